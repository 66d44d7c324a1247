"""Installs what a worker needs to take snapshots and to resume from one."""

from __future__ import annotations

import atexit
import sys
import time
from types import TracebackType

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from dadt.errors import DadtError, NotResumed
from dadt.inject.data.seed import State, Streams
from dadt.inject.files.overlay import Overlay
from dadt.inject.module import Modules
from dadt.inject.replay.draws import Draws
from dadt.inject.replay.handover import Handover
from dadt.inject.replay.newcomer import Newcomer
from dadt.inject.replay.recorder import Recorder
from dadt.inject.replay.replay import Replay, refuse
from dadt.inject.replay.roster import Roster
from dadt.inject.replay.selections import Selections
from dadt.inject.replay.snapshot import StoredSnapshot
from dadt.inject.replay.taken import Taken
from dadt.inject.replay.values import ReadValues
from dadt.train.runtime import Runtime


def install(runtime: Runtime, modules: Modules, streams: Streams, overlay: Overlay | None) -> None:
    """Install snapshots and replay in this worker; called before the script builds anything. If the snapshot to resume
    from cannot be read, the process ends."""
    config = runtime.ranks.config
    if not runtime.replay.possible:
        return
    values, roster = ReadValues(), Roster()
    values.install()
    roster.install()
    Selections(values).install(replaying=runtime.replay.under_way)
    runtime.replay.aside, runtime.replay.reported = values.aside, values.told
    register_optimizer_step_pre_hook(values.step_begins)
    taken = Taken(runtime, roster, values, streams)
    if runtime.ranks.alone:
        streams.undivided = Draws(values).around
        taken.at_start = State.capture().plain()
    recorder = Recorder(runtime, values, taken) if config.snapshot_dir else None
    if runtime.replay.under_way:
        _resume(runtime, modules, overlay, recorder, (roster, values, streams))
    if recorder is not None:
        handover = Handover(runtime, values, recorder, taken)
        modules.saw += [recorder.saw, handover.saw]
        runtime.events.on_stepped += [recorder.stepped, handover.stepped]
        runtime.events.on_regroup += [recorder.drop, handover.regrouped]
        runtime.events.on_exchange.append(recorder.begins)
        register_optimizer_step_pre_hook(recorder.before_step)
        runtime.replay.stop_snapshots = recorder.stop
        runtime.events.on_finish.append(recorder.close)


def _resume(
    runtime: Runtime,
    modules: Modules,
    overlay: Overlay | None,
    recorder: Recorder | None,
    parts: tuple[Roster, ReadValues, Streams],
) -> None:
    newcomer = Newcomer(runtime, parts[1]) if runtime.ranks.world.joins else None
    try:
        replay = Replay(runtime, *parts, newcomer or StoredSnapshot(runtime, parts[1]))
        replay.held.hold()
    except NotResumed as error:
        refuse(error)
    except OSError as error:
        refuse(NotResumed(f"--resume: {error.filename}: cannot be written ({error.strerror}), as a replay has to"))
    if (state := replay.goal.at_start) is not None:
        State.from_plain(state).restore()
    _begin(runtime, modules, replay)
    if overlay is not None:
        overlay.loads = replay.loads
        replay.at_its_end += [overlay.replayed, lambda: setattr(overlay, "loads", None)]
    if recorder is None:
        return
    if newcomer is not None:
        replay.at_its_end.append(lambda: recorder.follows(newcomer.plan))
    recorder.goes_on_from(replay.goal.step, replay.goal.began)
    replay.when_abandoned = recorder.stop


def _begin(runtime: Runtime, modules: Modules, replay: Replay) -> None:
    modules.stand_in = replay.forward
    modules.saw.append(replay.saw)
    torch.autograd.backward = replay.backward(torch.autograd.backward)
    torch.autograd.grad = replay.grad(torch.autograd.grad)
    time.sleep = replay.sleep(time.sleep)
    register_optimizer_step_pre_hook(replay.before_step)
    runtime.events.on_stepped.append(replay.stepped)
    replay.at_its_end.append(lambda: setattr(modules, "stand_in", None))
    hook = sys.excepthook

    def excepthook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        replay.held.release()
        if replay.under_way and not issubclass(kind, DadtError | KeyboardInterrupt):
            sys.__excepthook__(kind, error, trace)
            refuse(NotResumed(f"the script has raised {kind.__name__} where it had not before: {error}"))
        hook(kind, error, trace)

    sys.excepthook = excepthook
    atexit.register(replay.ended)
