"""Weight prediction: the forward runs where the weights will be when its gradient arrives."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence, Set
from typing import Any

import torch

from dadt.train.later import Later
from dadt.train.prediction.memory import Memory, lends
from dadt.train.prediction.shown import PARTS, ShownParameter, copy, part, replaced, show, still_lent

Tensors = Mapping[torch.Tensor, torch.Tensor]
"""A tensor for each parameter."""


class Holds(enum.Enum):
    """Content of each parameter's extra buffer."""

    NOTHING = 0
    """Nothing that is of use."""
    TRUE_WEIGHTS = 1
    """The true weights, while the parameters show predicted ones."""
    SUSPENDED = 2
    """The true weights, which the parameters show as well for a while; the predicted ones wait beside."""
    BEFORE = 3
    """The weights before the step that is about to be taken."""
    KNOWN = 4
    """Values from which the next prediction follows."""
    OWN = 5
    """The rank's own gradients, which have just been sent."""
    AVERAGE = 6
    """The gradients that have just been applied, with none on the way."""
    AHEAD = 7
    """The predicted weights themselves, which have not been shown yet."""


_FIRST, _EVERY = 8, 64
"""Predictions after which it is looked whether the script has changed the weights meanwhile: the first _FIRST, and then
each _EVERY-th."""


class Prediction:
    """Runs forward and backward at predicted weights, and gives the script true weights else.

    One buffer per parameter holds in turn what predicts, the predicted weights and the true ones. Where it can, a
    parameter is given the other memory instead of its values, so that no weight is copied: it has its own memory
    whenever its weights are true. This goes past autograd's version counter: the bits the backward needs are the ones
    it saw. This class predicts nothing: see Displacement, Expectation.
    """

    needs = 0
    """Synchronous steps before the first late one that it learns from."""
    sees_gradients = False
    """Whether it learns from gradients, also from those of a step that applies none."""

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        self.given = {id(p) for p in parameters}
        """Ids of the optimizer's parameters that show predicted values."""
        self.parameters = _apart(parameters)
        self._holds = Holds.NOTHING
        self._buffers: list[torch.Tensor] = []
        self._places: list[torch.Tensor] = []
        """The memory in which predicted weights are, whatever the script makes of the parameters meanwhile."""
        self._predicted: list[torch.Tensor] = []
        """Where predicted weights wait while the weights are true for a while: in their places, or copied."""
        self._lent: list[bool] = []
        """Whether a parameter is given the memory of its predicted weights."""
        self._own_memory = self._memory_ahead = Memory((), [])
        """The parameters' own memory, and that of predicted weights."""
        self._count = 0
        self._norms: list[torch.Tensor] = []
        """Norms of predicted weights, by which a change is noticed."""
        self._found = False
        self._suspicion: Later | None = None
        """Whether norms were found to differ: of a GPU, so that this is read later."""
        self.barred = False
        """Whether the script computes gradients where weights are not to be predicted."""

    @property
    def changed(self) -> bool:
        """Whether the script changes predicted weights, as by a decay of its own before the step: that is lost,
        as predicted weights differ from rank to rank."""
        if self._suspicion is not None and self._suspicion.done:
            self._found |= bool(self._suspicion.read())
            self._suspicion = None
        return self._found

    @property
    def wanted(self) -> bool:
        """Whether there is anything to predict with."""
        return self.needs > 0

    @property
    def applied(self) -> bool:
        return self._holds is Holds.TRUE_WEIGHTS

    @property
    def suspended(self) -> bool:
        return self._holds is Holds.SUSPENDED

    def apply(self) -> None:
        """Go from true to predicted weights, at the first forward with gradients after a step."""
        mine = self.parameters
        if mine and mine[0].is_cuda and torch.cuda.is_current_stream_capturing():
            # The graph would read predicted weights where they are now for ever. No look at them belongs into it.
            self._norms = []
            self.undo()
        elif self._holds is Holds.AHEAD and not traces():
            self._go_to_predicted()
        elif self._holds is Holds.KNOWN and not traces():
            if self._go_ahead():
                self._go_to_predicted()
            else:
                self.forget()
        else:
            self.resume()

    def _go_ahead(self) -> bool:
        """Put predicted weights into the buffers; whether that could be done."""
        return False

    def _go_to_predicted(self) -> None:
        predicted = self._buffers
        if not self._own_memory.shown_by(self.parameters):
            self._own_memory = Memory(self.parameters, [p.data for p in self.parameters])
        if self._memory_ahead.tensors is not predicted:
            self._memory_ahead = Memory(self.parameters, predicted)
        mine = self._own_memory.tensors
        if self._own_memory.is_lent():
            self._lent, places, buffers = [True] * len(mine), predicted, mine
        else:
            self._lent = [lends(p) for p in self.parameters]
            rows = list(zip(mine, predicted, self._lent, strict=True))
            places = [b if lent else m for m, b, lent in rows]
            buffers = [m if lent else torch.empty_like(m) for m, _, lent in rows]
        # At once, as a signal may end it at any line.
        self._predicted, self._places, self._buffers, self._holds = predicted, places, buffers, Holds.SUSPENDED
        self._norms = []
        self.resume()
        self._count += 1
        self._norms = self._norms_now() if self._count <= _FIRST or self._count % _EVERY == 0 else []

    def undo(self) -> None:
        """Back to the true weights, bit for bit.

        At each moment the buffers or the parameters hold them, so a signal handler may save in the midst of this.
        """
        if self._undo_by_memory():
            return
        rows = self._rows
        if self.applied:
            self._show_true(rows, still_lent(rows))
        elif not self.suspended:
            return
        buffers = [row.place if row.parameter.data_ptr() == row.true.data_ptr() else row.true for row in rows]
        self._holds, self._buffers, self._places, self._predicted = Holds.NOTHING, buffers, [], []
        self._norms = []

    def _undo_by_memory(self) -> bool:
        """Give all parameters their own memory, if all have that of their predicted weights; whether they had."""
        places, buffers, ahead = self._places, self._buffers, self._memory_ahead
        if not (self.applied and places is ahead.tensors and ahead.shown_by(self.parameters) and ahead.is_lent()):
            return False
        self._look_for_changes()
        for p, true in zip(self.parameters, buffers, strict=True):
            p.data = true
        self._holds, self._buffers, self._places, self._predicted = Holds.NOTHING, places, [], []
        self._norms = []
        return True

    def suspend(self) -> None:
        """Like `undo`, but `resume` can follow: a backward or forward before the step still needs predicted weights."""
        places, rows = self._places, self._rows
        if self.applied:
            lent = still_lent(rows)
            predicted = [r.place if by_memory else r.place.clone() for r, by_memory in zip(rows, lent, strict=True)]
            self._show_true(rows, lent)
            if self.applied:
                self._predicted, self._holds = predicted, Holds.SUSPENDED
            if self._places is not places:  # undone meanwhile by a signal handler
                self._holds = Holds.NOTHING

    def resume(self) -> None:
        """Back to the predicted weights. What the script has made of the true ones stays.

        Not while torch traces or transforms a function: its copies would be part of that.
        """
        if not self.suspended or traces():
            return
        places, rows, waiting = self._places, self._rows, self._predicted
        if waiting is places and self._own_memory.shown_by(self.parameters):
            self._holds, self._predicted = Holds.TRUE_WEIGHTS, []
            for p, place in zip(self.parameters, places, strict=True):
                p.data = place
        else:
            pairs = list(zip(rows, waiting, strict=True))
            copied = [(row, predicted) for row, predicted in pairs if predicted is not row.place]
            copy([(row.true, row.place) for row, _ in copied])
            if self.suspended:
                self._holds, self._predicted = Holds.TRUE_WEIGHTS, []
                for (p, true, place, _), predicted in pairs:
                    if predicted is place and p.data_ptr() == true.data_ptr():
                        p.data = place
                copy([(row.place, predicted) for row, predicted in copied])
        if self._places is not places:  # undone meanwhile by a signal handler
            self._holds = Holds.NOTHING
            show(rows, [predicted is row.place for row, predicted in zip(rows, waiting, strict=True)])

    @property
    def _rows(self) -> list[ShownParameter]:
        """While weights are predicted, or suspended; else there are none."""
        return list(map(ShownParameter, self.parameters, self._buffers, self._places, self._lent))

    def _show_true(self, rows: Sequence[ShownParameter], lent: Sequence[bool]) -> None:
        self._look_for_changes()
        show(rows, lent)

    def _look_for_changes(self) -> None:
        norms = self._norms
        if not norms or self._suspicion is not None:
            return
        found = self._norms_now()
        if len(found) == len(norms):  # else a signal handler has undone the prediction meanwhile
            before, now = torch.stack(norms), torch.stack(found)
            self._suspicion = Later(torch.any((before != now) & torch.isfinite(now)))

    def _norms_now(self) -> list[torch.Tensor]:
        """Norms of predicted weights, of one of their parts, so exact that another last bit of one value shows."""
        parts = (part(place, self._count % PARTS) for place in self._places if place.is_floating_point())
        norms = [torch.linalg.vector_norm(part, dtype=torch.float64) for part in parts]
        return [norm.to(norms[0].device) for norm in norms]

    def before_step(self, *, late: bool, scale: torch.Tensor | None, delivery: Set[int] = frozenset()) -> None:
        """Make the weights true; they are about to change. late: by gradients that are on the way since the last step.

        `.grad` holds the rank's own gradients, which are about to be sent; scale: their loss scale. delivery: the
        addresses to which averages come.
        """
        if not self.applied or self._undo_by_memory():
            self.undo()
            return
        rows = self._rows
        elsewhere = [row for row in rows if row.parameter.data_ptr() not in (row.true.data_ptr(), row.place.data_ptr())]
        self.undo()
        for p, _, place, _ in elsewhere:
            # The script has put what it made of predicted weights into other memory, and would train it.
            if replaced(p.data, place):
                p.data.copy_(place)
                self._found = True

    def arrived(self, scale: torch.Tensor | None) -> None:
        """`.grad` holds the averages, of this loss scale, before the script changes them."""

    def after_step(self, *, held: bool, scale: torch.Tensor | None) -> None:
        """The optimizer has stepped; held: without gradients. scale: the loss scale of the gradients just sent."""

    def release(self, ids: set[int]) -> None:
        """Another optimizer steps these parameters: it predicts them from now on."""
        if any(id(p) in ids for p in self.parameters):
            self.follow([p for p in self.parameters if id(p) not in ids])

    def follow(self, parameters: Sequence[torch.Tensor]) -> None:
        """The script froze, added or replaced parameters: those that stay keep what is known of them."""
        self.undo()
        self.given, parameters = {id(p) for p in parameters}, _apart(parameters)
        self._keep(parameters)
        self.parameters = parameters

    def _keep(self, parameters: Sequence[torch.Tensor]) -> None:
        """Keep the buffers of these parameters; new ones get zeros, or their weights where buffers hold weights."""
        if self._buffers:
            self._buffers = self._kept(self._buffers, parameters, weights=self._holds in (Holds.BEFORE, Holds.AHEAD))

    def _kept(
        self, buffers: Sequence[torch.Tensor | None], parameters: Sequence[torch.Tensor], *, weights: bool = False
    ) -> list[torch.Tensor]:
        """The buffers for these parameters: known ones, and for new parameters zeros, or the values with `weights`."""
        known = {id(p): b for p, b in zip(self.parameters, buffers, strict=True)}
        fresh = torch.clone if weights else torch.zeros_like
        return [b if (b := known.get(id(p))) is not None else fresh(p.data) for p in parameters]

    def state(self) -> dict[str, Any]:
        """The content for a checkpoint: numbers, and tensors by parameter."""
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` gave."""
        self.forget()

    def observe(self) -> dict[str, Any]:
        """What is this rank's own between two steps, as it is; tensors in lists by parameter. Nothing is changed, and
        the tensors are its own: copy them before the next step."""
        return {"looks": self._count, "changed": self._found, "ahead": list(self._predicted) if self.suspended else []}

    def restore(self, own: Mapping[str, Any], common: Mapping[str, Any]) -> bool:
        """Go on with the same bits from what `observe` gave on this rank, and `state` on any. Returns whether the
        parameters are those of then."""
        self.load_state(common)
        fits = _fits(self.parameters, own["ahead"])
        if fits and own["ahead"]:
            self._buffers, self._holds = beside_parameters(self.parameters, own["ahead"]), Holds.AHEAD
        self._count, self._found = own["looks"], own["changed"]
        return fits

    def join(self, averages: Tensors, scale: torch.Tensor | None) -> None:
        """The averages in flight are known: what was one rank's alone gives way to them. scale: their loss scale."""

    def forget(self) -> None:
        """The step was skipped, or the script replaced the weights: what is known predicts nothing."""
        self.undo()
        self._holds = Holds.NOTHING

    def end(self) -> None:
        """Nothing is predicted any more: the memory is given back."""
        self.forget()
        self._buffers = []


def traces() -> bool:
    """Whether this runs inside make_fx, AOTAutograd, torch.func or their like."""
    return torch._C._len_torch_dispatch_stack() > 0 or torch._C._functorch.peek_interpreter_stack() is not None


def _apart(parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Leave out parameters in the same memory as one before: its true values would be put back as the other's."""
    first = {p.data_ptr(): id(p) for p in reversed(parameters) if p.numel()}
    return [p for p in parameters if not p.numel() or first[p.data_ptr()] == id(p)]


def tensors_of(parameters: Sequence[torch.Tensor], values: Tensors) -> list[torch.Tensor]:
    """A copy of each parameter's value; zeros where there is none."""
    fresh = [torch.zeros_like(p.data) for p in parameters]
    return [f.copy_(values[p]) if p in values else f for p, f in zip(parameters, fresh, strict=True)]


def beside_parameters(parameters: Sequence[torch.Tensor], values: Sequence[torch.Tensor | None]) -> list[Any]:
    """The values, each on its parameter's device."""
    return [None if v is None else v.to(p.device) for p, v in zip(parameters, values, strict=True)]


def _fits(parameters: Sequence[torch.Tensor], values: Sequence[torch.Tensor | None]) -> bool:
    """Whether these are a value for each parameter, or none at all."""
    alike = len(values) == len(parameters)
    return not values or (
        alike and all(v is None or v.shape == p.shape for p, v in zip(parameters, values, strict=True))
    )
