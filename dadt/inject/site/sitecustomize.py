"""In the search path (PYTHONPATH) of workers, so that Python runs it at startup. It lets scripts import DADT as
`horovod` if Horovod is not installed, and starts DADT after `import keras`, and after `import torch` if torch does not
call entry points.

Uses only the standard library, and imports nothing else before the script does.
"""

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from pathlib import Path

PARTS = {
    "torch.mpi_ops": "torch",
    "torch.functions": "torch",
    "common.process_sets": "torch.process_sets",
    "tensorflow.keras": "keras",
    "tensorflow.keras.callbacks": "keras.callbacks",
}
"""Modules of Horovod whose contents are in a module of another name in DADT."""


class _After(importlib.abc.MetaPathFinder):
    """An import finder that lets the other finders locate a module, and calls `hook` of one of DADT's modules after its
    import."""

    def __init__(self, name: str, own: str) -> None:
        self._name, self._own = name, own

    def find_spec(self, name, path=None, target=None):  # type: ignore[no-untyped-def]
        if name != self._name:
            return None
        sys.meta_path = [finder for finder in sys.meta_path if finder is not self]
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module):  # type: ignore[no-untyped-def]
            execute(module)
            importlib.import_module(self._own).hook()

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


class _Horovod(importlib.abc.MetaPathFinder):
    """An import finder that makes DADT's modules available as `horovod` and its submodules. It is the first finder,
    because the others would load DADT's modules a second time. If Horovod is installed, it removes itself."""

    def find_spec(self, name, path=None, target=None):  # type: ignore[no-untyped-def]
        whole, _, part = name.partition(".")
        if whole != "horovod":
            return None
        if not part and any(self._is_installed(finder) for finder in sys.meta_path if finder is not self):
            sys.meta_path = [finder for finder in sys.meta_path if finder is not self]
            return None
        own = ".".join(filter(None, ["dadt.frontends.horovod", PARTS.get(part, part)]))
        try:
            found = importlib.util.find_spec(own)
        except ModuleNotFoundError:  # the parent of the name is a module, not a package
            found = None
        if found is None:
            return None
        return importlib.machinery.ModuleSpec(name, _Own(own), is_package=True)

    @staticmethod
    def _is_installed(finder) -> bool:  # type: ignore[no-untyped-def]
        """Return whether the finder finds an installed Horovod. A folder named `horovod` without modules does not
        count, nor does a source tree of Horovod that has not been compiled."""
        find = getattr(finder, "find_spec", None)
        spec = find("horovod", None) if find is not None else None
        if spec is None or spec.origin is None:
            return False
        folder = Path(spec.origin).parent
        is_source = (folder / "common" / "basics.py").exists() and not any(folder.glob("*/**/*.so"))
        return not is_source


class _Own(importlib.abc.Loader):
    """A loader that makes a module of DADT available under another name."""

    def __init__(self, name: str) -> None:
        self._name = name

    def create_module(self, spec):  # type: ignore[no-untyped-def]
        module = importlib.import_module(self._name)
        self._spec = module.__spec__
        return module

    def exec_module(self, module):  # type: ignore[no-untyped-def]
        """Restore the module's own spec. There is nothing to execute, since the module was already imported under its
        own name."""
        module.__spec__ = self._spec


def _run_next() -> None:
    """Run the user's own sitecustomize module, which this one hides, if there is one."""
    here = str(Path(__file__).parent)
    rest = [folder for folder in sys.path if str(Path(folder or ".").resolve()) != here]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", rest)
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


if os.environ.get("DADT_HOOK") == "sitecustomize":
    sys.meta_path.insert(0, _After("torch", "dadt.inject"))
if os.environ.get("DADT_HOROVOD", "none") != "none":
    sys.meta_path.insert(0, _Horovod())
sys.meta_path.insert(0, _After("keras", "dadt.frontends.keras.hook"))
_run_next()
