"""What tests of training share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.training.zygote import Zygote


@pytest.fixture(scope="session")
def zygote() -> Iterator[Zygote]:
    found = Zygote()
    yield found
    found.process.kill()
    found.process.wait()
