"""Loads templates of HTML pages. Values inserted into a template are always escaped, so they appear as text."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from dadt.errors import ConfigError

if TYPE_CHECKING:
    from jinja2 import Template


@cache
def template(path: Path, command: str) -> Template:
    """Load the template in a file. command: the `dadt` command that needs jinja2, for an error message. Raises
    ConfigError if jinja2 is not installed."""
    try:
        from jinja2 import Environment, StrictUndefined
    except ImportError as error:
        raise ConfigError(f"{command} needs jinja2, which comes with torch -> pip install jinja2") from error
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(path.read_text())
