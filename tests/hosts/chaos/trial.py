"""One fault of one job, and what came of it."""

from __future__ import annotations

import hashlib
import json
import random
import re
import subprocess
import tempfile
import time
from collections.abc import Collection, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
from harness.disk import small_disk
from harness.host_run import HostRun
from harness.machine import Network
from harness.patience import SETTLE_SECONDS, await_that
from hosts.chaos.kind import KINDS, Kind
from hosts.chaos.struck import (
    BATCH,
    LOGS,
    OPTIONS,
    RANKS,
    SAVES,
    SCRIPT,
    SHARDED,
    STEPS,
    TRAININGS,
    WAITS,
    Struck,
    Training,
)

from dadt.config.numbers import numbers


@dataclass(frozen=True)
class Row:
    """What was promised, and what came."""

    seed: int
    kind: Kind
    training: Training
    promised: frozenset[int] = frozenset()
    """Ranks that train to the end."""
    survivors: frozenset[int] = frozenset()
    code: int = -1
    equal: bool = False
    """Whether they have trained as many steps as without the fault, to weights as the training promises them."""
    saved: bool = False
    """Whether the script's file is of the last step, and holds the weights of a survivor; where ranks have weights of
    their own, those of one that may have been lost after that step."""
    told: float | None = None
    """Seconds from the fault until the last loss was told."""
    went_on: float | None = None
    """Seconds from then until training went on."""
    steps: int | None = None
    """Steps of which the survivors lack the most."""
    samples: int | None = None
    """Samples that nobody has trained on, as their workers were lost; None if no loss is on record."""
    left: Sequence[str] = ()
    text: str = ""
    skipped: str = ""
    """Why it was not tried."""

    @property
    def kept(self) -> bool:
        # Where all islands are lost, the job ends with the first of its failures.
        well = self.code == 0 and self.equal and self.saved if self.promised else self.code > 0
        came = self.promised == self.survivors and well and not self.left
        return bool(self.skipped) or (came and self.kind.tells in self.text)


def drawn(seed: int, trainings: Sequence[Training]) -> tuple[Kind, Training, random.Random]:
    chance = random.Random(seed)
    kind = KINDS[seed % len(KINDS)]
    return kind, chance.choice([each for each in trainings if each.hosts >= kind.hosts]), chance


def try_out(seed: int, trainings: Sequence[Training] = TRAININGS) -> Row:
    kind, training, chance = drawn(seed, trainings)
    if reason := kind.needs():
        return Row(seed, kind, training, skipped=reason)
    with tempfile.TemporaryDirectory(prefix="dadt-chaos-") as name, ExitStack() as stack:
        folder = Path(name)
        (folder / "network").mkdir()
        (folder / SAVES).mkdir()
        if kind.disk:
            stack.enter_context(small_disk(folder / LOGS))
        network = Network(folder / "network", training.hosts)
        stack.callback(network.close)
        return _try_out(seed, kind, training, chance, network, stack)


def _try_out(
    seed: int, kind: Kind, training: Training, chance: random.Random, network: Network, stack: ExitStack
) -> Row:
    folder = network.folder.parent
    step = chance.randint(5, 120)
    logs = folder / (LOGS if kind.disk else "dadt-logs")
    options = [*OPTIONS, *WAITS, *training.arguments, "--log-dir", str(logs)]
    hosts = ["-np", "4", "-H", network.list(len(RANKS) // training.hosts)]
    script = SHARDED if training.island > 1 else SCRIPT
    run = HostRun(network, folder, script, [*hosts, *options, "train.py", str(step)], {}, alone=True)
    try:
        await_that(lambda: all((folder / f"here{rank}").exists() for rank in RANKS), f"step {step}")
        job = Struck(network, folder, seed, chance, stack)
        job.pause(chance.uniform(0.0, 0.02))  # so that it strikes anywhere in a step
        at = time.time()
        lost = kind.strike(job)
        result = run.finish()
    except (subprocess.TimeoutExpired, AssertionError) as error:
        return Row(seed, kind, training, text=f"it hangs: {error}")
    finally:
        run.process.kill()
    for heal in job.healing:
        heal()
    for machine in network.all:
        network.heal(machine)
    found = {
        rank: (int(m[2]), m[3])
        for m in re.finditer(r"^\[([\d,-]+)(?: \w+)?\] weights (\d+) (\w+)", result.out.decode(), re.MULTILINE)
        for rank in numbers(m[1]) or ()
    }
    digests = {digest for _, digest in found.values()}
    told, went_on = _times(logs / result.job / "events.jsonl", at)
    return Row(
        seed=seed,
        kind=kind,
        training=training,
        promised=frozenset(
            RANKS - {rank for rank in RANKS if any(rank // training.island == r // training.island for r in lost)}
        ),
        survivors=frozenset(found),
        code=result.code,
        equal=all(steps == STEPS for steps, _ in found.values()) and (len(digests) == 1 or not training.equal),
        saved=_saved(folder / SAVES / "model.pt", digests, any_rank=bool(lost) and not training.equal),
        told=told,
        went_on=went_on,
        steps=max((STEPS - steps for steps, _ in found.values()), default=None),
        samples=_samples(logs / result.job / "report.json"),
        left=_left(network, folder, job.dark),
        text=result.err,
    )


def _times(events: Path, at: float) -> tuple[float | None, float | None]:
    """Until the last loss was told, and from then until training went on, as far as the disk had room for it."""
    lines = [json.loads(line) for line in events.read_text().splitlines() if line.endswith("}")]
    told = [event["time"] for event in lines if event["kind"] == "regroup"]
    ons = [event["time"] for event in lines if event["kind"] == "said" and "train on from step" in event["text"]]
    return max(told) - at if told else None, max(ons) - max(told) if told and ons else None


def _samples(report: Path) -> int | None:
    """Of lost workers, from their last steps to the end; with `gossip` new workers read some of them."""
    losses = json.loads(report.read_text())["losses"] if report.exists() else []
    return sum((STEPS - max(loss["step"], 0)) * BATCH for loss in losses) if losses else None


def _saved(path: Path, digests: Collection[str], *, any_rank: bool) -> bool:
    """Whether the file is of the last step, and its weights are those of one of these digests, or any numbers."""
    content = torch.load(path, weights_only=True) if path.exists() else {"step": 0}
    if content["step"] != STEPS:
        return False
    tensors = list(content["model"].values())
    if any_rank:
        return all(bool(t.isfinite().all()) for t in tensors)
    return hashlib.sha256(b"".join(t.numpy().tobytes() for t in tensors)).hexdigest() in digests


def _left(network: Network, folder: Path, dark: str) -> list[str]:
    """Processes and files, once they have had some seconds to go."""
    machines = [machine for machine in network.all if machine.name != dark]

    def looked() -> list[str]:
        saves = [f"{SAVES}: {path.name}" for path in (folder / SAVES).iterdir() if path.name != "model.pt"]
        return [*(left for machine in machines for left in machine.leftovers()), *saves]

    deadline = time.monotonic() + SETTLE_SECONDS
    while (found := looked()) and time.monotonic() < deadline:
        time.sleep(0.1)
    return found
