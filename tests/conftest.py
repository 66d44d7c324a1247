"""For all tests: nothing may be left behind, GPU tests need a GPU, and what tests share is made once."""

from __future__ import annotations

import functools
import gc
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import CodeType
from typing import Any

import pytest
from harness import TESTS, job, leftover
from harness.patience import FACTOR
from harness.run import Result, Run, await_nothing_left, end

STARTERS = {"subprocess", "multiprocessing", *(f"harness.{path.stem}" for path in (TESTS / "harness").glob("*.py"))} - {
    "harness.patience"
}
"""Modules by which tests start processes."""
SECONDS_OF_A_TEST = 180.0
"""More than a single wait takes, so that it is the wait that fails, and says what it was for."""
FORKING = {"harness.conformance", "harness.ranks"}
"""What modules of tests import that have ranks forked off a process with torch (harness/ranks.py)."""
OF_RANKS = "tests/comm/backend"
"""Where the ranks are that several modules share: what forks them is there as well."""
SESSION = pytest.StashKey[leftover.Session]()
LEFT = pytest.StashKey[list[str]]()


def pytest_configure(config: pytest.Config) -> None:
    os.environ.setdefault("DADT_OUTPUT", "all")  # most tests look at what each rank has printed
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) == signal.SIG_IGN:  # as under nohup: what the tests start would inherit that
            signal.signal(number, lambda *_: None)
    if not hasattr(config, "workerinput"):  # xdist's workers inherit the mark
        config.stash[SESSION] = leftover.Session()


@pytest.hookimpl(tryfirst=True)  # before xdist, which reads the groups in the same hook
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not Path("/dev/nvidiactl").exists():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="no CUDA device on this machine"))
    leave_for_slow(items)
    for item in items:
        limit = item.get_closest_marker("timeout", pytest.mark.timeout(SECONDS_OF_A_TEST).mark)
        seconds = limit.kwargs.get("timeout", *limit.args[:1])
        item.add_marker(pytest.mark.timeout(FACTOR * seconds), append=False)
        if starts_processes(item):
            item.add_marker(pytest.mark.job)
        if place := shared(item):
            item.add_marker(pytest.mark.xdist_group(place))


def pytest_collection_finish() -> None:
    """What is there now stays to the end: neither the tests nor what they fork look through it for garbage."""
    gc.collect()
    gc.freeze()


def leave_for_slow(items: Sequence[pytest.Item]) -> None:
    """Mark as slow what `sample` leaves out: it spreads its number over the cases."""
    cases: dict[tuple[str, int], list[pytest.Item]] = {}
    for item in items:
        sample = item.get_closest_marker("sample")
        if sample is not None and item.get_closest_marker("slow") is None:
            cases.setdefault((item.nodeid.partition("[")[0], *sample.args), []).append(item)
    for (_, number), some in cases.items():
        kept = {len(some) * i // number for i in range(number)}
        for index in set(range(len(some))) - kept:
            some[index].add_marker(pytest.mark.slow)


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
    sessions = [each.baseid for each in fixtures if each.scope == "session"]
    return next(iter(modules + sessions), OF_RANKS if forks_ranks(item.module) else "")


@functools.cache
def forks_ranks(module: Any) -> bool:
    return not FORKING.isdisjoint(getattr(each, "__module__", "") for each in vars(module).values())


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


@pytest.fixture
def start(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Callable[..., Run]]:
    """start(script, *arguments, **env) -> a running `dadt run`. `-np 2 train.py` where no arguments are given."""
    runs: list[Run] = []
    alone = request.node.get_closest_marker("alone") is not None

    def begin(script: str, *arguments: str, **env: str) -> Run:
        runs.append(Run(tmp_path, script, list(arguments) or ["-np", "2", "train.py"], env, alone))
        return runs[-1]

    yield begin
    end(runs)
    await_nothing_left(tmp_path)


@pytest.fixture
def launch(start: Callable[..., Run]) -> Callable[..., Result]:
    """As `start`, and waits for the end."""
    return lambda script, *arguments, **env: start(script, *arguments, **env).finish()


@pytest.fixture
def dadt_run(tmp_path: Path) -> Callable[..., job.Run]:
    """dadt_run(script, *options, np=2) runs the script; whatever a rank gives to `report` is in Run.ranks."""
    return functools.partial(job.run, tmp_path)


@pytest.fixture(scope="module")
def shared_run(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., job.Run]:
    """As dadt_run, for a job that several tests of a module look at, by `Run.of`."""
    return lambda script, *options: job.run(tmp_path_factory.mktemp("shared"), script, *options, code=None)
