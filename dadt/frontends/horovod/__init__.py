"""Horovod's API on DADT's core. Under `dadt run`, scripts that import horovod get this package where Horovod is not
installed.

Names, arguments and errors, and when errors are raised, are as in Horovod 0.28 (Apache-2.0,
https://github.com/horovod/horovod).
"""

from __future__ import annotations

from dadt.frontends.horovod.runner import run as run

__version__ = "0.28.1"
"""Version of Horovod whose API this package offers."""
