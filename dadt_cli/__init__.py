"""The command line of DADT. Each subcommand is imported only when it is called, so `dadt --help` needs neither torch
nor rich."""

from __future__ import annotations

import gc
import importlib
import os
import sys

import click
from click.shell_completion import CompletionItem

import dadt
from dadt.errors import DadtError
from dadt_cli.terminal import console

COMMANDS = {
    "run": ("dadt_cli.run.command", "Train a script on several workers."),
    "check-env": ("dadt_cli.check_env.command", "Check whether training can work here and on other hosts."),
    "config": ("dadt_cli.config", "Show all settings and where they come from."),
    "ps": ("dadt_cli.jobs.ps", "List your jobs on this machine, or the ranks of one."),
    "logs": ("dadt_cli.jobs.logs", "Print what the workers of a job have printed."),
    "stacks": ("dadt_cli.jobs.stacks", "Print the Python stacks of every rank of a running job."),
    "timeline": ("dadt_cli.report.timeline", "Summarize a recorded timeline."),
    "report": ("dadt_cli.jobs.report", "Write a page about how a job went."),
    "compare": ("dadt_cli.compare.command", "Compare the weights in two files."),
    "kill": ("dadt_cli.jobs.kill", "End a job."),
    "bench": ("dadt_cli.bench.command", "Measure how fast a model trains, and what communication costs."),
}


LATER = {"While a job runs": ("ps", "logs", "stacks", "kill"), "Afterwards": ("timeline", "report", "compare")}
"""Sections of `dadt --help` after the section "Commands": each title with the names of its commands."""
FLAGS = ("-h", "--help", "--version")


class LazyGroup(click.Group):
    """A click group that lists each command with a one-line description and imports only the command that is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in COMMANDS:
            return None
        command = getattr(importlib.import_module(COMMANDS[name][0]), name.replace("-", "_"))
        assert isinstance(command, click.Command)
        return command

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the command line; for a command that does not exist, raise click.UsageError with a suggestion."""
        if args and args[0] not in COMMANDS and args[0] not in FLAGS:
            from dadt_cli.terminal import suggestion

            if hint := suggestion.command(args, COMMANDS):
                raise click.UsageError(f"{args[0]}: there is no such command; {hint}", ctx)
        return super().parse_args(ctx, args)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Complete names of commands without importing any command."""
        found = [(name, sentence) for name, (_, sentence) in COMMANDS.items() if name.startswith(incomplete)]
        return [CompletionItem(name, help=sentence) for name, sentence in found] + click.Command.shell_complete(
            self, ctx, incomplete
        )

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        known = {name: sentence for name, (_, sentence) in COMMANDS.items()}
        later = {name for names in LATER.values() for name in names}
        width = max(map(len, known))
        for title, names in {"Commands": [name for name in known if name not in later], **LATER}.items():
            with formatter.section(title):
                formatter.write_dl([(name.ljust(width), known[name]) for name in names if name in known])


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(dadt.__version__, prog_name="dadt")
def dadt_command() -> None:
    """Train a PyTorch script on several workers, without changing it.

    \b
    dadt run -np 4 train.py                      instead of python train.py
    dadt run -np 4 -H host1:2,host2:2 train.py   on two hosts
    dadt check-env                               check whether it would work
    dadt COMMAND --help                          list the options of a command
    """


def main() -> None:
    """Run a command and exit with its code. No other place in the program exits."""
    _open_streams()
    code = _run()
    # Without gc.freeze(), the exiting interpreter would collect garbage among all imported objects, which takes time.
    gc.freeze()
    sys.exit(code)


def _open_streams() -> None:
    """Open the null device for each standard stream that was closed when the process started. Otherwise the next file
    that is opened would get the stream's number and receive everything printed."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            # The descriptor from open() may already be the stream's own number, since open() returns the lowest free
            # number.
            os.dup2(os.open(os.devnull, os.O_RDWR), number)
            os.set_inheritable(number, True)
            setattr(sys, name, open(number, "w" if number else "r", closefd=False))  # noqa: SIM115


def _run() -> int:
    try:
        return int(dadt_command.main(prog_name="dadt", standalone_mode=False) or 0)
    except click.exceptions.NoArgsIsHelpError as error:
        console.text(error.format_message())
        return 2
    except click.UsageError as error:
        # The error of click does not always contain the name of the command, so the name is read from the arguments.
        named = sys.argv[1:2] if set(sys.argv[1:2]) <= COMMANDS.keys() else []
        command = error.ctx.command_path if error.ctx else " ".join(["dadt", *named])
        console.error(f"{error.format_message().rstrip('.')} ({command} --help lists what there is)")
        return 2
    except console.ReaderGone as error:
        return error.exit_code
    except DadtError as error:
        console.error(str(error))
        return error.exit_code
    except OSError as error:
        if error.errno in console.FULL and error.filename is None:
            # The file of stdout is on a full disk, so the rest of the buffer, which is flushed at exit, goes to the
            # null device.
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            console.error(f"stdout: {error.strerror}")
            return 1
        if error.filename is None:
            raise
        console.error(f"{os.fsdecode(error.filename)}: {error.strerror}")
        return 2
    except (KeyboardInterrupt, click.Abort):
        return 130
