"""Scripts that `import dadt`, under mpirun and torchrun without `dadt run`."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
import torch
from harness import TESTS, forkserver
from harness.checks import assert_equal, assert_near
from harness.mpis import installed
from harness.patience import PATIENCE
from harness.scenarios import WARMUP, simulate

from dadt.control.machine import free_ports

RANK = """
import os
rank = int(next(os.environ[name] for name in ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "RANK") if name in os.environ))
"""
TRAIN = f"""
{RANK}
import sys
sys.path.insert(0, {str(TESTS)!r})
{{}}
from harness import scenarios
torch.set_num_threads(1)
drawn = torch.rand(1)  # before training and without a seed, ranks draw alike
torch.save({{{{"drawn": drawn, **scenarios.train("momentum", rank)}}}}, open(f"rank{{{{rank}}}}.pt", "wb"))
"""
OWN_GROUP = "torch.distributed.init_process_group('gloo', rank=rank, world_size=2)"
STEP = """
model = torch.nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
def step():
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
"""


@pytest.fixture(
    params=[
        pytest.param("torchrun", marks=pytest.mark.slow),
        "mpirun.openmpi",
        pytest.param("mpirun.mpich", marks=pytest.mark.slow),
    ]
)
def launcher(request: pytest.FixtureRequest) -> str:
    return installed(request.param)


@pytest.fixture
def mpirun() -> str:
    """One of them, where it makes no difference."""
    return installed("mpirun.openmpi")


@pytest.mark.parametrize(
    ("launcher", "imports"),
    [
        ("torchrun", "import torch, dadt"),
        pytest.param("mpirun.openmpi", "import torch, dadt", marks=pytest.mark.slow),
        ("mpirun.openmpi", "import dadt, torch"),
        ("mpirun.mpich", "import dadt, torch"),
    ],
)
def test_training_equals_the_definition(foreign, launcher, imports, tmp_path):
    torch.set_num_threads(1)
    done = foreign(installed(launcher), TRAIN.format(imports), DADT_WARMUP_STEPS=str(WARMUP))
    assert done.returncode == 0, done.stderr
    ranks = [torch.load(tmp_path / f"rank{rank}.pt", weights_only=False) for rank in range(2)]
    assert_equal(ranks[0], ranks[1], "replicas")
    assert ranks[0].pop("drawn") == ranks[1].pop("drawn")
    assert_near(ranks[0], simulate("momentum", 2, "pipe"), "definition")
    assert done.stderr.count(", executor shm, algorithm pipe") == 1
    assert done.stderr.count("dadt: done: 24 steps, 19 of them delayed by one") == 1


def test_scripts_without_dadt_are_left_alone(foreign, launcher):
    done = foreign(
        launcher,
        f"""{RANK}
import sys, torch
{STEP}
step()
sys.stdout.write(f"{{'dadt' in sys.modules}} {{torch.save.__module__}} {{rank}}\\n")
""",
        alone=True,
    )
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["False torch.serialization 0", "False torch.serialization 1"]
    assert "dadt" not in done.stderr


@pytest.mark.slow
def test_the_failing_rank_gives_the_exit_code(foreign, launcher):
    done = foreign(
        launcher,
        f"{RANK}\nimport torch, dadt, sys\n{STEP}\nfor i in range(3):\n    step()\nif rank == 1: sys.exit(7)\nstep()",
    )
    assert done.returncode == (1 if launcher == "torchrun" else 7), done.stderr
    assert "dadt: done" not in done.stderr


@pytest.mark.slow
def test_a_rank_that_does_not_come_is_named(foreign, mpirun):
    script = f"{RANK}\nimport time\nif rank == 1: time.sleep(20)\nimport torch, dadt"
    done = foreign(mpirun, script, DADT_START_TIMEOUT="3")
    assert done.returncode == 124
    assert "rank 1 " in done.stderr and "within 3 s" in done.stderr


@pytest.mark.slow
def test_bad_input_is_one_sentence(foreign, mpirun):
    done = foreign(mpirun, "import torch, dadt", DADT_ALGORITHM="none")
    assert done.returncode == 2
    # The launcher may end the other one before it has said so.
    assert re.search(r"dadt: rank [01]: --algorithm none: unknown", done.stderr), done.stderr
    assert "import torch, dadt" not in done.stderr


CHILD = """
import sys, torch, dadt
torch.optim.SGD([torch.ones(1, requires_grad=True)]).step()
sys.stdout.write("child\\n")
"""


@pytest.mark.slow
def test_children_are_no_ranks(foreign, mpirun):
    done = foreign(
        mpirun,
        f"""{RANK}
import torch, dadt, subprocess, sys
from torch.utils.data import DataLoader
{STEP}
for x in DataLoader(torch.ones(8, 3), batch_size=2, num_workers=1):
    step()
subprocess.run([sys.executable, "-c", {CHILD!r}], check=True)
sys.stdout.write("end\\n")
""",
    )
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["child", "child", "end", "end"]
    assert "dadt: done: 2 steps" in done.stderr
    assert "[W" not in done.stderr  # none of torch's own warnings


@pytest.mark.slow
def test_a_script_that_makes_no_step_is_warned(foreign, mpirun):
    done = foreign(mpirun, "import torch, dadt")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("dadt: warning: training was NOT distributed") == 1


def test_one_rank_saves_and_downloads(foreign, mpirun, tmp_path):
    (tmp_path / "source").write_text("x" * 100)
    done = foreign(
        mpirun,
        f"""{RANK}
import sys, torch, dadt, torch.hub
torch.hub.download_url_to_file("file://{tmp_path}/source", "copy", progress=False)
{STEP}
step()
torch.save(model.state_dict(), "model.pt")
same = open("copy").read() == "x" * 100, torch.load("model.pt")["bias"].equal(model.bias.data)
sys.stdout.write(f"{{same}}\\n")
""",
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["(True, True)"] * 2


def two_hosts(folder: Path, script: str, **env: str) -> list[tuple[int, str]]:
    """Exit codes and stderr of two ranks which believe that each has a host of its own."""
    (folder / "train.py").write_text(script)
    names = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "0", "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}
    ranks = [
        subprocess.Popen(
            [forkserver.python(), "train.py"],
            cwd=folder,
            env={**os.environ, **names, "OMPI_COMM_WORLD_RANK": str(rank), **env},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    said = [rank.communicate(timeout=PATIENCE)[1] for rank in ranks]
    return [(rank.returncode, text) for rank, text in zip(ranks, said)]


def test_several_hosts_meet_at_master_addr(tmp_path):
    port = str(free_ports(1)[0])
    script = f"{RANK}\nimport torch, dadt\n{STEP}\nstep()\n{OWN_GROUP}"
    ends = two_hosts(tmp_path, script, MASTER_ADDR="127.0.0.1", MASTER_PORT=port, DADT_EXECUTOR="gloo")
    assert [code for code, _ in ends] == [0, 0], ends
    assert "dadt: done: 1 steps" in ends[0][1]


def test_several_hosts_that_know_no_way_are_told_what_to_do(tmp_path):
    script = "import sys\nsys.modules['mpi4py'] = None\nimport torch, dadt"
    for code, text in two_hosts(tmp_path, script):
        assert code == 2
        assert "dadt run --launcher mpi" in text and "MASTER_ADDR" in text
        assert "Traceback" not in text


OBJECTS = f"""
{RANK}
import os, torch, dadt
dadt.init()
model = torch.nn.Linear(3, 1)
optimizer = torch.optim.Adam(model.parameters())
optimizer.step()
dadt.broadcast_optimizer_state(optimizer)
print(dadt.broadcast_object({{"rank": rank}}))
"""


def test_objects_travel_between_hosts_only_under_a_secret(tmp_path):
    """Whoever reaches torch's store learns all that is in it, and a pickle runs code where it is read."""
    port = str(free_ports(1)[0])
    env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "DADT_EXECUTOR": "gloo"}
    ends = two_hosts(tmp_path, OBJECTS, **env)
    assert [code for code, _ in ends] == [1, 1]
    # The other one may hear first that this one has failed.
    assert any("met without a secret -> export the same DADT_SECRET" in text for _, text in ends)
    ends = two_hosts(tmp_path, OBJECTS, **env, DADT_SECRET="0123456789abcdef")
    assert [code for code, _ in ends] == [0, 0], ends


CODE = f"""
{RANK}
import os
if rank == 0:
    os.environ["DADT_ALGORITHM"] = "stranger:Algorithm"
import torch, dadt
{STEP}
step()
"""


def test_rank_0_names_no_code_for_others_without_a_secret(tmp_path):
    """A stranger may have taken its place."""
    (tmp_path / "stranger.py").write_text(
        "open('loaded', 'a').close()\nfrom dadt.algorithms.sync import Sync as Algorithm"
    )
    port = str(free_ports(1)[0])
    env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "DADT_EXECUTOR": "gloo", "DADT_START_TIMEOUT": "10"}
    code, text = two_hosts(tmp_path, CODE, **env)[1]
    assert code == 2
    assert (
        "--algorithm stranger:Algorithm: rank 0 asks for it, this rank does not, and they met without a secret" in text
    )
    ends = two_hosts(tmp_path, CODE, **env, DADT_SECRET="0123456789abcdef")
    assert [code for code, _ in ends] == [0, 0], ends
