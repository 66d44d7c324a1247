"""Reads and replaces the state of an optimizer, so that it can be sent to another rank.

Optimizers of torch store it in `state`, by parameter. Others may store it anywhere: in attributes, in optimizers that
they wrap, or in a `state_dict` of their own layout. So this module sends two things: the result of `state_dict`, if
`load_state_dict` accepts it, and tensors and numbers found elsewhere in the object, by their paths.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer

from dadt.comm import plain, shards
from dadt.errors import DadtError, Mismatch

DEPTH = 8
"""Maximum depth to which containers and wrapped optimizers are searched for state."""
_GROUPS = "param_groups"
_NUMBERS = (bool, int, float)
_NOT_REMEMBERED = ("params", "defaults")
"""Attributes that are left out of an optimizer's state, as other code compares them and sends them to other ranks."""


class StatePlace(NamedTuple):
    """A place in an optimizer that contains a tensor or a number."""

    path: str
    value: Any
    put: Callable[[Any], None]
    """Callback that stores another value at this place."""


def is_torchs(optimizer: Optimizer) -> bool:
    """Whether the optimizer's `step` is a method of torch's own optimizers. Such steps change nothing without
    gradients, draw no random numbers and, except for LBFGS, need no loss."""
    step: Any = type(optimizer).step
    while (inner := getattr(step, "__wrapped__", None)) is not None:
        step = inner
    return str(step.__module__).startswith("torch.optim.")


def encode(optimizer: Optimizer, *, without: Collection[str] = ()) -> bytes:
    """Return the optimizer's encoded state, empty if it has none. without: paths of numbers to leave out. Raises
    DadtError."""
    content = remembered(optimizer, without=without)
    return plain.encode(content, f"the state of {type(optimizer).__name__}") if content else b""


def load(optimizer: Optimizer, data: bytes, *, without: Collection[str] = ()) -> None:
    """Replace the optimizer's state by another rank's. data: the other rank's encoded state. without: paths of numbers
    that stay unchanged. Raises DadtError."""
    restore(optimizer, plain.decode(data) if data else {}, without=without)


def remembered(optimizer: Optimizer, *, without: Collection[str] = (), depth: int = DEPTH) -> dict[str, Any]:
    """Return the plain values and tensors in the state of the optimizer and of optimizers that it wraps; empty if there
    are none."""
    state = _loadable(optimizer)
    found = {p.path: p.value for p in places(optimizer) if p.path not in without}
    inner = {path: remembered(each, depth=depth - 1) for path, each in _wrapped(optimizer, depth)}
    content = {"state_dict": state, "places": found, "wrapped": {path: each for path, each in inner.items() if each}}
    return {name: part for name, part in content.items() if part}


def restore(
    optimizer: Optimizer, content: Mapping[str, Any], *, without: Collection[str] = (), depth: int = DEPTH
) -> None:
    """Replace the optimizer's state by `content`, which `remembered` has returned for another optimizer. Raises
    Mismatch if this optimizer lacks a place for a tensor."""
    state = content.get("state_dict")
    if state is not None:
        _load(optimizer, state)
    elif not _overrides(optimizer, "state_dict"):
        getattr(optimizer, "state", {}).clear()
    for path, each in _wrapped(optimizer, depth):
        # A wrapped optimizer for which `content` has no state keeps the values that its wrapper has set.
        if path in content.get("wrapped", {}):
            restore(each, content["wrapped"][path], depth=depth - 1)
    theirs = content.get("places", {})
    mine = {p.path: p for p in places(optimizer)} if theirs else {}
    for path, value in theirs.items():
        if path in mine:
            if path not in without:
                _put(mine[path], value)
        elif isinstance(value, torch.Tensor):
            raise Mismatch(
                f"{type(optimizer).__name__} remembers a tensor ({path}) on another rank, and has no place for it here:"
                " let its state_dict() give it and its load_state_dict() take it"
            )


def _load(optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """Load a state dict by the optimizer's own `load_state_dict`. Dicts and lists that wrappers share with wrapped
    optimizers stay shared."""
    every = [optimizer, *(each for _, each in _wrapped(optimizer, DEPTH))]
    before = [(each, vars(each).get("state"), vars(each).get(_GROUPS)) for each in every]
    if _is_of_torch(state) and _GROUPS not in state:
        state = {**sharded(optimizer, state), _GROUPS: optimizer.state_dict()[_GROUPS]}
    optimizer.load_state_dict(dict(state))
    for each, old, groups in before:
        if isinstance(old, dict) and each.state is not old:
            loaded = dict(each.state)
            old.clear()
            old.update(loaded)
            each.state = old  # type: ignore[assignment]
        if isinstance(groups, list) and each.param_groups is not groups:
            for mine, theirs in zip(groups, each.param_groups, strict=True):
                mine.update({key: value for key, value in theirs.items() if key != "params"})
            each.param_groups = groups


def _wrapped(optimizer: Optimizer, depth: int) -> list[tuple[str, Optimizer]]:
    """Return the optimizers that this optimizer wraps, with the names of the attributes that contain them, except
    optimizers that share this optimizer's state."""
    state = vars(optimizer).get("state")
    found = [(name, each) for name, each in vars(optimizer).items() if isinstance(each, Optimizer) and depth]
    return [(name, each) for name, each in found if state is None or vars(each).get("state") is not state]


def keeps_elsewhere(optimizer: Optimizer) -> bool:
    """Whether the optimizer has more state than a `state_dict` in torch's layout contains."""
    of_torch = not _overrides(optimizer, "state_dict") or _is_of_torch(optimizer.state_dict())
    return not of_torch or bool(tensors(optimizer)) or bool(_wrapped(optimizer, DEPTH))


def numbers(optimizer: Optimizer) -> dict[str, float]:
    """Return the numbers in the optimizer's attributes, such as counters and settings, by path."""
    return {p.path: p.value for p in places(optimizer) if not isinstance(p.value, torch.Tensor)}


def tensors(optimizer: Optimizer) -> dict[str, torch.Tensor]:
    """Return the tensors that the optimizer stores outside a `state` of torch's layout, by path."""
    return {p.path: p.value for p in places(optimizer) if isinstance(p.value, torch.Tensor)}


def places(optimizer: Optimizer) -> Iterator[StatePlace]:
    """Yield the tensors and numbers in the optimizer's attributes, and in dicts and lists there, in the same order on
    all ranks. Parameters, groups and the contents of a `state_dict` of torch's layout are left out."""
    numbered = {id(p): i for i, p in enumerate(p for g in optimizer.param_groups for p in g["params"])}
    seen = {id(optimizer), id(optimizer.param_groups), *map(id, optimizer.param_groups), *numbered}
    state: Any = {"state": getattr(optimizer, "state", {})}
    if _overrides(optimizer, "state_dict"):
        state = optimizer.state_dict()
    if isinstance(state, dict) and _is_of_torch(state):
        seen.add(id(vars(optimizer).get("state")))
        seen.update(id(t) for each in state["state"].values() if isinstance(each, dict) for t in each.values())
    yield from _within(optimizer, "", numbered, seen, DEPTH)


def _within(owner: Any, path: str, numbered: Mapping[int, int], seen: set[int], depth: int) -> Iterator[StatePlace]:
    for name, value, put in _members(owner, numbered):
        here = f"{path}.{name}" if path else name
        if type(value) in _NUMBERS:
            yield StatePlace(here, value, put)
        elif type(value) is torch.Tensor and value.layout is torch.strided and not value.is_meta:
            if id(value) not in seen:
                seen.add(id(value))
                yield StatePlace(here, value, put)
        elif depth and id(value) not in seen and isinstance(value, dict | list | tuple | deque):
            seen.add(id(value))
            yield from _within(value, here, numbered, seen, depth - 1)


def _members(owner: Any, numbered: Mapping[int, int]) -> Iterator[tuple[str, Any, Callable[[Any], None]]]:
    """Yield the attributes or items of `owner`, each as its name, its value, and a function that stores another value
    in its place."""
    if isinstance(owner, Optimizer):
        for name, value in list(vars(owner).items()):
            if name not in _NOT_REMEMBERED and not name.startswith(("_optimizer_", "_zero_grad", "_opt_called")):
                yield name, value, lambda new, name=name: setattr(owner, name, new)  # type: ignore[misc]
    elif isinstance(owner, dict):
        for place, (key, value) in enumerate(list(owner.items())):
            name = f"parameter {numbered.get(id(key), f'at {place}')}" if isinstance(key, torch.Tensor) else str(key)
            if name not in _NOT_REMEMBERED:
                yield name, value, lambda new, key=key: owner.__setitem__(key, new)  # type: ignore[misc]
    else:
        for place, value in enumerate(list(owner)):
            if not isinstance(owner, tuple):
                yield str(place), value, lambda new, place=place: owner.__setitem__(place, new)  # type: ignore[misc]
            elif type(value) not in _NUMBERS:  # numbers in a tuple cannot be replaced, so they are left as they are
                yield str(place), value, lambda new: None


def _put(place: StatePlace, value: Any) -> None:
    mine = place.value
    if isinstance(value, torch.Tensor) != isinstance(mine, torch.Tensor):
        return
    if isinstance(value, torch.Tensor) and mine.shape == value.shape:
        with torch.no_grad():
            mine.copy_(value)
    else:
        place.put(value.to(mine.device) if isinstance(value, torch.Tensor) else value)


def _loadable(optimizer: Optimizer) -> dict[str, Any]:
    """Return the result of `state_dict` in a form that `load_state_dict` accepts, or an empty dict if there is none."""
    if not (_overrides(optimizer, "state_dict") or getattr(optimizer, "state", None)):
        return {}
    given = optimizer.state_dict()
    if not isinstance(given, dict):
        raise DadtError(f"{type(optimizer).__name__}.state_dict() gives a {type(given).__name__}, and no dict")
    if _is_of_torch(given):
        parts = {key: _parts(each) for key, each in given["state"].items()}
        return {key: value for key, value in given.items() if key != _GROUPS} | {"state": parts}
    # A custom state_dict without a custom load_state_dict is left out, because `places` finds the values.
    return dict(given) if _overrides(optimizer, "load_state_dict") else {}


def _parts(values: Any) -> Any:
    """Return one parameter's state with each tensor replaced by the part that this rank stores."""
    if not isinstance(values, dict):
        return values
    return {name: shards.local(v) if isinstance(v, torch.Tensor) else v for name, v in values.items()}


def sharded(optimizer: Optimizer, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state dict in which tensors that have the shape of this rank's part of a sharded parameter are sharded
    tensors, too."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if not any(map(shards.is_sharded, parameters)) or not _is_of_torch(state):
        return dict(state)
    made = dict(state["state"])
    for key, values in state["state"].items():
        p = parameters[key] if isinstance(key, int) else None
        if p is not None and isinstance(values, dict):
            shape = shards.local(p).shape
            parts = {name for name, v in values.items() if isinstance(v, torch.Tensor) and v.shape == shape}
            made[key] = {name: shards.like(p, v) if name in parts else v for name, v in values.items()}
    return {**state, "state": made}


def _is_of_torch(state_dict: Mapping[str, Any]) -> bool:
    """Whether the state dict has torch's layout, perhaps with further entries."""
    return isinstance(state_dict.get("state"), dict)


def _overrides(optimizer: Optimizer, name: str) -> bool:
    return getattr(type(optimizer), name) is not getattr(Optimizer, name)
