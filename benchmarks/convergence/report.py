"""Tables of paired differences with intervals, and pictures of loss against steps, from the file of results."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from torch import nn

from benchmarks.convergence.family import FAMILIES
from benchmarks.convergence.interval import Interval, interval
from benchmarks.convergence.simulator import EVERY
from benchmarks.convergence.study import SWEEP_SEEDS, Results, load, score

BEGIN, END = "<!-- tables: made by python -m benchmarks.convergence --report -->", "<!-- end of tables -->"
COLORS = {"sync": "#1f3b57", "plain": "#c8553d", "pipe": "#2a9d8f"}
LOOSE = ("gossip", "gossip-sqrt", "local", "local-sqrt", "diloco", "diloco-8")
AVERAGED = ", averaged"
"""The mean of the ranks' weights in place of each rank's own."""
EXACT = ("bf16", "fp16", "int8")
"""Nothing may be lost beyond noise: the good end of the interval is 0 or better."""


class Row(NamedTuple):
    family: str
    rate: float
    ranks: int
    method: str
    mean: float
    lost: Interval | None
    """Accuracy lost, or loss added, against sync with the same seeds; None for sync itself."""
    diverged: int
    """Trainings that ended no better than chance."""

    @property
    def met(self) -> str:
        if self.lost is None or self.lost.pairs < 2:
            return ""
        end = self.lost.low if self.method in EXACT else self.lost.high
        return "yes" if end <= allowed(self.family, self.method) else "no"


def allowed(family: str, method: str) -> float:
    """Accuracy that may be lost, or loss that may be added, at the bad end of the interval."""
    if method in EXACT:
        return 0.0
    if FAMILIES[family].counts:
        return 0.005 if method.removesuffix(AVERAGED) in LOOSE else 0.003
    return 0.03 if method.removesuffix(AVERAGED) in LOOSE else 0.01


def groups(results: Results) -> dict[tuple[str, float, int, str], dict[int, float]]:
    """Scores by seed, of all trainings but the sweep's."""
    found: dict[tuple[str, float, int, str], dict[int, float]] = {}
    for run, outcome in sorted(results.items()):
        if run.seed not in SWEEP_SEEDS:
            found.setdefault((run.family, run.rate, run.ranks, run.method), {})[run.seed] = score(run.family, outcome)
            if run.method in LOOSE and "averaged" in outcome:
                key = (run.family, run.rate, run.ranks, f"{run.method}{AVERAGED}")
                found.setdefault(key, {})[run.seed] = score(run.family, outcome["averaged"])
    return found


def rows(results: Results) -> Iterator[Row]:
    scores = groups(results)
    for key in sorted(scores, key=lambda key: (key[0], key[2], key[1], key[3])):
        family, rate, ranks, method = key
        by_seed = scores[key]
        chance = 0.2 if FAMILIES[family].counts else math.log(65)
        sign = 1 if FAMILIES[family].counts else -1
        bad = sum(sign * value <= sign * chance for value in by_seed.values())
        sync = scores.get((family, rate, ranks, "sync"), {})
        lost = [sign * (sync[seed] - value) for seed, value in by_seed.items() if seed in sync]
        finite = all(map(math.isfinite, lost))
        difference = interval(lost) if lost and finite and method != "sync" else None
        mean = statistics.fmean(by_seed.values())
        yield Row(family, rate, ranks, method, mean, difference, bad)


def table(results: Results) -> str:
    lines = [
        "| family | rate | workers | method | mean | seeds | lost against sync (95 %) | target | met | diverged |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    counts = {key: len(by_seed) for key, by_seed in groups(results).items()}
    for row in rows(results):
        lost = "" if row.lost is None else f"{row.lost.mean:.4f}"
        if row.lost is not None and row.lost.pairs > 1:
            lost += f" ({row.lost.low:.4f} to {row.lost.high:.4f})"
        target = "" if row.lost is None else f"{allowed(row.family, row.method):g}"
        seeds = counts[row.family, row.rate, row.ranks, row.method]
        cells = [row.family, f"{row.rate:g}", row.ranks, row.method, f"{row.mean:.4f}", seeds, lost, target, row.met]
        lines.append("| " + " | ".join(map(str, [*cells, row.diverged])) + " |")
    return "\n".join(lines)


def chance(results: Results) -> str:
    """What another order of summation makes of the same training: `sync` against itself with the fewest workers."""
    lines = ["| family | rate | workers | seeds | `sync` above itself (95 %) |", "|---|---|---|---|---|"]
    scores = {key[:3]: by_seed for key, by_seed in groups(results).items() if key[3] == "sync"}
    for (family, rate, ranks), by_seed in sorted(scores.items()):
        fewest = min(r for f, at, r in scores if (f, at) == (family, rate))
        first = scores[family, rate, fewest]
        sign = -1 if FAMILIES[family].counts else 1
        above = [sign * (value - first[seed]) for seed, value in by_seed.items() if seed in first]
        if ranks == fewest or len(above) < 2 or normalizes(family):
            continue
        found = interval(above)
        cells = f"{found.mean:.4f} ({found.low:.4f} to {found.high:.4f})"
        lines.append(f"| {family} | {rate:g} | {ranks} against {fewest} | {found.pairs} | {cells} |")
    return "\n".join(lines)


def normalizes(family: str) -> bool:
    """With BatchNorm each rank normalizes by its own part of the batch: other ranks, another training."""
    return any(isinstance(module, nn.BatchNorm2d) for module in FAMILIES[family].begin(0, 1.0)[0].modules())


def sweeps(results: Results) -> str:
    """What `sync` reaches at each learning rate."""
    lines = ["| family | rate | sync |", "|---|---|---|"]
    for family in FAMILIES.values():
        for rate in family.rates:
            found = [
                score(family.name, outcome)
                for run, outcome in results.items()
                if run.seed in SWEEP_SEEDS and (run.family, run.rate, run.method) == (family.name, rate, "sync")
            ]
            if found:
                lines.append(f"| {family.name} | {rate:g} | {statistics.fmean(found):.4f} |")
    return "\n".join(lines)


def picture(family: str, results: Results, path: Path) -> bool:
    """Training loss against steps, a panel for each learning rate; mean over seeds, the band from least to most.

    False where there is nothing to show.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    shown = [run for run in results if run.family == family and run.method in COLORS and run.seed not in SWEEP_SEEDS]
    if not shown:
        return False
    ranks = min(run.ranks for run in shown)
    rates = sorted({run.rate for run in shown if run.ranks == ranks})
    figure, panels = plt.subplots(
        1, len(rates), figsize=(4.6 * len(rates), 3.4), sharey=True, squeeze=False, layout="constrained"
    )
    for panel, rate in zip(panels[0], rates, strict=True):
        for method, color in COLORS.items():
            draw(
                panel,
                [results[r] for r in shown if (r.method, r.rate, r.ranks) == (method, rate, ranks)],
                method,
                color,
            )
        panel.set(title=f"{family}, {ranks} workers, rate {rate:g}", xlabel="step")
        panel.spines[["top", "right"]].set_visible(False)
        panel.grid(axis="y", alpha=0.3)
        panel.set_yscale("log" if FAMILIES[family].counts else "linear")
    panels[0][0].set_ylabel("training loss")
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(COLORS), frameon=False)
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return True


def draw(panel: object, outcomes: list[dict[str, list[float]]], method: str, color: str) -> None:
    curves = [outcome["curve"] for outcome in outcomes]
    if not curves:
        return
    points = list(zip(*curves, strict=True))
    steps = [EVERY * (i + 0.5) for i in range(len(points))]
    panel.fill_between(steps, list(map(min, points)), list(map(max, points)), color=color, alpha=0.15, linewidth=0)  # type: ignore[attr-defined]
    panel.plot(steps, list(map(statistics.fmean, points)), color=color, label=f"{method} ({len(curves)} seeds)")  # type: ignore[attr-defined]


def write(path: Path) -> None:
    """Print the tables, put them into the page beside the results, and draw the pictures."""
    results = load(path)
    tables = f"{sweeps(results)}\n\n{chance(results)}\n\n{table(results)}"
    print(tables)
    page = path.with_suffix(".md")
    if page.exists():
        before, _, rest = page.read_text().partition(BEGIN)
        _, _, after = rest.partition(END)
        page.write_text(f"{before}{BEGIN}\n{tables}\n{END}{after}")
    for family in FAMILIES:
        picture(family, results, path.with_name(f"{path.stem}-{family}.png"))
