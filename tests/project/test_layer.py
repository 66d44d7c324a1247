"""Imports go one way, and what is quick stays free of torch."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path

import pytest
from harness import ROOT
from harness.patience import PATIENCE

SOURCES = sorted([*(ROOT / "dadt").rglob("*.py"), *(ROOT / "dadt_cli").rglob("*.py")])


@functools.cache
def imports(path: Path) -> frozenset[str]:
    """Names of imported modules."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{path}: relative import"
            names.add(node.module)
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return frozenset(names)


def under(names: Collection[str], package: str) -> set[str]:
    return {name for name in names if name == package or name.startswith(package + ".")}


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


LAYERS = (
    ("errors", "world"),
    ("config",),
    ("control",),
    ("launch", "comm"),
    ("train",),
    ("algorithms",),
    ("inject",),
    ("api",),
    ("__init__", "frontends"),
    ("pytorch", "keras", "tensorflow"),
)
"""Of dadt, from the ground up. Each imports those below it, and nothing of its own row."""
FLOOR = {name: floor for floor, names in enumerate(LAYERS) for name in names} | {"_core": -1}
MOST_ENTRIES = 14
"""Files and folders of dadt that a newcomer sees at first."""
MOST_LINES = 400


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_of(path): path for path in SOURCES}


@functools.cache
def own_imports(path: Path) -> dict[str, int]:
    """Modules of ours that a file imports anywhere, also by name, for types alone and in functions, with the line."""
    found: dict[str, int] = {}
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            names = [each.value for each in node.args if isinstance(each, ast.Constant)]
        for name in names:
            while name and name not in MODULES and name != "dadt._core":
                name = name.rpartition(".")[0]
            if name and name != module_of(path):
                found.setdefault(name, node.lineno)
    return found


def layer_of(module: str) -> str:
    return module.partition(".")[2].partition(".")[0] or "__init__"


def test_imports_go_down() -> None:
    wrong = []
    for path in SOURCES:
        own = layer_of(module_of(path))
        for module, line in own_imports(path).items() if path.is_relative_to(ROOT / "dadt") else ():
            where = f"{relative(path)}:{line} imports {module}"
            if module.partition(".")[0] != "dadt":
                wrong.append(f"{where}, a command")
            elif layer_of(module) != own and FLOOR[layer_of(module)] >= FLOOR[own]:
                wrong.append(where)
    assert not wrong, "\n".join(wrong)


def test_no_files_import_each_other_in_a_circle() -> None:
    graph = {module: own_imports(path) for module, path in MODULES.items()}
    graph["dadt"] = {}  # what it gives is imported when it is used: whoever imports anything of it, imports it first
    free: set[str] = set()
    while left := {module for module, imported in graph.items() if imported.keys() & (graph.keys() - free)} - free:
        if freed := graph.keys() - free - left:
            free |= freed
            continue
        lines = [
            f"{relative(MODULES[module])}:{line} imports {other}"
            for module in sorted(left)
            for other, line in graph[module].items()
            if other in left
        ]
        pytest.fail("a circle is among these:\n" + "\n".join(lines))


TIED = [[f"dadt.launch.{name}" for name in ("agent", "ending", "launchers", "members", "monitor", "start")]]
"""Folders of one package that still import each other: the phases of a job. There shall be none."""


def test_no_folders_of_a_package_import_each_other_in_a_circle() -> None:
    folders = {module for module, path in MODULES.items() if path.name == "__init__.py"}
    graph: dict[str, set[str]] = {folder: set() for folder in folders}
    for module, path in MODULES.items():
        own = [folder for folder in folders if f"{module}.".startswith(f"{folder}.")]
        for other in own_imports(path):
            theirs = [folder for folder in folders if f"{other}.".startswith(f"{folder}.")]
            for folder in own:
                beside = {each for each in theirs if each.rpartition(".")[0] == folder.rpartition(".")[0]}
                graph[folder] |= beside - {folder}
    reached = {folder: set(graph[folder]) for folder in folders}
    for middle in folders:
        for folder in folders:
            reached[folder] |= reached[middle] if middle in reached[folder] else set()
    circles = {tuple(sorted(other for other in reached[f] if f in reached[other])) for f in folders if f in reached[f]}
    assert sorted(map(list, circles)) == TIED


CORE_LAYERS = (("base",), ("kernels",), ("engine", "mail"), ("shm", "tcp"), ("negotiation",), ("bindings",))
"""Of csrc, likewise."""


def test_includes_go_down() -> None:
    floors = {name: floor for floor, names in enumerate(CORE_LAYERS) for name in names}
    wrong = []
    for path in sorted([*(ROOT / "csrc").rglob("*.h"), *(ROOT / "csrc").rglob("*.cc")]):
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if found := re.match(r'#include "(\w+)/', line):
                own, other = path.parent.name, found[1]
                if other != own and floors[other] >= floors[own]:
                    wrong.append(f"{relative(path)}:{number} includes {line[10:-1]}")
            if re.match(r'#include "[^/]+"', line):
                wrong.append(f"{relative(path)}:{number} does not name the folder")
    assert not wrong, "\n".join(wrong)


def test_ls_shows_the_layers() -> None:
    entries = {
        path.stem for path in (ROOT / "dadt").iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()
    }
    assert entries - {"__init__"} <= FLOOR.keys()
    assert len(entries - {"__init__"}) <= MOST_ENTRIES
    page = (ROOT / "docs" / "architecture.md").read_text()
    rows = re.findall(r"^\| `dadt/(\w+)(?:\.py|/)` \|", page, re.MULTILINE)
    assert set(rows) == entries - {"__init__"}
    floors = [FLOOR[row] for row in rows]
    assert floors == sorted(floors), "docs/architecture.md names the layers from the ground up"


def test_a_file_can_be_read_at_once() -> None:
    lines = {relative(path): len(path.read_text().splitlines()) for path in SOURCES}
    assert {path: number for path, number in lines.items() if number > MOST_LINES} == {}


DECISIONS = (
    "control.snapshot_parts",
    "inject.data.division",
    "inject.data.share",
    "inject.replay.snapshot_timing",
    "launch.start.host_report",
    "launch.start.startup",
    "launch.agent.actions",
    "launch.agent.host_job",
    "launch.agent.launcher_contact",
    "launch.agent.other_hosts",
    "launch.agent.registry",
    "launch.agent.shims",
    "launch.agent.stop",
    "launch.ending.cause",
    "launch.contact",
    "launch.ending.endings",
    "launch.ending.restart",
    "launch.members.generation",
    "launch.members.handovers",
    "launch.hosts.candidates",
    "launch.hosts.discovery",
    "launch.job",
    "launch.members.joining",
    "launch.members.membership",
    "launch.members.board",
    "launch.members.member",
    "launch.members.reconnect_request",
    "launch.members.rendezvous",
    "launch.members.silence",
    "launch.members.stalls",
    "launch.members.waits",
    "launch.monitor.bad_links",
    "launch.monitor.host_links",
    "launch.monitor.watch",
    "launch.members.node",
    "launch.actions",
    "launch.members.replacement",
    "launch.ending.results",
    "launch.ending.termination",
    "train.loss.gathering",
    "train.loss.position",
)
"""What is decided apart from all I/O: these modules take events, facts and the time, and give actions."""
IO = {"os", "select", "selectors", "shutil", "socket", "subprocess", "tempfile", "threading", "time"}
HARMLESS = {"SIGINT", "SIGKILL", "SIGTERM"}
"""What of the module `signal` is a number, and delivers nothing."""


def test_what_decides_does_no_io() -> None:
    for module in DECISIONS:
        found = imports(MODULES[f"dadt.{module}"])
        assert not {name.partition(".")[0] for name in found} & (IO | {"torch"}), module
        signals = under(found, "signal")
        assert signals != {"signal"}, f"{module}: import the numbers by name"
        assert signals <= {"signal", *(f"signal.{name}" for name in HARMLESS)}, module


@pytest.mark.parametrize(("folder", "other"), [("hosts", "agent"), ("monitor", "query")])
def test_the_launcher_has_no_tie_in_both_directions(folder: str, other: str) -> None:
    for path in (ROOT / "dadt" / "launch" / folder).rglob("*.py"):
        assert not under(imports(path), f"dadt.launch.{other}"), relative(path)


MOST_METHODS = 20
"""Public methods that a class may have, with those of its bases of ours; properties are counted as attributes."""
MORE_METHODS = {
    "Backend": "torch shapes it",
    "Overlay": "a table of the functions of `os` and `open` that it stands for",
    **dict.fromkeys(("WorkerLine", "Control", "StoreClient"), "a table of what a worker may say, and ask for"),
}


def methods_of(node: ast.ClassDef) -> set[str]:
    def is_property(method: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
        return any("property" in ast.unparse(each) or ".setter" in ast.unparse(each) for each in method.decorator_list)

    methods = [each for each in node.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)]
    return {each.name for each in methods if not each.name.startswith("_") and not is_property(each)}


def test_no_class_does_everything() -> None:
    classes: dict[str, list[tuple[set[str], list[str]]]] = {}
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                bases = [ast.unparse(base).partition("[")[0].rpartition(".")[2] for base in node.bases]
                classes.setdefault(node.name, []).append((methods_of(node), bases))

    def every(methods: set[str], bases: list[str], known: frozenset[str] = frozenset()) -> set[str]:
        above = [each for base in bases if base not in known for each in classes.get(base, ())]
        return methods.union(*(every(*each, known.union(bases)) for each in above))

    large = {name for name, found in classes.items() for each in found if len(every(*each)) > MOST_METHODS}
    assert large == MORE_METHODS.keys()


def test_the_launcher_and_what_is_below_it_need_no_torch() -> None:
    for module, path in MODULES.items():
        if layer_of(module) in ("errors", "world", "config", "control", "launch"):
            assert not under(imports(path), "torch") | under(imports(path), "numpy"), relative(path)


def loaded(code: str) -> set[str]:
    """Top-level packages that are loaded after the code ran."""
    code += "\nimport sys; print('\\nloaded', *{name.split('.')[0] for name in sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE, check=True)
    return set(done.stdout.splitlines()[-1].split())


def test_import_dadt_leaves_torch_alone() -> None:
    assert "numpy" in loaded("import numpy")
    assert not {"torch", "numpy"} & loaded(
        "import dadt, dadt.config, dadt.world, dadt.control.agent_client, dadt._core"
    )


@pytest.mark.parametrize("arguments", [["--help"], ["run", "--help"], ["--version"]], ids=" ".join)
def test_help_leaves_torch_alone(arguments: list[str]) -> None:
    code = f"""
import sys
sys.argv = ["dadt", *{arguments!r}]
from dadt_cli import main
try:
    main()
except SystemExit as end:
    assert not end.code, end.code
"""
    assert not {"torch", "numpy"} & loaded(code)


def test_tensors_do_not_depend_on_the_scripts_default_dtype_and_device() -> None:
    factories = {"arange", "asarray", "as_tensor", "empty", "eye", "full", "linspace", "ones", "rand", "randn", "zeros"}
    factories |= {"randint", "randperm", "scalar_tensor", "sparse_coo_tensor", "tensor"}
    for path in (ROOT / "dadt").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            if ast.unparse(node.func).startswith("torch.") and node.func.attr in factories:
                assert {"dtype", "device"} <= {k.arg for k in node.keywords}, f"{path}, line {node.lineno}"


def test_no_two_test_modules_share_a_name() -> None:
    """pytest and the processes that tests start import a test module by the name of its file alone."""
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    assert sorted({name for name in names if names.count(name) > 1}) == []
