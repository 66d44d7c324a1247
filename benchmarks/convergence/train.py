"""One training as a plain script, which knows nothing of DADT:

python -m benchmarks.convergence.train --family cnn                                     one process
dadt run -np 4 --batch global -m benchmarks.convergence.train --family cnn              four, the same batches
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import time
from pathlib import Path

import torch
from torch import nn

from benchmarks.convergence.family import FAMILIES


def digest(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Of all bits of weights, buffers and optimizer state."""
    found = hashlib.blake2b(digest_size=16)
    for values in (model.state_dict(), *optimizer.state_dict()["state"].values()):
        for key, value in values.items():
            if isinstance(value, torch.Tensor):
                found.update(str(key).encode() + value.contiguous().numpy().tobytes())
    return found.hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--family", choices=list(FAMILIES), default="cnn")
    parser.add_argument("--rate", type=float, default=0.1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=0, help="0: as many as the family takes")
    parser.add_argument("--every", type=int, default=0, help="steps between two looks at the data of the verdict")
    parser.add_argument("--out", type=Path, help="folder for the outcome, a file rank<RANK>.json of each process")
    parser.add_argument("--rank", default="0", help="in the name of that file; under dadt run: {rank}")
    options = parser.parse_args()
    torch.set_num_threads(1)
    family = FAMILIES[options.family]
    family = dataclasses.replace(family, steps=options.steps or family.steps)
    model, optimizer, schedule = family.begin(options.seed, options.rate)
    losses: list[float] = []
    looks: list[tuple[int, float, float]] = []
    begun = time.monotonic()
    for step, batch in enumerate(family.batches(options.seed), 1):
        optimizer.zero_grad()
        loss = family.loss(model, batch)
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(float(loss.detach()))
        if options.every and step % options.every == 0:
            seconds = time.monotonic() - begun
            looks.append((step, seconds, family.verdict(model, 250)["loss"]))
    seconds = time.monotonic() - begun
    verdict = family.verdict(model)
    print(f"{options.family}: loss {verdict['loss']:.4f}  accuracy {verdict['accuracy']:.4f}  {seconds:.1f} s")
    if options.out:
        outcome = {**verdict, "digest": digest(model, optimizer), "seconds": seconds, "losses": losses, "looks": looks}
        (options.out / f"rank{options.rank}.json").write_text(json.dumps(outcome))


if __name__ == "__main__":
    main()
