"""What users and peers give, changed at random: it is taken, or refused by one sentence, and nothing else happens."""

from __future__ import annotations

import json
import os
import resource
import signal
import struct
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.mutation import Mutator
from safetensors.torch import save_file

from dadt.comm.trace.clock import ClockOffset
from dadt.comm.trace.merge import _shifted
from dadt.config import Config
from dadt.config.check import variable
from dadt.control import timeline_file
from dadt.control.frame import LENGTHS, Frame, Parser
from dadt.control.schema import AGENT
from dadt.control.seal import Seal
from dadt.control.uptime import uptime
from dadt.errors import DadtError, LaunchError
from dadt.launch.actions import Action, Event, WriteJournal
from dadt.launch.contact import Contact
from dadt.launch.hosts import host
from dadt.launch.hosts.host import Host
from dadt.launch.hosts.slot import Slot
from dadt.launch.job import Job
from dadt.launch.members.node import Node
from dadt.launch.monitor.journal import Journal
from dadt_cli.compare import stored
from dadt_cli.report.timeline import Summary
from dadt_cli.report.timeline import read as read_timeline
from dadt_cli.terminal import file

SEED = int(os.environ.get("DADT_FUZZ_SEED", "1"))
SECONDS = 10
"""Of one input: what takes longer hangs."""
GROWTH = 512 << 20
"""Bytes of memory that all inputs together may need at a time."""

Take = Callable[[bytes], object]


WORKER = {"rank": 0, "pid": 7}
ASKS = {**WORKER, "timeout": 5.0, "line": 1}
STEPS = {"counts": {"-3": 4}, "seconds": 1.5}
NUMBERS = {"samples": 8, "waited": 0.1, "clock": 9.0, "sent": 8, "plain": 8, "late": 0, "fell_back": 0}
LINK = {"peer": 1, "sent": 8, "received": 8, "resent": 0, "busy": 0.1, "round_trip": 0.001, "queued": 0}
FRAMES = [{"file": "train.py", "line": 3, "function": "f", "text": "f()"}]
FROM_AGENTS = [
    Frame("beat", {"steps": {"0": [1, 0.5]}, "memory": {"0": 1 << 30}, "conditions": {"0": "busy"}, "clock": 1.5}),
    Frame("out", {"rank": 0}, b"a line\n"),
    Frame("started", WORKER),
    Frame("hello", {**WORKER, "torch": "2.13.0", "line": 1}),
    Frame("claim", ASKS),
    Frame("exchange", {**ASKS, "key": "hosts"}, b"\0" * 40),
    Frame("put", {**ASKS, "key": "group/0"}, b"\0" * 40),
    Frame("get", {**ASKS, "keys": ["group/0", "group/1"]}),
    Frame("say", {**WORKER, "text": "a warning", "level": "warning", "line": 1}),
    Frame("numbers", {**WORKER, "step": 3, "numbers": {**NUMBERS, "step_times": STEPS, "links": [LINK]}, "line": 1}),
    Frame(
        "failed",
        {
            **WORKER,
            "type": "ValueError",
            "message": "no",
            "frames": FRAMES,
            "step": 3,
            "secondary": False,
            "thread": "",
            "time": 5.0,
            "line": 1,
        },
    ),
    Frame("ending", {**WORKER, "steps": 5, "gathered": 0, "line": 1}),
    Frame("done", {**WORKER, "summary": {"steps": 5, "explicit": False}, "line": 1}),
    Frame("result", ASKS, b"pickled"),
    Frame("peers", ASKS),
    Frame("dump", {**WORKER, "line": 1}),
    Frame("stack", {"number": 1, "rank": 0, "problem": ""}, b"stack"),
    Frame("stacks", WORKER, b"stack"),
    Frame("heartbeat", {"port": 4000}),
    Frame("silent", {"peer": 0, "port": 4000, "seconds": 10.5}),
    Frame("heard", {"peer": 0, "port": 4000, "seconds": 0.5}),
    Frame("unheard", {"peer": 0, "port": 4000, "seconds": 10.5}),
    Frame("refused", {"rank": 0, "why": "it said too much"}),
    Frame("unstarted", {"message": "there is no such file"}),
    Frame(
        "exit",
        {
            "rank": 0,
            "code": -9,
            "step": 3,
            "time": 2.5,
            "stopped": False,
            "peak_memory": 1 << 30,
            "memory_limit": 1 << 34,
            "memory_kills": 0,
        },
    ),
    Frame("end", {"stuck": [7], "signal": 15}),
]
"""Each kind that an agent may say once its job runs."""


@pytest.fixture
def path() -> Iterator[Path]:
    """Of a file in memory: a disk would take most of the time."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder) / "given"


@contextmanager
def bounded() -> Iterator[None]:
    """No input may take long, or much memory."""

    def late(*_: object) -> None:
        raise AssertionError(f"one input took longer than {SECONDS} s")

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    handler = signal.signal(signal.SIGALRM, late)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10 < GROWTH


def a_job(folder: Path) -> tuple[Job, Node]:
    """Of two ranks on one host."""
    slots = [Slot(rank=rank, local_rank=rank, world_size=2, local_size=2, host="h0") for rank in range(2)]
    node = Node(0, Host(name="h0"), report={"pid": 9})
    job = Job(Config(grace=1.0), [node], slots, folder, now=0.0, begin=0.0)
    job.start([Frame("job")], now=0.0, uptime=0.0)
    return job, node


def go(what: str, inputs: int, mutate: Mutator, take: Take) -> None:
    """take: returns, or raises DadtError with a sentence."""
    taken = 0
    with bounded():
        for number in range(inputs):
            data = mutate()
            signal.setitimer(signal.ITIMER_REAL, SECONDS)
            try:
                take(data)
                taken += 1
            except DadtError as error:
                assert str(error).strip(), data
            except Exception as error:
                raise AssertionError(f"input {number} of seed {SEED}: {data[:2000]!r}") from error
    print(f"{what}: {inputs} inputs, {taken} taken")
    assert inputs // 50 < taken < inputs, "what is always refused, or never, shows nothing"


def amounts(few: int, many: int) -> pytest.MarkDecorator:
    """How many inputs: in each run of the tests, and in the slow one."""
    return pytest.mark.parametrize("inputs", [few, pytest.param(many, marks=pytest.mark.slow)])


@amounts(20_000, 200_000)
def test_frames(inputs: int) -> None:
    """As bytes: lengths, headers, bodies, cut in two."""
    known = [frame.encode() for frame in FROM_AGENTS]

    def take(data: bytes) -> None:
        parser, half = Parser(AGENT), len(data) // 2
        for part in (data[:half], data[half:]):
            for frame in parser.feed(part):
                assert frame.kind in AGENT.kinds

    tokens = [b'{"kind":', b'"kind"', b"null", struct.pack(">II", 2, 1 << 30), struct.pack(">II", 1 << 31, 0)]
    go("frames", inputs, Mutator(SEED, known, tokens), take)


@amounts(20_000, 250_000)
def test_what_agents_say_to_the_launcher(inputs: int, tmp_path: Path) -> None:
    """A frame that the schema lets through does no harm either: a job, its watch and its journal take it."""
    job, node = a_job(tmp_path)
    contact, journal = Contact([node], 30.0, 0.0), Journal(tmp_path / "events.jsonl", lambda text: None)

    def perform(action: Action) -> None:
        if isinstance(action, WriteJournal):
            journal.write(action.kind, **action.facts)

    tokens = [
        b'"rank": 1',
        b'"rank": 0',
        b'"steps": {"1": [5, 0.0]}',
        b'"line": 3',
        b"-1",
        b"1e9",
        b"true",
        b"{}",
        b"[]",
    ]

    def take(data: bytes) -> None:
        for frame in Parser(AGENT).feed(LENGTHS.pack(len(data), 0) + data):
            if not contact.hear(node, frame, uptime()):
                now = time.monotonic()
                journal.see(node.name, frame)
                job.take(Event(node, frame, now))
                job.turn(now)
                job.outbox.empty(perform)
                json.dumps([gauge.describe(now) for gauge in job.watch.gauges])

    headers = [json.dumps({"kind": frame.kind, **frame.header}).encode() for frame in FROM_AGENTS]
    go("what agents say", inputs, Mutator(SEED, headers, tokens), take)


def test_an_agent_that_ends_and_has_not_told_how_its_workers_have_is_no_success(tmp_path: Path) -> None:
    job, node = a_job(tmp_path)
    job.take(Event(node, Frame("end", {"stuck": [], "signal": 0}), 1.0))
    assert job.over
    with pytest.raises(LaunchError, match="it is not known how rank 0 has ended: its agent has not told"):
        job.judge(1.0, [], [])


@amounts(10_000, 100_000)
def test_sealed_records(inputs: int) -> None:
    """Of a connection whose two sides know each other: whatever is changed on the way is noticed."""
    said = [b"one", b"", b"x" * 300, b"{}"]
    records = [Seal.between(b"k" * 32, b"", b"a", b"b").closed(text) for text in said]
    whole = Seal.between(b"k" * 32, b"", b"a", b"b")
    records.append(b"".join(whole.closed(text) for text in said))

    def take(data: bytes) -> None:
        opened = Seal.between(b"k" * 32, b"", b"b", b"a").opened(data)
        assert any(text.startswith(opened) for text in [*said, b"".join(said)])

    go("sealed records", inputs, Mutator(SEED, records), take)


@amounts(3_000, 40_000)
def test_variables(inputs: int) -> None:
    values = [str(part) for value in Config().to_env().values() for part in [value, f"{value}1"]]
    words = [
        "powersgd:4",
        "own:0.5",
        "hierarchical:gloo",
        "prometheus:9100",
        "h0:2,h1:2",
        "0,3-5",
        "package.module:Class",
        "nan",
    ]
    names = [variable(field.name) for field in fields(Config)]
    samples = [(f"{name}={value}").encode() for name in names for value in words] + [
        f"{name}={value}".encode() for name, value in Config().to_env().items()
    ]
    samples += [f"{name}={value}".encode() for name in names for value in values[:20]]

    def take(data: bytes) -> None:
        pairs = (os.fsdecode(part).partition("=") for part in data.split(b"\n"))
        config = Config.from_env({name: value for name, _, value in pairs})
        assert Config.from_env(config.to_env()).to_env() == config.to_env()

    go("variables", inputs, Mutator(SEED, samples, [b"\nDADT_NP=", b"\nDADT_ALGORITHM=", b"1e400", b"-1"]), take)


HOSTS = [b"a,b:2,user@c:3,[::1]:4", b"host1:2", b"localhost", b"10.0.0.1:8,10.0.0.2:8", b"[fe80::1%eth0]:2"]


@amounts(20_000, 300_000)
def test_hosts_of_the_command_line(inputs: int) -> None:
    def take(data: bytes) -> None:
        for each in host.parse(os.fsdecode(data)):
            assert each.name and each.slots >= 0

    go("hosts of -H", inputs, Mutator(SEED, HOSTS, [b",", b":2", b"@", b"[", b"]", b"slots=4"]), take)


@amounts(10_000, 200_000)
def test_hostfiles(inputs: int, path: Path) -> None:
    samples = [b"host1 slots=2\nhost2 slots=4 # the big one\n\nuser@host3\n", b"a:2\n[::1] slots=1\n", *HOSTS]

    def take(data: bytes) -> None:
        path.write_bytes(data)
        for each in host.read(path):
            assert each.name and each.slots >= 0

    go("hostfiles", inputs, Mutator(SEED, samples, [b" slots=", b"slots=0", b"slots=99999", b"\nb"]), take)


@amounts(300, 5_000)
def test_config_files(inputs: int, path: Path) -> None:
    samples = [
        b"np: 2\nhosts: [h1:2, h2:2]\nwarmup-steps: 7\nbroadcast: off\n",
        b"forward:\n  - COLOUR=blue\n  - 'A=1'\ntimeout: 1e3\n",
        b"algorithm: &a sync\noutput: *a\nseed: 0x1f\n",
    ]
    tokens = [
        b"&a ",
        b"*a",
        b"<<: ",
        b"!!python/object/apply:os.system [true]",
        b"2001-99-99",
        b"1:2:3",
        b"!!binary ",
        b"? ",
        b"|\n ",
    ]

    def take(data: bytes) -> None:
        path.write_bytes(data)
        Config(**{name: setting.value for name, setting in file.read(path).items()})

    go("config files", inputs, Mutator(SEED, samples, tokens), take)


def _parts() -> list[bytes]:
    events: list[dict[str, Any]] = [
        {"ts": 0, "ph": "M", "pid": 0, "tid": 0, "name": "process_name", "args": {"name": "rank 0 on h0"}},
        {"ts": 12.5, "ph": "X", "pid": 0, "tid": 1, "dur": 40.25, "name": "step 1", "cat": "step", "args": {"step": 1}},
        {"ts": 13.5, "ph": "X", "pid": 0, "tid": 2, "dur": 4.0, "name": "pack", "cat": "stage", "args": {"step": 1}},
        {"ts": 14.5, "ph": "X", "pid": 0, "tid": 1, "dur": 2.0, "name": "wait", "cat": "wait", "args": {"step": 1}},
        {"ts": 15.5, "ph": "b", "pid": 0, "tid": 2, "id": 3, "name": "step 1, bucket 0", "cat": "queue"},
    ]
    lines = [json.dumps(event, separators=(",", ":")).encode() + b",\n" for event in events]
    return [
        timeline_file.PART_HEAD + b"".join(lines),
        timeline_file.HEAD + b"".join(lines) + b"]}\n",
        timeline_file.PART_HEAD + lines[1],
    ]


@amounts(5_000, 100_000)
def test_timelines(inputs: int, path: Path) -> None:
    begin, end = ClockOffset(0.0, 0.0, 1.0, 1e-6), ClockOffset(0.5, 0.0, 9.0, 1e-6)

    def take(data: bytes) -> None:
        lines = data.partition(b"\n")[2]
        assert _shifted(lines, begin, end).count(b"\n") == lines.count(b"\n")
        path.write_bytes(data)
        summary = Summary()
        read_timeline([path], summary)

    tokens = [b'"args":{}', b'"ts":', b"null", b"1e400", b"NaN", b"[" * 50, b'{"ts":1', b'"dur":"x"']
    go("parts of timelines", inputs, Mutator(SEED, _parts(), tokens), take)


@amounts(300, 5_000)
def test_files_to_compare(inputs: int, tmp_path: Path, path: Path) -> None:
    tensors = {"net.weight": torch.arange(6.0).reshape(2, 3), "net.bias": torch.zeros(2, dtype=torch.bfloat16)}
    torch.save({"model": tensors, "epoch": 3}, tmp_path / "a.pt")
    torch.save(tensors, tmp_path / "b.pt", _use_new_zipfile_serialization=False)
    save_file(tensors, tmp_path / "c.safetensors", {"net.tied": "net.weight"})
    samples = [(tmp_path / name).read_bytes() for name in ("a.pt", "b.pt", "c.safetensors")]

    def take(data: bytes) -> None:
        path.write_bytes(data)
        stored.read(str(path))

    tokens = [b"PK\x03\x04", b"cos\nsystem\n", b"\x80\x02", b'{"a":', b"[0,6]", b"F32", struct.pack("<Q", 1 << 40)]
    go("files to compare", inputs, Mutator(SEED, samples, tokens), take)
