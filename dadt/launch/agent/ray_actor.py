"""The Ray actor that runs the agent of its node. No other part of DADT runs inside Ray."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import deque
from collections.abc import Mapping
from importlib import import_module

TAIL_LINES = 20


class RayActor:
    """The Ray actor that runs one node's agent; there is one for each node of a job."""

    def run(
        self, python: str, variables: Mapping[str, str], shipped: bool, once: bool, *gpus: list[str]
    ) -> tuple[int, list[str]]:
        """Run the agent until it ends. Returns its exit code (minus the signal's number if a signal ended it) and the
        last lines that it printed.

        python: path of the agent's Python; empty for the Python of this actor. shipped: whether workers start in the
        folder that Ray has copied to this node. once: whether a GPU shared by several bundles is listed once. gpus: the
        GPUs of each bundle (Ray's group of resources for one worker).
        """
        # Ray's own variables are left out, as they describe this actor's process. Ray sets OMP_NUM_THREADS to suit the
        # number of CPUs reserved for the actor, which is 0.
        left_out, kept = ("RAY_", "DADT_", "OMP_NUM_THREADS"), ("RAY_USE_TLS", "RAY_TLS_", "RAY_AUTH_")
        env = {
            name: value for name, value in os.environ.items() if name.startswith(kept) or not name.startswith(left_out)
        } | dict(variables)
        given = [each for bundle in gpus for each in bundle]
        # Without GPUs for the actor, Ray leaves all GPUs visible, so the variable is set even if the list is empty,
        # which hides all GPUs.
        env["CUDA_VISIBLE_DEVICES"] = ",".join(dict.fromkeys(given) if once else given)
        words = [python or sys.executable, "-u", "-m", "dadt.launch.agent", "--connect"]
        with subprocess.Popen(
            [*words, f"--folder={os.getcwd()}"] if shipped else words,  # noqa: PTH109
            env=env,
            cwd="/",
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            text=True,
            errors="replace",
        ) as process:
            assert process.stdout is not None
            tail = deque((line.rstrip() for line in process.stdout), TAIL_LINES)
        return process.returncode, list(tail)


def gpus() -> list[str]:
    """Return the GPUs that Ray has assigned to a bundle, which is Ray's group of resources for one worker. Called by
    Ray within the bundle."""
    found: list[str] = import_module("ray").get_runtime_context().get_accelerator_ids()["GPU"]
    return found
