"""`dadt bench MODEL`: what is measured, how it is computed, and how it is told."""

from __future__ import annotations

import csv
import json
import os
import re
import subprocess
import sys
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from harness.patience import PATIENCE

from dadt.config import Config
from dadt.errors import ConfigError
from dadt_cli.bench import models, training
from dadt_cli.bench.command import bench
from dadt_cli.bench.conclusion import conclusion
from dadt_cli.bench.data import Images, Text
from dadt_cli.bench.fsdp import ISLANDS
from dadt_cli.bench.line import Hello, Worked
from dadt_cli.bench.models import resnet, transformer, vgg
from dadt_cli.bench.party import Location
from dadt_cli.bench.place import location_of
from dadt_cli.bench.ratio import Interval
from dadt_cli.bench.sweep import blocks, parse_sweep
from dadt_cli.bench.training import Contender, Task, alone, copies, limit, rows
from dadt_cli.terminal.options import config_of

DADT = [sys.executable, "-m", "dadt_cli", "bench"]
FACTORY = """
import torch

def small():
    def loss(model, x, y):
        return torch.nn.functional.mse_loss(model(x), y)

    return torch.nn.Linear(3, 2), lambda size: (torch.randn(size, 3), torch.randn(size, 2)), loss

def wrong():
    return torch.nn.Linear(3, 2)
"""


def run(folder: Path, *arguments: object, code: int = 0) -> str:
    """What it prints, on stdout and stderr."""
    (folder / "mine.py").write_text(FACTORY)
    done = subprocess.run(
        [*DADT, *map(str, arguments)],
        cwd=folder,
        env={**os.environ, "COLUMNS": "100"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == code, done.stdout
    return done.stdout


def test_a_factory_is_measured_and_told_in_every_form(tmp_path: Path) -> None:
    given = ["--model", "mine:small", "-np", 1, "--batch-size", 4, "--steps", 2, "--rounds", 7, "--precision", "bf16"]
    files = ["--json", tmp_path / "a.json", "--csv", tmp_path / "a.csv", "--plot", tmp_path / "a.html"]
    said = run(tmp_path, *given, "--against", "horovod,sync", *files)
    assert "samples/s" in said and "8 parameters, bf16" in said and " for each worker; this host has " in said
    assert "horovod is left out: it cannot be imported here" in said
    figures = json.loads((tmp_path / "a.json").read_text())
    assert [row["name"] for row in figures["rows"]] == ["1 worker", "pipe"]
    for row in figures["rows"]:
        assert 0 < row["rate"]["low"] <= row["rate"]["median"] <= row["rate"]["high"]
        assert row["memory"] > 1e6 and row["rates"] == [row["rate"]]
        assert row["rate"]["median"] == pytest.approx(4 / row["seconds"]["median"], rel=0.2)
    assert figures["rows"][0]["own"] == 0 < figures["rows"][1]["own"] < 1
    assert figures["model"]["parameters"] == 8
    lines = list(csv.DictReader((tmp_path / "a.csv").open()))
    assert float(lines[1]["rate.median"]) == figures["rows"][1]["rate"]["median"]
    page = (tmp_path / "a.html").read_text()
    assert "<svg" in page and "src=" not in page and 'href="http' not in page and "@import" not in page


@pytest.mark.slow
def test_rounds_end_with_the_time_but_there_are_enough_for_an_interval() -> None:
    told: list[str] = []
    measured = training.measure(
        [Contender("pipe", 1)], Task("mlp", 1), steps=1, rounds=9, seconds=0.0, progress=told.append
    )
    assert len(measured.turns[0]) == training.LEAST_ROUNDS
    assert re.fullmatch(r"round 1 of 9, \d+ s left", told[2]) and re.fullmatch(r"round 6 of 9, \d+ s left", told[-1])


@pytest.mark.slow
def test_two_workers_beside_peers_and_the_limit(tmp_path: Path) -> None:
    given = ["mlp", "-np", 2, "--batch-size", 2, "--accumulate", 2, "--steps", 2, "--rounds", 2]
    given += ["--against", "ddp,sync"]
    run(tmp_path, *given, "--sweep", "compression=none,int8", "--json", "a.json", "--plot", "a.png")
    found = json.loads((tmp_path / "a.json").read_text())["rows"]
    assert [row["name"] for row in found] == ["1 worker", "plain", "null (limit)", "none", "int8", "ddp", "sync"]
    assert [len(row["rates"]) for row in found] == [1, 2, 2, 2, 2, 2, 2]
    assert all(row["efficiency"] and row["exposed"] for row in found[3:])
    assert found[3]["speed"] == {"median": 1.0, "low": 1.0, "high": 1.0}
    assert found[1]["rate"]["high"] == pytest.approx(2 * 2 * 2 / found[1]["seconds"]["low"])
    assert found[0]["own"] == found[1]["own"] == 0 < found[3]["own"]
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_all_contenders_exchange_over_paced_connections(tmp_path: Path) -> None:
    """Each as long at least as their gradients take at the pace, and those that exchange nothing are faster."""
    (tmp_path / "wide.py").write_text(
        "import torch\n"
        "def make():\n"
        "    def loss(model, x):\n"
        "        return model(x).square().mean()\n"
        "    return torch.nn.Linear(1000, 1000), lambda size: (torch.randn(size, 1000),), loss\n"
    )
    given = ["--model", "wide:make", "-np", 2, "--link", "paced:80mbit", "--steps", 2, "--rounds", 2]
    said = run(tmp_path, *given, "--against", "ddp,bare", "--json", "a.json")
    assert "connections paced to 80mbit, 2 rounds" in " ".join(said.split())
    assert "each pair of workers has its own" in said
    found = {row["name"]: row["seconds"]["low"] for row in json.loads((tmp_path / "a.json").read_text())["rows"]}
    exchange = 4 * 1001 * 1000 / (80e6 / 8)
    assert min(found[name] for name in ("pipe", "ddp", "bare")) > 0.8 * exchange
    assert max(found[name] for name in ("plain", "null (limit)")) < 0.5 * exchange


@pytest.mark.slow
def test_it_goes_by_the_number_of_workers_and_reads_a_text(tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes(b"to be or not to be, " * 40)
    (tmp_path / "reader.py").write_text(
        "from dadt_cli.bench.models import workload\n"
        "import torch\n"
        "def make():\n"
        "    def loss(model, tokens):\n"
        "        return model(tokens).square().mean()\n"
        "    return workload.tokens(torch.nn.Embedding(256, 4), 'mine', loss, 16, 256)\n"
    )
    given = ["--model", "reader:make", "--data", "text", "--steps", 1, "--rounds", 2, "--batch-size", 2]
    run(tmp_path, *given, "--sweep", "np=1,2", "--json", "a.json", "--plot", "a.svg")
    found = json.loads((tmp_path / "a.json").read_text())
    assert [(row["name"], row["ranks"]) for row in found["rows"]] == [
        ("1 worker", 1),
        ("pipe", 1),
        ("1 worker", 1),
        ("plain", 2),
        ("null (limit)", 2),
        ("pipe", 2),
    ]
    assert found["model"]["unit"] == "tokens"
    assert "workers" in (tmp_path / "a.svg").read_text()


def worked(*seconds: float) -> list[Worked]:
    """Of a turn, by rank."""
    return [Worked(each, 0.1 * each, 0.9 * each, 7 + i, 0.2 * each) for i, each in enumerate(seconds)]


def test_workers_that_do_not_fit_into_memory_are_refused_before_they_start() -> None:
    one = [Worked(1.0, 0.0, 1.0, 1 << 20), Worked(1.0, 0.0, 1.0, 1 << 50)]
    training._check_memory(one, 0)
    training._check_memory(one[:1], 2)
    with pytest.raises(ConfigError, match=r"2 workers more need about 2251799.8 GB of memory, and [\d.]+ GB are free"):
        training._check_memory(one, 2)


def test_plain_copies_keep_the_options_of_their_contender(monkeypatch) -> None:
    """Without --island plain workers of `bench fsdp` would shard their model over all hosts."""
    monkeypatch.setattr(training, "start", lambda name, place, ranks, options, script: nullcontext(options))
    with ExitStack() as stack:
        plain, pipe = (
            training._start(stack, contender, Task(), Location(), 0)
            for contender in (copies(4, ISLANDS), Contender("pipe", 4, ISLANDS))
        )
    assert plain == ["--island", "host", "--inject", "none"]
    assert pipe == ["--island", "host", "--warmup-steps", "2"]


def test_figures_come_of_the_slowest_rank_and_of_the_same_round() -> None:
    hello = Hello(0, 1, "cpu", "", 8, "tokens", 10)
    contenders = [alone(), copies(2), limit((), 2), Contender("pipe", 2), Contender("ddp", 2, peer="ddp")]
    turns = [
        [worked(0.8), worked(1.6)],  # the machine is half as fast in the second round
        [worked(1.0, 0.9), worked(1.8, 2.0)],
        [worked(1.0, 0.5), worked(2.0, 1.0)],
        [worked(1.0, 1.25), worked(2.0, 2.5)],
        [worked(2.0, 2.5), worked(5.0, 4.0)],
    ]
    one, plain, null, pipe, ddp = rows(contenders, Task(batch_size=3), hello, turns, steps=5)
    assert one.rate.high == 5 * 3 * 10 / 0.8 and one.efficiency is None and one.exposed is None
    assert plain.rate.high == 2 * 5 * 3 * 10 / 1.0 and plain.efficiency is plain.exposed is None
    assert (pipe.rate.high, pipe.rate.low) == (2 * 150 / 1.25, 2 * 150 / 2.5)
    assert [rate.high for rate in pipe.rates] == [150.0, 120.0]
    assert (pipe.seconds.low, pipe.seconds.high) == (0.25, 0.5)
    assert pipe.efficiency and pipe.efficiency.low == pipe.efficiency.high == pytest.approx(0.8)
    assert pipe.exposed and pipe.exposed.low == pipe.exposed.high == pytest.approx(0.2)
    assert ddp.speed.low == ddp.speed.high == pytest.approx(0.5) and pipe.speed.median == 1.0
    assert null.efficiency and null.efficiency.median == 1.0 and null.exposed is None
    assert pipe.memory == 8 and pipe.own == pytest.approx(0.1)
    assert one.beyond is plain.beyond is None and pipe.beyond and pipe.transport
    assert (pipe.beyond.low, pipe.beyond.high) == pytest.approx((0.9 * 0.25 / 5, 0.9 * 0.5 / 5))
    assert (pipe.transport.low, pipe.transport.high) == pytest.approx((0.2 * 1.25 / 5, 0.2 * 2.5 / 5))
    untold = [[replace(each, transport=None) for each in turn] for turn in turns[1]]
    assert rows(contenders[1:2], Task(), hello, [untold], steps=5)[0].transport is None
    assert conclusion([one, plain, null, pipe, ddp]) == (
        "pipe is 1.28 times as fast as 1 worker (1.28 to 1.28); pipe is 2.00 times as fast as ddp (2.00 to 2.00); "
        "pipe waits for communication in 20% of a step."
    )
    assert conclusion([plain, null, replace(pipe, exposed=None)]) == conclusion([one]) == ""
    assert conclusion([pipe, replace(ddp, speed=Interval(1.1, 0.9, 1.2))]).startswith(
        "pipe and ddp are as fast as each other, as far as this shows (0.83 to 1.11); "
    )
    fourfold = rows(contenders, Task(batch_size=3, accumulate=4), hello, turns, steps=5)
    assert fourfold[3].rate.high == 4 * pipe.rate.high and fourfold[3].seconds == pipe.seconds


def test_a_sweep_is_every_combination_beside_the_same_peers() -> None:
    sweep = parse_sweep("executor=shm,gloo, bucket-mb=1,25,np=1,2,batch=4,8")
    made = blocks(Config(), ["--verbose"], sweep, ["ddp", "sync"], 2, 16)
    assert [(block.ranks, block.batch_size) for block in made] == [(1, 4), (1, 8), (2, 4), (2, 8)]
    names = ["shm 1", "shm 25", "gloo 1", "gloo 25"]
    assert [c.name for c in made[0].contenders] == ["1 worker", *names]
    assert [c.name for c in made[3].contenders] == ["1 worker", "plain", "null (limit)", *names, "ddp", "sync"]
    options = ("--verbose", "--executor", "gloo", "--bucket-mb", "1")
    assert made[2].contenders[5] == Contender("gloo 1", 2, options)
    assert made[2].contenders[7] == Contender("ddp", 2, peer="ddp")
    assert made[2].contenders[:2] == [alone(), copies(2)]


@pytest.mark.parametrize(
    ("given", "remote", "options"),
    [
        ({}, False, []),
        ({"hosts": ("localhost:2",)}, False, ["--hosts", "localhost:2"]),
        ({"hosts": ("localhost:1", "other:1")}, True, ["--hosts", "localhost:1,other:1"]),
        ({"link": "1gbit"}, False, ["--link", "1gbit"]),
        ({"link": "paced:1gbit", "gpu_visibility": "all"}, False, ["--gpu-visibility", "all", "--link", "paced:1gbit"]),
    ],
)
def test_other_machines_alone_are_reached_over_the_network(
    given: dict[str, Any], remote: bool, options: list[str]
) -> None:
    location = location_of(config_of(given), given)
    assert (location.remote, location.options) == (remote, options)


def test_whatever_chooses_local_its_rounds_must_hold_an_average(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DADT_ALGORITHM", "local")
    monkeypatch.setenv("DADT_SYNC_EVERY", "12")
    with pytest.raises(ConfigError, match="--steps 5: `local` averages every 12 steps"):
        CliRunner().invoke(bench, ["mlp"], catch_exceptions=False)


@pytest.mark.parametrize(
    ("factory", "count"),
    [
        (lambda: resnet.own("resnet18"), 11_689_512),
        (lambda: resnet.own("resnet50"), 25_557_032),
        (lambda: resnet.own("resnet101"), 44_549_160),
        (vgg.own, 138_357_544),
        (transformer.Bert, 109_514_298),
        (transformer.Gpt, 124_439_808),
    ],
    ids=["resnet18", "resnet50", "resnet101", "vgg16", "bert-base", "gpt2-small"],
)
def test_our_definitions_have_as_many_parameters_as_the_libraries(factory, count: int) -> None:
    with torch.device("meta"):
        assert sum(p.numel() for p in factory().parameters()) == count


@pytest.mark.parametrize("make", [transformer.Bert, transformer.Gpt])
def test_our_transformers_learn(make, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a small size: the loss of tokens that repeat falls, and GPT sees no later token."""
    monkeypatch.setattr(transformer, "WIDTH", 24)
    monkeypatch.setattr(transformer, "DEPTH", 1)
    torch.manual_seed(0)
    model = make(vocabulary=128, places=8)
    tokens = torch.arange(8).expand(4, 8)
    loss = transformer.hidden if make is transformer.Bert else transformer.following
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        losses.append(loss(model, tokens))
        losses[-1].backward()
        optimizer.step()
    assert losses[-1] < 0.5 * losses[0]
    model.eval()
    other = tokens.clone()
    other[:, 5:] = 99
    same = torch.allclose(model(tokens)[:, :5], model(other)[:, :5], atol=1e-5)
    assert same == (make is transformer.Gpt)


def test_images_are_read_from_folders_by_class(tmp_path: Path) -> None:
    from PIL import Image

    for name, colour in (("cats", (255, 0, 0)), ("dogs", (0, 0, 255))):
        (tmp_path / name).mkdir()
        Image.new("RGB", (5, 9), colour).save(tmp_path / name / "a.png")
    images = Images(tmp_path, side=4, classes=2)
    assert len(images) == 2
    pixels, label = images[1]
    assert pixels.shape == (3, 4, 4) and label == 1
    assert pixels[:, 0, 0].tolist() == [-1.0, -1.0, 1.0]
    (tmp_path / "text").write_bytes(bytes(range(10)))
    assert [piece.tolist() for (piece,) in (Text(tmp_path / "text", 4)[i] for i in range(2))] == [
        [0, 1, 2, 3],
        [4, 5, 6, 7],
    ]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["mlp", "-np", "0"], "-np 0: the number of workers must be 1 or more"),
        (["mlp", "-H", "one,two"], "-np N: say how many workers the hosts are to have"),
        (["mlp", "--batch-size", "0"], "--batch-size 0: must be 1 or more"),
        (["mlp", "--steps", "0"], "--steps 0: must be 1 or more"),
        (["mlp", "--rounds", "0"], "--rounds 0: an interval needs 2 rounds or more"),
        (["mlp", "--rounds", "1"], "--rounds 1: an interval needs 2 rounds or more, and one of 95 % needs 6"),
        (["mlp", "--accumulate", "0"], "--accumulate 0: must be 1 or more"),
        (["mlp", "--against", "me"], "--against me: unknown; choose from ddp, ddp-view, ddp-bf16, "),
        (["mlp", "--sweep", "gloo"], "--sweep gloo: give settings with their values, as executor=shm,gloo,batch=8,32"),
        (["mlp", "--sweep", "np=two"], "--sweep np=two: give whole numbers above 0"),
        (["mlp", "--sweep", "batch=x", "--sweep", "np=2"], "--sweep batch=x: give whole numbers above 0"),
        (["mlp", "--sweep", "hosts=a"], "there is no hosts; sweep over batch, np or settings of dadt run"),
        (["mlp", "--sweep", "executor=smh"], "--executor smh: unknown"),
        (["mlp", "--sweep", "bucket-mb=" + ",".join(map(str, range(1, 17)))], "19 contenders are up at once; 16 are"),
        (["mlp", "--algorithm", "local", "--steps", "8"], "--steps 8: `local` averages every 32 steps"),
        (["mlp", "--plot", "a.gif"], "--plot a.gif: give a file that ends in .png, .svg, .pdf, .html"),
        (["mlp", "--json", "/no/where.json"], "--json /no/where.json: there is no folder /no"),
        (["mlp", "--json", "-", "--csv", "-"], "--json - and --csv - both want stdout"),
        (["mlp", "--link", "fast"], "--link fast: give a speed as 100mbit"),
        (["mlp", "--sweep", "np=4,1", "--simulate-hosts", "2"], "--simulate-hosts 2: 1 workers on 2 simulated hosts"),
        (["mlp", "--link", "paced:1gbit", "--executor", "shm"], "and --executor shm has others -> give tcp"),
        (["mlp", "--link", "paced:1gbit", "--against", "horovod"], "--link paced:1gbit does not reach its connections"),
        (["mlp", "--sweep", "link=paced:1gbit,paced:2gbit"], "there is no link; sweep over batch, np or settings"),
        (["advise", "--link", "paced:1gbit"], "advise measures a network between hosts; give --link 1gbit, as root"),
        (["advise", "--latency", "5"], "--latency 5: give a time as 500us or 5ms"),
        (["advise", "fsdp"], "bench advise fsdp: not of a sharded model; dadt bench fsdp measures it"),
        (["fsdp"], "bench fsdp: give two hosts or more, as -H host1:2,host2:2 or --simulate-hosts 2"),
        (
            ["fsdp", "--simulate-hosts", "2", "--contenders", "pipe,all"],
            "--contenders all: unknown; choose from pipe, ",
        ),
        (["fsdp", "--simulate-hosts", "2", "--steps", "4"], "--steps 4: `local` averages every 8 steps"),
        (["startup", "-np", "0"], "-np 0: the number of workers must be 1 or more"),
        (["startup", "--rounds", "0"], "--rounds 0: must be 1 or more"),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, list) else "",
)
def test_bad_options_are_one_sentence(options: list[str], sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        CliRunner().invoke(bench, options, catch_exceptions=False)
    assert sentence in str(caught.value)


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("resnet19", "--model resnet19: give <module>:<factory>, or one of resnet18, "),
        ("no.such:make", "--model no.such:make: there is no module no"),
        ("mine:none", "--model mine:none: module 'mine' has no attribute 'none'"),
        ("mine:wrong", "--model mine:wrong: the factory must return (model, batch, loss)"),
    ],
)
def test_what_is_no_model_is_refused(name: str, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.py").write_text(FACTORY)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    with pytest.raises(ConfigError) as caught:
        models.make(name)
    assert str(caught.value).startswith(sentence)


@pytest.mark.slow
def test_a_worker_that_refuses_or_fails_is_told_of(tmp_path: Path) -> None:
    small = ["--model", "mine:small", "-np", 1, "--rounds", 2]
    assert run(tmp_path, "--model", "mine:wrong", "-np", 1, code=2).count("\n") == 1
    refused = run(tmp_path, *small, "--data", "x", code=2)
    assert refused.startswith("dadt: --data") and refused.count("\n") == 1
    failed = run(tmp_path, "--model", "mine:FACTORY", "-np", 1, code=2)
    assert "has no attribute 'FACTORY'" in failed
    (tmp_path / "late.py").write_text("import mine\ndef make():\n    return (*mine.small()[:2], None.loss)\n")
    assert "has no attribute 'loss'" in run(tmp_path, "--model", "late:make", "-np", 1, code=1)


def test_what_begins_otherwise_is_measured_after_that() -> None:
    def contender(*options: str) -> Contender:
        return Contender("dadt", 2, options)

    assert contender().warmup == contender("--compression", "int8").warmup == 2
    assert contender("--algorithm", "auto").warmup == contender("--compression", "auto").warmup == 10
    assert contender().settling == contender("--compression", "int8").settling < training.BEGINNING
    for compression in ("momentum:2", "momentum:1", "auto"):
        assert contender("--compression", compression).settling == training.BEGINNING
    assert alone().settling == contender().settling


@pytest.mark.slow
def test_momentum_of_adam_is_measured_in_few_bits(tmp_path: Path) -> None:
    given = ["--model", "mine:small", "-np", 2, "--batch-size", 4, "--steps", 2, "--rounds", 2]
    few = ["--compression", "momentum:1", "--optimizer", "adam", "--json", tmp_path / "a.json"]
    said = run(tmp_path, *given, *few)
    assert "8 parameters, adam, fp32" in said
    assert json.loads((tmp_path / "a.json").read_text())["model"]["optimizer"] == "adam"
