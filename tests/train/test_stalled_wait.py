"""When a rank that waits for long concludes that its peers do not run the same steps."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from dadt.config import Config
from dadt.errors import CommTimeout, Mismatch
from dadt.train.stall import Stall


def look(launched: Callable[[Any], bool], *, done: bool = False) -> None:
    """Look at a peer that has ended."""
    work = SimpleNamespace(name="evaluation", done=False)

    def peers() -> list[dict[str, Any]]:
        work.done = done
        return [{"rank": 1, "state": "has ended after 7 steps", "said": "has ended after 7 steps", "step": 7}]

    stall = Stall(Config(timeout=30.0), 0, SimpleNamespace(peers=peers), print)  # type: ignore[arg-type]
    stall.look(work, 3.0, launched, CommTimeout("it is under way"), "")


def test_a_peer_that_ended_without_the_operation_is_a_mismatch() -> None:
    with pytest.raises(Mismatch, match="rank 0 is in evaluation, rank 1 has ended after 7 steps"):
        look(lambda peer: False)


def test_what_a_peer_launched_before_it_ended_still_arrives() -> None:
    look(lambda peer: True)


def test_what_arrives_while_peers_are_asked_for_is_no_mismatch() -> None:
    look(lambda peer: False, done=True)
