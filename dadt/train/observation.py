"""What a rank's training is between two steps, as it is: for a snapshot, which waits for nobody and changes nothing.

What all ranks have in common has a checkpoint's form, so that other numbers of ranks can go on from it. What is one
rank's own (its part of the gradient in flight and of prediction, what its compression owes) is beside that, and with it
the rank goes on with the same bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dadt.train.attachment import Attachment
from dadt.train.restored import numbers_of


class Observation:
    """What the training of one optimizer is on this rank. Begun behind a step, and complete once the next one begins,
    when what was in flight has to come in any case. It holds the rank's own tensors: copy them before they change."""

    def __init__(self, attachment: Attachment) -> None:
        a = self.attachment = attachment
        in_flight = a.algorithm.pending is not None
        indices = numbers_of(a.optimizer)
        self.prediction = {
            key: {indices[p]: t for p, t in value.items() if p in indices} if isinstance(value, dict) else value
            for key, value in a.prediction.state().items()
        }
        """What all ranks have in common of it, as a checkpoint has it."""
        self.own: dict[str, Any] = {
            "prediction": a.prediction.observe(),
            "barred": a.prediction.barred,
            "owes": None if in_flight else _owes(a),
            "in_flight": {},
            "follows": a.agreement.follows,
            "algorithm": a.algorithm.observe(),
        }

    @property
    def waits(self) -> bool:
        """Whether it lacks something that is still under way."""
        return self.own["owes"] is None

    def complete(self) -> None:
        """All ranks call it before they launch anything of the next step. Waits for what is in flight; raises
        CommError."""
        a = self.attachment
        pending = a.algorithm.pending
        if pending is not None:
            lanes = pending.wait()
            self.own["in_flight"] = {"not_finite": [lane.not_finite for lane in lanes], "learned": pending.learned()}
        if self.waits:
            self.own["owes"] = _owes(a)

    def state(self) -> dict[str, Any]:
        """A copy of the algorithm's state, which all ranks have in common, once it is complete."""
        return {**self.attachment.algorithm.state(), **self.attachment.switch_note}


def restore(a: Attachment, own: Mapping[str, Any], prediction: Mapping[str, Any], state: Mapping[str, Any]) -> None:
    """Go on with the same bits. own: what an Observation of this rank has held. prediction, state: what all ranks have
    in common."""
    state = dict(state)
    if state.get("in_flight"):
        state["in_flight"] = [{**state["in_flight"][-1], **own["in_flight"]}]
    a.prediction.restore(own["prediction"], prediction)
    a.prediction.barred = own["barred"]
    if state:
        a.algorithm.load_state(state)
    a.algorithm.restore(own["algorithm"])
    for form, owed in zip(a.schema.forms, own["owes"], strict=False):
        if form is not None and owed is not None:
            form.restore(owed)
    a.agreement.follows = own["follows"]
    a.changing_buffers.forget()


def _owes(a: Attachment) -> list[dict[str, Any] | None]:
    """What compression owes, by bucket (None: nothing is compressed); for when no exchange is under way."""
    return [None if form is None else form.observe() for form in a.schema.forms]
