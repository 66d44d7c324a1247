"""Executors over Gloo (TCP) and other backends of torch.distributed, using process groups of DADT's own instead of the
script's default group."""

from __future__ import annotations

import datetime
import hashlib
import os
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from time import monotonic
from typing import Any

import torch
from torch import distributed
from torch.distributed import (  # type: ignore[attr-defined]
    AllreduceOptions,
    AllToAllOptions,
    BroadcastOptions,
    PrefixStore,
    ProcessGroupGloo,
    ReduceOp,
)
from torch.distributed.distributed_c10d import (  # type: ignore[attr-defined]
    Backend,
    _DistributedBackendOptions,
)

from dadt.comm.executors import proof, pull
from dadt.comm.executors.base import Connection
from dadt.comm.executors.c10d_message import C10dMessage
from dadt.comm.executors.framed import FramedMessages
from dadt.comm.executors.keys import Keys
from dadt.comm.executors.meet import Meet, attend
from dadt.comm.executors.strangers import strangers
from dadt.comm.keepalive import KeepAlive
from dadt.comm.waiters import Waiters
from dadt.config import Config
from dadt.config.link import pace_of
from dadt.control.pacing import paced
from dadt.errors import ConfigError, PeerLost
from dadt.world import World

_REDUCE = {"sum": ReduceOp.SUM, "min": ReduceOp.MIN, "max": ReduceOp.MAX, "product": ReduceOp.PRODUCT}
_GIVE_UP_SECONDS = 5.0
_TAG = 1 << 30
"""Message tag that the executor itself uses; callers' tags must be below it."""


def connect(name: str, config: Config, world: World, meet: Meet) -> Connection:
    """Connect all ranks by the torch.distributed backend of this name. Raises ConfigError if torch has no usable
    backend of this name."""
    check(name)
    executor = join(name, meet, world, range(world.world_size), config)
    return pull.connect(executor, world.rank, world.world_size, config.timeout)


def gloo(config: Config, world: World, meet: Meet) -> Connection:
    return connect("gloo", config, world, meet)


def check(name: str) -> None:
    """Raise ConfigError if torch has no backend of this name, or if the backend cannot be used for a process group of
    DADT's own."""
    if name == "gloo" or (name not in ("mpi", "dadt", "fake") and name.upper() in Backend._plugins):
        return
    asked = name if name == "nccl" else f"c10d:{name}"
    if name in ("mpi", "dadt", "fake"):
        raise ConfigError(f"executor {asked}: cannot be used through torch.distributed -> give another, or mpi")
    if not getattr(distributed, f"is_{name}_available", lambda: False)():
        known = {
            "gloo",
            *(n for n in ("nccl", "ucc", "xccl") if getattr(distributed, f"is_{n}_available", lambda: False)()),
        }
        names = ", ".join(sorted({*known, *map(str.lower, Backend._plugins)} - {"dadt", "fake"}))
        raise ConfigError(
            f"executor {asked}: torch {torch.__version__} ({torch.__path__[0]}) has no such backend, only {names} -> "
            + _INSTALL.get(name, f"import the package that registers {name} before training, or give one of these")
        )
    device = Backend.backend_capability[name][0]
    if device != "cpu" and not torch.get_device_module(device).is_available():
        raise ConfigError(
            f"executor {asked}: torch sees no {device.upper()} device here -> run where there is one, or give gloo"
        )


_INSTALL = {
    "nccl": "pip install torch --index-url https://download.pytorch.org/whl/cu128 (a build for CUDA), or give gloo",
    "xccl": "pip install torch --index-url https://download.pytorch.org/whl/xpu (a build for Intel GPUs), or give gloo",
    "ucc": "build torch with USE_UCC=1, or give gloo",
}


def join(name: str, meet: Meet, world: World, ranks: Sequence[int], config: Config) -> C10d:
    """Connect these ranks of the world, which are renumbered in the given order, and let all prove that they belong to
    the job. Raises Unproved or PeerLost if a rank does not prove this."""
    own = name_of(name, ranks)
    devices = Backend.backend_capability.get(name, ["cpu"])
    device = None
    if "cpu" not in devices:  # uses the current device, which the script may have set
        device = torch.device(devices[0], torch.get_device_module(devices[0]).current_device())
    rank = ranks.index(world.rank)

    def joined() -> C10d:
        store = Keys(meet, rank, len(ranks))
        with paced(pace_of(config.link)):
            each = C10d(name, group(name, store, world, ranks, config.timeout, own), rank, len(ranks), device)
        answered = partial(strangers, world.job, store.holds)
        proof.prove(each, meet.secret, rank, ranks, name, own, config.start_timeout, answered)
        return each

    return joined() if device is not None else attend(meet, f"connecting by {proof.title(name)}", joined)


def name_of(name: str, ranks: Sequence[int]) -> str:
    """Return a short name for the group of these ranks, equal on all of them. It is part of the group's keys in a
    store."""
    return f"{name} {hashlib.sha256(' '.join(map(str, ranks)).encode()).hexdigest()[:16]}"


def group(name: str, store: Any, world: World, ranks: Sequence[int], timeout: float, own: str) -> Any:
    """Create torch's process group of these ranks. own: a name that separates the keys of groups that share a store."""
    rank, size = ranks.index(world.rank), len(ranks)
    if name == "gloo":
        return gloo_group(store, world.address or "127.0.0.1", rank, size, timeout, own)
    made = _other_group(name, PrefixStore(own, store), rank, size, timeout)
    # NCCL's group reads its store at its first operation, but torch keeps only a store's C++ object alive; the
    # finalizer keeps the Python object alive.
    weakref.finalize(made, lambda _: None, store).atexit = False
    return made


def gloo_group(store: Any, address: str, rank: int, world_size: int, timeout: float, name: str = "dadt") -> Any:
    """Create a process group of Gloo. address: this host's address. name: separates the keys of groups that share a
    store."""
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = datetime.timedelta(seconds=timeout)
    with _threads_give_way():
        options._devices = [ProcessGroupGloo.create_device(hostname=address)]
        return ProcessGroupGloo(PrefixStore(name, store), rank, world_size, options)


@contextmanager
def _threads_give_way() -> Iterator[None]:
    """Context manager that gives threads started within it batch scheduling. Such threads do not interrupt a computing
    thread for every few packets, but handle many packets at once, which halves the kernel's work."""
    usual = os.sched_getscheduler(0) == os.SCHED_OTHER and _schedule(os.SCHED_BATCH)
    try:
        yield
    finally:
        if usual:
            _schedule(os.SCHED_OTHER)


def _schedule(policy: int) -> bool:
    """Set the scheduling policy of the calling thread. Returns False if a sandbox forbids it."""
    try:
        os.sched_setscheduler(0, policy, os.sched_param(0))
    except OSError:
        return False
    return True


def _other_group(name: str, store: Any, rank: int, world_size: int, timeout: float) -> Any:
    """Create a process group as torch.distributed does, but without registering the group with torch.distributed."""
    seconds = datetime.timedelta(seconds=timeout)
    if plugin := Backend._plugins.get(name.upper()):
        if not plugin.extended_api:
            return plugin.creator_fn(store, rank, world_size, seconds)
        made = _DistributedBackendOptions()
        made.store, made.group_rank, made.group_size, made.timeout = store, rank, world_size, seconds
        made.group_id, made.global_ranks_in_group = f"dadt {name}", list(range(world_size))
        return plugin.creator_fn(made, None)
    kind: Any = getattr(distributed, f"ProcessGroup{name.upper()}")
    if name == "ucc":
        return kind(store, rank, world_size, timeout=seconds)
    options = kind.Options()
    options._timeout = seconds
    return kind(store, rank, world_size, options)


class C10d:
    """A torch.distributed process group as an Executor. If the backend moves a device's memory only, host tensors are
    copied to the device."""

    def __init__(self, name: str, group: Any, rank: int, world_size: int, device: torch.device | None = None) -> None:
        self.name = name
        self.means = name == "nccl"
        self._group = group
        self._rank = rank
        self._world_size = world_size
        self._device = device
        self._aborted = False
        # The function always reports no failure: every message ends by itself, possibly with an error, and its memory
        # may be released afterwards.
        self._kept = KeepAlive(lambda: False)
        self._messages: weakref.WeakSet[C10dMessage] = weakref.WeakSet()
        self._waiters = Waiters("dadt-message")
        self._lock = threading.Lock()
        self._letters = FramedMessages(group, rank)

    def start(self, flat: torch.Tensor) -> Any:
        """Start a sum or mean over ranks, in place, of a tensor in memory that the group can access. Returns
        torch.distributed's Work."""
        options, real = AllreduceOptions(), torch.view_as_real(flat) if flat.is_complex() else flat
        if self.means and real.is_floating_point():
            options.reduceOp = ReduceOp(ReduceOp.AVG)
        return self._group.allreduce([real], options)

    def alltoall(self, sent: torch.Tensor, received: torch.Tensor) -> Any:
        """Start to exchange parts of equal size with each rank, of tensors in memory that the group can access. Returns
        torch.distributed's Work."""
        return self._group.alltoall_base(received.view(-1), sent.view(-1), [], [], AllToAllOptions())

    def gather(self, mine: torch.Tensor, all: torch.Tensor) -> Any:
        """Start to gather parts of equal size from all ranks. Returns torch.distributed's Work."""
        return self._group._allgather_base(all.view(-1), mine.view(-1))

    def allreduce(self, flat: torch.Tensor, reduction: str) -> None:
        options = AllreduceOptions()
        options.reduceOp = _REDUCE[reduction]  # type: ignore[assignment]
        moved = flat if self._device is None else flat.to(self._device)
        if flat.dtype == torch.int16:  # neither Gloo nor NCCL supports int16
            moved = moved.to(torch.int32)
        self._group.allreduce([moved], options).wait()
        if moved is not flat:
            flat.copy_(moved)

    def allgather(self, mine: torch.Tensor, all: torch.Tensor) -> None:
        if self._device is None:
            self._group._allgather_base(all, mine).wait()
            return
        moved = torch.empty_like(all, device=self._device)
        self._group._allgather_base(moved, mine.to(self._device)).wait()
        all.copy_(moved)

    def broadcast(self, flat: torch.Tensor, root: int) -> None:
        options = BroadcastOptions()
        options.rootRank = root
        moved = flat if self._device is None else flat.to(self._device)
        self._group.broadcast([moved], options).wait()
        if moved is not flat and root != self._rank:
            flat.copy_(moved)

    def exchange(self, sends: Sequence[torch.Tensor], receives: Sequence[torch.Tensor]) -> None:
        if self._device is not None:
            self._exchange_at_once(sends, receives)
            return
        messages = []
        for offset in range(1, self._world_size):
            to = (self._rank + offset) % self._world_size
            source = (self._rank - offset) % self._world_size
            if receives[source].numel():
                messages.append(self._receive(receives[source], source, _TAG))
            if sends[to].numel():
                messages.append(self._send(sends[to], to, _TAG))
        receives[self._rank].copy_(sends[self._rank])
        for message in messages:
            message.finish()

    def _exchange_at_once(self, sends: Sequence[torch.Tensor], receives: Sequence[torch.Tensor]) -> None:
        """Exchange with all ranks in one operation. Since a device runs one message at a time, two ranks that both
        receive first would hang."""
        lengths = [[len(tensor) for tensor in tensors] for tensors in (receives, sends)]
        moved = torch.empty(sum(lengths[0]), dtype=torch.uint8, device=self._device)
        self._group.alltoall_base(moved, torch.cat(list(sends)).to(self._device), *lengths, AllToAllOptions()).wait()
        for receive, part in zip(receives, torch.split(moved, lengths[0]), strict=True):
            receive.copy_(part)

    def send(self, tensor: torch.Tensor, peer: int, tag: int = 0) -> C10dMessage:
        self._check()
        if self._device is not None:
            return self._keep(self._send(tensor, peer, tag), f"a message to {_named(peer, tag)}")
        try:
            letter = self._letters.send(tensor, peer, tag)
        # PyTorch raises this if it already knows that the connection to the peer is closed
        except RuntimeError as error:
            raise PeerLost(f"a message to {_named(peer, tag)} was not delivered: {error}") from error
        message = C10dMessage(self._waiters, letter, self._rank, tensor, tensor)
        return self._keep(message, f"a message to {_named(peer, tag)}")

    def receive(self, tensor: torch.Tensor, peer: int | None, tag: int = 0) -> C10dMessage:
        self._check()
        if self._device is not None:
            return self._keep(self._receive(tensor, peer, tag), f"a message from {_named(peer, tag)}")
        try:
            letter = self._letters.receive(tensor, peer, tag)
        # PyTorch raises this if it already knows that the connection to the peer is closed
        except RuntimeError as error:
            raise PeerLost(f"a message from {_named(peer, tag)} was not received: {error}") from error
        message = C10dMessage(self._waiters, letter, peer, tensor, tensor)
        message.begin()
        return self._keep(message, f"a message from {_named(peer, tag)}")

    def _check(self) -> None:
        if self._aborted:
            raise PeerLost("no message is sent or received any more: the job has failed")

    def _keep(self, message: C10dMessage, what: str) -> C10dMessage:
        """Keep the message's object alive, since a library does not deliver a message whose object is destroyed. what:
        the message's name in error texts."""
        message.what = what
        self._kept.add(message, message)
        with self._lock:
            self._messages.add(message)
        if self._aborted:  # another thread may have called abort() since _check()
            message.give_up(_GIVE_UP_SECONDS)
        return message

    def _send(self, tensor: torch.Tensor, peer: int, tag: int) -> C10dMessage:
        moved = tensor if self._device is None else tensor.to(self._device)
        return C10dMessage(self._waiters, self._group.send([moved], peer, tag), self._rank, moved, moved)

    def _receive(self, tensor: torch.Tensor, peer: int | None, tag: int) -> C10dMessage:
        moved = tensor if self._device is None else torch.empty_like(tensor, device=self._device)
        if peer is None:
            return C10dMessage(self._waiters, self._group.recv_anysource([moved], tag), None, moved, tensor)
        return C10dMessage(self._waiters, self._group.recv([moved], peer, tag), peer, moved, tensor)

    def abort(self) -> None:
        self._aborted = True
        if self.name == "gloo":
            self._hang_up()
        # In old versions of torch, NCCL's group has no abort(); its shutdown() aborts all communicators.
        names = ("abort", "shutdown", "_shutdown") if self.name == "nccl" else ("abort",)
        end = next((each for name in names if (each := getattr(self._group, name, None))), None)
        if end is not None:
            end()

    def _hang_up(self) -> None:
        """End all waits in Gloo. Gloo's own abort does not end waits that have begun, but a wait that times out closes
        all connections. A wait for a lost peer fails at once without closing any connection, so every peer is tried."""
        nothing = torch.empty(1, dtype=torch.uint8, device="cpu")
        for offset in range(1, self._world_size):
            with suppress(Exception):  # the receive is meant to time out, and the group may already have ended
                peer = (self._rank + offset) % self._world_size
                self._group.recv([nothing], peer, _TAG + 1).wait(datetime.timedelta(milliseconds=1))

    def close(self) -> bool:
        """Close the group and its threads, before the interpreter ends. Returns whether the memory of operations is no
        longer in use; this is certain only for Gloo, whose destructor waits for its threads."""
        if self.name == "nccl" and not self._aborted:
            self._group.shutdown()  # without this call NCCL's destructor warns that the group was not shut down
        else:
            self._end_messages()
        self._waiters.close()
        self._letters.close()
        group, self._group = weakref.ref(self._group), None
        return self.name == "gloo" and group() is None

    def _end_messages(self) -> None:
        """Wait up to _GIVE_UP_SECONDS for messages that this rank is sending, then give up all messages that are not
        finished."""
        deadline = monotonic() + _GIVE_UP_SECONDS
        with self._lock:
            messages = list(self._messages)
        for message in messages:
            if message.sender == self._rank and not self._aborted:
                message.stay(max(0.0, deadline - monotonic()))
        for message in messages:
            message.give_up(max(0.0, deadline - monotonic()))


def _named(peer: int | None, tag: int) -> str:
    return f"{'any rank' if peer is None else f'rank {peer}'} (tag {tag})"
