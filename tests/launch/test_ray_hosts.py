"""What the Ray launcher does where no Ray is needed: jobs in a real cluster are in tests/by_ray."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from dadt.config import Config
from dadt.errors import ConfigError
from dadt.launch.hosts.ray import RayHost, bundle_of
from dadt.launch.launchers.ray import reason
from dadt.launch.start import plan

GONE = """The actor died unexpectedly before finishing this task.
\tclass_name: RayActor
\tactor_id: 5f9d5c7e0b1b2d3c4a
\tpid: 4711
\tnamespace: 2d9f
\tip: 10.7.0.3
The actor is dead because its node has died. Node Id: 1f2e
"""


@pytest.mark.parametrize(
    ("knobs", "total", "bundle"),
    [
        ({}, {"CPU": 8}, {"CPU": 1}),
        ({}, {"CPU": 8, "GPU": 2}, {"CPU": 1, "GPU": 1}),
        ({"ray_resources": "GPU=0"}, {"CPU": 8, "GPU": 2}, {"CPU": 1}),
        ({"cpus_per_worker": 4, "ray_resources": "GPU=0.5,ssd=1"}, {"GPU": 1}, {"CPU": 4, "GPU": 0.5, "ssd": 1}),
    ],
)
def test_what_a_worker_holds(knobs: dict[str, object], total: dict[str, float], bundle: dict[str, float]) -> None:
    assert bundle_of(Config(launcher="ray", **knobs), total) == bundle


@pytest.mark.parametrize("text", ["GPU", "GPU=", "=1", "GPU=one", "GPU=-1", "GPU=nan"])
def test_resources_that_are_not_understood(text: str) -> None:
    with pytest.raises(ConfigError, match="is not KEY=N"):
        bundle_of(Config(launcher="ray", ray_resources=text), {})


def test_a_worker_trains_on_one_gpu() -> None:
    with pytest.raises(ConfigError, match="GPU=2: each worker trains on one GPU"):
        bundle_of(Config(launcher="ray", ray_resources="GPU=2"), {"GPU": 8})


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"hosts": "h1:2"}, "Ray chooses the hosts; leave -H out"),
        ({"hosts": "h1:2", "hostfile": "f"}, "leave -H and --hostfile out"),
        ({"nnodes": 2}, "leave --nnodes out"),
        ({"cpus_per_worker": 0.0}, "--cpus-per-worker 0.0: must be above 0"),
        ({"ray_strategy": "pack"}, "--ray-strategy pack: unknown; choose one of PACK, SPREAD"),
        ({"host_discovery_script": "x"}, "--launcher ray has hosts of its own"),
    ],
)
def test_what_does_not_go_together(knobs: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan.make(Config(launcher="ray", np=2, **knobs), ["true"])


@pytest.mark.skipif(find_spec("ray") is not None, reason="Ray is installed")
def test_without_ray() -> None:
    with pytest.raises(ConfigError, match=r"Ray is not installed for .*; pip install 'dadt\[ray\]'"):
        plan.make(Config(launcher="ray", np=2), ["true"])


def test_why_ray_has_ended_an_actor() -> None:
    assert reason(GONE) == "Ray: The actor is dead because its node has died. Node Id: 1f2e"
    assert reason("ModuleNotFoundError: No module named 'dadt'\n").startswith("dadt is not installed for the Python")
    assert reason("one line") == "Ray: one line"


def test_hosts_differ_by_their_bundles() -> None:
    one = RayHost(name="a", group="g", node="1f", bundles=(0, 1), slots=2)
    assert str(one) == "a" and one != RayHost(name="a", group="g", node="1f", bundles=(2, 3), slots=2)
