"""Of what redraws itself the last state stays, as on a terminal; everything else comes through at once."""

from __future__ import annotations

import io
import random
from collections.abc import Callable
from itertools import pairwise

import pytest
from rich.console import Console
from rich.progress import Progress

from dadt.launch.monitor.printed import BAR_SECONDS, LEFT_SECONDS, LINE_LIMIT, ROWS, Printed

UP = "\x1b[A"


def nested(epochs: int = 3, steps: int = 20) -> str:
    """What tqdm writes for a bar in a bar: the inner one is a row below, and is wiped at the end."""
    text = ""
    for epoch in range(epochs):
        text += f"\router {epoch}/{epochs}"
        for step in range(steps):
            text += f"\n\rinner {step}/{steps}{UP}"
        text += "\n\r" + " " * 12 + UP
        # tqdm.write: both rows are wiped for a line of its own.
        text += "\r" + " " * 12 + "\r" + f"epoch {epoch} is over\n"
    return text + f"\router {epochs}/{epochs}\n"


def keras(epochs: int = 2, steps: int = 10) -> str:
    """As Keras 3 writes it: it goes back by backspaces and by a carriage return."""
    text = ""
    for epoch in range(epochs):
        text += f"Epoch {epoch + 1}/{epochs}\n"
        for step in range(1, steps + 1):
            text += ("\b" * 30 if step > 1 else "") + f"\r\x1b[1m{step}/{steps}\x1b[0m loss: {1 / step:.2f}"
        text += "\n"
    return text


def rich(steps: int = 20) -> list[str]:
    """Two bars, a third one after half of the steps, and a message, as rich draws them where it takes a pipe for a
    terminal: each time it does so."""
    file, drawn = io.StringIO(), [""]
    console = Console(file=file, force_terminal=True, width=60, color_system=None, _environ={"TERM": "xterm"})
    with Progress(console=console, auto_refresh=False) as progress:
        for step in range(steps):
            if step in (0, 1, steps // 2):
                progress.add_task(f"bar {step}", total=steps)
            if step == 3:
                console.print("a message")
            for task in progress.task_ids:
                progress.update(task, completed=step + 1)
            progress.refresh()
            drawn.append(file.getvalue())
    return [after.removeprefix(before) for before, after in pairwise([*drawn, file.getvalue()])]


def lines_of(text: str, pieces: int = 1, seed: int = 0) -> list[str]:
    """The lines, where the text comes in so many pieces, a hundredth of a second apart."""
    draw, printed, lines, data = random.Random(seed), Printed(), [], text.encode()
    cuts = sorted(draw.randrange(len(data) + 1) for _ in range(pieces - 1))
    for index, (start, end) in enumerate(zip([0, *cuts], [*cuts, len(data)], strict=True)):
        lines += printed.feed(data[start:end], index / 100)
    lines += [*printed.tick(pieces / 100 + LEFT_SECONDS), *printed.finish()]
    return [line.decode() for line in lines]


@pytest.mark.parametrize("pieces", [1, 40])
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("".join(f"\r{step}%" for step in range(101)) + "\nafter\n", ["100%", "after"]),
        ("".join(f"{step}%\r" for step in range(101)) + "\nafter\n", ["100%", "after"]),
        ("".join(f"{step}%\x1b[K\x1b[1G" for step in range(101)) + "\nafter\n", ["100%", "after"]),
        ("".join(f"\x1b[2K\x1b[G{step}%" for step in range(101)) + "\nafter\n", ["100%", "after"]),
        ("".join(f"\r{step}%" for step in range(9)) + "\r" + " " * 9 + "\rafter\n", ["after"]),
        ("".join(f"\r{step}%" for step in range(9)), ["8%"]),
        ("".join("|/-\\"[step % 4] + "\b" for step in range(9)) + "done\n", ["done"]),
        (nested(), ["epoch 0 is over", "epoch 1 is over", "epoch 2 is over", "outer 3/3"]),
        (keras(), ["Epoch 1/2", "\x1b[1m10/10\x1b[0m loss: 0.10", "Epoch 2/2", "\x1b[1m10/10\x1b[0m loss: 0.10"]),
        ("a line\r\nanother\r\n\n", ["a line", "another", ""]),
        ("\x1b[31mred\x1b[0m\nplain\n", ["\x1b[31mred\x1b[0m", "plain"]),
    ],
    ids=["carriage", "after", "erased", "column", "wiped", "endless", "spinner", "nested", "keras", "crlf", "colours"],
)
def test_the_last_state_stays(text: str, expected: list[str], pieces: int):
    for seed in range(20 if pieces > 1 else 1):
        assert lines_of(text, pieces, seed) == expected


@pytest.mark.parametrize("seconds", [0.01, 0.5])
def test_bars_of_rich(seconds: float):
    printed, found = Printed(), []
    for index, piece in enumerate(rich()):
        found += printed.feed(piece.encode(), index * seconds, float("inf"))
        found += printed.tick((index + 1) * seconds - 0.001, float("inf"))
    found += printed.tick(100.0)
    assert [line.split()[0] for line in found] == [b"a", b"bar", b"bar", b"bar"], found
    assert [line.split()[1] for line in found] == [b"message", b"0", b"1", b"10"]
    assert all(b"100%" in line and "━━━".encode() in line for line in found[1:])


def test_lines_below_a_hidden_cursor_are_not_held_back():
    printed = Printed()
    assert printed.feed(b"\x1b[?25lone\ntwo\n", 0.0) == []
    assert printed.tick(printed.due()) == [b"one", b"two"]


def test_a_bar_that_moves_for_long_is_shown_at_times():
    printed, shown = Printed(), []
    for second in range(100):
        shown += printed.feed(f"\r{second}%".encode(), float(second))
    assert shown == [b"30%", b"60%", b"90%"] and BAR_SECONDS == 30
    assert printed.due() == 120
    assert printed.feed(b"\r99%\n", 100.0) == []
    assert printed.due() == 100 + LEFT_SECONDS
    assert printed.tick(100 + LEFT_SECONDS) == [b"99%"] and printed.finish() == []


def test_a_bar_that_is_seen_elsewhere_is_shown_at_its_end():
    printed, shown = Printed(), []
    for second in range(100):
        shown += printed.feed(f"\r{second}%".encode(), float(second), float("inf"))
    assert shown == [] and printed.due(float("inf")) == float("inf")
    assert printed.feed(b"\nnext\n", 100.0) == [b"99%", b"next"]


def test_an_end_that_was_shown_already_is_not_shown_again():
    printed = Printed()
    printed.feed(b"\r100%", 0.0)
    assert printed.tick(31.0) == [b"100%"]
    assert printed.feed(b"\nnext\n", 32.0) == [b"next"]


def test_bars_end_where_another_stream_is_written_to():
    printed = Printed()
    assert printed.feed(b"\r100%\n", 0.0) == [] and printed.settle() == [b"100%"] and printed.finish() == []
    for returns in (b"\router\n\rinner", b"\x1b[?25l\rbar\n"):
        printed = Printed()
        assert printed.feed(returns, 0.0) == printed.settle() == []


def test_lines_without_bars_are_not_held_back():
    printed = Printed()
    assert printed.feed(b"one\ntw", 0.0) == [b"one"]
    assert printed.feed(b"o\n\n\xff\n", 0.0) == [b"two", b"", b"\xff"]
    assert printed.due() == float("inf")


def test_a_line_without_end_is_cut():
    printed = Printed()
    assert [len(part) for part in printed.feed(b"x" * (3 * LINE_LIMIT + 5), 0.0)] == [LINE_LIMIT] * 3
    assert printed.finish() == [b"x" * 5]


@pytest.mark.parametrize(
    "step", [b"\rx\n", b"x\x1b[B", b"\x1b[999999999999999B", b"\x1b[9A\rx" * 9, b"\x08" * 9 + b"y"]
)
def test_rows_are_bounded(step: bytes):
    printed = Printed()
    for _ in range(200):
        printed.feed(step, 0.0)
    assert len(printed._rows) <= ROWS


@pytest.mark.parametrize(
    "piece", [b"\r", b"\x1b", b"\x1b[", b"7" * 1000, b"\x1b[" + b"7" * 5000 + b"A"], ids=list("reb7A")
)
def test_what_is_unfinished_is_bounded(piece: bytes):
    printed = Printed()
    printed.feed(b"\x1b[", 0.0)
    for _ in range(1000):
        printed.feed(piece, 0.0)
        assert len(printed._rest) < 16 and sum(len(row.drawn) for row in printed._rows) <= LINE_LIMIT


@pytest.mark.parametrize("make", [nested, keras, lambda: "".join(rich())], ids=["nested", "keras", "rich"])
def test_random_pieces_lose_no_end(make: Callable[[], str]):
    whole = lines_of(make())
    for seed in range(30):
        assert lines_of(make(), 60, seed) == whole
