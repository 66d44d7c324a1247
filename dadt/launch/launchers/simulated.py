"""The launcher for simulated hosts: each agent runs on this machine, but in a network and on cores of its own."""

from __future__ import annotations

import os
import sys
from concurrent.futures import Future

from dadt.control import machine
from dadt.launch.channel import AgentRequest, Channel
from dadt.launch.hosts.host import Host
from dadt.launch.hosts.simulated import Network, link_of
from dadt.launch.launchers.local import start


class SimulatedLauncher:
    """Starts agents in simulated networks. The agents end with this process, and the networks end with the last
    agent."""

    extends = True

    def __init__(self, request: AgentRequest) -> None:
        self._python = request.config.python or sys.executable
        self._link = link_of(request.config)
        self._network: Network | None = None

    def launch(self, hosts: list[Host]) -> list[Future[Channel]]:
        """Start one agent for each simulated host. Raises ConfigError if the kernel lacks a feature that the simulated
        link needs."""
        self._network = self._network or Network(self._link)
        try:
            places = [self._network.add() for _ in hosts]
        except BaseException:
            self.close()
            raise
        cores = sorted(os.sched_getaffinity(0))
        gpus = machine.gpus()
        futures = []
        for number, (host, place) in enumerate(zip(hosts, places, strict=True)):
            # With more hosts than cores, each host gets one core, which it shares with other hosts.
            shared = cores[number :: len(hosts)] or [cores[number % len(cores)]]
            pinned = [*place, "taskset", "--cpu-list", ",".join(map(str, shared))]
            before = sum(each.slots for each in hosts[:number])
            mine = gpus[before : before + host.slots]
            # Without an id for each host, NCCL would see a single machine and bypass the simulated network. The log
            # level hides torch's warnings that the addresses have no names.
            env = {"NCCL_HOSTID": host.name, "TORCH_CPP_LOG_LEVEL": os.environ.get("TORCH_CPP_LOG_LEVEL", "ERROR")}
            env |= {"CUDA_VISIBLE_DEVICES": ",".join(mine)} if mine else {}
            futures.append(start(self._python, pinned, env))
        return futures

    def command(self, host: Host) -> str:
        return f"nsenter --net=<network of {host}> {self._python} -u -m dadt.launch.agent"

    def close(self) -> None:
        if self._network is not None:
            self._network.close()
