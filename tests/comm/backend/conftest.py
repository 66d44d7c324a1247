"""Ranks that the tests of the backend share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from harness.backend_ranks import Ranks


@pytest.fixture(scope="session")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    yield from _ranks(2, tmp_path_factory.mktemp("two"))


@pytest.fixture(scope="session")
def four(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    yield from _ranks(4, tmp_path_factory.mktemp("four"))


def _ranks(size: int, folder: Path) -> Iterator[Ranks]:
    ranks = Ranks(size, folder)
    yield ranks
    ranks.close()
