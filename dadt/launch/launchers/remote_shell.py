"""Starts an agent through the shell of another machine: builds the command line, and explains its exit code."""

from __future__ import annotations

import re
import shlex
import sys
from concurrent.futures import Future

from dadt.config import Config
from dadt.errors import ConfigError
from dadt.launch.channel import Channel
from dadt.launch.ending.failure import last_line, signal_name
from dadt.launch.hosts.host import Host
from dadt.launch.ssh.attempt import Attempts

PLAIN = re.compile(r"[\w@%+=:,./~-]+")
STDERR_BYTES = 4096
"""Number of bytes stored from the end of the remote agent's standard error."""
NOT_FOUND = 127
NOT_EXECUTABLE = 126
NO_PROGRAM = ("command not found", "no such file or directory", "not found", "unknown command")
NO_MODULE = re.compile(r"No module named '?dadt\b")
NO_AGENT = re.compile(r"No module named '?dadt\.")
"""Matches Python's error on a host that has an older version of DADT, in which the agent is in another module."""


class ShellLauncher:
    """A launcher that starts agents through the shells of other hosts. Subclasses make the connections."""

    extends = True

    def __init__(self, config: Config) -> None:
        self._config = config
        self._python = config.python or sys.executable
        self._command = command(self._python)
        self._attempts = Attempts(self._attempt)

    def launch(self, hosts: list[Host]) -> list[Future[Channel]]:
        return self._attempts.begin(hosts, self._config.start_timeout)

    def command(self, host: Host) -> str:
        return shown(self._config, host, self._command)

    def close(self) -> None:
        self._attempts.close()

    def _attempt(self, host: Host, deadline: float) -> Channel:
        """Connect to a host before the deadline (time.monotonic), and start its agent. Raises LaunchError."""
        raise NotImplementedError


def command(python: str) -> str:
    """Return the command line that starts an agent, which sh, csh and fish understand alike. Everything else that the
    agent needs is sent in frames. The command starts with cd, because `python -m` first looks for modules in the
    current folder, which otherwise is the home folder. Raises ConfigError."""
    if not PLAIN.fullmatch(python):
        if set("'!\\\n") & set(python):
            raise ConfigError(f"--python {python!r}: give a path without quotes and other special characters")
        python = f"'{python}'"
    return f"cd /; exec {python} -u -m dadt.launch.agent"


def shown(config: Config, host: Host, command: str) -> str:
    """Return the equivalent `ssh` command line, for users to read."""
    words = ["-F", config.ssh_config] if config.ssh_config else []
    words += ["-p", str(config.ssh_port)] if config.ssh_port else []
    words += ["-i", config.ssh_identity_file] if config.ssh_identity_file else []
    return shlex.join(["ssh", *words, host.login, command])


def explain(code: int | None, noise: bytes, stderr: bytes, python: str) -> str:
    """Return a text that follows the host's name and says how the agent ended; empty if it ended well. code: the
    agent's exit code (-n: signal n; None: an unknown signal). noise: output on stdout before the agent's first frame.
    """
    if code == 0:
        return ""
    text = stderr.decode(errors="replace")
    words = last_line(stderr) or last_line(noise)
    if NO_AGENT.search(text):
        return f"{python} there has an older dadt -> install the same version there, or give --python PATH"
    if NO_MODULE.search(text):
        return f"{python} there has no dadt -> install it there, or give --python PATH"
    # If a program is missing, csh exits with 1, as Python does after an exception, so the error text has to show which
    # it was.
    if code == NOT_FOUND or (code == 1 and "Traceback" not in text and _lacks_program(text)):
        return f"there is no {python} -> give --python PATH, a path that is right on all hosts"
    if code == NOT_EXECUTABLE:
        return f"{python} cannot be run there ({words}) -> give --python PATH"
    if code is None:
        how = "was killed by a signal"
    elif code < 0:
        how = f"was killed by signal {-code} ({signal_name(-code)})"
    else:
        how = f"exited with code {code}"
    return f"the agent {how}" + (f"; its last words: {words}" if words else "")


def _lacks_program(text: str) -> bool:
    lines = text.lower().strip().splitlines()
    return bool(lines) and any(words in lines[-1] for words in NO_PROGRAM)
