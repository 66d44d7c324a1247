"""The ways to train among which `auto` chooses: in how few bytes each sends what ranks tell each other, and what
docs/results/accuracy.md shows that it costs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from dadt.comm.compression import CODECS, OF_MOMENTUM
from dadt.comm.compression.base import BLOCK
from dadt.train.own_moments import REFRESH


class Choice(NamedTuple):
    """One way to train."""

    algorithm: str
    compression: str
    every: int = 0
    """Number of steps of a round of `local`; 0 for the value of --sync-every, and with other algorithms."""

    at_once: bool = False
    """Whether ranks wait for each mean of `local`, unless the user has set --overlap-steps. Otherwise they train on
    until it has come."""

    def __str__(self) -> str:
        name = self.algorithm if self.compression == "none" else f"{self.algorithm} with {self.compression}"
        rounds = f" every {self.every} steps" if self.every else ""
        return f"{name}{rounds}{', merged at once' if self.at_once else ''}"


class Shown(NamedTuple):
    """What the page of accuracy shows of one kind of optimizer."""

    of: str
    """The training whose figures count."""
    costs: Mapping[Choice, float]
    """Loss above that of `sync` with which each way ends, beginning with the way that changes training least. Other
    ways are not chosen, as they cost more or were not measured."""
    doubling: float
    """Loss by which this training ends lower if it takes twice as many steps."""


SHOWN = {
    "sgd": Shown(
        "the CNN",
        {
            Choice("sync", "none"): 0.0,
            Choice("sync", "bf16"): 0.0005,
            Choice("sync", "int8"): 0.0005,
            Choice("sync", "int4"): 0.0021,
            Choice("sync", "momentum:2"): 0.0054,
            Choice("sync", "momentum:1"): 0.0054,
            Choice("pipe", "none"): 0.0004,
            Choice("pipe", "bf16"): 0.0009,
            Choice("pipe", "int8"): 0.0009,
            Choice("pipe", "int4"): 0.0025,
            Choice("pipe", "momentum:2"): 0.0054,
            Choice("pipe", "momentum:1"): 0.0054,
            Choice("local", "none", 8): 0.0037,
            Choice("local", "int4", 8): 0.0037,
        },
        0.028,
    ),
    "adam": Shown(
        "the GPT",
        {
            Choice("sync", "none"): 0.0,
            Choice("sync", "int8"): 0.0013,
            Choice("sync", "int4"): 0.0013,
            Choice("sync", "momentum:2"): 0.0013,
            Choice("sync", "momentum:1"): 0.0013,
            Choice("pipe", "none"): 0.0045,
            Choice("pipe", "int8"): 0.0077,
            Choice("pipe", "int4"): 0.0148,
            Choice("pipe", "momentum:2"): 0.0148,
            Choice("pipe", "momentum:1"): 0.0148,
            Choice("local", "int4", 4, at_once=True): 0.013,
            Choice("local", "int4", 8, at_once=True): 0.0342,
        },
        0.167,
    ),
}
"""What `auto` counts on, by kind of optimizer. The table of these figures in docs/results/accuracy.md says where they
come from."""

WIRE = {
    "none": 1.0,
    **{name: codec.core.block_bytes / (4 * BLOCK) for name, codec in {**CODECS, **OF_MOMENTUM}.items()},
}
"""Bytes that are sent for each byte of float32, by compression. Blocks have 4 more for their scale."""
REFRESHED = WIRE["int8"] / REFRESH
"""The same for Adam's second moments, which ranks that send momentum or step alone send in 8 bits now and then."""


def sent(way: Choice, *, adaptive: bool) -> float:
    """Return the bytes that ranks send in a step, as a share of uncompressed gradients. adaptive: whether the optimizer
    has second moments."""
    refreshed = REFRESHED if adaptive and (way.every or way.compression in OF_MOMENTUM) else 0.0
    return WIRE.get(way.compression, 1.0) / max(way.every, 1) + refreshed
