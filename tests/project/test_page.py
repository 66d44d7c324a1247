"""README and docs: what they tell the user to type works, and prints what they say."""

from __future__ import annotations

import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import click
import pytest
from harness import ROOT, forkserver
from harness.patience import PATIENCE

import dadt_cli
from dadt_cli import COMMANDS, dadt_command

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
SITE = [*PAGES[1:], *sorted((ROOT / "docs" / "results").glob("*.md"))]
INCLUDED = runpy.run_path(str(ROOT / "docs" / "include.py"))["included"]
READING = re.compile(r"\A# .+\n\n\*([^*]+?)\s+Reading\s+time:\s+(\d+)\s+minutes?\.\*\n")
WORDS_PER_MINUTE = 220
WIDTH = 120
BLOCK = re.compile(r"<!-- (?P<mark>runnable|file): ?(?P<value>.*?) ?-->\n```\w+\n(?P<text>.*?)```", re.S)
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z-]+")
EXAMPLE_FLAGS = {"--epochs"}
FOREIGN_FLAGS = {
    "architecture.md": {"--kind"},
    "benchmarks.md": {
        "--budget-minutes",
        "--families",
        "--jobs",
        "--only",
        "--others",
        "--ranks",
        "--seeds",
        "--write",
    },
    "compatibility.md": {"--dummy", "--multirun"},
    "configuration.md": {"--local", "--mca"},
    "errors.md": {"--connect", "--head", "--privileged"},
    "from-horovod.md": {
        *("--autotune", "--binding-args", "--blacklist-cooldown-range", "--cache-capacity", "--check-build"),
        *("--config-file", "--disable-cache", "--elastic-timeout", "--fusion-threshold-mb", "--gloo", "--jsrun"),
        *("--gloo-timeout-seconds", "--hierarchical-allgather", "--hierarchical-allreduce", "--log-hide-timestamp"),
        *("--log-level", "--log-with-timestamp", "--max-np", "--mpi", "--mpi-threads-disable", "--no-stall-check"),
        *("--num-nccl-streams", "--prefix-output-with-timestamp", "--reset-limit", "--slots-per-host"),
        *("--stall-check-shutdown-time-seconds", "--tcp", "--thread-affinity", "--timeline-mark-cycles"),
        "--torus-allreduce",
    },
    "examples.md": {
        *(
            "--amp",
            "--batch-size",
            "--data",
            "--depth",
            "--length",
            "--lr",
            "--nproc-per-node",
            "--resume",
        ),
        *("--size", "--speakers", "--steps", "--synthetic", "--width", "--workers"),
    },
    "executors.md": {"--mpi"},
    "ray.md": {"--address", "--head", "--working-dir"},
    "from-ddp.md": {
        *("--local", "--max-restarts", "--nproc-per-node", "--rdzv-endpoint", "--redirects", "--run-path", "--tee"),
        *("--local-ranks-filter", "--standalone"),
    },
    "from-deepspeed.md": {"--enable", "--local", "--master", "--no", "--node", "--num", "--ssh"},
    "install.md": {"--index-url"},
    "injection.md": {"--init", "--local", "--world"},
    "kubernetes.md": {"--from-literal", "--image", "--prefix", "--restart", "--rm", "--tail"},
    "launching.md": {"--local"},
    "metrics.md": {"--logdir"},
    "mpi.md": {"--mca", "--nproc-per-node"},
    "ssh.md": {"--upgrade"},
    "slurm.md": {
        *(
            "--array",
            "--cpus-per-task",
            "--full",
            "--nodes",
            "--ntasks",
            "--ntasks-per-node",
            "--open-mode",
            "--requeue",
        ),
        *("--requeue", "--signal", "--time"),
    },
}
"""Of other programs, as torchrun, sbatch, ssh, a script of the page or a module that is run."""
LINK = re.compile(r"\]\((?!https?://|#)([^)#]+)")
SLOW = {"from-ddp.md", "from-deepspeed.md", "from-horovod.md", "keras.md", "launching.md"}
OURS = rf"dadt (?:{'|'.join(COMMANDS)})\b"
SHOWN = re.compile(rf"^(?:    )?(?:\w*\$ |exec )?(?:[A-Z_]+=\S+ )*({OURS}.*)$", re.M)
INLINE = re.compile(rf"(?<!`)`({OURS}[^`]*)`")
PLACEHOLDER = re.compile(r"\[[a-z ]+\]|\.\.\.|…")
STANDS_FOR = {"N": "2", "MODEL": "mlp"}
REMARK = re.compile(r"\s{3,}\S.*")
MAKE = re.compile(r"^(?:\$ |    )make (\S+)", re.M)


@dataclass
class Command:
    """A line after `$`, and what the page shows below it."""

    text: str
    output: list[str] = field(default_factory=list)


def blocks(page: Path) -> list[tuple[str, str, str]]:
    text = INCLUDED(page.read_text()).replace("<!-- runnable -->", "<!-- runnable: -->")
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


def page_case(page: Path) -> object:
    """As a test of its own; those that only show what other tests hold are for `make test-slow`."""
    return pytest.param(page, id=page.name, marks=[pytest.mark.slow] if page.name in SLOW else [])


def test_there_are_runnable_pages() -> None:
    assert {"README.md", "quickstart.md", "launching.md"} <= {page.name for page in RUNNABLE}


@pytest.mark.parametrize("page", [page_case(page) for page in RUNNABLE])
def test_commands_do_what_the_page_says(
    page: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    dadt = sys.executable if page.name == "README.md" else forkserver.dadt()  # as its readers run it
    monkeypatch.setenv("PATH", f"{Path(dadt).parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    for mark, value, text in blocks(page):
        if mark == "file":
            (tmp_path / value).write_text(text)
            continue
        expected = int(value.removeprefix("exit ") or 0)
        for command in commands(text):
            # One epoch prints what each of them prints, but for the numbers.
            given = re.sub(r"--epochs \d+", "--epochs 1", command.text)
            if given.startswith("dadt compare"):  # needs torch, which this process has
                monkeypatch.setattr(sys, "argv", shlex.split(given))
                code = dadt_cli._run()
            else:
                code = subprocess.run(given, shell=True, stderr=subprocess.STDOUT, timeout=PATIENCE).returncode
            output = "".join(capfd.readouterr())
            assert code == expected, f"{given}\n{output}"
            printed = {pattern(line) for line in output.splitlines()}
            missing = [line for line in command.output if pattern(line) not in printed]
            assert not missing, f"{given} does not print {missing}, but\n{output}"


def words(text: str) -> list[str]:
    """Of a command after `dadt`, without remarks and what stands for the user's own."""
    plain = PLACEHOLDER.sub("", REMARK.sub("", text))
    return [STANDS_FOR.get(word, word) for word in shlex.split(plain, comments=True)[1:]]


def make_what_it_names(given: list[str], folder: Path) -> None:
    """Scripts, modules, classes and lists of hosts, as far as `dadt run --dry-run` looks at them."""
    for option, word in zip(["", *given], given, strict=False):
        name, _, cls = word.partition(":")
        if option == "--hostfile":
            (folder / word).write_text("host1 slots=2\n")
        elif option == "--config":
            (folder / word).write_text("warmup-steps: 50\n")
        elif option in ("--no-python", "--host-discovery-script"):
            (folder / word).write_text("#!/bin/sh\necho host1:8\n")
            (folder / word).chmod(0o755)
        elif word.endswith((".py", ".sh")):
            (folder / word).parent.mkdir(parents=True, exist_ok=True)
            (folder / word).touch()
        elif option == "-m" or re.fullmatch(r"[a-z.]+:[A-Z]\w+", word):
            module = folder / f"{name.replace('.', '/')}.py"
            module.parent.mkdir(parents=True, exist_ok=True)
            module.write_text(f"class {cls}: ..." if cls else "")


def plan(given: list[str], folder: Path) -> None:
    """`dadt run --dry-run`, which says what is wrong with flags, values, hosts and scripts."""
    make_what_it_names(given, folder)
    if not {"-np", "-H", "--hostfile"} & set(given):
        given = ["-np", "2", *given]  # elsewhere a Slurm allocation says how many
    mpi = "mpi" in (given[at + 1] for at, word in enumerate(given) if word in ("--launcher", "--executor"))
    if (mpi and shutil.which("mpirun") is None) or "ray" in given:
        parse(["run", *given])
    else:
        assert not dadt_command.main(["run", "--dry-run", *given], prog_name="dadt", standalone_mode=False)


def parse(given: list[str]) -> None:
    """Flags and the values that they take; the rest may be left out."""
    command: click.Command = dadt_command
    context = click.Context(command)
    while isinstance(command, click.Group) and given and given[0] != "--help":
        if given[0].startswith("--model"):
            given = ["model", *given]  # of `dadt bench`, which has a command for it
        found = command.get_command(context, given[0])
        assert found, f"there is no {given[0]}"
        command, given = found, given[1:]
    try:
        command.make_context(command.name, list(given))
    except (click.MissingParameter, click.exceptions.Exit, click.exceptions.NoArgsIsHelpError):
        pass  # named without its arguments, or --help


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_can_be_given(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("DADT_SECRET", "0123456789abcdef")  # as the pages say before such a command
    text = page.read_text()
    for line in SHOWN.findall(text):
        given = words(line)
        try:
            if given[0] == "run":
                plan(given[1:], tmp_path)
            else:
                parse(given)
        except Exception as error:
            pytest.fail(f"{line}: {error}")
    for line in INLINE.findall(text):
        try:
            parse(words(line))
        except Exception as error:
            pytest.fail(f"{line}: {error}")
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M))
    assert set(MAKE.findall(text)) <= targets


def test_links_lead_somewhere() -> None:
    pages = [*PAGES, ROOT / "CONTRIBUTING.md"]
    found = {page: set(LINK.findall(page.read_text())) for page in pages}
    dead = [(page.name, link) for page, links in found.items() for link in links if not (page.parent / link).exists()]
    assert not dead


def flags(command: click.Command) -> set[str]:
    """All options of a command and of those below it."""
    known = {name for each in command.params for name in (*each.opts, *each.secondary_opts)} | {"--help"}
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in [*command.list_commands(context), "model"]:
            if found := command.get_command(context, name):
                known |= flags(found)
    return known


def test_flags_exist() -> None:
    known = EXAMPLE_FLAGS | flags(dadt_command)
    strangers = {
        page.name: found
        for page in PAGES
        if (found := set(FLAG.findall(page.read_text())) - known - FOREIGN_FLAGS.get(page.name, set()))
    }
    assert not strangers


PATH = re.compile(r"(?<![\w/.-])((?:dadt|dadt_cli|csrc|examples|tests|benchmarks)/[\w/.-]*\w)(?![\w(*])")
TO_COME = re.compile(r"dadt/frontends|dadt/.*/mine\.py")
"""What CONTRIBUTING.md says how to add."""


def test_paths_exist() -> None:
    pages = [*PAGES, ROOT / "CONTRIBUTING.md"]
    named = {(page.name, path) for page in pages for path in PATH.findall(page.read_text())}
    missing = [(page, path) for page, path in sorted(named) if not (ROOT / path).exists()]
    assert not [(page, path) for page, path in missing if not TO_COME.fullmatch(path)]


def test_results_are_listed() -> None:
    listed = (ROOT / "docs" / "benchmarks.md").read_text()
    missing = [p.name for p in (ROOT / "docs" / "results").glob("*") if p.name not in listed]
    assert not missing, "name each file of docs/results in docs/benchmarks.md"


@pytest.mark.parametrize("script", [ROOT / "docs" / f"{name}.py" for name in ("api", "configuration")], ids=str)
def test_written_pages_are_what_their_scripts_write(script: Path) -> None:
    assert script.with_suffix(".md").read_text() == runpy.run_path(str(script))["page"](), "run `make format`"


def without_code(text: str) -> str:
    text = re.sub(r"^ *```.*?^ *```", "", text, flags=re.S | re.M)
    return re.sub(r"^    (?! *[-*\d]).*$", "", text, flags=re.M)


def test_pages_begin_with_what_they_are_for_and_how_long_they_take() -> None:
    for page in SITE:
        text = page.read_text()
        found = READING.match(text)
        assert found, f"{page.name}, after the title: *What it is for. Reading time: N minutes.*"
        assert len(found[1].split()) >= 4, page.name
        minutes = len(re.findall(r"[^\W\d_]{2,}", without_code(text))) / WORDS_PER_MINUTE
        told = f"{page.name} takes about {max(1, round(minutes))} minutes"
        assert abs(int(found[2]) - minutes) <= max(1.0, 0.3 * minutes), told


def test_no_line_of_prose_is_too_long() -> None:
    """Tables, code, and what cannot be broken, as a link, are left alone."""
    whole = re.compile(r" *(?:[-*] |\d+\. )?(?:`[^`]*`|\[[^\]]*\]\([^)]*\)|[^\s`])+")
    for page in [*SITE, ROOT / "README.md"]:
        long = [line for line in without_code(page.read_text()).splitlines() if len(line) > WIDTH and line[:1] != "|"]
        assert not [line for line in long if not whole.fullmatch(line)], page.name
