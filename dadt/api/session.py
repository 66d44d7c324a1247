"""The session from `dadt.init` to `dadt.shutdown`: this rank's numbers, and the sets of ranks that exchange tensors."""

from __future__ import annotations

import atexit
import itertools
import json
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from dadt.comm.collectives import operation
from dadt.comm.collectives.object import gather_bytes
from dadt.comm.collectives.process_set import ProcessSet
from dadt.comm.executors.meet import Apart, Meet
from dadt.comm.trace.merge import merge
from dadt.comm.trace.recorder import Timeline
from dadt.config import Config
from dadt.config.check import flag
from dadt.errors import CommError, ConfigError, DadtError
from dadt.inject import worker
from dadt.world import World

if TYPE_CHECKING:
    from dadt.train.runtime import Runtime

KNOBS = {"all_reduce_executor": "allreduce_executor", "timeline_path": "timeline"}
"""Arguments of `dadt.init` that have another name in Config, each with its name in Config."""
CLOSE_SECONDS = 10.0
"""Seconds for which a script that ends without `shutdown` waits for pending operations."""
MOST_TAG = 1 << 18
"""Largest tag that a caller may give a message. DADT itself uses tags above it, and some MPI libraries allow no tag
above 2**19."""
_LOCAL_TAG = MOST_TAG + 1


class Session:
    """The state of DADT from `dadt.init` to `dadt.shutdown`, one per process. All ranks create it together, since the
    constructor waits for the other ranks."""

    def __init__(self, knobs: Mapping[str, Any]) -> None:
        """knobs: arguments of `dadt.init`. Raises ConfigError if they are wrong or differ between ranks, and
        StartTimeout, which names the missing ranks."""
        self.runtime: Runtime = worker.ask()
        self.knobs = dict(knobs)
        config = configured(self.runtime.ranks.config, knobs)
        self.world = self.runtime.ranks.world
        if self.runtime.ranks.control is not None:
            self.runtime.ranks.requests.checkpoint_signal.begin(*self.runtime.ranks.control.claim())
            self.runtime.reports.listen()
        mine = {"host": self.world.cross_rank, "config": config.to_env()}
        told = [json.loads(blob) for blob in self.runtime.ranks.meet.exchange("dadt.init", json.dumps(mine).encode())]
        _agree([each["config"] for each in told])
        self.runtime.ranks.config = self.config = config
        self._hosts: list[int] = [each["host"] for each in told]
        self._pid = os.getpid()
        self._sets: list[ProcessSet] = []
        self._steps = 0
        self._numbers = itertools.count(1)
        self.all = self._make(range(self.world.world_size), Apart(self.runtime.ranks.meet, "all"))
        self._counting = register_optimizer_step_post_hook(self._stepped)
        atexit.register(self._exit)

    @property
    def cross_size(self) -> int:
        """Number of different hosts on which the ranks run."""
        return len(set(self._hosts))

    @property
    def is_homogeneous(self) -> bool:
        """Whether all hosts have the same number of ranks."""
        return len({self._hosts.count(host) for host in self._hosts}) == 1

    @property
    def forked(self) -> bool:
        """Whether this process is a forked child of the process that created the session."""
        return os.getpid() != self._pid

    def check_process(self) -> None:
        """Raise DadtError if this process is a forked child, which must not exchange tensors."""
        if self.forked:
            raise DadtError(
                f"process {os.getpid()} is a fork of rank {self.world.rank}: only the process that called dadt.init()"
                " may exchange tensors"
            )

    def add(self, ranks: Sequence[int]) -> ProcessSet:
        """Add a process set of these ranks. All ranks of the job call `add` with the same ranks. Raises ValueError if
        the ranks do not exist, occur twice or differ between callers."""
        name = f"process set {next(self._numbers)}"
        # The constructor compares `ranks` of all callers, and raises ValueError if they differ.
        rounds = _Rounds(self.all, ranks, name, self.runtime.ranks.meet.secret)
        chosen = sorted(set(ranks))
        if len(chosen) != len(ranks) or not chosen or chosen[0] < 0 or chosen[-1] >= self.world.world_size:
            raise ValueError(
                f"add_process_set({list(ranks)}): give one or more different ranks from 0 to"
                f" {self.world.world_size - 1}"
            )
        try:
            made = self._make(chosen, rounds)
        except Exception as error:
            rounds.end(f"{type(error).__name__}: {error}")
            raise
        rounds.end()
        return made

    def remove(self, chosen: ProcessSet) -> None:
        """Close the connection of a set of ranks. Raises ValueError for the set of all ranks. May be called again."""
        if chosen is self.all:
            raise ValueError("remove_process_set: the set of all ranks ends with dadt.shutdown()")
        if chosen in self._sets:
            self._sets.remove(chosen)
        chosen.close(self.config.timeout)
        self.runtime.ranks.progress.links.end(chosen)

    def local_barrier(self) -> None:
        """Wait until all ranks of this host have called `local_barrier`. Ranks exchange messages for this, since a
        collective operation would also need the ranks of other hosts."""
        if self.world.local_size == self.world.world_size:
            self.all.submit(operation.barrier(self.all.size), None).wait()
            return
        here = [rank for rank, host in enumerate(self._hosts) if host == self.world.cross_rank]
        mail, sign = self.all.mail, torch.zeros(1, dtype=torch.uint8, device="cpu")
        with self.all.naming_ranks():
            first, others = here[0], here[1:]
            if self.world.rank != first:
                mail.send(sign, first, _LOCAL_TAG).wait(self.config.timeout)
                mail.receive(sign, first, _LOCAL_TAG).wait(self.config.timeout)
                return
            for transit in [mail.receive(torch.zeros_like(sign), rank, _LOCAL_TAG) for rank in others]:
                transit.wait(self.config.timeout)
            for transit in [mail.send(sign, rank, _LOCAL_TAG) for rank in others]:
                transit.wait(self.config.timeout)

    def close(self, timeout: float, reason: str = "") -> None:
        """Close the process sets, newest first, and then the runtime. reason: if given, pending operations fail with
        this reason on all ranks. `close` may be called again."""
        sets, self._sets = self._sets, []
        self._counting.remove()
        # The ExitStack closes every process set and the runtime, even if closing one of them raises an error.
        with ExitStack() as stack:
            stack.callback(self.runtime.close, failed=bool(reason))
            for each in sets:
                stack.callback(each.close, timeout, reason)
            if sets and self.runtime.ranks.timeline is not None and not reason:
                self.runtime.ranks.say(merge(self.runtime.ranks.timeline, _Peers(self.all), self.runtime.ranks.members))

    def _make(self, ranks: Sequence[int], meet: Meet) -> ProcessSet:
        deaths, control = self.runtime.ranks.deaths, self.runtime.ranks.control
        dump = control.dump if deaths.listening and control is not None else None
        made = ProcessSet(ranks, self._world_of(ranks), self._config_of(ranks), meet, deaths, dump)
        self._sets.append(made)
        if made.included:
            self.runtime.ranks.progress.links.begin(made, made.links)
        if self.config.timeline and made.included:
            self._record(made)
        return made

    def _record(self, made: ProcessSet) -> None:
        """Record the operations of a process set in the timeline. The first set recorded contains all ranks of the job;
        over its connection the timeline compares the clocks of all ranks."""
        timeline = self.runtime.ranks.timeline
        if timeline is None:
            timeline = self.runtime.ranks.timeline = Timeline(self.config.timeline, self.world)
            timeline.start(_Peers(made))
            timeline.count(self.runtime.ranks.progress.links.totals)
        timeline.record(made.named.connection, f"named tensors of {made}")

    def _world_of(self, ranks: Sequence[int]) -> World | None:
        """Return this rank's World among these ranks; None if this rank is not among them."""
        if self.world.rank not in ranks:
            return None
        hosts = [self._hosts[rank] for rank in ranks]
        rank = ranks.index(self.world.rank)
        here = hosts[rank]
        return replace(
            self.world,
            rank=rank,
            world_size=len(ranks),
            local_rank=hosts[:rank].count(here),
            local_size=hosts.count(here),
            cross_rank=sorted(set(hosts)).index(here),
            address=self.world.address if len(set(hosts)) > 1 else "",
        )

    def _config_of(self, ranks: Sequence[int]) -> Config:
        """Return the configuration for a set of ranks. The set may be on fewer hosts than all ranks, so the executor is
        chosen again."""
        if len(ranks) == 1:
            return replace(self.config, executor="null", broadcast_executor="", allreduce_executor="")
        if len(ranks) < self.world.world_size and self.config.executor.partition(":")[0] in ("shm", "hierarchical"):
            return replace(self.config, executor="auto")
        return self.config

    def _stepped(self, *_: object) -> None:
        """Count this rank's steps, so that a report of a stall says how far each rank has come."""
        self._steps += 1
        self.all.named.set_step(self._steps)

    def _exit(self) -> None:
        """Close the session of a script that ends without `shutdown`."""
        if self.forked:
            return
        failed = isinstance(getattr(sys, "last_value", None), BaseException)
        try:
            self.close(CLOSE_SECONDS, f"rank {self.world.rank} failed" if failed else "")
        except CommError as error:
            # The error is only printed, because the other ranks raise an error where they wait, and this rank's exit
            # code is that of its script.
            if failed:
                return  # Python has already printed the exception that ended the script
            sys.stderr.write(f"dadt: rank {self.world.rank} ended: {error}\n")


class _Peers:
    """The ranks of a process set, with the methods that a timeline needs to exchange bytes with them."""

    def __init__(self, among: ProcessSet) -> None:
        self._among = among

    def allgather(self, data: bytes, name: str) -> list[bytes]:
        return gather_bytes(self._among, data, name)

    gather = allgather


class _Rounds(Meet):
    """Lets the ranks of a new process set exchange bytes before they have a connection of their own: all ranks of the
    job gather messages repeatedly over the connection that they all have, and each rank sends the value that it has to
    share, or nothing. `look` and `say` do nothing, because that connection already reports long waits, and its links
    have been shown to the user."""

    secret = b""

    def __init__(self, all: ProcessSet, ranks: Sequence[int], name: str, secret: bytes) -> None:
        self.secret = secret
        self._all = all
        self._ranks = sorted(ranks)
        self._name = name
        self._round = 0
        self._told: dict[str, bytes] = {}
        self._ended: dict[int, str] = {}
        self._compare()

    def exchange(self, key: str, blob: bytes) -> list[bytes]:
        """Send `blob` under this key, and wait for the values that all ranks of the set send under the same key.
        Returns the values by rank. Raises DadtError if a rank has failed."""
        self.put(f"{key} of {self._all.rank}", blob)
        return self.get([f"{key} of {rank}" for rank in self._ranks])

    def put(self, key: str, blob: bytes) -> None:
        self._tell(key, blob, "")

    def get(self, keys: Sequence[str]) -> list[bytes]:
        """Wait until ranks have put values under these keys, and return the values. Raises DadtError if a rank has
        failed."""
        while not all(key in self._told for key in keys):
            self._pass()
        return [self._told[key] for key in keys]

    def end(self, error: str = "") -> None:
        """Report that this rank has connected, or has failed with `error`, and take part in further exchanges until all
        ranks have reported. Raises DadtError if another rank failed, unless `error` is given."""
        self._tell("", b"", error or "done")
        while len(self._ended) < self._all.size:
            self._tell("", b"", error or "done")
        if not error:
            self._check()

    def _compare(self) -> None:
        every = gather_bytes(self._all, json.dumps(list(self._ranks)).encode(), f"ranks of {self._name}")
        for rank, ranks in enumerate(every):
            if ranks != every[0]:
                raise ValueError(
                    f"add_process_set: rank 0 gives {every[0].decode()} and rank {rank} {ranks.decode()};"
                    " every rank must call it with the same ranks"
                )

    def _tell(self, key: str, blob: bytes, ended: str) -> None:
        self._round += 1
        head = json.dumps([key, ended]).encode() + b"\n"
        every = gather_bytes(self._all, head + blob, f"{self._name}, round {self._round}")
        for rank, data in enumerate(every):
            head, _, blob = data.partition(b"\n")
            key, ended = json.loads(head)
            if key:
                self._told[key] = blob
            if ended:
                self._ended[rank] = ended

    def _pass(self) -> None:
        """Take part in one exchange between all ranks of the job without sending a value. Raises DadtError if a rank
        has failed."""
        self._check()
        self._tell("", b"", "")

    def _check(self) -> None:
        for rank, text in sorted(self._ended.items()):
            if text != "done":
                raise DadtError(f"{self._name} of ranks {list(self._ranks)} was not made: rank {rank}: {text}")


def configured(config: Config, knobs: Mapping[str, Any]) -> Config:
    """Return the configuration, changed by the arguments of `dadt.init` that are not None. Raises ConfigError."""
    known = {f.name: f for f in fields(Config) if not f.metadata["launch"]}
    given = {KNOBS.get(name, name): value for name, value in knobs.items() if value is not None}
    for name, value in given.items():
        if name not in known:
            raise ConfigError(f"dadt.init({name}=): unknown; choose of {', '.join(known)}")
        default = known[name].default
        wanted = (int, float) if isinstance(default, float) else type(default)
        if not isinstance(value, wanted) or isinstance(value, bool) != isinstance(default, bool):
            raise ConfigError(f"dadt.init({name}={value!r}): give {_article(type(default).__name__)}")
        if isinstance(default, float):
            given[name] = float(given[name])
    return replace(config, **given)


def _article(name: str) -> str:
    return {"int": "a whole number", "float": "a number", "str": "text", "bool": "True or False"}.get(name, name)


def _agree(configs: Sequence[Mapping[str, str]]) -> None:
    for rank, config in enumerate(configs):
        for variable, value in config.items():
            if value != configs[0][variable]:
                name = variable.removeprefix("DADT_").lower()
                raise ConfigError(
                    f"{flag(name)} (dadt.init({name}=)) is {configs[0][variable]} on rank 0 and {value} on rank {rank}:"
                    " every rank must give the same"
                )
