"""README and docs: what they tell the user to type works, and prints what they say."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"<!-- (?P<mark>runnable|file): ?(?P<value>.*?) ?-->\n```\w+\n(?P<text>.*?)```", re.S)
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z-]+")
EXAMPLE_FLAGS = {"--epochs"}
FOREIGN_FLAGS = {
    "benchmarks.md": {"--budget-minutes", "--families", "--jobs", "--others", "--ranks", "--seeds"},
    "executors.md": {"--mpi"},
    "injection.md": {"--init", "--world"},
    "mpi.md": {"--nproc-per-node"},
    "slurm.md": {"--array", "--cpus-per-task", "--nodes", "--ntasks", "--ntasks-per-node", "--signal", "--time"},
}
"""Of other programs, as torchrun, sbatch, ssh, a script of the page or a module that is run."""
LINK = re.compile(r"\]\((?!https?://|#)([^)#]+)")


@dataclass
class Command:
    """A line after `$`, and what the page shows below it."""

    text: str
    output: list[str] = field(default_factory=list)


def blocks(page: Path) -> list[tuple[str, str, str]]:
    text = page.read_text().replace("<!-- runnable -->", "<!-- runnable: -->")
    return [(m["mark"], m["value"], m["text"]) for m in BLOCK.finditer(text)]


def commands(text: str) -> Iterator[Command]:
    command = None
    for line in text.splitlines():
        if line.startswith("$ "):
            if command:
                yield command
            command = Command(line[2:])
        elif command and line != "...":
            command.output.append(line)
    if command:
        yield command


def pattern(line: str) -> str:
    """What must stay of a line of output: not numbers, nor how wide they make a column, nor the job's id."""
    line = re.sub(r"job \w+|dadt-logs/\w+", "job", line)
    return re.sub(r"\s+", " ", re.sub(r"\d[\d.,]*", "0", line)).strip()


RUNNABLE = [page for page in PAGES if any(mark == "runnable" for mark, _, _ in blocks(page))]


def test_there_are_runnable_pages() -> None:
    assert {"README.md", "quickstart.md", "launching.md"} <= {page.name for page in RUNNABLE}


@pytest.mark.parametrize("page", RUNNABLE, ids=lambda page: page.name)
def test_commands_do_what_the_page_says(page: Path, tmp_path: Path) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    for mark, value, text in blocks(page):
        if mark == "file":
            (tmp_path / value).write_text(text)
            continue
        expected = int(value.removeprefix("exit ") or 0)
        for command in commands(text):
            done = subprocess.run(
                command.text,
                shell=True,
                cwd=tmp_path,
                env={**os.environ, "PATH": path},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=150,
            )
            assert done.returncode == expected, f"{command.text}\n{done.stdout}"
            printed = {pattern(line) for line in done.stdout.splitlines()}
            missing = [line for line in command.output if pattern(line) not in printed]
            assert not missing, f"{command.text} does not print {missing}, but\n{done.stdout}"


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CONTRIBUTING.md"], ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    dead = [link for link in LINK.findall(page.read_text()) if not (page.parent / link).exists()]
    assert not dead


@pytest.mark.parametrize("name", ["configuration", "api"])
def test_generated_pages_are_fresh(name: str) -> None:
    script = f"import sys; sys.path.insert(0, 'docs'); import {name} as it; sys.stdout.write(it.page())"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    page = (ROOT / "docs" / f"{name}.md").read_text()
    assert page == done.stdout, "run `make format`"


def test_flags_exist() -> None:
    helps = [
        ["run", "--help-all"],
        ["--help"],
        ["bench", "allreduce", "--help"],
        ["bench", "step", "--help"],
        ["logs", "--help"],
        ["compare", "--help"],
        ["config", "show", "--help"],
        ["check-env", "--help-all"],
    ]
    known = set(EXAMPLE_FLAGS)
    for arguments in helps:
        command = [sys.executable, "-m", "dadt_cli", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
        known.update(FLAG.findall(done.stdout))
    for page in PAGES:
        strangers = set(FLAG.findall(page.read_text())) - known - FOREIGN_FLAGS.get(page.name, set())
        assert not strangers, page.name


def test_results_are_listed() -> None:
    listed = (ROOT / "docs" / "benchmarks.md").read_text()
    missing = [p.name for p in (ROOT / "docs" / "results").glob("*") if p.name not in listed]
    assert not missing, "name each file of docs/results in docs/benchmarks.md"
