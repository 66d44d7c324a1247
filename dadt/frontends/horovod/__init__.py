"""Horovod's API on DADT's core. Under `dadt run`, scripts that import horovod find this where it is not installed.

Names, arguments, errors and their moments are those of Horovod 0.28 (Apache-2.0, https://github.com/horovod/horovod).
"""

from __future__ import annotations

from dadt.frontends.horovod.runner import run as run

__version__ = "0.28.1"
"""The version of Horovod whose API this is."""
