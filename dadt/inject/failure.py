"""A worker's own end: it reports the uncaught exception, and its stacks when it is asked for them."""

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
from dadt.errors import Aborted, CommTimeout, ConfigError, DadtError, PeerLost, StartTimeout
from dadt.inject import full_disk
from dadt.inject.exception_chain import chain_of, remote_frames

STACKS_SIGNAL = signal.SIGRTMAX - 3
"""One that scripts do not use, unlike SIGUSR1 and SIGUSR2."""
OURS = str(Path(__file__).resolve().parents[1])
FRAMES = 5


def install(
    control: WorkerLine,
    step: Callable[[], int],
    interrupted: Callable[[], bool],
    unseen: Callable[[BaseException], str],
) -> None:
    """Chain into the exception hooks, and offer the stacks of all threads on a signal.

    What the script does with exceptions, its exit codes and what it prints stay as they are; but an error of DADT's
    own that ends a thread ends the job. step: the optimizer steps done so far. interrupted: the user has pressed
    Ctrl-C. unseen: the path that an error did not find, though this rank has written it.
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
            pass  # the agent is gone, so nobody is left to tell; the traceback is printed all the same

    def on_main(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        report(kind, error, trace, "")
        if issubclass(kind, PeerLost | CommTimeout | Aborted):
            # Another rank's failure caused it, and its own words would hide those of the cause.
            sys.stderr.write(f"dadt: rank {control.world.rank} ended: {error}\n")
        elif issubclass(kind, KeyboardInterrupt) and interrupted():
            if control.world.rank == 0:  # shows where it was, as the others were there, too
                trace = _to_ours(trace)
                main_hook(kind, error.with_traceback(trace), trace)
        elif not issubclass(kind, ConfigError | StartTimeout):  # which the launcher says, last and once
            main_hook(kind, error, trace)

    def on_thread(args: threading.ExceptHookArgs) -> None:
        if args.exc_value is not None:
            name = args.thread.name if args.thread else "unknown"
            # Training cannot go on, and the main thread may wait for this one for ever: told as if it were its own.
            ends = isinstance(args.exc_value, DadtError)
            report(args.exc_type, args.exc_value, args.exc_traceback, "" if ends else name)
        thread_hook(args)

    sys.excepthook = on_main
    threading.excepthook = on_thread
    if not faulthandler.is_enabled() and sys.__stderr__ is not None:
        faulthandler.enable(sys.__stderr__)  # crashes leave their stack there
    if control.world.agent:
        _offer_stacks(control)


def _to_ours(trace: TracebackType | None) -> TracebackType | None:
    """Without what DADT was doing when the script called it, or a library for the script."""
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
    """The innermost frames {file, line, function, text} that are the user's; without such, of all."""
    frames: list[dict[str, Any]] = []
    while trace is not None:
        code = trace.tb_frame.f_code
        text = linecache.getline(code.co_filename, trace.tb_lineno, trace.tb_frame.f_globals).strip()
        frames.append({"file": code.co_filename, "line": trace.tb_lineno, "function": code.co_name, "text": text})
        trace = trace.tb_next
    own = [frame for frame in frames if is_users(frame["file"])]
    return (own or frames)[-FRAMES:]


def is_users(file: str) -> bool:
    """Whether the code in this file is the user's, rather than a library's."""
    path = str(Path(file).resolve())
    libraries = (OURS, sys.prefix + os.sep + "lib", sys.base_prefix + os.sep + "lib")
    return not path.startswith(libraries) and "site-packages" not in path and not file.startswith("<")


def _offer_stacks(control: WorkerLine) -> None:
    """Write stacks to a file that the agent reads: when it asks through a pipe, or else at the signal.

    A handler of signals walks through frames of threads that run meanwhile, which has crashed healthy processes. So it
    is for those where no thread comes to hold the interpreter's lock: what holds it then runs no Python.
    """
    path = Path(control.world.agent).with_name(f"stacks-{os.getpid()}")
    # Open for the life of the process: a signal handler cannot open files.
    file = path.open("wb")
    # faulthandler restores this when the interpreter ends: a signal that comes then must not kill the process.
    signal.signal(STACKS_SIGNAL, signal.SIG_IGN)
    faulthandler.register(STACKS_SIGNAL, file, all_threads=True, chain=False)
    pipe = path.with_suffix(ASK)
    pipe.unlink(missing_ok=True)  # of this process before it replaced itself, or of one that had its pid
    os.mkfifo(pipe, 0o600)
    asked = os.open(pipe, os.O_RDWR | os.O_CLOEXEC)  # also for writing, or it would be at its end without an agent
    _thread.start_new_thread(_answer, (asked, file))  # not among threading's, which scripts may count or wait for
    control.stacks(path, STACKS_SIGNAL)


def _answer(asked: int, file: IO[bytes]) -> None:
    """Write the stacks of all threads but this one, at each byte."""
    with os.fdopen(os.memfd_create("dadt-stacks"), "w+b") as scratch:
        while os.read(asked, 1):
            scratch.seek(0)
            scratch.truncate()
            faulthandler.dump_traceback(scratch, all_threads=True)
            scratch.seek(0)
            threads = scratch.read().split(b"\n\n")
            file.write(b"\n\n".join(each for each in threads if not each.startswith(b"Current thread")) + b"\n")
            file.flush()
