"""Measuring the steps of a program, on the CPU; on a GPU it is `tests/gpu/test_profile.py`."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch

from msplit import api
from msplit.cost.costs import Constants
from msplit.engines.base import Job
from msplit.engines.cuda.engine import CudaEngine
from msplit.engines.cuda.ir.interpret import walk
from msplit.engines.cuda.options import EngineOptions
from msplit.engines.cuda.profiling import kernel_profile
from msplit.engines.cuda.profiling.kernel_profile import kind_of, measure, resident, share_of
from msplit.errors import EngineError
from msplit.inputs.make import make_inputs
from tests.cli.runner import SAMPLES
from tests.engines.cuda.cases import scattered

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Model:
    """A sample, lowered and traced."""

    program: object
    feeds: dict
    engine: CudaEngine
    job: Job


@pytest.fixture(scope="module")
def model() -> Model:
    flat = api.load(SAMPLES / "mmoe_small.pb")
    feeds = make_inputs(flat, {}, batch=4)
    engine = CudaEngine()
    job = Job(flat, scattered(flat, 1, 0), 1, feeds, options=EngineOptions("cpu"))
    compiled = engine.compile(job)
    return Model(compiled.program, compiled.optimized.feeds, engine, job)


def test_equal_steps_are_measured_once(model):
    found = measure(model.program, model.feeds, CPU)
    launching = [kind for kind, step in zip(found.kernel, model.program.steps, strict=True) if step.launches]
    assert len(launching) == 25
    assert len(found.kernels) == len(set(launching)) < 15
    assert all(kernel.time_us > 0 for kernel in found.kernels)
    assert found.unmeasured == {}
    # The four experts are alike: their first products are one kind.
    first = [
        kind
        for kind, step in zip(found.kernel, model.program.steps, strict=True)
        if step.op.name.startswith("expert_") and "dense_0" in step.op.name
    ]
    assert len(first) == 4
    assert len(set(first)) == 1


def test_what_there_is_no_time_for_is_said(model):
    found = measure(model.program, model.feeds, CPU, seconds=0.0)
    assert found.kernels == ()
    assert found.unmeasured == {kernel_profile.LATE: 25}
    assert set(found.kernel) == {-1}


@pytest.mark.parametrize(
    ("problem", "told"),
    [
        (
            RuntimeError("operation not permitted\nwhen stream is capturing"),
            "Softmax can not be captured: operation not permitted",
        ),
        (
            EngineError("Softmax: CUDA out of memory.", where="node gate", fix="use a smaller --batch"),
            "Softmax: CUDA out of memory.",
        ),
    ],
)
def test_what_can_not_be_measured_is_said_and_the_rest_is(model, monkeypatch, problem, told):
    class Picky(kernel_profile.CpuTimer):
        def graph_us(self, lanes, **options):
            for lane in lanes:
                for call in lane:
                    if "Softmax" in str(call):
                        raise problem
            return super().graph_us(lanes, **options)

    monkeypatch.setattr(kernel_profile, "CpuTimer", Picky)
    found = measure(model.program, model.feeds, CPU)
    assert found.unmeasured == {told: 2}
    assert sum(kind < 0 for kind, step in zip(found.kernel, model.program.steps, strict=True) if step.launches) == 2


@pytest.mark.parametrize(
    ("size", "expected"), [(1 << 20, 0.5), (128 << 20, 0.5), ((128 << 20) + 1, 1.0), (3 << 30, 1.0)]
)
def test_copies_of_what_makes_gigabytes_do_not_run_side_by_side(size, expected):
    class Timer:
        lanes = 16

        def graph_us(self, lanes, **_):
            # Sixteen chains take as long as eight would one after the other: a kernel fills half of the device.
            assert len(lanes) == 1 or size * len(lanes) <= 2 << 30
            return 10.0 * len(lanes[0]) * (8 if len(lanes) == 16 else 1)

    time_us, share = kernel_profile._time(Timer(), lambda: None, Constants(node_us=1.0), size)
    assert time_us == pytest.approx(10.0)
    assert share == pytest.approx(expected)


def test_walking_gives_each_step_the_inputs_that_it_has_in_the_model(model):
    executable = model.engine.build(model.job)
    expected = executable.step(model.job.feeds)
    results = {}
    for step, _, call in walk(model.program, model.feeds, CPU):
        for port, value in enumerate(call()):
            results[step.op.node, port] = value
    for name, key in model.program.fetches.items():
        torch.testing.assert_close(results[key], torch.from_numpy(expected[name]))


def test_steps_are_alike_only_if_everything_that_decides_a_kernel_is(model):
    steps = [step for step in model.program.steps if step.op.op == "_FusedMatMul"]
    a, b = torch.ones(4, 64), torch.ones(64, 64)
    step = steps[0]
    assert kind_of(step, [a, b]) == kind_of(step, [a + 1, b])
    for other in ([a.double(), b], [torch.ones(5, 64), b], [a, b.t()], [a]):
        assert kind_of(step, [a, b]) != kind_of(step, other)


def test_constants_that_are_bound_count():
    def step(axis):
        return SimpleNamespace(
            op=SimpleNamespace(op="Sum", attrs={"_class": axis}), bound={1: torch.tensor(axis).numpy()}
        )

    assert kind_of(step(0), []) == kind_of(step(0), [])
    assert kind_of(step(0), []) != kind_of(step(1), [])


@pytest.mark.parametrize(
    ("alone", "each", "expected"),
    [
        (10.0, 10.0, 1.0),  # nothing gained side by side
        (10.0, 2.5, 0.25),
        (10.0, 0.625, 0.0625),  # sixteen at once, none slower
        (10.0, 12.0, 1.0),  # slower than in a row: no share is larger
        (1.1, 0.2, None),  # the device was busy starting them
    ],
)
def test_the_share_follows_from_sixteen_side_by_side(alone, each, expected):
    assert share_of(alone, each, 16, 0.2) == expected


H200 = SimpleNamespace(
    max_threads_per_multi_processor=2048, regs_per_multiprocessor=65536, shared_memory_per_multiprocessor=233472
)


@pytest.mark.parametrize(
    ("threads", "registers", "shared", "blocks"),
    [
        (256, 32, 0, 8),  # by threads
        (256, 64, 0, 4),  # by registers: 64 x 256 x 4 is all that there are
        (128, 40, 100_000, 2),  # by shared memory
        (32, 16, 0, 32),  # no SM holds more blocks
        (1024, 255, 0, 1),
    ],
)
def test_resident_blocks_are_those_of_the_occupancy_calculator(threads, registers, shared, blocks):
    assert resident(kernel_profile.KernelRecord("k", 1, threads, registers, shared, None, 1.0), H200) == blocks


def event(category: str, name: str, ts: float, dur: float, **arguments) -> dict:
    return {"ph": "X", "cat": category, "name": name, "ts": ts, "dur": dur, "args": arguments}


def test_kernels_belong_to_the_mark_in_which_they_were_launched():
    shape = {"grid": [4, 2, 1], "block": [128, 1, 1], "registers per thread": 40, "shared memory": 1024}
    found = kernel_profile.parse(
        [
            event("user_annotation", f"{kernel_profile.MARK}0", 100.0, 10.0),
            event("user_annotation", f"{kernel_profile.MARK}7", 120.0, 10.0),
            event("user_annotation", "somebody else's", 90.0, 100.0),
            event("cuda_runtime", "cudaLaunchKernel", 101.0, 1.0, correlation=1),
            event("cuda_driver", "cuLaunchKernelEx", 105.0, 1.0, correlation=2),
            event("cuda_runtime", "cudaLaunchKernel", 115.0, 1.0, correlation=3),  # between the marks
            event("cuda_runtime", "cudaLaunchKernel", 125.0, 1.0, correlation=4),
            # On the device everything happens later, after the marks are over.
            event("kernel", "second", 210.0, 3.0, correlation=2, **shape),
            event("kernel", "first", 200.0, 5.0, correlation=1, **shape, **{"est. achieved occupancy %": 25}),
            event("kernel", "stray", 220.0, 5.0, correlation=3, **shape),
            event("kernel", "last", 230.0, 5.0, correlation=4, **shape),
            {"ph": "M", "name": "process_name", "args": {"name": "python"}},
        ]
    )
    assert {number: [one.name for one in kernels] for number, kernels in found.items()} == {
        0: ["first", "second"],
        7: ["last"],
    }
    first = found[0][0]
    assert (first.blocks, first.threads, first.registers, first.shared_bytes, first.occupancy) == (
        8,
        128,
        40,
        1024,
        0.25,
    )


@pytest.mark.filterwarnings("ignore:CUDA is not available")
def test_the_profiler_is_asked_and_a_trace_without_kernels_is_no_error():
    def run():
        with torch.profiler.record_function(f"{kernel_profile.MARK}0"):
            torch.ones(8) + 1

    assert kernel_profile.record(run) == {}
