"""Inputs on their way to a real GPU: every step has its own, whatever they are and however they are copied."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from msplit.core.arguments import Precision
from msplit.engines.base import Job
from msplit.engines.cuda.engine import CudaEngine
from msplit.engines.cuda.ir.dtypes import to_torch
from msplit.engines.cuda.options import Torture
from msplit.engines.cuda.runtime import input_staging, memcpy
from tests.engines.cuda.cases import flat_of, options_of, scattered, step_then
from tests.engines.cuda.random_graphs import FLOAT, INT32, _Graph

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120)]

COLUMNS = 250
ROWS = [530, 588, 1500, 4100]
"""Of 1000 bytes: an image of 224 by 224 and less, two of them and some, and what goes ahead by whichever threads."""


def net(rows, drawing=False):
    """A large input, one of a row and ids; random numbers on request."""
    made = _Graph(lambda strategy: 0)
    x = made.placeholder("x", [rows, COLUMNS])
    y = made.placeholder("y", [1, COLUMNS])
    ids = made.placeholder("ids", [100], INT32)
    outputs = [
        made.node("Neg", [x], T=FLOAT),
        made.node("Mul", [x, y], T=FLOAT),
        made.node("AddV2", [ids, ids], T=INT32),
    ]
    if drawing:
        shape = made.constant(np.array([7], np.int32))
        outputs.append(made.node("RandomUniform", [shape], T=INT32, dtype=FLOAT, seed=3, seed2=5))
    return flat_of(made.graph_def, outputs=outputs), outputs


def values(rows, number):
    rng = np.random.default_rng(number)
    return {
        "x": rng.standard_normal((rows, COLUMNS)).astype(np.float32),
        "y": rng.standard_normal((1, COLUMNS)).astype(np.float32),
        "ids": rng.integers(0, 99, 100).astype(np.int32),
    }


def assert_gives(outputs, names, feeds, message=""):
    wanted = -feeds["x"], feeds["x"] * feeds["y"], feeds["ids"] * 2
    for name, value in zip(names, wanted, strict=False):
        np.testing.assert_array_equal(outputs[name], value, err_msg=f"{name} {message}")


@pytest.fixture
def build():
    """Makes executables; all are closed at the end."""
    engine, made = CudaEngine(), []

    def one(flat, feeds, streams=1, state=None, **options):
        ids = scattered(flat, streams, streams)
        own = options_of("cuda", **options)
        made.append(
            engine.build(Job(flat, ids, streams, feeds, precision=Precision.IEEE, options=own, state=state or {}))
        )
        return made[-1]

    yield one
    for executable in made:
        executable.close()


def net_of(build, rows=588, **options):
    flat, names = net(rows)
    made = build(flat, values(rows, 0), **options)
    return made, names


@pytest.mark.parametrize("streams", [1, 3])
@pytest.mark.parametrize("rows", ROWS)
def test_every_step_has_its_own_inputs(build, rows, streams):
    """Arrays, an executable's own buffers, what is not contiguous, tensors and announced batches come one after the other. What was fed is
    written over as soon as its step has returned."""
    torture = Torture(poison=True, delay_cycles=2000, seed=1) if streams > 1 else None
    made, names = net_of(build, rows, streams=streams, torture=torture)
    chance = np.random.default_rng(rows)
    for number in range(150):
        feeds = values(rows, number)
        wanted = {name: value.copy() for name, value in feeds.items()}
        match int(chance.integers(8)):
            case 0:
                for name, value in feeds.items():
                    made.buffers()[name][...] = value
                outputs = made.step(made.buffers())
            case 1:
                outputs = made.step({**feeds, "x": np.asfortranarray(feeds["x"])})
            case 2:
                outputs = made.step({**feeds, "x": to_torch(feeds["x"].copy(), "cuda")})
            case 3:
                outputs = step_then(made, feeds, values(rows, 1000 + number))
            case 4:
                with torch.cuda.stream(torch.cuda.Stream()):
                    outputs = made.step(feeds)
            case _:
                outputs = made.step(feeds)
        for value in feeds.values():
            value[...] = 7
        assert_gives(outputs, names, wanted, f"of step {number}")


def test_ctrl_c_while_inputs_are_copied_leaves_it_usable(build, monkeypatch):
    made, names = net_of(build)

    def interrupted(*arguments):
        raise KeyboardInterrupt

    for number in range(5):
        with monkeypatch.context() as patch:
            patch.setattr(memcpy.Memcpy, "copy", interrupted)
            with pytest.raises(KeyboardInterrupt):
                made.step(values(588, 100 + number))
        feeds = values(588, number)
        outputs = step_then(made, feeds, feeds) if number == 4 else made.step(feeds)
        assert_gives(outputs, names, feeds, f"of step {number}")


def test_what_is_refused_launches_nothing(build):
    made, names = net_of(build)
    number = made._outputs._output_copy.number
    before = number[0]
    for wrong in ({"x": np.zeros((1, COLUMNS), np.float32)}, {"ids": np.zeros(100)}, {"y": None}):
        with pytest.raises(Exception, match="input"):
            made.step({**values(588, 0), **wrong})
    torch.cuda.synchronize()
    assert number[0] == before
    feeds = values(588, 1)
    assert_gives(made.step(feeds), names, feeds)


def test_several_executables_run_at_once(build):
    every = [net_of(build, rows, streams=2) for rows in (530, 588, 588, 1500)]

    def steps(at):
        made, names = every[at]
        rows = (530, 588, 588, 1500)[at]
        with torch.cuda.stream(torch.cuda.Stream()):
            for number in range(100):
                feeds = values(rows, 1000 * at + number)
                assert_gives(made.step(feeds), names, feeds, f"of step {number}")

    with ThreadPoolExecutor(len(every)) as pool:
        list(pool.map(steps, range(len(every))))


def test_one_thread_begins_several_and_then_ends_them(build):
    every = [net_of(build, rows) for rows in (588, 1500)]
    for number in range(30):
        feeds = [values(rows, number) for rows in (588, 1500)]
        streams = [torch.cuda.Stream() for _ in every]
        for (made, _), fed, stream in zip(every, feeds, streams, strict=True):
            with torch.cuda.stream(stream):
                assert made.begin(fed)
        for (made, names), fed, stream in zip(every, feeds, streams, strict=True):
            with torch.cuda.stream(stream):
                assert_gives(made.end(), names, fed)


def test_without_capture_or_own_kernels_inputs_arrive(build):
    flat, names = net(588)
    for options in ({"capture": False}, {"measure": False}):
        made = build(flat, values(588, 0), **options)
        feeds = values(588, 1)
        assert_gives(made.step(feeds), names, feeds)


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("kind", ["arrays", "tensors", "pinned"])
def test_inputs_that_are_copied_by_threads_and_sent_meanwhile_arrive(build, monkeypatch, native, kind):
    """2 and 9 MB, in parts that are on the bus while the next is copied; and the same as tensors in the host's memory."""
    if not native:
        monkeypatch.setattr(memcpy, "native_threads", lambda: None)
        monkeypatch.setattr(input_staging, "native_threads", lambda: None)
    elif memcpy.native_threads() is None:
        pytest.skip("copy_threads.c was not compiled")
    for rows in (2100, 9000):
        made, names = net_of(build, rows)
        assert made._inputs.has_large == (native or rows == 9000)
        for number in range(40):
            feeds = values(rows, number)
            given = feeds if kind == "arrays" else {name: torch.from_numpy(value) for name, value in feeds.items()}
            if kind == "pinned":
                given = {name: value.pin_memory() for name, value in given.items()}
            wanted = {name: value.copy() for name, value in feeds.items()}
            outputs = made.step(given)
            for value in feeds.values():
                value[...] = 7
            assert_gives(outputs, names, wanted, f"of step {number}")
