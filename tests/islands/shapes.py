"""Trains a small model in each of the shapes that are asked for, and tells its weights, norms and losses as JSON.

`shapes.py KIND SHAPE...`, where a shape is words with `+` between them, such as `keep+accumulate`. The kind says how
the model is divided: `fsdp2`, `fsdp1`, `flat` (FSDP1 with flat parameters), `ddp`; `mesh`: FSDP2 over a mesh of two
rows, which torch averages; `whole`: not at all, with the batch of an island, whose size follows the colon (`whole:2`).
"""

import contextlib
import json
import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

STEPS, WORDS, WIDTH = 24, 11, 8
torch.set_num_threads(1)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 17), nn.Linear(17, WIDTH)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self, shape):
        super().__init__()
        self.shape = shape
        self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.scale = nn.Parameter(torch.ones(1))  # some ranks have nothing of it
        if "tied" in shape:
            self.head.weight = self.words.weight

    def forward(self, x):
        x = self.words(x) * self.scale
        for block in [*self.blocks, self.blocks[0]] if "twice" in self.shape else self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if "checkpoint" in self.shape else block(x)
        return self.head(x)


def divided(model, kind, shape):
    """The model as the script trains it."""
    if kind == "ddp":
        return nn.parallel.DistributedDataParallel(model, find_unused_parameters="frozen" in shape)
    if kind in ("fsdp1", "flat"):
        from torch.distributed.fsdp import MixedPrecision, ShardingStrategy

        bf16 = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        more = {"use_orig_params": kind == "fsdp1", "device_id": torch.device("cpu")}
        more["mixed_precision"] = bf16 if "bf16" in shape else None
        more["sharding_strategy"] = ShardingStrategy.SHARD_GRAD_OP if "keep" in shape else ShardingStrategy.FULL_SHARD
        wrapped = lambda module, recurse, **_: recurse or isinstance(module, Block)  # noqa: E731
        return FullyShardedDataParallel(model, auto_wrap_policy=wrapped, **more)
    if kind in ("fsdp2", "mesh"):
        size = dist.get_world_size()
        sizes, names = ((2, size // 2), ("host", "part")) if kind == "mesh" else ((size,), ("part",))
        more = {"mesh": init_device_mesh("cpu", sizes, mesh_dim_names=names)}
        if "bf16" in shape:
            more["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        if "offload" in shape:
            more["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
        more["reshard_after_forward"] = "keep" not in shape
        for block in model.blocks:
            fully_shard(block, **more)
        fully_shard([model.words, model.head] if "tied" in shape else model.head, **more)
        fully_shard(model, **more)
    return model


def optimizers_of(model, blocks, shape):
    if "muon" not in shape:
        return [torch.optim.AdamW(model.parameters(), lr=0.01, fused="fused" in shape)]
    matrices = [p for p in blocks.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if not any(p is each for each in matrices)]
    return [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(others, lr=0.01)]


def batch(step, numbers):
    """Words of these ranks, and the words that follow."""
    drawn = [torch.Generator().manual_seed(1000 * step + number) for number in numbers]
    x = torch.cat([torch.randint(0, WORDS, (4, 3), generator=each) for each in drawn])
    return x, (3 * x + 1) % WORDS


def loss_of(model, x, y):
    return nn.functional.cross_entropy(model(x).flatten(0, 1).double(), y.flatten())


def whole(tensor):
    return getattr(tensor.detach(), "full_tensor", tensor.detach)().clone()


def freeze(model, frozen):
    """A whole block, and all but the biases of another one."""
    for name, parameter in [*model.blocks[1].named_parameters(), *model.blocks[0].named_parameters(prefix="0")]:
        if not (name.startswith("0") and name.endswith("bias")):
            parameter.requires_grad_(not frozen)


def without_sync(model, kind):
    """Context of all but the last of several backwards before a step."""
    if kind in ("fsdp1", "flat", "ddp"):
        return model.no_sync()

    @contextlib.contextmanager
    def unsynced():
        if hasattr(model, "set_requires_gradient_sync"):
            model.set_requires_gradient_sync(False)
        yield
        if hasattr(model, "set_requires_gradient_sync"):
            model.set_requires_gradient_sync(True)

    return unsynced()


def save_and_load(model, optimizer, last):
    """Look at the states, whole and in parts, between backward and step, and load them. last: weights since the last
    step."""
    expected = {name: value for (name, _), value in zip(model.named_parameters(), last, strict=True)}
    full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    parts = get_model_state_dict(model)
    assert all(torch.equal(full[name], value) for name, value in expected.items())
    assert all(torch.equal(whole(parts[name]), value) for name, value in expected.items())
    state = get_optimizer_state_dict(model, optimizer)
    set_model_state_dict(model, parts)
    set_optimizer_state_dict(model, optimizer, state)


def train(kind, shape, numbers):
    torch.manual_seed(0)
    model = Model(shape)
    if "bf16" not in shape and kind not in ("fsdp1", "flat"):  # whose own clip_grad_norm_ takes no 64 bits
        model = model.double()
    if "frozen" in shape:
        freeze(model, True)
    if "wrapper" in shape:
        apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, Block))
    if "compile" in shape:
        for block in model.blocks:
            block.compile(backend="aot_eager")
    early = torch.optim.AdamW(model.parameters(), lr=0.01) if "switched" in shape else None
    inside, model = model, divided(model, kind, shape)
    optimizers = optimizers_of(model, inside.blocks, shape)
    if early is not None:  # as Accelerate does
        early.param_groups[0]["params"] = list(model.parameters())
        optimizers = [early]
    norms, losses, looks, last = [], [], [], []
    for step in range(STEPS):
        if "frozen" in shape and step == 16:
            freeze(inside, False)
        for optimizer in optimizers:
            optimizer.zero_grad()
        times = 2 if "accumulate" in shape else 1
        for time in range(times):
            x, y = batch(times * step + time, numbers)
            with without_sync(model, kind) if time < times - 1 else contextlib.nullcontext():
                loss = loss_of(model, x, y)
                if "look" in shape:
                    with torch.no_grad():
                        looks.append(float(loss_of(model, *batch(0, range(4)))))
                (loss / times).backward()
            losses.append(float(loss.detach()))
        if "state" in shape and step in (2, 12):
            save_and_load(model, optimizers[0], last)
        clip = getattr(model, "clip_grad_norm_", lambda most: nn.utils.clip_grad_norm_(model.parameters(), most))
        norms.append(float(whole(clip(0.5))))
        for optimizer in optimizers:
            optimizer.step()
        if "state" in shape:
            last = [whole(p) for p in model.parameters()]
        if "eval" in shape:
            model.eval()
            with torch.no_grad():
                looks.append(float(loss_of(model, *batch(0, range(4)))))
            model.train()
    context = contextlib.nullcontext()
    if kind in ("fsdp1", "flat"):
        context = FullyShardedDataParallel.summon_full_params(model)
    with context:
        weights = torch.cat([whole(p).flatten().double() for p in model.parameters()]).tolist()
    if kind != "mesh" or dist.get_rank() == 0:  # long lines of several processes would mix
        print(json.dumps({"weights": weights, "norms": norms, "losses": losses, "looks": looks}), flush=True)


if __name__ == "__main__":
    kind, _, size = sys.argv[1].partition(":")
    number, size = int(os.environ.get("DADT_RANK") or os.environ["RANK"]), int(size or 1)
    if kind != "whole":
        dist.init_process_group("gloo")
    for shape in sys.argv[2:]:
        train(kind, set(shape.split("+")), range(number * size, (number + 1) * size))
    if kind != "whole":
        dist.destroy_process_group()
