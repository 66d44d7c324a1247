"""A worker's connection to the other ranks if they were started by mpirun, srun or torchrun, which have no agents."""

from __future__ import annotations

import faulthandler
import json
import os
import secrets
import sys
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from dadt import world as environment
from dadt.comm.rendezvous import store as stores
from dadt.comm.rendezvous.values import SharedValues
from dadt.config import Config
from dadt.config.check import flag
from dadt.config.executor import HostWorkers, choose, shown
from dadt.control import machine, network, shared_folder, written_files
from dadt.control.worker_line import WorkerLine
from dadt.errors import ConfigError, DadtError, StartTimeout
from dadt.world import World

LOOK_SECONDS = 0.5
"""Seconds after which a waiting rank checks again whether the missing ranks have ended."""
CAUSE_SECONDS = 1.0
"""Seconds that a rank waits before it exits, if another rank's failure has caused its own: that rank should exit first,
because the first exit code becomes the job's."""
START_SECONDS = 10.0
"""Seconds that rank 0, after the end of its script, waits for other ranks to finish their start."""
PAUSES = (0.001, 0.05)
"""Seconds between polls of the store for other ranks' values: the pause grows from the first value to the second."""
ABSENT = "has not imported dadt"
BEGUN = "has imported torch, not begun to train"
T = TypeVar("T")


class StoreClient(WorkerLine):
    """A worker's connection to rank 0, whose store passes values between the ranks and ensures that each text is
    printed only once."""

    def __init__(self, world: World, found: stores.Found) -> None:
        self.world, self.secret, self._pid = world, found.secret, os.getpid()
        self._found = found
        self._values = found.values
        self._step, self._gathered = -1, 0
        self._state = BEGUN
        self._heard = 0
        """Number of the reports that this rank has read about files written in the folder that its host shares with
        other hosts."""

    @classmethod
    def connect(cls, world: World, config: Config) -> tuple[StoreClient, Config]:
        """Join all ranks. Returns the client and rank 0's settings, which all ranks adopt, with open choices resolved.

        Raises StartTimeout naming ranks that do not join, and ConfigError if there is no way for ranks to find each
        other.
        """
        found = stores.connect(world, config.start_timeout, config.timeout)
        client = cls(world, found)
        mine = {
            "machine": machine_id(),
            "own": found.own,
            "store": found.other,
            "gpus": len(machine.gpus()),
            "draw": secrets.randbelow(2**31),
            "config": config.to_env(),
        }
        blobs = client.exchange("start", json.dumps(mine).encode(), config.start_timeout)
        everyone = [json.loads(blob) for blob in blobs]
        job = f"{everyone[0]['draw']:08x}"
        client.world = replace(placed(world, everyone, _address(everyone, world.rank)), job=job)
        if client.world.address:
            writer = client._folder_writer([each["machine"] for each in everyone], config.start_timeout)
            client.world = replace(client.world, folder_writer=writer)
        if interface := network.interface_of(client.world.address):
            environment.speak_over(interface)
        if not found.secret:
            _refuse_code(config, everyone[0]["config"])
        config, why = _resolved(everyone)
        size = f"{world.world_size} ranks by {world.launcher}"
        client.say(f"{size}, executor {shown(config)}, algorithm {config.algorithm}")
        if config.verbose:
            client.say(why)
        return client, config

    def _folder_writer(self, machines: Sequence[str], timeout: float) -> int:
        """Find out which hosts see the same working folder, by a file that each host's first rank creates and the
        others look for. Returns this rank's World.folder_writer. machines: machine id of each rank."""
        marker = shared_folder.Marker(".", self.world.job) if self.world.local_rank == 0 else None
        try:
            made = self.exchange("marker", json.dumps(marker.describe() if marker else {}).encode(), timeout)
            markers = [{**found, "index": rank} for rank, blob in enumerate(made) if (found := json.loads(blob))]
            seen = self.exchange("seen", json.dumps(marker.seen(markers) if marker else []).encode(), timeout)
        finally:
            if marker is not None:
                marker.remove()
        firsts = [machines.index(machine) for machine in machines]
        places = {rank: (first, min(json.loads(seen[first]), default=None)) for rank, first in enumerate(firsts)}
        return shared_folder.writers(places).get(self.world.rank, -1)

    def hello(self, torch: str) -> None:
        self._publish(BEGUN)

    def claim(self) -> tuple[int, int]:
        first = self._use(lambda values: values.compare_set(f"claim/{self.world.rank}", "", str(self._pid)))
        if first != str(self._pid):
            raise DadtError(
                f"rank {self.world.rank} is already claimed by pid {first}: of the processes of one rank only one may "
                "train"
            )
        self._publish("has begun to train")
        return 0, 0  # zeros: without an agent, no signal to save can arrive

    def exchange(
        self, key: str, blob: bytes, timeout: float, generation: int = 0, *, island: bool = False
    ) -> list[bytes]:
        deadline = time.monotonic() + timeout
        keys = [f"exchange/{key}/{rank}" for rank in range(self.world.world_size)]
        self._use(lambda values: values.set(keys[self.world.rank], blob))
        while not self._arrive(keys, deadline):
            missing = [rank for rank, each in enumerate(keys) if not self._has(each)]
            states = {rank: self._peer(rank)["state"] for rank in missing}
            gone = [rank for rank in missing if states[rank].startswith("has ended")]
            if missing and (gone or time.monotonic() >= deadline):
                who = ", ".join(f"rank {rank} ({states[rank]})" for rank in gone or missing)
                what = StartTimeout.gone if gone else f"did not arrive within {timeout:g} s"
                raise StartTimeout(f"{who} {what} for {key!r}")
        return [self._get(each) for each in keys]

    def put(self, key: str, blob: bytes, generation: int = 0) -> None:
        self._use(lambda values: values.set(f"put/{key}", blob))

    def get(self, keys: Sequence[str], timeout: float, generation: int = 0) -> list[bytes]:
        if not self._arrive([f"put/{key}" for key in keys], time.monotonic() + timeout, timeout):
            missing = next(key for key in keys if not self._has(f"put/{key}"))
            raise StartTimeout(f"no rank did its part within {timeout:g} s for {missing!r}")
        return [self._get(f"put/{key}") for key in keys]

    def say(self, text: str, level: str = "info") -> None:
        if level == "info":
            if self.world.rank == 0:
                _print(text)
        elif self._use(lambda values: values.add(f"said/{zlib.crc32(text.encode())}", 1)) == 1:
            _print(f"{level}: {text}")

    def progress(self, step: int, last: bool = False, **numbers: Any) -> None:
        self._step = step  # `peers` publishes the step when this rank waits, so that a step costs no message

    def failed(
        self, type: str, message: str, *where: Any, secondary: bool = False, thread: str = "", **details: Any
    ) -> None:
        """Publish the failure to the other ranks. Python itself prints the traceback; only the text of a ConfigError is
        printed here."""
        if type == "ConfigError":
            _print(message)
        if not thread:
            self._publish(f"has failed: {type}")
        if secondary:
            # the launcher kills this process as soon as the rank that failed first has exited
            time.sleep(CAUSE_SECONDS)

    def ending(self, steps: int, gathered: int) -> None:
        self._gathered = gathered
        self._publish(f"has ended after {steps} steps")

    def done(self, summary: Mapping[str, Any]) -> None:
        """Print on rank 0 the summary of how the ranks have started, once all have. Other ranks do nothing, since rank
        0, which serves the store, may have exited."""
        if self.world.rank or self._state.startswith("has failed"):
            return
        # Rank 0 serves the store, so it must not end before ranks that are still starting have read their values.
        everyone = [f"state/{rank}" for rank in range(self.world.world_size)]
        self._arrive(everyone, time.monotonic() + START_SECONDS, START_SECONDS)
        if not summary["steps"]:
            if not summary["explicit"]:
                _print("warning: training was NOT distributed by DADT: no torch.optim optimizer made a step in rank 0")
            return
        why = f" ({summary['why']})" if summary["why"] else ""
        _print(
            f"done: {summary['steps']} steps, {summary['delayed'] or 'none'} of them delayed by one{why}, "
            f"{100 * summary['wait_fraction']:.1f} % of the time spent waiting for communication"
        )

    def peers(self, starts: bool = False) -> list[dict[str, Any]]:
        self._publish(
            f"at step {self._step}" if self._step >= 0 and not self._state.startswith("has e") else self._state
        )
        return [self._peer(rank) for rank in range(self.world.world_size)]

    def dump(self) -> None:
        """Print the stacks of this rank's threads on stderr. There is no way to ask other ranks for theirs, but each
        rank that also waits prints its own."""
        faulthandler.dump_traceback(all_threads=True)

    def saved(self, path: str, count: int, number: int) -> None:
        self._tell_saved(path, count, number)

    def _tell_saved(self, path: str, count: int, number: int, far: bool = False) -> None:
        self._use(lambda values: values.set(self._save_key(path, count, far), b"1"))
        self._use(lambda values: values.set(self._save_key("", number, far), b"1"))

    def wrote(self, path: str, **facts: Any) -> bool:
        with suppress(DadtError):
            if "count" in facts:
                self._tell_saved(path, facts["count"], facts["number"], far=True)
                return True
            told = written_files.line(self.world.rank, facts["size"], path)
            number = self._use(lambda values: values.add(self._log, 1))
            self._use(lambda values: values.set(f"{self._log}/{number}", told))
            return True
        return False

    def heard(self) -> list[bytes]:
        lines: list[bytes] = []
        with suppress(DadtError):  # rank 0, which serves the store, may have ended
            while self.world.folder_writer >= 0 and self._has(f"{self._log}/{self._heard + 1}"):
                self._heard += 1
                lines.append(self._get(f"{self._log}/{self._heard}"))
        return lines

    def await_save(self, path: str, count: int, number: int, step: int, timeout: float, far: bool = False) -> str:
        key = self._save_key(path, count, far)
        if not self._has(key):
            self._arrive([self._save_key("", number, far)], time.monotonic() + timeout, timeout)
        return "there" if self._has(key) else "write"

    def _save_key(self, path: str, count: int, far: bool = False) -> str:
        return f"saved/{f'by {self.world.folder_writer}' if far else self.world.cross_rank}/{path}/{count}"

    @property
    def _log(self) -> str:
        """Key under which ranks publish which files they have written in the folder that this host shares with other
        hosts."""
        return f"wrote/{self.world.folder_writer}"

    def _publish(self, state: str) -> None:
        self._state = state
        mine = {"pid": self._pid, "state": state, "step": self._step, "gathered": self._gathered, "time": time.time()}
        self._use(lambda values: values.set(f"state/{self.world.rank}", json.dumps(mine).encode()))

    def _peer(self, rank: int) -> dict[str, Any]:
        key = f"state/{rank}"
        if not self._has(key):
            return {"rank": rank, "pid": 0, "state": ABSENT, "said": ABSENT, "step": -1, "gathered": 0, "seconds": 0.0}
        known = json.loads(self._get(key))
        return {"rank": rank, "seconds": time.time() - known.pop("time"), "said": known["state"], **known}

    def _arrive(self, keys: list[str], deadline: float, patience: float = LOOK_SECONDS) -> bool:
        """Wait until all keys are in the store, until `deadline` and for at most `patience` seconds. Returns whether
        all are present."""
        seconds = min(deadline - time.monotonic(), patience)
        return polled(lambda: self._use(lambda values: values.check(keys)), seconds)

    def _has(self, key: str) -> bool:
        return self._use(lambda values: values.check([key]))

    def _get(self, key: str) -> bytes:
        return self._use(lambda values: values.get(key))

    def _use(self, action: Callable[[SharedValues], T]) -> T:
        self._check_process()
        return action(self._values)


def polled(done: Callable[[], bool], seconds: float) -> bool:
    """Call `done` again and again until it returns True or `seconds` have passed. Returns whether it has returned
    True."""
    deadline = time.monotonic() + seconds
    pause, longest = PAUSES
    while not done():
        if time.monotonic() >= deadline:
            return False
        time.sleep(pause)
        pause = min(2 * pause, longest)
    return True


def placed(world: World, everyone: Sequence[Mapping[str, Any]], address: str) -> World:
    """Return the World with host-related numbers filled in from the machine id of each rank; hosts are numbered in the
    order of their first ranks. address: where other hosts reach this host."""
    machines = [each["machine"] for each in everyone]
    here = [rank for rank, each in enumerate(machines) if each == machines[world.rank]]
    hosts = list(dict.fromkeys(machines))
    return World(
        rank=world.rank,
        local_rank=here.index(world.rank),
        cross_rank=hosts.index(machines[world.rank]),
        world_size=world.world_size,
        local_size=len(here),
        address="" if len(hosts) == 1 else address,
        job=world.job,
        launcher=world.launcher,
    )


def _address(everyone: Sequence[Mapping[str, Any]], rank: int) -> str:
    """Return the address at which other hosts reach this rank's host: for rank 0's host the one that other hosts used,
    for other hosts their own on the route to rank 0."""
    if everyone[rank]["machine"] != everyone[0]["machine"]:
        return str(everyone[rank]["own"])
    return str(next((each["store"] for each in everyone if each["machine"] != everyone[0]["machine"]), ""))


def machine_id() -> str:
    """Return an id that is equal for processes that can share memory: the kernel's boot id and the PID namespace."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {Path('/proc/self/ns/pid').readlink()}"


def _resolved(everyone: Sequence[Mapping[str, Any]]) -> tuple[Config, str]:
    """Return rank 0's settings, in which the options left open (seed and executor) are chosen for all ranks, and the
    reason for the executor."""
    config = Config.from_env(everyone[0]["config"])
    if config.seed < 0:
        config = replace(config, seed=everyone[0]["draw"])
    gpus: dict[str, list[int]] = {}
    for each in everyone:
        gpus.setdefault(each["machine"], []).append(each["gpus"])
    hosts = [HostWorkers(f"host {host}", len(each), min(each)) for host, each in enumerate(gpus.values())]
    return choose(config, hosts)


def _refuse_code(own: Config, first: Mapping[str, str]) -> None:
    """Raise ConfigError if rank 0 asks for an algorithm or timeline that would load code or name files and that this
    rank has not chosen itself. Called if ranks met without a secret, because then anyone could claim to be rank 0."""
    theirs = Config.from_env(first)
    for name in ("algorithm", "timeline"):
        chosen = str(getattr(theirs, name))
        if chosen != getattr(own, name) and (name == "timeline" or ":" in chosen):
            raise ConfigError(
                f"{flag(name)} {chosen}: rank 0 asks for it, this rank does not, and they met without a secret -> give "
                f"it to all ranks, or export the same DADT_SECRET for all"
            )


def _print(text: str) -> None:
    sys.stderr.write(f"dadt: {text}\n")
    sys.stderr.flush()
