"""A worker's connection to the agent or launcher that started it, for reports, questions, and exchanges with the other
ranks."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

from dadt.control import schema
from dadt.control.frame import Frame
from dadt.control.uptime import uptime
from dadt.errors import DadtError
from dadt.world import World

SHOWN = 4096
"""Number of characters of a path or of a line of source code after which it is cut off in a report."""


class WorkerLine:
    """A worker's connection to the agent of its host; subclasses send its reports and questions. If another launcher
    started the ranks, there is no agent, and some reports and questions are ignored or refused. Thread-safe. Usable
    only in the process that created it; in a forked child, reports and questions raise DadtError."""

    world: World
    secret: bytes
    """Secret that only the ranks of this job know. It is empty until it is received, and also if processes outside the
    job may have learned it."""
    _pid: int

    def hello(self, torch: str) -> None:
        """Report that this process has imported torch, and that DADT is hooked in. torch: version of torch."""
        self._report("hello", torch=torch)

    def stacks(self, path: Path, signal: int) -> None:
        """Report that this process writes the stack traces of its threads to the file `path` whenever it receives this
        signal."""
        self._report("stacks", path=str(path), signal=int(signal))

    def claim(self) -> tuple[int, int]:
        """Register this process as the one that trains as this rank; repeated calls change nothing. Returns the number
        of the signal that asks the script to save (0: none), and how often the job's ranks were asked to save so far.

        Raises DadtError if another living process has claimed the rank.
        """
        answer = self._ask("claim", 0.0)
        self.secret = answer.body
        return answer["signal"], answer["saves"]

    # In the following methods, `generation` is the number of the set of ranks that are left after losses, as this rank
    # knows it. The launcher refuses requests of an older generation.

    def exchange(
        self, key: str, blob: bytes, timeout: float, generation: int = 0, *, island: bool = False
    ) -> list[bytes]:
        """Publish this rank's `blob` and return every rank's, ordered by rank, or with `island` only those of this
        rank's island. Each key may be used once per job.

        Raises StartTimeout after `timeout` seconds, or as soon as a missing rank has exited; the message names the
        missing ranks and their progress.
        """
        among = {"island": True} if island else {}
        return parts(self._ask("exchange", timeout, blob, key=key, generation=generation, **among))

    def put(self, key: str, blob: bytes, generation: int = 0) -> None:
        """Publish a blob that any rank may read with get(). Raises DadtError if the key is in use, or if this rank has
        stored too many bytes."""
        self._ask("put", 0.0, blob, key=key, generation=generation)

    def get(self, keys: Sequence[str], timeout: float, generation: int = 0) -> list[bytes]:
        """Wait for the blobs that ranks publish with put() under `keys`, and return them. Raises StartTimeout after
        `timeout` seconds, or as soon as a missing rank has exited."""
        return parts(self._ask("get", timeout, keys=list(keys), generation=generation))

    def say(self, text: str, level: str = "info") -> None:
        """Have `dadt: <text>` printed once, even if several ranks pass the same text. level: info or warning."""
        self._report("say", text=text[: schema.TEXT], level=level)

    @property
    def due(self) -> bool:
        """Whether the next call of `progress` will send its numbers to the agent. This is the case at most five times a
        second, and never without an agent."""
        return False

    def progress(self, step: int, last: bool = False, **numbers: Any) -> None:
        """Record the number of optimizer steps done so far, in shared memory without a system call. numbers: figures
        that are sent to the agent if `due`, and always if this is the last step."""

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
        """Report an uncaught exception: its type and text, and its frames {file, line, function, text}, innermost last.

        secondary: whether another rank's failure caused it. thread: name of the thread, empty for the main one. around:
        texts of exceptions that were raised from this one, outermost first. details: `context`, text of an exception
        that was being handled; `disk`, which disk is full, and its free space; `unseen`, a path that was not found
        because this rank's file was written to a private copy.
        """
        self._report(
            "failed",
            type=type,
            message=message[: schema.TEXT],
            frames=[_shortened(frame) for frame in frames[-16:]],
            step=step,
            secondary=secondary,
            thread=thread[:SHOWN],
            time=uptime(),
            around=[text[:SHOWN] for text in around[: schema.MOST_AROUND]],
            **_shortened(details),
        )

    def exits(self, text: str, frame: Mapping[str, Any] | None, step: int) -> None:
        """Report that the script has called `sys.exit` with this text at the place {file, line, function, text}. The
        call may end the process."""
        frames = [_shortened(frame)] if frame is not None else []
        self._report("exits", text=text[: schema.TEXT], frames=frames, step=step)

    def ending(self, steps: int, gathered: int) -> None:
        """Report that the script ended after `steps` steps and `gathered` allgathers, and this rank now waits for other
        ranks."""
        self._report("ending", steps=steps, gathered=gathered)

    def done(self, summary: Mapping[str, Any]) -> None:
        """Report that training succeeded. summary: {steps, delayed (number of steps with late averages), wait_fraction
        (share of time spent waiting)} and further numbers."""
        self._report("done", summary=dict(summary))

    def peers(self, starts: bool = False) -> list[dict[str, Any]]:
        """Report that this rank waits for the other ranks, and return facts about these, in the order of ranks: {rank,
        pid, state, step (-1: none), seconds (since the last sign of life)}. In a job of many ranks the facts concern
        only some ranks, such as those for which the others wait. starts: whether this rank waits for its first
        connection with the other ranks."""
        ranks: list[dict[str, Any]] = self._ask("peers", 0.0, starts=starts)["peers"]
        return ranks

    def reconnect(self, text: str, timeout: float, generation: int) -> tuple[bool, str]:
        """Request that all ranks connect again, because this rank's connection failed, and wait for the launcher's
        decision. text: the error. Returns whether the ranks reconnect and, if not, why (empty if the error itself
        explains it)."""
        answer = self._ask("reconnect", timeout, text=text[: schema.TEXT], generation=generation)
        return answer["anew"], answer["text"]

    def approach(self, known: int, last: bool, timeout: float) -> tuple[bytes, bool]:
        """Request the state of training, as a worker that replaces a lost one, and wait until a rank has sent it after
        its next step. known: number of bytes that this worker already has of the values that scripts of other ranks
        have read from tensors. last: whether the other ranks shall wait for this worker. Returns the state, and whether
        there are more such values, for this worker or for another one of its island. Raises StartTimeout, or NotResumed
        if the worker cannot join."""
        answer = self._ask("approach", timeout, known=known, last=last)
        return answer.body, answer["more"]

    def give(
        self, number: int, blob: bytes, generation: int, *, last: bool, more: bool = False, text: str = ""
    ) -> None:
        """Answer question `number` of a replacement worker about the state of training. blob: the answer. last: whether
        this answers the worker's last question; all ranks answer that one, but only one of them sends a blob. more:
        whether more values are recorded than the blob holds. text: why the worker cannot join; empty if it can."""
        facts = {"number": number, "generation": generation, "last": last, "more": more, "text": text[: schema.TEXT]}
        self._ask("give", 0.0, blob, **facts)

    def propose(self, key: str, generation: int) -> None:
        """Propose to all ranks to do something after the same step. They hear it once in each generation."""
        self._report("propose", key=key, generation=generation)

    def dump(self) -> None:
        """Ask all ranks to write their Python stack traces."""
        self._report("dump")

    def writes(self, path: str, mark: str) -> None:
        """Report that this process writes temporary files in folder `path`, under names that begin with `mark`. If the
        process is killed, the agent removes them."""
        self._report("writes", path=path, mark=mark)

    def saved(self, path: str, count: int, number: int) -> None:
        """Report that local rank 0 has written the file `count` times. number: how many saves of any file this rank has
        finished."""
        self._report("saved", path=path, count=count, number=number)

    def wrote(self, path: str, **facts: Any) -> bool:
        """Report to the hosts that see the same folder that this process has written a file. facts: `size` (bytes of
        the file that was there before), or `count` (saves of this file) and `number` (saves of any file). Returns
        whether the report was sent."""
        self._report("wrote", path=path, **facts)
        return True

    def heard(self) -> Sequence[bytes]:
        """Return the reports that ranks have made by `wrote` since the last call, as lines in the same order on all
        ranks. Always empty if there is an agent, which writes the reports of other hosts to a file instead."""
        return ()

    def await_save(self, path: str, count: int, number: int, step: int, timeout: float, far: bool = False) -> str:
        """Wait until local rank 0, or with `far` the first rank of another host, has written the file `count` times.
        Returns "there" if it has.

        Returns "write" if the caller must write the file itself, since local rank 0 wrote another file in its save
        number `number`, went past `step`, ended, or took longer than `timeout` seconds. Returns "yours" if the caller
        has replaced the lost local rank 0.
        """
        more: dict[str, Any] = {"far": True} if far else {}
        answer = self._ask("await_save", timeout, path=path, count=count, number=number, step=step, **more)
        return str(answer["verdict"])

    def listen(self, hear: Callable[[Frame], None]) -> bool:
        """Call `hear` in a new thread whenever another rank ends, with the frame `death`, or with `regroup` if the
        remaining ranks continue training. Call this method once. Returns whether there is an agent that reports ends of
        ranks; without one, mpirun, srun or torchrun ends all ranks when one of them dies."""
        return False

    def stop_listening(self) -> None:
        """End the thread that `listen` started. Repeated calls do nothing."""
        return

    def close(self) -> None:
        """Close the connection for reports. Repeated calls do nothing."""
        return

    def _report(self, kind: str, **facts: Any) -> None:
        """Send a report to the agent. Does nothing if there is no agent."""

    def _ask(self, kind: str, timeout: float, body: bytes = b"", **facts: Any) -> Frame:
        """Send a question to the agent and wait for its answer. Raises DadtError if there is no agent."""
        raise DadtError(f"rank {self.world.rank} has no agent to ask: start it with `dadt run`")

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise DadtError(f"process {os.getpid()} is a fork of rank {self.world.rank} and cannot speak for it")


def _shortened(facts: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value[:SHOWN] if isinstance(value, str) else value for name, value in facts.items()}


def parts(answer: Frame) -> list[bytes]:
    """Return the blobs of which the body of an answer consists."""
    ends = list(accumulate(answer["sizes"], initial=0))
    return [answer.body[start:end] for start, end in pairwise(ends)]
