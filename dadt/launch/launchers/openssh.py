"""The launcher that starts agents by the program `ssh`, which supports Kerberos, hardware keys and shared
connections."""

from __future__ import annotations

import os
import select
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Sequence

from dadt.config import Config
from dadt.control.frame import CHUNK
from dadt.errors import LaunchError
from dadt.launch.channel import Channel
from dadt.launch.hosts.host import Host
from dadt.launch.launchers import remote_shell
from dadt.launch.launchers.local import ProcessChannel
from dadt.launch.ssh import route as routes
from dadt.launch.ssh.gate import Gates
from dadt.launch.ssh.report import SshReport
from dadt.launch.ssh.route import Route

STDERR_BYTES = 1 << 16
"""Number of bytes that are stored from the end of ssh's stderr. They are enough for everything that `ssh -v` prints
about a connection."""
FORCE_SECONDS = 1.0
SSH_FAILED = 255
OPTIONS = (
    "BatchMode=yes",
    "LogLevel=DEBUG1",  # makes ssh print which keys it tries, and the host's key
    "ConnectionAttempts=1",
    "ClearAllForwardings=yes",
    "ForwardAgent=no",
    "ForwardX11=no",
    "PermitLocalCommand=no",
    "RemoteCommand=none",
    "RequestTTY=no",
)


class OpensshLauncher(remote_shell.ShellLauncher):
    """Runs one `ssh` per host, and waits until it has logged in."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._gates = Gates()
        self._processes: set[subprocess.Popen[bytes]] = set()

    def close(self) -> None:
        super().close()
        for process in list(self._processes):
            process.kill()

    def _attempt(self, host: Host, deadline: float) -> Channel:
        ssh = shutil.which("ssh")
        if ssh is None:
            raise LaunchError("there is no ssh program on this machine -> install it, or --ssh-backend paramiko")
        config = self._config
        route = routes.find(config, host.name, host.user, config.ssh_port, config.ssh_identity_file)
        # The number of simultaneous log-ins is limited per server. The first server at which `ssh` logs in is the first
        # jump host, unless the user's configuration shares connections.
        with self._gates.passed(route.jumps[0] if route.jumps else route.where, deadline):
            channel = OpensshChannel(self._command_line(ssh, host, route), self._python, self._processes)
            if self._attempts.closed:
                channel.end(0.0)  # `close` may have run before this process was in the set of processes that it kills
                raise LaunchError("given up")
            has_output = channel.await_output(deadline)
        report = channel.report()
        channel.notes = report.notes()
        if has_output:
            return channel
        how = channel.end(0.0)
        if channel.code == SSH_FAILED and not report.logged_in:
            raise report.failure(route)
        raise LaunchError(how or "the agent ended without a word")

    def _command_line(self, ssh: str, host: Host, route: Route) -> list[str]:
        config = self._config
        checking = {"off": "no", "strict": "yes", "accept-new": "yes" if route.strict else "accept-new"}
        alive = max(1, int(config.orphan_timeout / 3))
        options = [*OPTIONS, f"StrictHostKeyChecking={checking[config.ssh_host_keys]}"]
        options += [f"ConnectTimeout={route.connect_timeout:.0f}", f"ServerAliveInterval={alive}"]
        if config.ssh_host_keys == "off":
            options += ["UserKnownHostsFile=/dev/null", "GlobalKnownHostsFile=/dev/null"]
        if config.ssh_identity_file:
            options += ["IdentitiesOnly=yes", f'IdentityFile="{route.identities[0]}"']
        words = [ssh] + [word for option in options for word in ("-o", option)]
        words += ["-F", config.ssh_config] if config.ssh_config else []
        words += ["-p", str(config.ssh_port)] if config.ssh_port else []
        words += ["-l", host.user] if host.user else []
        return [*words, "--", host.name, self._command]


class OpensshChannel(ProcessChannel):
    """The launcher's connection to an agent through a running `ssh`."""

    def __init__(self, command: list[str], python: str, processes: set[subprocess.Popen[bytes]]) -> None:
        """processes: the set of the launcher's running `ssh` processes, to which this one is added so that `close` can
        end it."""
        pipe, env = subprocess.PIPE, {**os.environ, "SSH_ASKPASS_REQUIRE": "never"}
        process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True, env=env)
        super().__init__(process)
        self._python = python
        self._processes = processes
        self.notes: Sequence[str] = ()
        self._stderr = b""
        self._explanation: str | None = None
        processes.add(process)
        self._errors = threading.Thread(target=self._read_errors, name="dadt-ssh-err", daemon=True)
        self._errors.start()

    @property
    def code(self) -> int | None:
        return self._process.returncode

    def await_output(self, deadline: float) -> bool:
        """Wait until the remote side prints something or the `ssh` process ends. Returns whether something was printed.
        Raises LaunchError."""
        poll = select.poll()
        poll.register(self.link.reader, select.POLLIN)
        events = poll.poll(max(0.0, deadline - time.monotonic()) * 1000)
        if not events:
            self.end(0.0)
            raise LaunchError("timeout: not connected within --start-timeout")
        if events[0][1] & select.POLLIN:
            return True
        self._process.wait()  # ssh has closed its output, so it is about to exit
        self._errors.join(FORCE_SECONDS)
        return False

    def report(self) -> SshReport:
        return SshReport(self._stderr.decode(errors="replace"))

    def end(self, timeout: float) -> str:
        if self._explanation is None:
            ended = self._await_end(timeout)
            self._processes.discard(self._process)
            self._errors.join(FORCE_SECONDS)
            self._explanation = self._explain(not ended)
        return self._explanation

    def _explain(self, gave_up: bool) -> str:
        if gave_up:
            return "the agent has not ended in time; the connection to it was closed"
        code: int | None = self._process.returncode
        report = self.report()
        if code == -signal.SIGKILL:
            return "its ssh process was killed"
        if code == SSH_FAILED and report.killed:
            code = None
        elif code == SSH_FAILED:
            return f"the connection was lost ({report.last_words or 'closed by the other side'})"
        return remote_shell.explain(code, self.link.parser.noise, report.others.encode(), self._python)

    def _read_errors(self) -> None:
        assert self._process.stderr is not None
        while data := os.read(self._process.stderr.fileno(), CHUNK):
            self._stderr = (self._stderr + data)[-STDERR_BYTES:]
        self._process.stderr.close()
