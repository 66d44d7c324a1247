"""The section of docs/results/faults.md about other programs."""

from __future__ import annotations

import os
import statistics
from collections import Counter
from collections.abc import Sequence
from datetime import date
from importlib.metadata import version

from hosts.compared.fault import FAULTS
from hosts.compared.system import SYSTEMS, System
from hosts.compared.trial import STEPS, Row

from benchmarks.page import table

OUTCOMES = ("goes on", "restarts", "ends", "hangs")
TEXT = f"""
Four workers on two simulated hosts train the same small model on the same data for {STEPS} steps of about 25 ms, with
gloo. Each fault strikes each system at the same step. Each has the settings that suit it best:

- **DADT**: the unmodified script, `--min-np 1 --timeout 6 --heartbeat-timeout 4 --orphan-timeout 6`, and
  `--snapshot-every 25steps --snapshot-dir FOLDER`, so that new workers take the place of lost ones.
- **torchrun**: a script for DistributedDataParallel, which saves a checkpoint every 25 steps and loads it at its start.
  `--nnodes 1:2 --max-restarts 20 --monitor-interval 0.1 --shutdown-timeout 1`, a process group with a timeout of 6 s,
  agents that meet at a store of their own, on a third machine.
- **torchft**: a script with its Manager, DistributedDataParallel, Optimizer and DistributedSampler; each worker is a
  replica under a torchrun of its own, which starts it again; timeouts of 6 s, the lighthouse on a third machine with
  `--min_replicas 1 --heartbeat_timeout_ms 4000 --join_timeout_ms 1000`. A replica that is left gives the others what
  it has; where none is left, the new ones take up the file that the script saves every 25 steps.

*Goes on*: processes from before the fault train to the end. *Restarts*: all that come to the end are new processes.
*Ends*: the job fails. *Hangs*: for two minutes there is no new step. Standstill: the longest time without a step that
had not been taken before; the median over the faults after which training went on or restarted. Again: steps that a
rank had to repeat, or took without effect. Workers: how many come to the end, of four.
"""


def page(rows: Sequence[Row]) -> str:
    cores = f"{os.cpu_count()} cores"
    head = ["System", "Lines added, removed", *(name.capitalize() for name in OUTCOMES)]
    head += ["Standstill, median (s)", "worst", "Again, median", "worst"]
    lines = [
        f"Made on {date.today()} with `make faults-compared` (as root), on a shared virtual machine of {cores},",
        f"with torch {version('torch')} and the torchft of `tests/hosts/compared/requirements.txt`.",
        TEXT,
        table(head, [_summed(system, [row for row in rows if row.system is system]) for system in SYSTEMS]),
    ]
    cells = []
    for fault in FAULTS:
        found = {row.system: _cell(row) for row in rows if row.fault is fault}
        if found:
            cells.append([fault.name, str(fault.step), *(found.get(system, "") for system in SYSTEMS)])
    lines.append(table(["Fault", "at step", *(system.name for system in SYSTEMS)], cells))
    return "\n".join(lines)


def _summed(system: System, rows: Sequence[Row]) -> list[str]:
    outcomes = Counter(row.outcome for row in rows)
    backs = [row.back for row in rows if row.back is not None]
    again = [row.again for row in rows if row.back is not None]
    spread = [f"{statistics.median(backs):.2f}", f"{max(backs):.2f}"] if backs else ["", ""]
    spread += [f"{statistics.median(again):g}", str(max(again))] if again else ["", ""]
    return [system.name, "{}, {}".format(*system.changed), *(str(outcomes[name]) for name in OUTCOMES), *spread]


def _cell(row: Row) -> str:
    if row.back is None:
        return row.outcome
    again = f", {row.again} again" if row.again else ""
    unlike = "" if row.equal else ", weights differ"
    return f"{row.outcome} with {row.workers}: {row.back:.2f} s{again}{unlike}"
