"""The command line for another machine's shell, and what its end means."""

from __future__ import annotations

from pathlib import Path

import pytest

from dadt.config import Config
from dadt.errors import ConfigError
from dadt.launch.hosts.host import Host
from dadt.launch.launchers import remote_shell


def test_only_pythons_path_is_part_of_the_command() -> None:
    assert remote_shell.command("/opt/v/bin/python3.11") == "cd /; exec /opt/v/bin/python3.11 -u -m dadt.launch.agent"
    assert remote_shell.command("~/v/bin/python") == "cd /; exec ~/v/bin/python -u -m dadt.launch.agent"
    assert remote_shell.command("/my python") == "cd /; exec '/my python' -u -m dadt.launch.agent"
    assert remote_shell.command("$(touch x);`y`") == "cd /; exec '$(touch x);`y`' -u -m dadt.launch.agent"


@pytest.mark.parametrize("python", ["it's", "a\nb", "!x", "a\\b"])
def test_a_python_that_no_quotes_can_hold_is_refused(python: str) -> None:
    with pytest.raises(ConfigError, match="--python"):
        remote_shell.command(python)


def test_what_is_shown_can_be_typed() -> None:
    config = Config(ssh_port=2222, ssh_identity_file="~/.ssh/key", ssh_config="my config")
    shown = remote_shell.shown(config, Host(name="node1", user="me"), remote_shell.command("python3"))
    key = Path("~/.ssh/key").expanduser()
    expected = f"ssh -F 'my config' -p 2222 -i {key} me@node1 'cd /; exec python3 -u -m dadt.launch.agent'"
    assert shown == expected


@pytest.mark.parametrize(
    ("code", "noise", "stderr", "text"),
    [
        (0, "hello", "anything", ""),
        (127, "", "bash: line 1: /p: No such file or directory", "there is no /p -> "),
        (1, "", "/p: Command not found.", "there is no /p -> "),
        (126, "", "sh: /p: Permission denied", "/p cannot be run there (sh: /p: Permission denied) -> "),
        (1, "", "/p: No module named dadt", "/p there has no dadt -> "),
        (1, "", "/p: No module named dadt.launch.agent", "/p there has an older dadt -> install the same version"),
        (1, "", "/p: Error while finding module (ModuleNotFoundError: No module named 'dadt')", "/p there has no dadt"),
        (
            1,
            "",
            "Traceback (most recent call last):\nFileNotFoundError: not found",
            "the agent exited with code 1; its",
        ),
        (1, "no shell for you", "", "the agent exited with code 1; its last words: no shell for you"),
        (None, "", "", "the agent was killed by a signal"),
        (-9, "", "", "the agent was killed by signal 9 (SIGKILL)"),
    ],
)
def test_how_an_agent_ended(code: int | None, noise: str, stderr: str, text: str) -> None:
    said = remote_shell.explain(code, noise.encode(), stderr.encode(), "/p")
    assert said.startswith(text) and bool(said) == bool(text)
