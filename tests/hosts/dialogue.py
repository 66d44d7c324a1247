"""Agents started by a launcher alone, and a few words with them."""

from __future__ import annotations

import select
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

from harness import forkserver
from harness.machine import Network
from harness.patience import PATIENCE

from dadt.config import Config
from dadt.control.frame import Frame
from dadt.errors import LaunchError
from dadt.launch.channel import Channel, Launcher
from dadt.launch.hosts.host import Host
from dadt.launch.launchers.nearby import ssh_launcher

BACKENDS = ("paramiko", "openssh")


@contextmanager
def launched(network: Network, backend: str, *names: str, **knobs: Any) -> Iterator[list[Future[Channel]]]:
    """The launcher's futures for these hosts (h0 where none is named); their channels are ended at the end."""
    values = {"ssh_config": str(network.config), "start_timeout": PATIENCE, "python": forkserver.python(), **knobs}
    launcher: Launcher = ssh_launcher(Config(ssh_backend=backend, **values))
    with network.launcher.entered():
        futures = launcher.launch([_host(name) for name in names or ("h0",)])
        try:
            yield futures
        finally:
            for future in futures:
                if future.exception(PATIENCE) is None:
                    future.result().end(PATIENCE)
            launcher.close()


def _host(name: str) -> Host:
    user, _, name = name.rpartition("@")
    return Host(name=name, user=user)


def outcome(network: Network, backend: str, name: str = "h0", **knobs: Any) -> str:
    """Why no agent runs there: the launcher's reason, or the channel's once it is closed; empty if one runs."""
    with launched(network, backend, name, **knobs) as (future,):
        try:
            channel = future.result(PATIENCE)
        except LaunchError as error:
            return str(error)
        try:
            ask(channel)
        except EOFError:
            return channel.end(PATIENCE)
        return channel.end(PATIENCE)


def ask(channel: Channel) -> Frame:
    """What the agent says of its host."""
    look = {"job": "test", "index": 0, "hosts": 1, "env": {}, "prologue": "", "cwd": "/", "files": [], "mpi": ""}
    try:
        channel.link.send(Frame("look", {**look, "orphan_timeout": 30.0}))
    except BrokenPipeError:
        pass  # gone already, as its end tells
    return read(channel, "ready")


def read(channel: Channel, kind: str, seconds: float = PATIENCE) -> Frame:
    """The next frame of a kind; raises EOFError at the end."""
    deadline = time.monotonic() + seconds
    while True:
        left = deadline - time.monotonic()
        assert left > 0, f"no frame `{kind}` within {seconds} s"
        select.select([channel.link.reader], [], [], left)
        for frame in channel.link.receive():
            if frame.kind == kind:
                return frame
