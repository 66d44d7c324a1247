"""Ranks as forked processes with a real, if small, runtime: operations go through torch's FileStore."""

from __future__ import annotations

import multiprocessing
import threading
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dadt.comm.peer_deaths import Generation
from dadt.config import Config
from dadt.inject.data import entropy, loader, seed
from dadt.inject.files import saving
from dadt.world import World
from harness.patience import PATIENCE


class Work:
    def __init__(self, store: Any, keys: list[str]) -> None:
        self.store, self.keys = store, keys
        self.lanes: list[bytes] = []

    @property
    def done(self) -> bool:
        return bool(self.store.check(self.keys))

    def wait(self, timeout: float) -> None:
        self.store.wait(self.keys, timedelta(seconds=timeout))
        self.lanes = [self.store.get(key) for key in self.keys]


class Runtime:
    """What loaders, seeds and saving ask of the runtime; a script says itself when it trains."""

    def __init__(self, rank: int, size: int, folder: Path, **config: Any) -> None:
        self.world = World(rank=rank, local_rank=rank, world_size=size, local_size=size, job="test")
        self.config = Config(**{"seed": 7, "timeout": PATIENCE, **config})
        self.control: Any = None
        self.folder = folder
        self.store = dist.FileStore(str(folder / "store"), size)
        self.step = 0
        self.knows_rank = False
        self.on_stepped: list[Any] = []
        self.backwards = 0
        self.training = True
        self.registered = True
        self.began = False
        self.is_distributed = self.divides_data = False
        self.together = True
        self.explicit = self.fitting = False
        self.possible = self.under_way = False
        # The parts of a runtime are one object here.
        self.ranks = self.script = self.replay = self.events = self.optimizers = self.batches = self
        self.alone, self.hooked, self.shares = size == 1, size > 1, size
        self.aside = nullcontext
        self.first, self.folder_writer = rank == 0, -1
        self.newest = Generation(members=tuple(range(size)))
        self.claimed = False
        self.said: list[str] = []
        self.warned: list[str] = []
        self.draws: list[tuple[int, int]] = []
        self.ends: list[int] = []
        self._operations = 0
        self.streams = seed.install(self)
        self.entropy = entropy.install(self, self.streams)
        loader.install(self, self.streams, self.entropy)
        saving.install(self)

    def tell_waiting(self, what: str, seconds: float) -> None: ...

    @property
    def on_training_thread(self) -> bool:
        return threading.current_thread() is threading.main_thread()

    def say(self, text: str, level: str = "info") -> None:
        said = self.said if level == "info" else self.warned
        if text not in said:
            said.append(text)

    def trains(self) -> bool:
        return self.training and self.registered and torch.is_grad_enabled()

    def claim(self) -> None:
        self.claimed = True

    def train(self) -> None:
        """What a forward, a backward and a step of the script come to."""
        self.began = True
        self.backwards += 1
        self.step += 1

    def allgather(self, name: str, data: bytes) -> Work:
        self._operations += 1
        prefix = f"{self._operations}:{name}"
        self.store.set(f"{prefix}:{self.world.rank}", data)
        return Work(self.store, [f"{prefix}:{rank}" for rank in range(self.world.world_size)])

    def wait(self, work: Work) -> None:
        work.wait(self.config.timeout)

    def drew(self, source: object, samples: int, nominal: int) -> None:
        self.draws.append((samples, nominal))

    def pass_over(self, source: object) -> None:
        self.ends.append(len(self.draws))

    def show_true_weights(self) -> None:
        pass


def ranks(size: int, script: Callable[[Runtime], Any], folder: Path, **config: Any) -> list[Any]:
    """What `script` returned on each of `size` ranks; raises with its traceback where it failed."""
    fork = multiprocessing.get_context("fork")
    folder.mkdir(exist_ok=True)
    lines = [fork.Pipe(duplex=False) for _ in range(size)]

    def main(rank: int) -> None:
        torch.set_num_threads(1)
        try:
            answer = (True, script(Runtime(rank, size, folder, **config)))
        except BaseException:
            answer = (False, traceback.format_exc())
        lines[rank][1].send(answer)

    processes = [fork.Process(target=main, args=(rank,)) for rank in range(size)]
    for process in processes:
        process.start()
    try:
        answers = []
        for rank, (receiver, sender) in enumerate(lines):
            sender.close()
            assert receiver.poll(PATIENCE), f"rank {rank} did not answer"
            answers.append(receiver.recv())
    finally:
        for process in processes:
            process.kill()
            process.join()
    for rank, (well, answer) in enumerate(answers):
        assert well, f"rank {rank}:\n{answer}"
    return [answer for _, answer in answers]


def single(script: Callable[[Any], Any], **attributes: Any) -> Any:
    """The same script in one unpatched process, seeded as `ranks` are."""
    fork = multiprocessing.get_context("fork")
    receiver, sender = fork.Pipe(duplex=False)

    class Alone:
        world = World()
        step = 0
        claimed = False

        def train(self) -> None:
            self.step += 1

    alone = Alone()
    for name, value in attributes.items():
        setattr(alone, name, value)

    def main() -> None:
        torch.set_num_threads(1)
        seed.seed_all(7)
        sender.send(script(alone))

    process = fork.Process(target=main)
    process.start()
    sender.close()
    try:
        assert receiver.poll(PATIENCE)
        return receiver.recv()
    finally:
        process.kill()
        process.join()
