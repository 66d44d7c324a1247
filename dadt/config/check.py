"""Checks and parses the values of single settings (knobs)."""

from __future__ import annotations

import math
import os
import re
import shlex
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from dadt.config.extensions import ALGORITHMS, EXECUTORS
from dadt.config.numbers import numbers
from dadt.errors import ConfigError

CROSS = ("tcp", "gloo", "nccl", "mpi")
"""Executors that can exchange between hosts in `--executor hierarchical:<name>`; c10d:<name> is valid as well."""
COMPRESSES = ("pipe", "sync", "local", "auto")
"""Algorithms that can be combined with `--compression auto`."""
SURVIVING = ("pipe", "sync", "auto", "local", "gossip")
"""Algorithms that can continue training when ranks are lost."""
SURVIVING_EXECUTORS = ("shm", "tcp", "gloo", "hierarchical", "hierarchical:tcp", "hierarchical:gloo", "nccl")
LEAST_MEASURED = 10
"""Number of steps that --algorithm auto and --compression auto must measure before they decide."""
COMPRESSIONS = ("none", "bf16", "fp16", "int8", "int4", "momentum:1", "momentum:2", "auto")
"""Names of compressions; powersgd:<rank> is valid as well."""
METRICS = ("tensorboard", "prometheus")
TOPOLOGIES = ("ring", "exponential", "complete")


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def variable(name: str) -> str:
    return "DADT_" + name.upper()


def check_algorithm(of: str, name: str) -> None:
    module, colon, cls = name.partition(":")
    own = colon and cls.isidentifier() and all(part.isidentifier() for part in module.split("."))
    if name not in ALGORITHMS and not own:
        raise ConfigError(
            f"{of} {name}: unknown; choose one of {', '.join(ALGORITHMS)}, or <module>:<Class> of your own"
        )


def check_compression(name: str) -> None:
    family, _, rank = name.partition(":")
    if name not in COMPRESSIONS and not (family == "powersgd" and re.fullmatch("[1-9][0-9]{0,5}", rank)):
        raise ConfigError(
            f"--compression {name}: unknown; choose one of {', '.join(COMPRESSIONS)}, or powersgd:<rank>, as powersgd:4"
        )


def check_momentum(algorithm: str, compression: str) -> None:
    """Raise ConfigError if `--compression momentum:N` is given with an algorithm whose ranks do not exchange
    momentum."""
    if compression.startswith("momentum") and algorithm in ("local", "gossip"):
        raise ConfigError(
            f"--compression {compression}: the ranks of --algorithm {algorithm} exchange weights, and no momentum;"
            " give int4, or --algorithm pipe or sync"
        )


def round_steps(sync_every: str) -> int:
    """Return the number of steps in a round of --algorithm local. With --sync-every auto, return the maximum, which a
    round exceeds only if its exchange takes even longer."""
    return 32 if sync_every == "auto" else int(sync_every)


def check_rounds(sync_every: str, steps: str, fragments: int) -> None:
    """Raise ConfigError if --fragments, --sync-every or --overlap-steps (`steps`) is no valid number, or if the
    averages of one round would be merged only after those of the next."""
    if fragments < 1:
        raise ConfigError(f"--fragments {fragments}: must be 1 or more")
    if sync_every != "auto" and not (sync_every.isdecimal() and int(sync_every) > 0):
        raise ConfigError(f"--sync-every {sync_every}: give auto, or a number of 1 or more")
    if steps == "auto" or (sync_every == "auto" and steps == "0"):
        return
    if sync_every == "auto":
        raise ConfigError(f"--overlap-steps {steps}: with --sync-every auto give auto or 0")
    if not (steps.isdecimal() and int(steps) <= int(sync_every)):
        raise ConfigError(f"--overlap-steps {steps}: give auto, or a number from 0 to --sync-every ({sync_every})")


def check_auto(algorithm: str, compression: str, steps: int) -> None:
    """Raise ConfigError if the algorithm or the compression is `auto`, but the job's synchronous steps are too few to
    measure the candidates. steps: the value of --warmup-steps."""
    if compression == "auto" and algorithm not in COMPRESSES:
        raise ConfigError(
            f"--compression auto: --algorithm {algorithm} has no synchronous steps in which it could be measured;"
            f" give a compression, or one of the algorithms {', '.join(COMPRESSES)}"
        )
    asked = "--algorithm auto" if algorithm == "auto" else "--compression auto" if compression == "auto" else ""
    if asked and steps < LEAST_MEASURED:
        raise ConfigError(f"{asked} measures in the synchronous steps: give --warmup-steps {LEAST_MEASURED} or more")


def check_min_np(least: int, np: int, algorithm: str, executors: Iterable[str], launcher: str, nnodes: int) -> None:
    """Raise ConfigError if `--min-np` cannot be combined with the other settings. least: its value."""
    given = f"--min-np {least}"
    if np and least > np:
        raise ConfigError(f"{given}: -np {np} starts no more; give {np} or less")
    if algorithm not in SURVIVING:
        raise ConfigError(f"{given}: --algorithm {algorithm} ends with any of its ranks; give pipe or sync")
    # With only one worker, `auto` has become `null`.
    for name in sorted({*executors} - {"", "auto", "null", *SURVIVING_EXECUTORS}):
        raise ConfigError(
            f"{given}: --executor {name} ends with any of its ranks; give shm, tcp, gloo, hierarchical or nccl"
        )
    if launcher == "mpi" or nnodes:
        other = "--launcher mpi" if launcher == "mpi" else "--nnodes"
        raise ConfigError(f"{given}: a job with {other} ends with any of its workers; leave one of the two out")


def check_patience(heartbeat: float, orphan: float) -> None:
    """Raise ConfigError if `--heartbeat-timeout` or `--orphan-timeout` is so short that one late heartbeat would exceed
    it."""
    if 0 < heartbeat < LEAST_TIMEOUT or heartbeat < 0:
        raise ConfigError(f"--heartbeat-timeout {heartbeat}: must be {LEAST_TIMEOUT:g} s or more, or 0")
    if orphan < LEAST_TIMEOUT:
        raise ConfigError(f"--orphan-timeout {orphan}: must be {LEAST_TIMEOUT:g} s or more")


def check_restarts(most: int, nnodes: int) -> None:
    if most and nnodes:
        raise ConfigError(
            f"--max-restarts {most}: a job with --nnodes is started by hand on each host, and cannot be started again"
            " from one of them"
        )


ISLAND_VALUES: Mapping[str, Collection[object]] = {
    "redistribute": (False,),
    "weigh": ("auto", "samples"),
}
"""The values of these options that are valid in a job with islands."""
UNEQUAL = ("speed", "memory")
"""Values of `--batch` with which ranks may get different numbers of samples."""
UNEQUAL_VALUES: Mapping[str, Collection[object]] = {
    "island": ("off",),
    "resume": ("",),
    "snapshot_every": ("auto", "never"),
    **ISLAND_VALUES,
}
"""The values of these options that are valid if ranks may get different numbers of samples."""


def in_islands(island: str) -> bool:
    """Return whether a job with this value of `--island` is divided into islands from its start."""
    return island not in ("off", "auto")


def check_island(text: str, setting: Callable[[str], object]) -> None:
    """Raise ConfigError if the value of `--island` is invalid, or conflicts with other settings. setting: returns the
    value of a setting, given its name."""
    if text not in ("off", "host", "auto") and not re.fullmatch("[1-9][0-9]{0,5}", text):
        raise ConfigError(f"--island {text}: give off, auto, host, or a number of workers")
    if text != "off":
        _check_values(f"--island {text}", "does not know islands", ISLAND_VALUES, setting)


def check_batch(text: str, setting: Callable[[str], object]) -> None:
    """Raise ConfigError if `--batch` conflicts with other settings. setting: returns the value of a setting, given its
    name."""
    if text in UNEQUAL:
        valid = {**UNEQUAL_VALUES, **({"algorithm": ("pipe", "sync")} if text == "speed" else {})}
        _check_values(f"--batch {text}", "does not know parts of different sizes", valid, setting)


def _check_values(
    given: str, why: str, valid: Mapping[str, Collection[object]], setting: Callable[[str], object]
) -> None:
    for name, values in valid.items():
        if (value := setting(name)) not in values:
            shown = flag(name) if value is True else f"{flag(name)} {value}"
            raise ConfigError(f"{given}: {shown} {why}; leave one of the two out")


def check_streams(count: int) -> None:
    if not 0 <= count <= MOST_STREAMS:
        raise ConfigError(f"--streams {count}: give a number of connections from 1 to {MOST_STREAMS}, or 0")


MOST_STREAMS = 64
LEAST_TIMEOUT = 2.0
"""Smallest valid `--orphan-timeout` and `--heartbeat-timeout` in seconds; the latter may also be 0."""
NEVER = "never"
AUTO = "auto"
"""The value of `--snapshot-every` with which a snapshot is taken every 10 minutes if the job restarts from snapshots by
itself, and none otherwise."""


def snapshot_interval(text: str) -> tuple[int, float]:
    """Parse `--snapshot-every`. Returns the steps and the seconds between two snapshots, one of which is 0. Raises
    ConfigError."""
    if text == AUTO:
        return 0, 600.0
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(steps?|s|min|h)", text)
    number = float(found[1]) if found else 0.0
    if found is None or not number or (found[2].startswith("step") and not number.is_integer()):
        raise ConfigError(f"--snapshot-every {text}: give steps or a time, as 500steps, 30s, 10min or 1h, or never")
    if found[2].startswith("step"):
        return int(number), 0.0
    return 0, number * {"s": 1.0, "min": 60.0, "h": 3600.0}[found[2]]


def check_snapshots(every: str, algorithm: str) -> None:
    """Raise ConfigError if `--snapshot-every` is invalid, or the algorithm cannot take snapshots."""
    if every in (NEVER, AUTO):
        return
    snapshot_interval(every)
    if algorithm == "gossip":
        raise ConfigError("--snapshot-every: ranks of --algorithm gossip take no step together, so none is whole")


def check_discovery(script: str, named: str, launcher: str, nnodes: int) -> None:
    """Raise ConfigError if hosts are given by a discovery script and also in another way. named: hosts given by -H or
    --hostfile."""
    if not script:
        return
    if named:
        raise ConfigError("--host-discovery-script and -H or --hostfile exclude each other: give one")
    if launcher in ("slurm", "mpi", "ray") or nnodes:
        other = "--nnodes" if nnodes else f"--launcher {launcher}"
        raise ConfigError(f"--host-discovery-script: {other} has hosts of its own; leave one of the two out")


def check_replicas(algorithm: str, on_nan: str, verify_every: int, redistribute: bool, least: int) -> None:
    """Raise ConfigError if `--redistribute` is given without `--min-np`, or if another option needs ranks with equal
    weights, or ranks that wait for each other, which the algorithm does not provide. least: the value of --min-np."""
    if redistribute and not least:
        raise ConfigError("--redistribute divides what a lost worker leaves, but one ends the job: give --min-np M")
    if algorithm not in ("local", "gossip"):
        return
    if on_nan != "ignore":
        raise ConfigError(
            f"--on-nan {on_nan}: with --algorithm {algorithm} each rank takes steps of its own, on which"
            " the others have no say; leave one of the two out"
        )
    if verify_every:
        raise ConfigError(
            f"--verify-every {verify_every}: with --algorithm {algorithm} each rank has weights of its own, which"
            " differ by design; leave one of the two out"
        )
    if redistribute and algorithm == "gossip":
        raise ConfigError(
            "--redistribute: with --algorithm gossip no rank waits for another, so that they cannot agree in which pass"
            " the data is divided anew; leave one of the two out"
        )


def metrics_place(text: str) -> tuple[str, str]:
    """Split the value of `--metrics KIND:WHERE` into kind and place. Raises ConfigError."""
    kind, _, place = text.partition(":")
    if kind not in METRICS or not place:
        raise ConfigError(f"--metrics {text}: give tensorboard:DIR, or prometheus:PORT")
    return kind, str(Path(place).expanduser()) if kind == "tensorboard" else place


def predict_factors(text: str) -> tuple[float, float] | None:
    """Return the two factors in the value of `--predict`: the last change of the weights is extrapolated by the first
    (0 or more), the change before it by the second. None if the value has no factors. Raises ConfigError."""
    if text == "auto" or predict_share(text) is not None:
        return None
    expected = "auto, own:0.9, a number from 0, as 1.5, or two, as 1.8,-0.9"
    first, comma, second = text.partition(",")
    factor = number("--predict", first, expected)
    if factor < 0:
        raise ConfigError(f"--predict {text}: give {expected}")
    return factor, number("--predict", second, expected) if comma else 0.0


def predict_share(text: str) -> float | None:
    """Return the share S, from 0 to 1, of `--predict own:S`; None for other values. Raises ConfigError."""
    name, _, share = text.partition(":")
    if name != "own":
        return None
    expected = "own:S with S from 0 to 1, as own:0.9"
    value = number("--predict", share, expected)
    if not 0 <= value <= 1:
        raise ConfigError(f"--predict {text}: give {expected}")
    return value


def check_executor(asked: str, name: str, optional: bool) -> None:
    family, colon, member = name.partition(":")
    crosses = member in CROSS or (member.startswith("c10d:") and member != "c10d:")
    if name == "auto" or name in EXECUTORS or (optional and not name) or (family == "c10d" and member):
        return
    if family == "hierarchical" and (crosses or not colon):
        return
    known = ", ".join(("auto", *EXECUTORS))
    raise ConfigError(
        f"{asked} {name}: unknown; choose one of {known}, c10d:<name of a torch.distributed backend>, "
        f"hierarchical:<{', '.join(CROSS)} or c10d:name>"
    )


def loader_numbers(name: str, text: str) -> set[int] | None:
    """Return the numbers of the DataLoaders in text such as "1,3-5"; None for "all".

    Raises ConfigError if the text is neither a list of numbers nor "all".
    """
    if text == "all":
        return None
    listed = numbers(text) if text else set()
    if listed is None or 0 in listed:
        raise ConfigError(f"{name} {text}: give DataLoaders by number from 1, as 1,3, or all")
    return listed


def check_shares(share: str, no_share: str) -> None:
    """Raise ConfigError if `--share` or `--no-share` is no list of DataLoaders, or if both name the same one."""
    shared, not_shared = loader_numbers("--share", share), loader_numbers("--no-share", no_share)
    for both in sorted(shared & not_shared if shared and not_shared else ()):
        raise ConfigError(f"--share and --no-share both name DataLoader {both}: name it once")


def mpi_arguments(text: str) -> list[str]:
    """Split the value of `--mpi-args` into words as a shell does. Raises ConfigError."""
    try:
        return shlex.split(text)
    except ValueError as error:
        raise ConfigError(f"--mpi-args {text}: cannot be read ({error})") from error


def here() -> str:
    """Return the current folder by the name that the user's shell has for it, since the target of a symlink may not
    exist on other hosts.

    Raises ConfigError if the folder has been deleted.
    """
    try:
        current = Path.cwd()
    except OSError as error:
        raise ConfigError(f"the current folder is gone ({error.strerror}) -> cd to one that exists") from error
    named = Path(os.environ.get("PWD", ""))
    with suppress(OSError):  # PWD may name a deleted folder if this process has changed folders since it started
        if named.is_absolute() and named.samefile(current):
            return str(named)
    return str(current)


def enter(folder: str) -> None:
    """Make `folder` the current folder, and set PWD to the same name. Raises OSError."""
    os.chdir(folder)
    os.environ["PWD"] = folder


def path_of(name: str, text: str, program: bool) -> str:
    """Return a path with ~ expanded, since no shell expands it in files and variables. A program's path is also made
    absolute, because the program may run in another folder."""
    if text.startswith("~"):
        try:
            return str(Path(text).expanduser())
        except RuntimeError as error:
            raise ConfigError(f"{name} {text}: there is no such home folder") from error
    return str(Path(here(), text)) if program and "/" in text else text


def number(name: str, text: str | float, expected: str) -> float:
    """Parse a number. Raises ConfigError if the text is no finite number. name, expected: what the error names as the
    option, and as a valid value."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise ConfigError(f"{name} {text}: give {expected}")
    return value
