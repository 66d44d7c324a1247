"""The section of docs/results/faults.md about chaos."""

from __future__ import annotations

import os
import statistics
from collections.abc import Sequence
from datetime import date

from hosts.chaos.kind import KINDS
from hosts.chaos.struck import BATCH, OPTIONS, RANKS, STEPS, WAITS, Training
from hosts.chaos.trial import Row

from benchmarks.page import table


def page(rows: Sequence[Row], trainings: Sequence[Training], at_once: int) -> str:
    """trainings: those drawn from. at_once: how many jobs ran at the same time."""
    tried = [row for row in rows if not row.skipped]
    lines = [
        f"Made on {date.today()} with `make chaos` (as root), on a shared virtual machine of {os.cpu_count()} cores,",
        f"with {at_once} jobs at a time, each of four workers on one or two simulated hosts joined by SSH. Faults,",
        "moments and trainings are drawn by seed. Settings:",
        f"`{' '.join([*OPTIONS, *WAITS])}`.",
        "",
        "A promise is kept if exactly the ranks that the fault does not take have trained to the end, with equal",
        "weights where the algorithm keeps them equal, in as many steps as without the fault, the script's last file",
        "holds the weights of one of them, the job has ended with 0 and nothing is left on any host that has power.",
        "Told: seconds from the fault to the line that tells the loss. Back: from then until the survivors train. Of",
        "faults that pass, and of full disks for logs, no rank may be lost. Steps: that any survivor lacks at the end.",
        f"Samples: of {len(RANKS) * STEPS * BATCH:,} in a training, those of lost workers from their last steps on.",
        "",
        f"**{sum(row.kept for row in tried)} of {len(tried)} promises were kept.**",
        "",
    ]
    kinds = []
    for kind in KINDS:
        mine = [row for row in tried if row.kind is kind]
        if mine:
            told, back = ([s for row in mine if (s := getattr(row, name)) is not None] for name in ("told", "went_on"))
            cells = [kind.name, f"{sum(row.kept for row in mine)} of {len(mine)}", *_spread(told), *_spread(back)]
            cells.append(str(max((row.steps for row in mine if row.steps is not None), default="")))
            samples = [row.samples for row in mine if row.samples is not None]
            cells += [f"{statistics.median(samples):.0f}", f"{max(samples)}"] if samples else ["", ""]
            kinds.append(cells)
    head = ["Fault", "Kept", "Told, median (s)", "worst", "Back, median (s)", "worst", "Steps lost"]
    trainings = [
        [training.name, f"{sum(row.kept for row in mine)} of {len(mine)}"]
        for training in trainings
        if (mine := [row for row in tried if row.training is training])
    ]
    lines += [table([*head, "Samples, median", "most"], kinds), table(["Training", "Kept"], trainings)]
    if skipped := {row.kind.name: row.skipped for row in rows if row.skipped}:
        lines += [*(f"Not tried: {name} ({why})." for name, why in skipped.items()), ""]
    if broken := [row for row in tried if not row.kept]:
        broken_rows = []
        for row in broken:
            ranks = [", ".join(map(str, sorted(each))) or "none" for each in (row.promised, row.survivors)]
            came = [str(row.code), *("yes" if each else "no" for each in (row.equal, row.saved))]
            left = "; ".join(row.left) or "nothing"
            broken_rows.append([row.seed, row.kind.name, row.training.name, *ranks, *came, left])
        head = ["Seed", "Fault", "Training", "Promised", "Came", "Exit code", "Equal", "Saved", "Left"]
        lines.append(table(head, broken_rows))
    return "\n".join([*lines, ""])


def _spread(seconds: Sequence[float]) -> tuple[str, str]:
    return (f"{statistics.median(seconds):.2f}", f"{max(seconds):.2f}") if seconds else ("", "")
