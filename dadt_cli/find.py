"""The job that a command is about, and its ranks, as users name them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import click

from dadt.errors import ConfigError, DadtError
from dadt.launch.frame import Frame
from dadt.launch.trace import Trace, traces


def _ranks(ctx: click.Context, parameter: click.Parameter, text: str | None) -> set[int] | None:
    """0,3-5; None: all."""
    if text is None:
        return None
    ranks: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdigit() or (dash and not last.isdigit()):
            raise ConfigError(f"--rank {text}: give ranks as 0,3-5")
        ranks.update(range(int(first), int(last or first) + 1))
    return ranks


rank_option = click.option("--rank", "ranks", callback=_ranks, metavar="RANKS", help="Of these ranks only, as 0,3-5.")


def jobs(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    """For shells to complete."""
    return [trace.job for trace in traces() if trace.job.startswith(incomplete)]


def find(job: str) -> Trace:
    """Raises ConfigError if no such job runs or has left something running here."""
    running = traces()
    for trace in running:
        if trace.job == job:
            return trace
    raise ConfigError(f"job {job}: {_there_is(running)}")


def _there_is(running: Sequence[Trace]) -> str:
    if not running:
        return "there is no such job; none of yours runs on this machine"
    return f"there is no such job; on this machine run {', '.join(trace.job for trace in running)}"


def describe(trace: Trace) -> dict[str, Any] | None:
    """What the launcher says of its job; None if it is not on this machine.

    Raises DadtError if it is, but does not answer.
    """
    line = trace.call()
    if line is None:
        return None
    with line:
        try:
            for answer in line.ask(Frame("describe")):
                return answer.header
        except TimeoutError:
            raise DadtError(
                f"job {trace.job}: its launcher (pid {line.pid}) does not answer -> dadt kill {trace.job}"
            ) from None
    return None  # it has just ended
