"""Merges the timeline parts of all ranks into one file, over the C++ engine with which the ranks have trained."""

from __future__ import annotations

import io
import json
import re
import zlib
from collections.abc import Sequence
from contextlib import suppress
from typing import IO, Any

from dadt.comm.trace.clock import ClockOffset, align
from dadt.comm.trace.gather import TimelinePeers
from dadt.comm.trace.recorder import Timeline
from dadt.control import private_files
from dadt.control.timeline_file import HEAD, PART_HEAD
from dadt.errors import CommError

_EVENT = re.compile(rb'\{"ts":(-?[0-9]{1,20}(?:\.[0-9]{1,20})?),(.*)', re.DOTALL)
_PIECE_BYTES = 4 * 2**20
_ALL_PIECES_BYTES = 64 * 2**20
"""Maximum number of bytes that rank 0 reads into memory at a time, of all ranks' parts together."""


def merge(timeline: Timeline, peers: TimelinePeers, members: Sequence[int]) -> str:
    """Stop the timeline and merge the files of all ranks into one. Returns a message for the user, empty if called
    again. members: the ranks that have not been lost; `peers` connects them.

    If ranks' files cannot be merged, raises nothing and leaves them in place.
    """
    timeline.stop()
    if timeline.merged_by is not None:
        return ""
    timeline.merged_by = peers
    return Merge(timeline, peers, members).run()


class Merge:
    """One rank's side of merging a timeline; all remaining ranks run it."""

    def __init__(self, timeline: Timeline, peers: TimelinePeers, members: Sequence[int]) -> None:
        self._timeline = timeline
        self._members = members
        self._peers = peers
        self._piece = min(_PIECE_BYTES, max(2**16, _ALL_PIECES_BYTES // len(members)))
        self._beside = timeline.path.with_name(f"{timeline.path.name}.part")
        self._error = ""
        """Reason why the first rank cannot write the file; empty if it can."""
        self._unread = ""
        """Reason why this rank's part is missing or incomplete in the file; empty if complete."""

    def run(self) -> str:
        """Merge the parts and return the message for the user. If this fails, the ranks' files remain unchanged."""
        try:
            return self._run()
        except (CommError, OSError, RuntimeError) as error:
            with suppress(OSError):
                self._beside.unlink(missing_ok=True)
            return self._in_parts(str(error))

    def _run(self) -> str:
        timeline = self._timeline
        end = align(self._peers, timeline.world)
        # If rank 0 was lost, the drift of its clock is unknown, so the offset from the beginning is used.
        end = end if 0 in self._members else timeline.clock
        source, size = self._source()
        with source:
            mine = {"rank": timeline.world.rank, "size": size, "error": timeline.error}
            heads = [json.loads(head) for head in self._allgather(mine, "sizes")]
            if [head["rank"] for head in heads] != list(self._members):
                return self._in_parts("the executor moves nothing between ranks")
            target = self._open() if timeline.world.rank == self._members[0] else None
            for number in range(-(-max(head["size"] for head in heads) // self._piece)):
                lines = _shifted(self._lines(source, number), timeline.clock, end)
                for theirs in self._peers.gather(zlib.compress(lines, 1), f"timeline: piece {number}"):
                    self._append(target, theirs)
        if target is not None:
            self._finish(target, len(heads))
        every = self._allgather({"error": self._error, "unread": self._unread}, "written")
        verdicts = [json.loads(each) for each in every]
        if verdicts[0]["error"]:
            return self._in_parts(verdicts[0]["error"])
        if not self._unread:
            timeline.part.unlink()
        errors = [head["error"] or verdict["unread"] for head, verdict in zip(heads, verdicts, strict=True)]
        told = [f"; rank {rank} is incomplete: {why}" for rank, why in zip(self._members, errors, strict=True) if why]
        lost = set(range(timeline.world.world_size)) - set(self._members)
        told += [f"; without rank {rank}, which was lost" for rank in sorted(lost)]
        return f"timeline: {timeline.path} (dadt timeline, or ui.perfetto.dev){''.join(told)}"

    def _in_parts(self, why: str) -> str:
        return f"the timeline was not merged ({why}): its parts are {self._timeline.path}.rank0 and so on"

    # All ranks: one whose part cannot be read adds nothing, as the others go on -------------------------------------

    def _source(self) -> tuple[IO[bytes], int]:
        """Return this rank's part, opened for reading, and its size in bytes; an empty one if the part cannot be
        read."""
        part = self._timeline.part
        try:
            return part.open("rb"), part.stat().st_size
        except OSError as error:
            self._unread = f"{part} could not be read ({error.strerror})"
            return io.BytesIO(), 0

    def _lines(self, source: IO[bytes], number: int) -> bytes:
        """Return the lines that begin in piece `number` of the part; empty if it cannot be read."""
        try:
            return self._read(source, number)
        except OSError as error:
            self._unread = f"{self._timeline.part} could not be read ({error.strerror})"
            return b""

    def _read(self, source: IO[bytes], number: int) -> bytes:
        def boundary(at: int) -> int:
            if at == 0:
                return len(PART_HEAD)
            source.seek(max(at - 1, 0))
            source.readline()
            return source.tell()

        begin, end = boundary(number * self._piece), boundary((number + 1) * self._piece)
        source.seek(begin)
        return source.read(end - begin)

    def _allgather(self, value: dict[str, Any], name: str) -> list[bytes]:
        data = json.dumps(value).encode()
        return self._peers.allgather(data, f"timeline: {name}")

    # First rank only: it goes on after an error, because the other ranks do -----------------------------------------

    def _open(self) -> IO[bytes] | None:
        try:
            file = private_files.open_file(self._beside)
            file.write(HEAD)
        except OSError as error:
            self._error = f"{self._beside}: {error.strerror}"
            return None
        return file

    def _append(self, file: IO[bytes] | None, compressed: bytes) -> None:
        if file is None or self._error:
            return
        try:
            file.write(_unpacked(compressed))
        except OSError as error:
            self._error = f"{file.name}: {error.strerror}"
        except zlib.error as error:
            self._error = f"a rank's part is damaged ({error})"

    def _finish(self, file: IO[bytes], ranks: int) -> None:
        last = {"ts": 0, "ph": "M", "pid": 0, "tid": 0, "name": "dadt", "args": {"ranks": ranks}}
        try:
            if not self._error:
                file.write(json.dumps(last, separators=(",", ":")).encode() + b"\n]}\n")
            file.close()
            if not self._error:
                self._beside.replace(self._timeline.path)
        except OSError as error:
            self._error = self._error or f"{self._timeline.path}: {error.strerror}"
        if self._error:
            self._beside.unlink()


def _unpacked(compressed: bytes) -> bytes:
    """Decompress a piece, up to a limit, since a few KiB could expand to GiB. Raises zlib.error for damaged or too
    large data."""
    unpacking = zlib.decompressobj()
    data = unpacking.decompress(compressed, _ALL_PIECES_BYTES)
    if not unpacking.eof:
        raise zlib.error("it is cut short, or its lines have no end")
    return data


def _shifted(lines: bytes, begin: ClockOffset, end: ClockOffset) -> bytes:
    """Return the events with times on rank 0's clock. Times are corrected if the two clocks have drifted apart since
    the beginning by more than the error of measurement."""
    drift = end.offset - begin.offset
    if abs(drift) <= begin.error + end.error:
        return lines
    rate = drift / (end.at - begin.at)
    shifted = []
    for line in lines.splitlines(keepends=True):
        found = _EVENT.fullmatch(line)
        if found is None:  # a damaged line is copied, since programs that read the timeline report it
            shifted.append(line)
            continue
        at = float(found[1])
        elapsed = at - (begin.at - begin.origin) * 1e6
        shifted.append(b'{"ts":%.3f,%b' % (at + rate * elapsed, found[2]))
    return b"".join(shifted)
