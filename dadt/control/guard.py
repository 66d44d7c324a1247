"""Cleaning up after a process that was killed, by a shell that waits for its end."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

MARK = "DADT_GUARD=1"
"""Set for the guard itself, which is no part of the job that it guards."""
SCRIPT = """
trap '' HUP INT QUIT TERM
read -r _
if [ -n "$2" ]; then
    for round in 1 2 3; do
        # Its exit code says nothing: there is always a process into which it cannot look.
        found=$(grep -lzxF -- "$2" /proc/[0-9]*/environ 2>/dev/null)
        [ -n "$found" ] || break
        for file in $found; do
            process=${file%/environ}
            # It removes the semaphores of the others once these are dead, and then ends by itself.
            if [ $round != 3 ] && grep -q multiprocessing.resource_tracker "$process/cmdline" 2>/dev/null; then
                spared=1
            else
                kill -KILL "${process#/proc/}" 2>/dev/null
            fi
        done
        [ -n "$spared" ] && [ $round = 2 ] && sleep 1
    done
fi
rm -rf -- "$1"
"""


class Guard:
    """Once this process is gone for any reason, kills the processes that carry the mark and removes the folder.

    The guard is a process of its own, as nothing runs in a killed process any more, and a shell, as that costs little.
    """

    def __init__(self, folder: Path, mark: str = "") -> None:
        """mark: a variable and its value, such as DADT_AGENT=/tmp/...; if empty, only the folder is removed."""
        self._process = subprocess.Popen(
            ["sh", "-c", SCRIPT, "dadt-guard", str(folder), mark],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={"PATH": os.defpath, **dict([MARK.split("=")])},
            cwd="/",
            start_new_session=True,
        )

    def release(self) -> None:
        """End the guard. Call it once the folder is removed and no process carries the mark. Idempotent."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.kill()
        self._process.wait()
