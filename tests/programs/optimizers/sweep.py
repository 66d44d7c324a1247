"""Tries every optimizer alone, with `sync` and with `pipe`, and says what becomes of each.

sweep.py [--write docs/compatibility.md] [--json FILE] [NAME ...]: a name is a part of MODULE:CLASS. Takes minutes.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from recipes import NOT_TRIED, OF_ITS_OWN, PACKAGES
from recipes import names as every

HERE = Path(__file__).parent
SECONDS = 900.0
"""That one job may take."""
BEGIN, END = "<!-- optimizers: written by tests/programs/optimizers/sweep.py -->", "<!-- end of optimizers -->"
LATE = "as alone with `sync`, late with `pipe`"


class Verdict(NamedTuple):
    """What becomes of one."""

    text: str
    fault: str
    """What is wrong with it; empty where nothing is."""


def trained(folder: Path, names: Sequence[str], command: Sequence[str], ranks: int, **env: str) -> dict[str, Any]:
    """What each rank has told of each optimizer. A job ends with the first that fails, and another goes on after it."""
    found: dict[str, list[dict[str, Any]]] = {}
    left = list(names)
    while left:
        at = folder / f"from-{len(names) - len(left)}"
        at.mkdir(parents=True)
        (at / "names.json").write_text(json.dumps(left))
        code = _run([*command, str(HERE / "train.py"), str(at)], at, env)
        files = [at / f"rank{rank}.jsonl" for rank in range(ranks)]
        told = [[json.loads(line) for line in f.read_text().splitlines()] if f.exists() else [] for f in files]
        for each in (each for rank in told for each in rank):
            found.setdefault(each["name"], []).append(each)
        count = max(map(len, told))
        if code == 0 and count == len(left):
            break
        if not any("error" in each for each in found.get(left[max(count - 1, 0)], [])):  # it ended without a word
            count = min(count, len(left) - 1)
            found[left[count]] = [{"name": left[count], "error": (at / "said").read_text()[-2000:]}]
            count += 1
        left = left[count:]
    return found


def _run(command: Sequence[str], folder: Path, env: Mapping[str, str]) -> int:
    path = f"{HERE}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    with (folder / "said").open("w") as said:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, **env}
        done = subprocess.Popen(command, cwd=folder, stdout=said, stderr=said, env=environment)
        try:
            return done.wait(SECONDS)
        except subprocess.TimeoutExpired:
            done.send_signal(signal.SIGTERM)
            return done.wait(60)


def sweep(names: Sequence[str], folder: Path, jobs: int) -> dict[str, Verdict]:
    """jobs: at a time."""
    python = [sys.executable]
    dadt = [str(Path(sys.executable).with_name("dadt")), "run", "-np", "2", "--batch", "global"]
    tried = [name for name in names if _kind(name) not in NOT_TRIED]
    ways: list[tuple[list[str], int, dict[str, str]]] = [
        (python, 1, {}),
        (python, 1, {"HALVES": "1"}),
        ([*dadt, "--algorithm", "sync"], 2, {}),
        ([*dadt, "--algorithm", "pipe", "--warmup-steps", "8"], 2, {}),
    ]
    parts = [tried[at::jobs] for at in range(jobs) if tried[at::jobs]]
    with ThreadPoolExecutor(jobs) as pool:
        waiting = [
            [pool.submit(trained, folder / f"{i}-{j}", part, command, ranks, **env) for j, part in enumerate(parts)]
            for i, (command, ranks, env) in enumerate(ways)
        ]
        runs = [{name: told for each in way for name, told in each.result().items()} for way in waiting]
    found = {name: judge(name, *(run[name] for run in runs)) for name in tried}
    skipped = {name: Verdict(f"not tried: {NOT_TRIED[_kind(name)]}", "") for name in names if name not in found}
    return {**found, **skipped}


def judge(name: str, *runs: list[dict[str, Any]]) -> Verdict:
    """runs: alone; alone, rounded as on two ranks; with `sync`; with `pipe`."""
    alone, halves, sync, pipe = runs
    if "error" in alone[0]:
        return Verdict("fails alone", f"alone: {alone[0]['error']}")
    refused = [each["error"] for each in (*sync, *pipe) if "error" in each]
    if refused:
        text = next((e.partition(": ")[2] for e in refused if e.startswith(("ConfigError: ", "DadtError: "))), "")
        return Verdict(f"refused: {text.partition(':')[0].replace(_kind(name), 'it', 1)}", "" if text else refused[0])
    for how, ranks in (("sync", sync), ("pipe", pipe)):
        if len(ranks) != 2 or ranks[0]["weights"] != ranks[1]["weights"]:
            return Verdict("", f"{how}: the replicas differ")
        if not all(-1e6 < loss < 1e6 for loss in ranks[0]["losses"]):
            return Verdict("", f"{how}: the loss is {ranks[0]['losses'][-1]}")
    if why := OF_ITS_OWN.get(_kind(name)):
        return Verdict(f"replicas equal, late with `pipe`; not as alone: {why}", "")
    rounding = distance(alone[0], halves[0])
    # Some compute in single precision inside.
    if (far := distance(alone[0], sync[0])) > 1e-7 + 100 * rounding:
        return Verdict("", f"sync: {far:.1e} from the weights of one process, where rounding is {rounding:.1e}")
    if pipe[0]["late"]:
        return Verdict(LATE, "")
    why = pipe[0]["why"].replace(_kind(name), "it", 1)
    return Verdict(f"as alone, and synchronous with `pipe`, as {why}", "" if why else "pipe: not late, and no reason")


def distance(one: dict[str, Any], other: dict[str, Any]) -> float:
    return max(abs(a - b) for a, b in zip(one["weights"], other["weights"], strict=True))


def table(found: Mapping[str, Verdict]) -> str:
    """By verdict, the most frequent ones first."""
    by_text: dict[str, list[str]] = {}
    for name, verdict in found.items():
        by_text.setdefault(verdict.text, []).append(name)
    lines = ["| What becomes of it | Optimizers |", "|---|---|"]
    for text, names in sorted(by_text.items(), key=lambda each: (-len(each[1]), each[0])):
        lines.append(f"| {text} ({len(names)}) | {'<br>'.join(_by_package(names))} |")
    return "\n".join(lines)


def _by_package(names: Sequence[str]) -> Iterator[str]:
    for module, package in PACKAGES.items():
        mine = [_kind(name) for name in names if name.startswith(f"{module}:")]
        if mine:
            version = importlib.metadata.version(package).partition("+")[0]
            yield f"{package} {version}: {', '.join(mine)}"


def _kind(name: str) -> str:
    return name.partition(":")[2]


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*")
    parser.add_argument("--write", type=Path)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--folder", type=Path, help="for what the jobs say; kept")
    parser.add_argument("--jobs", type=int, default=2)
    given = parser.parse_args()
    names = [name for name in every() if not given.names or any(part in name for part in given.names)]
    with tempfile.TemporaryDirectory() as folder:
        found = sweep(names, given.folder or Path(folder), given.jobs)
    for name, verdict in found.items():
        if verdict.fault:
            print(f"{name}: {verdict.fault}")
    if given.json:
        given.json.write_text(json.dumps({"found": {n: v._asdict() for n, v in found.items()}, "table": table(found)}))
    if given.write:
        before, _, rest = given.write.read_text().partition(BEGIN)
        given.write.write_text(f"{before}{BEGIN}\n\n{table(found)}\n\n{END}{rest.partition(END)[2]}")
    return int(any(verdict.fault for verdict in found.values()))


if __name__ == "__main__":
    sys.exit(main())
