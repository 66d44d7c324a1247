"""A worker's line to whatever started it, over which it reports, asks, and meets the other ranks."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from dadt.control.frame import Frame
from dadt.errors import DadtError
from dadt.world import World


class WorkerLine(Protocol):
    """Leads to the agent of this host, or to rank 0 where no agent has started the ranks: there nobody hears some of
    the reports.

    Thread-safe. Belongs to the process that connected: in a forked child every method raises DadtError.
    """

    world: World
    secret: bytes
    """A secret that only ranks of this job know; empty if strangers may have learnt it, or it is not known yet."""
    _pid: int

    def hello(self, torch: str) -> None:
        """Report that this process has imported torch (its version) and DADT is hooked in."""

    def stacks(self, path: Path, signal: int) -> None:
        """Report that this process writes the stacks of its threads to the file on this signal."""
        return

    def claim(self) -> tuple[int, int]:
        """Claim the rank for this process, which trains as it. Calling it again changes nothing. Returns the number of
        the signal by which the script is told to save, 0 if there is none, and how often that has been done.

        Raises DadtError if another living process has claimed the rank.
        """

    # Of `exchange`, `put`, `get` and `reconnect` the launcher answers none that an older generation of ranks asks.

    def exchange(self, key: str, blob: bytes, timeout: float, generation: int = 0) -> list[bytes]:
        """All-gather: every rank's blob for the key, by rank. Each key may be used once per job.

        Raises StartTimeout after `timeout` seconds, or as soon as a missing rank has exited; the message names the
        missing ranks and how far they came.
        """

    def put(self, key: str, blob: bytes, generation: int = 0) -> None:
        """Store a blob for any rank that asks for the key. Raises DadtError if the key was put before, or if this rank
        has put too many bytes."""

    def get(self, keys: Sequence[str], timeout: float, generation: int = 0) -> list[bytes]:
        """The blobs under the keys; waits for those not put yet. Raises StartTimeout as `exchange` does."""

    def say(self, text: str, level: str = "info") -> None:
        """Have `dadt: text` printed, once however many ranks say it. level: info or warning."""

    @property
    def due(self) -> bool:
        """Whether `progress` would send numbers now, which it does five times a second where there is an agent."""
        return False

    def progress(self, step: int, last: bool = False, **numbers: Any) -> None:
        """Record the optimizer steps done so far, which costs a write to memory. Numbers are sent when `due`, the
        last ones always."""

    def failed(
        self,
        type: str,
        message: str,
        frames: Sequence[Mapping[str, Any]] = (),
        step: int | None = None,
        *,
        secondary: bool = False,
        thread: str = "",
        around: Sequence[str] = (),
        **details: str,
    ) -> None:
        """Report an uncaught exception: its type and text, and frames {file, line, function, text}, innermost last.

        secondary: whether another rank's failure caused it. thread: name of the thread, empty for the main one.
        around: texts of exceptions that were raised from it, the outermost first. details: context, the text of
        another exception, which was being handled; disk, that a disk is full, which one, and what is free; unseen, a
        path that was not found, where this rank has written a file that was kept apart.
        """

    def exits(self, text: str, frame: Mapping[str, Any] | None, step: int) -> None:
        """Report the text with which the script has called `sys.exit`, and where: {file, line, function, text}. Its
        process may end by that."""
        return

    def ending(self, steps: int) -> None:
        """Report that the script ended after this many steps and this rank now waits for the others."""

    def done(self, summary: Mapping[str, Any]) -> None:
        """Report that training succeeded. summary: {steps, delayed, wait_fraction} and further numbers."""

    def peers(self, starts: bool = False) -> list[dict[str, Any]]:
        """All ranks in order: {rank, pid, state, step (-1: none), seconds (since the last sign of life)}. Reports that
        this one waits for them; starts: for its first connection with them."""

    def reconnect(self, text: str, timeout: float, generation: int) -> tuple[bool, str]:
        """Ask that all ranks connect again, as this one's connection has failed with the error in the text. Waits until
        the launcher has decided. Returns whether they do, and why not: empty if the error says all."""
        raise self._no_agent()

    def approach(self, known: int, last: bool, timeout: float) -> bytes:
        """Ask how far the others are, as a new worker. known, last: as of Approach. Waits until they have taken a step;
        raises StartTimeout, or NotResumed where this one cannot join them."""
        raise self._no_agent()

    def give(self, number: int, blob: bytes, generation: int, *, last: bool, text: str = "") -> None:
        """Answer the approach of this number. Where it is the last one, all ranks do, and one of them gives the blob.
        text: why the new worker cannot join; empty if it can."""
        raise self._no_agent()

    def dump(self) -> None:
        """Ask for every rank's Python stacks to be written."""

    def writes(self, path: str, mark: str) -> None:
        """Report that this process writes in that folder, below names that begin with the mark, files that are not
        whole yet. What is left there of one that is killed, the agent removes."""
        return

    def saved(self, path: str, count: int, number: int) -> None:
        """Report that local rank 0 has written the file for the count-th time, which was its number-th save."""

    def wrote(self, path: str, **facts: Any) -> bool:
        """Report to the hosts that see the same folder what this process writes there. facts: size, as for
        `written_files.line`, or count and number, as for `saved`. Returns whether the report was sent."""

    def heard(self) -> Sequence[bytes]:
        """The lines reported by `wrote` since the last call, in one order for all ranks; none where an agent adds what
        other hosts write to its own file."""
        return ()

    def await_save(self, path: str, count: int, number: int, step: int, timeout: float, far: bool = False) -> str:
        """Wait until local rank 0, or the first rank of another host (far), has written the file `count` times.

        Returns "there" if it has. Returns "write" if local rank 0 has written another file in its number-th save, went
        past `step`, ended, or took longer than `timeout` seconds: the caller then writes the file itself. Returns
        "yours" if the caller has taken the place of local rank 0, which was lost.
        """

    def listen(self, hear: Callable[[Frame], None]) -> bool:
        """Call `hear` in a thread of its own when another rank ends: with the frame `death`, or `regroup` where ranks
        train on. Call this once. Returns whether there is an agent to tell: mpirun, srun and torchrun end all ranks
        when one of them dies."""
        return False

    def stop_listening(self) -> None:
        """End the thread that `listen` has started. Idempotent."""
        return

    def close(self) -> None:
        """Close the connection for reports. May be called again."""
        return

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise DadtError(f"process {os.getpid()} is a fork of rank {self.world.rank} and cannot speak for it")

    def _no_agent(self) -> DadtError:
        return DadtError(f"rank {self.world.rank} has no agent to ask: start it with `dadt run`")
