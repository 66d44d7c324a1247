"""Every collective of torch.distributed, against torch's own Gloo."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness.backend_ranks import Ranks, group

DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int8,
    torch.uint8,
]
SHAPE = (3, 5)
_groups: dict[str, Any] = {}


def _group(executor: str) -> Any:
    if executor not in _groups:
        _groups[executor] = group(executor)
    return _groups[executor]


def _values(dtype: torch.dtype, shape: tuple[int, ...] = SHAPE, salt: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * salt + dist.get_rank())
    return torch.randint(0, 6, shape, generator=generator).to(dtype)


def all_reduce(dtype: torch.dtype, among: Any, n: int) -> Any:
    results = []
    for op in (dist.ReduceOp.SUM, dist.ReduceOp.PRODUCT, dist.ReduceOp.MIN, dist.ReduceOp.MAX):
        results.append(_values(dtype))
        dist.all_reduce(results[-1], op, group=among)
    return results


def bits(dtype: torch.dtype, among: Any, n: int) -> Any:
    results = []
    for op in (dist.ReduceOp.BAND, dist.ReduceOp.BOR, dist.ReduceOp.BXOR):
        results.append(_values(torch.int64))
        dist.all_reduce(results[-1], op, group=among)
    return results


def strided(dtype: torch.dtype, among: Any, n: int) -> Any:
    """Transposed, scalar, empty."""
    results = [_values(dtype).t(), _values(dtype, ()), _values(dtype, (0, 3))]
    for t in results:
        dist.all_reduce(t, group=among)
        dist.broadcast(t, n - 1, group=among)
    return results


def reduce(dtype: torch.dtype, among: Any, n: int) -> Any:
    tensor = _values(dtype)
    dist.reduce(tensor, n - 1, group=among)
    return tensor if dist.get_rank() == n - 1 else None


def broadcast(dtype: torch.dtype, among: Any, n: int) -> Any:
    tensor = _values(dtype)
    dist.broadcast(tensor, n - 1, group=among)
    return tensor


def all_gather(dtype: torch.dtype, among: Any, n: int) -> Any:
    results = [torch.empty(SHAPE, dtype=dtype) for _ in range(n)]
    dist.all_gather(results, _values(dtype), group=among)
    return results


def all_gather_single(dtype: torch.dtype, among: Any, n: int) -> Any:
    result = torch.empty((n * 3, 5), dtype=dtype)
    among._allgather_base(result, _values(dtype)).wait()
    return result


def gather(dtype: torch.dtype, among: Any, n: int) -> Any:
    results = [torch.empty(SHAPE, dtype=dtype) for _ in range(n)] if dist.get_rank() == 1 else None
    dist.gather(_values(dtype), results, 1, group=among)
    return results


def scatter(dtype: torch.dtype, among: Any, n: int) -> Any:
    result = torch.empty(SHAPE, dtype=dtype)
    given = [_values(dtype, salt=r) for r in range(n)] if dist.get_rank() == 1 else None
    dist.scatter(result, given, 1, group=among)
    return result


def reduce_scatter(dtype: torch.dtype, among: Any, n: int) -> Any:
    result = torch.empty(SHAPE, dtype=dtype)
    among._reduce_scatter_base(result, _values(dtype, (n * 3, 5)), dist.ReduceScatterOptions()).wait()
    return result


def all_to_all_single(dtype: torch.dtype, among: Any, n: int) -> Any:
    """Rank r sends r + 1 rows to each."""
    rank = dist.get_rank()
    results = [torch.empty((n * 2, 5), dtype=dtype), torch.empty((sum(range(1, n + 1)), 5), dtype=dtype)]
    dist.all_to_all_single(results[0], _values(dtype, (n * 2, 5)), group=among)
    rows = [rank + 1] * n
    dist.all_to_all_single(results[1], _values(dtype, (sum(rows), 5)), [r + 1 for r in range(n)], rows, group=among)
    return results


def all_to_all(dtype: torch.dtype, among: Any, n: int) -> Any:
    results = [torch.empty((r + 1, 2), dtype=dtype) for r in range(n)]
    given = [_values(dtype, (dist.get_rank() + 1, 2), r) for r in range(n)]
    if dist.get_backend(among) == "gloo":  # which has it not
        for r in range(n):
            dist.scatter(results[r], given if r == dist.get_rank() else None, r, group=among)
    else:
        dist.all_to_all(results, given, group=among)
    return results


def coalesced(dtype: torch.dtype, among: Any, n: int) -> Any:
    results = [_values(dtype), _values(dtype, (7,))]
    with dist._coalescing_manager(among, async_ops=True) as pending:
        for t in results:
            dist.all_reduce(t, group=among)
    pending.wait()
    return results


def objects(dtype: torch.dtype, among: Any, n: int) -> Any:
    mine = {"rank": dist.get_rank(), "values": _values(dtype)}
    every: list[Any] = [None] * n
    dist.all_gather_object(every, mine, group=among)
    one = [mine]
    dist.broadcast_object_list(one, n - 1, group=among)
    scattered: list[Any] = [None]
    dist.scatter_object_list(scattered, [r * 11 for r in range(n)] if dist.get_rank() == 0 else None, 0, among)
    return [each["values"] for each in every], one[0]["values"], scattered


VERBS = [
    all_reduce,
    bits,
    strided,
    reduce,
    broadcast,
    all_gather,
    all_gather_single,
    gather,
    scatter,
    reduce_scatter,
    all_to_all_single,
    all_to_all,
    coalesced,
    objects,
]


def against_gloo(executor: str, verb: Any, dtypes: list[torch.dtype]) -> None:
    for dtype in dtypes:
        ours = verb(dtype, _group(executor), dist.get_world_size())
        theirs = verb(dtype, _group("torch"), dist.get_world_size())
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0, msg=lambda text: f"{dtype}: {text}")


@pytest.mark.parametrize("verb", VERBS, ids=lambda verb: verb.__name__)
@pytest.mark.parametrize("executor", ["auto", "gloo"])
def test_two_ranks_get_what_gloo_gives(two: Ranks, executor: str, verb: Any) -> None:
    two.run(against_gloo, executor, verb, DTYPES)


@pytest.mark.parametrize("verb", VERBS, ids=lambda verb: verb.__name__)
def test_four_ranks_get_what_gloo_gives(four: Ranks, verb: Any) -> None:
    four.run(against_gloo, "auto", verb, [torch.float32, torch.int64])


def more_than_gloo() -> None:
    """What Gloo cannot do: means, bools, complex numbers."""
    rank, n = dist.get_rank(), dist.get_world_size()
    mean = torch.tensor([rank, 2.0])
    dist.all_reduce(mean, dist.ReduceOp.AVG)
    torch.testing.assert_close(mean, torch.tensor([(n - 1) / 2, 2.0]))
    flags = torch.tensor([True, rank == 0, False])
    dist.all_reduce(flags)
    assert flags.tolist() == [True, True, False]
    phasor = torch.tensor([complex(rank, 1)])
    dist.all_reduce(phasor)
    assert phasor.item() == complex(sum(range(n)), n)


def test_means_bools_and_complex_numbers(four: Ranks) -> None:
    four.run(more_than_gloo)


def subgroups() -> list[Any]:
    """Groups that overlap, ranks in an order of their own, and a group of one."""
    rank = dist.get_rank()
    found = []
    for members in ([0, 2], [1, 3], [3, 0, 1], [2], [0, 1, 2, 3]):
        among = dist.new_group(members, backend="dadt", use_local_synchronization=False)
        if rank in members:
            tensor = torch.tensor([1 << rank])
            dist.all_reduce(tensor, group=among)
            dist.broadcast(tensor, members[-1], group=among)
            every = [torch.empty(1, dtype=torch.int64) for _ in members]
            dist.all_gather(every, torch.tensor([rank]), group=among)
            assert [int(e) for e in every] == sorted(members)
            dist.destroy_process_group(among)
            found.append(int(tensor))
    return found


def test_groups_of_some_ranks(four: Ranks) -> None:
    assert four.run(subgroups) == [[5, 11, 15], [10, 11, 15], [5, 4, 15], [10, 11, 15]]


def in_any_order_of_waiting() -> None:
    rank, n = dist.get_rank(), dist.get_world_size()
    tensors = [torch.full((1000,), float(rank + i)) for i in range(20)]
    works = [dist.all_reduce(t, async_op=True) for t in tensors]
    dist.all_reduce(torch.ones(10), async_op=True)  # nobody waits for it, or holds its memory
    last = works[-1].get_future().then(lambda future: future.value()[0].sum().item())
    for work in reversed(works):
        assert work.wait()
    assert all(work.is_completed() and work.is_success() for work in works)
    for i, t in enumerate(tensors):
        assert t.eq(sum(range(n)) + i * n).all()
    assert last.wait() == tensors[-1].sum().item()
    assert works[0].result()[0] is tensors[0]
    late = works[1].get_future()  # there at once, as the results are
    assert late.done() and late.value()[0] is tensors[1]


def test_asynchronous_operations(two: Ranks) -> None:
    two.run(in_any_order_of_waiting)


def functional() -> None:
    from torch.distributed import _functional_collectives as collectives

    rank, n = dist.get_rank(), dist.get_world_size()
    total = collectives.all_reduce(torch.ones(3) * rank, "sum", dist.group.WORLD) + 0
    assert total.tolist() == [sum(range(n))] * 3
    every = torch.ops._c10d_functional.wait_tensor(
        torch.ops._c10d_functional.all_gather_into_tensor(torch.ones(2) * rank, n, dist.group.WORLD.group_name)
    )
    assert every.tolist() == [r for r in range(n) for _ in range(2)]
    ops, group = torch.ops._c10d_functional, dist.group.WORLD.group_name
    several = ops.all_gather_into_tensor_coalesced([torch.ones(1) * rank, torch.ones(2) * rank], n, group)
    gathered = [ops.wait_tensor(each).tolist() for each in several]
    assert gathered == [[*range(n)], [r for r in range(n) for _ in range(2)]]
    several = ops.reduce_scatter_tensor_coalesced([torch.arange(1.0 * n), torch.arange(2.0 * n)], "sum", n, group)
    scattered = [ops.wait_tensor(each).tolist() for each in several]
    assert scattered == [[n * rank], [2 * n * rank, n * (2 * rank + 1)]]


def test_functional_collectives(two: Ranks) -> None:
    two.run(functional)
