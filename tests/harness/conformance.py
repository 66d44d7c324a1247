"""One rank of the conformance suite: every verb, dtype and odd shape over one executor, against NumPy.

Run as `python -m harness.conformance EXECUTOR RANK SIZE FOLDER`; under mpirun, which says who is who, with -1 -1. It
prints a line for each case that is wrong. With one more argument, "wrong", it does what is wrong use, and prints what
is said of it; with "cuda" all tensors are a GPU's; with "product" it tries each shape with each dtype, else one of the
two is one of a few.
"""

from __future__ import annotations

import functools
import hashlib
import re
import sys
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import torch
from torch.distributed import FileStore

from dadt.comm import executors
from dadt.comm.backend.rendezvous import GroupRendezvous
from dadt.comm.collectives import operation
from dadt.comm.collectives.ordered import OrderedGroup
from dadt.config import Config
from dadt.errors import CommError, Mismatch
from dadt.world import World
from harness.patience import PATIENCE
from harness.ranks import printed

DTYPES = (
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.complex128,
)
FEW_DTYPES = (torch.float32, torch.int8, torch.complex128)
FEW_SHAPES = ("0-d", "odd", "long")
LONG = 70_001
"""Elements that no executor treats as few."""


def shapes() -> dict[str, Callable[[torch.Tensor], torch.Tensor]]:
    """Name -> how a tensor of that kind is made of the values of a flat one."""
    return {
        "0-d": lambda t: t[3].clone(),
        "empty": lambda t: t[:0],
        "an empty row": lambda t: t[:0].reshape(3, 0, 2),
        "one": lambda t: t[:1].clone(),
        "odd": lambda t: t[:77].reshape(7, 11),
        "transposed": lambda t: t[:77].reshape(7, 11).t(),
        "every other": lambda t: t[:90][::2],
        "offset": lambda t: t[1:14],
        "channels last": lambda t: t[:120].reshape(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
        "long": lambda t: t.clone(),
    }


def value(rank: int, dtype: torch.dtype, name: str, salt: int = 0) -> torch.Tensor:
    """A rank's tensor: whole numbers so small that every sum and product of four is exact in every dtype."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{rank} {name} {salt}".encode()))
    flat = torch.randint(0, 2 if dtype == torch.bool else 4, (LONG,), generator=generator)
    if dtype.is_complex:
        flat = torch.complex(flat.double(), flat.flip(0).double())
    return shapes()[name](flat.to(dtype))


def array(tensor: torch.Tensor) -> np.ndarray:
    """In a type of NumPy's that holds its values exactly."""
    wide = torch.complex128 if tensor.is_complex() else torch.float64 if tensor.is_floating_point() else torch.int64
    return tensor.cpu().to(wide).numpy()


def reduced(arrays: list[np.ndarray], reduction: str, dtype: torch.dtype) -> np.ndarray:
    many = np.stack(arrays)
    if reduction == "mean":
        mean = many.sum(0) / len(arrays)
        return mean if dtype.is_floating_point or dtype.is_complex else np.trunc(mean)
    function = {"sum": np.add, "min": np.minimum, "max": np.maximum, "product": np.multiply}[reduction]
    result = functools.reduce(function, arrays)
    return (result != 0).astype(np.int64) if dtype == torch.bool else result


def defined(reduction: str, dtype: torch.dtype) -> bool:
    if dtype == torch.bool:
        return reduction != "mean"
    return not (dtype.is_complex and reduction in ("min", "max"))


class Suite:
    def __init__(self, group: OrderedGroup, device: str = "cpu", product: bool = False) -> None:
        self.group = group
        self.device = device
        self.product = product
        self.rank = group.rank
        self.size = group.size
        self.cases = 0
        self.digest = hashlib.sha256()
        """Of every result that must be the same on all ranks."""

    def check(self, case: str, got: torch.Tensor, want: np.ndarray, tolerance: float = 0.0) -> None:
        self.cases += 1
        have = array(got)
        same = have.shape == want.shape and (
            np.allclose(have, want, rtol=tolerance, atol=tolerance) if tolerance else bool((have == want).all())
        )
        if not same:
            print(
                f"WRONG rank {self.rank}: {case}: {have.ravel()[:4]} {have.shape} not {want.ravel()[:4]} {want.shape}"
            )

    def run(self, call: operation.Call) -> object:
        return self.group.submit(call).wait(PATIENCE)

    def all(self) -> None:
        for dtype, name in self.kinds():
            every = [value(r, dtype, name) for r in range(self.size)]
            own = self.here(every[self.rank])
            arrays = [array(t) for t in every]
            self.reductions(f"{dtype} {name}", own, arrays, dtype)
            self.movements(f"{dtype} {name}", own, arrays, name)
            if dtype.is_floating_point or dtype.is_complex:
                self.average(f"{dtype} {name}", own, arrays)
        self.unequal()
        self.bits()
        self.fractions()
        self.missing_numbers()
        self.messages()

    def here(self, tensor: torch.Tensor) -> torch.Tensor:
        """On the suite's device, with the same strides: `to` may close the gaps of what is not dense."""
        if self.device == "cpu":
            return tensor
        span = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)) if tensor.numel() else 0
        moved = torch.empty(span, dtype=tensor.dtype, device=self.device).as_strided(tensor.shape, tensor.stride())
        return moved.copy_(tensor)

    def average(self, kind: str, own: torch.Tensor, arrays: list[np.ndarray]) -> None:
        """As the gradients of a GPU: where they are, where the executor can."""
        device = self.group.connection.device
        if device is None:
            return
        flat = torch.full((own.numel(),), 7, dtype=own.dtype, device=self.device)
        place = flat.view(own.shape)
        device.average([own], [place], flat, name=kind, weight=1.0, lane=b"").wait(PATIENCE)
        self.check(f"average {kind}", place, reduced(arrays, "mean", own.dtype), 0.01)

    def kinds(self) -> Iterator[tuple[torch.dtype, str]]:
        for dtype in DTYPES:
            for name in shapes():
                if self.product or dtype in FEW_DTYPES or name in FEW_SHAPES:
                    yield dtype, name

    def reductions(self, kind: str, own: torch.Tensor, arrays: list[np.ndarray], dtype: torch.dtype) -> None:
        for reduction in operation.REDUCTIONS:
            if not defined(reduction, dtype):
                continue
            close = 0.01 if reduction == "mean" else 0.0
            want = reduced(arrays, reduction, dtype)
            before = own.clone()
            output = torch.empty_like(own)
            self.run(operation.all_reduce(own, output, reduction, self.size))
            self.check(f"all_reduce {reduction} {kind}", output, want, close)
            self.check(f"all_reduce {reduction} {kind}: input", own, array(before))
            self.digest.update(output.contiguous().view(-1).view(torch.uint8).cpu().numpy().tobytes())
            in_place = own.clone()
            self.run(operation.all_reduce(in_place, in_place, reduction, self.size))
            self.check(f"all_reduce {reduction} {kind} in place", in_place, want, close)

            root = self.size - 1
            output = torch.zeros_like(own)
            self.run(operation.reduce(own, output, reduction, root, self.rank, self.size))
            self.check(f"reduce {reduction} {kind}", output, want if self.rank == root else want * 0, close)

            pieces = [own.roll(r) for r in range(self.size)]
            output = torch.empty_like(own)
            self.run(operation.reduce_scatter(pieces, output, reduction, self.rank, self.size))
            rolled = [array(torch.from_numpy(a).roll(self.rank)) for a in arrays]
            self.check(f"reduce_scatter {reduction} {kind}", output, reduced(rolled, reduction, dtype), close)

    def movements(self, kind: str, own: torch.Tensor, arrays: list[np.ndarray], name: str) -> None:
        ranks = range(self.size)
        for root in {0, self.size - 1}:
            tensor = own.clone()
            self.run(operation.broadcast(tensor, root, self.rank, self.size))
            self.check(f"broadcast {kind}", tensor, arrays[root])
            outputs = [torch.empty_like(own) for _ in ranks] if self.rank == root else None
            self.run(operation.gather(own, root, self.rank, self.size, outputs))
            for r, output in enumerate(outputs or ()):
                self.check(f"gather {kind}", output, arrays[r])
            output = torch.empty_like(own)
            pieces = [own.roll(r) for r in ranks] if self.rank == root else None
            self.run(operation.scatter(output, pieces, root, self.rank, self.size))
            self.check(f"scatter {kind}", output, array(torch.from_numpy(arrays[root]).roll(self.rank)))
        outputs = [torch.empty_like(own) for _ in ranks]
        self.run(operation.all_gather(own, self.size, outputs))
        for r, output in enumerate(outputs):
            self.check(f"all_gather {kind}", output, arrays[r])
        self.run(operation.all_to_all([own.roll(r) for r in ranks], self.size, outputs))
        for r, output in enumerate(outputs):
            self.check(f"all_to_all {kind}", output, array(torch.from_numpy(arrays[r]).roll(self.rank)))
        if name != "0-d":
            gathered = self.run(operation.all_gather(own, self.size))
            assert isinstance(gathered, list)
            for r, tensor in enumerate(gathered):
                self.check(f"all_gather {kind}, new", tensor, arrays[r])
        self.run(operation.barrier(self.size))

    def unequal(self) -> None:
        """First sizes that differ between ranks, none among them."""
        for dtype in DTYPES:
            own = self.here(value(self.rank, dtype, "odd"))[: self.rank]
            gathered = self.run(operation.all_gather(own, self.size))
            assert isinstance(gathered, list)
            for r, tensor in enumerate(gathered):
                self.check(f"all_gather {dtype} unequal", tensor, array(value(r, dtype, "odd")[:r]))
            gathered = self.run(operation.gather(own, 0, self.rank, self.size))
            assert (gathered is None) == (self.rank != 0)
            for r, tensor in enumerate(gathered or ()):
                self.check(f"gather {dtype} unequal", tensor, array(value(r, dtype, "odd")[:r]))
            long = self.here(value(self.rank, dtype, "long"))
            pieces = [long[: 1000 * r + self.rank] for r in range(self.size)]
            moved = self.run(operation.all_to_all(pieces, self.size))
            assert isinstance(moved, list)
            for r, tensor in enumerate(moved):
                want = array(value(r, dtype, "long")[: 1000 * self.rank + r])
                self.check(f"all_to_all {dtype} unequal", tensor, want)

    def bits(self) -> None:
        for dtype in (torch.int64, torch.uint8, torch.bool):
            own = self.here(value(self.rank, dtype, "odd"))
            arrays = [array(value(r, dtype, "odd")) for r in range(self.size)]
            for reduction, function in {"band": np.bitwise_and, "bor": np.bitwise_or, "bxor": np.bitwise_xor}.items():
                output = torch.empty_like(own)
                self.run(operation.all_reduce(own, output, reduction, self.size))
                self.check(f"all_reduce {reduction} {dtype}", output, functools.reduce(function, arrays))

    def fractions(self) -> None:
        """Numbers whose sums round: near NumPy's, and the same bits on every rank."""
        for dtype, close in (
            (torch.float64, 1e-12),
            (torch.float32, 1e-5),
            (torch.float16, 5e-2),
            (torch.bfloat16, 0.2),
        ):
            for count in (10, LONG):
                every = [
                    torch.randn(count, generator=torch.Generator().manual_seed(r), dtype=torch.float64).to(dtype)
                    for r in range(self.size)
                ]
                own = self.here(every[self.rank])
                output = torch.empty_like(own)
                self.run(operation.all_reduce(own, output, "sum", self.size))
                self.check(f"all_reduce of fractions {dtype}", output, sum(map(array, every)), close)
                self.digest.update(output.view(torch.uint8).cpu().numpy().tobytes())

    def missing_numbers(self) -> None:
        """A NaN of one rank stays one in a minimum and a maximum, and takes no other place."""
        for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
            for count in (10, LONG):
                every = [value(r, dtype, "long")[:count].clone() for r in range(self.size)]
                every[-1][3] = every[0][count - 1] = torch.nan
                for reduction in ("min", "max"):
                    output = torch.empty_like(own := self.here(every[self.rank]))
                    self.run(operation.all_reduce(own, output, reduction, self.size))
                    want = reduced([array(t) for t in every], reduction, dtype)
                    places = output.isnan().nonzero().flatten().tolist()
                    self.check(f"{reduction} with NaN {dtype} {count}", torch.tensor(places), np.array([3, count - 1]))
                    self.check(f"{reduction} beside NaN {dtype} {count}", output[4 : count - 1], want[4 : count - 1])

    def messages(self) -> None:
        """To the next rank and from the one before, several under way, tags crossed, a long one, one from anybody."""
        mail = self.group.mail
        after, before = (self.rank + 1) % self.size, (self.rank - 1) % self.size
        if self.size == 1:
            return
        for dtype in DTYPES:
            own = {tag: value(self.rank, dtype, name).contiguous() for tag, name in enumerate(("odd", "one", "long"))}
            theirs = {tag: torch.empty_like(t) for tag, t in own.items()}
            receives = [mail.receive(theirs[tag], before, tag) for tag in reversed(own)]
            sends = [mail.send(t, after, tag) for tag, t in own.items()]
            for transit in (*sends, *receives):
                transit.wait(PATIENCE)
                assert transit.done
            for tag, name in enumerate(("odd", "one", "long")):
                self.check(f"message {dtype} {name}", theirs[tag], array(value(before, dtype, name)))
        got = torch.empty(77, dtype=torch.int64)
        transit = mail.receive(got, None, 9)
        mail.send(value(self.rank, torch.int64, "odd").flatten(), after, 9).wait(PATIENCE)
        transit.wait(PATIENCE)
        assert transit.source == before, transit.source
        self.check("message from anybody", got, array(value(before, torch.int64, "odd")).ravel())


WRONG: dict[str, Callable[[int, int], operation.Call]] = {
    "lengths": lambda rank, size: _sum(torch.ones(3 + rank), size),
    "long lengths": lambda rank, size: _sum(torch.ones(LONG + rank), size),
    "dtypes": lambda rank, size: _sum(torch.ones(3, dtype=torch.float64 if rank else torch.float32), size),
    "shapes": lambda rank, size: _sum(torch.ones(2, 3) if rank else torch.ones(3, 2), size),
    "reductions": lambda rank, size: operation.all_reduce(torch.ones(3), torch.ones(3), "max" if rank else "min", size),
    "verbs": lambda rank, size: operation.barrier(size) if rank else _sum(torch.ones(3), size),
    "roots": lambda rank, size: operation.broadcast(torch.ones(3), rank, rank, size),
    "pieces": lambda rank, size: operation.all_gather(
        torch.ones(3 + rank), size, [torch.empty(3 + r + (r == 1 != rank)) for r in range(size)]
    ),
}
"""What ranks may do that do not agree."""


def _sum(tensor: torch.Tensor, size: int) -> operation.Call:
    return operation.all_reduce(tensor, tensor, "sum", size)


def world_of(executor: str, rank: int, size: int) -> World:
    """All ranks on one host; for the hierarchical executor two on each of as many as it takes."""
    local_size = 2 if executor.startswith("hierarchical") else size
    host = rank // local_size
    return World(
        rank=rank,
        world_size=size,
        local_rank=rank % local_size,
        local_size=min(local_size, size - host * local_size),
        cross_rank=host,
    )


def connect(executor: str, rank: int, size: int, folder: str, case: str = "") -> OrderedGroup:
    world = World.from_launcher() if rank < 0 else world_of(executor, rank, size)
    store = FileStore(str(Path(folder) / f"store {case}"), world.world_size)
    meet = GroupRendezvous(store, world.rank, world.world_size, PATIENCE)
    config = Config(executor=executor, timeout=PATIENCE, start_timeout=PATIENCE)
    return OrderedGroup(executors.connect(config, world, meet), world.rank, world.world_size)


def main(executor: str, rank: int, size: int, folder: str, *more: str) -> None:
    torch.set_num_threads(1)
    what = more[0] if more else ""
    for case in WRONG if what == "wrong" else ():
        group = connect(executor, rank, size, folder, case)
        try:
            group.submit(WRONG[case](group.rank, group.size)).wait(PATIENCE)
            print(f"{case}: nothing was said")
        except Mismatch as error:
            print(f"{case}: {error}")
        with suppress(CommError):
            group.close(PATIENCE)
    if what != "wrong":
        device = "cuda" if what == "cuda" else "cpu"
        suite = Suite(connect(executor, rank, size, folder), device, product=what == "product")
        suite.all()
        suite.group.close(PATIENCE)
        print(f"DONE {suite.cases} {suite.digest.hexdigest()}")


def check(outputs: list[str]) -> None:
    """Each rank went through all cases, none was wrong, and all have the same bits."""
    wrong = [line for text in outputs for line in text.splitlines() if line.startswith("WRONG")]
    assert not wrong, "\n".join(wrong[:20])
    done = [line for text in outputs for line in text.splitlines() if line.startswith("DONE")]
    assert len(done) == len(outputs), "\n".join(text[-2000:] for text in outputs)
    cases, digests = zip(*(line.split()[1:] for line in done), strict=True)
    assert len(set(digests)) == 1, done
    assert min(map(int, cases)) > 1500


def check_told(said: list[str]) -> None:
    """All ranks say the same of each case, and what two of them are in."""
    told = [[line for line in text.splitlines() if not line.startswith(("[", "dadt: "))] for text in said]
    assert all(each == told[0] for each in told), said
    lines = dict(line.split(": ", 1) for line in told[0])
    assert list(lines) == ["lengths", "long lengths", "dtypes", "shapes", "reductions", "verbs", "roots", "pieces"]
    for case, text in lines.items():
        assert re.search(r"rank 0 .*rank 1 ", text) or case == "pieces", text
    assert "rank 1 sends 16 bytes to rank 0, which expects 20" in lines["pieces"]


def outputs(executor: str, size: int, folder: Path, *more: str) -> list[str]:
    """What the ranks have printed."""
    ranks = ((executor, rank, size, str(folder), *more) for rank in range(size))
    return [rank.said for rank in printed(folder, main, *ranks)]


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:])
