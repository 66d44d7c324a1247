"""Checks environment variables that change what a job does, or that another launcher has left behind."""

from __future__ import annotations

import importlib.util
import ipaddress
import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import fields
from importlib.machinery import PathFinder
from pathlib import Path
from urllib.request import getproxies_environment, proxy_bypass

from dadt.config.check import variable
from dadt.config.config import Config, given_by_env
from dadt.config.spelling import misspelt
from dadt.errors import ConfigError
from dadt_cli.check_env.check import Check, CheckOptions, fail, good, warn

RANKS = re.compile(
    r"(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|ROLE_NAME|NODE_RANK|MASTER_ADDR|MASTER_PORT"
    r"|TORCHELASTIC_\w+|OMPI_COMM_WORLD_\w+|PMI_\w+|PMIX_RANK"
    r"|DADT_(RANK|LOCAL_RANK|CROSS_RANK|WORLD_SIZE|LOCAL_SIZE|JOB|AGENT)"
)
"""Names of variables by which launchers give a worker its rank and place. A script that is started in a shell with
left-over variables of this kind uses them by mistake."""
TUNING = re.compile(r"(NCCL|GLOO|UCX|FI|CUDA|CUBLAS|TORCH|PYTORCH)_\w+")
SHOWN = 200
PROXIES = ("http_proxy", "https_proxy", "all_proxy")
HERE, NAMED = ("localhost", "127.0.0.1"), 6


def checks(asked: CheckOptions) -> Iterator[Check]:
    left = sorted(name for name in os.environ if RANKS.fullmatch(name))
    if left:
        yield warn("of a launcher", ", ".join(left), f"unset {' '.join(left)}, unless you are within its job")
    else:
        yield good("of a launcher", "none")
    yield _settings()
    if os.environ.get("CUDA_LAUNCH_BLOCKING", "0") not in ("", "0"):
        hint = "unset CUDA_LAUNCH_BLOCKING: each operation of a GPU waits for the one before"
        yield warn("CUDA_LAUNCH_BLOCKING", os.environ["CUDA_LAUNCH_BLOCKING"], hint)
    if tuning := sorted(f"{name}={value}" for name, value in os.environ.items() if TUNING.fullmatch(name)):
        yield good("of libraries", ", ".join(tuning)[:SHOWN])
    if "LD_PRELOAD" in os.environ:
        yield _preloaded(os.environ["LD_PRELOAD"])
    if os.environ.get("PYTHONPATH"):
        yield _python_path(os.environ["PYTHONPATH"])
    if proxies := sorted(name for name, value in os.environ.items() if name.lower() in PROXIES and value):
        yield _proxies(proxies, (*HERE, *asked.peers))


def _settings() -> Check:
    if wrong := misspelt(fields(Config)):
        listed = ", ".join(f"{name} (meant: {meant})" for name, meant in wrong.items())
        return warn("of dadt", f"{listed}: means nothing", f"unset {' '.join(wrong)}, or spell it right")
    try:
        given = given_by_env()
    except ConfigError as error:
        return fail("of dadt", str(error), "unset it, or give it a value that `dadt config show` lists")
    return good("of dadt", ", ".join(map(variable, given)) or "none")


def _preloaded(value: str) -> Check:
    absent = [path for path in re.split(r"[:\s]+", value) if "/" in path and not Path(path).exists()]
    if absent:
        return warn("LD_PRELOAD", f"{value}, and there is no {absent[0]}", "unset LD_PRELOAD, or give the right path")
    return good("LD_PRELOAD", value[:SHOWN])


def _python_path(value: str) -> Check:
    """Check that PYTHONPATH does not replace the installed torch or dadt by another one."""
    folders = [folder for folder in value.split(os.pathsep) if folder]
    for name in ("torch", "dadt"):
        found = PathFinder.find_spec(name, folders)
        if found is not None and found.origin != _installed(name, folders):
            hint = f"take that folder out of PYTHONPATH, unless this is the {name} you mean"
            return warn("PYTHONPATH", f"{name} is imported from {found.origin}", hint)
    return good("PYTHONPATH", value[:SHOWN])


def _proxies(names: Sequence[str], hosts: Sequence[str]) -> Check:
    """Check that HTTP and gRPC between these hosts bypass the proxy. The proxy's address is not shown, since it may
    contain a password."""
    left = [host for host in hosts if not _bypassed(host)]
    listed = ", ".join(names)
    if left:
        hint = f"export no_proxy={','.join(hosts)}: or HTTP and gRPC between them (TensorBoard, Ray) ask the proxy"
        more = f" and {len(left) - NAMED} more" if len(left) > NAMED else ""
        return warn("proxies", f"{listed}, and no_proxy leaves out {', '.join(left[:NAMED])}{more}", hint)
    return good("proxies", f"{listed}; no_proxy covers all {len(hosts)} names and addresses")


def _bypassed(host: str) -> bool:
    """Return whether the variable no_proxy covers this host. Host names and suffixes match as in Python, networks as in
    requests and curl."""
    if proxy_bypass(host):
        return True
    for part in getproxies_environment().get("no", "").split(","):
        with suppress(ValueError):  # a host name cannot be parsed as an address, nor a suffix as a network
            if ipaddress.ip_address(host) in ipaddress.ip_network(part.strip(), strict=False):
                return True
    return False


def _installed(name: str, without: list[str]) -> str | None:
    """Return the file from which a module would be imported if PYTHONPATH were not set; None if there is none."""
    paths = [path for path in sys.path if path not in without]
    found = PathFinder.find_spec(name, paths) or importlib.util.find_spec(name)
    return found.origin if found is not None else None
