"""`dadt run` called by hand on each host: here, several times on one."""

from __future__ import annotations

import os
import signal
import socket
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
from harness.patience import await_that
from harness.run import Result, Run, await_end_of

from dadt.control.connection import Reach
from dadt.control.machine import free_ports
from dadt.errors import LaunchError
from dadt.launch.launchers.node_rendezvous import FileRendezvous

Start = Callable[..., Run]
SECRET = "what only the nodes of this job know"
ANOTHER = "what the nodes of another job know"
REACH = Reach(addresses=["127.0.0.1"], port=1, key=b"k" * 32, silence=1.0)
SHOW = "import os; print('rank', os.environ['RANK'], 'of', os.environ['WORLD_SIZE'], flush=True)\n"
FAIL = SHOW + "import sys; sys.exit(7 if os.environ['RANK'] == '3' else 0)\n"
SLEEP = (
    "import os, pathlib, time; pathlib.Path('pid' + os.environ['RANK']).write_text(str(os.getpid())); time.sleep(600)\n"
)


@pytest.fixture
def port() -> int:
    return free_ports(1)[0]


def node(start: Start, rank: int, where: object, script: str = SHOW, *more: str, **env: str) -> Run:
    arguments = ["--nnodes", "2", "--node-rank", str(rank), "--rendezvous", str(where), "-np", "4", *more, "train.py"]
    # One machine plays two: its GPUs, if it has any, are not for both.
    return start(script, *arguments, **{"CUDA_VISIBLE_DEVICES": "-1", "DADT_SECRET": SECRET, **env})


def listens(port: int) -> bool:
    with socket.socket() as caller:
        return caller.connect_ex(("127.0.0.1", port)) == 0


def written(path: Path, text: str) -> Path:
    """A file as node 0 makes it."""
    path.write_text(text)
    path.chmod(0o600)
    return path


def both(start: Start, where: object, script: str = SHOW) -> tuple[Result, Result]:
    runs = [node(start, rank, where, script) for rank in (0, 1)]
    return runs[0].finish(), runs[1].finish()


def test_two_nodes_meet_at_a_port_and_train_together(start: Start, port: int) -> None:
    first, second = both(start, f"localhost:{port}")
    assert (first.code, second.code) == (0, 0), first.err + second.err
    assert sorted(first.out.decode().splitlines()) == [
        f"[{rank} node{rank // 2}] rank {rank} of 4" for rank in range(4)
    ]
    assert second.out == b""
    assert second.err.splitlines()[0] == f"dadt: node 1 of job {first.job} at localhost:{port}"
    assert second.err.splitlines()[1].startswith("dadt: done in ")


def test_each_node_ends_with_the_exit_code_and_the_cause(start: Start, tmp_path: Path) -> None:
    first, second = both(start, f"file://{tmp_path}/meet", FAIL)
    assert (first.code, second.code) == (7, 7), first.err + second.err
    for result in (first, second):
        assert "dadt: worker 3 failed (exit code 7)" in result.err
        assert "  cause   it exited with code 7" in result.err


def test_one_job_after_the_other_meets_at_the_same_place(start: Start, tmp_path: Path, port: int) -> None:
    for where in (f"localhost:{port}", f"file://{tmp_path}/meet") * 2:
        first, second = both(start, where)
        assert (first.code, second.code) == (0, 0), first.err + second.err
        assert f"node 1 of job {first.job} " in second.err


def test_the_file_is_for_this_user_alone_and_goes_with_the_job(start: Start, tmp_path: Path) -> None:
    path = tmp_path / "meet"
    first, second = (node(start, rank, f"file://{path}", SLEEP) for rank in (0, 1))
    first.wait_for("pid0", "pid3")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    first.process.send_signal(signal.SIGINT)
    assert (first.finish().code, second.finish().code) == (130, 130)
    assert sorted(each.name for each in tmp_path.iterdir() if "meet" in each.name) == []


@pytest.mark.sample(1)
@pytest.mark.parametrize("left", ["nobody", "another"])
def test_a_file_that_a_dead_job_left_is_not_taken_for_a_new_one(start: Start, tmp_path: Path, left: str) -> None:
    """Nobody listens at its port any more, or another program does."""
    path = tmp_path / "meet"
    with socket.create_server(("127.0.0.1", 0)) as server:
        reach = Reach(addresses=["127.0.0.1"], port=server.getsockname()[1], key=b"old", silence=30.0)
        written(path, reach.to_text())
        if left == "nobody":
            server.close()
        late = node(start, 1, f"file://{path}")
        first = node(start, 0, f"file://{path}")
        if left == "another":
            connection, _ = server.accept()
            connection.close()
            server.close()
        assert (first.finish().code, late.finish().code) == (0, 0)


def test_a_file_that_a_running_job_uses_is_refused(start: Start, tmp_path: Path) -> None:
    path = tmp_path / "meet"
    running = node(start, 0, f"file://{path}")
    await_that(path.exists, "the file")
    text = path.read_text()
    other = node(start, 0, f"file://{path}").finish()
    assert (other.code, other.err) == (
        3,
        f"dadt: --rendezvous file://{path}: another job meets there now; give another file\n",
    )
    assert path.read_text() == text
    assert node(start, 1, f"file://{path}").finish().code == running.finish().code == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (["-np", "6"], "node1 was started with -np 6, node0 with -np 4"),
        (["--nnodes", "3", "-np", "6"], "node1 was started with --nnodes 3, node0 with --nnodes 2"),
        (["train.py"], "node1 was started with the script train.py train.py, node0 with the script train.py"),
        (["--nnodes", "3", "-np", "6", "--node-rank", "2"], "there is no node2 in job {job}, which has nodes 0 to 1"),
    ],
)
def test_nodes_that_were_started_differently_are_told_in_one_sentence(
    start: Start, port: int, changes: list[str], sentence: str
) -> None:
    where = f"localhost:{port}"
    first = node(start, 0, where)
    wrong = node(start, 1, where, SHOW, *changes).finish()
    assert wrong.code == 3
    assert wrong.err == f"dadt: {sentence.format(job=first.job)}\n"
    assert node(start, 1, where).finish().code == first.finish().code == 0


def test_a_node_that_is_there_twice_is_refused(start: Start, port: int) -> None:
    where = f"localhost:{port}"
    first, second = (node(start, rank, where, SLEEP) for rank in (0, 1))
    first.wait_for("pid0", "pid3")
    again = node(start, 1, where, SLEEP).finish()
    assert again.code == 3
    assert again.err.endswith("has a node1 already: give each host its own --node-rank\n")
    first.process.send_signal(signal.SIGTERM)
    assert (first.finish().code, second.finish().code) == (143, 143)


def test_a_node_that_is_missing_is_named(start: Start, port: int) -> None:
    alone = node(start, 0, f"localhost:{port}", SHOW, "--start-timeout", "5").finish()
    assert alone.code == 124
    assert "dadt: node1: is not connected after 5 s" in alone.err
    assert "dadt: node0: " not in alone.err


def test_a_node_0_that_is_missing_is_named(start: Start, tmp_path: Path, port: int) -> None:
    alone = node(start, 1, f"localhost:{port}", SHOW, "--start-timeout", "1").finish()
    assert alone.code == 124
    assert alone.err.startswith("dadt: node0 did not come within --start-timeout 1 s: ")
    assert f"localhost:{port} (" in alone.err
    alone = node(start, 1, f"file://{tmp_path}/meet", SHOW, "--start-timeout", "1").finish()
    assert alone.code == 124
    assert f"there is no {tmp_path}/meet" in alone.err


def test_the_secret_must_be_the_same(start: Start, port: int) -> None:
    where = f"localhost:{port}"
    first = node(start, 0, where, SHOW, DADT_SECRET=SECRET)
    await_that(lambda: listens(port), "node 0 at its port")
    wrong = node(start, 1, where, SHOW, "--start-timeout", "2", DADT_SECRET=ANOTHER).finish()
    assert wrong.code == 124
    assert "the launcher there has another key" in wrong.err
    assert node(start, 1, where, SHOW, DADT_SECRET=SECRET).finish().code == first.finish().code == 0


@pytest.mark.parametrize("rank", [0, 1])
def test_without_a_secret_nothing_listens_and_nothing_connects(start: Start, port: int, rank: int) -> None:
    """A stranger's node 0 would run what it likes here, and a stranger's node 1 would get our variables."""
    where = f"localhost:{port}"
    with socket.create_server(("127.0.0.1", port)) as stranger:
        stranger.settimeout(0.0)
        for secret, why in (
            ("", "a port needs a secret"),
            ("fifteen letters", "DADT_SECRET has 15 characters, fewer than 16, and can be guessed"),
        ):
            result = node(start, rank, where, SHOW, "--metrics", "prometheus:127.0.0.1:0", DADT_SECRET=secret).finish()
            assert (result.code, result.err) == (
                2,
                f"dadt: --rendezvous {where}: {why}: export DADT_SECRET=$(openssl rand -hex 32) on node 0 and the same "
                "value on the others, or give file://\n",
            )
        with pytest.raises(BlockingIOError):
            stranger.accept()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_another_node_ends_the_job(start: Start, port: int, number: int) -> None:
    first, second = (node(start, rank, f"localhost:{port}", SLEEP) for rank in (0, 1))
    workers = first.wait_for("pid0", "pid1", "pid2", "pid3")
    second.process.send_signal(number)
    assert second.finish().code == 128 + number
    result = first.finish()
    assert result.code != 0
    assert "node1" in result.err.splitlines()[-1]
    await_end_of(*workers)


def test_a_node_that_is_preempted_ends_the_job_so_that_all_are_queued_again(start: Start, port: int) -> None:
    options = ("--checkpoint-signal", "USR1", "--grace", "1")
    first, second = (node(start, rank, f"localhost:{port}", SLEEP, *options) for rank in (0, 1))
    first.wait_for("pid0", "pid1", "pid2", "pid3")
    second.process.send_signal(signal.SIGTERM)
    for result in (first.finish(), second.finish()):
        assert result.code == 75, result.err
        assert "node1 was told to end (SIGTERM): preempted; ranks 0, 1, 2 and 3 went on and were stopped" in result.err


@pytest.mark.parametrize("rank", [0, 1])
def test_nothing_outlives_a_node_that_was_killed(start: Start, port: int, rank: int) -> None:
    runs = [node(start, each, f"localhost:{port}", SLEEP) for each in (0, 1)]
    workers = runs[0].wait_for("pid0", "pid1", "pid2", "pid3")
    runs[rank].process.kill()
    result = runs[1 - rank].finish()
    assert result.code == 3
    if rank == 0:
        assert result.err.splitlines()[-1] == "dadt: node0 is gone, without a word on how the job ended"
    await_end_of(*workers)


def test_what_keeps_node_0_from_starting_is_said_everywhere(start: Start, port: int, tmp_path: Path) -> None:
    runs = [node(start, rank, f"localhost:{port}", SHOW, "--prologue", "exit 5") for rank in (0, 1)]
    first, second = (run.finish() for run in runs)
    assert (first.code, second.code) == (3, 3)
    assert "dadt: node1: --prologue" in first.err
    assert "dadt: nothing was started; exit code 3" in second.err


def test_a_port_that_is_taken_is_told(start: Start) -> None:
    with socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True) as server:
        where = f"localhost:{server.getsockname()[1]}"
        result = node(start, 0, where).finish()
    assert (result.code, result.err) == (
        3,
        f"dadt: --rendezvous {where}: cannot listen there (Address already in use)\n",
    )


@pytest.mark.parametrize(
    ("where", "sentence"),
    [
        ("localhost", "give host:port of node 0, as host1:29400, or file:///shared/meet"),
        ("localhost:99999", "give host:port of node 0, as host1:29400, or file:///shared/meet"),
        ("file://meet", "give the absolute path of a file, as file:///shared/meet"),
        ("file:///", "give the absolute path of a file, as file:///shared/meet"),
    ],
)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_meeting_point_that_is_none_is_refused(start: Start, where: str, sentence: str, rank: int) -> None:
    result = node(start, rank, where).finish()
    assert (result.code, result.err) == (2, f"dadt: --rendezvous {where}: {sentence}\n")


def test_a_file_of_another_program_is_refused(start: Start, tmp_path: Path) -> None:
    path = tmp_path / "meet"
    for text in ("something else", "[" * 60_000, " " * (1 << 17) + REACH.to_text()):
        written(path, text)
        with pytest.raises(LaunchError, match="was not written by dadt; give another file"):
            FileRendezvous(path).find()
    for rank in (0, 1):
        result = node(start, rank, f"file://{path}").finish()
        assert result.code == 3
        assert result.err == f"dadt: --rendezvous file://{path}: was not written by dadt; give another file\n"
    assert path.read_text() == text


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to make another user's file")
def test_a_file_of_another_user_is_refused(start: Start, tmp_path: Path) -> None:
    path = tmp_path / "meet"
    written(path, REACH.to_text())
    os.chown(path, 12345, 12345)
    result = node(start, 1, f"file://{path}").finish()
    assert (result.code, result.err) == (
        3,
        f"dadt: --rendezvous file://{path}: belongs to another user; give another file\n",
    )


def test_a_file_that_others_can_read_or_change_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path / "meet", REACH.to_text())
    assert FileRendezvous(path).find() == REACH
    for mode, may in ((0o640, "read"), (0o604, "read"), (0o620, "change"), (0o602, "change")):
        path.chmod(mode)
        with pytest.raises(LaunchError, match=f"others may {may} it, and it holds the job's key; remove it"):
            FileRendezvous(path).find()


def test_what_is_no_file_is_refused_at_once(tmp_path: Path) -> None:
    written(tmp_path / "real", REACH.to_text())
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with pytest.raises(LaunchError, match="it is a symbolic link"):
        FileRendezvous(tmp_path / "link").find()
    os.mkfifo(tmp_path / "pipe", 0o600)
    with pytest.raises(LaunchError, match="is not a file"):
        FileRendezvous(tmp_path / "pipe").find()


def test_a_folder_where_everyone_replaces_files_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "open"
    folder.mkdir()
    path = written(folder / "meet", REACH.to_text())
    folder.chmod(0o1777)
    assert FileRendezvous(path).find() == REACH
    folder.chmod(0o777)
    for step in (FileRendezvous(path).find, lambda: FileRendezvous(path).open(REACH)):
        with pytest.raises(LaunchError, match=f"everyone may replace files in {folder}; chmod o-w it"):
            step()


def test_a_folder_that_is_not_there_is_told(start: Start, tmp_path: Path) -> None:
    result = node(start, 0, f"file://{tmp_path}/none/meet").finish()
    assert result.code == 3
    assert (
        result.err == f"dadt: --rendezvous file://{tmp_path}/none/meet: cannot be written (No such file or directory)\n"
    )
