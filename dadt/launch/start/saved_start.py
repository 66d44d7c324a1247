"""Saves in the job's log folder how a job was started, so that `dadt run --resume JOB` can start it again without
further arguments."""

from __future__ import annotations

import errno
import fnmatch
import json
import os
import re
import shlex
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from dadt.config import Config, version
from dadt.control import private_files, schema, snapshots
from dadt.errors import ConfigError

FILE = "start.json"
VERSION = 1
LARGEST = 1 << 20
"""Size limit of start.json in bytes, which no real command line exceeds."""
SECRET = re.compile(r"KEY|TOKEN|SECRET|PASS|PWD|CREDENTIAL|AUTH|COOKIE", re.IGNORECASE)
"""Matches names of environment variables whose values may be secret and are therefore not saved."""
SECRET_VALUE = re.compile(r"://[^/\s]*:[^/\s]*@")
"""Matches values of variables that contain a URL with a password, which are not saved either."""
LOG_DIR = str(next(field.default for field in fields(Config) if field.name == "log_dir"))
NOT_KEPT = frozenset({"resume", "force"})
"""Settings that apply to a single start only and are therefore not saved."""


def _is_text(value: Any) -> bool:
    """Return whether a value is a string that can be an argument on a command line, which excludes zero bytes. Raises
    UnicodeError (a ValueError) if it cannot be encoded."""
    return isinstance(value, str) and b"\0" not in os.fsencode(value)


TEXTS = schema.listed(_is_text, LARGEST)
CHECKS = {"words": TEXTS, "module": schema.flag, "no_python": schema.flag, "cwd": _is_text, "settings": schema.anything}
"""The facts that start.json must contain, each with a check."""
OF_KIND: Mapping[type, schema.Check] = {
    bool: schema.flag,
    int: lambda value: type(value) is int,
    float: lambda value: type(value) in (int, float),
    str: _is_text,
    tuple: TEXTS,
}
"""Check for the value of a setting, by the type of the setting's default."""


@dataclass(frozen=True, kw_only=True)
class SavedStart:
    """How a job was started: the script with its arguments, and all settings from flags, environment variables and
    configuration files."""

    words: Sequence[str]
    """The script and its arguments."""
    module: bool
    no_python: bool
    cwd: str
    settings: Mapping[str, Any]
    """Settings that differ from their defaults. Variables forwarded by `-x NAME` are saved with their values, except
    for those that may be secret."""


def of(
    words: Sequence[str],
    config: Config,
    *,
    module: bool,
    no_python: bool,
    cwd: str,
    env: Mapping[str, str] = os.environ,
) -> SavedStart:
    settings = {
        field.name: value
        for field in fields(Config)
        if field.name not in NOT_KEPT and (value := getattr(config, field.name)) != field.default
    }
    if config.forward:
        named = {each.partition("=")[0]: each for text in config.forward for each in _with_values(text, env)}
        settings["forward"] = list(named.values())
    return SavedStart(words=list(words), module=module, no_python=no_python, cwd=cwd, settings=settings)


def _with_values(text: str, env: Mapping[str, str]) -> Iterator[str]:
    """Yield each variable that the argument `text` of `-x` names, as NAME=VALUE, or as NAME alone if its value may be
    secret."""
    name, equals, value = text.partition("=")
    found = {name: value} if equals else {each: env[each] for each in env if fnmatch.fnmatchcase(each, name)}
    for each, value in found.items():
        yield each if SECRET.search(each) or SECRET_VALUE.search(value) else f"{each}={value}"


def write(logs: Path, start: SavedStart) -> None:
    """Write how the job was started to its log folder, in a file that only this user can read. Raises OSError."""
    text = json.dumps({"version": VERSION, "dadt": version.VERSION, **asdict(start)}, indent=2)
    if len(text) > LARGEST:
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))
    with private_files.open_file(logs / FILE, "w") as file:
        file.write(text)


def read(logs: Path) -> SavedStart:
    """Return how the job of this log folder was started. Raises ConfigError, also if the file could have been changed
    by another user, as the script that it names will be run."""
    path = logs / FILE
    try:
        return _checked(json.loads(_own(path)))
    except (FileNotFoundError, NotADirectoryError):
        why = "is not there"
    except OSError as error:
        why = f"cannot be read ({error.strerror})"
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        why = "is not what dadt has written there"
    raise ConfigError(f"--resume: {path} {why}: give the script and its arguments, as when the job was started")


def _own(path: Path) -> bytes:
    """Return the content of start.json. Raises OSError, ValueError if it is not a regular file or too large, and
    ConfigError if another user could have changed it."""
    # Without O_NONBLOCK, opening a named pipe would block.
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        status = os.fstat(descriptor)
        if status.st_uid != os.getuid() or status.st_mode & 0o022:
            raise ConfigError(
                f"--resume: {path} can be changed by others than you, so what it names is not run: give the script"
                " and its arguments"
            )
        if not stat.S_ISREG(status.st_mode) or status.st_size > LARGEST:
            raise ValueError(path)
        return os.read(descriptor, LARGEST)
    finally:
        os.close(descriptor)


def _checked(told: Any) -> SavedStart:
    """Validate the content of start.json and return it as a SavedStart. Raises ValueError, KeyError, TypeError or
    AttributeError."""
    facts = {name: told[name] for name in CHECKS}
    kinds = {field.name: type(field.default) for field in fields(Config) if field.name not in NOT_KEPT}
    settings = facts["settings"].items()
    sound = told["version"] == VERSION and facts["words"] and schema.misfit(CHECKS, facts) is None
    if not sound or not all(name in kinds and OF_KIND[kinds[name]](value) for name, value in settings):
        raise ValueError
    kept = {name: tuple(value) if kinds[name] is tuple else value for name, value in settings}
    return SavedStart(**{**facts, "settings": kept})


def check_variables(start: SavedStart, given: Sequence[str], env: Mapping[str, str] = os.environ) -> None:
    """Raise ConfigError if a variable that was forwarded by `-x`, but whose value was not saved, is not set now. given:
    the arguments of `-x` on the current command line."""
    named = {text.partition("=")[0] for text in given}
    for text in start.settings.get("forward", ()):
        if "=" not in text and "*" not in text and text not in named and text not in env:
            remedy = f"set {text}, or give -x {text}=VALUE"
            raise ConfigError(f"--resume: the job was given -x {text}, whose value is not kept in its folder: {remedy}")


def command(logs: Path, root: str, came_from: str) -> str:
    """Return the command line that resumes a job, for the user to type, or an empty string if there is no snapshot to
    resume from. logs: the job's log folder. root: the folder of the job's snapshots; empty if it takes none. came_from:
    the snapshot from which the job itself was resumed; empty if it was not."""
    usual = Path(LOG_DIR)
    before = [(job_folder(Path(came_from), logs.parent), Path(came_from).parent)] if came_from else []
    for folder, snapshot_root in ([(logs, Path(root))] if root else []) + before:
        if (folder / FILE).is_file() and snapshots.newest(snapshot_root) is not None:
            near = logs.parent == usual and folder.absolute().parent == usual.absolute()
            return shlex.join(["dadt", "run", "--resume", folder.name if near else str(folder)])
    return ""


def snapshots_of(folder: Path, elsewhere: str) -> list[Path]:
    """Return the folders that may contain the snapshots of the job with the log folder `folder`. elsewhere: the value
    of `--snapshot-dir` on the current command line."""
    try:
        kept = read(folder).settings.get("snapshot_dir", "")
    except ConfigError:
        kept = ""
    return [Path(each, folder.name) for each in (elsewhere, kept) if each] + [folder / snapshots.FOLDER]


def job_folder(snapshot: Path, log_dir: Path) -> Path:
    """Return the log folder of the job that took this snapshot."""
    root = snapshot.parent
    return root.parent if root.name == snapshots.FOLDER else log_dir / root.name
