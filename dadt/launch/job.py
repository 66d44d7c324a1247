"""A running job, seen from the launcher: start, wait, terminate."""

from __future__ import annotations

import selectors
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from dadt.errors import LaunchError
from dadt.launch.failure import Ending, Failure, Record, find_cause, last_line, signal_name
from dadt.launch.folder import Folder
from dadt.launch.frame import Frame
from dadt.launch.interrupt import Interrupts
from dadt.launch.local import LocalAgent
from dadt.launch.output import Output
from dadt.launch.rendezvous import Rendezvous
from dadt.launch.slot import Slot
from dadt.launch.sweep import sweep

UNCAUGHT = 1
"""Python's exit code after an uncaught exception."""
TURN_SECONDS = 0.5
PRIMARY_SECONDS = 1.0
"""After a failure that another one caused: how long to wait for that other one to show itself."""
EXIT_SECONDS = 2.0
"""After an uncaught exception was reported: how long the worker may take to exit."""
FAILURE_GRACE = 1.5
INTERRUPT_GRACE = 5.0
"""From SIGTERM to SIGKILL: after a failure, and after the user's Ctrl-C."""
END_SECONDS = 5.0
"""How long an agent may take beyond that until all is gone."""
HANG_UP_SECONDS = 4.0
"""How long an agent whose launcher hangs up may take to end its workers."""

Say = Callable[[str, str], None]
"""Takes a text and its level, info or warning."""


@dataclass(kw_only=True)
class Outcome:
    """How a job ended."""

    seconds: float
    failure: Failure | None = None
    signal: int = 0
    """The signal by which the user ended it."""
    summaries: Mapping[int, Mapping[str, float]] = field(default_factory=dict)
    """What each rank reported at the end of its training."""
    hooked: bool = False
    """At least one worker imported torch with DADT hooked in."""
    stuck: Sequence[int] = ()
    """Processes that did not die of SIGKILL."""

    @property
    def exit_code(self) -> int:
        if self.signal:
            return 128 + self.signal
        return self.failure.exit_code if self.failure else 0


class Job:
    """One per `dadt run`. `wait` does all the work, in the thread that calls it."""

    def __init__(self, folder: Folder, slots: Sequence[Slot], output: Output, say: Say) -> None:
        self._folder = folder
        self._slots = slots
        self._output = output
        self._say = say
        self._rendezvous = Rendezvous(len(slots))
        self._said: set[str] = set()
        self._endings: dict[int, Ending] = {}
        self._records: dict[int, Record] = {}
        self._outcome = Outcome(seconds=0.0)
        self._stacks: list[Path] = []
        self._fail_at = float("inf")
        """When to stop everything because of what has failed so far."""
        self._end_by = float("inf")
        """When an agent that was told to stop must have done so."""
        self._grace = float("inf")
        self._hang_up = HANG_UP_SECONDS
        self._error: str | None = None
        self._over = False

    def start(
        self, command: Sequence[str], env: Mapping[str, str], envs: Sequence[Mapping[str, str]], cwd: str
    ) -> None:
        """env: of all workers. envs: what each slot has beyond that. Raises LaunchError without an agent."""
        self._begin = time.monotonic()
        self._begin_time = time.time()
        self._agent = LocalAgent()
        workers = [
            {"rank": slot.rank, "local_rank": slot.local_rank, "env": dict(extra)}
            for slot, extra in zip(self._slots, envs, strict=True)
        ]
        order = {"job": self._folder.job, "command": list(command), "env": dict(env), "workers": workers}
        self._send(Frame("job", {**order, "cwd": cwd}))

    def wait(self) -> Outcome:
        """Until nothing of the job is left. SIGINT, SIGTERM and SIGHUP end it gently, a second one at once.

        Raises LaunchError where the workers could not be started or the agent is lost.
        """
        link = self._agent.link
        numbers = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]
        with selectors.DefaultSelector() as selector, Interrupts(numbers) as interrupts:
            selector.register(link.reader, selectors.EVENT_READ, self._read_agent)
            selector.register(interrupts, selectors.EVENT_READ, lambda: self._interrupt(interrupts.take()))
            try:
                while not self._over:
                    for key, _ in selector.select(self._patience()):
                        key.data()
                    self._turn()
            finally:
                self._close()
        return self._judge()

    def terminate(self, grace: float, stacks: bool = False) -> None:
        """SIGTERM to all workers, and SIGKILL after `grace` seconds; the second call can only hasten it."""
        if grace < self._grace:
            self._grace = grace
            self._end_by = time.monotonic() + grace + END_SECONDS
            self._send(Frame("stop", {"grace": grace, "stacks": stacks}))

    def _turn(self) -> None:
        now = time.monotonic()
        self._rendezvous.settle()
        if now >= self._fail_at:
            self._fail_at = float("inf")
            self.terminate(FAILURE_GRACE, stacks=True)
        if now >= self._end_by:
            # The agent is stuck: it is killed, and its workers with it.
            self._over, self._hang_up = True, 0.0
        if self._agent.link.unsent:
            self._send(None)

    def _patience(self) -> float:
        now = time.monotonic()
        turn = 0.05 if self._rendezvous.waiting or self._agent.link.unsent else TURN_SECONDS
        return max(0.0, min(turn, self._output.tick(), self._fail_at - now, self._end_by - now))

    def _send(self, frame: Frame | None) -> None:
        try:
            if frame is None:
                self._agent.link.flush()
            else:
                self._agent.link.send(frame)
        except BrokenPipeError:
            pass  # the agent is gone, which the end of its output tells, too

    def _read_agent(self) -> None:
        try:
            frames = self._agent.link.receive()
        except EOFError:
            self._over = True
            self._error = self._error or "lost"
            return
        for frame in frames:
            getattr(self, f"_on_{frame.kind}")(frame)

    def _interrupt(self, caught: set[int]) -> None:
        number = min(caught & {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}, default=0)
        if not number:
            return
        if self._outcome.signal:
            self.terminate(0.0)
            return
        self._outcome.signal = number
        self.terminate(INTERRUPT_GRACE)
        self._say(f"{signal_name(number)}: stopping the workers (once more: at once)", "info")

    def _on_started(self, frame: Frame) -> None:
        self._rendezvous.members[frame["rank"]].pid = frame["pid"]

    def _on_unstarted(self, frame: Frame) -> None:
        self._error = frame["message"]

    def _on_out(self, frame: Frame) -> None:
        self._output.write(frame["rank"], frame.kind, frame.body)

    _on_err = _on_out

    def _on_beat(self, frame: Frame) -> None:
        for rank, (step, age) in frame["steps"].items():
            self._rendezvous.members[int(rank)].went_to(step, age)

    def _on_hello(self, frame: Frame) -> None:
        self._outcome.hooked = True
        self._rendezvous.members[frame["rank"]].sign("has imported torch, not begun to train")

    def _on_claim(self, frame: Frame) -> None:
        member = self._rendezvous.members[frame["rank"]]
        member.pid = frame["pid"]
        member.sign("has begun to train")

    def _on_numbers(self, frame: Frame) -> None:
        self._rendezvous.members[frame["rank"]].went_to(frame["step"], 0.0)

    def _on_say(self, frame: Frame) -> None:
        if frame["text"] not in self._said:
            self._said.add(frame["text"])
            self._say(frame["text"], frame["level"])

    def _on_failed(self, frame: Frame) -> None:
        record = Record.from_header(frame.header)
        known = self._records.get(frame["rank"])
        # What ends the process is the main thread's exception; of several others the first counts.
        if known is None or (known.thread and not record.thread):
            self._records[frame["rank"]] = record
        if not record.thread:
            self._fail_by(EXIT_SECONDS)

    def _on_ending(self, frame: Frame) -> None:
        member = self._rendezvous.members[frame["rank"]]
        member.finished = True
        member.sign(f"has ended after {frame['steps']} steps")

    def _on_done(self, frame: Frame) -> None:
        self._outcome.summaries = {**self._outcome.summaries, frame["rank"]: frame["summary"]}

    def _on_exchange(self, frame: Frame) -> None:
        line = frame["line"]
        self._rendezvous.give(
            frame["key"], frame["rank"], frame.body, frame["timeout"], lambda answer: self._answer(line, answer)
        )

    def _on_peers(self, frame: Frame) -> None:
        peers = [member.describe() for member in self._rendezvous.members]
        self._answer(frame["line"], Frame("peers", {"peers": peers}))

    def _on_exit(self, frame: Frame) -> None:
        ending = Ending(**frame.header)
        self._endings[ending.rank] = ending
        member = self._rendezvous.members[ending.rank]
        member.ended = True
        member.sign(f"has exited with code {ending.code}")
        if ending.code == 0:
            self._records.pop(ending.rank, None)  # an exception that did not end the process
        elif not ending.stopped:
            record = self._record(ending)
            self._fail_by(PRIMARY_SECONDS if record is not None and record.secondary else 0.0)
        self._rendezvous.settle()

    def _on_stacks(self, frame: Frame) -> None:
        path = self._output.folder / f"rank{frame['rank']}.stacks"
        path.write_bytes(frame.body)
        if path not in self._stacks:
            self._stacks.append(path)

    def _on_end(self, frame: Frame) -> None:
        self._outcome.stuck = frame["stuck"]
        if number := frame["signal"]:
            self._error = (
                f"the agent of this host (pid {self._agent.pid}) was told to end by signal {number} "
                f"({signal_name(number)}); all its workers were stopped"
            )
        self._over = True

    def _answer(self, line: int, answer: Frame) -> None:
        header = {"line": line, "answer": {"kind": answer.kind, **answer.header}}
        self._send(Frame("answer", header, answer.body))

    def _fail_by(self, seconds: float) -> None:
        self._fail_at = min(self._fail_at, time.monotonic() + seconds)

    def _record(self, ending: Ending) -> Record | None:
        """What the worker reported, or else what its traceback tells."""
        if ending.rank not in self._records and ending.code == UNCAUGHT:
            record = Record.from_stderr(self._output.tails[ending.rank].data)
            if record is not None:
                self._records[ending.rank] = record
        return self._records.get(ending.rank)

    def _close(self) -> None:
        """Nothing of the job outlives this, even if its agent was killed."""
        self._agent_code = self._agent.end(self._hang_up)
        self._outcome.stuck = sweep(self._folder.job) or self._outcome.stuck
        self._folder.remove()
        self._output.close()

    def _judge(self) -> Outcome:
        outcome = self._outcome
        outcome.seconds = time.monotonic() - self._begin
        cause = find_cause(list(self._endings.values()), self._records)
        if cause is not None and not outcome.signal:
            outcome.failure = self._failure(*cause)
        elif self._error is not None and not outcome.signal:
            raise LaunchError(self._error if self._error != "lost" else self._agent_lost())
        return outcome

    def _failure(self, ending: Ending, record: Record | None) -> Failure:
        member = self._rendezvous.members[ending.rank]
        at = record.time if record is not None and record.time else ending.time
        return Failure(
            ending=ending,
            record=record,
            seconds=max(0.0, at - self._begin_time),
            pid=member.pid,
            host=self._slots[ending.rank].host,
            log=self._output.path(ending.rank),
            stopped=sorted(each.rank for each in self._endings.values() if each.code and each is not ending),
            stacks=self._stacks,
            last_words=last_line(self._output.tails[ending.rank].data),
        )

    def _agent_lost(self) -> str:
        code = self._agent_code
        how = f"was killed by signal {-code} ({signal_name(-code)})" if code < 0 else f"exited with code {code}"
        return f"the agent of this host (pid {self._agent.pid}) {how}; all its workers were stopped"
