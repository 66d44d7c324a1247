"""One fault of one system, and what came of it."""

from __future__ import annotations

import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from harness.machine import Network
from harness.patience import await_that
from hosts.compared.fault import Fault, Victim
from hosts.compared.system import Processes, System
from hosts.compared.watch import Step, Watch

STEPS = 600
START_SECONDS = 240.0
HANGS_SECONDS = 120.0
"""After so long without a new step a job is said to hang, as the page says."""


@dataclass(frozen=True)
class Row:
    """What came of a fault."""

    fault: Fault
    system: System
    outcome: str
    """goes on, restarts, ends or hangs; not struck: it did not come to the step."""
    back: float | None
    """Seconds of the longest time without a step that none had taken before; None if training did not go on."""
    again: int
    """Most steps that one rank took again, or in vain."""
    workers: int
    """Ranks that came to the end."""
    equal: bool
    """Whether these ended with the same weights."""
    text: str


def try_out(system: System, fault: Fault) -> Row:
    with tempfile.TemporaryDirectory(prefix="dadt-compared-") as name, ExitStack() as stack:
        folder = Path(name)
        (folder / "network").mkdir()
        network = Network(folder / "network", 2)
        stack.callback(network.close)
        watch = Watch(folder / "trace")
        stack.callback(watch.close)
        processes = Processes(folder, {"TRACE_SOCKET": str(folder / "trace"), "OMP_NUM_THREADS": "1"})
        stack.callback(processes.close)
        system.start(network, processes)

        def ready() -> bool:
            assert any(part.poll() is None for part in processes.parts), _said(folder)
            return watch.reached() >= fault.step and len(watch.pids()) == 4

        try:
            await_that(ready, f"step {fault.step}", START_SECONDS)
        except AssertionError as error:
            return Row(fault, system, "not struck", None, 0, 0, False, f"{error}\n{_said(folder)}")
        at = time.monotonic()
        fault.strike(Victim(network, system, watch))
        ended = _await_end(processes, watch)
        return _judged(system, fault, watch.steps, at, ended, _said(folder))


def _await_end(processes: Processes, watch: Watch) -> bool:
    """Whether all has ended; False where no new step comes."""
    reached, since = watch.reached(), time.monotonic()
    while any(part.poll() is None for part in processes.parts):
        if watch.reached() > reached:
            reached, since = watch.reached(), time.monotonic()
        # One that is stopped or cut off does not end by itself, which concerns nobody once others are at the end.
        if time.monotonic() > since + (15.0 if reached >= STEPS else HANGS_SECONDS):
            return False
        time.sleep(0.05)
    return True


def _judged(system: System, fault: Fault, steps: list[Step], at: float, ended: bool, text: str) -> Row:
    before = {step.pid for step in steps if step.time <= at}
    finals = {step.rank: step for step in steps if step.digest and step.number >= STEPS}
    if not finals:
        outcome, back = "ends" if ended else "hangs", None
    else:
        outcome = "goes on" if any(step.pid in before for step in finals.values()) else "restarts"
        back = _longest(steps, at)
    return Row(
        fault=fault,
        system=system,
        outcome=outcome,
        back=back,
        again=_again(steps, at),
        workers=len(finals),
        equal=len({step.digest for step in finals.values()}) == 1,
        text=text,
    )


def _longest(steps: list[Step], at: float) -> float:
    reached, last, longest = max(step.number for step in steps if step.time <= at), at, 0.0
    for step in steps:
        if step.time > at and step.number > reached:
            reached, last, longest = step.number, step.time, max(longest, step.time - last)
    return longest


def _again(steps: list[Step], at: float) -> int:
    """Of the rank that has most: steps since the fault that it, or the process before it, had reached already. Those of
    a process that comes after others which train on meanwhile cost nobody time, and do not count."""
    counts: dict[int, int] = {}
    reached: dict[int, int] = {}
    newest: dict[int, Step] = {}
    for step in steps:
        newest[step.rank] = step
        ahead = max(
            (other.number for other in newest.values() if other.rank != step.rank and at < other.time), default=0
        )
        known = step.number <= reached.get(step.rank, 0)
        if step.time > at and not step.digest and known and step.number >= ahead - 1:
            counts[step.rank] = counts.get(step.rank, 0) + 1
        reached[step.rank] = max(step.number, reached.get(step.rank, 0))
    return max(counts.values(), default=0)


def _said(folder: Path) -> str:
    texts = [f"{path.name}:\n{path.read_text(errors='replace')[-3000:]}" for path in sorted(folder.glob("*.out"))]
    return "\n".join(texts)
