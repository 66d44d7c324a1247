"""The exception types of DADT. Each carries the exit code that `dadt` ends with."""

from __future__ import annotations


class DadtError(Exception):
    """An error the user can act on: the message says what is wrong, where, and what to do."""

    exit_code = 1


class ConfigError(DadtError):
    """A flag, variable or value is wrong; the message lists the valid ones."""

    exit_code = 2


class NotResumed(ConfigError):
    """The script does not come to where it was when the snapshot was taken, or goes on from something else."""


class LaunchError(DadtError):
    """Workers could not be started."""

    exit_code = 3


class StartTimeout(DadtError):
    """Some ranks never arrived; the message names them and what they were doing."""

    exit_code = 124


class Unproved(DadtError):
    """A process that does not belong to the job joined a group of ranks; the message names its rank."""

    answered = "answered there, without a proof of the job's secret"
    """So ends what the message says of a process that is known."""


class CommError(DadtError):
    """An operation between ranks failed. Raised where the training thread waits for it."""


class PeerLost(CommError):
    """A peer process died or closed its side."""


class CommTimeout(CommError):
    """A peer was silent until the deadline; the message names it and the operation."""


class Mismatch(CommError):
    """Ranks submitted different operations, shapes or step numbers; the message names both sides."""


class WeightsDiffer(Mismatch):
    """Ranks have ended with different weights; the message names the optimizer, a parameter and the ranks."""


class Aborted(CommError):
    """The engine was aborted by this process (shutdown, or after another error)."""
