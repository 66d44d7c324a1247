"""The flags of Config's knobs, made from its fields."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import Field, fields
from typing import Any, TypeVar

import click

from dadt.config import Config, flag

F = TypeVar("F", bound=Callable[..., Any])


def knobs(function: F) -> F:
    """Decorate a command with one flag per knob. A flag that is not given arrives as None."""
    for field in reversed(fields(Config)):
        function = _option(field)(function)
    return function


def config_of(given: dict[str, Any]) -> Config:
    """The flags that were given, else the DADT_* variables, else the defaults. Raises ConfigError."""
    config = Config.from_env()
    values = {field.name: getattr(config, field.name) for field in fields(Config)}
    chosen = {name: value for name, value in given.items() if name in values and value not in (None, ())}
    return Config(**{**values, **chosen})


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
    if isinstance(field.default, tuple):
        return click.option(*names, field.name, multiple=True, metavar=_metavar(field), **options)
    if isinstance(field.default, bool):
        return click.option(f"{name}/--no-{name[2:]}", field.name, **options)
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
