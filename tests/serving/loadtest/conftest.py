"""A table and the process that sends, once for all tests of a file."""

from __future__ import annotations

from collections.abc import Iterator
from unittest import mock

import pytest

from msplit.serving.loadtest.generator import LoadGenerator, RequestTable
from tests import forked
from tests.serving.loadtest import fakes


@pytest.fixture(scope="module", autouse=True)
def forked_processes() -> Iterator[None]:
    """Processes begin with their imports done."""
    with mock.patch("msplit.engines.process.subprocess", forked.OWN):
        yield


@pytest.fixture(scope="module")
def shared() -> Iterator[RequestTable]:
    made = fakes.table()
    yield made
    made.close()


@pytest.fixture(scope="module")
def generator(shared: RequestTable) -> Iterator[LoadGenerator]:
    made = LoadGenerator(shared)
    yield made
    made.close()
