"""A failing worker: its exit code, the block that names the cause, and the others' end."""

from __future__ import annotations

import re
import signal
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from harness.patience import PATIENCE
from harness.run import DADT

from dadt.launch.ending.failure import Ending, Failure, find_cause, last_line, size
from dadt.launch.ending.record import ErrorRecord

FAIL = "import os, sys, time\nif os.environ['RANK'] == '1':\n    {}\ntime.sleep(600)\n"

LOG = Path("rank1.log")

TORCH_FAIL = """\
import os, time, torch
torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
if os.environ["RANK"] == "1":
    while not os.path.exists("ready"): time.sleep(0.01)
    def main():
        {}
    main()
def waiting_for_godot():
    open("ready", "w").close()
    time.sleep(600)
waiting_for_godot()
"""

SET_BACK = """\
import atexit, os, time, torch
torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
if os.environ["RANK"] == "1":
    while not os.path.exists("ready"): time.sleep(0.01)
    atexit.register(lambda: open("failed", "w").close())
    raise ValueError("first")
time.time = lambda: 1000.0
open("ready", "w").close()
while not os.path.exists("failed"): time.sleep(0.001)
raise ValueError("second")
"""


@pytest.mark.parametrize(
    ("failure", "code", "verdict"),
    [
        ("sys.exit(1)", 1, "exit code 1"),
        ("sys.exit(3)", 3, "exit code 3"),
        ("os._exit(77)", 77, "exit code 77"),
        ("raise ValueError('bad label 11')", 1, "exit code 1"),
        ("os.kill(os.getpid(), 9)", 137, "killed by signal 9, SIGKILL"),
        ("os.abort()", 134, "killed by signal 6, SIGABRT"),
        ("os.kill(os.getpid(), 15)", 143, "killed by signal 15, SIGTERM"),
    ],
)
def test_the_exit_code_is_the_workers(launch, failure, code, verdict):
    result = launch(FAIL.format(failure))
    assert result.code == code
    assert f"dadt: worker 1 failed ({verdict}) after " in result.err
    assert "; worker 0 was stopped\n" in result.err


def test_the_block_stands_last_and_tells_the_cause(launch):
    result = launch(FAIL.format("print('before', file=sys.stderr); raise ValueError('bad label 11')"))
    block = result.err[result.err.index("dadt: worker 1 failed") :]
    expected = (
        r"dadt: worker 1 failed \(exit code 1\) after \d+\.\d s; worker 0 was stopped\n"
        rf"  host    this host, pid \d+, log dadt-logs/{result.job}/rank1\.log\n"
        r"  cause   ValueError: bad label 11\n"
        r"    File \"train\.py\", line 3, in <module>\n"
        r"      print\('before', file=sys\.stderr\); raise ValueError\('bad label 11'\)\n"
        r"  memory  peak [\d.]+ MiB \(limit [\d.]+ [MGT]iB\): not out of memory\n"
    )
    assert re.fullmatch(expected, block), block


def test_with_torch_the_block_names_the_frame_and_the_survivors_stacks_are_kept(launch):
    result = launch(TORCH_FAIL.format("raise ValueError('bad label 11')"))
    assert result.code == 1
    assert "  cause   ValueError: bad label 11\n" in result.err
    assert '    File "train.py", line 6, in main\n      raise ValueError' in result.err
    stacks = (result.logs / result.job / "rank0.stacks").read_text()
    assert "in waiting_for_godot" in stacks
    assert f"stacks  dadt-logs/{result.job}/rank0.stacks" in result.err


@pytest.mark.slow
def test_the_first_failure_is_the_cause_though_a_clock_was_set_back(launch):
    result = launch(SET_BACK)
    assert "  cause   ValueError: first\n" in result.err, result.err


def test_an_exception_in_a_thread_is_the_cause_if_the_process_fails_after_it(launch):
    thread = (
        "import threading\n"
        "        t = threading.Thread(target=lambda: 1 / 0, name='loader'); t.start(); t.join(); os._exit(5)"
    )
    result = launch(TORCH_FAIL.format(thread))
    assert result.code == 5
    assert "  cause   ZeroDivisionError: division by zero (in thread loader)\n" in result.err


def test_an_exception_in_a_thread_of_a_worker_that_ends_well_is_no_failure(launch):
    script = "import threading, torch\nt = threading.Thread(target=lambda: 1 / 0); t.start(); t.join()\n"
    result = launch(script, "-np", "1", "train.py")
    assert result.code == 0
    assert "failed" not in result.err


@pytest.mark.slow
def test_an_error_of_dadt_in_a_thread_ends_the_job(launch):
    script = (
        "import threading, torch, dadt\n"
        "def read():\n    raise dadt.DadtError('read it elsewhere')\n"
        "threading.Thread(target=read).start(); threading.Event().wait(600)\n"
    )
    result = launch(script, "-np", "1", "train.py")
    assert result.code == 1
    assert "  cause   DadtError: read it elsewhere\n" in result.err


def test_an_exit_code_of_the_scripts_own_is_not_called_an_exception(launch):
    result = launch(TORCH_FAIL.format("raise SystemExit(3)"))
    assert result.code == 3
    assert "  cause   it exited with code 3" in result.err


@pytest.mark.slow
def test_a_worker_that_does_not_exit_after_its_exception_does_not_hold_up_the_job(launch):
    hang = (
        "import threading\n"
        "        threading.Thread(target=time.sleep, args=(600,)).start(); raise ValueError('bad label 11')"
    )
    result = launch(TORCH_FAIL.format(hang))
    assert result.code == 1
    assert "worker 1 failed (exit code 1)" in result.err
    assert "  cause   ValueError: bad label 11\n" in result.err


def test_a_worker_that_ignores_sigterm_is_killed(launch):
    script = (
        "import os, signal, sys, time\n"
        "if os.environ['RANK'] == '0':\n"
        "    signal.signal(signal.SIGTERM, signal.SIG_IGN); open('ready', 'w').close(); time.sleep(600)\n"
        "while not os.path.exists('ready'): time.sleep(0.01)\n"
        "sys.exit(4)\n"
    )
    result = launch(script)  # which waits for no longer than a part of those 600 s
    assert result.code == 4


def test_asking_for_stacks_does_not_kill_a_worker_that_is_about_to_exit(launch):
    script = """\
import faulthandler, os, torch
from dadt.inject.failure import STACKS_SIGNAL
os.kill(os.getpid(), STACKS_SIGNAL)
faulthandler.unregister(STACKS_SIGNAL)  # as the end of the interpreter does
os.kill(os.getpid(), STACKS_SIGNAL)
print("survived")
"""
    result = launch(script, "-np", "1", "train.py")
    assert result.code == 0, result.err
    assert result.out == b"[0] survived\n"


def test_an_early_good_end_stops_nobody(launch):
    script = (
        "import os, time\n"
        "if os.environ['RANK'] == '1': open('gone', 'w').close(); raise SystemExit\n"
        "while not os.path.exists('gone'): time.sleep(0.01)\n"
        "time.sleep(1); print('still here')\n"
    )
    result = launch(script)
    assert result.code == 0
    assert result.out == b"[0] still here\n"


def test_a_command_that_cannot_be_run_is_one_sentence(launch, tmp_path):
    script = tmp_path / "broken"
    script.write_text("no program")
    script.chmod(0o755)
    result = launch("", "-np", "2", "--no-python", "./broken")
    assert result.code == 3
    assert "dadt: ./broken: cannot be run (Exec format error)\n" in result.err
    assert "Traceback" not in result.err


def ending(rank: int, code: int, at: float, **changes: object) -> Ending:
    values = {"step": 3, "peak_memory": 1 << 30, "memory_limit": 24 << 30, "memory_kills": 0, "stopped": False}
    return Ending(**{"rank": rank, "code": code, "time": at, **values, **changes})


def test_the_first_failure_by_time_is_the_cause():
    endings = [ending(0, 1, 12.0), ending(1, 3, 11.0), ending(2, -15, 11.5, stopped=True)]
    assert find_cause(endings, {}) == (endings[1], None)


def test_an_exception_counts_from_when_it_was_raised():
    endings = [ending(0, 1, 12.0), ending(1, 3, 11.0)]
    record = ErrorRecord(type="ValueError", time=10.0)
    assert find_cause(endings, {0: record}) == (endings[0], record)


def test_one_that_was_killed_as_it_failed_for_another_one_is_killed():
    endings = [ending(0, -9, 2.5), ending(1, -9, 2.0)]
    cause = find_cause(endings, {1: ErrorRecord(type="CommError", secondary=True, time=1.0)})
    assert cause is not None and cause[0].rank == 1


def test_a_failure_that_another_one_caused_is_not_the_cause():
    endings = [ending(0, 1, 10.0), ending(1, -9, 11.0)]
    lost = ErrorRecord(type="PeerLost", time=9.0, secondary=True)
    assert find_cause(endings, {0: lost}) == (endings[1], None)
    assert find_cause(endings[:1], {0: lost}) == (endings[0], lost)


def test_one_that_waited_at_the_start_for_a_rank_that_failed_is_not_the_cause():
    lost, late = ErrorRecord(type="PeerLost", time=9.0, secondary=True), ErrorRecord(type="StartTimeout", time=9.5)
    endings = [ending(0, 1, 10.0), ending(1, 124, 9.6)]
    assert find_cause(endings, {0: lost, 1: late}) == (endings[0], lost)
    assert find_cause(endings, {0: lost, 1: replace(late, time=8.0)}) == (endings[1], replace(late, time=8.0))


def test_a_rank_that_left_is_the_cause_of_what_others_waited_for_in_vain():
    lost = ErrorRecord(type="PeerLost", time=9.0, secondary=True)
    endings = [ending(0, 1, 10.0), ending(1, 0, 11.0), ending(2, 0, 8.0, step=4)]
    assert find_cause(endings, {0: lost}, [2, 1]) == (endings[1], None)  # rank 2 has taken a step that rank 0 has not
    assert find_cause(endings, {0: lost}, [0, 2]) == (endings[0], lost)
    own = ErrorRecord(type="ValueError", time=9.0)
    assert find_cause(endings, {0: own}, [1]) == (endings[0], own)


def test_an_exception_in_a_thread_does_not_make_a_stopped_worker_the_cause():
    endings = [ending(0, -15, 12.0, stopped=True), ending(1, 3, 11.0)]
    record = ErrorRecord(type="ZeroDivisionError", time=1.0, thread="loader")
    assert find_cause(endings, {0: record}) == (endings[1], None)


def test_a_worker_that_had_to_be_stopped_after_its_exception_is_the_cause():
    endings = [ending(0, -15, 12.0, stopped=True), ending(1, -15, 12.1, stopped=True)]
    record = ErrorRecord(type="ValueError", time=10.0)
    assert find_cause(endings, {1: record}) == (endings[1], record)


def test_a_traceback_that_was_printed_and_survived_is_not_the_cause(launch):
    script = (
        "import sys, traceback\n"
        "try: 1 / 0\nexcept ZeroDivisionError: traceback.print_exc()\n"
        "print('giving up', file=sys.stderr); sys.exit(3)\n"
    )
    result = launch(script, "-np", "1", "train.py")
    assert "  cause   it exited with code 3; its last words: giving up\n" in result.err


def test_nothing_failed():
    assert find_cause([ending(0, 0, 1.0), ending(1, -signal.SIGTERM, 2.0, stopped=True)], {}) is None


def block(end: Ending, record: ErrorRecord | None = None) -> str:
    failure = Failure(ending=end, record=record, seconds=1.0, pid=7, host="", log=LOG, last_words="")
    return "\n".join(failure.lines())


def test_a_kill_for_lack_of_memory_is_named():
    text = block(ending(1, -9, 1.0, memory_kills=1))
    assert "cause   killed by the kernel for lack of memory" in text
    assert "peak 1.0 GiB (limit 24 GiB): killed by the kernel for lack of memory" in text
    assert "not out of memory" in block(ending(1, -9, 1.0))


def test_an_exception_for_lack_of_memory_is_not_denied():
    text = block(ending(1, 1, 1.0), ErrorRecord(type="OutOfMemoryError", message="CUDA out of memory. Tried to ..."))
    assert "not out of memory" not in text


def test_a_signal_that_dadt_passes_on_is_not_somebody_elses():
    assert "cause   SIGUSR1, for which the script has no handler; dadt run passes it on" in block(ending(1, -10, 1.0))


def test_a_start_timeout_has_an_exit_code_of_its_own():
    record = ErrorRecord(type="StartTimeout", message="rank 1 did not arrive")
    failure = Failure(ending=ending(0, 1, 1.0), record=record, seconds=1.0, pid=7, host="", log=LOG)
    assert failure.exit_code == 124


def test_a_traceback_on_stderr_is_understood():
    text = (
        b"noise \xff\nTraceback (most recent call last):\n"
        b'  File "a.py", line 1, in <module>\n    f()\n    ~^^\n'
        b'  File "a.py", line 9, in f\n    raise E("x")\nmod.E: x\n'
    )
    record = ErrorRecord.from_stderr(text)
    assert record is not None
    assert record.text == "E: x"
    assert record.frames[-1] == {"file": "a.py", "line": "9", "function": "f", "text": 'raise E("x")'}
    assert ErrorRecord.from_stderr(b"no traceback") is None


def test_a_script_that_is_no_python_is_named():
    record = ErrorRecord.from_stderr(
        b"noise\n  File \"a.py\", line 2\n    f((x\n      ^\nSyntaxError: '(' was never closed\n"
    )
    assert record is not None
    assert record.text == "SyntaxError: '(' was never closed"
    assert record.frames == [{"file": "a.py", "line": "2", "function": None, "text": "f((x"}]


def test_a_long_message_leaves_the_block_on_the_screen():
    message = "\n".join(["sizes differ:", "\x1b[2J\udce9", *map(str, range(2000))])
    text = block(ending(1, 1, 1.0), ErrorRecord(type="RuntimeError", message=message))
    assert r"\x1b[2J\udce9" in text and "\x1b" not in text
    assert re.search(r"\.\.\. 19\d\d more lines, in the log \.\.\.", text) and text.count("\n") < 24
    assert text.index("sizes differ") < text.index("1999")
    text = block(ending(1, 1, 1.0), ErrorRecord(type="E", message="x" * 9999))
    assert "xxx ... xxx" in text and len(text) < 5000


def test_last_words_are_words():
    assert last_line(b"ValueError: \x1b[1mx\n  +-----------\ndadt: ended\n") == r"ValueError: \x1b[1mx"


def test_a_folder_that_was_deleted_does_not_hide_the_cause(tmp_path):
    script = tmp_path / "train.py"
    script.write_text("import os, shutil\nshutil.rmtree(os.getcwd())\nraise ValueError('late')\n")
    (tmp_path / "gone").mkdir()
    command = [*DADT, "run", "-np", "1", "--log-dir", tmp_path / "logs", script]
    done = subprocess.run(command, cwd=tmp_path / "gone", capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 1
    assert done.stderr.endswith("not out of memory\n") and "  cause   ValueError: late\n" in done.stderr


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (900, "900 B"),
        (850 << 20, "850 MiB"),
        (1288490189, "1.2 GiB"),
        (24 << 30, "24 GiB"),
        (3 << 40, "3.0 TiB"),
    ],
)
def test_sizes_are_said_as_people_say_them(count, text):
    assert size(count) == text


@pytest.mark.parametrize(
    ("kind", "message", "secondary"),
    [
        ("RuntimeError", "[/gloo/transport/tcp/pair.cc:537] Read error [::1]:2: Connection reset by peer", True),
        ("RuntimeError", "[/gloo/transport/tcp/pair.cc:534] Connection closed by peer [::1]:2", True),
        ("RuntimeError", "[/gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 1800000ms for recv", True),
        ("DistBackendError", "[Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=5)", True),
        ("DistBackendError", "NCCL error in: x.cpp:77, remote process exited or there was a network error", True),
        ("ConnectionResetError", "[Errno 104] Connection reset by peer", False),
        ("RuntimeError", "the database: connection closed by peer", False),
    ],
)
def test_what_torch_says_of_an_ended_peer_is_no_cause(kind: str, message: str, secondary: bool) -> None:
    record = ErrorRecord.from_header({"type": kind, "message": message, "time": 9.0})
    assert record.secondary is secondary
    of_output = ErrorRecord.from_stderr(f"Traceback (most recent call last):\n{kind}: {message}\n".encode())
    assert of_output is not None and of_output.secondary is secondary
    killed = ending(1, -9, 10.0)
    first = find_cause([ending(0, 1, 11.0), killed], {0: record})
    assert first is not None and (first[0] is killed) is secondary
