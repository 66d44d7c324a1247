"""events.jsonl and report.json: there after every end, and true."""

from __future__ import annotations

import json
import os
import signal
from typing import Any

import pytest
from harness.run import Result

TRAIN = """\
import os, sys, time
from dadt.control.agent_client import Control
from dadt.world import World
control = Control.connect(World.from_env())
rank = control.world.rank
control.hello(torch="2.13"); control.claim()
control.progress(7, samples=70, waited=0.1, clock=1.0)
{}
control.done({{"steps": 7, "delayed": 5, "wait_fraction": 0.1, "samples": 70, "seconds": 2.0}})
"""


def report_of(result: Result) -> dict[str, Any]:
    data: dict[str, Any] = json.loads((result.logs / result.job / "report.json").read_text())
    return data


def events_of(result: Result) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (result.logs / result.job / "events.jsonl").read_text().splitlines()]


def kinds_of(result: Result, rank: int | None = None) -> list[str]:
    return [event["kind"] for event in events_of(result) if rank is None or event.get("rank") == rank]


def test_a_good_end_is_reported(launch):
    result = launch(TRAIN.format(""), "-np", "2", "-x", "SECRET=hunter2", "train.py", "--epochs", "3")
    assert result.code == 0, result.err
    report = report_of(result)
    assert (report["exit_code"], report["error"], report["failure"], report["signal"]) == (0, None, None, None)
    assert report["command"][-3:] == ["train.py", "--epochs", "3"]
    assert report["config"]["np"] == 2 and report["config"]["forward"] == ["SECRET"]
    assert "hunter2" not in json.dumps(report)
    assert 0 < report["seconds"] == report["end"] - report["begin"]
    assert [host["dadt"] for host in report["hosts"]] == [report["dadt"]]
    for rank, told in enumerate(report["ranks"]):
        assert told["rank"] == rank and told["exit_code"] == 0 and told["pid"] > 0
        assert (told["steps"], told["delayed"], told["samples_per_second"]) == (7, 5, 35.0)
        assert told["peak_memory"] > 1 << 20


def test_events_are_in_order(launch):
    result = launch(TRAIN.format(""))
    assert result.code == 0
    assert kinds_of(result, 0) == ["started", "hello", "claim", "summary", "exit"]
    everything = kinds_of(result)
    assert everything[:4] == ["start", "connected", "agent ready", "placed"]
    assert everything[-2:] == ["agent ended", "end"]
    times = [event["time"] for event in events_of(result)]
    assert times == sorted(times)


def test_a_failure_is_reported_as_data(launch):
    script = (
        "if rank == 0: open('trained', 'w').close()\n"
        "while not os.path.exists('trained'): time.sleep(0.01)\n"
        "if rank == 1: raise ValueError('bad label')\n"
        "time.sleep(600)"
    )
    result = launch(TRAIN.format(script))
    assert result.code == 1
    report = report_of(result)
    failure = report["failure"]
    assert report["exit_code"] == 1 and report["error"] is None
    assert (failure["rank"], failure["exit_code"], failure["stopped"]) == (1, 1, [0])
    assert failure["message"].endswith("bad label")
    assert failure["log"].endswith("rank1.log")
    assert "stop" in kinds_of(result)
    assert report["ranks"][0]["exit_code"] == -signal.SIGTERM
    assert report["ranks"][0]["steps"] == 7


def test_ctrl_c_is_reported(start):
    run = start(TRAIN.format("open(f'ready{rank}', 'w').write(str(os.getpid()))\ntime.sleep(600)"))
    run.wait_for("ready0", "ready1")
    run.process.send_signal(signal.SIGINT)
    result = run.finish()
    report = report_of(result)
    assert (report["exit_code"], report["signal"]) == (130, 2)
    stop = next(event for event in events_of(result) if event["kind"] == "stop")
    assert stop["why"] == "SIGINT" and stop["grace"] == 10.0


def test_workers_that_could_not_be_started_are_reported(launch):
    result = launch("", "-np", "1", "--no-python", "./train.py")
    assert result.code in (2, 3)
    if result.code == 3:
        (folder,) = result.logs.iterdir()
        report = json.loads((folder / "report.json").read_text())
        assert report["exit_code"] == 3 and "cannot be run" in report["error"]


@pytest.mark.alone
def test_a_lost_agent_is_reported(start):
    run = start(TRAIN.format("open(f'ready{rank}', 'w').write(str(os.getpid()))\ntime.sleep(600)"))
    run.wait_for("ready0", "ready1")
    os.kill(run.agent, signal.SIGKILL)
    result = run.finish()
    assert result.code == 3
    report = report_of(result)
    assert report["exit_code"] == 3 and "SIGKILL" in report["error"]
    assert "agent lost" in kinds_of(result)
