"""Small allgathers, of which a loss of ranks leaves some incomplete."""

from __future__ import annotations

import math

from dadt.train.loss.gathering import Gatherings


def test_one_that_was_abandoned_begins_no_more_unless_another_rank_has_its_result() -> None:
    gatherings, heard = Gatherings(), []
    for number in range(4):
        gatherings.begin(str(number), b"", float(number), heard.append, kept=True)
    gatherings.settle({0: [b"a"]}, 1)
    gatherings.abandon(1.5)
    gatherings.settle({1: [b"b"], 2: [b"c"]}, 3)  # another rank has completed them, of which 2 was abandoned
    gatherings.undo(math.inf)
    assert heard == [[b"a"], [b"b"], [b"c"]]
    assert (gatherings.count, [g.number for g in gatherings.newest]) == (3, [0, 1, 2])


def test_those_that_began_before_are_not_abandoned() -> None:
    gatherings = Gatherings()
    for number in range(2):
        gatherings.begin(str(number), b"", float(number), lambda lanes: None, kept=True)
    gatherings.abandon(0.5)
    gatherings.undo(math.inf)
    assert (gatherings.count, [g.number for g in gatherings.newest]) == (1, [0])
