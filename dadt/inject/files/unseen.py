"""Detects errors of libraries that do not find a file because this rank has written it only as a private copy."""

from __future__ import annotations

import os
import re
import traceback
from collections.abc import Iterator
from pathlib import Path

from dadt.inject.files.overlay import Overlay
from dadt.inject.files.writers import Mode

NO_FILE = re.compile(r"No such file or directory|unable to open|does not exist|not found", re.IGNORECASE)
NAMES = re.compile(r"""['"`<]([^'"`<>\n]+)['"`>]|([^\s'"`<>,;:()\[\]]+)""")
MOST_NAMES = 200
OURS = str(Path(__file__).parent) + os.sep


def unseen(overlay: Overlay, error: BaseException) -> str:
    """Return the path named in a file-not-found error if this rank has a private copy of that file; otherwise an empty
    string. Errors raised within the overlay do not count, since the overlay finds private copies."""
    if overlay.writers.mode not in (Mode.ONE, Mode.SHARED) or not NO_FILE.search(str(error)):
        return ""
    if any(frame.f_code.co_filename.startswith(OURS) for frame, _ in traceback.walk_tb(error.__traceback__)):
        return ""
    return next((name for name in _names(error) if _is_kept(overlay, name)), "")


def _is_kept(overlay: Overlay, name: str) -> bool:
    """Return whether the file, or the folder that should contain it, exists only as this rank's private copy."""
    path = overlay.path(name)
    if path is None:
        return False
    return overlay.is_private(path) or (os.sep in name and overlay.is_private(str(Path(path).parent)))


def _names(error: BaseException) -> Iterator[str]:
    """Yield the words in an error that may be paths."""
    for known in (getattr(error, "filename", None), getattr(error, "filename2", None)):
        if isinstance(known, str | os.PathLike):
            yield os.fsdecode(known)
    for number, found in enumerate(NAMES.finditer(str(error))):
        if number == MOST_NAMES:
            return
        yield (found[1] or found[2]).strip()
