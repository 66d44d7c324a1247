"""What a package index gets: the source distribution, the wheel that `pip install` makes, and its page."""

from __future__ import annotations

import email
import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest
from harness import ROOT, lightened
from harness.patience import PATIENCE

import dadt

REQUEST = pytest.FixtureRequest


def build(what: str, source: Path, folder: Path) -> Path:
    """`build_sdist` or `build_wheel`, which pip calls, too."""
    # The build needs cmake and ninja, which may be of this environment alone.
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    program = f"import sys; from scikit_build_core import build; build.{what}(sys.argv[1])"
    command = [sys.executable, "-c", program, folder]
    subprocess.run(command, cwd=source, env={**os.environ, "PATH": path}, check=True, timeout=13 * PATIENCE)
    return next(folder.glob("dadt-*"))


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("build_sdist", ROOT, tmp_path_factory.mktemp("sdist"))


@pytest.fixture(scope="module", params=["tree", pytest.param("sdist", marks=pytest.mark.slow)])
def wheel(request: REQUEST, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the source tree, on what the install of this environment has compiled, or of nothing but the sdist."""
    source = ROOT
    if request.param == "sdist":
        folder = tmp_path_factory.mktemp("unpacked")
        with tarfile.open(request.getfixturevalue("sdist")) as archive:
            archive.extractall(folder)
        source = next(folder.iterdir())
    return build("build_wheel", source, tmp_path_factory.mktemp("wheel"))


@pytest.mark.timeout(1600)
def test_sdist_holds_the_repository(sdist: Path) -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("this is no git repository")
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    known = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert names == {name for name in known if (ROOT / name).exists()} | {"PKG-INFO"}


@pytest.mark.timeout(1600)
def test_page_of_a_package_index(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        name = next(n for n in archive.namelist() if n.endswith("METADATA"))
        metadata = email.message_from_bytes(archive.read(name))
    page = metadata.get_payload()
    assert "## Speed" in page
    assert not re.findall(r"!\[|\]\((?!https?://|#)[^)]*", page), "a picture or link that leads nowhere there"
    named = re.findall(r"\(`([\w./-]+)`\)", page)
    assert "docs/install.md" in named
    assert not [path for path in named if not (ROOT / path).is_file()]
    newest = re.search(r"^## \[(\d.*?)\]", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert newest
    assert metadata["Version"] == dadt.__version__ == newest[1]


@pytest.mark.timeout(1600)
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


@pytest.mark.timeout(1600)
def test_trains_in_an_environment_of_its_own(wheel: Path, tmp_path: Path) -> None:
    """Beside the torch of this environment, but none of the source tree."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True, timeout=PATIENCE)
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
        lightened("import torch\n") + "import dadt\n"
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
        command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=PATIENCE
    )
    assert done.returncode == 0, done.stdout
    assert "60 steps, 10 of them delayed by one" in done.stdout
