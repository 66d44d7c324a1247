"""The launcher that starts agents by SSH with the library Paramiko. Each host has one connection with one channel,
without a terminal."""

from __future__ import annotations

import socket
import threading
from collections.abc import Sequence

import paramiko

from dadt.config import Config
from dadt.control import schema
from dadt.control.frame import CHUNK, Link
from dadt.launch.hosts.host import Host
from dadt.launch.launchers import remote_shell
from dadt.launch.ssh.attempt import Transient
from dadt.launch.ssh.connection import Connector, SshConnection

OPEN_SECONDS = 15.0
STATUS_SECONDS = 5.0
"""Seconds to wait for the agent's exit code after the end of its output."""
FORCE_SECONDS = 1.0


class SshLauncher(remote_shell.ShellLauncher):
    """Connects to hosts in daemon threads, so that an attempt to connect that hangs does not keep the process from
    ending."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._connector = Connector(config)

    def close(self) -> None:
        super().close()
        self._connector.close()

    def _attempt(self, host: Host, deadline: float) -> SshChannel:
        notes: list[str] = []
        connection = self._connector.connect(host, deadline, notes.append)
        try:
            channel = connection.transport.open_session(timeout=OPEN_SECONDS)
            channel.exec_command(self._command)
            return SshChannel(connection, channel, self._python, notes)
        except (paramiko.SSHException, EOFError, OSError) as error:
            connection.close()
            raise Transient(f"logged in, but no command can be started ({error}) -> try `ssh {host} true`") from error


class SshChannel:
    """The launcher's connection to an agent through a Paramiko channel. Threads copy its bytes to and from a socket,
    which a selector can watch, unlike the channel."""

    def __init__(self, connection: SshConnection, channel: paramiko.Channel, python: str, notes: Sequence[str]) -> None:
        self.notes = notes
        self._connection = connection
        self._channel = channel
        self._python = python
        self._stderr = b""
        self._explanation: str | None = None
        self._lost: str | None = None
        """Text that says why the connection was lost before the agent ended; None if it was not lost."""
        self._ours, self._theirs = socket.socketpair()
        self._writer = self._ours.dup()  # for writing, as a selector accepts each descriptor only once
        self.link = Link(self._ours.fileno(), self._writer.fileno(), schema.AGENT, noisy=True)
        self._errors = threading.Thread(target=self._carry_errors, name="dadt-ssh-err", daemon=True)
        self._out = threading.Thread(target=self._carry_out, name="dadt-ssh-out", daemon=True)
        self._in = threading.Thread(target=self._carry_in, name="dadt-ssh-in", daemon=True)
        for thread in (self._errors, self._out, self._in):
            thread.start()

    def hang_up(self) -> None:
        try:
            self._ours.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # the socket was closed before

    def end(self, timeout: float) -> str:
        if self._explanation is None:
            self.hang_up()
            self._out.join(timeout)
            gave_up = self._out.is_alive()
            self._connection.close()
            for thread in (self._errors, self._out, self._in):
                thread.join(FORCE_SECONDS)
            self._explanation = self._explain(gave_up)
            for end in (self._ours, self._writer, self._theirs):
                end.close()
        return self._explanation

    def _explain(self, gave_up: bool) -> str:
        if gave_up:
            return "the agent has not ended in time; the connection to it was closed"
        code = self._channel.exit_status
        if code < 0 and self._lost is not None:
            return f"the connection was lost ({self._lost})"
        return remote_shell.explain(None if code < 0 else code, self.link.parser.noise, self._stderr, self._python)

    def _carry_in(self) -> None:
        try:
            while data := self._theirs.recv(CHUNK):
                self._channel.sendall(data)
            self._channel.shutdown_write()
        except (OSError, EOFError, paramiko.SSHException):
            pass  # the connection is lost; the end of the agent's output reports this

    def _carry_out(self) -> None:
        """Copy the agent's output to the socket until the output ends, even if the launcher does not read it any more,
        as unread bytes in a channel block the whole connection."""
        try:
            self._pass_on()
            self._errors.join()
            self._channel.status_event.wait(STATUS_SECONDS)
            transport = self._connection.transport
            if not transport.is_active():
                self._lost = str(transport.get_exception() or "") or "closed by the other side"
        finally:
            self._connection.close()

    def _pass_on(self) -> None:
        taken = True
        while data := self._channel.recv(CHUNK):
            try:
                if taken:
                    self._theirs.sendall(data)
            except OSError:
                taken = False  # the launcher has closed its end: read on, but drop the data
        try:
            self._theirs.shutdown(socket.SHUT_WR)
        except OSError:
            pass  # the launcher has closed its end already

    def _carry_errors(self) -> None:
        while data := self._channel.recv_stderr(CHUNK):
            self._stderr = (self._stderr + data)[-remote_shell.STDERR_BYTES :]
