"""The end of a rank's training, at which all ranks wait for each other once more, so that a rank that ends early is
noticed."""

from __future__ import annotations

from contextlib import suppress

from dadt.errors import CommError, CommTimeout, DadtError, PeerLost, StartTimeout
from dadt.train import timelines
from dadt.train.attachments import Attachments
from dadt.train.events import Events
from dadt.train.final_weights import FinalWeights
from dadt.train.optimizers import Optimizers
from dadt.train.ranks import Ranks


class Departure:
    """Ends a rank's training once its script has ended."""

    def __init__(
        self,
        ranks: Ranks,
        optimizers: Optimizers,
        attachments: Attachments,
        final_weights: FinalWeights,
        events: Events,
    ) -> None:
        self._ranks, self._optimizers, self._attachments = ranks, optimizers, attachments
        self._final_weights, self._events = final_weights, events
        self._arrived = False
        """Whether all ranks have reached their end."""

    def close(self, *, failed: bool = False) -> None:
        """Wait for the other ranks a last time, so that a rank that ends early is noticed, then stop the C++ engine.
        Does nothing if called again."""
        if self._ranks.closing:
            return
        self._ranks.closing = True
        try:
            self._leave(failed)
        except CommError:  # a peer has not reached its end in time, but this rank has reached its own
            with suppress(DadtError):
                self._tell_end()
            raise
        self._tell_end()

    def _tell_end(self) -> None:
        ranks = self._ranks
        if ranks.control is not None:
            if ranks.step:
                ranks.control.progress(ranks.step, last=True, **ranks.progress.numbers(last=True))
            ranks.control.done({**ranks.progress.summary(), "explicit": self._optimizers.script.explicit})

    def _leave(self, failed: bool) -> None:
        ranks, told = self._ranks, list[bytes]()
        if ranks.connection is not None:
            engine, deaths = ranks.connection.engine, ranks.deaths
            try:
                if failed or deaths.preempted or ranks.requests.interruption.apart:
                    why = "it is preempted" if deaths.preempted else "it was interrupted (Ctrl-C)"
                    how = "failed" if failed else f"has left, as {why}"
                    engine.abort(f"rank {ranks.world.rank} {how}")
                elif engine.error is None or (ranks.survives and (deaths.outdated or not ranks.together)):
                    if ranks.control is not None:
                        ranks.control.ending(ranks.step, ranks.gatherings.count)
                    if self._is_left_alone:
                        return
                    self._meet()
                    told = ranks.tell(self._end, self._final_weights.tell() if self._is_same else b"")
                    timelines.merge_all(ranks)
            except CommError:
                if not self._arrived or not ranks.survives:
                    raise  # some ranks did not reach their end, or the job cannot survive a loss
            finally:
                self._stop()
        elif not failed:
            timelines.merge_all(ranks)
        elif ranks.timeline is not None:
            ranks.timeline.stop()
        self._final_weights.compare(told)

    def _meet(self) -> None:
        """Complete all operations that need every rank, at the end of training."""
        if self._ranks.together:
            self._arrive()
        for attachment in self._attachments:
            attachment.algorithm.finish()
        if not self._ranks.together:
            self._arrive_apart()
            return
        for callback in (*self._events.on_finish, *self._events.on_end):
            callback()

    @property
    def _is_left_alone(self) -> bool:
        """Whether DADT has trained nothing, so that ranks need not end together, since what the script trains by itself
        may differ between ranks."""
        optimizers, progress = self._optimizers, self._ranks.progress
        alone = not optimizers.script.explicit and (len(optimizers.left_alone) > 0 or progress.left_alone > 0)
        return alone and not progress.measures and self._ranks.timeline is None

    @property
    def _is_same(self) -> bool:
        """Whether all ranks have taken the same steps, so that their numbers of steps and final weights can be
        compared."""
        # After steps with rank-local gradients (`parted`), the ranks' gradient scalers may have skipped different
        # steps.
        return self._ranks.alone or (self._optimizers.algorithm.identical and not self._ranks.parted)

    @property
    def _end(self) -> str:
        steps = self._ranks.step - self._ranks.progress.left_alone
        return f"the end, after {steps} steps" if self._is_same else "the end"

    def _arrive(self) -> None:
        """Wait until all ranks have reached their end. Raises CommTimeout if some ranks do not. A rank that waits for
        an exchange with this rank reports the mismatch and fails.

        Once all ranks have reached it, exchanges still in flight complete, too, as the C++ engine runs operations in
        order.
        """
        ranks = self._ranks
        while ranks.control is not None and (ranks.survives or not ranks.mismatch_is_told):
            try:
                ranks.meet_within(ranks.config.timeout).exchange("the end", self._end.encode())
                self._arrived = True
                return
            except StartTimeout as error:
                raise CommTimeout(str(error)) from error
            except PeerLost as error:
                if not ranks.together:
                    raise
                try:
                    self._ranks.regroup(error)
                except StartTimeout as late:  # the lost rank does not reconnect, as its script may have ended
                    raise CommTimeout(str(late)) from late

    def _arrive_apart(self) -> None:
        """Compute the last averages, in which each rank takes part when it reaches its end. If ranks are lost
        meanwhile, all remaining ranks average again, as it is unknown which of them have finished."""
        with self._ranks.reconnection.within():
            while True:
                try:
                    for callback in (*self._events.on_finish, *self._events.on_end):
                        callback()
                    self._arrive()
                    return
                except CommError as error:
                    self._ranks.regroup(error)

    def _stop(self) -> None:
        self._ranks.reconnection.close()
        try:
            self._ranks.disconnect()
        finally:
            for callback in self._events.on_stop:
                callback()
            self._ranks.flights.every.clear()
