"""Plans a job before anything is started: determines its hosts, its launcher, its command and its variables."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from dadt.config import Config
from dadt.config.check import here
from dadt.config.executor import mpi_executor
from dadt.config.link import pace_of
from dadt.control import network, pacing, timeline_file
from dadt.errors import ConfigError
from dadt.launch.ending import signals
from dadt.launch.hosts import host, ray, script, simulated
from dadt.launch.hosts.host import Host
from dadt.launch.hosts.slot import HostRoom, share_out
from dadt.launch.hosts.slurm import slurm_hosts
from dadt.launch.launchers.node_rendezvous import rendezvous_of
from dadt.launch.start import environment
from dadt.launch.start.saved_start import SavedStart
from dadt.launch.start.torch_world import fewest

FIELDS = ("rank", "local_rank", "world_size", "master_addr", "master_port")
MOST_SLOTS = 1 << 16
"""Largest number of slots that one host may have. A larger number must be a typing error, and to place so many workers
would take long."""
BRACES = re.compile(r"\{\{|\}\}|\{(" + "|".join(FIELDS) + r")\}")


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One job as the user has requested it, before anything of it is started."""

    config: Config
    command: Sequence[str]
    """Command line of each worker, which still contains `{rank}` and the other placeholders of FIELDS."""
    files: Sequence[str] = ()
    """Files that must exist on each host. Their paths are relative to `cwd`."""
    blob: bytes = b""
    """Pickled function of `dadt.run`, which each agent writes to a file in its folder; empty for a script."""
    hosts: Sequence[Host] = ()
    elsewhere: Mapping[str, str] = field(default_factory=dict)
    """Environment variables that workers on other hosts get in addition to their host's environment."""
    named: Mapping[str, str] = field(default_factory=dict)
    """Environment variables from --env-file and -x, which all workers get."""
    divisors: Mapping[int, int] = field(default_factory=dict)
    """For each rank that ran out of memory, the number by which it divides the script's batch size."""
    cwd: str = ""
    start: SavedStart | None = None
    """Facts to save so that the job can be started again; None if it was not started from a command line."""

    def with_variables(self, given: Mapping[str, str]) -> Plan:
        """Return the plan with these additional variables for all workers, without those that the environment of `dadt
        run` contains already."""
        given = {name: value for name, value in given.items() if name not in os.environ}
        return replace(self, elsewhere={**given, **self.elsewhere}, named={**given, **self.named})

    @property
    def timeline(self) -> Path | None:
        """Path of the file of `--timeline` if it will be written on this host. None if it will be written elsewhere, if
        there is none, or if Ray decides where the workers run."""
        first = next(iter(self.hosts), None)
        if not self.config.timeline or first is None or isinstance(first, ray.RayHost):
            return None
        return Path(self.config.timeline) if first.is_here else None


def make(
    config: Config,
    command: Sequence[str],
    files: Sequence[str] = (),
    blob: bytes = b"",
    say: Callable[[str], None] = lambda text: None,
) -> Plan:
    """Make a plan from the configuration. say: called with a text for the user while a scheduler makes the job wait for
    hosts. Raises ConfigError; with Ray also LaunchError and StartTimeout."""
    config = _for_mpi(config)
    network.check(config.network_interface)
    for check in (signals.forwarded, signals.of_checkpoint):
        check(config)
    elsewhere, named = environment.forwarded(config)
    if by_ray := _by_ray(config):
        ray.ignore_threads(elsewhere, named)
    hosts = list(ray.reserve(config, say)) if by_ray else _within_reason(hosts_of(config))
    if not (config.host_discovery_script or by_ray):
        _check_room(fewest(config), hosts)
    made = Plan(
        config=config,
        command=command,
        files=files,
        blob=blob,
        hosts=hosts,
        elsewhere=elsewhere,
        named=named,
        cwd=str(Path(here(), config.workdir)),
    )
    if made.timeline:
        timeline_file.check(made.timeline)
    return made


def release(the_plan: Plan) -> None:
    """Return the resources that a scheduler (Ray) has reserved for this plan's job. Idempotent."""
    for group in {each.group for each in the_plan.hosts if isinstance(each, ray.RayHost)}:
        ray.release(group)


def _by_ray(config: Config) -> bool:
    """Return whether Ray places the workers. Raises ConfigError if the user has named hosts as well."""
    if config.launcher != "ray":
        return False
    given = {"-H": config.hosts, "--hostfile": config.hostfile, "--nnodes": config.nnodes}
    if named := [name for name, value in given.items() if value]:
        raise ConfigError(f"--launcher ray: Ray chooses the hosts; leave {' and '.join(named)} out")
    return True


def _for_mpi(config: Config) -> Config:
    """Return the configuration with a launcher that suits its executor, because only mpirun or srun can start the ranks
    of executors that use MPI. Raises ConfigError."""
    name = mpi_executor(config)
    if not name or config.launcher == "mpi":
        return config
    if config.nnodes or config.launcher not in ("auto", "slurm"):
        given = "--nnodes" if config.nnodes else f"--launcher {config.launcher}"
        raise ConfigError(f"--executor {name}: {given} starts no ranks of MPI; leave it out, or give --launcher mpi")
    by_slurm = config.launcher == "slurm" or (shutil.which(config.mpirun) is None and shutil.which("srun") is not None)
    if by_slurm and config.mpirun == "mpirun" and "SLURM_JOB_ID" in os.environ:
        return replace(config, launcher="mpi", mpirun="srun")
    return replace(config, launcher="mpi")


def _check_room(count: int, hosts: Sequence[Host]) -> None:
    """Raise ConfigError if the hosts have too few slots for `count` workers. Does nothing if the slots of some host are
    not known until its agent has reported."""
    if all(host.slots for host in hosts):
        share_out(count, [HostRoom(host=host.name, slots=host.slots) for host in hosts])


def hosts_of(config: Config, env: Mapping[str, str] = os.environ) -> list[Host]:
    """Return the hosts of the job. A single host with an empty name stands for this machine. Raises ConfigError."""
    if simulated.wanted(config):
        return [Host(name=name, slots=slots) for name, slots in simulated.hosts_and_slots(config).items()]
    if config.nnodes:
        return _by_hand(config)
    if config.rendezvous or config.node_rank >= 0:
        given = "--rendezvous" if config.rendezvous else "--node-rank"
        raise ConfigError(f"{given}: of how many hosts? Give --nnodes N, or leave it out")
    if config.host_discovery_script:
        return hosts_now(config)
    if config.hosts and config.hostfile:
        raise ConfigError("-H and --hostfile exclude each other: give one")
    if config.launcher == "slurm" and (config.hosts or config.hostfile):
        raise ConfigError("--launcher slurm: its hosts are those of the allocation; leave -H and --hostfile out")
    named = host.parse(config.hosts) if config.hosts else []
    if config.hostfile:
        named = host.read(Path(config.hostfile))
    if pace := pace_of(config.link):
        pacing.check(pace)
    elif not named and config.launcher in ("auto", "slurm", "mpi"):
        named = _allocated(config, env)
    if not named:
        if config.include or config.exclude:
            raise ConfigError("--include and --exclude choose among hosts: give them with -H or --hostfile")
        if config.launcher == "ssh":
            raise ConfigError("--launcher ssh: on which hosts? Give them, as in -H host1:2,host2:2")
        if not (config.np or config.accelerators):
            raise ConfigError("how many workers? Give their number, as in dadt run -np 2 train.py")
        return [Host(name="", slots=config.accelerators or config.np)]
    return _usable(config, host.choose(named, config.include, config.exclude))


def on_this_host(config: Config) -> Config:
    """Return the configuration with localhost as its only host, if it does not say in any way where workers run.
    localhost then offers as many slots as it has room for."""
    given = (config.hosts, config.hostfile, config.host_discovery_script, config.nnodes, config.accelerators)
    elsewhere = config.launcher in ("ray", "ssh") or simulated.wanted(config) or _allocated(config, os.environ)
    return config if any(given) or elsewhere else replace(config, hosts="localhost")


def who_names_hosts(config: Config, hosts: Sequence[Host] = ()) -> Callable[[], Sequence[Host]] | None:
    """Return a function that returns the current hosts (or raises ConfigError), if the list of hosts may change while
    the job runs; None if it does not change."""
    if hosts and isinstance(hosts[0], ray.RayHost):
        return partial(ray.hosts_of, hosts[0].group)
    changes = bool(config.host_discovery_script) or Path(config.hostfile or os.devnull).is_file()
    return partial(hosts_now, config) if changes else None


def hosts_now(config: Config) -> list[Host]:
    """Return the hosts that the discovery script or the hostfile names now; the list may be empty. Raises
    ConfigError."""
    named = (
        script.hosts(Path(here(), config.host_discovery_script))
        if config.host_discovery_script
        else host.read(Path(config.hostfile))
    )
    return _within_reason(_usable(config, host.choose(named, config.include, config.exclude, changing=True)))


def _usable(config: Config, chosen: Sequence[Host]) -> list[Host]:
    if config.launcher == "local" and (remote := [str(each) for each in chosen if not each.is_local]):
        raise ConfigError(f"--launcher local: {', '.join(remote)} is another host; leave --launcher out, or give ssh")
    return [host.with_slots(each, config.accelerators) for each in chosen]


def fill(command: Sequence[str], values: Mapping[str, object]) -> list[str]:
    """Return the command line of one worker, in which `{rank}` and the other placeholders of FIELDS are replaced, and
    `{{` and `}}` have become single braces."""

    def value(found: re.Match[str]) -> str:
        name = found[1]
        return str(values[name]) if name else found[0][0]

    # Arguments without a placeholder keep their braces, since scripts may take JSON as an argument.
    return [BRACES.sub(value, part) if _has_field(part) else part for part in command]


def _has_field(part: str) -> bool:
    return "{{" in part or any(found[1] for found in BRACES.finditer(part))


def _within_reason(hosts: list[Host]) -> list[Host]:
    for each in hosts:
        if each.slots > MOST_SLOTS:
            raise ConfigError(f"{each.slots} workers on {each.name or 'this host'}: give {MOST_SLOTS} at most")
    return hosts


def _by_hand(config: Config) -> list[Host]:
    if config.hosts or config.hostfile:
        raise ConfigError("--nnodes and -H exclude each other: with --nnodes, dadt run is called on each host")
    if not config.rendezvous:
        if config.nnodes == 1:
            raise ConfigError("--nnodes 1: leave it out; -np N starts N workers on this host")
        raise ConfigError(
            f"--nnodes {config.nnodes}: where do the hosts meet? Give --rendezvous host:port, or file:///a/shared/path;"
            " or leave --nnodes out and call dadt run on one host alone, with -H host1,host2"
        )
    if not 0 <= config.node_rank < config.nnodes:
        raise ConfigError(f"--node-rank {config.node_rank}: give this host's number, from 0 to {config.nnodes - 1}")
    slots = config.accelerators
    if config.np and not slots:
        if config.np % config.nnodes:
            remedy = "give --accelerators N, the most workers of each host"
            raise ConfigError(f"-np {config.np} is no multiple of --nnodes {config.nnodes}: {remedy}")
        slots = config.np // config.nnodes
    rendezvous_of(config)  # called only for its errors, before the launcher listens on any port
    return [Host(name=f"node{index}", slots=slots) for index in range(config.nnodes)]


def _allocated(config: Config, env: Mapping[str, str]) -> list[Host]:
    """Return the hosts that Slurm has allocated; an empty list outside of an allocation. Raises ConfigError."""
    if "SLURM_JOB_ID" not in env:
        if config.launcher == "slurm":
            raise ConfigError("--launcher slurm: this is no Slurm allocation; use sbatch or salloc")
        return []
    return slurm_hosts(env) or []
