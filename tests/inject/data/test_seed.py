"""One start, a shared stream, and a stream per rank."""

from __future__ import annotations

import random

import numpy as np
import torch
from harness.forked_ranks import Runtime, ranks, single


def draw() -> tuple[float, float, float]:
    return torch.rand(()).item(), np.random.rand(), random.random()


def test_all_ranks_start_alike_and_part_at_the_split(tmp_path):
    def script(runtime: Runtime):
        before = draw()
        runtime.streams.split()
        runtime.streams.split()
        return before, draw()

    first = ranks(3, script, tmp_path / "first")
    assert first == ranks(3, script, tmp_path / "again")
    assert first != ranks(3, script, tmp_path / "other", seed=8)
    assert len({before for before, _ in first}) == 1
    for kind in range(3):
        assert len({after[kind] for _, after in first}) == 3


def test_the_shared_stream_goes_on_as_the_single_process(tmp_path):
    def script(runtime):
        values = [draw()]
        if isinstance(runtime, Runtime):
            runtime.streams.split()
        for _ in range(3):
            if isinstance(runtime, Runtime):
                draw()
                with runtime.streams.shared(), runtime.streams.shared():
                    values.append(draw())
            else:
                values.append(draw())
        return values

    alone = single(script)
    assert ranks(2, script, tmp_path) == [alone, alone]


def test_the_rank_s_stream_is_not_touched_by_the_shared_one(tmp_path):
    def script(runtime: Runtime):
        runtime.streams.split()
        state = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
        with runtime.streams.shared():
            draw()
        after = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
        return torch.equal(state[0], after[0]) and state[1:] == after[1:]

    assert ranks(2, script, tmp_path) == [True, True]


def test_a_seed_of_the_script_joins_the_ranks_until_training_goes_on(tmp_path):
    def script(runtime: Runtime):
        assert torch.manual_seed(5) is torch.default_generator
        before = torch.rand(()).item()
        assert torch.initial_seed() == 5
        runtime.streams.split()
        assert torch.manual_seed(5) is torch.default_generator
        again = torch.rand(()).item()
        split = torch.randperm(100).tolist(), np.random.rand(), random.random()
        runtime.streams.split()
        mine = torch.rand(()).item()
        with runtime.streams.shared():
            return before, again, split, torch.rand(()).item(), mine

    a, b = ranks(2, script, tmp_path)
    torch.manual_seed(5)
    expected = torch.rand(()).item()
    assert a[0] == a[1] == b[0] == b[1] == expected
    assert a[2:4] == b[2:4]
    assert a[4] != b[4]


def test_fork_rng_gives_the_shared_stream_back(tmp_path):
    """`with fork_rng(): manual_seed(0)` in every epoch, as for samples of a generator, must not make every epoch
    shuffle alike."""

    def script(runtime: Runtime):
        runtime.streams.split()
        orders = []
        for _ in range(3):
            with torch.random.fork_rng():
                torch.manual_seed(0)
                torch.rand(5)
            with runtime.streams.shared():
                orders.append(torch.rand(()).item())
        return orders

    a, b = ranks(2, script, tmp_path)
    assert a == b and len(set(a)) == 3


def test_a_sampler_may_seed(tmp_path):
    def script(runtime: Runtime):
        runtime.streams.split()
        with runtime.streams.shared():
            torch.manual_seed(11)
            return torch.rand(()).item()

    a, b = ranks(2, script, tmp_path)
    torch.manual_seed(11)
    assert a == b == torch.rand(()).item()


def test_without_seeding_nothing_is_changed(tmp_path):
    def script(runtime: Runtime):
        torch.manual_seed(3)
        runtime.streams.split()
        value = torch.rand(()).item()
        with runtime.streams.shared():
            return value, torch.rand(()).item()

    torch.manual_seed(3)
    expected = torch.rand(()).item(), torch.rand(()).item()
    assert ranks(2, script, tmp_path, seeding=False) == [expected, expected]


def test_a_world_of_one_is_plain_python(tmp_path):
    def script(runtime: Runtime):
        runtime.streams.split()
        return torch.initial_seed(), torch.rand(()).item(), np.random.rand()

    torch.manual_seed(21), np.random.seed(22)
    assert ranks(1, script, tmp_path) == [(21, torch.rand(()).item(), np.random.rand())]
