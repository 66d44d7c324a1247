"""Runs a script as ranks of `dadt run` or torchrun, or alone, and collects what each of them found."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness import TESTS, forkserver
from harness.patience import PATIENCE

PRELUDE = """\
import os, sys
sys.path.append({tests!r})
{first}
import torch
{light}
from torch import nn
torch.set_num_threads(1)
rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
def report(value):
    with open(os.path.join({folder!r}, f"rank{{rank}}.pt"), "wb") as f:
        torch.save(value, f)
"""


WORDS = {
    "dadt run": lambda np: ["run", "-np", str(np)],
    "torchrun": lambda np: ["--nproc-per-node", str(np)],
    "python": lambda np: [],
}


def starter(launcher: str, np: int, alone: bool = False) -> list[str]:
    """What runs the script whose name follows, by one of WORDS. alone: as for `run`."""
    name = launcher.split()[0]
    program = str(Path(sys.executable).with_name(name)) if alone else forkserver.program(name)
    return [program, *WORDS[launcher](np)]


@dataclass
class Run:
    code: int
    output: str
    ranks: list[Any]
    """What each gave to `report`."""

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


def run(
    folder: Path,
    script: str,
    *options: str,
    np: int = 2,
    launcher: str = "dadt run",
    code: int | None = 0,
    first: str = "",
    timeout: float = PATIENCE,
    alone: bool = False,
    **env: str,
) -> Run:
    """first: what comes before `import torch`. code: the exit code that is expected; None where any is. alone: Python
    is started for the launcher and each rank, which else are forked off processes that have imported what they need."""
    path = folder / "train.py"
    light = "" if not alone or "torch.compile" in script else "from harness import light"
    prelude = PRELUDE.format(tests=str(TESTS), folder=str(folder), first=first, light=light)
    path.write_text(prelude + textwrap.dedent(script))
    done = subprocess.run(
        [*starter(launcher, np, alone), *options, str(path)],
        cwd=folder,
        capture_output=True,
        timeout=timeout,
        env={**os.environ, "OMP_NUM_THREADS": "1", **env},
    )
    import torch

    output = (done.stdout + done.stderr).decode(errors="replace")
    assert code in (None, done.returncode), output
    files = [folder / f"rank{r}.pt" for r in range(np)]
    return Run(done.returncode, output, [torch.load(f, weights_only=False) for f in files if f.exists()])


def run_api(folder: Path, script: str, *options: str, **how: Any) -> Run:
    """As `run`, for a script that begins with `import dadt`."""
    return run(folder, script, *options, **{"first": "import dadt", **how})
