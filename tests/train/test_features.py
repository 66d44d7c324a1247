"""The table of features in docs/algorithms.md: what scripts do around a step, under each algorithm."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness import ROOT
from harness.features import FEATURES, STEPS

DOCS = ROOT / "docs" / "algorithms.md"
SCRIPT = """
    import collections
    from harness import features
    from dadt.train.attachment import Attachment
    from dadt.inject import worker
    made = collections.Counter()
    new_exchange = Attachment.new_exchange
    def counted(self, **again):
        made[id(self.optimizer)] += 1
        return new_exchange(self, **again)
    Attachment.new_exchange = counted
    found = features.train_all(rank)
    exchanges = made[id(found["accumulation"].kept[0])]
    own = {name: t.seen for name, t in found.items()}
    worker.runtime.close()                       # as at the end of the process
    end = {name: t.model.state_dict() for name, t in found.items()}
    report({"own": own, "end": end, "exchanges": exchanges})
"""
OPTIONS = {
    "sync": ["--bucket-mb", "0.0002"],
    "pipe": ["--warmup-steps", "4"],
    "local": ["--warmup-steps", "4", "--sync-every", "4", "--overlap-steps", "2"],
    "gossip": [],
}
IDENTICAL = {"sync", "pipe"}
IN_STEP = {"rate of the plateau", "update_bn"}
"""Is the same wherever all ranks take the same steps."""


def equal(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(equal(x, y) for x, y in zip(a, b))
    return bool(a == b)


@pytest.mark.parametrize(
    "algorithm", ["pipe", *(pytest.param(name, marks=pytest.mark.slow) for name in ("sync", "local", "gossip"))]
)
def test_every_feature_works(dadt_run, algorithm) -> None:
    run = dadt_run(SCRIPT, "--algorithm", algorithm, *OPTIONS[algorithm])
    assert "Dynamo" not in run.output and "recompile_limit" not in run.output
    one, other = run.ranks
    assert len(one["own"]) == sum(map(len, FEATURES.values()))
    for name, seen in one["own"].items():
        for what, value in seen.items():
            same = algorithm in IDENTICAL or (algorithm == "local" and what in IN_STEP)
            assert equal(value, other["own"][name][what]) == same, f"{name}: {what}"
        assert equal(one["end"][name], other["end"][name]), f"{name}, at the end"
        assert all(value.isfinite().all() for value in one["end"][name].values()), name
    scales = [rank["own"]["half_with_scaler"]["loss scale"] for rank in run.ranks]
    assert scales == ([512.0, 512.0] if algorithm in IDENTICAL else [1024.0, 512.0])
    rates = [rank["own"]["plateau"]["rate of the plateau"] for rank in run.ranks]
    assert rates == ([0.05, 0.025] if algorithm == "gossip" else [0.05, 0.05])
    assert ("rank 0's are used on all" in run.output) == (algorithm != "gossip")
    if algorithm in IDENTICAL:
        assert one["exchanges"] == other["exchanges"] == STEPS  # of four backwards each
        assert equal(*one["own"]["loading"]["reached twice"])


def test_the_table_has_a_row_for_each_feature() -> None:
    table = DOCS.read_text().split("\n## What scripts do", 1)[1].split("\n## ", 1)[0]
    rows = [line.split("|")[1].strip() for line in table.splitlines() if line.startswith("|")]
    assert set(rows[2:]) - {"`SyncBatchNorm`, the script's process group"} == set(FEATURES)  # its test is below


SYNCHRONIZED = """
    import torch.distributed as dist
    from harness.features import normed, plain, points, sgd
    dist.init_process_group("gloo")
    model = nn.SyncBatchNorm.convert_sync_batchnorm(normed())
    plain(model, sgd(model))(0, *points(rank, 0))
"""


@pytest.mark.slow
def test_gossip_refuses_synchronized_norm(dadt_run) -> None:
    """It waits for all ranks in every forward."""
    refused = dadt_run(SYNCHRONIZED, "--algorithm", "gossip", code=None)
    assert refused.code == 2, refused.output
    assert "--algorithm gossip: SyncBatchNorm waits for all ranks in every forward" in refused.output


@pytest.mark.slow
@pytest.mark.parametrize(
    "algorithm", ["pipe", *(pytest.param(name, marks=pytest.mark.slow) for name in ("sync", "local"))]
)
def test_synchronized_norm_over_a_process_group_is_torchs(dadt_run, algorithm) -> None:
    """Which has it for GPUs only: tests/gpu."""
    torchs = dadt_run(SYNCHRONIZED, "--algorithm", algorithm, code=None)
    assert torchs.code == 1 and "ValueError: SyncBatchNorm expected input tensor to be on GPU" in torchs.output
