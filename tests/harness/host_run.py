"""Runs `dadt run` on the simulated machine named launcher."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from harness.machine import Network
from harness.patience import PATIENCE
from harness.run import Run, write_script

__all__ = ["PATIENCE", "HostRun"]


class HostRun(Run):
    """`dadt run` on the machine named launcher."""

    def __init__(
        self,
        network: Network,
        folder: Path,
        script: str,
        arguments: list[str],
        env: dict[str, str],
        alone: bool = False,
    ) -> None:
        """alone: as for Run. A forked process lives in the namespaces of its host all the same."""
        dadt = write_script(folder, script, alone)
        self.folder = folder
        command = [*dadt, "run", "--ssh-config", network.config, *arguments]
        self.process = subprocess.Popen(
            network.launcher.enter(command, folder),
            env={**os.environ, "PYTHONWARNINGS": "default", "HOME": str(network.launcher.home), **env},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
