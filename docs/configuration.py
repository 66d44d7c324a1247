"""Writes docs/configuration.md from dadt.config.Config."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from dadt.config import Config, flag, variable

PAGE = Path(__file__).with_suffix(".md")
HEAD = """\
# Configuration

<!-- Written by docs/configuration.py from dadt.config.Config: `make format` brings it up to date. -->

Every setting is a flag of `dadt run` and a variable; the flag wins. Settings are fixed for a job and the same on
every rank. Options that concern the launcher alone (`--output`, `--log-dir`, ...) are on [launching](launching.md).
"""


def row(field: dataclasses.Field[object]) -> str:
    default, choices = field.default, field.metadata["choices"]
    name = flag(field.name)
    if isinstance(default, bool):
        name, default = f"{name}` / `--no-{name[2:]}", int(default)
    text = field.metadata["help"]
    if choices:
        text += " One of " + ", ".join(f"`{choice}`" for choice in choices) + "."
    return f"| `{name}` | `{variable(field.name)}` | {f'`{default}`' if default != '' else ''} | {text} |"


def page() -> str:
    parts = [HEAD]
    for title, advanced in (("Usual", False), ("Advanced", True)):
        rows = [row(field) for field in dataclasses.fields(Config) if field.metadata["advanced"] is advanced]
        parts.append(f"## {title}\n\n| Flag | Variable | Default | |\n|---|---|---|---|\n" + "\n".join(rows) + "\n")
    return "\n".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page())
