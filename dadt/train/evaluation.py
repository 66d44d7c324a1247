"""Averages the gradients and loss of each closure evaluation, for optimizers that evaluate their closure several times
in a step, such as LBFGS."""

from __future__ import annotations

from dadt.errors import ConfigError
from dadt.train.attachment import Attachment


def begin(a: Attachment, why: str) -> None:
    """Average each evaluation of the closure from now on. All ranks call it, as they run the same optimizer. Raises
    ConfigError with --min-np."""
    if least := a.ranks.config.min_np:
        raise ConfigError(
            f"--min-np {least}: {why}, in the midst of which the others cannot go on without a rank; leave --min-np out"
        )
    a.has_closure = True
    a.measure.why = why
    bare = "" if a.compression == "none" else ", uncompressed"
    a.ranks.say(f"{why}{a.name}: gradients and loss of each evaluation are averaged at once{bare}, and no step is late")


def before(a: Attachment) -> None:
    """Prepare for an evaluation of the optimizer's closure, so that gradients that the closure itself uses, for example
    to clip them, are averaged first."""
    a.consumed = False
    a.prediction.forget()


def average(a: Attachment, loss: float) -> float:
    """Average the gradients and the loss of one evaluation of a closure over all ranks. Returns the mean loss."""
    a.consumed = False
    a.broadcast_new_parameters()
    a.refresh()
    if not a.algorithm.averages:
        a.weighing.exchanged()
        return loss
    exchange = a.new_exchange()
    a.close(exchange, value=loss)
    lanes = exchange.receive()
    if a.weighing.agree(lanes):
        exchange = a.new_exchange(again=True)
        a.close(exchange, value=loss)
        lanes = exchange.receive()
    a.agree(lanes, exchange)
    a.deliver(exchange)
    a.weighing.exchanged()
    total = sum(lane.weight for lane in lanes)
    return sum(lane.value * lane.weight for lane in lanes) / total if total else loss
