"""The timeline of ranks: its clocks, its parts, how they become one file, and what that costs."""

from __future__ import annotations

import ctypes
import json
import statistics
import zlib
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

import pytest
from click.testing import CliRunner
from harness.patience import PATIENCE
from harness.ranks import spawn
from harness.trace import check_format

from dadt import _core
from dadt.comm.trace import clock
from dadt.comm.trace import merge as merging
from dadt.comm.trace.clock import ClockOffset, align
from dadt.comm.trace.gather import Through
from dadt.comm.trace.merge import merge
from dadt.comm.trace.recorder import Timeline
from dadt.control.timeline_file import HEAD, PART_HEAD, check, part
from dadt.errors import ConfigError
from dadt.world import World
from dadt_cli.report.timeline import events, timeline

AHEAD = 1000.0
"""Seconds that each rank's clock shows more than that of the rank before, where ranks stand for hosts."""


def world(rank: int, world_size: int, hosts: bool = False) -> World:
    size = 1 if hosts else world_size
    return World(rank=rank, local_rank=0 if hosts else rank, world_size=world_size, local_size=size)


def _set_clock(rank: int, rate: float = 1.0) -> None:
    """What perf_counter says on another host: the core's clock is this one's, so only what Python reads is shifted."""
    clock.perf_counter = lambda: perf_counter() * rate + rank * AHEAD  # type: ignore[assignment]


def _align(engine: _core.Engine, rank: int, world_size: int, hosts: bool) -> ClockOffset:
    if hosts:
        _set_clock(rank)
    return align(Through(engine, world_size, 30.0), world(rank, world_size, hosts))


@pytest.mark.parametrize("hosts", [False, True], ids=["one host", "a host each"])
def test_clocks_are_compared_with_rank_0s(hosts: bool) -> None:
    clocks = spawn(3, _align, hosts)
    for rank, found in enumerate(clocks):
        expected = -rank * AHEAD if hosts else 0.0
        assert abs(found.offset - expected) <= found.error + 1e-9  # the bounds are certain, but for rounding
        assert found.error < 0.1
        assert found.origin + found.offset == pytest.approx(clocks[0].origin, abs=1e-6)
    assert (clocks[1].error > 0) == hosts


def test_clocks_that_run_unlike_are_brought_together() -> None:
    begin, end = (
        ClockOffset(offset=5.0, error=1e-5, at=100.0, origin=90.0),
        ClockOffset(offset=5.02, error=1e-5, at=300.0),
    )
    lines = b'{"ts":10000000.000,"x":1},\n{"ts":210000000.000,"dur":3},\n'
    # The first was when they were compared first, the second when they were compared last.
    assert merging._shifted(lines, begin, end) == b'{"ts":10000000.000,"x":1},\n{"ts":210020000.000,"dur":3},\n'
    unmoved = ClockOffset(offset=5.00001, error=1e-5, at=300.0)
    assert merging._shifted(lines, begin, unmoved) is lines


def _record(engine: _core.Engine, rank: int, world_size: int, path: str, operations: int, piece: int) -> str:
    merging._PIECE_BYTES = piece
    mine = Timeline(path, world(rank, world_size))
    mine.start(Through(engine, world_size, 30.0))
    mine._record(engine, "exchange")
    values = (ctypes.c_float * 4)()
    layout, pointer = _core.Layout(_core.DType.float32, [4]), [ctypes.addressof(values)]
    for number in range(operations):
        work = engine.allreduce(layout, pointer, pointer, f'"odd"\\\n\u00fc {number}')
        begin = perf_counter()
        work.wait(PATIENCE)
        mine.waited(work.name, begin)
        mine.step(number)
    verdict = merge(mine, Through(engine, world_size, 30.0), range(world_size))
    engine.close(30.0)
    return verdict


def read(path: Path) -> list[dict[str, Any]]:
    return json.loads(path.read_text())["traceEvents"]  # type: ignore[no-any-return]


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_parts_become_one_file(world_size: int, tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    part(path, 7).write_bytes(PART_HEAD)  # of an earlier, larger job
    verdicts = spawn(world_size, _record, str(path), 300, 2**16)
    assert all(str(path) in verdict for verdict in verdicts), verdicts
    assert [p.name for p in tmp_path.iterdir()] == ["t.json"]
    all_events = read(path)
    torn: list[str] = []
    assert list(events(path, torn)) == all_events and not torn
    for rank in range(world_size):
        mine = [e for e in all_events if e["pid"] == rank]
        operations = [e["name"] for e in mine if e.get("cat") == "allreduce"]
        assert operations == [f'"odd"\\\n\u00fc {number}' for number in range(300)]
        assert [e["args"]["step"] for e in mine if e.get("cat") == "step"] == list(range(300))
        assert [e["args"]["for"] for e in mine if e.get("cat") == "wait"] == operations


def test_events_are_chromes(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    spawn(2, _record, str(path), 50, 2**20)
    all_events = read(path)
    check_format(all_events)
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in all_events if e["name"] == "thread_name"}
    assert {names[e["pid"], e["tid"]] for e in all_events if e.get("cat") == "allreduce"} == {"exchange"}
    for step in (e for e in all_events if e.get("cat") == "step"):
        args = step["args"]
        assert args["compute_us"] + args["exposed_wait_us"] == pytest.approx(step["dur"], abs=0.01)
    # What one rank waits for, the other ends at the same time: the clocks are one.
    ends = [
        {e["name"]: e["ts"] + e["dur"] for e in all_events if e["pid"] == rank and e.get("cat") == "allreduce"}
        for rank in (0, 1)
    ]
    begins = {e["name"]: e["ts"] for e in all_events if e["pid"] == 0 and e.get("cat") == "allreduce"}
    assert all(ends[1][name] >= begins[name] for name in begins)


def _fail(engine: _core.Engine, rank: int, world_size: int, path: str) -> str:
    mine = Timeline(path, world(rank, world_size))
    mine.start(Through(engine, world_size, 30.0))
    mine._record(engine, "exchange")
    engine.allgather(b"", "the only one").wait(PATIENCE)
    if rank == 1:
        mine.stop()
        engine.abort("rank 1 has failed")
        return ""
    return merge(mine, Through(engine, world_size, 30.0), range(world_size))


def test_a_job_that_fails_leaves_parts(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    verdict = spawn(2, _fail, str(path))[0]
    assert "rank 1 has failed" in verdict and f"{path}.rank0" in verdict
    assert sorted(p.name for p in tmp_path.iterdir()) == ["t.json.rank0", "t.json.rank1"]
    with part(path, 1).open("ab") as file:
        file.write(b'{"ts":12.5,"dur"')  # killed while it wrote
    result = CliRunner().invoke(timeline, [str(path)], catch_exceptions=False)
    assert result.exit_code == 0 and "reading its 2 parts" in result.output
    for rank in (0, 1):
        names = [e["name"] for e in events(part(path, rank), []) if e.get("cat") == "allgather"]
        assert "the only one" in names


def _cannot_write(engine: _core.Engine, rank: int, world_size: int, path: str) -> str:
    mine = Timeline(path, world(rank, world_size))
    mine.start(Through(engine, world_size, 30.0))
    mine._record(engine, "exchange")
    if rank == 0:  # what was free at the start is a folder at the end
        Path(path).mkdir()
    engine.allgather(b"", "both are here").wait(PATIENCE)
    return merge(mine, Through(engine, world_size, 30.0), range(world_size))


def test_what_cannot_be_written_at_the_end_stays_in_parts(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    verdicts = spawn(2, _cannot_write, str(path))
    assert verdicts[0] == verdicts[1] and "directory" in verdicts[0]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["t.json", "t.json.rank0", "t.json.rank1"]


def _cannot_read(engine: _core.Engine, rank: int, world_size: int, path: str) -> str:
    mine = Timeline(path, world(rank, world_size))
    mine.start(Through(engine, world_size, 30.0))
    mine._record(engine, "exchange")
    engine.allgather(b"", "both are here").wait(PATIENCE)
    if rank == 1:
        mine.part.unlink()
    return merge(mine, Through(engine, world_size, 30.0), range(world_size))


def test_a_part_that_is_gone_keeps_nobody_waiting(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    verdicts = spawn(2, _cannot_read, str(path))
    why = f"; rank 1 is incomplete: {part(path, 1)} could not be read (No such file or directory)"
    assert verdicts[0] == verdicts[1] and verdicts[0].endswith(why)
    assert [p.name for p in tmp_path.iterdir()] == ["t.json"]
    assert {event["pid"] for event in read(path)} == {0}


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("folder", "this is a folder"),
        ("script.py", "this file is no timeline"),
        ("script.py/t.json", "cannot be written"),
    ],
)
def test_a_path_that_cannot_be_is_refused(name: str, why: str, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "script.py").write_text("import torch\n")
    with pytest.raises(ConfigError, match=why):
        check(tmp_path / name)
    check(tmp_path / "new" / "t.json")
    assert not (tmp_path / "new").exists(), "a check makes nothing"
    (tmp_path / "old.json").write_bytes(HEAD + b"]}\n")
    check(tmp_path / "old.json")


def _trace(tmp_path: Path) -> Path:
    """Two ranks, the second of which computes twice as long."""
    lines = [HEAD]
    for rank, compute in ((0, 1000.0), (1, 2000.0)):
        core = _core.Timeline(rank, 0.0)
        for step in range(4):
            begin, length = step * 0.01, compute / 1e6
            core.step(
                step, begin, begin + length + 0.0005, [(f"bucket {step}", begin + length, begin + length + 0.0005)]
            )
        lines.append(core.drain(0.0))
    path = tmp_path / "t.json"
    path.write_bytes(b"".join(lines)[:-2] + b"\n]}\n")
    return path


def test_the_summary_names_waits_and_the_slowest_rank(tmp_path: Path) -> None:
    result = CliRunner().invoke(timeline, [str(_trace(tmp_path))], catch_exceptions=False)
    rows = [line.split() for line in result.output.splitlines()]
    assert ["0", "3", "1.50", "ms", "1.00", "ms", "500", "us", "33.3", "%"] in rows
    assert ["1", "3", "2.50", "ms", "2.00", "ms", "500", "us", "20.0", "%"] in rows
    assert "rank 1 is the slowest: it computes for 2.00 ms in a step, the others for 1.00 ms" in result.output
    assert sum(row[-2:-1] == ["bucket"] for row in rows) == 6


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (b"import torch\n", "is no timeline"),
        (b"", "is torn: it ends before its first event"),
        (HEAD[:20], "is torn: it ends before its first event"),
        (HEAD + b"{]\n", "line 2: this is no event"),
        (HEAD + b'{"ph":"X"},\n', "this is no event of dadt's"),
        (None, "there is no such file"),
    ],
)
def test_a_wrong_file_is_one_sentence(text: bytes | None, why: str, tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    if text is not None:
        path.write_bytes(text)
    with pytest.raises(ConfigError, match=why):
        CliRunner().invoke(timeline, [str(path)], catch_exceptions=False)


@pytest.mark.parametrize(
    ("head", "cut", "told"),
    [
        (HEAD, 0, ""),
        (HEAD, 3, "its end, and"),
        (HEAD, 9, "it ends within line"),
        (PART_HEAD, 3, ""),
        (PART_HEAD, 9, "line"),
    ],
)
def test_a_torn_file_is_told_beside_what_it_says(head: bytes, cut: int, told: str, tmp_path: Path) -> None:
    path = _trace(tmp_path)
    path.write_bytes(head + path.read_bytes().removeprefix(HEAD)[: -cut or None])
    result = CliRunner().invoke(timeline, [str(path)], catch_exceptions=False)
    assert result.exit_code == 0 and "the others for 1.00 ms" in result.output
    assert (f"{path} is torn: " in result.output and told in result.output) if told else "torn" not in result.output


def test_recording_costs_little() -> None:
    """Beside a small step: about 1 ms of compute, four buckets. Pairs of engines, as it depends on where the kernel has
    an engine's thread; both ways in turn, by the time of the processor, as other processes want it, too."""
    recorder = _core.Timeline(0, perf_counter())
    values, batch = (ctypes.c_float * 1000)(), bytes(2**20)
    layout, pointer = _core.Layout(_core.DType.float32, [1000]), [ctypes.addressof(values)]

    def steps(engine: _core.Engine, recorded: bool) -> float:
        used = process_time()
        for number in range(10):
            begin = perf_counter()
            zlib.crc32(batch)
            waits = []
            for work in [engine.allreduce(layout, pointer, pointer, f"bucket {i}") for i in range(4)]:
                before = perf_counter()
                work.wait(PATIENCE)
                waits.append((work.name, before, perf_counter()))
            if recorded:
                recorder.step(number, begin, perf_counter(), waits)
        if recorded:
            recorder.drain(0.0)
        return process_time() - used

    def ratio() -> float:
        engines = [_core.Engine(_core.NullExecutor(0, 1), 0, 1, 30.0) for _ in range(2)]
        engines[1].record(recorder, 3)
        ratios = []
        for turn in range(10):
            times = {way: steps(engines[way], way) for way in (turn % 2 == 0, turn % 2 == 1)}
            ratios.append(times[True] / times[False])
        for engine in engines:
            engine.close(30.0)
        return statistics.median(ratios)

    ratios = [ratio() for _ in range(9)]
    assert statistics.median(ratios) < 1.25, ratios  # docs/timeline.md has what was measured
