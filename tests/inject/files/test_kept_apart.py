"""Files that a script without ranks in mind writes, on two ranks of a host."""

from __future__ import annotations

import json
import re
import subprocess
import textwrap
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from harness import lightened
from harness.job import starter
from harness.patience import PATIENCE

from dadt.inject.files.install import Scope
from dadt.inject.files.saving import PATIENCE_SECONDS

HEAD = """
import csv, glob, io, json, os, shutil, sys, time, zipfile
import numpy as np
import torch
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
dataset = torch.utils.data.TensorDataset(torch.randn(32, 4), torch.randn(32, 1))
loader = torch.utils.data.DataLoader(dataset, 4, shuffle=True)

def train():
    for x, y in loader:
        optimizer.zero_grad()
        (model(x) - y).pow(2).mean().backward()
        optimizer.step()
"""


@pytest.fixture
def job(tmp_path: Path):
    def run(script: str, *flags: str, code: int = 0, first: str = "", last: str = "") -> tuple[list[Any], str]:
        """What each rank has printed as JSON, and what DADT has said. first: what comes before `import torch`, in a
        Python of its own if it is seen to ask for the rank. last: an argument of the script."""
        text = first + HEAD + textwrap.dedent(script)
        alone = "RANK" in first
        (tmp_path / "train.py").write_text(lightened(text) if alone else text)
        command = [*starter("dadt run", 2, alone), *flags, "train.py", last]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE)
        assert done.returncode == code, done.stderr
        told = [json.loads(line[4:]) for line in sorted(done.stdout.splitlines()) if line[:4] in ("[0] ", "[1] ")]
        return told, done.stderr

    return run


LIBRARIES = """
from pathlib import Path
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch.utils.tensorboard import SummaryWriter
if os.path.isdir("out"):
    shutil.rmtree("out")
os.makedirs("out")
log = open("out/log.csv", "a")
board = SummaryWriter("out/board")
for epoch in range(3):
    train()
    print(epoch, file=log, flush=True)
    board.add_scalar("epoch", epoch, epoch)
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    with zipfile.ZipFile("out/model.zip", "w") as archive:
        archive.writestr("policy.pth", buffer.getvalue())
        archive.writestr("data", "x" * 100_000)
    with zipfile.ZipFile("out/model.zip") as archive:
        assert archive.testzip() is None
    Path("out/state.json").write_text(json.dumps({"epoch": epoch}))
    np.save("out/curve.npy", np.arange(epoch + 1))
    assert len(np.load("out/curve.npy")) == epoch + 1
    save_file(model.state_dict(), "out/model.safetensors")
    assert torch.equal(load_file("out/model.safetensors")["weight"], model.weight)
    torch.jit.save(torch.jit.script(torch.nn.ReLU()), "out/relu.pt")
    torch.jit.script(torch.nn.ReLU()).save("out/relu2.pt")
    torch.jit.load("out/relu.pt"), torch.jit.load("out/relu2.pt")
board.close()
weights = [p.tolist() for p in model.parameters()]
print(json.dumps([weights, open("out/log.csv").read().split(), sorted(os.listdir("out"))]))
"""


def test_the_first_rank_writes_and_each_reads_its_own(job, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "of the last job").touch()
    (first, second), said = job(LIBRARIES)
    names = ["board", "curve.npy", "log.csv", "model.safetensors", "model.zip", "relu.pt", "relu2.pt", "state.json"]
    assert first == second and first[1:] == [["0", "1", "2"], names]
    out = tmp_path / "out"
    assert sorted(path.name for path in out.iterdir()) == names
    assert (out / "log.csv").read_text() == "0\n1\n2\n"
    assert len(list((out / "board").iterdir())) == 1
    assert len(np.load(out / "curve.npy")) == 3
    assert json.loads((out / "state.json").read_text()) == {"epoch": 2}
    with zipfile.ZipFile(out / "model.zip") as archive:
        assert archive.testzip() is None
    assert "not kept" not in said  # nobody misses anything


CHECKPOINTS = """
best = 0
for epoch in range(5):
    train()
    time.sleep(late.pop() if late else 0)
    if not os.path.isdir("out"):
        os.mkdir("out")
    torch.save({"epoch": epoch, "model": model.state_dict()}, "out/checkpoint.tmp")
    os.replace("out/checkpoint.tmp", "out/checkpoint.pt")
    torch.save(model.state_dict(), "out/new.tmp")
    os.rename("out/new.tmp", f"out/last-{epoch}.pt")
    for old in sorted(glob.glob("out/last-*.pt"))[:-2]:
        os.remove(old)
    if epoch == 2:
        shutil.copyfile("out/checkpoint.pt", "out/best.pt")
    assert torch.load("out/checkpoint.pt")["epoch"] == epoch
best = torch.load("out/best.pt")
model.load_state_dict(best["model"])
train()
print(json.dumps([best["epoch"], sorted(os.listdir("out")), [p.tolist() for p in model.parameters()]]))
"""


LATE = """
import os, time
mine = os.environ["RA" + "NK"]  # before torch: a script that asks for it later is one that knows of ranks
late = [0.7] if mine == "{rank}" else []
"""


@pytest.mark.sample(1)
@pytest.mark.parametrize("rank", ["nobody", 0, 1])
def test_renamed_removed_and_loaded_checkpoints(job, tmp_path: Path, rank: int | str) -> None:
    """Whichever is late at the first one, by less than it is waited for."""
    (first, second), _ = job(CHECKPOINTS, first=LATE.format(rank=rank))
    assert first == second
    assert first[:2] == [2, ["best.pt", "checkpoint.pt", "last-3.pt", "last-4.pt"]]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == first[1]
    assert torch.load(tmp_path / "out" / "checkpoint.pt")["epoch"] == 4


NAMED_BY_TIME = """
folder = f"runs/{time.time_ns()}"
os.makedirs(folder)
number = 1
while os.path.exists(f"exp{number}"):
    number += 1
os.mkdir(f"exp{number}")
seconds = 0.0
for epoch in range(6):
    train()
    begin = time.perf_counter()
    for path in (f"{folder}/last.pt", f"exp{number}/last.pt", f"by-time-{time.time_ns()}.pt"):
        torch.save(epoch, path)
        assert torch.load(path) == epoch
    seconds += time.perf_counter() - begin
print(json.dumps([seconds, len(os.listdir("runs")), sorted(os.listdir(folder))]))
"""


def test_names_by_time_are_not_waited_for(job, tmp_path: Path) -> None:
    found, _ = job(NAMED_BY_TIME)
    for seconds, runs, files in found:
        assert seconds < 6 * PATIENCE_SECONDS  # the six saves by one of the names alone would take as much more
        assert runs == 1 and files == ["last.pt"]  # each rank sees its own
    assert len(list((tmp_path / "runs").iterdir())) == 1 and len(list(tmp_path.glob("by-time-*"))) == 6
    assert [path.name for path in tmp_path.glob("exp*")] == ["exp1"]


TABLE = """
import contextlib, fcntl
{before}
@contextlib.contextmanager
def turn():
    "Of one rank after the other, where all write: two that rename one file at a time would both need luck."
    with open(__file__) as lock:
        if "in turn" in sys.argv:
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield

def whole(path, text):
    with open(path + ".tmp", "w") as file:
        file.write(text)
    os.replace(path + ".tmp", path)

me = os.getpid()
with turn():
    if os.path.isdir("out"):
        shutil.rmtree("out")
    if not os.path.isdir("out"):
        os.mkdir("out")
for epoch in range(4):
    if epoch == 1:
        {after}
    train()
    with turn():
        torch.save([me, epoch], "out/saved.pt")
        torch.save([me, epoch], "out/last.tmp")
        os.replace("out/last.tmp", "out/last.pt")
        assert torch.load("out/last.pt")[1] == epoch
        with open("out/written", "w") as file:
            file.write(str(me))
        whole("out/replaced", json.dumps([me, "x" * (1000 + me % 1000)]))
        with open("out/log.csv", "a") as file:
            print(me, epoch, file=file)
        torch.save(epoch, f"out/epoch-{{epoch}}.pt")
        for old in sorted(glob.glob("out/epoch-*.pt"))[:-2]:
            os.remove(old)
open(f"out/alone-{{me}}", "w").close()
print(json.dumps([me, sorted(os.listdir("out"))]))
"""
READ = 'rank = int(os.environ.get("RANK", 0))'
READ_LATE = 'rank = int(os.environ.get("RA" "NK", 0))'  # a script that names it may have read it from the beginning
COLUMNS = {
    "never": ("", "pass", []),
    "before": (READ, "pass", []),
    "after": ("", READ_LATE, []),
    "all": ("", "pass", ["--files", "all"]),
    "before, all": (READ, "pass", ["--files", "all"]),
    "after, all": ("", READ_LATE, ["--files", "all"]),
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("column", COLUMNS)
def test_the_table_of_who_writes(job, tmp_path: Path, column: str) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "of the last job").touch()
    before, after, flags = COLUMNS[column]
    found, said = job(TABLE.format(before=before, after=after), *flags, last="in turn" if "all" in column else "")
    (first, _), (second, names) = found
    out = tmp_path / "out"
    files = sorted(path.name for path in out.iterdir())
    alone = [f"alone-{first}"] if column == "never" else sorted(f"alone-{each}" for each in (first, second))
    expected = ["epoch-2.pt", "epoch-3.pt", "last.pt", "log.csv", "replaced", "saved.pt", "written"]
    assert files == sorted([*alone, *expected])
    assert set(expected) <= set(names) and f"alone-{second}" in names
    assert torch.load(out / "last.pt")[1] == torch.load(out / "saved.pt")[1] == 3
    writers = {int((out / "written").read_text()), json.loads((out / "replaced").read_text())[0]}
    assert writers <= {first, second} if "all" in column else writers == {first}
    lines = sorted((out / "log.csv").read_text().splitlines())
    everyone = [first, second] if column in ("before", "all", "before, all", "after, all") else [first]
    assert lines == sorted(f"{each} {epoch}" for each in everyone for epoch in range(4))
    assert "not kept" not in said


OTHERWISE = {
    # the barrier, as the first rank may end else while the other still needs its store
    "group": 'torch.distributed.init_process_group("gloo"); torch.distributed.barrier(); torch.distributed.get_rank()',
    "init": "import dadt; dadt.init()",
}


@pytest.mark.parametrize("how", OTHERWISE)
def test_all_ranks_write_where_the_script_knows_them(job, tmp_path: Path, how: str) -> None:
    job(f"{OTHERWISE[how]}\nopen(f'file-{{os.getpid()}}', 'w').close()\n")
    assert len(list(tmp_path.glob("file-*"))) == 2


EARLY = 'import os\nrank = os.environ["RANK"]\n'


@pytest.mark.parametrize("how", [{"first": EARLY}, {"last": "--rank={rank}"}], ids=["early", "argument"])
def test_a_script_may_know_its_rank_before_it_imports_torch(job, tmp_path: Path, how: dict[str, str]) -> None:
    job("open(f'file-{os.getpid()}', 'w').close()\n", **how)
    assert len(list(tmp_path.glob("file-*"))) == 2


def test_a_library_that_asks_for_the_rank_is_not_the_script(job, tmp_path: Path) -> None:
    library = "import torch.distributed.elastic.utils as u; u.get_env_variable_or_raise('RA' + 'NK')"
    job(f"{library}\nopen(f'file-{{os.getpid()}}', 'w').close()\n")
    assert len(list(tmp_path.glob("file-*"))) == 1


SHARED = """
import subprocess, tempfile
with tempfile.TemporaryDirectory() as folder:
    open(folder + "/a", "w").close()
    subprocess.run(["cp", folder + "/a", folder + "/b"], check=True)
    print(json.dumps(sorted(os.listdir(folder))))
os.makedirs("cache", exist_ok=True)
open(f"cache/{os.getpid()}", "w").close()
"""


def test_temporary_files_and_caches_are_shared_with_other_programs(job, tmp_path: Path) -> None:
    found, _ = job(SHARED)
    assert found == [["a", "b"]] * 2
    assert len(list((tmp_path / "cache").iterdir())) == 2


UNSEEN = """
name = f"numbers-{os.getpid()}"
with open(name, "wb") as file:
    file.write(b"1")
torch.UntypedStorage.from_file(name, False, 1)
"""


def test_a_file_that_is_not_found_is_hinted_at(job) -> None:
    _, said = job(UNSEEN, code=1)
    assert re.search(r"\n  hint    numbers-\d+: what this rank wrote there was kept apart from the files", said), said


NOT_THERE = {
    "a folder to which a copy is moved": "os.rename(name, 'folder/numbers')",
    "a file that nobody has written": "torch.UntypedStorage.from_file('numbers', False, 1)",
    "a file that Python looks for": "np.load('numbers')",
    "words of the script": "raise FileNotFoundError('the data set does not exist')",
}
WITH_A_COPY = """
from dadt.inject import worker
name = f"mine-{{os.getpid()}}"
open(name, "w").close()
if worker.runtime.ranks.world.rank == 1:
    {}
time.sleep(60)
"""


@pytest.mark.sample(1)
@pytest.mark.parametrize("call", NOT_THERE.values(), ids=NOT_THERE)
def test_nothing_is_hinted_at_where_something_else_is_missing(job, call: str) -> None:
    """The rank has a copy of another file."""
    _, said = job(WITH_A_COPY.format(call), code=1)
    assert "worker 1 failed" in said and re.search("does not exist|No such file", said), said
    assert "hint" not in said, said


LATE_BOUND = """
import subprocess, tempfile
from torch.utils.data import DataLoader, Dataset
train()
scripted = torch.jit.script(model)
torch.jit.save(m=scripted, f="model.jit")
torch.jit.load("model.jit")
with tempfile.NamedTemporaryFile(dir=".") as file:
    file.write(b"text")
folder = tempfile.mkdtemp(dir=".")
subprocess.run(["sh", "-c", "echo text > said"], cwd=folder, check=True)
said = open(os.path.join(folder, "said")).read()
open("runs/new.txt", "w").close()

class Cached(Dataset):
    def __len__(self):
        return 4
    def __getitem__(self, i):
        found = []
        for name in (f"cached{i}.pt", f"item{i}.pt"):  # the first is shared with others, by its name
            if not os.path.exists(name):
                torch.save(torch.full((300_000,), float(i)), name)
            found.append(torch.load(name)[0])
        return sum(found)

with torch.no_grad():
    cached = [batch.tolist() for batch in DataLoader(Cached(), 2, num_workers=1)]
print(json.dumps([said, sorted(os.listdir("runs")), cached]))
"""


def test_what_is_bound_before_or_called_by_keywords_or_in_a_child(job, tmp_path: Path) -> None:
    (tmp_path / "scratch").mkdir()
    (tmp_path / "scratch" / "old.txt").touch()
    (tmp_path / "runs").symlink_to("scratch")
    found, _ = job(LATE_BOUND)
    assert found == [["text\n", ["new.txt", "old.txt"], [[0.0, 2.0], [4.0, 6.0]]]] * 2
    for name in ("cached", "item"):
        assert [torch.load(tmp_path / f"{name}{i}.pt")[0].item() for i in range(4)] == [0.0, 1.0, 2.0, 3.0]


def test_a_cache_is_one_below_the_folder_in_which_the_script_works(tmp_path: Path, monkeypatch) -> None:
    folder = tmp_path / "kvcache-experiment"
    folder.mkdir()
    monkeypatch.chdir(folder)
    keeps = Scope().keeps
    assert keeps(str(folder / "log.txt")) and keeps(str(folder / "runs" / "log.txt"))
    assert not keeps(str(folder / "cache" / "data")) and not keeps(str(folder / "x" / "__pycache__" / "a.pyc"))
