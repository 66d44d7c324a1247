"""How ranks train on that have connected again, decided from what each of them reports of itself."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dadt.errors import Mismatch
from dadt.train.loss.position import CatchUp, Position, decide


def at(
    *averaged: int, gathered: int = 0, consumed: bool = False, stuck: str = "", joins: bool = False, given: int = 0
) -> Position:
    """The report of a rank that has averaged so many steps of each optimizer."""
    return Position(averaged, [consumed] * len(averaged), [{}] * len(averaged), gathered, True, stuck, joins, given)


def test_who_lacks_an_average_takes_the_weights_of_the_first_that_has_it() -> None:
    course = decide([at(4, 3), at(4, 4), at(5, 4)], [0, 2, 5])
    assert course.furthest == [5, 4]
    assert course.catch_ups == [CatchUp(0, 2, {0, 1}), CatchUp(1, 1, {0})]
    assert course.greeter is None


def test_who_has_not_begun_with_an_optimizer_is_behind_and_who_is_new_is_not() -> None:
    assert decide([at(0, 0), at(0)], [0, 1]).catch_ups == [CatchUp(1, 0, {1})]
    course = decide([at(joins=True), at(7)], [0, 1])
    assert (course.catch_ups, course.greeter) == ([], 1)


def test_who_will_start_from_what_it_was_given_is_not_behind() -> None:
    """It was let in a moment ago, and has built its first optimizer, or its first of two, as another rank joins."""
    for late in (at(joins=True, given=2), at(0, given=2)):
        course = decide([at(0, 0), late, at(joins=True)], [0, 1, 2])
        assert (course.catch_ups, course.greeter) == ([], 0)


@pytest.mark.parametrize(
    ("told", "why"),
    [
        ([at(5), at(3)], "rank 3 cannot catch up"),
        ([at(3), at(4, consumed=True)], "rank 1 cannot catch up"),
        ([at(3), at(3, stuck="in step 3")], "rank 3 was in step 3"),
    ],
)
def test_what_cannot_go_on_says_which_rank(told: list[Position], why: str) -> None:
    with pytest.raises(Mismatch, match=why):
        decide(told, [1, 3])


def test_whoever_has_gathered_most_tells_the_others_but_not_those_that_are_new() -> None:
    course = decide([at(joins=True), at(1, gathered=3), at(1, gathered=5)], [0, 1, 2])
    assert (course.gathered, course.least, course.informant) == (5, 3, 2)


def test_ranks_are_level_if_nobody_takes_anything_from_another_one() -> None:
    assert decide([at(4, 3), at(4, 3)], [0, 1]).level
    for other in (at(4, 4), at(4, 3, gathered=1), at(joins=True), replace(at(4, 3), rounds=[{"mean": [1]}, {}])):
        assert not decide([at(4, 3), other], [0, 1]).level
