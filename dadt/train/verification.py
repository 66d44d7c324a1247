"""Compares the ranks' replicas every `--verify-every` steps, without delaying the training. A rank whose replica
differs loads a copy of another rank's."""

from __future__ import annotations

import json
import socket
from array import array
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple
from weakref import WeakKeyDictionary

from dadt.errors import CommError, ConfigError
from dadt.train.attachment import Attachment
from dadt.train.loss.gathering import Gathering
from dadt.train.ranks import Ranks
from dadt.train.replicas import Replicas, checksum

LOOK_AFTER = 2
"""Number of steps after which a comparison's result is read. The result has arrived by that step, even with algorithm
`pipe`, whose second step waits for an exchange launched after the comparison."""

TURNS = 8
"""The checksum of each frozen parameter is computed once in this number of comparisons. The other comparisons use the
last checksum, unless the script has changed the parameter."""


class Verdict(NamedTuple):
    """Result of a comparison: the ranks whose replicas differ, as indices in the group."""

    right: int
    """Index of the first rank whose replica counts as right."""
    wrong: list[int]
    sure: bool
    """Whether more than half of the replicas are equal. If not, the first rank's replica counts as right."""


def judge(every: Sequence[Sequence[int]]) -> Verdict:
    """Decide which replicas count as right and which as wrong. every: checksums of each rank's replica."""
    told = [tuple(each) for each in every]
    most, count = Counter(told).most_common(1)[0]
    sure = 2 * count > len(told)
    chosen = most if sure else told[0]
    return Verdict(told.index(chosen), [i for i, each in enumerate(told) if each != chosen], sure)


class PendingComparison(NamedTuple):
    """A comparison under way, with the step after which it began, and the allgather of the ranks' checksums."""

    step: int
    answer: Gathering


class FrozenSum(NamedTuple):
    """A frozen parameter's checksum, with the parameter's autograd version and address, which show later whether it was
    changed."""

    checksum: int
    version: int
    """The parameter's autograd version when the checksum was computed."""
    address: int


class Verification:
    """Comparisons of all optimizers' replicas. All ranks make the same comparisons in the same steps."""

    def __init__(self, ranks: Ranks, replicas: Replicas) -> None:
        self._ranks, self._replicas = ranks, replicas
        self._asked: WeakKeyDictionary[Attachment, PendingComparison] = WeakKeyDictionary()
        self._equal: WeakKeyDictionary[Attachment, int] = WeakKeyDictionary()
        """For each optimizer, the last step after which its replicas were found equal."""
        self._frozen: WeakKeyDictionary[Attachment, dict[str, FrozenSum]] = WeakKeyDictionary()
        """For each optimizer, the checksums of its modules' frozen parameters, by name."""

    def stepped(self, attachment: Attachment) -> None:
        """Begin a comparison of the replicas every `--verify-every` steps, and act on the result of the one before.
        Called after a step, while weights are true. Raises ConfigError if the algorithm gives each rank its own
        weights."""
        every, step = self._ranks.config.verify_every, attachment.step
        if not every:
            return
        if not attachment.algorithm.identical:
            raise ConfigError(f"--verify-every {every}: the algorithm gives each rank weights of its own; leave it out")
        asked = self._asked.get(attachment)
        if asked is not None and step >= asked.step + min(LOOK_AFTER, every):
            self._look(attachment, self._asked.pop(attachment), last=False)
        if step % every == 0:
            lane = array("q", [self._ranks.generation, *self._checksums(attachment)])
            answer = self._ranks.allgather(f"replicas{attachment.name} after {step} steps", lane.tobytes())
            self._asked[attachment] = PendingComparison(step, answer)

    def finish(self) -> None:
        """Report the results of comparisons that are still under way. Called when the script has ended. Raises
        CommError."""
        for attachment, asked in list(self._asked.items()):
            self._look(attachment, asked, last=True)

    def _look(self, attachment: Attachment, asked: PendingComparison, *, last: bool) -> None:
        ranks = self._ranks
        ranks.wait(asked.answer)
        told = [array("q", bytes(lane)).tolist() for lane in asked.answer.lanes]
        if any(generation != ranks.generation for generation, *_ in told):
            return  # ranks were lost meanwhile, and the remaining ranks compared their replicas when they regrouped
        every = [checksums for _, *checksums in told]
        when = f" (equal after {self._equal.get(attachment, 0)} steps, not after {asked.step})"
        self._equal[attachment] = asked.step
        if last:
            self._report(attachment, every, when)
            return
        try:
            with self._replicas.aside():
                self.repair(attachment, every, when)
        except CommError as error:
            ranks.regroup(error)  # the remaining ranks compare again while they regroup

    def checksums(self, attachment: Attachment) -> list[int]:
        """Return the checksums of this rank's current replica."""
        self.forget(attachment)  # a rank that joins has no checksums yet, so all ranks compute theirs again
        return self._checksums(attachment)

    def forget(self, attachment: Attachment) -> None:
        """Forget the checksums of frozen parameters, since this rank takes over another one's replica."""
        self._frozen.pop(attachment, None)

    def compare(self, attachment: Attachment) -> list[list[int]]:
        """Return the checksums of each rank's current replica. Waits for all ranks. Those of frozen parameters are the
        ones that `checksums` has computed, unless they were changed or forgotten since."""
        mine = json.dumps(self._checksums(attachment)).encode()
        return [json.loads(lane) for lane in self._ranks.tell(f"replicas{attachment.name}", mine)]

    def repair(self, attachment: Attachment, every: Sequence[Sequence[int]], when: str = "") -> None:
        """Replace replicas that differ by a copy of a right one. All ranks call this method with the same checksums.
        Raises CommError without having changed any replica. when: text that says since when replicas differ, if known.
        """
        verdict = judge(every)
        if verdict.wrong:
            behind = self._ranks.group.rank in verdict.wrong
            self.forget(attachment)
            self._replicas.catch_up(attachment, verdict.right, behind=behind)
            members = self._ranks.members
            self._report(attachment, every, f"{when}: it takes over that of rank {members[verdict.right]}")

    def _report(self, attachment: Attachment, every: Sequence[Sequence[int]], more: str) -> None:
        """On a rank whose replica differs, count the difference, and warn the user of the first, second, fourth, eighth
        and so on. The rank itself warns, because it knows the name of its host."""
        ranks, verdict, measure = self._ranks, judge(every), attachment.measure
        if ranks.group.rank not in verdict.wrong:
            return
        measure.differed += 1
        if measure.differed & (measure.differed - 1):
            return
        world, pairs = ranks.world, zip(every[ranks.group.rank], every[verdict.right], strict=False)
        names = zip(self._replicas.tensors(attachment), pairs, strict=False)
        first = next((name for name, (mine, theirs) in names if mine != theirs), "the optimizer's state")
        here = f" on {socket.gethostname()}" if world.local_size < world.world_size else ""
        unsure = "" if verdict.sure else "; no majority says whose is right, so that of the first rank counts"
        ranks.say(
            f"step {attachment.step}{attachment.name}: the replica of rank {world.rank}{here} differs from that of rank"
            f" {ranks.members[verdict.right]}, first in {first}{more}{unsure}",
            "warning",
        )

    def _checksums(self, attachment: Attachment) -> list[int]:
        every = self._replicas.tensors(attachment)
        frozen = self._replicas.untrained(attachment)
        before, turn = self._frozen.get(attachment, {}), attachment.step // (self._ranks.config.verify_every or 1)
        kept = self._frozen[attachment] = {}
        for number, (name, parameter) in enumerate(frozen.items()):
            known, now = before.get(name), (parameter._version, parameter.data_ptr())
            is_due = known is None or known[1:] != now or (turn + number) % TURNS == 0
            if name in every:
                kept[name] = FrozenSum(checksum(every[name]) if is_due or known is None else known.checksum, *now)
        return [kept[name].checksum if name in kept else checksum(tensor) for name, tensor in every.items()]
