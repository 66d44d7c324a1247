"""The flags of Config's knobs, made from its fields."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import Field, fields
from pathlib import Path
from typing import Any, TypeVar

import click

from dadt.config import Config, flag, given_by_env, variable
from dadt_cli import file
from dadt_cli.file import Setting

F = TypeVar("F", bound=Callable[..., Any])


def knobs(function: F) -> F:
    """Decorate a command with one flag per knob. A flag that is not given arrives as None."""
    for field in sorted(fields(Config), key=lambda field: not field.metadata["launch"])[::-1]:
        function = _option(field)(function)
    return click.option("--config", metavar="FILE", help="YAML file of settings; flags and variables win.")(function)


def config_of(given: dict[str, Any]) -> Config:
    """The flags that were given, else the DADT_* variables, else the file that --config names, else the defaults.

    Raises ConfigError.
    """
    return Config(**{name: setting.value for name, setting in settings_of(given).items()})


def settings_of(given: dict[str, Any]) -> dict[str, Setting]:
    """Each knob's value, and where it comes from. Raises ConfigError."""
    settings = {field.name: Setting(field.default, "default") for field in fields(Config)}
    if given.get("config"):
        settings.update(file.read(Path(given["config"])))
    settings.update({name: Setting(value, variable(name)) for name, value in given_by_env().items()})
    for name in settings:
        if given.get(name) not in (None, ()):
            # Hosts that are given one by one are one list.
            several = isinstance(given[name], tuple) and isinstance(settings[name].value, str)
            settings[name] = Setting(",".join(given[name]) if several else given[name], flag(name))
    return settings


def help_all(ctx: click.Context, parameter: click.Parameter, value: bool) -> None:
    if value and not ctx.resilient_parsing:
        for each in ctx.command.params:
            if isinstance(each, click.Option):
                each.hidden = False
        click.echo(ctx.get_help())
        ctx.exit()


def _option(field: Field[Any]) -> Callable[[F], F]:
    name = flag(field.name)
    # np is said as -np; what is a tuple is given with -x alone.
    names = [*field.metadata["flags"], name]
    shown = _shown(field.default)
    text = field.metadata["help"] + (f"  [default: {shown}]" if shown else "")
    options: dict[str, Any] = {"default": None, "help": text, "hidden": field.metadata["advanced"]}
    if isinstance(field.default, tuple) or field.metadata["metavar"] == "HOSTS":
        return click.option(*names, field.name, multiple=True, metavar=_metavar(field), **options)
    if isinstance(field.default, bool):
        return click.option(*field.metadata["flags"], f"{name}/--no-{name[2:]}", field.name, **options)
    if field.metadata["choices"]:
        return click.option(*names, field.name, type=click.Choice(field.metadata["choices"]), **options)
    return click.option(*names, field.name, type=type(field.default), metavar=_metavar(field), **options)


def _metavar(field: Field[Any]) -> str:
    names = {int: "N", float: "X", str: "TEXT", tuple: "TEXT"}
    return field.metadata["metavar"] or names[type(field.default)]


def _shown(default: object) -> str:
    if isinstance(default, bool):
        return "on" if default else "off"
    if isinstance(default, float):
        return f"{default:g}"
    return str(default) if default else ""
