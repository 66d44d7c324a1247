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
    chosen = {name: value for name, value in given.items() if name in values and value is not None}
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
    text = f"{field.metadata['help']}  [default: {_shown(field.default)}]"
    options: dict[str, Any] = {"default": None, "help": text, "hidden": field.metadata["advanced"]}
    if isinstance(field.default, bool):
        return click.option(f"{name}/--no-{name[2:]}", field.name, **options)
    if field.metadata["choices"]:
        return click.option(name, field.name, type=click.Choice(field.metadata["choices"]), **options)
    return click.option(name, field.name, type=type(field.default), metavar=_metavar(field), **options)


def _metavar(field: Field[Any]) -> str:
    names = {int: "N", float: "X", str: "TEXT"}
    return names[type(field.default)]


def _shown(default: object) -> str:
    if isinstance(default, bool):
        return "on" if default else "off"
    return f"{default:g}" if isinstance(default, float) else str(default) or "none"
