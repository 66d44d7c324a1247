"""Generators that a script makes without a seed."""

from __future__ import annotations

import os
import random
import secrets
import tempfile
import threading
import uuid

import numpy as np
import torch
from harness.forked_ranks import ranks
from torch.utils.data import DataLoader, Dataset, Sampler

LIBRARY = """
import random, uuid, numpy as np
def make(): return np.random.RandomState().rand(), random.Random().random(), uuid.uuid4().hex
"""


def library(name: str):
    """A function of a library of this name, which makes generators."""
    found = {"__name__": f"{name}.sampler"}
    exec(compile(LIBRARY, f"/opt/site-packages/{name}/sampler.py", "exec"), found)
    return found["make"]


def made() -> list:
    """One number, or a few, of each kind of generator."""
    torch_generator = torch.Generator()
    torch_generator.seed()
    return [
        np.random.default_rng().integers(2**60).item(),
        np.random.RandomState().rand(),
        np.random.SeedSequence().entropy,
        random.Random().random(),
        torch.rand(1, generator=torch_generator).item(),
        uuid.uuid4().hex,
    ]


def globals_seeded() -> list:
    torch.seed()
    np.random.seed()
    random.seed()
    return [torch.rand(()).item(), np.random.rand(), random.random()]


def test_they_are_equal_on_all_ranks_and_other_ones_each_time(tmp_path):
    def script(runtime):
        every = [made() for _ in range(2)]
        if runtime.ranks.world.rank == 0:
            made()
        runtime.streams.split()
        every += [made(), [*library("optuna")()], [*library("optuna")()]]
        for _ in range(2):
            every.append(globals_seeded())
        system = random.SystemRandom().random(), secrets.token_hex(), next(tempfile._get_candidate_names())
        return every, [*system, *library("tokens")(), library("optuna.storages._rdb")()[-1]]

    (a, own), (b, other) = ranks(2, script, tmp_path / "one")
    assert a == b
    assert not set(own) & set(other)
    ((c, _), _) = ranks(2, script, tmp_path / "two", seed=8)
    flat = [[value for values in every for value in values] for every in (a, c)]
    assert len(set(flat[0] + flat[1])) == 2 * len(flat[0])


def test_other_threads_and_processes_ask_the_system(tmp_path):
    def script(runtime):
        found = []
        thread = threading.Thread(target=lambda: found.extend(made()))
        thread.start()
        thread.join()
        reader, writer = os.pipe()
        if not (child := os.fork()):
            os.write(writer, made()[-1].encode())
            os._exit(0)
        os.waitpid(child, 0)
        return [*found, os.read(reader, 100)], made()

    (a, after), (b, other_after) = ranks(2, script, tmp_path)
    assert not set(a) & set(b)
    assert after == other_after


def test_a_script_that_shares_out_by_itself_asks_the_system(tmp_path):
    def script(runtime):
        runtime.script.is_distributed = True
        return made()

    a, b = ranks(2, script, tmp_path)
    assert not set(a) & set(b)


noise = None


class Augmented(Dataset):
    def __init__(self, transform):
        self.rng, self.python = np.random.default_rng(), random.Random()
        self.items = self.rng.permutation(8).tolist()
        self.transforms = [transform]

    def __len__(self):
        return 8

    def __getitem__(self, i):
        new = np.random.default_rng().random()
        return i, self.rng.random(), self.python.random(), self.transforms[0](), noise.random(), new


class Jitter:
    def __init__(self):
        self.legacy = np.random.RandomState()

    def __call__(self):
        return self.legacy.rand()


class Own(Sampler):
    def __init__(self):
        self.rng = np.random.default_rng()

    def __iter__(self):
        return iter(self.rng.permutation(8).tolist())

    def __len__(self):
        return 8


def test_data_sets_draw_other_numbers_on_each_rank_and_samplers_the_same(tmp_path):
    def script(runtime):
        global noise
        noise = np.random.default_rng()
        data, chooses = Augmented(Jitter()), np.random.RandomState()
        read = []
        for _ in range(2):
            for batch in DataLoader(data, batch_size=2, sampler=Own()):
                runtime.train()
                read += zip(*(each.tolist() for each in batch), strict=True)
        return data.items, read, chooses.rand(), runtime.warned

    a, b = ranks(2, script, tmp_path)
    assert a[0] == b[0] and a[2] == b[2]
    for start in (0, 4):
        assert sorted(row[0] for each in (a, b) for row in each[1][start : start + 4]) == list(range(8))
    for column in range(1, 6):
        drawn = [row[column] for each in (a, b) for row in each[1]]
        assert len(set(drawn)) == len(drawn)


def test_a_script_that_chooses_its_data_itself_draws_other_numbers_on_each_rank(tmp_path):
    def script(runtime):
        rngs = np.random.default_rng(), np.random.RandomState(), random.Random(), torch.Generator()
        rngs[3].seed()
        sweep, seeded = library("optuna"), np.random.default_rng(3)

        def draw():
            return [rngs[0].random(), rngs[1].rand(), rngs[2].random(), torch.rand(1, generator=rngs[3]).item()]

        before = draw()
        runtime.entropy.trained(by_loader=False)
        return [*before, sweep()[0], seeded.random()], [*draw(), np.random.default_rng().random()]

    (common, own), (also, other) = ranks(2, script, tmp_path)
    assert common == also
    assert not set(own) & set(other)
