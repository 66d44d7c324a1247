"""Determines up to which step a new worker replays its script, in a job that continues meanwhile."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from dadt.comm import plain
from dadt.control import job_folder
from dadt.errors import NotResumed, PeerLost
from dadt.inject.replay.handover import TAG, Description, description_of
from dadt.inject.replay.values import ReadValues
from dadt.train.digest import digests
from dadt.train.runtime import Runtime

NEAR_SECONDS = 1.0
"""If the replay has reached the step of the last answer within this many seconds, the next request is the last one, at
which the other ranks wait for the new worker."""
ROUNDS = 10
"""Number of requests after which the next one is the last, at which the other ranks wait for the new worker, however
far behind it is."""


class Newcomer:
    """The goal (see Goal) of a new worker's replay: the current step of the other ranks. Each request moves the goal on
    to a later step, until the other ranks wait."""

    digest = ""
    is_exact = False
    at_start: dict[str, Any] | None = None

    def __init__(self, runtime: Runtime, values: ReadValues) -> None:
        """Wait until the other ranks have completed a step and reported it."""
        self._runtime, self._values = runtime, values
        self._ranks = runtime.ranks
        self._rounds = 0
        self._asked = 0.0
        self._last = False
        """Whether this is the worker's last request, for which the other ranks wait."""
        self._giver, self._size = -1, 0
        self.plan: list[float] = []
        self.step = 0
        self.further()
        self.began = self.plan[2]

    @property
    def log(self) -> Path:
        return job_folder.of_worker(self._ranks.world) / f"replayed-rank{self._ranks.world.rank}.log"

    def further(self) -> bool:
        if self._last:
            return False
        near = self._rounds > 0 and perf_counter() - self._asked < NEAR_SECONDS
        while self._ask(last=near or self._rounds >= ROUNDS):
            pass
        self._rounds, self._asked = self._rounds + 1, perf_counter()
        return True

    def _ask(self, *, last: bool) -> bool:
        """Request the current step of the other ranks and the values recorded since the last request. last: whether the
        other ranks shall wait; in an island they do so once this holds for all of its new workers. Return whether there
        are more values to request."""
        assert self._ranks.control is not None  # an agent exists, since it has started this replacement worker
        seconds = max(self._ranks.config.timeout, self._ranks.config.start_timeout)
        blob, more = self._ranks.control.approach(len(self._values.recorded), last, seconds)
        told = plain.decode(blob)
        self._last = told["last"]
        self.step, self.plan, self._giver, self._size = told["step"], told["plan"], told["giver"], told["size"]
        self._ranks.shares = told["shares"]
        self._values.recorded += told["values"]
        return more and not self._last

    def state(self, mine: Mapping[str, torch.Tensor]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Join the other ranks, which wait, and receive the state. mine: the tensors of the script's modules, of which
        frozen ones are used as they are if they equal those of the other ranks. Raises PeerLost if the rank that sends
        the state was lost, and NotResumed if this rank has built another model."""
        self._runtime.take_place()
        if self._giver not in self._ranks.members:
            raise PeerLost(f"rank {self._giver} was lost before it had given its state to this one")
        state = plain.decode(self._receive(self._size).numpy().tobytes())
        state["tensors"] |= self._frozen(state.pop("frozen"), mine)
        if "shared" in state["random"]:
            del state["random"]["own"]  # the stream belongs to the rank that sent the state; this rank gets its own
        # If the script knows its rank, module attributes may differ between ranks, so the sending rank's values are not
        # loaded.
        if self._runtime.script.knows_rank:
            del state["counts"]
        return state, state

    def _frozen(self, told: Mapping[str, Description], mine: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the frozen tensors by name. If this rank's tensor differs from the other ranks', its values are
        received. told: descriptions of the other ranks' tensors, by name."""
        if not told:
            return {}
        if any(name not in mine or description_of(mine[name], 0)[1:] != it[1:] for name, it in told.items()):
            raise NotResumed("the script has built other modules than the other ranks")
        have = digests(mine[name] for name in told)
        lacks = [digest != it[0] for digest, it in zip(have, told.values(), strict=True)]
        asked = self._ranks.mail.send(torch.tensor(lacks, dtype=torch.uint8, device="cpu"), self._place, TAG)
        self._ranks.await_message(asked, "asking for frozen weights")
        found = {name: mine[name] for name in told}
        for (name, tensor), lack in zip(list(found.items()), lacks, strict=True):
            if lack:
                if not self._receive(1).item():
                    raise PeerLost(f"the script has changed a frozen weight as rank {self._giver} was to give it")
                received = self._receive(tensor.numel() * tensor.element_size())
                found[name] = received.view(tensor.dtype).view(tensor.shape)
        return found

    def _receive(self, size: int) -> torch.Tensor:
        given = torch.empty(size, dtype=torch.uint8, device="cpu")
        message = self._ranks.mail.receive(given, self._place, TAG)
        self._ranks.await_message(message, f"giving the state to rank {self._ranks.world.rank}")
        return given

    @property
    def _place(self) -> int:
        return list(self._ranks.members).index(self._giver)
