"""Ranks that exchange named tensors in a simulated world, with what must hold of them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from functools import cache, partial
from unittest.mock import patch

from dadt import _core
from dadt.comm import keepalive
from dadt.comm.collectives import named
from dadt.errors import CommTimeout, Mismatch
from simulation.comm_data import Engines
from simulation.comm_faults import SILENT_SECONDS, Adds, Differs, EndsEarly, Lacks, NamedFault, RankDies, Vanishes
from simulation.comm_rank import NamedRank, Submitted
from simulation.comm_scenario import NamedTensor, NamedTensors
from simulation.comm_wire import RankConnection
from simulation.world import Broken, World

SOON = 1.0
"""Seconds within which something is known everywhere, where nothing is slow."""


class NegotiationJob:
    """The ranks of one scenario, and the world between them."""

    def __init__(self, scenario: NamedTensors, *, logs: bool = False) -> None:
        self.scenario = scenario
        self.world = World(scenario.seed, logs=logs)
        self.time = _core.ToldTime()
        self.time.set(self.world.now)
        self.engines = Engines(
            self.world, scenario.size, lambda rank: self.ranks[rank].process.get(lambda: self.ranks[rank].look())
        )
        self.struck: list[NamedFault] = []
        self.connections = [
            RankConnection(self.world, rank, scenario.latency, lambda to: self.ranks[to].poke())
            for rank in range(1, scenario.size)
        ]
        ends = [[-1, *(each.of_rank_0.detach() for each in self.connections)]]
        ends += [[each.of_rank.detach()] for each in self.connections]
        self.invariants = NamedInvariants(self)
        self.ranks = [NamedRank(self, rank, sockets) for rank, sockets in enumerate(ends)]
        for each in self.connections:
            for rank in (0, each.rank):
                self.ranks[rank].wires += each.wires.values()
                self.ranks[rank].own_wires.append(each.wires[rank])

    def run(self) -> None:
        """Raises Broken if something does not hold that has to."""
        try:
            with (
                patch.object(named, "_say", self.invariants.say),
                patch.object(named, "_dump", partial(self.world.note, "dump")),
                patch.object(keepalive, "_forever", []),  # what a process keeps until its end
            ):
                self._run()
        finally:
            self._close()

    def _run(self) -> None:
        world = self.world
        for fault in self.scenario.faults:
            world.after(fault.at, lambda fault=fault: self._strike(fault))
        if not world.run(lambda: all(rank.over for rank in self.ranks), world.now + self.scenario.limit):
            late = [rank.rank for rank in self.ranks if not rank.over]
            raise Broken(f"ranks {late} have not ended within {self.scenario.limit:.0f} s")
        self.invariants.ended()

    def _strike(self, fault: NamedFault) -> None:
        self.time.set(self.world.now)
        if fault.strike(self):
            self.strikes(fault)

    def strikes(self, fault: NamedFault) -> None:
        """This fault has had an effect."""
        if fault not in self.struck:
            self.world.note("fault", f"{fault}")
            self.struck.append(fault)

    def _close(self) -> None:
        for rank in self.ranks:
            with suppress(CommTimeout):
                rank.named.negotiation.close(0.0)
        self.engines.close()
        for each in self.connections:
            each.close()

    # What ranks ask of the job ------------------------------------------------------------------------------------

    @staticmethod
    @cache
    def _layout(dtype: str, count: int) -> _core.Layout:
        return _core.Layout(getattr(_core.DType, dtype), [count])

    def layout(self, tensor: NamedTensor) -> _core.Layout:
        return self._layout(tensor.dtype, tensor.count)

    def ends_early(self, fault: NamedFault, rank: int) -> bool:
        return isinstance(fault, EndsEarly) and fault.rank == rank

    def turned(self, rank: NamedRank) -> None:
        """The rank's negotiation has done something: pass on what it has sent, and begin its operations."""
        for each in self.connections if rank.rank == 0 else [self.connections[rank.rank - 1]]:
            each.pump(rank.rank)
        self.engines.look(rank.rank)

    def ended(self, rank: NamedRank) -> None:
        """The rank's script and its negotiation are over: its process ends."""
        rank.settle_all()

    def lost(self, rank: NamedRank, *, silent: bool) -> None:
        """The process of a rank is gone."""
        self.engines.leave(rank.rank)
        for each in self.connections if rank.rank == 0 else [self.connections[rank.rank - 1]]:
            to, own = each.wires[each.rank - rank.rank], each.wires[rank.rank]
            to.link.vanish()
            if silent:
                own.link.vanish()
                self.world.after(SILENT_SECONDS, own.end)
            else:
                own.link.close()


class NamedInvariants:
    """What holds in every job, whatever goes wrong."""

    def __init__(self, job: NegotiationJob) -> None:
        self._job = job
        self._told: set[str] = set()
        self._stalled: set[str] = set()
        """Tensors of which rank 0 has said that they wait, in the newest news."""
        self._orders = 0
        self._aborted_late = False
        """Whether the job had to end as a rank is late with a tensor."""

    def hear(self, notices: Sequence[_core.Notice]) -> None:
        """News have come to a rank."""
        stalls = [notice.stall for notice in notices if notice.stall is not None]
        self._stalled = {stall.name for stall in stalls}
        self._orders += bool(stalls)
        for stall in stalls:
            self.stalled(stall)

    def say(self, text: str) -> None:
        """A line that the user sees."""
        self._job.world.note("user", text)
        self._told |= self._stalled if text.endswith("as well") else set(re.findall('"([^"]*)" has waited', text))

    def stalled(self, stall: _core.Stall) -> None:
        """What rank 0 tells of a tensor that waits is true, but for what is still under way."""
        job = self._job
        if stall.seconds < job.scenario.stall_warning - 1e-6:
            raise Broken(f"{stall.name} is told of after {stall.seconds} s")
        for rank in stall.submitted if stall.name != "join" else []:
            if not any(each.tensor.name == stall.name for each in job.ranks[rank].submitted) and self.sane:
                raise Broken(f"rank {rank} is said to have submitted {stall.name}, and has not")
        self._aborted_late |= bool(stall.missing) and job.scenario.on_stall == "abort"
        for rank in stall.missing if stall.name != "join" and not any(each.fatal for each in job.struck) else []:
            if any(
                each.tensor.name == stall.name and not each.ticket.done and job.world.now - each.at > SOON
                for each in job.ranks[rank].submitted
            ):
                raise Broken(f"rank {rank} is said to lack {stall.name}, and has submitted it long ago")

    @property
    def sane(self) -> bool:
        """Whether no rank sends what it should not."""
        return not any(type(fault).__name__ == "SendsNonsense" for fault in self._job.struck)

    def ended(self) -> None:
        """All ranks have ended."""
        job = self._job
        for rank in job.ranks:
            rank.settle_all()
        living = [rank for rank in job.ranks if rank.process.alive]
        self._check_that_all_is_settled(living)
        self._check_alike(living)
        self._check_losses(living)
        self._check_messages()
        if not job.struck:
            self._check_undisturbed(living)
        self._check_errors(living)
        joined = {rank.last_joined for rank in living if rank.last_joined >= 0}
        if len(joined) > 1:
            raise Broken(f"ranks do not agree who has joined last: {sorted(joined)}")

    def _check_that_all_is_settled(self, living: list[NamedRank]) -> None:
        for rank in living:
            for each in rank.submitted:
                runs = each.ticket.operation is not None and any(
                    other.failed or other.over for other in self._job.ranks
                )
                if each.ended is None and not runs and not rank.failed and rank.named.negotiation.error is None:
                    raise Broken(f"{each.tensor.name} of rank {rank.rank} has not ended, and nothing was said of it")

    def _check_alike(self, living: list[NamedRank]) -> None:
        """A tensor of a round runs on all ranks or on none, but for those that fail while it runs."""
        if not self.sane:
            return
        rounds: dict[tuple[int, str], dict[int, Submitted]] = {}
        for rank in living:
            for each in rank.submitted:
                rounds.setdefault((each.round, each.tensor.name), {})[rank.rank] = each
        for (number, name), ranks in rounds.items():
            wrong = {rank for rank, each in ranks.items() if isinstance(each.error, Mismatch)}
            good = {rank for rank, each in ranks.items() if each.ended is not None and each.error is None}
            if wrong and good and not any(fault.fatal for fault in self._job.struck):
                raise Broken(f"{name} of round {number} is a mismatch on ranks {wrong}, and runs on {good}")
            self._check_named(name, ranks)
            tensors = {(each.tensor.signature, each.tensor.group) for rank, each in ranks.items() if rank in good}
            if len(tensors) > 1:
                raise Broken(f"{name} of round {number} runs with {tensors}")
            operations = {each.ticket.operation for rank, each in ranks.items() if rank in good}
            if len(operations) > 1:
                raise Broken(f"{name} of round {number} runs in {operations}")

    def _check_named(self, name: str, ranks: dict[int, Submitted]) -> None:
        """Of what waits for long in vain the user is told."""
        job = self._job
        if (
            not all(isinstance(fault, Lacks | Adds | Differs) for fault in job.struck)
            or job.ranks[0].over_at < job.world.now
        ):
            return
        for rank, each in ranks.items():
            waited = (each.ended or job.ranks[rank].over_at) - each.at
            undecided = each.ticket.operation is None and not isinstance(each.error, Mismatch)
            if undecided and waited > job.scenario.stall_warning + SOON and name not in self._told:
                raise Broken(f"{name} of rank {rank} has waited {waited:.1f} s, and nobody was told")

    def _check_losses(self, living: list[NamedRank]) -> None:
        """A lost rank keeps no other one for longer than it takes to notice."""
        job = self._job
        lost = [rank for rank in job.ranks if not rank.process.alive]
        if not lost or not all(isinstance(fault, RankDies | Vanishes) for fault in job.struck):
            return
        silent = SILENT_SECONDS if any(isinstance(fault, Vanishes) for fault in job.struck) else 0.0
        most = min(rank.over_at for rank in lost) + silent + 4 * job.scenario.step_seconds + 2 * SOON
        for rank in living:
            if rank.over_at > most:
                late = rank.over_at - most
                raise Broken(f"rank {rank.rank} is kept {late:.1f} s too long by the loss of rank {lost[0].rank}")
            named = {int(number) for number in re.findall(r"rank (\d+)", rank.failed)} & {each.rank for each in lost}
            if rank.failed and not named and "closed by a peer" not in rank.failed and '"' not in rank.failed:
                raise Broken(f"rank {rank.rank} does not say who is lost: {rank.failed}")

    def _check_messages(self) -> None:
        """The number of messages stays within what is submitted: a rank reports once for each tensor at most, and while
        it waits once for each decision."""
        every = {each.tensor.name for rank in self._job.ranks for each in rank.submitted}
        tensors = 8 + 2 * len(every) * (2 + len(self._job.scenario.rounds))
        for each in self._job.connections:
            most = {0: tensors, each.rank: tensors + 2 * len(self._job.ranks[each.rank].submitted)}
            for rank, wire in each.wires.items():
                if wire.kinds["order"] > self._orders:
                    raise Broken(f"rank 0 gives {wire.kinds['order']} orders for {self._orders} news")
                if wire.messages > most[rank]:
                    raise Broken(f"rank {rank} sends {wire.messages} messages, and {most[rank]} are the most")

    def _check_undisturbed(self, living: list[NamedRank]) -> None:
        scenario = self._job.scenario
        for rank in living:
            for each in rank.submitted:
                if each.error is not None and not scenario.joins:
                    raise Broken(f"nothing was wrong, and {each.tensor.name} of rank {rank.rank}: {each.error}")
                last = max(other.at for one in living for other in one.submitted if other.round == each.round)
                # a script that has failed looks no more at what has ended
                late = each.error is None and (each.ended or 0.0) > last + scenario.cycle + SOON and not rank.failed
                if not scenario.overlap and late:
                    raise Broken(
                        f"nothing was wrong, and {each.tensor.name} of rank {rank.rank} took until {each.ended}"
                    )
        error = next((r.failed for r in living if r.failed), "")
        if error and not scenario.joins and not self._aborted_late:
            raise Broken(f"nothing was wrong, and {error}")

    def _check_errors(self, living: list[NamedRank]) -> None:
        """Whatever fails names what has failed, and no rank that has done nothing."""
        struck = self._job.struck
        guilty = {fault.rank for fault in struck} | set(self._job.scenario.joins)
        for rank in living:
            for each in rank.submitted:
                if isinstance(each.error, Mismatch):
                    self._check_mismatch(rank, each, guilty)
        if struck and not any(fault.fatal for fault in struck) and self._job.scenario.tolerant:
            for rank in living:
                if rank.failed and not self._job.scenario.joins and not self._aborted_late:
                    raise Broken(f"only tensors differ, and rank {rank.rank} fails: {rank.failed}")

    def _check_mismatch(self, rank: NamedRank, each: Submitted, guilty: set[int]) -> None:
        text = str(each.error)
        ranks = {int(number) for number in re.findall(r"rank (\d+)", text)}
        others = [other.tensor for one in self._job.ranks for other in one.submitted]
        names, before = {each.tensor.name}, set[str]()
        while names != before:  # a mismatch makes all groups fail that share a tensor
            before = names
            groups = {other.group for other in others if other.name in names} - {""}
            names = names | {other.name for other in others if other.group in groups}
        if not any(f'"{name}"' in text for name in names):
            raise Broken(f"the mismatch of {each.tensor.name} on rank {rank.rank} does not name it: {text}")
        joined = "members, and all ranks have joined" in text  # which names no rank
        if self._job.struck:  # a rank that is behind by that meets others that have joined at their end
            assert each.ended is not None
            guilty = guilty | {other.rank for other in self._job.ranks if other.joined_at <= each.ended}
        if not joined and not ranks & guilty:
            raise Broken(f"a mismatch names no rank that differs: {text}")
