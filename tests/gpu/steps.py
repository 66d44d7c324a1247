"""A training that exchanges with itself: steps.py DEVICE EXECUTOR ALGORITHM. Nothing in its steps may wait for a GPU.

One GPU takes one rank over NCCL, and a job of one exchanges nothing; so the runtime is told here that it is not alone.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function

from dadt import algorithms
from dadt.config import Config
from dadt.train.runtime import Runtime
from dadt.world import World

BEFORE = 25
"""Steps in which DADT learns: warm-up, and the first gradients of each rank are compared on the host."""
STEPS = 8
WAITS = {"cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy"}


class Alone:
    """A Meet of one rank."""

    secret = b""
    outdated = None

    def __init__(self) -> None:
        self._kept: dict[str, bytes] = {}

    def exchange(self, key: str, blob: bytes) -> list[bytes]:
        return [blob]

    def put(self, key: str, blob: bytes) -> None:
        self._kept[key] = blob

    def get(self, keys: Sequence[str]) -> list[bytes]:
        return [self._kept[key] for key in keys]


class Exchanging(Runtime):
    alone = False

    @property
    def meet(self) -> Alone:
        return Alone()


class Training:
    def __init__(self, device: str, executor: str, algorithm: str) -> None:
        torch.manual_seed(0)
        self.device = device
        self.model = nn.Sequential(nn.Linear(64, 256), nn.BatchNorm1d(256), nn.Tanh(), nn.Linear(256, 1)).to(device)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)
        config = Config(executor=executor, algorithm=algorithm, warmup_steps=5, bucket_mb=0.01)
        self.runtime = Exchanging(World(), config, None, algorithms.find)
        self.runtime.register(self.optimizer)
        self.inputs = torch.randn(32, 64, device=device)

    def step(self) -> None:
        attachment = self.runtime.attachment(self.optimizer)
        assert attachment is not None
        attachment.prediction.apply()
        self.optimizer.zero_grad()
        self.model(self.inputs).pow(2).mean().backward()
        attachment.average_gradients()
        attachment.withhold_gradients()
        self.optimizer.step()
        attachment.stepped()


def waits(profiler: profile) -> list[str]:
    """For the GPU, in the steps."""
    events = profiler.events() or []
    (steps,) = [event for event in events if event.name == "steps" and event.device_type.name == "CPU"]
    begun, ended = steps.time_range.start, steps.time_range.end
    return [e.name for e in events if e.name in WAITS and begun <= e.time_range.start <= ended]


def main(device: str, executor: str, algorithm: str) -> None:
    training = Training(device, executor, algorithm)
    gpu = device == "cuda"
    for _ in range(BEFORE):
        training.step()
    assert (training.runtime.device is not None) == (executor == "nccl")
    first = training.model(training.inputs).pow(2).mean().item()
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if gpu else [])]
    with profile(activities=activities) as profiler, record_function("steps"):
        if gpu:
            torch.cuda.set_sync_debug_mode("error")
        for _ in range(STEPS):
            training.step()
        if gpu:
            torch.cuda.set_sync_debug_mode("default")
    found = waits(profiler)
    assert not found, found
    assert training.model(training.inputs).pow(2).mean().item() < first
    training.runtime.close()
    print("DONE")


if __name__ == "__main__":
    main(*sys.argv[1:])
