"""Checks the Python that runs the workers, and the operating system."""

from __future__ import annotations

import os
import platform
import struct
import sys
import time
from collections.abc import Iterator

from dadt_cli.check_env.check import Check, CheckOptions, fail, good, warn

NEEDED = (3, 10)
SUPPORTED_UNTIL = {(3, 10): "2026-10", (3, 11): "2027-10", (3, 12): "2028-10", (3, 13): "2029-10", (3, 14): "2030-10"}
"""Month in which security fixes end, for each version of Python (https://devguide.python.org/versions)."""


def checks(asked: CheckOptions) -> Iterator[Check]:
    yield _version()
    yield _bits()
    yield good("executable", f"{sys.executable} ({_environment()})")
    if "PYTHONHOME" in os.environ:
        yield warn("PYTHONHOME", os.environ["PYTHONHOME"], "unset PYTHONHOME: another Python reads its files, too")
    if os.environ.get("PYTHONSAFEPATH"):
        hint = "unset PYTHONSAFEPATH: with it, a script does not find the modules in its own folder"
        yield warn("PYTHONSAFEPATH", os.environ["PYTHONSAFEPATH"], hint)
    yield good("system", f"{_distribution()}, Linux {platform.release()}, {' '.join(platform.libc_ver())}")


def _version() -> Check:
    found, version = sys.version_info[:2], platform.python_version()
    if found < NEEDED:
        return fail("version", version, "give a Python of 3.10 or later by --python PATH", alike="warn")
    end = SUPPORTED_UNTIL.get(found)
    if end is not None and time.strftime("%Y-%m") > end:
        return warn("version", f"{version}, without security fixes since {end}", "install a later Python", alike="warn")
    return good("version", version, alike="warn")


def _bits() -> Check:
    bits, machine = 8 * struct.calcsize("P"), platform.machine()
    if bits != 64:
        return fail("build", f"{bits} bits, {machine}", "install a Python of 64 bits")
    return good("build", f"64 bits, {machine}", alike="fail")


def _environment() -> str:
    if "CONDA_PREFIX" in os.environ and sys.prefix == os.environ["CONDA_PREFIX"]:
        return "conda environment"
    return "virtual environment" if sys.prefix != sys.base_prefix else "no virtual environment"


def _distribution() -> str:
    try:
        found = platform.freedesktop_os_release()
    except OSError:
        return "unknown distribution"
    return found.get("PRETTY_NAME", found.get("NAME", "unknown distribution"))
