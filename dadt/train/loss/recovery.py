"""Connects a rank with the other ranks and, after a loss of ranks, with the remaining ones."""

from __future__ import annotations

from collections.abc import Mapping
from time import perf_counter
from typing import Any

import torch

from dadt.comm import executors
from dadt.comm.executors.base import Connection
from dadt.comm.peer_deaths import Generation
from dadt.config.executor import executors_of
from dadt.errors import CommError, CommTimeout, DadtError, Mismatch, PeerLost, StartTimeout, Unproved
from dadt.train.attachments import Attachments
from dadt.train.checkpoint import Checkpoints
from dadt.train.drawn_batches import DrawnBatches
from dadt.train.events import Events
from dadt.train.loss.regroup import regroup
from dadt.train.optimizers import Optimizers
from dadt.train.ranks import Ranks
from dadt.train.replicas import Replicas
from dadt.train.stall import PATIENCE
from dadt.train.verification import Verification

REGROUP_SECONDS = 10.0
"""Seconds for which a rank waits until the launcher reports which ranks train on, after a library has noticed a lost
host."""


class Recovery:
    """Connects this rank with all ranks that train, at the start and after each loss of ranks. In algorithms whose
    ranks do not wait for each other, reconnecting runs on the thread of `Reconnection`."""

    def __init__(
        self,
        ranks: Ranks,
        optimizers: Optimizers,
        attachments: Attachments,
        batches: DrawnBatches,
        checkpoints: Checkpoints,
        replicas: Replicas,
        verification: Verification,
        events: Events,
    ) -> None:
        self._ranks, self._optimizers, self._attachments, self._batches = ranks, optimizers, attachments, batches
        self._checkpoints, self._replicas, self._events = checkpoints, replicas, events
        self._verification = verification
        self._regrouping = False

    def join(self) -> None:
        """Connect with all ranks for the first time, and continue from their state if they have trained already. This
        is repeated if ranks are lost meanwhile. Raises StartTimeout, PeerLost or ConfigError."""
        ranks = self._ranks
        if ranks.world.joins:
            # The launcher lets it in once all new workers of its island have come.
            seconds = ranks.config.start_timeout if ranks.world.parts > 1 else 0.0
            self.enter(StartTimeout("the launcher did not let this rank into the job"), seconds)
        self.connect()
        if not ranks.generation:
            return
        with ranks.as_a_whole():
            try:
                self.regroup()
            except CommError as error:
                ranks.regroup(error)

    def connect(self) -> None:
        """Connect with all ranks of the group, after waiting for them. Raises StartTimeout, PeerLost or ConfigError."""
        while True:
            try:
                connection = self._connected()
                break
            except Exception as error:  # noqa: BLE001 (a library may say in words of its own that a rank has ended)
                self.enter(error)
        self._ranks.use(connection)

    def _connected(self) -> Connection:
        ranks = self._ranks
        if ranks.group.world_size == 1:
            # Even for one rank, buckets in GPU memory need an executor that leaves them there.
            name = "null" if ranks.device is None else executors_of(ranks.config)[1].replace("auto", "nccl")
            return executors.connect_one(name, ranks.connecting, ranks.group, ranks.meet)
        return executors.connect(ranks.connecting, ranks.group, ranks.meet)

    def regroup(self) -> None:
        """Compare how far the connected ranks have trained, and continue from the state of the furthest rank."""
        ranks = self._ranks
        regroup(ranks, self._attachments, self._replicas, self._verification, equal=ranks.together)

    def connect_anew(
        self,
        error: CommError,
        seconds: float = 0.0,
        parts: Mapping[torch.optim.Optimizer, dict[str, Any]] | None = None,
    ) -> None:
        """Connect with the ranks that are left. Raises the error if no loss of ranks explains it.

        seconds: time that a new worker may take to join. parts: DADT's part of each optimizer's state dict, which all
        ranks must pass if they have waited for a new worker.
        """
        if self._regrouping:
            raise error
        ranks = self._ranks
        begun, self._regrouping = perf_counter(), True
        try:
            while True:
                before = ranks.generation
                handed = self.enter(error, seconds).handed > before
                seconds = 0.0
                if ranks.together and handed:
                    self._release(parts or {})
                try:
                    ranks.hang_up()
                    self.connect()
                    if ranks.timeline is not None and ranks.connection is not None:
                        ranks.timeline.record(ranks.connection, f"exchange, generation {ranks.generation}")
                    with self._checkpoints.aside():
                        self.regroup()
                    break
                except CommError as another:
                    error = another
        finally:
            self._regrouping = False
        ranks.requests.approaches.begin_anew()
        for callback in self._events.on_regroup:
            callback()
        seconds = perf_counter() - begun
        ranks.progress.stood += seconds
        size, whole = ranks.group.world_size * ranks.world.parts, ranks.world.world_size
        text = self._batches.missing(whole - size) if size < whole else ""
        missing = f"; {text}" if text else ""
        ranks.say(f"{size} of {whole} workers train on from step {ranks.step}, {seconds:.2f} s later{missing}")

    def _release(self, parts: Mapping[torch.optim.Optimizer, dict[str, Any]]) -> None:
        """Detach all optimizers from DADT, so that the next forward attaches them again, as in a job that resumes from
        a checkpoint. parts: DADT's part of each optimizer's state dict, as in a checkpoint."""
        for attachment in self._attachments:
            attachment.prediction.undo()
            self._batches.keep(attachment)
        self._optimizers.buffers.release()
        self._attachments.clear()
        self._events.on_end.clear()
        self._ranks.requests.forget_proposals()
        for optimizer, part in parts.items():
            self._checkpoints.keep(optimizer, part)

    def enter(self, error: Exception, seconds: float = 0.0) -> Generation:
        """Enter the newest group of ranks, without connecting yet. seconds: time that a new worker may take to join.
        Raises the error if no new group is announced in time."""
        ranks, deaths, rank = self._ranks, self._ranks.deaths, self._ranks.world.rank
        late = isinstance(error, StartTimeout) and not deaths.outdated
        if not ranks.survives or isinstance(error, Mismatch) or (late and ranks.closing):
            raise error
        if seconds:
            self._await_news(seconds)
        if not deaths.outdated and self._may_have_passed(error):
            self._ask_to_reconnect(error)
        self._await_news(REGROUP_SECONDS)
        generation = deaths.enter(error, 0.0)
        while ranks.world.joins and rank not in generation.members:  # older groups do not include the new worker yet
            generation = deaths.enter(error, max(seconds, REGROUP_SECONDS))
        if rank not in generation.members:
            raise PeerLost(f"the others train on without this rank: {generation.text}") from error
        ranks.enter(generation)
        return generation

    def _await_news(self, seconds: float) -> None:
        """Wait at most `seconds` seconds until the launcher reports which ranks train on."""
        begun = perf_counter()
        while not self._ranks.deaths.await_news(min(PATIENCE, max(0.0, seconds - (perf_counter() - begun)))):
            if (waited := perf_counter() - begun) >= seconds:
                return
            self._ranks.tell_waiting("connecting anew", waited)

    def _may_have_passed(self, error: Exception) -> bool:
        """Whether the error may come from a failed connection, which connecting again can repair. False if a rank was
        missing at the start of the job, since it would probably be missing after a second wait, too."""
        ranks = self._ranks
        ours = isinstance(error, DadtError) and not isinstance(error, CommError | StartTimeout | Unproved)
        wanted = isinstance(error, CommTimeout) and ranks.config.on_stall == "abort"
        starts = isinstance(error, StartTimeout) and ranks.step == 0 and ranks.generation == 0
        return not (ours or wanted or starts)

    def _ask_to_reconnect(self, error: Exception) -> None:
        """Ask the agent whether all ranks reconnect, and wait for its answer. Raises the error if ranks do not
        reconnect."""
        ranks = self._ranks
        assert ranks.control is not None  # jobs that survive losses of ranks have an agent on each host
        most = ranks.config.timeout + REGROUP_SECONDS
        anew, text = ranks.control.reconnect(str(error), most, ranks.generation)
        if text:
            raise PeerLost(text) from error
        if not anew:
            if isinstance(error, CommError):
                ranks.deaths.name(error)
            raise error
