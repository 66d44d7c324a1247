"""`dadt bench advise`: the formulas, what is fitted to measurements, and a prediction beside a training."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest
from harness import ROOT
from harness.patience import PATIENCE

from dadt.algorithms.auto.ways import SHOWN, Choice
from dadt.api.run import run
from dadt.errors import ConfigError
from dadt_cli.bench import adviser, cost
from dadt_cli.bench.cost import BucketCost, Handling, LinkCost, LowRankBytes, MeasuredCosts, NetworkSpeed
from dadt_cli.bench.probe import CODECS, ProbeResult, probe

FREE = Handling(0.0, 0.0, 0.0)
MB = 1_000_000
ROOT_ONLY = pytest.mark.skipif(os.geteuid() != 0, reason="networks can be made by root only")


def figures(**other) -> MeasuredCosts:
    """100 MB of gradients in two buckets, a step of 1 s, a link of 100 MB/s."""
    made = MeasuredCosts(
        network=NetworkSpeed(alpha=0.0, bandwidth=100.0 * MB),
        handling=dict.fromkeys(cost.WIRE, FREE),
        buckets=[BucketCost(60 * MB, 0.5), BucketCost(40 * MB, 1.0)],
        buffers=[],
        forward=0.25,
        backward=0.75,
        compute=dict.fromkeys(cost.ALGORITHMS, 1.0),
        packing=0.0,
        low_rank=0.0,
        link_costs=dict.fromkeys(cost.COMPRESSIONS, LinkCost(100 * MB, 0.0, 0.0)),
        mail=0.0,
        busy=0.0,
        chunked=False,
        sync_every=32,
    )
    return replace(made, **other)


def seconds(algorithm: str, compression: str = "none", hosts: int = 2, **other) -> float:
    return cost.seconds(figures(**other), Choice(algorithm, compression), hosts)


def test_an_allreduce_sends_what_a_ring_does():
    assert cost.allreduce(figures(), 100 * MB, "none", 2) == pytest.approx(1.0)
    assert cost.allreduce(figures(), 100 * MB, "none", 4) == pytest.approx(1.5)
    assert cost.allreduce(figures(), 100 * MB, "bf16", 4) == pytest.approx(0.75)
    assert cost.allreduce(figures(), 100 * MB, "int8", 4) == pytest.approx(1.5 * 260 / 1024)
    assert cost.allreduce(figures(), 100 * MB, "none", 1) == 0.0


def test_latency_counts_for_each_step_of_the_way():
    slow = figures(network=NetworkSpeed(0.001, 1e12))
    assert cost.allreduce(slow, MB, "none", 8) == pytest.approx(0.014, rel=1e-3)
    assert cost.allreduce(slow, MB, "int8", 8) == pytest.approx(0.008, rel=1e-3)
    assert cost.allreduce(slow, 1000, "none", 8) == pytest.approx(0.007, rel=1e-3)
    chunked = replace(slow, chunked=True)
    assert cost.allreduce(chunked, 16 << 20, "none", 8) == pytest.approx(4 * 0.014, rel=1e-3)


def test_sync_hides_what_goes_while_the_backward_still_computes():
    # The first bucket goes from 0.625 to 1.225 s, so the second one from there on, to 1.625 s.
    assert seconds("sync") == pytest.approx(1.625)
    # Of one bucket nothing is hidden.
    assert seconds("sync", buckets=[BucketCost(100 * MB, 0.9)]) == pytest.approx(2.0)
    # Statistics go before the last one.
    assert seconds("sync", buckets=[BucketCost(100 * MB, 0.9)], buffers=[10 * MB]) == pytest.approx(2.1)


def test_pipe_takes_the_longer_of_compute_and_exchange():
    assert seconds("pipe", hosts=2) == pytest.approx(1.0)
    assert seconds("pipe", hosts=4) == pytest.approx(1.5)
    assert seconds("pipe", "int8", hosts=4) == pytest.approx(1.0)
    busy = {"none": Handling(0.0, 0.0, 2e-9)}
    assert seconds("pipe", handling=busy, busy=1.0) == pytest.approx(1.2)


def test_local_hides_half_a_round():
    assert seconds("local") == pytest.approx(1.0)
    # 100 MB over 2 MB/s are 50 s, of which 16 are hidden in a round of 32.
    assert seconds("local", network=NetworkSpeed(0.0, 2.0 * MB)) == pytest.approx((32 + 34) / 32)


def test_gossip_waits_for_nobody_but_shares_the_processor():
    assert seconds("gossip", network=NetworkSpeed(0.0, 1.0 * MB)) == 1.0
    # 0.3 s of the processor for each exchange of 2 s on the wire, and 0.4 s of computing that takes twice as long.
    shared = {"link_costs": {"none": LinkCost(100 * MB, 0.1, 0.2)}, "busy": 1.0}
    assert seconds("gossip", **shared) == pytest.approx(1.0 / (1 - 0.3 / 2.8))
    # On a faster network there is one for each step, and not more.
    assert seconds("gossip", network=NetworkSpeed(0.0, 1e12), **shared) == pytest.approx(1.3)
    assert seconds("gossip", network=NetworkSpeed(0.0, 1e12), mail=1e-9, **shared) == pytest.approx(1.4)
    assert seconds("gossip", hosts=1, **shared) == pytest.approx(1.3)


def test_low_rank_sends_two_thin_halves():
    buckets = [BucketCost(100 * MB, 1.0, LowRankBytes(2 * MB, 3 * MB))]
    assert seconds("sync", "powersgd:4", buckets=buckets, low_rank=0.2) == pytest.approx(1.0 + 0.02 + 0.03 + 0.2)
    assert seconds("pipe", "powersgd:4", buckets=buckets, low_rank=0.2) == pytest.approx(1.2)
    slow = NetworkSpeed(0.0, 1.0 * MB)
    assert seconds("pipe", "powersgd:4", buckets=buckets, network=slow, low_rank=0.2) == pytest.approx(2 + 3)


def test_the_best_is_what_auto_would_choose():
    sync, pipe, gossip = Choice("sync", "none"), Choice("pipe", "none"), Choice("gossip", "none")
    shown = SHOWN["sgd"]
    assert cost.best({sync: 9.6, pipe: 9.9, gossip: 30.0}, shown) == sync
    assert cost.best({sync: 9.0, pipe: 9.9, gossip: 30.0}, shown) == pipe
    few, one = Choice("pipe", "int4"), Choice("pipe", "momentum:1")
    assert cost.best({few: 1.0, one: 1.05}, SHOWN["adam"]) == few
    assert cost.best({few: 1.0, one: 2.0}, SHOWN["adam"]) == one


def test_rates_go_up_to_1024_hosts_and_fall_with_their_number():
    rates = cost.rates(figures(network=NetworkSpeed(1e-4, 100.0 * MB)), cost.HOSTS, SHOWN["sgd"])
    for way in (Choice("sync", "none"), Choice("pipe", "none")):
        assert rates[way] == sorted(rates[way], reverse=True)
    assert rates[Choice("gossip", "none")][-1] == 1.0


@pytest.mark.parametrize("kind", SHOWN)
def test_all_ways_are_predicted_that_auto_knows(kind):
    ways = list(cost.rates(figures(), [2], SHOWN[kind]))
    assert set(SHOWN[kind].costs) <= set(ways)
    assert {Choice("local", "powersgd:4", 32), Choice("gossip", "int8")} <= set(ways)
    algorithms = [way.algorithm for way in ways]
    assert algorithms == sorted(algorithms, key=cost.ALGORITHMS.index) and len(ways) == len(set(ways))


def test_with_adam_ranks_wait_for_the_averages_of_local():
    slow = figures(network=NetworkSpeed(0.0, 2.0 * MB))
    late = Choice("local", "int4", 8)
    way = late._replace(at_once=True)
    exchange = 50 * cost.WIRE["int4"]
    rates = cost.rates(slow, [2], SHOWN["adam"])
    assert 1 / rates[way][0] == pytest.approx(1 + exchange / 8)
    assert 1 / cost.rates(slow, [2], SHOWN["sgd"])[late][0] == pytest.approx(1 + (exchange - 4) / 8)
    assert cost.options(way)[-4:] == ["--sync-every", "8", "--overlap-steps", "0"]
    assert cost.options(late)[-2:] == ["--sync-every", "8"]


def found(hosts: int, alpha: float, bandwidth: float, each: float, per_byte: float) -> list[ProbeResult]:
    """What ranks would measure on such a network."""
    sizes = (MB, 4 * MB, 16 * MB)

    def exchange(compression: str) -> list[tuple[int, float]]:
        network = figures(network=NetworkSpeed(alpha, bandwidth), handling={compression: Handling(each, per_byte, 0.0)})
        return [(size, cost.allreduce(network, size, compression, hosts)) for size in sizes]

    one = ProbeResult(
        cross_rank=0,
        local_size=1,
        cores=1,
        threads=1,
        executor="gloo",
        alpha=alpha,
        pairs=[(size, alpha + size / bandwidth) for size in sizes],
        exchanges={name: exchange(name) for name in CODECS},
        processor=dict.fromkeys(CODECS, 1e-9),
        packing=1e-10,
        buckets=[(16 * MB, 1.0)],
        low_rank=[(0, 0)],
        low_rank_seconds=0.1,
        link_costs={"none": LinkCost(16 * MB, 0.01, 0.02)},
        mail=1e-9,
        buffers=[],
        parts=(0.1, 0.2, 0.1),
        busy=0.5,
        scarcity=2.0,
        parameters=4 * MB,
    )
    return [replace(one, cross_rank=rank, pairs=one.pairs if rank < 2 else []) for rank in range(hosts)]


@pytest.mark.parametrize("hosts", [2, 4])
def test_the_constants_of_a_network_are_found_again(hosts):
    made = adviser.figures_of(
        found(hosts, 2e-4, 12.5 * MB, 3e-3, 2e-9), dict.fromkeys(cost.ALGORITHMS, 0.4), sync_every=8
    )
    assert made.network.alpha == pytest.approx(2e-4)
    assert made.network.bandwidth == pytest.approx(12.5 * MB, rel=0.05)
    for name in ("bf16", "int8", "int4"):
        assert made.handling[name].per_byte == pytest.approx(2e-9, rel=0.2)
        assert made.handling[name].each == pytest.approx(3e-3, rel=0.2)
    assert made.busy == 0.5
    assert made.handling["int8"].processor == 2e-9
    assert made.link_costs["none"] == LinkCost(16 * MB, 0.02, 0.04)
    # What was measured is predicted, whatever share of it each constant has.
    for name in CODECS:
        (size, seconds), *_ = found(hosts, 2e-4, 12.5 * MB, 3e-3, 2e-9)[0].exchanges[name]
        assert cost.allreduce(made, size, name, hosts) == pytest.approx(seconds, rel=0.1)


def test_packing_counts_once():
    """It is in a step where no byte moves, and in each exchange that is measured: of local, in one of a round."""
    packed = figures(packing=1e-9)
    own = {name: adviser._unpacked(packed, name, 1.0) for name in cost.ALGORITHMS}
    assert own == pytest.approx({"sync": 0.9, "pipe": 0.9, "local": 1 - 0.1 / 32, "gossip": 1.0})


def test_a_disturbed_measurement_is_refused():
    with pytest.raises(ConfigError, match="the measurement was disturbed"):
        adviser.fit([(MB, 2.0), (4 * MB, 1.0)])


@pytest.mark.slow
@ROOT_ONLY
def test_workers_measure_the_link_between_them(tmp_path):
    ranks = run(probe, ("mlp", 4, "cpu", 0.2), np=2, link="200mbit", output="errors", log_dir=str(tmp_path))
    made = adviser.figures_of(ranks, dict.fromkeys(cost.ALGORITHMS, sum(ranks[0].parts)), sync_every=32)
    assert 0.6 * 25 * MB < made.network.bandwidth < 1.15 * 25 * MB
    assert 0 < made.network.alpha < 0.02
    assert ranks[0].executor == "tcp"
    (bucket,) = made.buckets
    assert bucket.bytes == 4 * ranks[0].parameters
    assert bucket.low_rank is not None
    assert bucket.low_rank.first + bucket.low_rank.second < bucket.bytes / 50
    # 16.3 MB at 25 MB/s: nothing else of a step takes that long.
    assert cost.seconds(made, Choice("sync", "none"), 2) > 0.5
    assert made.bytes / MB / cost.seconds(made, Choice("pipe", "none"), 2) < 1.15 * 25


@pytest.mark.slow
@ROOT_ONLY
@pytest.mark.timeout(1860)
@pytest.mark.parametrize("link", ["100mbit", "1gbit"])
def test_what_is_predicted_is_what_training_does(link, tmp_path):
    """Within 15 %, of a model for which the host waits: what else uses the cores matters less."""
    out = tmp_path / "advice.json"
    command = [sys.executable, "-m", "dadt_cli", "bench", "advise", "benchmarks.asleep:model", "--batch-size", "4"]
    done = subprocess.run(
        [*command, "-np", "2", "--link", link, "--sync-every", "8", "--check", "--json", str(out)],
        cwd=ROOT,
        timeout=15 * PATIENCE,
    )
    assert done.returncode == 0
    rows = json.loads(out.read_text())["rows"]
    off = {f"{row['algorithm']} {row['compression']}": row["error"] for row in rows if abs(row["error"]) > 0.15}
    assert not off
