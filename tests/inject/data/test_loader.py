"""Shared map-style DataLoaders in real processes, compared with the same script in a single process."""

from __future__ import annotations

import functools
import gc
import importlib
import inspect
import itertools
import pickle
import random
import sys
import textwrap
import time

import numpy as np
import pytest
import torch
from harness.forked_ranks import ranks, single
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    get_worker_info,
)

from dadt.inject.data import hugging_face

SIZE = 2


class Numbers(Dataset):
    """Sample i is i, and a number drawn in the loader's worker or here, as augmentation would."""

    def __init__(self, n: int, draw: bool = True) -> None:
        self.n, self.draw = n, draw

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: int) -> tuple[int, float]:
        if not 0 <= i < self.n:
            raise IndexError(i)
        return i, torch.rand(()).item() if self.draw else 0.0


class Shuffled(Sampler):
    """A sampler as people write them: draws when iterated, from the generator that `kind` names."""

    def __init__(self, n: int, kind: str) -> None:
        self.n, self.kind = n, kind

    def __len__(self) -> int:
        return self.n

    def __iter__(self):
        if self.kind == "torch":
            return iter(torch.randperm(self.n).tolist())
        if self.kind == "numpy":
            return iter(np.random.permutation(self.n).tolist())
        return self.one_by_one()

    def one_by_one(self):
        left = list(range(self.n))
        while left:
            yield left.pop(random.randrange(len(left)))


class Pairs(Sampler):
    """A batch sampler of one's own, with batches of 2 and 3."""

    def __init__(self, n: int) -> None:
        self.n = n

    def batches(self):
        order = torch.randperm(self.n).tolist()
        sizes = itertools.cycle((2, 3))
        while order:
            size = next(sizes)
            yield order[:size]
            order = order[size:]

    def __iter__(self):
        return self.batches()

    def __len__(self) -> int:
        return sum(1 for _ in zip(range(self.n), _cuts(self.n)))


def _cuts(n: int):
    sizes = itertools.cycle((2, 3))
    while n > 0:
        yield n
        n -= next(sizes)


SAMPLERS = {
    "shuffle": lambda n: {"shuffle": True, "batch_size": 4},
    "sequential": lambda n: {"batch_size": 4},
    "replacement": lambda n: {"sampler": RandomSampler(range(n), replacement=True), "batch_size": 4},
    "subset": lambda n: {"sampler": SubsetRandomSampler(range(n)), "batch_size": 4},
    "weighted": lambda n: {"sampler": WeightedRandomSampler([1.0] * n, n), "batch_size": 4},
    "own torch": lambda n: {"sampler": Shuffled(n, "torch"), "batch_size": 4},
    "own numpy": lambda n: {"sampler": Shuffled(n, "numpy"), "batch_size": 4},
    "own random": lambda n: {"sampler": Shuffled(n, "random"), "batch_size": 4},
    "batch sampler": lambda n: {"batch_sampler": Pairs(n)},
    "no batch": lambda n: {"shuffle": True, "batch_size": None},
}


def passes(make, epochs: int, dropout: bool = True):
    """A training script: the indices of every batch of every pass, as read."""

    def script(runtime):
        loader = make()
        read, before = [], len(getattr(runtime, "draws", ()))
        for _ in range(epochs):
            read.append([])
            for index, _ in loader:
                if dropout:
                    torch.nn.functional.dropout(torch.ones(8))
                    random.random()
                    np.random.rand()
                runtime.train()
                read[-1].append(torch.as_tensor(index).reshape(-1).tolist())
        lengths = len(loader)
        return read, getattr(runtime, "draws", [])[before:], lengths, getattr(runtime, "warned", None)

    return script


def of_each_sampler(workers: int, epochs: int, draw: bool):
    """A script with a loader for each kind. With workers for some of them, as a sampler is iterated before those."""
    few = ("shuffle", "own numpy", "batch sampler", "no batch")
    kinds = few if workers else SAMPLERS

    def make(kind):
        return DataLoader(Numbers(21, draw), num_workers=workers, **SAMPLERS[kind](21))

    scripts = {kind: passes(functools.partial(make, kind), epochs, draw) for kind in kinds}
    return lambda runtime: {kind: script(runtime) for kind, script in scripts.items()}


@pytest.mark.parametrize("workers", [0, 2])
def test_shares_are_the_single_process_order(workers, tmp_path):
    """Without draws between batches, ranks joined read exactly what the single process reads, in its order."""
    script = of_each_sampler(workers, 3, draw=False)
    every = ranks(SIZE, script, tmp_path)
    for kind, (alone, _, alone_length, _) in single(script).items():
        answers = [answer[kind] for answer in every]
        assert all(not warned for _, _, _, warned in answers), kind
        for epoch in range(3):
            batches = [read[epoch] for read, _, _, _ in answers]
            assert {len(mine) for mine in batches} == {length for _, _, length, _ in answers}, kind
            order = list(itertools.chain(*alone[epoch]))
            steps = len(batches[0])
            draws = [draws[epoch * steps : (epoch + 1) * steps] for _, draws, _, _ in answers]
            joined = [i for k in range(steps) for rank in range(SIZE) for i in batches[rank][k][: draws[rank][k][0]]]
            assert joined == order, kind
        assert len(answers[0][0][0]) < alone_length, kind


@pytest.mark.parametrize("workers", [0, 2])
def test_order_is_common_with_dropout(workers, tmp_path):
    """Draws of the script's own between batches differ by rank and do not disturb what is read: no loss."""
    every = ranks(SIZE, of_each_sampler(workers, 2, draw=True), tmp_path)
    for kind in every[0]:
        answers = [answer[kind] for answer in every]
        assert all(not warned for _, _, _, warned in answers), kind
        for epoch in range(2):
            steps = len(answers[0][0][epoch])
            got = [
                i
                for read, draws, _, _ in answers
                for k in range(steps)
                for i in read[epoch][k][: draws[epoch * steps + k][0]]
            ]
            assert len(got) == 21, kind
            if kind not in ("replacement", "weighted"):
                assert sorted(got) == list(range(21)), kind


@pytest.mark.parametrize("n", [3, 17, 24])
@pytest.mark.parametrize("drop_last", [False, True])
def test_global_batch_keeps_the_steps(n, drop_last, tmp_path):
    make = lambda: DataLoader(Numbers(n, False), batch_size=6, shuffle=True, drop_last=drop_last)  # noqa: E731
    alone, _, alone_length, _ = single(passes(make, 2, dropout=False))
    answers = ranks(3, passes(make, 2, dropout=False), tmp_path, batch="global")
    for _, _, length, _ in answers:
        assert length == alone_length
    for epoch in range(2):
        for k, batch in enumerate(alone[epoch]):
            joined = []
            for read, draws, _, _ in answers:
                samples, nominal = draws[epoch * alone_length + k]
                assert nominal == 2
                joined += read[epoch][k][:samples]
            assert joined == batch


def test_global_batch_that_cannot_be_divided(tmp_path):
    def script(runtime):
        with pytest.raises(Exception, match=r"--batch global: DataLoader #1 has batches of 1.*2 workers"):
            next(iter(DataLoader(Numbers(8))))
        with pytest.raises(Exception, match=r"--batch global: DataLoader #2 has no batch size"):
            next(iter(DataLoader(Numbers(8), batch_size=None)))

    ranks(2, script, tmp_path, batch="global")


class Stream(IterableDataset):
    def __init__(self, samples) -> None:
        self.samples = samples

    def __iter__(self):
        return iter(self.samples)


class Prompts(Sampler):
    """TRL's order for a training that generates: each prompt as often as completions of it are compared, and each batch
    of these as often as it is used."""

    mini_repeat_count, batch_size = 4, 2

    def __init__(self, prompts: int, repeat_count: int) -> None:
        self.prompts, self.repeat_count = prompts, repeat_count

    def __iter__(self):
        order = torch.randperm(self.prompts).tolist()
        for two in zip(order[::2], order[1::2], strict=True):
            for _ in range(self.repeat_count):
                yield from [prompt for prompt in two for _ in range(4)]

    def __len__(self) -> int:
        return self.prompts * 4 * self.repeat_count


@pytest.mark.parametrize("uses", [1, 4])
def test_groups_of_a_prompt_s_completions_stay_together_and_each_is_used_as_often(uses, tmp_path):
    make = lambda: DataLoader(Numbers(10, False), sampler=Prompts(10, uses), batch_size=8)  # noqa: E731
    read = []
    for batches, draws, length, warned in ranks(2, passes(make, 1), tmp_path):
        assert len(batches[0]) == length == 3 * uses and not warned
        for start in range(0, length, uses):
            assert batches[0][start : start + uses] == uses * [batches[0][start]]  # what it generates from comes first
        read += [i for batch, (samples, nominal) in zip(batches[0], draws, strict=True) for i in batch[:samples]]
        assert all(nominal == 8 and samples in (0, 8) for samples, nominal in draws)
        assert all(len(set(batch[start : start + 4])) == 1 for batch in batches[0] for start in (0, 4))
    assert sorted(read) == sorted(4 * uses * list(range(10)))


def test_a_sampler_of_another_kind_is_divided_as_any(tmp_path):
    """One that only repeats samples, with a name in common with TRL's."""
    other = type("Other", (RandomSampler,), {"mini_repeat_count": 4})

    def script(runtime):
        return [i for batch, _ in DataLoader(Numbers(8, False), 2, sampler=other(range(8))) for i in batch.tolist()]

    assert sorted(itertools.chain(*ranks(2, script, tmp_path))) == list(range(8))


def test_groups_are_divided_only_where_they_stay_whole(tmp_path):
    def script(runtime):
        for batch_size in (8, 16):
            loader = DataLoader(Numbers(8, False), sampler=Prompts(8, 1), batch_size=batch_size)
            if batch_size == 8 and runtime.ranks.world.world_size == 4:
                with pytest.raises(Exception, match=r"#1 has batches of 8 in groups of 4 that belong together, which"):
                    next(iter(loader))
            else:
                runtime.train()
                assert all(len(set(index.tolist())) == len(index) // 4 for index, _ in loader)

    ranks(2, script, tmp_path / "two", batch="global")
    ranks(4, script, tmp_path / "four", batch="global")


@pytest.mark.parametrize("early", [False, True])
def test_data_that_the_script_divides_by_a_library_s_function_is_left_as_it_is(early, tmp_path):
    """`split_dataset_by_node` of Hugging Face's datasets, in a package of the same name and signature. early: whether a
    module has imported it before torch was."""
    (tmp_path / "datasets").mkdir()
    (tmp_path / "datasets" / "__init__.py").touch()
    text = "def split_dataset_by_node(dataset, rank, world_size):\n    return dataset[rank::world_size]\n"
    (tmp_path / "datasets" / "distributed.py").write_text(text)
    (tmp_path / "early.py").write_text("from datasets.distributed import split_dataset_by_node\n")

    def script(runtime):
        sys.path.insert(0, str(tmp_path))
        if early:
            importlib.import_module("early")
        hugging_face.install(runtime)
        split_dataset_by_node = importlib.import_module("early").split_dataset_by_node
        rank = runtime.ranks.world.rank
        whole = list(range(16))
        whole = split_dataset_by_node(whole, rank=0, world_size=1)  # which divides nothing
        shared = [i for batch in DataLoader(whole, batch_size=2) for i in batch.tolist()]
        runtime.train()
        mine = DataLoader(split_dataset_by_node(whole, rank=rank, world_size=2), batch_size=2)
        return shared, [i for batch in mine for i in batch.tolist()], runtime.said[-1]

    a, b = ranks(2, script, tmp_path)
    assert sorted(a[0] + b[0]) == sorted(a[1] + b[1]) == list(range(16))
    assert a[1] == list(range(0, 16, 2)) and "#2: left as it is, as the script knows its rank" in a[2]


def test_a_stream_of_groups_is_refused(tmp_path):
    """TRL's `repeat_iterable_dataset`, in a module of the same name and signature."""
    (tmp_path / "trl" / "trainer").mkdir(parents=True)
    text = """
    def repeat_iterable_dataset(dataset, mini_repeat_count, batch_size=1, repeat_count=1):
        return type(dataset)([one for one in dataset for _ in range(mini_repeat_count)])
    """
    (tmp_path / "trl" / "trainer" / "utils.py").write_text(textwrap.dedent(text))

    def script(runtime):
        hugging_face.install(runtime)
        sys.path.insert(0, str(tmp_path))
        from trl.trainer.utils import repeat_iterable_dataset

        stream = repeat_iterable_dataset(Stream(range(8)), mini_repeat_count=1, repeat_count=2)
        assert len([index for batch in DataLoader(stream, 2) for index in batch]) == 4
        stream = repeat_iterable_dataset(Stream(range(8)), mini_repeat_count=4)
        with pytest.raises(
            Exception, match="#2 is a stream in which 4 samples in a row belong together, of which each"
        ):
            next(iter(DataLoader(stream, 8)))
        runtime.training = False  # an evaluation reads all of it
        assert len(next(iter(DataLoader(stream, 8)))) == 8

    ranks(2, script, tmp_path)


@pytest.mark.parametrize("workers", [0, 2])
def test_augmentation_differs_by_rank_and_is_reproducible(workers, tmp_path):
    def script(runtime):
        loader = DataLoader(Numbers(16), batch_size=4, num_workers=workers)
        return [drawn.tolist() for _ in range(2) for _, drawn in loader]

    first = ranks(2, script, tmp_path / "first")
    again = ranks(2, script, tmp_path / "again")
    assert first == again
    assert not set(itertools.chain(*first[0])) & set(itertools.chain(*first[1]))


def test_evaluation_gives_everything_alike(tmp_path):
    def script(runtime):
        train = DataLoader(Numbers(20), batch_size=4, shuffle=True)
        test = DataLoader(Numbers(10), batch_size=3, num_workers=1)
        seen = []
        for _ in range(2):
            runtime.training = True
            for _ in train:
                runtime.train()
                torch.rand(3)
            runtime.training = False
            assert len(test) == 4
            with torch.no_grad():
                seen.append([(i.tolist(), drawn.tolist()) for i, drawn in test])
        return seen, runtime.said, runtime.warned, runtime.draws

    answers = ranks(2, script, tmp_path)
    assert answers[0][0] == answers[1][0]
    for seen, said, warned, draws in answers:
        assert [i for batch, _ in seen[0] for i in batch] == list(range(10))
        assert said == [
            "DataLoader #1 (20 samples, shuffled): trains, 10 per worker.",
            "DataLoader #2 (10 samples): evaluates, all of it.",
        ]
        assert not warned
        assert [samples for samples, _ in draws] == [4, 4, 2] * 2


def test_a_pass_before_training_decides_nothing(tmp_path):
    """Statistics of the data before the optimizer exists, then under no_grad: everything. Then the share."""

    def script(runtime):
        runtime.optimizers.registered = False
        loader = DataLoader(Numbers(12), batch_size=3, shuffle=True, num_workers=1, persistent_workers=True)
        assert len(loader) == 2, "what shuffles trains"
        before = sorted(i for index, _ in loader for i in index.tolist())
        runtime.optimizers.registered = True
        with torch.no_grad():
            quiet = sorted(i for index, _ in loader for i in index.tolist())
        assert not runtime.said and not runtime.claimed and not runtime.draws
        shares = []
        for _ in range(2):
            shares.append([])
            for index, _ in loader:
                runtime.train()
                shares[-1] += index.tolist()
        return before, quiet, shares

    answers = ranks(2, script, tmp_path)
    for before, quiet, _ in answers:
        assert before == quiet == list(range(12))
    for epoch in range(2):
        assert sorted(answers[0][2][epoch] + answers[1][2][epoch]) == list(range(12))


def test_share_and_no_share_overrule(tmp_path):
    def script(runtime):
        first, second, third = (DataLoader(Numbers(8), batch_size=2, shuffle=True) for _ in range(3))
        assert [len(first), len(second), len(third)] == [4, 2, 2]
        assert len(list(first)) == 4
        runtime.training = False
        with torch.no_grad():
            assert len(list(second)) == 2
        return runtime.said

    said = [
        "DataLoader #1 (8 samples, shuffled): evaluates, all of it.",
        "DataLoader #2 (8 samples, shuffled): trains, 4 per worker.",
    ]
    assert ranks(2, script, tmp_path, share="2", no_share="1") == [said, said]


def test_len_goes_by_the_sampler_until_the_role_is_known(tmp_path):
    def script(runtime):
        loaders = {kind: DataLoader(Numbers(21), **make(21)) for kind, make in SAMPLERS.items()}
        lengths = {kind: len(loader) for kind, loader in loaders.items()}
        runtime.script.began, runtime.training = True, False
        for loader in loaders.values():
            list(loader)
        return lengths, {kind: len(loader) for kind, loader in loaders.items()}

    for before, after in ranks(2, script, tmp_path):
        assert after == dict.fromkeys(SAMPLERS, 6) | {"no batch": 21, "batch sampler": 9}
        assert before == dict.fromkeys(SAMPLERS, 3) | {"sequential": 6, "no batch": 11, "batch sampler": 5}


class Own(DataLoader):
    """A loader of one's own: another constructor, another __iter__, state of its own."""

    def __init__(self, n: int) -> None:
        super().__init__(Numbers(n), batch_size=2, shuffle=True)
        self.passes = 0

    def __iter__(self):
        self.passes += 1
        for index, _ in super().__iter__():
            yield index + 100


def test_subclasses_copies_and_pickles(tmp_path):
    def script(runtime):
        loader = Own(8)
        assert loader.batch_sampler.batch_size == 2 and len(loader.sampler) == 8
        got = []
        for index in loader:
            runtime.train()
            got += index.tolist()
        assert loader.passes == 1
        plain = DataLoader(Numbers(8), batch_size=2, shuffle=True)
        next(iter(plain))
        copy = pickle.loads(pickle.dumps(plain))
        copied = []
        for index, _ in copy:
            runtime.train()
            copied += index.tolist()
        return got, copied, runtime.said

    answers = ranks(2, script, tmp_path)
    assert sorted(answers[0][0] + answers[1][0]) == list(range(100, 108))
    assert sorted(answers[0][1] + answers[1][1]) == list(range(8))
    assert [text.split(" (")[0] for text in answers[0][2]] == [f"DataLoader #{i}" for i in (1, 2, 3)]


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_worker_processes_of_either_kind(method, tmp_path):
    def script(runtime):
        data = TensorDataset(torch.arange(24))
        how = {"multiprocessing_context": method, "persistent_workers": method == "spawn"}  # that one imports torch
        loader = DataLoader(data, batch_size=2, shuffle=True, num_workers=1, **how)
        got = []
        for _ in range(2):
            for (index,) in loader:
                runtime.train()
                got += index.tolist()
        return got

    answers = ranks(2, script, tmp_path)
    for epoch in range(2):
        joined = answers[0][12 * epoch : 12 * epoch + 12] + answers[1][12 * epoch : 12 * epoch + 12]
        assert sorted(joined) == list(range(24))


class Uneven(Numbers):
    """Its first worker is slow, so that later batches are ready before earlier ones."""

    def __getitem__(self, i: int) -> tuple[int, float]:
        if get_worker_info().id == 0:
            time.sleep(0.1)
        return super().__getitem__(i)


def test_persistent_workers_and_prefetching_keep_counts_in_order(tmp_path):
    def script(runtime):
        loader = DataLoader(
            Uneven(16), batch_size=3, shuffle=True, num_workers=3, persistent_workers=True, in_order=False
        )
        got = []
        for _ in range(3):
            got.append([])
            for index, _ in loader:
                runtime.train()
                got[-1].append(index.tolist())
        return got, runtime.draws

    answers = ranks(2, script, tmp_path)
    for got, draws in answers:
        assert [len(batch) for epoch in got for batch in epoch] == [samples for samples, _ in draws]
    for epoch in range(3):
        assert sorted(i for got, _ in answers for batch in got[epoch] for i in batch) == list(range(16))


def test_cycle_next_break_and_several_iterators(tmp_path):
    def script(runtime):
        loader = DataLoader(Numbers(8), batch_size=2, shuffle=True)
        endless = itertools.cycle(loader)
        cycled = [next(endless)[0].tolist() for _ in range(5)]
        nexts = [next(iter(loader))[0].tolist() for _ in range(3)]
        for index, _ in loader:
            nexts.append(index.tolist())
            break
        first, second = iter(loader), iter(loader)
        pairs = [[next(first)[0].tolist(), next(second)[0].tolist()] for _ in range(2)]
        assert next(first, None) is None and next(second, None) is None
        return cycled, nexts, pairs, len(first)

    a, b = ranks(2, script, tmp_path)
    assert a[3] == b[3] == 2
    for epoch in (0, 2):
        assert sorted(itertools.chain(*a[0][epoch : epoch + 2], *b[0][epoch : epoch + 2])) == list(range(8))
    assert all(not set(x) & set(y) for x, y in zip(a[1], b[1], strict=True))
    for which in range(2):
        joined = [i for pairs in (a[2], b[2]) for pair in pairs for i in pair[which]]
        assert sorted(joined) == list(range(8))


def test_a_loader_of_a_gan_is_one_loader(tmp_path):
    """Two optimizers, one batch: the loader counts each batch once."""

    def script(runtime):
        loader = DataLoader(Numbers(9), batch_size=2, shuffle=True)
        for _ in loader:
            runtime.train()
            runtime.train()
        return runtime.draws

    assert ranks(2, script, tmp_path) == [[(2, 2), (2, 2), (1, 2)], [(2, 2), (2, 2), (0, 2)]]


def test_an_own_distributed_sampler_is_left_alone(tmp_path):
    def script(runtime):
        data = Numbers(8)
        sampler = torch.utils.data.DistributedSampler(data, num_replicas=2, rank=runtime.ranks.world.rank)
        loader = DataLoader(data, batch_size=2, sampler=sampler)
        got = sorted(i for index, _ in loader for i in index.tolist())
        return got, len(loader), runtime.said, runtime.claimed

    a, b = ranks(2, script, tmp_path)
    assert sorted(a[0] + b[0]) == list(range(8)) and a[1] == 2 and not a[3]
    assert a[2] == ["DataLoader #1: shares out its data itself, left as it is."]


def test_a_distributed_sampler_of_one_replica_is_shared_out(tmp_path):
    def script(runtime):
        data = Numbers(8)
        sampler = torch.utils.data.DistributedSampler(data, num_replicas=1, rank=0)
        loader = DataLoader(data, batch_size=2, sampler=sampler)
        return sorted(i for index, _ in loader for i in index.tolist()), len(loader)

    a, b = ranks(2, script, tmp_path)
    assert sorted(a[0] + b[0]) == list(range(8)) and a[1] == b[1] == 2


def test_a_shared_pass_without_a_step_is_noticed(tmp_path):
    def script(runtime):
        runtime.script.began = True
        loader = DataLoader(Numbers(8), batch_size=2)
        for _ in loader:
            with torch.no_grad():
                torch.rand(1)
        return runtime.warned

    for warned in ranks(2, script, tmp_path):
        assert len(warned) == 1 and "in a pass without a backward" in warned[0]


def test_an_error_in_the_data_set_is_counted_out(tmp_path):
    """A script that catches a bad batch goes on with the next; counts stay with their batches."""

    class Broken(Numbers):
        def __getitem__(self, i):
            if i == 2:
                raise ValueError("sample 2 is broken")
            return super().__getitem__(i)

    def script(runtime, workers):
        batches = iter(DataLoader(Broken(11), batch_size=2, num_workers=workers))
        got = []
        while True:
            try:
                got.append(next(batches)[0].tolist())
            except ValueError:
                got.append("broken")
            except StopIteration:
                return got, runtime.draws

    for workers in (0, 2):
        a, b = ranks(2, lambda runtime, w=workers: script(runtime, w), tmp_path / str(workers))
        assert a == ([[0, 1], [4, 5], [8, 9, 10]], [(2, 2), (2, 2), (3, 2)])
        assert b == (["broken", [6, 7], [8, 9]], [(2, 2), (0, 2)])


class Failing(Sampler):
    def __init__(self) -> None:
        pass

    def __len__(self) -> int:
        return 11

    def __iter__(self):
        yield from range(8)
        raise KeyError("no class 7")


def test_an_error_of_the_sampler_is_raised_as_it_is(tmp_path):
    def script(runtime):
        batches = iter(DataLoader(Numbers(11), batch_size=2, sampler=Failing()))
        with pytest.raises(KeyError, match="no class 7"):
            for _ in range(3):
                next(batches)

    ranks(2, script, tmp_path)


class WithoutAttribute(Sampler):
    def __init__(self) -> None:
        pass

    def __len__(self) -> int:
        return 11

    def __iter__(self):
        return iter(self.order)


def test_an_attribute_that_the_sampler_lacks_is_named(tmp_path):
    def script(runtime):
        with pytest.raises(AttributeError, match="order"):
            next(iter(DataLoader(Numbers(11), batch_size=2, sampler=WithoutAttribute())))

    ranks(2, script, tmp_path)


def test_nothing_is_patched_in_a_world_of_one(tmp_path):
    before = DataLoader.__iter__, DataLoader.__init__, DataLoader.__len__, torch.manual_seed

    def script(runtime):
        return (DataLoader.__iter__, DataLoader.__init__, DataLoader.__len__, torch.manual_seed) == before

    assert ranks(1, script, tmp_path) == [True]


class Ending(DataLoader):
    """A loader that ends what it owns when it goes."""

    ended = 0

    def __del__(self) -> None:
        Ending.ended += 1


def test_the_end_of_a_loader_comes_once(tmp_path):
    def script(runtime):
        runtime.optimizers.registered = False
        loader = Ending(Numbers(8), batch_size=2)
        list(loader)
        runtime.optimizers.registered = True
        list(loader)
        assert Ending.ended == 0
        del loader
        gc.collect()
        return Ending.ended

    assert ranks(2, script, tmp_path) == [1, 1]


def test_signatures_stay(tmp_path):
    """Libraries rebuild loaders from the constructor's signature."""
    before = inspect.signature(DataLoader.__init__), inspect.signature(torch.save)
    script = lambda runtime: (inspect.signature(DataLoader.__init__), inspect.signature(torch.save)) == before  # noqa: E731
    assert ranks(2, script, tmp_path) == [True, True]


def test_what_drop_last_leaves_out_is_said(tmp_path):
    def script(runtime):
        list(DataLoader(Numbers(30), batch_size=4, drop_last=True))
        return runtime.said

    said = ["DataLoader #1 (30 samples): trains, 15 per worker; drop_last leaves 6 of them out."]
    assert ranks(2, script, tmp_path) == [said, said]


def test_loaders_made_in_every_epoch_are_not_all_listed(tmp_path):
    def script(runtime):
        for _ in range(6):
            list(DataLoader(Numbers(8), batch_size=2))
        return runtime.said

    said = [f"DataLoader #{number} (8 samples): trains, 4 per worker." for number in (1, 2, 3)]
    said[2] += " More like it are not listed."
    assert ranks(2, script, tmp_path) == [said, said]


class Endless(DataLoader):
    """As YOLO's: its only iterator is made before there is an optimizer."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.iterator = super().__iter__()

    def __iter__(self):
        for _ in range(4):
            yield next(self.iterator)


def test_the_role_is_decided_at_the_first_batch(tmp_path):
    def script(runtime):
        runtime.optimizers.registered = False
        trains, evaluates = Endless(Numbers(8)), Endless(Numbers(4))
        runtime.optimizers.registered = True
        trained = []
        for index, _ in trains:
            runtime.train()
            trained += index.tolist()
        later = iter(DataLoader(Numbers(4)))
        runtime.training = False
        return trained, [int(index) for index, _ in evaluates], [int(index) for index, _ in later]

    first, second = ranks(2, script, tmp_path)
    assert sorted(first[0] + second[0]) == list(range(8))
    assert first[1:] == second[1:] == ([0, 1, 2, 3], [0, 1, 2, 3])


@pytest.mark.parametrize("workers", [0, 1])
def test_a_pass_without_gradients_over_the_training_data_is_whole(workers, tmp_path):
    def script(runtime):
        loader = DataLoader(Numbers(8), batch_size=2, num_workers=workers, persistent_workers=workers > 0)
        found = []
        for _ in range(2):
            for index, _ in loader:
                runtime.train()
                found += index.tolist()
            found.append(len(loader))
            with torch.no_grad():
                found.append([int(i) for index, _ in loader for i in index])
            found.append(len(loader))
        return found

    first, second = ranks(2, script, tmp_path)
    whole = list(range(8))
    for found in (first[:4] + second[:4], first[7:11] + second[7:11]):
        assert sorted(found) == whole
    assert [first[4:7], first[11:]] == [second[4:7], second[11:]] == [[2, whole, 4]] * 2


def test_a_loader_whose_first_pass_has_no_backward_evaluates(tmp_path):
    """As skorch's: it chooses evaluation once it has a batch."""

    def script(runtime):
        train, test, sums = (DataLoader(Numbers(n), batch_size=2, shuffle=True) for n in (8, 12, 16))
        passes = [sum(len(index) for index, _ in sums)]  # before the first step this decides nothing
        for _ in range(2):
            for _ in train:
                runtime.train()
            passes.append(sum(len(index) for index, _ in test))
        for _ in sums:
            runtime.train()
        return passes, len(test), len(sums), runtime.warned

    for passes, test, sums, warned in ranks(2, script, tmp_path):
        assert (passes, test, sums) == ([8, 6, 12], 6, 4)
        assert [text.rpartition("; ")[2] for text in warned] == [
            "to give all of it, begin such a pass under torch.no_grad()",
            "it evaluates, and gives all of it from here on",
        ]


def test_what_is_in_order_beside_training_data_evaluates_until_there_is_a_backward(tmp_path):
    def script(runtime):
        train, test, second = (DataLoader(Numbers(n), batch_size=2, shuffle=n == 8) for n in (8, 12, 16))
        found = []
        for _ in range(2):
            for _ in train:
                runtime.train()
            found.append(sum(len(index) for index, _ in test))
            for index, _ in second:
                runtime.train()
                found.append(len(index))
        return found, runtime.warned

    for found, warned in ranks(2, script, tmp_path):
        assert found == [12, *[2] * 8, 12, *[2] * 4] and not warned


def test_one_backward_after_all_batches_is_training(tmp_path):
    def script(runtime):
        loader = DataLoader(Numbers(8), batch_size=2)
        found = []
        for _ in range(3):
            found.append(sum(len(index) for index, _ in loader))
            runtime.train()
        return found

    assert ranks(2, script, tmp_path) == [[4, 4, 4]] * 2


def test_a_stream_of_parts_without_a_length(tmp_path):
    class Part(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter(range(4))

    def script(runtime):
        loader = DataLoader(torch.utils.data.ChainDataset([Part(), Part()]), batch_size=2)
        got = []
        for batch in loader:
            got += batch.tolist()
            runtime.train()
        return got

    a, b = ranks(2, script, tmp_path)
    assert sorted(a + b) == sorted([*range(4), *range(4)])


@pytest.mark.parametrize("workers", [0, 2])
def test_iterators_made_before_the_loop_give_the_single_process_order(workers, tmp_path):
    def script(runtime):
        given = {"batch_size": 2, "num_workers": workers}
        shuffled = DataLoader(Numbers(12, False), shuffle=True, **given)
        weighted = DataLoader(Numbers(12, False), sampler=WeightedRandomSampler(torch.ones(12), 12), **given)
        iterators = [iter(shuffled), iter(weighted)]
        torch.rand(3)  # as by a model that is built meanwhile
        later = (torch.manual_seed(9) and iter(shuffled) for _ in range(1))
        read = []
        for batches in (zip(*iterators, strict=True), zip(*later, strict=True)):
            for batch in batches:
                runtime.train()
                read.append([index.tolist() for index, _ in batch])
        return read

    alone = single(script)
    a, b = ranks(2, script, tmp_path, batch="global")
    assert [[one + other for one, other in zip(*pair, strict=True)] for pair in zip(a, b, strict=True)] == alone


class Listed(Dataset):
    def __init__(self, n: int) -> None:
        self.items = list(range(n))

    def __len__(self) -> int:
        return len(self.items) // 2

    def __getitem__(self, i: int) -> list[int]:
        torch.manual_seed(i)  # as for an image and its mask
        random.seed(i), np.random.seed(i)
        return self.items[2 * i : 2 * i + 2]


def by_permutation(data: Listed) -> None:
    halves = np.random.permutation(len(data)).tolist()
    data.items = [item for half in halves for item in data.items[2 * half : 2 * half + 2]]


SHUFFLES = {
    "random.shuffle": lambda data: random.shuffle(data.items),
    "random.sample": lambda data: setattr(data, "items", random.sample(data.items, len(data.items))),
    "numpy.random.shuffle": lambda data: np.random.shuffle(data.items),
    "numpy.random.permutation": by_permutation,
    "a seed before": lambda data: (random.seed(len(data)), random.shuffle(data.items)),
}


def test_data_that_the_script_shuffles_between_passes_is_in_one_order(tmp_path):
    def script(runtime):
        orders = []
        for shuffle in SHUFFLES.values():
            data = Listed(16)
            loader = DataLoader(data, batch_size=2, shuffle=True)
            for epoch in range(3):
                if epoch:
                    shuffle(data)
                orders.append(data.items[:])
                for batch in loader:
                    runtime.train()
                    orders[-1] += torch.stack(batch).T.reshape(-1).tolist()
                for _ in range(runtime.ranks.world.rank):  # the script's own draws, not as many on all ranks
                    torch.rand(1), random.random(), np.random.rand()
        return orders, runtime.warned

    (a, warned), (b, _) = ranks(2, script, tmp_path)
    assert not [text for text in warned if "different orders" in text]
    for one, other in zip(a, b, strict=True):
        assert one[:16] == other[:16]
        assert sorted(one[16:] + other[16:]) == list(range(16))
    expected = list(range(16))
    random.seed(8)
    random.shuffle(expected)
    assert a[-2][:16] == expected and a[-1][:16] != expected
