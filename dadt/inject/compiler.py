"""torch.compile: what DADT does around a step is no part of a graph."""

from __future__ import annotations

import sys
from collections.abc import Callable


def look_past() -> Callable[[], None]:
    """A function to call now and then: once torch's compiler is loaded, it is made to leave DADT's own code as it is.

    Otherwise a compiled optimizer compiles the exchange along with its step: to no use, and with warnings.
    """
    told = False

    def look() -> None:
        nonlocal told
        rules = None if told else sys.modules.get("torch._dynamo.trace_rules")
        if rules is not None and hasattr(rules, "add"):
            told = True
            rules.add("dadt")

    return look
