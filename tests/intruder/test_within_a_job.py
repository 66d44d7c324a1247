"""A process of the job, or of its user, that says what it may not say: to its agent, and to the launcher."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from harness.jobs import SEED, TRAIN, assert_flat, held, refusals, weights
from harness.patience import PATIENCE, await_that
from harness.run import FOLDERS, Run

from dadt.control.frame import LENGTHS, Frame

# Rank 1 does this in the middle of its training; `agent` is its own line, `told(text)` says it there and waits until
# the agent has hung up.
ATTACK = r"""
import json, struct, sys
def line():
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(os.environ["DADT_AGENT"] + "." + os.environ["DADT_LOCAL_RANK"])
    connection.settimeout(20)
    return connection
def frame(header, body=b"", announced=None):
    header = json.dumps(header).encode() if isinstance(header, dict) else header
    return struct.pack(">II", len(header), len(body) if announced is None else announced) + header + body
def told(data):
    with line() as connection:
        try:
            connection.sendall(data)
            while connection.recv(4096):
                pass
        except ConnectionError:
            pass
me = {"rank": 1, "pid": os.getpid()}
other = {**me, "rank": 0}
failure = {"type": "E", "message": "", "frames": [], "step": 1, "secondary": False, "thread": "", "time": 1.0}
def attack():
    for kind in ("end", "exit", "lost", "beat", "ready", "connected", "__class__", "judge", "x" * 100_000):
        told(frame({"kind": kind, **me}))
    told(frame({"kind": "end", "stuck": [], "signal": 0}))
    told(frame({"kind": "exit", "rank": 1, "code": 0, "time": 1.0, "step": 99, "peak_memory": 1, "memory_limit": 1,
                "memory_kills": 0, "stopped": False}))
    told(frame({"kind": "failed", **other, **failure}))
    told(frame({"kind": "ending", **other, "steps": 5, "gathered": 0}))
    told(frame({"kind": "exchange", **me, "timeout": "soon", "key": "a"}))
    told(frame({"kind": "stacks", **me, "path": "/etc/passwd", "signal": 10}))
    told(frame({"kind": "stacks", **me, "pid": -1, "path": "x", "signal": 9}))
    told(frame({"kind": "say", **me, "text": "x" * 70_000, "level": "info"}))
    told(frame(b"[" * 200_000))
    told(frame(b"\xff\xfe"))
    told(struct.pack(">II", 1 << 30, 1 << 30))
    told(frame({"kind": "exchange", **me, "timeout": 1.0, "key": "a"}, announced=1 << 30))
    told(frame({"kind": "result", **me, "timeout": 1.0}, announced=1 << 20))
    told(b"GET / HTTP/1.1\r\n\r\n")
    flood = []
    for _ in range(300):
        flood.append(line())
        try:
            flood[-1].send(b"half")
        except ConnectionError:
            pass
"""
WITHIN = TRAIN.format("import socket" + ATTACK).replace(
    "    if step == 30:\n",
    "    if step == 30:\n"
    "        if os.environ['RANK'] == '1' and not pathlib.Path('alone').exists():\n"
    "            attack()\n"
    "            pathlib.Path('attacked').touch()\n",
)


def test_a_worker_speaks_for_nobody_else_and_ends_nothing(start: Callable[..., Run], tmp_path: Path) -> None:
    flags = ("-np", "3", *SEED, "train.py")
    result = start(WITHIN, *flags).finish()
    assert result.code == 0, result.err
    told = refusals(tmp_path)
    for text in (
        "'end' is nothing that a worker may say",
        "'judge' is nothing that a worker may say",
        "'failed' for rank 0 came from a process of rank 1",
        "'ending' for rank 0 came from a process of rank 1",
        "'timeout' of 'exchange' is not what a worker may say: 'soon'",
        "/etc/passwd is no file for stacks in the folder of the job",
        "'pid' of 'stacks' is not what a worker may say: -1",
        "'exchange' of a worker announces 1,073,741,824 bytes; 67,108,864 is the most",
        "'result' is nothing that a worker may say",
    ):
        assert text in told, told
    assert sum("expected a frame of a worker" in text for text in told) == 4, told
    (ended_with,) = weights(result.out.decode())
    # The same job, left alone.
    for name in ("half0", "half1", "half2"):
        (tmp_path / name).unlink()
    (tmp_path / "alone").touch()
    alone = start(WITHIN, *flags).finish()
    assert weights(alone.out.decode()) == {ended_with}, alone.err


def head(header: bytes, announced: int = 0) -> bytes:
    return LENGTHS.pack(len(header), announced) + header


CALLS = {
    "no JSON": head(b"{"),
    "no object": head(b"[]"),
    "no kind": head(b"{}"),
    "no question": Frame("end").encode(),
    "a deep nest": head(b"[" * 200_000),
    "no ranks": Frame("stacks").encode(),
    "ranks that are none": Frame("stacks", {"ranks": ["0"]}).encode(),
    "a rank below 0": Frame("stacks", {"ranks": [-1]}).encode(),
    "a long header": LENGTHS.pack(1 << 30, 0),
    "a body": head(b'{"kind": "describe"}', 1 << 30),
    "another program": b"GET / HTTP/1.1\r\n\r\n",
    "many questions at once": Frame("stacks", {"ranks": None}).encode() * 50,
}


@pytest.mark.alone
def test_the_launcher_outlives_its_callers(start: Callable[..., Run], tmp_path: Path) -> None:
    run = start(TRAIN.format(""), "-np", "2", *SEED, "train.py")
    run.wait_for("half0", "half1")
    path = FOLDERS / run.job / "launcher"
    before = held([run.process.pid])
    for what, said in CALLS.items():
        with socket.socket(socket.AF_UNIX) as caller:
            caller.connect(str(path))
            caller.settimeout(PATIENCE)
            caller.sendall(said)
            try:
                while caller.recv(1 << 16):
                    pass  # until it hangs up
            except ConnectionResetError:
                pass
            except TimeoutError:
                pytest.fail(f"{what}: the connection was not closed")
    flood = [socket.socket(socket.AF_UNIX) for _ in range(300)]
    try:
        for caller in flood:
            caller.connect(str(path))
        dadt = str(Path(sys.executable).with_name("dadt"))
        asked = subprocess.run([dadt, "ps"], capture_output=True, text=True, timeout=PATIENCE)
        assert run.job in asked.stdout, asked.stdout + asked.stderr
    finally:
        for caller in flood:
            caller.close()
    await_that(lambda: held([run.process.pid])[0][0] <= before[0][0] + 3, "the end of the flood")
    assert_flat(before, held([run.process.pid]))
    (tmp_path / "attacked").touch()
    result = run.finish()
    assert result.code == 0, result.err
    assert len(weights(result.out.decode())) == 1
    told = refusals(tmp_path)
    assert "'end' is nothing that a caller may say" in told
    assert "a caller asked on without waiting for the answers" in told
    assert sum("a caller" in text for text in told) >= len(CALLS) - 1, told


NOBODY = 65534
"""A user who may not do anything."""


def seen_by_another_user(job: str, logs: Path) -> list[str]:
    """What is open to it of this job."""
    reader, writer = os.pipe()
    child = os.fork()  # no program of this user's need be readable for the other one
    if child == 0:
        try:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            os.write(writer, json.dumps(_tried(job, logs)).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as told:
        seen: list[str] = json.loads(told.read())
    os.waitpid(child, 0)
    return seen


def _tried(job: str, logs: Path) -> list[str]:
    def connect(name: str) -> None:
        with socket.socket(socket.AF_UNIX) as line:
            line.connect(name)

    sockets = [str(FOLDERS / folder / name) for folder in (job, f"{job}.0") for name in ("launcher", "agent.0")]
    unix = (line.split()[-1] for line in Path("/proc/net/unix").read_text().splitlines())
    sockets += ["\0" + name[1:] for name in unix if name.startswith("@dadt")]
    files = [logs / name for name in ("events.jsonl", "report.json", "rank0.log", "progress.jsonl")]
    attempts: list[tuple[str, Callable[[], object]]] = [
        *((name, partial(connect, name)) for name in sockets),
        *((str(folder), partial(os.listdir, folder)) for folder in (FOLDERS, logs, logs.parent)),
        *((str(file), file.read_bytes) for file in files),
    ]
    seen = []
    for what, act in attempts:
        try:
            act()
            seen.append(what)
        except PermissionError:
            pass
    return seen


def test_another_user_of_the_host_sees_and_reaches_nothing(start: Callable[..., Run], tmp_path: Path) -> None:
    for folder in [tmp_path, *tmp_path.parents]:  # which pytest has closed: the job alone must keep others out
        if folder.is_relative_to("/tmp") and folder != Path("/tmp"):
            folder.chmod(0o755)
    run = start(TRAIN.format("print('a token')"), "-np", "2", *SEED, "train.py")
    run.wait_for("half0", "half1")
    assert seen_by_another_user(run.job, tmp_path / "dadt-logs" / run.job) == []
    (tmp_path / "attacked").touch()
    assert run.finish().code == 0
