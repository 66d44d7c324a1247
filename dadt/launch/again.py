"""How a job was started: kept in its folder, so that `dadt run --resume JOB` needs no more than its name."""

from __future__ import annotations

import json
import os
import re
import shlex
import stat
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from dadt.config import Config, version
from dadt.control import private_files, snapshots
from dadt.errors import ConfigError

FILE = "start.json"
VERSION = 1
LARGEST = 1 << 20
"""Bytes of the file: no command line is longer."""
SECRET = re.compile(r"KEY|TOKEN|SECRET|PASS|CREDENTIAL|AUTH|COOKIE", re.IGNORECASE)
"""Names of variables whose values are not kept."""
NOT_KEPT = frozenset({"resume", "force"})
"""Settings of one start alone."""


@dataclass(frozen=True, kw_only=True)
class Start:
    """What the user has typed, and what stood in variables and files of settings then."""

    words: Sequence[str]
    """The script and its arguments."""
    module: bool
    no_python: bool
    cwd: str
    settings: Mapping[str, Any]
    """Knobs that do not have their defaults. Of variables that may be secret, -x NAME stands without the value."""


def of(words: Sequence[str], config: Config, *, module: bool, no_python: bool, cwd: str) -> Start:
    settings = {
        field.name: value
        for field in fields(Config)
        if field.name not in NOT_KEPT and (value := getattr(config, field.name)) != field.default
    }
    if config.forward:
        settings["forward"] = [_without_secret(text) for text in config.forward]
    return Start(words=list(words), module=module, no_python=no_python, cwd=cwd, settings=settings)


def _without_secret(text: str) -> str:
    name, _, _ = text.partition("=")
    return name if SECRET.search(name) else text


def write(logs: Path, start: Start) -> None:
    """Only this user may read it, whoever may read the folder. Raises OSError."""
    with private_files.open_file(logs / FILE, "w") as file:
        json.dump({"version": VERSION, "dadt": version.VERSION, **asdict(start)}, file, indent=2)


def read(logs: Path) -> Start:
    """What is in the folder is run: it must be this user's own. Raises ConfigError."""
    path = logs / FILE
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        raise ConfigError(
            f"--resume: {path} is not there, so give the script and its arguments, as when the job was started"
        ) from None
    except OSError as error:
        raise ConfigError(f"--resume: {path} cannot be read ({error.strerror})") from None
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o022:
            raise ConfigError(
                f"--resume: {path} can be changed by others than you, so what it names is not run: give the script"
                " and its arguments"
            )
        text = file.read(LARGEST + 1)
    try:
        if len(text) > LARGEST:
            raise ValueError
        return _checked(json.loads(text))
    except (ValueError, KeyError, TypeError, RecursionError):
        raise ConfigError(
            f"--resume: {path} is not what dadt has written there: give the script and its arguments"
        ) from None


def _checked(told: Any) -> Start:
    """Raises ValueError, KeyError or TypeError."""
    known = {field.name: field.default for field in fields(Config)}
    words, settings, cwd = told["words"], told["settings"], told["cwd"]
    texts = isinstance(words, list) and bool(words) and all(isinstance(each, str) for each in [*words, cwd])
    if told["version"] != VERSION or not texts or not isinstance(settings, dict):
        raise ValueError
    if not all(isinstance(told[name], bool) for name in ("module", "no_python")):
        raise ValueError
    found: dict[str, Any] = {}
    for name, value in settings.items():
        if name not in known or name in NOT_KEPT:
            raise ValueError
        kind = type(known[name])
        if kind is tuple:
            if not (isinstance(value, list) and all(isinstance(each, str) for each in value)):
                raise ValueError
            found[name] = tuple(value)
        elif type(value) is kind or (kind is float and type(value) is int):
            found[name] = value
        else:
            raise ValueError
    return Start(words=words, module=told["module"], no_python=told["no_python"], cwd=cwd, settings=found)


def check_variables(start: Start, given: Sequence[str], env: Mapping[str, str] = os.environ) -> None:
    """Raises ConfigError where a value that was not kept is nowhere to be found. given: by -x now."""
    named = {text.partition("=")[0] for text in given}
    for text in start.settings.get("forward", ()):
        if "=" not in text and "*" not in text and text not in named and text not in env:
            raise ConfigError(
                f"--resume: the job was given -x {text}, whose value is not kept in its folder: set {text}, or give"
                f" -x {text}=VALUE"
            )


def command(logs: Path, log_dir: str, root: str, came_from: str) -> str:
    """What goes on with the job of the folder `logs`, as the user types it; empty where nothing does. root: the folder
    of its snapshots, if it takes any. came_from: the snapshot that it went on from, if any."""
    for folder, job in ((root, logs.name), (came_from and str(Path(came_from).parent), _job_of(came_from))):
        if folder and (logs.parent / job / FILE).is_file() and snapshots.newest(Path(folder)) is not None:
            default = next(field.default for field in fields(Config) if field.name == "log_dir")
            where = [] if log_dir == default else ["--log-dir", log_dir]
            return shlex.join(["dadt", "run", *where, "--resume", job])
    return ""


def _job_of(snapshot: str) -> str:
    root = Path(snapshot).parent
    return root.parent.name if root.name == snapshots.FOLDER else root.name


def job_folder(snapshot: Path, log_dir: str) -> Path:
    """The folder of the job that has taken it."""
    root = snapshot.parent
    return root.parent if root.name == snapshots.FOLDER else Path(log_dir).absolute() / root.name
