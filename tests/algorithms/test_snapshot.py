"""The copy that a rank averages with others while it trains."""

from __future__ import annotations

import threading

import pytest
import torch

from dadt.algorithms.gossip import snapshot
from dadt.algorithms.gossip.link_state import LinkState, PlainLinkState
from dadt.algorithms.gossip.snapshot import WeightSnapshot


def weights(seed: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Larger than a part, tiny, without elements, of another memory order, with holes, and of another dtype."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    wide = draw(5, 8)
    return [
        draw(300, 900),
        draw(1)[0],
        draw(0, 3),
        draw(2, 3, 4, 5).to(memory_format=torch.channels_last),
        wide[:, :3],
        draw(33).to(torch.float64 if not dtype.is_complex else torch.complex128),
    ]


def test_parts_are_small_and_hold_every_element_once() -> None:
    tensors = weights(0)
    seen = [torch.zeros(t.numel(), dtype=torch.long) for t in tensors]
    for part in WeightSnapshot(tensors).parts:
        assert part.stop - part.start <= snapshot.PART_BYTES
        for piece in part.pieces:
            seen[piece.tensor][piece.start : piece.stop] += 1
    assert all(bool((count == 1).all()) for count in seen)


def begin(one: WeightSnapshot) -> tuple[LinkState, torch.Tensor, int]:
    """What one end says."""
    state = PlainLinkState("none", one)
    message = one.take(state.size)
    return state, message, state.say(one, message)


def exchange(one: WeightSnapshot, other: WeightSnapshot) -> int:
    """What two edges do; gives the step of the copy that was sent."""
    (asking, question, step), (answering, answer, other_step) = begin(one), begin(other)
    answering.settle(other, answer, question.clone(), other_step)
    asking.settle(one, question, answer, step)
    one.give_back(question)
    other.give_back(answer)
    return step


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64])
def test_both_come_to_the_mean_at_the_next_boundary(dtype: torch.dtype) -> None:
    mine, theirs = weights(1, dtype), weights(2, dtype)
    means = [(a.to(torch.complex128) + b) / 2 for a, b in zip(mine, theirs, strict=True)]
    one, other = WeightSnapshot(mine), WeightSnapshot(theirs)
    assert one.crc == other.crc
    assert not one.publish(mine, 1) and not other.publish(theirs, 5)
    before = [t.clone() for t in mine]
    exchange(one, other)
    assert all(torch.equal(a, b) for a, b in zip(mine, before, strict=True))  # live weights are left alone until then
    assert one.publish(mine, 3) == {2: 1}
    assert other.publish(theirs, 6) == {1: 1}
    assert not one.publish(mine, 4)
    for side in (mine, theirs):
        for tensor, mean in zip(side, means, strict=True):
            # Of two numbers in bfloat16 below 4, the mean is rounded to the next 64th or so.
            torch.testing.assert_close(
                tensor.to(torch.complex128), mean, atol=0.04 if dtype.itemsize == 2 else 1e-6, rtol=0
            )


def train(tensors: list[torch.Tensor], update: float) -> None:
    for tensor in tensors:
        tensor += update


def assert_sums(mine: list[torch.Tensor], theirs: list[torch.Tensor], totals: list[torch.Tensor]) -> None:
    for a, b, total in zip(mine, theirs, totals, strict=True):
        torch.testing.assert_close(a.double() + b, total, atol=1e-4, rtol=0)


def test_a_late_answer_keeps_the_sum() -> None:
    mine, theirs = weights(1), weights(2)
    totals = [a.double() + b + 3 * 0.25 for a, b in zip(mine, theirs, strict=True)]
    one, other = WeightSnapshot(mine), WeightSnapshot(theirs)
    one.publish(mine, 0)
    other.publish(theirs, 0)
    (asking, question, step), (answering, answer, other_step) = begin(one), begin(other)
    answering.settle(other, answer, question.clone(), other_step)
    for later in (1, 2, 3):  # both train on, and average meanwhile
        train(mine, 0.5)
        train(theirs, -0.25)
        one.publish(mine, later)
        other.publish(theirs, later)
        exchange(one, other)
    asking.settle(one, question, answer, step)
    one.publish(mine, 4)
    other.publish(theirs, 4)
    assert_sums(mine, theirs, totals)


def test_training_and_averaging_at_once_lose_nothing() -> None:
    mine, theirs = weights(1), weights(2)
    begun = [a.double() + b for a, b in zip(mine, theirs, strict=True)]
    one, other = WeightSnapshot(mine), WeightSnapshot(theirs)
    one.publish(mine, 0)
    other.publish(theirs, 0)
    ended = threading.Event()
    exchanged = []

    def average() -> None:
        while not ended.is_set():
            exchanged.append(exchange(one, other))

    thread = threading.Thread(target=average)
    thread.start()
    step = 0
    while step < 20 or len(exchanged) < 5:  # pytest's timeout ends a test in which nothing is averaged
        step += 1
        train(mine, 0.5)
        train(theirs, -0.25)
        one.publish(mine, step)
        other.publish(theirs, step)
    ended.set()
    thread.join()
    assert len(exchanged) >= 5
    ages = one.publish(mine, step + 1)
    other.publish(theirs, step + 1)
    assert sum(ages.values()) <= len(exchanged)
    assert_sums(mine, theirs, [total + step * 0.25 for total in begun])


def test_what_was_added_goes_to_tensors_of_another_kind() -> None:
    mine, theirs = weights(1), weights(2)
    means = [(a.double() + b) / 2 for a, b in zip(mine, theirs, strict=True)]
    one, other = WeightSnapshot(mine), WeightSnapshot(theirs)
    one.publish(mine, 0)
    other.publish(theirs, 0)
    exchange(one, other)
    lives: list[torch.Tensor | None] = [tensor.double().contiguous() for tensor in mine]
    lives[1] = None  # gone
    for _ in range(2):  # once
        one.hand_over(lives)
        for live, mean in zip(lives, means, strict=True):
            if live is not None:
                torch.testing.assert_close(live, mean, atol=1e-6, rtol=0)
