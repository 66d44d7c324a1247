"""Scripts in the spelling of the first DADT."""

from __future__ import annotations

import pytest
import torch
from harness.job import run_api as run

SCRIPT = """
    import dadt.pytorch as dadt
    dadt.{start}
    r, n = dadt.rank(), dadt.size()
    x = torch.arange(4.0) + r
    sparse = torch.sparse_coo_tensor([[r, 2]], [1.0, 2.0], (9,))
    found = {{
        "broad_cast": [dadt.broad_cast(x, "x"), dadt.broad_cast(3, x)],
        "all_reduce": [dadt.all_reduce(x, "x"), dadt.all_reduce(3, x), dadt.all_reduce(x, "x", 1 / n)],
        "async": [dadt.all_reduce_async(7, x * i) for i in range(3)],
        "coo": [dadt.coo_all_reduce(1, sparse).to_dense()],
        "coo async": [dadt.coo_all_reduce_async(1, sparse).to_dense() for _ in range(2)],
        "who": [r, n, dadt.local_rank(), dadt.local_size(), dadt.initialized()],
    }}
    net = torch.nn.Linear(2, 1)
    optimizer = torch.optim.Adadelta(net.parameters(), lr=1.0)
    distributed = dadt.DistributedOptimizer(optimizer=optimizer)
    for _ in range(3):
        distributed.zero_grad()
        net(torch.randn(4, 2)).sum().backward()
        distributed.step()
    found["weights"] = net.state_dict()
    dadt.barrier()
    dadt.local_barrier()
    report(found)
    dadt.shutdown()
"""
STARTS = [
    "init(cycle_duration_ms=3, broad_cast_executor='GLOO', all_reduce_executor='shm', all_reduce_buffer_size=1 << 20)",
    pytest.param("initialize(5, 'shm', 64 * 1024 * 1024)", marks=pytest.mark.slow),
]


@pytest.mark.parametrize("start", STARTS)
def test_old_scripts(tmp_path, start) -> None:
    first, second = run(tmp_path, SCRIPT.format(start=start)).ranks
    x, total = torch.arange(4.0), torch.arange(4.0) * 2 + 1
    for rank, found in enumerate((first, second)):
        assert found["who"] == [rank, 2, rank, 2, True]
        expected = {
            "broad_cast": [x, x],
            "all_reduce": [total, total, total / 2],
            "async": [torch.zeros(4), torch.zeros(4), total],
            "coo": [torch.tensor([1.0, 1, 4, 0, 0, 0, 0, 0, 0])],
            "coo async": [torch.zeros(9), torch.tensor([1.0, 1, 4, 0, 0, 0, 0, 0, 0])],
        }
        for name, tensors in expected.items():
            torch.testing.assert_close(found[name], tensors)
    torch.testing.assert_close(first["weights"], second["weights"], rtol=0, atol=0)


def test_a_config_in_a_world_of_one(tmp_path) -> None:
    script = """
        import dadt.pytorch as dadt
        config = dadt.Config()
        config.cycle_duration_ms = 3
        config.broad_cast_executor = "mpi"
        config.all_reduce_executor = "mpi"
        config.all_reduce_buffer_size = 64 * 1024 * 1024
        dadt.initialize(config)
        report(dadt.all_reduce(torch.ones(2), "x"))
    """
    assert run(tmp_path, script, launcher="python", np=1).ranks[0].tolist() == [1.0, 1.0]


def test_a_gpu_that_is_not_there(tmp_path) -> None:
    script = "import dadt.pytorch as dadt; dadt.initialize(gpu_device_id=0)"
    done = run(tmp_path, script, launcher="python", np=1, code=1, CUDA_VISIBLE_DEVICES="")
    assert "gpu_device_id 0: torch finds no CUDA device; leave it out" in done.output
