"""Checks how the GPUs of a host are connected, from the table of `nvidia-smi topo -m`."""

from __future__ import annotations

import re
from itertools import combinations

from dadt_cli.check_env.check import Check, ask, fail, good, warn

SECONDS = 20.0
GPU = re.compile(r"GPU\d+")
STYLE = re.compile(r"\x1b\[[\d;]*m")
"""Matches escape sequences: newer drivers underline the head of the table even if the output is a pipe."""
NVLINK = re.compile(r"NV\d+")
SELF, ACROSS = "X", "SYS"
"""Marks in nvidia-smi's table: a GPU's entry for itself, and a connection that leads from one processor to another."""
NAMES = {
    "PIX": "one PCIe switch",
    "PXB": "several PCIe switches",
    "PHB": "the host bridge",
    "NODE": "one NUMA node",
    ACROSS: "both processors",
}
"""Parts of the machine that each kind of connection between two GPUs passes through, from the shortest path to the
longest."""
NAME = "GPU links"


def checked() -> Check:
    text, wrong = ask(["nvidia-smi", "topo", "-m"], SECONDS)
    if wrong.startswith(" cannot be run"):
        return fail(NAME, f"nvidia-smi{wrong}", "`nvidia-smi topo -m` must work first")
    if wrong.startswith(":"):
        return warn(NAME, f"nvidia-smi topo -m{wrong}", "not every container may ask: run it on the host itself")
    return fail(NAME, f"nvidia-smi topo -m{wrong}", "look into dmesg") if wrong else judged(parsed(text))


def parsed(text: str) -> dict[tuple[str, str], str]:
    """Parse nvidia-smi's table into the connection of each pair of GPUs: NV12, PIX, PXB, PHB, NODE or SYS. Columns of
    network cards and CPU affinity are ignored."""
    lines = [STYLE.sub("", line).split() for line in text.splitlines()]
    head = next((words for words in lines if words and GPU.fullmatch(words[0]) and SELF not in words), [])
    gpus = [word for word in head if GPU.fullmatch(word)]
    rows = {words[0]: words[1 : len(gpus) + 1] for words in lines if words and words is not head}
    return {
        (one, other): rows[one][gpus.index(other)]
        for one, other in combinations(gpus, 2)
        if len(rows.get(one, ())) == len(gpus)
    }


def judged(ways: dict[tuple[str, str], str]) -> Check:
    """Return a check that warns if every connection between two GPUs leads from one processor to another. ways: kind of
    connection of each pair of GPUs."""
    if not ways:
        return warn(NAME, "nvidia-smi topo -m draws no table", "see what it says; update the driver")
    found = set(ways.values())
    if found == {ACROSS}:
        hint = "put them on one processor's slots, or take machines with NVLink; if NCCL hangs: NCCL_P2P_DISABLE=1"
        return warn(NAME, "SYS alone: all that GPUs exchange goes from processor to processor", hint)
    if all(NVLINK.fullmatch(way) for way in found):
        return good(NAME, f"all by NVLink ({', '.join(sorted(found))})")
    counts = {way: sum(each == way for each in ways.values()) for way in found}
    order = [*sorted(way for way in found if way not in NAMES), *(way for way in NAMES if way in found)]
    listed = (f"{counts[way]} by {way}" + (f" ({NAMES[way]})" if way in NAMES else "") for way in order)
    return good(NAME, f"of {len(ways)} pairs, {', '.join(listed)}")
