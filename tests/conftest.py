"""Settings for every test."""

import contextlib
import functools
import gc
import importlib.util
import os
import sys
from collections.abc import Generator, Iterator

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


_settled: set[str] = set()


def _settle() -> None:
    """What imports have left stays to the end. Once for each of the large ones it is set apart, so that the garbage collector does not look
    through a million objects of TensorFlow again and again: half a second each time, in whichever test it happens."""
    loaded = {
        name for name in ("pytest", "torch", "tensorflow.python", "keras", "torch._inductor") if name in sys.modules
    }
    if loaded != _settled:
        _settled.update(loaded)
        gc.collect()
        gc.freeze()


@contextlib.contextmanager
def _untraced(item: pytest.Item) -> Iterator[None]:
    """Nothing traces a test that is marked `no_cover`. pytest-cov stops its own tracer for it, under which another one of coverage's runs
    in the workers of xdist."""
    trace = sys.gettrace() if item.get_closest_marker("no_cover") else None
    if trace is None:
        yield
        return
    sys.settrace(None)
    try:
        yield
    finally:
        sys.settrace(trace)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None, object, object]:
    """Tests marked `gpu` run where there is one."""
    _settle()
    if item.get_closest_marker("gpu") and (why := _no_gpu()):
        pytest.skip(why)
    with _untraced(item):
        return (yield)


@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """Last: within what pytest-cov does."""
    with _untraced(item):
        return (yield)
