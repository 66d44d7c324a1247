"""Frozen weights are kept once beside the snapshots, and come from there where the script has built others."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from harness.patience import PATIENCE
from harness.replayed import HEAD
from test_regrow import OPTIONS as REGROW
from test_regrow import REGROWS
from test_regrow import ends as all_end
from test_replay import OPTIONS, WITHOUT, ends

from dadt.control import snapshots
from dadt.errors import DadtError, NotResumed
from dadt.inject.replay import base
from dadt.inject.replay.base import Base
from dadt.train.digest import digests

MODEL = """
class Adapted(nn.Module):
    def __init__(self):
        super().__init__()
        self.base = nn.Linear(8, 40_000, bias=False).requires_grad_(False)
        self.thawed = nn.Linear(8, 40_000, bias=False).requires_grad_(False)
        self.teacher = nn.Linear(8, 40_000, bias=False).requires_grad_(False)
        self.register_buffer("scales", torch.rand(300_000))
        self.packed = nn.Parameter(torch.randint(0, 99, (1_200_000,), dtype=torch.uint8), requires_grad=False)
        self.packed.absmax = torch.rand(4)  # in no state_dict
        self.lora_A = nn.Parameter(torch.randn(2, 8) / 3)
        self.lora_B = nn.Parameter(torch.zeros(4, 2))
    def forward(self, x):
        wide = self.base(x) + self.thawed(x) + self.teacher(x)
        packed = self.packed[:4] / 99 * self.packed.absmax
        return wide.view(len(x), 4, -1).mean(2) * self.scales[:4] + packed + x @ self.lora_A.T @ self.lora_B.T
    def follow(self):  # a moving average, in a way of which no version of the tensor tells
        self.teacher.weight.data.mul_(0.9).add_(self.base.weight.data, alpha=0.1)
model, reference = Adapted(), nn.Linear(8, 40_000, bias=False).requires_grad_(False)
if "OTHER" in os.environ:
    with torch.no_grad():
        for each in (model.base.weight, reference.weight, model.scales, model.packed, model.packed.absmax):
            each.add_(1)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
"""
STEP = """
        optimizer.zero_grad()
        with torch.no_grad():
            target = reference(x).view(len(x), 4, -1).mean(2)
        (F.cross_entropy(model(x), y) + F.mse_loss(model(x), target)).backward()
        optimizer.step()
        model.follow()
"""
SCRIPT = (
    HEAD
    + MODEL
    + """
for epoch in range(4):
    for i, (x, y) in enumerate(DataLoader(data, batch_size=8, shuffle=True)):
        if epoch == 2 and i == 4:
            model.thawed.requires_grad_(True)
"""
    + STEP
    + """
        stepped()
tell(model, reference)
"""
)
KEPT = {"base", "thawed", "teacher", "scales", "reference", "packed"}
"""What is there before the first snapshot and may be kept apart, each of more than 1 MiB."""


@pytest.mark.parametrize(
    ("algorithm", "other", "at"),
    [
        ("pipe", {"OTHER": "1"}, "16"),
        pytest.param("pipe", {}, "16", marks=pytest.mark.slow),
        pytest.param("pipe", {}, "36", marks=pytest.mark.slow),
        pytest.param("pipe", {"OTHER": "1"}, "36", marks=pytest.mark.slow),
        pytest.param("sync", {"OTHER": "1"}, "36", marks=pytest.mark.slow),
    ],
)
def test_a_job_goes_on_with_the_frozen_weights_that_it_had(launch, tmp_path, algorithm, other, at) -> None:
    """Frozen ones that stay, one that is thawed in the midst, one that the script changes in each step, a large buffer,
    and a model that no optimizer trains."""
    options = ["--algorithm", algorithm]
    expected = ends(launch(SCRIPT, *options, *WITHOUT, "train.py"))
    killed = launch(SCRIPT, *options, *OPTIONS, "train.py", DIE=at)
    assert killed.code != 0
    root = tmp_path / "dadt-logs" / killed.job / "snapshots"
    files = {path.stem for path in (root / "base").iterdir()}
    newest = snapshots.newest(root)
    held = torch.load(newest / "rank0.pt", weights_only=True)
    assert {f"{digest:016x}" for digest in held["base"].values()} <= files and len(files) <= len(KEPT)
    size = sum(t.numel() for t in held["tensors"].values())
    assert size < (2 if at == "16" else 3) * 320_000, "the moving average, and what trains"
    assert not any(name in held["buffers"] for name in held["base"])
    resumed = launch(SCRIPT, *options, *OPTIONS[:-2], "--resume", killed.job, "train.py", **other)
    assert ends(resumed) == expected
    assert ("other frozen weights than before: 4.96 MB come from" in resumed.err) == bool(other), resumed.err


def test_without_these_files_only_the_same_weights_will_do(launch, tmp_path) -> None:
    killed = launch(SCRIPT, *OPTIONS, "train.py", DIE="16")
    root = tmp_path / "dadt-logs" / killed.job / "snapshots"
    for path in (root / "base").iterdir():
        path.unlink()
    refused = launch(SCRIPT, *OPTIONS, "--resume", killed.job, "train.py", OTHER="1")
    assert refused.code == 2 and "Traceback" not in refused.err
    assert "is missing, and the script has built other frozen weights than those of the snapshot" in refused.err


@pytest.mark.slow
def test_each_rank_has_weights_of_its_own_beside_them(launch, tmp_path) -> None:
    options = ["--algorithm", "local", "--sync-every", "5", "--overlap-steps", "0"]
    expected = ends(launch(SCRIPT, *options, *WITHOUT, "train.py"))
    killed = launch(SCRIPT, *options, *OPTIONS, "train.py", DIE="16")
    root = tmp_path / "dadt-logs" / killed.job / "snapshots"
    own = torch.load(snapshots.newest(root) / "rank1.pt", weights_only=True)
    assert sum(t.numel() for t in own["weights"].values()) < 3 * 320_000
    resumed = launch(SCRIPT, *options, *OPTIONS[:-2], "--resume", killed.job, "train.py", OTHER="1")
    assert ends(resumed) == expected


JOINS = (
    HEAD
    + REGROWS
    + MODEL
    + """
shadow = copy.deepcopy(model.base)
if joins:
    with torch.no_grad():
        reference.weight.sub_(3.0)
n = 0
while goes_on(n):
    for x, y in DataLoader(data, batch_size=8, shuffle=True):
"""
    + STEP.replace("model.follow()", "shadow.weight.data.mul_(0.999).add_(0.125)")
    + """
        n += 1
        dies(n)
        if not goes_on(n):
            break
tell(model, reference, shadow)
"""
)


@pytest.mark.parametrize("algorithm", ["pipe", pytest.param("sync", marks=pytest.mark.slow)])
@pytest.mark.timeout(400)
def test_a_new_worker_is_sent_what_it_lacks(start, algorithm) -> None:
    """Here models that no optimizer trains: one that stays as it is, and a moving one."""
    options = ["-np", "2", "--algorithm", algorithm, *REGROW, "--snapshot-every", "10steps"]
    result = start(JOINS, *options, "train.py", VICTIMS="1").finish(3 * PATIENCE)
    all_end(result, 2)
    assert result.err.count("a new worker starts in place of rank") == 1 and "Traceback" not in result.err


def tensors(**more: torch.Tensor) -> dict[str, torch.Tensor]:
    small, trained = torch.zeros(4), torch.nn.Parameter(torch.ones(300_000))
    return {"small": small, "trained": trained, "frozen": torch.ones(300_000), "equal": torch.zeros(300_000), **more}


def test_what_changes_is_in_the_snapshot_itself() -> None:
    every = tensors()
    known = {every["equal"]: digests([every["equal"]])[0]}
    chosen = Base(known)
    assert set(chosen.common(every)) == {"frozen", "equal"} and chosen.shared(every) == {"equal"}
    every["frozen"].data.view(-1)[7] = 3.0
    assert set(chosen.common(every)) == {"equal"}
    assert set(chosen.common(every)) == {"frozen", "equal"}, "as it was in the snapshot before"
    every["equal"].data.view(-1)[7] = 3.0
    assert set(Base(known).common(every)) == {"frozen"}, "changed since the start"
    assert chosen.shared(every) == set()


def test_a_tensor_is_kept_once_and_comes_back(tmp_path: Path) -> None:
    kinds = [torch.rand(600, 600), torch.rand(600, 600).t(), torch.randint(0, 99, (1_100_000,), dtype=torch.uint8)]
    kinds.append(torch.rand(1_000_000)[100:400_000].to(torch.bfloat16))
    mine = dict(zip(digests(kinds), kinds, strict=True))
    base.keep(tmp_path, 0, mine)
    assert sum(path.stat().st_size for path in (tmp_path / "base").iterdir()) < 5.5e6
    built = {str(number): torch.zeros_like(each) for number, each in enumerate(kinds)}
    built["0"] = kinds[0]
    found, size = base.complete(tmp_path, {str(n): digest for n, digest in enumerate(mine)}, built)
    assert found["0"] is kinds[0] and size == sum(t.numel() * t.element_size() for t in kinds[1:])
    assert all(torch.equal(found[str(n)], each) and found[str(n)].dtype == each.dtype for n, each in enumerate(kinds))


def test_a_tensor_that_changes_meanwhile_is_not_kept(tmp_path: Path) -> None:
    tensor = torch.rand(600, 600)
    with pytest.raises(DadtError, match="changed frozen weights while they were written"):
        base.keep(tmp_path, 0, {digests([tensor])[0] ^ 1: tensor})
    assert list((tmp_path / "base").iterdir()) == []


@pytest.mark.parametrize("how", ["flipped", "torn", "another"])
def test_a_damaged_file_is_refused(tmp_path: Path, how: str) -> None:
    tensor = torch.rand(600, 600)
    (digest,) = digests([tensor])
    base.keep(tmp_path, 0, {digest: tensor})
    path = base.path_of(tmp_path, digest)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    if how == "another":
        torch.save([1], path)
    else:
        path.write_bytes(data if how == "flipped" else data[:-5000])
    with pytest.raises(NotResumed, match=r"damaged|cannot be read"):
        base.complete(tmp_path, {"0.weight": digest}, {})


def test_files_that_no_snapshot_needs_are_removed_after_an_hour(tmp_path: Path) -> None:
    kept = [torch.rand(600, 600), torch.rand(600, 600)]
    needed, unused = digests(kept)
    base.keep(tmp_path, 0, {needed: kept[0], unused: kept[1]})
    folder = snapshots.folder_of(tmp_path, 10)
    folder.mkdir()
    torch.save({}, folder / "half")
    told = {"step": 10, "seed": 1, "began": 1.0, "members": [0], "shares": 1, "world": 1, "common": True}
    told |= {"script": "x", "arguments": [], "next": "y", "base": [needed]}
    snapshots.complete(folder, 0, folder / "half", snapshots.digest(folder / "half"), told)
    now = base.path_of(tmp_path, unused).stat().st_mtime
    base.drop_unused(tmp_path, now + 3000)
    assert base.path_of(tmp_path, unused).exists()
    os.utime(base.path_of(tmp_path, needed), (now - 9e4, now - 9e4))
    base.drop_unused(tmp_path, now + 4000)
    assert base.path_of(tmp_path, needed).exists() and not base.path_of(tmp_path, unused).exists()
