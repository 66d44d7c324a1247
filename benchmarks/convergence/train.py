"""One training as a plain script, which knows nothing of DADT:

python -m benchmarks.convergence.train --family cnn                                     one process
dadt run -np 4 --batch global -m benchmarks.convergence.train --family cnn              four, the same batches
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from benchmarks.convergence.family import FAMILIES, Batch


def digests(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> dict[str, str]:
    """Return hashes of the bits of each weight, buffer and tensor of the optimizers' states, by name."""
    states = {"model": model.state_dict()}
    for number, optimizer in enumerate(optimizers):
        states |= {f"{number}.{key}": state for key, state in optimizer.state_dict()["state"].items()}
    return {
        f"{of} {name}": hashlib.blake2b(whole(value).contiguous().numpy().tobytes(), digest_size=8).hexdigest()
        for of, values in states.items()
        for name, value in values.items()
        if isinstance(value, torch.Tensor)
    }


def sharded(model: nn.Module) -> None:
    """Shard the blocks and then the model over the ranks of torch's world, by FSDP2."""
    from torch.distributed.fsdp import fully_shard  # exists from torch 2.6 on

    torch.distributed.init_process_group("gloo")
    for block in (*model.blocks, model):  # type: ignore[misc]
        fully_shard(block)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return all of a tensor of which this rank may hold a part. All ranks of its mesh call this together."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def mine(batch: Batch) -> Batch:
    """Return this rank's part of the batch, if the script itself divides the data."""
    size = len(batch[0]) // torch.distributed.get_world_size()
    own = slice(torch.distributed.get_rank() * size, (torch.distributed.get_rank() + 1) * size)
    return batch[0][own], batch[1][own]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--family", choices=list(FAMILIES), default="cnn")
    parser.add_argument("--rate", type=float, default=0.1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=0, help="0: as many as the family takes")
    parser.add_argument("--every", type=int, default=0, help="steps between two looks at the data of the verdict")
    parser.add_argument("--judge", type=int, default=0, help="samples of the verdict; 0: all")
    parser.add_argument("--batch", type=int, default=0, help="joint batch; 0: the family's")
    parser.add_argument(
        "--wait", type=float, default=0.0, help="seconds that each step waits, as if it computed longer"
    )
    parser.add_argument("--straggler-wait", type=float, default=-1.0, help="the same on rank 0, where it differs")
    parser.add_argument(
        "--falls", default="", metavar="RANK:STEP,...", help="ranks that are killed after so many steps"
    )
    parser.add_argument("--ddp", action="store_true", help="DistributedDataParallel over Gloo, ranks as torchrun tells")
    parser.add_argument("--sharded", action="store_true", help="FSDP2 over the ranks of torch's world")
    parser.add_argument("--out", type=Path, help="folder for the outcome, a file rank<RANK>.json of each process")
    parser.add_argument("--rank", default="0", help="in the name of that file; under dadt run: {rank}")
    return parser.parse_args()


def main() -> None:
    options = arguments()
    torch.set_num_threads(1)
    family = FAMILIES[options.family]
    family = dataclasses.replace(family, steps=options.steps or family.steps, batch=options.batch or family.batch)
    model, optimizers, schedules = family.begin(options.seed, options.rate, *[sharded] * options.sharded)
    trained = model
    begun = time.monotonic()  # ranks connect in what follows, those of dadt run in the first step
    if options.ddp:
        torch.distributed.init_process_group("gloo")
        trained = nn.parallel.DistributedDataParallel(model)
    wait = options.straggler_wait if options.rank == "0" and options.straggler_wait >= 0 else options.wait
    falls = dict(fall.split(":") for fall in options.falls.split(",") if fall).get(options.rank)
    losses: list[float] = []
    times: list[float] = []
    looks: list[tuple[int, float, float]] = []
    for step, batch in enumerate(family.batches(options.seed), 1):
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = family.loss(trained, mine(batch) if options.ddp else batch)
        loss.backward()  # type: ignore[no-untyped-call]
        time.sleep(wait)
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            schedule.step()
        losses.append(float(loss.detach()))
        times.append(round(time.monotonic() - begun, 4))
        if str(step) == falls:
            os.kill(os.getpid(), signal.SIGKILL)
        if options.every and step % options.every == 0:
            most = 1000 if family.counts else 100  # images, or texts of many letters
            looks.append((step, time.monotonic() - begun, family.verdict(model, most)["loss"]))
    seconds = times[-1]
    verdict = family.verdict(model, options.judge)
    print(f"{options.family}: loss {verdict['loss']:.4f}  accuracy {verdict['accuracy']:.4f}  {seconds:.1f} s")
    if options.out:
        outcome = {**verdict, "digests": digests(model, optimizers), "seconds": seconds, "losses": losses}
        outcome |= {"times": times, "looks": looks}
        (options.out / f"rank{options.rank}.json").write_text(json.dumps(outcome))
        # Not by torch.save, which under DADT only one rank would do.
        np.savez(
            options.out / f"rank{options.rank}.npz", **{k: whole(v).numpy() for k, v in model.state_dict().items()}
        )


if __name__ == "__main__":
    main()
