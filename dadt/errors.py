"""The exception types of DADT. Each carries the exit code that `dadt` ends with."""

from __future__ import annotations


class DadtError(Exception):
    """An error the user can act on: the message says what is wrong, where, and what to do."""

    exit_code = 1


class ConfigError(DadtError):
    """A flag, variable or value is wrong; the message lists the valid ones."""

    exit_code = 2


class NotResumed(ConfigError):
    """The job cannot resume from a snapshot, because the snapshot is damaged, or the script does not reach the same
    state again or loads a checkpoint of its own."""


class Sharded(DadtError):
    """The script shards its model over several hosts. The launcher restarts the job with each host as an island, inside
    which the script shards."""


class LaunchError(DadtError):
    """Workers could not be started."""

    exit_code = 3
    is_last = False
    """Whether the job must not be restarted after this error."""


class StartTimeout(DadtError):
    """Some ranks did not connect in time; the message names these ranks and what they were doing."""

    exit_code = 124
    gone = "cannot arrive any more"
    """What an error message says of ranks that have ended. The launcher looks for this text."""


class Unproved(DadtError):
    """A process connected to a group of ranks without a proof that it belongs to the job; the message names its
    rank."""

    answered = "answered there, without a proof of the job's secret"
    """End of the sentence in an error message about a process that answered at a known address, but is not part of the
    job. The launcher looks for this text."""


class CommError(DadtError):
    """An operation between ranks failed. Raised where the training thread waits for the operation."""


class PeerLost(CommError):
    """A peer process died or closed its connection."""


class CommTimeout(CommError):
    """A peer was silent until the deadline; the message names it and the operation."""


class Mismatch(CommError):
    """Ranks submitted different operations, shapes or step numbers; the message names both sides."""


class WeightsDiffer(Mismatch):
    """Ranks have different weights at the end of training; the message names the optimizer, a parameter and the
    ranks."""


class Aborted(CommError):
    """The operation was cancelled, because this process shut down or stopped its exchanges after another error."""
