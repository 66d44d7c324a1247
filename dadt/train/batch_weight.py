"""The weight of a rank's gradient in the mean: how full the batches of its step are."""

from __future__ import annotations


class BatchWeight:
    """The weight for one optimizer, by the batches that shared loaders hand to the script."""

    def __init__(self) -> None:
        self.value = 1.0
        self.drawn = 0
        """Batches since the last exchange."""
        self._samples = 0.0
        self._fills_up = False
        """Whether the weight is 1 again from the next step on, unless that step draws."""

    def drew(self, samples: int, nominal: int) -> None:
        """A batch of a shared loader was handed to the script; samples of it count, of nominally so many."""
        if self.drawn == 0:
            self._samples = 0.0
        self._fills_up = False
        self.drawn += 1
        self._samples += samples / max(nominal, 1)
        self.value = self._samples / self.drawn

    def pass_over(self) -> None:
        """A shared loader has come to its end: a step that draws nothing (the script repeats batches that it has
        kept) counts in full, as it is not known which batch it takes."""
        if self.drawn:  # what was accumulated since the last step is still to be used
            self._fills_up = True
        else:
            self.value = 1.0

    def exchanged(self) -> None:
        """The gradients of what was drawn so far are on their way."""
        self.drawn = 0

    def stepped(self) -> None:
        if self._fills_up:
            self.value, self._fills_up = 1.0, False
