"""A job that was killed whole goes on from a snapshot, and ends with the weights that it would have ended with."""

from __future__ import annotations

import re

import pytest
from harness.replayed import HEAD, SCRIPTS

OPTIONS = ["-np", "2", "--warmup-steps", "5", "--snapshot-every", "10steps", "--seed", "7"]


def ends(result) -> dict[str, str]:
    """Weights by rank."""
    assert result.code == 0, result.err
    lines = [line.split() for line in result.out.decode().splitlines() if "ends with" in line]
    found = {words[0]: words[-1] for words in lines}
    assert len(found) == 2, result.out
    return found


@pytest.mark.parametrize("name", [name for name in SCRIPTS if name != "hidden-state"])
@pytest.mark.parametrize("algorithm", ["pipe", "sync"])
def test_a_killed_job_ends_as_if_nothing_had_been(launch, name: str, algorithm: str) -> None:
    options = ["--algorithm", algorithm, *OPTIONS]
    script = HEAD + SCRIPTS[name]
    expected = ends(launch(script, *options, "train.py"))
    killed = launch(script, *options, "train.py", DIE="26")
    assert killed.code != 0
    resumed = launch(script, *options[:-2], "--resume", killed.job, "train.py")
    assert ends(resumed) == expected
    assert re.search(r"resumed: [1-5]0 steps replayed", resumed.err), resumed.err


def test_what_cannot_be_made_again_is_refused(launch) -> None:
    script = HEAD + SCRIPTS["hidden-state"]
    killed = launch(script, *OPTIONS, "train.py", DIE="26")
    assert killed.code != 0
    resumed = launch(script, *OPTIONS, "--resume", killed.job, "train.py")
    assert resumed.code == 2
    assert "comes to another batch than it has trained on before" in resumed.err
    assert "Traceback" not in resumed.err
