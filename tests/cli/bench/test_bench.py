"""`dadt bench allreduce`, end to end."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from dadt.errors import ConfigError
from dadt_cli.bench.allreduce import AllreduceRow, measure
from dadt_cli.bench.command import bench, parse_size
from dadt_cli.bench.ratio import Interval


def test_allreduce_reports_every_size_and_no_wrong_element(tmp_path: Path) -> None:
    file, picture = tmp_path / "figures.json", tmp_path / "figures.svg"
    given = ["allreduce", "--sizes", "1000,64K", "--rounds", "10", "--json", str(file), "--plot", str(picture)]
    result = CliRunner().invoke(bench, given, catch_exceptions=False)
    assert result.exit_code == 0 and "65,536" in result.output
    figures = json.loads(file.read_text())
    assert [row["bytes"] for row in figures["rows"]] == [1000, 65536]
    for row in figures["rows"]:
        assert row["wrong"] == 0
        for who in ("dadt", "gloo", "memcpy", "gloo_per_dadt", "dadt_per_memcpy"):
            assert 0 < row[who]["low"] <= row[who]["median"] <= row[who]["high"]
    assert figures["conditions"]["cores"] >= 1
    assert "busbw" in result.output and "bus bandwidth" in picture.read_text()


def test_bandwidths_are_those_of_nccl_tests() -> None:
    seconds = Interval(0.5, 0.4, 1.0)
    row = AllreduceRow(1000, 250, 4, *[seconds] * 5, wrong=0)
    assert row.algbw(seconds) == Interval(2000.0, 1000.0, 2500.0)
    assert row.busbw(seconds) == Interval(3000.0, 1500.0, 3750.0)


@pytest.mark.slow
def test_three_ranks_are_right_to_the_bit() -> None:
    (row,) = measure(ranks=3, sizes=[1_000_000], rounds=10)
    assert row.wrong == 0


@pytest.mark.parametrize(
    ("text", "bytes"), [("1000", 1000), ("64K", 65536), ("1.5m", 3 << 19), ("100MB", 100 << 20), ("1GiB", 1 << 30)]
)
def test_sizes_have_units(text: str, bytes: int) -> None:
    assert parse_size(text) == bytes


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--sizes", "big"], "--sizes big: give sizes as 64K,1M,100M"),
        (["--sizes", "4"], "--sizes 4: give 240 bytes or more, for 60 tensors"),
        (["-np", "1"], "-np 1: an allreduce needs 2 workers or more"),
        (["--rounds", "3"], "--rounds 3: an interval needs 10 rounds or more"),
    ],
)
def test_bad_options_are_one_sentence(options: list[str], sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        CliRunner().invoke(bench, ["allreduce", *options], catch_exceptions=False)
    assert str(caught.value) == sentence
