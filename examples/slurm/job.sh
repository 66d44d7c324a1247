#!/bin/bash
# One job over two nodes, two workers on each:
#     sbatch examples/slurm/job.sh
# The same for each of four seeds, as an array of tasks:
#     sbatch --array=1-4 examples/slurm/job.sh
# What follows job.sh goes to the script: sbatch examples/slurm/job.sh --epochs 5
#SBATCH --job-name=mnist
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=2
#SBATCH --time=00:30:00
#SBATCH --output=mnist-%j.out

# Slurm counts an array's tasks from 0 or 1 as you say; a job that is no array has none.
seed=${SLURM_ARRAY_TASK_ID:-1}

# Once, and without srun: dadt starts the workers on all nodes of the allocation. `exec` lets Slurm's signals reach it.
exec dadt run examples/mnist.py --epochs 3 --seed "$seed" --save "mnist-$seed.pt" "$@"
