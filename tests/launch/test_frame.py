"""Frames survive being cut anywhere, noise before them, and a reader that is slow."""

from __future__ import annotations

import os

import pytest

from dadt.errors import DadtError
from dadt.launch.frame import MAGIC, NOISE_LIMIT, Frame, Link, Parser

FRAMES = [Frame("a", {"x": [1, None, "é"]}, b"\0\xff" * 50), Frame("b"), Frame("c", {}, b"x")]
WIRE = b"".join(frame.encode() for frame in FRAMES)


@pytest.mark.parametrize("size", [1, 2, 7, 100, 10_000])
def test_frames_come_out_however_the_bytes_are_cut(size):
    parser = Parser()
    parts = [WIRE[i : i + size] for i in range(0, len(WIRE), size)]
    assert [frame for part in parts for frame in parser.feed(part)] == FRAMES


@pytest.mark.parametrize("size", [1, 3, 10_000])
def test_noise_before_the_first_frame_is_skipped(size):
    parser = Parser(noisy=True)
    data = b"Welcome to host7!\n\0D" + MAGIC + WIRE
    parts = [data[i : i + size] for i in range(0, len(data), size)]
    assert [frame for part in parts for frame in parser.feed(part)] == FRAMES


def test_what_is_no_frame_is_refused():
    with pytest.raises(DadtError, match="expected a frame of dadt, got b'Segmentation"):
        list(Parser().feed(b"Segmentation fault, and more"))
    with pytest.raises(DadtError, match="expected an agent"):
        list(Parser(noisy=True).feed(b"x" * (NOISE_LIMIT + 1)))


def test_a_slow_reader_blocks_nobody_and_loses_nothing():
    reader, writer = os.pipe()
    try:
        link = Link(reader, writer)
        sent = [Frame("out", {"i": i}, bytes([i]) * 30_000) for i in range(50)]
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
    link = Link(reader, writer)
    link.send(FRAMES[0])
    os.close(writer)
    assert link.receive() == FRAMES[:1]
    with pytest.raises(EOFError):
        link.receive()
    os.close(reader)
