"""What a job is to be: its command lines, its variables, its settings."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from harness import forkserver
from harness.patience import PATIENCE, await_that
from harness.run import DADT

from dadt.config import Config
from dadt.errors import ConfigError
from dadt.launch.actions import Outbox
from dadt.launch.members.member import Member
from dadt.launch.members.replacement import Replacements
from dadt.launch.start import environment
from dadt.launch.start.plan import fill, hosts_of, make

VALUES = {"rank": 3, "local_rank": 1, "world_size": 4, "master_addr": "10.0.0.1", "master_port": 29401}


@pytest.mark.parametrize(
    ("written", "filled"),
    [
        ("{rank}", "3"),
        ("--out=run-{rank}-of-{world_size}", "--out=run-3-of-4"),
        ("tcp://{master_addr}:{master_port}", "tcp://10.0.0.1:29401"),
        ("{{rank}}", "{rank}"),
        ("{{{local_rank}}}", "{1}"),
        ('{"a": {"b": 1}}', '{"a": {"b": 1}}'),
        ("{epoch}", "{epoch}"),
        ("{}", "{}"),
    ],
)
def test_a_worker_finds_its_rank_in_its_arguments(written, filled):
    assert fill(["x", written], VALUES) == ["x", filled]


def test_each_worker_gets_its_own(launch):
    script = "import sys; print(sys.argv[1:])"
    result = launch(script, "-np", "2", "--pass-local-rank", "train.py", "--rank", "{rank}", "{world_size}", "{{x}}")
    assert sorted(result.out.splitlines()) == [
        b"[0] ['--rank', '0', '2', '{x}', '--local_rank=0']",
        b"[1] ['--rank', '1', '2', '{x}', '--local_rank=1']",
    ]


ENV = {"PATH": "/bin", "WANDB_KEY": "k", "WANDB_MODE": "m", "SECRET": "s", "HOSTNAME": "h", "NCCL_DEBUG": "INFO"}


def test_other_hosts_get_what_a_script_needs_and_no_more():
    elsewhere, named = environment.forwarded(Config(), ENV)
    assert set(elsewhere) == {"PATH", "WANDB_KEY", "WANDB_MODE", "NCCL_DEBUG"}
    assert named == {}


def test_variables_by_name_value_and_pattern(tmp_path):
    (tmp_path / "env").write_text("# tokens\n\nA=1\nB= two words # kept\nSECRET=file\n")
    config = Config(forward=("SECRET", "X=1=2", "WANDB_*"), env_file=str(tmp_path / "env"))
    elsewhere, named = environment.forwarded(config, ENV)
    wanted = {"A": "1", "B": " two words # kept", "SECRET": "s", "X": "1=2", "WANDB_KEY": "k", "WANDB_MODE": "m"}
    assert named == wanted
    assert elsewhere == {**wanted, "PATH": "/bin", "NCCL_DEBUG": "INFO"}


@pytest.mark.parametrize(
    ("name", "said"),
    [("NOPE", "-x NOPE: there is no such variable here"), ("a b=1", "is no name of a variable"), ("=1", "is no name")],
)
def test_variables_that_are_none(name, said):
    with pytest.raises(ConfigError) as error:
        environment.forwarded(Config(forward=(name,)), ENV)
    assert said in str(error.value)


def test_an_env_file_with_a_mistake_is_refused_with_its_line(tmp_path):
    (tmp_path / "env").write_text("A=1\nexport B=2\n")
    with pytest.raises(ConfigError, match=r"env, line 2: 'export B=2' is not NAME=VALUE"):
        environment.forwarded(Config(env_file=str(tmp_path / "env")), ENV)


def test_variables_reach_the_workers_and_no_command_line(launch):
    script = (
        "import os, pathlib\n"
        "lines = [p.read_bytes() for p in pathlib.Path('/proc').glob('[0-9]*/cmdline')]\n"
        "print(os.environ['TOKEN'], sum(b'hush' + b'hush' in line for line in lines))\n"
    )
    result = launch(script, "-np", "1", "-x", "TOKEN", "train.py", TOKEN="hushhush")
    assert result.out == b"[0] hushhush 0\n"


def test_a_prologue_changes_what_workers_find(launch, tmp_path):
    (tmp_path / "env.sh").write_text("echo noise\nexport COLOUR='deep\nblue'\n")
    script = "import os; print(repr(os.environ['COLOUR']))"
    result = launch(script, "-np", "1", "--prologue", f"source {tmp_path}/env.sh", "train.py")
    assert result.out == b"[0] 'deep\\nblue'\n"


def test_a_prologue_that_fails_starts_nothing(launch, tmp_path):
    result = launch("open('started', 'w')", "-np", "1", "--prologue", "source nowhere.sh", "train.py")
    assert result.code == 3
    last = result.err.splitlines()[-1]
    assert last.startswith("dadt: --prologue 'source nowhere.sh' ended with exit code 1: bash: ")
    assert last.endswith("nowhere.sh: No such file or directory")
    assert not (tmp_path / "started").exists()


def test_workers_start_in_the_folder_that_was_asked_for(launch, tmp_path):
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "other.py").write_text("import os; print(os.getcwd())")
    result = launch("", "-np", "1", "--workdir", "there", "other.py")
    assert result.out == f"[0] {tmp_path}/there\n".encode()
    missing = launch("", "-np", "1", "--workdir", "nowhere", "other.py")
    assert missing.code == 3
    assert f"there is no folder {tmp_path}/nowhere" in missing.err


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({}, "how many workers?"),
        ({"hosts": "a", "hostfile": "f"}, "exclude each other"),
        ({"np": 2, "include": "a"}, "give them with -H or --hostfile"),
        ({"np": 2, "launcher": "ssh"}, "--launcher ssh: on which hosts?"),
        ({"np": 2, "launcher": "slurm"}, "this is no Slurm allocation"),
        ({"hosts": "far:2", "launcher": "local"}, "--launcher local: far is another host"),
        ({"np": 2, "node_rank": 1}, "--node-rank: of how many hosts?"),
        ({"np": 2, "rendezvous": "h:1", "node_rank": 0}, "--rendezvous: of how many hosts? Give --nnodes N"),
        ({"nnodes": 2, "node_rank": 0}, "where do the hosts meet?"),
        ({"nnodes": 2, "node_rank": 2, "rendezvous": "h:1"}, "--node-rank 2: give this host's number, from 0 to 1"),
        ({"nnodes": 2, "node_rank": 0, "rendezvous": "h:1", "np": 3}, "-np 3 is no multiple of --nnodes 2"),
        ({"nnodes": 2, "node_rank": 0, "rendezvous": "h:1", "hosts": "a"}, "--nnodes and -H exclude each other"),
    ],
)
def test_plans_that_do_not_fit(settings, said):
    with pytest.raises(ConfigError) as error:
        hosts_of(Config(**settings), {})
    assert said in str(error.value)


@pytest.mark.parametrize("settings", [{"np": 10**6}, {"hosts": "a:999999999"}, {"accelerators": 10**6}])
def test_a_slip_of_the_finger_is_not_laid_out(settings):
    with pytest.raises(ConfigError, match=r"workers on \w+.*: give 65536 at most"):
        make(Config(**settings), ["true"])


@pytest.mark.parametrize(
    ("flag", "value"), [("-np", "9" * 30), ("--output", "0-99999999999"), ("--share", "1-99999999999")]
)
def test_a_slip_of_the_finger_fills_no_memory(tmp_path, flag, value):
    (tmp_path / "train.py").write_text("")
    given = [flag, value] if flag == "-np" else ["-np", "1", flag, value]
    ended = dadt(tmp_path, "run", *given, "train.py")
    assert ended.returncode == 2 and ended.stderr.startswith(f"dadt: {flag} {value}: give ")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--share", "²"], "--share ²: give DataLoaders by number"),
        (["--share", "1-3", "--no-share", "2"], "--share and --no-share both name DataLoader 2"),
        (["--compression", "powersgd:²"], "--compression powersgd:²: unknown"),
        (["--metrics", "prometheus:²"], "--metrics prometheus:²: give a port"),
        (["--seed", str(2**64)], "--seed 18446744073709551616: give a whole number from 0 to 2**64 - 1"),
        (["--seed", "-5"], "--seed -5: give a whole number"),
        (["-m"], "-m ./train: give the name of a module"),
        (["--mpi-args", "'x", "--launcher", "mpi"], "--mpi-args 'x: cannot be read (No closing quotation)"),
    ],
)
def test_values_that_are_none(tmp_path, arguments, said):
    (tmp_path / "train.py").write_text("")
    ended = dadt(tmp_path, "run", "-np", "1", *arguments, "./train" if "-m" in arguments else "train.py")
    assert ended.returncode == 2
    assert said in ended.stderr and ended.stderr.count("\n") == 1


def test_a_seed_reaches_workers_as_it_is(tmp_path):
    for seed in (2**53 + 1, 2**64 - 1):
        assert Config.from_env(Config(seed=seed).to_env()).seed == seed
    assert Config.from_env({"DADT_NP": "1e3"}).np == 1000


def test_paths_are_expanded_wherever_they_come_from(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "dadt.yaml").write_text("log-dir: ~/logs\n")
    arguments = ("config", "show", "--config", "dadt.yaml", "--changed", "--workdir=~/there", "--python=bin/py")
    shown = dadt(tmp_path, *arguments, DADT_ENV_FILE="~/env")
    assert {line.split()[1] for line in shown.stdout.splitlines()} == {
        f"{tmp_path}/logs",
        f"{tmp_path}/there",
        f"{tmp_path}/env",
        f"{tmp_path}/bin/py",
    }
    assert Config(ssh_config="~/ssh").ssh_config == f"{tmp_path}/ssh"
    with pytest.raises(ConfigError, match="--log-dir ~nobody-of-this-name/x: there is no such home folder"):
        Config(log_dir="~nobody-of-this-name/x")


def test_a_python_is_found_from_the_current_folder(launch, tmp_path):
    (tmp_path / "py").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    (tmp_path / "py").chmod(0o755)
    assert launch("print('fine')", "-np", "1", "--python", "./py", "train.py").out == b"[0] fine\n"
    assert Config(python="python3").python == "python3"


def test_the_current_folder_keeps_the_name_that_the_user_gave(tmp_path, monkeypatch):
    (tmp_path / "real").mkdir()
    (tmp_path / "home").symlink_to("real")
    monkeypatch.chdir(tmp_path / "home")
    monkeypatch.setenv("PWD", f"{tmp_path}/home")
    assert make(Config(np=1), ["true"]).cwd == f"{tmp_path}/home"
    assert make(Config(np=1, workdir="x"), ["true"]).cwd == f"{tmp_path}/home/x"
    for stale in ("/", "/nowhere", "home", ""):
        monkeypatch.setenv("PWD", stale)
        assert make(Config(np=1), ["true"]).cwd == f"{tmp_path}/real"


def test_a_current_folder_that_was_deleted_is_told(tmp_path, monkeypatch):
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with pytest.raises(ConfigError, match="the current folder is gone"):
        make(Config(np=1), ["true"])


def test_on_and_off_of_yaml_are_words(tmp_path):
    (tmp_path / "dadt.yaml").write_text("live: off\nssh-host-keys: off\n")
    shown = dadt(tmp_path, "config", "show", "--config", "dadt.yaml", "--changed").stdout
    assert [line.split()[:2] for line in shown.splitlines()] == [["ssh-host-keys", "off"], ["live", "off"]]


def dadt(folder: Path, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    of_tests = ("DADT_OUTPUT", "PYTEST_CURRENT_TEST")  # which is as long as a case's text
    outer = {name: value for name, value in os.environ.items() if name not in of_tests}
    return subprocess.run(
        [forkserver.dadt(ranks=False), *arguments],
        cwd=folder,
        env={**outer, **env},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )


def test_each_setting_tells_where_it_comes_from(tmp_path):
    (tmp_path / "dadt.yaml").write_text("warmup-steps: 7\nhosts: [a:2, b:2]\nbroadcast: false\npredict: 1.5\n")
    arguments = ("config", "show", "--config", "dadt.yaml", "--changed", "--algorithm", "sync", "--warmup-steps", "9")
    shown = dadt(tmp_path, *arguments, DADT_PREDICT="2", HOROVOD_TIMELINE="t.json")
    assert shown.returncode == 0, shown.stderr
    rows = [line.split() for line in shown.stdout.splitlines()]
    assert rows == [
        ["algorithm", "sync", "--algorithm"],
        ["horovod", "sync", "--algorithm"],
        ["warmup-steps", "9", "--warmup-steps"],
        ["predict", "2", "DADT_PREDICT"],
        ["broadcast", "false", "dadt.yaml:", "broadcast"],
        ["timeline", str(tmp_path / "t.json"), "HOROVOD_TIMELINE"],
        ["hosts", "a:2,b:2", "dadt.yaml:", "hosts"],
    ]


def test_a_file_counts_only_when_it_is_named(tmp_path):
    (tmp_path / "dadt.yaml").write_text("warmup-steps: 7\n")
    assert dadt(tmp_path, "config", "show", "--changed").stdout.strip() == ""


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("warmup-step: 7", "there is no setting warmup-step; did you mean warmup-steps?"),
        ("num_proc: 2\nnp: 2", "num_proc and np are the same setting; give it once"),
        ("a: [", "this is no YAML"),
        ("- a", "give settings a line each"),
        ("warmup-steps: few", "warmup-steps: 'few' is not a whole number"),
        ("np: .inf", "np: inf is not a whole number"),
        ("timeout: .nan", "timeout: nan is not a number"),
        ("broadcast: maybe", "broadcast: 'maybe' is not true or false"),
        ("algorithm: pip", "--algorithm pip: unknown; choose one of pipe, sync"),
        ("hosts: {a: 2}", "hosts: give one value, or a list"),
        ("seed: 2001-99-99", "cannot be read (month must be in 1..12)"),
        ("seed: " + "1" * 400, " is not a whole number"),
        ("[" * 5000, "cannot be read (maximum recursion depth exceeded"),
        ("hosts: [&a x, *a]", "line 1: an alias (*a) is not taken; write the value out"),
        (
            "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}' if n else 'x'] * 10)}]\n" for n in range(12)),
            "line 2: an alias",
        ),
        ("hosts: " + "x" * (1 << 16), "has more than 64 KiB"),
        ("hosts: [0x" + "f" * 9000 + "]", "hosts: is no value of a setting"),
    ],
)
def test_a_file_with_a_mistake_is_refused(tmp_path, text, said):
    (tmp_path / "dadt.yaml").write_text(text)
    (tmp_path / "train.py").write_text("")
    ended = dadt(tmp_path, "run", "--config", "dadt.yaml", "-np", "1", "train.py")
    assert ended.returncode == 2
    assert said in ended.stderr and ended.stderr.count("\n") == 1


def test_a_file_can_say_all_that_flags_can(tmp_path):
    (tmp_path / "dadt.yaml").write_text("num-proc: 2\nforward: [COLOUR=blue]\n")
    (tmp_path / "train.py").write_text("import os; print(os.environ['COLOUR'])")
    ended = dadt(tmp_path, "run", "--config", "dadt.yaml", "train.py")
    assert ended.stdout == "[0-1] blue\n"


def test_a_dry_run_starts_nothing(launch, tmp_path):
    result = launch("open('started', 'w')", "-np", "3", "-H", "node1:2,node2:2", "--dry-run", "-x", "A=1", "train.py")
    assert result.code == 0, result.err
    made = ["--timeline", "new/t.json", "--log-dir", "logs", "--metrics", "tensorboard:runs"]
    assert launch("", "-np", "1", "--dry-run", *made, "--snapshot-dir", "snapshots", "train.py").code == 0
    text = result.out.decode()
    assert "node1: " in text and "node2: " in text and "dadt.launch.agent" in text
    assert [line.split()[1] for line in text.splitlines() if line.startswith("  rank ")] == ["0:", "1:", "2:"]
    assert "    A=1" in text and "    RANK=2" in text and "    DADT_ALGORITHM=pipe" in text
    assert [each.name for each in tmp_path.iterdir()] == ["train.py"]


def test_a_prologue_that_leaves_its_shell_starts_nothing(launch):
    result = launch("", "-np", "1", "--prologue", "exit 0", "train.py")
    assert result.code == 3
    assert "left the shell (exit, exec), and its variables with it" in result.err


def test_a_folder_that_cannot_be_looked_at_is_told():
    (problem,) = environment.missing("/" + "x" * 300, ["train.py"])
    assert "/xxx" in problem and "--workdir DIR" in problem


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_streams_lead_nowhere(tmp_path, closed):
    (tmp_path / "train.py").write_text("print('printed')")
    command = f'exec "$0" run -np 1 train.py {closed}'
    ended = subprocess.run(
        ["bash", "-c", command, *DADT], cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE
    )
    assert ended.returncode == 0, ended.stderr
    assert "Traceback" not in ended.stderr
    (log,) = tmp_path.glob("dadt-logs/*/rank0.log")
    assert log.read_text() == "printed\n"


@pytest.mark.slow
def test_a_start_that_is_ended_says_so_on_a_line_of_its_own(start, tmp_path):
    prologue = f"touch {tmp_path}/begun; sleep 2"
    run = start("", "-H", "localhost:1,127.0.0.1:1", "--prologue", prologue, "train.py")
    await_that(lambda: (tmp_path / "begun").exists(), "the prologue")
    run.process.send_signal(signal.SIGTERM)
    first, last = run.finish().err.splitlines()
    assert first.endswith(": starting 2 agents ...")
    assert last == "dadt: ended by SIGTERM; nothing was started"


def test_a_variable_that_is_misspelt_is_told(launch):
    result = launch("", "-np", "1", "train.py", DADT_ALGORITM="sync", DADT_SECRET="x")
    assert "warning: DADT_ALGORITM means nothing to dadt; did you mean DADT_ALGORITHM?" in result.err
    assert "DADT_SECRET" not in result.err


def test_values_of_variables_are_not_shown(tmp_path):
    shown = dadt(tmp_path, "config", "show", "--changed", "-x", "TOKEN=hush", "-x", "A")
    assert shown.stdout.split() == ["forward", "TOKEN=...,A", "--forward"]


def test_hosts_may_be_given_one_by_one(tmp_path):
    shown = dadt(tmp_path, "config", "show", "--changed", "-H", "a:2", "-H", "b")
    assert shown.stdout.split() == ["hosts", "a:2,b", "--hosts"]


def test_with_min_np_fewer_may_fit(tmp_path) -> None:
    (tmp_path / "x.py").touch()
    make(Config(np=4, min_np=2, hosts="localhost:2"), ["x"])
    with pytest.raises(ConfigError, match="the hosts have 2 slots"):
        make(Config(np=4, min_np=3, hosts="localhost:2"), ["x"])
    shown = subprocess.run(
        [*DADT, "run", "--dry-run", "-np", "4", "--min-np", "2", "-H", "localhost:2", "x.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert shown.stdout.startswith("2 workers on localhost"), shown.stdout + shown.stderr


def test_a_wrong_signal_is_noticed_before_anything_is_made() -> None:
    with pytest.raises(ConfigError, match="--forward-signals NO: NO is no signal"):
        make(Config(np=1, forward_signals="NO"), ["x"])


def test_new_workers_that_fail_again_and_again_do_not_end_the_job() -> None:
    replacements = Replacements(Outbox(), lambda ranks, now: True)
    for _ in range(2000):
        replacements.exited([Member(rank=0)], 0.0)


@pytest.mark.parametrize(
    ("given", "workers"),
    [((), "1 worker on localhost"), (("-H", "localhost:3"), "3 workers on localhost"), (("--accelerators", "2"), "2 ")],
)
def test_no_number_of_workers_is_one_for_each_slot(launch, given, workers):
    assert launch("", "-np", "0", "--dry-run", *given, "train.py").out.decode().startswith(workers)
