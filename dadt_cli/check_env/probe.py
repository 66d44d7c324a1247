"""Runs all subjects of `dadt check-env` on this host, each in a process of its own with its own time limit."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict

from dadt.launch.ending.failure import last_line, signal_name
from dadt_cli.check_env import SUBJECTS
from dadt_cli.check_env.check import Check, CheckOptions, fail

AT_ONCE = 4
KILL_SECONDS = 2.0
SLOW = 3.0
"""Factor by which a subject's time limit grows with the option `full`."""


def of_host(
    asked: CheckOptions,
    seen: Callable[[str, list[Check]], None] = lambda subject, checks: None,
    env: Mapping[str, str] = os.environ,
) -> list[Check]:
    """Check all subjects on this host, several at once, and return the checks in order. seen: called from several
    threads whenever a subject has ended."""
    waiting: queue.SimpleQueue[str] = queue.SimpleQueue()
    # Subjects (groups of checks) with the longest time limits start first, so that all are done sooner.
    for subject in sorted(SUBJECTS, key=lambda subject: -SUBJECTS[subject]):
        waiting.put(subject)
    found: dict[str, list[Check]] = {}

    def work() -> None:
        while True:
            try:
                subject = waiting.get_nowait()
            except queue.Empty:
                return
            found[subject] = of_subject(subject, asked, env)
            seen(subject, found[subject])

    threads = [threading.Thread(target=work, name="dadt-check", daemon=True) for _ in range(AT_ONCE)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(longest(asked))
    return [check for subject in SUBJECTS if subject in found for check in found[subject]]


def longest(asked: CheckOptions) -> float:
    """Return the seconds within which all checks of a host end, even if each of them hangs until it is killed."""
    return (SLOW if asked.full else 1.0) * sum(SUBJECTS.values()) + KILL_SECONDS * len(SUBJECTS)


def of_subject(subject: str, asked: CheckOptions, env: Mapping[str, str] = os.environ) -> list[Check]:
    """Run the checks of one subject and return them, with a failed check added if its process did not end normally."""
    seconds = SUBJECTS[subject] * (SLOW if asked.full else 1.0)
    command = [sys.executable, "-m", "dadt_cli.check_env", subject, json.dumps(asdict(asked))]
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=dict(env),
            cwd="/",  # `python -m` searches the current folder first, where the user's files could hide modules
            start_new_session=True,
        )
    except OSError as error:
        hint = "raise the limit of processes (ulimit -u) or of memory"
        return [fail("started", f"no process can be started ({error.strerror})", hint).of(subject)]
    try:
        out, err = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired as late:
        out, err = late.stdout or b"", late.stderr or b""
        _kill(process)
        how = f"no answer within {seconds:g} s"
    else:
        code = process.returncode
        how = f"it was ended by signal {-code} ({signal_name(-code)})" if code < 0 else f"it ended with code {code}"
        how = how if code else ""
    # A killed process may leave an incomplete last line, which is ignored.
    lines = [line for line in out.splitlines(keepends=True) if line.endswith(b"\n")]
    checks = [Check(**json.loads(line)).of(subject) for line in lines]
    if how:
        words = last_line(err)
        hint = f"{sys.executable} -m dadt_cli.check_env {subject} shows where it stays"
        checks.append(fail("ended", f"{how}: {words}" if words else how, hint).of(subject))
    return checks


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill a process and all processes that it has started. A process that hangs in the kernel is left running."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    with suppress(subprocess.TimeoutExpired):
        process.wait(KILL_SECONDS)
    for pipe in (process.stdout, process.stderr):
        if pipe is not None:
            pipe.close()
