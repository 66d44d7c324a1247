"""How a job was started: kept in its folder, so that `dadt run --resume JOB` needs no more than its name."""

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
from dadt.control import private_files, snapshots
from dadt.errors import ConfigError

FILE = "start.json"
VERSION = 1
LARGEST = 1 << 20
"""Bytes of the file: no command line is longer."""
SECRET = re.compile(r"KEY|TOKEN|SECRET|PASS|PWD|CREDENTIAL|AUTH|COOKIE", re.IGNORECASE)
"""Names of variables whose values are not kept."""
SECRET_VALUE = re.compile(r"://[^/\s]*:[^/\s]*@")
"""Matches an address with a password in it; such values are not kept either."""
LOG_DIR = str(next(field.default for field in fields(Config) if field.name == "log_dir"))
NOT_KEPT = frozenset({"resume", "force"})
"""Settings that belong to one start alone, and are not kept for the next."""


@dataclass(frozen=True, kw_only=True)
class SavedStart:
    """What the user has typed, and what stood in variables and files of settings then."""

    words: Sequence[str]
    """The script and its arguments."""
    module: bool
    no_python: bool
    cwd: str
    settings: Mapping[str, Any]
    """Knobs that do not have their defaults. -x NAME has the value that it had, but for what may be secret."""


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
    """What -x names, each variable as NAME=VALUE, or as NAME where its value may be secret."""
    name, equals, value = text.partition("=")
    found = {name: value} if equals else {each: env[each] for each in env if fnmatch.fnmatchcase(each, name)}
    for each, value in found.items():
        yield each if SECRET.search(each) or SECRET_VALUE.search(value) else f"{each}={value}"


def write(logs: Path, start: SavedStart) -> None:
    """Only this user may read it, whoever may read the folder. Raises OSError."""
    text = json.dumps({"version": VERSION, "dadt": version.VERSION, **asdict(start)}, indent=2)
    if len(text) > LARGEST:
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))
    with private_files.open_file(logs / FILE, "w") as file:
        file.write(text)


def read(logs: Path) -> SavedStart:
    """What is in the folder is run: it must be this user's own. Raises ConfigError."""
    path = logs / FILE
    try:
        return _checked(json.loads(_own(path)))
    except (FileNotFoundError, NotADirectoryError):
        why = "is not there"
    except OSError as error:
        why = f"cannot be read ({error.strerror})"
    except (ValueError, KeyError, TypeError, RecursionError):
        why = "is not what dadt has written there"
    raise ConfigError(f"--resume: {path} {why}: give the script and its arguments, as when the job was started")


def _own(path: Path) -> bytes:
    """What is in the file. Raises OSError, ValueError where it is none, or too long, and ConfigError where it may be
    another user's."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)  # a pipe would be waited for
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
    """The start that was read, if all of it is well-formed. Raises ValueError, KeyError or TypeError."""
    known = {field.name: field.default for field in fields(Config)}
    words, settings, cwd = told["words"], told["settings"], told["cwd"]
    texts = isinstance(words, list) and bool(words) and all(map(_is_text, [*words, cwd]))
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
            if not (isinstance(value, list) and all(map(_is_text, value))):
                raise ValueError
            found[name] = tuple(value)
        elif _is_text(value) if kind is str else type(value) is kind or (kind is float and type(value) is int):
            found[name] = value
        else:
            raise ValueError
    return SavedStart(words=words, module=told["module"], no_python=told["no_python"], cwd=cwd, settings=found)


def _is_text(value: Any) -> bool:
    """Whether a value is a string that can stand on a command line: without a zero byte. Raises UnicodeError, a
    ValueError, where nothing encodes it."""
    return isinstance(value, str) and b"\0" not in os.fsencode(value)


def check_variables(start: SavedStart, given: Sequence[str], env: Mapping[str, str] = os.environ) -> None:
    """Raises ConfigError where a value that was not kept is nowhere to be found. given: by -x now."""
    named = {text.partition("=")[0] for text in given}
    for text in start.settings.get("forward", ()):
        if "=" not in text and "*" not in text and text not in named and text not in env:
            raise ConfigError(
                f"--resume: the job was given -x {text}, whose value is not kept in its folder: set {text}, or give"
                f" -x {text}=VALUE"
            )


def command(logs: Path, root: str, came_from: str) -> str:
    """What goes on with the job of the folder `logs`, as the user types it; empty where nothing does. root: the folder
    of its snapshots, if it takes any. came_from: the snapshot that it went on from, if any."""
    usual = Path(LOG_DIR)
    before = [(job_folder(Path(came_from), logs.parent), Path(came_from).parent)] if came_from else []
    for folder, snapshot_root in ([(logs, Path(root))] if root else []) + before:
        if (folder / FILE).is_file() and snapshots.newest(snapshot_root) is not None:
            near = logs.parent == usual and folder.absolute().parent == usual.absolute()
            return shlex.join(["dadt", "run", "--resume", folder.name if near else str(folder)])
    return ""


def snapshots_of(folder: Path, elsewhere: str) -> list[Path]:
    """The folders in which the job of this log folder may have its snapshots. elsewhere: the folder of --snapshot-dir,
    given now."""
    try:
        kept = read(folder).settings.get("snapshot_dir", "")
    except ConfigError:
        kept = ""
    return [Path(each, folder.name) for each in (elsewhere, kept) if each] + [folder / snapshots.FOLDER]


def job_folder(snapshot: Path, log_dir: Path) -> Path:
    """The folder of the job that has taken it."""
    root = snapshot.parent
    return root.parent if root.name == snapshots.FOLDER else log_dir / root.name
