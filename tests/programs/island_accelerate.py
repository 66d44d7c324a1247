"""A loop of one's own with Accelerate and FSDP2, which saves its state and loads it again."""

import sys

import sharded_on_cpus  # noqa: F401
import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.utils import merge_fsdp_weights
from safetensors.torch import load_file
from shared import BATCH, Points, tell


def network():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))


model, data = network(), Points()
if sys.argv[1:2] == ["load"]:  # in one process: of what the training has left
    merge_fsdp_weights(sys.argv[2], "whole")
    model.load_state_dict(load_file("whole/model.safetensors"))
    tell(model, 0.0, data.loss(model))
else:
    before = data.loss(model)
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="size_based_wrap",
        min_num_params=20,
        state_dict_type="SHARDED_STATE_DICT",
    )
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = torch.utils.data.DataLoader(data, BATCH, shuffle=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 8 * len(loader))
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    assert type(next(model.parameters())).__name__ == "DTensor" and accelerator.num_processes == 2
    for epoch in range(8):
        for points, classes in loader:
            optimizer.zero_grad()
            accelerator.backward(torch.nn.functional.cross_entropy(model(points), classes))
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
        accelerator.save_state(f"checkpoints/{epoch}")
    trained = [parameter.full_tensor() for parameter in model.parameters()]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    accelerator.load_state("checkpoints/7")
    whole = network()
    for mine, parameter, expected in zip(whole.parameters(), model.parameters(), trained, strict=True):
        mine.data.copy_(parameter.full_tensor())
        assert torch.equal(mine, expected)
    tell(whole, before, data.loss(whole), data)
