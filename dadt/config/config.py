"""Every knob of DADT. Each field gives the flag (`--warmup-steps`), the variable (DADT_WARMUP_STEPS) and the docs."""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from dadt.config.check import (
    TOPOLOGIES,
    check_algorithm,
    check_compression,
    check_executor,
    flag,
    here,
    loader_numbers,
    metrics_place,
    number,
    path_of,
    predict_factors,
    variable,
)
from dadt.config.extensions import LAUNCHERS
from dadt.config.numbers import MOST
from dadt.errors import ConfigError
from dadt.world import World

LEAST_MEASURED = 10
"""Steps that --algorithm auto must measure before it decides."""
LEAST_HEARTBEAT_TIMEOUT = 2.0
LEAST_ORPHAN_TIMEOUT = 2.0
"""Seconds; long enough for a few signs of life."""


def knob(
    default: Any,
    help: str,
    *,
    choices: tuple[str, ...] = (),
    advanced: bool = False,
    launch: bool = False,
    flags: tuple[str, ...] = (),
    metavar: str = "",
) -> Any:
    """A field of Config, with the help text of its flag.

    advanced: shown by --help-all only. launch: for the launcher only, not passed on to workers.
    flags: other names of the flag.
    """
    metadata = {
        "help": help,
        "choices": choices,
        "advanced": advanced,
        "launch": launch,
        "flags": flags,
        "metavar": metavar,
    }
    return field(default=default, metadata=metadata)


def launch_knob(default: Any, help: str, **options: Any) -> Any:
    return knob(default, help, launch=True, **options)


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """The configuration of one job, the same on every rank. The command line makes it and each worker rebuilds it."""

    algorithm: str = knob(
        "pipe",
        "How ranks learn from each other: pipe, sync, local, gossip, auto, or <module>:<Class>.",
        metavar="NAME",
    )
    executor: str = knob(
        "auto",
        "What moves the bytes: auto, shm, gloo, nccl, mpi, mpicuda, null, c10d:<name>, hierarchical:<name>.",
        metavar="NAME",
    )
    broadcast_executor: str = knob(
        "", "The same for broadcasts alone; else as --executor.", metavar="NAME", advanced=True
    )
    allreduce_executor: str = knob(
        "", "The same for all but broadcasts; else as --executor.", metavar="NAME", advanced=True
    )
    verbose: bool = knob(False, "Say why, where dadt chooses.", flags=("-v",))
    warmup_steps: int = knob(50, "Synchronous steps before `pipe` begins to delay.", advanced=True)
    predict: str = knob(
        "auto",
        "Weight prediction of `pipe`: auto; own:S by the optimizer's step, with a share S of the rank's own gradient;"
        " or factors of the last displacement, and of the one before: C or C,D.",
        advanced=True,
    )
    fall_back: bool = knob(
        True, "Go back to `sync` on all ranks where gradients blow up once `pipe` delays.", advanced=True
    )
    compression: str = knob(
        "none", "What goes over the wire: none, bf16, fp16, int8, or powersgd:<rank>.", metavar="NAME"
    )
    sync_every: int = knob(32, "Steps of its own that a rank takes between two averages of `local`.", advanced=True)
    outer_lr: float = knob(1.0, "`local`: the outer optimizer's learning rate; DiLoCo's is 0.7.", advanced=True)
    outer_momentum: float = knob(
        0.0, "`local`: the outer optimizer's Nesterov momentum; DiLoCo's is 0.9.", advanced=True
    )
    fragments: int = knob(1, "`local`: parts of the model that are averaged at different steps.", advanced=True)
    topology: str = knob("exponential", "`gossip`: who averages with whom.", choices=TOPOLOGIES, advanced=True)
    batch: str = knob(
        "per-rank",
        "The script's batch size is each rank's, or is divided among ranks.",
        choices=("per-rank", "global"),
    )
    scale_lr: str = knob(
        "none", "Multiply learning rates by the number of workers.", choices=("none", "linear", "sqrt")
    )
    share: str = knob("", "DataLoaders that train, by number, as 1,3.")
    no_share: str = knob("", "DataLoaders not to be shared out: 2, or all.")
    seed: int = knob(
        -1, "Seed of torch, numpy and random on every rank before the script's own; -1 draws one.", advanced=True
    )
    seeding: bool = knob(True, "Seed all ranks alike, then give each its own random stream.", advanced=True)
    broadcast: bool = knob(True, "Start all ranks from rank 0's weights, buffers and optimizer state.", advanced=True)
    buffers: bool = knob(True, "Average buffers (BatchNorm statistics) over ranks.", advanced=True)
    save_once: bool = knob(
        True,
        "torch.save to a path: one rank of each host writes, the others wait for the file.",
        advanced=True,
    )
    lock_downloads: bool = knob(True, "Download into one folder by one rank of a host at a time.", advanced=True)
    bucket_mb: float = knob(25.0, "Gradients are exchanged in buckets of about this many MiB.", advanced=True)
    timeline: str = knob("", "Record what each rank does when, for Perfetto and `dadt timeline`.", metavar="FILE")
    cycle_duration_ms: float = knob(
        1.0, "Named tensors: milliseconds that one that is ready may wait for others to go with it.", advanced=True
    )
    all_reduce_buffer_size: int = knob(
        64 << 20, "Named tensors: bytes of a buffer in which they are reduced together; 0: one by one.", advanced=True
    )
    group_buffer_size: int = knob(64 << 20, "The same within an explicit group of tensors.", advanced=True)
    stall_warning: float = knob(
        60.0, "Seconds after which a tensor that some ranks have not submitted is told of.", advanced=True
    )
    on_stall: str = knob(
        "dump",
        "What happens then: a line, every rank's stacks too, or an end on all ranks.",
        choices=("warn", "dump", "abort"),
        advanced=True,
    )
    timeout: float = knob(300.0, "Seconds that a rank waits for a silent peer before it fails.", advanced=True)
    start_timeout: float = knob(
        120.0,
        "Seconds in which all hosts must be ready, and all ranks once one of them begins to train.",
        advanced=True,
    )
    inject: str = knob(
        "auto",
        "How DADT gets into the script.",
        choices=("auto", "entrypoint", "sitecustomize", "none"),
        advanced=True,
    )

    np: int = launch_knob(0, "Workers, exactly; 0: one for each slot.", flags=("-np", "-n", "--num-proc"))
    hosts: str = launch_knob("", "Hosts and slots: host1:2,user@host2:2,[::1].", flags=("-H",), metavar="HOSTS")
    hostfile: str = launch_knob("", "File of hosts, a line each: `host slots=N`.", metavar="FILE")
    include: str = launch_knob("", "Of the hosts, these only.", advanced=True, metavar="HOSTS")
    exclude: str = launch_knob("", "Of the hosts, all but these.", advanced=True, metavar="HOSTS")
    accelerators: int = launch_knob(0, "Workers on each host that has no slots given.", advanced=True)
    gpu_visibility: str = launch_knob("one", "GPUs that each worker sees.", choices=("one", "all"), advanced=True)
    launcher: str = launch_knob(
        "auto", "How the agent of each host is started.", choices=("auto", *LAUNCHERS), advanced=True
    )
    ssh_backend: str = launch_knob("paramiko", "What speaks SSH.", choices=("paramiko", "openssh"), advanced=True)
    ssh_port: int = launch_knob(0, "Port of sshd; 0: as the SSH configuration says.", flags=("-p",), advanced=True)
    ssh_identity_file: str = launch_knob(
        "", "Private key for SSH, and no other.", flags=("-i",), metavar="FILE", advanced=True
    )
    ssh_config: str = launch_knob("", "SSH configuration in place of ~/.ssh/config.", advanced=True, metavar="FILE")
    ssh_host_keys: str = launch_knob(
        "accept-new",
        "Hosts whose key is not known yet; a changed key is refused in strict and accept-new.",
        choices=("strict", "accept-new", "off"),
        advanced=True,
    )
    mpirun: str = launch_knob(
        "mpirun", "The mpirun of --launcher mpi: Open MPI's, MPICH's or Intel MPI's.", advanced=True, metavar="PATH"
    )
    mpi_args: str = launch_knob("", "Further arguments for mpirun, as '--mca btl tcp,self'.", advanced=True)
    nnodes: int = launch_knob(0, "Hosts, where `dadt run` is called on each by hand.", advanced=True)
    node_rank: int = launch_knob(-1, "Which of them this one is, from 0.", advanced=True)
    rendezvous: str = launch_knob(
        "",
        "Where they meet: host:port on node 0 (with DADT_SECRET on all), or file:///a/shared/path.",
        advanced=True,
        metavar="WHERE",
    )
    link: str = launch_knob(
        "", "Workers on hosts simulated here, each behind a link of this speed, as 1gbit (root).", advanced=True
    )
    latency: str = launch_knob("", "The same: time from host to host on such links, as 5ms.", advanced=True)
    simulate_hosts: int = launch_knob(
        0, "So many simulated hosts, with the workers shared out among them; 0: one for each worker.", advanced=True
    )
    network_interface: str = launch_knob(
        "", "Interfaces (eth0) or networks (10.0.0.0/8) between hosts, by comma.", advanced=True, metavar="IF|CIDR"
    )
    forward: tuple[str, ...] = launch_knob(
        (), "Variables for workers: NAME[=VALUE], 'ABC_*'.", flags=("-x",), metavar="NAME"
    )
    env_file: str = launch_knob(
        "", "Variables for the workers, a line each: NAME=VALUE, taken as it stands.", metavar="FILE", advanced=True
    )
    workdir: str = launch_knob("", "Folder in which workers start; else this one.", metavar="DIR", advanced=True)
    python: str = launch_knob("", "Python of the workers and agents; else this one.", metavar="PATH", advanced=True)
    prologue: str = launch_knob(
        "", "Shell commands (bash) before the workers of a host, as 'source env.sh'.", advanced=True
    )
    pass_local_rank: bool = launch_knob(False, "Add --local_rank N to the script's arguments.", advanced=True)
    torch_env: bool = launch_knob(True, "Set RANK, WORLD_SIZE, MASTER_ADDR and their like.", advanced=True)
    output: str = launch_knob("all", "Shown here: all, rank0, errors, or ranks as 0,3-5.", metavar="WHAT")
    log_dir: str = launch_knob(
        "dadt-logs", "Everything that workers print goes to files here.", metavar="DIR", advanced=True
    )
    live: str = launch_knob(
        "auto", "Live view of all ranks; auto: on a terminal.", choices=("auto", "on", "off"), advanced=True
    )
    metrics: tuple[str, ...] = launch_knob(
        (),
        "Figures of each rank while it runs: tensorboard:DIR, or prometheus:PORT.",
        metavar="KIND:WHERE",
        advanced=True,
    )
    grace: float = launch_knob(5.0, "Seconds from SIGTERM to SIGKILL when you end a job.", advanced=True)
    forward_signals: str = launch_knob(
        "USR1,USR2", "Signals that dadt passes on to all workers, by comma.", advanced=True, metavar="NAMES"
    )
    heartbeat_timeout: float = launch_knob(
        10.0, "Seconds without a sign of life between two hosts after which that is told; 0: none.", advanced=True
    )
    orphan_timeout: float = launch_knob(
        30.0, "Seconds of silence after which launcher and agent give each other up.", advanced=True
    )

    def __post_init__(self) -> None:
        for f in fields(self):
            choices = f.metadata["choices"]
            value = getattr(self, f.name)
            if value and f.metadata["metavar"] in ("FILE", "DIR", "PATH"):
                value = path_of(flag(f.name), str(value), f.metadata["metavar"] == "PATH")
                object.__setattr__(self, f.name, value)  # frozen from here on
            if isinstance(f.default, float):
                number(flag(f.name), value, "a number")
            if choices and value not in choices:
                raise ConfigError(f"{flag(f.name)} {value}: unknown; choose one of {', '.join(choices)}")
        if self.timeline:  # as seen from here: workers may be elsewhere
            object.__setattr__(self, "timeline", str(Path(here(), self.timeline)))
        predict_factors(self.predict)
        if self.warmup_steps < 0:
            raise ConfigError(f"--warmup-steps {self.warmup_steps}: must be 0 or more")
        check_algorithm(self.algorithm)
        if self.algorithm == "auto" and self.warmup_steps < LEAST_MEASURED:
            raise ConfigError(
                f"--algorithm auto measures in the synchronous steps: give --warmup-steps {LEAST_MEASURED} or more"
            )
        check_compression(self.compression)
        for name in ("sync_every", "fragments"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{flag(name)} {getattr(self, name)}: must be 1 or more")
        if self.outer_lr <= 0:
            raise ConfigError(f"--outer-lr {self.outer_lr}: must be above 0")
        if not 0 <= self.outer_momentum < 1:
            raise ConfigError(f"--outer-momentum {self.outer_momentum}: must be from 0 to below 1")
        if self.bucket_mb <= 0:
            raise ConfigError(f"--bucket-mb {self.bucket_mb}: must be above 0")
        for name in ("timeout", "start_timeout", "stall_warning"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{flag(name)} {getattr(self, name)}: must be above 0 seconds")
        if 0 < self.heartbeat_timeout < LEAST_HEARTBEAT_TIMEOUT or self.heartbeat_timeout < 0:
            raise ConfigError(
                f"--heartbeat-timeout {self.heartbeat_timeout}: must be {LEAST_HEARTBEAT_TIMEOUT:g} s or more, or 0"
            )
        if self.orphan_timeout < LEAST_ORPHAN_TIMEOUT:
            raise ConfigError(f"--orphan-timeout {self.orphan_timeout}: must be {LEAST_ORPHAN_TIMEOUT:g} s or more")
        sizes = ("cycle_duration_ms", "all_reduce_buffer_size", "group_buffer_size")
        for name in ("np", "accelerators", "nnodes", "simulate_hosts", "grace", *sizes):
            if getattr(self, name) < 0:
                raise ConfigError(f"{flag(name)} {getattr(self, name)}: must be 0 or more")
        for name in ("np", "accelerators", "nnodes", "simulate_hosts"):
            if getattr(self, name) > MOST:
                given = "-np" if name == "np" else flag(name)
                raise ConfigError(f"{given} {getattr(self, name)}: give {MOST} at most")
        if not -1 <= self.seed < 2**64:
            raise ConfigError(f"--seed {self.seed}: give a whole number from 0 to 2**64 - 1, or leave it out")
        if not 0 <= self.ssh_port < 65536:
            raise ConfigError(f"--ssh-port {self.ssh_port}: give a port from 1 to 65535")
        for text in self.metrics:
            metrics_place(text)
        for name in ("executor", "broadcast_executor", "allreduce_executor"):
            check_executor(flag(name), getattr(self, name), optional=name != "executor")
        share, not_shared = loader_numbers("--share", self.share), loader_numbers("--no-share", self.no_share)
        for both in sorted(share & not_shared if share and not_shared else ()):
            raise ConfigError(f"--share and --no-share both name DataLoader {both}: name it once")

    def to_env(self) -> dict[str, str]:
        """The variables passed to workers: all knobs except the launcher's."""
        theirs = (f for f in fields(self) if not f.metadata["launch"])
        return {variable(f.name): _text(getattr(self, f.name)) for f in theirs}

    @classmethod
    def from_env(cls, env: Mapping[str, str] = os.environ) -> Config:
        return cls(**given_by_env(env))


def given_by_env(env: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """The knobs whose variables are set. Raises ConfigError."""
    return {f.name: parse(f.name, env[v]) for f in fields(Config) if (v := variable(f.name)) in env}


def misspelt(env: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Variables that look like a knob's but are not, each with the name that was probably meant."""
    known = {variable(f.name) for f in fields(Config)}
    own = World().to_env()  # present when a worker's script calls dadt
    near = {n: difflib.get_close_matches(n, known, 1, 0.85) for n in env if n.startswith("DADT_") and n not in own}
    return {name: found[0] for name, found in near.items() if found and name not in known}


def parse(name: str, text: str) -> Any:
    """Parse the text of a knob's variable, by the type of the knob's default. Raises ConfigError."""
    default = next(f.default for f in fields(Config) if f.name == name)
    if isinstance(default, bool):
        if text.lower() not in ("0", "1", "true", "false"):
            raise ConfigError(f"{variable(name)}={text}: give 1 or 0")
        return text.lower() in ("1", "true")
    if isinstance(default, int):
        with suppress(ValueError):
            return int(text)
        value = number(variable(name), text, "a whole number")  # 1e3
        if value != int(value):
            raise ConfigError(f"{variable(name)}={text}: give a whole number")
        return int(value)
    if isinstance(default, float):
        return number(variable(name), text, "a number")
    if isinstance(default, tuple):
        return tuple(part.strip() for part in text.split(",") if part.strip())
    return text


def _text(value: object) -> str:
    return str(int(value)) if isinstance(value, bool) else str(value)
