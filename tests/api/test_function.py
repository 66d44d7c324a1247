"""`dadt.run`: a function on all workers, from Python."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys

import pytest
from harness import forkserver, lightened
from harness.patience import PATIENCE, await_that

import dadt

HEAD = "import os, sys\nimport dadt\n"


@pytest.fixture(autouse=True)
def forked_agents(monkeypatch) -> None:
    monkeypatch.setenv("DADT_PYTHON", forkserver.python())


def python(folder, code: str) -> subprocess.CompletedProcess[str]:
    (folder / "main.py").write_text(HEAD + lightened(code))
    return subprocess.run([sys.executable, "main.py"], cwd=folder, capture_output=True, text=True, timeout=PATIENCE)


def test_each_ranks_result_comes_back(tmp_path):
    code = (
        "class Point:\n    def __init__(self, x): self.x = x\n"
        "def work(a, b=0): return Point((int(os.environ['RANK']), a, b))\n"
        "print([p.x for p in dadt.run(work, (1,), {'b': 2}, np=3)])\n"
    )
    ended = python(tmp_path, code)
    assert ended.stdout.splitlines()[-1] == "[(0, 1, 2), (1, 1, 2), (2, 1, 2)]", ended.stderr


def test_what_workers_print_is_shown(tmp_path):
    ended = python(tmp_path, "dadt.run(lambda: print('hello from', os.environ['RANK']), np=2)")
    assert sorted(ended.stdout.splitlines()) == ["[0] hello from 0", "[1] hello from 1"]


def test_an_exception_comes_back_with_its_traceback(tmp_path):
    code = (
        "def work():\n"
        "    if os.environ['RANK'] == '1':\n"
        "        raise KeyError('lost')\n"
        "    import time; time.sleep(600)\n"
        "try: dadt.run(work, np=2)\n"
        "except KeyError as error: print('caught', error, type(error.__cause__).__name__); raise\n"
    )
    ended = python(tmp_path, code)
    assert "caught 'lost' WorkerTraceback" in ended.stdout, ended.stderr
    # With the source beside it where cloudpickle keeps the file's name.
    assert re.search(r"in worker 1:\n(.*\n)+.*, in work\n(.*\n)?KeyError: 'lost'", ended.stderr), ended.stderr
    assert ended.returncode == 1


def test_an_exception_of_the_callers_own_class_comes_back_as_such(tmp_path):
    code = (
        "class Mine(Exception):\n    pass\n"
        "def work(): raise Mine('own')\n"
        "try: dadt.run(work, np=1)\n"
        "except Mine as error: print('caught', error)\n"
    )
    assert python(tmp_path, code).stdout == "caught own\n"


def test_an_exception_that_cannot_travel_is_told(tmp_path):
    code = (
        "class Odd(Exception):\n    def __init__(self, a, b): super().__init__(a)\n"
        "def work(): raise Odd('strange', 2)\n"
        "try: dadt.run(work, np=1)\n"
        "except dadt.DadtError as error: print('told', 'Odd: strange' in str(error))\n"
    )
    assert "told True" in python(tmp_path, code).stdout


def test_a_worker_that_is_killed_is_an_error(tmp_path):
    code = (
        "def work(): os.kill(os.getpid(), 9)\n"
        "try: dadt.run(work, np=1)\n"
        "except dadt.DadtError as error: print('signal 9' in str(error))\n"
    )
    assert python(tmp_path, code).stdout.splitlines() == ["True"]


def test_training_in_a_function_is_distributed(tmp_path):
    code = (
        "def work():\n"
        "    import torch\n"
        "    torch.manual_seed(int(os.environ['RANK']))\n"
        "    model = torch.nn.Linear(4, 1); optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "    for _ in range(5):\n"
        "        optimizer.zero_grad(); model(torch.randn(8, 4)).pow(2).mean().backward(); optimizer.step()\n"
        "    return model.weight.tolist()\n"
        "one, two = dadt.run(work, np=2, algorithm='sync')\n"
        "print(one == two)\n"
    )
    ended = python(tmp_path, code)
    assert ended.stdout.splitlines()[-1:] == ["True"], ended.stderr


def test_it_works_beside_the_main_thread(tmp_path):
    code = (
        "import threading\n"
        "results = []\n"
        "thread = threading.Thread(target=lambda: results.append(dadt.run(os.getpid, np=2)))\n"
        "thread.start(); thread.join(); print(len(set(results[0])), os.getpid() in results[0])\n"
    )
    assert python(tmp_path, code).stdout.splitlines()[-1] == "2 False"


def test_an_interrupt_ends_the_workers_and_not_the_caller(tmp_path):
    code = (
        "import pathlib, time\n"
        "def work():\n"
        "    pathlib.Path('ready' + os.environ['RANK']).touch(); time.sleep(600)\n"
        "try: dadt.run(work, np=2)\n"
        "except KeyboardInterrupt: print('still here')\n"
    )
    (tmp_path / "main.py").write_text(HEAD + code)
    process = subprocess.Popen([sys.executable, "main.py"], cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    await_that(lambda: (tmp_path / "ready0").exists() and (tmp_path / "ready1").exists(), "the workers")
    os.kill(process.pid, signal.SIGINT)
    assert process.communicate(timeout=PATIENCE)[0] == "still here\n"


@pytest.mark.slow
def test_an_interrupt_before_the_workers_are_there_is_one_as_well(tmp_path):
    code = (
        "try: dadt.run(print, np=1, prologue=f'touch {os.getcwd()}/begun; sleep 2')\n"
        "except KeyboardInterrupt: print('still here')\n"
    )
    (tmp_path / "main.py").write_text(HEAD + code)
    process = subprocess.Popen([sys.executable, "main.py"], cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    await_that((tmp_path / "begun").exists, "the prologue")
    os.kill(process.pid, signal.SIGINT)
    assert process.communicate(timeout=PATIENCE)[0] == "still here\n"


def test_what_is_too_large_for_one_message_is_refused(monkeypatch):
    monkeypatch.setattr(sys.modules[dadt.run.__module__], "RESULT", 1 << 10)
    with pytest.raises(dadt.DadtError, match=r"arguments: 2\.\d KiB is more than 1\.0 KiB -> pass it through a file"):
        dadt.run(len, (b"x" * 2100,), np=1)


def test_bad_settings_are_refused():
    with pytest.raises(dadt.DadtError, match="algoritm is no setting"):
        dadt.run(print, np=1, algoritm="sync")
    with pytest.raises(dadt.DadtError, match="how many workers"):
        dadt.run(print)
