"""Computes the weights after the optimizer's next step for all parameters on a GPU, by one kernel launch that reads
weights, gradients and optimizer state once.

As tensor operations, this takes about 12 launches for each parameter (docs/results/speed.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton  # type: ignore[import-not-found,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,unused-ignore]

from dadt.train.prediction.next_step import Group
from dadt.train.prediction.rows import Column, Row, addresses

BLOCK = 1024
"""Number of elements that one program of the kernel computes."""
_KEPT = 256
"""Maximum number of recently used grids to store. Each group of an optimizer has a grid of its own, and the set of
trained parameters may change between steps."""
DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


class Grid(NamedTuple):
    """Arguments of a kernel launch that stay equal from step to step for parameters of the same sizes."""

    programs: int
    row_of: torch.Tensor
    part_of: torch.Tensor
    sizes: torch.Tensor


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _foresee(  # type: ignore[no-untyped-def]
    table,
    host_weights,
    weights,
    row_of,
    part_of,
    sizes,
    gradient,
    momentum,
    decay,
    keep,
    square,
    squared,
    root,
    epsilon,
    log_beta1,
    log_beta2,
    rows,
    PARTS: tl.constexpr,
    HAS_MOMENTUM: tl.constexpr,
    HAS_SQUARE: tl.constexpr,
    COUNTS: tl.constexpr,
    DTYPE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    program = tl.program_id(0)
    row = tl.load(row_of + program)
    at = tl.load(part_of + program).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    there = at < tl.load(sizes + row)
    own = tl.load(table + row).to(tl.pointer_type(DTYPE))
    w = tl.load(own + at, mask=there, other=0.0).to(tl.float32)
    # Columns of the address table: weight, destination of the next weight, first and second moment, step count, then
    # the terms of the expected gradient.
    g = tl.zeros((BLOCK,), tl.float32)
    for part in tl.static_range(PARTS):
        address = tl.load(table + (5 + part) * rows + row)
        values = address.to(tl.pointer_type(DTYPE))
        value = tl.load(values + at, mask=there & (address != 0), other=0.0).to(tl.float32)
        g += value * (tl.load(host_weights + part) * tl.load(weights + part))
    g += w * decay
    move = g * gradient
    if HAS_MOMENTUM:
        first = tl.load(table + 2 * rows + row).to(tl.pointer_type(DTYPE))
        move += tl.load(first + at, mask=there, other=0.0).to(tl.float32) * momentum
    if HAS_SQUARE:
        second = tl.load(table + 3 * rows + row).to(tl.pointer_type(DTYPE))
        v = tl.load(second + at, mask=there, other=0.0).to(tl.float32)
        if COUNTS:
            count = tl.load(tl.load(table + 4 * rows + row).to(tl.pointer_type(tl.float32))) + 1.0
            move = move / (1.0 - tl.exp2(log_beta1 * count))
            root = root / tl.sqrt(1.0 - tl.exp2(log_beta2 * count))
        move = move / (tl.sqrt(v * square + g * g * squared) * root + epsilon)
    ahead = move + w * keep
    # In a step that will be skipped, the expected gradient may be NaN or infinite; the weight then stays as it is.
    known = tl.abs(ahead) < float("inf")
    into = tl.load(table + rows + row).to(tl.pointer_type(DTYPE))
    tl.store(into + at, tl.where(known, ahead, w).to(DTYPE), mask=there)


class KernelLauncher:
    def __init__(self) -> None:
        self._grids: dict[tuple[torch.device, tuple[int, ...]], Grid] = {}

    def foresee(self, group: Group, rows: Sequence[Row], weights: Sequence[torch.Tensor | float]) -> None:
        """Compute the next weights of these parameters, whose rows have one dtype and device. weights: the factor of
        each term of the expected gradient."""
        first = rows[0][0]
        assert first is not None
        with torch.cuda.device(first.device):  # Triton launches on the current device
            self._foresee(group, rows, weights, first)

    def _foresee(
        self, group: Group, rows: Sequence[Row], weights: Sequence[torch.Tensor | float], first: torch.Tensor
    ) -> None:
        weight, into, momentum, square, *parts = zip(*rows, strict=True)
        counts = group.counts
        columns = [weight, into, momentum, square, _counts(group, weight), *parts]
        found = [address for column in columns for address in addresses(column)]
        grid = self._grid(first.device, tuple(t.numel() for t in weight if t is not None))
        _foresee[(grid.programs,)](
            _sent(torch.tensor(found, dtype=torch.int64, device="cpu"), first.device),
            *_weights(weights, first.device),
            grid.row_of,
            grid.part_of,
            grid.sizes,
            *(group.factors[name] for name in _FACTORS),
            *((counts.log_beta1, counts.log_beta2) if counts else (0.0, 0.0)),
            len(rows),
            PARTS=len(parts),
            HAS_MOMENTUM=momentum[0] is not None,
            HAS_SQUARE=square[0] is not None,
            COUNTS=counts is not None,
            DTYPE=DTYPES[first.dtype],
            BLOCK=BLOCK,
        )

    def _grid(self, device: torch.device, sizes: tuple[int, ...]) -> Grid:
        found = self._grids.pop((device, sizes), None)
        if found is None:
            counts = [-(-size // BLOCK) for size in sizes]
            row_of = [row for row, count in enumerate(counts) for _ in range(count)]
            part_of = [part for count in counts for part in range(count)]
            kinds = ((row_of, torch.int32), (part_of, torch.int32), (sizes, torch.int64))
            moved = (torch.tensor(values, dtype=dtype, device=device) for values, dtype in kinds)
            if len(self._grids) == _KEPT:
                del self._grids[next(iter(self._grids))]
            found = Grid(len(row_of), *moved)
        self._grids[device, sizes] = found
        return found


_FACTORS = ("gradient", "momentum", "decay", "keep", "square", "squared", "root", "epsilon")


def _sent(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy the values to the device, without the host waiting for the copy."""
    return values.pin_memory().to(device, non_blocking=True)


def _weights(weights: Sequence[torch.Tensor | float], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return two factors for each term's weight, one known on the host and one known on the device; the factor that is
    not used is 1."""
    hosts = [1.0 if isinstance(weight, torch.Tensor) else weight for weight in weights]
    devices = torch.ones(len(weights), dtype=torch.float32, device=device)
    for i, weight in enumerate(weights):
        if isinstance(weight, torch.Tensor):
            devices[i] = weight.to(device).reshape(())
    return _sent(torch.tensor(hosts, dtype=torch.float32, device="cpu"), device), devices


def _counts(group: Group, weight: Column) -> Column:
    """Return the parameters' step counts if they are stored on the device; a list of None if the host knows them."""
    if group.counts is None:
        return [None] * len(weight)
    known = {id(step.parameter): count for step, count in zip(group.steps, group.counts.steps, strict=True)}
    return [known[id(each)] for each in weight]
