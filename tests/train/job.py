"""Runs scripts under `dadt run`, as a user does, and collects what each rank found."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

PRELUDE = """\
import os, sys
sys.path.insert(0, {here!r})
import torch{light}
from torch import nn
torch.set_num_threads(1)
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
def report(value):
    with open(os.path.join({folder!r}, f"rank{{rank}}.pt"), "wb") as f:
        torch.save(value, f)
"""


@dataclass
class Run:
    code: int
    output: str
    ranks: list[Any]

    def lines(self, prefix: str = "dadt: ") -> list[str]:
        return [line for line in self.output.splitlines() if line.startswith(prefix)]

    def of(self, name: str) -> Run:
        """What one of the scripts of `joined` has reported."""
        failed = [found["failed"] for found in self.ranks if "failed" in found]
        assert self.code == 0, "\n".join(failed) or self.output
        return Run(self.code, self.output, [found[name] for found in self.ranks])


JOINED = """
    import gc, traceback
    found = {{}}
    given = dict(torch=torch, nn=nn, os=os, sys=sys, rank=rank, world=world)
    given["report"] = lambda value: found.update({{name: value}})
    try:
        for name, script in {scripts!r}.items():
            exec(compile(script, name, "exec"), {{**given, "__name__": name}})
            gc.collect()
    except Exception:
        found["failed"] = "{{}} on rank {{}}:\\n{{}}".format(name, rank, traceback.format_exc())
        raise
    finally:
        report(found)
"""


def joined(**scripts: str) -> str:
    """Scripts that one job runs one after the other, each in a namespace of its own, as a job takes longer to start
    than any of them. `Run.of` tells what each has reported. What one has made is gone before the next begins."""
    return JOINED.format(scripts={name: textwrap.dedent(text) for name, text in scripts.items()})


def runner(tmp_path: Path):
    """run(script, *options, np=2): whatever a rank gives to `report` is in Run.ranks."""

    def run(script: str, *options: str, np: int = 2, check: bool = True, timeout: float = 150) -> Run:
        path = tmp_path / "train.py"
        here = str(Path(__file__).parent)
        light = "" if "torch.compile" in script else ", light"
        prelude = PRELUDE.format(here=here, folder=str(tmp_path), light=light)
        path.write_text(prelude + textwrap.dedent(script))
        command = [sys.executable, "-m", "dadt_cli", "run", "-np", str(np), *options, str(path)]
        done = subprocess.run(
            command,
            cwd=tmp_path,
            capture_output=True,
            timeout=timeout,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        output = (done.stdout + done.stderr).decode(errors="replace")
        if check:
            assert done.returncode == 0, output
        files = [tmp_path / f"rank{r}.pt" for r in range(np)]
        return Run(done.returncode, output, [torch.load(f, weights_only=False) for f in files if f.exists()])

    return run
