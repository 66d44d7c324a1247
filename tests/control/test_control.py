"""What a worker and its agent say to each other; the workers here need no torch."""

from __future__ import annotations

import pytest

from dadt.launch.members.board import MOST_BYTES, MOST_KEYS, Board

HEAD = """\
import os, sys, time
from pathlib import Path
from dadt.control.agent_client import Control
from dadt.errors import DadtError, StartTimeout
from dadt.world import World
world = World.from_env()
rank = world.rank
control = Control.connect(world)
def meet(name, timeout=20.0): return control.exchange(name, str(rank).encode(), timeout)
"""


def test_an_exchange_gives_every_rank_all_blobs_by_rank(launch):
    script = HEAD + (
        "blob = bytes([rank]) * (rank * 100_000)\n"
        "for key in 'ab':\n"
        "    assert control.exchange(key, blob, 20) == [bytes([r]) * (r * 100_000) for r in range(4)]\n"
        "print('same')\n"
    )
    result = launch(script, "-np", "4", "train.py")
    assert result.code == 0, result.err
    assert result.out.count(b"same") == 4


def test_threads_may_ask_at_the_same_time(launch):
    script = HEAD + (
        "import threading\n"
        "def ask(key):\n"
        "    if meet(key) == [b'0', b'1']: print('right')\n"
        "threads = [threading.Thread(target=ask, args=(f'{i * (1 - 2 * rank) % 20}',)) for i in range(20)]\n"
        "[t.start() for t in threads]; [t.join() for t in threads]\n"
    )
    result = launch(script)
    assert result.out.count(b"right") == 40


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("did", "state"),
    [
        ("", "has not imported torch"),
        ("control.hello(torch='2.13')", "has imported torch, not begun to train"),
        ("control.hello(torch='2.13'); control.claim()", "has begun to train"),
        ("control.progress(7)", "at step 7"),
    ],
)
def test_a_rank_that_does_not_arrive_is_named_with_its_state(launch, did, state):
    script = HEAD + (
        f"if rank == 1:\n    {did or 'pass'}\n    open('done', 'w').close()\n"
        "    while not os.path.exists('told'): time.sleep(0.01)\n"
        "else:\n"
        "    while not os.path.exists('done'): time.sleep(0.01)\n"
        "    try: meet('start', 1.5)\n"
        "    except StartTimeout as error: print(error)\n"
        "    open('told', 'w').close()\n"
    )
    result = launch(script)
    assert result.out.decode() == f"[0] rank 1 ({state}) did not arrive within 1.5 s for 'start'\n"


def test_a_rank_that_has_exited_is_not_waited_for(launch):
    result = launch(HEAD + "if rank == 0: meet('start', 600)")
    assert result.code == 124
    assert "rank 1 (has exited with code 0) cannot arrive any more" in result.err


def test_a_start_timeout_is_exit_code_124(launch):
    script = HEAD + "time.sleep(600 * rank); meet('start', 0.5)"
    result = launch(script)
    assert result.code == 124
    assert result.err.splitlines()[-1].startswith("dadt: rank 1 (has not imported torch) did not arrive within 0.5 s")


def test_a_rank_is_claimed_by_one_living_process(launch):
    script = HEAD + (
        "control.claim(); control.claim()\n"
        "import subprocess\n"
        "again = '''import sys\n"
        "from dadt.control.agent_client import Control\n"
        "from dadt.world import World\n"
        "from dadt.errors import DadtError\n"
        "try: Control.connect(World.from_env()).claim()\n"
        "except DadtError as error: sys.exit(str(error))'''\n"
        "print(os.getpid()); subprocess.run([sys.executable, '-c', again])\n"
    )
    result = launch(script, "-np", "1", "train.py")
    pid = result.out.decode().split()[1]
    assert f"[0] rank 0 is already claimed by pid {pid}: " in result.err


def test_the_claim_of_a_dead_process_is_free(launch):
    script = HEAD + (
        "import subprocess\n"
        "claim = 'from dadt.control.agent_client import Control; from dadt.world import World; "
        'Control.connect(World.from_env()).claim(); print("claimed")\'\n'
        "for _ in range(2): subprocess.run([sys.executable, '-c', claim], check=True)\n"
        "control.claim()\n"
    )
    result = launch(script, "-np", "1", "train.py")
    assert result.code == 0, result.err
    assert result.out.count(b"claimed") == 2


def test_what_all_ranks_say_is_printed_once(launch):
    script = HEAD + "control.say('the same'); control.say(f'from {rank}', level='warning')"
    err = launch(script).err
    assert err.count("dadt: the same\n") == 1
    assert "dadt: warning: from 0\n" in err and "dadt: warning: from 1\n" in err


def test_peers_are_known_with_their_step(launch):
    script = HEAD + (
        "control.progress(10 + rank); meet('done')\n"
        "while [p['step'] for p in control.peers()] != [10, 11]: time.sleep(0.05)\n"
        "peers = control.peers()\n"
        "assert [p['rank'] for p in peers] == [0, 1] and peers[rank]['pid'] == os.getpid(), peers\n"
        "assert all(p['state'] == f\"at step {p['step']}\" and 0 <= p['seconds'] < 20 for p in peers), peers\n"
        "print(sorted(p['step'] for p in peers)); meet('end')\n"
    )
    result = launch(script)
    assert result.code == 0, result.err
    assert result.out.count(b"[10, 11]") == 2


def test_the_step_of_a_killed_worker_is_known(launch):
    result = launch(
        HEAD + "control.progress(41); control.progress(42); os.kill(os.getpid(), 9)", "-np", "1", "train.py"
    )
    assert result.code == 137
    assert ", at step 42\n" in result.err


def test_a_failure_that_another_caused_is_not_the_cause_though_it_comes_first(launch):
    script = HEAD + (
        "if rank == 0:\n"
        "    control.failed('PeerLost', 'rank 1 is gone', step=3, secondary=True)\n"
        "    open('told', 'w').close(); sys.exit(1)\n"
        "while not os.path.exists('told'): time.sleep(0.01)\n"
        "time.sleep(0.3); sys.exit(9)\n"
    )
    result = launch(script)
    assert result.code == 9
    assert "worker 1 failed (exit code 9)" in result.err and "worker 0 was stopped" in result.err


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("first", "verdict"),
    [
        ("time.sleep(0.3); control.saved('f', 1, 1); meet('end')", "there"),
        ("control.saved('f', 2, 2); meet('end')", "there"),
        ("control.progress(5); meet('end')", "write"),
        ("sys.exit()", "write"),
        ("control.saved('g', 1, 7); control.progress(4); meet('end')", "write"),
        ("control.saved('g', 1, 1); meet('end')", "write"),
    ],
)
def test_a_file_is_awaited_until_it_is_there_or_never_comes(launch, first, verdict):
    script = HEAD + (
        f"meet('begin')\nif rank == 0:\n    {first}\n"  # as the other may still be starting
        "else:\n    print(control.await_save('f', 1, 1, 4, 3.0))\n" + ("" if "exit" in first else "    meet('end')\n")
    )
    result = launch(script)
    assert result.code == 0, result.err
    assert result.out.decode() == f"[1] {verdict}\n"


def test_a_fork_cannot_speak_for_its_parent(launch):
    script = HEAD + (
        "if os.fork() == 0:\n"
        "    try: control.progress(1)\n"
        "    except DadtError as error: print(error, flush=True)\n"
        "    os._exit(0)\n"
        "os.wait(); control.progress(1)\n"
    )
    result = launch(script, "-np", "1", "train.py")
    assert result.code == 0
    assert b"is a fork of rank 0 and cannot speak for it" in result.out


def test_the_summary_makes_the_last_line(launch):
    script = HEAD + (
        "control.hello(torch='2.13'); control.progress(186)\n"
        "control.done({'steps': 186, 'delayed': 136, 'wait_fraction': 0.012})\n"
    )
    last = launch(script).err.splitlines()[-1]
    start, _, rest = last.partition(" s: ")
    assert start.startswith("dadt: done in ")
    assert rest == "186 steps, 136 of them delayed by one, 1.2 % of the time spent waiting for communication"


@pytest.mark.parametrize(
    ("script", "why"),
    [("", "no worker imported torch"), (HEAD + "control.hello(torch='2')", "no torch.optim optimizer made a step")],
)
def test_training_that_was_not_distributed_is_told_loudly(launch, script, why):
    result = launch(script)
    assert result.code == 0
    *_, end, last = result.err.splitlines()
    assert end.startswith("dadt: done in ")
    assert last.startswith(f"dadt: warning: training was NOT distributed by DADT: {why}")


def test_a_script_that_leaves_without_a_word_has_trained_all_the_same(launch):
    result = launch(HEAD + "control.hello(torch='2')\ncontrol.progress(3, last=True)\nos._exit(0)")
    assert result.code == 0
    assert "NOT distributed" not in result.err


def test_what_one_rank_puts_others_get(launch):
    """In any order, several at once, each key once."""
    script = HEAD + (
        "blob = bytes(range(256)) * 4000\n"
        "if rank == 1:\n"
        "    late, early = control.get(['g/late', 'g/early'], 20)\n"
        "    print(len(early), control.get(['g/late'], 20) == [late] == [blob])\n"
        "    control.put('h/back', b'')\n"
        "else:\n"
        "    control.put('g/early', b'abc'); control.put('g/late', blob); control.get(['h/back'], 20)\n"
        "    try: control.put('g/early', b'other')\n"
        "    except DadtError as error: print(error)\n"
        "meet('end')\n"
    )
    result = launch(script)
    assert sorted(result.out.decode().splitlines()) == [
        "[0] rank 0 puts 'g/early', which is there already: each key is put once in a job",
        "[1] 3 True",
    ]


def test_who_has_not_put_is_named(launch):
    script = HEAD + (
        "meet('begin')\n"  # as others may still be starting
        "if rank == 2: meet('end')\n"
        "control.put(f'group/{rank}', b'')\n"
        "try: control.get(['group/0', 'group/1', 'group/2'], 0.5)\n"
        "except StartTimeout as error: print(error)\n"
        "meet('end')\n"
    )
    result = launch(script, "-np", "3", "train.py")
    told = "rank 2 (has not imported torch) did not arrive within 0.5 s for 'group/2'"
    assert sorted(result.out.decode().splitlines())[:2] == [f"[0] {told}", f"[1] {told}"]


def test_a_rank_that_has_ended_puts_nothing_more(launch):
    script = HEAD + "if rank == 0: control.put('group/0', b''); control.get(['group/1'], 600)"
    result = launch(script)
    assert result.code == 124
    assert "rank 1 (has exited with code 0) cannot arrive any more for 'group/1'" in result.err


def test_what_a_rank_may_put_is_bounded():
    board = Board()
    for number in range(MOST_KEYS):
        assert board.put(f"group/{number}", 1, b"", 0.0) == ""
    assert board.put("group/one more", 1, b"", 0.0).startswith("rank 1 puts 4,097 keys of ")
    assert board.put("group/0 of rank 2", 2, b"", 0.0) == ""
    assert "are the most: its script makes too many groups of ranks" in board.put(
        "group/large", 2, bytes(MOST_BYTES), 0.0
    )
    assert board.put("group/half", 2, bytes(MOST_BYTES // 2), 0.0) == ""


def test_the_secret_is_the_jobs_own_and_stands_in_no_environment(launch):
    """Its ranks know it once they have claimed their rank, and no other process of this user can read it of them."""
    script = HEAD + (
        "assert control.secret == b''\n"
        "control.claim()\n"
        "secret = control.secret\n"
        "assert len(secret) == 32 and len(set(secret)) > 8\n"
        "assert control.exchange('secret', secret, 20) == [secret, secret]\n"
        "pid, seen = os.getpid(), b''\n"
        "while pid > 1:\n"
        "    for name in ('environ', 'cmdline'): seen += Path(f'/proc/{pid}/{name}').read_bytes()\n"
        "    pid = int(Path(f'/proc/{pid}/stat').read_text().rpartition(')')[2].split()[1])\n"
        "assert secret not in seen and secret.hex().encode() not in seen\n"
        "print(secret.hex())\n"
        "meet('end')\n"
    )
    jobs = [{line.split()[-1] for line in launch(script).out.decode().splitlines()} for _ in range(2)]
    assert [len(each) for each in jobs] == [1, 1] and jobs[0] != jobs[1]


def test_a_signals_handler_may_speak_in_the_midst_of_a_report(launch):
    script = HEAD + (
        "import itertools, signal\n"
        "said, texts = [], map('handler {}'.format, itertools.count())\n"
        "def speak(number, frame):\n"  # may be interrupted by the next signal
        "    text = next(texts); said.append(text); control.say(text)\n"
        "signal.signal(signal.SIGALRM, speak)\n"
        "signal.setitimer(signal.ITIMER_REAL, 0.001, 0.0005)\n"
        "number = 0\n"
        "while len(said) < 300:\n"
        "    control.say(f'report {number % 1000}'); number += 1\n"  # the launcher prints so many different ones
        "signal.setitimer(signal.ITIMER_REAL, 0)\n"
        "print('said', number, len(said))\n"
    )
    result = launch(script, "-np", "1", "train.py")
    assert result.code == 0, result.err
    reports, handlers = map(int, result.out.split()[-2:])
    assert [f"report {n}" in result.err for n in range(min(reports, 1000))] == [True] * min(reports, 1000)
    assert [f"handler {n}" in result.err for n in range(handlers)] == [True] * handlers
