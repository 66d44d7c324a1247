"""Faults whose outcome users are told of: what each does to a job of two ranks, and what is expected of it."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from signal import SIGCONT, SIGKILL, SIGSTOP

from harness import cgroup
from hosts.victim import Victim

SHORT = ("--timeout", "12", "--stall-warning", "5", "--heartbeat-timeout", "4", "--orphan-timeout", "8")
"""In place of 300, 60, 10 and 30 s, so that the table is made in minutes."""
DEFAULTS = ("--timeout", "300", "--heartbeat-timeout", "10", "--orphan-timeout", "30")
"""For cuts that are to be survived as a user's jobs survive them."""
STEPPED_SECONDS = 15.0
"""How long a job goes on after a step of the clock: longer than each of its waits."""
Strike = Callable[[Victim], None]
HERE, SIMULATED, SSH = "one host", "2 simulated hosts", "2 hosts by SSH"


@dataclass(frozen=True)
class Fault:
    """Something that befalls a job, and what is expected of it."""

    name: str
    place: str
    executor: str
    strike: Strike
    told: str
    """A pattern of the line that names it; empty: nobody is to be bothered."""
    code: int
    arguments: tuple[str, ...] = ()
    clock: bool = False
    """Whether the job's clock can be set."""
    needs: Callable[[], str] = lambda: ""
    """Why it cannot be tried here; empty if it can."""

    @property
    def title(self) -> str:
        return f"{self.place}, {self.executor}: {self.name}"


def kill(job: Victim) -> None:
    job.signal(1, SIGKILL)


def stop(job: Victim) -> None:
    job.signal(1, SIGSTOP)


def go_on(job: Victim) -> None:
    job.signal(1, SIGCONT)


def signal_agent(number: int, host: int = 0) -> Strike:
    return lambda job: job.signal_agent(host, number)


def script(code: str) -> Strike:
    return lambda job: job.run(code)


def cut_data(job: Victim) -> None:
    job.cut_data(0, 1)


def cut_control(job: Victim) -> None:
    for host in (0, 1):
        job.cut_control(host)


def cut_both(job: Victim) -> None:
    job.cut_both(1)


def heal(job: Victim) -> None:
    job.heal()


def for_a_while(seconds: float, begin: Strike, end: Strike) -> Strike:
    """And the job ends well afterwards."""

    def strike(job: Victim) -> None:
        begin(job)
        job.pause(seconds)
        end(job)
        job.finish()

    return strike


def fill_logs(job: Victim) -> None:
    job.fill_logs()
    job.finish()


def step_clock(seconds: int) -> Strike:
    return for_a_while(STEPPED_SECONDS, lambda job: job.step_clock(seconds), lambda job: None)


def mpi() -> str:
    return "" if shutil.which("mpirun") else "no mpirun here"


WAS_STOPPED = r"stopped \(SIGSTOP"
KILLED = r"worker 1 failed \(killed by signal 9, SIGKILL\)"
EARLY = r"worker 1 failed \(ended too early"
LINK = r"sim0 and sim1 have heard nothing from each other"
LEAVE, EXIT, RAISE = "os._exit(0)", "sys.exit()", "1 / 0"
TAKE = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64)); [os.open('.', 0) for _ in [0] * 99]"


def faults() -> Iterator[Fault]:
    leave = script(LEAVE)
    for executor, needs in (("shm", str), ("gloo", str), ("mpi", mpi)):
        yield Fault("kill -9 of a worker", HERE, executor, kill, KILLED, 137, needs=needs)
        yield Fault("SIGSTOP of a worker", HERE, executor, stop, WAS_STOPPED, 1, needs=needs)
        yield Fault("os._exit(0) in the middle", HERE, executor, leave, EARLY, 1, needs=needs)
    here = partial(Fault, place=HERE, executor="gloo")
    yield here("sys.exit() in the middle", strike=script(EXIT), told=EARLY, code=1)
    yield here("an exception", strike=script(RAISE), told="ZeroDivisionError: division by zero", code=1)
    yield here("SIGSTOP of a worker for 4 s", strike=for_a_while(4, stop, go_on), told="", code=0)
    yield here("EMFILE in a worker", strike=script(TAKE), told="Too many open files", code=1)
    hungry = "lack of memory"
    yield here("no memory, in a cgroup", strike=lambda job: job.starve(1), told=hungry, code=137, needs=cgroup.missing)
    full = "No space left"
    yield here("a full disk for logs", strike=fill_logs, told=full, code=0, arguments=("--log-dir", "disk"))
    yield here("kill -9 of the agent", strike=signal_agent(SIGKILL), told="agent .* was killed", code=3)
    still = for_a_while(4, signal_agent(SIGSTOP), signal_agent(SIGCONT))
    yield here("SIGSTOP of the agent for 4 s", strike=still, told="", code=0)
    silent = "no sign of life for"
    yield here("SIGSTOP of the agent", strike=signal_agent(SIGSTOP), told=silent, code=3)
    yield here("kill -9 of the launcher", strike=lambda job: job.signal_launcher(SIGKILL), told="", code=-SIGKILL)
    for seconds, what in ((3600, "forward"), (-3600, "back")):
        yield here(f"the clock steps an hour {what}", strike=step_clock(seconds), told="", code=0, clock=True)
    yield Fault("kill -9 of a worker", SIMULATED, "gloo", kill, KILLED, 137)
    yield Fault("SIGSTOP of a worker", SIMULATED, "gloo", stop, WAS_STOPPED, 1)
    yield Fault("kill -9 of an agent", SIMULATED, "gloo", signal_agent(SIGKILL, 1), "sim1: .* was killed", 3)
    yield Fault("data cut for 5 s", SIMULATED, "gloo", for_a_while(5, cut_data, heal), "", 0, DEFAULTS)
    yield Fault("data cut for 6 s", SIMULATED, "gloo", for_a_while(6, cut_data, heal), LINK, 0)
    yield Fault("data cut for good", SIMULATED, "gloo", cut_data, LINK, 1)
    yield Fault("os._exit(0) on one host", SSH, "gloo", leave, EARLY, 1)
    yield Fault("kill -9 of an agent", SSH, "gloo", signal_agent(SIGKILL, 1), "h1: ", 3)
    yield Fault("control cut for 5 s", SSH, "gloo", for_a_while(5, cut_control, heal), "", 0, DEFAULTS)
    yield Fault("control cut for good", SSH, "gloo", cut_control, silent, 3)
    yield Fault("both cut for 5 s", SSH, "gloo", for_a_while(5, cut_both, heal), "", 0, DEFAULTS)
    yield Fault("both cut for good", SSH, "gloo", cut_both, rf"h1: {silent}", 3)
