"""`dadt config show`: prints each setting's value, and where the value comes from."""

from __future__ import annotations

from typing import Any

import click

from dadt.config import Config
from dadt_cli.terminal import console
from dadt_cli.terminal.options import Brief, knobs, settings_of


@click.group()
def config() -> None:
    """Show all settings and where they come from."""


@config.command(
    cls=Brief, context_settings={"max_content_width": 110}, short_help="Print each setting, its value and its source."
)
@knobs
@click.option("--changed", is_flag=True, help="Leave out settings at their defaults.")
def show(changed: bool, **given: Any) -> int:
    """Print each setting, its value and its source, under these flags, this environment and --config.

    A flag wins over a DADT_* variable, which wins over the file that --config names. No other file is read.
    """
    settings = settings_of(given)
    # Creating a Config raises the same errors for wrong values as `dadt run`.
    made = Config(**{name: setting.value for name, setting in settings.items()})
    rows = [
        (name.replace("_", "-"), _text(getattr(made, name)), setting.source)
        for name, setting in settings.items()
        if not (changed and setting.source == "default")
    ]
    widths = [max((len(row[column]) for row in rows), default=0) for column in (0, 1)]
    lines = [f"{name:{widths[0]}}  {value:{widths[1]}}  {source}" for name, value, source in rows]
    console.text("\n".join(lines), stdout=True)
    return 0


def _text(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, tuple):
        # Show only the names of variables, since their values may be secrets.
        return (
            ",".join(name + ("=..." if equals else "") for name, equals, _ in (v.partition("=") for v in value)) or "-"
        )
    return f"{value:g}" if isinstance(value, float) else str(value) or "-"
