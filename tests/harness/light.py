"""Imported by scripts that do not compile: their optimizers go without torch._dynamo.

To import that takes a process as long as torch itself. The first optimizer does it, only to mark for torch.compile what
that is to leave alone (torch/_compile.py, torch/optim/optimizer.py). Gradients are off in a step, as ever. Nor does a
process look through all of torch for garbage when it ends, which takes a quarter of that time.
"""

from __future__ import annotations

import gc
from inspect import isclass, isfunction, unwrap

from torch import no_grad, optim

for method in filter(isfunction, vars(optim.Optimizer).values()):
    unwrap(method).__dynamo_disable = unwrap(method)
for each in filter(isclass, vars(optim).values()):
    if "step" in vars(each) and issubclass(each, optim.Optimizer):
        each.step = no_grad()(unwrap(each.step))
gc.freeze()
