"""Implements `--metrics prometheus:PORT`: serves a page that Prometheus reads."""

from __future__ import annotations

import errno
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
)
from prometheus_client.core import Metric as MetricFamily
from prometheus_client.registry import Collector

from dadt.control.step_times import PER_DOUBLING
from dadt.errors import ConfigError
from dadt.launch.monitor.metrics.metric import LINK_METRICS, METRICS, Metric, Source
from dadt.launch.monitor.watch import Watch

LOOPBACK = "127.0.0.1"
SECONDS = 0.5
BOUNDS = range(-13, 7)
"""Exponents of two that give the bounds of the histogram of step times in seconds, from 0.1 ms to about a minute."""
LABELS = ("job", "rank", "host")
LINK_LABELS = ("job", "source", "target")


PORT = re.compile(r"[0-9]{1,5}")


class Prometheus(Collector):
    """Serves one page with the metrics of all ranks while the job runs. The launcher's thread updates the values, and
    the server's threads read them."""

    def __init__(self, place: str) -> None:
        """place: PORT, or HOST:PORT. Raises ConfigError if the server cannot listen there."""
        host, _, port = place.rpartition(":")
        host = host.strip("[]") or LOOPBACK
        if not PORT.fullmatch(port) or int(port) > 65535:
            raise ConfigError(f"--metrics prometheus:{place}: give a port, as prometheus:9100, or HOST:PORT")
        self._families: list[MetricFamily] = []
        registry = CollectorRegistry()
        registry.register(self)
        try:
            self._server, self._thread = start_http_server(int(port), host, registry)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                why = "another program listens there, perhaps another job; give each a port of its own, 0 for any"
            else:
                why = f"cannot listen there ({error.strerror})"
            raise ConfigError(f"--metrics prometheus:{place}: {why}") from error
        shown = f"[{host}]" if ":" in host else host
        self._address = f"http://{shown}:{self._server.server_port}/metrics"
        self._closed = False
        self._due = 0.0

    def begin(self, watch: Watch, facts: Mapping[str, str], warn: Callable[[str], None]) -> str:
        self._watch, self._facts = watch, facts
        self.tick()
        return f"metrics for Prometheus at {self._address}"

    def collect(self) -> Iterator[MetricFamily]:
        yield from self._families

    def tick(self) -> float:
        now = time.monotonic()
        if now >= self._due:
            self._due = now + SECONDS
            self._families = self._look()
        return self._due - now

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._server.shutdown()
            self._server.server_close()
            self._thread.join()

    def _look(self) -> list[MetricFamily]:
        job = self._facts["job"]
        families: list[MetricFamily] = [InfoMetricFamily("dadt_job", "What runs.", dict(self._facts))]
        labelled = [((job, str(gauge.rank), gauge.host or "localhost"), gauge) for gauge in self._watch.gauges]
        families += [_family(metric, LABELS, labelled) for metric in METRICS]
        times = HistogramMetricFamily(
            "dadt_step_seconds", "From the end of a step to the end of the next.", labels=LABELS
        )
        for labels, gauge in labelled:
            if told := gauge.numbers.get("step_times"):
                times.add_metric(labels, _buckets(told["counts"]), told["seconds"])
        links = [((job, link["source"], link["target"]), link) for link in self._watch.links.describe(time.monotonic())]
        return [*families, times, *(_family(metric, LINK_LABELS, links) for metric in LINK_METRICS if links)]


def _family(
    metric: Metric[Source], names: Sequence[str], sources: Iterable[tuple[Sequence[str], Source]]
) -> MetricFamily:
    """Return the values of one metric, for the ranks or links that have a value. names: names of the labels. sources:
    pairs of the values of the labels and the rank or link."""
    kind = CounterMetricFamily if metric.grows else GaugeMetricFamily
    family = kind(f"dadt_{metric.name}", metric.help, labels=names)
    for labels, source in sources:
        if (value := metric.value(source)) is not None:
            family.add_metric(labels, value)
    return family


def _buckets(counts: Mapping[str, int]) -> list[tuple[str, float]]:
    """Return the buckets of a cumulative histogram, which are for each bound the number of steps that took less
    time."""
    below = [
        (str(2.0**power), float(sum(count for size, count in counts.items() if int(size) < power * PER_DOUBLING)))
        for power in BOUNDS
    ]
    return [*below, ("+Inf", float(sum(counts.values())))]
