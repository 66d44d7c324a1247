"""The launcher in a Ray cluster: an actor on each node starts the agent, which connects to the launcher."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from typing import Any

from dadt.control.connection import Reach, SealedConnection, Words
from dadt.launch.agent import ray_actor
from dadt.launch.agent.connect import NAME, REACH
from dadt.launch.channel import AgentRequest, Channel
from dadt.launch.ending.failure import signal_name
from dadt.launch.hosts.host import Host
from dadt.launch.hosts.ray import RayHost, connect, end_of_node, own_node
from dadt.launch.launchers.connect_back import ConnectBackLauncher, SocketChannel

END_SECONDS = 5.0
QUIET_SECONDS = 1.0
"""Seconds of waiting until Ray reports why an agent is gone, after which a message is shown to the user."""
DEATH_SHARE = 0.6
"""Share of --orphan-timeout for which a job waits until Ray reports whether a lost agent's node is gone, which takes
Ray about 15 seconds longer than to report the end of an actor. After --orphan-timeout itself, the other agents would
end their workers. A job that continues without lost ranks does not wait."""


@dataclass(slots=True, eq=False)
class Started:
    """An agent that Ray was asked to start."""

    host: RayHost
    arrival: Future[Channel]
    actor: Any = None
    end: Future[str] = field(default_factory=Future)
    """Completed with the reason why the agent has ended, or with an empty text if the agent ended as intended."""
    reason: str = ""
    """The reason why the agent has ended as far as it is known, before Ray reports whether the agent's node is gone."""


class RayLauncher(ConnectBackLauncher):
    """Starts one agent per node through a Ray actor. The actor's result, or Ray's error about it, explains failures."""

    extends = True

    def __init__(self, request: AgentRequest) -> None:
        super().__init__(request)
        self._ray = connect(request.config)
        self._reach: Reach | None = None
        self._started: dict[str, Started] = {}
        """The latest agent of each host, by the host's name."""
        self._lock = threading.Lock()

    def launch(self, hosts: list[Host]) -> list[Future[Channel]]:
        self._reach = self._reach or self._listen()
        return [self._launch(host) for host in hosts]

    def command(self, host: Host) -> str:
        assert isinstance(host, RayHost)
        return f"by an actor of Ray's on node {host.node}, in bundle {host.bundles[0]} of group {host.group}"

    def close(self) -> None:
        super().close()
        wait([each.end for each in self._started.values() if each.arrival.done()], END_SECONDS)
        for each in self._started.values():
            if each.actor is not None and self._ray.is_initialized():  # an actor exists even after its agent has ended
                self._ray.kill(each.actor)

    def _launch(self, host: Host) -> Future[Channel]:
        assert isinstance(host, RayHost)
        started = Started(host, Future())
        with self._lock:
            self._arrivals[host.name] = started.arrival
            self._started[host.name] = started
        try:
            run = self._begin(started)
        except Exception as error:  # noqa: BLE001 (Ray has many exception classes for a refused actor)
            self._over(started, reason(str(error)))
        else:
            threading.Thread(target=self._watch, args=(started, run), name="dadt-ray", daemon=True).start()
        return started.arrival

    def _begin(self, started: Started) -> Any:
        """Have Ray create the actor for an agent. Returns a reference to the result that the actor will have."""
        ray, config, host = self._ray, self._config, started.host
        assert self._reach is not None
        strategies = import_module("ray.util.scheduling_strategies")
        group = ray.util.get_placement_group(host.group)
        within = partial(strategies.PlacementGroupSchedulingStrategy, group)
        bundle = group.bundle_specs[host.bundles[0]]
        started.actor = (
            ray.remote(ray_actor.RayActor)
            .options(num_cpus=0, scheduling_strategy=within(placement_group_bundle_index=host.bundles[0]))
            .remote()
        )
        look = ray.remote(ray_actor.gpus)
        each = {"num_cpus": 0, "num_gpus": bundle.get("GPU", 0)}
        gpus = [
            look.options(**each, scheduling_strategy=within(placement_group_bundle_index=index)).remote()
            for index in (host.bundles if each["num_gpus"] else ())
        ]
        variables = {
            REACH: self._reach.to_text(),
            NAME: host.name,
            "RAY_ADDRESS": ray.get_runtime_context().gcs_address,
            "OMP_NUM_THREADS": str(max(1, int(bundle.get("CPU", 1)))),
        }
        ships = config.ship and not config.workdir and "working_dir" in ray.get_runtime_context().runtime_env
        shipped = ships and host.node != own_node(ray)
        return started.actor.run.remote(config.python, variables, shipped, config.gpu_visibility == "all", *gpus)

    def _take(self, hello: Words, connection: SealedConnection) -> None:
        name = hello["name"]
        self._admit(name, SocketChannel(connection, partial(self._explain, self._started[name])))

    def _explain(self, started: Started, seconds: float) -> str:
        if seconds > QUIET_SECONDS and not self._config.min_np:
            seconds = max(seconds, DEATH_SHARE * self._config.orphan_timeout)
        if wait([started.end], min(seconds, QUIET_SECONDS)).not_done and seconds > QUIET_SECONDS:
            most = seconds - QUIET_SECONDS
            self._request.say(f"waiting for Ray to say why {started.host.name} is gone, for {most:.0f} s at most")
            wait([started.end], most)
        return started.end.result() if started.end.done() else started.reason

    def _watch(self, started: Started, run: Any) -> None:
        """Wait for the end of an agent. Runs in a thread of its own."""
        try:
            code, tail = self._ray.get(run)
            why = _verdict(code, tail, self._config.python or "the Python of Ray")
        except Exception as error:  # noqa: BLE001 (Ray has many exception classes for an actor that has ended)
            started.reason = reason(str(error))
            why = end_of_node(started.host.node, DEATH_SHARE * self._config.orphan_timeout) or started.reason
        self._over(started, why)

    def _over(self, started: Started, why: str) -> None:
        started.end.set_result(why)
        with self._lock:  # another agent may have been started on this host in the meantime
            if self._started[started.host.name] is started:
                text = why or "the agent ended before it was asked for anything"
                self._refuse(started.host.name, text)


def _verdict(code: int, tail: Sequence[str], python: str) -> str:
    if not code:
        return ""
    if tail and "No module named 'dadt'" in tail[-1]:
        return f"dadt is not installed for {python} there -> pip install it, or --python PATH"
    how = f"was killed by {signal_name(-code)}" if code < 0 else f"has ended with exit code {code}"
    return f"the agent {how}" + (f"; its last words: {tail[-1]}" if tail else "")


def reason(text: str) -> str:
    """Return the part of a Ray error that says why an actor is gone."""
    if "No module named 'dadt'" in text:
        return "dadt is not installed for the Python of Ray there -> pip install it in the image of the node"
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    facts = ("class_name:", "actor_id:", "pid:", "namespace:", "ip:", "name:")
    told = [line for line in lines if not line.startswith(facts)]
    return f"Ray: {told[-1] if told else text}"
