"""Several GPUs: each gives what one gives, whichever is the current one, and all are at work at once."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import msplit
from msplit.cost.profile import Workload
from msplit.engines.cuda.device.device import Device
from msplit.engines.cuda.engine import ENGINE
from msplit.inputs.make import feeds_for
from msplit.opset import schema
from msplit.serving.loadtest.corpus import of_build, of_ports
from tests.engines.cuda.cases import flat_of, job

pytestmark = [pytest.mark.gpu, pytest.mark.needs_gpus(2)]

SAMPLES = Path(__file__).parents[2] / "sample_graphs"
ONE = {
    "streams": (4,),
    "engine": "cuda",
    "batch": 24,
    "precision": "ieee",
}
TWO = dict(ONE, devices=(0, 1))
LARGE = 8 << 20
"""Bytes of an input that is on the bus, piece by piece, while the rest of it is still being copied."""


@pytest.fixture(autouse=True)
def _first_is_current() -> Iterator[None]:
    torch.cuda.set_device(0)
    yield
    assert torch.cuda.current_device() == 0, "whoever calls keeps the current GPU"


def assert_close(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=2e-4, atol=2e-5, err_msg=name)


def sums(width: int, layers: int = 0) -> Any:
    """A model that adds up its rows, behind some products. Made without TensorFlow, which a machine with GPUs may lack."""
    made = schema.graph_pb2.GraphDef()

    def const(name: str, value: Any) -> str:
        node = made.node.add(op="Const", name=name)
        kind = {"float32": 1, "int32": 3}[value.dtype.name]
        node.attr["dtype"].type = node.attr["value"].tensor.dtype = kind
        for size in value.shape:
            node.attr["value"].tensor.tensor_shape.dim.add(size=size)
        node.attr["value"].tensor.tensor_content = value.tobytes()
        return name

    x = made.node.add(op="Placeholder", name="x")
    x.attr["dtype"].type = 1
    for size in (-1, width):
        x.attr["shape"].shape.dim.add(size=size)
    last = "x"
    for number in range(layers):
        weights = np.random.default_rng(number).standard_normal((width, width), np.float32) / np.float32(width**0.5)
        node = made.node.add(op="MatMul", name=f"product_{number}", input=[last, const(f"weights_{number}", weights)])
        node.attr["T"].type, last = 1, node.name
    y = made.node.add(op="Sum", name="y", input=[last, const("axis", np.array(1, np.int32))])
    y.attr["T"].type, y.attr["Tidx"].type = 1, 3
    return flat_of(made, outputs=["y"])


@pytest.mark.parametrize("name", ["mmoe_small.pb", "towers_small.pb", "keras_inception"])
@pytest.mark.parametrize("devices", [(1,), (0, 1), (1, 0)])
def test_gpus_give_what_one_gives(name: str, devices: tuple[int, ...]) -> None:
    """The second one alone, too: nothing that is issued goes to the first."""
    flat = msplit.load(SAMPLES / name)
    with msplit.prepare(flat, **ONE) as one, msplit.prepare(flat, **dict(ONE, devices=devices)) as several:
        for seed in range(20):
            feeds = feeds_for(flat, Workload(ONE["batch"]), seed=seed)
            expected = one.step(feeds)
            assert_close(several.step(feeds), expected)
            torch.cuda.set_device(1)  # as somebody else's code may
            assert_close(several.step(feeds), expected)
            torch.cuda.set_device(0)
        there = {key: torch.as_tensor(value, device="cuda:1") for key, value in feeds.items()}
        stayed = several.step(there, on_device=True)
        assert {value.device for value in stayed.values()} == {torch.device("cuda", devices[0])}
        assert_close({key: value.cpu().numpy() for key, value in stayed.items()}, expected)


@pytest.mark.parametrize("capture", [True, False])
def test_large_inputs_go_to_the_gpu_that_reads_them(capture: bool) -> None:
    """Pieces go ahead on the default stream, whose handle is the same on every GPU: steps with other inputs follow one another closely."""
    flat = sums(LARGE // 4 // 16)
    rows = [{"x": np.full((16, LARGE // 4 // 16), float(seed), np.float32)} for seed in range(6)]
    made = ENGINE.build(job(flat, rows[0], device="cuda:1", capture=capture))
    both = ENGINE.build(job(flat, rows[0], device="cuda:0", devices=("cuda:0", "cuda:1"), capture=capture))
    for turn in range(60):
        feeds = rows[turn % len(rows)]
        for executable in (made, both):
            np.testing.assert_allclose(executable.step(feeds)["y"], feeds["x"].sum(axis=1))
    both.close()
    made.close()


def test_what_one_gpu_has_the_other_one_has_not() -> None:
    """Weights, programs, choices and streams are those of a device."""
    flat = msplit.load(SAMPLES / "mmoe_small.pb")
    before = [torch.cuda.memory_allocated(gpu) for gpu in (0, 1)]
    with msplit.prepare(flat, **dict(ONE, devices=(1,))):
        first, second = Device.of(torch.device("cuda:0")), Device.of(torch.device("cuda:1"))
        assert torch.cuda.memory_allocated(1) > before[1]
        assert torch.cuda.memory_allocated(0) <= before[0]
        assert first.streams is not second.streams
        assert flat not in first.compiled


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gpus") / "build"
    msplit.build(SAMPLES / "mmoe_small.pb", path, **dict(ONE, batch=None), batches=(1, 8, 32))
    return path


@pytest.mark.parametrize("groups", [1, 4])
def test_a_pool_answers_on_all(built: Path, groups: int) -> None:
    with msplit.pool(built, **dict(TWO, batch=None), groups=groups) as pool, msplit.open(built) as runner:
        feeds = [one for rows in (1, 3, 8, 32) for one in of_ports(of_build(built), pool.inputs, rows, 20, seed=rows)]
        expected = [runner.step(one) for one in feeds]
        order = np.random.default_rng(0).permutation(len(feeds) * 40) % len(feeds)
        going: deque[tuple[int, Any]] = deque()
        for number in order:
            going.append((number, pool.submit(feeds[number])))
            if len(going) > 64:
                one, pending = going.popleft()
                assert_close(pending.result(), expected[one])
        for one, pending in going:
            assert_close(pending.result(), expected[one])
        stats = pool.stats()
        assert (stats.answered, stats.failed, stats.in_flight) == (len(order), 0, 0)
        lines = [member.line for member in pool._steps._members]
        slots = [sum(map(len, line.free)) for line in lines]
        assert slots == [line.hello.sizes.slots for line in lines], "all room in the memory of both processes is free"
        del lines
        assert all(one.stats.steps for one in pool.processes())


def test_gpus_work_at_the_same_time() -> None:
    """A step that the GPU is busy with, and not the host, is over in little more than half the time."""
    flat = sums(1024, layers=12)
    feeds = {"x": np.random.default_rng(0).standard_normal((8192, 1024), np.float32)}
    times = []
    for devices in ((), ("cuda:0", "cuda:1")):
        executable = ENGINE.build(job(flat, feeds, device="cuda:0", devices=devices))
        executable.step(feeds)
        spent = []
        for _ in range(20):
            start = time.perf_counter()
            executable.launch()
            spent.append(time.perf_counter() - start)
        times.append(float(np.median(spent)))
        executable.close()
    assert times[1] < 0.7 * times[0]


def test_a_gpu_that_is_not_there_is_refused() -> None:
    with pytest.raises(msplit.MsplitError, match="there is no GPU 63"):
        msplit.prepare(SAMPLES / "mmoe_small.pb", **dict(ONE, devices=(0, 63)))
