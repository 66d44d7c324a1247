"""The connections between an agent and its workers, over real sockets."""

from __future__ import annotations

import os
import socket
from pathlib import Path

from harness.patience import await_that

from dadt.control import schema
from dadt.control.accept import Entrance, connect_to, listen_at
from dadt.control.frame import Frame, Link
from dadt.launch.agent.launcher_line import LauncherLine
from dadt.launch.agent.lines import Lines
from dadt.launch.agent.registry import Line


def test_an_answer_to_a_process_that_does_not_listen_counts_as_unsent(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    server = listen_at(tmp_path / "agent", 1)
    found: list[Line] = []
    heard: list[str] = []
    ended: list[int] = []
    launcher = LauncherLine(Link(reader, writer, schema.LAUNCHER))
    entrance = Entrance(server, lambda connection: None)
    lines = Lines(schema.WORKER, launcher, found.append, lambda line, frame: heard.append(frame.kind), ended.append)
    with connect_to(tmp_path / "agent") as worker, server:
        lines.accept(0, entrance)
        (line,) = found
        assert lines.answer(line.number, Frame("preempted"))
        worker.shutdown(socket.SHUT_RD)
        line.listens = True
        assert not lines.answer(line.number, Frame("save", {"patience": 0.0}))
        assert not line.listens
        worker.sendall(Frame("dump", {"rank": 0, "pid": os.getpid()}).encode())
        await_that(lambda: lines.read(line.number) or heard == ["dump"], "what the process still says is heard")
    lines.read(line.number)
    assert ended == [line.number]
    assert not lines.answer(line.number, Frame("preempted"))
    entrance.close()
    launcher.selector.close()
    os.close(reader)
    os.close(writer)
