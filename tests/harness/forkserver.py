"""A process that has imported torch and DADT, and forks a rank for each `forked_rank` that asks.

To start Python and import torch takes longer than most jobs of tests. DADT hooks in as ever, at the end of `import
torch`, which finds the torch that is there. Tests of how it gets into a script start Python themselves.
"""

from __future__ import annotations

import atexit
import functools
import gc
import importlib.abc
import importlib.machinery
import json
import os
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

FORKED_RANK = Path(__file__).with_name("forked_rank")


@functools.cache
def command() -> tuple[str, ...]:
    """What stands in the place of `python` before a script's name."""
    folder = tempfile.TemporaryDirectory(prefix="dadt-forkserver-")
    address = os.path.join(folder.name, "socket")
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, __file__, address], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env
    )
    assert process.stdin is not None and process.stdout is not None
    assert process.stdout.readline() == b"listening\n"

    def end() -> None:
        from harness.patience import PATIENCE  # this file is also run by its path, without this package

        process.stdin.close()
        process.wait(PATIENCE)
        folder.cleanup()

    atexit.register(end)
    return str(FORKED_RANK), address


class Rank:
    """A forked process, and the connection of the forked_rank whose place in the job it has."""

    def __init__(self, pid: int, connection: socket.socket) -> None:
        self.pid = pid
        self.connection = connection
        self.end = os.pidfd_open(pid)

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)

    def bury(self) -> None:
        code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        try:
            self.connection.send(str(code).encode())
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
        hook()


def serve(address: str) -> dict[str, Any] | None:
    """Returns the order in each forked process, and None where the process of the tests has ended."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(address)
    listener.listen(128)
    ready = selectors.DefaultSelector()
    ready.register(listener, selectors.EVENT_READ)
    ready.register(sys.stdin, selectors.EVENT_READ)
    print("listening", flush=True)
    ranks: list[Rank] = []
    while True:
        for key, _ in ready.select():
            if key.fileobj is sys.stdin:
                for rank in ranks:
                    rank.kill()
                return None
            if key.fileobj is listener:
                connection = listener.accept()[0]
                try:
                    size, files, _, _ = socket.recv_fds(connection, 8, 3)
                    order = connection.recv(int.from_bytes(size, "big"), socket.MSG_WAITALL)
                except ConnectionError:  # it was killed before it had said what it is for
                    connection.close()
                    continue
                if (pid := os.fork()) == 0:
                    for number, file in enumerate(files):
                        os.dup2(file, number)
                        os.close(file)
                    for each in (connection, listener, ready, *ranks):
                        each.close()
                    return json.loads(order)
                for file in files:
                    os.close(file)
                ranks.append(Rank(pid, connection))
                ready.register(ranks[-1].end, selectors.EVENT_READ, ranks[-1])
                ready.register(connection, selectors.EVENT_READ, ranks[-1])
            elif key.data not in ranks:
                pass  # buried since this was seen
            elif key.fileobj is key.data.connection:  # the job has ended it
                ready.unregister(key.fileobj)
                key.data.kill()
            else:
                ready.unregister(key.fileobj)
                if key.data.connection in ready.get_map():
                    ready.unregister(key.data.connection)
                key.data.bury()
                ranks.remove(key.data)


def main() -> None:
    import torch._dynamo  # what the first optimizer imports
    import torch.distributed.optim  # noqa: F401  # and DDP

    import dadt.api  # noqa: F401
    from dadt.inject import worker  # noqa: F401

    gc.freeze()  # or every rank would go through all of that at its end, which takes a second
    if (order := serve(sys.argv[1])) is None:
        return
    os.setsid()
    os.chdir(order["cwd"])
    os.environ.clear()
    os.environ.update(order["env"])
    sys.argv = order["argv"]
    Import()
    sys.path[0] = str(Path(sys.argv[0]).parent)
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
