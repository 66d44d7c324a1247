"""The lines in which `auto` says what it has measured and chosen."""

from __future__ import annotations

from collections.abc import Mapping

from dadt.algorithms.auto.asked import shown
from dadt.algorithms.auto.choice import CLOSE, Times
from dadt.algorithms.auto.ways import Choice, sent
from dadt.config.check import round_steps
from dadt.train.attachment import Attachment
from dadt.train.measure import milliseconds


def measured(steps: int, times: Times) -> str:
    """Return what was measured in the synchronous steps."""
    plain, *others = times.exchange.items()
    exchange = f"exchange {milliseconds(plain[1])}" + (f" as {plain[0]}" if plain[0] != "none" else "")
    exchange += "".join(f", as {name} {milliseconds(each)}" for name, each in others)
    return f"warm-up done after {steps} steps: compute {milliseconds(times.compute)}, {exchange}"


def flags(a: Attachment) -> str:
    """Return the flags by which the user asks for a choice."""
    config = a.ranks.config
    asked = (("--algorithm", config.algorithm), ("--compression", config.compression))
    return ", ".join(f"{name} auto" for name, value in asked if value == "auto")


def chosen(a: Attachment, way: Choice, found: Mapping[Choice, float]) -> str:
    """Return which way was chosen, and why; how many bytes it spares, and what it costs. found: the predicted seconds
    of a step of each way, beginning with the one that changes training least."""
    first = next(iter(found))
    if way == first:
        least = f"nothing comes to the same loss more than {100 * (CLOSE - 1):.0f} % faster"
        return f"chooses {way}: {milliseconds(found[way])} a step, and {least}{_price(a, way)}"
    return f"chooses {way}: {milliseconds(found[way])} a step, where {first} takes {milliseconds(found[first])}" + (
        _price(a, way)
    )


def _price(a: Attachment, way: Choice) -> str:
    """Return how many bytes a way spares, and what the page of accuracy shows that it costs."""
    every = way.every or (round_steps(a.ranks.config.sync_every) if way.algorithm == "local" else 0)
    adaptive = any("betas" in group for group in a.optimizer.param_groups)
    less = 1 / sent(way._replace(every=every), adaptive=adaptive)
    parts = [f"sends {less:.2g}x less"] if less > 1 else []
    costs = {each.every: cost for each, cost in shown(a).costs.items() if each._replace(every=way.every) == way}
    # Rounds of a length that was not measured cost no more than the next longer ones.
    length = min((each for each in costs if each >= way.every), default=None)
    if length is not None and costs[length]:
        most = "" if length == way.every else "at most "
        parts.append(f"ends {most}{costs[length]:.2g} of loss above sync for {shown(a).of} (docs/results/accuracy.md)")
    return f"; it {' and '.join(parts)}" if parts else ""
