"""Reads settings from a YAML file, which maps names of settings to values."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

from dadt.config import Config, document
from dadt.config.check import flag
from dadt.config.spelling import HOROVODRUN
from dadt.errors import ConfigError

LIMIT = 1 << 16
"""Most bytes of a file of settings (--config)."""
DEFAULT = "default"
"""Source of a setting that is set by no flag, no variable and no file, and so has its default."""


class Setting(NamedTuple):
    """A setting's value, and its source: DEFAULT, a flag, a variable, or a file and its key."""

    value: Any
    source: str


def read(path: Path) -> dict[str, Setting]:
    """Return the settings in the file. Raises ConfigError if the file cannot be read or a setting is wrong."""
    import yaml  # imported only when needed, since most users have no settings file

    class Loader(yaml.SafeLoader):
        """A YAML loader that refuses aliases: a few lines of them can expand to more than fits in memory, and no
        setting needs them."""

        def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
            if self.check_event(yaml.AliasEvent):
                event = self.peek_event()  # type: ignore[no-untyped-call]
                where = f"--config {path}, line {event.start_mark.line + 1}"
                raise ConfigError(f"{where}: an alias (*{event.anchor}) is not taken; write the value out")
            return super().compose_node(parent, index)

    text = document.read(path, "--config", LIMIT)
    try:
        content = yaml.load(text, Loader)
    # The YAML library raises these exceptions for impossible dates and for very deep nesting.
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"--config {path}: cannot be read ({error})") from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}" if mark else ""
        raise ConfigError(f"--config {path}{where}: this is no YAML ({getattr(error, 'problem', error)})") from error
    if content is None:
        return {}
    if not isinstance(content, Mapping):
        raise ConfigError(f"--config {path}: give settings a line each, as `warmup-steps: 50`")
    defaults = {field.name: field.default for field in fields(Config)}
    spelt = _spellings()
    found: dict[str, Setting] = {}
    for key, value in content.items():
        name = spelt.get(str(key).replace("_", "-"), "")
        if not name:
            near = difflib.get_close_matches(str(key).replace("_", "-"), spelt, 1)
            hint = f"; did you mean {near[0]}?" if near else "; `dadt config show` lists all"
            raise ConfigError(f"--config {path}: there is no setting {key}{hint}")
        if name in found:
            other = found[name].source.removeprefix(f"{path}: ")
            raise ConfigError(f"--config {path}: {other} and {key} are the same setting; give it once")
        try:
            found[name] = Setting(_value(path, str(key), value, defaults[name]), f"{path}: {key}")
        # Functions int() and float() raise ValueError for numbers with thousands of digits.
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"--config {path}: {key}: is no value of a setting ({error})") from error
    return found


def _spellings() -> dict[str, str]:
    """Return the allowed keys of a settings file, each with its setting: all spellings of the flags, without leading
    dashes."""
    flags = {field.name: [flag(field.name), *field.metadata["flags"]] for field in fields(Config)}
    for name, other in HOROVODRUN.items():
        flags[name].append(other)
    return {each.lstrip("-"): name for name, names in flags.items() for each in names}


def _value(path: Path, key: str, value: Any, default: object) -> Any:
    """Convert a value from the file to the type of the setting's default. Raises ConfigError if the value does not have
    this type."""
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
        value = "on" if value else "off"  # YAML reads the words on and off as booleans
    values = value if isinstance(value, list) else [value]
    return tuple(map(str, values)) if isinstance(default, tuple) else ",".join(map(str, values))


def _is_real(value: Any) -> bool:
    try:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:
        return False  # an integer may be too large to become a float
