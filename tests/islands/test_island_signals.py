"""Signals on which ranks of islands act together: to save, and Ctrl-C."""

from __future__ import annotations

import json
import signal
from functools import partial
from pathlib import Path

import pytest
from harness.patience import await_that

from dadt.errors import PeerLost
from dadt.train.checkpoint_signal import CheckpointSignal

SAVES = 3
TRAIN = """
import json, os, signal, torch, torch.distributed as dist
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
            print("saved", 0, flush=True)
        if asked:
            asked.clear()
            save()
except KeyboardInterrupt:
    save()
print("saves", json.dumps(saves), flush=True)
"""


def all_say(folder: Path, text: str) -> bool:
    logs = [each.read_text() for each in folder.glob("dadt-logs/*/rank*.log")]
    return len(logs) == 4 and all(text in each for each in logs)


@pytest.mark.alone  # who stands for a forked rank would pass on a Ctrl-C that only the rank itself is to get
@pytest.mark.parametrize("algorithm", ["pipe", pytest.param("sync", marks=pytest.mark.slow)])
def test_all_ranks_of_an_island_save_after_the_same_step(start, algorithm: str) -> None:
    options = ["-np", "4", "--island", "2", "--algorithm", algorithm, "--warmup-steps", "5"]
    run = start(TRAIN, *options, "--checkpoint-signal", "USR1", "--grace", "40", "train.py")
    for number in range(SAVES + 1):
        await_that(partial(all_say, run.folder, f"saved {number}\n"), f"save {number} of all ranks")
        run.process.send_signal(signal.SIGUSR1 if number < SAVES else signal.SIGINT)
    result = run.finish()
    logs = [each.read_text() for each in run.folder.glob("dadt-logs/*/rank*.log")]
    assert all(log.count("saves [") == 1 for log in logs), (result.err, logs)
    saves = [json.loads(log.partition("saves ")[2].splitlines()[0]) for log in logs]
    assert len(saves[0]) == SAVES + 1
    assert saves == saves[:1] * 4


def test_no_step_ends_before_the_step_of_the_signal_is_known() -> None:
    told: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: told.append(number))
    try:
        asked: list[tuple[str, bytes]] = []

        def meet(key: str, data: bytes, patience: float) -> list[bytes]:
            asked.append((key, data))
            return [data, b"8"]  # the other rank has heard of it a step later

        checkpoint = CheckpointSignal()
        checkpoint.meet = meet
        checkpoint.begin(signal.SIGUSR1, 0)
        checkpoint.stepped(7)
        checkpoint.hear(60.0)
        checkpoint.stepped(8)
        assert asked == [(f"signal {int(signal.SIGUSR1)}, 1", b"7")]
        assert told == []
        checkpoint.stepped(9)
        assert told == [signal.SIGUSR1]
        checkpoint.stepped(10)
        assert told == [signal.SIGUSR1]
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_the_signal_comes_late_where_the_others_say_nothing() -> None:
    told: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: told.append(number))
    try:

        def meet(key: str, data: bytes, patience: float) -> list[bytes]:
            raise PeerLost("ranks have ended")

        checkpoint = CheckpointSignal()
        checkpoint.meet = meet
        checkpoint.begin(signal.SIGUSR1, 0)
        checkpoint.hear(0.2)
        checkpoint.stepped(1)
        await_that(lambda: told, "the signal")
        assert told == [signal.SIGUSR1]
    finally:
        signal.signal(signal.SIGUSR1, before)
