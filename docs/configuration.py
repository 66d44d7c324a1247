"""Writes docs/configuration.md from dadt.config.Config."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from dadt.config import Config
from dadt.config.check import flag, variable

PAGE = Path(__file__).with_suffix(".md")
GROUPS = (
    ("Where and how workers are started", True, False),
    ("Where and how workers are started: advanced", True, True),
    ("Training", False, False),
    ("Training: advanced", False, True),
)
HEAD = """\
# Configuration

*For looking up a setting: its flag, its variable, its default and what it does. Reading time: 7 minutes.*

<!-- Written by docs/configuration.py from dadt.config.Config: `make format` brings it up to date. -->

Every setting is a flag of `dadt run`, an environment variable, and a key of the YAML file that `--config` names. The
key is the name of the flag without the leading dashes (`warmup-steps: 50`). A flag wins over a variable, which wins
over the file; no other file is read. Settings are fixed for a job and the same on every rank. `dadt config show` prints
each setting, its value and its source.
"""


def row(field: dataclasses.Field[object]) -> str:
    default, choices = field.default, field.metadata["choices"]
    name = flag(field.name)
    if isinstance(default, bool):
        name, default = f"{name}` / `--no-{name[2:]}", int(default)
    names = [*(short for short in field.metadata["flags"] if short.startswith("-")), name]
    text = field.metadata["help"]
    if choices:
        text += " One of " + ", ".join(f"`{choice}`" for choice in choices) + "."
    shown = "" if default in ("", ()) else f"`{default}`"
    flags = ", ".join(f"`{each}`" for each in names)
    return f"| {flags} | `{variable(field.name)}` | {shown} | {text} |"


def page() -> str:
    parts = [HEAD]
    for title, launch, advanced in GROUPS:
        rows = [
            row(field)
            for field in dataclasses.fields(Config)
            if (field.metadata["launch"], field.metadata["advanced"]) == (launch, advanced)
        ]
        parts.append(f"## {title}\n\n| Flag | Variable | Default | |\n|---|---|---|---|\n" + "\n".join(rows) + "\n")
    return "\n".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page())
