"""What a worker is born with, how its command is read, and how DADT gets into it."""

from __future__ import annotations

import os
import sys

import pytest

from dadt.world import World

SHOW = "import os; print(*(os.environ.get(name) for name in {}))"
TORCHRUN = "('RANK', 'LOCAL_RANK', 'WORLD_SIZE', 'LOCAL_WORLD_SIZE', 'MASTER_ADDR')"
HOOKED = """\
import sys, torch
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    optimizer.zero_grad(); model(torch.randn(4, 2)).sum().backward(); optimizer.step()
"""


def test_variables_are_those_of_torchrun(launch):
    result = launch(SHOW.format(TORCHRUN))
    assert sorted(result.out.splitlines()) == [b"[0] 0 0 2 2 127.0.0.1", b"[1] 1 1 2 2 127.0.0.1"]
    ports = launch(SHOW.format("('MASTER_PORT',)")).out.split()[1::2]
    assert len(set(ports)) == 1 and 1024 <= int(ports[0]) < 65536


@pytest.mark.parametrize("flag", [False, True])
def test_a_world_is_read_as_it_was_written(flag):
    world = World(rank=3, world_size=8, address="10.0.0.1", restarts=2, rank_in_arguments=flag, joins=flag)
    assert World.from_env(world.to_env()) == world


def test_they_can_be_left_out(launch):
    result = launch(SHOW.format(TORCHRUN), "-np", "1", "--no-torch-env", "train.py")
    assert result.out == b"[0] None None None None None\n"


def test_cores_are_divided_unless_the_user_did_it(launch):
    share = max(1, len(os.sched_getaffinity(0)) // 2)
    script = SHOW.format("('OMP_NUM_THREADS',)")
    assert int(launch(script).out.split()[1]) <= share
    assert launch(script, OMP_NUM_THREADS="5").out.split()[1] == b"5"


def test_knobs_reach_the_worker_and_flags_beat_variables(launch):
    script = "from dadt import Config; c = Config.from_env(); print(c.warmup_steps, c.algorithm, c.broadcast)"
    arguments = ["-np", "1", "--algorithm", "sync", "--no-broadcast", "train.py"]
    assert launch(script, *arguments, DADT_WARMUP_STEPS="7").out == b"[0] 7 sync False\n"
    arguments[2:2] = ["--warmup-steps", "8"]
    assert launch(script, *arguments, DADT_WARMUP_STEPS="7").out == b"[0] 8 sync False\n"


def test_all_ranks_get_one_seed_and_each_job_its_own(launch):
    script = "from dadt import Config; print(Config.from_env().seed)"
    seeds = [line.split()[1] for _ in range(2) for line in launch(script).out.splitlines()]
    assert seeds[0] == seeds[1] != seeds[2] == seeds[3]
    assert int(seeds[0]) >= 0
    assert launch(script, "-np", "1", "--seed", "5", "train.py").out == b"[0] 5\n"


def test_hashes_are_the_same_on_all_ranks_unless_the_user_says_so(launch):
    """An order of words in a set may become the order of rows in an embedding."""
    script = "print(hash('word'))"
    ends = [launch(script, "-np", "2", *options, "train.py").out for options in ([], ["--no-seeding"])]
    hashes = [line.split()[1] for out in ends for line in out.splitlines()]
    assert hashes[0] == hashes[1] and hashes[2] != hashes[3]
    own = launch("import os; print(os.environ['PYTHONHASHSEED'])", PYTHONHASHSEED="7").out
    assert own.count(b" 7\n") == 2


@pytest.mark.parametrize("name", ["-np", "--np", "-n", "--num-proc"])
def test_the_number_of_workers_has_the_names_that_users_know(launch, name):
    assert launch("print('x')", name, "2", "train.py").out.count(b"x") == 2


@pytest.mark.parametrize(
    "command",
    [["train.py"], ["python", "train.py"], [sys.executable, "-u", "train.py"], ["-m", "train"]],
)
def test_what_follows_the_script_is_its_own(launch, command):
    result = launch("import sys; print(sys.argv[1:])", "-np", "1", *command, "--epochs", "3", "-np", "9")
    assert result.out == b"[0] ['--epochs', '3', '-np', '9']\n"


def test_any_executable(launch):
    result = launch("", "-np", "2", "--no-python", "sh", "-c", "echo rank $RANK $0", "zero")
    assert sorted(result.out.splitlines()) == [b"[0] rank 0 zero", b"[1] rank 1 zero"]


def test_a_script_that_shadows_a_standard_module_shadows_it_for_itself_alone(launch, tmp_path):
    (tmp_path / "selectors.py").write_text("raise SystemExit('not for dadt')")
    assert launch("print('fine')", "-np", "1", "train.py").out == b"[0] fine\n"


@pytest.mark.alone
@pytest.mark.parametrize(
    ("arguments", "env"),
    [([], {}), (["--inject", "sitecustomize"], {}), ([], {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"})],
)
def test_dadt_gets_into_the_script(launch, arguments, env):
    result = launch(HOOKED, "-np", "1", *arguments, "train.py", **env)
    assert result.code == 0, result.err
    assert ": 3 steps, " in result.err.splitlines()[-1]


@pytest.mark.alone
def test_a_sitecustomize_of_the_users_own_still_runs(launch, tmp_path):
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text("print('mine')")
    arguments = ["-np", "1", "--inject", "sitecustomize", "train.py"]
    result = launch("print('script')", *arguments, PYTHONPATH=str(tmp_path / "site"))
    assert result.code == 0, result.err
    # It runs in dadt itself, too, and what it prints there must not get between the agent and the launcher.
    assert result.out == b"mine\n[0] mine\n[0] script\n"
