"""After which steps snapshots are taken, decided without any training."""

from __future__ import annotations

import sys

from dadt.inject.replay.snapshot_timing import SnapshotTiming


def test_a_snapshot_is_put_off_where_none_is_possible_and_while_exchanges_are_under_way() -> None:
    timing = SnapshotTiming(5)
    assert timing.next == 5
    assert not timing.takes(5, 2, possible=False, rests=True)
    assert timing.next == 6
    assert not timing.takes(6, 2, possible=True, rests=False)
    assert timing.takes(7, 2, possible=True, rests=False)  # as late as it may be
    assert timing.next == 12


def test_one_that_was_dropped_is_taken_again_after_a_step_that_a_forward_follows() -> None:
    timing = SnapshotTiming(100)
    for step in (0, 4, 8):
        timing.saw(step)
    assert timing.likely(9) == 12
    timing.retry(timing.likely(9))
    assert timing.next == 12
    assert timing.takes(12, 0, possible=True, rests=True)
    assert timing.next == 112


def test_without_an_interval_none_is_taken_until_it_is_known() -> None:
    timing = SnapshotTiming(0)
    assert timing.next == sys.maxsize
    timing.steps = 7
    timing.goes_on_from(20)
    assert timing.next == 27
