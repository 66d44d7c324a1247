"""`dadt.run`: call a function, instead of a script, on all workers, from Python or a notebook.

In a worker, `python -m dadt.api.run` calls the function and sends back what it returned or raised.
"""

from __future__ import annotations

import pickle
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import fields
from pathlib import Path
from typing import Any

from dadt.api import by_ray
from dadt.config import Config
from dadt.config.config import given_by_env, implied
from dadt.control.agent_client import Control
from dadt.control.schema import RESULT
from dadt.errors import ConfigError, DadtError
from dadt.launch.ending.failure import size
from dadt.launch.ending.outcome import Ended, Outcome
from dadt.launch.ending.preemption import Preempted
from dadt.launch.start.placement import Placed
from dadt.world import World

FILE = "function"
"""Name of the file in the agent's folder with the pickled function and its arguments."""


class WorkerTraceback(Exception):
    """Set as the cause of an exception from a worker, so that Python also prints the worker's traceback."""

    def __init__(self, rank: int, text: str) -> None:
        super().__init__(f"\n\nin worker {rank}:\n{text}")


def run(
    function: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    np: int = 0,
    hosts: str | Sequence[str] = "",
    **settings: Any,
) -> list[Any]:
    """Call `function(*args, **kwargs)` in `np` worker processes, on this host or on `hosts` ("host1:2,host2:2" or a
    list), and return the results by rank.

    In the function, training is distributed as under `dadt run`. settings: fields of Config, such as algorithm="sync".
    Arguments and results must be picklable; functions and classes of a notebook are. With launcher="ray", Ray chooses
    the hosts, and arguments travel through its object store.

    Raises the exception of the worker that failed first, with its traceback as the cause; DadtError if a worker ended
    without an exception or could not be started; KeyboardInterrupt after Ctrl-C.
    """
    config = _config(np, hosts, settings)
    call = (function, tuple(args), dict(kwargs or {}))
    with by_ray.stored(call, config) if config.launcher == "ray" else nullcontext(call) as told:
        placed, outcome = _launch(told, config)
    if outcome.signal:
        raise KeyboardInterrupt
    if outcome.preemption is not None:
        raise Preempted(outcome.preemption.text)
    if outcome.failure is not None:
        _reraise(outcome.failure.ending.rank, outcome.results.get(outcome.failure.ending.rank))
        raise DadtError("\n".join(outcome.failure.lines()))
    missing = [slot.rank for slot in placed[-1].slots if slot.rank not in outcome.results]
    if missing:
        raise DadtError(f"rank {missing[0]} ended well but returned nothing: the function ended its process")
    return [pickle.loads(outcome.results[slot.rank])[1] for slot in placed[-1].slots]


def _launch(told: by_ray.RayReference | by_ray.Call, config: Config) -> tuple[list[Placed], Outcome]:
    """Run the job. Returns where its workers ran, with one entry per start of the job, and how it ended. Raises
    DadtError, and KeyboardInterrupt after Ctrl-C."""
    from dadt.launch import launch
    from dadt.launch.start import plan

    blob = _pickled(told, "the function and its arguments")
    the_plan = plan.make(config, [config.python or sys.executable, "-m", "dadt.api.run"], blob=blob)
    placed: list[Placed] = []
    # Python allows signal handlers only in the main thread. The launcher restores the previous handlers when the job
    # ends.
    signals = threading.current_thread() is threading.main_thread()
    try:
        outcome = launch.run(the_plan, _Streams(), lambda where, watch: placed.append(where), signals)
    except Ended as error:
        raise KeyboardInterrupt from error
    return placed, outcome


def main() -> None:
    """Run in a worker: call the function and send its result."""
    world = World.from_env()
    sys.path.insert(0, str(Path.cwd()))
    told = pickle.loads(Path(world.agent).with_name(FILE).read_bytes())
    function, args, kwargs = told.load() if isinstance(told, by_ray.RayReference) else told
    try:
        value = function(*args, **kwargs)
    except Exception as error:
        _send(world, False, (_picklable(error), traceback.format_exc()))
        raise
    _send(world, True, value)


def _config(np: int, hosts: str | Sequence[str], settings: Mapping[str, Any]) -> Config:
    known = {field.name for field in fields(Config)}
    if unknown := set(settings) - known:
        raise ConfigError(f"dadt.run: {', '.join(sorted(unknown))} is no setting; `dadt config show` lists all")
    listed = hosts if isinstance(hosts, str) else ",".join(hosts)
    given = {"np": np, "hosts": listed}
    chosen = {name: value for name, value in given.items() if value}
    return Config(**implied({**given_by_env(), **chosen, **settings}))


def _send(world: World, well: bool, value: Any) -> None:
    control = Control.connect(world)
    if control is None:
        raise DadtError("dadt.api.run runs under dadt.run only")
    control.result(_pickled((well, value), "what the function returned"))
    control.close()


def _pickled(value: Any, what: str) -> bytes:
    """Pickle the value with cloudpickle. Raises DadtError if the pickled value does not fit into one message."""
    import cloudpickle  # type: ignore[import-untyped]

    blob: bytes = cloudpickle.dumps(value)
    if len(blob) > RESULT:
        raise DadtError(f"{what}: {size(len(blob))} is more than {size(RESULT)} -> pass it through a file")
    return blob


def _picklable(error: Exception) -> Exception | None:
    """Return the exception if it can be pickled and unpickled, otherwise None."""
    import cloudpickle

    try:
        copy: Exception = pickle.loads(cloudpickle.dumps(error))
    except Exception:  # noqa: BLE001 (a user's class may raise anything here; then only the error's text is sent)
        return None
    return copy


def _reraise(rank: int, result: bytes | None) -> None:
    if result is None:
        return
    well, value = pickle.loads(result)
    if well:
        return  # the worker called its function successfully and failed only afterwards
    error, text = value
    if error is None:
        raise DadtError(f"worker {rank} failed\n{text}")
    raise error from WorkerTraceback(rank, text)


class _Streams:
    """Prints the job's output to Python's sys.stdout and sys.stderr, which notebooks show."""

    def __init__(self) -> None:
        self._grows = False

    def say(self, text: str, level: str = "info") -> None:
        self._err(f"dadt: warning: {text}\n" if level == "warning" else f"dadt: {text}\n")

    def part(self, text: str, last: bool = False) -> None:
        beginning = "" if self._grows else "dadt: "
        self._grows = not last
        self._err(beginning + text + ("\n" if last else ""))

    def lines(self, stream: str, data: bytes) -> None:
        to = sys.stdout if stream == "out" else sys.stderr
        to.write(data.decode(errors="replace"))
        to.flush()

    def bars_move(self) -> bool:
        return False

    def meanwhile(self, act: Callable[[], None]) -> None:
        """Does nothing. A terminal would call `act` while its output is blocked, but output to a notebook never
        blocks."""

    def _err(self, text: str) -> None:
        sys.stderr.write(text)
        sys.stderr.flush()


if __name__ == "__main__":
    main()
