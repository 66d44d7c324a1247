"""`dadt run`: from flags to a job, and from its outcome to the last lines on the screen."""

from __future__ import annotations

import re
import secrets
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click

from dadt.config import Config
from dadt.errors import ConfigError
from dadt.launch import environment, machine
from dadt.launch.folder import Folder
from dadt.launch.job import Job, Outcome
from dadt.launch.output import Output, ranks_shown
from dadt.launch.slot import Slot, place
from dadt_cli import console
from dadt_cli.options import config_of, help_all, knobs

PYTHON = re.compile(r"python[\d.]*(t|d)?")


@click.command(
    context_settings={
        "allow_interspersed_args": False,
        "help_option_names": ["-h", "--help"],
        "max_content_width": 110,
    },
    options_metavar="-np N [OPTIONS]",
    epilog="Ends with 0, or the exit code of the worker that failed first (128 + n if signal n ended it), 2 for bad "
    "input, 3 if workers could not be started or their agent was lost, 124 if some did not arrive in time, 130 after "
    "Ctrl-C.",
)
@click.argument("command", nargs=-1, type=click.UNPROCESSED, metavar="SCRIPT [ARGS]...")
@click.option("-np", "--np", "-n", "--num-proc", "count", type=int, metavar="N", help="Number of workers.")
@click.option("-m", "module", is_flag=True, help="SCRIPT is a module, as with python -m.")
@click.option("--no-python", is_flag=True, help="SCRIPT is any executable.")
@click.option("--output", default="all", metavar="WHAT", help="Shown here: all, rank0, errors, or ranks as 0,3-5.")
@click.option("--log-dir", default="dadt-logs", metavar="DIR", help="Everything that workers print goes to files here.")
@click.option("--no-torch-env", is_flag=True, help="Leave out RANK, WORLD_SIZE, MASTER_ADDR and their like.")
@click.option("--gpu-visibility", type=click.Choice(["one", "all"]), default="one", help="GPUs that each worker sees.")
@knobs
@click.option("--help-all", is_flag=True, is_eager=True, expose_value=False, callback=help_all, help="All flags.")
def run(
    command: tuple[str, ...],
    count: int | None,
    module: bool,
    no_python: bool,
    output: str,
    log_dir: str,
    no_torch_env: bool,
    gpu_visibility: str,
    **given: Any,
) -> int:
    """Train SCRIPT on N workers of this host. What follows SCRIPT are its own arguments.

    \b
    dadt run -np 2 train.py --epochs 3
    dadt run -np 2 python train.py --epochs 3
    dadt run -np 2 -m package.train
    """
    config = config_of(given)
    slots = _slots(count, gpu_visibility)
    shown = ranks_shown(output, len(slots))
    program = _program(command, module, no_python)
    config = _resolved(config, slots)
    folder = _reserve(Path(log_dir))
    try:
        logs = Path(log_dir) / folder.job
        sink = Output(logs, len(slots), shown, console.lines, lambda text: console.say(text, "warning"))
        job = Job(folder, slots, sink, console.say)
        console.say(_first_line(config, slots, folder.job, logs))
        for text in _warnings(slots, program):
            console.say(text, "warning")
        common = environment.common(config)
        port = None if no_torch_env else environment.free_port()
        job.start(program, common, [environment.own(slot, folder.job, port) for slot in slots], str(Path.cwd()))
        return _finish(job.wait(), config, slots)
    finally:
        folder.remove()


def _slots(count: int | None, gpu_visibility: str) -> list[Slot]:
    if count is None:
        raise ConfigError("how many workers? Give their number, as in dadt run -np 2 train.py")
    if count < 1:
        raise ConfigError(f"-np {count}: the number of workers must be 1 or more")
    gpus = machine.gpus() if gpu_visibility == "one" else []
    if gpus and count > len(gpus):
        raise ConfigError(
            f"-np {count}: only {len(gpus)} GPUs are visible; start fewer workers, or give --gpu-visibility all "
            "to let workers share GPUs"
        )
    return place(count, gpus, machine.cores())


def _program(command: Sequence[str], module: bool, no_python: bool) -> list[str]:
    """The command line of a worker."""
    if not command:
        raise ConfigError("which script? Give its path, as in dadt run -np 2 train.py")
    first = command[0]
    if module and no_python:
        raise ConfigError("-m and --no-python exclude each other: a module is run by python")
    if module:
        _find_module(first)
        return [sys.executable, "-m", *command]
    if no_python or PYTHON.fullmatch(Path(first).name):
        if shutil.which(first) is None:
            raise ConfigError(f"{first}: there is no such executable; give its path or check PATH")
        if not no_python and len(command) == 1:
            raise ConfigError(f"which script? {first} alone reads from the terminal, which workers do not have")
        if not no_python and not command[1].startswith("-"):
            _find_script(command[1])
        return list(command)
    _find_script(first)
    return [sys.executable, *command]


def _find_script(path: str) -> None:
    script = Path(path)
    if script.is_dir() and not (script / "__main__.py").is_file():
        raise ConfigError(f"{path} is a directory: give the path of a Python script")
    if not script.exists():
        where = "" if script.is_absolute() else f" in {Path.cwd()}"
        raise ConfigError(f"{path}: there is no such script{where}")


def _find_module(name: str) -> None:
    """By its topmost package only: to look for the rest would import it."""
    top = name.partition(".")[0]
    if find_spec(top) is None and not Path(top).exists() and not Path(f"{top}.py").exists():
        raise ConfigError(f"-m {name}: there is no module {top}, neither installed nor in {Path.cwd()}")


def _resolved(config: Config, slots: Sequence[Slot]) -> Config:
    """With what all ranks must choose alike: the executor, and the seed where none is given."""
    if config.seed < 0:
        config = replace(config, seed=secrets.randbelow(2**31))
    if config.executor == "auto" and len(slots) > 1:
        config = replace(config, executor="gloo" if machine.gpus() else "shm")
    return config


def _warnings(slots: Sequence[Slot], program: Sequence[str]) -> list[str]:
    texts = []
    cores = machine.cores()
    if len(slots) > cores:
        texts.append(f"{len(slots)} workers share {cores} CPU cores: each will be slower than alone")
    if PYTHON.fullmatch(Path(program[0]).name):
        for flags in environment.isolating_flags(program[1:]):
            texts.append(
                f"python {flags} ignores the environment, or installed packages, by which DADT gets into the script: "
                "leave it out if training turns out not to be distributed"
            )
    return texts


def _reserve(log_dir: Path) -> Folder:
    """The job's id, and the folder of its logs."""
    try:
        log_dir.mkdir(parents=True, exist_ok=True)
        folder = Folder.reserve(log_dir)
    except OSError as error:
        raise ConfigError(f"--log-dir {log_dir}: cannot be written ({error.strerror}); give another") from error
    try:
        (log_dir / folder.job).mkdir()
    except OSError as error:
        folder.remove()
        raise ConfigError(f"--log-dir {log_dir}: cannot be written ({error.strerror}); give another") from error
    return folder


def _first_line(config: Config, slots: Sequence[Slot], job: str, logs: Path) -> str:
    workers = "1 worker" if len(slots) == 1 else f"{len(slots)} workers"
    executor = "" if config.executor == "auto" else f", executor {config.executor}"
    return f"{workers} on this host{executor}, algorithm {config.algorithm} (job {job}, logs in {logs})"


def _finish(outcome: Outcome, config: Config, slots: Sequence[Slot]) -> int:
    """Say how it ended; the failure, if any, last."""
    if outcome.stuck:
        pids = ", ".join(map(str, outcome.stuck))
        console.say(f"processes {pids} do not die, they hang in the kernel (a device or a file server)", "warning")
    if outcome.signal:
        console.say(f"ended by {'Ctrl-C' if outcome.signal == 2 else f'signal {outcome.signal}'}; all workers stopped")
    elif outcome.failure is not None:
        console.block(outcome.failure.lines())
    else:
        if len(slots) > 1 and (reason := _not_distributed(outcome, config)) is not None:
            console.say(f"training was NOT distributed: {reason}", "warning")
        console.say(_last_line(outcome))
    return outcome.exit_code


def _not_distributed(outcome: Outcome, config: Config) -> str | None:
    if not outcome.hooked and config.inject == "none":
        return "--inject none left every worker to itself"
    if not outcome.hooked:
        return (
            "no worker imported torch with DADT hooked in (does the script import torch, in a Python in which dadt "
            "is installed? try --inject sitecustomize)"
        )
    if not any(summary.get("steps", 0) for summary in outcome.summaries.values()):
        return (
            "no torch.optim optimizer made a step in any worker, so every worker did the same work for itself "
            "(an optimizer that is not a torch.optim.Optimizer, or training in a child process?)"
        )
    return None


def _last_line(outcome: Outcome) -> str:
    line = f"done in {outcome.seconds:.1f} s"
    summary: Mapping[str, float] = outcome.summaries.get(0, {})
    if steps := int(summary.get("steps", 0)):
        delayed = int(summary.get("delayed", 0))
        waiting = 100 * summary.get("wait_fraction", 0.0)
        line += f": {steps} steps, " + (f"{delayed} of them delayed by one, " if delayed else "none delayed, ")
        line += f"{waiting:.1f} % of the time spent waiting for communication"
    return line
