"""Reads and writes host keys in known_hosts files, in OpenSSH's format."""

from __future__ import annotations

import base64
import binascii
import fcntl
import fnmatch
import hashlib
import hmac
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from dadt.errors import LaunchError
from dadt.launch.ssh import refusals
from dadt.launch.ssh.route import SSH_PORT, Route

HASHED = "|1|"


@dataclass(frozen=True, slots=True)
class HostKey:
    """A public key by which a host proves its identity."""

    kind: str
    blob: bytes

    @property
    def fingerprint(self) -> str:
        digest = base64.b64encode(hashlib.sha256(self.blob).digest()).decode().rstrip("=")
        return f"{self.kind} SHA256:{digest}"


@dataclass(frozen=True, slots=True)
class KnownHostLine:
    """A line of a known_hosts file that contains a host's key."""

    names: str
    key: HostKey
    revoked: bool
    file: Path
    line: int

    @property
    def place(self) -> str:
        return f"{self.file}, line {self.line}"

    def is_for(self, name: str) -> bool:
        if self.names.startswith(HASHED):
            salt, _, digest = self.names[len(HASHED) :].partition("|")
            try:
                expected = hmac.new(base64.b64decode(salt), name.encode(), hashlib.sha1).digest()
                return base64.b64decode(digest) == expected
            except binascii.Error:
                return False
        patterns = self.names.lower().split(",")
        if any(fnmatch.fnmatchcase(name, _glob(pattern[1:])) for pattern in patterns if pattern.startswith("!")):
            return False
        return any(fnmatch.fnmatchcase(name, _glob(pattern)) for pattern in patterns)


class KnownHosts:
    """The keys of one host that known_hosts files contain."""

    def __init__(self, route: Route) -> None:
        self._route = route
        entries = [entry for entry in _read(route.known_hosts) if entry.is_for(route.key_name)]
        self._revoked = [entry for entry in entries if entry.revoked]
        self._entries = [entry for entry in entries if not entry.revoked]
        self._portless: list[KnownHostLine] = []
        if not self._entries and route.port != SSH_PORT and not route.alias:
            # As in OpenSSH, a key that is known for port 22 is valid for the other ports of the host as well.
            name = route.hostname.lower()
            entries = [entry for entry in _read(route.known_hosts) if entry.is_for(name)]
            self._portless = [entry for entry in entries if not entry.revoked]

    @property
    def kinds(self) -> list[str]:
        """Types of the known keys. The client requests these types from the host first."""
        return [entry.key.kind for entry in self._entries + self._portless]

    def check(self, key: HostKey, policy: str) -> str:
        """Check the key that the host has presented, and raise LaunchError if it is not accepted. Returns a note for
        the user, which continues the host's name; empty if the key was known."""
        if policy == "off":
            return ""
        if revoked := [entry for entry in self._revoked if entry.key == key]:
            raise LaunchError(refusals.revoked_key(key.fingerprint, revoked[0].place))
        if any(entry.key == key for entry in self._entries + self._portless):
            return ""
        if self._entries:
            raise LaunchError(changed(key.fingerprint, self._entries[0], self._route.key_name))
        if policy == "strict" or self._route.strict:
            raise LaunchError(refusals.unknown_key(key.fingerprint, self._route))
        return self._accept(key)

    def _accept(self, key: HostKey) -> str:
        file = self._route.known_hosts[0]
        try:
            _append(file, f"{self._route.key_name} {key.kind} {base64.b64encode(key.blob).decode()}\n")
        except OSError as error:
            return f"its host key was not known ({key.fingerprint}), and cannot be added to {file} ({error.strerror})"
        return f"its host key was not known ({key.fingerprint}): added to {file}"


def changed(fingerprint: str, entry: KnownHostLine, name: str) -> str:
    remedy = f"ssh-keygen -R '{name}' -f {entry.file}"
    return refusals.changed_key(fingerprint, entry.key.fingerprint, entry.place, remedy)


def read_line(file: Path, number: int) -> KnownHostLine | None:
    """Parse a line of a known_hosts file. number: its number in the file, counted from 1. Returns None if the line
    contains no key."""
    return next((entry for entry in _read([file]) if entry.line == number), None)


def _read(files: Iterable[Path]) -> Iterator[KnownHostLine]:
    for file in files:
        try:
            lines = file.read_text(errors="replace").splitlines()
        except OSError:
            continue  # the file is missing, or this user may not read it
        for number, line in enumerate(lines, 1):
            words = line.split()
            marker = words.pop(0) if words and words[0].startswith("@") else ""
            # Lines with host certificates (@cert-authority) are not supported here; OpenSSH handles them.
            if len(words) < 3 or words[0].startswith("#") or marker not in ("", "@revoked"):
                continue
            try:
                blob = base64.b64decode(words[2], validate=True)
            except binascii.Error:
                continue  # the line contains no valid key
            yield KnownHostLine(words[0], HostKey(words[1], blob), marker != "", file, number)


def _append(file: Path, line: str) -> None:
    """Append a line to a file, unless the file contains the line already. This is safe even if other processes append
    to the file at the same time."""
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with file.open("a+b") as known:
        if not file.is_file():
            return  # the path is a device such as /dev/null, to which nothing is written
        fcntl.flock(known, fcntl.LOCK_EX)
        known.seek(0)
        text = known.read()
        if line.encode() not in text:
            known.write((b"" if text.endswith(b"\n") or not text else b"\n") + line.encode())


def _glob(pattern: str) -> str:
    """Escape brackets for fnmatch. In known_hosts files they enclose the name of a host whose port is given, and do not
    mean a range of characters."""
    return pattern.replace("[", "[[]")
