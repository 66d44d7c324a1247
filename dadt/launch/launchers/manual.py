"""The launcher for jobs that are started by hand: the user calls `dadt run` on each host, and the other hosts connect
to node 0."""

from __future__ import annotations

import os
import select
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import Future

from dadt.config import Config
from dadt.control import schema
from dadt.control.connection import SealedConnection, Unreached, Words, dial
from dadt.control.frame import Frame, Link
from dadt.errors import DadtError, LaunchError, StartTimeout
from dadt.launch.channel import AgentRequest, Channel
from dadt.launch.child import end, end_with, spawn_agent, without_settings
from dadt.launch.ending.failure import signal_name
from dadt.launch.ending.preemption import EXIT_CODE
from dadt.launch.ending.signals import Interrupts
from dadt.launch.hosts.host import Host
from dadt.launch.launchers.connect_back import ConnectBackLauncher, SocketChannel
from dadt.launch.launchers.local import LocalLauncher
from dadt.launch.launchers.node_rendezvous import rendezvous_of
from dadt.launch.start.startup import Voice

END_SECONDS = 10.0
"""Seconds that this host's agent may take to end after the end of the job."""


class HandLauncher(ConnectBackLauncher):
    """The launcher on node 0. The agent of node 0 is its child process, and the agents of the other nodes connect to
    it."""

    def __init__(self, request: AgentRequest) -> None:
        super().__init__(request, (f"node{rank}" for rank in range(1, request.config.nnodes)))
        self._claims = claims(self._config, request.command)
        self._meeting = rendezvous_of(self._config)
        self._local = LocalLauncher(self._config)
        self._watchers: dict[str, SealedConnection] = {}
        """Connections from `dadt run` on the other nodes, which wait for the job's result there, by node name."""

    def launch(self, hosts: list[Host]) -> list[Future[Channel]]:
        meeting = self._meeting
        try:
            reach = self._listen(meeting.key, meeting.port)
        except OSError as error:
            reason = os.strerror(error.errno or 0)
            raise LaunchError(f"--rendezvous {self._config.rendezvous}: cannot listen there ({reason})") from error
        try:
            meeting.open(reach)
        except LaunchError:
            super().close()
            raise
        return [*self._local.launch(hosts[:1]), *(self._arrivals[host.name] for host in hosts[1:])]

    def command(self, host: Host) -> str:
        rank = host.name.removeprefix("node")
        if rank == "0":
            return self._local.command(host)
        return f"by hand there: dadt run --nnodes {self._config.nnodes} --node-rank {rank} --rendezvous ..."

    def close(self) -> None:
        # Close the listener before the other nodes learn that the job is over, so that their next `dadt run` does not
        # connect to this job.
        super().close()
        if self._listener is not None:
            self._meeting.close()

    def conclude(self, code: int, lines: Sequence[str]) -> None:
        verdict = Frame("verdict", {"code": code, "lines": [line[: schema.TEXT] for line in lines[:100]]})
        for connection in self._watchers.values():
            with connection.socket:
                _tell(connection, verdict)
        self._watchers.clear()

    def _greet(self, hello: Words) -> Words:
        name, asks = str(hello.get("node")), hello.get("asks")
        if name not in self._arrivals:
            last = self._config.nnodes - 1
            return {"refused": f"there is no {name} in job {self._request.job}, which has nodes 0 to {last}"}
        for what, ours in self._claims.items():
            if (theirs := hello.get(what)) != ours:
                return {"refused": f"{name} was started with {what} {theirs}, node0 with {what} {ours}"}
        watcher = self._watchers.get(name)
        if self._arrivals[name].done() if asks == "orders" else watcher is not None and not _is_gone(watcher):
            return {"refused": f"job {self._request.job} has a {name} already: give each host its own --node-rank"}
        return {"job": self._request.job}

    def _take(self, hello: Words, connection: SealedConnection) -> None:
        name = hello["node"]
        if hello["asks"] == "verdict":
            self._watchers[name] = connection
        else:
            self._admit(name, SocketChannel(connection))


def join(config: Config, command: Sequence[str], voice: Voice) -> int:
    """Carry out `dadt run` on a node other than node 0: run this node's agent until the job is over. Returns the job's
    exit code."""
    name = f"node{config.node_rank}"
    hello = {"node": name, **claims(config, command)}
    meeting = rendezvous_of(config)
    deadline = time.monotonic() + config.start_timeout
    numbers = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]
    try:
        watcher, answer, at = dial(meeting.find, {**hello, "asks": "verdict"}, deadline)
        agent, _, _ = dial(meeting.find, {**hello, "asks": "orders"}, deadline)
    except Unreached as error:
        raise StartTimeout(f"node0 did not come within --start-timeout {config.start_timeout:g} s: {error}") from error
    voice.say(f"node {config.node_rank} of job {answer['job']} at {at}")
    with Interrupts(numbers) as interrupts, watcher.socket:
        return _follow(watcher, _agent(config, agent), interrupts, voice)


def claims(config: Config, command: Sequence[str]) -> dict[str, object]:
    """Return those settings that must be the same on all nodes, by name."""
    # The path of Python is left out, as it may differ between hosts.
    program = " ".join(command[1:] if len(command) > 1 else command)
    return {"--nnodes": config.nnodes, "-np": config.np, "--accelerators": config.accelerators, "the script": program}


def _follow(watcher: SealedConnection, agent: subprocess.Popen[bytes], interrupts: Interrupts, voice: Voice) -> int:
    """Wait for the job's result from node 0, and return the exit code. A signal such as that of Ctrl-C ends the whole
    job: it is passed to this host's agent, which reports it to the launcher on node 0."""
    link = Link(watcher.socket.fileno(), watcher.socket.fileno(), schema.VERDICT, seal=watcher.seal)
    caught = 0
    with selectors.DefaultSelector() as selector:
        selector.register(interrupts, selectors.EVENT_READ)
        selector.register(link.reader, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fileobj is interrupts:
                    caught = min(interrupts.take(), default=caught) or caught
                    voice.say(f"{signal_name(caught)}: stopping the job")
                    agent.send_signal(caught)
                    continue
                try:
                    verdicts = link.receive()
                except (EOFError, DadtError):
                    voice.say("node0 is gone, without a word on how the job ended", "error")
                    end(agent, END_SECONDS)
                    return LaunchError.exit_code
                for verdict in verdicts:
                    end(agent, END_SECONDS)
                    voice.say("\n".join(verdict["lines"]))
                    return 128 + caught if caught and verdict["code"] != EXIT_CODE else int(verdict["code"])


def _tell(connection: SealedConnection, verdict: Frame) -> None:
    try:
        ends = connection.socket.fileno(), connection.socket.fileno()
        Link(*ends, schema.VERDICT, seal=connection.seal).send(verdict)
    except BrokenPipeError:
        pass  # `dadt run` on the other node has ended before the result


def _is_gone(connection: SealedConnection) -> bool:
    """Return whether the other side has closed the connection. It sends nothing while it waits, so a readable
    connection is a closed one."""
    return bool(select.select([connection.socket], [], [], 0)[0])


def _agent(config: Config, connection: SealedConnection) -> subprocess.Popen[bytes]:
    """Start this host's agent with the connection as its standard input. Raises LaunchError."""
    python, parent = config.python or sys.executable, os.getpid()
    try:
        return spawn_agent(connection, python, without_settings(os.environ), lambda: end_with(parent, signal.SIGTERM))
    except OSError as error:
        raise LaunchError(f"{python}: cannot be run ({error.strerror}) -> --python PATH") from error
