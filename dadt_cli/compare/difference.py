"""Measures how much two tensors, or two other values in checkpoints, differ."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dadt.errors import ConfigError

CHUNK = 1 << 22
"""Number of elements compared at a time, so that comparing a large tensor needs little additional memory."""
MOST_REPEATED = 1 << 24
"""Most elements to compare in a tensor that has more elements than it stores, because strides make its rows overlap."""
WORDS = reprlib.Repr()
WORDS.maxstring = WORDS.maxother = WORDS.maxlong = 40


@dataclass(frozen=True, slots=True)
class Difference:
    """How two values with the same name differ."""

    what: str = ""
    """The kind of difference if the values are not compared as numbers: type, shape, dtype, or value."""
    largest: float = 0.0
    """The largest difference of any element; may be infinite, and is nan if only one of two elements is nan."""
    relative: float | None = None
    """The largest difference divided by the largest finite magnitude in the first tensor; None if one of the two is
    infinite, or the magnitude is 0."""
    count: int = 0
    """Number of elements that differ by more than the tolerance."""
    elements: int = 1

    @property
    def equal(self) -> bool:
        return not (self.what or self.count)

    @property
    def weight(self) -> float:
        """Return the number by which rows are sorted: the largest difference of any element, or infinity if values
        cannot be subtracted."""
        return math.inf if self.what in ("type", "shape", "value") or math.isnan(self.largest) else self.largest


def difference(a: Any, b: Any, tolerance: float, ignore_dtype: bool = False) -> Difference:
    """Compare two values. tolerance: largest difference between elements that count as equal. ignore_dtype: compare
    tensors of different dtypes by their values. Raises ConfigError if a tensor has far more elements than it stores."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        if a.shape != b.shape:
            return Difference("shape", elements=a.numel())
        if _form(a) != _form(b):
            return Difference("type", elements=a.numel())
        what = "dtype" if a.dtype != b.dtype and not ignore_dtype else ""
        return _between_tensors(a, b, what, tolerance)
    if _is_number(a) and _is_number(b):
        return _between_numbers(a, b, tolerance)
    # Only empty containers are compared as a whole; all other containers are compared item by item.
    for empty in (Mapping, list | tuple):
        if isinstance(a, empty) and isinstance(b, empty):
            return Difference()
    if type(a) is not type(b):
        return Difference("type")
    return Difference("value" if a != b else "")


def describe(value: Any) -> str:
    """Describe a tensor as "float32 [3, 2]", and any other value by its text, shortened if it is long."""
    if not isinstance(value, Tensor):
        return WORDS.repr(value)
    name = str(value.dtype).removeprefix("torch.")
    layout = "" if value.layout == torch.strided else f" {str(value.layout).removeprefix('torch.')}"
    return f"{name} {list(value.shape)}{layout}{' without values' if value.is_meta else ''}"


def _form(x: Tensor) -> tuple[object, ...]:
    return x.layout, x.is_meta, x.sparse_dim() if x.layout == torch.sparse_coo else 0


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float | complex) and not isinstance(value, bool)


def _between_numbers(a: Any, b: Any, tolerance: float) -> Difference:
    if a == b or (a != a and b != b):
        return Difference()
    gap, size = _float(lambda: abs(a - b)), _float(lambda: abs(a))
    relative = gap / size if 0 < size < math.inf and gap < math.inf else None
    return Difference(largest=gap, relative=relative, count=int(not gap <= tolerance))


def _float(value: Callable[[], float]) -> float:
    try:
        return float(value())
    except OverflowError:  # an integer may be too large to become a float
        return math.inf


def _between_tensors(a: Tensor, b: Tensor, what: str, tolerance: float) -> Difference:
    elements = a.numel()
    if a.is_meta:
        return Difference(what, elements=elements)
    a, b = _once(a, b)
    times = elements // a.numel() if a.numel() else 1
    a, b = _aligned(a, b)
    largest, scale, count = 0.0, 0.0, 0
    for x, y in zip(torch.split(a, CHUNK), torch.split(b, CHUNK), strict=True):
        gap = _gap(x, y)
        if gap is None:
            continue
        # Written as ~(gap <= tolerance), so that nan counts as different: no comparison with nan is true.
        count += int((~(gap <= tolerance)).sum())
        if not math.isnan(largest):
            # If any element is nan, max() of the whole tensor is nan, too.
            most = gap.max().item()
            largest = most if math.isnan(most) else max(largest, most)
    if largest > 0.0 and math.isfinite(largest):
        scale = max(_magnitude(x) for x in torch.split(a, CHUNK))
    return Difference(what, largest, largest / scale if scale else None, count * times, elements)


def _once(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Shorten dimensions that repeat the same stored elements in both tensors, as `expand` creates them, to length
    1."""
    if a.layout != torch.strided:
        return a, b
    for dim, (length, *strides) in enumerate(zip(a.shape, a.stride(), b.stride(), strict=True)):
        if length > 1 and strides == [0, 0]:
            a, b = a.narrow(dim, 0, 1), b.narrow(dim, 0, 1)
    held = max(x.untyped_storage().nbytes() // x.element_size() for x in (a, b))
    if a.numel() > max(held, MOST_REPEATED):
        raise ConfigError(f"has {a.numel():,} elements, of which {held:,} are stored: save it as `tensor.clone()`")
    return a, b


def _gap(x: Tensor, y: Tensor) -> Tensor | None:
    """Return the differences by element as float64; None if all elements are equal."""
    same = x == y if x.dtype == y.dtype else _wide(x) == _wide(y)
    if same.all():
        return None
    same |= x.isnan() & y.isnan()
    gap = (_wide(x) - _wide(y)).abs().masked_fill_(same, 0.0)
    if not (x.is_floating_point() or x.is_complex() or y.is_floating_point() or y.is_complex()):
        # Different integers may become equal as float64, so their difference counts as at least 1.
        gap = torch.where(same, gap, gap.clamp(min=1.0))
    return gap if gap.any() else None


def _magnitude(x: Tensor) -> float:
    sizes = _wide(x).abs()
    return float(sizes.masked_fill_(~sizes.isfinite(), 0.0).max())


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.complex128 if x.is_complex() else torch.float64)


def _aligned(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Return both tensors as flat, dense tensors of types that torch can compute with."""
    if a.layout != torch.strided:
        return _sparse(a, b)
    return _flat(a), _flat(b)


def _flat(x: Tensor) -> Tensor:
    x = x.detach().resolve_conj().resolve_neg()
    if x.is_quantized:
        x = x.dequantize()
    try:
        _wide(x.new_empty(1))
    except NotImplementedError:  # packed types cannot be converted to numbers, so their bytes are compared
        x = x.contiguous().view(torch.uint8)
    return x.reshape(-1)


def _sparse(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Return the values of two sparse tensors at all positions that either of them stores."""
    both = [(x if x.layout == torch.sparse_coo else x.to_sparse()).detach().coalesce() for x in (a, b)]
    empty = [
        torch.sparse_coo_tensor(x.indices(), torch.zeros_like(x.values()), x.shape, check_invariants=True) for x in both
    ]
    first, second = (both[0] + empty[1].to(both[0].dtype), both[1] + empty[0].to(both[1].dtype))
    return first.coalesce().values().reshape(-1), second.coalesce().values().reshape(-1)
