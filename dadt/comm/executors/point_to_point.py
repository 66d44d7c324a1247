"""Messages between two ranks over the core's shared memory, and those of ranks that only seem to be there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from dadt.comm.keepalive import KeepAlive
from dadt.errors import PeerLost

if TYPE_CHECKING:
    import torch

    from dadt import _core


class SharedMemoryMessages:
    """A PointToPoint through the core's mailbox."""

    def __init__(self, mailbox: _core.Mailbox) -> None:
        self._mailbox = mailbox
        self._kept = KeepAlive(lambda: False)  # the core leaves the memory of what has failed alone
        self._closed = False

    def send(self, tensor: torch.Tensor, peer: int, tag: int = 0) -> _core.P2PWork:
        with self._open():
            return self._keep(self._mailbox.send(*_memory(tensor), peer, tag), tensor)

    def receive(self, tensor: torch.Tensor, peer: int | None, tag: int = 0) -> _core.P2PWork:
        with self._open():
            return self._keep(self._mailbox.receive(*_memory(tensor), -1 if peer is None else peer, tag), tensor)

    def abort(self) -> None:
        """Fail all messages under way, on this rank and on its peers."""
        self._mailbox.abort("a rank is lost", lost=True)

    def close(self) -> None:
        """Fail all that is not done."""
        self._closed = True
        self._mailbox.close()

    @contextmanager
    def _open(self) -> Iterator[None]:
        """Raises PeerLost where another thread has ended the connection meanwhile."""
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
    """A PointToPoint that moves nothing: a send is done at once, and a receive leaves the tensor as it is."""

    def send(self, tensor: torch.Tensor, peer: int, tag: int = 0) -> Unsent:
        return Unsent(peer)

    def receive(self, tensor: torch.Tensor, peer: int | None, tag: int = 0) -> Unsent:
        return Unsent(peer or 0)

    def abort(self) -> None:
        """Does nothing, as no message is ever under way."""


class Unsent:
    """A message that did not have to be moved."""

    done = True

    def __init__(self, source: int) -> None:
        self.source = source

    def wait(self, timeout: float) -> None:
        """Returns at once, as nothing is to be moved."""


def _memory(tensor: torch.Tensor) -> tuple[int, int]:
    """The address of the tensor's memory, and its length in bytes."""
    return tensor.data_ptr(), tensor.numel() * tensor.element_size()
