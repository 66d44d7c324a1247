"""Builds the messages that say why SSH could not reach a host and what to do, for both Paramiko and OpenSSH.

Each message continues the host's name.
"""

from __future__ import annotations

from collections.abc import Sequence

from dadt.launch.ssh.route import SSH_PORT, Route


def unknown_host(name: str, reason: str) -> str:
    remedy = "check the name, or give it a HostName in the SSH configuration"
    return f"unknown host: {name} has no address ({reason}) -> {remedy}"


def refused(where: str) -> str:
    return f"connection refused: nothing listens at {where} -> is sshd running there? on another port: -p PORT"


def silent(where: str, seconds: float) -> str:
    remedy = "is it running, and does its firewall let this machine in?"
    return f"timeout: no answer from {where} within {seconds:.0f} s -> {remedy}"


def unreachable(where: str, reason: str) -> str:
    return f"unreachable: {where} ({reason}) -> is it on this network?"


def closed(where: str) -> str:
    problem = "closed the connection before it let anybody log in (too many at once: MaxStartups? a firewall?)"
    return f"{where} {problem} -> try again, or look into its log"


def no_ssh(where: str, reason: str) -> str:
    return f"what answers at {where} is no SSH server ({reason}) -> give the right port with -p PORT"


def no_algorithm(reason: str, instead: str) -> str:
    return f"no algorithm in common ({reason}) -> {instead}"


def overloaded(seconds: float) -> str:
    return f"timeout: its sshd has not answered within {seconds:.0f} s -> is it overloaded?"


def changed_key(now: str, known: str, place: str, remedy: str) -> str:
    problem = f"its host key has changed: it is {now}, known is {known} ({place}); somebody may be in between"
    return f"{problem} -> if the host was installed anew: {remedy}"


def unknown_key(fingerprint: str, route: Route) -> str:
    remedy = f"compare it and run `ssh {login(route)}` once, or give --ssh-host-keys accept-new"
    return f"its host key is not known: it is {fingerprint} -> {remedy}"


def revoked_key(fingerprint: str, place: str) -> str:
    return f"its host key {fingerprint} is revoked in {place} -> do not use this host"


def denied(route: Route, tried: Sequence[str], locked: Sequence[str], unusable: Sequence[str]) -> str:
    """Return the message for a refused log-in. tried: keys that the host refused. locked: key files with a passphrase.
    unusable: texts that say why other files could not be used."""
    text = f"no accepted key (tried {', '.join(tried)})" if tried else "no key to try"
    text += "".join(f"; {file} has a passphrase, and the agent does not hold it" for file in locked)
    text += "".join(f"; {reason}" for reason in unusable)
    first = "" if tried or unusable else "ssh-keygen, then "
    remedy = f"ssh-add {locked[0]}" if locked else f"{first}ssh-copy-id {login(route)}, or -i FILE"
    return f"permission denied: {text} -> {remedy}"


def denied_early(tried: Sequence[str]) -> str:
    after = f" after {', '.join(tried)}" if tried else ""
    return f"permission denied: too many keys: it hung up{after} (MaxAuthTries) -> name the right one with -i FILE"


def other_way(ways: Sequence[str]) -> str:
    remedy = "--ssh-backend openssh, with a shared connection (ControlPath)"
    return f"permission denied: it asks for {' or '.join(ways)}, not only for a key -> {remedy}"


def agent_keys(count: int) -> list[str]:
    return [f"{count} agent key{'s' if count > 1 else ''}"] if count else []


def login(route: Route) -> str:
    """Return the host with user and port, as they follow `ssh` or `ssh-copy-id` in a command that the user can type."""
    port = "" if route.port == SSH_PORT else f"-p {route.port} "
    return f"{port}{route.user}@{route.host}"
