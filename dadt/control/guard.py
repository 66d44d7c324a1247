"""Cleans up after a process that was killed. A shell, started for this purpose, waits for the end of the process."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

MARK = "DADT_GUARD=1"
"""Environment variable with its value that the guard's own process has, so that it is not mistaken for a process of the
job."""
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
    """Kills the processes whose environment contains a mark, and removes a folder, once this process has ended for any
    reason.

    The guard is a separate process, because a killed process can run nothing. It runs a shell, which costs little.
    """

    def __init__(self, folder: Path, mark: str = "") -> None:
        """folder: removed when this process ends. mark: an environment variable and its value, such as
        DADT_AGENT=/tmp/...; if empty, no process is killed."""
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
        """End the guard without cleaning up. Call this once the folder is removed and no process carries the mark. May
        be called repeatedly."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.kill()
        self._process.wait()
