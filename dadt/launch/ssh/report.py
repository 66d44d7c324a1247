"""Finds the reason why an SSH connection failed in the output of `ssh -v`."""

from __future__ import annotations

import re
from pathlib import Path

from dadt.errors import LaunchError
from dadt.launch.ssh import host_key, refusals
from dadt.launch.ssh.attempt import Transient
from dadt.launch.ssh.identity import shorten
from dadt.launch.ssh.route import Route

OWN_LINE = re.compile(
    r"debug\d: |OpenSSH_|Authenticated |Transferred: |Bytes per second: |Warning: Permanently added |Killed by signal 1"
)
"""Matches lines in which `ssh -v` describes what it does. All other lines come from the remote side, or say why ssh
failed."""
SERVER_KEY = re.compile(r"Server host key: (\S+) (SHA256:\S+)")
OFFENDING = re.compile(r"Offending (?:\S+ )?key(?: for IP)? in (.+):(\d+)")
OFFERED = re.compile(r"Offering public key: (?P<name>.+) (?P<kind>[\w-]+) (?P<print>SHA256:\S+)(?P<from>.*)")
ACCEPTED = re.compile(r"Server accepts key: (?P<name>.+) (?P<kind>[\w-]+) (?P<print>SHA256:\S+)")
CONNECT = re.compile(r"connect to host (.+ port \d+): (.+)")
RESOLVE = re.compile(r"Could not resolve hostname ([^:]+): (.+)")
DENIED = re.compile(r"Permission denied \((.*)\)")
NO_SSH = re.compile(r"No SSH version received|banner line contains invalid|banner exchange: .*: invalid format")
NEGOTIATE = re.compile(r"Unable to negotiate with .*?: (.+)")
EARLY = ("kex_exchange_identification", "Connection closed by", "Connection reset by", "Connection timed out during")


class SshReport:
    """The text that one run of `ssh -v` has written to standard error."""

    def __init__(self, text: str) -> None:
        self._text = text
        self.others = "\n".join(line for line in text.splitlines() if not OWN_LINE.match(line))
        """The lines that come from the remote side or describe a failure, without those in which ssh describes what it
        does."""

    @property
    def logged_in(self) -> bool:
        return "\nAuthenticated to " in self._text

    @property
    def killed(self) -> bool:
        """Whether a signal ended the remote command."""
        return "rtype exit-signal" in self._text

    @property
    def last_words(self) -> str:
        """The last line that comes from the remote side or describes a failure. Lines that only say that the connection
        was closed are used if there are no others."""
        lines = [line.strip() for line in self.others.splitlines() if line.strip()]
        telling = [line for line in lines if not line.startswith(EARLY)] or lines
        return telling[-1] if telling else ""

    def notes(self) -> list[str]:
        """Return notes for the user after a successful log-in: one if an unknown host key was added to known_hosts,
        else none."""
        if "Warning: Permanently added" not in self._text:
            return []
        return [f"its host key was not known ({self._fingerprint()}): added to known_hosts"]

    def failure(self, route: Route) -> LaunchError:
        """Return an error that says why the log-in failed. The first reason in the text is used, as jump hosts report
        theirs first."""
        text = self._text
        if found := RESOLVE.search(text):
            kind = Transient if "Temporary failure" in found[2] else LaunchError
            return kind(refusals.unknown_host(found[1], found[2]))
        if found := CONNECT.search(text):
            return _unreachable(found[1], found[2], route)
        if "HOST IDENTIFICATION HAS CHANGED" in text or "REVOKED HOST KEY" in text or "host key is known" in text:
            return LaunchError(self._host_key(route))
        if "Too many authentication failures" in text:
            return LaunchError(refusals.denied_early(self._tried()))
        if found := DENIED.search(text):
            return LaunchError(self._denied(route, found[1].split(",")))
        if found := NEGOTIATE.search(text):
            return LaunchError(refusals.no_algorithm(found[1], f"try `ssh {refusals.login(route)}`"))
        if found := NO_SSH.search(text):
            return LaunchError(refusals.no_ssh(route.where, found[0]))
        if any(line.startswith(EARLY) for line in self.others.splitlines()) and not route.proxy_command:
            return Transient(refusals.closed(route.where))
        return LaunchError(f"ssh failed: {self.last_words} -> try `ssh {refusals.login(route)}`")

    def _host_key(self, route: Route) -> str:
        offending = OFFENDING.search(self._text)
        entry = host_key.read_line(Path(offending[1]), int(offending[2])) if offending else None
        if "REVOKED HOST KEY" in self._text:
            return refusals.revoked_key(self._fingerprint(), entry.place if entry else "known_hosts")
        if entry is not None:
            return host_key.changed(self._fingerprint(), entry, route.key_name)
        return refusals.unknown_key(self._fingerprint(), route)

    def _fingerprint(self) -> str:
        found = SERVER_KEY.findall(self._text)
        return " ".join(found[-1]) if found else "unknown"

    def _denied(self, route: Route, ways: list[str]) -> str:
        if not any(way == "publickey" for way in ways):
            return refusals.other_way(ways)
        locked = [shorten(Path(found["name"])) for found in ACCEPTED.finditer(self._text)]
        return refusals.denied(route, [name for name in self._tried() if name not in locked], locked, [])

    def _tried(self) -> list[str]:
        files, agent = [], 0
        for found in OFFERED.finditer(self._text):
            if "agent" in found["from"] and not Path(found["name"]).is_file():
                agent += 1
            else:
                files.append(shorten(Path(found["name"])))
        return files + refusals.agent_keys(agent)


def _unreachable(where: str, reason: str, route: Route) -> LaunchError:
    if "refused" in reason:
        return LaunchError(refusals.refused(where))
    if "reset" in reason:
        return Transient(refusals.closed(where))
    if "timed out" in reason:
        return LaunchError(refusals.silent(where, route.connect_timeout))
    return LaunchError(refusals.unreachable(where, reason.strip()))
