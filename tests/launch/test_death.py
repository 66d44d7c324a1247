"""What the other ranks are told of one that has ended, and what the user is."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from harness.run import Result

from dadt.config import Config

SCRIPT = """
import json, os, signal, sys, time, torch
from dadt.errors import CommError
torch.set_num_threads(1)
signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a rank that gets no processor for half a second writes what it was told
rank = int(os.environ["RANK"])
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
try:
    for step in range(100_000):
        optimizer.zero_grad()
        model(torch.randn(2, 4)).sum().backward()
        optimizer.step()
        if rank == 1 and step == 10:
            with open("ended", "w") as file: file.write(str(time.time()))
            {end}
except CommError as error:
    with open(f"told{{rank}}", "w") as file:
        json.dump([type(error).__name__, str(error), time.time()], file)
    raise
"""
KILL = "os.kill(os.getpid(), signal.SIGKILL)"


def told(result: Result, ranks: int) -> list[tuple[str, str, float]]:
    """What each of the others has raised: type, text, seconds after the end of rank 1."""
    folder = result.logs.parent
    ended = float((folder / "ended").read_text())
    raised = [json.loads((folder / f"told{rank}").read_text()) for rank in range(ranks) if rank != 1]
    return [(kind, text, at - ended) for kind, text, at in raised]


@pytest.mark.parametrize("ranks", [4, pytest.param(6, marks=pytest.mark.slow)])
def test_all_ranks_are_told_at_once_of_one_that_was_killed(launch: Callable[..., Result], ranks: int) -> None:
    """Gloo tells the two neighbours in its ring only."""
    result = launch(SCRIPT.format(end=KILL), "-np", str(ranks), "--executor", "gloo", "train.py")
    assert result.code == 137, result.err
    for kind, text, seconds in told(result, ranks):
        assert kind == "PeerLost"
        assert text.startswith("rank 1 (pid ") and text.endswith(") was killed by signal 9 (SIGKILL) after 11 steps")
        assert seconds < Config().timeout / 10
    assert "dadt: worker 1 failed (killed by signal 9, SIGKILL) after " in result.err


@pytest.mark.slow
@pytest.mark.parametrize("end", ["os._exit(0)", "sys.exit()"])
def test_a_rank_that_ends_well_in_the_middle_is_the_cause(launch: Callable[..., Result], end: str) -> None:
    result = launch(SCRIPT.format(end=end), "-np", "2", "--executor", "gloo", "train.py")
    assert result.code == 1, result.err
    assert "dadt: worker 1 failed (ended too early" in result.err
    assert "after 11 steps, while others went on\n" in result.err
    if end == "os._exit(0)":
        [(kind, text, seconds)] = told(result, 2)
        assert kind == "PeerLost" and text.endswith(") has exited with code 0 after 11 steps, while others went on")
        assert seconds < Config().timeout / 10


@pytest.mark.slow
def test_ranks_that_all_leave_without_a_word_have_done_their_work(launch: Callable[..., Result]) -> None:
    """The first that leaves must not fail what the others still have under way."""
    leave = "pass\n        if step == 60: os._exit(0)"
    result = launch(SCRIPT.format(end=leave), "-np", "2", "--executor", "gloo", "--algorithm", "sync", "train.py")
    assert result.code == 0, result.err


SETS = """
import json, os, signal, time, torch, dadt
from dadt.errors import CommError
dadt.init()
signal.signal(signal.SIGTERM, signal.SIG_IGN)
rank = dadt.rank()
apart = dadt.add_process_set([0, 2])
try:
    for number in range(1_000_000):
        if rank == 1 and number == 20:
            with open("ended", "w") as file: file.write(str(time.time()))
            os.kill(os.getpid(), signal.SIGKILL)
        if apart.included and number >= 20: dadt.all_reduce(torch.ones(4), process_set=apart, name="apart")
        else: dadt.all_reduce(torch.ones(4), name="all")
except CommError as error:
    with open(f"told{rank}", "w") as file:
        json.dump([type(error).__name__, str(error), time.time()], file)
    raise
"""


@pytest.mark.slow
def test_ranks_that_exchange_tensors_by_name_are_told_too(launch: Callable[..., Result]) -> None:
    """Also in a set to which the dead rank does not belong: the job is over."""
    result = launch(SETS, "-np", "4", "--executor", "gloo", "train.py")
    assert result.code == 137, result.err
    for kind, text, seconds in told(result, 4):
        assert kind == "PeerLost"
        assert text.startswith("rank 1 (pid ") and ") was killed by signal 9 (SIGKILL) after 0 steps" in text
        assert seconds < Config().timeout / 10
