"""For all tests: nothing may be left behind, GPU tests need a GPU, and what tests share is made once."""

from __future__ import annotations

import signal
from pathlib import Path
from types import CodeType
from typing import Any

import leftover
import pytest

STARTERS = {"subprocess", "multiprocessing", "run", "machine", "core.ranks", "ranks", "api_run", "job", "terminal"}
"""Modules by which tests start processes."""
SESSION = pytest.StashKey[leftover.Session]()
LEFT = pytest.StashKey[list[str]]()


def pytest_configure(config: pytest.Config) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) == signal.SIG_IGN:  # as under nohup: what the tests start would inherit that
            signal.signal(number, lambda *_: None)
    if not hasattr(config, "workerinput"):  # xdist's workers inherit the mark
        config.stash[SESSION] = leftover.Session()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not Path("/dev/nvidiactl").exists():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="no CUDA device on this machine"))
    for item in items:
        if starts_processes(item):
            item.add_marker(pytest.mark.job)
        if place := shared(item):
            item.add_marker(pytest.mark.xdist_group(place))


def starts_processes(item: pytest.Item) -> bool:
    """Whether it uses a fixture of a folder's conftest.py, or reaches one of STARTERS by what it calls."""
    fixtures = [each for found in item._fixtureinfo.name2fixturedefs.values() for each in found if each.baseid]
    known: set[str] = set()

    def reaches(function: Any) -> bool:
        code, names = getattr(function, "__code__", None), getattr(function, "__globals__", {})
        for name in _names(code) - known if code else ():
            known.add(name)
            value = names.get(name)
            if name in STARTERS or getattr(value, "__module__", "") in STARTERS or reaches(value):
                return True
        return False

    own = [each.func for each in fixtures if each.baseid.endswith(".py")]
    return len(own) < len(fixtures) or any(map(reaches, [item.function, *own]))


def _names(code: CodeType) -> set[str]:
    return set(code.co_names).union(*(_names(each) for each in code.co_consts if isinstance(each, CodeType)))


def shared(item: pytest.Item) -> str:
    """Where a test has something in common with others: `--dist loadgroup` gives all of them to one of xdist's
    workers, as each would make it for itself. Empty if it has not."""
    fixtures = [each for found in item._fixtureinfo.name2fixturedefs.values() for each in found if each.baseid]
    modules = [item.nodeid.partition("::")[0] for each in fixtures if each.scope == "module"]
    return next(iter(modules + [each.baseid for each in fixtures if each.scope == "session"]), "")


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """After all tests, and after xdist's workers have ended."""
    if SESSION in session.config.stash:
        left = session.config.stash[LEFT] = session.config.stash[SESSION].leftovers()
        if left and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if left := config.stash.get(LEFT, []):
        terminalreporter.section("left behind by the tests", red=True, bold=True)
        for line in left:
            terminalreporter.line(line, red=True)
