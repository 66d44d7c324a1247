"""What `pip install` installs, and that it works outside the source tree."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest
from harness import ROOT


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built by what `pip install .` calls, on what the install of this environment has compiled."""
    folder = tmp_path_factory.mktemp("wheel")
    # The build needs cmake and ninja, which may be of this environment alone.
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    build = "import sys; from scikit_build_core import build; build.build_wheel(sys.argv[1])"
    command = [sys.executable, "-c", build, folder]
    subprocess.run(command, cwd=ROOT, env={**os.environ, "PATH": path}, check=True, timeout=600)
    return next(folder.glob("dadt-*.whl"))


@pytest.mark.timeout(600)
def test_files(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    for name in ("py.typed", "_core.pyi", f"_core{suffix}", "train/runtime.py", "inject/site/sitecustomize.py"):
        assert f"dadt/{name}" in names
    assert {"dadt_cli/__init__.py", "dadt_cli/report/report.html"} <= set(names)
    modules = {str(p.relative_to(ROOT)) for folder in ("dadt", "dadt_cli") for p in (ROOT / folder).rglob("*.py")}
    assert modules <= set(names)
    strangers = [n for n in names if not n.startswith(("dadt/", "dadt_cli/", "dadt-"))]
    assert not strangers
    points = zipfile.ZipFile(wheel).read(next(n for n in names if n.endswith("entry_points.txt"))).decode()
    assert "dadt = dadt_cli:main" in points
    assert "[torch.backends]\ndadt = dadt.inject:hook" in points.replace(" =", " =")
    assert any(n.endswith("licenses/LICENSE") for n in names)


@pytest.mark.timeout(600)
def test_trains_in_an_environment_of_its_own(wheel: Path, tmp_path: Path) -> None:
    """Beside the torch of this environment, but none of the source tree."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True, timeout=60)
    site = next((tmp_path / "venv" / "lib").glob("python*/site-packages"))
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    here = Path(sysconfig.get_path("purelib"))
    for path in here.iterdir():
        # Everything but the editable install.
        if "dadt" not in path.name and path.suffix != ".pth" and not (site / path.name).exists():
            (site / path.name).symlink_to(path)
    script = tmp_path / "train.py"
    script.write_text(
        "import torch, dadt\n"
        f"assert dadt.__file__.startswith({str(site)!r}), dadt.__file__\n"
        "model = torch.nn.Linear(3, 1)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "for _ in range(60):\n"
        "    optimizer.zero_grad()\n"
        "    model(torch.randn(8, 3)).square().mean().backward()\n"
        "    optimizer.step()\n"
    )
    python = tmp_path / "venv" / "bin" / "python"
    command = [python, "-c", "from dadt_cli import main; main()", "run", "-np", "2", "train.py"]
    done = subprocess.run(
        command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout
    assert "60 steps, 10 of them delayed by one" in done.stdout
