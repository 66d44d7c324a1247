"""Splitting over ranks, against a brute-force reference: nothing lost, nothing doubled, the same steps."""

from __future__ import annotations

import itertools
import random

import pytest

from dadt.inject.data.share import (
    Batches,
    Divided,
    Items,
    PerRank,
    Repeated,
    Skipped,
    Spare,
    every_nth,
    portion,
    stream_steps,
)

SIZES = (1, 2, 3, 4, 7)
COUNTS = (0, 1, 2, 3, 5, 8, 13, 24, 25, 97)


def read(shares):
    """All ranks' pieces, checked: as many steps on each as len() says, repeats only of the step's samples."""
    steps = [list(share) for share in shares]
    assert {len(pieces) for pieces in steps} == {len(shares[0])}
    for row in zip(*steps, strict=True):
        assert len({repr(piece.whole) for piece in row}) == 1
        for piece in row:
            if piece.samples:
                assert piece.samples == len(piece.index)
            else:
                assert len(piece.index) in (1, 2)
                assert all(i in piece.whole or any(i in batch for batch in piece.whole) for i in piece.index)
    return steps


def counted(steps):
    return [i for pieces in steps for piece in pieces if piece.samples for i in piece.index]


@pytest.mark.parametrize("size", SIZES)
def test_portions_are_even_and_complete(size):
    for total in COUNTS:
        parts = [portion(total, rank, size) for rank in range(size)]
        assert list(itertools.chain(*parts)) == list(range(total))
        lengths = [len(p) for p in parts]
        assert max(lengths) - min(lengths) <= 1 and lengths == sorted(lengths, reverse=True)


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("batch_size", [1, 2, 5, 8])
def test_per_rank(size, batch_size, drop_last):
    for n in COUNTS:
        order = random.Random(n).sample(range(n), n)
        steps = read([PerRank(order, batch_size, drop_last, rank, size) for rank in range(size)])
        # Joined over ranks, each step is the next size * batch_size samples of the single process's order.
        whole = size * batch_size
        expected = [order[i : i + whole] for i in range(0, n, whole)]
        if drop_last:
            expected = [batch for batch in expected if len(batch) == whole]
        joined = [[i for piece in row if piece.samples for i in piece.index] for row in zip(*steps, strict=True)]
        assert joined == expected


@pytest.mark.parametrize("size", SIZES)
def test_batches_of_a_batch_sampler_in_turn(size):
    for number in COUNTS:
        pick = random.Random(number)
        indices = itertools.count()
        batches = [list(itertools.islice(indices, pick.randint(1, 6))) for _ in range(number)]
        steps = read([Batches(batches, rank, size) for rank in range(size)])
        assert sorted(counted(steps)) == sorted(itertools.chain(*batches))
        for k in range(number // size):
            assert [pieces[k].index for pieces in steps] == batches[k * size : (k + 1) * size]
        for piece in (pieces[-1] for pieces in steps if number % size):
            assert any(set(piece.index) <= set(batch) for batch in batches), "samples of two batches"


def test_batches_that_cannot_be_joined_are_repeated():
    batches = [slice(0, 4), slice(4, 8), slice(8, 12)]
    last = [list(Batches(batches, rank, 2))[-1] for rank in range(2)]
    assert [(piece.index, piece.samples) for piece in last] == [(slice(8, 12), 1), (slice(8, 12), 0)]


@pytest.mark.parametrize("size", SIZES)
def test_items_in_turn(size):
    for n in COUNTS:
        shares = [Items(range(n), rank, size) for rank in range(size)]
        steps = [list(share) for share in shares]
        assert {len(pieces) for pieces in steps} == {len(shares[0])} == {-(-n // size)}
        got = [piece.index for pieces in steps for piece in pieces if piece.samples]
        assert sorted(got) == list(range(n))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("times", [1, 2, 3])
def test_repeated_batches_stay_whole_and_are_read_as_often_as_alone(size, times):
    for n in COUNTS:
        different = [[2 * i, 2 * i, 2 * i + 1, 2 * i + 1] for i in range(n)]
        shares = [Repeated([b for b in different for _ in range(times)], times, rank, size) for rank in range(size)]
        steps = [list(share) for share in shares]
        assert {len(pieces) for pieces in steps} == {len(shares[0])} == {-(-n // size) * times}
        for rank, pieces in enumerate(steps):
            given = [piece.index for piece in pieces if piece.samples]
            assert given == [b for b in different[rank::size] for _ in range(times)]
            assert all(piece.samples in (0, 4) and piece.index in different for piece in pieces)


def test_items_that_are_batches_count_their_samples():
    pieces = [list(Items([[1, 2, 3], [4, 5]], rank, 2)) for rank in range(2)]
    assert [p[0].samples for p in pieces] == [3, 2]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("batch_size", [7, 8, 16])
def test_divided(size, batch_size):
    for n in COUNTS:
        batches = [list(range(i, min(i + batch_size, n))) for i in range(0, n, batch_size)]
        steps = read([Divided(batches, batch_size, rank, size) for rank in range(size)])
        joined = [[i for piece in row if piece.samples for i in piece.index] for row in zip(*steps, strict=True)]
        assert joined == batches


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("batch_size", [2, 5])
def test_nobody_is_left_with_one_sample(size, batch_size):
    """BatchNorm cannot train on one, and the single process had more."""
    for n in range(2, 60):
        if n % batch_size == 1:
            continue  # there, the single process has a batch of one as well
        shares = [PerRank(range(n), batch_size, False, rank, size) for rank in range(size)]
        assert all(len(piece.index) >= 2 for share in shares for piece in share)
        counts = [list(share)[-1].samples for share in shares]
        given = [count for count in counts if count]
        assert max(given) - min(given) <= 1 and sum(given) == (n % (batch_size * size) or batch_size * size)


def test_nominal_batch_is_the_same_on_every_rank():
    """Weights of a step are samples over nominal: they compare between ranks only if nominal is one number."""
    for make in (
        lambda rank: PerRank(range(100), 8, False, rank, 3),
        lambda rank: Batches([[0, 1, 2], [3], [4, 5]] * 5, rank, 3),
        lambda rank: Items(range(10), rank, 3),
        lambda rank: Repeated([[0, 0, 1, 1]] * 4, 2, rank, 3),
        lambda rank: Divided([list(range(8))] * 4, 8, rank, 3),
        lambda rank: Divided([list(range(8))] * 4, 0, rank, 3),
    ):
        shares = [make(rank) for rank in range(3)]
        for share in shares:
            next(iter(share))
        assert len({share.nominal for share in shares}) == 1 and shares[0].nominal >= 1


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("block", [0, 6, 12])
def test_every_nth(size, block):
    for n in COUNTS:
        parts = [list(every_nth(iter(range(n)), rank, size, block * size)) for rank in range(size)]
        real = [[i for i in mine if not isinstance(i, Spare)] for mine in parts]
        assert sorted(itertools.chain(*real)) == list(range(n))
        for rank, mine in enumerate(parts):
            assert [i for i in mine if not isinstance(i, Spare)] == list(range(n))[rank::size]
            assert (n > 0 and not real[rank]) == any(isinstance(i, Spare) for i in mine)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("batch_size", [1, 3, 8])
def test_whole_blocks_give_every_rank_as_much(size, batch_size):
    for n in COUNTS:
        block = batch_size * size
        parts = [list(every_nth(range(n), rank, size, block, True)) for rank in range(size)]
        real = [[i for i in mine if not isinstance(i, Spare)] for mine in parts]
        assert {len(mine) for mine in real} == {n // block * batch_size}
        assert sorted(itertools.chain(*real)) == list(range(n // block * block))
        assert stream_steps(n, batch_size, True, size) * batch_size == len(real[0])


def test_a_stream_may_hold_none():
    assert list(every_nth([None, None, None], 1, 2)) == [None]
    assert list(every_nth([None], 1, 2)) == [Spare(None)]


@pytest.mark.parametrize("steps", [1, 3, 99])
@pytest.mark.parametrize("size", SIZES)
def test_steps_are_skipped_on_all_ranks(size, steps):
    batches = [[3 * i, 3 * i + 1, 3 * i + 2] for i in range(20)]
    for kind in (lambda rank: PerRank(range(60), 3, False, rank, size), lambda rank: Batches(batches, rank, size)):
        whole = read([kind(rank) for rank in range(size)])
        rest = read([Skipped(kind(rank), steps) for rank in range(size)])
        assert rest == [pieces[steps:] for pieces in whole]


@pytest.mark.parametrize("whole", [[], [5]])
def test_walks_again_from_the_start(whole):
    share = PerRank(whole, 2, False, 0, 2)
    assert list(share) == list(share)
