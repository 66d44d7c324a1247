"""Checks the content of a snapshot's file before it is used, since the file may be damaged or come from an untrusted
source."""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from dadt.comm.compression import CODECS, OF_MOMENTUM
from dadt.comm.shards import local
from dadt.errors import NotResumed
from dadt.train.weighing import Rule

DEEPEST = 64
"""Maximum nesting depth of containers in a snapshot."""
FEWEST = 10_000
"""Number of values that a file may contain even if it has fewer bytes than this."""
Kind = Callable[[Any], bool]


def check_archive(path: Path) -> None:
    """Raises NotResumed if the archive cannot be read or is compressed. Snapshots are written uncompressed, so that
    unpacking never needs more space than the file has."""
    try:
        with zipfile.ZipFile(path) as archive:
            if all(each.compress_type == zipfile.ZIP_STORED for each in archive.infolist()):
                return
    except (OSError, ValueError, NotImplementedError, zipfile.BadZipFile) as error:
        raise NotResumed(f"{path}: cannot be read: {error}") from error
    raise NotResumed(f"{path}: is compressed, which no snapshot is: resume from another one")


def check(path: Path, content: Any, step: int, *, common: bool) -> dict[str, Any]:
    """Return the content after checking that it is of this step and has all parts of this rank's own state and, with
    `common`, of the state that all ranks share. Raises NotResumed if something is missing, of the wrong type, or nested
    too deeply.
    """
    if not isinstance(content, dict):
        raise NotResumed(f"{path}: holds no state of a job: resume from another snapshot")
    _check_size(path, content)
    apart = {name: kind for name, kind in {**APART, **BASE}.items() if name in content}
    for name, kind in {**OWN, **apart, **(COMMON if common else {})}.items():
        if name not in content:
            raise NotResumed(f"{path}: {name!r} is missing in it: resume from another snapshot")
        if not kind(content[name]):
            raise NotResumed(f"{path}: {name!r} in it is not what belongs there: resume from another snapshot")
    if content["step"] != step:
        raise NotResumed(f"{path}: is of step {content['step']}, and not of {step}: resume from another snapshot")
    return content


def _check_size(path: Path, content: Any) -> None:
    """Raises NotResumed if the content has more values than the file has bytes, or is nested too deeply. One list in a
    file may be referred to at many places, so that a short file could expand to any number of values."""
    most, count = max(FEWEST, path.stat().st_size), 0
    waiting = [(content, 0)]
    while waiting:
        value, depth = waiting.pop()
        count += 1
        if count > most or depth > DEEPEST:
            what = f"more values than bytes ({most:,})" if count > most else f"containers {depth} deep in each other"
            raise NotResumed(f"{path}: holds {what}: resume from another snapshot")
        if isinstance(value, Mapping):
            waiting += [(each, depth + 1) for item in value.items() for each in item]
        elif isinstance(value, list | tuple | set):
            waiting += [(each, depth + 1) for each in value]
        elif isinstance(value, torch.Tensor) and _repeats(value):
            raise NotResumed(f"{path}: holds a tensor of more elements than are stored: resume from another one")


def _repeats(tensor: torch.Tensor) -> bool:
    if tensor.layout != torch.strided or tensor.is_meta:
        return False
    return tensor.numel() * tensor.element_size() > tensor.untyped_storage().nbytes()


def fits(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> bool:
    """Return whether an optimizer's state fits the optimizer, because both have the same number of parameters. For
    torch's own optimizers, state with one value per element of a parameter must also have the parameter's shape."""
    groups = optimizer.param_groups
    if [len(each["params"]) for each in groups] != [len(each["params"]) for each in state["param_groups"]]:
        return False
    if not type(optimizer).__module__.startswith("torch.optim."):
        return True
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    shapes = dict(zip(numbers, (local(p).shape for group in groups for p in group["params"]), strict=True))
    return all(
        value.shape == shapes.get(number, value.shape)
        for number, values in state["state"].items()
        if isinstance(values, Mapping)
        for name, value in values.items()
        if name in _OF_EACH_ELEMENT and isinstance(value, torch.Tensor)
    )


def alike(mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> bool:
    """Return whether two states have the same names, and under each name values of similar types."""
    return mine.keys() == theirs.keys() and all(_is_like(mine[name], theirs[name]) for name in mine)


def _is_like(one: Any, other: Any) -> bool:
    if one is None or other is None:
        return True
    kinds = ((bool, int, float, torch.Tensor), (str,), (list, tuple), (Mapping,))
    return any(isinstance(one, each) and isinstance(other, each) for each in kinds) or type(one) is type(other)


def _is_step(value: Any) -> bool:
    return type(value) is int and value >= 0


def _is_text_of_bytes(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype == torch.uint8 and value.dim() == 1 and value.is_contiguous()


def _is_random(value: Any) -> bool:
    """Return whether a value contains the random streams `own`, `shared` or both, each as plain values and tensors."""
    return (
        isinstance(value, dict)
        and {*value} in ({"own"}, {"shared"}, {"own", "shared"})
        and all(
            isinstance(state, dict)
            and _is_text_of_bytes(state.get("torch"))
            and state["torch"].numel() == torch.default_generator.get_state().numel()
            and _is_row(state.get("numpy"), 5, 624)
            and _is_row(state.get("random"), 3, 625)
            for state in value.values()
        )
    )


def _is_row(value: Any, length: int, words: int) -> bool:
    """Return whether a value is a list of `length` plain values, except for the second, which must be a byte tensor
    with the `words` 4-byte words of a random generator."""
    if not isinstance(value, list | tuple) or len(value) != length or not _is_text_of_bytes(value[1]):
        return False
    plain = all(isinstance(each, int | float | str | None) for each in (value[0], *value[2:]))
    return plain and value[1].numel() == 4 * words


def _exactly(kind: type) -> Kind:
    """Return a check for values of this type, but not of its subclasses."""
    return lambda value: type(value) is kind


def _any_of(*kinds: type) -> Kind:
    return lambda value: isinstance(value, kinds)


def _or_none(kind: Kind) -> Kind:
    return lambda value: value is None or kind(value)


def _each(kind: Kind) -> Kind:
    """Return a check for a list or tuple whose elements all pass the check `kind`."""
    return lambda value: isinstance(value, list | tuple) and all(map(kind, value))


def _with(*needed: str, **kinds: Kind) -> Kind:
    """Return a check for a dict, which must have the keys in `needed`. If it has a key that is in `kinds`, the value
    must pass the check of that key."""
    return lambda value: (
        isinstance(value, dict) and value.keys() >= set(needed) and all(kinds[n](value[n]) for n in kinds if n in value)
    )


def _named(kind: Kind) -> Kind:
    return lambda value: isinstance(value, dict) and all(isinstance(n, str) and kind(v) for n, v in value.items())


def _numbered(kind: Kind) -> Kind:
    """Return a check for a dict whose keys are integers (numbers of modules, optimizers or schedulers) and whose values
    pass the check `kind`."""
    return lambda value: isinstance(value, dict) and all(type(n) is int and kind(v) for n, v in value.items())


def _is_averaged(value: Any) -> bool:
    """Return whether a value is a list with one entry per module: the module's number, names of buffers, averaged
    values, and the rank's own values."""
    return isinstance(value, list) and all(
        isinstance(each, list | tuple)
        and len(each) == 4
        and type(each[0]) is int
        and isinstance(each[1], list | tuple | set)
        and all(isinstance(name, str) for name in each[1])
        and all(values is None or _named(_is_tensor)(values) for values in each[2:])
        for each in value
    )


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and not value.is_meta


def _is_optimizer(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and isinstance(value.get("state"), dict)
        and isinstance(groups := value.get("param_groups"), list)
        and all(isinstance(each, dict) and isinstance(each.get("params"), list) for each in groups)
        and all(isinstance(number, int) for each in groups for number in each["params"])
        and all(isinstance(each.get("lr", 0.0), int | float | torch.Tensor) for each in groups)
    )


_is_bool = _exactly(bool)
_is_numbers = _each(_or_none(_exactly(int)))
_is_rows = _each(_or_none(_is_tensor))


def _is_factor(value: Any) -> bool:
    return type(value) in (int, float) or (_is_tensor(value) and value.numel() == 1)


def _is_positive(value: Any) -> bool:
    return type(value) is float and 0 < value < float("inf")


def _is_rule(value: Any) -> bool:
    return isinstance(value, str) and value in Rule.__members__


def _is_term(value: Any) -> bool:
    """Return whether a value is a pair of a list of tensors and a factor for their sum."""
    return isinstance(value, list | tuple) and len(value) == 2 and _is_rows(value[0]) and _is_factor(value[1])


def _is_owed(value: Any) -> bool:
    """Return whether a value is a list of tensors, or a contiguous one-dimensional float32 tensor, whose memory the C++
    core later reads as an array of floats."""
    return _is_rows(value) or (
        _is_tensor(value) and value.dtype == torch.float32 and value.dim() == 1 and value.is_contiguous()
    )


def _is_round(value: Any) -> bool:
    """Return whether a value is a position in a round of `local`: five numbers of steps."""
    return isinstance(value, list | tuple) and len(value) == 5 and all(map(_is_step, value))


_PREDICTION = _with(
    *("looks", "changed", "ahead"),
    **dict.fromkeys(("ahead", "expected", "previous"), _is_rows),
    **dict.fromkeys(("clip", "scale"), _is_factor),
    **dict.fromkeys(("changed", "in_place"), _is_bool),
    looks=_is_step,
    terms=_each(_is_term),
    absent=_is_numbers,
)
_IN_FLIGHT = {"not_finite": _is_numbers, "learned": _numbered(_any_of(list, tuple))}
_OWES = _with(scale=_or_none(_is_factor), forgets=_is_bool, owed=_or_none(_is_owed), bases=_is_rows, unsent=_is_bool)
_UNSEEN = _with("seen", "since_start", seen=_is_rows, since_start=_is_bool)
_MOMENTUM = _with(own=_is_rows, taken=_is_numbers, on_way=_is_rows, unseen=_UNSEEN)
_WEIGHING = _with("rule", "unit", "usual", rule=_is_rule, unit=_is_positive, usual=_is_positive)
_FRAGMENT = _with("round", "owes", round=_is_round, owes=_each(_or_none(_OWES)))
_ALGORITHM = _with(
    before=_is_numbers,
    expected=_is_numbers,
    pause=_is_step,
    left=_is_step,
    watches=_is_bool,
    fragments=_numbered(_FRAGMENT),
    idle=_numbered(_is_step),
    tries=lambda value: isinstance(value, str) and value in ("none", *CODECS, *OF_MOMENTUM),
)


_TRAINING: Mapping[str, Kind] = {
    "prediction": _PREDICTION,
    "barred": _is_bool,
    "owes": _each(_or_none(_OWES)),
    "in_flight": lambda value: _with(**_IN_FLIGHT)(value) and value.keys() <= _IN_FLIGHT.keys(),
    "follows": _is_bool,
    "momentum": _MOMENTUM,
    "idle": _numbered(_is_tensor),
    "algorithm": _ALGORITHM,
    "weighing": _WEIGHING,
}
"""The entries that a snapshot has about one optimizer's training, by name, with a check for each."""


def _is_training(value: Any) -> bool:
    return _with(**_TRAINING)(value) and value.keys() == _TRAINING.keys()


OWN: Mapping[str, Kind] = {
    "step": _is_step,
    "random": _is_random,
    "values": _is_text_of_bytes,
    "variables": _named(_is_tensor),
    "counts": _named(_any_of(bool, int, float, str)),
    "buffers": _named(_is_tensor),
    "averaged": _is_averaged,
    "training": _numbered(_is_training),
}
"""The entries of a snapshot that belong to a single rank, by name, with a check for each."""
APART: Mapping[str, Kind] = {"weights": _named(_is_tensor), "states": _numbered(_is_optimizer)}
"""Further entries that belong to a single rank if ranks have different weights, by name, with a check for each."""
COMMON: Mapping[str, Kind] = {
    "tensors": _named(_is_tensor),
    "optimizers": _numbered(_is_optimizer),
    "schedulers": _numbered(_any_of(dict)),
    "scalers": _numbered(_any_of(dict)),
}
"""The entries of a snapshot that all ranks have in common, by name, with a check for each."""
BASE: Mapping[str, Kind] = {"base": _named(lambda value: type(value) is int and 0 <= value < 1 << 64)}
"""The entry with the digests, by name, of the tensors that are stored in files next to the snapshots. It exists only if
there are such tensors."""
_OF_EACH_ELEMENT = frozenset(
    {"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "momentum_buffer", "square_avg", "grad_avg", "sum"}
    | {"acc_delta", "prev", "step_size", "ax"}
)
