"""Lowerings may run on a GPU here; the kernels that they are held against are TensorFlow's on the CPU."""

import contextlib

import pytest

from .harness import DEVICE


@pytest.fixture(scope="session", autouse=True)
def _hide_gpus_from_tensorflow():
    """TensorFlow would run there whatever has a kernel. It must not have started in this process before."""
    if DEVICE != "cpu":
        with contextlib.suppress(ImportError):  # not installed: what needs it says so
            from tensorflow import config

            config.set_visible_devices([], "GPU")
