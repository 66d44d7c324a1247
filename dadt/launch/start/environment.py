"""Builds the environment variables of a worker, which are those of its host's agent and those that the launcher
adds."""

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
from dadt.launch.child import without_settings
from dadt.launch.hosts.slot import Slot
from dadt.launch.start.torch_world import TorchWorld

SITE = Path(__file__).parents[2] / "inject" / "site"
"""Folder of the sitecustomize.py that makes `import horovod` import DADT's replacement, and that loads DADT if torch
has no entry points for backends."""
FORWARDED = re.compile(
    r"(LC|CONDA|OMP|MKL|KMP|OPENBLAS|NCCL|GLOO|UCX|FI|CUBLAS|HF|TRANSFORMERS|TOKENIZERS|WANDB|MLFLOW)_.*"
    r"|(PYTHON|TORCH).*|PATH|LD_LIBRARY_PATH|LANG|TZ|VIRTUAL_ENV|CUDA_(HOME|LAUNCH_BLOCKING|DEVICE_ORDER)|XDG_CACHE_HOME"
)
"""Matches environment variables of the launcher that workers on other hosts get by default. CUDA_VISIBLE_DEVICES is not
among them, since its value depends on the host."""
NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
PROLOGUE_SECONDS = 60.0


def forwarded(config: Config, env: Mapping[str, str] = os.environ) -> tuple[dict[str, str], dict[str, str]]:
    """Return two mappings of variables: those that workers on other hosts get in addition to their host's environment,
    and those from --env-file and -x, which all workers get. Raises ConfigError."""
    defaults = {name: value for name, value in env.items() if FORWARDED.fullmatch(name)}
    named = _file(Path(config.env_file)) if config.env_file else {}
    for text in config.forward:
        named.update(_named(text, env))
    return {**defaults, **named}, named


def base(env: Mapping[str, str], prologue: str, mark: str, cwd: str) -> tuple[dict[str, str], list[str]]:
    """Run the user's prologue command in the agent's environment, extended by `env`. Returns the variables after it,
    and a list of problems. Called by the agent. mark: NAME=VALUE by which processes of the prologue can be recognized.
    cwd: folder in which the prologue runs."""
    result = without_settings(os.environ) | dict(env)
    if not prologue:
        return result, []
    # The prologue may print anything, so its variables are not printed but written to a file of their own.
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
    return without_settings({name: value for name, _, value in entries}), []


def missing(cwd: str, files: Sequence[str]) -> list[str]:
    """Return a list of problems with the working folder and the files that workers need on this host."""
    try:
        if not Path(cwd).is_dir():
            return [f"there is no folder {cwd} -> make it, share it, or --workdir DIR"]
        absent = [file for file in files if not (Path(cwd) / file).exists()]
    except OSError as error:  # for example, this user may not enter the folder
        return [f"{error.filename or cwd} cannot be looked at ({error.strerror}) -> allow it, or --workdir DIR"]
    return [f"there is no {file} in {cwd} -> copy it to that folder, or share the folder" for file in absent]


def common(config: Config) -> dict[str, str]:
    """Return the variables that the launcher adds for every worker."""
    return {**config.to_env(), "PYTHONUNBUFFERED": "1"}


def torchrun(config: Config, job: str, restarts: int) -> dict[str, str]:
    """Return the variables that torchrun would set to the same values for all workers. Each host is a group, and there
    is a single role. Empty with --no-torch-env. restarts: number of restarts of the job so far."""
    if not config.torch_env:
        return {}
    return {
        "ROLE_NAME": "default",
        "TORCHELASTIC_RUN_ID": job,
        "TORCHELASTIC_MAX_RESTARTS": str(config.max_restarts),
        "TORCHELASTIC_RESTART_COUNT": str(restarts),
        # Rank 0 serves the store of torch's rendezvous, not an agent.
        "TORCHELASTIC_USE_AGENT_STORE": "False",
    }


def own(slot: Slot, job: str, torch: TorchWorld | None, *, told: bool, restarts: int, joins: bool) -> dict[str, str]:
    """Return the variables of one worker whose values differ between workers. torch: the worker's ranks for torchrun's
    variables; None to leave these variables unset. told: whether the script's arguments contain its rank. restarts:
    number of restarts of the job so far. joins: whether the worker joins a running job."""
    result = replace(slot.world(job), rank_in_arguments=told, restarts=restarts, joins=joins).to_env()
    if torch is not None:
        result.update(
            RANK=str(torch.rank),
            ROLE_RANK=str(torch.rank),
            WORLD_SIZE=str(torch.world_size),
            ROLE_WORLD_SIZE=str(torch.world_size),
            LOCAL_RANK=str(torch.local_rank),
            LOCAL_WORLD_SIZE=str(torch.local_size),
            GROUP_RANK=str(torch.group_rank),
            GROUP_WORLD_SIZE=str(torch.group_count),
            MASTER_ADDR=torch.address,
            MASTER_PORT=str(torch.port),
        )
        if torch.gpus:
            result["DADT_GPUS"] = torch.gpus  # the script selects one of these GPUs by LOCAL_RANK
    result["DADT_THREADS"] = str(slot.threads)
    if slot.gpu is not None:
        result["CUDA_VISIBLE_DEVICES"] = slot.gpu
    return result


def of_worker(base: Mapping[str, str], given: Mapping[str, str], socket: Path) -> dict[str, str]:
    """Return the complete environment of a worker. Called by the agent. base: the host's environment. given: variables
    from the launcher. socket: path of the agent's socket."""
    result = {**base, **given, "DADT_AGENT": str(socket)}
    result.setdefault("OMP_NUM_THREADS", result.pop("DADT_THREADS"))
    # With the same PYTHONHASHSEED, sets of strings, for example, have the same order on all ranks.
    if result.get("DADT_SEEDING") != "0":
        result.setdefault("PYTHONHASHSEED", str(max(0, int(result.get("DADT_SEED", 0))) % 2**32))
    if interface := result.pop("DADT_INTERFACE", ""):
        result.setdefault("GLOO_SOCKET_IFNAME", interface)
        result.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")
        if "OMPI_MCA_btl_tcp_if_exclude" not in result:  # Open MPI accepts only one of if_exclude and if_include
            result.setdefault("OMPI_MCA_btl_tcp_if_include", interface)
    if "CUDA_VISIBLE_DEVICES" in given:
        result.setdefault("DADT_GPUS", base.get("CUDA_VISIBLE_DEVICES", ""))
    inject = result.get("DADT_INJECT", "auto")
    hooks = needs_sitecustomize(inject, result)
    result["DADT_HOOK"] = "sitecustomize" if hooks else ""
    if inject != "none":
        result["PYTHONPATH"] = ":".join([str(SITE), *filter(None, [result.get("PYTHONPATH")])])
    return result


def needs_sitecustomize(inject: str, env: Mapping[str, str]) -> bool:
    """Return whether sitecustomize.py has to load DADT, because --inject says so or because torch will not call DADT's
    entry point: it is older than version 2.5, or its configuration forbids it."""
    if inject in ("none", "entrypoint"):
        return False
    calls = env.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1") == "1" and _torch_version() >= (2, 5)
    return inject == "sitecustomize" or not calls


def isolating_flags(arguments: Sequence[str]) -> list[str]:
    """Return those of the arguments that contain Python's flags -I, -E or -S. With these, Python ignores PYTHON*
    variables or site packages, so that DADT cannot be loaded."""
    found = []
    for argument in arguments:
        if not argument.startswith("-") or argument in ("-", "-m", "-c"):
            break
        if re.fullmatch(r"-[A-Za-z]*[IES][A-Za-z]*", argument):
            found.append(argument)
    return found


def _named(text: str, env: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that a single -x argument names, with their values. Raises ConfigError."""
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
    """Return the variables in a file of lines NAME=VALUE, in the format of docker's --env-file: quotes are kept, and
    lines that begin with # are comments."""
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


def _torch_version() -> tuple[int, int]:
    """Return the version of the installed torch without importing it. If torch is not installed, the result is higher
    than any version."""
    try:
        major, minor, *_ = importlib.metadata.version("torch").split(".")
    except importlib.metadata.PackageNotFoundError:
        return 99, 0
    return int(major), int(minor)
