"""Defines the metrics that are exported for each rank and each link; docs/metrics.md lists them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, Generic, TypeVar

from dadt.launch.monitor.watch import Gauge

Source = TypeVar("Source")


@dataclass(frozen=True, slots=True)
class Metric(Generic[Source]):
    """One metric of a rank, or of the link from one host to another. As is usual for Prometheus, the metric's name ends
    with its unit, or with `_total` if its value only grows."""

    name: str
    help: str
    value: Callable[[Source], float | None]
    """Function that returns the metric's value from the Gauge of a rank or the description of a link; None while it is
    unknown."""

    @property
    def grows(self) -> bool:
        return self.name.endswith("_total")


def _told(name: str) -> Callable[[Gauge], float | None]:
    return lambda gauge: gauge.numbers.get(name)


def _speed(of: str) -> Callable[[Gauge], float | None]:
    return lambda gauge: getattr(speed, of) if (speed := gauge.speed(time.monotonic())) is not None else None


def _samples_per_second(gauge: Gauge) -> float | None:
    return _speed("samples")(gauge) if gauge.samples else None


def _compression(gauge: Gauge) -> float | None:
    sent = gauge.numbers.get("sent")
    return gauge.numbers["plain"] / sent if sent else None


METRICS: tuple[Metric[Gauge], ...] = (
    Metric("steps_total", "Optimizer steps.", lambda gauge: max(0, gauge.member.step)),
    Metric("steps_per_second", "Over the last five seconds.", _speed("steps")),
    Metric("samples_total", "Samples drawn for training.", lambda gauge: gauge.samples or None),
    Metric("samples_per_second", "Over the last five seconds.", _samples_per_second),
    Metric(
        "waiting_seconds_total",
        "The training thread stood still for communication.",
        lambda gauge: gauge.last.waited if gauge.last is not None else None,
    ),
    Metric("waiting_ratio", "Share of the last five seconds, 0 to 1, that it stood still.", _speed("wait")),
    Metric("sent_bytes_total", "Sent to other ranks in averages.", _told("sent")),
    Metric("compression_ratio", "Bytes that averages would take uncompressed, to those sent.", _compression),
    Metric("staleness_steps", "Steps by which the gradients of the last step were late.", _told("late")),
    Metric("fall_backs_total", "Times that late gradients blew up and steps became synchronous.", _told("fell_back")),
    Metric("replica_differences_total", "Times that its weights or their state had come to differ.", _told("differed")),
    Metric("memory_bytes", "Resident memory of the process that trains.", lambda gauge: gauge.memory or None),
    Metric(
        "failures_total",
        "1 once the rank has failed by itself, and was not stopped because another one had.",
        lambda gauge: float(gauge.failed),
    ),
    Metric("generation", "Times that it trained on without lost ranks.", lambda g: g.member.generation),
    Metric("lost_timestamp_seconds", "When it was lost, since the epoch.", lambda gauge: gauge.lost_at),
)


LINK_METRICS: tuple[Metric[Mapping[str, Any]], ...] = (
    Metric("link_sent_bytes_total", "Sent from one host to another, and arrived.", itemgetter("sent")),
    Metric("link_resent_bytes_total", "Sent again, as they were lost or late.", itemgetter("resent")),
    Metric("link_bits_per_second", "Over the last ten seconds, while bytes were under way.", itemgetter("recent_rate")),
    Metric("link_round_trip_seconds", "As TCP measures it.", itemgetter("round_trip")),
    Metric("link_queue_bytes", "Waiting in the kernel to be sent.", itemgetter("queued")),
)
