"""Imports go one way, and what is quick stays free of torch."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = sorted([*(ROOT / "dadt").rglob("*.py"), *(ROOT / "dadt_cli").rglob("*.py")])
TORCH_FREE = ("config.py", "world.py", "errors.py", "control.py", "agent.py", "pulse.py", "__init__.py")


def imports(path: Path, *, inner: bool = True) -> set[str]:
    """Names of imported modules; without `inner`, those imported when the module is."""
    tree = ast.parse(path.read_text())
    nodes = list(ast.walk(tree)) if inner else [n for n in tree.body if isinstance(n, ast.Import | ast.ImportFrom)]
    names: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{path}: relative import"
            names.add(node.module)
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return names


def under(names: set[str], package: str) -> set[str]:
    return {name for name in names if name == package or name.startswith(package + ".")}


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", [p for p in SOURCES if p.is_relative_to(ROOT / "dadt")], ids=relative)
def test_the_library_does_not_know_the_command_line(path: Path) -> None:
    assert not under(imports(path), "dadt_cli")


LOWEST = ["config.py", "errors.py", "numbers.py", "world.py"]


@pytest.mark.parametrize("name", LOWEST)
def test_the_lowest_layer_needs_the_standard_library_alone(name: str) -> None:
    tops = {module.split(".")[0] for module in imports(ROOT / "dadt" / name)}
    assert tops - {"dadt"} <= sys.stdlib_module_names
    below = {f"dadt.{Path(each).stem}" for each in LOWEST}
    assert all(".".join(each.split(".")[:2]) in below for each in under(imports(ROOT / "dadt" / name), "dadt"))


def test_the_launcher_does_not_know_the_runtime() -> None:
    upper = (
        "dadt.train.runtime",
        "dadt.inject",
        "dadt.algorithms",
        "dadt.train.attachment",
        "dadt.comm.executors",
        "dadt._core",
        "torch",
    )
    for path in [*(ROOT / "dadt" / "launch").rglob("*.py"), *(ROOT / "dadt" / n for n in TORCH_FREE)]:
        if path.name == "sitecustomize.py":
            continue  # it is the way into a worker
        # The package itself goes on to hook in where it finds torch loaded.
        names = imports(path, inner=path != ROOT / "dadt" / "__init__.py")
        found = {name for package in upper for name in under(names, package)}
        assert not found, relative(path)


def test_the_runtime_knows_neither_injection_nor_launcher() -> None:
    layer = ("runtime", "attachment", "exchange", "bucket", "lane", "predictions/base", "buffer", "measure", "share")
    for name in layer:
        found = imports(ROOT / "dadt" / f"{name}.py")
        assert not under(found, "dadt.inject") | under(found, "dadt.launch"), name


def loaded(code: str) -> set[str]:
    """Top-level packages that are loaded after the code ran."""
    code += "\nimport sys; print('\\nloaded', *{name.split('.')[0] for name in sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    return set(done.stdout.splitlines()[-1].split())


def test_import_dadt_leaves_torch_alone() -> None:
    assert "torch" in loaded("import torch")
    assert not {"torch", "numpy"} & loaded(
        "import dadt, dadt.config.config, dadt.world, dadt.control.agent_client, dadt._core"
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
        if path.relative_to(ROOT / "dadt").parts[0] in ("benchmarks", "checks"):
            continue  # programs of their own
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            if ast.unparse(node.func).startswith("torch.") and node.func.attr in factories:
                assert {"dtype", "device"} <= {k.arg for k in node.keywords}, f"{path}, line {node.lineno}"
