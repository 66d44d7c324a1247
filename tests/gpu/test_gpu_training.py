"""Unmodified scripts that train on a GPU, under `dadt run`."""

from __future__ import annotations

import json

import pytest

pytestmark = pytest.mark.gpu

ONE_GPU = ["--gpu-visibility", "all"]
"""Both workers on the same one."""
TRAIN = """
import os, torch
from torch import nn
rank = int(os.environ["RANK"])
torch.manual_seed(rank)
model = nn.Sequential(nn.Conv2d(2, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 4)).cuda()
model = model.to(memory_format=torch.channels_last)
target = nn.Linear(2 * 64, 4).cuda()
with torch.no_grad():
    torch.manual_seed(7)
    target.weight.copy_(torch.randn(4, 128) / 11); target.bias.zero_()
optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
scaler = torch.amp.GradScaler("cuda", enabled={amp}, init_scale=256.0)
torch.manual_seed(100 + rank)
losses = []
for step in range(40):
    x = torch.randn(64, 2, 8, 8, device="cuda")
    optimizer.zero_grad()
    with torch.autocast("cuda", torch.float16, enabled={amp}):
        loss = (model(x).float() - target(x.flatten(1)).float()).pow(2).mean()
    if {amp} and step == 10 and rank == 1:
        loss = loss * float("inf")  # all skip this step
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 5.0)
    scaler.step(optimizer)
    scaler.update()
    losses.append(loss.detach())
if {amp}:
    assert scaler.get_scale() == 128, scaler.get_scale()
model.eval()
losses = torch.stack(losses).tolist()
first, last = sum(losses[:5]) / 5, sum(losses[-5:]) / 5
assert last < 0.7 * first, (first, last)
own = [t.cpu() for t in model.state_dict().values()]
torch.save(own, f"rank{{rank}}.pt")
"""


def check_equal(folder, ranks):
    import torch

    every = [torch.load(folder / f"rank{rank}.pt") for rank in range(ranks)]
    for mine in every[1:]:
        for a, b in zip(every[0], mine, strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("amp", [False, True], ids=["float32", "GradScaler"])
@pytest.mark.parametrize("algorithm", ["sync", "pipe"])
@pytest.mark.parametrize("executor", ["shm", "gloo"])
def test_two_workers_on_one_gpu(launch, tmp_path, executor, algorithm, amp):
    result = launch(
        TRAIN.format(amp=amp), "-np", "2", *ONE_GPU, "--executor", executor, "--algorithm", algorithm,
        "--warmup-steps", "5", "--bucket-mb", "0.002", "train.py",
    )  # fmt: skip
    assert result.code == 0, result.err
    check_equal(tmp_path, 2)


@pytest.mark.parametrize("amp", [False, True], ids=["float32", "GradScaler"])
@pytest.mark.parametrize("algorithm", ["sync", "pipe"])
@pytest.mark.parametrize(
    "optimizer",
    [
        "Adam({}, 4e-3, capturable=True)",
        "AdamW({}, 4e-3, fused=True, weight_decay=0.0)",
        "Adamax({}, 4e-3)",
        "SGD({}, 0.02, 0.9)",
    ],
)
def test_momentum_in_one_bit(launch, tmp_path, optimizer, algorithm, amp):
    """A mask of the last layer's weights is never trained, and stays as it is."""
    masked = """
mask = torch.ones_like(model[4].weight)
mask[:, 7:11] = 0
model[4].weight.register_hook(lambda gradient: gradient * mask)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 200)
losses = []
"""
    ended = """scaler.update()
    schedule.step()
    before = before if step else model[4].weight.detach().clone()
"""
    text = TRAIN.format(amp=amp).replace("range(40)", "range(120)")
    text = text.replace("SGD(model.parameters(), lr=0.02, momentum=0.9)", optimizer.format("model.parameters()"))
    text = text.replace("losses = []\n", masked, 1).replace("scaler.update()\n", ended)
    text += "assert ((model[4].weight - before)[mask == 0] == 0).all()\n"
    result = launch(
        text, "-np", "2", *ONE_GPU, "--executor", "shm", "--algorithm", algorithm, "--compression", "momentum:1",
        "--warmup-steps", "5", "train.py",
    )  # fmt: skip
    assert result.code == 0, result.err
    assert "from now on momentum is sent" in result.err
    check_equal(tmp_path, 2)


@pytest.mark.parametrize("executor", ["shm", "gloo"])
def test_four_workers_on_one_gpu(launch, tmp_path, executor):
    result = launch(
        TRAIN.format(amp=False), "-np", "4", *ONE_GPU, "--executor", executor, "--warmup-steps", "5",
        "--bucket-mb", "0.002", "train.py",
    )  # fmt: skip
    assert result.code == 0, result.err
    check_equal(tmp_path, 4)


OUT_OF_MEMORY = """
import os, torch
model = torch.nn.Linear(1024, 1024).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(8):
    if step == 6 and os.environ["RANK"] == "1":
        held = [torch.empty(1 << 32, device="cuda") for _ in range(64)]
    optimizer.zero_grad()
    model(torch.randn(8, 1024, device="cuda")).sum().backward()
    optimizer.step()
"""


def test_a_gpu_out_of_memory(launch):
    """The block says how much was asked for, and how much the GPU has."""
    result = launch(OUT_OF_MEMORY, "-np", "2", *ONE_GPU, "--executor", "shm", "train.py")
    assert result.code == 1
    assert "dadt: worker 1 failed" in result.err
    block = result.err[result.err.rindex("dadt: worker 1 failed") :]
    assert "OutOfMemoryError: CUDA out of memory. Tried to allocate 16.00 GiB. GPU 0 has a total capacity of" in block
    assert "the memory of GPU 0 ran out, not the host's" in block
    assert "held = [torch.empty" in block


@pytest.mark.parametrize("algorithm", ["sync", "pipe"])
def test_a_worker_alone(launch, tmp_path, algorithm):
    result = launch(TRAIN.format(amp=False), "-np", "1", "--executor", "nccl", "--algorithm", algorithm, "train.py")
    assert result.code == 0, result.err
    check_equal(tmp_path, 1)


@pytest.mark.gpu(devices=2)
@pytest.mark.parametrize("amp", [False, True], ids=["float32", "GradScaler"])
@pytest.mark.parametrize("algorithm", ["sync", "pipe"])
def test_two_workers_over_nccl(launch, tmp_path, algorithm, amp):
    result = launch(
        TRAIN.format(amp=amp), "-np", "2", "--executor", "nccl", "--algorithm", algorithm,
        "--warmup-steps", "5", "--bucket-mb", "0.002", "train.py",
    )  # fmt: skip
    assert result.code == 0, result.err
    assert "destroy_process_group" not in result.err  # NCCL's own warning of what has not been ended
    check_equal(tmp_path, 2)


@pytest.mark.parametrize("algorithm", ["sync", "pipe"])
@pytest.mark.parametrize(
    ("ranks", "place"),
    [
        pytest.param(ranks, place, marks=pytest.mark.gpu(devices=ranks))
        for ranks in (2, 3)
        for place in ("x = torch.randn(64", "scaler.step(optimizer)")
    ],
)
def test_a_rank_over_nccl_is_lost(launch, tmp_path, algorithm, ranks, place):
    """Its kernels wait for a peer that is gone, and have to be aborted; what they leave must reach no weight."""
    script = TRAIN.format(amp=False)
    assert place in script
    script = script.replace(place, f"if step == 20 and rank == {ranks - 1}: os.kill(os.getpid(), 9)\n    {place}")
    result = launch(
        script, "-np", str(ranks), "--min-np", "1", "--executor", "nccl", "--algorithm", algorithm,
        "--warmup-steps", "5", "--bucket-mb", "0.002", "train.py",
    )  # fmt: skip
    assert result.code == 0, result.err
    assert f"{ranks - 1} of {ranks} workers train on from step" in result.err
    check_equal(tmp_path, ranks - 1)


def test_a_timeline_of_tensors_of_a_gpu(launch, tmp_path):
    result = launch(
        TRAIN.format(amp=False), "-np", "2", *ONE_GPU, "--executor", "shm", "--warmup-steps", "4",
        "--timeline", "t.json", "train.py",
    )  # fmt: skip
    assert result.code == 0, result.err
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    for rank in (0, 1):
        mine = [event for event in events if event["pid"] == rank]
        assert [event["args"]["step"] for event in mine if event.get("cat") == "step"] == list(range(40))
        assert any(event["name"] == "step 39, bucket 0" for event in mine if event.get("cat") == "allreduce")


SYNCHRONIZED = TRAIN.replace("nn.BatchNorm2d(8)", "nn.SyncBatchNorm(8)").replace(
    "losses = []",
    """
import torch.distributed as dist
dist.init_process_group("gloo")
model(torch.randn(64, 2, 8, 8, device="cuda"))
both = [torch.zeros(8), torch.zeros(8)]
dist.all_gather(both, model[1].running_mean.cpu())
assert torch.allclose(*both) and both[0].any(), both
losses = []
""",
)


@pytest.mark.parametrize("algorithm", ["sync", "pipe", "local"])
def test_synchronized_norm_over_the_scripts_group(launch, tmp_path, algorithm):
    """Ranks with data of their own have the same statistics after one forward."""
    result = launch(
        SYNCHRONIZED.format(amp=False), "-np", "2", *ONE_GPU, "--executor", "gloo", "--algorithm", algorithm,
        "--warmup-steps", "5", "train.py",
    )  # fmt: skip
    assert result.code == 0, result.err
    if algorithm != "local":
        check_equal(tmp_path, 2)


GRAPHS = """
import os, torch
rank = int(os.environ["RANK"])
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1)).cuda()
compiled = torch.compile(model, mode="reduce-overhead")
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
torch.manual_seed(rank)
def step():
    optimizer.zero_grad()
    compiled(torch.randn(32, 64, device="cuda")).pow(2).mean().backward()
    optimizer.step()
for _ in range(20):
    step()
torch.save([t.cpu() for t in model.state_dict().values()], f"rank{{rank}}.pt")
if {capture}:
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        step()
"""


def test_compiled_steps_make_no_cuda_graphs(launch, tmp_path):
    result = launch(GRAPHS.format(capture=False), "-np", "2", *ONE_GPU, "--executor", "shm", "train.py")
    assert result.code == 0, result.err
    assert "torch.compile runs without CUDA graphs" in result.err
    check_equal(tmp_path, 2)


def test_a_captured_step_is_refused(launch):
    result = launch(GRAPHS.format(capture=True), "-np", "2", *ONE_GPU, "--executor", "shm", "train.py")
    assert result.code == 2, result.err
    assert "the script captures a training step in a CUDA graph" in result.err
