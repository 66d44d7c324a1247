"""What has to hold for the data that ranks read: no sample is read twice in a step, and none is left out needlessly."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from simulation.world import Broken

if TYPE_CHECKING:
    from simulation.worker_training import StepTold


def check_shares(told: Sequence[StepTold], generation: int, *, redistribute: bool) -> None:
    """Check one step of all ranks. generation: the one in which they take it."""
    first = told[0]
    if any((each.share.whole, each.readers) != (first.share.whole, first.readers) for each in told):
        raise Broken(f"ranks do not divide the same data in the same way: {told}")
    taken = [sample for each in told if each.share.samples for sample in each.share.index]
    if len(taken) != len({*taken}):
        raise Broken(f"two ranks read the same samples: {told}")
    present = {each.rank for each in told}
    if redistribute and all(each.pass_begun == generation for each in told) and present != {*first.readers}:
        raise Broken(f"a pass was begun by ranks {present}, and is divided among {first.readers}")
    if present >= {*first.readers} and len(taken) < len(first.share.whole):
        raise Broken(f"samples are left out though all are there who read: {told}")
