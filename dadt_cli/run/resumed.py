"""`dadt run --resume JOB`: combines the command line that started the job with the current command line, which has
priority."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from dadt.config import Config
from dadt.config.check import enter, here
from dadt.errors import ConfigError
from dadt.launch.start import resume, saved_start
from dadt_cli.terminal.file import DEFAULT
from dadt_cli.terminal.options import settings_of

HOSTS = ("hosts", "hostfile", "host_discovery_script", "simulate_hosts", "nnodes")
"""Settings that say where workers run. If the current command line has any of these settings, all of them are dropped
from the old command line."""
FILES = frozenset(field.name for field in fields(Config) if field.metadata["metavar"] in ("FILE", "DIR"))


def as_started(
    command: Sequence[str], given: Mapping[str, Any], config: Config, module: bool, no_python: bool
) -> tuple[tuple[str, ...], Config, bool, bool]:
    """Return the script with its arguments, and the settings of the job to resume. Raises ConfigError if the job cannot
    be resumed."""
    if not command and _is_script(config.resume, config):  # `--resume SCRIPT` resumes the last job that ran this script
        command, config = (config.resume,), replace(config, resume=resume.LAST)
    if command:
        return tuple(command), config, module, no_python
    job, snapshot = resume.source(config)
    start = saved_start.read(job)
    saved_start.check_variables(start, given["forward"])
    told = settings_of(given, variables=False)
    now = {name: getattr(config, name) for name, setting in told.items() if setting.source != DEFAULT}
    replaced = HOSTS if any(name in now for name in HOSTS) else ()
    kept = {name: value for name, value in start.settings.items() if name not in replaced}
    if "forward" in kept:
        now["forward"] = (*kept["forward"], *now.get("forward", ()))
    if start.cwd != here():
        now = {name: str(Path(here(), value)) if name in FILES else value for name, value in now.items()}
        _go_to(start.cwd)
        # The path is made absolute, since the user sees it from another folder.
        kept["log_dir"] = str(Path(start.cwd, kept.get("log_dir", saved_start.LOG_DIR)))
    return tuple(start.words), Config(**{**kept, **now, "resume": str(snapshot)}), start.module, start.no_python


def _is_script(text: str, config: Config) -> bool:
    try:
        return text != resume.LAST and Path(config.workdir, text).is_file()
    except OSError:
        return False  # the file system raises an error, for example if the name is too long for a path


def _go_to(cwd: str) -> None:
    """Enter the folder in which the job was started, to which its paths are relative. Raises ConfigError if this
    fails."""
    try:
        enter(cwd)
    except OSError as error:
        why = error.strerror
        raise ConfigError(f"--resume: the job was started in {cwd}, which cannot be entered ({why})") from error
