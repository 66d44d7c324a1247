"""Checks of each operation of Horovod's API, on any number of ranks. Run by test_horovod_operations.py."""

from __future__ import annotations

import itertools
import multiprocessing
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import horovod.torch as hvd
import torch

INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
CHECKS: dict[str, Callable[[], None]] = {}


def check(function: Callable[[], None]) -> Callable[[], None]:
    CHECKS[function.__name__] = function
    return function


def value(rank: int, dtype: torch.dtype, shape: tuple[int, ...] = (5, 3)) -> torch.Tensor:
    """Small whole numbers, so that sums and products are exact in each dtype."""
    generator = torch.Generator().manual_seed(100 + rank)
    return torch.randint(0, 4, shape, generator=generator).to(dtype)


def every(dtype: torch.dtype, shape: tuple[int, ...] = (5, 3)) -> list[torch.Tensor]:
    return [value(rank, dtype, shape) for rank in range(hvd.size())]


def mine(dtype: torch.dtype, shape: tuple[int, ...] = (5, 3)) -> torch.Tensor:
    return value(hvd.rank(), dtype, shape)


def same(got: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(got.detach(), expected, rtol=0, atol=0)


def raises(kind: type[BaseException], call: Callable[[], object], text: str = "") -> None:
    try:
        call()
    except kind as error:
        assert text in str(error), error
    else:
        raise AssertionError(f"no {kind.__name__}")


def reduced(op: hvd.ReduceOp, values: list[torch.Tensor]) -> torch.Tensor:
    wide = torch.stack([v.to(torch.float64) for v in values])
    if op == hvd.Average:
        result = wide.sum(0) / len(values)
    elif op == hvd.Sum:
        result = wide.sum(0)
    elif op == hvd.Min:
        result = wide.amin(0)
    elif op == hvd.Max:
        result = wide.amax(0)
    else:
        result = wide.prod(0)
    return result.to(values[0].dtype)


OPS = (hvd.Average, hvd.Sum, hvd.Min, hvd.Max, hvd.Product)


@check
def allreduce_of_each_dtype_and_op() -> None:
    for dtype, op, shape in itertools.product(INTEGERS + FLOATS, OPS, [(7,), (5, 3), (2, 3, 4)]):
        tensor = mine(dtype, shape)
        before, expected = tensor.clone(), reduced(op, every(dtype, shape))
        same(hvd.allreduce(tensor, op=op), expected)
        same(tensor, before)
        same(hvd.allreduce_(tensor, op=op), expected)
        same(tensor, expected)


@check
def allreduce_by_its_deprecated_argument() -> None:
    same(hvd.allreduce(mine(torch.float32), average=True), reduced(hvd.Average, every(torch.float32)))
    same(hvd.allreduce(mine(torch.float32), average=False), reduced(hvd.Sum, every(torch.float32)))
    same(hvd.allreduce(mine(torch.float32)), reduced(hvd.Average, every(torch.float32)))
    raises(ValueError, lambda: hvd.allreduce(mine(torch.float32), average=True, op=hvd.Sum), "supersedes")


@check
def allreduce_with_factors() -> None:
    inexact = {} if hvd.size() == 2 else {"rtol": 2e-3, "atol": 0.0}  # sums of more are rounded in another order
    for dtype in (torch.int32, torch.float16, torch.float32, torch.float64):
        wide = torch.float64 if dtype in (torch.int32, torch.float64) else torch.float32
        before = sum((v.to(wide) * 0.37).to(dtype) for v in every(dtype))
        torch.testing.assert_close(
            hvd.allreduce(mine(dtype), op=hvd.Sum, prescale_factor=0.37), before, **(inexact or {"rtol": 0, "atol": 0})
        )
        after = (reduced(hvd.Sum, every(dtype)).to(wide) * 0.37).to(dtype)
        same(hvd.allreduce(mine(dtype), op=hvd.Sum, postscale_factor=0.37), after)


@check
def grouped_allreduce() -> None:
    for dtype, op in itertools.product([torch.int32, torch.float32], OPS):
        shapes = [(n, 3) for n in range(1, 6)]
        expected = [reduced(op, every(dtype, shape)) for shape in shapes]
        for got, wanted in zip(hvd.grouped_allreduce([mine(dtype, s) for s in shapes], op=op), expected, strict=True):
            same(got, wanted)
        tensors = [mine(dtype, s) for s in shapes]
        hvd.synchronize(hvd.grouped_allreduce_async_(tensors, op=op, name="group"))
        for got, wanted in zip(tensors, expected, strict=True):
            same(got, wanted)


@check
def many_at_once_in_any_order() -> None:
    names = list(range(60))
    if hvd.rank() % 2:
        names.reverse()
    handles = {n: hvd.allreduce_async(mine(torch.float32) + n, op=hvd.Sum, name=f"tensor {n}") for n in names}
    for n, handle in handles.items():
        same(hvd.synchronize(handle), reduced(hvd.Sum, every(torch.float32)) + n * hvd.size())
        assert hvd.poll(handle)


@check
def adasum() -> None:
    a = torch.zeros(4)
    a[hvd.rank() % 4] = hvd.rank() + 1.0
    same(hvd.allreduce(a, op=hvd.Adasum), torch.tensor([r + 1.0 if r < hvd.size() else 0.0 for r in range(4)]))
    alike = torch.arange(6, dtype=torch.float64)
    torch.testing.assert_close(hvd.allreduce(alike, op=hvd.Adasum), alike)
    zero = torch.zeros(3) if hvd.rank() else torch.ones(3)
    same(hvd.allreduce(zero, op=hvd.Adasum), torch.ones(3))


@check
def sparse_allreduce() -> None:
    rows = torch.tensor([[hvd.rank(), 4]])
    sparse = torch.sparse_coo_tensor(rows, torch.ones(2, 3), (5, 3))
    dense = torch.zeros(5, 3)
    for rank in range(hvd.size()):
        dense[rank] += 1
    dense[4] += hvd.size()
    same(hvd.sparse_allreduce_async(sparse, "embedding", hvd.Sum)().to_dense(), dense)
    same(hvd.sparse_allreduce_async(sparse, "embedding", hvd.Average)().to_dense(), dense / hvd.size())


@check
def allgather_of_each_dtype() -> None:
    for dtype in [*INTEGERS, *FLOATS, torch.bool]:
        shapes = [(3 + rank, 2) for rank in range(hvd.size())]
        expected = torch.cat([value(rank, dtype, shape) for rank, shape in enumerate(shapes)])
        same(hvd.allgather(mine(dtype, shapes[hvd.rank()])), expected)
    same(hvd.allgather(torch.tensor(float(hvd.rank()))), torch.arange(hvd.size(), dtype=torch.float32))
    nothing = torch.zeros(hvd.rank(), 2)
    assert hvd.allgather(nothing).shape == (sum(range(hvd.size())), 2)
    first, second = hvd.grouped_allgather([mine(torch.float32), mine(torch.int32, (2,))], name="two")
    same(first, torch.cat(every(torch.float32)))
    same(second, torch.cat(every(torch.int32, (2,))))


@check
def broadcast_of_each_dtype() -> None:
    for dtype, root in itertools.product([*INTEGERS, *FLOATS, torch.bool], range(hvd.size())):
        tensor = mine(dtype)
        same(hvd.broadcast(tensor, root), value(root, dtype))
        same(tensor, mine(dtype))
        same(hvd.broadcast_(tensor, root, name="weights"), value(root, dtype))
        same(tensor, value(root, dtype))


@check
def alltoall() -> None:
    size, rank = hvd.size(), hvd.rank()
    for dtype in [*INTEGERS, *FLOATS]:
        sent = torch.cat([torch.full((rank + 1, 2), to, dtype=dtype) for to in range(size)])
        expected = torch.full((sum(range(1, size + 1)), 2), rank, dtype=dtype)
        same(hvd.alltoall(sent), expected)
        for splits in (torch.tensor([rank + 1] * size, dtype=torch.int32), [rank + 1] * size):
            got, counts = hvd.alltoall(sent, splits)
            same(got, expected)
            assert counts.tolist() == list(range(1, size + 1))
    only = [0] * size
    only[0] = 3
    got, counts = hvd.alltoall(torch.ones(3, 2), only)
    assert len(got) == (3 * size if rank == 0 else 0)
    assert counts.tolist() == ([3] * size if rank == 0 else [0] * size)


@check
def reducescatter() -> None:
    rank, size = hvd.rank(), hvd.size()
    for dtype, op, rows in itertools.product(INTEGERS + FLOATS, OPS, [size * 2, size * 2 + 1, size - 1]):
        shares = [rows // size + (r < rows % size) for r in range(size)]
        expected = reduced(op, every(dtype, (rows, 3))).split(shares)[rank]
        same(hvd.reducescatter(mine(dtype, (rows, 3)), op=op), expected)
    tensor = mine(torch.float32, (size, 2))
    expected = reduced(hvd.Average, every(torch.float32, (size, 2)))[rank : rank + 1]
    same(hvd.synchronize(hvd.reducescatter_async(tensor, name="part")), expected)
    two = hvd.grouped_reducescatter([tensor, tensor * 2], op=hvd.Sum, prescale_factor=2.0, postscale_factor=0.5)
    same(two[0], expected * size)
    same(two[1], expected * size * 2)


@check
def gradients() -> None:
    rank, size = hvd.rank(), hvd.size()
    for op, expected in ((hvd.Sum, float(size)), (hvd.Average, 1.0)):
        x = mine(torch.float64).requires_grad_()
        hvd.allreduce(x, op=op).sum().backward()
        same(x.grad, torch.full((5, 3), expected, dtype=torch.float64))
        several = [mine(torch.float64).requires_grad_() for _ in range(3)]
        sum(t.sum() for t in hvd.grouped_allreduce(several, op=op)).backward()
        for each in several:
            same(each.grad, torch.full((5, 3), expected, dtype=torch.float64))
    x = mine(torch.float64, (rank + 2, 2)).requires_grad_()
    rows = torch.cat([torch.full((r + 2, 2), float(r), dtype=torch.float64) for r in range(size)])
    hvd.allgather(x).backward(rows)
    same(x.grad, torch.full((rank + 2, 2), float(rank), dtype=torch.float64))
    x = mine(torch.float64).requires_grad_()
    hvd.broadcast(x, 1).sum().backward()
    same(x.grad, torch.full((5, 3), float(rank == 1), dtype=torch.float64))
    x = mine(torch.float64, (2 * size + 1, 2)).requires_grad_()
    got, _ = hvd.alltoall(x, [2] * size)
    got.backward(torch.full_like(got, rank + 1.0))
    expected = torch.cat([torch.full((2, 2), r + 1.0) for r in range(size)] + [torch.zeros(1, 2)])
    same(x.grad, expected.double())
    for op, factor in ((hvd.Average, 1.0), (hvd.Sum, float(size))):
        x = mine(torch.float64, (2 * size + 1, 2)).requires_grad_()
        hvd.reducescatter(x, op=op).sum().backward()
        same(x.grad, torch.full((2 * size + 1, 2), factor, dtype=torch.float64))


@check
def compression() -> None:
    x = mine(torch.float32) + 0.5
    expected = sum(v.half() for v in (t + 0.5 for t in every(torch.float32))).float() / hvd.size()
    same(hvd.allreduce(x, compression=hvd.Compression.fp16), expected.half().float())
    same(hvd.allreduce(mine(torch.int32), op=hvd.Sum, compression=hvd.Compression.fp16), sum(every(torch.int32)))


@check
def objects() -> None:
    assert hvd.broadcast_object({"of": hvd.rank()}, 1) == {"of": 1}
    assert hvd.allgather_object([hvd.rank()] * hvd.rank()) == [[r] * r for r in range(hvd.size())]
    assert hvd.broadcast_object((lambda n: n + 1) if hvd.rank() == 0 else None)(1) == 2
    raises(Exception, lambda: hvd.broadcast_object(threading.Lock() if hvd.rank() == 0 else None), "pickle")
    raises(Exception, lambda: hvd.allgather_object(threading.Lock() if hvd.rank() == 0 else None), "pickle")


@check
def what_is_done_is_in_place() -> None:
    tensor = mine(torch.float32)
    handle = hvd.allreduce_async_(tensor, name="polled")
    while not hvd.poll(handle):
        time.sleep(0.001)
    same(tensor, reduced(hvd.Average, every(torch.float32)))


def _child(numbers: object) -> None:
    numbers.put((hvd.is_initialized(), hvd.rank(), hvd.size(), hvd.local_rank(), hvd.global_process_set.included()))


@check
def a_forked_child_knows_its_rank() -> None:
    fork = multiprocessing.get_context("fork")
    numbers = fork.Queue()
    child = fork.Process(target=_child, args=(numbers,))
    child.start()
    assert numbers.get() == (True, hvd.rank(), hvd.size(), hvd.rank(), True)
    child.join()


@check
def errors() -> None:
    rank, size = hvd.rank(), hvd.size()
    wrong = torch.ones(3 + rank) if rank < 2 else torch.ones(3)
    raises(hvd.HorovodInternalError, lambda: hvd.allreduce(wrong, name="shape"), "shape")
    raises(RuntimeError, lambda: hvd.allreduce(torch.ones(3, dtype=torch.int32 if rank else torch.float32)))
    raises(RuntimeError, lambda: hvd.allreduce(torch.ones(3), op=hvd.Average if rank else hvd.Sum))
    raises(RuntimeError, lambda: hvd.allreduce(torch.ones(3), prescale_factor=1.0 + rank))
    raises(RuntimeError, lambda: hvd.allgather(torch.ones(3, 2 + rank)))
    raises(RuntimeError, lambda: hvd.allgather(torch.ones(3, dtype=torch.int32 if rank else torch.float32)))
    raises(RuntimeError, lambda: hvd.broadcast(torch.ones(3), rank))
    raises(RuntimeError, lambda: hvd.broadcast(torch.ones(3 + rank), 0))
    raises(RuntimeError, lambda: hvd.alltoall(torch.ones(size, 1 + rank)))
    raises(RuntimeError, lambda: hvd.reducescatter(torch.ones(size + rank)))
    for grouped in (hvd.grouped_allreduce, hvd.grouped_allgather, hvd.grouped_reducescatter):
        raises(RuntimeError, lambda: grouped([torch.ones(size)] * (1 + rank)), "group")
    raises(ValueError, lambda: hvd.alltoall(torch.ones(size + 1)))
    raises(ValueError, lambda: hvd.alltoall(torch.ones(size), torch.ones(size)))
    raises(ValueError, lambda: hvd.alltoall(torch.ones(size - 1), [1] * size))
    raises(ValueError, lambda: hvd.alltoall(torch.ones(size), [1] * (size + 1)))
    raises(RuntimeError, lambda: hvd.reducescatter(torch.tensor(1.0)))
    raises(RuntimeError, lambda: hvd.reducescatter(torch.ones(3), op=hvd.Adasum))
    raises(ValueError, lambda: hvd.broadcast(torch.ones(1), size), "root_rank")
    raises(ValueError, lambda: hvd.broadcast_parameters(3, 0))
    hvd.barrier()
    if rank == 0:
        handle = hvd.allreduce_async(torch.ones(3), name="twice", op=hvd.Sum)
        raises(ValueError, lambda: hvd.allreduce_async(torch.ones(3), name="twice"), "twice")
    else:
        hvd.broadcast_object(None, 0)
        handle = hvd.allreduce_async(torch.ones(3), name="twice", op=hvd.Sum)
    if rank == 0:
        hvd.broadcast_object("all may", 0)
    same(hvd.synchronize(handle), torch.full((3,), float(size)))


@check
def process_sets() -> None:
    rank, size = hvd.rank(), hvd.size()
    even, odd = hvd.ProcessSet(range(0, size, 2)), hvd.ProcessSet(range(1, size, 2))
    assert even.size() is None
    assert even.rank() is None
    hvd.add_process_set(even)
    hvd.add_process_set(odd)
    raises(ValueError, lambda: hvd.add_process_set(list(range(0, size, 2))))
    raises(ValueError, lambda: hvd.add_process_set(list(range(size))))
    own = even if rank % 2 == 0 else odd
    assert own.included()
    assert own.size() == len(own.ranks)
    assert own.rank() == own.ranks.index(rank)
    values = [value(r, torch.float32) for r in own.ranks]
    same(hvd.allreduce(mine(torch.float32), op=hvd.Sum, process_set=own), sum(values))
    same(hvd.allreduce(mine(torch.float32), process_set=own), sum(values) / len(values))
    same(hvd.allgather(mine(torch.float32), process_set=own), torch.cat(values))
    same(hvd.broadcast(mine(torch.float32), own.ranks[-1], process_set=own), values[-1])
    same(hvd.alltoall(torch.full((own.size(),), rank), process_set=own), torch.tensor(own.ranks))
    assert hvd.broadcast_object(rank, own.ranks[0], process_set=own) == own.ranks[0]
    x = mine(torch.float64).requires_grad_()
    hvd.reducescatter(x, op=hvd.Sum, process_set=own).sum().backward()
    same(x.grad, torch.full((5, 3), float(own.size()), dtype=torch.float64))
    other = odd if own is even else even
    raises(ValueError, lambda: hvd.allreduce(torch.ones(1), process_set=other))
    torch.testing.assert_close(hvd.allreduce(torch.ones(2), op=hvd.Adasum, process_set=own), torch.ones(2))
    hvd.barrier(own)
    assert hvd.remove_process_set(even)
    assert hvd.remove_process_set(odd)
    assert not hvd.remove_process_set(odd)
    assert not hvd.remove_process_set(hvd.global_process_set)
    raises(ValueError, lambda: hvd.allreduce(torch.ones(1), process_set=own))
    assert hvd.global_process_set.size() == size
    assert hvd.global_process_set.ranks == list(range(size))


@check
def join() -> None:
    rank, size = hvd.rank(), hvd.size()
    for first in (0, 1):
        if rank == first:
            last = hvd.join()
        else:
            values = [value(r, torch.float32) for r in range(size) if r != first]
            handle = hvd.allreduce_async(mine(torch.float32), name="of the others")
            same(hvd.synchronize(handle), sum(values) / size)
            same(hvd.allreduce(mine(torch.float32), op=hvd.Sum, name="sum of the others"), sum(values))
            raises(RuntimeError, lambda: hvd.allgather(torch.ones(3), name="with joined ranks"))
            raises(RuntimeError, lambda: hvd.broadcast(torch.ones(3), 1 - first, name="with joined ranks"))
            last = hvd.join(hvd.local_rank())
        assert last != first or size == 1
        assert 0 <= last < size


@check
def again() -> None:
    before = hvd.rank(), hvd.size()
    some = list(range(hvd.size() - 1))
    pair = hvd.add_process_set(some)
    hvd.shutdown()
    assert not hvd.is_initialized()
    assert pair.size() is None
    for call in (hvd.rank, hvd.is_homogeneous, lambda: hvd.allreduce(torch.ones(1)), lambda: hvd.allgather_object(1)):
        raises(ValueError, call, "hvd.init()")
    hvd.init(process_sets=[pair])
    assert (hvd.rank(), hvd.size()) == before
    assert pair.size() == hvd.size() - 1
    same(hvd.allreduce(torch.ones(2), op=hvd.Sum), torch.full((2,), float(hvd.size())))
    hvd.shutdown()
    raises(ValueError, lambda: hvd.init(process_sets=[hvd.ProcessSet([0]), hvd.ProcessSet([0])]), "entry 1")


def main() -> None:
    raises(ValueError, hvd.size, "hvd.init()")
    assert not hvd.is_initialized()
    hvd.init()
    folder = Path(__import__("sys").argv[1])
    for name, function in CHECKS.items():
        try:
            function()
        except Exception:
            (folder / f"{name}.{hvd.rank() if hvd.is_initialized() else 'x'}").write_text(traceback.format_exc())
    (folder / f"done.{hvd.global_process_set.ranks.index(hvd.rank())}").write_text("")


if __name__ == "__main__":
    main()
