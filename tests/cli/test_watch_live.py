"""The live view: there while the job runs, in nobody's way, and gone at the end."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from harness.run import DADT, FOLDERS, left_of

pytest.importorskip("pyte")
from harness.patience import PATIENCE, SETTLE_SECONDS, await_that
from harness.terminal import Terminal

STEPS = """\
import os, sys, time
from dadt.control.agent_client import Control
from dadt.world import World
control = Control.connect(World.from_env())
rank = control.world.rank
control.hello(torch="2.13"); control.claim()
def step(number):
    control.progress(number, samples=32 * number, waited=0.02 * number, clock=0.1 * number)
def wait_for(name):
    while not os.path.exists(name): time.sleep(0.01)
"""
TRAIN = (
    STEPS
    + """\
print(f"begin of {rank}", flush=True)
number = 0
while not os.path.exists("go"):
    number += 1
    step(number)
    time.sleep(0.1)
print(f"end of {rank}", flush=True)
control.close()
"""
)
HEAD = re.compile(r"^rank +(host +)?step")


@pytest.fixture
def show(tmp_path: Path) -> Iterator[Callable[..., Terminal]]:
    """show(script, *arguments, width=, height=, env=) -> Terminal. `-np 2 train.py` where no arguments are given."""
    terminals: list[Terminal] = []

    def begin(script: str, *arguments: str, **options) -> Terminal:
        terminals.append(Terminal(tmp_path, script, list(arguments) or ["-np", "2", "train.py"], **options))
        return terminals[-1]

    yield begin
    for terminal in terminals:
        terminal.close()
    for job in (tmp_path / "dadt-logs").glob("*"):
        await_that(lambda job=job: not left_of(job.name), f"the end of {left_of(job.name)}", seconds=SETTLE_SECONDS)
        await_that(
            lambda job=job: not (FOLDERS / job.name).exists(),
            f"the end of {FOLDERS / job.name}",
            seconds=SETTLE_SECONDS,
        )


def has_view(lines: list[str]) -> bool:
    return any(HEAD.match(line) for line in lines)


def row(lines: list[str], rank: int) -> str:
    """The rank's line in the view; empty if there is none."""
    rows = [line for line in lines if re.match(rf" +>?{rank}  ", line)]
    return rows[-1] if rows else ""


def without_clutter(lines: list[str]) -> list[str]:
    """Without what dadt says at the begin and the end."""
    return [line for line in lines if not re.match(r"dadt: (\d+ workers? |warning: (\d+ workers|training)|done)", line)]


def test_the_view_shows_every_rank_and_is_gone_at_the_end(show):
    terminal = show(TRAIN, width=250)
    lines = terminal.see(
        lambda lines: re.search(r"\d+ +10 +3\d\d +20 %  +\d+ MiB  begin of 1", row(lines, 1)), "speeds"
    )
    title = next(line for line in lines if line.startswith("job "))
    assert re.fullmatch(r"job \w{4}: 2 workers on this host, algorithm pipe, executor shm, 0:\d\d", title)
    (terminal.folder / "go").touch()
    assert terminal.finish() == 0
    assert sorted(without_clutter(terminal.lines)) == [
        "[0] begin of 0",
        "[0] end of 0",
        "[1] begin of 1",
        "[1] end of 1",
    ]
    assert terminal.lines[-1].startswith("dadt: done in ")


def test_hosts_are_shown_where_there_are_several(show):
    terminal = show(TRAIN, "-np", "4", "-H", "localhost:2,127.0.0.1:2", "train.py")

    def have_steps(lines) -> bool:
        hosts = {0: "localhost", 3: "127.0.0.1"}
        return all(re.match(f" +{rank}  {host} +[1-9]", row(lines, rank)) for rank, host in hosts.items())

    lines = terminal.see(have_steps, "steps")
    assert any(" 4 workers on 2 hosts, " in line for line in lines)


def test_much_output_arrives_whole_and_in_order_above_the_view(show):
    script = TRAIN.replace("number = 0", 'for i in range(2000): print(f"line {i:04} of {rank}")\nnumber = 0')
    terminal = show(script)
    terminal.see(has_view, "a view")
    (terminal.folder / "go").touch()
    assert terminal.finish() == 0
    for rank in (0, 1):
        mine = [line for line in terminal.lines if line.startswith(f"[{rank}] line ")]
        assert mine == [f"[{rank}] line {i:04} of {rank}" for i in range(2000)]
    assert not has_view(terminal.lines)


def test_a_failure_stands_last_and_nothing_of_the_view(show):
    terminal = show(TRAIN + "if rank == 1: raise ValueError('bad label')")
    terminal.see(has_view, "a view")
    (terminal.folder / "go").touch()
    assert terminal.finish() == 1
    assert not has_view(terminal.lines)
    place = next(i for i, line in enumerate(terminal.lines) if line.startswith("dadt: worker 1 failed (exit code 1)"))
    assert any("cause   ValueError: bad label" in line for line in terminal.lines[place:])


def test_ctrl_c_leaves_a_clean_screen(show):
    terminal = show(TRAIN)
    terminal.see(lambda lines: "steps/s" in "\n".join(lines), "a view")
    terminal.type(b"\x03")
    assert terminal.finish() == 130
    assert not has_view(terminal.lines)
    assert terminal.lines[-1] == "dadt: ended by Ctrl-C; all workers stopped"


def test_a_second_ctrl_c_leaves_a_clean_screen(show):
    ignores = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)"
    terminal = show(TRAIN.replace("number = 0", ignores + "\nnumber = 0", 1))
    terminal.see(lambda lines: all(re.match(r" +>?\d +[1-9]", row(lines, rank)) for rank in (0, 1)), "steps")
    terminal.type(b"\x03")
    terminal.see(lambda lines: "once more: at once" in "\n".join(lines), "what a second one does")
    terminal.type(b"\x03")
    assert terminal.finish() == 130
    assert not has_view(terminal.lines)
    assert terminal.lines[-1] == "dadt: ended by Ctrl-C; all workers stopped"


def test_a_terminal_that_is_closed_ends_the_job_gently(show):
    gentle = "import signal; signal.signal(signal.SIGTERM, lambda *_: (open(f'saved{rank}', 'w').close(), sys.exit(0)))"
    terminal = show(TRAIN.replace("number = 0", gentle + "\nnumber = 0", 1))
    terminal.see(lambda lines: all(re.match(r" +>?\d +[1-9]", row(lines, rank)) for rank in (0, 1)), "steps")
    terminal.hang_up()
    assert terminal.process.wait(PATIENCE) == 129
    assert all((terminal.folder / f"saved{rank}").exists() for rank in (0, 1))


def test_of_many_ranks_the_rest_is_one_line(show):
    terminal = show(TRAIN, "-np", "16", "train.py", height=16)
    lines = terminal.see(lambda lines: any(line.startswith("and 9 ") for line in lines), "a folded view")
    assert sum(bool(re.match(r" +>?\d+  ", line)) for line in lines) == 7
    (terminal.folder / "go").touch()
    assert terminal.finish() == 0
    assert not has_view(terminal.lines)


@pytest.mark.sample(2)
@pytest.mark.parametrize("width", [60, 100, 20, 40])
def test_a_narrow_terminal_gets_fewer_columns_and_no_broken_rows(show, width):
    terminal = show(TRAIN, width=width)
    lines = terminal.see(lambda lines: re.search(r"^ +1 .*\d", row(lines, 1)), "a row")
    place = next(i for i, line in enumerate(lines) if HEAD.match(line))
    assert re.match(" +>?0 ", lines[place + 1]) and re.match(" +>?1 ", lines[place + 2])
    assert all(len(line) < width for line in lines[place:])
    (terminal.folder / "go").touch()
    assert terminal.finish() == 0
    assert not has_view(terminal.lines)


def test_a_terminal_may_grow(show):
    terminal = show(TRAIN, width=60)
    terminal.see(lambda lines: row(lines, 1) and "memory" not in "\n".join(lines), "a narrow view")
    terminal.resize(120, 40)
    terminal.see(lambda lines: "memory" in "\n".join(lines), "a wide view")
    (terminal.folder / "go").touch()
    assert terminal.finish() == 0
    assert not has_view(terminal.lines)


@pytest.mark.parametrize(
    ("arguments", "env"), [(["--live", "off"], {}), ([], {"TERM": "dumb"}), ([], {"DADT_LIVE": "off"})]
)
def test_there_need_not_be_a_view(show, arguments, env):
    terminal = show("print('plain')", *arguments, "-np", "1", "train.py", env=env)
    assert terminal.finish() == 0
    assert b"\x1b[" not in terminal.text.replace(b"\x1b[1m", b"").replace(b"\x1b[0m", b"")
    assert "[0] plain" in terminal.lines


BARS = (
    STEPS
    + """\
import sys
number = 0
while not os.path.exists("go"):
    number += 1
    step(number)
    sys.stderr.write(f"\\router {number}\\n\\rinner {number} of {rank}\\x1b[A"); sys.stderr.flush()
    time.sleep(0.05)
print("alike", flush=True)
sys.stderr.write("\\n\\r" + " " * 20 + "\\x1b[A\\router at its end\\n"); sys.stderr.flush()
control.close()
"""
)


def test_bars_move_in_the_view_and_leave_their_last_state(show):
    terminal = show(BARS, "-np", "2", "--output", "all", "train.py", width=120)
    for number in (3, 9):
        terminal.see(lambda lines, n=number: re.search(r"inner (\d+) of 1", row(lines, 1)) and _at(lines) >= n, "a bar")
    (terminal.folder / "go").touch()
    assert terminal.finish() == 0
    assert sorted(without_clutter(terminal.lines)) == [
        f"[{rank}] {line}" for rank in (0, 1) for line in ("alike", "outer at its end")
    ]


def _at(lines: list[str]) -> int:
    found = re.search(r"inner (\d+) of 1", row(lines, 1))
    return int(found[1]) if found else 0


def test_what_dadt_says_is_folded_between_words(show):
    folder = "a-folder-with-a-long-name/and-another-one"
    terminal = show("print('x')", "-np", "1", "--log-dir", folder, "train.py", width=60)
    assert terminal.finish() == 0
    first = next(line for line in terminal.lines if line.startswith("dadt: 1 worker"))
    rest = terminal.lines[terminal.lines.index(first) + 1]
    assert len(first) <= 60 and re.fullmatch(rf"      (\S+ )*{folder}/\w{{4}}\)", rest)


def test_rich_draws_its_bars_for_the_view(show, monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    told = 'import os; print(*map(os.environ.get, ("TTY_COMPATIBLE", "COLUMNS")))'
    assert "[0] 1 93" in _told(show(told, "-np", "1", "train.py", width=100))
    assert "[0] 0 70" in _told(show(told, "-np", "1", "-x", "COLUMNS=70", "train.py", env={"TTY_COMPATIBLE": "0"}))
    assert "[0] None None" in _told(show(told, "-np", "1", "--live", "off", "train.py"))


def _told(terminal: Terminal) -> list[str]:
    assert terminal.finish() == 0
    return terminal.lines


def test_of_a_bar_that_does_not_fit_the_figures_are_shown(show):
    bar = "print(f'\\rtrains  {number}%|####      | 3/9 [00:02<', end='', flush=True)"
    terminal = show(TRAIN.replace("    step(number)", f"    step(number); {bar}"), width=80)
    terminal.see(lambda lines: re.search(r"MiB  trains \d+% 3/9 \[00:02<$", row(lines, 1)), "a bar")
    (terminal.folder / "go").touch()
    assert terminal.finish() == 0


def test_no_color_is_respected(show):
    terminal = show(TRAIN, env={"NO_COLOR": "1"})
    terminal.see(lambda lines: row(lines, 1), "a view")
    assert not re.search(rb"\x1b\[[0-9;]*3[0-7]m", terminal.text)


def test_a_view_needs_a_terminal(tmp_path):
    (tmp_path / "train.py").write_text("")
    command = [*DADT, "run", "--live", "on", "-np", "1", "train.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 2
    assert done.stderr == "dadt: --live on: stderr is no terminal; leave it out, or give auto\n"
