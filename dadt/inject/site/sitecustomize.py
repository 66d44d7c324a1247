"""On PYTHONPATH of workers whose torch does not call entry points: runs dadt.inject.hook after `import torch`.

Standard library only, and nothing is imported before the script asks for torch.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from pathlib import Path


class _AfterTorch(importlib.abc.MetaPathFinder):
    """Finds torch as the others do, and adds one call after its import."""

    def find_spec(self, name, path=None, target=None):  # type: ignore[no-untyped-def]
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module):  # type: ignore[no-untyped-def]
            execute(module)
            from dadt.inject import hook

            hook()

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _run_next() -> None:
    """The sitecustomize that this one hides, if there is one."""
    here = str(Path(__file__).parent)
    rest = [folder for folder in sys.path if str(Path(folder or ".").resolve()) != here]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", rest)
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


sys.meta_path.insert(0, _AfterTorch())
_run_next()
