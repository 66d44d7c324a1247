"""Checks DADT's own installation: its compiled core, and the entry point by which torch loads DADT."""

from __future__ import annotations

import hashlib
import importlib.metadata
from collections.abc import Iterator
from pathlib import Path

import dadt
from dadt_cli.check_env.check import Check, CheckOptions, fail, good, said, warn

REINSTALL = "pip install --force-reinstall --no-deps dadt, for this Python"
GROUP, NAME = "torch.backends", "dadt"


def checks(asked: CheckOptions) -> Iterator[Check]:
    yield good("version", dadt.__version__, alike="fail")
    yield good("folder", Path(dadt.__file__).parent)
    yield good("files", _digest(Path(dadt.__file__).parent), alike="warn")
    yield from _compiled()
    yield _entry_point()
    yield _folder(asked.cwd)


def _digest(folder: Path) -> str:
    """Return a checksum of the Python files in the folder, since two checkouts of one version may differ."""
    found = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        found.update(f"{path.relative_to(folder)}\n".encode() + path.read_bytes())
    return f"sha256 {found.hexdigest()[:12]}"


def _compiled() -> Iterator[Check]:
    try:
        from dadt import _core
    except ImportError as error:
        yield fail("compiled", said(error), REINSTALL)
        return
    if _core.__version__ != dadt.__version__:
        yield fail("compiled", f"built for dadt {_core.__version__}, but this is {dadt.__version__}", REINSTALL)
        return
    executors = sorted(name.removesuffix("Executor").lower() for name in dir(_core) if name.endswith("Executor"))
    yield good("compiled", f"loads, with executors {', '.join(filter(None, executors))}, instructions {_core.simd}")


def _entry_point() -> Check:
    found = {point.name: point.value for point in importlib.metadata.entry_points(group=GROUP)}
    if NAME not in found:
        return fail("entry point", f"{GROUP} names no dadt, so torch does not call it", REINSTALL)
    others = sorted(set(found) - {NAME})
    return good("entry point", f"{found[NAME]}" + (f", beside {', '.join(others)}" if others else ""))


def _folder(cwd: str) -> Check:
    """Check the folder in which workers would start."""
    try:
        there = Path(cwd).is_dir()
    except OSError as error:
        return warn("start folder", f"{cwd} cannot be looked at ({error.strerror})", "allow it, or --workdir DIR")
    if not there:
        return warn("start folder", f"there is no {cwd}", "make it, share it, or give --workdir DIR to dadt run")
    return good("start folder", cwd)
