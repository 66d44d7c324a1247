"""Where a failure wraps another one, the block at the end names the innermost, by its first lines and last ones."""

from __future__ import annotations

import builtins
import concurrent.futures
import multiprocessing.pool
import sys
from pathlib import Path
from typing import Any

import pytest

from dadt.control.traceback_text import TRACEBACK
from dadt.errors import CommError, PeerLost
from dadt.inject.exception_chain import Chain, chain_of, remote_frames
from dadt.inject.failure import frames_of
from dadt.launch.ending.failure import Ending, Failure
from dadt.launch.ending.record import ErrorRecord, shortened


def record_of(error: BaseException) -> ErrorRecord:
    chain = chain_of(error)
    frames = remote_frames(chain.remote) or frames_of(chain.cause.__traceback__)
    told = {"type": type(chain.cause).__name__, "message": str(chain.cause), "frames": frames}
    return ErrorRecord.from_header({**told, "around": chain.around, "context": chain.context})


def block(record: ErrorRecord) -> str:
    end = Ending(
        rank=1, code=1, time=1.0, step=3, peak_memory=1 << 30, memory_limit=24 << 30, memory_kills=0, stopped=False
    )
    failure = Failure(ending=end, record=record, seconds=1.0, pid=7, host="", log=Path("rank1.log"))
    return "\n".join(failure.lines())


def raised(body: Any) -> BaseException:
    try:
        body()
    except BaseException as error:
        return error
    raise AssertionError("nothing was raised")


def read() -> None:
    raise KeyError("encoder.weight")


def load() -> None:
    try:
        read()
    except KeyError as error:
        raise RuntimeError("the model cannot be loaded") from error


def begin() -> None:
    try:
        load()
    except RuntimeError as error:
        raise OSError("no training") from error


def test_the_innermost_of_those_that_were_raised_from_each_other() -> None:
    text = block(record_of(raised(begin)))
    assert "  cause   KeyError: 'encoder.weight'\n" in text and ", in read\n" in text
    assert "\n  within  OSError: no training\n  within  RuntimeError: the model cannot be loaded\n" in text


def test_one_that_was_being_handled_is_told_beside_it() -> None:
    def lookup() -> None:
        try:
            read()
        except KeyError:
            raise ValueError("give --model")

    def plainly() -> None:
        try:
            read()
        except KeyError:
            raise ValueError("give --model") from None

    text = block(record_of(raised(lookup)))
    assert "  cause   ValueError: give --model\n" in text and "  while   handling KeyError: 'encoder.weight'" in text
    assert "handling" not in block(record_of(raised(plainly)))


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 has no groups")
def test_the_first_of_a_group() -> None:
    group = getattr(builtins, "ExceptionGroup")
    text = block(record_of(group("unhandled errors in a TaskGroup", [raised(load), ValueError("another")])))
    assert "  cause   KeyError: 'encoder.weight'\n" in text
    assert "  within  ExceptionGroup: unhandled errors in a TaskGroup (2 sub-exceptions)\n" in text


def test_what_another_ranks_end_has_caused_stays_that() -> None:
    lost = PeerLost("rank 1 has left")
    lost.__cause__ = CommError("connection reset")
    wrapped = RuntimeError("training failed")
    wrapped.__cause__ = lost
    assert chain_of(wrapped) == Chain(lost, ["RuntimeError: training failed"], "", "", True)


def fail(label: int) -> None:
    raise ValueError(f"bad label {label}")


@pytest.mark.parametrize("pool", [concurrent.futures.ProcessPoolExecutor, multiprocessing.pool.Pool])
def test_a_pool_of_processes(pool: Any) -> None:
    def work() -> None:
        with pool(1) as workers:
            list(workers.map(fail, [11]))

    text = block(record_of(raised(work)))
    assert "  cause   ValueError: bad label 11\n" in text and ", in fail\n" in text
    assert "RemoteTraceback" not in text and text.count("bad label 11") <= 2


REMOTE = """{head}
Traceback (most recent call last):
  File "/usr/lib/python3.11/concurrent/process.py", line 256, in run
    return function(*arguments)
{frames}  File "train.py", line 9, in read
    raise OSError("bad label 11")
OSError: bad label 11
"""
FRAMES = "".join(f'  File "lib.py", line {i}, in f{i}\n    call({i})\n' for i in range(60))


@pytest.mark.parametrize(
    ("kind", "head"),
    [
        ("ProcessRaisedException", "\n\n-- Process 1 terminated with the following error:"),
        ("ValueError", "Caught ValueError in DataLoader worker process 0.\nOriginal "),
        ("TransportableException", "TransportableException\n____\nOSError  Fri Nov\nPID: 17 Python 3.11"),
        ("RayTaskError", "\x1b[36mray::step()\x1b[39m (pid=17, ip=10.0.0.1)"),
    ],
)
def test_a_traceback_of_another_process_in_the_message(kind: str, head: str) -> None:
    message = REMOTE.format(head=head, frames=FRAMES).replace("Original \n", "Original ")
    text = block(ErrorRecord.from_header({"type": kind, "message": message}))
    assert '  cause   OSError: bad label 11\n    File "train.py", line 9, in read\n' in text
    assert f"\n  within  {kind}: " in text and text.count("\n") < 12


def test_a_chain_of_tracebacks_on_stderr() -> None:
    direct = "\nThe above exception was the direct cause of the following exception:\n\n"
    inner = f'{TRACEBACK}\n  File "a.py", line 3, in read\n    x()\nFileExistsError: there is a pipe\n'
    outer = (
        f'{TRACEBACK}\n  File "b.py", line 1, in <module>\n    import torch\n'
        "RuntimeError: Failed to load the backend extension: npu. You can disable extension auto-loading with "
        "TORCH_DEVICE_BACKEND_AUTOLOAD=0.\n"
    )
    record = ErrorRecord.from_stderr((inner + direct + outer).encode())
    assert record is not None
    text = block(record)
    assert '  cause   FileExistsError: there is a pipe\n    File "a.py", line 3, in read\n' in text
    assert "  within  RuntimeError: Failed to load the backend extension: npu.\n" in text
    assert "TORCH_DEVICE_BACKEND_AUTOLOAD" not in text
    alone = block(ErrorRecord.from_header({"type": "RuntimeError", "message": outer.partition("RuntimeError: ")[2]}))
    assert "Failed to load the backend extension: npu." in alone and "TORCH_DEVICE" not in alone


def test_a_sentence_of_dadts_own_is_the_cause_whatever_it_was_raised_from() -> None:
    direct = "\nThe above exception was the direct cause of the following exception:\n\n"
    inner = f'{TRACEBACK}\n  File "a.py", line 3, in dial\n    x()\nFileNotFoundError: [Errno 2] No such file\n'
    own = f'{TRACEBACK}\n  File "b.py", line 1, in connect\n    y()\ndadt.errors.DadtError: the agent is gone\n'
    record = ErrorRecord.from_stderr((inner + direct + own).encode())
    assert record is not None and record.text == "DadtError: the agent is gone" and not record.around


def test_of_a_long_text_the_end_is_kept() -> None:
    lines = shortened("\n".join(["sizes differ:", *map(str, range(500)), "expected 3"]))
    assert lines[0] == "sizes differ:" and lines[-1] == "expected 3" and len(lines) < 12
    assert shortened("x" * 9000 + "expected 3")[0].endswith("expected 3")


WRAPS = {
    "loader": """
class Items(torch.utils.data.Dataset):
    def __len__(self): return 8
    def __getitem__(self, i): raise ValueError("bad label 11")
for batch in torch.utils.data.DataLoader(Items(), num_workers=1): pass
""",
    "spawn": """
def work(index): raise ValueError("bad label 11")
if __name__ == "__main__": torch.multiprocessing.spawn(work, nprocs=1)
""",
    "futures": """
import concurrent.futures
def work(index): raise ValueError("bad label 11")
with concurrent.futures.ProcessPoolExecutor(1) as pool: list(pool.map(work, [1]))
""",
}


@pytest.mark.slow
@pytest.mark.parametrize("how", WRAPS)
def test_a_job_names_the_reason(launch, how: str) -> None:
    result = launch("import torch\n" + WRAPS[how], "-np", "1", "train.py")
    found = result.err.partition("dadt: worker 0 failed")[2]
    assert "  cause   ValueError: bad label 11\n" in found and 'File "train.py", line ' in found, result.err


@pytest.mark.slow
def test_torch_does_not_hide_why_dadt_could_not_begin(launch, tmp_path) -> None:
    script = "import os\nos.environ['DADT_TIMEOUT'] = 'soon'\nimport torch\n"
    result = launch(script, "-np", "1", "train.py")
    assert "AUTOLOAD" not in result.err and "backend extension" not in result.err
    assert result.code == 2 and "DADT_TIMEOUT" in result.err, result.err
