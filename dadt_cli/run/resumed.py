"""`dadt run --resume JOB`: what was typed when the job was started, and what is typed now, which wins."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from dadt.config import Config
from dadt.config.check import here
from dadt.errors import ConfigError
from dadt.launch import again, resume
from dadt_cli.terminal.options import config_of

HOSTS = ("hosts", "hostfile", "host_discovery_script", "simulate_hosts", "nnodes")
"""Ways to say where the workers are: the one that is given takes the place of the others."""


def as_started(
    command: Sequence[str], given: Mapping[str, Any], config: Config, module: bool, no_python: bool
) -> tuple[tuple[str, ...], Config, bool, bool]:
    """The script with its arguments, and the settings. Raises ConfigError."""
    if not command and _is_script(config.resume, config):  # --resume SCRIPT: of the last job
        command, config = (config.resume,), replace(config, resume=resume.LAST)
    if command:
        return tuple(command), config, module, no_python
    snapshot = resume.found(config)
    start = again.read(again.job_folder(snapshot, config.log_dir))
    again.check_variables(start, given["forward"])
    typed = {name: value for name, value in given.items() if value not in (None, ())}
    if start.cwd != here():
        typed |= {name: str(Path(typed[name]).absolute()) for name in ("log_dir", "snapshot_dir") if name in typed}
        _go_to(start.cwd)
    kept = {name: value for name, value in start.settings.items() if not _is_replaced(name, typed)}
    merged = {**given, **kept, **typed}
    if "forward" in kept:
        merged["forward"] = (*kept["forward"], *typed.get("forward", ()))
    settings = replace(config_of(merged), resume=str(snapshot))
    return tuple(start.words), settings, start.module, start.no_python


def _is_replaced(name: str, typed: Mapping[str, Any]) -> bool:
    return name in HOSTS and any(each in typed for each in HOSTS)


def _is_script(text: str, config: Config) -> bool:
    return text != resume.LAST and Path(config.workdir, text).is_file()


def _go_to(cwd: str) -> None:
    """Where the job was started: its paths are seen from there."""
    try:
        os.chdir(cwd)
    except OSError as error:
        why = error.strerror
        raise ConfigError(f"--resume: the job was started in {cwd}, which cannot be entered ({why})") from error
