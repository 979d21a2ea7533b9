"""Settings for every test."""

import functools
import importlib.util
import os
import sys
from collections.abc import Generator

import pytest
from hypothesis import settings

# A test that takes long is no wrong answer, and machines are shared. CI tries the same examples each time; everyone else new ones.
settings.register_profile("msplit", deadline=None, derandomize="CI" in os.environ)
settings.load_profile("msplit")


@functools.cache
def _no_gpu() -> str | None:
    """Why tests marked `gpu` can not run here, or None."""
    if importlib.util.find_spec("torch") is None:
        return "PyTorch is not installed"
    import torch

    return None if torch.cuda.is_available() else "no CUDA device"


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Tests marked `gpu` run where there is one."""
    if item.get_closest_marker("gpu") and (why := _no_gpu()):
        pytest.skip(why)


@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """Tests marked `no_cover` measure time: nothing traces them. pytest-cov stops its own tracer for them, under which another one of
    coverage's runs in the workers of xdist. Last: within what pytest-cov does."""
    trace = sys.gettrace() if item.get_closest_marker("no_cover") else None
    if trace is None:
        return (yield)
    sys.settrace(None)
    try:
        return (yield)
    finally:
        sys.settrace(trace)
