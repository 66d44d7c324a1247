"""As root: python -m benchmarks.peers --json docs/results/peers.json --write docs/results/speed.md

Measurements that the JSON holds are not repeated, so the same command continues a study that was stopped.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

from benchmarks.page import put
from benchmarks.peers.measurement import MEASUREMENTS, USUAL, found
from benchmarks.peers.page import page
from benchmarks.peers.target import SLOW_LINKS, slow_link
from dadt.errors import DadtError


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description=__doc__.partition("\n\n")[2])
    parser.add_argument("--json", type=Path, required=True, help="file of the figures; plots go beside it")
    parser.add_argument("--write", type=Path, help="page whose section `peers` is written from them")
    parser.add_argument("--only", metavar="NAME,...", help=f"make or repeat these alone: {', '.join(MEASUREMENTS)}")
    parser.add_argument("--rounds", type=int, help="of each measurement, in place of its own number")
    options = parser.parse_args()
    if unknown := set(options.only.split(",") if options.only else ()) - set(MEASUREMENTS):
        parser.error(f"--only {', '.join(sorted(unknown))}: unknown; choose from {', '.join(MEASUREMENTS)}")
    if options.rounds is not None and options.rounds < 2:
        parser.error(f"--rounds {options.rounds}: an interval needs 2 rounds or more")
    for name, file in (("--json", options.json), ("--write", options.write)):
        if file is not None and not file.absolute().parent.is_dir():
            parser.error(f"{name} {file}: there is no folder {file.absolute().parent}")
    study = json.loads(options.json.read_text()) if options.json.exists() else {}
    wanted = options.only.split(",") if options.only else [name for name in USUAL if name not in study]
    failed = [name for name in wanted if not _made(name, study, options)]
    if options.write is not None:
        put(options.write, "peers", page(study, _slow(options.json.parent)))
    if failed:
        raise SystemExit(f"not measured: {', '.join(failed)}")


def _slow(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the measurements that other commands have put into the folder."""
    files = {name: folder / f"{name}.json" for name in SLOW_LINKS}
    return {name: slow_link(json.loads(file.read_text())["seeds"]) for name, file in files.items() if file.exists()}


def _made(name: str, study: dict[str, Any], options: argparse.Namespace) -> bool:
    """Make a measurement, and put it into the file at once. Returns False if it could not be made; others can still
    be."""
    asked, begun = MEASUREMENTS[name], time.monotonic()

    def tell(what: str) -> None:
        print(f"{name}, {time.monotonic() - begun:4.0f} s: {what}", flush=True)

    picture = options.json.with_name(f"{options.json.stem}-{name}.png")
    try:
        study[name] = found(asked, options.rounds or asked.rounds, picture, tell)
    except DadtError as error:
        tell(str(error))
        return False
    options.json.write_text(json.dumps(study, indent=1) + "\n")
    return True


if __name__ == "__main__":
    main()
