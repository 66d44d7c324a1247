"""Named tensors between processes, over shared memory."""

from __future__ import annotations

import os
import random
import socket
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from harness.patience import PATIENCE, await_that
from harness.ranks import fresh_processes

from dadt import _core
from dadt.comm import executors
from dadt.comm.collectives import named, operation
from dadt.comm.collectives.named import Named, _connect_here, describe
from dadt.config import Config
from dadt.control.connection import Reach, Refused, Unreached, dial
from dadt.errors import Aborted, CommTimeout, Mismatch, PeerLost, StartTimeout
from dadt.world import World

TENSORS = 1000


class Through:
    """A Meet through whoever has started the ranks."""

    secret = b"s" * 32
    outdated = None

    def __init__(self, pipe: Pipe) -> None:
        self._pipe = pipe

    def exchange(self, key: str, blob: bytes) -> list[bytes]:
        self._pipe.send((key, blob))
        return self._pipe.recv()  # type: ignore[no-any-return]

    def put(self, key: str, blob: bytes) -> None:
        """As Gloo's ranks do: each puts once."""
        told = [each.partition(b" is ") for each in self.exchange("put", key.encode() + b" is " + blob)]
        self._known = {key.decode(): value for key, _, value in told}

    def get(self, keys: Sequence[str]) -> list[bytes]:
        return [self._known[key] for key in keys]


class Alone(Through):
    """One rank whose peers say nothing of their own."""

    def __init__(self, size: int) -> None:
        self._size = size

    def exchange(self, key: str, blob: bytes) -> list[bytes]:
        return [blob] * self._size


def _main(body: Callable[..., Any], world: World, options: dict[str, Any], pipe: Pipe, args: Any) -> None:
    try:
        torch.set_num_threads(1)
        config = Config(executor="shm", start_timeout=PATIENCE, **options)
        meet = Through(pipe)
        connection = executors.connect(config, world, meet)
        pipe.send((None, body(Named(connection, config, world, meet), *args)))
    except BaseException:
        pipe.send(("error", traceback.format_exc()))


def spawn(size: int, body: Callable[..., Any], *args: Any, address: str = "", **options: Any) -> list[Any]:
    """What body(named, *args) returns in a process of its own for each rank; None for one that died without a word."""
    context = fresh_processes()
    pipes = [context.Pipe() for _ in range(size)]
    worlds = [
        World(rank=r, local_rank=r, world_size=size, local_size=1 if address else size, address=address)
        for r in range(size)
    ]
    ranks = [
        context.Process(target=_main, args=(body, world, options, theirs, args), daemon=True)
        for world, (_, theirs) in zip(worlds, pipes, strict=True)
    ]
    for process, (_, theirs) in zip(ranks, pipes, strict=True):
        process.start()
        theirs.close()
    try:
        results: list[Any] = [None] * size
        open_ranks = set(range(size))
        while open_ranks:
            blobs = {}
            for rank in sorted(open_ranks):
                ours = pipes[rank][0]
                assert ours.poll(PATIENCE), f"rank {rank} is silent"
                try:
                    key, value = ours.recv()
                except EOFError:
                    key, value = None, None
                assert key != "error", f"rank {rank}:\n{value}"
                if key is None:
                    open_ranks.discard(rank)
                    results[rank] = value
                else:
                    blobs[rank] = value
            for rank in blobs:
                pipes[rank][0].send([blobs[r] for r in range(size)])
        return results
    finally:
        for process in ranks:
            process.kill()
            process.join()


def shuffled_sums(named: Named) -> list[int]:
    """How many operations a turn of 1000 tensors of 4 KB took."""
    tensors = [torch.empty(1024) for _ in range(TENSORS)]
    operations = []
    for turn in range(3):
        order = list(range(TENSORS))
        random.Random(named.rank * 10 + turn).shuffle(order)
        for i in order:
            tensors[i].fill_(float(i + named.rank))
        pending = {
            i: named.submit(operation.all_reduce(tensors[i], tensors[i], "sum", named.size), f"tensor {i}")
            for i in order
        }
        for i, one in pending.items():
            one.wait(PATIENCE)
            assert torch.all(tensors[i] == named.size * i + named.size * (named.size - 1) / 2)
        operations.append(len({one._work.operation for one in pending.values()}))  # type: ignore[attr-defined]
    named.close(PATIENCE)
    return operations


@pytest.mark.parametrize("size", [2, 4])
def test_a_thousand_small_tensors_in_another_order_on_each_rank(size: int) -> None:
    results = spawn(size, shuffled_sums)
    assert all(operations == results[0] for operations in results)
    assert max(results[0]) < TENSORS / 5


def verbs(named: Named) -> bool:
    rank, size = named.rank, named.size
    mean = torch.full((3, 4), float(rank))
    sent = torch.full((5,), rank, dtype=torch.int64)
    calls = {
        "mean": operation.all_reduce(mean, mean, "mean", size),
        "sent": operation.broadcast(sent, 1, rank, size),
        "rows": operation.all_gather(torch.full((rank + 1, 2), rank), size),
    }
    names = list(calls)
    names = names[rank:] + names[:rank]
    pending = {name: named.submit(calls[name], name) for name in names}
    results = {name: one.wait(PATIENCE) for name, one in pending.items()}
    assert results["mean"] is mean
    assert torch.all(mean == (size - 1) / 2)
    assert torch.all(sent == 1)
    assert [row.tolist() for row in results["rows"]] == [[[r, r]] * (r + 1) for r in range(size)]
    named.close(PATIENCE)
    return True


@pytest.mark.parametrize("address", ["", "127.0.0.1"])
def test_verbs_in_any_order_within_a_host_and_over_tcp(address: str) -> None:
    assert all(spawn(3, verbs, address=address))


def cut_while_summing(named: Named) -> int:
    """How many connections were replaced while tensors were summed."""
    cut, step, replaced, goes_on = tcp_connections(), 0, 0, torch.ones(1)
    while goes_on:
        if named.rank == step % named.size:
            now = tcp_connections()
            replaced += len(now.keys() - cut.keys())
            cut = now
            for descriptor in now.values():
                with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as one:  # it may be gone already
                    one.shutdown(socket.SHUT_RDWR)
        tensors = [torch.full((3,), float(i)) for i in range(20)]
        pending = [
            named.submit(operation.all_reduce(t, t, "sum", named.size), f"tensor {i}") for i, t in enumerate(tensors)
        ]
        goes_on = torch.tensor([float(step < 100 and (named.rank > 0 or replaced < 6))])
        pending.append(named.submit(operation.all_reduce(goes_on, goes_on, "min", named.size), "goes on"))
        for one in pending:
            one.wait(PATIENCE)
        assert all(torch.equal(t, torch.full((3,), float(named.size * i))) for i, t in enumerate(tensors))
        step += 1
    named.close(PATIENCE)
    return replaced


def tcp_connections() -> dict[tuple[object, object], int]:
    """Descriptors of this process's established connections, by their ends."""
    found = psutil.Process().net_connections("tcp")
    return {(one.laddr, one.raddr): one.fd for one in found if one.status == psutil.CONN_ESTABLISHED}


def test_tensors_are_summed_over_connections_that_are_replaced() -> None:
    assert spawn(3, cut_while_summing, address="127.0.0.1")[0] >= 6


def end_alone(named: Named) -> str | None:
    tensor = torch.ones(3)
    named.submit(operation.all_reduce(tensor, tensor, "sum", named.size), "first").wait(PATIENCE)
    if named.rank == 2:
        os._exit(1)
    with pytest.raises(PeerLost) as caught:
        named.submit(operation.all_reduce(tensor, tensor, "sum", named.size), "second").wait(PATIENCE)
    return str(caught.value)


def test_a_rank_that_dies_is_named_over_tcp_as_well() -> None:
    results = spawn(3, end_alone, address="127.0.0.1")
    assert results[2] is None
    for rank in (0, 1):
        assert "rank 2 is gone" in results[rank], results


def attacked(named: Named) -> int:
    """How many strangers were turned away."""
    tensor, count = torch.ones(3), 0
    named.submit(operation.all_reduce(tensor, tensor, "sum", named.size), "before").wait(PATIENCE)
    if named.rank == 1:
        (address,) = {raddr for _, raddr in tcp_connections()}  # where rank 0 listens
        for key, use in ((b"t" * 32, "negotiation"), (Through.secret, "negotiation"), (Through.secret, "mended"),
                         (Through.secret, "broken"), (Through.secret, "other")):  # fmt: skip
            reach = Reach(addresses=[address[0]], port=address[1], key=key, silence=PATIENCE)
            hello = {"use": use, "place": 2, "group": "named tensors", "number": 0, "count": 1, "attempt": 1}
            with pytest.raises((Refused, Unreached)):
                dial(lambda: reach, hello, 0.0)
            count += 1
        with socket.create_connection(address) as stranger, suppress(OSError):
            stranger.sendall(b"\xff" * 100_000)
    after = torch.ones(3)
    named.submit(operation.all_reduce(after, after, "sum", named.size), "after").wait(PATIENCE)
    assert torch.equal(after, torch.full((3,), float(named.size)))
    named.close(PATIENCE)
    return count


def test_nobody_else_gets_a_connection_with_rank_0() -> None:
    assert spawn(2, attacked, address="127.0.0.1") == [0, 5]


def differ(named: Named) -> str:
    tensor = torch.ones(3, dtype=torch.float64 if named.rank == 1 else torch.float32)
    pending = named.submit(operation.all_reduce(tensor, tensor, "mean", named.size), "grad")
    with pytest.raises(Mismatch) as caught:
        pending.wait(PATIENCE)
    again = torch.ones(3)
    named.submit(operation.all_reduce(again, again, "sum", named.size), "grad").wait(PATIENCE)
    assert torch.all(again == named.size)
    named.close(PATIENCE)
    return str(caught.value)


def test_tensors_that_differ_fail_alone_and_name_both_ranks() -> None:
    text = '"grad": rank 0 has all_reduce mean float32 [3], rank 1 has all_reduce mean float64 [3]'
    assert spawn(2, differ) == [text] * 2


def group_and_join(named: Named) -> int:
    pair = [torch.ones(3), torch.ones(4)]
    pending = [
        named.submit(operation.all_reduce(t, t, "sum", named.size), f"member {i}", "pair", 2)
        for i, t in enumerate(pair)
    ]
    for one in pending:
        one.wait(PATIENCE)
    assert len({one._work.operation for one in pending}) == 1  # type: ignore[attr-defined]
    for batch in range(2 * (named.rank + 1)):
        tensor = torch.full((2,), float(named.rank))
        named.submit(operation.all_reduce(tensor, tensor, "mean", named.size), "loss").wait(PATIENCE)
        assert torch.all(tensor == (1.0 if batch >= 2 else 0.5))
    ticket = named.join()
    ticket.wait(PATIENCE)
    named.close(PATIENCE)
    return ticket.last_joined


def test_groups_and_ranks_that_end_early() -> None:
    assert spawn(2, group_and_join) == [1, 1]


def die(named: Named) -> str | None:
    if named.rank == 1:
        os._exit(1)
    tensor = torch.ones(3)
    with pytest.raises(PeerLost) as caught:
        named.submit(operation.all_reduce(tensor, tensor, "mean", named.size), "grad").wait(PATIENCE)
    return str(caught.value)


def test_a_rank_that_dies_is_named() -> None:
    results = spawn(3, die)
    assert results[1] is None
    for rank in (0, 2):
        assert "rank 1" in results[rank]


def stall(named: Named, record: str) -> str:
    with open(f"{record}.{named.rank}", "w") as log:
        sys.stderr = sys.__stderr__ = log  # type: ignore[misc]
        named.set_step(5 + named.rank)
        tensor = torch.ones(3)
        if named.rank == 1:
            named.submit(operation.all_reduce(tensor, tensor, "mean", named.size), "other")
        pending = named.submit(operation.all_reduce(tensor, tensor, "mean", named.size), f"only {named.rank}")
        with pytest.raises(Aborted) as caught:
            pending.wait(PATIENCE)
        # Another thread writes it, after the abort.
        await_that(lambda: log.flush() or named.rank != 0 or Path(log.name).read_text(), "the warning")
        return str(caught.value)


def test_a_stall_is_told_and_may_end_all_ranks(tmp_path: Any) -> None:
    texts = spawn(2, stall, str(tmp_path / "log"), stall_warning=0.2, on_stall="abort")
    told = (tmp_path / "log.0").read_text()
    assert texts[0].startswith('"o')
    assert "submitted by rank" in texts[0] and "not by rank" in texts[0] and "(step " in texts[0]
    assert texts[1] == f"rank 0 gave up: {texts[0]}"
    assert texts[0] in told


def dump(named: Named, record: str) -> bool:
    with open(f"{record}.{named.rank}", "w+") as log:
        sys.stderr = sys.__stderr__ = log  # type: ignore[misc]
        tensor = torch.ones(3)
        if named.rank == 0:
            early = named.submit(operation.all_reduce(tensor, tensor, "mean", named.size), "late")
        # The other's thread writes it.
        await_that(lambda: "most recent call first" in Path(log.name).read_text(), "the stacks")
        if named.rank == 1:
            early = named.submit(operation.all_reduce(tensor, tensor, "mean", named.size), "late")
        early.wait(PATIENCE)
        named.close(PATIENCE)
    return True


def test_a_stall_may_dump_the_stacks_of_all_ranks(tmp_path: Any) -> None:
    assert all(spawn(2, dump, str(tmp_path / "log"), stall_warning=0.2, on_stall="dump"))
    assert "where rank 1 is:" in (tmp_path / "log.1").read_text()
    assert '"late" has waited' in (tmp_path / "log.0").read_text()


def on_two_engines(named: Named) -> list[bool]:
    """Which of two operations the engine for broadcasts ran."""
    broadcaster, timeline = named.connection.broadcaster, _core.Timeline(named.rank, 0.0)
    assert broadcaster is not None
    broadcaster.record(timeline, 1)
    told, summed = torch.full((5,), float(named.rank)), torch.ones(5)
    calls = {
        "told": operation.broadcast(told, 1, named.rank, named.size),
        "summed": operation.all_reduce(summed, summed, "sum", named.size),
    }
    for one in [named.submit(call, name) for name, call in calls.items()]:
        one.wait(PATIENCE)
    assert torch.all(told == 1)
    assert torch.all(summed == named.size)
    named.close(PATIENCE)
    timeline.close()
    events = timeline.drain(0.0).decode()
    return [name in events for name in calls]


def test_broadcasts_go_over_the_executor_for_broadcasts() -> None:
    assert spawn(2, on_two_engines, broadcast_executor="gloo") == [[True, False]] * 2


def test_ranks_that_do_not_come_are_named() -> None:
    world = World(rank=0, world_size=3, local_size=3)
    with pytest.raises(StartTimeout, match=r"ranks 1, 2 did not come to the start of named tensors within 0\.2 s"):
        _connect_here(world, Alone(3), 0.2)


def test_a_world_of_one_works() -> None:
    config, world = Config(executor="shm"), World()
    named = Named(executors.connect(config, world, Alone(1)), config, world, Alone(1))
    tensor = torch.full((3,), 2.0)
    named.submit(operation.all_reduce(tensor, tensor, "mean", 1), "x").wait(PATIENCE)
    assert torch.all(tensor == 2)
    with pytest.raises(ValueError, match="has a name and a size"):
        named.submit(operation.all_reduce(tensor, tensor, "mean", 1), "x", "group")
    named.close(PATIENCE)


def test_a_stall_is_described_with_steps() -> None:
    class Seen:
        name, seconds, submitted, missing, steps = "fc.weight", 60.4, [0, 2], [1], [12, 11, 12]
        group, group_has, group_size = "", 0, 0

    class Short(Seen):
        submitted, missing = [0, 1], []
        group, group_has, group_size = "fc", 2, 3

    text = '"fc.weight" has waited 60 s: submitted by rank 0 (step 12), rank 2 (step 12); not by rank 1 (step 11)'
    assert describe(Seen()) == text  # type: ignore[arg-type]
    text = describe(Short())  # type: ignore[arg-type]
    assert text.endswith('submitted by rank 0 (step 12), rank 1 (step 11); its group "fc" has 2 of 3 tensors')


@pytest.mark.parametrize(("stalls", "rest"), [(8, []), (9, ["1 more tensor waits"]), (10, ["2 more tensors wait"])])
def test_of_many_stalls_the_first_are_described(monkeypatch: Any, stalls: int, rest: list[str]) -> None:
    said: list[str] = []
    monkeypatch.setattr(named, "_say", said.append)
    monkeypatch.setattr(named, "describe", str)
    Named._tell(SimpleNamespace(_on_stall="warn"), range(stalls))  # type: ignore[arg-type]
    assert said == [*map(str, range(8)), *(f"{text} as well" for text in rest)]


def test_a_wait_that_takes_too_long_says_whether_ranks_are_to_blame() -> None:
    assert (
        spawn(1, wait_for_the_rest)[0]
        == '"x" was not done within 0.05 s: some rank has not submitted it, or not all of its group'
    )


def wait_for_the_rest(named: Named) -> str:
    tensor = torch.ones(3)
    pending = named.submit(operation.all_reduce(tensor, tensor, "mean", 1), "x", "pair", 2)
    with pytest.raises(CommTimeout) as caught:
        pending.wait(0.05)
    named.submit(operation.all_reduce(tensor, tensor, "mean", 1), "y", "pair", 2)
    ticket = named.join()
    ticket.wait(PATIENCE)
    assert ticket.received == []
    return str(caught.value)
