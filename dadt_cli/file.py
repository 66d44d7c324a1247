"""Settings from a YAML file: a mapping from the names of knobs to their values."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

from dadt.config import Config
from dadt.errors import ConfigError


class Setting(NamedTuple):
    """A knob's value, and where it comes from: default, a flag, a variable, or a file and its key."""

    value: Any
    source: str


def read(path: Path) -> dict[str, Setting]:
    """The knobs that the file sets. Raises ConfigError."""
    import yaml  # not needed by those who have no such file

    try:
        content = yaml.safe_load(path.read_text())
    except (OSError, ValueError, RecursionError) as error:  # no UTF-8, no such date, brackets without end
        raise ConfigError(f"--config {path}: cannot be read ({getattr(error, 'strerror', error)})") from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}" if mark else ""
        raise ConfigError(f"--config {path}{where}: this is no YAML ({getattr(error, 'problem', error)})") from error
    if content is None:
        return {}
    if not isinstance(content, Mapping):
        raise ConfigError(f"--config {path}: give settings a line each, as `warmup-steps: 50`")
    defaults = {field.name: field.default for field in fields(Config)}
    found = {}
    for key, value in content.items():
        name = str(key).replace("-", "_")
        if name not in defaults:
            near = difflib.get_close_matches(name, defaults, 1)
            hint = f"; did you mean {near[0].replace('_', '-')}?" if near else "; `dadt config show` lists all"
            raise ConfigError(f"--config {path}: there is no setting {key}{hint}")
        found[name] = Setting(_value(path, str(key), value, defaults[name]), f"{path}: {key}")
    return found


def _value(path: Path, key: str, value: Any, default: object) -> Any:
    """The value as the knob's type."""
    if isinstance(default, bool):
        if not isinstance(value, bool):
            raise ConfigError(f"--config {path}: {key}: {value!r} is not true or false")
        return value
    if isinstance(default, int | float):
        number = type(default)
        if not _is_real(value) or value != number(value):
            what = "a whole number" if isinstance(default, int) else "a number"
            raise ConfigError(f"--config {path}: {key}: {value!r} is not {what}")
        return number(value)
    if isinstance(value, Mapping) or value is None:
        raise ConfigError(f"--config {path}: {key}: give one value, or a list")
    if isinstance(value, bool) and isinstance(default, str):
        value = "on" if value else "off"  # which YAML takes for booleans
    values = value if isinstance(value, list) else [value]
    return tuple(map(str, values)) if isinstance(default, tuple) else ",".join(map(str, values))


def _is_real(value: Any) -> bool:
    try:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:
        return False  # of hundreds of digits
