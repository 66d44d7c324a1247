"""`--compression momentum:N`: ranks first send gradients in int4, and after this beginning the optimizer's next
momentum in N bits, in place of gradients (1-bit Adam, arXiv:2102.02888; 0/1 Adam, arXiv:2202.06009).

Error feedback suits Adam only where compressed values enter the step linearly: in the momentum m, not in the second
moment v, whose square of a compressed gradient would be noise. So with x(i) = a m + b g(i) on rank i

    m = Q(mean over ranks of Q(x(i) + error(i)) + error)
    v = f * mean over ranks of v(i), every REFRESH steps; v(i) is the second moment of the rank's own gradients
    v = max(v, m^2), so that no weight moves further than the learning rate

where f, a number for each tensor, is the ratio of the second moment of averaged gradients to that of own ones. It is
measured when the beginning ends, and at each refresh from samples of the ranks' gradients. For the step of the script's
optimizer, the gradient is set to (m - a m(t-1)) / b, and v to the value that becomes the v above after the optimizer's
own update. Ranks that step alone (`local`) use a common v in the same way, with f as it was when they began to.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from time import perf_counter
from typing import Any

import torch

from dadt.comm.bucket import Bucket, Staged
from dadt.comm.compression import OF_MOMENTUM
from dadt.errors import CommError, CommTimeout, Mismatch
from dadt.train.confine import confine, confine_largest
from dadt.train.idle_momentum import IdleMomentum, Pairs, Sent
from dadt.train.moment import Moment, beside, forget_others, is_sgd, lacks_momentum, moments_of, state_of, unsuited
from dadt.train.own_moments import REFRESH, OwnMoments
from dadt.train.restored import numbers_of
from dadt.train.settling import Sender, Settling
from dadt.train.shown_gradients import ShownGradients
from dadt.train.stand_in import name_of
from dadt.train.trained import sparse_tables
from dadt.train.unseen import UnseenWeights

_LOOK = 10
"""Number of steps between two decisions whether the beginning, in which gradients are sent, ends."""


class Momentum:
    """State by which one optimizer's momentum is exchanged, and ranks that step alone share Adam's second moment. Does
    nothing if neither is asked for, or if the optimizer's step is not known."""

    def __init__(self, attachment: Sender) -> None:
        self._attachment = attachment
        self._ranks = attachment.ranks
        self._asked = self._shares = self._considered = False
        """Whether momentum will be sent in place of gradients, once the beginning is over; whether ranks use a common v
        while each steps without averaging gradients; whether either may still be chosen."""
        self.begun = False
        """Whether the beginning, in which gradients are sent, is over."""
        self.shown = ShownGradients(attachment)
        """Scales the averages that the script sees before the optimizer's step."""
        self._own = OwnMoments(attachment)
        self._settling = Settling(attachment)
        self.unseen, self.idle = UnseenWeights(), IdleMomentum()
        self._on_way: dict[torch.Tensor, torch.Tensor] = {}
        """This rank's part of the momentum in the exchange under way, if averages arrive late."""
        self.ask(attachment.compression, alone=attachment.algorithm.shares)

    @property
    def unsuited(self) -> str:
        """The reason why this optimizer's momentum cannot be sent; empty if it can."""
        return self.unshared or lacks_momentum(self._attachment.optimizer)

    @property
    def unshared(self) -> str:
        """The reason why ranks that step alone cannot share the optimizer's v; empty if they can, or it has none."""
        a = self._attachment
        sparse = "its embeddings have sparse gradients" * bool(sparse_tables(a.modules, a.parameters))
        return unsuited(a.optimizer) or sparse or ("" if is_sgd(a.optimizer) else lacks_momentum(a.optimizer))

    def ask(self, compression: str, *, alone: bool) -> None:
        """Exchange momentum if this compression sends it, and share v if ranks step alone. All ranks call this in the
        same step."""
        optimizer, name = self._attachment.optimizer, self._attachment.name
        self._asked = compression in OF_MOMENTUM and not self._ranks.alone
        self._shares = alone and not is_sgd(optimizer) and not self._ranks.alone
        self._considered = False
        if self._asked and (why := self.unsuited):
            what = f"--compression {compression}{name}: gradients are sent in 4 bits, as with int4"
            if not isinstance(optimizer, torch.optim.LBFGS):  # nothing of it is compressed, as its closures say
                self._ranks.say(f"{what}, since {why}")
            self._asked = False
        if self._shares and (why := self.unshared):
            what = f"local{name}: what {name_of(optimizer)} computes from gradients"
            self._ranks.say(f"{what} stays each rank's own, since {why}")
            self._shares = False
        if not (self._asked or self._shares):
            self._own.clear()
            self.begun = False
        if not self._asked:
            self.unseen, self.idle = UnseenWeights(), IdleMomentum()

    def consider(self) -> None:
        """Compute second moments of the rank's own gradients already now, since `ask` may need them later."""
        self._considered = not (self._ranks.alone or self.unshared)

    @property
    def _active(self) -> bool:
        return self._asked and not self._attachment.has_closure and self._attachment.algorithm.averages

    @property
    def _watches(self) -> bool:
        """Whether this rank has to compute second moments of its own gradients."""
        apart = self._shares or self._considered
        return self._active or (apart and not self._attachment.has_closure)

    def shares(self, parameter: torch.Tensor) -> bool:
        """Whether all ranks use a common v (Adam's second moment) of this parameter, though each steps by itself."""
        return self._shares and self._watches and parameter in self._own.factors

    @property
    def sends(self) -> bool:
        """Whether exchanges send momentum in place of gradients."""
        return self.begun and self._active

    @property
    def begins(self) -> bool:
        """Whether gradients are sent for some steps more, and momentum after these."""
        return self._active and not self.begun

    def ratio(
        self,
        pairs: Pairs,
        square: float,
        ratio: torch.Tensor | float | None,
        scale: torch.Tensor | None,
    ) -> torch.Tensor | float | None:
        """Return the factor by which averaged gradients are multiplied before the script sees them. ratio: factor from
        the loss scale at which they were sent to the current one. The other parameters are those of
        `ShownGradients.ratio`."""
        more = self.shown.ratio(pairs, square, scale) if self._watches else None
        return ratio if more is None else more if ratio is None else more * beside(ratio, more)

    @property
    def _parameters(self) -> list[torch.Tensor]:
        return list(numbers_of(self._attachment.optimizer))

    def _state(self, parameter: torch.Tensor) -> dict[str, Any]:
        return state_of(self._attachment.optimizer, parameter)

    @property
    def _moments(self) -> dict[torch.Tensor, Moment]:
        return {p: moment for moment, parameters in moments_of(self._attachment.optimizer) for p in parameters}

    # Methods in the order in which a step calls them --------------------------------------------------------------

    @torch.no_grad()
    def see(self) -> None:
        """Add this rank's own gradients, which `.grad` contains, to its second moments. Called in each step."""
        if self._watches and self._attachment.algorithm.averages:
            if self._asked or self._considered:
                first = not self._attachment.optimizer.state
                self.unseen.see(list(self.unseen.masks) if self.begun else self._parameters, first=first)
            self.shown.measure(self._own.factors)
            self._own.add(self._attachment.scale, self.shown.clip, alone=False)

    @torch.no_grad()
    def stage(
        self,
        bucket: Bucket,
        gradients: Sequence[torch.Tensor | None],
        turn: int,
        scale: torch.Tensor | None,
        *,
        keeps: bool,
    ) -> Staged:
        """Return this rank's next momentum of the bucket's tensors, which is sent in place of gradients. keeps: whether
        the next exchange may begin before this one has ended."""
        late = self._attachment.algorithm.pending is not None
        clip = self.shown.clip
        if not late:
            self.idle.waited()
        moments = self._moments
        places = [torch.empty_like(t) for t in bucket.tensors] if bucket.staged else bucket.views[turn]
        for p, gradient, place in zip(bucket.tensors, gradients, places, strict=True):
            moment = moments[p]
            fresh = torch.zeros_like(place) if gradient is None else gradient * moment.new
            if scale is not None:
                fresh.div_(scale.to(fresh.device))
            before = self._state(p).get(moment.first)
            old = moment.old * moment.sign
            torch.add(fresh, before, alpha=old * moment.old if late else old, out=place) if before is not None else (
                place.copy_(fresh)
            )
            if late and p in self._on_way:
                # The momentum to which this is added will have got what is on the way, clipped and with weight decay.
                coming = self._on_way[p] if clip is None else self._on_way[p] * beside(clip, place)
                place.add_(coming, alpha=moment.old)
                if moment.decay:
                    place.add_(p, alpha=moment.old * moment.new * moment.sign * moment.decay)
            if keeps:
                # An infinite gradient makes all ranks skip a step, of which nothing must remain.
                self._on_way[p] = fresh.nan_to_num_(0.0, 0.0, 0.0)
            else:
                self._on_way.pop(p, None)
        return bucket.stage(places, turn) if bucket.staged else Staged(list(places), None)

    @torch.no_grad()
    def arrived(self, there: Pairs, idle: Pairs) -> Sent:
        """Note that an exchange has arrived. there: parameters with their mean momentum, if any rank had a gradient.
        idle: all others."""
        sent, moments = self.idle.arrived(there), self._moments if idle else {}
        for p, mean in idle:
            if p in moments:
                self.idle.owe(p, sent.excess(p, mean.clone(), moments[p], self._state(p).get(moments[p].first)))
        return sent

    @torch.no_grad()
    def to_gradients(self, pairs: Pairs, scale: torch.Tensor | None, sent: Sent) -> None:
        """Change the mean momentum of each parameter, in place, to the gradient that leads to it; to 0 for parameters
        that have left the optimizer meanwhile. sent: what `arrived` returned."""
        moments = self._moments
        for p, mean in pairs:
            if p not in moments:
                mean.zero_()
                continue
            moment = moments[p]
            sent.excess(p, mean, moment, self._state(p).get(moment.first))
            if p in sent.owed:
                mean.add_(sent.owed[p])
            mean.div_(moment.new)
            if scale is not None:
                mean.mul_(scale.to(mean.device))

    @torch.no_grad()
    def delivered(self, parameters: Sequence[torch.Tensor], averages: Pairs) -> None:
        """Set the averages of weights to 0 that have had no gradient. parameters: those of the averages' exchange."""
        if self.sends:
            self.idle.delivered(parameters, averages)
            for p, mean in averages:
                self.unseen.hold(p, mean)

    @torch.no_grad()
    def before_step(self) -> None:
        """Change the optimizer's v so that it is max(v, m^2) after the optimizer's own update, and Adamax's divisor in
        the same way. Called when the optimizer is about to step."""
        if not self._watches:
            return
        optimizer, averages = self._attachment.optimizer, self._attachment.algorithm.averages
        scale, found = (getattr(optimizer, name, None) for name in ("grad_scale", "found_inf"))
        if averages:
            known = self.shown.clip is not None
            self.shown.before_step()
            if self.shown.clip is not None and not known and not self._own.factors:
                self._own.clear()  # of gradients before clipping, which may be many times as large
        else:
            self._own.add(scale, None, alone=True)
        if averages and not self.sends:
            return
        for moment, parameters in moments_of(optimizer):
            divisor = "exp_inf" if moment.fades else "exp_avg_sq"
            there = [p for p in parameters if p.grad is not None and divisor in self._state(p)]
            there = [p for p in there if averages or self.shares(p)]
            for p in there if moment.fades else ():
                confine_largest(moment, p, self._state(p))
            if not moment.beta2 or not there:
                continue
            states = [self._state(p) for p in there]
            gradients = [p.grad if scale is None else p.grad / scale.to(p.device) for p in there if p.grad is not None]
            confine(moment, there, states, gradients, found)

    # The change from gradients to momentum, and refreshes of v ---------------------------------------------------

    def delivering(self) -> None:
        """Begin to send momentum if it is time, or refresh v. All ranks call this at the same point of each step, when
        its averages have arrived."""
        if self._asked and self._active:
            now = perf_counter()
            try:
                self._refresh() if self.begun else self._decide()
            except CommError as error:
                if not self._ranks.survives or isinstance(error, Mismatch | CommTimeout):
                    raise
                # This step can do without, and the next exchange meets the loss, after which all begin anew.
                self._ranks.gatherings.abandon(now)

    def _refresh(self) -> None:
        a = self._attachment
        # In the last of REFRESH steps, before a script that saves so often replaces what ranks know alone.
        if not self._own.factors or a.step % REFRESH == REFRESH - 1:
            if self._own.factors:
                self.unseen.share(self._ranks)
            else:
                self.unseen.begin(a.optimizer, self._ranks)
            self.share()

    def _decide(self) -> None:
        a, what = self._attachment, f"whether momentum is sent{self._attachment.name}"
        if a.step % _LOOK == 0 and all(self._ranks.collect(what, self._settling.decide())):
            self.begun = True
            a.schema.compress(a.compression, momentum=True)
            self._ranks.say(f"step {a.step}: from now on momentum is sent, in place of gradients{a.name}")

    def share(self) -> None:
        """Set v to a value that all ranks compute together from their own second moments. All ranks call this
        together."""
        if self.sends or (self._shares and self._watches):
            self._own.share(alone=self._shares)

    # Checkpoints, snapshots, and the loss of ranks ------------------------------------------------------------------

    @property
    def _keeps(self) -> bool:
        """Whether this optimizer has state of momentum that a resumed training needs."""
        return self._asked or self._shares or self._considered

    def forget(self) -> bool:
        """Forget momentum under way, and what ranks might know differently, so that it is measured again. Called when
        ranks were lost. Returns whether parameters have been idle, which changes the plan of buckets."""
        split = bool(self.idle.seldom)
        if not self._shares:
            self._own.factors, self._own.sums = {}, {}
        self._on_way, self.idle, self.unseen = {}, IdleMomentum(), UnseenWeights()
        return split

    def follow(self) -> None:
        """Forget parameters that have left the optimizer, and end what those that have come cannot bear. All ranks call
        this in the same step."""
        a = self._attachment
        if (self._asked and self.unsuited) or (self._shares and self.unshared):
            self.ask(a.compression, alone=self._shares)
        numbers = numbers_of(a.optimizer)
        self._own.follow(numbers)
        self.unseen.follow(numbers)
        self.idle.follow(numbers)
        forget_others(self._on_way, numbers)
        self._settling.follow(numbers)

    def state(self) -> dict[str, Any]:
        """Return the state that is equal on all ranks, for a checkpoint."""
        if not self._keeps:
            return {}
        numbers = numbers_of(self._attachment.optimizer)
        every = (self._own.factors, self._own.sums, *self._settling.sizes)
        factors, sums, *sizes = ({numbers[p]: value for p, value in each.items() if p in numbers} for each in every)
        return {
            "begun": self.begun,
            "early": self.shown.early,
            "clip": None if self.shown.clip is None else float(self.shown.clip),
            "factors": factors,
            "sums": sums,
            "sizes": sizes,
            "rates": list(self._settling.rates),
            "unseen": self.unseen.state(numbers),
            "idle": self.idle.state(numbers),
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Load the state that is equal on all ranks. Call `join` after it, or `restore` with a snapshot."""
        if not self._keeps or not state:
            return
        parameters = self._parameters
        self.begun, self.shown.early, self.shown.clip = state["begun"], state["early"], state["clip"]
        self._own.factors, self._own.sums, *self._settling.sizes = (
            {parameters[i]: value for i, value in each.items() if i < len(parameters)}
            for each in (state["factors"], state["sums"], *state["sizes"])
        )
        self._settling.rates = list(state["rates"])
        self.unseen.load_state(state.get("unseen", {}), parameters)
        self.idle.load_state(state.get("idle", ()), parameters)
        if self._asked:
            self._attachment.schema.compress(self._attachment.compression, momentum=self.sends)

    def join(self, averages: Mapping[torch.Tensor, torch.Tensor], scale: torch.Tensor | None) -> None:
        """Replace the state of this rank alone by values that are equal on all ranks. averages: the averages of the
        gradients in flight, without those that `delivered` sets to 0. scale: their loss scale."""
        if not self._keeps:
            return
        self._on_way = {}
        self.idle.join()
        for moment, group in moments_of(self._attachment.optimizer):
            for p in group:
                if p in averages:
                    mean = averages[p].to(p.device) * moment.new
                    self._on_way[p] = mean if scale is None else mean / scale.to(p.device)
        self._own.join()

    def observe(self) -> dict[str, Any]:
        """Return the state of this rank alone, for a snapshot. The tensors are no copies and stay in use."""
        every = self._parameters
        on_way = [self._on_way.get(p) for p in every]
        return {**self._own.observe(), "on_way": on_way, "unseen": self.unseen.observe(every)}

    def restore(self, own: Mapping[str, Any]) -> None:
        """Continue bit for bit from a snapshot. own: the value that `observe` returned."""
        self._own.restore(own)
        every = zip(self._parameters, own["on_way"], strict=True)
        self._on_way = {p: t.to(p.device) for p, t in every if t is not None}
        self.unseen.restore(own["unseen"], self._parameters)
