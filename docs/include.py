"""A hook of mkdocs: puts a file in place of a line `# include: path`, as pages share scripts."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
LINE = re.compile(r"^# include: (\S+)$", re.M)


def included(text: str) -> str:
    """The page's text with the files that it names. Raises OSError where one is missing."""
    return LINE.sub(lambda found: (ROOT / found[1]).read_text().rstrip("\n"), text)


def on_page_markdown(markdown: str, **_: Any) -> str:
    return included(markdown)
