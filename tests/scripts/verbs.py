"""What three ranks do with every function of `import dadt`; each check's result, or error, is reported by its name."""

import os
import random
import sys
import threading
import time
from pathlib import Path
from typing import NamedTuple

import torch

sys.path.append(str(Path(__file__).parents[1]))
from harness import light  # noqa: F401 (faster to start)

import dadt

RANKS = 3


def x(rank, shape=(2, 3), dtype=torch.float32):
    """A rank's tensor."""
    return (torch.arange(torch.Size(shape).numel()).reshape(shape) % 5 + 10 * rank + 1).to(dtype)


def who():
    return [
        dadt.rank(), dadt.size(), dadt.local_rank(), dadt.local_size(), dadt.cross_rank(), dadt.cross_size(),
        dadt.initialized(),
    ]  # fmt: skip


def second_init():
    dadt.init()
    dadt.init(cycle_duration_ms=1.5)


def other_init():
    dadt.init(cycle_duration_ms=7)


def all_reduce():
    found = {r: dadt.all_reduce(x(dadt.rank()), r) for r in ("mean", "sum", "min", "max", "product")}
    found["bf16"] = dadt.all_reduce(x(dadt.rank(), (5,), torch.bfloat16), "sum")
    found["0-d"] = dadt.all_reduce(torch.tensor(float(dadt.rank())))
    found["transposed"] = dadt.all_reduce(x(dadt.rank()).t(), "sum")
    found["of a parameter"] = dadt.all_reduce(torch.nn.Parameter(x(dadt.rank())), "sum")
    return found


def in_place():
    mine, handled, grouped = x(dadt.rank()), x(dadt.rank()), [x(dadt.rank()), x(dadt.rank(), (4,))]
    same = dadt.all_reduce_(mine, "sum") is mine
    handle = dadt.all_reduce_async_(handled, "sum", name="handled")
    gave = dadt.synchronize(handle) is handled and dadt.poll(handle)
    dadt.grouped_all_reduce_(grouped, "sum")
    spread, later = x(dadt.rank()), x(dadt.rank())
    dadt.broadcast_(spread, 2)
    dadt.broadcast_async_(later, 1).wait()
    return [same, gave, mine, handled, *grouped, spread, later]


def grouped():
    tensors = [x(dadt.rank(), (i + 1,)) for i in range(4)]
    named = dadt.grouped_all_reduce_async(tensors, "sum", name="layers")
    return [dadt.grouped_all_reduce(tensors, "sum"), named.wait(), named.done]


def any_order():
    names = [f"tensor {i}" for i in range(50)]
    random.Random(dadt.rank()).shuffle(names)
    handles = {name: dadt.all_reduce_async(torch.full((7,), float(name[7:])), "sum", name=name) for name in names}
    return {name: handles[name].wait() for name in sorted(names)}


def any_thread():
    found = {}

    def use(name):
        for i in range(5):
            found[name, i] = dadt.all_reduce(torch.ones(3) * (dadt.rank() + i), "sum", name=f"{name} {i}")

    threads = [threading.Thread(target=use, args=(name,)) for name in ("a", "b", "c")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return dict(sorted(found.items()))


def broadcast():
    mine = x(dadt.rank())
    return [dadt.broadcast(mine, root_rank=1), mine, dadt.broadcast(x(dadt.rank(), (), torch.complex64), 2)]


def rooted():
    rank = dadt.rank()
    scattered = [torch.full((r, 2), r, dtype=torch.int16) for r in range(RANKS)] if rank == 2 else None
    return {
        "reduce": dadt.reduce(x(rank), 1, "sum"),
        "gather": dadt.gather(x(rank, (rank, 2)), 2),
        "scatter": dadt.scatter(scattered, 2),
        "scatter of a bool": dadt.scatter([torch.tensor(r == 1) for r in range(RANKS)] if rank == 0 else None),
    }


def among_all():
    rank = dadt.rank()
    return {
        "all_gather": dadt.all_gather(x(rank, (rank, 2))),
        "all_gather of 0-d": dadt.all_gather(torch.tensor(rank)),
        "all_to_all": dadt.all_to_all([x(rank, (rank + r, 2)) for r in range(RANKS)]),
        "all_to_all of little": dadt.all_to_all([torch.zeros(0), x(rank), torch.zeros(0)]),
        "reduce_scatter": dadt.reduce_scatter([x(rank, (r + 1,)) for r in range(RANKS)], "sum"),
    }


def barriers():
    found = []
    for name, wait in (("all", dadt.barrier), ("local", dadt.local_barrier)):
        if dadt.rank() == 1:
            time.sleep(0.1)  # or the others would not have to wait
            Path(name).touch()
        wait()
        found.append(Path(name).exists())
    return found


def messages():
    rank = dadt.rank()
    following, before = (rank + 1) % RANKS, (rank - 1) % RANKS
    got = torch.zeros(3, 2)
    handle = dadt.isend(x(rank, (2, 3)).t(), following, 5)
    source = dadt.recv(got, before, 5)
    handle.wait()
    anybody = torch.zeros(2)
    if rank == 0:
        sources = sorted(dadt.recv(anybody, tag=6) for _ in range(2))
    else:
        dadt.send(torch.ones(2), 0, 6)
        sources = []
    return [source, got, sources]


def objects():
    rank = dadt.rank()
    return [
        dadt.allgather_object({"rank": rank, "text": "x" * rank}),
        dadt.broadcast_object([rank, "of the root"], root_rank=2),
    ]


def coo(rank, shape=(40, 2), rows=None):
    """Entries of a rank: some rows, one of them twice (not coalesced); rank 1 has none."""
    rows = {0: [0, 2, 2], 1: [], 2: [2, 5]}[rank] if rows is None else rows
    indices = torch.tensor(rows, dtype=torch.int64).reshape(1, -1)
    return torch.sparse_coo_tensor(
        indices, torch.arange(2.0 * len(rows)).reshape(-1, 2) + rank + 1, shape, check_invariants=False
    )


def sparse():
    rank = dadt.rank()
    many = [coo(rank, (4, 2), [(rank + i) % 4 for i in range(3)]) for _ in range(2)]
    two = torch.sparse_coo_tensor([[rank, 3], [0, rank]], [1.0, 2.0], (4, 3))
    handles = [dadt.coo_all_reduce_async(coo(rank), "sum", name=f"sparse {i}") for i in range(3)]
    waited = [h.wait() for h in (handles if rank else handles[::-1])]
    return {
        "sum": dadt.coo_all_reduce(coo(rank), "sum"),
        "mean": dadt.coo_all_reduce(coo(rank)),
        "dense": dadt.coo_all_reduce(many[0], "sum"),
        "dense mean": dadt.coo_all_reduce(many[1]),
        "two dimensions": dadt.coo_all_reduce(two, "sum"),
        "half": dadt.coo_all_reduce(coo(rank).to(torch.bfloat16), "sum"),
        "async": waited,
        "cancelled": dadt.coo_all_reduce(coo(rank, (4, 2), [1]) * [1, 1, 0][rank] * (1 - rank * 1.5), "sum"),
    }


def make_sets():
    some = dadt.add_process_set([2, 0])
    one = dadt.add_process_set([1])
    return some, one


def sets():
    some, one = make_sets()
    rank = dadt.rank()
    found = {"of": [some.ranks, some.included, some.size, repr(some), one.included]}
    if some.included:
        found["sum"] = dadt.all_reduce(x(rank), "sum", process_set=some)
        found["number"] = some.rank
        found["broadcast"] = dadt.broadcast(x(rank), 2, process_set=some)
        found["all_gather"] = dadt.all_gather(x(rank, (rank, 2)), process_set=some)
        found["objects"] = dadt.allgather_object(rank, process_set=some)
        dadt.barrier(some)
        message = torch.tensor([7 * rank])
        found["source"] = (
            dadt.recv(message, 0, process_set=some) if rank == 2 else dadt.send(message, 2, process_set=some)
        )
        try:
            dadt.all_reduce(torch.ones(rank + 1), name="odd", process_set=some)
        except dadt.Mismatch as error:
            found["mismatch"] = str(error)
    else:
        try:
            dadt.all_reduce(x(rank), process_set=some)
        except dadt.DadtError as error:
            found["stranger"] = str(error)
        found["alone"] = dadt.all_reduce(x(rank), "mean", process_set=one)
        found["to itself"] = torch.zeros(2, 3)
        handle = dadt.isend(x(rank), rank, process_set=one)
        dadt.recv(found["to itself"], rank, process_set=one)
        handle.wait()
    dadt.barrier()
    for each in (some, one, some):
        dadt.remove_process_set(each)
    return found


def wrong_set():
    found = []
    for ranks in ([0, 3], [0, 9] if dadt.rank() == 1 else [0, 2], [0, 1] if dadt.rank() else [0, 2]):
        try:
            dadt.add_process_set(ranks)
        except ValueError as error:
            found.append(str(error))
    return "; ".join(found)


def joined():
    rank = dadt.rank()
    found = [dadt.all_reduce(torch.full((2,), float(rank)), "mean") for _ in range(2 + rank)]
    return [found, dadt.join(), dadt.all_reduce(torch.ones(1), "sum")]


def differing_shapes():
    return dadt.all_reduce(torch.zeros(3 + dadt.rank()), name="grad")


def differing_dtypes():
    return dadt.all_reduce(torch.zeros(3, dtype=torch.float64 if dadt.rank() == 2 else torch.float32), name="grad")


def differing_verbs():
    return dadt.all_reduce(torch.zeros(3)) if dadt.rank() else dadt.broadcast(torch.zeros(3))


def differing_roots():
    return dadt.broadcast(torch.zeros(3), dadt.rank())


def wrong_root():
    return dadt.broadcast(torch.zeros(3), 3)


def wrong_reduction():
    return dadt.all_reduce(torch.zeros(3), "median")


def wrong_count():
    return dadt.all_to_all([torch.zeros(3)] * 2)


def wrong_rows():
    return dadt.all_to_all([torch.zeros(2, 3), torch.zeros(2, 4), torch.zeros(0)])


def differing_rows():
    return dadt.gather(torch.zeros(2, 4 - (dadt.rank() == 0)))


def differing_dimensions():
    return dadt.all_gather(torch.zeros([2] if dadt.rank() else []))


def high_tag():
    return dadt.isend(torch.zeros(1), 0, 2**18 + 1)


def wrong_layout():
    return dadt.all_reduce(coo(0))


def same_name_twice():
    handle = dadt.all_reduce_async(torch.zeros(3), name="twice")
    if dadt.rank():
        handle.wait()
        return None
    try:  # while the others have it still before them
        return dadt.all_reduce_async(torch.zeros(3), name="twice") and None
    finally:
        handle.wait()


def forked():
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            dadt.shutdown()  # which is the parent's affair
            if not dadt.initialized():
                dadt.all_reduce(torch.zeros(1))
            os.write(write, b"no error")
        except dadt.DadtError as error:
            os.write(write, str(error).encode())
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    text = os.read(read, 1000).decode()
    dadt.barrier()
    return text


def model(rank):
    torch.manual_seed(rank)
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1))


def train(net, optimizer, steps):
    for _ in range(steps):
        net(torch.randn(6, 3)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def replicas():
    net = model(dadt.rank())
    optimizer = torch.optim.Adam(net.parameters(), lr=0.1 / (dadt.rank() + 1))
    if dadt.rank() == 1:
        train(net, optimizer, 3)
    dadt.broadcast_parameters(net.state_dict(), root_rank=1)
    dadt.broadcast_optimizer_state(optimizer, root_rank=1)
    return [net.state_dict(), optimizer.state_dict()]


class Pair(NamedTuple):
    first: torch.Tensor
    second: int


def named_tuples():
    """Among an optimizer's settings, which are pickled without their tensors."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=0.1)
    if dadt.rank() == 0:
        optimizer.param_groups[0]["pair"] = Pair(torch.ones(2), 3)
    dadt.broadcast_optimizer_state(optimizer)
    pair = optimizer.param_groups[0]["pair"]
    return [type(pair).__name__, pair.first.tolist(), pair.second]


def replicas_differ():
    net = torch.nn.Linear(3, 2 + (dadt.rank() == 1))
    dadt.broadcast_parameters(net.named_parameters())


def no_tensor():
    dadt.broadcast_parameters({"epoch": 3})


CHECKS = [
    who, second_init, other_init, all_reduce, in_place, grouped, any_order, any_thread, broadcast, rooted,
    among_all, barriers, messages, objects, sparse, sets, wrong_set, joined, differing_shapes, differing_dtypes,
    differing_verbs, differing_roots, wrong_root, wrong_reduction, wrong_count, wrong_rows, differing_rows,
    differing_dimensions, high_tag, wrong_layout, same_name_twice, forked, replicas, named_tuples,
    replicas_differ, no_tensor,
]  # fmt: skip


def main():
    found = {}
    for name in ("rank", "barrier"):
        try:
            getattr(dadt, name)()
        except dadt.DadtError as error:
            found[f"{name} before init"] = str(error)
    dadt.init(cycle_duration_ms=1.5)
    for check in CHECKS:
        try:
            found[check.__name__] = check()
        except Exception as error:
            found[check.__name__] = f"{type(error).__name__}: {error}"
    dadt.shutdown()
    dadt.shutdown()
    for name in ("rank", "init"):
        try:
            getattr(dadt, name)()
        except dadt.DadtError as error:
            found[f"{name} after shutdown"] = str(error)
    torch.save(found, os.path.join(sys.argv[1], f"rank{os.environ['RANK']}.pt"))


if __name__ == "__main__":
    main()
