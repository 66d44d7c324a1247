"""DistributedDataParallel and its relatives over backend `dadt`: the weights that torch's own Gloo gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness.backend_ranks import Ranks, group
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

STEPS = 4
Weights = dict[str, torch.Tensor]


class Dense(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Flatten(), nn.Linear(64, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 10))


class Convolutional(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(36, 10)
        )


class Branching(nn.Module):
    """Each rank leaves out one branch: with find_unused_parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList(nn.Linear(64, 10) for _ in range(3))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        rank = dist.get_rank()
        return sum(b(images.flatten(1)) for i, b in enumerate(self.branches) if i != rank % 3)  # type: ignore[return-value]


def _data() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(
        torch.randn(64, 1, 8, 8, generator=generator), torch.randint(0, 10, (64,), generator=generator)
    )


def train(executor: str, kind: type[nn.Module], zero: bool = False, **options: Any) -> Weights:
    """Through a DistributedSampler. The ranks start from weights of their own: DDP makes them equal."""
    among = group(executor)
    torch.manual_seed(dist.get_rank())
    model = DistributedDataParallel(kind(), process_group=among, **options)
    if zero:
        from torch.distributed.optim import ZeroRedundancyOptimizer  # imports much, which only the ranks need

        optimizer: Any = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, process_group=among, lr=0.01)
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    sampler: Any = DistributedSampler(_data(), dist.get_world_size(among), dist.get_rank(among), seed=3)
    loader = DataLoader(_data(), 8, sampler=sampler)
    for _, (images, labels) in zip(range(STEPS), loader, strict=False):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
    dist.barrier(among)
    if executor != "torch":  # whose Gloo waits in its destructor, with the GIL, for a thread that waits for the GIL
        dist.destroy_process_group(among)
    return {name: value.clone() for name, value in model.module.state_dict().items()}


def both(kind: type[nn.Module], tolerance: float, executor: str = "auto", **options: Any) -> Weights:
    theirs = train("torch", kind, **options)
    ours = train(executor, kind, **options)
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)
    return ours


def _equal_parameters(everyone: list[Weights]) -> None:
    """Statistics of batches are each rank's own."""
    for weights in everyone[1:]:
        for name, value in weights.items():
            assert "running" in name or value.equal(everyone[0][name]), name


@pytest.mark.parametrize("kind", [Dense, Convolutional])
@pytest.mark.parametrize("options", [{}, {"bucket_cap_mb": 0.001, "gradient_as_bucket_view": True}], ids=["", "views"])
def test_two_ranks_train_bit_for_bit_as_over_gloo(two: Ranks, kind: type[nn.Module], options: dict[str, Any]) -> None:
    """a + b is b + a."""
    _equal_parameters(two.run(_both_with, kind, 0.0, options))


def _both_with(kind: type[nn.Module], tolerance: float, options: dict[str, Any]) -> Weights:
    return both(kind, tolerance, **options)


@pytest.mark.parametrize("kind", [Dense, Convolutional])
def test_four_ranks_train_as_over_gloo(four: Ranks, kind: type[nn.Module]) -> None:
    _equal_parameters(four.run(_both_with, kind, 1e-5, {}))


def test_over_this_packages_gloo(two: Ranks) -> None:
    two.run(_both_with, Dense, 0.0, {"executor": "gloo"})


def test_unused_parameters(two: Ranks) -> None:
    _equal_parameters(two.run(_both_with, Branching, 0.0, {"find_unused_parameters": True}))


def test_a_sharded_optimizer(two: Ranks) -> None:
    _equal_parameters(two.run(_both_with, Dense, 0.0, {"zero": True}))


def accumulate(executor: str) -> Weights:
    among = group(executor)
    torch.manual_seed(0)
    model = DistributedDataParallel(Dense(), process_group=among)
    images, labels = _data()[dist.get_rank() * 8 : dist.get_rank() * 8 + 8]
    with model.no_sync():
        nn.functional.cross_entropy(model(images), labels).backward()
    nn.functional.cross_entropy(model(images * 2), labels).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    return {name: p.grad.clone() for name, p in model.named_parameters()}  # type: ignore[union-attr]


def both_accumulate() -> None:
    torch.testing.assert_close(accumulate("auto"), accumulate("torch"), rtol=0, atol=0)


def test_accumulation_and_clipping(two: Ranks) -> None:
    two.run(both_accumulate)


def hooked() -> None:
    """A communication hook of torch's: gradients travel as 16-bit floats."""
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

    found = []
    for executor in ("auto", "torch"):
        among = group(executor)
        torch.manual_seed(0)
        model = DistributedDataParallel(nn.Linear(64, 4), process_group=among)
        model.register_comm_hook(among, fp16_compress_hook)
        model(torch.full((2, 64), 0.1 + dist.get_rank())).sum().backward()
        found.append([p.grad for p in model.parameters()])
    torch.testing.assert_close(*found, rtol=0, atol=0)


def test_a_communication_hook(two: Ranks) -> None:
    two.run(hooked)


def shard() -> None:
    """torch's fully sharded data parallelism: gathers and reduce-scatters through the functional collectives."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    found = []
    for executor in ("auto", "torch"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 3))
        fully_shard(model, mesh=DeviceMesh.from_group(group(executor), "cpu"))
        optimizer = torch.optim.Adam(model.parameters())
        for step in range(2):
            model(torch.full((2, 16), 0.1 * step + dist.get_rank())).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append([p.full_tensor() for p in model.parameters()])  # type: ignore[attr-defined]
    torch.testing.assert_close(*found, rtol=0, atol=0)


def test_fully_sharded(two: Ranks) -> None:
    two.run(shard)
