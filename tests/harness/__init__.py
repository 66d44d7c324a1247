"""How tests start jobs and ranks, the models that these train, and what is checked of them."""

import re
from pathlib import Path

TESTS = Path(__file__).parents[1]
ROOT = TESTS.parent
SCRIPTS = TESTS / "scripts"
"""Scripts that jobs of several tests run."""


def lightened(script: str) -> str:
    """The script, which does without torch._dynamo from its `import torch` on (see light.py), unless it compiles. Its
    lines keep their numbers."""
    if "torch.compile" in script:
        return script
    light = f"; import sys; sys.path.append({str(TESTS)!r}); from harness import light"
    return re.sub(
        r"^([ \t]*import\b[^#\n]*\btorch\b(?!\.)[^#\n]*)$", lambda line: line[1] + light, script, count=1, flags=re.M
    )
