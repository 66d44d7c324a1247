"""The hosts of a job in a Ray cluster: the nodes on which Ray has reserved the job's placement group, which consists of
one bundle of resources per worker.

The group exists until `release`, or until this process's connection to Ray ends.
"""

from __future__ import annotations

import json
import logging
import os
import re
import secrets
import signal
import socket
import sys
import textwrap
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from dadt.config import Config
from dadt.config.check import here
from dadt.errors import ConfigError, LaunchError, StartTimeout
from dadt.launch.hosts.host import Host

QUIET_SECONDS = 3.0
"""Seconds of waiting for Ray after which a message is shown to the user."""
TURN_SECONDS = 1
SHOWN_NODES = 8
SURVEY_SECONDS = 20.0
KNOCK_SECONDS = 10.0
MOST_LETTERS = 400
ROUNDING = 1e-6
"""Added before quotients of resources are rounded down, so that 1 CPU has room for five times 0.2 in spite of rounding
errors."""
_given: dict[str, str] = {}
"""The names that DADT has given to nodes, by Ray's node id. A node keeps its name when other nodes with the same name
come and go."""
IN_JOB = "RAY_JOB_CONFIG_JSON_ENV_VAR"
"""Environment variable that Ray sets for programs run by `ray job submit`. Ray has already copied the folder of these
programs to all nodes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RayHost(Host):
    """A node of a Ray cluster on which workers run. It has a slot for each of the job's bundles (resources of one
    worker) that Ray has placed there."""

    group: str
    """Name of the placement group."""
    node: str
    """Ray's id of the node."""
    bundles: tuple[int, ...]


def ray_module() -> Any:
    """Import and return Ray's Python module. Raises ConfigError if Ray is not installed."""
    try:
        return import_module("ray")
    except ImportError:
        remedy = "pip install 'dadt[ray]'"
        raise ConfigError(f"--launcher ray: Ray is not installed for {sys.executable}; {remedy}") from None


def reserve(config: Config, say: Callable[[str], None] = lambda text: None) -> list[RayHost]:
    """Have Ray reserve a bundle of resources for each worker, and wait until it has. say: called once with a message if
    this takes long.

    Raises ConfigError, LaunchError if the cluster is too small, and StartTimeout.
    """
    if config.np < 1:
        raise ConfigError("--launcher ray: how many workers? Give their number, as in -np 4")
    ray = connect(config)
    name = f"dadt-{secrets.token_hex(6)}"
    try:
        return _reserve(ray, config, name, say)
    except failures(ray) as error:
        release(name)
        raise ConfigError(f"--launcher ray: {_words(error)}") from error
    except BaseException:  # also after Ctrl-C: in a notebook, this process continues and would keep the resources
        release(name)
        raise


def _reserve(ray: Any, config: Config, name: str, say: Callable[[str], None]) -> list[RayHost]:
    bundle = bundle_of(config, ray.cluster_resources())
    wanted = f"{config.np} workers of {_named(bundle)} each"
    fit = sum(_fits(node["Resources"], bundle) for node in _alive(ray))
    # Ray does not report whether an autoscaler can add nodes. A user who sets --start-timeout is assumed to expect
    # that.
    patient = config.start_timeout != Config().start_timeout
    if fit < config.np and not patient:
        hint = f"it has {_cluster(ray)}. Give --start-timeout 600 to wait for nodes that an autoscaler starts"
        raise LaunchError(f"--launcher ray: the cluster has room for {fit} of {wanted}; {hint}")
    group = ray.util.placement_group([bundle] * config.np, strategy=config.ray_strategy, name=name)
    _await(ray, group, wanted, config.start_timeout, say)
    return hosts_of(name)


def _await(ray: Any, group: Any, wanted: str, most: float, say: Callable[[str], None]) -> None:
    begin = time.monotonic()
    told = False
    while not group.wait(TURN_SECONDS):
        waited = time.monotonic() - begin
        if waited > most:
            there = f"it has {_cluster(ray)}, and {_named(ray.available_resources())} of it free"
            raise StartTimeout(f"Ray did not place {wanted} within --start-timeout {most:g} s: {there}")
        if waited > QUIET_SECONDS and not told:
            told = True
            say(f"waiting for Ray to place {wanted}, for {most:g} s at most (--start-timeout)")


def hosts_of(group: str) -> list[RayHost]:
    """Return the nodes on which the placement group has bundles now. The node of this process comes first, so that rank
    0 runs there. Raises ConfigError if Ray cannot report the nodes."""
    ray = ray_module()
    try:
        _check_connected(ray)
        table = ray.util.placement_group_table(ray.util.get_placement_group(group))
        names = _names(ray)
        mine = own_node(ray)
    except failures(ray) as error:
        raise ConfigError(f"Ray does not tell where it has placed workers: {_words(error)}") from error
    places: dict[str, list[int]] = {}
    for index, node in sorted(table.get("bundles_to_node_id", {}).items()):
        places.setdefault(node, []).append(int(index))
    found = [
        RayHost(name=names[node], slots=len(bundles), group=group, node=node, bundles=tuple(bundles))
        for node, bundles in places.items()
        if node in names  # lost nodes are not in `names`
    ]
    return sorted(found, key=lambda host: (host.node != mine, host.bundles))


def end_of_node(node: str, seconds: float) -> str:
    """Return why Ray considers this node lost, or an empty text if Ray does not within `seconds` seconds."""
    ray, deadline = ray_module(), time.monotonic() + seconds
    while time.monotonic() < deadline and ray.is_initialized():
        try:
            found = next((each for each in ray.nodes() if each["NodeID"] == node), None)
        except failures(ray):
            found = None
        if found is None:  # the whole cluster is gone, or this process has disconnected from it
            return ""
        if not found["Alive"]:
            why = found.get("DeathReasonMessage") or found.get("DeathReason") or "without a reason"
            return f"Ray has lost this node: {why}"
        try:  # connect to the node directly, since Ray needs about 15 seconds to notice that a node does not answer
            socket.create_connection((found["NodeManagerAddress"], found["NodeManagerPort"]), TURN_SECONDS).close()
        except OSError:
            time.sleep(0.1)
        else:
            return ""
    return ""


def release(group: str) -> None:
    """Return the resources of a placement group to Ray. May be called repeatedly."""
    ray = ray_module()
    try:
        _check_connected(ray)
        ray.util.remove_placement_group(ray.util.get_placement_group(group))
    except failures(ray):
        pass  # the placement group or the whole cluster is gone already


def connect(config: Config) -> Any:
    """Connect to a Ray cluster, unless this process is connected already, and return Ray's module. Raises
    ConfigError."""
    ray = ray_module()
    if ray.is_initialized():
        return ray
    address = config.ray_address or os.environ.get("RAY_ADDRESS") or "auto"
    if address.startswith("http"):
        raise ConfigError(f"--launcher ray: {address} is the cluster's dashboard; give --ray-address HOST:6379")
    _knock(address)
    shipped = _shipped(config)
    former = signal.getsignal(signal.SIGTERM)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Ray's exception says the same as its long warnings
            ray.init(
                address,
                log_to_driver=False,
                logging_level=logging.ERROR,
                **({"runtime_env": shipped} if shipped else {}),
            )
    except failures(ray) as error:
        ray.shutdown()  # after the error, the connection may be half open
        if address == "auto" and isinstance(error, ConnectionError):
            remedy = "begin one with `ray start --head`, or give --ray-address HOST:6379"
            raise ConfigError(f"--launcher ray: no Ray cluster is found on this machine; {remedy}") from None
        hint = "; --no-ship leaves the folder where it is" if shipped else ""
        if isinstance(error, ConnectionError) and not address.startswith("ray:"):
            hint = "; this machine is no node of it: `ray start --address` makes it one, or give ray://HOST:10001"
        raise ConfigError(f"--launcher ray: {_words(error)}{hint}") from error
    finally:
        # Restore the previous handler, since Ray has installed one that exits with code 15 on SIGTERM.
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, former or signal.SIG_DFL)
    return ray


def failures(ray: Any) -> tuple[type[Exception], ...]:
    """Return the types of exceptions that Ray raises if the cluster or a request fails."""
    return ray.exceptions.RayError, ConnectionError, RuntimeError, ValueError


def _check_connected(ray: Any) -> None:
    """Raise ConnectionError if the connection to Ray has ended, because Ray's next call would start a new cluster."""
    if not ray.is_initialized():
        raise ConnectionError("the connection with the cluster is over")


def _knock(address: str) -> None:
    """Raise ConfigError if no process listens at the address, because Ray itself would try to connect for minutes."""
    host, colon, port = address.rpartition("://")[2].rpartition(":")
    if not (host and colon and port.isdigit()):
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), KNOCK_SECONDS).close()
    except (OSError, OverflowError) as error:
        why = getattr(error, "strerror", None) or error
        remedy = "begin one with `ray start --head`, or give --ray-address HOST:6379"
        raise ConfigError(f"--launcher ray: no Ray cluster is found at {address} ({why}); {remedy}") from None


def own_node(ray: Any) -> str:
    """Return Ray's id of the node on which this process runs; empty if it runs outside the cluster (by an address
    ray://...)."""
    if ray.util.client.ray.is_connected():
        return ""
    node: str = ray.get_runtime_context().get_node_id()
    return node


def bundle_of(config: Config, total: Mapping[str, float]) -> dict[str, float]:
    """Return the resources to reserve for each worker. total: resources of the whole cluster. Raises ConfigError."""
    named: dict[str, float] = {}
    for part in filter(None, config.ray_resources.split(",")):
        found = re.fullmatch(r"\s*([^=\s]+)=(\d+(?:\.\d+)?)\s*", part)
        if found is None:
            raise ConfigError(f"--ray-resources {config.ray_resources}: {part!r} is not KEY=N, as GPU=1")
        named[found[1]] = float(found[2])
    if named.get("GPU", 0.0) > 1.0:
        raise ConfigError(f"--ray-resources {config.ray_resources}: each worker trains on one GPU; give GPU=1 or less")
    bundle = {"CPU": config.cpus_per_worker, "GPU": 1.0 if total.get("GPU") else 0.0} | named
    return {key: value for key, value in bundle.items() if value}


def ignore_threads(elsewhere: dict[str, str], named: Mapping[str, str]) -> None:
    """Remove OMP_NUM_THREADS from `elsewhere` unless the user has set it. Ray sets it to suit the CPUs reserved for the
    process that `ray job submit` starts, which are none."""
    if IN_JOB in os.environ:
        given = json.loads(os.environ[IN_JOB]).get("runtime_env") or {}
        if "OMP_NUM_THREADS" not in {*named, *(given.get("env_vars") or {})}:
            elsewhere.pop("OMP_NUM_THREADS", None)


def _shipped(config: Config) -> dict[str, Any]:
    """Return the settings with which Ray copies the current folder to all nodes; empty if it must not."""
    if not config.ship or config.workdir or IN_JOB in os.environ:
        return {}
    folder, logs = Path(here()), Path(here(), config.log_dir)
    inside = logs.is_relative_to(folder) and logs != folder
    return {
        "working_dir": str(folder),
        "excludes": [".git", ".venv", *([f"/{logs.relative_to(folder)}"] if inside else [])],
    }


def _alive(ray: Any) -> list[dict[str, Any]]:
    return [node for node in ray.nodes() if node["Alive"]]


def _names(ray: Any) -> dict[str, str]:
    """Return the names of the nodes that are alive, by node id. If several nodes have the same name, as on one machine,
    the end of the id is added to the name."""
    alive = {node["NodeID"]: node["NodeName"] for node in _alive(ray)}
    times = Counter([*alive.values(), *_given.values()])
    for node, name in alive.items():
        if node not in _given:
            _given[node] = name if times[name] == 1 else f"{name}.{node[-6:]}"
    return {node: _given[node] for node in alive}


def _fits(has: Mapping[str, float], bundle: Mapping[str, float]) -> int:
    return min((int(has.get(key, 0) / value + ROUNDING) for key, value in bundle.items()), default=0)


def _named(resources: Mapping[str, float]) -> str:
    """Return the resources as text, such as `2 CPU and 1 GPU`, without memory and without the resources that Ray itself
    adds to each node."""
    own = {key: value for key, value in resources.items() if not key.startswith("node:") and "memory" not in key}
    parts = [f"{value:g} {key}" for key, value in sorted(own.items())]
    return " and ".join(filter(None, [", ".join(parts[:-1]), *parts[-1:]])) or "nothing"


def _cluster(ray: Any) -> str:
    nodes = _alive(ray)
    shown = [f"{_named(node['Resources'])} on {node['NodeName']}" for node in nodes[:SHOWN_NODES]]
    more = len(nodes) - SHOWN_NODES
    return "; ".join([*shown, f"{more} more nodes"] if more > 0 else shown)


def _words(error: Exception) -> str:
    """Return the text of an error of Ray as one line, cut to MOST_LETTERS characters."""
    return textwrap.shorten(str(error), MOST_LETTERS) or type(error).__name__


@dataclass(frozen=True, slots=True)
class Surveyed:
    """A living node of the cluster, with its resources and software versions."""

    name: str
    resources: str
    versions: Mapping[str, str]
    """Versions of Python and of packages that a job needs on the node, by name. The version is empty for a package that
    is not installed. The mapping is empty for a node that did not answer."""


def survey(config: Config) -> list[Surveyed]:
    """Ask all nodes for their resources and software versions. Raises ConfigError if there is no cluster."""

    # This function is nested so that Ray sends its code to the nodes, where DADT may not be installed.
    def versions() -> dict[str, str]:
        import importlib.metadata
        import platform

        found = {"Python": platform.python_version()}
        for name in ("ray", "torch", "dadt"):
            try:
                found[name] = importlib.metadata.version(name)
            except importlib.metadata.PackageNotFoundError:
                found[name] = ""
        return found

    ray = connect(config)
    try:
        nodes = _alive(ray)
    except failures(ray) as error:
        raise ConfigError(f"--launcher ray: {_words(error)}") from error
    near = import_module("ray.util.scheduling_strategies").NodeAffinitySchedulingStrategy
    look = ray.remote(versions)
    asked = [
        look.options(num_cpus=0, scheduling_strategy=near(node["NodeID"], soft=False), max_retries=0).remote()
        for node in nodes
    ]
    ray.wait(asked, num_returns=len(asked), timeout=SURVEY_SECONDS)
    told = []
    for node, answer in zip(nodes, asked, strict=True):
        try:
            found = ray.get(answer, timeout=0)
        except ray.exceptions.RayError:
            found = {}
        told.append(Surveyed(node["NodeName"], _named(node["Resources"]), found))
    return told
