"""Measures what DADT adds to a step on one GPU: python -m benchmarks.gpu [resnet50] [gpt2-small]

Contenders are processes on the same GPU that run at the same time and train in turn: the script by itself, under `dadt
run -np 1`, and with DADT where the rank exchanges with itself, so that only DADT's own work is added (over NCCL, which
moves nothing then; over `null`, gradients go through host memory). At the end the steps of each are profiled.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from time import perf_counter, sleep
from typing import IO, Any, NamedTuple

from dadt_cli.bench.folder import folder
from dadt_cli.bench.line import KEY, Reception, connect, listen
from dadt_cli.bench.party import accept, end, failure

HERE = Path(__file__).resolve()
WARMUP = 30
"""Number of steps before the first one that counts, since the host compares the first gradients of each rank."""
PROFILED = 5
ITSELF = "itself"
HOW = {
    "python": [],
    "dadt run -np 1": ["-m", "dadt_cli", "run", "-np", "1", "-x", KEY],
    "sync": [ITSELF, "sync", "nccl"],
    "pipe": [ITSELF, "pipe", "nccl"],
    "pipe, staged": [ITSELF, "pipe", "null"],
}
"""The contenders, and how each is run."""
LAUNCHES = {"cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel", "cuLaunchKernelEx"}
WAITS = {"cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy"}


# A contender ------------------------------------------------------------------------------------------------------


class Case(NamedTuple):
    """A model, its optimizer and a step's loss."""

    model: Any
    optimizer: Any
    loss: Callable[[], Any]


def resnet50(device: str, small: bool) -> Case:
    """Return a case: channels_last, bfloat16 autocast, SGD with momentum; 128 images of 224 x 224."""
    import torch

    from dadt_cli.bench import models

    workload = models.make("resnet18" if small else "resnet50")
    model = workload.model.to(device, memory_format=torch.channels_last)
    images, labels = (part.to(device) for part in workload.batch(2 if small else 128))
    images = images.to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9, weight_decay=1e-4)
    return Case(model, optimizer, lambda: workload.loss(model, images, labels))


def gpt2_small(device: str, small: bool) -> Case:
    """Return a case: compiled, bfloat16 autocast, fused AdamW, clipped gradients; 16 times 1,024 tokens."""
    import torch
    from torch import nn

    from dadt_cli.bench.models import transformer

    if small:
        transformer.WIDTH, transformer.DEPTH = 96, 2
    model = transformer.Gpt(50257 if not small else 500).to(device)
    tokens = torch.randint(0, 500 if small else 50257, (2, 64) if small else (16, 1024), device=device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    compiled = torch.compile(model) if device == "cuda" else model

    def loss() -> Any:
        return nn.functional.cross_entropy(compiled(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())

    return Case(model, optimizer, loss)


CASES: dict[str, Callable[[str, bool], Case]] = {"resnet50": resnet50, "gpt2-small": gpt2_small}


class GpuTraining:
    def __init__(self, case: Case, device: str, clip: bool) -> None:
        self._case, self._device, self._clip = case, device, clip

    def step(self) -> None:
        import torch

        self._case.optimizer.zero_grad()
        with torch.autocast(self._device, torch.bfloat16):
            loss = self._case.loss()
        loss.backward()
        if self._clip:
            torch.nn.utils.clip_grad_norm_(self._case.model.parameters(), 1.0)
        self._case.optimizer.step()

    def finish(self) -> None:
        import torch

        if self._device == "cuda":
            torch.cuda.synchronize()

    def seconds(self, steps: int) -> float:
        self.finish()
        begun = perf_counter()
        for _ in range(steps):
            self.step()
        self.finish()
        return (perf_counter() - begun) / steps

    def about(self) -> dict[str, Any]:
        """Return memory, and the launches of a step."""
        import torch

        gpu = self._device == "cuda"
        parameters = list(self._case.model.parameters())
        weights = sum(p.nbytes for p in parameters)
        peak = torch.cuda.max_memory_allocated() if gpu else 0
        held = torch.cuda.memory_allocated() if gpu else 0
        activities = [torch.profiler.ProfilerActivity.CPU]
        activities += [torch.profiler.ProfilerActivity.CUDA] if gpu else []
        with torch.profiler.profile(activities=activities) as profiler:
            self.seconds(PROFILED)
        events = profiler.events() or []
        # The profiler repeats each host span on the GPU, under the span's name.
        spans = {e.name for e in events if e.device_type.name == "CPU"}
        on_gpu = [e for e in events if e.device_type.name == "CUDA" and e.name not in spans]
        copies = [e for e in on_gpu if e.name.startswith(("Memcpy", "Memset"))]

        times: Counter[str] = Counter()
        for e in on_gpu:
            times[e.name[:80]] += e.time_range.elapsed_us()

        def each(number: float) -> float:
            return round(number / PROFILED, 1)

        return {
            "tensors": len(parameters),
            "weights": weights,
            "peak": peak,
            "held": held,
            "kernels": each(len(on_gpu) - len(copies)),
            "copies": each(len(copies)),
            "longest": [(name, each(us)) for name, us in times.most_common(12)],
            "gpu_ms": each(sum(e.time_range.elapsed_us() for e in on_gpu) / 1e3),
            "launches": each(sum(e.name in LAUNCHES for e in events)),
            # The waits of `finish`, before and after all steps, are not part of the steps.
            "waits": each(sum(e.name in WAITS for e in events) - 2 * gpu),
        }


def train(asked: argparse.Namespace) -> None:
    """Train as one contender, in its own process, which receives the number of steps of each turn over the
    connection."""
    import torch

    if asked.itself:
        from benchmarks import itself

        algorithm, executor = asked.itself
        executor = executor if asked.device == "cuda" else "null"
        itself.hook(algorithm=algorithm, executor=executor, warmup_steps="5", seeding="0")
    torch.manual_seed(0)
    with connect(asked.connect) as line:
        training = GpuTraining(CASES[asked.train](asked.device, asked.small), asked.device, asked.train != "resnet50")
        training.seconds(WARMUP)
        line.send(asked.name)
        while (steps := line.recv()) is not None:
            line.send(training.seconds(steps) if steps else training.about())


# The measuring process ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class GpuRow:
    """What one contender has reached with one model."""

    model: str
    name: str
    seconds: Any
    """Interval of the seconds that a step takes."""
    per_first: Any
    """Interval of a step's seconds divided by the first contender's, round by round."""
    about: dict[str, Any]


def start(
    reception: Reception, model: str, names: Sequence[str], asked: argparse.Namespace, stack: ExitStack
) -> list[Connection]:
    """Start the contenders. Returns their connections once all are ready."""
    place = stack.enter_context(folder())
    said: IO[bytes] = stack.enter_context((place / "said").open("w+b"))
    path = os.pathsep.join([str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "PYTHONPATH": path, KEY: reception.key}
    processes: list[subprocess.Popen[bytes]] = []
    stack.callback(end, processes)
    for name in names:
        how = HOW[name]
        by_itself = how[:1] == [ITSELF]
        through = [*how, "--log-dir", str(place / "logs")] if how and not by_itself else []
        command = [sys.executable, *through, str(HERE), "--train", model, "--name", name, "--device", asked.device]
        command += ["--connect", reception.where, *(["--small"] if asked.small else [])]
        command += ["--itself", *how[1:]] if by_itself else []
        processes.append(subprocess.Popen(command, env=env, stdout=said, stderr=subprocess.STDOUT))
    came = {}
    for _ in names:
        line = stack.enter_context(accept(reception, processes, model, said))
        stack.callback(dismiss, line)
        try:
            came[line.recv()] = line
        except EOFError:
            while all(process.poll() is None for process in processes):
                sleep(0.1)  # waits for the last output of the contender, which comes before its end
            raise failure(model, "a contender ended", said) from None
    return [came[name] for name in names]


def dismiss(line: Connection) -> None:
    with suppress(OSError):  # the contender has ended already, and whoever waited for it reports why
        line.send(None)


def measure(model: str, asked: argparse.Namespace) -> list[GpuRow]:
    from dadt_cli.bench.ratio import interval, ratio

    names = asked.only or list(HOW)
    with ExitStack() as stack:
        reception = stack.enter_context(listen(False, len(names)))
        begun = perf_counter()
        lines = start(reception, model, names, asked, stack)
        print(f"{model}: contenders are ready after {perf_counter() - begun:.0f} s", file=sys.stderr, flush=True)
        turns: list[list[float]] = [[] for _ in names]
        for number in range(asked.rounds):
            for i in range(len(names)) if number % 2 == 0 else reversed(range(len(names))):
                lines[i].send(asked.steps)
                turns[i].append(lines[i].recv())
        about = []
        for line in lines:
            line.send(0)
            about.append(line.recv())
    return [
        GpuRow(model, name, interval(seconds), ratio(seconds, turns[0]), found)
        for name, seconds, found in zip(names, turns, about, strict=True)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=list(CASES), help=f"of {', '.join(CASES)} (all)")
    parser.add_argument("--rounds", type=int, default=20, help="turns of each contender (20)")
    parser.add_argument("--steps", type=int, default=10, help="steps of a turn (10)")
    parser.add_argument("--only", action="append", choices=list(HOW), help="contenders; the first is compared with")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--small", action="store_true", help="models so small that they show only that this works")
    parser.add_argument("--json", metavar="FILE", help="also write the figures as JSON; - for stdout")
    parser.add_argument("--train", help=argparse.SUPPRESS)
    parser.add_argument("--name", help=argparse.SUPPRESS)
    parser.add_argument("--connect", help=argparse.SUPPRESS)
    parser.add_argument("--itself", nargs=2, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.train:
        train(asked)
        return
    from dadt_cli.bench.figure import BenchResults, Outputs, ResultTable
    from dadt_cli.bench.ratio import cell

    outputs = Outputs(json=asked.json)
    rows = [row for model in asked.models for row in measure(model, asked)]
    first = {row.model: row for row in reversed(rows)}

    def count(name: str) -> Callable[[GpuRow], str]:
        return lambda row: f"{row.about[name]:g}"

    columns: dict[str, Callable[[GpuRow], str]] = {
        "model": lambda row: row.model,
        "": lambda row: row.name,
        "ms": lambda row: cell(row.seconds, 1e3),
        "/ first": lambda row: cell(row.per_first),
        **{name: count(name) for name in ("kernels", "launches", "copies", "waits")},
        "GPU ms": count("gpu_ms"),
        "peak\n/ weights": lambda row: f"{row.about['peak'] / row.about['weights']:.2f}",
        "+ held": lambda row: f"{(row.about['held'] - first[row.model].about['held']) / row.about['weights']:.2f}",
    }
    title = f"steps on one GPU, {asked.rounds} rounds of {asked.steps}"
    command = " ".join(["python", "-m", "benchmarks.gpu", *sys.argv[1:]])
    BenchResults(rows, [ResultTable.of(title, rows, columns)], about={"command": command}).report(title, outputs)


if __name__ == "__main__":
    main()
