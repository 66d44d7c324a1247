"""AD-PSGD (arXiv:1710.06952): each rank trains at its own speed, and averages its weights with one other rank at a
time."""

from __future__ import annotations

import json
import weakref
import zlib
from collections import Counter
from collections.abc import Container
from functools import partial
from typing import cast

import torch
from torch import nn

from dadt.algorithms.gossip.finish import await_all
from dadt.algorithms.gossip.pairing import Pairing
from dadt.comm.compression import CODECS
from dadt.comm.shards import local
from dadt.errors import ConfigError
from dadt.train import lora
from dadt.train.algorithm import Algorithm
from dadt.train.attachment import Attachment
from dadt.train.ranks import Ranks

_Place = tuple[int, int]
"""A tensor's address, and its number of elements."""
_TAG = 100
"""The first tag of gossip's messages; each optimizer uses two tags, one for pairwise averages and one for the end of
the training."""
_IDLE_STEPS = 64
"""Number of steps of other optimizers after which an idle optimizer no longer averages the weights that it shares with
them; the other optimizers average these weights."""
_MOST_COPIES = 24
"""Largest number of copies of the weights that compression may need, one per neighbour. `--topology exponential`
reaches it at 4,096 ranks."""


class Gossip(Algorithm):
    """w(i) = optimizer(w(i), g(i)), where g(i) are the rank's own gradients. In the background pairs of ranks i, j move
    w(i) and w(j) half the way to each other; the live weights receive the change at the next step boundary.

    No rank waits for another before the end of the process.
    """

    identical = False
    together = False
    survives = True

    attachment: Attachment

    def __init__(self, attachment: Attachment) -> None:
        super().__init__(attachment)
        ranks, tag = attachment.ranks, _TAG + 2 * attachment.index
        if _has_group() and any(isinstance(m, nn.SyncBatchNorm) for m in attachment.modules):
            raise ConfigError(
                "--algorithm gossip: SyncBatchNorm waits for all ranks in every forward, and with gossip no rank waits"
                " for another: use BatchNorm, or another algorithm"
            )
        config = ranks.config
        check_copies(config.compression, config.topology, ranks.world.world_size)
        self._stepped = ranks.step
        place = ranks.mail, ranks.group, ranks.members
        self._pairing = Pairing(*place, config.topology, tag, config.timeout, config.compression)
        ranks.progress.senders.append(self._pairing)
        # When the optimizer is garbage collected, at a different time on each rank, this rank stops requesting
        # averages.
        weakref.finalize(attachment.optimizer, self._pairing.forsake).atexit = False
        pairing = self._pairing
        attachment.events.on_end.append(partial(final_average, ranks, weakref.ref(attachment), pairing, tag + 1))
        attachment.events.on_regroup.append(lambda: pairing.connect(ranks.mail, ranks.group, ranks.members))
        attachment.events.on_stop.append(self._pairing.stop)

    @property
    def exchanges(self) -> int:
        """The number of exchanges that have reached this rank's weights."""
        return sum(self._pairing.ages.values())

    def started(self) -> None:
        lora.tell(self.attachment)

    def before_step(self) -> None:
        ranks = self.attachment.ranks
        with ranks.deaths.naming():
            self._pairing.check(survives=ranks.survives)
        if ranks.survives and (error := self._pairing.failure) is not None:
            ranks.reconnection.begin(error)
        ranks.reconnection.pause.begin()

    def after_step(self) -> None:
        ranks = self.attachment.ranks
        self._stepped = ranks.step
        self._pairing.publish(self.weights())
        if ranks.survives and ranks.world.parts > 1:
            self.attachment.replicas.remember(self.attachment)
        ranks.reconnection.pause.end()

    def weights(self) -> list[torch.Tensor]:
        """Return the weights to average, without those that an earlier optimizer averages, because weights averaged
        twice would move twice as far as the neighbour's."""
        a = self.attachment
        taken: set[_Place] = set()
        for other in a.siblings:
            optimizer = other._optimizer() if other.index < a.index else None
            if optimizer is not None and cast("Gossip", other.algorithm)._is_busy:
                taken.update(weights(optimizer, other.listing.ever))
        return [p for place, p in weights(a.optimizer, a.listing.ever).items() if place not in taken]

    @property
    def _is_busy(self) -> bool:
        return self.attachment.ranks.step - self._stepped <= _IDLE_STEPS


def final_average(ranks: Ranks, attached: weakref.ref[Attachment], pairing: Pairing, tag: int) -> None:
    """Answer neighbours until all ranks have finished training, then compute the exact average of all ranks' weights,
    unless the optimizer was garbage collected. Called at the end of the process. Raises CommError."""
    pairing.retire()
    await_all(ranks, tag)
    pairing.close()
    attachment = attached()
    optimizer = attachment._optimizer() if attachment is not None else None
    shared: list[torch.Tensor] = []
    if attachment is not None and optimizer is not None:
        pairing.publish(cast("Gossip", attachment.algorithm).weights())
        shared = list(weights(optimizer, attachment.listing.ever).values())
    kinds = zlib.crc32(repr([(tuple(p.shape), p.dtype) for p in shared]).encode())
    whole = all(bool(p.isfinite().all()) for p in shared)
    mine = [optimizer is not None, kinds, whole, pairing.asked, pairing.in_vain, list(pairing.ages.items())]
    work = ranks.allgather("the end of a gossip", json.dumps(mine).encode())
    ranks.wait(work)
    told = [json.loads(lane) for lane in work.lanes]
    other = next((rank for rank, each in enumerate(told) if each[:2] != told[0][:2]), 0)
    if attachment is not None and optimizer is not None and not other:
        _average(ranks, attachment, [p.data for p in shared], [each[2] for each in told])
    elif other and all(lives for lives, *_ in told):
        ranks.say(
            f"the average at the end is left out: rank {ranks.members[other]}'s weights have other shapes"
            f" or dtypes than rank {ranks.members[0]}'s"
        )
    ages = Counter[int]()
    for *_, each in told:
        ages.update(dict(each))
    ranks.say(describe(sum(each[3] for each in told), sum(each[4] for each in told), ages))


def _average(ranks: Ranks, attachment: Attachment, tensors: list[torch.Tensor], whole: list[bool]) -> None:
    """Average the weights, and the buffers that training has changed on any rank. whole: for each rank, whether all
    of its weights are finite; the other ranks take the average of the ranks with finite weights."""
    attachment.changing_buffers.select()
    if not any(whole):
        return
    members = zip(ranks.members, whole, strict=True)
    lost = ", ".join(str(rank) for rank, finite in members if not finite)
    if lost and ranks.group.rank == 0:
        ranks.say(
            f"the average at the end is without the weights of rank {lost}, which hold infinity or NaN: the others'"
            " are taken over there",
            level="warning",
        )
    tensors = [*tensors, *(buffer.data for _, _, buffer in attachment.buffers())]
    host = [t.to("cpu").contiguous() for t in tensors]
    counts = whole[ranks.group.rank]
    if not counts:
        host = [torch.zeros_like(t) for t in host]
    ranks.average(host, "the average at the end", float(counts))
    for tensor, average in zip(tensors, host, strict=True):
        if tensor.data_ptr() != average.data_ptr():
            tensor.copy_(average)


def check_copies(compression: str, topology: str, world_size: int) -> None:
    """Check that compression would not need too many copies of the weights, one per neighbour. Raises ConfigError, on
    all ranks alike."""
    copies = (world_size + 1) // 2
    if compression in CODECS and topology == "complete" and copies > _MOST_COPIES:
        raise ConfigError(
            f"--compression {compression} with --topology complete keeps a copy of the weights for each of {copies}"
            f" neighbours, and {_MOST_COPIES} is the most: use --topology exponential, or --compression powersgd:4"
        )


def _has_group() -> bool:
    """Whether the script has created a process group of torch. Without one, SyncBatchNorm acts like BatchNorm."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def weights(optimizer: torch.optim.Optimizer, trained: Container[torch.Tensor]) -> dict[_Place, torch.Tensor]:
    """Return the tensors to average, each once; of a sharded tensor, this rank's part. Parameters that were trained and
    are frozen now are included, so that all ranks average the same tensors even if they freeze at different times.
    trained: the parameters that have been trained at any time."""
    return {
        (p.data_ptr(), p.numel()): p
        for group in optimizer.param_groups
        for p in (local(each) for each in group["params"] if each.requires_grad or each in trained)
        if (p.is_floating_point() or p.is_complex()) and p.layout == torch.strided and p.numel()
    }


def describe(exchanges: int, in_vain: int, ages: Counter[int]) -> str:
    """Return a one-line summary of all ranks' exchanges. ages: for each number of steps between the copy of the weights
    and the application of an exchange's result, how many exchanges had this age."""
    text = f"gossip: {exchanges:,} exchanges"
    if ages:
        text += f", {_steps(_median(ages))} old at the median ({_steps(max(ages))} at most)"
    return text + (f"; {in_vain:,} in vain, as the other rank had no such weights" if in_vain else "")


def _median(ages: Counter[int]) -> int:
    """Return the median age of the exchanges, which is the greater of the two middle ages if their number is even. Does
    not build a list of all ages."""
    left = ages.total() // 2
    for age in sorted(ages):
        left -= ages[age]
        if left < 0:
            break
    return age


def _steps(count: int) -> str:
    return f"{count} step" + "s" * (count != 1)
