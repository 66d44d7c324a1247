"""Rank 0 reads what the launcher could; the others read nothing, from a terminal of the same size."""

from __future__ import annotations

import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest
from harness.patience import PATIENCE
from harness.run import DADT

ASKS = """\
import os, sys
rank = os.environ["DADT_RANK"]
looked = os.popen("stty size 2>&1").read().strip()
try:
    name = input("name? ")
except EOFError:
    name = "none"
print(f"rank {rank}, size {looked}, name {name}, then {sys.stdin.read()!r}", flush=True)
"""


def test_rank_0_asks_at_the_terminal_and_all_know_its_size(tmp_path: Path) -> None:
    pytest.importorskip("pyte")
    from harness.terminal import Terminal

    terminal = Terminal(tmp_path, ASKS, ["-np", "3", "train.py"], width=97, height=31)
    try:
        for rank in (1, 2):
            said = f"rank {rank}, size 31 97, name none, then ''"
            terminal.see(lambda lines, said=said: said in "".join(lines), said)
        terminal.type(b"Ada\n")
        terminal.type(b"\x04")
        terminal.see(lambda lines: "rank 0, size 31 97, name Ada, then ''" in "".join(lines), "the name")
        assert terminal.finish() == 0
    finally:
        terminal.close()


def test_rank_0_reads_a_pipe_to_its_end(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(ASKS)
    done = subprocess.run(
        [*DADT, "run", "-np", "2", "train.py"],
        cwd=tmp_path, input="Ada\nand more", text=True, capture_output=True, timeout=PATIENCE, check=True,
    )  # fmt: skip
    assert "name Ada, then 'and more'" in done.stdout
    assert "name none, then ''" in done.stdout


@pytest.mark.parametrize("in_background", [False, True])
def test_a_job_in_the_background_leaves_the_terminal_to_the_shell(in_background: bool) -> None:
    code = "from dadt.launch.start.standard_input import of_launcher\nwith of_launcher() as given: print(len(given))"
    master, terminal = pty.openpty()

    def begin() -> None:
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)
        if in_background and os.fork():
            os._exit(os.waitstatus_to_exitcode(os.wait()[1]))  # the leader stays in the foreground until then
        if in_background:
            os.setpgrp()

    done = subprocess.run(
        [sys.executable, "-c", code],
        stdin=terminal, capture_output=True, start_new_session=True, preexec_fn=begin, timeout=PATIENCE, check=True,
    )  # fmt: skip
    os.close(terminal)
    os.close(master)
    assert done.stdout.strip() == (b"0" if in_background else b"1")


def test_without_a_pseudo_terminal_the_others_read_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    from dadt.launch.start.standard_input import NoInput

    assert struct.unpack("HHHH", fcntl.ioctl(NoInput([5, 6]), termios.TIOCGWINSZ, bytes(8)))[:2] == (5, 6)
    monkeypatch.setattr(os, "openpty", lambda: (_ for _ in ()).throw(OSError()))
    assert os.read(NoInput([5, 6]).fileno(), 1) == b""
