"""`dadt bench advise`: predicts how fast each algorithm and compression would be on these hosts and on more hosts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import click

from dadt.config.check import round_steps
from dadt.config.link import pace_of
from dadt.errors import ConfigError
from dadt_cli.bench.figure import BenchResults, Outputs, ResultTable, progress, writes
from dadt_cli.bench.models import MODELS, SHARDED
from dadt_cli.bench.place import WHERE, check_hosts, location_of, ranks_of
from dadt_cli.terminal.options import Brief, config_of, some_knobs
from dadt_cli.terminal.table import short

if TYPE_CHECKING:
    from dadt.algorithms.auto.ways import Choice, Shown
    from dadt_cli.bench.adviser import Checked
    from dadt_cli.bench.cost import MeasuredCosts as Measured
    from dadt_cli.bench.probe import ProbeResult

KNOBS = ("executor", "sync_every")
SCREEN = (2, 4, 8, 16, 64, 1024)
"""Numbers of hosts whose predictions fit on a screen; the JSON output has more numbers of hosts."""
STEPS = 5
"""Number of steps of the progress bar without --check, which adds a step for each algorithm and compression."""


@dataclass(frozen=True, slots=True)
class AdviceRow:
    """Predicted and measured speed of one algorithm with one compression."""

    algorithm: str
    compression: str
    sync_every: int
    """Number of steps of a round of `local`; 0 with other algorithms."""
    at_once: bool
    """Whether ranks wait for each mean of `local`."""
    loss: float | None
    """Loss above that of `sync` that docs/results/accuracy.md shows; None if it shows none for this optimizer."""
    steps_per_second: dict[int, float]
    """Predicted steps per second, by number of hosts."""
    best_for: list[int]
    measured: float | None
    """Steps per second measured on the available hosts with --check; None without --check."""
    error: float | None
    """Relative error of the prediction: the predicted rate over the measured one, minus 1."""


def _models(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    """Return the model names that begin with `incomplete`, for shell completion."""
    return [name for name in MODELS if name.startswith(incomplete)]


@click.command(
    cls=Brief,
    context_settings={"max_content_width": 110},
    short_help="Predict steps/s of each algorithm on up to 1,024 hosts.",
)
@click.argument("model", default="resnet18", shell_complete=_models)
@click.option("-np", "--np", type=int, metavar="N", help="Number of workers.  [default: 2]")
@some_knobs(*WHERE, *KNOBS)
@click.option("--batch-size", default=8, show_default=True, help="Samples per worker and step.")
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", show_default=True)
@click.option("--optimizer", type=click.Choice(["sgd", "adam"]), default="sgd", show_default=True)
@click.option("--check", is_flag=True, help="Also train in each way here, and print the prediction error.")
@writes("json")
def advise(
    *, outputs: Outputs, model: str, batch_size: int, device: str, optimizer: str, check: bool, **given: Any
) -> int:
    """Predict steps/s of each algorithm and compression, on these hosts and on up to 1,024 of them.

    Measures a step of MODEL (a name from dadt bench --help, or module:factory) and the latency and bandwidth between
    the workers. For each number of hosts, a mark shows which way --algorithm auto --compression auto would choose, by
    its speed and by the loss that it costs with this optimizer.

    \b
    dadt bench advise resnet50 -np 2 -H host1,host2
    dadt bench advise resnet50 -np 2 --link 1gbit   (root) on a simulated link
    """
    if model in SHARDED:
        raise ConfigError(f"bench advise {model}: not of a sharded model; dadt bench {model} measures it")
    config = config_of(given)
    ranks = ranks_of(config, given["np"])
    if ranks < 2:
        raise ConfigError(f"-np {ranks}: advise measures what workers exchange: give 2 or more")
    check_hosts(config, ranks)
    if pace_of(config.link):
        raise ConfigError(f"--link {config.link}: advise measures a network between hosts; give --link 1gbit, as root")
    if batch_size < 1:
        raise ConfigError(f"--batch-size {batch_size}: must be 1 or more")
    from dadt.algorithms.auto.ways import SHOWN
    from dadt_cli.bench import adviser
    from dadt_cli.bench.cost import ways_of
    from dadt_cli.bench.training import Task

    task, location = Task(model, batch_size, device, optimizer=optimizer), location_of(config, given)
    ways = ways_of(round_steps(config.sync_every), SHOWN[optimizer])
    with progress(STEPS + (len(ways) if check else 0)) as tell:
        tell("network and exchanges")
        found = _probe(config, ranks, task)
        hosts = len({each.cross_rank for each in found})
        figures = adviser.measure(task, location, ranks, found, round_steps(config.sync_every), tell)
        checked = adviser.check(figures, ways, task, location, ranks, hosts, tell) if check else []
    _results(task, found, figures, hosts, checked).report(f"advice for {model}", outputs)
    return 0


def _probe(config: Any, ranks: int, task: Any) -> list[ProbeResult]:
    from dadt.api.run import run
    from dadt_cli.bench.folder import folder
    from dadt_cli.bench.probe import COMPUTE_SECONDS, probe

    where = {name: getattr(config, name) for name in (*WHERE, *KNOBS) if name not in ("config", "hosts")}
    given = (task.model, task.batch_size, task.device, COMPUTE_SECONDS, task.optimizer)
    with folder() as place:
        settings = {**where, "log_dir": str(place), "output": "errors", "timeout": 120.0}
        return run(probe, given, np=ranks, hosts=config.hosts, **settings)


def _results(
    task: Any, found: Sequence[ProbeResult], figures: Measured, hosts: int, checked: Sequence[Checked]
) -> BenchResults:
    from dadt.algorithms.auto.ways import SHOWN
    from dadt_cli.bench.cost import HOSTS, best, rates

    # With a single host no network is measured, so nothing can be predicted for more hosts.
    counts = [1] if hosts == 1 else sorted({hosts, *HOSTS})
    shown = SHOWN[task.optimizer]
    predicted = rates(figures, counts, shown)
    marked = {count: best({way: rate[i] for way, rate in predicted.items()}, shown) for i, count in enumerate(counts)}
    seen = {each.way: each for each in checked}
    rows = [
        AdviceRow(
            way.algorithm,
            way.compression,
            way.every,
            way.at_once,
            shown.costs.get(way),
            dict(zip(counts, predicted[way], strict=True)),
            [count for count in counts if marked[count] == way],
            seen[way].measured if way in seen else None,
            seen[way].error if way in seen else None,
        )
        for way in predicted
    ]
    workers = f"{found[0].local_size} worker{'s' if found[0].local_size > 1 else ''} each"
    title = f"{task.model}, {task.optimizer}, batch {task.batch_size}, {workers}: predicted steps/s by number of hosts"
    tables = [_forecast(title, predicted, counts, marked, hosts, shown)]
    if checked:
        tables.append(_comparison(checked, hosts))
    about = {"figures": asdict(figures), "hosts": hosts, "measured by rank": [asdict(each) for each in found]}
    return BenchResults(rows, tables, _notes(found, figures, hosts), about)


def _forecast(
    title: str,
    predicted: dict[Choice, list[float]],
    counts: Sequence[int],
    marked: dict[int, Choice],
    hosts: int,
    shown: Shown,
) -> ResultTable:
    columns = [i for i, count in enumerate(counts) if count in (*SCREEN, hosts)]
    lines = [
        [
            str(way),
            _loss(shown.costs.get(way)),
            *(short(rate[i]) + (" *" if marked[counts[i]] == way else "  ") for i in columns),
        ]
        for way, rate in predicted.items()
    ]
    caption = f"* what auto would choose; loss: above sync, for {shown.of} (docs/results/accuracy.md)"
    return ResultTable(title, ["", "loss", *(f"{counts[i]:,}  " for i in columns)], lines, caption)


def _name(way: Choice) -> str:
    """Return the way in few characters: the algorithm, the compression and the number of steps of a round."""
    compression = "" if way.compression == "none" else f" {way.compression}"
    return way.algorithm + compression + (f", H = {way.every}" if way.every else "")


def _loss(cost: float | None) -> str:
    return "" if cost is None else f"{cost:g}"


def _comparison(checked: Sequence[Checked], hosts: int) -> ResultTable:
    lines = [
        [_name(each.way), short(each.predicted), short(each.measured), f"{100 * each.error:+.0f} %"] for each in checked
    ]
    title = f"steps/s on {hosts} host{'s' if hosts > 1 else ''}"
    return ResultTable(title, ["", "predicted", "measured", "error"], lines, "")


def _notes(found: Sequence[ProbeResult], figures: Measured, hosts: int) -> list[str]:
    computed = 1e3 * figures.compute["local"]
    notes = [f"a step computes {computed:.3g} ms and has {figures.bytes / 1e6:.3g} MB of gradients"]
    network = figures.network
    if hosts > 1:
        notes.append(
            f"between hosts, by {found[0].executor}: latency {1e3 * network.alpha:.3g} ms, bandwidth"
            f" {8e-6 * network.bandwidth:,.0f} Mbit/s; more hosts are taken to have the same links, and a switch that"
            " carries all of them"
        )
    else:
        notes.append(
            "one host: no network was measured. Name more by -H, or simulate them: --link 1gbit says what such a"
            " network would do"
        )
    unknown = "ways without a loss lose more, or were not measured: auto does not choose them"
    return [*notes, f"H: number of steps between two averages of local; {unknown}"]
