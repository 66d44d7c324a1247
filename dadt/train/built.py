"""Compares the optimizers, models and schedulers that ranks have built when an optimizer is attached. Ranks that differ
fail before the first step, with a message that shows both values.

If some ranks have loaded a checkpoint's state, only the values with which the optimizers were first built are compared,
as the other ranks will receive the loaded state.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

import torch

from dadt.errors import Mismatch
from dadt.train.param_groups import group_values, plain_values

ADVANCING = ("last_epoch", "base_lrs")
"""Attributes of a scheduler that a script sets to continue from a checkpoint, so they may differ between ranks."""
CAUSES = (
    "each has chosen for itself, by entropy (a generator that DADT does not seed), by random numbers drawn after"
    " training began, by the time, or by a measurement of its own: seed them (as by torch.manual_seed before each"
    " trial), or choose by values that are equal on all ranks"
)
MODEL = f"every rank must build the same model; {CAUSES}"


class Made(NamedTuple):
    """Names and values of an optimizer's param_groups at the time when it was built."""

    keys: list[list[str]]
    values: list[dict[str, Any]]


class Scheduler(NamedTuple):
    kind: str
    values: dict[str, Any]


class Build(NamedTuple):
    """Description of one rank's optimizer, model and schedulers, in plain values that ranks can compare."""

    kind: str
    parameters: list[tuple[str, str]]
    """For each parameter its name (empty if not known), and its shape and dtype."""
    made: Made
    now: Made
    schedulers: list[Scheduler]
    epochs: list[int]
    """The `last_epoch` of each scheduler, in the order of `schedulers`."""
    restored: bool
    """Whether the script has loaded state into an optimizer, or this optimizer was attached to DADT before."""


def made(optimizer: torch.optim.Optimizer, *, wait: bool = False) -> Made:
    """Return the names and values in the optimizer's current param_groups. wait: whether to include values of tensors
    on a GPU."""
    return Made([sorted(map(str, group)) for group in optimizer.param_groups], group_values(optimizer, wait=wait))


def scheduler(built: Any) -> Scheduler:
    values = {key: value for key, value in vars(built).items() if key not in ADVANCING and not key.startswith("_")}
    return Scheduler(type(built).__qualname__, plain_values(values))


def build(
    optimizer: torch.optim.Optimizer,
    names: Mapping[int, str],
    was: Made | None,
    schedulers: Sequence[tuple[Scheduler, int]],
    *,
    restored: bool,
) -> Build:
    """Return the description of this rank's optimizer. names: known parameter names by id. was: the param_groups when
    the optimizer was built. schedulers: the optimizer's learning rate schedulers, each with its epoch."""
    now = made(optimizer, wait=True)
    kinds, epochs = [each for each, _ in schedulers], [epoch for _, epoch in schedulers]
    return Build(type(optimizer).__qualname__, _described(names, optimizer), was or now, now, kinds, epochs, restored)


def encoded(build: Build) -> Any:
    """Return the description in types that ranks can send to each other."""
    return [
        build.kind,
        build.parameters,
        list(build.made),
        list(build.now),
        list(map(list, build.schedulers)),
        *build[5:],
    ]


def decoded(told: Any) -> Build:
    kind, parameters, was, now, schedulers, epochs, restored = told
    kinds = [Scheduler(*each) for each in schedulers]
    return Build(kind, list(map(tuple, parameters)), Made(*was), Made(*now), kinds, epochs, restored)


def _described(names: Mapping[int, str], optimizer: torch.optim.Optimizer) -> list[tuple[str, str]]:
    every = [p for group in optimizer.param_groups for p in group["params"]]
    return [(names.get(id(p), ""), f"{tuple(p.shape)} {p.dtype}".replace("torch.", "")) for p in every]


def check(builds: Sequence[Build], members: Sequence[int], which: str) -> None:
    """Raise Mismatch if any rank's description of its optimizer differs from that of the first rank. members: ranks
    that sent the descriptions, in the same order. which: suffix that names the optimizer in messages."""
    restored = any(each.restored for each in builds) or len({tuple(each.epochs) for each in builds}) > 1
    for rank, other in zip(members, builds, strict=True):
        _check_order(rank, other, members[0], builds[0], which)
        for what, mine, firsts, why in _differences(other, builds[0], restored=restored):
            raise Mismatch(f"{what}{which} is {mine} on rank {rank} and {firsts} on rank {members[0]}: {why}")


Difference = tuple[str, Any, Any, str]
"""One difference between two ranks: its description, the value on each rank, and likely causes."""


def _check_order(rank: int, other: Build, first: int, firsts: Build, which: str) -> None:
    """Raise Mismatch if two ranks list the same parameters in different orders, because averages would reach another
    parameter of equal shape."""
    order, expected = ([name for name, _ in each.parameters] for each in (other, firsts))
    if order != expected and sorted(order) == sorted(expected):
        mine, its = next((a, b) for a, b in zip(order, expected, strict=True) if a != b)
        raise Mismatch(
            f"rank {rank} lists the parameters{which} in another order than rank {first}, {mine} in the place of"
            f" {its}: give the optimizer a list, as the order of a set differs between processes"
        )


def _differences(a: Build, b: Build, *, restored: bool) -> Iterator[Difference]:
    if a.kind != b.kind:
        yield "the optimizer", a.kind, b.kind, CAUSES
    yield from _of_parameters(a.parameters, b.parameters)
    for number, (mine, other) in enumerate(zip_longest(a.schedulers, b.schedulers)):
        if mine is None or other is None or mine.kind != other.kind:
            yield f"scheduler {number}", mine.kind if mine else "none", other.kind if other else "none", CAUSES
        else:
            yield from _of_values(f"of {mine.kind}", mine.values, other.values)
    one, two = (each.made if restored else each.now for each in (a, b))
    if len(one.keys) != len(two.keys):
        yield f"the number of groups of {a.kind}", len(one.keys), len(two.keys), CAUSES
    for number, (keys, others) in enumerate(zip(one.keys, two.keys, strict=False)):
        if keys != others:
            yield f"what group {number} of {a.kind} holds", ", ".join(keys), ", ".join(others), CAUSES
    for number, (values, other_values) in enumerate(zip(one.values, two.values, strict=False)):
        yield from _of_values(f"in group {number} of {a.kind}", values, other_values)


def _of_parameters(a: Sequence[tuple[str, str]], b: Sequence[tuple[str, str]]) -> Iterator[Difference]:
    if len(a) != len(b):
        yield "the number of parameters", len(a), len(b), MODEL
    for number, ((name, kind), (other_name, other_kind)) in enumerate(zip(a, b, strict=False)):
        if kind != other_kind:
            yield name or f"parameter {number}", kind, other_kind, MODEL
        # Names may differ by a prefix, because the script may wrap the model on one rank only, for example on the rank
        # that reports.
        wrapped = f".{name}".endswith(f".{other_name}") or f".{other_name}".endswith(f".{name}")
        if name and other_name and not wrapped:
            yield f"the name of parameter {number}", name, other_name, MODEL


def _of_values(where: str, a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterator[Difference]:
    for key in sorted({*a, *b}):
        mine, other = (repr(each[key]) if key in each else "not there" for each in (a, b))
        if mine != other:
            yield f"{key} {where}", mine, other, CAUSES
