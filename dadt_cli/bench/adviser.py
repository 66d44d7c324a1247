"""Measures how fast each algorithm and compression is on these hosts, and predicts with dadt_cli/bench/cost.py how fast
it would be on more hosts."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace

import numpy as np

from dadt.algorithms.auto.ways import Choice
from dadt.comm.compression import OF_MOMENTUM
from dadt.errors import ConfigError
from dadt_cli.bench import cost, probe
from dadt_cli.bench.cost import BucketCost, Handling, LinkCost, LowRankBytes, MeasuredCosts, NetworkSpeed
from dadt_cli.bench.party import Location, Party, start
from dadt_cli.bench.probe import ProbeResult
from dadt_cli.bench.training import BEGINNING, Task, flags_of

WARMUP = 2
"""Number of synchronous steps at the start of each training (--warmup-steps)."""
LEAD = 1
"""Number of steps at the start of each turn that are not counted, since an exchange from before the pause of the
training finishes in them."""
STEPS_SECONDS = 3.0
CHECK_SECONDS = 6.0
"""Approximate seconds to measure one algorithm and compression with --check."""
CHECK_TURNS = 3
LEAST_STEPS = 2
Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Checked:
    """Predicted and measured steps per second of one algorithm and compression on the available hosts."""

    way: Choice
    predicted: float
    measured: float

    @property
    def error(self) -> float:
        """Return the relative error of the prediction: the predicted rate over the measured one, minus 1."""
        return self.predicted / self.measured - 1.0


def figures_of(found: Sequence[ProbeResult], compute: dict[str, float], sync_every: int) -> MeasuredCosts:
    """Return the constants of the cost model. found: the measurements of each rank. Raises ConfigError if there are
    fewer than two ranks."""
    hosts = len({each.cross_rank for each in found})
    if len(found) < 2:
        raise ConfigError("advise measures what workers exchange: give -np 2 or more")
    network = network_of(found, hosts)
    executor = found[0].executor
    chunked = executor.startswith("hierarchical")
    draft = MeasuredCosts(
        network=network,
        handling={name: Handling(0.0, 0.0, 0.0) for name in cost.WIRE},
        buckets=buckets_of(found[0]),
        buffers=found[0].buffers,
        forward=_share(found, 0),
        backward=_share(found, 1),
        compute=compute,
        packing=max(each.packing for each in found),
        low_rank=max(each.low_rank_seconds for each in found),
        link_costs={name: _link_cost(found, name) for name in found[0].link_costs},
        mail=max(each.mail * each.scarcity for each in found),
        busy=max(0.0 if each.cores // each.local_size > each.threads else each.busy for each in found),
        chunked=chunked,
        sync_every=sync_every,
    )
    handling = {name: handling_of(draft, found, name, hosts) for name in found[0].exchanges}
    return replace(draft, handling=handling)


def network_of(found: Sequence[ProbeResult], hosts: int) -> NetworkSpeed:
    """Return latency and bandwidth of the network between hosts. For a single host they are 0 and infinite, so that an
    allreduce costs exactly what was measured."""
    if hosts == 1:
        return NetworkSpeed(0.0, float("inf"))
    spoke = [each for each in found if each.pairs]
    _, per_byte = fit(_slowest([each.pairs for each in spoke]))
    # An allreduce may use more of a link's bandwidth than messages over a single connection, so bandwidth is also
    # fitted to allreduces.
    _, in_ring = fit(_slowest([each.exchanges["none"] for each in found]))
    bandwidth = max(1.0 / per_byte, 2 * (hosts - 1) / hosts / in_ring)
    return NetworkSpeed(statistics.median(each.alpha for each in spoke), bandwidth)


def handling_of(draft: MeasuredCosts, found: Sequence[ProbeResult], compression: str, hosts: int) -> Handling:
    """Return the costs of measured exchanges that the network model does not explain: per operation and per byte."""
    times = _slowest([each.exchanges[compression] for each in found])
    rest = [(size, max(0.0, t - cost.allreduce(draft, size, compression, hosts)), t) for size, t in times]
    each, per_byte = _fit(rest)
    if per_byte < 0.0:
        each, per_byte = statistics.median(seconds for _, seconds, _ in rest), 0.0
    processor = max(each.processor[compression] * each.scarcity for each in found)
    return Handling(max(0.0, each), per_byte, processor)


def buckets_of(found: ProbeResult) -> list[BucketCost]:
    return [
        BucketCost(size, ready, LowRankBytes(*halves) if halves != (0, 0) else None)
        for (size, ready), halves in zip(found.buckets, found.low_rank, strict=True)
    ]


def _link_cost(found: Sequence[ProbeResult], compression: str) -> LinkCost:
    """Return the cost of one end of a `gossip` exchange on the slowest rank."""
    link_costs = [(each.link_costs[compression], each.scarcity) for each in found]
    return LinkCost(
        link_costs[0][0].bytes,
        max(link.say * s for link, s in link_costs),
        max(link.settle * s for link, s in link_costs),
    )


def fit(times: Iterable[tuple[int, float]]) -> tuple[float, float]:
    """Fit seconds = a + b * bytes by least squares of the relative error, and return a and b. Raises ConfigError unless
    b is positive."""
    each, per_byte = _fit([(size, seconds, seconds) for size, seconds in times])
    if per_byte <= 0:
        raise ConfigError("the measurement was disturbed: larger messages took no longer than small ones; try again")
    return each, per_byte


def measure(
    task: Task, location: Location, ranks: int, found: Sequence[ProbeResult], sync_every: int, tell: Progress
) -> MeasuredCosts:
    """Measure the compute time of each algorithm with the null executor, which transfers nothing, and combine it with
    the measurements of `probe`."""
    compute = {}
    guess = sum(max(each.parts[part] for each in found) for part in range(3))
    for algorithm in cost.ALGORITHMS:
        tell(f"compute with {algorithm}")
        with _party(task, location, ranks, _alone(algorithm, sync_every)) as party:
            compute[algorithm] = _turn(party, _steps(algorithm, STEPS_SECONDS / guess, sync_every), LEAD)
    figures = figures_of(found, compute, sync_every)
    return replace(figures, compute={name: _unpacked(figures, name, seconds) for name, seconds in compute.items()})


def check(
    figures: MeasuredCosts,
    ways: Sequence[Choice],
    task: Task,
    location: Location,
    ranks: int,
    hosts: int,
    tell: Progress,
) -> list[Checked]:
    """Train with each algorithm and compression on the available hosts, in turn with the same algorithm on the null
    executor, which transfers nothing. The compute time measured with the null executor is used in the prediction, so
    that prediction and measurement see the same load of the machine.
    """
    checked = []
    for algorithm, every in dict.fromkeys((way.algorithm, way.every or figures.sync_every) for way in ways):
        with _party(task, location, ranks, _alone(algorithm, every)) as alone:
            for way in (way for way in ways if (way.algorithm, way.every or figures.sync_every) == (algorithm, every)):
                tell(f"{way} trains")
                share = CHECK_SECONDS / CHECK_TURNS
                steps = _steps(algorithm, share / cost.seconds(figures, way, hosts), every)
                least = _steps(algorithm, share / 2 / figures.compute[algorithm], every)
                # `local` averages weights once in `every` steps, and its first average may come earlier, so the first
                # `every` steps are not counted.
                lead = every if algorithm == "local" else LEAD
                with _party(task, location, ranks, cost.options(way)) as party:
                    if way.compression in OF_MOMENTUM:
                        party.train(0, BEGINNING)  # gradients are sent at first
                    turns = [(_turn(alone, least, LEAD), _turn(party, steps, lead)) for _ in range(CHECK_TURNS)]
                compute, seconds = (statistics.median(column) for column in zip(*turns, strict=True))
                then = replace(figures, compute={algorithm: _unpacked(figures, algorithm, compute)})
                checked.append(Checked(way, 1.0 / cost.seconds(then, way, hosts), 1.0 / seconds))
    return checked


def _alone(algorithm: str, sync_every: int) -> list[str]:
    """Return options of `dadt run` for the null executor, which transfers nothing."""
    return ["--executor", "null", "--algorithm", algorithm, "--sync-every", str(sync_every)]


def _unpacked(figures: MeasuredCosts, algorithm: str, seconds: float) -> float:
    """Return a step's compute time: `seconds`, measured with the null executor, minus the packing of gradients, which
    the cost model counts as part of each exchange."""
    steps = {"sync": 1, "pipe": 1, "local": figures.sync_every}
    return seconds - figures.packing * figures.bytes / steps[algorithm] if algorithm in steps else seconds


def _steps(algorithm: str, about: float, sync_every: int) -> int:
    """Return the number of steps to measure: `about`, rounded, but at least LEAST_STEPS. For `local` it is a multiple
    of `sync_every`, the number of steps between two averages."""
    count = max(LEAST_STEPS, round(about))
    return max(1, round(count / sync_every)) * sync_every if algorithm == "local" else count


@contextmanager
def _party(task: Task, location: Location, ranks: int, options: Sequence[str]) -> Iterator[Party]:
    settled = [*options, "--warmup-steps", str(WARMUP)]
    with start(" ".join(options), location, ranks, settled, flags_of(asdict(task))) as party:
        party.train(0, WARMUP + 1)
        yield party


def _turn(party: Party, steps: int, lead: int) -> float:
    return max(worked.seconds for worked in party.train(lead, steps)) / steps


def _share(found: Sequence[ProbeResult], part: int) -> float:
    """Return the share of a step's compute time that one part takes on the slowest rank. part: 0 forward, 1 backward, 2
    optimizer."""
    slowest = max(found, key=lambda each: sum(each.parts))
    return slowest.parts[part] / sum(slowest.parts)


def _slowest(tries: Sequence[probe.Times]) -> list[tuple[int, float]]:
    """Return, for each message size, the median time over all tries, where the time of a try is that of the slowest
    rank. tries: one list for each rank."""
    by_size: dict[int, list[float]] = {}
    for row in zip(*tries, strict=True):
        by_size.setdefault(row[0][0], []).append(max(seconds for _, seconds in row))
    return [(size, statistics.median(seconds)) for size, seconds in by_size.items()]


def _fit(rows: Sequence[tuple[int, float, float]]) -> tuple[float, float]:
    """Fit y = a + b x by weighted least squares, and return a and b. rows: x, y and the scale by which the error of y
    is divided."""
    x, y, scale = (np.array(column, dtype=float) for column in zip(*rows, strict=True))
    if np.ptp(x) == 0:
        weights = scale**-2.0
        return 0.0, float((weights @ y) / (weights @ x))
    slope, intercept = np.polyfit(x, y, 1, w=1.0 / scale)
    return float(intercept), float(slope)
