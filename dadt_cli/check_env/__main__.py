"""`python -m dadt_cli.check_env`: all checks of this host, as one line of JSON, after what is between it and others,
if asked.

With a subject: its checks, a line each.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import signal
import sys
from dataclasses import asdict

from dadt_cli.check_env import SUBJECTS, pairs
from dadt_cli.check_env.check import CheckOptions
from dadt_cli.check_env.probe import of_host

PR_SET_PDEATHSIG = 1
"""What asked for a subject may be killed: then nobody reads its answer."""


def main() -> None:
    words = sys.argv[1:]
    subject = words.pop(0) if words and words[0] in SUBJECTS else ""
    asked = CheckOptions(**json.loads(words[0])) if words else CheckOptions()
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # whatever libraries print must not get between
    with out:
        if not subject:
            # Without what its agent gives to a worker.
            env = {name: value for name, value in os.environ.items() if not name.startswith("DADT_")}
            if not env.get("OMP_NUM_THREADS"):
                env.pop("OMP_NUM_THREADS", None)
            ways = pairs.measure(pairs.PairOrder(**json.loads(words[1]))) if len(words) > 1 else []
            checks = of_host(asked, env=env)
            told = {"checks": [asdict(check) for check in checks], "ways": [asdict(way) for way in ways]}
            json.dump(told, out)
            return
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if subject != "variables":
            # Neither a worker that asks, nor its settings, get into what is tried.
            for name in [name for name in os.environ if name.startswith("DADT_")]:
                del os.environ[name]
        for check in importlib.import_module(f"dadt_cli.check_env.{subject}").checks(asked):
            print(json.dumps(asdict(check)), file=out, flush=True)


if __name__ == "__main__":
    main()
