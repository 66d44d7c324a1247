"""The end of a rank: all meet once more, so that none that ends early goes unnoticed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cached_property
from typing import TYPE_CHECKING

from dadt.config import Config
from dadt.errors import CommError, CommTimeout, DadtError, PeerLost, StartTimeout
from dadt.train.algorithm import Algorithm
from dadt.train.final_weights import FinalWeights
from dadt.train.registry import Registry
from dadt.world import World

if TYPE_CHECKING:
    from dadt.control.worker_line import WorkerLine


class Departure(Registry):
    """A rank that trains by an algorithm until its script ends."""

    def __init__(
        self,
        world: World,
        config: Config,
        control: WorkerLine | None,
        find: Callable[[str], type[Algorithm]],
    ) -> None:
        """find: returns the class of the algorithm with a name."""
        super().__init__(world, config, control)
        self._find = find
        self.on_end: list[Callable[[], None]] = []
        """Called when the script has ended, whatever has become of its optimizers: in one order on all ranks."""
        self.on_stop: list[Callable[[], None]] = []
        """Called last, also after a failure: messages under way have failed, and threads that use torch end here, as
        the interpreter aborts the process where it ends and they do not."""
        self.final_weights = FinalWeights(self)
        self._arrived = False
        """Whether all ranks are at their end."""

    @property
    def algorithm(self) -> type[Algorithm]:
        """The class of all optimizers' algorithm; `dadt.init` may change it before training begins."""
        return self._find("auto" if self.config.compression == "auto" else self.config.algorithm)

    @cached_property
    def together(self) -> bool:
        """Whether all ranks take the same steps; else each goes at its own speed, and waits for nobody between them."""
        return self.alone or self.algorithm.together

    def regroup(self, error: CommError) -> None:
        """Ranks were lost, or a connection has failed: connect again with those that are left, and go on. Raises the
        error where it says something else, or where training cannot go on."""
        if self.together or not self.survives:
            self.connect_anew(error)
        else:
            self.reconnection.wait(error)

    def close(self, *, failed: bool = False) -> None:
        """Meet the peers a last time, so that a rank that ends early is noticed; then stop the engine. Idempotent."""
        if self.closing:
            return
        self.closing = True
        try:
            self._leave(failed)
        except CommError:  # a peer did not come to the end in time; it has trained all the same
            with suppress(DadtError):
                self._tell_end()
            raise
        self._tell_end()

    def _tell_end(self) -> None:
        if self.control is not None:
            if self.step:
                self.control.progress(self.step, last=True, **self.progress.numbers())
            self.control.done({**self.progress.summary(), "explicit": self.explicit})

    def _leave(self, failed: bool) -> None:
        told: Sequence[bytes] = ()
        if self._engine is not None:
            try:
                if failed or self.deaths.preempted or self.interruption.apart:
                    why = "it is preempted" if self.deaths.preempted else "it was interrupted (Ctrl-C)"
                    how = "failed" if failed else f"has left, as {why}"
                    self._engine.abort(f"rank {self.world.rank} {how}")
                elif self._engine.error is None or (self.survives and (self.deaths.outdated or not self.together)):
                    if self.control is not None:
                        self.control.ending(self.step)
                    if self._is_left_alone:
                        return
                    if self.together:
                        self._arrive()
                    for attachment in self.attachments:
                        attachment.algorithm.finish()
                    if not self.together:
                        self._arrive_apart()
                    for callback in self.on_end if self.together else ():
                        callback()
                    told = self.tell(self._end, self.final_weights.tell() if self._is_same else b"")
                    self.merge_timelines()
            except CommError:
                if not self._arrived or not self.survives:
                    raise  # else all have trained to the end, and what becomes of the others now is no matter
            finally:
                self._stop()
        elif not failed:
            self.merge_timelines()
        elif self.timeline is not None:
            self.timeline.stop()
        self.final_weights.compare(told)

    @property
    def _is_left_alone(self) -> bool:
        """Whether DADT has trained nothing, and what the script trains by itself need not run alike: each rank ends
        when it does."""
        alone = not self.explicit and (len(self.left_alone) > 0 or self.progress.left_alone > 0)
        return alone and not self.progress.measures and self.timeline is None

    @property
    def _is_same(self) -> bool:
        """Whether all ranks have taken the same steps."""
        # With gradients of its own a rank's scaler may have left out steps that others took.
        return self.alone or (self.algorithm.identical and not self.parted)

    @property
    def _end(self) -> str:
        return f"the end, after {self.step - self.progress.left_alone} steps" if self._is_same else "the end"

    def _arrive(self) -> None:
        """Meet the others at the end. Raises where some do not come: those that wait for this rank say so, and fail.

        Once all are there, what is still in flight ends, too: the engine runs in order.
        """
        while self.control is not None and (self.survives or not self._mismatch_is_told):
            try:
                self.meet_within(self.config.timeout).exchange("the end", self._end.encode())
                self._arrived = True
                return
            except StartTimeout as error:
                raise CommTimeout(str(error)) from error
            except PeerLost as error:
                if not self.together:
                    raise
                try:
                    self.regroup(error)
                except StartTimeout as late:  # it has not come to meet the others once more, and may be at its end
                    raise CommTimeout(str(late)) from late

    def _arrive_apart(self) -> None:
        """The last averages, each rank when it is there. Where ranks are lost meanwhile, all that are left average once
        more: nobody knows who has done so already."""
        with self.reconnection.within():
            while True:
                try:
                    for callback in self.on_end:
                        callback()
                    self._arrive()
                    return
                except CommError as error:
                    self.regroup(error)

    def _stop(self) -> None:
        self.reconnection.close()
        try:
            self.disconnect()
        finally:
            for callback in self.on_stop:
                callback()
            self.flights.every.clear()
