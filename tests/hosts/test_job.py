"""Jobs over several hosts: where workers run, what they print, which way between hosts is taken, how it all ends."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time

import pytest
from harness import ROOT, forkserver
from harness.patience import PATIENCE, SETTLE_SECONDS, await_that

import dadt
from dadt.config import Config

SHOW = """
import os, socket
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "DADT_ADDRESS", "GLOO_SOCKET_IFNAME")
print("is", socket.gethostname(), *(os.environ.get(name) for name in names))
"""
TRAIN = """
import hashlib, torch
model = torch.nn.Linear(100, 10); optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
for step in range(70):
    optimizer.zero_grad(); model(torch.randn(8, 100)).pow(2).mean().backward(); optimizer.step()
print("weights", hashlib.sha256(model.weight.detach().numpy().tobytes()).hexdigest())
"""
WAIT = """
import os, signal, sys, time
from pathlib import Path
def ready(name):
    path = Path(name + os.environ["RANK"])
    path.with_suffix(".new").write_text("1"); path.with_suffix(".new").rename(path)
{}
ready("ready")
while True: time.sleep(600)
"""
IGNORE = "signal.signal(signal.SIGTERM, signal.SIG_IGN); signal.signal(signal.SIGINT, signal.SIG_IGN)"
DAEMON = """
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        ready("daemon")
        while True: time.sleep(600)
    os._exit(0)
while not os.path.exists("daemon" + os.environ["RANK"]): time.sleep(0.01)
"""

DIE = """
import torch
if os.environ["RANK"] == "1":
    while not os.path.exists("die"): time.sleep(0.01)
    os._exit(7)
"""


def words(out: bytes) -> list[list[str]]:
    return sorted(line.split() for line in out.decode().splitlines())


def test_ranks_go_host_by_host_and_know_each_other(hosts, start):
    network = hosts(2)
    result = start(network, SHOW, "-np", 3, "-H", network.list(2), "--display-map", "train.py").finish()
    assert result.code == 0, result.err
    assert words(result.out) == [
        ["[0", "h0]", "is", "h0", "0", "0", "3", "2", "10.7.0.1", "10.7.0.1", "eth0"],
        ["[1", "h0]", "is", "h0", "1", "1", "3", "2", "10.7.0.1", "10.7.0.1", "eth0"],
        ["[2", "h1]", "is", "h1", "2", "0", "3", "1", "10.7.0.1", "10.7.0.2", "eth0"],
    ]
    assert re.search(r"^2 +h1 +0 +10\.7\.0\.2 ", result.err, re.MULTILINE)
    assert re.search(r"starting 2 agents \.\.\.  h\d ready \(\d\.\d s\)  h\d ready", result.err)


def test_hosts_that_are_not_needed_are_let_go(hosts, start):
    network = hosts(3)
    result = start(network, SHOW, "-np", 2, "-H", network.list(1), "train.py").finish()
    assert result.code == 0, result.err
    assert [line[3] for line in words(result.out)] == ["h0", "h1"]
    assert "h2 not used" in result.err


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 4])
def test_four_workers_learn_digits_over_hosts(hosts, start, count):
    network = hosts(count)
    script = (ROOT / "examples" / "mnist.py").read_text()
    arguments = ("--epochs", 1, "--data", ROOT / "examples" / "data" / "mnist")
    result = start(network, script, "-np", 4, "-H", network.list(4 // count), "train.py", *arguments).finish()
    assert result.code == 0, result.err
    assert result.err.splitlines()[-1].startswith("dadt: done in ")
    accuracies = {line[-1] for line in words(result.out) if "accuracy" in line}
    assert len(accuracies) == 1, result.out


def test_replicas_are_equal_over_hosts(hosts, start):
    network = hosts(2)
    result = start(network, TRAIN, "-np", 4, "-H", network.list(2), "train.py").finish()
    assert result.code == 0, result.err
    assert len(words(result.out)) == 4 and len({line[-1] for line in words(result.out)}) == 1
    assert ", executor hierarchical:tcp," in result.err


@pytest.mark.slow
def test_hosts_meet_over_the_newer_protocol(hosts, start):
    network = hosts(2)
    result = start(
        network, TRAIN + SHOW, "-np", 2, "-H", network.list(1), "--network-interface", "fd07::/64", "train.py"
    )
    result = result.finish()
    assert result.code == 0, result.err
    assert len({line[-1] for line in words(result.out) if line[2] == "weights"}) == 1
    assert [line[9] for line in words(result.out) if line[2] == "is"] == ["fd07::1", "fd07::2"]


def test_ranks_meet_over_the_interface_of_a_virtual_network(hosts, start):
    network = hosts(2)
    for number, host in enumerate(network.hosts):
        # As a VPN's: a tunnel with addresses of its own, and packets that are smaller than the network's.
        ends = "dev", "eth0", "remote", network[1 - number].address
        host.run("ip", "link", "add", "vpn0", "type", "vxlan", "id", "7", "dstport", "4789", *ends)
        host.run("ip", "link", "set", "vpn0", "mtu", "1280", "up")
        host.run("ip", "addr", "add", f"10.99.0.{number + 1}/24", "dev", "vpn0")
    flags = "-np", 2, "-H", network.list(1), "--network-interface", "vpn0"
    result = start(network, TRAIN + SHOW, *flags, "train.py").finish()
    assert result.code == 0, result.err
    assert len({line[-1] for line in words(result.out) if line[2] == "weights"}) == 1
    shown = [line[9:11] for line in words(result.out) if line[2] == "is"]
    assert shown == [["10.99.0.1", "vpn0"], ["10.99.0.2", "vpn0"]]
    (tunnel,) = json.loads(network[0].run("ip", "-json", "-stats", "link", "show", "vpn0"))
    assert tunnel["stats64"]["tx"]["bytes"] > 70 * 1010 * 4, "gradients do not travel by the tunnel"


def test_networks_that_only_look_alike_are_not_taken_for_a_way(hosts, start):
    network = hosts(2)
    for host in network.hosts:
        # As Docker makes them: the same on each host; and one that has no such name, but leads nowhere either.
        host.run("ip", "link", "add", "docker0", "type", "bridge")
        host.run("ip", "addr", "add", "172.17.0.1/16", "dev", "docker0")
        host.run("ip", "link", "set", "docker0", "up")
        host.run("ip", "link", "add", "lan9", "type", "bridge")
        host.run("ip", "addr", "add", "192.168.9.1/24", "dev", "lan9")
        host.run("ip", "link", "set", "lan9", "up")
    result = start(network, SHOW, "-np", 2, "-H", network.list(1), "train.py").finish()
    assert [line[9] for line in words(result.out)] == ["10.7.0.1", "10.7.0.2"]


def test_interfaces_may_have_different_names(hosts, start):
    network = hosts(2)
    network[1].run("ip", "link", "set", "eth0", "down")
    network[1].run("ip", "link", "set", "eth0", "name", "lan7")
    network[1].run("ip", "link", "set", "lan7", "up")
    result = start(network, SHOW, "-np", 2, "-H", network.list(1), "train.py").finish()
    assert [line[10] for line in words(result.out)] == ["eth0", "lan7"]


def test_hosts_without_a_way_between_them_are_named(hosts, start, tmp_path):
    network = hosts(2)
    network[0].run("ip", "route", "add", "blackhole", "10.7.0.2")
    network[0].run("ip", "-6", "route", "add", "blackhole", "fd07::2")
    result = start(network, "open('started', 'w')", "-np", 2, "-H", network.list(1), "train.py").finish()
    assert result.code == 3
    assert "h1 (10.7.0.2, fd07::2) is not reached by h0" in result.err.splitlines()[-1]
    assert not (tmp_path / "started").exists()
    other = start(network, "", "-np", 2, "-H", network.list(1), "--network-interface", "nothing0", "train.py").finish()
    assert (
        "--network-interface nothing0: matches nothing on h0, which has eth0 10.7.0.1, eth0 fd07::1; h1," in other.err
    )


def test_the_first_failure_by_time_over_all_hosts_is_the_cause(hosts, start):
    script = """
import os, subprocess, sys, time
rank = int(os.environ["RANK"])
def tell(command):  # what Python writes here stays apart
    subprocess.run(command, shell=True, check=True)
def await_file(name):
    while not os.path.exists(name): time.sleep(0.01)
def is_there(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
if rank == 3:
    tell(f"echo {os.getpid()} > pid.part; mv pid.part pid")
    raise ValueError("first")
if rank == 2:  # of the same host
    await_file("pid")
    pid = int(open("pid").read())
    while is_there(pid): time.sleep(0.01)
    tell("touch go")
await_file("go")
sys.exit(9)
"""
    network = hosts(2)
    result = start(network, script, "-np", 4, "-H", network.list(2), "train.py").finish()
    assert result.code == 1
    assert "worker 3 failed (exit code 1)" in result.err and "ValueError: first" in result.err
    assert "host    h1, pid" in result.err


def test_survivors_leave_their_stacks_and_do_not_take_the_grace_period(hosts, start, tmp_path):
    script = WAIT.format(DIE)
    network = hosts(2)
    run = start(network, script, "-np", 2, "-H", network.list(1), "--grace", "60", "train.py")
    run.wait_for("ready0")
    begin = time.monotonic()
    (tmp_path / "die").touch()
    result = run.finish()
    assert time.monotonic() - begin < 60.0
    assert result.code == 7
    assert "train.py" in (tmp_path / "dadt-logs" / result.job / "rank0.stacks").read_text()


@pytest.mark.sample(3)
@pytest.mark.parametrize("extra", [IGNORE, DAEMON])
@pytest.mark.parametrize("whom", ["launcher", "agent", "worker"])
def test_kill_9_leaves_nothing_on_any_host(hosts, start, whom, extra):
    network = hosts(2)
    run = start(network, WAIT.format(extra), "-np", 2, "-H", network.list(1), "--grace", "0.5", "train.py")
    run.wait_for("ready0", "ready1")
    if whom == "launcher":
        run.process.kill()
        run.process.wait()
    else:
        wanted = "dadt.launch.agent" if whom == "agent" else "train.py"
        os.kill(next(pid for pid, line in network[1].processes().items() if wanted in line), signal.SIGKILL)
        result = run.finish()
        assert result.code == (3 if whom == "agent" else 137), result.err
        if whom == "agent":
            assert "h1: " in result.err.splitlines()[-1]
        else:
            assert "killed by signal 9" in result.err
    await_that(
        lambda: not any(host.leftovers() for host in network.hosts), f"{network.leftovers()}", seconds=SETTLE_SECONDS
    )


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_reaches_all_hosts(hosts, start, tmp_path, number):
    gentle = f"signal.signal({int(number)}, lambda *_: (ready('gentle'), sys.exit()))"
    network = hosts(2)
    run = start(network, WAIT.format(gentle), "-np", 2, "-H", network.list(1), "train.py")
    run.wait_for("ready0", "ready1")
    run.process.send_signal(number)
    assert run.finish().code == 128 + number
    assert (tmp_path / "gentle0").exists() and (tmp_path / "gentle1").exists()


def test_signals_are_passed_on(hosts, start, tmp_path):
    wanted = "signal.signal(signal.SIGUSR1, lambda *_: (ready('usr'), sys.exit()))"
    network = hosts(2)
    run = start(network, WAIT.format(wanted), "-np", 2, "-H", network.list(1), "train.py")
    run.wait_for("ready0", "ready1")
    run.process.send_signal(signal.SIGUSR1)
    assert run.finish().code == 0
    assert (tmp_path / "usr0").exists() and (tmp_path / "usr1").exists()


def test_a_cut_network_ends_both_sides(hosts, start):
    network = hosts(2)
    run = start(network, WAIT.format(IGNORE), "-np", 2, "-H", network.list(1), "--orphan-timeout", "3", "train.py")
    run.wait_for("ready0", "ready1")
    network.cut(network[1])
    begin = time.monotonic()
    result = run.finish()
    assert result.code == 3
    assert re.search(r"h1: .*(no sign of life|connection)", result.err.splitlines()[-1]), result.err
    await_that(lambda: not network[1].leftovers(), f"the end of {network[1].leftovers()}", seconds=SETTLE_SECONDS)
    assert time.monotonic() - begin < Config().orphan_timeout


def test_output_arrives_whole_and_in_order(hosts, start, tmp_path):
    script = """
import os, random, sys, threading
rank = int(os.environ["RANK"])
data = random.Random(rank).randbytes(10_000_000)
def write(stream, data):
    stream.buffer.write(data); stream.flush()
parts = ((sys.stdout, data[:5_000_000]), (sys.stderr, b"e" * 3_000_000))
threads = [threading.Thread(target=write, args=part) for part in parts]
[t.start() for t in threads]; [t.join() for t in threads]
write(sys.stdout, data[5_000_000:])
sys.stdout.buffer.write(b"\\n"); sys.stdout.flush()
for i in range(2000): print("line", i)
"""
    network = hosts(2)
    result = start(network, script, "-np", 2, "-H", network.list(1), "--output", "0", "train.py").finish()
    assert result.code == 0, result.err[-2000:]
    lines = [line for line in result.out.split(b"\n") if line.startswith(b"[0 h0] line ")]
    assert lines == [b"[0 h0] line %d" % i for i in range(2000)]
    for rank in (0, 1):
        log = result.log(rank)
        data = random.Random(rank).randbytes(10_000_000)
        assert len(log) == 10_000_000 + 3_000_000 + 1 + sum(len(f"line {i}\n") for i in range(2000))
        # Both streams go to one file: without the other's letters, the order is that of the script.
        printed = data.replace(b"e", b"")
        assert log.replace(b"e", b"")[: len(printed)] == printed


def test_a_host_where_something_is_missing_says_so(hosts, start, tmp_path):
    network = hosts(2)
    result = start(network, "", "-np", 2, "-H", network.list(1), "--workdir", "/nowhere", "train.py").finish()
    assert result.code == 3
    for name in ("h0", "h1"):
        assert f"dadt: {name}: there is no folder /nowhere" in result.err
    assert result.err.splitlines()[-1] == "dadt: nothing was started; exit code 3"


@pytest.mark.slow
def test_a_host_that_does_not_answer_ends_the_start(hosts, start):
    network = hosts(2)
    network.cut(network[1])
    begin = time.monotonic()
    result = start(network, "", "-np", 2, "-H", network.list(1), "--start-timeout", "3", "train.py").finish()
    assert result.code in (3, 124), result.err
    assert "dadt: h1: " in result.err and "h0: " not in result.err.replace("h0 ready", "")
    assert time.monotonic() - begin < 15


@pytest.mark.slow
def test_ranks_that_never_begin_to_train_are_named_with_their_hosts(hosts, start):
    script = TRAIN.replace(
        "import hashlib", "import os, time\nif os.environ['RANK'] == '1': time.sleep(600)\nimport hashlib"
    )
    network = hosts(2)
    result = start(network, script, "-np", 2, "-H", network.list(1), "--start-timeout", "6", "train.py").finish()
    assert result.code == 124
    assert "rank 1 (on h1, has not imported torch) did not arrive within 6 s" in result.err


def test_variables_reach_the_hosts_that_were_asked_for(hosts, start):
    script = "import os; print(*(os.environ.get(n) for n in ('WANDB_KEY', 'PRIVATE', 'ASKED', 'CUDA_VISIBLE_DEVICES')))"
    network = hosts(1)
    env = {"WANDB_KEY": "w", "PRIVATE": "p", "ASKED": "a", "CUDA_VISIBLE_DEVICES": "5"}
    result = start(network, script, "-np", 1, "-H", "h0", "-x", "ASKED", "train.py", **env).finish()
    assert result.out == b"[0] w None a None\n", result.err


def test_python_is_the_launchers_own(hosts, start):
    network = hosts(1)
    result = start(network, "import sys; print(sys.executable)", "-np", 1, "-H", "h0", "train.py").finish()
    assert os.path.samefile(result.out.decode().split()[1], sys.executable)


def test_a_function_runs_on_all_hosts(hosts, tmp_path):
    code = """
import os, socket, sys
import dadt
def work(factor):
    if int(os.environ["RANK"]) == factor: raise LookupError("on " + socket.gethostname())
    return socket.gethostname(), int(os.environ["RANK"]) * factor
print(dadt.run(work, (10,), hosts=["h0:1", "h1:2"], ssh_config=sys.argv[1]))
try: dadt.run(work, (2,), hosts="h0:1,h1:2", ssh_config=sys.argv[1])
except LookupError as error: print(error)
"""
    network = hosts(2)
    (tmp_path / "main.py").write_text(code)
    command = network.launcher.enter([forkserver.python(), "main.py", network.config], tmp_path)
    env = {**os.environ, "DADT_PYTHON": forkserver.python()}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=PATIENCE)
    assert done.stdout.splitlines() == ["[('h0', 0), ('h1', 10), ('h1', 20)]", "on h1"], done.stderr


def test_another_version_on_a_host_is_refused_and_another_torch_is_told(hosts, start, tmp_path):
    def differ(line: str) -> str:
        (tmp_path / "site").mkdir(exist_ok=True)
        (tmp_path / "site" / "sitecustomize.py").write_text(line)
        python = tmp_path / "python"
        python.write_text(
            f'#!/bin/sh\n[ "$(hostname)" = h1 ] && export PYTHONPATH={tmp_path}/site\nexec {sys.executable} "$@"\n'
        )
        python.chmod(0o755)
        return str(python)

    network = hosts(2)
    python = differ("import dadt.config.version as v; v.VERSION = '9.9'")
    result = start(network, "", "-np", 2, "-H", network.list(1), "--python", python, "train.py").finish()
    assert result.code == 3
    assert f"dadt: h1: dadt 9.9 is installed there, {dadt.__version__} here -> install the same version" in result.err
    python = differ("import dadt.control.machine as m; m._version = lambda package: '2.2.0'")
    result = start(network, "", "-np", 2, "-H", network.list(1), "--python", python, "train.py").finish()
    assert result.code == 0
    assert "hosts differ in torch: h0 2." in result.err and "h1 2.2" in result.err


@pytest.mark.slow
def test_a_long_prologue_is_no_silence(hosts, start):
    network = hosts(1)
    arguments = ("-np", 1, "-H", "h0", "--orphan-timeout", "2", "--prologue", "sleep 3; export A=b")
    result = start(network, "import os; print(os.environ['A'])", *arguments, "train.py").finish()
    assert result.out == b"[0] b\n", result.err


@pytest.mark.slow
def test_a_host_that_is_lost_while_others_get_ready_ends_the_start(hosts, start, tmp_path):
    network = hosts(2)
    prologue = 'if [ "$(hostname)" = h1 ]; then touch slow; sleep 5; fi'
    run = start(network, "", "-np", 2, "-H", network.list(1), "--prologue", prologue, "train.py")
    await_that(lambda: (tmp_path / "slow").exists(), "the prologue on h1")
    events = tmp_path / "dadt-logs" / run.job / "events.jsonl"
    await_that(lambda: '"agent ready"' in events.read_text(), "h0")
    agent = next(pid for pid, line in network[0].processes().items() if "dadt.launch.agent" in line)
    os.kill(agent, signal.SIGKILL)
    result = run.finish()
    assert result.code == 3
    assert re.search(r"^dadt: h0: .*(killed|closed)", result.err, re.MULTILINE), result.err
