"""Every setting of DADT: each field of Config defines a flag (`--seed`), a variable (DADT_SEED) and their docs."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from dadt.config.check import (
    TOPOLOGIES,
    check_algorithm,
    check_auto,
    check_batch,
    check_compression,
    check_discovery,
    check_executor,
    check_island,
    check_min_np,
    check_momentum,
    check_patience,
    check_replicas,
    check_restarts,
    check_rounds,
    check_shares,
    check_snapshots,
    check_streams,
    flag,
    here,
    metrics_place,
    mpi_arguments,
    number,
    path_of,
    predict_factors,
    variable,
)
from dadt.config.extensions import LAUNCHERS
from dadt.config.knob import knob, launch_knob
from dadt.config.link import check_link
from dadt.config.numbers import MOST
from dadt.config.spelling import by_horovod
from dadt.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """The settings of one job, equal on every rank. Command-line flags take precedence over environment variables."""

    algorithm: str = knob(
        "pipe", "How ranks average: pipe, sync, local, gossip, auto, or <module>:<Class>.", metavar="NAME"
    )
    horovod: str = knob(
        "sync",
        "How scripts that import horovod average where it is not installed, if --algorithm is not given; none"
        " (--no-horovod): they do not find DADT.",
        metavar="NAME",
        advanced=True,
    )
    executor: str = knob(
        "auto",
        "How ranks exchange data: auto, shm, tcp, gloo, nccl, mpi, mpicuda, null, c10d:<name>, hierarchical:<name>.",
        metavar="NAME",
    )
    broadcast_executor: str = knob(
        "", "Executor for broadcasts, if not that of --executor.", metavar="NAME", advanced=True
    )
    allreduce_executor: str = knob(
        "", "Executor for everything but broadcasts, if not that of --executor.", metavar="NAME", advanced=True
    )
    streams: int = knob(
        0, "`tcp`: connections for data between two ranks; 0: by measured bandwidth and delay.", advanced=True
    )
    verbose: bool = knob(False, "Explain what dadt chooses.", flags=("-v",))
    warmup_steps: int = knob(50, "Synchronous steps before `pipe` starts to delay gradients.", advanced=True)
    predict: str = knob(
        "auto",
        "Weight prediction of `pipe`: auto; own:S, the optimizer's step with a share S of the rank's own gradient;"
        " or C or C,D, factors of the last displacement and of the one before it.",
        advanced=True,
    )
    on_nan: str = knob(
        "ignore",
        "What to do in steps in which a rank's gradient is not finite: report it, skip the step on all ranks, or stop.",
        choices=("ignore", "report", "skip", "stop"),
        advanced=True,
    )
    verify_every: int = knob(
        0, "Compare the ranks' weights every K steps, and repair those that differ.", metavar="K", advanced=True
    )
    fall_back: bool = knob(
        True, "Fall back to `sync` on all ranks if gradients blow up once `pipe` delays them.", advanced=True
    )
    compression: str = knob(
        "none", "none, bf16, fp16, int8, int4, momentum:<bits>, powersgd:<rank>, auto.", metavar="NAME"
    )
    sync_every: str = knob("32", "`local`: steps between two averages; auto: as few as hide them.", advanced=True)
    overlap_steps: str = knob(
        "auto", "`local`: steps until a mean is merged; auto: as many as that takes.", metavar="N", advanced=True
    )
    outer_lr: float = knob(1.0, "`local`: the outer optimizer's learning rate; DiLoCo's is 0.7.", advanced=True)
    outer_momentum: float = knob(
        0.0, "`local`: the outer optimizer's Nesterov momentum; DiLoCo's is 0.9.", advanced=True
    )
    fragments: int = knob(1, "`local`: number of parts of the model, averaged at different steps.", advanced=True)
    topology: str = knob(
        "exponential", "`gossip`: which ranks average with each other.", choices=TOPOLOGIES, advanced=True
    )
    batch: str = knob("per-rank", "Who trains on a batch.", choices=("per-rank", "global", "speed", "memory"))
    weigh: str = knob(
        "auto",
        "Weigh ranks by samples, or by the targets (tokens) that their losses count; auto: by these where they tell.",
        choices=("auto", "samples", "tokens"),
        advanced=True,
    )
    scale_lr: str = knob(
        "none", "Multiply learning rates by the number of workers.", choices=("none", "linear", "sqrt")
    )
    share: str = knob("", "Numbers of DataLoaders to shard, such as 1,3.", advanced=True)
    no_share: str = knob("", "DataLoaders not to shard: numbers, or all.", advanced=True)
    seed: int = knob(
        -1, "Seed of torch, numpy and random on every rank until the script sets its own; -1 draws one.", advanced=True
    )
    seeding: bool = knob(True, "Seed all ranks alike, then give each its own random stream.", advanced=True)
    broadcast: bool = knob(True, "Start all ranks from rank 0's weights, buffers and optimizer state.", advanced=True)
    buffers: bool = knob(True, "Average buffers (BatchNorm statistics) across ranks.", advanced=True)
    save_once: bool = knob(
        True,
        "When all ranks torch.save to a path, one rank per host writes and the others wait for the file.",
        advanced=True,
    )
    files: str = knob(
        "first",
        "Which ranks of a host write the files that all of them write: the first, or all.",
        choices=("first", "all"),
        advanced=True,
    )
    lock_downloads: bool = knob(
        True, "Let only one rank per host at a time download into the same folder.", advanced=True
    )
    bucket_mb: float = knob(25.0, "Approximate size of a gradient bucket in MiB.", advanced=True)
    timeline: str = knob("", "Record a timeline of all ranks, for Perfetto.", metavar="FILE")
    cycle_duration_ms: float = knob(
        1.0, "Named tensors: milliseconds that a ready tensor may wait to be fused with others.", advanced=True
    )
    all_reduce_buffer_size: int = knob(
        64 << 20, "Named tensors: size of the fusion buffer in bytes; 0 reduces them one by one.", advanced=True
    )
    group_buffer_size: int = knob(
        64 << 20, "Named tensors: size of the fusion buffer within an explicit group, in bytes.", advanced=True
    )
    stall_warning: float = knob(
        60.0, "Warn when some ranks have not submitted a tensor after this many seconds.", advanced=True
    )
    on_stall: str = knob(
        "dump",
        "Action on such a stall: print a line, also dump the stacks of every rank, or abort all ranks.",
        choices=("warn", "dump", "abort"),
        advanced=True,
    )
    timeout: float = knob(300.0, "Seconds that a rank waits for a silent peer before it fails.", advanced=True)
    start_timeout: float = knob(
        120.0,
        "Seconds allowed for all hosts to become ready, and for all ranks to begin training once one has.",
        advanced=True,
    )
    inject: str = knob(
        "auto",
        "How DADT is loaded into the script.",
        choices=("auto", "entrypoint", "sitecustomize", "none"),
        advanced=True,
    )

    np: int = launch_knob(0, "Exact number of workers; 0: one per slot.", flags=("-np", "-n", "--num-proc"))
    hosts: str = launch_knob("", "Hosts and slots: host1:2,user@host2:2,[::1].", flags=("-H",), metavar="HOSTS")
    hostfile: str = launch_knob("", "Hostfile with a line `host slots=N` per host.", metavar="FILE")
    host_discovery_script: str = launch_knob(
        "", "Program that prints the hosts there are, one `host:slots` a line.", advanced=True, metavar="FILE"
    )
    include: str = launch_knob("", "Use only these of the given hosts.", advanced=True, metavar="HOSTS")
    exclude: str = launch_knob("", "Use all of the given hosts but these.", advanced=True, metavar="HOSTS")
    accelerators: int = launch_knob(0, "Number of workers on each host whose slots are not given.", advanced=True)
    gpu_visibility: str = launch_knob("one", "GPUs visible to each worker.", choices=("one", "all"), advanced=True)
    launcher: str = launch_knob(
        "auto", "How to start the agent of each host.", choices=("auto", *LAUNCHERS), advanced=True
    )
    ssh_backend: str = launch_knob("paramiko", "SSH client to use.", choices=("paramiko", "openssh"), advanced=True)
    ssh_port: int = launch_knob(0, "SSH port; 0: the port in the SSH configuration.", flags=("-p",), advanced=True)
    ssh_identity_file: str = launch_knob(
        "", "Private key for SSH; no other key is tried.", flags=("-i",), metavar="FILE", advanced=True
    )
    ssh_config: str = launch_knob(
        "", "SSH configuration file to read instead of ~/.ssh/config.", advanced=True, metavar="FILE"
    )
    ssh_host_keys: str = launch_knob(
        "accept-new",
        "How to treat unknown host keys; strict and accept-new refuse a changed key.",
        choices=("strict", "accept-new", "off"),
        advanced=True,
    )
    mpirun: str = launch_knob(
        "mpirun", "The mpirun of --launcher mpi, from Open MPI, MPICH or Intel MPI.", advanced=True, metavar="PATH"
    )
    mpi_args: str = launch_knob("", "More arguments for mpirun, such as '--mca btl tcp,self'.", advanced=True)
    ray_address: str = launch_knob("", "Ray's cluster, if not RAY_ADDRESS or the local one.", advanced=True)
    cpus_per_worker: float = launch_knob(1.0, "CPUs that Ray reserves for each worker.", advanced=True)
    ray_resources: str = launch_knob(
        "", "Other resources that Ray reserves for each worker.", advanced=True, metavar="KEY=N,KEY=N"
    )
    ray_strategy: str = launch_knob(
        "PACK", "How Ray places workers.", advanced=True, choices=("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")
    )
    ship: bool = launch_knob(True, "Have Ray copy the current folder to the other nodes.", advanced=True)
    nnodes: int = launch_knob(0, "Number of hosts, if you call `dadt run` on each by hand.", advanced=True)
    node_rank: int = launch_knob(-1, "Number of this host among --nnodes, from 0.", advanced=True)
    rendezvous: str = launch_knob(
        "",
        "Where --nnodes hosts meet: host:port on node 0 (with DADT_SECRET on all), or file:///a/shared/path.",
        advanced=True,
        metavar="WHERE",
    )
    link: str = knob(
        "",
        "Run workers on simulated hosts, each behind a link of this speed, such as 1gbit (needs root); or pace each"
        " connection between workers of this host, as in paced:1gbit.",
        metavar="SPEED",
        advanced=True,
    )
    latency: str = launch_knob("", "One-way latency between simulated hosts, such as 5ms.", advanced=True)
    simulate_hosts: int = launch_knob(
        0, "Number of simulated hosts to divide the workers among; 0: one per worker.", advanced=True
    )
    network_interface: str = launch_knob(
        "",
        "Comma-separated interfaces (eth0) or networks (10.0.0.0/8) to use between hosts.",
        advanced=True,
        metavar="IF|CIDR",
    )
    forward: tuple[str, ...] = launch_knob(
        (), "Variables for workers: NAME[=VALUE], 'ABC_*'.", flags=("-x",), metavar="NAME"
    )
    env_file: str = launch_knob(
        "", "File of variables for workers, a line NAME=VALUE for each, taken literally.", metavar="FILE", advanced=True
    )
    workdir: str = launch_knob(
        "", "Folder in which workers start, if not the current one.", metavar="DIR", advanced=True
    )
    python: str = launch_knob("", "Python of workers and agents, if not dadt's.", metavar="PATH", advanced=True)
    prologue: str = launch_knob(
        "", "bash commands to run on each host before its workers, such as 'source env.sh'.", advanced=True
    )
    pass_local_rank: bool = launch_knob(False, "Add --local_rank N to the script's arguments.", advanced=True)
    torch_env: bool = launch_knob(True, "Set RANK, WORLD_SIZE, MASTER_ADDR and similar variables.", advanced=True)
    island: str = launch_knob("off", "Ranks of one torch world: off, auto, host, N.", advanced=True, metavar="KIND")
    output: str = launch_knob("once", "Output to show: once, all, rank0, errors, 0,3-5.", metavar="WHAT")
    log_dir: str = launch_knob(
        "dadt-logs", "Folder for the logs, which hold everything that workers print.", metavar="DIR", advanced=True
    )
    live: str = launch_knob(
        "auto", "Live view of all ranks; auto shows it on a terminal.", choices=("auto", "on", "off"), advanced=True
    )
    metrics: tuple[str, ...] = launch_knob(
        (),
        "Publish the figures of each rank while it runs: tensorboard:DIR, or prometheus:PORT.",
        metavar="KIND:WHERE",
        advanced=True,
    )
    min_np: int = knob(0, "Train on while M workers are left.", metavar="M")
    redistribute: bool = knob(
        False, "With --min-np: later passes divide a lost worker's share among the others.", advanced=True
    )
    max_restarts: int = launch_knob(0, "Times that a failed job starts again.")
    snapshot_every: str = knob("auto", "Time between snapshots.", metavar="TIME")
    snapshot_dir: str = knob("", "Folder for snapshots, in place of the job's.", advanced=True, metavar="DIR")
    resume: str = knob("", "Go on from a job's last snapshot.", metavar="JOB")
    force: bool = knob(False, "With --resume: accept another script or other arguments.", advanced=True)
    grace: float = launch_knob(5.0, "Seconds from Ctrl-C to SIGTERM, and from SIGTERM to SIGKILL.", advanced=True)
    forward_signals: str = launch_knob(
        "USR1,USR2", "Comma-separated signals that dadt passes on to all workers.", advanced=True, metavar="NAMES"
    )
    checkpoint_signal: str = launch_knob(
        "", "Signal on which the script saves, such as USR1; a SIGTERM sends it first.", advanced=True, metavar="NAME"
    )
    heartbeat_timeout: float = launch_knob(
        10.0, "Warn when two hosts have exchanged no heartbeat for this many seconds; 0: never.", advanced=True
    )
    orphan_timeout: float = launch_knob(
        30.0, "Seconds of silence after which the launcher and an agent give each other up.", advanced=True
    )

    def __post_init__(self) -> None:
        for f in fields(self):
            choices = f.metadata["choices"]
            value = getattr(self, f.name)
            if value and f.metadata["metavar"] in ("FILE", "DIR", "PATH"):
                value = path_of(flag(f.name), str(value), f.metadata["metavar"] == "PATH")
            # settings that accept words and numbers are stored as text
            elif isinstance(f.default, str) and type(value) is int:
                value = str(value)
            object.__setattr__(self, f.name, value)  # an assignment would raise, since the dataclass is frozen
            if isinstance(f.default, float):
                number(flag(f.name), value, "a number")
            if choices and value not in choices:
                raise ConfigError(f"{flag(f.name)} {value}: unknown; choose one of {', '.join(choices)}")
        for name in ("timeline", "snapshot_dir"):  # made absolute, since workers may run in another folder
            if path := getattr(self, name):
                object.__setattr__(self, name, str(Path(here(), path)))
        predict_factors(self.predict)
        check_algorithm("--algorithm", self.algorithm)
        if self.horovod != "none":
            check_algorithm("--horovod", self.horovod)
        check_replicas(self.algorithm, self.on_nan, self.verify_every, self.redistribute, self.min_np)
        check_compression(self.compression)
        check_momentum(self.algorithm, self.compression)
        check_auto(self.algorithm, self.compression, self.warmup_steps)
        check_rounds(self.sync_every, self.overlap_steps, self.fragments)
        seconds = ("timeout", "start_timeout", "stall_warning")
        for name in ("outer_lr", "bucket_mb", "cpus_per_worker", *seconds):
            if getattr(self, name) <= 0:
                unit = " seconds" if name in seconds else ""
                raise ConfigError(f"{flag(name)} {getattr(self, name)}: must be above 0{unit}")
        if not 0 <= self.outer_momentum < 1:
            raise ConfigError(f"--outer-momentum {self.outer_momentum}: must be from 0 to below 1")
        check_streams(self.streams)
        check_island(self.island, self.__getattribute__)
        check_batch(self.batch, self.__getattribute__)
        check_patience(self.heartbeat_timeout, self.orphan_timeout)
        sizes = ("cycle_duration_ms", "all_reduce_buffer_size", "group_buffer_size", "verify_every")
        numbers = ("np", "accelerators", "nnodes", "simulate_hosts")
        for name in (*numbers, "grace", "min_np", "max_restarts", "warmup_steps", *sizes):
            if getattr(self, name) < 0:
                raise ConfigError(f"{flag(name)} {getattr(self, name)}: must be 0 or more")
        for name in numbers:
            if getattr(self, name) > MOST:
                raise ConfigError(f"{'-np' if name == 'np' else flag(name)} {getattr(self, name)}: give {MOST} at most")
        if self.min_np:
            executors = self.executor, self.broadcast_executor, self.allreduce_executor
            check_min_np(self.min_np, self.np, self.algorithm, executors, self.launcher, self.nnodes)
        named = {"--simulate-hosts": self.simulate_hosts, "-H": self.hosts, "--hostfile": self.hostfile}
        named |= {"--host-discovery-script": self.host_discovery_script, "--nnodes": self.nnodes}
        named |= {f"--launcher {self.launcher}": self.launcher not in ("auto", "local")}
        check_link(self.link, self.latency, (self.executor, self.broadcast_executor, self.allreduce_executor), named)
        check_restarts(self.max_restarts, self.nnodes)
        check_snapshots(self.snapshot_every, self.algorithm)
        check_discovery(self.host_discovery_script, self.hosts or self.hostfile, self.launcher, self.nnodes)
        if not -1 <= self.seed < 2**64:
            raise ConfigError(f"--seed {self.seed}: give a whole number from 0 to 2**64 - 1, or leave it out")
        if not 0 <= self.ssh_port < 65536:
            raise ConfigError(f"--ssh-port {self.ssh_port}: give a port from 1 to 65535")
        for text in self.metrics:
            metrics_place(text)
        mpi_arguments(self.mpi_args)
        for name in ("executor", "broadcast_executor", "allreduce_executor"):
            check_executor(flag(name), getattr(self, name), optional=name != "executor")
        check_shares(self.share, self.no_share)

    def to_env(self) -> dict[str, str]:
        """Return the environment variables for workers: all settings except the launcher's."""
        theirs = (f for f in fields(self) if not f.metadata["launch"])
        return {variable(f.name): _text(getattr(self, f.name)) for f in theirs}

    @classmethod
    def from_env(cls, env: Mapping[str, str] = os.environ) -> Config:
        return cls(**implied(given_by_env(env)))


def given_by_env(env: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """Return the settings (knobs) given by environment variables, with their values. Raises ConfigError."""
    return by_horovod(env) | {f.name: parse(f.name, env[v]) for f in fields(Config) if (v := variable(f.name)) in env}


def implied(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the given settings, with `--algorithm` also as the algorithm of scripts that import horovod."""
    return {"horovod": given["algorithm"], **given} if "algorithm" in given else dict(given)


def parse(name: str, text: str) -> Any:
    """Parse the text of a setting's environment variable, to the type of the setting's default. Raises ConfigError."""
    default = next(f.default for f in fields(Config) if f.name == name)
    if isinstance(default, bool):
        if text.lower() not in ("0", "1", "true", "false"):
            raise ConfigError(f"{variable(name)}={text}: give 1 or 0")
        return text.lower() in ("1", "true")
    if isinstance(default, int):
        with suppress(ValueError):
            return int(text)
        value = number(variable(name), text, "a whole number")  # accepts "1e3", which int() refuses to parse
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
