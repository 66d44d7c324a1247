"""Serializes plain values for other ranks: numbers, text, containers, tensors and arrays. Unlike with pickle, reading
cannot run code.

A tag byte precedes each value. Lengths are little-endian, and are checked against the bytes that remain before anything
is read.
"""

from __future__ import annotations

import math
import struct
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch

from dadt.errors import DadtError, Mismatch

DEPTH = 100
"""Maximum nesting depth of containers in a value."""
_DIMENSIONS = 32
_MOST = 1 << 56
"""Maximum number of elements of a tensor or array, where a dimension of 0 counts as 1: few enough that torch and NumPy
can compute the size in bytes without overflow."""
_COUNT = struct.Struct("<Q")
_FLOAT = struct.Struct("<d")
_COMPLEX = struct.Struct("<dd")
_FACTORIES = (None, list, dict, set, tuple, int, float, str)
"""Factories of a defaultdict that can be sent. The bytes contain the index of a factory in this tuple, so the order is
part of the format."""
_DTYPES: list[torch.dtype] = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex128, torch.complex64),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
    # Include only dtypes that the installed version of torch has.
    *(getattr(torch, name) for name in ("complex32", "uint16", "uint32", "uint64") if hasattr(torch, name)),
    *(getattr(torch, name) for name in dir(torch) if name.startswith("float8_")),
]
_BY_NAME = {str(dtype).removeprefix("torch."): dtype for dtype in _DTYPES}
_NAMES = {dtype: name for name, dtype in _BY_NAME.items()}
_NUMBERS = "?bhilqBHILQefdgFDG"
"""Type codes of the NumPy dtypes that can be sent."""
_KEYS = (type(None), bool, int, float, complex, str, bytes, tuple, frozenset, torch.Size, torch.dtype, torch.device)
"""Types allowed as keys of dictionaries and as members of sets."""


def encode(value: Any, what: str) -> bytes:
    """Return the value as bytes. what: names the value in errors, such as "the state of Adam". Raises DadtError if a
    part is neither a plain value nor a tensor."""
    writer = _Writer(what)
    writer.write(value, 0)
    return b"".join(writer.parts)


def decode(data: bytes | memoryview) -> Any:
    """Return the value that `encode` turned into bytes. Tensors are on the CPU, with the dimension order of the
    original strides. Raises Mismatch for invalid bytes."""
    reader = _Reader(memoryview(data))
    value = reader.read(0)
    if reader.left:
        _wrong(f"{reader.left} bytes follow it")
    return value


def _wrong(why: str) -> NoReturn:
    raise Mismatch(f"what came from a rank is no value: {why}")


class _Writer:
    def __init__(self, what: str) -> None:
        self.parts: list[bytes | memoryview] = []
        self._what = what
        self._path: list[str] = []

    def write(self, value: Any, depth: int) -> None:
        kind = _KINDS.get(type(value))
        if kind is None:
            self._refuse(value)
        if depth > DEPTH:
            raise DadtError(f"{self._what} is nested in itself, or more than {DEPTH} deep: other ranks cannot have it")
        self.parts.append(kind.tag)
        kind.write(self, value, depth)

    def count(self, number: int) -> None:
        self.parts.append(_COUNT.pack(number))

    def bytes(self, data: bytes | memoryview) -> None:
        self.count(len(data))
        self.parts.append(data)

    def items(self, values: Iterable[Any], count: int, depth: int) -> None:
        self.count(count)
        for place, value in enumerate(values):
            self._path.append(f"[{place}]")
            self.write(value, depth + 1)
            self._path.pop()

    def pairs(self, values: dict[Any, Any], depth: int) -> None:
        self.count(len(values))
        for key, value in values.items():
            self._path.append(f"[{key!r}]")
            if type(key) not in _KEYS:
                self._refuse(key, "the key ")
            self.write(key, depth + 1)
            self.write(value, depth + 1)
            self._path.pop()

    def tensor(self, value: torch.Tensor) -> None:
        """Append the tensor. The memory of a dense tensor is copied once, without reordering, together with the order
        of its dimensions."""
        if value.layout != torch.strided or value.dtype not in _NAMES or value.is_meta:
            self._refuse(value, f"a {str(value.layout).removeprefix('torch.')} tensor of {value.dtype}, ")
        host = value.detach().resolve_conj().resolve_neg().to("cpu")
        strides = host.stride()
        order = list(range(host.dim()))
        if not host.is_contiguous() and not any(s == 0 for s, n in zip(strides, host.shape, strict=True) if n > 1):
            order.sort(key=lambda each: -strides[each])
        flat = host.permute(order).contiguous().reshape(-1)
        self.bytes(_NAMES[value.dtype].encode())
        self.parts.append(bytes([isinstance(value, torch.nn.Parameter) << 1 | value.requires_grad]))
        self.sizes(value.shape)
        self.parts.append(bytes(order))
        self.bytes(_bytes_of(flat) if flat.numel() else b"")

    def array(self, value: np.ndarray[Any, Any]) -> None:
        if value.dtype.kind not in "biufc":
            self._refuse(value, f"an array of {value.dtype}, ")
        self.bytes(value.dtype.str.encode())
        self.sizes(value.shape)
        self.bytes(value.tobytes())

    def sizes(self, shape: Sequence[int]) -> None:
        self.count(len(shape))
        for size in shape:
            self.count(size)

    def _refuse(self, value: Any, how: str = "") -> NoReturn:
        kind = type(value)
        name = f"{kind.__module__}.{kind.__qualname__}".removeprefix("builtins.")
        where = "".join(self._path)
        raise DadtError(
            f"{self._what} holds {how}a {name}{f' at {where}' if where else ''}, and ranks tell each other plain "
            "values and tensors only -> keep it elsewhere, or make it one of these"
        )


class _Reader:
    def __init__(self, data: memoryview) -> None:
        self._data = data
        self._at = 0

    @property
    def left(self) -> int:
        return len(self._data) - self._at

    def take(self, size: int) -> memoryview:
        if size > self.left:
            _wrong(f"{size} bytes are announced, and {self.left} are there")
        self._at += size
        return self._data[self._at - size : self._at]

    def count(self) -> int:
        number: int = _COUNT.unpack(self.take(_COUNT.size))[0]
        return number

    def items(self) -> int:
        """Read the number of items that follow. Each item takes at least one byte, so a number above the remaining
        bytes is refused."""
        number = self.count()
        if number > self.left:
            _wrong(f"{number} items are announced, and {self.left} bytes are there")
        return number

    def bytes(self) -> memoryview:
        return self.take(self.count())

    def text(self) -> str:
        try:
            return str(self.bytes(), "utf-8", "surrogatepass")
        except UnicodeDecodeError:
            _wrong("its text is not UTF-8")

    def read(self, depth: int) -> Any:
        if depth > DEPTH:
            _wrong(f"it is more than {DEPTH} deep")
        kind = _TAGS.get(bytes(self.take(1)))
        if kind is None:
            _wrong(f"there is no kind {self._data[self._at - 1]}")
        return kind.read(self, depth)

    def values(self, depth: int) -> list[Any]:
        return [self.read(depth + 1) for _ in range(self.items())]

    def keys(self, depth: int) -> list[Any]:
        return [self.key(depth) for _ in range(self.items())]

    def key(self, depth: int) -> Any:
        key = self.read(depth + 1)
        if type(key) not in _KEYS:
            _wrong(f"a {type(key).__name__} is no key")
        try:
            hash(key)
        except TypeError:  # a tuple that contains a list, for example, cannot be hashed
            _wrong(f"this {type(key).__name__} is no key")
        return key

    def pairs(self, depth: int) -> list[tuple[Any, Any]]:
        return [(self.key(depth), self.read(depth + 1)) for _ in range(self.items())]

    def sizes(self) -> list[int]:
        dimensions = self.count()
        if dimensions > _DIMENSIONS:
            _wrong(f"it has {dimensions} dimensions")
        sizes = [self.count() for _ in range(dimensions)]
        if math.prod(size or 1 for size in sizes) >= _MOST:
            _wrong(f"there is no memory for {sizes}")
        return sizes

    def memory(self, sizes: Sequence[int], width: int) -> memoryview:
        """Read the memory of an array with these sizes, whose elements have `width` bytes. Raises Mismatch if the
        stored length is another one."""
        data = self.bytes()
        if len(data) != math.prod(sizes) * width:
            _wrong(f"{len(data)} bytes are not {sizes} elements of {width} bytes")
        return data

    def tensor(self) -> torch.Tensor:
        dtype = self.dtype()
        flags = self.take(1)[0]
        sizes = self.sizes()
        order = list(self.take(len(sizes)))
        if sorted(order) != list(range(len(sizes))):
            _wrong(f"{order} is no order of {len(sizes)} dimensions")
        data = self.memory(sizes, dtype.itemsize)
        made = torch.empty([sizes[each] for each in order], dtype=dtype, device="cpu")
        if len(data):
            _bytes_of(made.view(-1))[:] = data
            if dtype == torch.bool and made.view(torch.uint8).max() > 1:
                _wrong("a bool is neither True nor False")
        made = made.permute([order.index(each) for each in range(len(order))])
        if (flags & 1 and not (dtype.is_floating_point or dtype.is_complex)) or flags > 3:
            _wrong(f"no tensor of {dtype} is as {flags} says")
        return torch.nn.Parameter(made, bool(flags & 1)) if flags & 2 else made.requires_grad_(bool(flags & 1))

    def dtype(self) -> torch.dtype:
        name = self.text()
        if name not in _BY_NAME:
            _wrong(f"torch has no dtype {name[:40]!r}")
        return _BY_NAME[name]

    def device(self) -> torch.device:
        name = self.text()
        try:
            return torch.device(name)
        except RuntimeError:
            _wrong(f"torch has no device {name[:40]!r}")

    def array(self) -> np.ndarray[Any, Any]:
        name = self.text()
        if name not in _ARRAYS:
            _wrong(f"there is no array of {name[:40]!r}")
        dtype = np.dtype(name)
        sizes = self.sizes()
        made = np.frombuffer(self.memory(sizes, dtype.itemsize), dtype).copy()
        if dtype.kind == "b" and made.size and made.view(np.uint8).max() > 1:
            _wrong("a bool is neither True nor False")
        return made.reshape(sizes)

    def scalar(self) -> np.generic:
        made = self.array()
        if made.shape:
            _wrong("an array is no number")
        number: np.generic[Any] = made[()]  # type: ignore[assignment]
        return number

    def factory(self) -> Any:
        number = self.take(1)[0]
        if number >= len(_FACTORIES):
            _wrong(f"there is no factory {number}")
        return _FACTORIES[number]

    def most(self) -> int | None:
        """Read the maximum length of a deque; None if it has no maximum."""
        number = self.count()
        return None if number == _MOST else min(number, _MOST)


class _Kind(NamedTuple):
    """Tag byte of one type, with the functions that write and read its values."""

    tag: bytes
    write: Callable[[_Writer, Any, int], None]
    read: Callable[[_Reader, int], Any]


_ARRAYS = {np.dtype(kind).newbyteorder(order).str for kind in _NUMBERS for order in (">", "<")}


def _write_int(writer: _Writer, value: int, depth: int) -> None:
    writer.bytes(value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True))


def _read_int(reader: _Reader, depth: int) -> int:
    return int.from_bytes(reader.bytes(), "little", signed=True)


def _write_default(writer: _Writer, value: defaultdict[Any, Any], depth: int) -> None:
    if value.default_factory not in _FACTORIES:
        writer._refuse(value.default_factory, "a defaultdict of ")
    writer.parts.append(bytes([_FACTORIES.index(value.default_factory)]))
    writer.pairs(value, depth)


def _write_deque(writer: _Writer, value: deque[Any], depth: int) -> None:
    writer.count(_MOST if value.maxlen is None else value.maxlen)
    writer.items(value, len(value), depth)


def _items(writer: _Writer, value: Any, depth: int) -> None:
    writer.items(value, len(value), depth)


_TENSOR = _Kind(b"T", lambda w, v, _: w.tensor(v), lambda r, _: r.tensor())
_SCALAR = _Kind(b"g", lambda w, v, _: w.array(np.asarray(v)), lambda r, _: r.scalar())
_KINDS: dict[type, _Kind] = {
    type(None): _Kind(b"0", lambda w, v, _: None, lambda r, _: None),
    bool: _Kind(b"b", lambda w, v, _: w.parts.append(b"\1" if v else b"\0"), lambda r, _: r.take(1)[0] != 0),
    int: _Kind(b"i", _write_int, _read_int),
    float: _Kind(b"f", lambda w, v, _: w.parts.append(_FLOAT.pack(v)), lambda r, _: _FLOAT.unpack(r.take(8))[0]),
    complex: _Kind(
        b"c",
        lambda w, v, _: w.parts.append(_COMPLEX.pack(v.real, v.imag)),
        lambda r, _: complex(*_COMPLEX.unpack(r.take(16))),
    ),
    str: _Kind(b"s", lambda w, v, _: w.bytes(v.encode("utf-8", "surrogatepass")), lambda r, _: r.text()),
    bytes: _Kind(b"y", lambda w, v, _: w.bytes(v), lambda r, _: bytes(r.bytes())),
    list: _Kind(b"l", _items, lambda r, d: r.values(d)),
    tuple: _Kind(b"t", _items, lambda r, d: tuple(r.values(d))),
    set: _Kind(b"e", _items, lambda r, d: set(r.keys(d))),
    frozenset: _Kind(b"z", _items, lambda r, d: frozenset(r.keys(d))),
    dict: _Kind(b"d", lambda w, v, d: w.pairs(v, d), lambda r, d: dict(r.pairs(d))),
    OrderedDict: _Kind(b"o", lambda w, v, d: w.pairs(v, d), lambda r, d: OrderedDict(r.pairs(d))),
    defaultdict: _Kind(b"D", _write_default, lambda r, d: defaultdict(r.factory(), r.pairs(d))),
    deque: _Kind(b"q", _write_deque, lambda r, d: _deque(r.most(), r.values(d))),
    torch.Size: _Kind(b"S", lambda w, v, _: w.sizes(v), lambda r, _: torch.Size(r.sizes())),
    torch.dtype: _Kind(b"k", lambda w, v, _: w.bytes(_name_of(w, v)), lambda r, _: r.dtype()),
    torch.device: _Kind(b"v", lambda w, v, _: w.bytes(str(v).encode()), lambda r, _: r.device()),
    torch.Tensor: _TENSOR,
    torch.nn.Parameter: _TENSOR,
    np.ndarray: _Kind(b"a", lambda w, v, _: w.array(v), lambda r, _: r.array()),
    **{np.dtype(kind).type: _SCALAR for kind in _NUMBERS},
}
_TAGS = {kind.tag: kind for kind in _KINDS.values()}


def _deque(most: int | None, items: list[Any]) -> deque[Any]:
    if most is not None and len(items) > most:
        _wrong(f"a deque of at most {most} has {len(items)} items")
    return deque(items, most)


def _name_of(writer: _Writer, dtype: torch.dtype) -> bytes:
    if dtype not in _NAMES:
        writer._refuse(dtype, f"{dtype}, ")
    return _NAMES[dtype].encode()


def _bytes_of(flat: torch.Tensor) -> memoryview:
    """Return the memory of a flat tensor, which must be contiguous, on the CPU and not empty."""
    raw: Any = flat.view(torch.uint8).numpy()
    return memoryview(raw)
