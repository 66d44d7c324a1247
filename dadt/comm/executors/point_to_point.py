"""Messages between two ranks through the C++ core, and a stand-in that moves nothing, for simulated ranks."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from time import monotonic

import torch

from dadt import _core
from dadt.comm.keepalive import KeepAlive
from dadt.errors import CommError, PeerLost

SEND_SECONDS = 5.0
"""Seconds that a mailbox, when it is closed, waits for messages whose receivers have not asked for them yet."""


class CoreMessages:
    """Messages between two ranks, through a mailbox of the C++ core."""

    def __init__(self, mailbox: _core.Mailbox | _core.TcpMailbox) -> None:
        self._mailbox = mailbox
        # The function always reports no failure, because the C++ core no longer accesses the memory of a failed
        # message, so the memory can be released.
        self._kept = KeepAlive(lambda: False)
        self._closed = self._aborted = False
        self._lock = threading.Lock()
        self._sends: weakref.WeakSet[_core.P2PWork] = weakref.WeakSet()

    def send(self, tensor: torch.Tensor, peer: int, tag: int = 0) -> _core.P2PWork:
        with self._open():
            transit = self._keep(self._mailbox.send(*_memory(tensor), peer, tag), tensor)
        with self._lock:
            self._sends.add(transit)
        return transit

    def receive(self, tensor: torch.Tensor, peer: int | None, tag: int = 0) -> _core.P2PWork:
        with self._open():
            return self._keep(self._mailbox.receive(*_memory(tensor), -1 if peer is None else peer, tag), tensor)

    def abort(self) -> None:
        """Fail all messages in flight, on this rank and on its peers."""
        self._aborted = True
        self._mailbox.abort("a rank is lost", lost=True)

    def close(self) -> bool:
        """Wait up to SEND_SECONDS for messages that this rank is sending, fail all unfinished ones, and close the
        mailbox. Returns True, because the memory of all messages is no longer in use."""
        deadline = monotonic() + SEND_SECONDS
        with self._lock:
            sends = [] if self._aborted else list(self._sends)
        for each in sends:
            with suppress(CommError):
                each.wait(max(0.0, deadline - monotonic()))
        self._closed = True
        self._mailbox.close()
        return True

    @contextmanager
    def _open(self) -> Iterator[None]:
        """Context manager that raises PeerLost if another thread has closed the mailbox in the meantime."""
        try:
            yield
        except RuntimeError as error:
            if self._closed:
                raise PeerLost(f"no message is sent or received any more: {error}") from error
            raise

    def _keep(self, transit: _core.P2PWork, tensor: torch.Tensor) -> _core.P2PWork:
        self._kept.add(transit, tensor)
        return transit


class NoPointToPoint:
    """A PointToPoint that moves nothing, for simulated ranks: a send is done at once, and a receive leaves the tensor
    unchanged."""

    def send(self, tensor: torch.Tensor, peer: int, tag: int = 0) -> Unsent:
        return Unsent(peer)

    def receive(self, tensor: torch.Tensor, peer: int | None, tag: int = 0) -> Unsent:
        return Unsent(peer or 0)

    def abort(self) -> None:
        """Do nothing, because no message is ever in flight."""


class Unsent:
    """A message that is not moved and counts as done."""

    done = True

    def __init__(self, source: int) -> None:
        self.source = source

    def wait(self, timeout: float) -> None:
        """Return at once, because nothing is moved."""


def _memory(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the address of the tensor's memory and its length in bytes."""
    return tensor.data_ptr(), tensor.nbytes
