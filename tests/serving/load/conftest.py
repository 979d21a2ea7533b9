"""A table and the process that sends, once for all tests of a file."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from msplit.serving.load.generator import Generator
from msplit.serving.load.table import Table
from tests.serving.load import fakes


@pytest.fixture(scope="module")
def shared() -> Iterator[Table]:
    made = fakes.table()
    yield made
    made.close()


@pytest.fixture(scope="module")
def generator(shared: Table) -> Iterator[Generator]:
    made = Generator(shared)
    yield made
    made.close()
