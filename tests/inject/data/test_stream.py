"""Iterable data sets over ranks: nothing lost or doubled, as many batches on every rank."""

from __future__ import annotations

import itertools
import pickle
import random
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from harness.forked_ranks import ranks, single
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from torch.utils.data.datapipes.iter import IterableWrapper

from dadt.errors import DadtError
from dadt.inject.data.stream import EveryNth, Split, first_dimension


class Numbers(IterableDataset):
    def __init__(self, start: int, end: int) -> None:
        self.start, self.end = start, end

    def __iter__(self):
        info = get_worker_info()
        step, first = (info.num_workers, info.id) if info else (1, 0)
        return iter(range(self.start + first, self.end, step))


class Sized(Numbers):
    def __len__(self) -> int:
        return self.end - self.start


class Shuffled(Numbers):
    def __iter__(self):
        order = list(range(self.start, self.end))
        random.shuffle(order)
        for i in order:
            torch.rand(1)
            yield i


def restrict(worker: int) -> None:
    """As torch's documentation has it: each worker's copy of the data set is given a range of its own."""
    info = get_worker_info()
    span = (info.dataset.end - info.dataset.start) // info.num_workers
    info.dataset.start += worker * span
    if worker < info.num_workers - 1:
        info.dataset.end = info.dataset.start + span


class Ranged(Numbers):
    def __iter__(self):
        return iter(range(self.start, self.end))


def passes(make, epochs: int = 2):
    def script(runtime):
        loader = make()
        read, before = [], len(getattr(runtime, "draws", ()))
        for _ in range(epochs):
            read.append([])
            for batch in loader:
                torch.rand(1), random.random()
                runtime.train()
                read[-1].append(torch.as_tensor(batch).reshape(-1).tolist())
        return read, getattr(runtime, "draws", [])[before:], getattr(runtime, "said", None)

    return script


def real(answer, epoch: int, epochs: int = 2) -> list[int]:
    """What a rank read, without its repeats."""
    read, draws, _ = answer
    start = sum(len(batches) for batches in read[:epoch])
    counts = [samples for samples, _ in draws[start : start + len(read[epoch])]]
    assert all(count in (0, len(batch)) for count, batch in zip(counts, read[epoch], strict=True))
    return [i for batch, count in zip(read[epoch], counts, strict=True) if count for i in batch]


def of_each_length(lengths, **given):
    """A script with a loader for each length of the data."""
    loaders = {n: lambda n=n: DataLoader(Numbers(0, n), **given) for n in lengths}
    return lambda runtime: {n: passes(make)(runtime) for n, make in loaders.items()}


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("size", [2, 3])
def test_all_samples_once_and_equal_steps(workers, size, tmp_path):
    lengths = (0, 1, 2, 7, 12, 25)
    every = ranks(size, of_each_length(lengths, batch_size=2, num_workers=workers), tmp_path)
    for n in lengths:
        answers = [answer[n] for answer in every]
        for epoch in range(2):
            assert len({len(read[epoch]) for read, _, _ in answers}) == 1, n
            assert sorted(i for answer in answers for i in real(answer, epoch)) == list(range(n)), n


@pytest.mark.parametrize("batch", ["per-rank", "global"])
def test_drop_last_drops_the_whole_global_batch(batch, tmp_path):
    lengths = (5, 12, 25)
    every = ranks(2, of_each_length(lengths, batch_size=4, drop_last=True), tmp_path, batch=batch)
    whole = 8 if batch == "per-rank" else 4
    for n in lengths:
        answers = [answer[n] for answer in every]
        for epoch in range(2):
            assert {len(read[epoch]) for read, _, _ in answers} == {n // whole}, n
            got = sorted(i for answer in answers for i in real(answer, epoch))
            assert got == list(range(n // whole * whole)), n


def test_global_batches_are_the_script_s(tmp_path):
    make = lambda: DataLoader(Numbers(0, 17), batch_size=5)  # noqa: E731
    answers = ranks(2, passes(make, 1), tmp_path, batch="global")
    expected = [list(range(i, min(i + 5, 17))) for i in range(0, 17, 5)]
    for k, batch in enumerate(expected):
        joined = [i for read, draws, _ in answers for i in read[0][k][: draws[k][0]]]
        assert sorted(joined) == batch
    assert {nominal for _, draws, _ in answers for _, nominal in draws} == {3}


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stream_that_shuffles_is_one_stream(workers, tmp_path):
    """Every rank walks the whole stream, so its random order must be common: the shared stream draws it."""
    make = lambda: DataLoader(Shuffled(0, 10), batch_size=2, num_workers=workers)  # noqa: E731
    answers = ranks(2, passes(make), tmp_path)
    copies = max(workers, 1)  # a data set that does not look at its worker is read once by each
    for epoch in range(2):
        got = sorted(i for answer in answers for i in real(answer, epoch))
        assert got == sorted(list(range(10)) * copies)
    if not workers:
        alone = single(lambda runtime: [i for b in DataLoader(Shuffled(0, 10), batch_size=2) for i in b.tolist()])
        mine = [real(answer, 0) for answer in answers]
        assert [i for pair in zip(*mine, strict=True) for i in pair] == alone


def test_a_worker_init_fn_reaches_the_data_set(tmp_path):
    make = lambda: DataLoader(Ranged(3, 21), batch_size=2, num_workers=2, worker_init_fn=restrict)  # noqa: E731
    answers = ranks(2, passes(make), tmp_path)
    for epoch in range(2):
        assert sorted(i for answer in answers for i in real(answer, epoch)) == list(range(3, 21))


@pytest.mark.slow  # spawned workers: test_loader.py; what they get of a stream: below, in a pickle
@pytest.mark.parametrize("persistent", [False, True])
def test_spawned_and_persistent_workers(persistent, tmp_path):
    make = lambda: DataLoader(  # noqa: E731
        Numbers(0, 11),
        batch_size=2,
        num_workers=1,
        multiprocessing_context="spawn",
        persistent_workers=persistent,
    )
    epochs = 2 if persistent else 1
    answers = ranks(2, passes(make, epochs), tmp_path)
    for epoch in range(epochs):
        assert sorted(i for answer in answers for i in real(answer, epoch)) == list(range(11))


def test_without_batches(tmp_path):
    make = lambda: DataLoader(Numbers(0, 5), batch_size=None)  # noqa: E731
    answers = ranks(2, passes(make), tmp_path)
    assert [read[0] for read, _, _ in answers] == [[[0], [2], [4]], [[1], [3], [3]]]
    assert [[samples for samples, _ in draws[:3]] for _, draws, _ in answers] == [[1, 1, 1], [1, 1, 0]]


def test_length_endless_breaks_and_several_at_once(tmp_path):
    def script(runtime):
        loader = DataLoader(Sized(0, 10), batch_size=2)
        assert len(loader) == 3, "the first loader trains, where none shuffles"
        assert len(DataLoader(Sized(0, 10), batch_size=2)) == 5
        first = next(iter(loader)).tolist()
        assert len(loader) == 3
        one, two = iter(loader), iter(loader)
        assert len(one) == 3
        mixed = [next(one).tolist(), next(two).tolist(), next(one).tolist(), next(two).tolist()]
        endless = itertools.cycle(DataLoader(Numbers(0, 4), batch_size=1))
        cycled = [next(endless).item() for _ in range(4)]
        assert list(one) and next(one, None) is None
        forever = DataLoader(Forever(), batch_size=1)
        return first, mixed, cycled, [batch.item() for batch in itertools.islice(forever, 3)], runtime.said

    a, b = ranks(2, script, tmp_path)
    assert (a[0], b[0]) == ([0, 2], [1, 3])
    assert a[1] == [[0, 2], [0, 2], [4, 6], [4, 6]]
    assert (a[2], b[2]) == ([0, 2, 0, 2], [1, 3, 1, 3])
    assert (a[3], b[3]) == ([0, 2, 4], [1, 3, 5])
    assert a[4][0] == "DataLoader #1 (a stream): trains, one sample in 2 per worker."


class Living(IterableDataset):
    """Goes on in each pass where the one before was left."""

    def __init__(self) -> None:
        self.numbers = itertools.count()

    def __iter__(self):
        return (number for number in self.numbers)


class Itself(Living):
    def __iter__(self):
        return self

    def __next__(self):
        return next(self.numbers)


@pytest.mark.parametrize("batch", ["per-rank", "global"])
@pytest.mark.parametrize("kind", [Living, Itself])
def test_a_stream_that_lives_on_loses_nothing_where_a_pass_is_left(kind, batch, tmp_path):
    def script(runtime):
        read = []
        loader = DataLoader(kind(), batch_size=5)
        for steps in (2, 1, 3):
            for drawn in itertools.islice(loader, steps):
                runtime.train()
                read += drawn.tolist()
        return read

    a, b = ranks(2, script, tmp_path, batch=batch)
    assert sorted(a + b) == list(range(60 if batch == "per-rank" else 30))


@pytest.mark.parametrize("shards", [True, False])
def test_length_with_workers(shards, tmp_path):
    class Whole(Sized):
        def __iter__(self):
            return iter(range(self.start, self.end))

    def script(runtime):
        loader = DataLoader((Sized if shards else Whole)(0, 26), batch_size=4, num_workers=2)
        return len(loader), [(len(list(loader)), len(loader)) for _ in range(2)]

    for before, after in ranks(2, script, tmp_path):
        steps = after[0][0]
        assert after == 2 * [(steps, steps)]
        assert before == steps or not shards


class Forever(IterableDataset):
    def __iter__(self):
        return itertools.count()


def test_evaluation_reads_all(tmp_path):
    def script(runtime):
        runtime.script.began, runtime.training = True, False
        return [i for batch in DataLoader(Numbers(0, 5), batch_size=2) for i in batch.tolist()]

    assert ranks(2, script, tmp_path) == [list(range(5))] * 2


def test_an_error_comes_with_its_own_batch(tmp_path):
    class Broken(Numbers):
        def __iter__(self):
            yield from range(6)
            raise ValueError("the stream is broken")

    def script(runtime):
        batches = iter(DataLoader(Broken(0, 6), batch_size=1))
        got = []
        with pytest.raises(ValueError, match="the stream is broken"):
            while True:
                got.append(next(batches).item())
        return got

    assert ranks(2, script, tmp_path) == [[0, 2, 4], [1, 3, 5]]


@pytest.mark.parametrize("together", [True, False])
def test_another_thread_reads_only_where_no_rank_asks_the_others(together, tmp_path):
    def script(runtime):
        runtime.ranks.together = together
        batches = iter(DataLoader(Numbers(0, 6), batch_size=1))
        with ThreadPoolExecutor(1, "ahead") as thread:
            reading = thread.submit(list, batches)
            if together:
                with pytest.raises(DadtError, match=r"DataLoader #1 is a stream that another thread \(ahead_0\) reads"):
                    reading.result()
            return len(list(batches)) if together else len(reading.result())

    assert ranks(2, script, tmp_path) == [3, 3]


@pytest.mark.parametrize("together", [True, False])
def test_the_end_of_a_pass_is_told(together, tmp_path):
    def script(runtime):
        runtime.ranks.together = together
        loader = DataLoader(Numbers(0, 6), batch_size=1)
        return [len(list(loader)) for _ in range(2)], runtime.ends

    assert ranks(2, script, tmp_path) == 2 * [([3, 3], [3, 6])]


def test_streams_that_differ_by_rank_are_an_error(tmp_path):
    def script(runtime):
        batches = iter(DataLoader(Numbers(0, 4 if runtime.ranks.world.rank == 0 else 0), batch_size=1))
        if runtime.ranks.world.rank == 0:
            return next(batches).item()
        with pytest.raises(DadtError, match=r"rank 1 has no sample in DataLoader #1 but ranks \[0\] have"):
            next(batches)
        return None

    assert ranks(2, script, tmp_path) == [0, None]


def test_pickles_and_stands_for_its_data_set():
    part = pickle.loads(pickle.dumps(EveryNth(Numbers(2, 9), Split(1, 2, 0, False))))
    assert list(part) == [3, 5, 7] and (part.start, part.end) == (2, 9)
    part.start = 4
    assert list(part) == [5, 7]


def test_first_dimension():
    assert first_dimension({"x": [torch.zeros(5, 2)], "y": torch.zeros(3)}) == 5
    assert first_dimension((torch.tensor(1.0), "text")) == 1
    assert first_dimension("text") == 1


@pytest.mark.parametrize("workers", [0, 2])
def test_data_pipes_shuffle_and_shard_as_ever(workers, tmp_path):
    def make():
        pipe = IterableWrapper(range(13)).shuffle().sharding_filter()
        return DataLoader(pipe, batch_size=2, shuffle=True, num_workers=workers)

    answers = ranks(2, passes(make), tmp_path)
    orders = []
    for epoch in range(2):
        orders.append([i for answer in answers for i in real(answer, epoch)])
        assert sorted(orders[-1]) == list(range(13))
    assert orders[0] != orders[1] != list(range(13))
