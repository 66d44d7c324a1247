"""Which snapshots are complete, and what ranks resume from, by what the parts of ranks say of themselves."""

from __future__ import annotations

from typing import Any

from dadt.control import snapshot_parts
from dadt.control.snapshot_parts import Source


def part(
    members: list[int],
    generation: int = 0,
    *,
    common: bool = False,
    world: int = 3,
    attempt: int = 0,
    parts: int = 1,
) -> dict[str, Any]:
    """What the part of a rank says."""
    return {
        "members": members,
        "attempt": attempt,
        "generation": generation,
        "common": common,
        "shares": world,
        "world": world,
        "parts": parts,
        "next": "batch",
    }


ALL = [0, 1, 2]


def test_all_that_took_it_have_to_be_there() -> None:
    assert not snapshot_parts.is_whole({})
    assert not snapshot_parts.is_whole({0: part(ALL), 2: part(ALL)})
    assert snapshot_parts.is_whole({each: part(ALL) for each in ALL})
    assert snapshot_parts.is_whole({0: part([0, 2], 1), 2: part([0, 2], 1)})


def test_a_rank_that_took_it_after_a_loss_has_not_taken_it_with_the_others() -> None:
    caught_up = {0: part([0, 1], 1), 1: part(ALL), 2: part(ALL)}
    assert not snapshot_parts.is_whole(caught_up)
    assert not snapshot_parts.is_whole({0: part(ALL), 1: part([0, 1], 1), 2: part(ALL)})


def test_parts_of_two_attempts_make_no_snapshot() -> None:
    left = {0: part([0, 1], 2, world=2), 1: part([0, 1], 2, world=2)}
    assert not snapshot_parts.is_whole({**left, 1: part([0, 1], attempt=1, world=2)})
    assert snapshot_parts.is_whole({each: part([0, 1], attempt=1, world=2) for each in (0, 1)})


def test_what_an_attempt_leaves_is_superseded_by_the_next() -> None:
    assert snapshot_parts.superseded([2, 4, 6, 8], 4) == [6, 8]


def test_the_part_of_a_rank_that_was_lost_is_not_used() -> None:
    parts = {0: part([0, 1], 1, common=True), 1: part([0, 1], 1), 2: part(ALL, common=True)}
    assert snapshot_parts.is_whole(parts)
    assert snapshot_parts.source(parts, 2, 3) == Source(common=0, own=None, is_exact=False, batch="")
    assert snapshot_parts.source(parts, 1, 3) == Source(common=0, own=1, is_exact=False, batch="")


def test_each_rank_goes_on_exactly_where_all_are_there_that_took_it() -> None:
    parts = {each: part(ALL, common=each == 1) for each in ALL}
    assert snapshot_parts.source(parts, 2, 3) == Source(common=1, own=2, is_exact=True, batch="batch")
    assert snapshot_parts.source(parts, 1, 2) == Source(common=1, own=1, is_exact=False, batch="")
    assert snapshot_parts.source(parts, 3, 4) == Source(common=1, own=None, is_exact=False, batch="")


def test_a_rank_of_an_island_goes_on_from_an_equal_one() -> None:
    four = {each: part([0, 1, 2, 3], common=each in (0, 1), world=4, parts=2) for each in range(4)}
    assert snapshot_parts.source(four, 3, 4) == Source(common=1, own=3, is_exact=True, batch="batch")
    assert snapshot_parts.source(four, 1, 2) == Source(common=1, own=1, is_exact=False, batch="")
    left = {each: part([2, 3], 1, common=True, world=4, parts=2) for each in (2, 3)}
    assert snapshot_parts.source(left, 1, 4) == Source(common=3, own=None, is_exact=False, batch="")
    assert not snapshot_parts.is_whole({2: left[2]})
