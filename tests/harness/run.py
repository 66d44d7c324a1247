"""Runs `dadt run` as its users do, and looks afterwards whether anything is left of it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from harness import forkserver, lightened
from harness.patience import PATIENCE, SETTLE_SECONDS, await_that

DADT = [str(Path(sys.executable).with_name("dadt"))]
FOLDERS = Path(f"/tmp/dadt-{os.getuid()}")


@dataclass(frozen=True)
class Result:
    code: int
    out: bytes
    err: str
    """What dadt itself said stands here, too."""
    logs: Path

    @property
    def job(self) -> str:
        found = re.search(r"\(job (\w{4}), logs in ", self.err)
        assert found, self.err
        return found[1]

    def log(self, rank: int) -> bytes:
        return (self.logs / self.job / f"rank{rank}.log").read_bytes()


class Run:
    """A running `dadt run`; the script's text is given, and its file is called train.py."""

    def __init__(
        self, folder: Path, script: str, arguments: list[str], env: dict[str, str], alone: bool = False
    ) -> None:
        """alone: Python is started for launcher, agents and ranks, which else are forked, ranks if they need torch."""
        dadt = write_script(folder, script, alone)
        self.folder = folder
        self.process = subprocess.Popen(
            [*dadt, "run", *arguments],
            cwd=folder,
            env={**os.environ, "PYTHONWARNINGS": "default", **env},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    def finish(self, seconds: float = PATIENCE) -> Result:
        out, err = self.process.communicate(timeout=seconds)
        return Result(self.process.returncode, out, err.decode(errors="replace"), self.folder / "dadt-logs")

    def wait_for(self, *names: str) -> list[int]:
        """Until the script has written these files; their contents are pids."""
        paths = [self.folder / name for name in names]
        await_that(lambda: all(path.exists() and path.read_text() for path in paths), f"{names}")
        return [int(path.read_text()) for path in paths]

    @property
    def job(self) -> str:
        logs = self.folder / "dadt-logs"
        await_that(lambda: logs.exists() and any(logs.iterdir()), "the job's logs")
        return next(logs.iterdir()).name

    @property
    def agent(self) -> int:
        """Of a job that is alone."""
        threads = Path(f"/proc/{self.process.pid}/task").glob("*/children")
        children = [int(pid) for thread in threads for pid in thread.read_text().split()]
        agents = [pid for pid in children if b"dadt.launch.agent" in Path(f"/proc/{pid}/cmdline").read_bytes()]
        assert len(agents) == 1
        return agents[0]


def write_script(folder: Path, script: str, alone: bool = False) -> list[str]:
    """Writes train.py. Returns the program that runs it, which is forked unless alone, as are ranks with torch."""
    is_forked = "torch" in script and not alone
    (folder / "train.py").write_text(script if is_forked else lightened(script))
    return DADT if alone else [forkserver.dadt(is_forked)]


def end(runs: list[Run]) -> None:
    """Ends what still runs. What it has said is shown if the test has failed."""
    for run in runs:
        if run.process.poll() is None:
            run.process.send_signal(signal.SIGTERM)
        _, err = run.process.communicate(timeout=PATIENCE)
        print(err.decode(errors="replace"))


def await_nothing_left(folder: Path) -> None:
    """Of the jobs that were started in this folder: no process and no folder."""
    for job in (folder / "dadt-logs").glob("*"):
        await_that(lambda job=job: not left_of(job.name), f"the end of {left_of(job.name)}", seconds=SETTLE_SECONDS)
        folders = FOLDERS.glob(f"{job.name}*")
        await_that(
            lambda job=job: not list(FOLDERS.glob(f"{job.name}*")),
            f"the end of {list(folders)}",
            seconds=SETTLE_SECONDS,
        )


def left_of(job: str) -> list[str]:
    """Command lines of the processes that carry the job's mark."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and f"DADT_JOB={job}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                found.append((entry / "cmdline").read_text().replace("\0", " "))
        except OSError:
            continue  # it ended while we looked
    return found


def parent(pid: int) -> int:
    """Of a worker that is not forked: its agent."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def await_end_of(*pids: int) -> None:
    """A process that dies has lost its environment, by which DADT finds it, some time before it is a zombie."""
    await_that(lambda: not any(map(is_running, pids)), f"the end of {pids}", seconds=SETTLE_SECONDS)
