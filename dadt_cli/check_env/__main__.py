"""Run as `python -m dadt_cli.check_env`: prints all checks of this host as one line of JSON, and measures the
connections to other hosts if the second argument is an order to do so (PairOrder).

With a subject's name as first argument: prints only the checks of this subject, one line of JSON each.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from dataclasses import asdict

from dadt.launch.child import end_with, without_settings
from dadt_cli.check_env import SUBJECTS, pairs
from dadt_cli.check_env.check import CheckOptions
from dadt_cli.check_env.probe import of_host


def main() -> None:
    words = sys.argv[1:]
    subject = words.pop(0) if words and words[0] in SUBJECTS else ""
    asked = CheckOptions(**json.loads(words[0])) if words else CheckOptions()
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # anything that libraries print goes to stderr, so that stdout holds only JSON
    with out:
        if not subject:
            # Leave out variables that the agent sets for a worker, since they would change the results of the checks.
            env = without_settings(os.environ)
            if not env.get("OMP_NUM_THREADS"):
                env.pop("OMP_NUM_THREADS", None)
            ways = pairs.measure(pairs.PairOrder(**json.loads(words[1]))) if len(words) > 1 else []
            checks = of_host(asked, env=env)
            told = {"checks": [asdict(check) for check in checks], "ways": [asdict(way) for way in ways]}
            json.dump(told, out)
            return
        end_with(os.getppid())  # end with the parent process, which reads the results
        if subject != "variables":
            # Remove DADT's variables, since neither a calling worker nor its settings may affect the checks.
            for name in [name for name in os.environ if name.startswith("DADT_")]:
                del os.environ[name]
        for check in importlib.import_module(f"dadt_cli.check_env.{subject}").checks(asked):
            print(json.dumps(asdict(check)), file=out, flush=True)


if __name__ == "__main__":
    main()
