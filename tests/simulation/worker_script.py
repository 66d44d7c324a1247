"""What the ranks of a simulated job run, and how that ends."""

from __future__ import annotations

from dataclasses import dataclass

BATCH_SIZE = 2


class ScriptError(Exception):
    """The script's own exception."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind
        """The name of its class."""


class Interrupted(KeyboardInterrupt):
    """Ctrl-C, as the script gets it."""


class Exit(Exception):
    """The script calls `sys.exit`, or its process ends by itself."""

    def __init__(self, code: int, *, at_once: bool) -> None:
        super().__init__(code)
        self.code, self.at_once = code, at_once


@dataclass(frozen=True, slots=True)
class Script:
    """What the ranks of a job run."""

    steps: int
    step_seconds: float
    start_seconds: float
    on_interrupt: str
    """What it does on Ctrl-C: end, save, or ignore."""
    on_terminate: str
    """What it does on SIGTERM: end, save, or ignore."""
    save_seconds: float
    ends_when_saved: bool
    optimizers: int
    """How many optimizers each step has."""
    samples: int
    """How many samples each pass over the data has."""
    evaluate_every: int
    """After how many steps the ranks gather a measure; 0: never."""
    gathers_seldom: bool
    """Whether there are steps between which ranks gather nothing, so that a new worker can be let in."""
    exit_seconds: float = 0.1
    """What a process takes to end once its script has ended."""
