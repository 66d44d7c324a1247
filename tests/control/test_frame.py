"""Frames survive being cut anywhere, noise before them, and a reader that is slow."""

from __future__ import annotations

import os

import pytest

from dadt.control.frame import LENGTHS, MAGIC, NOISE_LIMIT, Frame, Link, Parser
from dadt.control.schema import AGENT, WORKER, FrameKind, Speaker, anything, listed
from dadt.control.seal import Seal
from dadt.errors import DadtError

KINDS = {"a": FrameKind({"x": listed(anything, 9)}, 1000), "b": FrameKind({}), "c": FrameKind({}, 1)}
SPEAKER = Speaker("a tester", KINDS)
FRAMES = [Frame("a", {"x": [1, None, "é"]}, b"\0\xff" * 50), Frame("b"), Frame("c", {}, b"x")]
WIRE = b"".join(frame.encode() for frame in FRAMES)


@pytest.mark.parametrize("size", [1, 2, 7, 100, 10_000])
def test_frames_come_out_however_the_bytes_are_cut(size):
    parser = Parser(SPEAKER)
    parts = [WIRE[i : i + size] for i in range(0, len(WIRE), size)]
    assert [frame for part in parts for frame in parser.feed(part)] == FRAMES


@pytest.mark.parametrize("size", [1, 3, 10_000])
def test_noise_before_the_first_frame_is_skipped(size):
    parser = Parser(SPEAKER, noisy=True)
    data = b"Welcome to host7!\n\0D" + MAGIC + WIRE
    parts = [data[i : i + size] for i in range(0, len(data), size)]
    assert [frame for part in parts for frame in parser.feed(part)] == FRAMES


def test_what_is_no_frame_is_refused():
    with pytest.raises(DadtError, match="expected a frame of a tester, got b'Segmentation"):
        list(Parser(SPEAKER).feed(b"Segmentation fault, and more"))
    with pytest.raises(DadtError, match="expected an agent"):
        list(Parser(SPEAKER, noisy=True).feed(b"x" * (NOISE_LIMIT + 1)))


def test_a_slow_reader_blocks_nobody_and_loses_nothing():
    reader, writer = os.pipe()
    try:
        link = Link(reader, writer, SPEAKER)
        sent = [Frame("a", {"x": [i]}, bytes([i]) * 1_000) for i in range(200)]
        for frame in sent:
            link.send(frame)
        assert link.unsent
        received = []
        while len(received) < len(sent):
            received += link.receive()
            link.flush()
        assert received == sent and not link.unsent
    finally:
        os.close(reader)
        os.close(writer)


def test_the_end_is_told_after_the_last_frame():
    reader, writer = os.pipe()
    link = Link(reader, writer, SPEAKER)
    link.send(FRAMES[0])
    os.close(writer)
    assert link.receive() == FRAMES[:1]
    with pytest.raises(EOFError):
        link.receive()
    os.close(reader)


WRONG = {
    "no JSON": b"{",
    "no object": b"[]",
    "no kind": b"{}",
    "an unknown kind": b'{"kind": "lost", "message": "the host is gone"}',
    "a kind that is no text": b'{"kind": ["end"]}',
    "a kind that is a number": b'{"kind": 5.0}',
    "a missing fact": b'{"kind": "end", "stuck": []}',
    "a wrong type": b'{"kind": "end", "stuck": [], "signal": "9"}',
    "a number out of bounds": b'{"kind": "end", "stuck": [], "signal": 65}',
    "truth for a number": b'{"kind": "end", "stuck": [], "signal": true}',
    "an infinite number": b'{"kind": "beat", "clock": 1e999}',
    "no number": b'{"kind": "beat", "clock": NaN}',
    "a fact too many": b'{"kind": "end", "stuck": [], "signal": 0, "code": 0}',
    "all processes": b'{"kind": "started", "rank": 0, "pid": -1}',
    "no character": b'{"kind": "unstarted", "message": "\xff"}',
    "a very deep nest": b'{"kind": ' + b"[" * 100_000,
    "a very long number": b'{"kind": "beat", "clock": ' + b"9" * 10_000 + b"}",
}


@pytest.mark.parametrize("header", WRONG.values(), ids=WRONG)
def test_what_an_agent_may_not_say_is_refused_in_a_sentence(header):
    with pytest.raises(DadtError, match="the agent"):
        list(Parser(AGENT).feed(LENGTHS.pack(len(header), 0) + header))


def test_no_memory_is_taken_for_what_is_only_announced():
    """By kind: before a byte of the body has come, and before a header that is too long has."""
    frame = Frame("say", {"rank": 0, "pid": 7, "text": "x", "level": "info"}).encode()
    header = frame[LENGTHS.size :]
    with pytest.raises(DadtError, match="'say' of a worker announces 1,073,741,824 bytes; 0 is the most"):
        list(Parser(WORKER).feed(LENGTHS.pack(len(header), 1 << 30) + header))
    with pytest.raises(DadtError, match="expected a frame of a worker"):
        list(Parser(WORKER).feed(LENGTHS.pack(1 << 30, 0)))


def test_each_kind_that_workers_say_reaches_the_launcher():
    passed_on = set(AGENT.kinds) & set(WORKER.kinds)
    assert {"exchange", "failed", "done", "result"} <= passed_on
    assert all("line" in (AGENT.kinds[kind].facts or {}) for kind in passed_on - {"stacks"})


def ends() -> tuple[Seal, Seal]:
    return Seal.between(b"k" * 32, b"t", b"a", b"b"), Seal.between(b"k" * 32, b"t", b"b", b"a")


@pytest.mark.parametrize("size", [1, 7, 100_000])
def test_a_sealed_connection_carries_what_was_said(size):
    ours, theirs = ends()
    said = os.urandom(200_000)
    wire = ours.closed(said[:5]) + ours.closed(said[5:])
    assert said[:5] not in wire
    assert b"".join(theirs.opened(wire[i : i + size]) for i in range(0, len(wire), size)) == said


def test_a_record_that_was_changed_repeated_left_out_or_given_back_is_noticed():
    ours, theirs = ends()
    first, second = ours.closed(b"one"), ours.closed(b"two")
    back = theirs.closed(b"three")
    for place in range(len(first)):
        changed = bytearray(first)
        changed[place] ^= 1
        with pytest.raises(DadtError, match="changed"):
            ends()[1].opened(bytes(changed) + b"\0" * 300)
    for wire in (first + first, second, back):
        with pytest.raises(DadtError, match="changed, repeated or left out"):
            ends()[1].opened(wire)
    assert theirs.opened(first + second) == b"onetwo"
    with pytest.raises(DadtError, match="length"):
        theirs.opened(b"\xff\xff\xff\xff")


def test_another_process_takes_a_sealed_connection_over():
    ours, theirs = ends()
    theirs.opened(ours.closed(b"hello"))
    taken = Seal.from_text(theirs.to_text())
    assert taken.opened(ours.closed(b"go on")) == b"go on"
    assert ours.opened(taken.closed(b"well")) == b"well"
