"""Every knob of DADT: the flag `--warmup-steps`, the variable DADT_WARMUP_STEPS and the docs come from here."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from dadt.errors import ConfigError

EXECUTORS = ("auto", "shm", "gloo", "null")
ALGORITHMS = ("pipe", "sync")


def knob(default: Any, help: str, *, choices: tuple[str, ...] = (), advanced: bool = False) -> Any:
    """A field of Config with the text its flag shows. `advanced` ones are listed by --help-all only."""
    return field(default=default, metadata={"help": help, "choices": choices, "advanced": advanced})


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """What one job does, the same on every rank. Frozen: made once by the command line, rebuilt in each worker."""

    algorithm: str = knob("pipe", "How gradients are averaged.", choices=ALGORITHMS)
    executor: str = knob("auto", "What moves the bytes between ranks.", choices=EXECUTORS)
    warmup_steps: int = knob(50, "Synchronous steps before `pipe` begins to delay.")
    predict: str = knob("auto", "Weight prediction of `pipe`: auto, or a factor of the last displacement.")
    batch: str = knob(
        "per-rank",
        "The script's batch size is each rank's own, or is divided among ranks.",
        choices=("per-rank", "global"),
    )
    scale_lr: str = knob(
        "none", "Multiply learning rates by the number of workers.", choices=("none", "linear", "sqrt")
    )
    share: str = knob("", "DataLoaders (numbers by order of creation, as 1,3) that train, whatever they look like.")
    no_share: str = knob("", "DataLoaders (as 2, or all) that give every rank all of their data.")
    seed: int = knob(-1, "Seed of torch, numpy and random on every rank before the script's own; -1 draws one.")
    seeding: bool = knob(True, "Seed all ranks alike, then give each its own random stream.", advanced=True)
    broadcast: bool = knob(True, "Start all ranks from rank 0's weights, buffers and optimizer state.", advanced=True)
    buffers: bool = knob(True, "Average buffers (BatchNorm statistics) over ranks.", advanced=True)
    save_once: bool = knob(
        True,
        "torch.save to a path: one rank of each host writes, the others wait for the file.",
        advanced=True,
    )
    lock_downloads: bool = knob(True, "Download into one folder by one rank of a host at a time.", advanced=True)
    bucket_mb: float = knob(25.0, "Gradients are exchanged in buckets of about this many MiB.", advanced=True)
    timeout: float = knob(1800.0, "Seconds that a rank waits for a silent peer before it fails.")
    start_timeout: float = knob(120.0, "Seconds in which all ranks must have arrived.")
    inject: str = knob(
        "auto",
        "How DADT gets into the script.",
        choices=("auto", "entrypoint", "sitecustomize", "none"),
        advanced=True,
    )

    def __post_init__(self) -> None:
        for f in fields(self):
            choices = f.metadata["choices"]
            value = getattr(self, f.name)
            if choices and value not in choices:
                raise ConfigError(f"{flag(f.name)} {value}: unknown; choose one of {', '.join(choices)}")
        if self.predict != "auto":
            factor = _number("--predict", self.predict, "auto or a number, as 1.5")
            if not 0 <= factor < math.inf:
                raise ConfigError(f"--predict {self.predict}: give auto or a number from 0, as 1.5")
        if self.warmup_steps < 0:
            raise ConfigError(f"--warmup-steps {self.warmup_steps}: must be 0 or more")
        if self.bucket_mb <= 0:
            raise ConfigError(f"--bucket-mb {self.bucket_mb}: must be above 0")
        for name in ("timeout", "start_timeout"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{flag(name)} {getattr(self, name)}: must be above 0 seconds")
        loader_numbers("--share", self.share)
        loader_numbers("--no-share", self.no_share)

    def to_env(self) -> dict[str, str]:
        return {variable(f.name): _text(getattr(self, f.name)) for f in fields(self)}

    @classmethod
    def from_env(cls, env: Mapping[str, str] = os.environ) -> Config:
        return cls(**{f.name: parse(f.name, env[v]) for f in fields(cls) if (v := variable(f.name)) in env})


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def variable(name: str) -> str:
    return "DADT_" + name.upper()


def loader_numbers(name: str, text: str) -> set[int] | None:
    """The DataLoaders that "1,3-5" names; None for "all".

    Raises ConfigError where the text is neither.
    """
    if text == "all":
        return None
    numbers: set[int] = set()
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        if not first.isdigit() or (last and not last.isdigit()) or int(first) < 1:
            raise ConfigError(f"{name} {text}: give DataLoaders by number from 1, as 1,3, or all")
        numbers.update(range(int(first), int(last or first) + 1))
    return numbers


def parse(name: str, text: str) -> Any:
    """A knob's value from its variable's text, by the type of its default."""
    default = next(f.default for f in fields(Config) if f.name == name)
    if isinstance(default, bool):
        if text.lower() not in ("0", "1", "true", "false"):
            raise ConfigError(f"{variable(name)}={text}: give 1 or 0")
        return text.lower() in ("1", "true")
    if isinstance(default, int):
        value = _number(variable(name), text, "a whole number")
        if value != int(value):
            raise ConfigError(f"{variable(name)}={text}: give a whole number")
        return int(value)
    if isinstance(default, float):
        return _number(variable(name), text, "a number")
    return text


def _number(name: str, text: str, expected: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ConfigError(f"{name} {text}: give {expected}") from None


def _text(value: object) -> str:
    return str(int(value)) if isinstance(value, bool) else str(value)
