"""The page of what was found: targets, and a table of each measurement."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.peers.measurement import MEASUREMENTS
from benchmarks.peers.target import BARE, DDP, HOROVOD, PLAIN, TARGETS, Target, fastest, seconds, speed, verdict
from dadt_cli.bench.ratio import Interval, interval

Found = Mapping[str, Mapping[str, Any]]
QUIET = 10.0
"""Per cent of the processors that others may use before a measurement."""
HEAD = """# DADT beside its peers

Made with `make bench-peers` as root; `peers.json` holds every round and the conditions. Each table is one measurement
by the code of [`dadt bench`](../benchmarks.md#a-model): all contenders are up at once and train in turn, round by
round. Figures are medians with the interval of 95 % (with fewer than 6 rounds, the range); ratios are those of the same
rounds.

*plain* are as many copies of the script at once, which exchange nothing. *null* is DADT without moving data.
*bare* is *plain* with torch's own allreduce of as many bytes behind each step, by a thread of Gloo's, of buffers that
nobody reads or writes; *bare-bf16* moves half of them. That is the least that averaging late costs through Gloo as
torch uses it. DADT can be a little faster: its threads of Gloo's do not interrupt the one that computes, and bf16 is
summed by its own loops.
*ddp-view* and *ddp-bf16* are DistributedDataParallel with `gradient_as_bucket_view=True`, the latter also with torch's
hook of this name. "DDP" is the faster of *ddp* and *ddp-view*. torch's PowerSGD hook is not among them: over Gloo it
ended in its second round, with lengths that did not fit (`dadt bench resnet50 --against ddp-powersgd` tries it).
"""
TARGETS_HEAD = """
## Targets

A target is reached where the whole interval is at or above it ("yes"), and missed where the whole interval is below it
("no"); otherwise the table says on which side the median is. A small model is not slower where the interval includes 1.
"Bare" is the same ratio of *bare* (or *bare-bf16*), where it was measured: what is much above it is out of reach
through Gloo on this machine, however little DADT itself costs.

"""


def page(found: Found, slow: Found) -> str:
    """slow: what `benchmarks.convergence.slow_link` has found."""
    done = [(name, found[name]) for name in MEASUREMENTS if name in found]
    parts = [HEAD, _busy(done), TARGETS_HEAD, _targets({**found, **slow}), _slow(slow)]
    parts += [_section(name, each) for name, each in done]
    return "".join(parts)


def table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    rows = [head, ["---"] * len(head), *lines]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def _busy(done: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
    busy = {name: each["conditions"]["busy"] for name, each in done if each["conditions"]["busy"] > QUIET}
    if not busy:
        return ""
    shares = ", ".join(f"{share:.0f} % before {name}" for name, share in busy.items())
    return (
        f"\n**The machine did other work meanwhile: these figures are no results.** Processors in use just before a\n"
        f"measurement began: {shares}.\n"
    )


def _targets(found: Found) -> str:
    lines = []
    for target in TARGETS:
        value = _value(target, found)
        bound = _value(target._replace(mine=BARE.get(target.mine, ("",))[0]), found)
        most = "" if bound is None else f"{bound.median:.2f}"
        lines.append([_words(target), f"{target.least:.2f}", most, _told(value), verdict(target, value)])
    return table(["", "at least", "bare", "measured", "reached"], lines)


def _slow(slow: Found) -> str:
    if not slow:
        return ""
    ratios = [ratio for each in slow.values() for ratio in each["ratios"]]
    return (
        f"\nOver the slow link (100 Mbit/s) a step of DDP waits {min(ratios):.0f} to {max(ratios):.0f} times as long\n"
        "as it computes. The times are those to the same loss, with `--algorithm auto --compression auto` and nothing\n"
        "else, for a perceptron of 0.24 million weights; each round is a training with a seed of its own\n"
        "(`slow-link-sgd.json`, `slow-link-adam.json`).\n"
    )


def _value(target: Target, found: Found) -> Interval | None:
    if target.measurement not in found:
        return None
    return speed(found[target.measurement], target.mine, target.others, target.limited)


def _words(target: Target) -> str:
    known = {DDP: "DDP's", HOROVOD: "Horovod's", PLAIN: "plain's"}
    other = known.get(target.others, f"that of {target.others[0]}")
    limit = ", or what the link allows" if target.limited else ""
    return f"{target.measurement}: speed of {target.mine} over {other}{limit}"


def _told(value: Interval | None) -> str:
    return "" if value is None else f"{value.median:.2f} ({value.low:.2f} to {value.high:.2f})"


def _section(name: str, measurement: Mapping[str, Any]) -> str:
    ddp = fastest(measurement, DDP)
    against = [(PLAIN, "/ plain"), (DDP, f"/ DDP ({ddp})"), (HOROVOD, "/ Horovod")]
    against += [(bare, f"/ {bare[0]}") for bare in BARE.values()]
    against = [(others, head) for others, head in against if fastest(measurement, others)]
    lines = []
    for contender, each in measurement["contenders"].items():
        step = interval([1e3 * value for value in seconds(measurement, contender)])
        ratios = [
            "1" if fastest(measurement, others) == contender else _told(speed(measurement, contender, others))
            for others, _ in against
        ]
        shown = f"{step.median:.4g} ({step.low:.4g} to {step.high:.4g})"
        lines.append([contender, shown, *ratios, f"{each['memory'] / 1e6:,.0f}"])
    head = ["", "ms a step", *(head for _, head in against), "MB a process"]
    return (
        f"\n## {measurement['title']}\n\n{_conditions(name, measurement)}\n\n{table(head, lines)}"
        f"\n![speed of all workers, and share of plain](peers-{name}.png)\n"
    )


def _conditions(name: str, measurement: Mapping[str, Any]) -> str:
    about, each = measurement["conditions"], measurement
    source = f" ({each['source']})" if each["source"] else ""
    backwards = f" x {each['accumulate']} backwards a step" if each["accumulate"] > 1 else ""
    threads = f"{each['threads']} thread{'s' if each['threads'] > 1 else ''}"
    options = f", `{' '.join(each['options'])}`" if each["options"] else ""
    link = f"The link needs {1e3 * each['exchange']:.0f} ms for the gradients of a step." if each["exchange"] else ""
    told = [
        f"`{name}`: `{each['model']}`{source}, {each['parameters']:,} parameters, batch {each['batch']}{backwards};",
        f"{each['ranks']} workers of {threads}{options}; {each['rounds']} rounds of {each['steps']} steps,",
        f"in {each['minutes']:.1f} minutes from {about['when']}; {about['cpu']}, {about['cores']} cores,",
        f"{about['busy']:.0f} % in use just before; torch {about['torch']}.",
        link,
        *(f"{note[0].upper()}{note[1:]}." for note in each["notes"]),
    ]
    return "\n".join(filter(None, told))
