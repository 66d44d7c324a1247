"""Writes Markdown tables, and the sections of docs/results that are made by commands."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def table(head: Sequence[str], lines: Sequence[Sequence[object]]) -> str:
    rows = [head, ["---"] * len(head), *lines]
    return "".join(f"| {' | '.join(map(str, row))} |\n" for row in rows)


def spread(middle: float, low: float, high: float, form: str = ".2f") -> str:
    """Return a figure with its interval, such as 1.02 (0.98 to 1.13)."""
    return f"{middle:{form}} ({low:{form}} to {high:{form}})"


def put(page: Path, section: str, text: str) -> None:
    """Replace the section of this name, between its two comments on the page. A page that does not exist is created
    with this section.

    Raises ValueError if the page has no such section.
    """
    begin, end = f"<!-- {section} -->", f"<!-- end of {section} -->"
    old = page.read_text() if page.exists() else f"{begin}{end}\n"
    pattern = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.S)
    if not pattern.search(old):
        raise ValueError(f"{page}: has no section between {begin} and {end}")
    page.write_text(pattern.sub(lambda _: f"{begin}\n{text.strip()}\n{end}", old))


def publish(study: Any, text: str, section: str, json_file: Path | None, page: Path | None) -> None:
    """Print the text of a study, write the study to a JSON file, and put the text into a page's section; None for no
    file or page."""
    if json_file:
        json_file.write_text(json.dumps(study, indent=1) + "\n")
    print(text)
    if page:
        put(page, section, text)


def read(page: Path, section: str) -> list[list[dict[str, str]]]:
    """Return the tables in the section of this name: for each line its cells, by the words of the head; of equal words
    the first counts."""
    begin, end = f"<!-- {section} -->", f"<!-- end of {section} -->"
    tables = re.findall(r"(?:^\|.*\n)+", page.read_text().partition(begin)[2].partition(end)[0], re.MULTILINE)
    cells = [[[cell.strip() for cell in row[1:-1].split("|")] for row in each.splitlines()] for each in tables]
    return [[dict(reversed([*zip(head, row, strict=True)])) for row in rows] for head, _, *rows in cells]
