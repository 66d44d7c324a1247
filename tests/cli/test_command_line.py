"""The command line itself: quick, and documented from the knobs."""

from __future__ import annotations

import os
import re
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import click
import pytest
from harness import ROOT, forkserver
from harness.patience import PATIENCE
from harness.run import DADT

import dadt
from dadt.config import Config
from dadt.config.check import flag
from dadt_cli import COMMANDS, dadt_command


def call(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([forkserver.dadt(), *arguments], capture_output=True, text=True, timeout=PATIENCE)


def test_help_imports_neither_torch_nor_numpy_nor_rich():
    program = (
        "import sys\nfrom dadt_cli import main\nsys.argv = ['dadt', '--help']\n"
        "try: main()\nfinally: print(sorted({'torch', 'numpy', 'rich', 'psutil'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0
    assert done.stdout.splitlines()[-1] == "[]"


def test_help_takes_little_longer_than_python_itself():
    def seconds(command: list[str]) -> float:
        """Of a processor, as others use the machine, too."""
        with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
            _, status, usage = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
        assert process.returncode == 0
        return usage.ru_utime + usage.ru_stime

    bare = [sys.executable, "-c", "import click, json, subprocess"]
    pairs = [(seconds([*DADT, "--help"]), seconds(bare)) for _ in range(8)]
    mine, others = map(min, zip(*pairs, strict=True))
    assert mine / others < 3


def test_version():
    assert call("--version").stdout == f"dadt, version {dadt.__version__}\n"


def test_every_knob_has_a_flag_and_the_advanced_ones_are_listed_on_demand():
    short = call("run", "--help").stdout
    long = call("run", "--help-all").stdout
    for field in fields(Config):
        assert flag(field.name) in long
        shown = re.search(rf" {flag(field.name)}(?![\w-])", short) is not None
        assert shown != field.metadata["advanced"], field.name
    for other in ("--no-python", "130 after Ctrl-C"):
        assert other in long
        assert other not in short


def contexts(command: click.Command, name: str, parent: click.Context | None = None) -> Iterator[click.Context]:
    """Of the command and of all below it, on a terminal of 80 columns."""
    context = click.Context(command, parent, name, terminal_width=80)
    yield context
    if isinstance(command, click.Group):
        for below in command.list_commands(context):
            found = command.get_command(context, below)
            assert found
            yield from contexts(found, below, context)


def test_every_help_fits_a_screen():
    helps = {context.command_path: context.get_help().splitlines() for context in contexts(dadt_command, "dadt")}
    assert {"dadt", "dadt run", "dadt bench resnet18"} <= helps.keys()
    # 40 lines, with the command that was typed and the next prompt.
    assert not {path: len(lines) for path, lines in helps.items() if len(lines) > 38}
    assert not {path: line for path, lines in helps.items() for line in lines if len(line) > 80}
    # No command is told of by half a sentence.
    assert not {path: line for path, lines in helps.items() for line in lines if re.match(r"  \S+  .*\.\.\.$", line)}


INSTALL = (ROOT / "docs" / "install.md").read_text()
SETUP = {
    shell: line.replace("\\|", "|") for line, shell in re.findall(r"`(.*_DADT_COMPLETE=(\w+)_source.*?)`", INSTALL)
}
"""What the page tells users of each shell to write."""
BASH = """\
eval "$SETUP"
complete -p dadt >/dev/null || exit 1
compopt() { echo "$@"; }
COMP_WORDS=("$@") COMP_CWORD=$(($# - 1))
_dadt_completion dadt
printf '%s\\n' "${COMPREPLY[@]}"
"""
FISH = """\
eval $SETUP
complete -C "$argv"
"""
ZSH = """\
compdef() { [[ $* = "_dadt_completion dadt" ]] || exit 1 }
_describe() { print -rl -- ${${(P)3}%%:*} }
compadd() { print -rl -- ${(P)argv[-1]} }
eval "$SETUP"
words=("$@") CURRENT=$#
_dadt_completion
"""


def complete(*words: str, shell: str = "bash") -> list[str]:
    """What the shell offers when TAB is hit behind the last word."""
    if shutil.which(shell) is None:
        pytest.skip(f"there is no {shell}")
    path = f"{Path(forkserver.dadt()).parent}{os.pathsep}{os.environ['PATH']}"
    command = {
        "bash": ["bash", "-c", BASH, "bash", *words],
        "fish": ["fish", "--no-config", "-c", FISH, " ".join(words)],
        "zsh": ["zsh", "-f", "-c", ZSH, "zsh", *words],
    }[shell]
    env = {**os.environ, "PATH": path, "SETUP": SETUP[shell]}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=PATIENCE)
    assert (done.returncode, done.stderr) == (0, "")
    return [line.partition("\t")[0] for line in done.stdout.splitlines() if line]


@pytest.mark.parametrize("shell", ["bash", "fish", "zsh"])
def test_shells_complete_commands_options_and_values(shell):
    assert set(complete("dadt", "", shell=shell)) == set(COMMANDS)
    assert complete("dadt", "run", "--algorithm", "g", shell=shell) == ["gossip"]


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (["run", "--out"], {"--output", "--outer-lr", "--outer-momentum"}),  # of which two are for --help-all
        (["run", "-np", "2", "--launcher", "s"], {"ssh", "slurm"}),
        (["run", "-np", "2", "tr"], {"-o default"}),  # bash goes on with the names of files
        (["run", "--log-dir", ""], {"-o dirnames"}),
        (["run", "train.py", "--"], set()),  # the script's own options
        (["compare", ""], {"-o default"}),
        (["timeline", "out"], {"-o default"}),
        (["report", "late"], {"latest"}),
        (["logs", "--log-dir", ""], {"-o dirnames"}),
        (["bench", "advise", "gpt"], {"gpt2-small"}),
        (["bench", "all"], {"allreduce"}),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bash_completes(words, offered):
    assert set(complete("dadt", *words)) == offered


def test_common_options_are_offered_first():
    offered = complete("dadt", "run", "--")
    assert "--algorithm" in offered
    assert "--outer-lr" not in offered


def test_completion_imports_neither_torch_nor_a_command():
    program = (
        "import os, sys\nfrom dadt_cli import main\nsys.argv = ['dadt']\n"
        "os.environ.update(_DADT_COMPLETE='bash_complete', COMP_WORDS='dadt ', COMP_CWORD='1')\n"
        "try: main()\nfinally: print(sorted({'torch', 'numpy', 'rich', 'dadt_cli.run.command'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[]"
    assert "plain,run" in done.stdout


def test_without_a_command_help_is_shown():
    done = call()
    assert done.returncode == 2
    assert "Commands:" in done.stdout + done.stderr


BEHIND = "dadt run has no such flag; if it is the script's, give it behind the script: dadt run -np 2"
SCRIPT = "there is no such command; a script is run by dadt run -np 2"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("xyz", "No such command 'xyz'"),
        ("rnu -np 2 train.py", "rnu: there is no such command; did you mean dadt run -np 2 train.py?"),
        ("train.py --epochs 3", f"train.py: {SCRIPT} train.py --epochs 3"),
        ("-np 2 train.py", f"-np: {SCRIPT} train.py"),
        ("run -np 2 --epochs 3 train.py", f"--epochs: {BEHIND} train.py --epochs 3"),
        ("run --lr=0.1 -np 2 a.py -v", f"--lr: {BEHIND} a.py -v --lr=0.1"),
        ("run --fp16 -np 2 a.py", f"--fp16: {BEHIND} a.py --fp16"),
        ("run --algoritm sync a.py", "--algoritm: dadt run has no such flag; did you mean --algorithm?"),
        ("run --epochs", "No such option '--epochs'"),
        ("run -np -1 a.py", "-np -1: the number of workers must be 1 or more, or 0 for one per slot"),
    ],
)
def test_slips_are_one_sentence(arguments: str, sentence: str):
    done = call(*arguments.split())
    assert done.returncode == 2
    assert done.stderr.startswith(f"dadt: {sentence}"), done.stderr
    assert done.stderr.count("\n") == 1


def test_a_dry_run_of_many_hosts_shows_some_of_them(tmp_path):
    (tmp_path / "hosts").write_text("".join(f"node{i} slots=2\n" for i in range(30)))
    done = call("run", "--hostfile", str(tmp_path / "hosts"), "--dry-run", "--no-python", "true")
    assert done.returncode == 0 and "\n59    node29  1 " in done.stdout
    assert done.stdout.count("  rank ") == 2 * 16 and done.stdout.endswith("\nand 14 more hosts in the same way\n")


def test_no_number_of_workers_is_one_for_each_slot():
    done = call("run", "-np", "0", "-H", "localhost:3", "--dry-run", "--no-python", "true")
    assert done.returncode == 0 and done.stdout.startswith("3 workers on localhost"), done.stderr


FIRST_STEP = """\
import os, time, torch
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
model(torch.randn(8, 4)).sum().backward()
optimizer.step()
if os.environ["RANK"] == "0": print("seconds", time.time() - float(os.environ["BEGIN"]))
"""


@pytest.mark.slow
def test_the_first_step_comes_about_as_soon_as_with_torchrun(tmp_path):
    (tmp_path / "train.py").write_text(FIRST_STEP)

    def seconds(command: list[str]) -> float:
        env = {**os.environ, "BEGIN": str(time.time())}
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=PATIENCE)
        return float(done.stdout.rpartition("seconds ")[2])

    torchrun = [str(Path(sys.executable).with_name("torchrun")), "--nproc-per-node", "2", "train.py"]
    pairs = [(seconds([*DADT, "run", "-np", "2", "train.py"]), seconds(torchrun)) for _ in range(3)]
    assert statistics.median(ours / theirs for ours, theirs in pairs) < 1.2
