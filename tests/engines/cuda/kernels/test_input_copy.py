"""The kernel that copies inputs while the host still writes them. In Triton's interpreter, whose programs run one after the other."""

import pytest

from tests.engines.cuda.interpreted import run_interpreted

SCRIPT = """
import threading, time
import numpy as np, torch
from msplit.engines.cuda.device import Device
from msplit.engines.cuda.ir.dtypes import to_numpy, to_torch
from msplit.engines.cuda.kernels import memory
from msplit.engines.cuda.runtime.input_staging import InputStaging

rng = np.random.default_rng(0)


def made(size):
    source, target = torch.zeros(size, dtype=torch.uint8), torch.zeros(size, dtype=torch.uint8)
    return source, target, memory.InputCopy(source, target)


def assert_ready_for_the_next(one):
    assert one._counters.tolist() == [0, 0]


# All was announced before: a launch is a copy, again and again.
for size in (256, 8192, 8192 + 256, 3 * 8192, 100_096):
    source, target, one = made(size)
    for step in range(3):
        source.copy_(torch.from_numpy(rng.integers(0, 256, size).astype(np.uint8)))
        one.issue()
        assert target.equal(source), (size, step)
        assert not one.gave_up()
        assert_ready_for_the_next(one)

# Nothing comes: it gives up, says so once, and the next launch waits as long as this one did.
memory._LOOKS = 16
source, target, one = made(20_480)
for announced in (0, 8192, 20_479):
    source.fill_(announced % 251)
    one.hold()
    one.announce(announced)
    one.issue()
    assert target.equal(source)
    assert one.gave_up() and not one.gave_up()
    assert_ready_for_the_next(one)
one.hold()
one.announce_all()
one.issue()
assert not one.gave_up()
one.hold()
one.issue()
one.hold()  # a launch forgets what an earlier one said
assert not one.gave_up()

# Launched first, it copies what comes later.
memory._LOOKS = 10**9
source, target, one = made(70_144)
for step in range(3):
    source.fill_(200)  # never announced, never copied
    values = rng.integers(0, 200, source.numel()).astype(np.uint8)
    one.hold()
    kernel = threading.Thread(target=one.issue)
    kernel.start()
    time.sleep(0.02)
    for first in range(0, source.numel(), 8000):
        last = min(first + 8000, source.numel())
        source.numpy()[first:last] = values[first:last]
        one.announce(last)
        time.sleep(0.001)
    kernel.join()
    np.testing.assert_array_equal(target.numpy(), values)
    assert not one.gave_up()
    assert_ready_for_the_next(one)

# The same by way of what feeds a step.
values = {f"ids_{n}": rng.integers(0, 99, (3, n)) for n in range(5)}
values |= {"picture": rng.standard_normal((1, 180, 181)).astype(np.float32), "flags": rng.integers(0, 2, 9).astype(bool)}
found = InputStaging({name: to_torch(np.zeros_like(value)) for name, value in values.items()}, Device.of(torch.device("cpu")))
found.input_copy = memory.InputCopy(found.block.host, found.memory)
for step in range(5):
    values = {name: np.roll(value, step) for name, value in values.items()}
    kernel = threading.Thread(target=found.rest_to_device)
    assert found.feed(values, kernel.start)
    kernel.join()
    assert not found.missed()
    for name, value in values.items():
        np.testing.assert_array_equal(to_numpy(found.on_device[name]), value, err_msg=name)
"""


@pytest.mark.needs_triton
def test_what_is_announced_is_copied_and_no_launch_waits_for_ever():
    run_interpreted(SCRIPT)
