"""The state of a rank's training between two steps, for a snapshot. Recording it waits for no other rank and changes
nothing.

State that is equal on all ranks has the form of a checkpoint, so that another number of ranks can continue from it.
State of one rank alone (its part of the gradient in flight and of the prediction, its compression residuals) is stored
separately, and lets the rank continue bit for bit.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dadt.comm.compression import Unsent
from dadt.train.attachment import Attachment
from dadt.train.restored import numbers_of


class Observation:
    """State of one optimizer's training on this rank, for a snapshot. It is created after a step, and completed when
    the next step begins, as that step waits for the exchange in flight anyway. It refers to the rank's own tensors, so
    copy them before they change.
    """

    def __init__(self, attachment: Attachment) -> None:
        a = self.attachment = attachment
        in_flight = a.algorithm.pending is not None
        indices = numbers_of(a.optimizer)
        self.prediction = {
            key: {indices[p]: t for p, t in value.items() if p in indices} if isinstance(value, dict) else value
            for key, value in a.prediction.state().items()
        }
        """The part of the prediction that is equal on all ranks, in the form of a checkpoint."""
        self.own: dict[str, Any] = {
            "prediction": a.prediction.observe(),
            "barred": a.prediction.barred,
            "owes": None if in_flight else _owes(a),
            "in_flight": {},
            "follows": a.agreement.follows,
            "momentum": a.momentum.observe(),
            "algorithm": a.algorithm.observe(),
            "weighing": a.weighing.observe(),
        }

    @property
    def waits(self) -> bool:
        """Whether a part of the state is missing because an exchange is still under way."""
        return self.own["owes"] is None

    def complete(self) -> None:
        """Add the parts of the state that the exchange in flight determines. All ranks call this method before they
        launch an operation of the next step. Waits for the exchange in flight; raises CommError."""
        a = self.attachment
        pending = a.algorithm.pending
        if pending is not None:
            lanes = pending.wait()
            self.own["in_flight"] = {"not_finite": [lane.not_finite for lane in lanes], "learned": pending.learned()}
            if a.momentum.sends:
                pending.averaged_gradients()  # so that the momentum knows of which parameters nobody had a gradient
        if self.waits:
            self.own["owes"] = _owes(a)
        self.own["idle"] = a.momentum.idle.observe(list(numbers_of(a.optimizer)))

    def state(self) -> dict[str, Any]:
        """Return a copy of the algorithm's state, which is equal on all ranks. Call this method after `complete`."""
        return state_of(self.attachment)


def state_of(a: Attachment) -> dict[str, Any]:
    """Return the algorithm's state, with the entries that `Attachment.switch_to` has added. May wait for the exchange
    in flight."""
    return {**a.algorithm.state(), **a.switch_note}


def restore(a: Attachment, own: Mapping[str, Any], prediction: Mapping[str, Any], state: Mapping[str, Any]) -> None:
    """Continue bit for bit from a snapshot. own: this rank's own part of the state. prediction, state: the prediction's
    and the algorithm's state, which are equal on all ranks."""
    state = dict(state)
    if state.get("in_flight"):
        state["in_flight"] = [{**state["in_flight"][-1], **own["in_flight"]}]
    a.prediction.restore(own["prediction"], prediction)
    a.prediction.barred = own["barred"]
    if state:
        a.algorithm.load_state(state)
    a.algorithm.restore(own["algorithm"])
    forms = a.schema.forms
    for index, (form, owed) in enumerate(zip(forms, own["owes"], strict=False)):
        if form is None and owed is not None and "unsent" in owed:
            form = forms[index] = Unsent()
        if form is not None and owed is not None:
            form.restore(owed)
    a.momentum.restore(own["momentum"])
    a.momentum.idle.restore(own["idle"], list(numbers_of(a.optimizer)))
    a.weighing.restore(own["weighing"])
    a.agreement.follows = own["follows"]
    a.changing_buffers.forget()


def _owes(a: Attachment) -> list[dict[str, Any] | None]:
    """Return the compression residuals of each bucket, None for uncompressed buckets, and where the next step has other
    buckets, which begin without any. Call it only while no exchange is under way."""
    current = a.schema_is_current
    return [form.observe() if form is not None and current else None for form in a.schema.forms]
