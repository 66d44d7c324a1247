"""Logs in to a host with the user's keys, from the SSH agent and from files, tried one by one."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import paramiko
from cryptography.exceptions import UnsupportedAlgorithm
from paramiko.pkey import UnknownKeyType

from dadt.errors import LaunchError
from dadt.launch.ssh import refusals
from dadt.launch.ssh.attempt import Transient
from dadt.launch.ssh.route import Route


class Identities:
    """The user's keys for one host, with records of the keys that the host refused, that are locked by a passphrase,
    and that cannot be used."""

    def __init__(self, route: Route) -> None:
        self._route = route
        self._files = [file for file in route.identities if file.is_file()]
        self._by_agent = 0
        self._tried: list[str] = []
        self._locked: list[str] = []
        self._unusable: list[str] = []

    def log_in(self, transport: paramiko.Transport) -> None:
        """Log in to the host at the other end of the transport. Raises LaunchError if the host accepts no key."""
        user = self._route.user
        try:
            transport.auth_none(user)
            return
        except paramiko.BadAuthenticationType as refusal:
            if "publickey" not in refusal.allowed_types:
                raise LaunchError(refusals.other_way(refusal.allowed_types)) from refusal
        with closing(paramiko.Agent()) as agent:
            for key, label in self._keys(agent.get_keys() if self._route.uses_agent else ()):
                try:
                    more = transport.auth_publickey(user, key)
                except paramiko.SSHException as error:
                    if "timeout" in str(error):
                        raise Transient(refusals.overloaded(transport.auth_timeout)) from error
                    if not transport.is_active():
                        raise LaunchError(refusals.denied_early(self._what_was_tried())) from error
                    self._note(label)
                    continue
                if more:
                    raise LaunchError(refusals.other_way(more))
                return
        raise LaunchError(refusals.denied(self._route, self._what_was_tried(), self._locked, self._unusable))

    def _keys(self, held: tuple[paramiko.AgentKey, ...]) -> Iterator[tuple[paramiko.PKey, str]]:
        """Yield keys with labels in the order in which OpenSSH tries them: keys of the SSH agent that are in configured
        files, its other keys, then the remaining files.

        The label is the key's file; it is empty for a key of the agent that is in no file.
        """
        publics = {blob: file for file in self._files if (blob := _public(file)) is not None}
        for key in sorted(held, key=lambda key: key.blob not in publics):
            if key.blob in publics:
                yield key, shorten(publics[key.blob])
                self._files.remove(publics[key.blob])
            elif not self._route.identities_only:
                yield key, ""
        for file in self._files:
            loaded = self._load(file)
            if loaded is not None:
                yield loaded, shorten(file)

    def _load(self, file: Path) -> paramiko.PKey | None:
        try:
            return paramiko.PKey.from_path(file)
        except TypeError:
            self._locked.append(shorten(file))
        except (ValueError, UnsupportedAlgorithm, paramiko.SSHException, UnknownKeyType):
            self._unusable.append(f"{shorten(file)} is of a kind that only --ssh-backend openssh can use")
        except OSError as error:
            self._unusable.append(f"{shorten(file)} cannot be read ({error.strerror})")
        return None

    def _note(self, label: str) -> None:
        if label:
            self._tried.append(label)
        else:
            self._by_agent += 1

    def _what_was_tried(self) -> list[str]:
        return self._tried + refusals.agent_keys(self._by_agent)


def _public(file: Path) -> bytes | None:
    """Return the public key that the file contains, or that the .pub file beside it contains; None if there is none."""
    for candidate in (file, file.with_name(f"{file.name}.pub")):
        try:
            words = candidate.read_text(errors="replace").split(maxsplit=2)
            return base64.b64decode(words[1], validate=True)
        except (OSError, IndexError, binascii.Error):
            continue  # the file is missing, or contains no public key
    return None


def shorten(file: Path) -> str:
    return f"~/{file.relative_to(Path.home())}" if file.is_relative_to(Path.home()) else str(file)
