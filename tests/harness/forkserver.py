"""Two processes fork others, for each `forked` that asks: one has imported torch and DADT and forks ranks, the other
has imported the launcher without torch, and forks launchers and agents.

To start Python and import torch takes longer than most jobs of tests, and so does taking apart what was imported when a
process ends. DADT hooks in as ever, at the end of `import torch`, which finds the torch that is there. Tests of how it
gets into a script start Python themselves, as do those of what Python reads only at its start (PYTHONHASHSEED).
"""

from __future__ import annotations

import atexit
import ctypes
import fcntl
import functools
import gc
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import io
import marshal
import os
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import types
import warnings
import weakref
from collections.abc import Collection
from pathlib import Path
from typing import Any

FORKED = Path(__file__).with_name("forked")
RANKS, JOBS = "ranks", "jobs"
"""What the two processes fork, and the names of their sockets: scripts; launchers and agents."""
IMPORTED = {
    RANKS: (
        "torch._dynamo",
        "torch.distributed.checkpoint.state_dict",
        "torch.distributed.fsdp",
        "torch.distributed.optim",
        "torch.distributed.run",
        "torch.distributed.tensor.parallel",
        "torch.profiler._cupti_monitor",
        "torch.utils.serialization.config",
        "dadt.api",
        "dadt.algorithms.auto.auto",
        "dadt.algorithms.gossip",
        "dadt.algorithms.local",
        "dadt.algorithms.pipe.pipe",
        "dadt.algorithms.sync",
        "dadt.comm.executors.core",
        "dadt.comm.executors.hierarchical",
        "dadt.comm.executors.tcp",
        "dadt.inject.worker",
        "cryptography.hazmat.primitives.ciphers.aead",
        "encodings.idna",
    ),
    JOBS: (
        "dadt_cli.run.command",
        "dadt.launch.agent.__main__",
        "dadt.launch.agent.connect",
        "dadt.launch.agent.shim",
        "dadt.launch.launchers.manual",
        "encodings.idna",
        "dadt.launch.launchers.mpi",
        "dadt.launch.launchers.nearby",
        "dadt.launch.launchers.slurm",
        "dadt.launch.launchers.ssh",
        "dadt.launch.launchers.simulated",
    ),
}
"""By them, of what their processes import in the end."""
PLAIN_PYTHON = """#!/bin/sh
case "$*" in
*"-m dadt.launch.agent"*) exec {folder}/plain-agent "$@" ;;
*) exec {python} "$@" ;;
esac
"""
"""Of jobs in which only launchers, agents and shims are forked."""
NAMESPACES = ("pid", "net", "uts", "mnt")
ROOM = 64 << 10
"""Bytes for a process's variables where the kernel shows them, in /proc/PID/environ."""
FREE = 256
"""From this file descriptor on none is asked for."""
MOST_FILES = 253
"""As many can be sent at once."""
OF_SYS = frozenset(vars(sys))


def python() -> str:
    """A program that stands in the place of `python`, for `dadt run --python` or before a script's name."""
    return program("python")


def dadt(ranks: bool = True) -> str:
    """A program that stands in the place of `dadt`: its launcher and agents are forked, and if asked for its ranks."""
    return program("dadt" if ranks else "plain-dadt")


def program(name: str) -> str:
    """The one of this name, which stands in the place of `python`, `dadt` or `torchrun`."""
    return str(_programs() / name)


def _write(program: Path, text: str) -> None:
    program.write_text(text)
    program.chmod(0o755)


@functools.cache
def _programs() -> Path:
    folder = tempfile.TemporaryDirectory(prefix="dadt-forkserver-")
    programs = dict.fromkeys(("python", "dadt", "torchrun", "plain-dadt", "plain-agent"), FORKED.read_text())
    for name, text in programs.items():
        _write(Path(folder.name, name), f"#!{sys.executable} -IS\n{text}")
    _write(Path(folder.name, "plain-python"), PLAIN_PYTHON.format(folder=folder.name, python=sys.executable))
    env = {**os.environ, "OMP_NUM_THREADS": "1", "ROOM": ROOM * "x"}
    commands = [[sys.executable, __file__, str(Path(folder.name, name))] for name in (RANKS, JOBS)]
    processes = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env) for command in commands
    ]
    for process in processes:
        assert process.stdout is not None and process.stdout.readline() == b"listening\n"

    def end() -> None:
        from harness.patience import PATIENCE  # this file is also run by its path, without this package

        for process in processes:
            assert process.stdin is not None
            process.stdin.close()
            process.wait(PATIENCE)
        folder.cleanup()

    atexit.register(end)
    return Path(folder.name)


class Forked:
    """A forked process, and the connection of the `forked` whose place in the job it has."""

    def __init__(self, pid: int, connection: socket.socket) -> None:
        self.pid = pid
        self.connection = connection
        self.end = os.pidfd_open(pid)

    def kill(self) -> None:
        try:
            os.killpg(self.pid, signal.SIGKILL)
        except ProcessLookupError:  # it has not made its group yet
            os.kill(self.pid, signal.SIGKILL)

    def bury(self) -> None:
        code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        try:
            self.connection.send(b"E" + code.to_bytes(8, "big", signed=True))
        except ConnectionError:
            pass  # killed together with it
        self.close()

    def close(self) -> None:
        self.connection.close()
        os.close(self.end)


class Import(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Makes the script's `import torch` what it is in a process of its own."""

    def __init__(self) -> None:
        self.torch = sys.modules.pop("torch")
        self.spec = self.torch.__spec__
        sys.meta_path.insert(0, self)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        return importlib.machinery.ModuleSpec(name, self) if name == "torch" else None

    def create_module(self, spec: Any) -> Any:
        return self.torch

    def exec_module(self, module: Any) -> None:
        from dadt.inject import hook

        sys.meta_path.remove(self)
        module.__spec__ = self.spec
        if os.environ.get("DADT_INJECT") != "none":
            hook()


def enter(there: int, here: int) -> None:
    """Have this process, or with a namespace of pids those that it forks, go from here to another namespace."""
    same = os.path.samestat(os.fstat(there), os.fstat(here))
    if not same and ctypes.CDLL(None, use_errno=True).setns(there, 0) != 0:
        raise OSError(ctypes.get_errno(), "setns")


def fork_within(there: int, here: int) -> int:
    """Fork a process into another namespace of pids, as os.fork does."""
    enter(there, here)
    pid = -1
    try:
        pid = os.fork()
    finally:
        if pid != 0:
            enter(here, there)
    return pid


def serve(address: str) -> dict[str, Any] | None:
    """Returns the order in each forked process, and None where the process of the tests has ended."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(address)
    listener.listen(128)
    ready = selectors.DefaultSelector()
    ready.register(listener, selectors.EVENT_READ)
    ready.register(sys.stdin, selectors.EVENT_READ)
    own = [os.open(f"/proc/self/ns/{name}", os.O_RDONLY) for name in NAMESPACES]
    print("listening", flush=True)
    forked: list[Forked] = []
    while True:
        for key, _ in ready.select():
            if key.fileobj is sys.stdin:
                for each in forked:
                    each.kill()
                return None
            if key.fileobj is listener:
                connection = listener.accept()[0]
                files: list[int] = []
                try:
                    size, files, _, _ = socket.recv_fds(connection, 8, MOST_FILES)
                    order = connection.recv(int.from_bytes(size, "big"), socket.MSG_WAITALL)
                    if len(files) < 3 + len(NAMESPACES):
                        raise ConnectionError("it was killed before it had said what it is for")
                    pid = fork_within(files[0], own[0])
                except OSError as error:  # of this process, which ends by it; the server is there for the others
                    print(f"nothing is forked: {error}", file=sys.stderr)
                    for file in files:
                        os.close(file)
                    connection.close()
                    continue
                if pid == 0:
                    os.setsid()
                    for there, here in zip(files[1 : len(NAMESPACES)], own[1:], strict=True):
                        enter(there, here)
                    connection.send(b"P" + os.getpid().to_bytes(8, "big"))
                    given = [fcntl.fcntl(file, fcntl.F_DUPFD, FREE) for file in files[len(NAMESPACES) :]]
                    for file in [*files, *own]:
                        os.close(file)
                    for each in (connection, listener, ready, *forked):
                        each.close()
                    what = marshal.loads(order)
                    for number, file in zip(what["numbers"], given, strict=True):
                        os.dup2(file, number)
                        os.close(file)
                    return what
                for file in files:
                    os.close(file)
                forked.append(Forked(pid, connection))
                ready.register(forked[-1].end, selectors.EVENT_READ, forked[-1])
                ready.register(connection, selectors.EVENT_READ, forked[-1])
            elif key.data not in forked:
                pass  # buried since this was seen
            elif key.fileobj is key.data.connection:  # the job has ended it
                ready.unregister(key.fileobj)
                key.data.kill()
            else:
                ready.unregister(key.fileobj)
                if key.data.connection in ready.get_map():
                    ready.unregister(key.data.connection)
                key.data.bury()
                forked.remove(key.data)


def set_environment(env: dict[str, str]) -> None:
    """As if this process had begun with these variables, also to those who read /proc."""
    os.environ.clear()
    os.environ.update(env)
    begin, end = map(int, Path("/proc/self/stat").read_text().rpartition(")")[2].split()[47:49])
    block = b"".join(f"{name}={value}\0".encode() for name, value in env.items())
    assert len(block) <= end - begin, "more room is needed"
    ctypes.memset(begin, 0, end - begin)
    ctypes.memmove(begin, block, len(block))


def unbuffered() -> None:
    """Standard output and error as PYTHONUNBUFFERED has them."""
    for name, number in (("stdout", 1), ("stderr", 2)):
        stream = io.TextIOWrapper(io.FileIO(number, "w", closefd=False), write_through=True)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def stand_under(parent: int) -> None:
    """As if this process, but none that it forks, had been started by that one."""
    own, of_kernel = os.getpid(), os.getppid
    os.getppid = lambda: parent if os.getpid() == own else of_kernel()


def run(program: str, parent: int, python: str) -> Any:
    """Run what `forked` stands for: a script, a launcher, an agent or a shim. Returns the names that a script has made.
    parent: whose child `forked` is. python: by what a shim starts its agent."""
    if program.endswith(".py"):
        stand_under(parent)
        Import()
    sys.modules.pop("sitecustomize", None)  # that of the server's Python, as Debian's has one
    if importlib.util.find_spec("sitecustomize"):
        import sitecustomize  # noqa: F401
    if program == "dadt":
        import dadt_cli

        return dadt_cli.main()
    if program == "agent":
        from dadt.launch.agent import __main__ as agent

        return agent.main()
    if program == "shim":
        from dadt.launch.agent import shim

        sys.executable = python
        return shim.main()
    if program == "torchrun":
        from torch.distributed.run import main as torchrun

        return torchrun()
    sys.path.insert(0, str(Path(program).parent))
    return runpy.run_path(program, run_name="__main__")


def leave(names: dict[str, Any], code: int, known: Collection[str]) -> None:
    """End as Python does: take apart the script, the modules that it has imported and what is new in sys. But not the
    known modules, which were there before the fork: that takes longer than most scripts."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    names.clear()
    new = [module for name, module in sys.modules.items() if name not in known]
    for module in reversed(new):
        if isinstance(module, types.ModuleType):  # a script may put anything there
            vars(module).clear()
    gc.collect()
    for stream in filter(None, (sys.stdout, sys.stderr)):
        try:
            stream.flush()
        except OSError:
            sys.exit(code)  # Python finds it as well, and says so
    for name in vars(sys).keys() - OF_SYS:
        delattr(sys, name)
    os._exit(code)


def main() -> None:
    sys.path.pop(0)  # this folder
    for name in IMPORTED[Path(sys.argv[1]).name]:
        importlib.import_module(name)
    for each in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        each.atexit = False  # torch takes apart all its libraries of operators
    gc.freeze()
    if (order := serve(sys.argv[1])) is None:
        return
    os.chdir(order["cwd"])
    set_environment(order["env"])
    sys.argv = order["argv"]
    if os.environ.get("PYTHONUNBUFFERED") or order["unbuffered"]:
        unbuffered()
    sys.path[:0] = filter(None, os.environ.get("PYTHONPATH", "").split(":"))
    if warning := os.environ.get("PYTHONWARNINGS"):
        warnings.simplefilter(warning)  # type: ignore[arg-type]  # one action for all is what tests ask for
    known = frozenset(sys.modules)
    try:
        names, code = run(*(order[each] for each in ("program", "parent", "python"))) or {}, 0
    except SystemExit as end:
        if not isinstance(end.code, int | None):
            raise  # Python prints it
        names, code = {}, end.code or 0
    leave(names, code, known)


if __name__ == "__main__":
    main()
