"""A training that exchanges with itself, in whose steps nothing may wait for a GPU.

Run as steps.py DEVICE EXECUTOR ALGORITHM OPTIMIZER. One GPU takes one rank over NCCL, and a job of one exchanges
nothing: see benchmarks/itself.py.
"""

from __future__ import annotations

import sys

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function

from benchmarks.itself import exchange_alone
from dadt import algorithms
from dadt.config import Config
from dadt.train.runtime import Runtime
from dadt.world import World

BEFORE = 60
"""Steps in which DADT learns: warm-up, and the first gradients of each rank are compared on the host."""
STEPS = 12
"""Among them is one that looks whether the script has changed predicted weights."""
MAKE = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.001, fused=True),
}
WAITS = {"cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy"}


class Training:
    def __init__(self, device: str, executor: str, algorithm: str, optimizer: str) -> None:
        torch.manual_seed(0)
        self.device = device
        self.model = nn.Sequential(nn.Linear(64, 256), nn.BatchNorm1d(256), nn.Tanh(), nn.Linear(256, 1)).to(device)
        self.optimizer = MAKE[optimizer](self.model.parameters())
        self.clips = optimizer == "adamw"
        config = Config(executor=executor, algorithm=algorithm, warmup_steps=5, bucket_mb=0.01)
        exchange_alone()
        self.runtime = Runtime(World(), config, None, algorithms.find)
        self.runtime.optimizers.register(self.optimizer)
        self.inputs = torch.randn(32, 64, device=device)

    def loss(self) -> float:
        with torch.no_grad():
            return self.model(self.inputs).pow(2).mean().item()

    def step(self) -> None:
        attachment = self.runtime.attachment(self.optimizer)
        assert attachment is not None
        attachment.prediction.apply()
        self.optimizer.zero_grad()
        self.model(self.inputs).pow(2).mean().backward()
        attachment.average_gradients()
        if self.clips:
            nn.utils.clip_grad_norm_(self.model.parameters(), 0.01)
        attachment.withhold_gradients()
        self.optimizer.step()
        attachment.stepped()


def waits(profiler: profile) -> list[str]:
    """For the GPU, in the steps."""
    events = profiler.events() or []
    (steps,) = [event for event in events if event.name == "steps" and event.device_type.name == "CPU"]
    begun, ended = steps.time_range.start, steps.time_range.end
    return [e.name for e in events if e.name in WAITS and begun <= e.time_range.start <= ended]


def main(device: str, executor: str, algorithm: str, optimizer: str) -> None:
    training = Training(device, executor, algorithm, optimizer)
    gpu = device == "cuda"
    first = training.loss()
    for _ in range(BEFORE):
        training.step()
    assert (training.runtime.ranks.device is not None) == (executor == "nccl")
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
    assert training.loss() < first
    training.runtime.close()
    print("DONE")


if __name__ == "__main__":
    main(*sys.argv[1:])
