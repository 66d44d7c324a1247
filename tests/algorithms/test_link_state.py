"""What two ranks of a gossip need not say again: compression by differences."""

from __future__ import annotations

import queue
import threading
from collections import defaultdict
from contextlib import nullcontext

import pytest
import torch
from harness.patience import PATIENCE

from dadt.algorithms.gossip.edge import Answering, Asking, LinkMessages
from dadt.algorithms.gossip.gossip import check_copies
from dadt.algorithms.gossip.link_state import LinkState
from dadt.algorithms.gossip.pairing import link_state
from dadt.algorithms.gossip.snapshot import WeightSnapshot
from dadt.errors import CommTimeout, ConfigError

LEAST = {"bf16": 1.99, "fp16": 1.99, "int8": 3.9, "powersgd:2": 4.9}
"""Times fewer bytes."""
NAMES = list(LEAST)


@pytest.fixture(autouse=True)
def one_thread():
    """Beside other work a second one of torch's is waited for longer than it computes."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def weights(seed: int, large: int) -> list[torch.Tensor]:
    """Of so many elements, of a block and a bit, tiny, without any, transposed, with holes, and of other dtypes."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    return [
        draw(10, large // 10),
        draw(257),
        draw(1)[0],
        draw(0, 3),
        draw(9, 20).T,
        draw(8, 3, 4, 5).to(memory_format=torch.channels_last),
        draw(5, 80)[:, :30],
        draw(6, 50).double(),
        draw(6, 50).to(torch.bfloat16),
        draw(3, 40).to(torch.complex64),
    ]


class Rank:
    """One rank's live weights and the snapshot of them."""

    def __init__(self, seed: int, large: int = 300) -> None:
        self.live = weights(seed, large)
        self.snapshot = WeightSnapshot(self.live)
        self.step = 0
        self.publish()

    def publish(self) -> None:
        self.snapshot.publish(self.live, self.step)
        self.step += 1

    def train(self, generator: torch.Generator, size: float) -> None:
        for tensor in self.live:
            tensor += (size * torch.randn(tensor.shape, generator=generator)).to(tensor.dtype)
        self.publish()


def ends(name: str, one: Rank, other: Rank) -> tuple[LinkState, LinkState]:
    return link_state(name, one.snapshot, True), link_state(name, other.snapshot, False)


def exchange(between: tuple[LinkState, LinkState], one: Rank, other: Rank) -> int:
    """Gives the bytes of a message."""
    size, again = (end.size for end in between)
    assert size == again
    messages = [torch.empty(size, dtype=torch.uint8) for _ in between]
    steps = [
        end.say(rank.snapshot, message) for end, rank, message in zip(between, (one, other), messages, strict=True)
    ]
    theirs = [message.clone() for message in reversed(messages)]
    for end, rank, mine, their, step in zip(between, (one, other), messages, theirs, steps, strict=True):
        end.settle(rank.snapshot, mine, their, step)
        rank.publish()
    return size


def apart(one: Rank, other: Rank) -> float:
    """The greatest difference, of what has 32 bits or more."""
    pairs = zip(one.live, other.live, strict=True)
    return max(float((a - b).abs().max()) for a, b in pairs if a.numel() and a.dtype != torch.bfloat16)


def mean(ranks: list[Rank]) -> list[torch.Tensor]:
    return [
        torch.stack([t.to(torch.complex128) for t in each]).mean(0)
        for each in zip(*(r.live for r in ranks), strict=True)
    ]


def assert_mean(ranks: list[Rank], before: list[torch.Tensor]) -> None:
    for now, then, tensor in zip(mean(ranks), before, ranks[0].live, strict=True):
        torch.testing.assert_close(now, then, atol=0.05 if tensor.dtype == torch.bfloat16 else 1e-5, rtol=0)


@pytest.mark.parametrize("name", NAMES)
def test_two_come_together_with_no_floor_and_their_mean_stays(name: str) -> None:
    one, other = Rank(1, 300_000), Rank(2, 300_000)  # more than a part
    between = ends(name, one, other)
    exchange(between, one, other)
    generator = torch.Generator().manual_seed(3)
    for rank in (one, other):
        rank.train(generator, 1.0)
    before = mean([one, other])
    assert apart(one, other) > 1.0
    # Of 10 rows, two exchanges bring 2 directions together.
    sizes = [exchange(between, one, other) for _ in range(24 if name.startswith("powersgd") else 4)]
    assert apart(one, other) < 3e-6
    assert_mean([one, other], before)
    assert max(sizes) < one.snapshot.bytes / LEAST[name]


@pytest.mark.parametrize("name", ["none", "int8", "powersgd:2"])
def test_infinity_is_one_ranks_alone_and_does_not_stay(name: str) -> None:
    """Its script replaces its weights by finite ones, as from a checkpoint."""
    one, other = Rank(1), Rank(2)
    between = ends(name, one, other)
    exchange(between, one, other)
    one.live[0][0, 0] = torch.inf
    one.live[1][0] = torch.nan
    one.live[-1][0, 0] = torch.nan  # complex
    one.publish()
    for _ in range(2):
        exchange(between, one, other)
    for tensor in (one.live[0], one.live[1], one.live[-1]):
        assert not tensor.isfinite().all()
    assert all(tensor.isfinite().all() for tensor in other.live)
    for tensor, value in zip(one.live, weights(1, 300), strict=True):
        tensor.copy_(value)
    one.publish()
    before = mean([one, other])
    for _ in range(24):
        exchange(between, one, other)
    assert apart(one, other) < 3e-6
    assert_mean([one, other], before)


@pytest.mark.parametrize("name", NAMES)
def test_four_that_train_stay_as_near_as_without_compression(name: str) -> None:
    def train(name: str) -> float:
        ranks = [Rank(0) for _ in range(4)]
        begun = mean(ranks)
        edges = [(0, 1), (2, 3), (0, 3), (2, 1)]
        between = {edge: ends(name, ranks[edge[0]], ranks[edge[1]]) for edge in edges}
        generator = torch.Generator().manual_seed(3)
        drift = [torch.randn(t.shape, generator=generator) for t in ranks[0].live]
        far = []
        for turn in range(60):
            for rank in ranks:
                for tensor, towards in zip(rank.live, drift, strict=True):
                    tensor += (0.1 * towards).to(tensor.dtype)  # what all learn
                rank.train(generator, 0.01)  # and each for itself
            for i in (0, 1):
                edge = edges[(2 * turn + i) % 4]
                exchange(between[edge], ranks[edge[0]], ranks[edge[1]])
            far.append(max(apart(ranks[0], other) for other in ranks[1:]))
        moved = [float((now - then).abs().mean()) for now, then in zip(mean(ranks), begun, strict=True) if then.numel()]
        assert min(moved) > 0.5
        return sum(far[30:]) / 30

    plain, compressed = train("none"), train(name)
    # What each learns for itself is of full rank here.
    assert compressed < plain * (6 if name.startswith("powersgd") else 1.05)


class Post:
    """Messages between two threads, as a PointToPoint's between two ranks."""

    def __init__(self) -> None:
        self._boxes: defaultdict[int, queue.SimpleQueue[torch.Tensor]] = defaultdict(queue.SimpleQueue)

    def send(self, tensor: torch.Tensor, peer: int, tag: int = 0) -> Message:
        self._boxes[peer].put(tensor.clone())
        return Message(None, tensor)

    def receive(self, tensor: torch.Tensor, peer: int | None, tag: int = 0) -> Message:
        return Message(self._boxes[1 - (peer or 0)], tensor)


class Message:
    """One under way."""

    def __init__(self, box: queue.SimpleQueue[torch.Tensor] | None, tensor: torch.Tensor) -> None:
        self.done = box is None
        self.source = 0
        self._box, self._tensor = box, tensor

    def wait(self, timeout: float) -> None:
        if self._box is None:
            return
        try:
            self._tensor.copy_(self._box.get(timeout=timeout))
        except queue.Empty:
            raise CommTimeout("nothing came") from None
        self._box, self.done = None, True


def test_ends_begin_anew_where_one_has_lost_what_both_knew() -> None:
    one, other, post = Rank(1), Rank(2), Post()
    there: list[WeightSnapshot | None] = [other.snapshot]
    ended: queue.SimpleQueue[bool] = queue.SimpleQueue()
    asking = Asking(
        LinkMessages(post, 0, 1, 1, 0, 20.0),
        lambda: nullcontext(one.snapshot),
        lambda snapshot: link_state("int8", snapshot, True),
        lambda edge, averaged: ended.put(averaged),
    )
    answering = Answering(
        LinkMessages(post, 1, 0, 0, 0, 20.0), lambda: nullcontext(there[0]), lambda p: link_state("int8", p, False)
    )
    threads = [threading.Thread(target=end.run, daemon=True) for end in (asking, answering)]
    for thread in threads:
        thread.start()
    sent = [0]

    def ask() -> tuple[bool, int]:
        asking.order()
        averaged = ended.get(timeout=PATIENCE)
        sent.append(asking.line.sent)
        return averaged, sent[-1] - sent[-2]

    begun = mean([one, other])
    whole = one.snapshot.bytes
    assert ask() == (True, whole)
    averaged, short = ask()
    assert averaged and short < whole / 2
    there[0] = WeightSnapshot(one.live[:3])  # the script trains fewer
    assert ask() == (False, short)
    assert ask() == (False, whole)
    there[0] = other.snapshot
    assert ask() == (True, whole)
    assert ask() == (True, short)
    asking.retire()
    for thread in threads:
        thread.join(PATIENCE)
        assert not thread.is_alive()
    assert asking.plain == 6 * whole
    for rank in (one, other):
        rank.publish()
    assert apart(one, other) < 3e-6
    assert_mean([one, other], begun)


def test_copies_for_many_neighbours_are_refused() -> None:
    check_copies("int8", "complete", 48)
    check_copies("int8", "exponential", 4096)
    check_copies("powersgd:4", "complete", 1000)
    with pytest.raises(ConfigError, match=r"a copy of the weights for each of 25 neighbours, and 24 is the most"):
        check_copies("int8", "complete", 50)
