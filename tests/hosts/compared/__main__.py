"""`make faults-compared` (as root)."""

from __future__ import annotations

import argparse
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from harness.machine import missing
from hosts.compared.fault import FAULTS
from hosts.compared.page import page
from hosts.compared.system import SYSTEMS
from hosts.compared.trial import Row, try_out

from benchmarks.page import put


def main() -> None:
    parser = argparse.ArgumentParser(prog="hosts.compared", description="Faults under DADT, torchrun and torchft.")
    parser.add_argument("--only", default="", metavar="PATTERN", help="of the trials, by system, fault and step")
    parser.add_argument("--at-once", type=int, default=1, metavar="N", help="trainings at the same time")
    parser.add_argument("--write", type=Path, metavar="FILE", help="page whose section `faults-compared` gets it")
    options = parser.parse_args()
    if reason := missing():
        sys.exit(reason)
    trials = [(system, fault) for fault in FAULTS for system in SYSTEMS]
    chosen = [each for each in trials if re.search(options.only, f"{each[0].name}: {each[1].name} at {each[1].step}")]
    rows: list[Row] = []
    with ThreadPoolExecutor(options.at_once) as pool:
        for row in pool.map(lambda each: try_out(*each), chosen):
            rows.append(row)
            title = f"{row.system.name}: {row.fault.name} at {row.fault.step}: {row.outcome}"
            came = f"back {row.back}, again {row.again}, workers {row.workers}, equal {row.equal}"
            text = [row.text] if row.back is None else []
            print(f"{title}, {came}", *text, sep="\n", file=sys.stderr, flush=True)
            if options.write:
                put(options.write, "faults-compared", page(rows))
    print(page(rows))


if __name__ == "__main__":
    main()
