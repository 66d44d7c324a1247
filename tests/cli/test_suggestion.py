"""Flags of other launchers: what `dadt run` says of them."""

from __future__ import annotations

import re

import click
import pytest
from torch.distributed.run import get_args_parser

from dadt.errors import ConfigError
from dadt_cli import dadt_command
from dadt_cli.run.command import run
from dadt_cli.terminal.suggestion import without_space

FLAGS = {name for each in run.params if isinstance(each, click.Option) for name in (*each.opts, *each.secondary_opts)}


def said(*arguments: str) -> str:
    with pytest.raises(click.UsageError) as error:
        dadt_command.main(["run", *arguments, "train.py"], prog_name="dadt", standalone_mode=False)
    return error.value.format_message()


@pytest.mark.parametrize(
    ("given", "hint"),
    [
        ("--nproc-per-node 4", "give -np 4, the number of all workers"),
        ("--nproc_per_node=4 --nnodes=1", "give -np 4, the number of all workers"),
        ("--standalone --nproc_per_node=4", "leave it out: workers of one host meet by themselves"),
        ("--nnodes 2 --nproc-per-node 4", "give -np 8, the number of all workers: once, with -H host1:4,host2:4"),
        ("--nnodes=1:4", "give one number of hosts; --min-np M lets a job train on with M workers"),
        ("--nproc-per-node gpu", "hosts named without one, -H host1,host2, get a worker for each GPU"),
        ("--nproc-per-node", "give -np N, the number of all workers"),
        ("--node_rank 1", "give --node-rank"),
        ("--num_gpus 2", "give -np 2, the number of all workers"),
        ("--num_machines 2", "name the hosts, -H host1,host2"),
        ("-r 3", "leave it out: all output is kept"),
        ("--log_line_prefix_template x", "leave it out: the rank stands before each line"),  # of torch 2.14
        ("--algoritm pipe", "did you mean"),
    ],
)
def test_what_to_give_in_place_of_a_flag(given: str, hint: str) -> None:
    assert hint in said(*given.split())


def test_every_flag_of_torchrun_is_known_or_has_a_hint_that_names_flags_of_ours() -> None:
    for action in get_args_parser()._actions:
        for name in set(action.option_strings) - FLAGS - {"-h", "--help"}:
            hint = said(name, *([] if action.nargs == 0 else ["1"]))
            assert f"{name}: there is no such flag; " in hint, hint
            named = set(re.findall(r"(?<![\w-])--?[A-Za-z][\w-]*", hint)) - {name}
            assert named <= FLAGS, hint


def test_a_number_of_workers_without_a_space() -> None:
    assert without_space(["-np2", "-v", "-np=3", "-np", "4", "-npx"]) == [
        "-np",
        "2",
        "-v",
        "-np",
        "3",
        "-np",
        "4",
        "-npx",
    ]
    with pytest.raises(ConfigError, match=r"no_such\.py: there is no such script"):
        dadt_command.main(["run", "-np2", "no_such.py", "-np3", "--standalone"], "dadt", standalone_mode=False)
