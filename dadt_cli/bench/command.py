"""`dadt bench`: measures how fast a model trains on this machine or these hosts, and what communication costs."""

from __future__ import annotations

import re
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import click

from dadt.config import Config
from dadt.config.check import flag
from dadt.config.link import pace_of
from dadt.errors import ConfigError
from dadt_cli.bench.comparison import ROUNDS, measure_in_turn, results_of, size_of
from dadt_cli.bench.figure import BenchResults, Outputs, ResultTable, progress, writes
from dadt_cli.bench.models import MODELS, SHARDED
from dadt_cli.bench.peer import PEERS, absent, parse_peers
from dadt_cli.bench.place import WHERE, check_hosts, location_of, network_of, notes_on, ranks_of
from dadt_cli.terminal.options import Brief, config_of, some_knobs

UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
HOW = ("algorithm", "executor", "compression")
"""Flags that affect only training with DADT, not with other libraries such as DDP."""
KNOWN = (*HOW, "sync_every")
"""Settings that affect a measurement, whether set by flags, variables or a file."""

np_option = click.option("-np", "--np", "ranks", default=2, show_default=True, help="Number of workers.")


class Bench(click.Group):
    """The command group `dadt bench`. In addition to its registered commands, each model's name is a command, and
    `--model module:factory` calls the hidden command `model`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if args and args[0].partition("=")[0] == "--model":
            args = ["model", *args]
        return super().parse_args(ctx, args)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*MODELS, *SHARDED, "advise", *super().list_commands(ctx)]

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name == "advise":  # imported only when needed, since other commands do not use it
            from dadt_cli.bench.advise import advise

            return advise
        if name in SHARDED:  # imported only when needed, since other commands do not use it
            from dadt_cli.bench.fsdp import fsdp

            return fsdp
        return _train_command(name) if name in (*MODELS, "model") else super().get_command(ctx, name)


@click.group(cls=Bench)
def bench() -> None:
    """Measure how fast a model trains here and what communication costs.

    Contenders run in turn; results are medians with 95 % intervals.

    \b
    dadt bench resnet50 -np 4 --against ddp,sync
    dadt bench --model mine.models:factory -np 2
    dadt bench resnet18 -np 2 --link 1gbit     (root) on a simulated network
    dadt bench resnet18 -np 2 --link paced:1gbit     over slower connections
    dadt bench allreduce -np 2
    """


def _train_command(name: str) -> click.Command:
    """Create the command that benchmarks the model `name`; the name "model" stands for any model, given by --model."""
    given = click.Option(
        ["--model"], required=True, metavar="MODULE:FACTORY", help="Factory that returns (model, batch, loss)."
    )
    assert train.callback is not None
    text = "Train a model of your own" if name == "model" else f"Train {name}"
    return Brief(
        name,
        params=[*([given] if name == "model" else []), *train.params],
        callback=train.callback if name == "model" else partial(train.callback, model=name),
        hidden=name == "model",
        short_help=f"{text} on synthetic or real data.",
        help=f"{text}. Compare with one worker alone, as many copies that exchange nothing (plain), and the limit.",
        context_settings={"max_content_width": 110},
    )


@click.command()
@click.option("-np", "--np", type=int, metavar="N", help="Number of workers.  [default: 2]")
@some_knobs(*WHERE, *HOW)
@click.option("--batch-size", default=8, show_default=True, help="Samples per worker and backward.")
@click.option("--accumulate", default=1, show_default=True, metavar="N", help="Backwards per step.")
@click.option("--steps", default=5, show_default=True, help="Measured steps of each contender in a round.")
@click.option("--rounds", type=int, help="Number of rounds; contenders take turns.  [default: 10, in 5 minutes]")
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", show_default=True)
@click.option("--precision", type=click.Choice(["fp32", "bf16", "fp16"]), default="fp32", show_default=True)
@click.option("--optimizer", type=click.Choice(["sgd", "adam"]), default="sgd", show_default=True)
@click.option("--data", default="", metavar="PATH", help="Real data: folders of images by class, or a text file.")
@click.option("--against", multiple=True, metavar="LIST", help=f"Peers: {', '.join(PEERS)}.")
@click.option(
    "--sweep",
    multiple=True,
    metavar="LIST",
    help="Run every combination of settings, such as executor=shm,gloo,np=1,2.",
)
@writes("json", "csv", "plot")
def train(
    *, outputs: Outputs, model: str, batch_size: int, accumulate: int, steps: int, rounds: int | None, device: str,
    precision: str, optimizer: str, data: str, against: tuple[str, ...], sweep: tuple[str, ...], **given: Any,
) -> int:  # fmt: skip
    """Measure the training of a model; the commands of all models have these options."""
    config = config_of(given)
    ranks = ranks_of(config, given["np"])
    if batch_size < 1:
        raise ConfigError(f"--batch-size {batch_size}: must be 1 or more")
    if accumulate < 1:
        raise ConfigError(f"--accumulate {accumulate}: must be 1 or more")
    from dadt_cli.bench.sweep import blocks, parse_sweep
    from dadt_cli.bench.training import Task, check

    peers, notes = parse_peers(",".join(against)), notes_on(config)
    if pace_of(config.link) and "horovod" in peers:
        raise ConfigError(f"--against horovod: --link {config.link} does not reach its connections; leave it out")
    for peer in [peer for peer in peers if absent(peer)]:
        notes.append(absent(peer))
        peers.remove(peer)
    wanted = blocks(config, _chosen(config), parse_sweep(",".join(sweep)), peers, ranks, batch_size)
    for group in wanted:
        check(group.contenders, steps, ROUNDS if rounds is None else rounds)
        check_hosts(config, group.ranks)
    data = str(Path(data).absolute()) if data else ""
    tasks = [Task(model, group.batch_size, device, precision, data, accumulate, optimizer) for group in wanted]
    measured = measure_in_turn(wanted, tasks, location_of(config, given), steps, rounds)
    results = results_of(wanted, tasks, measured, notes, ROUNDS if rounds is None else rounds, network_of(config))
    results.report(f"{model}, {'; '.join(map(size_of, wanted))}{network_of(config)}", outputs)
    return 0


def _chosen(config: Config) -> list[str]:
    values = {f.name: getattr(config, f.name) for f in fields(Config) if getattr(config, f.name) != f.default}
    return [part for name in KNOWN if name in values for part in (flag(name), str(values[name]))]


@bench.command(short_help="Measure allreduce alone, as nccl-tests does.")
@np_option
@click.option("--sizes", default="64K,1M,100M", show_default=True, help="Sizes in bytes, with K, M or G.")
@click.option("--rounds", default=50, show_default=True, help="Runs of each contender.")
@writes("json", "csv", "plot")
def allreduce(outputs: Outputs, ranks: int, sizes: str, rounds: int) -> int:
    """Measure allreduce alone, as nccl-tests does: shared memory against torch's Gloo and a memcpy.

    The time includes packing and unpacking 60 float32 tensors. Exits with 1 if an element was wrong.
    """
    from dadt_cli.bench.allreduce import COLUMNS, measure

    counts = [parse_size(size) for size in sizes.split(",")]
    with progress(len(counts)) as tell:
        rows = measure(ranks=ranks, sizes=counts, rounds=rounds, progress=tell)
    title = f"allreduce of float32, {ranks} workers, {rounds} rounds"

    def picture() -> Any:
        from dadt_cli.bench import plot as pictures

        return pictures.allreduce(rows, title)

    BenchResults(rows, [ResultTable.of(title, rows, COLUMNS)], picture=picture).report(title, outputs)
    return 1 if any(row.wrong for row in rows) else 0


@bench.command(short_help="Measure a DDP step over dadt and over Gloo.")
@np_option
@click.option(
    "--width", default=2240, show_default=True, help="Width of the 5 layers (width x width each, 100 MB by default)."
)
@click.option("--batch-size", default=2, show_default=True, help="Samples per worker and step.")
@click.option("--rounds", default=20, show_default=True, help="Number of rounds; contenders take turns.")
@writes("json", "csv")
def ddp(outputs: Outputs, ranks: int, width: int, batch_size: int, rounds: int) -> None:
    """Measure a step of DistributedDataParallel over backend dadt against torch's Gloo."""
    from dadt_cli.bench.ddp import COLUMNS, measure

    row = measure(ranks=ranks, width=width, batch_size=batch_size, rounds=rounds)
    title = f"step of DDP, {ranks} workers, {rounds} rounds"
    BenchResults([row], [ResultTable.of(title, [row], COLUMNS)]).report(title, outputs)


@bench.command(short_help="Measure the time from the command to the first step.")
@np_option
@click.option("--rounds", default=5, show_default=True, help="Starts of each contender.")
@writes("json", "csv")
def startup(outputs: Outputs, ranks: int, rounds: int) -> None:
    """Measure the time from the command to the first step: `dadt run` against torchrun."""
    from dadt_cli.bench.startup import COLUMNS, measure

    with progress(2 * (rounds + 1)) as tell:
        rows = measure(ranks=ranks, rounds=rounds, progress=tell)
    title = f"start of {ranks} workers, {rounds} rounds"
    BenchResults(rows, [ResultTable.of(title, rows, COLUMNS)]).report(title, outputs)


def parse_size(text: str) -> int:
    """Parse a size such as 1000, 64K, 1.5M or 1G into bytes.

    Raises ConfigError for anything else.
    """
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([KMG]?)i?B?", text.strip(), re.IGNORECASE)
    if match is None:
        raise ConfigError(f"--sizes {text}: give sizes as 64K,1M,100M")
    return int(float(match[1]) * UNITS[match[2].upper()])
