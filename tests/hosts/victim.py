"""A job that a fault strikes, whether its processes are real ones or those of the simulated world."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random


class Victim:
    """What a fault can do to a job. Ranks and hosts go by their numbers. Each kind of job offers a part of it."""

    chance = Random(0)
    """Draws whom a fault strikes, and when."""
    hosts: Sequence[int] = ()

    def ranks(self, host: int) -> set[int]:
        raise NotImplementedError

    def pause(self, seconds: float) -> None:
        """What was done lasts so long before the next thing is."""
        raise NotImplementedError

    def finish(self) -> None:
        """All ranks are to end well."""
        raise NotImplementedError

    def signal(self, rank: int, number: int) -> None:
        raise NotImplementedError

    def signal_in_save(self, rank: int, number: int) -> None:
        """While this rank saves."""
        raise NotImplementedError

    def signal_agent(self, host: int, number: int) -> None:
        raise NotImplementedError

    def signal_launcher(self, number: int) -> None:
        raise NotImplementedError

    def run(self, code: str) -> None:
        """Rank 1 runs this between two steps of its script."""
        raise NotImplementedError

    def cut_power(self, host: int) -> None:
        raise NotImplementedError

    def cut_data(self, host: int, other: int) -> None:
        raise NotImplementedError

    def cut_control(self, host: int) -> None:
        raise NotImplementedError

    def cut_both(self, host: int) -> None:
        raise NotImplementedError

    def heal(self) -> None:
        """All that was cut goes through again."""
        raise NotImplementedError

    def slow(self, host: int) -> None:
        """It sends 1 Mbit/s from now on."""
        raise NotImplementedError

    def starve(self, rank: int) -> None:
        """It takes more memory than there is, and the kernel kills it."""
        raise NotImplementedError

    def step_clock(self, seconds: int) -> None:
        """The clock of all processes on one host jumps."""
        raise NotImplementedError

    def fill_logs(self) -> None:
        """The disk for the logs of the job is full."""
        raise NotImplementedError

    def fill_saves(self, host: int) -> None:
        """The disk for the files of the script is full, on this host."""
        raise NotImplementedError
