"""Trains by the methods that the simulator does not have (gossip, local and each compression): `dadt run`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.convergence.family import FAMILIES
from benchmarks.convergence.study import Run, simulated

ROOT = Path(__file__).parents[2]
RANKS = 4
SECONDS = 3600.0


def rounds(every: int, late: int) -> list[str]:
    """Return the arguments for progress in int4 that is merged so many steps late, whatever the link."""
    rounds = ["--algorithm", "local", "--sync-every", str(every), "--overlap-steps", str(late)]
    return [*rounds, "--compression", "int4"]


FLAGS = {
    "gossip": ["--algorithm", "gossip"],
    "gossip-sqrt": ["--algorithm", "gossip", "--scale-lr", "sqrt"],
    "local": ["--algorithm", "local", "--sync-every", "8"],
    "local-at-once": ["--algorithm", "local", "--sync-every", "8", "--overlap-steps", "0"],
    "local-int4": rounds(8, 0),
    "local-6-int4-at-once": rounds(6, 0),
    **{f"local-{every}-int4": rounds(every, every // 2) for every in (4, 8, 16, 32)},
    "local-32": ["--algorithm", "local"],
    "local-sqrt": ["--algorithm", "local", "--sync-every", "8", "--scale-lr", "sqrt"],
    "diloco": ["--algorithm", "local", "--sync-every", "32", "--outer-lr", "0.7", "--outer-momentum", "0.9"],
    "diloco-8": ["--algorithm", "local", "--sync-every", "8", "--outer-lr", "0.7", "--outer-momentum", "0.9"],
    "diloco-0.5": ["--algorithm", "local", "--sync-every", "32", "--outer-lr", "0.7", "--outer-momentum", "0.5"],
    "bf16": ["--compression", "bf16"],
    "fp16": ["--compression", "fp16"],
    "int8": ["--compression", "int8"],
    "int4": ["--compression", "int4"],
    "powersgd": ["--compression", "powersgd:4"],
    "powersgd-120": ["--compression", "powersgd:4", "--warmup-steps", "120"],
    "powersgd-16": ["--compression", "powersgd:16"],
    "powersgd-32": ["--compression", "powersgd:32"],
    "sync-powersgd": ["--algorithm", "sync", "--compression", "powersgd:4"],
    "sync-int8": ["--algorithm", "sync", "--compression", "int8"],
    "momentum:1": ["--compression", "momentum:1"],
    "momentum:2": ["--compression", "momentum:2"],
    "sync-momentum:1": ["--algorithm", "sync", "--compression", "momentum:1"],
    "sync-momentum:2": ["--algorithm", "sync", "--compression", "momentum:2"],
    "sync-int4": ["--algorithm", "sync", "--compression", "int4"],
    "real-pipe": [],
    **{
        f"islands-{name}": ["--island", "2", *flags]
        for name, flags in (
            ("sync", ["--algorithm", "sync"]),
            ("pipe", []),
            ("int8", ["--compression", "int8"]),
        )
    },
    "real-plain": ["--predict", "0"],
}
"""For each method, the arguments of `dadt run` that choose it. In islands FSDP2 shards the model."""


def checked(name: str) -> str:
    """Return the name itself. Raises ValueError if there is no such method."""
    if name not in FLAGS:
        raise ValueError(f"--others {name}: unknown; choose of {', '.join(FLAGS)}")
    return name


def train(run: Run) -> dict[str, Any]:
    """Train with real workers. Returns the mean of what each rank's own weights reach, and what the mean of all ranks'
    weights reaches. Methods that are not in FLAGS, such as `sync`, run in the simulator, which gives the same bits."""
    if run.method not in FLAGS:
        return simulated(run)
    with tempfile.TemporaryDirectory(prefix="dadt-convergence-") as name:
        flags, folder = FLAGS[run.method], Path(name)
        ranks = workers(run, flags, folder, *["--sharded"] * ("--island" in flags))
        joined = FAMILIES[run.family].verdict(averaged(run, folder))
    mean = {key: sum(rank[key] for rank in ranks) / len(ranks) for key in ("loss", "accuracy", "seconds")}
    losses = [sum(step) / len(step) for step in zip(*(rank["losses"] for rank in ranks), strict=False)]
    curve = [round(sum(part) / len(part), 5) for part in (losses[i : i + 25] for i in range(0, len(losses), 25))]
    return {**mean, "curve": curve, "averaged": joined}


def averaged(run: Run, folder: Path) -> torch.nn.Module:
    """Return a model with the mean of all ranks' weights and buffers, with which a job of `gossip` or `local` ends."""
    files = [np.load(folder / f"rank{rank}.npz") for rank in range(run.ranks)]
    model = FAMILIES[run.family].begin(run.seed, run.rate)[0]
    model.load_state_dict({k: torch.as_tensor(np.mean([file[k] for file in files], axis=0)) for k in files[0]})
    return model


def workers(
    run: Run, flags: list[str], folder: Path, *script: object, left: Sequence[int] = ()
) -> list[dict[str, Any]]:
    """Run a training by `dadt run`, and return each rank's outcome. script: further arguments of the training. left:
    the ranks that train to the end, if not all do."""
    dadt = [sys.executable, "-m", "dadt_cli", "run", "-np", run.ranks, "--batch", "global", "--log-dir", folder]
    what = ["--family", run.family, "--rate", run.rate, "--seed", run.seed, "--out", folder, "--rank", "{rank}"]
    command = [*dadt, *flags, "-m", "benchmarks.convergence.train", *what, *script]
    done = subprocess.run(
        list(map(str, command)),
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=SECONDS,
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(map(str, command))} ended with {done.returncode}:\n{done.stdout}")
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in left or range(run.ranks)]
