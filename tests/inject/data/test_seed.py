"""One start, a shared stream, and a stream per rank."""

from __future__ import annotations

import random

import numpy as np
import torch
from harness.forked_ranks import Runtime, ranks, single

from dadt.inject.data.seed import State


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


def test_the_seed_that_a_script_asks_for_is_one_process_s(tmp_path):
    """As samplers of libraries do that are made once training has begun; of a batch that is read it is the rank's."""

    def script(runtime):
        torch.manual_seed(42)
        draw()
        if isinstance(runtime, Runtime):
            runtime.streams.split()
            with runtime.streams.reading():
                own = torch.initial_seed()
            with runtime.streams.shared():
                assert torch.random.initial_seed() == 42
            return torch.initial_seed(), own
        return torch.initial_seed()

    alone, found = single(script), ranks(2, script, tmp_path)
    assert alone == 42 and [seed for seed, _ in found] == [42, 42]
    assert len({own for _, own in found} | {42}) == 3


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


def test_seeds_of_python_and_numpy_reach_both_streams(tmp_path):
    def script(runtime: Runtime):
        runtime.streams.split()
        torch.rand(runtime.ranks.world.rank), random.random()
        random.seed(5), np.random.seed(6)
        with runtime.streams.shared():
            sampled = random.random(), np.random.rand()
        drawn = random.random(), np.random.rand()
        runtime.streams.split()
        own = draw()
        kept = random.getstate()
        random.seed(1)
        random.setstate(kept)  # as a context in which a seed holds
        with runtime.streams.shared():
            return sampled, drawn, random.random(), own

    a, b = ranks(2, script, tmp_path)
    random.seed(5), np.random.seed(6)
    assert a[0] == b[0] == (random.random(), np.random.rand())
    assert a[1] == b[1] == (random.random(), np.random.rand())
    assert a[2] == b[2] == random.random()
    assert not set(a[3]) & set(b[3])


def test_a_seed_for_an_item_of_a_batch_is_the_rank_s_own(tmp_path):
    def script(runtime: Runtime):
        runtime.streams.split()
        with runtime.streams.reading():
            (
                torch.manual_seed(runtime.ranks.world.rank),
                random.seed(runtime.ranks.world.rank),
                np.random.seed(runtime.ranks.world.rank),
            )
            mine = draw()
        runtime.streams.split()
        with runtime.streams.shared():
            return mine, draw()

    a, b = ranks(2, script, tmp_path)
    assert not set(a[0]) & set(b[0])
    assert a[1] == b[1]


def test_seeds_after_a_checkpoint_was_loaded_count(tmp_path):
    def script(runtime: Runtime):
        def shared():
            runtime.streams.split()
            with runtime.streams.shared():
                return draw()

        def load(saved, *seeds):
            runtime.streams.loaded()
            for seed in seeds:
                seed(3)
            anew = runtime.streams.seeded_anew
            runtime.streams.load_state(saved["shared"], saved["own"], anew)

        elsewhere, before = type(runtime.streams)(runtime.ranks.world.rank), State.capture()
        elsewhere.split()
        saved = elsewhere.state()
        before.restore()
        if runtime.ranks.config.seed == 1:  # a new process, in which only torch's or Python's seed is set after it
            load(saved, *([random.seed] if runtime.ranks.world.rank < 2 else [torch.manual_seed]))
            return shared()
        shared()
        load(saved, torch.manual_seed)  # one that has trained goes on with its own streams
        return shared()

    torch.manual_seed(3), random.seed(3)
    seeded = torch.rand(()).item(), random.random()
    a, b, c, d = ranks(4, script, tmp_path / "new", seed=1)
    assert a == b and c == d and a[2] == seeded[1] and c[0] == seeded[0]
    assert a[0] != seeded[0] and a[1] == c[1] and c[2] != seeded[1]
    (a, b) = ranks(2, script, tmp_path / "same", seed=2)
    assert a == b and a[0] == seeded[0]


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
