"""A line is shown once where all ranks print it within a moment, and each rank's lines keep their order."""

from __future__ import annotations

import random

import pytest

from dadt.launch.monitor.alike import MOMENT_SECONDS, WAITING, Alike


def shown(alike: Alike, now: float) -> list[tuple[list[int], bytes]]:
    return list(alike.take(now))


def test_alike_from_all():
    alike = Alike(range(3))
    for rank in (2, 0):
        alike.add(rank, [b"x"], 0.0)
        assert shown(alike, 0.0) == []
    alike.add(1, [b"x"], 0.1)
    assert shown(alike, 0.1) == [([0, 1, 2], b"x")]
    assert alike.due() == float("inf")


def test_what_others_do_not_print_waits_a_moment():
    alike = Alike(range(2))
    alike.add(0, [b"mine", b"x"], 0.0)
    alike.add(1, [b"x"], 0.4)
    assert shown(alike, 0.9) == [] and alike.due() == MOMENT_SECONDS
    assert shown(alike, MOMENT_SECONDS) == [([0], b"mine"), ([0, 1], b"x")]


def test_lines_before_the_common_one_come_before_it():
    alike = Alike(range(2))
    alike.add(0, [b"x"], 0.0)
    alike.add(1, [b"a", b"b", b"x"], 0.3)
    assert shown(alike, MOMENT_SECONDS) == [([1], b"a"), ([1], b"b"), ([0, 1], b"x")]


def test_nobody_waits_for_a_rank_that_has_ended():
    alike = Alike(range(3))
    alike.add(0, [b"x", b"y"], 0.0)
    alike.add(1, [b"x", b"y"], 0.0)
    alike.add(2, [b"x"], 0.0)
    assert shown(alike, 0.0) == [([0, 1, 2], b"x")]
    alike.end(2)
    assert shown(alike, 0.0) == [([0, 1], b"y")]
    alike.end(1)
    alike.add(0, [b"z"], 0.0)
    assert shown(alike, 0.0) == [([0], b"z")]
    alike.add(1, [b"anew"], 0.0)
    alike.add(0, [b"u"], 0.0)
    assert shown(alike, 0.0) == []


@pytest.mark.parametrize(
    ("one", "other", "alike"),
    [
        ("epoch 1: 100%|█| 9/9 [00:17<00:00, 17.2it/s]", "epoch 1: 100%|█| 9/9 [00:18<00:00,  3.1s/it]", True),
        ("epoch 1: 100%|█| 9/9 [00:17<00:00, 17.2it/s]", "epoch 2: 100%|█| 9/9 [00:17<00:00, 17.2it/s]", False),
        ("epoch 1: 100%|█| 9/9 [00:17<00:00, 17.2it/s]", "epoch 1: 100%|█| 9/9 [1:00:18<00:00, 7it/s]", True),
        (" 27%|█▉   | 2430/9000 [00:30<01:22, 81.1it/s]", " 26%|█▊   | 2399/9000 [00:30<?, ?it/s]", True),
        ("100%|█| 9/9 [00:17<00:00, 1it/s, loss=0.5]", "100%|█| 9/9 [00:17<00:00, 1it/s, loss=0.6]", False),
        ("9/9 ━━━ 3s 61ms/step - loss: 0.5", "9/9 ━━━ 4s 70ms/step - loss: 0.5", True),
        ("9/9 ━━━ 3s 61ms/step - loss: 0.5", "9/9 ━━━ 3s 61ms/step - loss: 0.6", False),
        ("epoch 1 took 3s", "epoch 1 took 4s", False),
    ],
)
def test_bars_may_differ_in_their_pace(one: str, other: str, alike: bool):
    lines = Alike(range(2))
    lines.add(0, [one.encode()], 0.0)
    lines.add(1, [other.encode()], 0.0)
    together, apart = [([0, 1], one.encode())], [([0], one.encode()), ([1], other.encode())]
    assert shown(lines, MOMENT_SECONDS) == (together if alike else apart)


def test_bars_of_which_each_rank_has_another_do_not_wait():
    alike = Alike(range(2))
    alike.add(0, [b"100%|\xe2\x96\x88| 9/9 [00:17<00:00, 1it/s, loss=0.5]"], 0.0)
    assert shown(alike, 0.2) == []
    alike.add(1, [b"100%|\xe2\x96\x88| 9/9 [00:17<00:00, 1it/s, loss=0.6]"], 0.2)
    assert [ranks for ranks, _ in shown(alike, 0.2)] == [[0], [1]]


def test_a_flood_of_one_rank_does_not_wait():
    alike = Alike(range(2))
    alike.add(0, [b"%d" % i for i in range(WAITING + 10)], 0.0)
    assert len(shown(alike, 0.0)) == 10


def test_any_order_keeps_each_rank_s_lines():
    for seed in range(200):
        draw, alike, ranks = random.Random(seed), Alike(range(3)), range(3)
        printed: dict[int, list[bytes]] = {rank: [] for rank in ranks}
        found: dict[int, list[bytes]] = {rank: [] for rank in ranks}
        now = 0.0
        for _ in range(60):
            now += draw.choice([0.0, 0.1, 1.1])
            rank, line = draw.choice(ranks), draw.choice([b"a", b"b", b"c"])
            printed[rank].append(line)
            alike.add(rank, [line], now)
            for those, each in alike.take(now):
                for one in those:
                    found[one].append(each)
        for those, each in alike.take(float("inf")):
            for one in those:
                found[one].append(each)
        assert found == printed
