"""`dadt compare`: what it calls equal, what it calls different, and that it runs nothing that a file holds."""

from __future__ import annotations

import json
import math
import os
import pickle
import resource
import subprocess
import sys
import tarfile
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.patience import PATIENCE
from safetensors.torch import save_file, save_model
from torch import nn

import dadt_cli


class Net(nn.Module):
    """With tied weights, buffers, and one of each kind of name."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(20, 8)
        self.norm = nn.BatchNorm1d(8)
        self.body = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
        self.head = nn.Linear(8, 20, bias=False)
        self.head.weight = self.table.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.body(self.norm(self.table(x))))
        return out


def step(net: Net, optimizer: torch.optim.Optimizer) -> None:
    x = torch.arange(20)
    nn.functional.cross_entropy(net(x), x).backward()
    optimizer.step()
    optimizer.zero_grad()


class Compare:
    """compare(a, b, ...) in tmp_path: the exit code and what was printed. Anything but a path is saved first."""

    def __init__(self, folder: Path, capture: pytest.CaptureFixture[str], patch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self._capture = capture
        self._patch = patch
        patch.chdir(folder)

    def __call__(self, a: Any, b: Any, *options: str) -> tuple[int, str]:
        names = []
        for name, content in (("a.pth", a), ("b.pth", b)):
            names.append(content if isinstance(content, str) else name)
            if not isinstance(content, str):
                torch.save(content, self.folder / name)
        self._patch.setattr(sys, "argv", ["dadt", "compare", *names, *options])
        code = dadt_cli._run()
        printed = self._capture.readouterr()
        return code, printed.out + printed.err

    def rows(self, a: Any, b: Any, *options: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = json.loads(self(a, b, "--json", *options)[1])["rows"]
        return found


@pytest.fixture
def compare(tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Compare:
    return Compare(tmp_path, capfd, monkeypatch)


def test_a_checkpoint_and_the_next_one(compare: Compare) -> None:
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    step(net, optimizer)

    def checkpoint(epoch: int) -> dict[str, Any]:
        return {"model": net.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch, "note": "x"}

    torch.save(checkpoint(1), "1.pth")
    step(net, optimizer)
    torch.save(checkpoint(2), "2.pth")

    assert compare("1.pth", "1.pth") == (
        0,
        "parameters:       all 5 equal\nbuffers:          all 3 equal\noptimizer values: all 32 equal\n"
        "other values:     all 2 equal\n1.pth and 1.pth are equal\n",
    )
    code, text = compare("1.pth", "2.pth")
    assert code == 1
    assert "parameters:       5 of 5 differ, by up to 0.0" in text
    assert text.endswith("1.pth and 2.pth differ\n")
    rows = compare.rows("1.pth", "2.pth")
    parameters = [row for row in rows if row["kind"] == "parameter"]
    assert ["model/table.weight", "model/head.weight"] in [row["names"] for row in parameters]
    gaps = [row["difference"] for row in parameters]
    assert gaps == sorted(gaps, reverse=True)
    assert {row["names"][0] for row in rows if row["kind"] == "buffer"} == {
        "model/norm.running_mean",
        "model/norm.running_var",
        "model/norm.num_batches_tracked",
    }
    (epoch,) = [row for row in rows if row["kind"] == "other"]
    assert (epoch["names"], epoch["a"], epoch["b"], epoch["difference"]) == (["epoch"], "1", "2", 1.0)


def test_the_figures_are_right(compare: Compare) -> None:
    a = torch.zeros(3, 1000)
    a[0, 0] = -4.0
    b = a.clone()
    b[1, 7] = 0.5
    b[2, 9] = -2.0
    (row,) = compare.rows({"w": a, "same": a}, {"w": b, "same": a})
    assert (row["difference"], row["relative"], row["count"], row["elements"]) == (2.0, 0.5, 2, 3000)
    assert compare.rows({"w": a}, {"w": b}, "--tolerance", "0.6")[0]["count"] == 1
    assert compare({"w": a}, {"w": b}, "--tolerance", "2")[0] == 0
    assert compare({"w": a}, {"w": b}, "--tolerance", "1.99")[0] == 1
    assert "all 1 equal up to 2\n" in compare({"w": a}, {"w": b}, "--tolerance", "2")[1]


def test_a_difference_far_into_a_large_tensor(compare: Compare) -> None:
    a = torch.zeros((1 << 22) + 5)
    b = a.clone()
    b[-1] = 3.0
    assert [row["difference"] for row in compare.rows({"w": a}, {"w": b})] == [3.0]


def only(what: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.tensor([1.0, float(what)], dtype=dtype)


BIG = 1 << 53
SPARSE = torch.tensor([[0.0, 1.0], [0.0, 0.0]])


@pytest.mark.parametrize(
    ("a", "b", "difference"),
    [
        (only("nan"), only("nan"), None),
        (only("nan"), only("2"), "nan"),
        (only("2"), only("nan"), "nan"),
        (only("inf"), only("inf"), None),
        (only("inf"), only("-inf"), "inf"),
        (only("inf"), only("2"), "inf"),
        (only("-0.0"), only("0.0"), None),
        (only("nan", torch.bfloat16), only("1.5", torch.bfloat16), "nan"),
        (only("2", torch.float8_e4m3fn), only("1.5", torch.float8_e4m3fn), 0.5),
        (torch.tensor([BIG]), torch.tensor([BIG + 1]), 1.0),
        (torch.tensor(-5), torch.tensor(7), 12.0),
        (torch.tensor([3], dtype=torch.uint8), torch.tensor([250], dtype=torch.uint8), 247.0),
        (torch.tensor([True, False]), torch.tensor([True, True]), 1.0),
        (torch.tensor([3 + 4j]), torch.tensor([0j]), 5.0),
        (torch.empty(0, 3), torch.empty(0, 3), None),
        (torch.ones(2, 3).t(), torch.ones(3, 2), None),
        (torch.ones(1).expand(4), torch.ones(4), None),
        (SPARSE.to_sparse(), SPARSE.to_sparse(), None),
        (SPARSE.to_sparse(), SPARSE.t().to_sparse(), 1.0),
        (SPARSE.to_sparse_csr(), 3 * SPARSE.to_sparse_csr(), 2.0),
        (torch.empty(3, device="meta"), torch.empty(3, device="meta"), None),
        (1.0, 1, None),
        (math.nan, math.nan, None),
        (0.5, 0.25, 0.25),
        (math.nan, 1.0, "nan"),
        pytest.param(10**400, 10**400 + 1, 1.0, id="integers beyond all floats"),
        pytest.param(10**400, 1.5, "inf", id="an integer beyond all floats"),
        (None, None, None),
        ((0.9, 0.999), [0.9, 0.999], None),
        (OrderedDict(), {}, None),
        (torch.float16, torch.float16, None),
    ],
)
def test_values(compare: Compare, a: Any, b: Any, difference: Any) -> None:
    code, text = compare({"x": a}, {"x": b}, "--json")
    rows = json.loads(text)["rows"]
    assert [row["difference"] for row in rows] == ([] if difference is None else [difference])
    assert code == (0 if difference is None else 1)
    # In words, too.
    assert compare("a.pth", "b.pth")[0] == code


@pytest.mark.parametrize(
    ("a", "b", "what"),
    [
        (torch.zeros(2, 3), torch.zeros(3, 2), "shape"),
        (torch.zeros(1), torch.zeros(()), "shape"),
        (torch.zeros(2), torch.zeros(2, dtype=torch.float64), "dtype"),
        (torch.zeros(2), torch.zeros(2).to_sparse(), "type"),
        (torch.zeros(2), torch.zeros(2, device="meta"), "type"),
        (torch.tensor(1.0), 1.0, "type"),
        (True, 1, "type"),
        (None, 0, "type"),
        ("1", 1, "type"),
        ([], {}, "type"),
        ("sgd", "adam", "value"),
        (True, False, "value"),
        (torch.float16, torch.float32, "value"),
    ],
)
def test_what_cannot_be_equal(compare: Compare, a: Any, b: Any, what: str) -> None:
    code, text = compare({"x": a}, {"x": b}, "--tolerance", "1e300", "--json")
    assert (code, [row["what"] for row in json.loads(text)["rows"]]) == (1, [what])
    assert what in compare("a.pth", "b.pth")[1]


def test_dtypes_can_be_left_out(compare: Compare) -> None:
    net = Net().state_dict()
    half = {name: value.bfloat16() if value.is_floating_point() else value for name, value in net.items()}
    (first, *_) = compare.rows(net, half)
    assert first["what"] == "dtype"
    assert 0 < first["relative"] < 0.004
    assert compare(net, half, "--tolerance", "0.02")[0] == 1
    assert compare(net, half, "--tolerance", "0.02", "--ignore-dtype")[0] == 0


def test_names_in_one_file_alone(compare: Compare) -> None:
    a, b = {"w": torch.zeros(2), "x": torch.ones(2), "n": {}}, {"w": torch.zeros(2), "y": 3, "n": {"k": 1}}
    code, text = compare(a, b)
    assert code == 1
    rows = {row["names"][0]: row["result"] for row in compare.rows(a, b)}
    assert rows == {"x": "only in A", "n": "only in A", "y": "only in B", "n/k": "only in B"}
    assert "other values:     all 1 equal; 2 only in A; 2 only in B\n" in text


def test_keys_that_look_alike(compare: Compare) -> None:
    a = {"state": {0: 1.0, "0": 2.0, (0,): 5.0}, "a/b": 3.0, "a": {"b": 4.0}}
    assert compare(a, a)[0] == 0
    assert len(compare.rows(a, a, "--all")) == 5
    other = {"state": {0: 2.0, "0": 1.0, (0,): 5.0}, "a/b": 4.0, "a": {"b": 3.0}}
    assert len(compare.rows(a, other)) == 4


def test_kinds(compare: Compare) -> None:
    def floats() -> torch.Tensor:
        return torch.zeros(2)

    counts = torch.zeros(2, dtype=torch.int64)
    names = ("0.weight", "sn.weight_u", "rope.inv_freq", "bn.running_var")
    content = {
        "ema": {**{name: floats() for name in names}, "attn.bias": counts},
        "optimizers": [torch.optim.SGD([nn.Parameter(floats())], lr=1.0, momentum=0.9).state_dict()],
        "kept": {"running_mean": nn.Parameter(floats())},
        "rng": {"cpu": counts.byte()},
        "mixed": {"loss": floats(), "epoch": 3},
    }
    kinds = {row["names"][0]: row["kind"] for row in compare.rows(content, content, "--all")}
    assert {name for name, kind in kinds.items() if kind == "parameter"} == {"ema/0.weight", "kept/running_mean"}
    assert {name for name, kind in kinds.items() if kind == "other"} == {"rng/cpu", "mixed/loss", "mixed/epoch"}
    assert {name for name, kind in kinds.items() if kind == "buffer"} == {
        *(f"ema/{name}" for name in names[1:]),
        "ema/attn.bias",
    }
    assert kinds["optimizers/0/param_groups/0/lr"] == "optimizer"


def test_tied_weights_and_safetensors(compare: Compare) -> None:
    net = Net()
    torch.save(net.state_dict(), "tied.pth")
    save_model(net, "tied.safetensors")  # which holds one of the two names
    save_file({name: value.clone() for name, value in net.state_dict().items()}, "apart.safetensors")
    code, text = compare("tied.pth", "tied.safetensors")
    assert (code, text.splitlines()[0]) == (0, "parameters:       all 5 equal")
    code, text = compare("tied.pth", "apart.safetensors")
    assert code == 0  # the same values
    assert "one tensor in A alone: head.weight, table.weight\n" in text
    assert "all 6 equal" in text


def test_a_part_of_a_file(compare: Compare) -> None:
    net = Net()
    torch.save(net.state_dict(), "model.pth")
    torch.save({"model": net.state_dict(), "epoch": 3}, "last.pth")
    torch.save({"model": nn.DataParallel(net).state_dict()}, "wrapped.pth")
    assert compare("model.pth", "last.pth:model")[0] == 0
    assert compare("last.pth:model/", "model.pth")[0] == 0
    assert compare("last.pth:model", "wrapped.pth:model/module.")[0] == 0
    for names, hint in (
        (("model.pth", "last.pth"), "no name is in both; give last.pth:model as B"),
        (("last.pth", "model.pth"), "no name is in both; give last.pth:model as A"),
        (("last.pth:model", "wrapped.pth:model"), "no name is in both; give wrapped.pth:model/module. as B"),
    ):
        code, text = compare(*names)
        assert (code, text.splitlines()[-2]) == (1, hint)
    assert compare("model.pth", "last.pth:ema") == (
        2,
        "dadt: last.pth: nothing in it has a name that begins with ema/; they begin with model/, epoch\n",
    )
    Path("od:d").write_bytes(Path("model.pth").read_bytes())
    assert compare("od:d", "model.pth")[0] == 0


def test_a_table_is_no_longer_than_needed(compare: Compare) -> None:
    a = {f"w{n}": torch.tensor(1.0) for n in range(40)}
    b = {name: value + n for n, (name, value) in enumerate(a.items())}
    lines = compare(a, b)[1].splitlines()
    assert lines[3].split() == ["NAME", "KIND", "TYPE", "DIFFERENCE", "RELATIVE", "ELEMENTS"]
    assert [line.split()[0] for line in lines[4:15]] == [*(f"w{n}" for n in range(39, 29, -1)), "and"]
    assert "and 29 more, which --all lists" in lines
    assert len(compare(a, b, "--all")[1].splitlines()) == 40 + 7


class Payload:
    """Unpickling it would write a file."""

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return os.mkdir, ("was-run",)


@pytest.mark.parametrize("archive", [True, False])
def test_code_in_a_file_is_not_run(compare: Compare, archive: bool) -> None:
    torch.save({"w": torch.zeros(2)}, "good.pth")
    torch.save({"w": torch.zeros(2), "x": Payload()}, "bad.pth", _use_new_zipfile_serialization=archive)
    code, text = compare("good.pth", "bad.pth")
    assert (code, text.count("\n")) == (2, 1)
    assert text.startswith("dadt: bad.pth: holds posix.mkdir, which is made by running code")
    assert not Path("was-run").exists()


def tar_with_magic(path: Path) -> None:
    """What torch.load read until 0.1.10, and ran until 2.6; it begins with what files of later ones begin with."""
    member = "\udc80\x02\udc8a\nl\udcfc\udc9cF\udcf9 j\udca8P\x19"
    payload = path.with_name("payload")
    payload.write_bytes(pickle.dumps(Payload()))
    with tarfile.open(path, "w:", format=tarfile.GNU_FORMAT) as archive:  # bytes of names as they are
        archive.add(payload, arcname=member)
        for name in ("storages", "tensors", "pickle"):
            archive.add(payload, arcname=name)


def test_a_tar_file_is_not_given_to_torch(compare: Compare) -> None:
    torch.save({"w": torch.zeros(2)}, "good.pth")
    tar_with_magic(compare.folder / "old.pth")
    assert b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19" in Path("old.pth").read_bytes()[:64]
    code, text = compare("good.pth", "old.pth")
    assert (code, text) == (2, "dadt: old.pth: is neither a file that torch.save wrote nor a safetensors file\n")
    assert not Path("was-run").exists()


def cut(path: str, part: float) -> None:
    data = Path(path).read_bytes()
    Path(path).write_bytes(data[: int(len(data) * part)])


def make_bad_files() -> None:
    state = Net().state_dict()
    torch.save(state, "cut.pth")
    torch.save(state, "cut-legacy.pth", _use_new_zipfile_serialization=False)
    save_file({"w": torch.zeros(1000)}, "cut.safetensors")
    for name in ("cut.pth", "cut-legacy.pth", "cut.safetensors"):
        cut(name, 0.6)
    torch.save(Net(), "whole.pth")
    torch.jit.trace(nn.Linear(2, 2), torch.zeros(1, 2)).save("traced.pt")  # type: ignore[no-untyped-call]
    Path("empty.pth").touch()
    Path("text.pth").write_text("not a checkpoint\n" * 100)
    with open("plain.pkl", "wb") as file:
        pickle.dump({"w": 1}, file)
    deep: list[Any] = []
    for _ in range(200):
        deep = [deep]
    torch.save(deep, "deep.pth")
    Path("folder").mkdir()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch.jit's
def test_bad_input_is_one_sentence(compare: Compare) -> None:
    make_bad_files()
    torch.save({"w": torch.zeros(2)}, "good.pth")
    expected = {
        "missing.pth": "missing.pth: cannot be read (No such file or directory)",
        "folder": "folder: cannot be read (Is a directory)",
        "cut.pth": "cut.pth: is damaged or cut short (",
        "cut-legacy.pth": "cut-legacy.pth: is damaged or cut short (",
        "cut.safetensors": "cut.safetensors: is damaged or cut short (",
        "whole.pth": f"whole.pth: holds {__name__}.Net, which is made by running code, and dadt compare runs none ->",
        "traced.pt": "traced.pt: is a TorchScript program; give a file of its state_dict",
        "empty.pth": "empty.pth: is empty",
        "text.pth": "text.pth: is neither a file that torch.save wrote nor a safetensors file",
        "plain.pkl": "plain.pkl: is neither a file that torch.save wrote nor a safetensors file",
        "deep.pth": "deep.pth: mappings and lists are nested deeper than 100 times, as in 0/0/0",
    }
    for name, sentence in expected.items():
        for pair in (("good.pth", name), (name, "good.pth")):
            code, text = compare(*pair)
            assert (code, text.count("\n")) == (2, 1), text
            assert text.startswith(f"dadt: {sentence}"), text
    assert compare("good.pth", "good.pth", "--tolerance", "nan") == (2, "dadt: --tolerance nan: give a number from 0\n")
    assert compare("good.pth", "good.pth", "--tolerance", "-1")[0] == 2


def test_safetensors_need_not_be_installed(compare: Compare, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.save({"w": torch.zeros(2)}, "a.pt")
    save_file({"w": torch.zeros(2)}, "a.safetensors")
    monkeypatch.setitem(sys.modules, "safetensors", None)  # as Python does where there is none
    assert compare("a.pt", "a.pt")[0] == 0
    sentence = "dadt: a.safetensors: reading it needs safetensors -> pip install safetensors\n"
    assert compare("a.pt", "a.safetensors") == (2, sentence)


def test_as_a_process_and_without_torch_until_it_is_needed(tmp_path: Path) -> None:
    dadt = str(Path(sys.executable).with_name("dadt"))
    torch.save({"w": torch.zeros(2)}, tmp_path / "a.pth")
    torch.save({"w": torch.ones(2)}, tmp_path / "b.pth")
    done = subprocess.run(
        [dadt, "compare", "a.pth", "b.pth"], cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE
    )
    assert (done.returncode, done.stderr) == (1, "")
    assert done.stdout.endswith("a.pth and b.pth differ\n")
    code = "import sys; import dadt_cli.compare.command; assert not {'torch', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=PATIENCE)


def repack(path: str) -> None:
    """The same archive, but compressed."""
    with zipfile.ZipFile(path) as stored:
        content = {name: stored.read(name) for name in stored.namelist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as packed:
        for name, data in content.items():
            packed.writestr(name, data)


class Zeros:
    """A pickle in which a few bytes ask for many."""

    def __reduce__(self) -> tuple[Any, ...]:
        return bytearray, (1 << 36,)


def make_hostile_files() -> None:
    """Each a few KB, of what would take any amount of time or memory."""
    shared: Any = [1, 2]
    keys: Any = 1
    for number in range(27):
        shared = [shared, shared]
        keys = {f"{number}" + "x" * 1000: keys, "other": keys}
    torch.save({"l": shared}, "lists.pth")
    torch.save(keys, "mappings.pth")
    inside: list[Any] = []
    inside.append(inside)
    torch.save(inside, "cycle.pth")
    torch.save({"w": torch.zeros(1 << 20)}, "zeros.pth")
    repack("zeros.pth")
    os.mkfifo("pipe.pth")
    rows = torch.zeros(1 << 17)
    torch.save({"w": rows.as_strided((1 << 16, 1 << 16), (1, 1))}, "rows.pth")
    torch.save({"w": Zeros()}, "bytes.pth")
    torch.save({"w": rows[: 1 << 16].expand(1 << 16, 1 << 16)}, "down.pth")
    torch.save({"w": rows[: 1 << 16].expand(1 << 16, 1 << 16).t()}, "across.pth")


def test_a_small_file_takes_little_time_and_memory(compare: Compare) -> None:
    make_hostile_files()
    torch.save({"w": torch.zeros(2)}, "good.pth")
    expected = {
        ("lists.pth", "good.pth"): "lists.pth: holds more than 1,000,000 values",
        ("mappings.pth", "good.pth"): "mappings.pth: holds more than 1,000,000 values",
        ("cycle.pth", "good.pth"): "cycle.pth: mappings and lists are nested deeper than 100 times",
        ("zeros.pth", "good.pth"): "zeros.pth: is a compressed archive",
        ("pipe.pth", "good.pth"): "pipe.pth: is no file, but a pipe",
        ("good.pth", "/dev/zero"): "/dev/zero: is no file, but a pipe, a socket or a device",
        ("rows.pth", "rows.pth"): "rows.pth and rows.pth: w: has 4,294,967,296 elements, of which 131,072 are stored",
        ("down.pth", "across.pth"): "down.pth and across.pth: w: has 4,294,967,296 elements",
        ("bytes.pth", "good.pth"): "bytes.pth",
    }
    limits = resource.getrlimit(resource.RLIMIT_DATA)
    for pair, sentence in expected.items():
        code, text = compare(*pair)
        assert (code, text.count("\n")) == (2, 1), text
        assert text.startswith(f"dadt: {sentence}"), text
    assert resource.getrlimit(resource.RLIMIT_DATA) == limits


def test_what_is_stored_once_is_compared_once(compare: Compare) -> None:
    one, other = (torch.full((1,), value).expand(1 << 36) for value in (1.0, 3.0))
    assert compare({"w": one}, {"w": one})[0] == 0
    (row,) = compare.rows({"w": one}, {"w": other})
    assert (row["difference"], row["count"], row["elements"]) == (2.0, 1 << 36, 1 << 36)
    row_by_row = torch.arange(6.0).expand(4, 6)
    assert compare({"w": row_by_row}, {"w": row_by_row.clone()})[0] == 0
    (row,) = compare.rows({"w": row_by_row}, {"w": row_by_row + torch.tensor([0.0, 0, 0, 0, 0, 2])})
    assert (row["difference"], row["count"]) == (2.0, 4)
