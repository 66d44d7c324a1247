"""What `auto` chooses from: what the user leaves to it, and what the script and its optimizer bear."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dadt.algorithms.auto.choice import Shape
from dadt.algorithms.auto.ways import SHOWN, Choice, Shown
from dadt.comm.compression import OF_MOMENTUM
from dadt.config.check import round_steps
from dadt.train.attachment import Attachment
from dadt.train.moment import is_adam


def given_algorithm(a: Attachment) -> str:
    """Return the algorithm that the user has set; empty if `--algorithm auto` leaves the choice to DADT."""
    return "" if a.ranks.config.algorithm == "auto" else a.ranks.config.algorithm


def given_compression(a: Attachment) -> str:
    """Return the compression that the user has set; empty if `--compression auto` leaves the choice to DADT."""
    return "" if a.ranks.config.compression == "auto" else a.ranks.config.compression


def shown(a: Attachment) -> Shown:
    """Return what the page of accuracy shows of the optimizer's kind: SGD, or Adam and all others."""
    return SHOWN["sgd" if isinstance(a.optimizer, torch.optim.SGD) else "adam"]


def ways(a: Attachment, *, may_part: bool = True) -> dict[Choice, float]:
    """Return the ways to choose from, with the loss that each costs, beginning with the one that changes training
    least. may_part: whether weights may differ between ranks, as under `local`."""
    algorithm, compression, costs = given_algorithm(a), given_compression(a), shown(a).costs
    if algorithm == "local":
        names = dict.fromkeys(way.compression for way in costs if way.compression not in OF_MOMENTUM)
        return {Choice("local", name): 0.0 for name in names}
    longest = round_steps(a.ranks.config.sync_every)
    found: dict[Choice, float] = {}
    parts, suited = may_part and _parts(a), bool(compression) or not a.momentum.unsuited
    if compression in OF_MOMENTUM and a.momentum.unsuited:
        compression = "int4"  # as its gradients are sent for the whole training
    if compression not in ("", *(way.compression for way in costs)):
        # What this compression costs is not known, and the same for all algorithms.
        costs = {
            way._replace(compression=compression): cost for way, cost in costs.items() if way.compression == "none"
        }
    for way, cost in costs.items():
        momentum = way.compression in OF_MOMENTUM
        if (algorithm or way.algorithm) != way.algorithm or (compression or way.compression) != way.compression:
            continue
        if (suited or not momentum) and (parts or way.algorithm != "local"):
            found.setdefault(way._replace(every=min(way.every, longest)), cost)
    return found


def _parts(a: Attachment) -> bool:
    """Return whether `local` is what the page of accuracy shows, and the user does not need equal weights."""
    config, optimizer = a.ranks.config, a.optimizer
    plain = config.outer_lr == 1.0 and config.outer_momentum == 0.0
    equal = config.on_nan != "ignore" or config.verify_every
    shares = isinstance(optimizer, torch.optim.SGD) or (is_adam(optimizer) and not a.momentum.unshared)
    return plain and not equal and shares


def to_try(a: Attachment) -> list[str]:
    """Return the compressions to try in the last warm-up steps, which are those that earlier steps do not use."""
    if given := given_compression(a):
        return [given] if given.startswith("powersgd") else []
    every = dict.fromkeys(way.compression for way in ways(a))
    return [name for name in every if name != "none" and name not in OF_MOMENTUM]


def shape(a: Attachment, sizes: Sequence[int]) -> Shape:
    """Return what all ranks know alike. sizes: the bytes in each bucket of rank 0."""
    config = a.ranks.config
    # With several optimizers no bucket is sent before the optimizer step, so all buckets count as a single one.
    sizes = sizes if a.optimizers.trains_one else [sum(sizes)]
    overlap = None if config.overlap_steps == "auto" else int(config.overlap_steps)
    shares = [size / max(sum(sizes), 1) for size in sizes]
    return Shape(shares, round_steps(config.sync_every), overlap, config.fragments)
