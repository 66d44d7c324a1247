"""Keeps torch.compile from compiling the code that DADT runs around an optimizer's step."""

from __future__ import annotations

import sys
from collections.abc import Callable


def look_past() -> Callable[[], None]:
    """Return a function that makes torch's compiler skip DADT's own code once the compiler is loaded. Call the function
    repeatedly, because it does nothing until then.

    If the compiler did not skip DADT, a compiled optimizer would compile the exchange of gradients along with its step,
    which gains nothing and prints warnings.
    """
    told = False

    def look() -> None:
        nonlocal told
        rules = None if told else sys.modules.get("torch._dynamo.trace_rules")
        if rules is not None and hasattr(rules, "add"):
            told = True
            rules.add("dadt")

    return look
