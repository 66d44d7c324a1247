"""Reports how a worker ends: its uncaught exception, and on request the stacks of its threads."""

from __future__ import annotations

import _thread
import faulthandler
import linecache
import os
import signal
import sys
import threading
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from dadt.control.job_folder import ASK
from dadt.control.worker_line import WorkerLine
from dadt.errors import Aborted, CommTimeout, ConfigError, DadtError, PeerLost, Sharded, StartTimeout
from dadt.inject import full_disk
from dadt.inject.exception_chain import chain_of, remote_frames

STACKS_SIGNAL = signal.SIGRTMAX - 3
"""Signal at which this process writes the stacks of its threads. Scripts do not use this signal, unlike SIGUSR1 and
SIGUSR2."""
OURS = str(Path(__file__).resolve().parents[1])
FRAMES = 5


def install(
    control: WorkerLine,
    step: Callable[[], int],
    interrupted: Callable[[], bool],
    unseen: Callable[[BaseException], str],
) -> None:
    """Extend Python's exception hooks, so that errors are reported, and offer the stacks of all threads on request.

    The script's handling of exceptions, its exit codes and its output stay unchanged; except that an error of DADT that
    ends a thread also ends the job. step: returns the number of optimizer steps done so far. interrupted: returns
    whether the user has pressed Ctrl-C. unseen: returns the path of a file that an error reports as missing although
    this rank has written it.
    """
    owner = os.getpid()
    main_hook = sys.excepthook
    thread_hook = threading.excepthook

    def report(kind: type[BaseException], error: BaseException, trace: TracebackType | None, thread: str) -> None:
        if os.getpid() != owner or issubclass(kind, (SystemExit, KeyboardInterrupt)):
            return
        chain = chain_of(error)
        frames = remote_frames(chain.remote)[-FRAMES:] or frames_of(chain.cause.__traceback__ or trace)
        try:
            control.failed(
                type(chain.cause).__name__,
                str(chain.cause),
                frames,
                step(),
                secondary=chain.secondary,
                thread=thread,
                around=chain.around,
                context=chain.context,
                disk=full_disk.text_of(error),
                unseen=unseen(chain.cause),
            )
        except DadtError:
            pass  # the agent is gone, so the error cannot be reported; its traceback is printed nevertheless

    def on_main(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        report(kind, error, trace, "")
        if issubclass(kind, PeerLost | CommTimeout | Aborted):
            # Another rank's failure caused this error, and a traceback of this rank would only distract from that
            # rank's traceback.
            sys.stderr.write(f"dadt: rank {control.world.rank} ended: {error}\n")
        elif issubclass(kind, KeyboardInterrupt) and interrupted():
            if control.world.rank == 0:  # one traceback is enough, because all ranks stop at the same point
                trace = _to_ours(trace)
                main_hook(kind, error.with_traceback(trace), trace)
        # the launcher prints errors of configuration and start, once for all ranks
        elif not issubclass(kind, ConfigError | StartTimeout | Sharded):
            main_hook(kind, error, trace)

    def on_thread(args: threading.ExceptHookArgs) -> None:
        if args.exc_value is not None:
            name = args.thread.name if args.thread else "unknown"
            # An error of DADT ends training, and the main thread may wait for this thread forever, so the error is
            # reported as the main thread's.
            ends = isinstance(args.exc_value, DadtError)
            report(args.exc_type, args.exc_value, args.exc_traceback, "" if ends else name)
        thread_hook(args)

    sys.excepthook = on_main
    threading.excepthook = on_thread
    if not faulthandler.is_enabled() and sys.__stderr__ is not None:
        faulthandler.enable(sys.__stderr__)  # lets crashes print their stack to stderr
    if control.world.agent:
        _offer_stacks(control)


def _to_ours(trace: TracebackType | None) -> TracebackType | None:
    """Return the traceback up to the last frame of the user's code or of a library that it called, without the frames
    of DADT below."""
    frames = []
    while trace is not None:
        frames.append(trace)
        trace = trace.tb_next
    users = max((i for i, each in enumerate(frames) if is_users(each.tb_frame.f_code.co_filename)), default=len(frames))
    for before, each in pairwise(frames[users:]):
        if each.tb_frame.f_code.co_filename.startswith(OURS):
            before.tb_next = None
            break
    return frames[0] if frames else None


def frames_of(trace: TracebackType | None) -> list[dict[str, Any]]:
    """Return up to FRAMES innermost frames {file, line, function, text} of the user's code; of all code if none are the
    user's."""
    frames: list[dict[str, Any]] = []
    while trace is not None:
        code = trace.tb_frame.f_code
        text = linecache.getline(code.co_filename, trace.tb_lineno, trace.tb_frame.f_globals).strip()
        frames.append({"file": code.co_filename, "line": trace.tb_lineno, "function": code.co_name, "text": text})
        trace = trace.tb_next
    own = [frame for frame in frames if is_users(frame["file"])]
    return (own or frames)[-FRAMES:]


def is_users(file: str) -> bool:
    """Return whether a source file is the user's own code, not a library's."""
    path = str(Path(file).resolve())
    libraries = (OURS, sys.prefix + os.sep + "lib", sys.base_prefix + os.sep + "lib")
    return not path.startswith(libraries) and "site-packages" not in path and not file.startswith("<")


def _offer_stacks(control: WorkerLine) -> None:
    """Write the stacks of all threads to a file that the agent reads: on request through a pipe, or else at a signal.

    A signal handler reads the frames of threads while they run, which has crashed healthy processes. So the signal is
    sent only to a process in which the thread that reads the pipe cannot get the GIL, because the owner of the GIL then
    runs no Python code.
    """
    path = Path(control.world.agent).with_name(f"stacks-{os.getpid()}")
    # Stays open for the life of the process, since a signal handler cannot open files.
    file = path.open("wb")
    # faulthandler restores this handler when the interpreter ends, because a signal that arrives later must not kill
    # the process.
    signal.signal(STACKS_SIGNAL, signal.SIG_IGN)
    faulthandler.register(STACKS_SIGNAL, file, all_threads=True, chain=False)
    pipe = path.with_suffix(ASK)
    # Remove the pipe of an earlier process with the same pid, or of this process before it called exec.
    pipe.unlink(missing_ok=True)
    os.mkfifo(pipe, 0o600)
    # Also opened for writing, since reads would return end-of-file while no agent has the pipe open.
    asked = os.open(pipe, os.O_RDWR | os.O_CLOEXEC)
    _thread.start_new_thread(_answer, (asked, file))  # scripts may count the threads of `threading`
    control.stacks(path, STACKS_SIGNAL)


def _answer(asked: int, file: IO[bytes]) -> None:
    """For each byte read from the pipe, write the stacks of all threads except this one."""
    with os.fdopen(os.memfd_create("dadt-stacks"), "w+b") as scratch:
        while os.read(asked, 1):
            scratch.seek(0)
            scratch.truncate()
            faulthandler.dump_traceback(scratch, all_threads=True)
            scratch.seek(0)
            threads = scratch.read().split(b"\n\n")
            file.write(b"\n\n".join(each for each in threads if not each.startswith(b"Current thread")) + b"\n")
            file.flush()
