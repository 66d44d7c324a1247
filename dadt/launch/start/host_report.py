"""Interprets the report of an agent about its host: the host's room for workers, its problems, and its addresses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dadt.config import Config
from dadt.config.version import VERSION
from dadt.control.frame import Frame
from dadt.launch.hosts.slot import HostRoom
from dadt.launch.members.node import Node


def room(node: Node, config: Config) -> HostRoom:
    """Return the slots, GPUs and cores that a host offers to workers."""
    return HostRoom(
        host=node.name,
        slots=node.host.slots,
        gpus=node.report["gpus"] if config.gpu_visibility == "one" else (),
        cores=node.report["cores"],
        machine=node.report["machine"],
    )


def target_of(index: int, report: Mapping[str, Any]) -> dict[str, Any]:
    addresses = [entry["address"] for entry in report["addresses"]]
    return {"index": index, "port": report["probe_port"], "token": report["token"], "addresses": addresses}


def problem_of(ready: Frame, host: str = "") -> str:
    """Return a text that says why a host cannot take part in the job; empty if it can. ready: the agent's report. host:
    name of the host, if it has one."""
    python = ready["executable"]
    if ready["version"] != VERSION:
        found = f"dadt {ready['version']} is installed {'there' if host else f'for {python}'}"
        return f"{found}, {VERSION} here -> install the same version, or --python PATH"
    if not ready["torch"]:
        place = "there" if host else "here"
        return f"torch is not installed for {python} {place} -> pip install torch, or --python PATH"
    problems: list[str] = ready["problems"]
    return "; ".join(problems)


def share_folder(nodes: Sequence[Node], node: Node, seen: Sequence[Node]) -> None:
    """Record that a new host works in the same folder as the hosts `seen`, which see the marker file that the new host
    has created there."""
    known = [other.folder for other in seen if other.folder is not None]
    unused = 1 + max((other.folder for other in nodes if other.folder is not None), default=0)
    for each in (node, *seen):
        each.folder = min(known, default=unused)


def differences(nodes: Sequence[Node]) -> list[str]:
    """Return warnings about software versions that differ between the hosts but may work together."""
    texts = []
    for what, name in (("torch", "torch"), ("Python", "python")):
        found = {node.name: ".".join(str(node.report[name]).split(".")[:2]) for node in nodes}
        if len(set(found.values())) > 1:
            listed = ", ".join(f"{host} {version or 'none'}" for host, version in found.items())
            texts.append(f"hosts differ in {what}: {listed}")
    return texts
