"""Runs the user's program named by `--host-discovery-script`, which prints the hosts that exist at the moment."""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import time
from pathlib import Path

from dadt.config.check import here
from dadt.config.document import LIMIT
from dadt.errors import ConfigError, LaunchError
from dadt.launch.child import spawn
from dadt.launch.hosts import host
from dadt.launch.hosts.discovery import ANSWER_SECONDS
from dadt.launch.hosts.host import Host

SECONDS = ANSWER_SECONDS
"""Number of seconds after which the discovery script counts as failed."""
CHUNK = 1 << 16
SHOWN = 400
"""Number of characters after which the script's last line on stderr is cut off in a message."""


def hosts(path: Path) -> list[Host]:
    """Run the script and return the hosts that it prints in the format of a hostfile, of which there may be none.
    Blocks for at most SECONDS seconds. Raises ConfigError."""
    where = f"--host-discovery-script {path}"
    with Path(os.devnull).open("rb") as nothing:
        try:
            # The kernel kills the script when the thread that has started it ends. This thread waits for the script, so
            # that happens only if this process ends.
            pipes = (subprocess.PIPE, subprocess.PIPE)
            process = spawn([str(path)], os.environ, here(), nothing.fileno(), *pipes)
        except LaunchError as error:
            raise ConfigError(f"--host-discovery-script {error}; it has to be an executable") from error
    with process:
        try:
            printed, complained = _read(process, where)
        finally:
            if process.returncode is None:
                os.killpg(process.pid, signal.SIGKILL)  # the group contains all processes that the script has started
    if process.returncode:
        words = complained.decode(errors="replace").strip().splitlines()
        said = f": {words[-1][:SHOWN]}" if words else ""
        raise ConfigError(f"{where}: ended with code {process.returncode}{said}")
    return host.parse_lines(printed.decode(errors="replace"), f"{where}, its")


def _read(process: subprocess.Popen[bytes], where: str) -> tuple[bytes, bytes]:
    """Wait for the script's end, and return everything that it has printed on stdout and on stderr. Raises ConfigError
    if the script runs too long or prints too much."""
    deadline = time.monotonic() + SECONDS
    assert process.stdout is not None and process.stderr is not None
    data = {process.stdout.fileno(): bytearray(), process.stderr.fileno(): bytearray()}
    with selectors.DefaultSelector() as selector:
        for descriptor in data:
            selector.register(descriptor, selectors.EVENT_READ)
        while selector.get_map():
            ready = selector.select(max(0.0, deadline - time.monotonic()))
            for key, _ in ready:
                chunk = os.read(key.fd, CHUNK)
                data[key.fd] += chunk
                if not chunk:
                    selector.unregister(key.fd)
                if len(data[key.fd]) > LIMIT:
                    raise ConfigError(f"{where}: prints more than {LIMIT >> 10} KiB, which is no list of hosts")
            if not ready:
                raise ConfigError(f"{where}: took longer than {SECONDS:g} s")
    try:
        process.wait(max(0.1, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        raise ConfigError(f"{where}: took longer than {SECONDS:g} s") from None
    printed, complained = data.values()
    return bytes(printed), bytes(complained)
