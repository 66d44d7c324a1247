"""What a user sees of each fault: `make faults` (as root).

Each fault strikes a job that trains. Told: from the fault to the line that names it; over: to the end of the job. What
is left is looked for on all hosts after the end.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import date
from pathlib import Path

from harness import cgroup
from harness.cgroup import memory_limit
from harness.disk import small_disk
from harness.machine import Machine, Network, missing
from harness.patience import PATIENCE, SETTLE_SECONDS, await_that
from harness.run import DADT, left_of

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
SHORT = ("--timeout", "12", "--stall-warning", "5", "--heartbeat-timeout", "4", "--orphan-timeout", "8")
"""In place of 300, 60, 10 and 30 s, so that the table is made in minutes."""
DEFAULTS = ("--timeout", "300", "--heartbeat-timeout", "10", "--orphan-timeout", "30")
"""For cuts that are to be survived as a user's jobs survive them."""
NOWHERE = "lladdr 02:00:00:00:00:99 dev eth0 nud permanent"
STEPPED_SECONDS = 15.0
"""How long a job goes on after a step of the clock: longer than each of its waits."""
TELL_LETTERS = 220


class Job:
    """A running job of two or more ranks, all of which train."""

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
        more = {"2 simulated hosts": ["--simulate-hosts", "2"], "2 hosts by SSH": ["-H", "h0:1,h1:1"]}.get(place, [])
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

    def strike(self, code: str) -> None:
        """Rank 1 runs this between two steps."""
        (self.folder / "strike.new").write_text(code)
        (self.folder / "strike.new").rename(self.folder / "strike")

    def finish(self) -> None:
        """All ranks end well."""
        (self.folder / "end").touch()

    def ip(self, rank: int, words: str) -> None:
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


@dataclass(frozen=True)
class Fault:
    """Something that befalls a job, and what is expected of it."""

    name: str
    place: str
    executor: str
    strike: Callable[[Job], None]
    told: str
    """A pattern of the line that names it; empty: nobody is to be bothered."""
    code: int
    arguments: tuple[str, ...] = ()
    variables: Callable[[Path], Mapping[str, str]] = lambda folder: {}
    """Of the job in this folder."""
    needs: Callable[[], str] = lambda: ""
    """Why it cannot be tried here; empty if it can."""


HERE, SIMULATED, SSH = "one host", "2 simulated hosts", "2 hosts by SSH"


def send(number: int, rank: int = 1) -> Callable[[Job], None]:
    return lambda job: os.kill(job.worker(rank), number)


def kill_agent(job: Job) -> None:
    os.kill(job.agent(1), signal.SIGKILL)


def script(code: str) -> Callable[[Job], None]:
    return lambda job: job.strike(code)


def cut_data(job: Job) -> None:
    job.ip(0, f"neigh replace 10.77.0.2 {NOWHERE}")
    job.ip(1, f"neigh replace 10.77.0.1 {NOWHERE}")


def heal_data(job: Job) -> None:
    job.ip(0, "neigh del 10.77.0.2 dev eth0")
    job.ip(1, "neigh del 10.77.0.1 dev eth0")


def for_a_while(seconds: float, begin: Callable[[Job], None], end: Callable[[Job], None]) -> Callable[[Job], None]:
    """And the job ends well afterwards."""

    def strike(job: Job) -> None:
        begin(job)
        time.sleep(seconds)
        end(job)
        job.finish()

    return strike


def cut(*names: str) -> Callable[[Job], None]:
    return lambda job: _each(job, names, Network.cut)


def heal(*names: str) -> Callable[[Job], None]:
    return lambda job: _each(job, names, Network.heal)


def _each(job: Job, names: Sequence[str], act: Callable[[Network, Machine], None]) -> None:
    assert job.network is not None
    for machine in [*job.network.hosts, job.network.launcher]:
        if machine.name in names:
            act(job.network, machine)


def mpi() -> str:
    return "" if shutil.which("mpirun") else "no mpirun here"


def out_of_memory(job: Job) -> None:
    """The job goes into a cgroup that has not enough for what rank 1 then takes."""
    limit = job.stack.enter_context(memory_limit(f"dadt-faults-{os.getpid()}", 256))
    limit.take([job.agent(0), job.worker(0), job.worker(1)])
    job.strike("taken = bytearray(os.urandom(1 << 20) * 1024)")


def fill_disk(job: Job) -> None:
    job.strike("print('x' * (1 << 22)); os.remove('strike')")
    await_that(lambda: any("could not be written" in line or "is incomplete" in line for _, line in job.lines), "")
    job.finish()


def with_clock(folder: Path) -> dict[str, str]:
    """All processes of the job read the clock with the seconds that stand in this file, but for the monotonic one."""
    library = folder / "clock.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, Path(__file__).with_name("clock.c")], check=True)
    return {"LD_PRELOAD": str(library), "CLOCK_FILE": str(folder / "clock")}


def step_clock(seconds: int) -> Callable[[Job], None]:
    def step(job: Job) -> None:
        job.strike("Path('clock.read').write_text(str(time.time())); os.remove('strike')")
        await_that(lambda: _read(job.folder / "clock.read"), "the clock to be read")
        before = float(_read(job.folder / "clock.read"))
        (job.folder / "clock.new").write_text(f"{seconds:+d}")
        (job.folder / "clock.new").rename(job.folder / "clock")
        (job.folder / "clock.read").unlink()
        job.strike("Path('clock.read').write_text(str(time.time())); os.remove('strike')")
        await_that(lambda: _read(job.folder / "clock.read"), "the clock to be read again")
        assert abs(float(_read(job.folder / "clock.read")) - before - seconds) < PATIENCE, "the clock has not stepped"
        time.sleep(STEPPED_SECONDS)

    return step


def _read(path: Path) -> str:
    return path.read_text() if path.exists() else ""


WAS_STOPPED = r"stopped \(SIGSTOP"
KILLED = r"worker 1 failed \(killed by signal 9, SIGKILL\)"
EARLY = r"worker 1 failed \(ended too early"
LINK = r"sim0 and sim1 have heard nothing from each other"
TAKE = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64)); [os.open('.', 0) for _ in [0] * 99]"


def faults() -> Iterator[Fault]:
    kill, stop, leave = send(signal.SIGKILL), send(signal.SIGSTOP), script("os._exit(0)")
    for executor, needs in (("shm", str), ("gloo", str), ("mpi", mpi)):
        yield Fault("kill -9 of a worker", HERE, executor, kill, KILLED, 137, needs=needs)
        yield Fault("SIGSTOP of a worker", HERE, executor, stop, WAS_STOPPED, 1, needs=needs)
        yield Fault("os._exit(0) in the middle", HERE, executor, leave, EARLY, 1, needs=needs)
    yield Fault("sys.exit() in the middle", HERE, "gloo", script("sys.exit()"), EARLY, 1)
    yield Fault("an exception", HERE, "gloo", script("1 / 0"), "ZeroDivisionError: division by zero", 1)
    brief = for_a_while(4, stop, send(signal.SIGCONT))
    yield Fault("SIGSTOP of a worker for 4 s", HERE, "gloo", brief, "", 0)
    yield Fault("EMFILE in a worker", HERE, "gloo", script(TAKE), r"Too many open files", 1)
    yield Fault("no memory, in a cgroup", HERE, "gloo", out_of_memory, "lack of memory", 137, needs=cgroup.missing)
    yield Fault("a full disk for logs", HERE, "gloo", fill_disk, "No space left", 0, ("--log-dir", "disk"))
    yield Fault("kill -9 of the agent", HERE, "gloo", lambda job: os.kill(job.agent(0), 9), "agent .* was killed", 3)
    still = for_a_while(4, lambda job: os.kill(job.agent(0), 19), lambda job: os.kill(job.agent(0), 18))
    yield Fault("SIGSTOP of the agent for 4 s", HERE, "gloo", still, "", 0)
    silent = "no sign of life for"
    yield Fault("SIGSTOP of the agent", HERE, "gloo", lambda job: os.kill(job.agent(0), 19), silent, 3)
    yield Fault("kill -9 of the launcher", HERE, "gloo", lambda job: job.process.kill(), "", -9)
    for seconds, what in ((3600, "forward"), (-3600, "back")):
        step = for_a_while(0, step_clock(seconds), lambda job: None)
        yield Fault(f"the clock steps an hour {what}", HERE, "gloo", step, "", 0, variables=with_clock)
    yield Fault("kill -9 of a worker", SIMULATED, "gloo", kill, KILLED, 137)
    yield Fault("SIGSTOP of a worker", SIMULATED, "gloo", stop, WAS_STOPPED, 1)
    yield Fault("kill -9 of an agent", SIMULATED, "gloo", kill_agent, "sim1: .* was killed", 3)
    yield Fault("data cut for 5 s", SIMULATED, "gloo", for_a_while(5, cut_data, heal_data), "", 0, DEFAULTS)
    yield Fault("data cut for 6 s", SIMULATED, "gloo", for_a_while(6, cut_data, heal_data), LINK, 0)
    yield Fault("data cut for good", SIMULATED, "gloo", cut_data, LINK, 1)
    yield Fault("os._exit(0) on one host", SSH, "gloo", leave, EARLY, 1)
    yield Fault("kill -9 of an agent", SSH, "gloo", kill_agent, "h1: ", 3)
    control = for_a_while(5, cut("launcher"), heal("launcher"))
    yield Fault("control cut for 5 s", SSH, "gloo", control, "", 0, DEFAULTS)
    yield Fault("control cut for good", SSH, "gloo", cut("launcher"), silent, 3)
    yield Fault("both cut for 5 s", SSH, "gloo", for_a_while(5, cut("h1"), heal("h1")), "", 0, DEFAULTS)
    yield Fault("both cut for good", SSH, "gloo", cut("h1"), rf"h1: {silent}", 3)


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
            fault.variables(folder),
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
