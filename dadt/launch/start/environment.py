"""The environment of a worker: that of its host's agent, with the variables that the launcher adds."""

from __future__ import annotations

import fnmatch
import importlib.metadata
import os
import re
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from dadt.config import Config, document
from dadt.errors import ConfigError
from dadt.launch.hosts.slot import Slot

SITE = Path(__file__).parents[2] / "inject" / "site"
"""The folder whose sitecustomize.py has scripts find DADT in Horovod's place, and hooks DADT into a torch that has no
entry points."""
FORWARDED = (
    "PATH",
    "LD_LIBRARY_PATH",
    "LANG",
    "LC_*",
    "TZ",
    "VIRTUAL_ENV",
    "CONDA_*",
    "PYTHON*",
    "OMP_*",
    "MKL_*",
    "KMP_*",
    "OPENBLAS_*",
    "NCCL_*",
    "GLOO_*",
    "UCX_*",
    "FI_*",
    "TORCH*",
    "CUBLAS_*",
    "CUDA_HOME",
    "CUDA_LAUNCH_BLOCKING",
    "CUDA_DEVICE_ORDER",
    "HF_*",
    "TRANSFORMERS_*",
    "TOKENIZERS_*",
    "WANDB_*",
    "MLFLOW_*",
    "XDG_CACHE_HOME",
)
"""Variables that workers on other hosts get by default. Each host keeps its own CUDA_VISIBLE_DEVICES."""
NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
PROLOGUE_SECONDS = 60.0


def forwarded(config: Config, env: Mapping[str, str] = os.environ) -> tuple[dict[str, str], dict[str, str]]:
    """The variables for workers on other hosts, on top of their host's environment, and those for all workers, which
    --env-file and -x name. Raises ConfigError."""
    defaults = {name: value for name, value in env.items() if _matches(name, FORWARDED)}
    named = _file(Path(config.env_file)) if config.env_file else {}
    for text in config.forward:
        named.update(_named(text, env))
    return {**defaults, **named}, named


def base(env: Mapping[str, str], prologue: str, mark: str, cwd: str) -> tuple[dict[str, str], list[str]]:
    """Called by the agent: its environment with these variables, after the prologue, and a list of problems.

    mark: variable and value that mark the processes of the prologue. cwd: folder in which it runs.
    """
    result = {name: value for name, value in os.environ.items() if not name.startswith("DADT_")} | dict(env)
    if not prologue:
        return result, []
    # The prologue may print anything, so the variables go to a file of their own.
    with tempfile.TemporaryFile() as file, tempfile.TemporaryFile() as printed:
        script = f"{prologue}\nstatus=$?\ncommand -p env -0 >&{file.fileno()}\nexit $status"
        try:
            ended = subprocess.run(
                ["bash", "-c", script],
                env={**result, **dict([mark.split("=", 1)])},
                pass_fds=[file.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=printed,
                stderr=printed,
                cwd=cwd,
                timeout=PROLOGUE_SECONDS,
                check=False,
            )
        except OSError as error:
            return result, [f"--prologue needs bash ({error.strerror})"]
        except subprocess.TimeoutExpired:
            return result, [f"--prologue {prologue!r} did not end within {PROLOGUE_SECONDS:g} s"]
        if ended.returncode:
            printed.seek(0)
            said = printed.read().decode(errors="replace").strip().rpartition("\n")[2]
            why = f": {said}" if said else ""
            return result, [f"--prologue {prologue!r} ended with exit code {ended.returncode}{why}"]
        file.seek(0)
        entries = [entry.partition("=") for entry in os.fsdecode(file.read()).split("\0") if entry]
        if not entries:
            return result, [f"--prologue {prologue!r} left the shell (exit, exec), and its variables with it"]
    return {name: value for name, _, value in entries if not name.startswith("DADT_")}, []


def missing(cwd: str, files: Sequence[str]) -> list[str]:
    """Problems with the folder and the files that workers need on this host."""
    try:
        if not Path(cwd).is_dir():
            return [f"there is no folder {cwd} -> make it, share it, or --workdir DIR"]
        absent = [file for file in files if not (Path(cwd) / file).exists()]
    except OSError as error:  # for example another user's folder
        return [f"{error.filename or cwd} cannot be looked at ({error.strerror}) -> allow it, or --workdir DIR"]
    return [f"there is no {file} in {cwd} -> copy it to that folder, or share the folder" for file in absent]


def common(config: Config) -> dict[str, str]:
    """The variables that the launcher adds for all workers."""
    return {**config.to_env(), "PYTHONUNBUFFERED": "1"}


def torchrun(
    config: Config, job: str, slots: Sequence[Slot], master: tuple[str, int] | None, restarts: int
) -> dict[str, str]:
    """The variables that torchrun gives all workers alike: a group is a host, and all have one role. None with
    --no-torch-env. master: address and port of torch's rendezvous. restarts: of the job, so far."""
    if master is None or not config.torch_env:
        return {}
    return {
        "WORLD_SIZE": str(len(slots)),
        "ROLE_NAME": "default",
        "ROLE_WORLD_SIZE": str(len(slots)),
        "GROUP_WORLD_SIZE": str(len({slot.cross_rank for slot in slots})),
        "MASTER_ADDR": master[0],
        "MASTER_PORT": str(master[1]),
        "TORCHELASTIC_RUN_ID": job,
        "TORCHELASTIC_MAX_RESTARTS": str(config.max_restarts),
        "TORCHELASTIC_RESTART_COUNT": str(restarts),
        # The first rank serves the store of torch's rendezvous.
        "TORCHELASTIC_USE_AGENT_STORE": "False",
    }


def own(slot: Slot, job: str, *, torch: bool, told: bool, restarts: int, joins: bool) -> dict[str, str]:
    """The variables that differ between workers. torch: with those of torchrun. told: the script's arguments contain
    its rank. restarts: how often the job has been started again. joins: the worker joins a job that runs already."""
    result = replace(slot.world(job), rank_in_arguments=told, restarts=restarts, joins=joins).to_env()
    if torch:
        result.update(
            RANK=str(slot.rank),
            ROLE_RANK=str(slot.rank),
            LOCAL_RANK=str(slot.local_rank),
            GROUP_RANK=str(slot.cross_rank),
            LOCAL_WORLD_SIZE=str(slot.local_size),
        )
    result["DADT_THREADS"] = str(slot.threads)
    if slot.gpu is not None:
        result["CUDA_VISIBLE_DEVICES"] = slot.gpu
    return result


def of_worker(base: Mapping[str, str], given: Mapping[str, str], socket: Path) -> dict[str, str]:
    """Called by the agent: the complete environment of a worker. socket: the agent's."""
    result = {**base, **given, "DADT_AGENT": str(socket)}
    result.setdefault("OMP_NUM_THREADS", result.pop("DADT_THREADS"))
    if result.get("DADT_SEEDING") != "0":  # an order by hashes, as of a set of words, is the same on all ranks
        result.setdefault("PYTHONHASHSEED", str(max(0, int(result.get("DADT_SEED", 0))) % 2**32))
    if interface := result.pop("DADT_INTERFACE", ""):
        result.setdefault("GLOO_SOCKET_IFNAME", interface)
        result.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")
        if "OMPI_MCA_btl_tcp_if_exclude" not in result:  # Open MPI takes one of the two
            result.setdefault("OMPI_MCA_btl_tcp_if_include", interface)
    if "CUDA_VISIBLE_DEVICES" in given:
        result["DADT_GPUS"] = base.get("CUDA_VISIBLE_DEVICES", "")
    inject = result.get("DADT_INJECT", "auto")
    hooks = needs_sitecustomize(inject, result)
    result["DADT_HOOK"] = "sitecustomize" if hooks else ""
    if inject != "none":
        result["PYTHONPATH"] = ":".join([str(SITE), *filter(None, [result.get("PYTHONPATH")])])
    return result


def needs_sitecustomize(inject: str, env: Mapping[str, str]) -> bool:
    """Whether torch will not call DADT's entry point by itself, being older than 2.5 or set not to."""
    if inject in ("none", "entrypoint"):
        return False
    return (
        inject == "sitecustomize" or env.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1") != "1" or _torch_version() < (2, 5)
    )


def isolating_flags(arguments: Sequence[str]) -> list[str]:
    """Python's own flags, among the arguments, that make it ignore PYTHON* variables or site packages."""
    found = []
    for argument in arguments:
        if not argument.startswith("-") or argument in ("-", "-m", "-c"):
            break
        if re.fullmatch(r"-[A-Za-z]*[IES][A-Za-z]*", argument):
            found.append(argument)
    return found


def _named(text: str, env: Mapping[str, str]) -> dict[str, str]:
    """The variables that one -x names. Raises ConfigError."""
    name, equals, value = text.partition("=")
    if name.startswith("DADT_"):
        raise ConfigError(f"-x {name}: the settings of dadt are flags; `dadt config show` lists them")
    if equals:
        if not NAME.fullmatch(name):
            raise ConfigError(f"-x {text}: {name!r} is no name of a variable; give NAME, NAME=VALUE or 'NAME_*'")
        return {name: value}
    if set(name) & set("*?["):
        return {each: env[each] for each in env if fnmatch.fnmatchcase(each, name)}
    if not NAME.fullmatch(name):
        raise ConfigError(f"-x {text}: {name!r} is no name of a variable; give NAME, NAME=VALUE or 'NAME_*'")
    if name not in env:
        raise ConfigError(f"-x {name}: there is no such variable here; give -x {name}=VALUE")
    return {name: env[name]}


def _file(path: Path) -> dict[str, str]:
    """Read NAME=VALUE lines, as docker's --env-file: nothing is unquoted, and # begins a comment line."""
    found = {}
    for number, line in enumerate(document.read(path, "--env-file").splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        name, equals, value = line.partition("=")
        if not equals or not NAME.fullmatch(name.strip()):
            raise ConfigError(f"--env-file {path}, line {number}: {line.strip()[:40]!r} is not NAME=VALUE")
        if "\0" in value:
            raise ConfigError(f"--env-file {path}, line {number}: a value cannot hold a NUL byte")
        found[name.strip()] = value
    return found


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def _torch_version() -> tuple[int, int]:
    """The version of the installed torch, without importing it; a very new one if there is none."""
    try:
        major, minor, *_ = importlib.metadata.version("torch").split(".")
    except importlib.metadata.PackageNotFoundError:
        return 99, 0
    return int(major), int(minor)
