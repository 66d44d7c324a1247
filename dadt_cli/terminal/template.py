"""Pages of HTML from templates. Whatever is put into one is text: it is escaped wherever it stands."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from dadt.errors import ConfigError

if TYPE_CHECKING:
    from jinja2 import Template


@cache
def template(path: Path, command: str) -> Template:
    """The template in this file. Raises ConfigError where the library is not there that the command needs."""
    try:
        from jinja2 import Environment, StrictUndefined
    except ImportError as error:
        raise ConfigError(f"{command} needs jinja2, which comes with torch -> pip install jinja2") from error
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(path.read_text())
