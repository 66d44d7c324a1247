"""Checks for optional programs: some programs help to debug a job that hangs, others bind a worker to cores and
memory."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from dadt.control.proc import status
from dadt_cli.check_env.check import Check, CheckOptions, ask, good, warn

TOOLS = {
    "py-spy": ("--version", "pip install py-spy, to see where a process is that `dadt stacks` gets no answer from"),
    "gdb": ("--version", "apt-get install gdb, to see where C++ or CUDA hangs, or why a worker crashed"),
}
"""For each program the flag that prints its version, and a hint that says how to install the program and what it is
for."""
ANSWER_SECONDS = 5.0
NODES = Path("/sys/devices/system/node")
SCOPE = Path("/proc/sys/kernel/yama/ptrace_scope")
CAP_SYS_PTRACE = 19
NOBODY = 3
"""The value of ptrace_scope at which not even root may attach, until the next boot."""


def checks(asked: CheckOptions) -> Iterator[Check]:
    for name, (flag, hint) in TOOLS.items():
        yield _tool(name, flag, hint)
    yield _numactl()
    yield _ptrace()


def _tool(name: str, flag: str, hint: str) -> Check:
    beside = Path(sys.executable).with_name(name)
    path = shutil.which(name) or (str(beside) if os.access(beside, os.X_OK) else None)
    if path is None:
        return good(name, "none", hint)
    version, wrong = ask([path, flag], ANSWER_SECONDS)
    if wrong:
        return warn(name, f"{path}{wrong}", f"install it again, or take it out of PATH; {hint}")
    return good(name, f"{path} ({next(iter(version.strip().splitlines()), 'no version')})")


def _numactl() -> Check:
    """Check for numactl, which is useful if some memory is nearer to some cores than to others (several NUMA nodes)."""
    nodes = len(list(NODES.glob("node[0-9]*"))) or 1
    memory = "one NUMA node" if nodes == 1 else f"{nodes} NUMA nodes"
    path = shutil.which("numactl")
    if path is not None:
        return good("numactl", f"{path}, {memory}")
    if nodes == 1:
        return good("numactl", f"none, and {memory}: nothing to bind")
    return good("numactl", f"none, {memory}", "apt-get install numactl, to keep a worker and its memory on one node")


def _ptrace() -> Check:
    """Check whether a debugger may attach to a process of the same user (Linux, admin-guide/LSM/Yama)."""
    try:
        scope = int(SCOPE.read_text())
    except FileNotFoundError:
        return good("ptrace_scope", "not restricted: this kernel has no Yama")
    if scope == 0:
        return good("ptrace_scope", "0: debuggers may attach")
    if scope >= NOBODY:
        hint = "kernel.yama.ptrace_scope=1 in /etc/sysctl.d and a reboot, for py-spy and gdb; `dadt stacks` works"
        return warn("ptrace_scope", f"{scope}: nobody may attach", hint)
    if int(status("self", "CapEff") or "0", 16) >> CAP_SYS_PTRACE & 1:
        return good("ptrace_scope", f"{scope}, and this user may attach all the same")
    hint = "sudo py-spy, sysctl -w kernel.yama.ptrace_scope=0, or docker run --cap-add SYS_PTRACE; `dadt stacks` works"
    return warn("ptrace_scope", f"{scope}: py-spy and gdb may not attach to workers", hint)
