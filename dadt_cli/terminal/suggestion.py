"""Suggests replacements for commands and flags that dadt does not have: misspelt ones, and flags of torchrun,
torch.distributed.launch, mpirun, and DeepSpeed's and Accelerate's launchers."""

from __future__ import annotations

import difflib
import re
import shlex
from collections.abc import Collection, Sequence
from pathlib import Path

_MEET = "leave it out on one host; where dadt run is called on each host, give --nnodes, --node-rank and --rendezvous"
_OUTPUT = "leave it out: all output is kept in --log-dir, and --output chooses what is shown"
_ANSWERS = {
    "--standalone": "leave it out: workers of one host meet by themselves",
    "--rdzv-endpoint --rdzv-backend --rdzv-id --master-addr --master-port --main-process-ip --main-process-port": _MEET,
    "--rdzv-conf": "leave it out; --start-timeout says how long ranks wait for each other",
    "--machine-rank": "give --node-rank, with --nnodes and --rendezvous",
    "--monitor-interval --event-log-handler --run-path --numa-binding --multi-gpu --allow-run-as-root": "leave it out",
    "--start-method": "leave it out: workers are started as python starts a script",
    "--logs-specs --redirects -r --tee -t --duplicate-stdout-filters --duplicate-stderr-filters": _OUTPUT,
    "--role": "leave it out: all workers have one role",
    "--module": "give -m",
    "--local-ranks-filter": "give --output rank0, or ranks such as --output 0,3-5",
    "--log-line-prefix-template": "leave it out: the rank stands before each line",
    "--local-addr": "give --network-interface",
    "--signals-to-handle": "give --forward-signals",
    "--shutdown-timeout": "give --grace",
    "--virtual-local-rank": "leave it out: each worker sees one GPU, as --gpu-visibility says",
    "--print-completion": "leave it out: dadt's own completion is a line in your shell's configuration",
    "--use-env": "leave it out: LOCAL_RANK is always set",
    "--oversubscribe": "leave it out: more workers than cores are allowed",
    "--machinefile -machinefile": "give --hostfile",
    "--host": "give -H",
    "--map-by --bind-to": "give --mpi-args",
}
INSTEAD = {flag: answer for flags, answer in _ANSWERS.items() for flag in flags.split()}
"""For each flag of other launchers, advice about what to use instead."""
PER_HOST = ("--nproc-per-node", "--npernode", "-N", "-ppn", "--num-gpus", "--num-processes")
"""Flags of other launchers that count workers; most of these flags count workers per host."""
HOSTS = ("--nnodes", "--num-nodes", "--num-machines")


def command(arguments: Sequence[str], known: Collection[str]) -> str:
    """Suggest a command if the first argument is not one of dadt; empty if there is no good guess. known: the
    commands."""
    first = arguments[0]
    if _is_script(first) or (first.startswith("-") and any(map(_is_script, arguments))):
        workers = [] if first.startswith("-") else ["-np", "2"]  # a flag in front may set the number of workers
        return f"a script is run by {shlex.join(['dadt', 'run', *workers, *arguments])}"
    meant = difflib.get_close_matches(first, known, n=1)
    return f"did you mean {shlex.join(['dadt', meant[0], *arguments[1:]])}?" if meant else ""


def slip(name: str, arguments: Sequence[str], known: Collection[str]) -> str:
    """Suggest what was meant by a flag that `dadt run` does not have: a similar flag, or a flag of the script that was
    placed before the script. Empty if neither is likely. arguments: those of `dadt run`. known: its flags."""
    if meant := difflib.get_close_matches(name, known, n=1, cutoff=0.8):
        return f"did you mean {meant[0]}?"
    place = next((i for i, each in enumerate(arguments) if each.partition("=")[0] == name), len(arguments))
    if not any(map(_is_script, arguments[place:])):
        return ""
    takes_value = arguments[place] == name and not arguments[place + 1].startswith("-")
    end = place + 1 + (takes_value and not _is_script(arguments[place + 1]))
    words = ["dadt", "run", *arguments[:place], *arguments[end:], *arguments[place:end]]
    return f"if it is the script's, give it behind the script: {shlex.join(words)}"


def _is_script(word: str) -> bool:
    return word.endswith(".py") or ("/" in word and Path(word).is_file())


def instead(name: str, arguments: Sequence[str], known: Collection[str]) -> str:
    """Suggest a replacement for a flag that does not exist; empty if none is known. arguments: those of the command.
    known: the command's flags."""
    flag = spelt(name)
    if flag in known and flag != name:
        return f"give {flag}"
    if "-np" not in known:  # the flags below make sense only for commands that start a job
        return ""
    if flag in PER_HOST:
        return _workers(flag, _value(name, arguments), _hosts(arguments))
    if flag in HOSTS:
        return "name the hosts, -H host1,host2; or call dadt run on each, with --nnodes, --node-rank and --rendezvous"
    return INSTEAD.get(flag, "")


def spelt(name: str) -> str:
    """Return the flag with dashes in place of underscores."""
    return name.replace("_", "-")


def without_space(arguments: Sequence[str]) -> list[str]:
    """Replace `-np2` by `-np 2`, since click would read `-np2` as `-n p2`. arguments: those of `dadt`, without the
    script's."""
    found: list[str] = []
    for argument in arguments:
        joint = re.fullmatch(r"-np=?([0-9]+)", argument)
        found += ["-np", joint[1]] if joint else [argument]
    return found


def elastic(hosts: str) -> str:
    """Suggest a replacement for torchrun's `--nnodes LEAST:MOST`; empty if `hosts` is a plain number."""
    if ":" not in hosts:
        return ""
    return f"--nnodes {hosts}: give one number of hosts; --min-np M lets a job train on with M workers"


def _workers(flag: str, value: str, hosts: str) -> str:
    if value and not value.isdigit():  # the value may be a word such as gpu, cpu or auto instead of a number
        each = "hosts named without one, -H host1,host2, get a worker for each GPU"
        return f"give the number of all workers, -np N; {each}"
    if flag == "--num-processes" or hosts in ("", "1"):
        return f"give -np {value or 'N'}, the number of all workers"
    if not value or not hosts.isdigit():
        return "give -np, the number of workers on all hosts together"
    total = int(value) * int(hosts)
    once = f"once, with -H host1:{value},host2:{value} and so on"
    on_each = f"on each host, with --nnodes {hosts}, --node-rank and --rendezvous"
    return f"give -np {total}, the number of all workers: {once}; or {on_each}"


def _hosts(arguments: Sequence[str]) -> str:
    for argument in arguments:
        name = argument.partition("=")[0]
        if spelt(name) in HOSTS:
            return _value(name, arguments)
    return ""


def _value(name: str, arguments: Sequence[str]) -> str:
    """Return the value of a flag that dadt does not know; empty if it has none. Only words that look like a number of
    workers count as values, since an unknown flag may take no value."""
    for place, argument in enumerate(arguments):
        before, equals, value = argument.partition("=")
        if before == name:
            following = arguments[place + 1] if place + 1 < len(arguments) else ""
            return value if equals else following if re.fullmatch(r"[\d:]+|gpu|cpu|auto|xpu", following) else ""
    return ""
