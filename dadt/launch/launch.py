"""From a plan to a running job and its outcome, for both the command line and `dadt.run`."""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from dadt.config import Config
from dadt.config.executor import Place, choose, executors_of
from dadt.control import private_files, timeline_file
from dadt.control.job_folder import Folder
from dadt.errors import ConfigError, DadtError, LaunchError, StartTimeout
from dadt.launch import again, plan, resume
from dadt.launch.agents import Agents, Node
from dadt.launch.channel import Herald, Launcher, Request
from dadt.launch.failure import signal_name
from dadt.launch.hosts.discovery import Discovery
from dadt.launch.hosts.host import Host
from dadt.launch.hosts.slot import Slot, place, share_out
from dadt.launch.idle import Idle
from dadt.launch.job import HANG_UP_SECONDS, Job
from dadt.launch.joining import Joining
from dadt.launch.launchers import launcher_of
from dadt.launch.monitor import metrics
from dadt.launch.monitor.metrics import Export
from dadt.launch.monitor.output import Output
from dadt.launch.monitor.series import Series
from dadt.launch.monitor.watch import View, Watch
from dadt.launch.order import look, orders
from dadt.launch.outcome import Outcome, end_early
from dadt.launch.placed import Placed, room
from dadt.launch.plan import Plan
from dadt.launch.processes import sweep
from dadt.launch.replacement import replaces
from dadt.launch.report import Report
from dadt.launch.restart import Restarts
from dadt.launch.signals import ENDING_SIGNALS, Interrupts, forwarded, of_checkpoint
from dadt.launch.startup import Voice, agree, differences, find_shared_folders, gather

Told = Callable[[Placed, Watch], View | None]
"""Called once every worker has its place. Returns the view that shows the job, or None."""


def run(the_plan: Plan, voice: Voice, placed: Told, signals: bool = True) -> Outcome:
    """Start the job and wait for its end.

    signals: whether this thread may take over the process's signals. Raises DadtError if nothing could be started.
    """
    config = the_plan.config
    exports: Sequence[Export] = ()
    try:
        if the_plan.timeline:
            timeline_file.prepare(the_plan.timeline)
        exports = metrics.prepare(config.metrics)
        return _record(the_plan, voice, placed, signals, exports)
    finally:
        for export in exports:
            export.close()
        plan.release(the_plan)


def _record(the_plan: Plan, voice: Voice, placed: Told, signals: bool, exports: Sequence[Export]) -> Outcome:
    """Run the job, and write its report into its folder."""
    config = the_plan.config
    folder = reserve(Path(config.log_dir))
    taken = {*ENDING_SIGNALS, *forwarded(config), of_checkpoint(config)} - {0}
    interrupts = Interrupts(sorted(taken)) if signals else None
    report = Report(the_plan, Path(config.log_dir) / folder.job, lambda text: voice.say(text, "warning"))
    if the_plan.start is not None:
        try:
            again.write(Path(config.log_dir) / folder.job, the_plan.start)
        except OSError as error:
            voice.say(f"--resume will need the script once more: {again.FILE} ({error.strerror})", "warning")
    try:
        request = Request(config, the_plan.hosts, the_plan.command, folder.job, report.journal.refused, voice.say)
        launchers: list[Launcher] = []
        reached: list[Config] = []
        """The settings of each attempt so far."""
        discovery = Discovery(
            the_plan.hosts, plan.who_names_hosts(config, the_plan.hosts), lambda text: voice.say(text, "warning")
        )

        def attempt(number: int, hosts: Sequence[Host]) -> Outcome:
            those = metrics.prepare(config.metrics) if number else exports
            try:
                views = _views(placed, those, voice)
                launchers.append(launcher_of(replace(request, hosts=hosts)))
                logs = Path(config.log_dir) / folder.job
                told = resume.configured(config, logs, len(hosts), number, restarts.refused)
                reached.append(told)
                now = replace(the_plan, hosts=hosts, config=told)
                return _run(now, launchers[-1], folder, voice, views, report, interrupts, number, discovery)
            except (LaunchError, StartTimeout):
                discovery.blame(hosts)
                raise
            finally:
                for export in those:
                    export.close()

        with interrupts or nullcontext():
            logs = Path(config.log_dir) / folder.job
            facts = {"job": folder.job, "command": list(the_plan.command), "logs": str(logs.resolve()), "hosts": 0}
            idle = partial(Idle, folder, facts, report.journal.refused)
            restarts = Restarts(config, discovery, voice, report, logs, interrupts, idle)

            def goes_on() -> str:
                """The command that goes on with the job."""
                return again.command(logs, reached[-1].snapshot_dir, reached[-1].resume) if reached else ""

            try:
                outcome = restarts.run(attempt)
                outcome.remember(goes_on())
            except DadtError as error:
                if report.began and not isinstance(error, ConfigError) and (command := goes_on()):
                    error.args = (f"{error}; go on with: {command}",)
                _conclude(launchers, error.exit_code, [str(error)])
                raise
            report.ended(outcome)
            _conclude(launchers, outcome.exit_code, _verdict(outcome))
            return outcome
    except DadtError as error:
        report.failed(error)
        raise
    finally:
        folder.remove()
        report.close()


def _run(
    the_plan: Plan,
    launcher: Launcher,
    folder: Folder,
    voice: Voice,
    views: Callable[[Placed, Watch], Sequence[View]],
    report: Report,
    interrupts: Interrupts | None,
    restarts: int,
    discovery: Discovery,
) -> Outcome:
    config = the_plan.config
    agents = Agents(launcher, the_plan.hosts, config.orphan_timeout, report.journal.see)
    voice.meanwhile(agents.beat)
    try:
        if interrupts is not None:
            agents.watch(interrupts, lambda: end_early(interrupts.take(), of_checkpoint(config)))
        ask = partial(look, the_plan, folder.job)
        all_needed = not config.min_np
        gather(agents, ask, config.start_timeout, folder.job, voice, discovery.failed, all_needed=all_needed)
        where = replace(settle(the_plan, agents, folder.job, voice), restarts=restarts)
        where = replace(where, config=resume.settled(where.config, len(where.slots), restarts))
        if interrupts is not None:
            agents.forget(interrupts)
        output = Output(
            where.logs,
            [slot.host for slot in where.slots],
            config.output,
            voice.lines,
            lambda text: voice.say(text, "warning"),
            voice.bars_move,
        )
        if restarts:
            output.note(f"dadt: restart {restarts}")
        job = Job(
            folder.job,
            agents,
            where.slots,
            output,
            report.journal,
            voice.say,
            config,
        )
        if replaces(config) and launcher.extends:
            members = [gauge.member for gauge in job.watch.gauges]
            job.let_join(Joining(where, agents, members, output, discovery, ask, job.order, voice.say))
        voice.meanwhile(lambda: job.attend(interrupts))
        report.placed(where.config, where.nodes, where.slots, job.watch)
        job.serve(folder, _facts(where))
        for view in (*views(where, job.watch), report.interim()):
            job.show(view)
        discovery.served(node.host for node in agents.nodes)
        job.start(orders(where))
        try:
            outcome = job.wait(interrupts)
        finally:
            for node in [node for node in agents.nodes if node.failed]:
                discovery.failed(node.host)
        if (failure := outcome.failure) is not None:
            outcome.failure = replace(failure, torch_env=config.torch_env)
        return outcome
    finally:
        voice.meanwhile(lambda: None)
        agents.close(HANG_UP_SECONDS)
        sweep(f"DADT_JOB={folder.job}")


def _views(placed: Told, exports: Sequence[Export], voice: Voice) -> Callable[[Placed, Watch], Sequence[View]]:
    """A function that makes all views of the job: the display, the exported metrics and the recorded series."""

    def views(where: Placed, watch: Watch) -> Sequence[View]:
        view = placed(where, watch)
        for export in exports:
            voice.say(export.begin(watch, _labels(where), warn))
        series = Series(where.logs / "progress.jsonl", watch, warn)
        return [series, *exports, *([view] if view is not None else [])]

    def warn(text: str) -> None:
        voice.say(text, "warning")

    return views


def settle(the_plan: Plan, agents: Agents, job: str, voice: Voice) -> Placed:
    """Place the workers, once all hosts have reported. Agents that get no workers are ended."""
    config = the_plan.config
    rooms = [room(node, config) for node in agents.nodes]
    missing = len(the_plan.hosts) - len(agents.nodes)
    fit = sum(each.places for each in rooms)
    if fit < config.min_np:
        absent = f", without the {missing} that cannot be reached" if missing else ""
        raise LaunchError(f"--min-np {config.min_np}: the hosts have room for {fit} workers{absent}")
    if fit < config.np and config.min_np and not missing:
        voice.say(f"the hosts have room for {fit} of {config.np} workers: training begins with these", "warning")
    shares = share_out(min(config.np, fit) if config.min_np else config.np, rooms)
    idle = [node for node, share in zip(list(agents.nodes), shares, strict=True) if not share]
    if idle:
        voice.say(f"{', '.join(node.name for node in idle)} not used: {sum(shares)} workers fit on the other hosts")
        agents.dismiss(idle)
    for text in differences(agents.nodes):
        voice.say(text, "warning")
    agree(agents, config.network_interface)
    find_shared_folders(agents)
    rooms = [room for room, share in zip(rooms, shares, strict=True) if share]
    shares = [share for share in shares if share]
    slots = place(shares, rooms, [node.address for node in agents.nodes])
    config, why = _resolved(config, slots, agents.nodes)
    return Placed(
        plan=the_plan,
        config=config,
        why=why,
        job=job,
        logs=Path(config.log_dir) / job,
        nodes=agents.nodes,
        slots=slots,
        master=_master(config, agents.nodes[0]),
        secret=secrets.token_hex(32),
    )


def reserve(log_dir: Path) -> Folder:
    """Reserve the job's id, and make the folder of its logs. Raises ConfigError or LaunchError."""
    try:
        private_files.make_folder(log_dir)
    except OSError as error:
        raise ConfigError(f"--log-dir {log_dir}: cannot be written ({error.strerror}); give another") from error
    try:
        folder = Folder.reserve(log_dir)
    except OSError as error:
        raise LaunchError(
            f"{error.filename or 'a file'}: cannot be written ({error.strerror}); running jobs need it"
        ) from error
    try:
        private_files.make_inner_folder(log_dir / folder.job)
    except OSError as error:
        folder.remove()
        raise ConfigError(f"--log-dir {log_dir}: cannot be written ({error.strerror}); give another") from error
    return folder


def not_distributed(outcome: Outcome, where: Placed) -> str | None:
    """Why training was not distributed although the job succeeded; None if it was."""
    if len(where.slots) < 2:
        return None
    if not outcome.hooked and where.config.inject == "none":
        return "--inject none left every worker to itself"
    if not outcome.hooked:
        return (
            "no worker imported torch with DADT hooked in (does the script import torch, in a Python in which dadt "
            "is installed? try --inject sitecustomize)"
        )
    # A script that calls dadt.init may use its ranks without an optimizer.
    told = any(summary.get("steps", 0) or summary.get("explicit") for summary in outcome.summaries.values())
    if not (told or outcome.stepped):
        return (
            "no torch.optim optimizer made a step in any worker, so nothing was averaged "
            "(an optimizer that is not a torch.optim.Optimizer, or training in a child process?)"
        )
    return None


def _facts(where: Placed) -> dict[str, Any]:
    """Constant facts about the job for other commands."""
    logs = str(where.logs.resolve())
    return {"job": where.job, "command": list(where.plan.command), "logs": logs, "hosts": len(where.nodes)}


def _labels(where: Placed) -> dict[str, str]:
    """The job's labels for metrics."""
    config = where.config
    executor = executors_of(config)[1]
    chosen = {"algorithm": config.algorithm, "executor": executor, "compression": config.compression}
    return {"job": where.job, **chosen, "workers": str(len(where.slots))}


def _master(config: Config, first: Node) -> tuple[str, int]:
    return first.address or "127.0.0.1", int(first.report["port"])


def _resolved(config: Config, slots: Sequence[Slot], nodes: Sequence[Node]) -> tuple[Config, str]:
    """Make the choices that must be the same on all ranks: the executors, with the reason, and the seed if unset."""
    if config.seed < 0:
        config = replace(config, seed=secrets.randbelow(2**31))
    workers = Counter(slot.cross_rank for slot in slots)
    return choose(config, [_place(workers[index], node) for index, node in enumerate(nodes)])


def _place(workers: int, node: Node) -> Place:
    usable = not str(node.report.get("torch", "")).endswith("+cpu")
    return Place(node.name, workers, len({*node.report["gpus"]}) if usable else 0)  # Ray lets workers share one


def _conclude(launchers: Sequence[Launcher], code: int, lines: Sequence[str]) -> None:
    for launcher in launchers[-1:]:
        if isinstance(launcher, Herald):
            launcher.conclude(code, lines)


def _verdict(outcome: Outcome) -> list[str]:
    if outcome.signal:
        return [f"ended by {signal_name(outcome.signal)}"]
    if outcome.preemption is not None:
        return [outcome.preemption.text]
    return outcome.failure.lines() if outcome.failure is not None else [f"done in {outcome.seconds:.1f} s"]
