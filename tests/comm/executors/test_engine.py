"""The Python face of the core, with processes as ranks."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
from harness.patience import PATIENCE
from harness.ranks import spawn
from numpy.typing import NDArray

from dadt import _core
from dadt.errors import Aborted, CommError, CommTimeout, Mismatch, PeerLost

Array = NDArray[Any]
SHAPES = [(3, 5), (0,), (70000,), (1,), (64, 3)]


def addresses(arrays: list[Array]) -> list[int]:
    return [array.ctypes.data for array in arrays]


def layout(arrays: list[Array], dtype: Any = _core.DType.float32) -> _core.Layout:
    return _core.Layout(dtype, [array.size for array in arrays])


def gradients(rank: int) -> list[Array]:
    random = np.random.default_rng(rank)
    return [random.standard_normal(shape).astype(np.float32) for shape in SHAPES]


def average(engine: _core.Engine, rank: int, world_size: int, weights: list[float]) -> tuple[Any, ...]:
    arrays = gradients(rank)
    outputs = [np.empty_like(array) for array in arrays]
    work = engine.allreduce(
        layout(arrays), addresses(arrays), addresses(outputs), "grads", weights[rank], bytes([rank]) * 40
    )
    work.wait(PATIENCE)
    assert work.done and work.name == "grads"
    assert work.seconds >= 0
    engine.close(PATIENCE)
    assert engine.closed and engine.error is None
    return outputs, work.lanes, work.weight_sum


@pytest.mark.parametrize("weights", [[1.0, 1.0], [3.0, 5.0], [2.0, 2.0, 2.0], [0.0, 1.0, 0.5, 4.0]])
def test_allreduce_is_the_weighted_mean_with_the_same_bits_everywhere(weights: list[float]) -> None:
    results = spawn(len(weights), average, weights)
    inputs = [gradients(rank) for rank in range(len(weights))]
    for i in range(len(SHAPES)):
        want = sum(w * x[i].astype(np.float64) for w, x in zip(weights, inputs, strict=True)) / sum(weights)
        np.testing.assert_allclose(results[0][0][i], want, rtol=1e-5, atol=1e-6)
    for outputs, lanes, weight_sum in results:
        assert [a.tobytes() for a in outputs] == [a.tobytes() for a in results[0][0]]
        assert lanes == [bytes([rank]) * 40 for rank in range(len(weights))]
        assert weight_sum == sum(weights)


def mix(engine: _core.Engine, rank: int, world_size: int) -> bool:
    for step in range(100):
        array = np.full(step * 37, rank, np.float64)
        mean = engine.allreduce(layout([array], _core.DType.float64), addresses([array]), addresses([array]), "a")
        gathered = engine.allgather(b"x" * (rank * step * 100), "b")
        gathered.wait(PATIENCE)
        assert mean.done  # in order
        assert np.all(array == (world_size - 1) / 2)
        assert gathered.lanes == [b"x" * (r * step * 100) for r in range(world_size)]
        tensor = np.full((11, 13), rank, np.int8)
        root = step % world_size
        engine.broadcast(layout([tensor], _core.DType.int8), addresses([tensor]), root, "c").wait(PATIENCE)
        assert np.all(tensor == root)
    engine.close(PATIENCE)
    return True


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_operations_of_all_kinds_in_a_row(world_size: int) -> None:
    assert all(spawn(world_size, mix))


def differ(engine: _core.Engine, rank: int, world_size: int) -> str:
    array = np.zeros(10, np.float32)
    if rank == 0:
        work = engine.allreduce(layout([array]), addresses([array]), addresses([array]), "step 3 bucket 0")
    else:
        work = engine.allgather(b"", "end")
    with pytest.raises(Mismatch) as caught:
        work.wait(PATIENCE)
    with pytest.raises(Mismatch):
        engine.allgather(b"", "later").wait(PATIENCE)
    with pytest.raises(Mismatch):
        _ = work.lanes
    assert engine.error == str(caught.value)
    return str(caught.value)


def test_ranks_in_different_operations_learn_of_both() -> None:
    want = (
        'rank 0 is in allreduce "step 3 bucket 0" of 10 float32, rank 1 in allgather "end": '
        "the ranks do not run the same steps"
    )
    assert spawn(2, differ) == [want, want]


def die_or_wait(engine: _core.Engine, rank: int, world_size: int) -> str:
    engine.allgather(b"", "start").wait(PATIENCE)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(PeerLost) as caught:
        engine.allgather(b"", "after").wait(PATIENCE)
    return str(caught.value)


def test_a_peer_that_dies_is_named() -> None:
    first, second, third = spawn(3, die_or_wait)
    assert second is None
    for message in (first, third):
        assert "rank 1 (pid " in message and 'waited for it in allgather "after"' in message


def be_silent(engine: _core.Engine, rank: int, world_size: int) -> str:
    if rank == 1:
        late = threading.Event()
        threading.Timer(1.0, late.set).start()
        late.wait()
    with pytest.raises(CommTimeout) as caught:
        engine.allgather(b"", "start").wait(PATIENCE)
    return str(caught.value)


def test_a_silent_peer_is_named_and_told_when_it_comes() -> None:
    first, second = spawn(2, be_silent, timeout=0.2)
    assert first == 'rank 1 did not come to allgather "start" within 0.2 s'
    assert second == "rank 0 gave up: " + first


def abort(engine: _core.Engine, rank: int, world_size: int) -> str:
    work = engine.allgather(b"", "never") if rank == 0 else None
    if rank == 1:
        engine.abort("rank 1 had enough")
        work = engine.allgather(b"", "never")
    assert work is not None
    with pytest.raises(Aborted) as caught:
        work.wait(PATIENCE)
    return str(caught.value)


def test_abort_reaches_everybody() -> None:
    assert spawn(2, abort, timeout=600.0) == ["rank 1 gave up: rank 1 had enough", "rank 1 had enough"]


def lonely(timeout: float = PATIENCE) -> _core.Engine:
    return _core.Engine(_core.NullExecutor(0, 1), 0, 1, timeout)


def test_pull_mode_runs_operations_in_a_python_thread() -> None:
    engine, timeline = _core.Engine(None, 0, 2, PATIENCE), _core.Timeline(0, 0.0)
    engine.record(timeline, 4)
    assert engine.pull(0.01) is None
    kinds: list[str] = []

    def loop() -> None:
        while not engine.closed:
            job = engine.pull(1.0)
            if job is None:
                continue
            kinds.append(job.kind)
            if job.layout is None:
                job.finish([job.lane, b"peer"], 0.0, 0.5, 0.25)
                continue
            flat = np.empty(job.layout.total, np.float32)
            job.pack(flat.ctypes.data)
            job.unpack(flat.ctypes.data, 0.5)
            job.finish([], 2 * job.weight, 0.0, 0.0)

    thread = threading.Thread(target=loop)
    thread.start()
    array, out = np.arange(6, dtype=np.float32), np.zeros(6, np.float32)
    reduced = engine.allreduce(layout([array]), addresses([array]), addresses([out]), "a", weight=3.0, lane=b"l")
    gathered = engine.allgather(b"mine", "b")
    gathered.wait(PATIENCE)
    engine.close(PATIENCE)
    thread.join(PATIENCE)
    assert not thread.is_alive()
    assert kinds == ["allreduce", "allgather"]
    np.testing.assert_array_equal(out, array * 1.5)
    assert reduced.weight_sum == 6
    assert gathered.lanes == [b"mine", b"peer"] and gathered.seconds == 0.5
    events = json.loads(b"[" + timeline.drain(0.0)[:-2] + b"]")
    assert [event["dur"] for event in events if event["name"] == "wait"] == [0.25e6]


def test_a_failed_job_is_the_engines_error() -> None:
    engine = _core.Engine(None, 0, 2, PATIENCE)
    work = engine.allgather(b"", "a")
    job = engine.pull(PATIENCE)
    assert job is not None
    job.fail("no route to host")
    with pytest.raises(CommError, match="no route to host"):
        work.wait(PATIENCE)
    assert engine.error == "no route to host"
    engine.close(PATIENCE)


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """A shell's background job starts with SIGINT ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("ctrl_c")
def test_wait_has_a_deadline_and_sees_ctrl_c() -> None:
    engine = _core.Engine(None, 0, 2, PATIENCE)
    work = engine.allgather(b"", "slow")
    with pytest.raises(CommTimeout, match=r'allgather "slow" was not done within 0.05 s'):
        work.wait(0.05)
    assert not work.done
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        work.wait(PATIENCE)


def test_wait_lets_other_threads_run() -> None:
    engine = _core.Engine(None, 0, 2, PATIENCE)
    work = engine.allgather(b"", "slow")

    def finish() -> None:
        job = engine.pull(PATIENCE)
        assert job is not None
        job.finish([b"", b""], 0, 0, 0)

    thread = threading.Thread(target=finish)
    thread.start()
    work.wait(PATIENCE)  # would never return with the GIL held
    thread.join(PATIENCE)


def test_a_fork_is_inert_and_leaves_the_parent_alone() -> None:
    engine = lonely()
    work = engine.allgather(b"mine", "before")
    work.wait(PATIENCE)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            signal.alarm(20)
            engine.allgather(b"", "child")
        except RuntimeError as error:
            status = 0 if "forked child" in str(error) else 2
            engine.abort("child")
            engine.close(5)
            del engine, work
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    engine.allgather(b"", "after").wait(PATIENCE)
    assert engine.error is None
    engine.close(PATIENCE)


def test_bad_arguments_are_value_errors() -> None:
    engine = lonely()
    array = np.zeros(3, np.float32)
    with pytest.raises(ValueError, match="so many addresses"):
        engine.allreduce(layout([array]), [], [], "a")
    with pytest.raises(ValueError, match="weight"):
        engine.allreduce(layout([array]), addresses([array]), addresses([array]), "a", float("nan"))
    with pytest.raises(ValueError, match="no rank"):
        engine.broadcast(layout([array]), addresses([array]), 1, "a")
    with pytest.raises(ValueError, match="ranks run from 0"):
        _core.ShmExecutor(2, 2)
    with pytest.raises(ValueError, match="no floating dtype"):
        _core.predict(_core.DType.int32, [3], addresses([array]), addresses([array]), 1.0)
    engine.close(PATIENCE)
    with pytest.raises(RuntimeError, match="closed"):
        engine.allgather(b"", "late")


def test_predict_goes_by_the_displacement() -> None:
    parameter, displacement = gradients(0), gradients(1)
    moved = [p + np.float32(1.5) * d for p, d in zip(parameter, displacement, strict=True)]
    counts = [array.size for array in parameter]
    _core.predict(_core.DType.float32, counts, addresses(parameter), addresses(displacement), 1.5)
    for got, want in zip(displacement, moved, strict=True):
        np.testing.assert_array_equal(got, want)


def test_predict_by_minus_one_is_the_difference() -> None:
    parameter, before = gradients(0), gradients(1)
    moved = [p - old for p, old in zip(parameter, before, strict=True)]
    counts = [array.size for array in parameter]
    _core.predict(_core.DType.float32, counts, addresses(parameter), addresses(before), -1.0)
    for got, want in zip(before, moved, strict=True):
        np.testing.assert_array_equal(got, want)


def test_dtypes_and_layouts_say_what_they_are() -> None:
    assert _core.DType.bfloat16.name == "bfloat16" and _core.DType.bfloat16.itemsize == 2
    made = _core.Layout(_core.DType.int64, [3, 0, 4])
    assert (made.dtype, made.counts, made.total) == (_core.DType.int64, [3, 0, 4], 7)
    assert _core.simd in ("avx512", "avx2", "neon", "scalar")
    assert _core.NullExecutor(0, 1).name == "null" and _core.ShmExecutor(0, 1).name == "shm"


def test_a_process_that_ends_without_closing_ends() -> None:
    code = (
        "from dadt import _core\n"
        "e = _core.Engine(_core.NullExecutor(0, 1), 0, 1, 5.0)\n"
        "p = _core.Engine(None, 0, 2, 5.0)\n"
        "w = p.allgather(b'', 'never')\n"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=PATIENCE).returncode == 0


def give_up(engine: _core.Engine, rank: int, world_size: int, reason: str) -> str:
    array = np.zeros(4, np.float32)
    if rank == 0:
        engine.abort(reason)
    work = engine.allreduce(layout([array]), addresses([array]), addresses([array]), "a") if rank else None
    with pytest.raises(Aborted) if work is not None else nullcontext():
        if work is not None:
            work.wait(PATIENCE)
    assert engine.error is not None
    return engine.error


@pytest.mark.parametrize("reason", ["é" * 600, "a" + "é" * 600, "no file \udcff"])
def test_a_reason_in_any_alphabet_reaches_the_peers(reason: str) -> None:
    """Also one that is cut in the middle of a character, or is no UTF-8."""
    start = reason.encode(errors="backslashreplace").decode()[:100]
    assert all(start in error for error in spawn(2, give_up, reason))


def add_between(engine: _core.Engine, rank: int, world_size: int, dtype: str, offset: int) -> bool:
    count = (17 << 20) // np.dtype(dtype).itemsize  # so many are stored past the cache
    memory = np.zeros(count * np.dtype(dtype).itemsize + 64, np.uint8)
    start = -memory.ctypes.data % 64 + offset
    array = memory[start : start + count * np.dtype(dtype).itemsize].view(dtype)
    array[:] = rank
    engine.allreduce(layout([array], getattr(_core.DType, dtype)), addresses([array]), addresses([array]), "a").wait(
        PATIENCE
    )
    engine.close(PATIENCE)
    return bool(np.all(array == (world_size - 1) / 2))


@pytest.mark.parametrize(("dtype", "offset"), [("float32", 1), ("float64", 4)])
def test_elements_may_lie_between_multiples_of_their_size(dtype: str, offset: int) -> None:
    """As those of torch.frombuffer, or of a file that is mapped."""
    assert spawn(2, add_between, dtype, offset) == [True, True]
