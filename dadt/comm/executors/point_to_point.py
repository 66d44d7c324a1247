"""Messages between two ranks over the core's shared memory, and those of ranks that only seem to be there."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dadt.comm.keepalive import KeepAlive

if TYPE_CHECKING:
    import torch

    from dadt import _core


class SharedMemoryMessages:
    """A PointToPoint through the core's mailbox."""

    def __init__(self, mailbox: _core.Mailbox) -> None:
        self._mailbox = mailbox
        self._kept = KeepAlive(lambda: False)  # the core leaves the memory of what has failed alone

    def send(self, tensor: torch.Tensor, peer: int, tag: int = 0) -> _core.P2PWork:
        return self._keep(self._mailbox.send(*_memory(tensor), peer, tag), tensor)

    def receive(self, tensor: torch.Tensor, peer: int | None, tag: int = 0) -> _core.P2PWork:
        return self._keep(self._mailbox.receive(*_memory(tensor), -1 if peer is None else peer, tag), tensor)

    def abort(self) -> None:
        """Here and on the peers."""
        self._mailbox.abort("a rank is lost", lost=True)

    def close(self) -> None:
        """Fail all that is not done."""
        self._mailbox.close()

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
        """Nothing waits."""


class Unsent:
    """A message that did not have to be moved."""

    done = True

    def __init__(self, source: int) -> None:
        self.source = source

    def wait(self, timeout: float) -> None:
        """Nothing: it is done."""


def _memory(tensor: torch.Tensor) -> tuple[int, int]:
    """Address and bytes."""
    return tensor.data_ptr(), tensor.numel() * tensor.element_size()
