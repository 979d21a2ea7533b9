"""A table and the process that sends, once for all tests of a file."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from msplit.serving.loadtest.generator import Generator
from msplit.serving.loadtest.table import Table
from tests.serving.loadtest import fakes


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
