"""Defines the frames (messages) allowed on each connection of a job: for each sender the kinds, their fields, and their
largest bodies.

Every frame is checked against these definitions before it is handled. A frame that does not fit ends its connection.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

Check = Callable[[Any], bool]

TEXT = 1 << 16  # most characters of a text that is shown to users
BLOB = 64 << 20  # most bytes that a rank sends to the other ranks in one exchange through the launcher
RESULT = 1 << 30  # most bytes of the function of `dadt.run` with its arguments, and of its result
OUTPUT = 1 << 20  # maximum bytes of a worker's output or stack traces in one frame
MOST_RANKS = 1 << 20
RANKS = re.compile("[0-9]{1,7}")
SIZES = re.compile("-?[0-9]{1,6}")
MARK = re.compile(r"\.dadt-\w+(-[0-9]+){4}-")
RAISED = ("DadtError", "StartTimeout", "PeerLost", "CommTimeout", "NotResumed")
TOKEN = re.compile(r"([0-9a-f]{2}){1,32}")
MOST_AROUND = 16  # most exceptions of one chain, each raised from the next, that a report names
DEPTH = 6  # deepest nesting of JSON values that are forwarded without being read


def whole(least: int = 0, most: int = 1 << 62) -> Check:
    return lambda value: isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def number(value: Any) -> bool:
    """Return whether the value is a finite number. NaN is rejected as well, since every comparison with it is false."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e300


def text(most: int = 4096) -> Check:
    return lambda value: isinstance(value, str) and len(value) <= most


def matching(pattern: re.Pattern[str]) -> Check:
    return lambda value: isinstance(value, str) and pattern.fullmatch(value) is not None


def is_address(value: Any) -> bool:
    """Return whether the value is the text of an IPv4 or IPv6 address. Host names are not accepted."""
    try:
        return isinstance(value, str) and bool(ipaddress.ip_address(value))
    except ValueError:
        return False


def flag(value: Any) -> bool:
    return isinstance(value, bool)


def one_of(*values: str) -> Check:
    return lambda value: isinstance(value, str) and value in values


def maybe(check: Check) -> Check:
    return lambda value: value is None or check(value)


def either(*checks: Check) -> Check:
    return lambda value: any(check(value) for check in checks)


def listed(check: Check, most: int) -> Check:
    return lambda value: isinstance(value, list) and len(value) <= most and all(map(check, value))


def mapped(check: Check, most: int = 4096, names: re.Pattern[str] = re.compile(".*", re.DOTALL)) -> Check:
    """Return a check for dictionaries whose keys, written as in JSON, match the pattern `names`."""
    return lambda value: (
        isinstance(value, dict)
        and len(value) <= most
        and all(map(check, value.values()))
        and all(names.fullmatch(str(name)) for name in value)
    )


def pair(first: Check, second: Check) -> Check:
    return lambda value: isinstance(value, list) and len(value) == 2 and first(value[0]) and second(value[1])


def record(**facts: Check) -> Check:
    """Return a check for dictionaries with exactly these fields. A field name with a trailing underscore means that the
    field (without the underscore) is optional."""
    return lambda value: isinstance(value, dict) and misfit(facts, value) is None


def anything(value: Any, depth: int = DEPTH) -> bool:
    """Return whether a JSON value is nested at most `depth` levels deep. Used for values that are forwarded without
    being read."""
    if isinstance(value, dict):
        value = list(value.values())
    return not isinstance(value, list) or (depth > 0 and all(anything(each, depth - 1) for each in value))


def misfit(facts: Mapping[str, Check], header: Mapping[str, Any]) -> str | None:
    """Return the name of the first field that is missing, wrong or unknown; None if all fields fit."""
    for name, check in facts.items():
        optional = name.endswith("_")
        name = name.rstrip("_")
        if name in header:
            if not check(header[name]):
                return name
        elif not optional:
            return name
    known = {name.rstrip("_") for name in facts}
    return next((name[:80] for name in header if name not in known), None)


class FrameKind(NamedTuple):
    facts: Mapping[str, Check] | None
    """Check for each header field; None allows any fields of limited depth, for frames that are only displayed."""
    body: int = 0
    """Largest number of bytes of the body, which follows the header."""


@dataclass(frozen=True, slots=True)
class Speaker:
    """One side of a connection, with the kinds of frames that it may send."""

    name: str
    """Name of the side for error messages, such as "a worker"."""
    kinds: Mapping[str, FrameKind]
    header: int = 1 << 20
    """Largest number of bytes of a frame's header."""

    def refusal(self, kind: str, header: Mapping[str, Any], body: int) -> str:
        """Return why a frame with this header and a body of this many bytes is not allowed; empty if it is allowed."""
        known = self.kinds.get(kind)
        if known is None:
            return f"{kind[:80]!r} is nothing that {self.name} may say"
        wrong = misfit(known.facts, header) if known.facts is not None else None
        if wrong is not None:
            told = f"{header[wrong]!r:.80}" if wrong in header else "missing"
            return f"{wrong!r:.80} of {kind!r} is not what {self.name} may say: {told}"
        if known.facts is None and not anything(header):
            return f"{kind!r} of {self.name} nests too deep"
        if body > known.body:
            return f"{kind!r} of {self.name} announces {body:,} bytes; {known.body:,} is the most"
        return ""

    def without(self, *kinds: str) -> Speaker:
        return replace(self, kinds={name: kind for name, kind in self.kinds.items() if name not in kinds})


RANK = whole(0, MOST_RANKS)
SIGNAL = whole(1, 64)
PID = whole(2, 1 << 31)  # with 0, 1 or a negative number, kill() would signal a whole group of processes
SECONDS = number
STEP = whole(-1)
COUNT = whole()
LINE = whole()
PORT = whole(0, 65535)
KEY = text(1024)
PATH = text(4096)
ARGUMENTS = listed(text(1 << 20), 1 << 16)
VARIABLES = mapped(text(1 << 20), 1 << 16)
TERMINAL = maybe(pair(whole(0, 65535), whole(0, 65535)))

DEATH = FrameKind({"text": text(TEXT), "steps_": COUNT})
"""Frame that says which rank has ended and how. `steps` is the number of the rank's steps, if it ended successfully."""

_ranks, _writers = listed(RANK, MOST_RANKS), listed(STEP, MOST_RANKS)
APPROACH = FrameKind({"number": COUNT, "rank": RANK, "known": listed(COUNT, MOST_RANKS), "last": flag})
"""A replacement worker, or all of an island, the first of which has this rank, ask to join."""
PROPOSAL = FrameKind({"key": KEY})
"""A rank proposes to do something together, after a step that all ranks find."""
REGROUP = FrameKind({"generation": COUNT, "members": _ranks, "firsts": _ranks, "writers_": _writers, "text": text(TEXT),
                "handed_": COUNT})  # fmt: skip
"""Frame sent when a new generation of ranks begins, for example after a loss. It says which ranks train from now on
(`members`), which rank is the first on each host (`firsts`), and why (`text`)."""

_process: dict[str, Check] = {"rank": RANK, "pid": PID}
_question: dict[str, Check] = {**_process, "timeout": SECONDS, "generation_": COUNT}
_save: dict[str, Check] = {"path": PATH, "count": COUNT, "number": COUNT}
_link = record(peer=RANK, sent=COUNT, received=COUNT, resent=COUNT, busy=number, round_trip=number, queued=COUNT)
MOST_LINKS = 256
_numbers = record(
    samples_=number, waited_=number, clock_=number, sent_=number, plain_=number, late_=number, fell_back_=number,
    differed_=number, step_times_=record(counts=mapped(COUNT, names=SIZES), seconds=number),
    links_=listed(_link, MOST_LINKS),
)  # fmt: skip
_source = record(file=text(), line=maybe(COUNT), function_=maybe(text()), text_=maybe(text()))
_failed: dict[str, Check] = {
    **_process, "type": text(), "message": text(TEXT), "frames": listed(_source, 16), "step": maybe(STEP),
    "secondary": flag, "thread": text(), "time": number, "disk_": text(), "unseen_": text(), "context_": text(),
    "around_": listed(text(), MOST_AROUND),
}  # fmt: skip

_wrote = FrameKind({**_process, "path": PATH, "size_": whole(-2), "count_": COUNT, "number_": COUNT})
_marker = record(index_=RANK, name=text(256), content=text(64))

_passed_on: dict[str, FrameKind] = {
    "hello": FrameKind({**_process, "torch": text(100)}),
    "claim": FrameKind(_question),
    "exchange": FrameKind({**_question, "key": KEY, "island_": flag}, BLOB),
    "put": FrameKind({**_question, "key": KEY}, 16 << 20),
    "get": FrameKind({**_question, "keys": listed(KEY, 1 << 16)}),
    "say": FrameKind({**_process, "text": text(TEXT), "level": one_of("info", "warning")}),
    "numbers": FrameKind({**_process, "step": STEP, "numbers": _numbers}),
    "failed": FrameKind(_failed),
    "exits": FrameKind({**_process, "text": text(TEXT), "frames": listed(_source, 1), "step": STEP}),
    "ending": FrameKind({**_process, "steps": COUNT, "gathered": COUNT}),
    "done": FrameKind({**_process, "summary": mapped(either(number, flag, text()), 64)}),
    "result": FrameKind(_question, RESULT),
    "reconnect": FrameKind({**_question, "text": text(TEXT)}),
    "approach": FrameKind({**_question, "known": COUNT, "last": flag}),
    "give": FrameKind({**_question, "number": COUNT, "last": flag, "more": flag, "text": text(TEXT)}, BLOB),
    "peers": FrameKind({**_question, "starts_": flag}),
    "dump": FrameKind(_process),
    "propose": FrameKind({**_process, "key": KEY, "generation": COUNT}),
    "wrote": _wrote,
}
"""Frames of workers that the agent forwards to the launcher."""

WORKER = Speaker(
    "a worker",
    {
        **_passed_on,
        "stacks": FrameKind({**_process, "path": PATH, "signal": SIGNAL}),
        "listen": FrameKind(_process),
        "writes": FrameKind({**_process, "path": PATH, "mark": matching(MARK)}),
        "saved": FrameKind({**_process, **_save}),
        "await_save": FrameKind({**_question, **_save, "step": STEP, "far_": flag}),
        "shim": FrameKind({**_process, "local_rank": RANK}),
        "spawned": FrameKind(_process),
        "unspawned": FrameKind({"rank": RANK, "message": text(TEXT)}),
        "ended": FrameKind({"rank": RANK, "status": whole(0, 1 << 16), "peak_memory": COUNT}),
    },
)
"""Frames that the agent of a host accepts from a worker, or from the shim that mpirun started in the worker's place."""

_member = record(
    rank=RANK, host=text(), pid=COUNT, state=text(TEXT), said=text(), step=STEP, gathered=COUNT, seconds=number
)

ANSWERS = Speaker(
    "the agent",
    {
        "claimed": FrameKind({"signal": either(SIGNAL, whole(0, 0)), "saves": COUNT}, 64),
        "exchanged": FrameKind({"sizes": listed(COUNT, MOST_RANKS)}, 4 << 30),
        "given": FrameKind({"more": flag}, BLOB),
        "taken": FrameKind({}),
        "peers": FrameKind({"peers": listed(_member, MOST_RANKS)}),
        "reconnect": FrameKind({"anew": flag, "text": text(TEXT)}),
        "saved": FrameKind({"verdict": one_of("there", "write", "yours")}),
        "error": FrameKind({"type": one_of(*RAISED), "message": text(1 << 22)}),
        "death": DEATH,
        "regroup": REGROUP,
        "approach": APPROACH,
        "proposal": PROPOSAL,
        "preempted": FrameKind({}),
        "save": FrameKind({"patience": SECONDS, "count": COUNT}),
        "interrupt": FrameKind({"patience": SECONDS}),
        "order": FrameKind(
            {"command": ARGUMENTS, "env": VARIABLES, "cwd": PATH, "terminal": TERMINAL, "out": PATH, "err": PATH}
        ),
    },
    header=64 << 20,
)
"""Frames that an agent sends to a worker, or to the shim that mpirun started in the worker's place."""

_about_a_peer: dict[str, Check] = {"peer": RANK, "port": PORT, "seconds": number}
_address = record(interface=text(64), address=is_address, speed=number)

_ready: dict[str, Check] = {
    **dict.fromkeys(("version", "python", "torch"), text(100)), **dict.fromkeys(("hostname", "machine"), text(256)),
    "executable": PATH, "cores": whole(1, 1 << 20), **dict.fromkeys(("gpus", "gpu_models"), listed(text(100), 1024)),
    "addresses": listed(_address, 1 << 16), "ports": listed(whole(1, 65535), 64), "pid": PID,
    "problems": listed(text(TEXT), 100), "probe_port_": whole(1, 65535), "token_": matching(TOKEN),
    "marker_": maybe(_marker), "clock": number, "date": number,
}  # fmt: skip
_beat: dict[str, Check] = {
    "steps": mapped(pair(STEP, number), MOST_RANKS, RANKS),
    "memory": mapped(COUNT, MOST_RANKS, RANKS),
    "conditions": mapped(one_of("stopped", "traced", "hanging", "swapping", "busy"), MOST_RANKS, RANKS),
    "clock": number,
}
_exit: dict[str, Check] = {
    "rank": RANK, "code": whole(-255, 255), "time": number, "step": STEP, "stopped": flag,
    **dict.fromkeys(("peak_memory", "memory_limit", "memory_kills"), COUNT),
}  # fmt: skip

AGENT = Speaker(
    "the agent",
    {
        **{name: FrameKind({**(kind.facts or {}), "line": LINE}, kind.body) for name, kind in _passed_on.items()},
        "ready": FrameKind(_ready),
        "probed": FrameKind({"reached": mapped(mapped(number), 1 << 16), "seen_": listed(RANK, 1 << 16)}),
        "beat": FrameKind(_beat),
        "heartbeat": FrameKind({"port": PORT}),
        "silent": FrameKind(_about_a_peer),
        "heard": FrameKind(_about_a_peer),
        "unheard": FrameKind(_about_a_peer),
        "started": FrameKind(_process),
        "unstarted": FrameKind({"message": text(TEXT)}),
        "out": FrameKind({"rank": RANK}, OUTPUT),
        "err": FrameKind({"rank": RANK}, OUTPUT),
        "exit": FrameKind(_exit),
        "stacks": FrameKind(_process, OUTPUT),
        "stack": FrameKind({"number": COUNT, "rank": RANK, "problem": text(TEXT)}, OUTPUT),
        "refused": FrameKind({"rank": RANK, "why": text(TEXT)}),
        "preempted": FrameKind({}),
        "unheeded": FrameKind({"number": SIGNAL, "ranks": _ranks, "handled": flag}),
        "end": FrameKind({"stuck": listed(PID, 1 << 16), "signal": whole(0, 64)}),
    },
    header=8 << 20,
)
"""Frames that the launcher accepts from an agent."""

_worker = record(rank=RANK, local_rank=RANK, env=VARIABLES, command=ARGUMENTS)
_target = record(index=RANK, port=whole(1, 65535), token=matching(TOKEN), addresses=listed(is_address, 1 << 16))

_look: dict[str, Check] = {
    "job": text(64), "index": RANK, "hosts": RANK, "cwd": PATH, "files": listed(PATH, 1 << 16), "env": VARIABLES,
    "prologue": text(1 << 20), "mpi_": text(100), "orphan_timeout": maybe(number),
}  # fmt: skip
_job: dict[str, Check] = {
    "job": text(64), "env": VARIABLES, "workers": listed(_worker, 1 << 16), "cwd": PATH, "terminal": TERMINAL,
    "adopt": number, "stays_": flag, "secret": text(64),
    "heartbeat_": record(index=RANK, address=text(64), timeout=number),
    "checkpoint_": record(number=SIGNAL, grace=number, alone=flag, island=whole(1, MOST_RANKS), saves=COUNT),
}  # fmt: skip

LAUNCHER = Speaker(
    "the launcher",
    {
        "look": FrameKind(_look),
        "probe": FrameKind({"targets": listed(_target, 1 << 16), "markers_": listed(_marker, 1 << 16)}),
        "job": FrameKind(_job, RESULT),
        "stop": FrameKind({"grace_": number, "stacks_": flag, "natural_": number}),
        "interrupt": FrameKind({"grace": number}),
        "preempt": FrameKind({}),
        "answer": FrameKind({"line": LINE, "answer": anything}, 4 << 30),
        "stacks": FrameKind({"number": COUNT, "ranks": listed(RANK, MOST_RANKS)}),
        "signal": FrameKind({"number": SIGNAL, "rank_": RANK, "saves_": COUNT, "ranks_": _ranks}),
        "worker": FrameKind({"rank": RANK}),
        "wrote": _wrote,
        "heartbeat": FrameKind({"hosts": listed(record(index=RANK, address=text(64), port=PORT), 1 << 16)}),
        "death": DEATH,
        "regroup": REGROUP,
        "approach": APPROACH,
        "proposal": PROPOSAL,
        "beat": FrameKind({}),
    },
    header=64 << 20,
)
"""Frames that an agent accepts from the launcher."""

VERDICT = Speaker("node0", {"verdict": FrameKind({"code": whole(0, 255), "lines": listed(text(TEXT), 100)})})
"""Frames from node 0 to `dadt run` on the other nodes, in a job started by hand on each node."""

CALLER = Speaker(
    "a caller",
    {
        "describe": FrameKind({}),
        "stacks": FrameKind({"ranks": maybe(listed(RANK, MOST_RANKS))}),
        "kill": FrameKind({}),
    },
    header=8 << 20,
)
"""Frames from `dadt ps`, `dadt stacks` and `dadt kill` to the launcher of a running job."""

TOLD = Speaker(
    "the launcher",
    {
        "description": FrameKind(None),
        "stack": FrameKind(None, OUTPUT),
        "end": FrameKind({}),
        "killed": FrameKind({"workers": listed(text(), MOST_RANKS), "grace": number}),
    },
    header=64 << 20,
)
"""Frames from the launcher of a running job to `dadt ps`, `dadt stacks` and `dadt kill`."""
