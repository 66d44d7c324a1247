"""`dadt run`: turns flags into a plan, runs it, and prints the job's outcome."""

from __future__ import annotations

import io
import os
import re
import shutil
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click

from dadt.config import Config
from dadt.config.check import here
from dadt.config.executor import shown
from dadt.config.spelling import misspelt
from dadt.errors import ConfigError
from dadt.launch import launch
from dadt.launch.ending.failure import signal_name
from dadt.launch.ending.outcome import Outcome
from dadt.launch.ending.preemption import ranks
from dadt.launch.monitor.output import ranks_shown
from dadt.launch.monitor.watch import Watch
from dadt.launch.start import environment, plan, saved_start, user_class
from dadt.launch.start.placement import Placed
from dadt_cli.run import live
from dadt_cli.run.dry import describe, placement, size_of
from dadt_cli.run.live import Live
from dadt_cli.run.resumed import as_started
from dadt_cli.terminal import console
from dadt_cli.terminal.options import Brief, config_of, knobs, paths

PYTHON = re.compile(r"python[\d.]*(t|d)?")
MOST = 1 << 20
"""Assumed number of ranks for checking the ranks in --output while the real number is unknown."""


@click.command(
    cls=Brief,
    context_settings={
        "allow_interspersed_args": False,
        "help_option_names": ["-h", "--help"],
        "max_content_width": 110,
    },
    options_metavar="-np N [-H HOSTS] [OPTIONS]",
    epilog="Exits with 0, or the code of the worker that failed first (128 + n if signal n ended it), 2 for bad "
    "input, 3 if workers could not be started or their agent was lost, 75 if it was preempted (--checkpoint-signal), "
    "124 if some did not arrive in time, 130 after Ctrl-C.",
)
@click.argument("command", nargs=-1, type=click.UNPROCESSED, metavar="SCRIPT [ARGS]...", shell_complete=paths("file"))
@click.option("-m", "module", is_flag=True, help="SCRIPT is a module, as with python -m.")
@click.option("--no-python", is_flag=True, hidden=True, help="SCRIPT is any executable.")
@click.option("--dry-run", is_flag=True, help="Only print what would be started.")
@click.option("--display-map", is_flag=True, hidden=True, help="Print where each rank is placed.")
@knobs
def run(command: tuple[str, ...], module: bool, no_python: bool, dry_run: bool, display_map: bool, **given: Any) -> int:
    """Train SCRIPT on N workers, on this host or on those that -H names. ARGS are the arguments of SCRIPT.

    \b
    dadt run -np 2 train.py --epochs 3
    dadt run -np 4 -H host1:2,host2:2 train.py
    dadt run -np 2 -m package.train
    """
    if given["np"] is not None and given["np"] < 0:
        raise ConfigError(f"-np {given['np']}: the number of workers must be 1 or more, or 0 for one per slot")
    if given["resume"] == "":
        raise ConfigError("--resume '': give the four letters of a job, or --resume alone for the last one")
    config = config_of(given)
    if given["np"] == 0:
        config = plan.on_this_host(config)
    if config.resume:
        command, config, module, no_python = as_started(command, given, config, module, no_python)
    for name, meant in misspelt(fields(Config)).items():
        console.say(f"{name} means nothing to dadt; did you mean {meant}?", "warning")
    ranks_shown(config.output, config.np or MOST)
    live.check(config.live)
    if ":" in config.algorithm and not no_python:
        user_class.check("--algorithm", config.algorithm, Path(config.workdir) if module else _folder(command, config))
    the_plan = plan.make(config, *_program(command, module, no_python, config), say=console.say)
    start = saved_start.of(command, config, module=module, no_python=no_python, cwd=here())
    the_plan = replace(the_plan, start=start)
    if dry_run:
        console.text("\n".join(describe(the_plan)), stdout=True)
        plan.release(the_plan)
        return 0
    if config.nnodes and config.node_rank > 0:
        from dadt.launch.launchers.manual import join

        return join(config, the_plan.command, console)
    seen: list[Placed] = []
    if shows := live.wanted(config.live):
        the_plan = the_plan.with_variables(live.variables())

    def placed(where: Placed, watch: Watch) -> Live | None:
        seen.append(where)
        console.say(_first_line(where))
        if config.verbose:
            console.say(where.why)
        if display_map:
            console.text("\n".join(placement(where)))
        for text in _warnings(where):
            console.say(text, "warning")
        return live.show(watch, _title(where)) if shows else None

    # Ray prints logs of lost nodes to sys.stdout, so sys.stdout is replaced. Workers' output is written to file
    # descriptors instead, and so is still shown.
    if config.launcher == "ray":
        sys.stdout = sys.stderr if config.verbose else io.StringIO()
    outcome = launch.run(the_plan, console, placed)
    return _finish(outcome, seen[-1])


def _program(command: Sequence[str], module: bool, no_python: bool, config: Config) -> tuple[list[str], list[str]]:
    """Return the command line of a worker, and the files that must exist where the worker runs."""
    if not command or not command[0]:
        raise ConfigError("which script? Give its path, as in dadt run -np 2 train.py")
    first = command[0]
    python = config.python or sys.executable
    if module and no_python:
        raise ConfigError("-m and --no-python exclude each other: a module is run by python")
    if module:
        _find_module(first, config)
        return [python, "-m", *command], []
    if no_python or PYTHON.fullmatch(Path(first).name):
        if shutil.which(first) is None:
            raise ConfigError(f"{first}: there is no such executable; give its path or check PATH")
        if not no_python and len(command) == 1:
            raise ConfigError(f"which script? {first} alone reads from the terminal, which workers do not have")
        if not no_python and not command[1].startswith("-"):
            _find_script(command[1], config)
            return list(command), [command[1]]
        return list(command), []
    _find_script(first, config)
    return [python, *command], [first]


def _folder(command: Sequence[str], config: Config) -> Path:
    """Return the folder of the script, which Python searches for modules first."""
    words = [word for word in command if not word.startswith("-") and not PYTHON.fullmatch(Path(word).name)]
    return (Path(config.workdir) / words[0]).parent if words else Path(config.workdir)


def _find_script(path: str, config: Config) -> None:
    """Check that the script exists on this host, where it most likely has the same path as on other hosts. With
    --workdir, only the other hosts check this. Raises ConfigError if the script is missing."""
    script = Path(config.workdir) / path
    try:
        if script.is_dir() and not (script / "__main__.py").is_file():
            raise ConfigError(f"{path} is a directory: give the path of a Python script")
        there = script.exists() or bool(config.workdir)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from error
    if not there:
        where = "" if script.is_absolute() else f" in {here()}"
        raise ConfigError(f"{path}: there is no such script{where}")


def _find_module(name: str, config: Config) -> None:
    """Check that the module exists. Only its top-level package is looked up, since looking up submodules would import
    the package. Raises ConfigError if the module is missing."""
    top = name.partition(".")[0]
    if not top or "/" in name:
        raise ConfigError(f"-m {name}: give the name of a module, as in dadt run -np 2 -m package.train")
    try:
        installed = find_spec(top) is not None
    except ValueError:
        # Function find_spec() raises ValueError for __main__, which is this command itself, and for relative names.
        installed = False
    if not (installed or Path(top).exists() or Path(f"{top}.py").exists() or config.workdir):
        raise ConfigError(f"-m {name}: there is no module {top}, neither installed nor in {here()}")


def _warnings(where: Placed) -> list[str]:
    texts = []
    workers = Counter(slot.cross_rank for slot in where.slots)
    for cross_rank, node in enumerate(where.nodes):
        count = workers[cross_rank]
        cores = int(node.report["cores"])
        if count > cores:
            on = f" on {node.name}" if node.name else ""
            texts.append(f"{count} workers share {cores} CPU cores{on}: each may be slower than alone")
    program = where.plan.command
    if PYTHON.fullmatch(Path(program[0]).name):
        for flags in environment.isolating_flags(program[1:]):
            texts.append(
                f"python {flags} ignores the environment, or installed packages, by which DADT gets into the script: "
                "leave it out if training turns out not to be distributed"
            )
    return texts


def _first_line(where: Placed) -> str:
    config = where.config
    executor = "" if len(where.slots) == 1 else f", executor {shown(config)}"
    return f"{size_of(where)}{executor}, algorithm {config.algorithm} (job {where.job}, logs in {where.logs})"


def _title(where: Placed) -> str:
    return f"job {where.job}: {size_of(where)}, algorithm {where.config.algorithm}, executor {shown(where.config)}"


def _finish(outcome: Outcome, where: Placed) -> int:
    """Print how the job ended. If it failed, the failure is printed last."""
    if outcome.stuck:
        pids = ", ".join(map(str, outcome.stuck))
        console.say(
            f"processes {pids} do not end, even when killed, as where they hang in the kernel (device, file server)",
            "warning",
        )
    goes_on = f"; go on with: {outcome.resume}" if outcome.resume else ""
    if outcome.signal:
        by = "Ctrl-C" if outcome.signal == 2 else f"signal {outcome.signal} ({signal_name(outcome.signal)})"
        console.say(f"ended by {by}; all workers stopped{goes_on}")
    elif outcome.preemption is not None:
        console.say(f"{outcome.preemption.text}{goes_on}")
    elif outcome.failure is not None:
        console.block(outcome.failure.lines())
    else:
        if text := _missed(outcome):
            console.say(text)
        console.say(_last_line(outcome))
        if (reason := launch.not_distributed(outcome, where)) is not None:
            console.say(f"training was NOT distributed by DADT: {reason}", "warning")
    return outcome.exit_code


def _missed(outcome: Outcome) -> str:
    """Return a sentence about files that were not kept, since only ranks other than the first of their host wrote them;
    empty if there are no such files."""
    found = [summary for summary in outcome.summaries.values() if summary.get("files_missed")]
    if not found:
        return ""
    count = sum(summary["files_missed"] for summary in found)
    one = f"such as {os.path.relpath(found[0]['file_missed'])}"
    what = f"{count} files" if count > 1 else "1 file"
    who = "that only ranks other than the first of their host wrote"
    return f"not kept: {what} {who}, {one} (--files all keeps what every rank writes)"


def _last_line(outcome: Outcome) -> str:
    line = f"done in {outcome.seconds:.1f} s"
    if outcome.restarts:
        line += f", after {outcome.restarts} restart{'s' * (outcome.restarts > 1)}"
    if missing := {loss.rank for loss in outcome.losses if loss.replaced is None}:
        line += f", without {ranks(missing)}"
    if replaced := {loss.rank for loss in outcome.losses if loss.replaced is not None} - missing:
        line += f", with new workers in place of {ranks(replaced)}"
    summary: Mapping[str, Any] = outcome.summaries.get(min(outcome.summaries, default=0), {})
    if steps := int(summary.get("steps", 0)):
        delayed = int(summary.get("delayed", 0))
        waiting = 100 * summary.get("wait_fraction", 0.0)
        line += f": {steps} steps, " + (f"{delayed} of them delayed by one" if delayed else "none delayed")
        line += f" ({why}), " if (why := summary.get("why")) else ", "
        line += f"{waiting:.1f} % of the time spent waiting for communication"
        if stood := summary.get("stood", 0.0):
            line += f"; training stood still for {stood:.1f} s while ranks connected anew"
        if bad := summary.get("not_finite", 0):
            line += f"; gradients of {bad} steps were not finite"
        if differed := [rank for rank, each in outcome.summaries.items() if each.get("differed")]:
            line += f"; weights of {ranks(differed)} had come to differ from the others'"
        if sent := summary.get("sent", 0):
            less = summary.get("plain", 0) / sent
            line += f"; sent {sent / steps / 1e6:.3g} MB per step, {less:.1f}x less than uncompressed"
    return line
