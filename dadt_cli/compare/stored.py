"""Reads every tensor and value in a file of weights by its name, without running any code in the file."""

from __future__ import annotations

import pickle
import re
import stat
import tarfile
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dadt.errors import ConfigError

KINDS = ("parameter", "buffer", "optimizer", "other")
BUFFERS = re.compile(
    r"(.*\.)?(running_mean|running_var|num_batches_tracked|n_averaged|(weight)?_[uv]|\w+_mask|masked_bias|inv_freq"
    r"|position_ids|token_type_ids|relative_position_index)"
)
"""Matches names of buffers in modules of torch, torchvision and transformers."""
ZIP = b"PK\x03\x04"
LEGACY = b"\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19"
"""The magic number at the start of files by torch.save before version 1.6, as pickle encodes it."""
NEITHER = "is neither a file that torch.save wrote nor a safetensors file"
DEEPEST = 100
MOST_VALUES = 1_000_000
MOST_CHARACTERS = 1 << 27
"""Most characters in all names of a file together."""
SECOND_SENTENCE = re.compile(r"(?<=[^.])\. |\n")


@dataclass(frozen=True, slots=True)
class WeightFile:
    """The content of a file of weights. Names are dictionary keys and list indices, joined by /."""

    name: str
    """The file as the user typed it, possibly with `:PART` at the end."""
    whole: str
    """The file and the prefix that was removed from all names, such as last.pth:model/"""
    values: dict[str, Any]
    """Tensors and other values by name. An empty mapping or sequence is a value; of others, each item is one."""
    kinds: dict[str, str]
    tied: list[tuple[str, ...]]
    """Groups of names that refer to the same tensor."""


def read(text: str) -> WeightFile:
    """Read a file of weights. For FILE:PART, read only values whose names begin with PART, and remove PART from their
    names.

    Raises ConfigError if there is no such file or part, or reading the file would require running code.
    """
    path, part = _split(text)
    content, removed = _content(path)
    values: dict[str, Any] = {}
    kinds: dict[str, str] = {}
    characters = 0
    for name, kind, value in _walk(path, (), content, "other"):
        values[name], kinds[name] = value, kind
        characters += len(name)
        # A short file may refer to one list from many places, so the number of values is not limited by the file's
        # size.
        if len(values) > MOST_VALUES or characters > MOST_CHARACTERS:
            raise ConfigError(f"{path}: holds more than {MOST_VALUES:,} values, each by its name, or too long names")
    for name, kept in removed.items():
        if kept in values and name not in values:
            values[name], kinds[name] = values[kept], kinds[kept]
    start = part if not part or part.endswith(("/", ".")) else f"{part}/"
    if start:
        found = [name for name in values if name.startswith(start)]
        if not found:
            raise ConfigError(
                f"{path}: nothing in it has a name that begins with {start}; they begin with {_tops(values)}"
            )
        values = {name[len(start) :]: values[name] for name in found}
        kinds = {name[len(start) :]: kinds[name] for name in found}
    return WeightFile(text, f"{path}:{start}", values, kinds, _tied(values))


def path_of(text: str) -> Path:
    """Return the path of the file in an argument FILE or FILE:PART."""
    return _split(text)[0]


def _split(text: str) -> tuple[Path, str]:
    """Split FILE:PART into path and part. A file whose own name contains a colon is recognized if it exists."""
    path, _, part = text.rpartition(":")
    if path and not Path(text).exists() and Path(path).is_file():
        return Path(path), part
    return Path(text), ""


def _content(path: Path) -> tuple[Any, Mapping[str, str]]:
    """Return the file's content, and a mapping from names left out of the file to the names stored instead. Raises
    ConfigError if the file cannot be read."""
    try:
        # Only regular files and folders are read, since reading a pipe would wait for a writer.
        if not (stat.S_ISREG(mode := path.stat().st_mode) or stat.S_ISDIR(mode)):
            raise ConfigError(f"{path}: is no file, but a pipe, a socket or a device")
        with path.open("rb") as file:
            head = file.read(64)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from error
    if not head:
        raise ConfigError(f"{path}: is empty")
    if head[8:9] == b"{" or path.suffix == ".safetensors":
        return _safetensors(path)
    if head.startswith(ZIP):
        _check_archive(path)
        return _torch(path, mapped=True), {}
    # Tar files are refused: before torch 2.6, torch.load ran code in them despite weights_only.
    if LEGACY in head and not tarfile.is_tarfile(path):
        return _torch(path, mapped=False), {}
    raise ConfigError(f"{path}: {NEITHER}")


def _check_archive(path: Path) -> None:
    try:
        with zipfile.ZipFile(path) as archive:
            parts = {name.partition("/")[2] for name in archive.namelist()}
            packed = any(each.compress_type != zipfile.ZIP_STORED for each in archive.infolist())
    # Module zipfile raises ValueError, for example, for names that are not UTF-8.
    except (zipfile.BadZipFile, ValueError, NotImplementedError) as error:
        raise ConfigError(f"{path}: is damaged or cut short ({error})") from error
    if "constants.pkl" in parts:
        raise ConfigError(f"{path}: is a TorchScript program; give a file of its state_dict")
    if "data.pkl" not in parts:
        raise ConfigError(f"{path}: {NEITHER}")
    if packed:  # compressed files are refused, since they may expand to any size
        raise ConfigError(f"{path}: is a compressed archive, and torch.save writes none; unpack it, and zip it by -0")


def _torch(path: Path, mapped: bool) -> Any:
    try:
        return torch.load(str(path), map_location="cpu", weights_only=True, mmap=mapped)
    except pickle.UnpicklingError as error:
        found = re.search(r"(?:GLOBAL|[Uu]nsupported class) ([\w.]+)", str(error))
        if found is None:
            raise ConfigError(f"{path}: {_damaged(error)}") from error
        raise ConfigError(
            f"{path}: holds {found[1]}, which is made by running code, and dadt compare runs none -> save state_dicts, "
            "numbers and text alone"
        ) from error
    except MemoryError:
        raise
    except Exception as error:  # a damaged pickle can raise an exception of any type
        raise ConfigError(f"{path}: {_damaged(error)}") from error


def _safetensors(path: Path) -> tuple[Any, Mapping[str, str]]:
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError as error:
        raise ConfigError(f"{path}: reading it needs safetensors -> pip install safetensors") from error
    try:
        with safe_open(path, framework="pt") as file:
            # safetensors.torch.save_model stores a tensor with several names under one of them, and lists the others in
            # the metadata.
            return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"{path}: {_damaged(error)}") from error


def _damaged(error: Exception) -> str:
    reason = SECOND_SENTENCE.split(str(error).strip())[0].rstrip(".") or type(error).__name__
    return f"is damaged or cut short ({reason})"


def _walk(path: Path, keys: tuple[str, ...], value: Any, kind: str) -> Iterator[tuple[str, str, Any]]:
    """Yield name, kind and value of each item in nested mappings and lists. kind: kind of the surrounding container;
    `weights` for a state_dict."""
    if len(keys) > DEEPEST:
        raise ConfigError(f"{path}: mappings and lists are nested deeper than {DEEPEST} times, as in {'/'.join(keys)}")
    if isinstance(value, Mapping) and value:
        inner = kind if kind == "optimizer" else _kind_within(value)
        for key, item in value.items():
            yield from _walk(path, (*keys, _part(key)), item, inner)
    elif isinstance(value, list | tuple) and value:
        for index, item in enumerate(value):
            yield from _walk(path, (*keys, str(index)), item, kind if kind == "optimizer" else "other")
    else:
        yield "/".join(keys) or ".", _kind(keys, value) if kind == "weights" else kind, value


def _kind_within(mapping: Mapping[Any, Any]) -> str:
    if {"state", "param_groups"} <= mapping.keys():
        return "optimizer"
    tensors = [item for key, item in mapping.items() if not str(key).endswith("_extra_state")]
    named = all(isinstance(key, str) for key in mapping) and all(isinstance(item, torch.Tensor) for item in tensors)
    return "weights" if named and any(_is_trainable(item) for item in tensors) else "other"


def _kind(keys: tuple[str, ...], value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return "other"  # a module's extra state (get_extra_state) may be any value
    if isinstance(value, torch.nn.Parameter):
        return "parameter"
    return "buffer" if BUFFERS.fullmatch(keys[-1]) or not _is_trainable(value) else "parameter"


def _is_trainable(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _part(key: Any) -> str:
    """Format a key as part of a name, so that different keys such as 0, '0' and 0.0 never look alike."""
    if isinstance(key, str):
        return repr(key) if not key or "/" in key or re.fullmatch(r"-?\d+", key) else key
    return str(key) if type(key) is int else f"({key!r})"


def _tops(values: Mapping[str, Any]) -> str:
    """Return the first parts of the names, which are divided by /, as words for a message; at most five parts."""
    tops = list(dict.fromkeys("".join(name.partition("/")[:2]) for name in values))
    return ", ".join(tops[:5]) + ", ..." * (len(tops) > 5)


def _tied(values: Mapping[str, Any]) -> list[tuple[str, ...]]:
    names: dict[tuple[Any, ...], list[str]] = {}
    for name, value in values.items():
        strided = isinstance(value, torch.Tensor) and value.layout == torch.strided and value.device.type == "cpu"
        if strided and value.numel():
            where = value.untyped_storage().data_ptr(), value.storage_offset()
            names.setdefault((*where, value.shape, value.stride(), value.dtype), []).append(name)
    return [tuple(group) for group in names.values() if len(group) > 1]
