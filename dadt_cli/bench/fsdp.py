"""`dadt bench fsdp`: measures a model that is sharded within each host, averaged between hosts by DADT and by torch."""

from __future__ import annotations

from typing import Any

import click

from dadt.errors import ConfigError
from dadt_cli.bench.comparison import ROUNDS, measure_in_turn, results_of
from dadt_cli.bench.figure import Outputs, writes
from dadt_cli.bench.peer import SHARDING
from dadt_cli.bench.place import WHERE, check_hosts, location_of, network_of, notes_on, ranks_of
from dadt_cli.terminal.options import Brief, config_of, some_knobs

ISLANDS = ("--island", "host")
WAYS: dict[str, tuple[str, ...]] = {
    "pipe": (),
    "sync": ("--algorithm", "sync"),
    "pipe-int8": ("--compression", "int8"),
    "pipe-int4": ("--compression", "int4"),
    "local": ("--algorithm", "local", "--sync-every", "8"),
    "auto": ("--algorithm", "auto", "--compression", "auto"),
}
"""Ways to train with DADT, and the options that each adds to `dadt run`."""
CHOSEN = "pipe,sync,pipe-int8,local,hsdp,fsdp"


@click.command(
    cls=Brief,
    context_settings={"max_content_width": 110},
    short_help="Train a small GPT, sharded within each host.",
)
@click.option("-np", "--np", type=int, metavar="N", help="Number of workers on all hosts.  [default: 4]")
@some_knobs(*WHERE)
@click.option(
    "--contenders",
    default=CHOSEN,
    show_default=True,
    metavar="LIST",
    help=f"Of {', '.join([*WAYS, *SHARDING])}.",
)
@click.option("--batch-size", default=4, show_default=True, help="Sequences of 64 tokens per worker and step.")
@click.option("--steps", default=8, show_default=True, help="Measured steps of each contender in a round.")
@click.option("--rounds", default=ROUNDS, show_default=True, help="Number of rounds; contenders take turns.")
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", show_default=True)
@writes("json", "csv", "plot")
def fsdp(
    *, outputs: Outputs, contenders: str, batch_size: int, steps: int, rounds: int, device: str, **given: Any
) -> int:
    """Train a small GPT that FSDP2 shards within each host.

    DADT averages between hosts (`--island host`), beside torch's own hybrid sharding (hsdp), FSDP over all workers
    (fsdp), and islands that average nothing (plain). Needs two hosts or more: -H, or --simulate-hosts as root.
    """
    from dadt_cli.bench.sweep import ContenderGroup
    from dadt_cli.bench.training import Contender, Task, check, copies

    config = config_of({**given, "np": given["np"] or 4})
    if not (config.hosts or config.hostfile or config.simulate_hosts > 1):
        raise ConfigError("bench fsdp: give two hosts or more, as -H host1:2,host2:2 or --simulate-hosts 2")
    ranks = ranks_of(config, config.np)
    names = list(dict.fromkeys(name.strip() for name in contenders.split(",")))
    if unknown := [name for name in names if name not in (*WAYS, *SHARDING)]:
        raise ConfigError(f"--contenders {unknown[0]}: unknown; choose from {', '.join([*WAYS, *SHARDING])}")
    ways = [Contender(name, ranks, (*ISLANDS, *WAYS[name])) for name in names if name in WAYS]
    peers = [Contender(name, ranks, peer=name) for name in names if name in SHARDING]
    chosen = [copies(ranks, ISLANDS), *ways, *peers]
    check(chosen, steps, rounds)
    check_hosts(config, ranks)
    group, task = ContenderGroup(ranks, batch_size, chosen), Task("fsdp", batch_size, device)
    measured = measure_in_turn([group], [task], location_of(config, given), steps, rounds)
    results = results_of([group], [task], measured, notes_on(config), rounds, network_of(config))
    results.report(f"fsdp, {ranks} workers, batch {batch_size} each{network_of(config)}", outputs)
    return 0
