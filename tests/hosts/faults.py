"""What a user sees of each fault: `make faults` (as root).

Each fault strikes a job that trains. Told: from the fault to the line that names it; over: to the end of the job. What
is left is looked for on all hosts after the end.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import date
from pathlib import Path

from harness.cgroup import memory_limit
from harness.disk import small_disk
from harness.machine import Machine, Network, missing
from harness.patience import PATIENCE, SETTLE_SECONDS, await_that
from harness.run import DADT, left_of
from hosts.known_fault import SHORT, SIMULATED, SSH, Fault, faults
from hosts.victim import Victim

from benchmarks.page import put, table

SCRIPT = """
import os, signal, sys, time, torch
from pathlib import Path
torch.set_num_threads(1)
rank = os.environ["RANK"]
model = torch.nn.Linear(100, 10); optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(1_000_000):
    optimizer.zero_grad(); model(torch.randn(8, 100)).sum().backward(); optimizer.step()
    time.sleep(0.01)
    if step == 60:
        Path(f"pid{rank}.new").write_text(str(os.getpid())); Path(f"pid{rank}.new").rename(f"pid{rank}")
    if step % 50 == 0 and Path("end").exists(): os._exit(0)
    if rank == "1" and step > 60 and Path("strike").exists(): exec(Path("strike").read_text())
"""
ADDRESSES = ("10.77.0.1", "10.77.0.2")
"""Of simulated hosts."""
NOWHERE = "lladdr 02:00:00:00:00:99 dev eth0 nud permanent"
TELL_LETTERS = 220


class Job(Victim):
    """A running job of two ranks, both of which train."""

    def __init__(
        self,
        folder: Path,
        place: str,
        arguments: Sequence[str],
        variables: Mapping[str, str],
        network: Network | None,
        stack: ExitStack,
    ) -> None:
        """stack: what a fault has changed is undone when it closes."""
        self.folder = folder
        self.stack = stack
        (folder / "clock").write_text("+0")
        self.network = network
        (folder / "train.py").write_text(SCRIPT)
        more = {SIMULATED: ["--simulate-hosts", "2"], SSH: ["-H", "h0:1,h1:1"]}.get(place, [])
        if network is not None:
            more = ["--ssh-config", str(network.config), *more]
        options = [] if "--log-dir" in arguments else ["--log-dir", "logs"]
        command = [*DADT, "run", "-np", "2", *more, *SHORT, *options, *arguments, "train.py"]
        self.process = subprocess.Popen(
            network.launcher.enter(command, folder) if network is not None else command,
            cwd=folder,
            env={**os.environ, **variables, "HOME": str(network.launcher.home if network else os.environ["HOME"])},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.lines: list[tuple[float, str]] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        try:
            await_that(lambda: self._trains(), "training to begin")
        except BaseException:
            self.process.terminate()
            raise

    def worker(self, rank: int) -> int:
        """Its pid, as seen from here."""
        if self.network is None:
            return int((self.folder / f"pid{rank}").read_text())
        return self._on(self.network[rank], "train.py")

    def agent(self, rank: int) -> int:
        if self.network is not None:
            return self._on(self.network[rank], "dadt.launch.agent")
        return int(Path(f"/proc/{self.worker(rank)}/stat").read_text().rpartition(")")[2].split()[1])

    def pause(self, seconds: float) -> None:
        time.sleep(seconds)

    def finish(self) -> None:
        (self.folder / "end").touch()

    def signal(self, rank: int, number: int) -> None:
        os.kill(self.worker(rank), number)

    def signal_agent(self, host: int, number: int) -> None:
        os.kill(self.agent(host), number)

    def signal_launcher(self, number: int) -> None:
        self.process.send_signal(number)

    def run(self, code: str) -> None:
        (self.folder / "strike.new").write_text(code)
        (self.folder / "strike.new").rename(self.folder / "strike")

    def cut_data(self, host: int, other: int) -> None:
        self._ip(host, f"neigh replace {ADDRESSES[other]} {NOWHERE}")
        self._ip(other, f"neigh replace {ADDRESSES[host]} {NOWHERE}")

    def cut_control(self, host: int) -> None:
        assert self.network is not None
        self.network.divide(self.network.launcher, self.network[host])

    def cut_both(self, host: int) -> None:
        assert self.network is not None
        self.network.cut(self.network[host])

    def heal(self) -> None:
        if self.network is None:
            self._ip(0, f"neigh del {ADDRESSES[1]} dev eth0")
            self._ip(1, f"neigh del {ADDRESSES[0]} dev eth0")
        for machine in self.network.all if self.network is not None else ():
            self.network.heal(machine)

    def starve(self, rank: int) -> None:
        """The job goes into a cgroup that has not enough for what this rank then takes."""
        limit = self.stack.enter_context(memory_limit(f"dadt-faults-{os.getpid()}", 256))
        limit.take([self.agent(0), self.worker(0), self.worker(1)])
        self.run("taken = bytearray(os.urandom(1 << 20) * 1024)")

    def fill_logs(self) -> None:
        self.run("print('x' * (1 << 22)); os.remove('strike')")
        await_that(lambda: any("could not be written" in line or "is incomplete" in line for _, line in self.lines), "")

    def step_clock(self, seconds: int) -> None:
        before = self._read_clock()
        (self.folder / "clock.new").write_text(f"{seconds:+d}")
        (self.folder / "clock.new").rename(self.folder / "clock")
        assert abs(self._read_clock() - before - seconds) < PATIENCE, "the clock has not stepped"

    def _read_clock(self) -> float:
        """As rank 1 reads it."""
        read = self.folder / "clock.read"
        self.run(
            "Path('clock.read.new').write_text(str(time.time())); Path('clock.read.new').rename('clock.read'); "
            "os.remove('strike')"
        )
        await_that(read.exists, "the clock to be read")
        text = read.read_text()
        read.unlink()
        return float(text)

    def _ip(self, rank: int, words: str) -> None:
        command = ["nsenter", "-t", str(self.worker(rank)), "-n", "ip", *words.split()]
        subprocess.run(command, check=True, timeout=PATIENCE)

    def wait(self) -> int:
        code = self.process.wait(PATIENCE)
        self._reader.join(PATIENCE)
        return code

    def left(self) -> list[str]:
        """Processes and files, once they have had some seconds to go."""
        deadline = time.monotonic() + SETTLE_SECONDS
        while (found := self._left()) and time.monotonic() < deadline:
            time.sleep(0.1)
        return found

    def _left(self) -> list[str]:
        if self.network is not None:
            return self.network.leftovers()
        jobs = [path.name for path in (self.folder / "logs").glob("*")]
        return [each for job in jobs for each in left_of(job)]

    def _on(self, machine: Machine, program: str) -> int:
        found = [pid for pid, command in machine.processes().items() if program in command and "sh -c" not in command]
        return min(found)

    def _trains(self) -> bool:
        assert self.process.poll() is None, "".join(line for _, line in self.lines)
        return all((self.folder / f"pid{rank}").exists() for rank in range(2))

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append((time.monotonic(), line))


def with_clock(folder: Path) -> dict[str, str]:
    """All processes of the job read the clock with the seconds that stand in this file, but for the monotonic one."""
    library = folder / "clock.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, Path(__file__).with_name("clock.c")], check=True)
    return {"LD_PRELOAD": str(library), "CLOCK_FILE": str(folder / "clock")}


@dataclass(frozen=True)
class Row:
    """What came of a fault."""

    fault: Fault
    line: str = ""
    told: float | None = None
    over: float | None = None
    code: int | None = None
    left: Sequence[str] = ()
    skipped: str = ""

    @property
    def as_expected(self) -> bool:
        found = self.told is not None or not self.fault.told
        return bool(self.skipped) or (found and self.code == self.fault.code and not self.left)


def try_out(fault: Fault) -> Row:
    if reason := fault.needs():
        return Row(fault, skipped=reason)
    with tempfile.TemporaryDirectory(prefix="dadt-faults-") as name, ExitStack() as stack:
        folder = Path(name)
        network = None
        if fault.place == SSH:
            (folder / "network").mkdir()
            network = Network(folder / "network", 2)
            stack.callback(network.close)
        if "disk" in fault.arguments:
            stack.enter_context(small_disk(folder / "disk"))
        job = Job(
            folder,
            fault.place,
            ["--executor", fault.executor, *fault.arguments],
            with_clock(folder) if fault.clock else {},
            network,
            stack,
        )
        stack.callback(job.process.kill)
        begin = time.monotonic()
        fault.strike(job)
        code = job.wait()
        over = time.monotonic() - begin
        found = [(at, line) for at, line in job.lines if at >= begin and fault.told and re.search(fault.told, line)]
        at, line = found[0] if found else (None, "")
        if not fault.told:
            line = next((line for at, line in job.lines if at >= begin and "warning" in line), "")
        return Row(fault, line.strip(), at - begin if at else None, over, code, job.left())


def page(rows: Sequence[Row]) -> str:
    lines = [
        f"Made on {date.today()} with `make faults` (as root), on a shared virtual machine of {os.cpu_count()} cores,",
        "with simulated hosts. Each fault strikes a job of two ranks. Told: from the fault to the first line",
        "that names it; over: to the end of the job. Waits were shortened:",
        f"`{' '.join(SHORT)}`;",
        "with the defaults (300, 60, 10 and 30 s), which cuts of 5 s had, what hangs on one of them takes as much",
        "longer. What is left was looked for on all hosts after the end.",
        "",
    ]
    cells = []
    for row in rows:
        fault = row.fault
        sees = f"not tried: {row.skipped}" if row.skipped else f"`{shortened(row.line)}`" if row.line else "nothing"
        told, over = ("" if value is None else f"{value:.1f}" for value in (row.told, row.over))
        left = "" if row.skipped else "; ".join(row.left) or "nothing"
        code = "" if row.code is None else str(row.code)
        cells.append([fault.place, fault.executor, fault.name, sees, told, over, code, left])
    head = ["Where", "Executor", "Fault", "What the user sees", "Told (s)", "Over (s)", "Exit code", "Left"]
    return "\n".join([*lines, table(head, cells)])


def shortened(line: str) -> str:
    text = re.sub(r"\s+", " ", line.removeprefix("dadt: ")).replace("|", "/")
    return text if len(text) <= TELL_LETTERS else text[:TELL_LETTERS] + " ..."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", metavar="PATTERN", help="of the faults, by place, executor and name")
    parser.add_argument("--write", type=Path, metavar="FILE", help="page whose section `faults` gets the table")
    options = parser.parse_args()
    if reason := missing():
        sys.exit(reason)
    rows: list[Row] = []
    for fault in faults():
        title = f"{fault.place}, {fault.executor}: {fault.name}"
        if not re.search(options.only, title):
            continue
        rows.append(try_out(fault))
        row = rows[-1]
        came = row.skipped or (row.line, row.told, row.over, row.code, row.left)
        verdict = "as expected" if row.as_expected else "NOT as expected"
        print(f"{title}: {verdict}: {came}", file=sys.stderr, flush=True)
    print(page(rows))
    if options.write:
        put(options.write, "faults", page(rows))
    wrong = [row.fault.name for row in rows if not row.as_expected]
    sys.exit(f"not as expected: {', '.join(wrong)}" if wrong else 0)


if __name__ == "__main__":
    main()
