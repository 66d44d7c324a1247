"""Base class of weight prediction, which runs forward and backward with the weights expected at the time when their
gradient arrives."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence, Set
from typing import Any

import torch

from dadt.comm.shards import is_sharded, local
from dadt.train.later import Later
from dadt.train.prediction.memory import Memory, lends
from dadt.train.prediction.shown import PARTS, ShownParameter, copy, part, replaced, show, still_lent

Tensors = Mapping[torch.Tensor, torch.Tensor]
"""Maps each parameter to a tensor."""


class Holds(enum.Enum):
    """Kinds of content that each parameter's extra buffer may have at a time."""

    NOTHING = 0
    """The buffer contains no values that are still needed."""
    TRUE_WEIGHTS = 1
    """The true weights, while the parameters contain predicted ones."""
    SUSPENDED = 2
    """The true weights, which the parameters contain at the moment, too; the predicted weights are stored in separate
    memory."""
    BEFORE = 3
    """The weights before the step that is about to be taken."""
    KNOWN = 4
    """Values from which the next prediction is computed."""
    OWN = 5
    """This rank's own gradients, which were just sent."""
    AVERAGE = 6
    """The gradients that were just applied, while no exchange is under way."""
    AHEAD = 7
    """The predicted weights, before they become the parameters' values."""


_FIRST, _EVERY = 8, 64
"""DADT checks whether the script has changed predicted weights after each of the first _FIRST predictions, and later
after every _EVERY-th."""


class Prediction:
    """Runs forward and backward at predicted weights, and shows the script true weights at all other times.

    One buffer per parameter contains in turn the prediction's input, the predicted weights and the true ones. If
    possible, the parameter and the buffer swap their memory instead of copying values; the parameter is back in its own
    memory whenever its weights are true. This bypasses autograd's version counter, which is safe as the backward reads
    exactly the bits that the forward saw. This base class predicts nothing; Displacement and Expectation do.
    """

    needs = 0
    """Number of synchronous steps from which the prediction learns before the first step with late averages."""
    sees_gradients = False
    """Whether the prediction learns from gradients, including those of a step that applies none."""

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        self.given = {id(p) for p in parameters}
        """Ids of the optimizer's parameters that can contain predicted values, including those that share memory with
        another parameter."""
        self.owners = _apart(parameters)
        """The optimizer's parameters that are predicted."""
        self.parameters = list(map(local, self.owners))
        """This rank's part of each predicted parameter; the parameter itself if it is not sharded."""
        self.sharded = any(map(is_sharded, self.owners))
        self._holds = Holds.NOTHING
        self._buffers: list[torch.Tensor] = []
        self._places: list[torch.Tensor] = []
        """Memory of the predicted weights, which DADT still knows if the script gives a parameter other memory."""
        self._predicted: list[torch.Tensor] = []
        """The predicted weights, in their own memory or as copies, while the parameters temporarily contain the true
        weights."""
        self._lent: list[bool] = []
        """For each parameter, whether its data pointer is exchanged for the predicted weights' memory instead of
        copying values."""
        self._own_memory = self._memory_ahead = Memory((), [])
        """The parameters' own memory, and the memory of the predicted weights."""
        self._count = 0
        self._norms: list[torch.Tensor] = []
        """Norms of the predicted weights, from which a change by the script is detected."""
        self._found = False
        self._suspicion: Later | None = None
        """Result of a comparison of norms that is read later, as it may still be computed on a GPU; None if there is
        none."""
        self.barred = False
        """Whether the script computes gradients from a forward that ran at true weights, for example a recomputed one,
        so that weights must not be predicted."""

    @property
    def changed(self) -> bool:
        """Whether the script changes predicted weights, for example by its own weight decay before the step. Such
        changes are lost, as predicted weights differ between ranks."""
        if self._suspicion is not None and self._suspicion.done:
            self._found |= bool(self._suspicion.read())
            self._suspicion = None
        return self._found

    @property
    def wanted(self) -> bool:
        """Whether this prediction predicts weights at all; the base class does not."""
        return self.needs > 0

    @property
    def applied(self) -> bool:
        return self._holds is Holds.TRUE_WEIGHTS

    @property
    def suspended(self) -> bool:
        return self._holds is Holds.SUSPENDED

    def apply(self) -> None:
        """Replace the true weights by predicted ones, if the next prediction can be computed. Called at the first
        forward with gradients after a step."""
        mine = self.parameters
        if mine and mine[0].is_cuda and torch.cuda.is_current_stream_capturing():
            # A captured CUDA graph would read the predicted weights' memory in every replay, and would include the
            # norms' computation.
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
        """Write predicted weights into the buffers. Returns whether that succeeded."""
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
        # All attributes are set in one statement, as a signal handler's exception may interrupt between two lines.
        self._predicted, self._places, self._buffers, self._holds = predicted, places, buffers, Holds.SUSPENDED
        self._norms = []
        self.resume()
        self._count += 1
        self._norms = self._norms_now() if self._count <= _FIRST or self._count % _EVERY == 0 else []

    def undo(self) -> None:
        """Restore the true weights, bit for bit.

        At each moment either the buffers or the parameters contain all true weights, so a signal handler may save in
        the middle of this method.
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
        """If every parameter uses the memory of its predicted weights, let each use its own memory again, and return
        True. Otherwise change nothing, and return False."""
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
        """Put the true weights into the parameters, and store the predicted ones so that `resume` can put them back,
        because a forward or backward before the step still needs them."""
        places, rows = self._places, self._rows
        if self.applied:
            lent = still_lent(rows)
            predicted = [r.place if by_memory else r.place.clone() for r, by_memory in zip(rows, lent, strict=True)]
            self._show_true(rows, lent)
            if self.applied:
                self._predicted, self._holds = predicted, Holds.SUSPENDED
            if self._places is not places:  # a signal handler has undone the prediction meanwhile
                self._holds = Holds.NOTHING

    def resume(self) -> None:
        """Put the predicted weights back into the parameters after `suspend`; changes that the script has made to the
        true weights are kept.

        Does nothing while torch traces or transforms a function, since the copies would become part of it.
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
        if self._places is not places:  # a signal handler has undone the prediction meanwhile
            self._holds = Holds.NOTHING
            show(rows, [predicted is row.place for row, predicted in zip(rows, waiting, strict=True)])

    @property
    def _rows(self) -> list[ShownParameter]:
        """One row per parameter while its predicted weights are in place or suspended, otherwise an empty list."""
        return list(map(ShownParameter, self.parameters, self._buffers, self._places, self._lent))

    def _show_true(self, rows: Sequence[ShownParameter], lent: Sequence[bool]) -> None:
        self._look_for_changes()
        show(rows, lent)

    def _look_for_changes(self) -> None:
        norms = self._norms
        if not norms or self._suspicion is not None:
            return
        found = self._norms_now()
        if len(found) == len(norms):  # lengths differ if a signal handler has undone the prediction
            before, now = torch.stack(norms), torch.stack(found)
            self._suspicion = Later(torch.any((before != now) & torch.isfinite(now)))

    def _norms_now(self) -> list[torch.Tensor]:
        """Return norms of one part of each predicted parameter, precise enough to show a change in the last bit of one
        value."""
        parts = (part(place, self._count % PARTS) for place in self._places if place.is_floating_point())
        norms = [torch.linalg.vector_norm(part, dtype=torch.float64) for part in parts]
        return [norm.to(norms[0].device) for norm in norms]

    def before_step(self, *, late: bool, scale: torch.Tensor | None, delivery: Set[int] = frozenset()) -> None:
        """Restore the true weights, which are about to change. late: whether the step applies gradients that have been
        in flight since the previous step.

        `.grad` contains the rank's own gradients, which are about to be sent; scale: their loss scale. delivery: memory
        addresses at which averages arrive.
        """
        if not self.applied or self._undo_by_memory():
            self.undo()
            return
        rows = self._rows
        elsewhere = [row for row in rows if row.parameter.data_ptr() not in (row.true.data_ptr(), row.place.data_ptr())]
        self.undo()
        for p, _, place, _ in elsewhere:
            # The script has moved predicted weights into other memory and changed them there. The true weights are
            # copied into this memory, as the script trains it.
            if replaced(p.data, place):
                p.data.copy_(place)
                self._found = True

    def arrived(self, scale: torch.Tensor | None) -> None:
        """Note the averages in `.grad`, if the prediction learns from them. Called before the script changes them.
        scale: their loss scale."""

    def after_step(self, *, held: bool, scale: torch.Tensor | None) -> None:
        """Note what the next prediction is computed from. Called when the optimizer has stepped. held: whether it
        stepped without gradients. scale: loss scale of the gradients just sent."""

    def release(self, ids: set[int]) -> None:
        """Stop predicting the parameters with these ids, as another optimizer steps and predicts them from now on."""
        if any(id(p) in ids for p in self.owners):
            self.follow([p for p in self.owners if id(p) not in ids])

    def follow(self, parameters: Sequence[torch.Tensor]) -> None:
        """Predict these parameters from now on, since the script has frozen, added or replaced some. What is known of
        parameters that remain is kept."""
        self.undo()
        self.given, owners = {id(p) for p in parameters}, _apart(parameters)
        parts = list(map(local, owners))
        self._keep(parts)
        self.owners, self.parameters, self.sharded = owners, parts, any(map(is_sharded, owners))
        if not parts:  # if such parameters are trained again, their prediction starts from nothing
            self.forget()

    def _keep(self, parameters: Sequence[torch.Tensor]) -> None:
        """Keep the buffers of these parameters only. Buffers of new parameters contain zeros, or the parameters'
        weights if buffers contain weights."""
        if self._buffers:
            self._buffers = self._kept(self._buffers, parameters, weights=self._holds in (Holds.BEFORE, Holds.AHEAD))

    def _kept(
        self, buffers: Sequence[torch.Tensor | None], parameters: Sequence[torch.Tensor], *, weights: bool = False
    ) -> list[torch.Tensor]:
        """Return the buffers of these parameters. New parameters get buffers of zeros, or with `weights` copies of
        their values."""
        known = {id(p): b for p, b in zip(self.parameters, buffers, strict=True)}
        fresh = torch.clone if weights else torch.zeros_like
        return [b if (b := known.get(id(p))) is not None else fresh(p.data) for p in parameters]

    def state(self) -> dict[str, Any]:
        """Return the prediction's content for a checkpoint: numbers, and tensors by parameter."""
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue from the content that `state` returned for a checkpoint. This base class stores none, so it only
        drops what it knows."""
        self.forget()

    def observe(self) -> dict[str, Any]:
        """Return this rank's own part of the prediction between two steps, with tensors in lists by parameter. Changes
        nothing. The tensors are not copies, so copy them before the next step."""
        return {"looks": self._count, "changed": self._found, "ahead": list(self._predicted) if self.suspended else []}

    def restore(self, own: Mapping[str, Any], common: Mapping[str, Any]) -> bool:
        """Continue bit for bit from a snapshot. own: this rank's own part of the prediction; common: the part that all
        ranks share. Returns whether `own` fits the parameters."""
        self.load_state(common)
        fits = _fits(self.parameters, own["ahead"])
        if fits and own["ahead"]:
            self._buffers, self._holds = beside_parameters(self.parameters, own["ahead"]), Holds.AHEAD
        self._count, self._found = own["looks"], own["changed"]
        return fits

    def join(self, averages: Tensors, scale: torch.Tensor | None) -> None:
        """Use the averages of the gradients in flight in place of this rank's own gradients, which other ranks do not
        have. scale: loss scale of the averages."""

    def forget(self) -> None:
        """Drop what the next prediction would be computed from, because a step was skipped or the script has replaced
        the weights."""
        self.undo()
        self._holds = Holds.NOTHING

    def end(self) -> None:
        """End all prediction and free its memory."""
        self.forget()
        self._buffers = []


def traces() -> bool:
    """Whether the current code runs inside make_fx, AOTAutograd, torch.func or a similar tracer."""
    return torch._C._len_torch_dispatch_stack() > 0 or torch._C._functorch.peek_interpreter_stack() is not None


def _apart(parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the parameters without those that share memory with an earlier one, since restoring the same weights twice
    would overwrite them."""
    places = [(p, local(p)) for p in parameters]
    first = {part.data_ptr(): id(p) for p, part in reversed(places) if part.numel()}
    return [p for p, part in places if not part.numel() or first[part.data_ptr()] == id(p)]


def tensors_of(parameters: Sequence[torch.Tensor], values: Tensors) -> list[torch.Tensor]:
    """Return a copy of each parameter's tensor in `values`; zeros for a parameter that is not in it."""
    fresh = [torch.zeros_like(local(p.data)) for p in parameters]
    return [f.copy_(values[p]) if p in values else f for p, f in zip(parameters, fresh, strict=True)]


def beside_parameters(parameters: Sequence[torch.Tensor], values: Sequence[torch.Tensor | None]) -> list[Any]:
    """Return the values, each moved to its parameter's device."""
    return [None if v is None else v.to(p.device) for p, v in zip(parameters, values, strict=True)]


def _fits(parameters: Sequence[torch.Tensor], values: Sequence[torch.Tensor | None]) -> bool:
    """Whether `values` is empty, or has one entry for each parameter, which is None or a tensor of the parameter's
    shape."""
    alike = len(values) == len(parameters)
    return not values or (
        alike and all(v is None or v.shape == p.shape for p, v in zip(parameters, values, strict=True))
    )
