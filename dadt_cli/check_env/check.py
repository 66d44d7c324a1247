"""Defines the result of one check (a verdict, a value and a remedy), and a function that runs a program for a check."""

from __future__ import annotations

import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from dadt.launch.ending.failure import last_line

PASS, WARN, FAIL = "pass", "warn", "fail"
VERDICTS = (PASS, WARN, FAIL)
"""The verdicts, ordered from good to bad."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckOptions:
    """Options of `dadt check-env`, the same on all hosts."""

    full: bool = False
    """Whether to run also the checks that take longer."""
    hosts: int = 1
    peers: Sequence[str] = ()
    """Names and addresses of all hosts, if there are several."""
    cwd: str = "/"
    """The folder in which workers would start."""
    network_interface: str = ""
    mpirun: str = "mpirun"


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """The result of one check."""

    name: str
    verdict: str
    value: str
    hint: str = ""
    """The remedy for the problem found, in one line; empty if nothing needs to be done."""
    alike: str = ""
    """The verdict if the check's values differ between hosts; empty if they may differ. Checks for which it is not
    empty describe the environment in a bug report."""
    subject: str = ""

    def of(self, subject: str) -> Check:
        return replace(self, subject=subject)


def good(name: str, value: object, hint: str = "", alike: str = "") -> Check:
    return Check(name=name, verdict=PASS, value=str(value), hint=hint, alike=alike)


def warn(name: str, value: object, hint: str, alike: str = "") -> Check:
    return Check(name=name, verdict=WARN, value=str(value), hint=hint, alike=alike)


def fail(name: str, value: object, hint: str, alike: str = "") -> Check:
    return Check(name=name, verdict=FAIL, value=str(value), hint=hint, alike=alike)


def refused(name: str, sentence: str, hint: str) -> Check:
    """Return a failed check for a launcher's error message, which may end in `-> what to do`. hint: the remedy if the
    message has none."""
    value, arrow, remedy = sentence.partition(" -> ")
    return fail(name, value, remedy if arrow else hint)


def worst(checks: Iterable[Check]) -> str:
    """Return the worst verdict of the checks; pass if there are none."""
    return max((check.verdict for check in checks), key=VERDICTS.index, default=PASS)


def said(error: BaseException) -> str:
    """Return an exception's type and message in one line."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:300]}" if lines else type(error).__name__


def ask(command: Sequence[str], seconds: float) -> tuple[str, str]:
    """Run a program and return its output and its failure. The failure is worded as the rest of a sentence that begins
    with the program's name; empty if the program succeeded."""
    try:
        done = subprocess.run(command, capture_output=True, timeout=seconds, check=False)
    except subprocess.TimeoutExpired:
        return "", f" has not answered within {seconds:g} s"
    except OSError as error:
        return "", f" cannot be run ({error.strerror})"
    words = last_line(done.stderr) or last_line(done.stdout) or f"it ended with code {done.returncode}"
    wrong = f": {words}" if done.returncode else ""
    return done.stdout.decode(errors="replace"), wrong
