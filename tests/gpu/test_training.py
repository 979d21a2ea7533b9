"""Training steps on a real GPU: variables of every optimizer as on the CPU, no race, one graph, and no step but the user's."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from msplit.core.arguments import Precision
from msplit.engines.base import GOOD_STEPS, LOSS_SCALE, Job
from msplit.engines.cuda.device.device import Device
from msplit.engines.cuda.engine import CudaEngine
from msplit.engines.cuda.options import KernelMode, Torture
from msplit.engines.table_rows import TableOptions
from tests.engines.cuda.cases import options_of, scattered
from tests.training_graphs import BATCH, STORED, apart, run, stored

pytestmark = pytest.mark.gpu

STEPS = 3
WITHIN = 1e-4
"""How far variables may be from those of the same steps on the CPU, in terms of their root mean square."""
BY_ROWS = [case for case in STORED if case[0] == "deepfm" and case[1] != "Adam"]
"""Those whose tables are changed by rows of a step alone."""
OTHERS = [case for case in STORED if case[0] != "deepfm"]


@pytest.fixture
def build():
    """Makes executables of stored graphs; all are closed at the end."""
    engine, made = CudaEngine(), []

    def one(case, streams=1, device="cuda", mode=KernelMode.PLAIN, **options):
        flat, training = stored(*case)
        job = Job(
            flat,
            scattered(flat, streams, streams),
            streams,
            training.feeds(BATCH),
            precision=Precision.IEEE,
            options=replace(options_of(device, **options), mode=mode),
            state=training.state(),
        )
        made.append(engine.build(job))
        return made[-1], training

    yield one
    for executable in made:
        executable.close()


def assert_equal(got, expected, message=""):
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(got[name], value, err_msg=f"{name} {message}")


@pytest.mark.parametrize("mode", KernelMode)
@pytest.mark.parametrize("case", STORED, ids="-".join)
def test_variables_are_those_of_the_cpu(build, case, mode):
    plain, training = build(case, device="cpu")
    losses = run(plain, training, range(STEPS))
    expected = plain.save_state()
    for streams in (1, 4):
        executable, _ = build(case, streams, mode=mode)
        np.testing.assert_allclose(run(executable, training, range(STEPS)), losses, rtol=WITHIN)
        wrong = {name: away for name, away in apart(executable.save_state(), expected).items() if away > WITHIN}
        assert not wrong, f"{streams} streams"


@pytest.mark.parametrize("mode", [KernelMode.PLAIN, KernelMode.FUSED_AND_GROUPED])
@pytest.mark.parametrize("case", BY_ROWS, ids="-".join)
def test_tables_in_the_hosts_memory_train_as_those_of_the_gpu_to_the_bit(build, case, mode):
    """Captured and launched step by step, on one stream and on several that are delayed; saved and loaded meanwhile."""
    plain, training = build(case, mode=mode)
    losses = run(plain, training, range(2 * STEPS))
    expected = plain.save_state()
    for streams, capture, delay in ((1, True, 0), (4, True, 20_000), (4, False, 0)):
        torture = Torture(delay_cycles=delay, seed=1) if delay else None
        executable, _ = build(case, streams, mode=mode, table_memory=TableOptions(1), capture=capture, torture=torture)
        state, begun = executable.state, executable.save_state()
        assert len(state.hosted) > 1
        assert not any(tensor.is_cpu for tensor in state.tensors.values())
        assert all(state.tensors[name].data_ptr() == array.ctypes.data for name, array in state.hosted.items())
        np.testing.assert_array_equal(run(executable, training, range(STEPS)), losses[:STEPS])
        half = executable.save_state()
        run(executable, training, range(7, 9))
        executable.load_state(half)
        executable.timeline()  # leaves variables as they are
        np.testing.assert_array_equal(run(executable, training, range(STEPS, 2 * STEPS)), losses[STEPS:])
        assert_equal(executable.save_state(), expected, f"{streams} streams, capture {capture}")
        executable.load_state(begun)
        np.testing.assert_array_equal(run(executable, training, range(STEPS)), losses[:STEPS])
        assert_equal(executable.save_state(), half)
        executable.close()
    assert not any(Device.of(torch.device("cuda", 0)).host_memory._free.values()), "closed, and not freed"


@pytest.mark.parametrize("mode", [KernelMode.PLAIN, KernelMode.FUSED_AND_GROUPED])
@pytest.mark.parametrize("case", [STORED[0], STORED[4], STORED[7], *OTHERS], ids="-".join)
def test_no_stream_overtakes_another_under_delays_with_freed_memory_poisoned(build, case, mode):
    alone, training = build(case, mode=mode)
    expected = []
    for step in range(4):
        losses = run(alone, training, range(step, step + 1))
        expected.append((losses, alone.save_state()))
    for streams in (2, 4, 8):
        for seed in range(3):
            torture = Torture(poison=True, delay_cycles=20_000, seed=seed)
            tortured, _ = build(case, streams, mode=mode, torture=torture)
            for step, (losses, state) in enumerate(expected):
                message = f"{streams} streams, seed {seed}, step {step}"
                np.testing.assert_array_equal(run(tortured, training, range(step, step + 1)), losses, err_msg=message)
                assert_equal(tortured.save_state(), state, message)


@pytest.mark.parametrize("capture", [True, False])
@pytest.mark.parametrize("mode", [KernelMode.PLAIN, KernelMode.FUSED_AND_GROUPED])
@pytest.mark.parametrize("case", [STORED[4], *OTHERS], ids="-".join)
def test_what_makes_a_step_ready_does_not_train(build, case, mode, capture):
    executable, training = build(case, 4, mode=mode, capture=capture)
    assert_equal(executable.save_state(), training.state())


def test_a_second_executable_has_variables_of_its_own(build):
    (first, training), (second, _) = build(OTHERS[0], 2), build(OTHERS[0], 2)
    run(first, training, range(STEPS))
    assert_equal(second.save_state(), training.state())
    run(second, training, range(STEPS))
    assert_equal(second.save_state(), first.save_state())


@pytest.mark.parametrize("case", [STORED[4], *OTHERS], ids="-".join)
def test_a_step_is_one_graph(build, case):
    executable, training = build(case, 4)
    run(executable, training, range(2))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        executable.launch()
    names = [event.name for event in seen.events()]
    assert sum(str(event.device_type).endswith("CUDA") for event in seen.events()) > 20, "nothing was recorded"
    assert not [name for name in names if "LaunchKernel" in name]


@pytest.mark.parametrize("mode", [KernelMode.PLAIN, KernelMode.FUSED_AND_GROUPED])
@pytest.mark.parametrize("case", STORED, ids="-".join)
def test_saved_variables_go_on_to_the_bit(build, case, mode):
    (whole, training), (first, _), (second, _) = (build(case, 4, mode=mode) for _ in range(3))
    run(whole, training, range(2 * STEPS))
    run(first, training, range(STEPS))
    second.load_state(first.save_state())
    run(second, training, range(STEPS, 2 * STEPS))
    assert_equal(second.save_state(), whole.save_state())


@pytest.mark.parametrize("case", [STORED[0], *OTHERS], ids="-".join)
def test_a_variable_that_is_not_a_number_spreads_as_on_the_cpu(build, case):
    plain, training = build(case, device="cpu")
    begun = training.state()
    name = next(name for name, value in begun.items() if value.ndim > 1)
    begun[name].flat[0] = np.nan
    states = []
    for executable in (plain, build(case, 2)[0]):
        executable.load_state(begun)
        run(executable, training, range(1))
        states.append(executable.save_state())
    assert max(apart(states[1], states[0]).values()) < WITHIN


@pytest.mark.parametrize("mode", KernelMode)
@pytest.mark.parametrize("case", STORED, ids="-".join)
def test_float16_trains_and_a_step_that_overflows_changes_nothing(case, mode):
    """In the captured graph: the device decides."""
    flat, training = stored(*case)
    options = replace(options_of("cuda"), mode=mode)
    job = Job(flat, scattered(flat, 4, 4), 4, training.feeds(BATCH), Precision.FP16, options, state=training.state())
    executable = CudaEngine().build(job)
    exact = CudaEngine().build(replace(job, precision=Precision.IEEE))
    losses = run(executable, training, range(STEPS))
    np.testing.assert_allclose(losses, run(exact, training, range(STEPS)), rtol=2e-2)
    before = executable.save_state()
    executable.load_state({LOSS_SCALE: np.array(2.0**60, np.float32)})
    run(executable, training, range(1))
    after = executable.save_state()
    assert (float(after.pop(LOSS_SCALE)), int(after.pop(GOOD_STEPS))) == (2.0**59, 0)
    assert_equal(after, {name: value for name, value in before.items() if name in after})
    executable.load_state({LOSS_SCALE: np.array(2.0**4, np.float32)})
    run(executable, training, range(1))
    assert int(executable.save_state()[GOOD_STEPS]) == 1
    executable.close()
    exact.close()
