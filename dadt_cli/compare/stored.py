"""The content of a file of weights: every tensor and value by its name, read without running anything in it."""

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
"""Names of buffers in torch's own modules, torchvision and transformers."""
ZIP = b"PK\x03\x04"
LEGACY = b"\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19"
"""The magic number with which torch.save began until 1.6, as pickle writes it."""
NEITHER = "is neither a file that torch.save wrote nor a safetensors file"
DEEPEST = 100
MOST_VALUES = 1_000_000
MOST_CHARACTERS = 1 << 27
"""Most characters of all names in a file together."""
SECOND_SENTENCE = re.compile(r"(?<=[^.])\. |\n")


@dataclass(frozen=True, slots=True)
class WeightFile:
    """Names are keys and indices, with / between them."""

    name: str
    """The file as the user named it."""
    whole: str
    """The file, and what all names began with before it was taken off: last.pth:model/"""
    values: dict[str, Any]
    """Tensors, and all else that is neither a mapping nor a sequence, nor one that holds nothing."""
    kinds: dict[str, str]
    tied: list[tuple[str, ...]]
    """Names of one and the same tensor."""


def read(text: str) -> WeightFile:
    """Read FILE; of FILE:PART only the values whose names begin with PART, which is taken off their names.

    Raises ConfigError where there is no such file or part, or it cannot be read without running code.
    """
    path, part = _split(text)
    content, removed = _content(path)
    values: dict[str, Any] = {}
    kinds: dict[str, str] = {}
    characters = 0
    for name, kind, value in _walk(path, (), content, "other"):
        values[name], kinds[name] = value, kind
        characters += len(name)
        # One list may stand in many places, so that a short file has any number of them.
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
    """The path of the file in FILE, or in FILE:PART."""
    return _split(text)[0]


def _split(text: str) -> tuple[Path, str]:
    """A file may have a colon in its name."""
    path, _, part = text.rpartition(":")
    if path and not Path(text).exists() and Path(path).is_file():
        return Path(path), part
    return Path(text), ""


def _content(path: Path) -> tuple[Any, Mapping[str, str]]:
    """The file's content, and which of its names were left out for which others. Raises ConfigError."""
    try:
        if not (stat.S_ISREG(mode := path.stat().st_mode) or stat.S_ISDIR(mode)):  # a pipe would be waited for
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
    # Until 2.6, torch.load ran what tar files hold, whatever weights_only said.
    if LEGACY in head and not tarfile.is_tarfile(path):
        return _torch(path, mapped=False), {}
    raise ConfigError(f"{path}: {NEITHER}")


def _check_archive(path: Path) -> None:
    try:
        with zipfile.ZipFile(path) as archive:
            parts = {name.partition("/")[2] for name in archive.namelist()}
            packed = any(each.compress_type != zipfile.ZIP_STORED for each in archive.infolist())
    except (zipfile.BadZipFile, ValueError, NotImplementedError) as error:  # also names that are no UTF-8
        raise ConfigError(f"{path}: is damaged or cut short ({error})") from error
    if "constants.pkl" in parts:
        raise ConfigError(f"{path}: is a TorchScript program; give a file of its state_dict")
    if "data.pkl" not in parts:
        raise ConfigError(f"{path}: {NEITHER}")
    if packed:  # a small one may hold any number of zeros
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
    except Exception as error:  # a damaged pickle raises whatever it likes
        raise ConfigError(f"{path}: {_damaged(error)}") from error


def _safetensors(path: Path) -> tuple[Any, Mapping[str, str]]:
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError as error:
        raise ConfigError(f"{path}: reading it needs safetensors -> pip install safetensors") from error
    try:
        with safe_open(path, framework="pt") as file:
            # safetensors.torch.save_model keeps one of the names of a tensor, and writes down the others for it.
            return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"{path}: {_damaged(error)}") from error


def _damaged(error: Exception) -> str:
    reason = SECOND_SENTENCE.split(str(error).strip())[0].rstrip(".") or type(error).__name__
    return f"is damaged or cut short ({reason})"


def _walk(path: Path, keys: tuple[str, ...], value: Any, kind: str) -> Iterator[tuple[str, str, Any]]:
    """Name, kind and value of each leaf. kind: of what it stands in, `weights` for a state_dict."""
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
        return "other"  # what a module gives as its extra state
    if isinstance(value, torch.nn.Parameter):
        return "parameter"
    return "buffer" if BUFFERS.fullmatch(keys[-1]) or not _is_trainable(value) else "parameter"


def _is_trainable(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _part(key: Any) -> str:
    """A key as part of a name, so that no two keys look alike: 0, '0' and 0.0."""
    if isinstance(key, str):
        return repr(key) if not key or "/" in key or re.fullmatch(r"-?\d+", key) else key
    return str(key) if type(key) is int else f"({key!r})"


def _tops(values: Mapping[str, Any]) -> str:
    """The beginnings of names, not all of many."""
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
