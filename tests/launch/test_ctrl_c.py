"""Ctrl-C reaches the script, as under python: it saves, and ends by itself if it can."""

from __future__ import annotations

import re
import signal
import sys
import time
from collections.abc import Callable

import pytest
from harness.patience import await_that
from harness.run import Result, Run, await_end_of

pytestmark = pytest.mark.alone  # the parent of a forked rank counts as a shell, which gets Ctrl-C as well
TRAIN = """
import os, signal, time, torch
torch.set_num_threads(1)
rank = os.environ["RANK"]
model = torch.nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
BEFORE
try:
    for step in range(100_000):
        optimizer.zero_grad()
        model(torch.randn(4, 3)).pow(2).mean().backward()
        optimizer.step()
        if step == 10:
            with open(f"ready{rank}.part", "w") as file: file.write(str(os.getpid()))
            os.rename(f"ready{rank}.part", f"ready{rank}")
        PAUSE
except CAUGHT:
    print("stopped at", step, flush=True)
finally:
    print("finally", flush=True)
torch.save([step, model.state_dict(), optimizer.state_dict()], "last.pt")
print("saved", flush=True)
"""
AFTER = ("-np", "2", "--grace", "60")


def begin(
    start: Callable[..., Run],
    *options: str,
    before: str = "",
    pause: str = "time.sleep(0.01)",
    caught: str = "KeyboardInterrupt",
) -> Run:
    script = TRAIN.replace("BEFORE", before).replace("PAUSE", pause).replace("CAUGHT", caught)
    run = start(script, *(options or AFTER), "train.py")
    run.wait_for("ready0", "ready1")
    return run


def interrupt(run: Run) -> Result:
    run.process.send_signal(signal.SIGINT)
    return run.finish()


def steps(result: Result) -> list[str]:
    return [line.rpartition(" ")[2] for line in result.out.decode().splitlines() if "stopped at" in line]


def test_a_script_that_catches_it_saves_on_all_ranks_after_the_same_step(start) -> None:
    result = interrupt(begin(start))
    assert result.code == 130, result.err
    assert len(steps(result)) == 2 and len(set(steps(result))) == 1, result.out
    assert result.out.count(b"finally") == 2 and result.out.count(b"saved") == 2
    assert (result.logs.parent / "last.pt").exists() and "Traceback" not in result.err
    assert result.err.endswith("dadt: ended by Ctrl-C; all workers stopped\n")


FLAG = "stop = []; signal.signal(signal.SIGINT, lambda *_: stop.append(1))"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "how"),
    [
        (("-H", "localhost:1,127.0.0.1:1"), {}),
        (("--algorithm", "sync"), {}),
        (("--algorithm", "local"), {}),
        (("--algorithm", "gossip"), {}),
        (("--min-np", "1"), {}),
        ((), {"before": FLAG, "pause": "time.sleep(0.01)\n        if stop: break"}),
        ((), {"pause": "time.sleep(9 if step > 10 else 0)"}),
        ((), {"pause": "time.sleep(9 if step > 10 and rank == '1' else 0)"}),
        (("--min-np", "1"), {"pause": "time.sleep(9 if step > 10 and rank == '0' else 0)"}),
    ],
)
def test_it_is_saved_wherever_the_ranks_are(start, options: tuple[str, ...], how: dict[str, str]) -> None:
    result = interrupt(begin(start, *AFTER, *options, **how))
    assert result.code == 130, result.err
    assert result.out.count(b"finally") == 2 and result.out.count(b"saved") == 2, result.out.decode() + result.err
    assert (result.logs.parent / "last.pt").exists()


@pytest.mark.slow
def test_a_script_that_does_not_catch_it_ends_with_one_traceback(start) -> None:
    result = interrupt(begin(start, caught="KeyError"))
    assert result.code == 130 and result.out.count(b"finally") == 2
    assert result.err.count("KeyboardInterrupt") == 1 and not (result.logs.parent / "last.pt").exists()
    assert 'train.py", line' in result.err and not re.search("/dadt/.*line", result.err), result.err


@pytest.mark.slow
def test_what_ignores_it_gets_sigterm_and_what_ignores_that_is_killed(start) -> None:
    ignores = "signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
    tells = "signal.signal(signal.SIGTERM, lambda *_: open(f'asked{rank}', 'w').write('1'))"
    run = begin(start, "-np", "2", "--grace", "2", before=ignores + tells)
    workers = run.wait_for("ready0", "ready1")
    begun = time.monotonic()
    result = interrupt(run)
    assert result.code == 130 and time.monotonic() - begun >= 4
    assert all((run.folder / f"asked{rank}").exists() for rank in (0, 1))
    await_end_of(*workers)


@pytest.mark.slow
def test_the_second_one_ends_at_once(start) -> None:
    run = begin(start, before="signal.signal(signal.SIGINT, lambda *_: open(f'asked{rank}', 'w').write('1'))")
    run.process.send_signal(signal.SIGINT)
    await_that(lambda: all((run.folder / f"asked{rank}").exists() for rank in (0, 1)), "both")
    assert interrupt(run).code == 130


@pytest.mark.slow
def test_a_shell_around_the_script_does_not_go_on(start) -> None:
    script = TRAIN.replace("BEFORE", "").replace("PAUSE", "time.sleep(0.01)").replace("CAUGHT", "KeyboardInterrupt")
    run = start(script, *AFTER, "--no-python", "sh", "-c", f"{sys.executable} train.py; touch went-on")
    run.wait_for("ready0", "ready1")
    assert interrupt(run).code == 130
    assert (run.folder / "last.pt").exists() and not (run.folder / "went-on").exists()
