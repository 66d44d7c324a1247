"""Signals on which ranks of islands act together: to save, and Ctrl-C."""

from __future__ import annotations

import json
import os
import queue
import re
import signal
import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
from harness.patience import PATIENCE, await_that

from dadt.errors import DadtError, PeerLost
from dadt.train.approaches import Approach, Approaches
from dadt.train.checkpoint_signal import CheckpointSignal
from dadt.train.common_step import CommonStep
from dadt.train.requests import Requests

SAVES = 3
TRAIN = """
import json, os, signal, sys, torch, torch.distributed as dist
torch.set_num_threads(1)
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
asked, steps, saves = [], 0, []
signal.signal(signal.SIGUSR1, lambda number, frame: asked.append(number))
def save():
    every = [None, None]
    dist.all_gather_object(every, steps)  # as a script that gathers a sharded model
    assert every == [steps, steps], every
    saves.append(steps)
    print("saved", len(saves), flush=True)
try:
    while True:
        optimizer.zero_grad()
        model(torch.randn(2, 4)).pow(2).mean().backward()
        optimizer.step()
        steps += 1
        if steps == 10:
            print("agent", os.getppid(), flush=True)
            print("saved", 0, flush=True)
        if asked:
            asked.clear()
            save()
            if "end" in sys.argv:
                break
except KeyboardInterrupt:
    save()
print("saves", json.dumps(saves), flush=True)
"""


def all_say(folder: Path, text: str) -> bool:
    logs = [each.read_text() for each in folder.glob("dadt-logs/*/rank*.log")]
    return len(logs) == 4 and all(text in each for each in logs)


@pytest.mark.parametrize(
    "algorithm", ["pipe", *(pytest.param(each, marks=pytest.mark.slow) for each in ("sync", "local"))]
)
def test_all_ranks_of_an_island_save_after_the_same_step(start, algorithm: str) -> None:
    options = ["-np", "4", "--island", "2", "--algorithm", algorithm, "--warmup-steps", "5"]
    env = {"INTERRUPTED_BY_THEIR_AGENT": "1"}
    run = start(TRAIN, *options, "--checkpoint-signal", "USR1", "--grace", "40", "train.py", **env)
    for number in range(SAVES + 1):
        await_that(partial(all_say, run.folder, f"saved {number}\n"), f"save {number} of all ranks")
        run.process.send_signal(signal.SIGUSR1 if number < SAVES else signal.SIGINT)
    result = run.finish()
    logs = [each.read_text() for each in run.folder.glob("dadt-logs/*/rank*.log")]
    assert all(log.count("saves [") == 1 for log in logs), (result.err, logs)
    saves = [json.loads(log.partition("saves ")[2].splitlines()[0]) for log in logs]
    assert len(saves[0]) == SAVES + 1
    assert saves == saves[:1] * 4


@contextmanager
def received() -> Iterator[list[int]]:
    """The signals that come meanwhile."""
    found: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: found.append(number))
    try:
        yield found
    finally:
        signal.signal(signal.SIGUSR1, before)


class Others:
    """The other ranks of a job in islands, at the launcher."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, bytes, float, int]] = []
        self.answers = defaultdict[int, queue.Queue[list[bytes] | DadtError]](queue.Queue)
        """What they answer, by generation; those of the island by the generation's number less 100."""
        self.generation = 1

    def exchange(
        self, key: str, blob: bytes, timeout: float, generation: int = 0, *, island: bool = False
    ) -> list[bytes]:
        self.asked.append((key, blob, timeout, generation))
        answer = self.answers[generation - 100 * island].get(timeout=PATIENCE)
        if isinstance(answer, DadtError):
            raise answer
        return answer

    def common_step(self, *, in_islands: bool = False) -> CommonStep:
        return CommonStep(self.exchange, lambda number, seconds: self.generation, 0, in_islands=in_islands)


def test_the_signal_comes_after_the_step_that_nobody_has_completed() -> None:
    others = Others()
    with received() as signals:
        checkpoint = CheckpointSignal()
        checkpoint.common_step = common_step = others.common_step()
        checkpoint.begin(signal.SIGUSR1, 0)
        common_step.stepped(7)
        others.answers[1].put([b"7", b"8"])  # the other rank has heard of it a step later
        checkpoint.hear(60.0, 1)
        for step in (8, 9, 10):
            common_step.stepped(step)
            checkpoint.stepped(step)
            assert signals == [signal.SIGUSR1] * (step >= 9)
        assert others.asked == [(f"step of signal {int(signal.SIGUSR1)}, 1", b"7", 60.0, 1)]


def test_no_step_ends_while_a_step_is_found() -> None:
    others = Others()
    common_step, found = others.common_step(), list[tuple[int, int]]()
    ended = threading.Event()
    for number in range(3):
        common_step.find(f"{number}", 60.0, lambda step, number=number: found.append((number, step)))
    thread = threading.Thread(target=lambda: (common_step.stepped(1), ended.set()))
    thread.start()
    for answer in ([b"0", b"1"], PeerLost("ranks have ended"), [b"0", b"0"]):
        assert not ended.wait(0.1)
        others.answers[1].put(answer)
    thread.join(PATIENCE)
    assert ended.is_set() and sorted(step for _, step in found) == [1, 2] and len(others.asked) == 3


def test_new_workers_are_heeded_after_the_common_step() -> None:
    approaches, approach = Approaches(), Approach(3, 2, (0, 0), False)
    request = approaches.hear(approach)
    assert approaches.due(5) == []
    request.agree_on(6)
    assert approaches.due(5) == []
    assert approaches.due(6) == [approach]
    assert approaches.due(7) == []


def test_what_ranks_of_the_generation_before_have_found_is_not_heeded() -> None:
    others, requests = Others(), Requests()
    requests.agree_by(others.common_step())
    requests.hear_approach(Approach(3, 2, (0, 0), False), 60.0)
    await_that(lambda: others.asked, "the question")
    others.generation = 2
    requests.approaches.forget()
    requests.hear_approach(again := Approach(3, 2, (0, 0), True), 60.0)  # the agent sends it again
    await_that(lambda: len(others.asked) == 2, "the second question")
    assert [generation for *_, generation in others.asked] == [1, 2]
    others.answers[1].put([b"4", b"4"])
    others.answers[2].put([b"5", b"6"])
    requests.complete(6)
    assert requests.approaches.due(6) == []
    assert requests.approaches.due(7) == [again]


def test_the_signal_comes_late_where_the_others_say_nothing() -> None:
    others = Others()
    others.answers[1].put(PeerLost("ranks have ended"))
    with received() as signals:
        checkpoint = CheckpointSignal()
        checkpoint.common_step = others.common_step()
        checkpoint.begin(signal.SIGUSR1, 0)
        checkpoint.hear(0.2, 1)
        checkpoint.common_step.stepped(1)
        checkpoint.stepped(1)
        await_that(lambda: signals, "the signal")
        assert signals == [signal.SIGUSR1]


@pytest.mark.parametrize("told", ["all", "island", "nobody"])
def test_an_island_agrees_where_not_all_ranks_have_heard(told: str) -> None:
    """It saves after the step that all ranks have found or, if they have not, after its own; if it has none, never."""
    others, unable = Others(), threading.Event()
    others.answers[1].put([b"7", b"9"] if told == "all" else PeerLost("rank 5 says nothing"))
    others.answers[-99].put(PeerLost("rank 1 says nothing") if told == "nobody" else [b"7", b"8"])
    with received() as signals:
        checkpoint = CheckpointSignal()
        checkpoint.common_step = common_step = others.common_step(in_islands=True)
        checkpoint.begin(signal.SIGUSR1, 0)
        checkpoint.unable = lambda number: unable.set()
        common_step.stepped(7)
        checkpoint.hear(60.0, 1)
        for step in (8, 9, 10):
            common_step.stepped(step)
            checkpoint.stepped(step)
            due = {"all": 10, "island": 9}.get(told, 11)
            assert signals == [signal.SIGUSR1] * (step >= due)
        assert unable.wait(PATIENCE) if told == "nobody" else not unable.is_set()


def test_an_island_that_loses_two_hosts_saves_once_and_under_one_number_for_all_its_ranks() -> None:
    """One of its ranks has missed the order before, and another one was told of it as it began."""
    others = Others()
    for told, heard in ((0, (1,)), (1, ())):
        checkpoint = CheckpointSignal()
        checkpoint.common_step = others.common_step(in_islands=True)
        checkpoint.begin(signal.SIGUSR1, told)
        for count in (*heard, 0, 0):
            checkpoint.hear(60.0, count)
    keys = [f"step of signal {int(signal.SIGUSR1)}, {number}" for number in (1, 1, 2, 2)]
    await_that(lambda: sorted(key for key, *_ in others.asked) == keys, "the questions")
    for generation in (1, 1, -99, -99, -99):
        others.answers[generation].put(PeerLost("the test ends"))


class AtOnce(threading.Timer):
    """A timer whose time is over as it starts."""

    def start(self) -> None:
        self.function(*self.args, **self.kwargs)


@pytest.mark.parametrize("completed", [6, 7])
def test_who_takes_no_step_saves_in_it_if_it_is_the_one_that_was_agreed_on(
    completed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threading, "Timer", AtOnce)
    others = Others()
    others.answers[-99].put([b"6", b"7"])
    with received() as signals:
        checkpoint = CheckpointSignal()
        checkpoint.common_step = common_step = others.common_step(in_islands=True)
        checkpoint.begin(signal.SIGUSR1, 0)
        common_step.step = completed
        checkpoint.hear(60.0, 0)  # only hosts of this island are to save
        common_step.stepped(completed)  # once the step is found
        assert signals == [signal.SIGUSR1] * (completed == 7)
        common_step.stepped(8)
        checkpoint.stepped(8)
        assert signals == [signal.SIGUSR1]


def test_an_island_looks_again_once_another_one_is_lost() -> None:
    others, found = Others(), queue.SimpleQueue[int]()
    others.answers[-99].put(PeerLost("rank 5 has ended"))
    others.answers[-98].put([b"3", b"4"])
    generations = iter([1, 2])
    common_step = CommonStep(others.exchange, lambda number, seconds: next(generations), 0, in_islands=True)
    common_step.find_in_island("signal 10, 1", 60.0, found.put, lambda: found.put(-1))
    assert found.get(timeout=PATIENCE) == 5
    assert [generation for *_, generation in others.asked] == [1, 2]


@pytest.mark.parametrize("algorithm", ["pipe", pytest.param("gossip", marks=pytest.mark.slow)])
def test_an_island_over_two_hosts_saves_when_one_of_them_is_told_to_end(start, algorithm: str) -> None:
    options = ["-np", "4", "-H", "localhost:1,127.0.0.1:3", "--island", "2", "--min-np", "1", "--algorithm", algorithm]
    env = {"INTERRUPTED_BY_THEIR_AGENT": "1"}
    run = start(TRAIN, *options, "--checkpoint-signal", "USR1", "--grace", "40", "train.py", "end", **env)
    await_that(partial(all_say, run.folder, "saved 0\n"), "training")
    (logs,) = run.folder.glob("dadt-logs/*/")
    os.kill(int((logs / "rank0.log").read_text().partition("agent ")[2].split()[0]), signal.SIGTERM)
    island = [logs / f"rank{rank}.log" for rank in (0, 1)]
    await_that(lambda: all("saves [" in each.read_text() for each in island), "the save of the island")
    await_that(lambda: '"kind": "regroup"' in (logs / "events.jsonl").read_text(), "the loss of the island")
    run.process.send_signal(signal.SIGINT)
    result = run.finish()
    saves = [json.loads(each.read_text().partition("saves ")[2].splitlines()[0]) for each in island]
    assert len(saves[0]) == 1 and saves[0] == saves[1], result.err
    # Either may be the first to end.
    first = r"rank (0 \(pid .*\) has left, as its host|1 \(pid .*\) has left, as a host of its island) was told to end"
    assert re.search(f"{first}: training goes on without the island of ranks 0 and 1", result.err), result.err
