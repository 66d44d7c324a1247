"""The agent: the one process per host that owns the host's workers.

The agent reports what the host has, starts the workers that the launcher orders, and forwards their output and reports.
It ends the workers when the launcher orders it, when the launcher's connection closes or stays silent for too long, or
when a signal asks the agent to end. It makes no other decisions.
"""

from __future__ import annotations

import os
import time
from typing import Any

from dadt.control import machine, mpi_library, network, schema
from dadt.control.frame import Frame, Link
from dadt.control.job_folder import Folder
from dadt.control.uptime import uptime
from dadt.launch.agent.host_job import TURN_SECONDS
from dadt.launch.agent.launcher_line import LauncherLine
from dadt.launch.agent.probing import Probing
from dadt.launch.agent.supervisor import Supervisor
from dadt.launch.ending.processes import sweep
from dadt.launch.ending.signals import ENDING_SIGNALS, Interrupts
from dadt.launch.start import environment

PROBE_TICK_SECONDS = 0.01
ADDRESS_SECONDS = 3.0
"""Seconds to wait for a network address on a host that has none yet."""


class Agent:
    """Reports about this host, tests which other hosts it reaches, and then runs the workers through a Supervisor."""

    def __init__(self, launcher: Link, interrupts: Interrupts, stdin: int | None = None, folder: str = "") -> None:
        """stdin: descriptor of rank 0's standard input. folder: working folder of the workers; if empty, the launcher
        names it."""
        self._differs = {"cwd": folder} if folder else {}
        self._launcher = LauncherLine(launcher)
        self._interrupts = interrupts
        self._stdin = stdin
        self._probing = Probing(self._launcher.send)
        self._beat_at = 0.0
        self._signal = 0
        """Number of the signal that asked this process to end before it received a job; 0: none."""

    def run(self) -> None:
        self._launcher.watch(self._interrupts.fileno(), self._read_signals)
        look = self._await_order("look")
        if look is None:
            return
        self._folder = Folder.join(f"{look['job']}.{look['index']}", guarded=True)
        try:
            self._launcher.contact.patience = look["orphan_timeout"] or float("inf")
            job = self._await_job(look)
            if job is not None:
                self._serve(job)
        finally:
            sweep(self._folder.mark)  # the user's prologue command may still run, or may have left processes behind
            self._folder.remove()

    def _await_job(self, look: Frame) -> Frame | None:
        """Report what the host has, test which other hosts it reaches, and wait for the order to start workers. Returns
        the order; None if the launcher is gone or a signal asked this process to end."""
        token = os.urandom(network.TOKEN_BYTES)
        listener = network.ProbeListener(token) if look["hosts"] > 1 else None
        try:
            self._env: dict[str, str] = {}
            problems = environment.missing(look["cwd"], look["files"])
            if not problems:
                self._env, problems = environment.base(look["env"], look["prologue"], self._folder.mark, look["cwd"])
            if look.get("mpi") and not problems:
                problems = mpi_library.missing(self._env, self._folder.path)
            report = machine.report(self._env) | {"problems": [text[: schema.TEXT] for text in problems[:100]]}
            if listener is not None:
                report["addresses"] = self._await_address()
                self._launcher.watch(listener.fileno(), listener.answer)
                report |= {"probe_port": listener.port, "token": token.hex()}
                report["marker"] = None if problems else self._probing.mark(look["cwd"], look["job"]) or None
            self._launcher.send(Frame("ready", report | {"clock": uptime(), "date": time.time()}))
            while (order := self._await_order("probe", "job")) is not None and order.kind == "probe":
                self._probing.begin(order)
                while self._probing.active and not self._launcher.gone:
                    self._launcher.select(PROBE_TICK_SECONDS)
                    self._probing.advance()
            return order
        finally:
            self._probing.unmark()
            if listener is not None:
                self._launcher.forget(listener.fileno())
                listener.close()

    def _await_address(self) -> list[dict[str, Any]]:
        """Return the host's network addresses. If there are none, as on a machine that has just booted, wait for some
        time until there are."""
        deadline = time.monotonic() + ADDRESS_SECONDS
        while not (found := network.addresses()) and time.monotonic() < deadline:
            self._launcher.select(PROBE_TICK_SECONDS)
            self._beat()
        return found

    def _await_order(self, *kinds: str) -> Frame | None:
        """Wait for the launcher's next order of one of these kinds. Returns None if the launcher is gone or a signal
        asked this process to end."""
        while not self._launcher.gone and not self._signal:
            orders, self._launcher.orders = self._launcher.orders, []
            for place, order in enumerate(orders):
                if order.kind in kinds:
                    self._launcher.orders = orders[place + 1 :]
                    order.header.update(self._differs)
                    return order
            # If an order and an ending signal arrive during the same call, the loop ends and the order is ignored.
            self._launcher.select(TURN_SECONDS)
            self._beat()
        return None

    def _serve(self, job: Frame) -> None:
        self._launcher.forget(self._interrupts.fileno())
        try:
            parts = (self._launcher, self._interrupts, self._folder, self._env, self._stdin, self._probing)
            supervisor = Supervisor(job, *parts)
        except OSError as error:
            why = f"{self._folder.path}: cannot be written ({error.strerror})"
            self._launcher.send(Frame("unstarted", {"message": why}))
            self._launcher.send(Frame("end", {"stuck": [], "signal": self._signal}))
            self._launcher.take_leave()
            return
        supervisor.run()

    def _read_signals(self) -> None:
        self._signal = min(self._interrupts.take() & ENDING_SIGNALS, default=self._signal)

    def _beat(self) -> None:
        if (now := time.monotonic()) >= self._beat_at:
            self._beat_at = now + TURN_SECONDS
            self._launcher.send(Frame("beat", {"steps": {}, "memory": {}, "conditions": {}, "clock": uptime()}))
