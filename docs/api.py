"""Writes docs/api.md from the docstrings of what `import dadt` offers."""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import dadt
import dadt.api.collectives
import dadt.pytorch

PAGE = Path(__file__).with_suffix(".md")
SECTIONS = {
    "Start and end": "init initialized shutdown",
    "Who is who": "rank size local_rank local_size cross_rank cross_size",
    "Training": "DistributedOptimizer DistributedSampler broadcast_parameters broadcast_optimizer_state",
    "Allreduce": (
        "all_reduce all_reduce_async all_reduce_ all_reduce_async_ grouped_all_reduce grouped_all_reduce_async"
        " grouped_all_reduce_ coo_all_reduce coo_all_reduce_async join"
    ),
    "From one, to one": (
        "broadcast broadcast_async broadcast_ broadcast_async_ reduce reduce_async gather gather_async scatter"
        " scatter_async"
    ),
    "Among all": "all_gather all_gather_async all_to_all all_to_all_async reduce_scatter reduce_scatter_async"
    " barrier local_barrier",
    "Objects": "broadcast_object allgather_object",
    "Between two": "send isend recv irecv",
    "Handles": "Handle synchronize poll",
    "Process sets": "add_process_set remove_process_set ProcessSet",
    "Errors": (
        "DadtError ConfigError NotResumed Sharded LaunchError StartTimeout Unproved CommError CommTimeout PeerLost"
        " Mismatch WeightsDiffer Aborted"
    ),
}
HEAD = """\
# Python API

*For scripts that control the exchange themselves: every name that `import dadt` offers. Reading time: 12 minutes.*

<!-- Written by docs/api.py from the docstrings: `make format` brings it up to date. -->

An unmodified script needs none of this. A script that controls the exchange itself looks like this:

<!-- file: train.py -->
```python
import torch
import dadt

dadt.init()
model = torch.nn.Linear(10, 1)
optimizer = dadt.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
data = torch.utils.data.TensorDataset(torch.randn(64, 10), torch.randn(64, 1))
loader = torch.utils.data.DataLoader(data, batch_size=8, sampler=dadt.DistributedSampler(data))
for features, labels in loader:
    optimizer.zero_grad()
    loss = torch.nn.functional.mse_loss(model(features), labels)
    loss.backward()
    optimizer.step()
mean = dadt.all_reduce(loss.detach(), name="loss")
print(f"rank {dadt.rank()} of {dadt.size()} is done")
```

<!-- runnable -->
```console
$ python train.py
rank 0 of 1 is done
$ dadt run -np 2 train.py
[1] rank 1 of 2 is done
```

It runs under `dadt run -np 4 train.py`, under torchrun, mpirun and srun, and alone under plain `python`. After
`dadt.init()`, DADT handles only the optimizers given to `DistributedOptimizer`; data, saving and other optimizers are
up to the script. Under `dadt run` the random generators of all ranks start alike and diverge at the first step, unless
the script seeds them (see `init`). `examples/mnist_api.py` is a whole script.

"""


FROM_HOROVOD = """\
## From Horovod

Replace `import horovod.torch as hvd` by `import dadt`, and these calls as the table shows. By default averages come one
step late; `dadt.init(algorithm="sync")` computes what Horovod does.

| Horovod | DADT |
|---|---|
| `init()`, `shutdown()`, `rank()`, `size()`, `local_rank()`, `cross_rank()`, `join()`, `barrier()`, `poll(handle)` | the same |
| `is_initialized()` | `initialized()` |
| `broadcast(tensor, root_rank=0)`, and `broadcast_`, `broadcast_async`, `broadcast_object` | the same |
| `broadcast_parameters(model.state_dict(), root_rank=0)`, `broadcast_optimizer_state(optimizer, root_rank=0)` | the same; not needed before training: `DistributedOptimizer` does it |
| `DistributedOptimizer(optimizer, named_parameters=model.named_parameters())` | the same |
| its `op=hvd.Sum` | `reduction="sum"` |
| its `backward_passes_per_step=` | omit it: gradients are averaged where they are used, after any number of backward passes |
| its `compression=`, `op=hvd.Adasum`, `gradient_predivide_factor=` | not available |
| `allreduce(tensor)`, and `allreduce_`, `allreduce_async`, `grouped_allreduce` | `all_reduce(tensor)`, `all_reduce_`, `all_reduce_async`, `grouped_all_reduce`; the mean is the default here, too |
| `op=hvd.Sum`, `hvd.Min`, `hvd.Max`, `hvd.Product`; `average=False` | `reduction="sum"`, `"min"`, `"max"`, `"product"`; `"sum"` |
| `prescale_factor=`, `postscale_factor=` | multiply the tensor, or the result |
| `sparse_allreduce_async(tensor, name, op)` | `coo_all_reduce_async(tensor, reduction, name=name)` |
| `allgather(tensor)` | `torch.cat(all_gather(tensor))` |
| `alltoall(tensor, splits)` | `all_to_all(tensor.split(splits.tolist()))`, a list by rank |
| `reducescatter(tensor)` | `reduce_scatter(tensor.tensor_split(dadt.size()))` |
| `allgather_object(value)`, `synchronize(handle)` | the same |
| `add_process_set(hvd.ProcessSet([0, 1]))` | `add_process_set([0, 1])` |
| `horovodrun -np 4 -H host1:2,host2:2 python train.py` | `dadt run -np 4 -H host1:2,host2:2 train.py` |"""  # noqa: E501


def page() -> str:
    parts = [HEAD + _text(dadt.api.collectives.__doc__)]
    for title, names in SECTIONS.items():
        entries = "\n\n".join("\n\n".join(entry(name, getattr(dadt, name))) for name in names.split())
        parts.append(f"## {title}\n\n{entries}")
    parts.append(FROM_HOROVOD)
    old = "\n\n".join("\n\n".join(entry(n, getattr(dadt.pytorch, n))) for n in OLD)
    parts.append(f"## The spelling of the first DADT\n\n{_text(dadt.pytorch.__doc__)}\n\n{old}")
    return "\n\n".join(parts) + "\n"


OLD = (
    "init",
    "initialize",
    "Config",
    "shutdown",
    "broad_cast",
    "all_reduce",
    "all_reduce_async",
    "coo_all_reduce",
    "coo_all_reduce_async",
    "DistributedOptimizer",
)


def entry(name: str, value: Any) -> Iterator[str]:
    """Heading, signature and text of one name, and of a class's members."""
    yield f"### {name}"
    if inspect.isclass(value) and issubclass(value, Exception):
        bases = [b.__name__ for b in value.__bases__ if b is not Exception]
        text = (f"A {bases[0]}. " if bases else "") + _text(value.__doc__)
        yield "\n\n".join(textwrap.fill(paragraph, 120, break_on_hyphens=False) for paragraph in text.split("\n\n"))
        return
    if not (inspect.isclass(value) and name in ("Handle", "ProcessSet", "Config")):
        yield f"```python\n{_signature(name, value)}\n```"
    yield _text(value.__doc__, inspect.signature(value).parameters)
    if inspect.isclass(value) and name in ("Handle", "ProcessSet"):
        for member, each in vars(value).items():
            shown = isinstance(each, property) or (inspect.isfunction(each) and member == "wait")
            if shown and not member.startswith("_") and member not in ("named", "mail"):
                text = each.fget.__doc__ if isinstance(each, property) else each.__doc__
                yield f"- `{name}.{member}`: {_text(text)}".replace("\n", "\n    ").replace("\n    \n", "\n\n")


def _signature(name: str, value: Any) -> str:
    signature = inspect.signature(value)
    text = _plain(f"{name}{signature}")
    if len(text) <= 100:
        return text
    arguments = [_plain(f"    {parameter}") for parameter in signature.parameters.values()]
    first = next((i for i, p in enumerate(signature.parameters.values()) if p.kind is p.KEYWORD_ONLY), None)
    if first is not None:
        arguments.insert(first, "    *")
    returned = signature.return_annotation
    end = "" if returned is signature.empty else _plain(f" -> {returned!r}")
    return f"{name}(\n" + ",\n".join(arguments) + f",\n){end}"


def _plain(text: str) -> str:
    """Annotations without quotes; defaults keep theirs."""
    return re.sub(r"(: |-> )'([^']*)'", r"\1\2", text).replace("'", '"')


def _text(docstring: str | None, parameters: Iterable[str] = ()) -> str:
    """Lines that begin with parameters become a list."""
    text = inspect.cleandoc(docstring or "")
    lines: list[str] = []
    for line in text.splitlines():
        names, colon, _ = line.partition(": ")
        listed = bool(colon) and set(names.split(", ")) <= set(parameters)
        if listed and lines and lines[-1] and not lines[-1].startswith(("- ", "  ")):
            lines.append("")
        within = not listed and line and lines and lines[-1].startswith(("- ", "  "))
        lines.append(f"- {line}" if listed else f"  {line}" if within else line)
    return "\n".join(lines)


if __name__ == "__main__":
    PAGE.write_text(page())
