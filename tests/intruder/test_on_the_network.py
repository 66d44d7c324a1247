"""A stranger on a third host of the network, while a job trains on two others."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from harness.jobs import SEED, TRAIN, assert_flat, held, refusals, weights
from harness.machine import Machine, Network
from harness.patience import PATIENCE, await_that
from harness.run import write_script

STRANGER = [sys.executable, Path(__file__).with_name("stranger.py")]
SECRET = "0123456789abcdef" * 4
Begin = Callable[..., list["subprocess.Popen[str]"]]


@pytest.fixture
def begin(network: Network, tmp_path: Path) -> Iterator[Begin]:
    """begin(launcher, executor) -> its processes, node 0's first."""
    started: list[subprocess.Popen[str]] = []
    dadt = write_script(tmp_path, TRAIN.format(""))

    def one(machine: Machine, *flags: object) -> None:
        env = {**os.environ, "HOME": str(machine.home), "DADT_SECRET": SECRET}
        command = machine.enter([*dadt, "run", *SEED, *flags, "train.py"], tmp_path)
        pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        started.append(subprocess.Popen(command, env=env, text=True, **pipes))

    def job(launcher: str, executor: str, where: str = "h0:29400") -> list[subprocess.Popen[str]]:
        common = ("--executor", executor, "-np", "4" if executor.startswith("hierarchical") else "2")
        if launcher == "hand":
            for rank, meeting in ((0, "h0:29400"), (1, where)):
                one(network[rank], *common, "--nnodes", "2", "--node-rank", rank, "--rendezvous", meeting)
        elif launcher == "local":
            one(network[0], *common)
        else:
            how = ("--ssh-config", network.config)
            how += ("--ssh-backend", launcher) if launcher == "openssh" else ("--launcher", launcher)
            each = int(common[-1]) // 2
            one(network.launcher, *common, "-H", f"h0:{each},h1:{each}", *how)
        return started

    yield job
    (tmp_path / "attacked").touch()
    for each in started:
        each.kill()
        each.communicate(timeout=PATIENCE)


def finish(processes: list[subprocess.Popen[str]]) -> tuple[list[int], str, str]:
    ended = [process.communicate(timeout=PATIENCE) for process in processes]
    return [process.returncode for process in processes], ended[0][0], "".join(err for _, err in ended)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("launcher", "executor"),
    [
        ("hand", "tcp"),
        pytest.param("hand", "gloo", marks=pytest.mark.slow),
        pytest.param("ssh", "tcp", marks=pytest.mark.slow),
        pytest.param("ssh", "hierarchical:tcp", marks=pytest.mark.slow),
        pytest.param("local", "gloo", marks=pytest.mark.slow),
        pytest.param("local", "shm", marks=pytest.mark.slow),
        pytest.param("ssh", "gloo", marks=pytest.mark.slow),
        pytest.param("openssh", "gloo", marks=pytest.mark.slow),
        pytest.param("ssh", "hierarchical:gloo", marks=pytest.mark.slow),
        pytest.param("mpi", "mpi", marks=pytest.mark.slow),
        pytest.param("mpi", "gloo", marks=pytest.mark.slow),
    ],
)
def test_a_stranger_changes_nothing(
    network: Network, begin: Begin, tmp_path: Path, launcher: str, executor: str
) -> None:
    processes = begin(launcher, executor)
    await_that(lambda: (tmp_path / "half0").exists() and (tmp_path / "half1").exists(), "half of the training")
    dadt = [process.pid for process in processes]
    before = held(dadt)
    if launcher == "local":  # the stranger is on the same host, where a job of one host is all there is
        stranger = network[0].enter([*STRANGER, "127.0.0.1", network[0].address], tmp_path)
    else:
        all_hosts = (network[0].address, network[1].address, network.launcher.address)
        stranger = network[2].enter([*STRANGER, *all_hosts], tmp_path)
    done = subprocess.run(stranger, capture_output=True, text=True, timeout=2 * PATIENCE)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert not any(port["got in"] or port["store"] for port in found.values()), found
    assert_flat(before, held(dadt))
    (tmp_path / "attacked").touch()
    codes, out, err = finish(processes)
    assert set(codes) == {0}, err
    (ended_with,) = weights(out)
    if any(port["launcher"] for port in found.values()):
        told = refusals(tmp_path)
        assert f"a connection from {network[2].address} was turned away: it has another key" in told, told
    # The same job, left alone: `attacked` is there already.
    processes.clear()
    for path in tmp_path.glob("half*"):
        path.unlink()
    codes, out, err = finish(begin(launcher, executor))
    assert set(codes) == {0}, err
    assert weights(out) == {ended_with}


@pytest.mark.parametrize(
    "how",
    [
        "change",
        pytest.param("repeat", marks=pytest.mark.slow),
        pytest.param("leave-out", marks=pytest.mark.slow),
        pytest.param("swap", marks=pytest.mark.slow),
    ],
)
def test_nobody_on_the_way_changes_what_is_said(network: Network, begin: Begin, tmp_path: Path, how: str) -> None:
    """Node 1 reaches node 0 through a stranger, who passes on all that is said, and then not."""
    command = [sys.executable, Path(__file__).with_name("relay.py"), "29400", network[0].address, "29400", how]
    relay = subprocess.Popen(
        network[2].enter([*command, tmp_path / "tamper"]), stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True
    )
    try:
        assert relay.stdout is not None and relay.stdout.readline() == "up\n"
        processes = begin("hand", "gloo", where="h2:29400")
        await_that(lambda: (tmp_path / "half0").exists() and (tmp_path / "half1").exists(), "the training")
        (tmp_path / "tamper").touch()
        codes, _, err = finish(processes)
        assert codes == [3, 3], err
        assert "node1: a record of the connection was changed, repeated or left out on its way" in err
        assert not weights(err)
    finally:
        for pid in network[2].processes():
            os.kill(pid, signal.SIGKILL)
        relay.communicate(timeout=PATIENCE)
