"""Local SGD, post-local SGD and DiLoCo, in which each rank takes many steps alone between two averages."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable, Mapping, Sequence
from time import perf_counter
from typing import Any

import torch

from dadt.algorithms.local.finish import LocalFinalAverage
from dadt.algorithms.local.moments import SHARED, RoundMoments
from dadt.algorithms.local.outer import Fragment, Outer, parts
from dadt.algorithms.local.pace import Pace
from dadt.algorithms.sync import Sync
from dadt.comm import plain
from dadt.train import lora
from dadt.train.attachment import Attachment
from dadt.train.param_groups import groups_crc
from dadt.train.restored import numbers_of


class Local(Sync):
    """Trains like `sync` for `warmup_steps` steps (post-local SGD, arXiv:1808.07217), then in rounds of H =
    `sync_every` steps, in which each rank trains alone.

    The anchor a (the weights that the ranks agree on) and the outer momentum m with velocity v are equal on all ranks.
    At the end of a round, rank i with weights w_i sends its progress p_i and continues from u_i: the next anchor, if
    all ranks had made this progress. After as many steps as the exchange takes, at most H/2, the rank receives (if need
    be waits for) the mean P of all p_i, moves the anchor by the outer optimizer (DiLoCo, arXiv:2311.08105), and adds
    its own steps since:

        p_i = w_i - a,     u_i = a + lr (p_i + m (m r v + p_i)),   w_i <- u_i
        v <- m r v + P,    a <- a + lr (P + m v),                  w_i <- a + (w_i - u_i)

    where r is the ratio of the round's learning rates to those of the round before (SlowMo, arXiv:1910.00643). The mean
    of all u_i is the new anchor: the ranks' mean follows DiLoCo without delay. With lr = 1, m = 0 this is Local SGD,
    merged as w += average - copy. With `fragments` F, part f of the parameters ends its rounds f H / F steps later
    (Streaming DiLoCo, arXiv:2501.18512).
    """

    identical = False
    shares = True

    def __init__(self, attachment: Attachment) -> None:
        super().__init__(attachment, watches=True)
        config = attachment.ranks.config
        self._pace = Pace(attachment)
        self._outer = Outer(config.outer_lr, config.outer_momentum)
        self._fragments: dict[int, Fragment] = {}
        """Fragments (groups of parameters exchanged together) by number; empty before the first round."""
        self._divisions = 0
        """How often the parameters were divided into fragments."""
        self._passing: dict[str, Fragment] = {}
        """Tensors that are averaged only once, by name. Stored until every rank must have received the average."""
        self._passed = 0
        self._steps = 0
        """Number of steps that this rank has taken alone, without averaging gradients."""
        self._trained: tuple[Any, ...] = ()
        self._moments = RoundMoments(attachment)
        self._end = LocalFinalAverage(attachment)
        self._compression = config.compression
        """Name of the compression of the progress that a rank sends at the end of a round; "none" for no compression.
        """

    @property
    def averages(self) -> bool:
        return not self._fragments

    def starting(self) -> None:
        """Average the weights that other optimizers train, or have trained, on each rank alone. Otherwise the start of
        this optimizer, which copies rank 0's weights, would lose other ranks' steps."""
        a = self.attachment
        others = [end for end in a.events.on_end if isinstance(end, LocalFinalAverage) and end.rounds]
        if not others:
            return
        # Keep references, because an optimizer that the script has dropped may be garbage collected at different times
        # on different ranks.
        mine = {other.index: (other, other._optimizer()) for other in a.siblings if other.alive}
        theirs = a.ranks.collect(f"local, optimizers before{a.name}", list(mine))
        for index in sorted(set(mine).intersection(*theirs)):
            algorithm = mine[index][0].algorithm
            if isinstance(algorithm, Local) and algorithm is not self and algorithm._steps:
                algorithm.settle()
        trained = {id(p) for end in others for ref in end.trained if (p := ref()) is not None}
        modules = a.optimizers.root_modules(a.optimizer)
        every = dict.fromkeys([*a.parameters, *(p for module in modules for p in module.parameters())])
        known = [p for p in every if id(p) in trained]
        if known:
            self._average("weights of a new optimizer", known)

    def started(self) -> None:
        if self.attachment.step >= self.attachment.warmup_steps and not self._fragments:
            self.begin()

    def gradient_ready(self, parameter: torch.Tensor) -> None:
        if self.averages:
            super().gradient_ready(parameter)

    def before_step(self) -> None:
        if self.averages:
            super().before_step()

    def after_step(self) -> None:
        a = self.attachment
        if self.averages:
            super().after_step()
            if a.step + 1 >= a.warmup_steps:
                self.begin()
            return
        self._moments.stepped()
        self._end.rounds = True
        if a.trained != self._trained:
            self._follow()
        self._steps += 1
        rate = sum(float(group.get("lr", 0.0)) for group in a.optimizer.param_groups) if self._outer.momentum else 0.0
        for fragment in self._fragments.values():
            fragment.since += 1
            fragment.rate += rate
            if fragment.under_way and fragment.since >= fragment.overlap:
                self._merge(fragment)
            if fragment.since >= fragment.every:
                fragment.since = 0
                self._send(fragment)
                if fragment.under_way and fragment.overlap == 0:
                    self._merge(fragment)

    def loaded(self) -> None:
        for fragment in self._fragments.values():
            fragment.replaced = True

    def settle(self) -> None:
        """Set weights and buffers to their means over all ranks immediately. All ranks call this method."""
        a = self.attachment
        self._settle(self._fragments.values())
        a.changing_buffers.select()
        if a.ranks.config.buffers:
            self._average("buffers", [b for _, _, b in a.optimizers.buffers.of(a.modules)])

    # Rounds of local steps and their exchange ------------------------------------------------------------------

    def choose(self, compression: str, every: int, *, at_once: bool) -> None:
        """Set the compression of the exchanged progress, and the length of a round, before the first one begins. every:
        0 for the value of --sync-every. at_once: whether each mean is waited for, if the user has not set for how many
        steps it is not."""
        self._compression = compression
        self._pace.choose(every, at_once=at_once)

    def begin(self) -> None:
        """Begin rounds in which each rank trains alone, from weights that are equal on all ranks."""
        a = self.attachment
        self._moments.share()
        self._pace.foresee()
        self._divide()
        for module in a.modules:
            # Each rank's BatchNorm statistics will belong to its own weights, so averages of the last synchronous step,
            # which would grow stale, are dropped.
            a.optimizers.buffers.forget(module)
        if not a.ranks.config.broadcast:
            self._settle(self._fragments.values())
        a.ranks.say(self._sentence())
        lora.tell(a)

    def _divide(self) -> None:
        a = self.attachment
        a.compress("none")  # gradients are not sent any more, so the memory of their compression is freed
        self._trained = a.trained
        if not self._divisions:
            a.events.on_end.append(self._end)
            a.ranks.parted = True
        self._divisions += 1
        self._end.trained = [weakref.ref(p) for p in a.parameters]
        divided = parts(a.parameters, a.ranks.config.fragments)
        self._fragments = {
            number: self._fragment(f"fragment {number + 1}" if len(divided) > 1 else "progress", part, self._outer)
            for number, part in enumerate(divided)
            if part
        }
        for number, fragment in self._fragments.items():
            self._moments.begin(fragment)
            self._pace.begin(fragment, number, self._steps)

    def _fragment(self, what: str, tensors: list[torch.Tensor], outer: Outer) -> Fragment:
        ranks = self.attachment.ranks
        name = f"local, {what}{self.attachment.name}"
        size = int(ranks.config.bucket_mb * 2**20)
        return Fragment(name, tensors, outer, ranks, ranks.regroup, size, self._compression)

    def _average(self, what: str, tensors: list[torch.Tensor]) -> None:
        """Set these tensors to their means over all ranks immediately. All ranks call this method."""
        fragment = self._fragment(what, tensors, Outer(1.0, 0.0))
        # Keep the previous average as well, because a rank that has finished it may be one exchange ahead of a rank
        # that still needs it.
        self._passing = {**dict(list(self._passing.items())[-1:]), f"{what} {self._passed}": fragment}
        self._passed += 1
        self._settle([fragment])

    def _follow(self) -> None:
        """Begin a new round on all ranks after the script has added, frozen or moved parameters. Scripts do so in the
        same step on all ranks."""
        velocities = {key: row.velocity for f in self._fragments.values() for key, row in f.rows.items()}
        rates = {number: fragment.rate_before for number, fragment in self._fragments.items()}
        self._settle(self._fragments.values())
        new = [p for p in self.attachment.parameters if id(p) not in velocities]
        self._average("new parameters", new)
        self._pace.foresee()  # a rank that has joined meanwhile does not know what the others foresaw
        self._divide()
        for number, fragment in self._fragments.items():
            fragment.rate_before = rates.get(number, 0.0)
            for key, row in fragment.rows.items():
                before = velocities.get(key)
                if row.velocity is not None and before is not None:
                    row.velocity.copy_(before)

    def _send(self, fragment: Fragment) -> None:
        a = self.attachment
        if fragment.replaced:
            self._settle([fragment])
            return
        self._moments.restart(fragment)
        fragment.send(groups_crc(a.optimizer))
        a.ranks.keep(fragment)

    def _merge(self, fragment: Fragment) -> None:
        a = self.attachment
        begun = perf_counter()
        fragment.receive()
        a.measure.exchanged(fragment.seconds, perf_counter() - begun)
        self._pace.exchanged(fragment)
        if fragment.replaced:
            return  # the script has replaced the weights that this exchange belongs to
        self._moments.tell(fragment)
        fragment.merge()
        self._moments.share()
        if fragment.differ:
            a.agreement.take_groups()

    def _settle(self, fragments: Iterable[Fragment]) -> None:
        a = self.attachment
        begun = perf_counter()
        for fragment in fragments:
            a.ranks.keep(fragment)
            fragment.settle(groups_crc(a.optimizer))
            self._moments.begin(fragment)
        a.measure.exchanged(0.0, perf_counter() - begun)

    def _sentence(self) -> str:
        measure = self.attachment.measure
        pace, every = self._pace, self._pace.every
        size = sum(fragment.size for fragment in self._fragments.values())
        parts = f" in {len(self._fragments)} fragments" if len(self._fragments) > 1 else ""
        text = (
            f"local{self.attachment.name}: from here on each rank takes steps of its own; every {every} steps"
            f" {_megabytes(size)} are averaged{parts}, {_megabytes(size / every)} per step"
        )
        if pace.measured:
            text = (
                f"local{self.attachment.name}: from here on each rank takes steps of its own; {_megabytes(size)} are"
                f" averaged{parts} as often as steps hide that"
            )
        if self._compression != "none":
            text += " before compression"
        if measure.exchange and measure.compute:
            steps = measure.exchange / measure.compute
            text += f"; an average takes as long as {steps:.2g} steps"
            # With several fragments, exchanges of other fragments fill the half of a round in which one fragment
            # exchanges nothing.
            hidden = every if len(self._fragments) > 1 else pace.longest
            if steps > hidden > 0 and not pace.measured:
                text += f", of which {hidden} are hidden: --sync-every {math.ceil(every * steps / hidden)} hides all"
        return text

    # Recovery after ranks were lost ----------------------------------------------------------------------------

    @property
    def rests(self) -> bool:
        return not any(fragment.under_way for fragment in self._fragments.values())

    def regroup(self, behind: bool, keep: bool) -> None:
        if self.averages:
            super().regroup(behind, keep)

    def common(self) -> Mapping[int, torch.Tensor]:
        return {key: row.anchor for fragment in self._fragments.values() for key, row in fragment.rows.items()}

    def rounds(self) -> dict[str, list[int]]:
        known = {key: [f.over, f.absorbed, f.differ, f.overlap, f.every] for key, f in self._known.items()}
        return known | self._moments.rounds()

    def follow(self, rounds: Sequence[Mapping[str, Sequence[int]]]) -> Sequence[Fragment]:
        """Bring all remaining ranks to the same number of finished exchanges, after ranks were lost. No rank is more
        than one exchange of a fragment ahead, as each exchange needs all ranks."""
        ranks, known = self.attachment.ranks, self._known
        for fragment in known.values():
            fragment.forget_residuals()
        self._moments.follow(rounds)
        for key in sorted({key for each in rounds for key in each} - {SHARED}):
            over = [each[key][0] if key in each else None for each in rounds]
            most = max(count for count in over if count is not None)
            if all(count in (None, most) for count in over):
                continue
            root, mine = over.index(most), known.get(key)
            given = plain.encode(mine.state(), key) if mine is not None and root == ranks.group.rank else b""
            state = ranks.tell(f"{key}{self.attachment.name}", given)[root]
            if mine is not None and mine.over < most:
                _, absorbed, differ, overlap, every = rounds[root][key]
                paces = {"overlap": overlap, "every": every}
                mine.take(plain.decode(state), absorbed=bool(absorbed), differ=bool(differ), **paces)
        return [fragment for fragment in known.values() if fragment.under_way]

    @property
    def _known(self) -> dict[str, Fragment]:
        """Fragments of the parameters, and tensors that are averaged once, by a name that is the same on all ranks."""
        return {f"{self._divisions}.{number}": f for number, f in self._fragments.items()} | self._passing

    # State in checkpoints --------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint. For an exchange still under way, whose mean is unknown, this rank's own
        progress stands for the mean."""
        if not self._fragments:
            return {}
        numbers = numbers_of(self.attachment.optimizer)
        resumed = [
            (number, a, v)
            for f in self._fragments.values()
            for row, a, v in f.resumed()
            # The script may have removed the parameter from the optimizer since the last step.
            if (number := numbers.get(row.parameter)) is not None
        ]
        return {
            "steps": self._steps,
            "moments": self._moments.state(),
            "overlap": {number: fragment.overlap for number, fragment in self._fragments.items()},
            "rates": {number: [f.rate, f.rate_before] for number, f in self._fragments.items()},
            "anchors": {number: a.to("cpu", copy=True) for number, a, _ in resumed},
            "velocities": {number: v.to("cpu", copy=True) for number, _, v in resumed if v is not None},
        }

    def by_parameter(self, state: dict[str, Any]) -> dict[int, torch.Tensor]:
        anchors: dict[int, torch.Tensor] = state.get("anchors", {})
        return anchors

    def load_state(self, state: dict[str, Any]) -> None:
        if "steps" not in state:  # the state is empty, or `auto` saved it before it had made its choice
            return
        # A state that is loaded in the middle of training may differ between ranks, so all ranks take rank 0's.
        if self._steps:
            ranks = self.attachment.ranks
            name = f"local, the state that was loaded{self.attachment.name}"
            mine, state = state, {}
            while not state:  # if the group's first rank is lost meanwhile, the new first rank's state is collected
                state = ranks.collect(name, mine if ranks.group.rank == 0 else {})[0]
        self._steps = state["steps"]
        self._divide()
        self._moments.load_state(state.get("moments", {}))
        for number, fragment in self._fragments.items():
            self._pace.resume(fragment, state.get("overlap", {}).get(number))
            fragment.rate, fragment.rate_before = state.get("rates", {}).get(number, (0.0, 0.0))
        numbers = numbers_of(self.attachment.optimizer)
        for row in (row for fragment in self._fragments.values() for row in fragment.rows.values()):
            # A parameter that was frozen at the checkpoint has no anchor in the state; its round begins at its current
            # weights.
            number = numbers[row.parameter]
            if (anchor := state["anchors"].get(number)) is not None:
                row.anchor.copy_(anchor)
            if row.velocity is not None and (velocity := state["velocities"].get(number)) is not None:
                row.velocity.copy_(velocity)

    def observe(self) -> dict[str, Any]:
        own = {number: fragment.observe() for number, fragment in self._fragments.items()}
        return {"fragments": own, "idle": self._moments.observe()} if own else super().observe()

    def restore(self, own: dict[str, Any]) -> None:
        if "fragments" not in own:
            super().restore(own)
        for number, fragment in own.get("fragments", {}).items():
            self._fragments[number].restore(fragment)
        self._moments.restore(own.get("idle", {}))


def _megabytes(size: float) -> str:
    return f"{size / 1e6:.3g} MB" if size >= 1e3 else f"{size:.0f} bytes"
