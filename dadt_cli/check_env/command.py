"""`dadt check-env`: checks whether training can work on this host and on the hosts of -H, and says what to do if
not."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

import click

import dadt
from dadt.config.check import here
from dadt.launch.start import plan
from dadt_cli.check_env import SUBJECTS, probe
from dadt_cli.check_env.check import FAIL, PASS, VERDICTS, WARN, Check, CheckOptions, worst
from dadt_cli.check_env.hosts import REACHED_BY, HostChecks, is_checked, look
from dadt_cli.terminal import console
from dadt_cli.terminal.options import Brief, config_of, some_knobs

if TYPE_CHECKING:
    from rich.table import Table

FORMAT = 1
"""Version of the JSON format, raised when a name changes its meaning or disappears."""
TITLES = ("hosts", "ssh", *SUBJECTS)
COLOURS = {PASS: "green", WARN: "yellow", FAIL: "bold red"}
KNOBS = ("hosts", "hostfile", "include", "exclude", *REACHED_BY, "mpirun", "start_timeout")
SHOWN_VALUES = 4
"""Most distinct values of one check to show for hosts that pass the check."""


@dataclass(frozen=True, slots=True)
class CheckRow:
    """A row of the table: a check with the same outcome on one or several hosts."""

    check: Check
    hosts: str = ""
    """Names of the hosts that the check is about, separated by commas; empty for all hosts."""

    @property
    def value(self) -> str:
        return f"{self.hosts}: {self.check.value}" if self.hosts else self.check.value


@click.command(
    cls=Brief,
    context_settings={"max_content_width": 110},
    epilog="Exits with 0, with 1 if a check fails (with --strict: or warns), and with 2 for bad input.",
)
@click.option("--full", is_flag=True, help="Also run longer tests: bandwidth between hosts, worker speed, MPI.")
@click.option("--json", "as_json", is_flag=True, help="Print the results as JSON.")
@click.option("--strict", is_flag=True, help="Exit with 1 for warnings, too.")
@some_knobs(*KNOBS)
def check_env(full: bool, as_json: bool, strict: bool, **given: Any) -> int:
    """Check whether training can work on this machine, or on and between the hosts of -H.

    Each check passes, warns or fails, and says what to do. It changes nothing.
    """
    # Only the hosts matter for these checks, so settings of what is trained and how ranks start are replaced by neutral
    # values.
    config = replace(config_of(given), np=1, nnodes=0, executor="auto", broadcast_executor="", allreduce_executor="")
    if config.launcher == "mpi":
        config = replace(config, launcher="auto")
    asked = CheckOptions(full=full, cwd=here(), network_interface=config.network_interface, mpirun=config.mpirun)
    if config.python or config.prologue or any(host.name for host in plan.hosts_of(config)):
        found = look(config, asked, console)
    else:
        found = HostChecks({"": _of_this_host(asked)})
    if as_json:
        console.text(json.dumps(_as_json(found), indent=2), stdout=True)
    else:
        console.text("\n".join(_lines(found)), stdout=True)
    verdict = worst(found.all)
    return int(verdict == FAIL or (strict and verdict == WARN))


def _of_this_host(asked: CheckOptions) -> list[Check]:
    """Run the checks of this host. On a terminal, a status line shows which subjects are still being checked."""
    if not sys.stderr.isatty():
        return probe.of_host(asked)
    from rich.console import Console

    left = list(SUBJECTS)

    def text() -> str:
        return f"checking {', '.join(left)} ..."

    with Console(stderr=True).status(text()) as status:

        def seen(subject: str, checks: Sequence[Check]) -> None:
            left.remove(subject)
            status.update(text())

        return probe.of_host(asked, seen)


def rows(found: HostChecks) -> Iterator[CheckRow]:
    """Yield the rows of the table, ordered by subject. A check with the same outcome on all hosts has one row."""
    for subject in TITLES:
        yield from (CheckRow(check) for check in found.between if check.subject == subject)
        names = dict.fromkeys(
            check.name for checks in found.hosts.values() for check in checks if check.subject == subject
        )
        for name in names:
            yield from _of_name(found, subject, name)


def _of_name(found: HostChecks, subject: str, name: str) -> Iterator[CheckRow]:
    owners: dict[Check, list[str]] = {}
    for host, checks in found.hosts.items():
        for check in checks:
            if (check.subject, check.name) == (subject, name):
                owners.setdefault(check, []).append(host)
    # A host that could not be checked has one row that says so, so the rows of other checks do not mention it.
    asked = {host for host, checks in found.hosts.items() if subject not in SUBJECTS or is_checked(checks)}
    passed = [check for check in owners if check.verdict == PASS]
    left_out = passed[SHOWN_VALUES:]
    for check, hosts in owners.items():
        if check not in left_out:
            yield CheckRow(check, ", ".join(hosts) if set(hosts) < asked else "")
    if left_out:
        yield CheckRow(replace(passed[0], value=f"{len(left_out)} other values, which --json shows"))


def _lines(found: HostChecks) -> list[str]:
    """Return the table as lines: on a terminal with colours and wrapped to its width, otherwise plain with one line per
    check."""
    from rich.console import Console

    screen = Console(highlight=False, emoji=False, markup=False)
    if not screen.is_terminal:
        screen = Console(highlight=False, emoji=False, markup=False, width=10_000)
    shown = list(rows(found))
    with screen.capture() as captured:
        screen.print(_table(shown))
    lines = [line.rstrip() for line in captured.get().splitlines()]
    return [*lines, "", _counted(found), "", "for an issue:", "", *_for_issue(found, shown)]


def _table(shown: Sequence[CheckRow]) -> Table:
    from rich.table import Table
    from rich.text import Text

    grid = Table.grid(padding=(0, 2))
    for options in ({"no_wrap": True}, {"no_wrap": True}, {"overflow": "fold"}):
        grid.add_column(**options)
    subject = ""
    for row in shown:
        if row.check.subject != subject:
            if subject:
                grid.add_row()
            subject = row.check.subject
            grid.add_row(Text(subject, "bold"))
        verdict = Text(f"  {row.check.verdict}", COLOURS[row.check.verdict])
        grid.add_row(verdict, Text(row.check.name), Text(row.value))
        if row.check.hint:
            grid.add_row("", "", Text(f"-> {row.check.hint}"))
    return grid


def _counted(found: HostChecks) -> str:
    counts = {verdict: sum(check.verdict == verdict for check in found.all) for verdict in VERDICTS}
    on = f" on {len(found.hosts)} hosts" if len(found.hosts) > 1 else ""
    total, found_so = sum(counts.values()), ", ".join(f"{count} {verdict}" for verdict, count in counts.items())
    return f"{total} check{'s' if total != 1 else ''}{on}: {found_so}"


def _for_issue(found: HostChecks, shown: Sequence[CheckRow]) -> list[str]:
    """Return Markdown for a bug report: facts that describe the environment, and all checks that did not pass."""
    facts = [f"{row.check.subject} {row.check.name}: {row.value}" for row in shown if row.check.alike]
    wrong = [
        f"{row.check.verdict.upper()} {row.check.subject} {row.check.name}: {row.value}"
        for row in shown
        if row.check.verdict != PASS
    ]
    return ["```text", f"dadt check-env, {_counted(found)}", *facts, *wrong, "```"]


def _as_json(found: HostChecks) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "dadt": dadt.__version__,
        "when": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "verdict": worst(found.all),
        "between": [asdict(check) for check in found.between],
        "pairs": found.pairs,
        "hosts": [
            {"name": name, "verdict": worst(checks), "checks": [asdict(check) for check in checks]}
            for name, checks in found.hosts.items()
        ],
    }
