"""What workers print arrives: complete in the files, readable on the console."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import textwrap
import time

import pytest
from harness.patience import PATIENCE, SETTLE_SECONDS, await_that
from harness.run import DADT, left_of

from dadt.config.config import Config
from dadt.errors import ConfigError
from dadt.launch.actions import Outbox
from dadt.launch.ending.outcome import Outcome
from dadt.launch.ending.termination import Termination
from dadt.launch.monitor.output import Output, ranks_shown
from dadt.launch.monitor.watch import Watch


def test_lines_carry_their_rank_and_keep_their_order(launch):
    result = launch("import os\nfor i in range(1000): print(os.environ['RANK'], i)")
    assert result.code == 0
    lines = result.out.decode().splitlines()
    for rank in "01":
        mine = [line for line in lines if line.startswith(f"[{rank}] ")]
        assert mine == [f"[{rank}] {rank} {i}" for i in range(1000)]
        assert result.log(int(rank)).decode().splitlines() == [f"{rank} {i}" for i in range(1000)]


def test_stdout_and_stderr_stay_apart(launch):
    result = launch("import sys\nprint('to out'); print('to err', file=sys.stderr)")
    assert sorted(result.out.split(b"\n")) == [b"", b"[0] to out", b"[1] to out"]
    assert "[0] to err\n" in result.err and "[1] to err\n" in result.err
    assert set(result.log(0).split(b"\n")) == {b"to out", b"to err", b""}


def test_binary_garbage_arrives_as_it_is(launch):
    script = (
        "import os, random, sys\n"
        "data = random.Random(3).randbytes(300_000)\n"
        "os.write(2, b'')\n"
        "sys.stdout.buffer.write(data)\n"
    )
    result = launch(script, "-np", "1", "train.py")
    assert result.code == 0
    import random

    assert result.log(0) == random.Random(3).randbytes(300_000)


def test_two_mebibytes_on_both_streams_at_once(launch):
    script = (
        "import os, threading\n"
        "def write(fd, letter):\n"
        "    for i in range(2048):\n"
        "        data = (letter * 1023 + b'\\n')\n"
        "        while data: data = data[os.write(fd, data):]\n"
        "threads = [threading.Thread(target=write, args=each) for each in ((1, b'o'), (2, b'e'))]\n"
        "[t.start() for t in threads]; [t.join() for t in threads]\n"
    )
    result = launch(script)
    assert result.code == 0
    for rank in (0, 1):
        log = result.log(rank)
        assert log.count(b"o") == log.count(b"e") == 2048 * 1023
        assert result.out.count(b"[%d] " % rank + b"o" * 1023 + b"\n") == 2048
        assert result.err.count(f"[{rank}] " + "e" * 1023 + "\n") == 2048


def test_a_progress_bar_does_not_flood_the_console(launch):
    script = (
        "import sys, time\n"
        "for i in range(101):\n"
        "    sys.stderr.write(f'\\r{i:3}% done'); sys.stderr.flush()\n"
        "sys.stderr.write('\\n'); print('after')\n"
    )
    result = launch(script, "-np", "1", "train.py")
    assert re.findall(r"^\[0\] +\d+% done$", result.err, re.M) == ["[0] 100% done"]
    assert result.log(0).count(b"\r") == 101
    assert b"\r" not in result.out


def test_bars_that_have_ended_stand_above_what_is_printed_next(tmp_path):
    shown: list[bytes] = []

    def sink(_: str, data: bytes) -> None:
        shown.extend(data.splitlines())

    output = Output(tmp_path, ["here", "here"], "once", sink, pytest.fail, lambda: True)
    for rank in (0, 1):
        output.write(rank, "err", f"\r 50%|#| 1/2 loss=0.9\r100%|#| 2/2 loss=0.{rank}\n".encode())
        output.write(rank, "out", b"epoch 1 is over\n")
    output.close()
    bars = [b"[%d] 100%%|#| 2/2 loss=0.%d" % (rank, rank) for rank in (0, 1)]
    assert shown == [*bars, b"[0-1] epoch 1 is over"]


def test_what_all_ranks_print_alike_is_shown_once_by_default(launch):
    script = """
        import os, sys
        print("alike")
        print("rank", os.environ["RANK"])
        print("alike again")
        print("a warning", file=sys.stderr)
        if os.environ["RANK"] == "1":
            print("mine alone")
    """
    result = launch(textwrap.dedent(script), "-np", "3", "--output", "once", "train.py")
    lines = result.out.decode().splitlines()
    assert sorted(lines) == sorted(
        ["[0-2] alike", *(f"[{r}] rank {r}" for r in range(3)), "[0-2] alike again", "[1] mine alone"]
    )
    assert lines[0] == "[0-2] alike" and lines.index("[0-2] alike again") > lines.index("[2] rank 2")
    assert result.err.count("a warning") == 1 and "[0-2] a warning\n" in result.err
    assert Config().output == "once"


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        ("rank0", {b"[0] out 0"}),
        ("0,2-3", {b"[0] out 0", b"[2] out 2", b"[3] out 3"}),
        ("errors", set()),
    ],
)
def test_a_filter_leaves_the_files_complete(launch, shown, expected):
    script = "import os, sys\nr = os.environ['RANK']\nprint('out', r); print('err', r, file=sys.stderr)"
    result = launch(script, "-np", "4", "--output", shown, "train.py")
    assert set(result.out.splitlines()) == expected
    errors = {line for line in result.err.splitlines() if line.startswith("[")}
    ranks = range(4) if shown == "errors" else [int(line[1:2]) for line in expected]
    assert errors == {f"[{rank}] err {rank}" for rank in ranks}
    for rank in range(4):
        assert set(result.log(rank).splitlines()) == {b"out %d" % rank, b"err %d" % rank}


def test_a_silent_worker_has_its_file_too(launch):
    result = launch("")
    assert result.log(0) == result.log(1) == b""


def test_the_last_line_may_lack_its_end(launch):
    result = launch("import sys; sys.stdout.write('no end')", "-np", "1", "train.py")
    assert result.out == b"[0] no end\n"


def test_a_reader_that_leaves_ends_the_job(start):
    run = start("while True: print('x' * 1000)")
    run.process.stdout.read(10_000)
    run.process.stdout.close()
    run.process.stdout = None
    run.process.communicate(timeout=PATIENCE)
    assert run.process.returncode == 141


@pytest.mark.parametrize("text", ["", "x", "1-", "9", "-1", "0,,1"])
def test_a_filter_that_names_nobody_is_refused(text):
    with pytest.raises(ConfigError, match="--output"):
        ranks_shown(text, 4)


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_a_file_that_is_full_ends_no_training(tmp_path, stream):
    (tmp_path / "train.py").write_text("print('trained')\n")
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with open("/dev/full", "wb") as full:
        command = [*DADT, "run", "-np", "2", "train.py"]
        done = subprocess.run(command, cwd=tmp_path, timeout=PATIENCE, text=True, **{**pipes, stream: full})
    assert done.returncode == 0
    other = done.stderr if stream == "stdout" else done.stdout
    assert f"dadt: warning: {stream} is incomplete: No space left on device\n" in other
    assert stream == "stdout" or "[1] trained\n" in other
    assert len(list(tmp_path.glob("dadt-logs/*/rank1.log"))) == 1


@pytest.mark.parametrize("arguments", [["config", "show"], ["ps"], ["run", "-np", "2", "--dry-run", "train.py"]])
def test_what_cannot_be_shown_is_told(tmp_path, arguments):
    (tmp_path / "train.py").write_text("")
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [*DADT, *arguments], cwd=tmp_path, timeout=PATIENCE, text=True, stdout=full, stderr=subprocess.PIPE
        )
    assert (done.returncode, done.stderr) == (1, "dadt: stdout: No space left on device\n")


def test_a_reader_who_pauses_does_not_end_the_job(start):
    script = "for i in range(100_000): print(f'{i:080}')\nopen('printed', 'w').close()"
    run = start(script, "-np", "1", "--orphan-timeout", "5", "train.py")
    # Longer than the agent does without a sign of life; more is printed than all the pipes on the way hold.
    time.sleep(7.0)
    assert not (run.folder / "printed").exists()
    result = run.finish()
    assert result.code == 0, result.err
    assert result.out.splitlines() == [f"[0] {i:080}".encode() for i in range(100_000)]


NOISY = "import sys\nfor i in range({}): print(f'{{i:099d}}')"


def slow_reader(start, lines: int, *arguments: str):
    """A run whose stdout is ours to read, or not."""
    return start(NOISY.format(lines), *arguments, "-np", "1", "train.py")


@pytest.mark.slow
def test_a_reader_that_comes_late_gets_everything_of_a_job_that_ended_well(start):
    run = slow_reader(start, 48000)
    time.sleep(6.0)  # longer than anybody waits for anything at a job's end: the pause itself is what is tested
    out, err = run.process.communicate(timeout=PATIENCE)
    assert run.process.returncode == 0, err
    assert out.count(b"\n") == 48000


@pytest.mark.slow
def test_a_reader_that_is_slow_all_the_time_does_not_lose_the_job(start):
    run = slow_reader(start, 6000, "--orphan-timeout", "5")  # 7 s in all
    read = b""
    while chunk := os.read(run.process.stdout.fileno(), 8192):
        read += chunk
        time.sleep(0.1)  # the pause itself is what is tested
    _, err = run.process.communicate(timeout=PATIENCE)
    assert run.process.returncode == 0, err
    assert read.count(b"\n") == 6000


def test_signals_count_while_nobody_reads(start):
    run = slow_reader(start, 400000)
    await_that(lambda: run.process.poll() is None and left_of(run.job), "the worker")
    run.process.send_signal(signal.SIGTERM)
    await_that(lambda: not left_of(run.job), "the end of the worker", seconds=SETTLE_SECONDS)
    run.process.send_signal(signal.SIGTERM)
    assert run.process.wait(PATIENCE) == 143


def test_agents_are_not_overdue_while_nobody_reads_what_they_say() -> None:
    outbox = Outbox()
    termination = Termination(outbox, Watch([], outbox, 0.0, 0.0), Outcome(seconds=0.0), grace=5.0, now=0.0)
    termination.terminate(0.0, "a worker failed", 100.0)
    termination.turn(101.0)
    before = termination.deadline
    for now in (110.0, 160.0):
        termination.excuse(now)
    assert termination.deadline - before == 59.0


def test_agents_are_not_overdue_where_dadt_run_itself_was_away() -> None:
    """It may be stopped, or wait for long to learn why one agent is gone, while the others tell of their ends."""
    outbox = Outbox()
    termination = Termination(outbox, Watch([], outbox, 0.0, 0.0), Outcome(seconds=0.0), grace=5.0, now=0.0)
    termination.terminate(1.0, "a worker failed", 0.0)
    assert not termination.turn(60.0)
    assert not any(termination.turn(now) for now in (62.0, 64.0, 65.9))
    assert termination.turn(66.1)


def test_the_time_in_which_dadt_run_was_away_before_agents_were_told_to_end_does_not_count() -> None:
    outbox = Outbox()
    termination = Termination(outbox, Watch([], outbox, 0.0, 0.0), Outcome(seconds=0.0), grace=5.0, now=0.0)
    termination.terminate(1.0, "a worker failed", 60.0)
    assert not any(termination.turn(now) for now in (60.0, 62.0, 64.0, 65.9))
    assert termination.turn(66.1)
