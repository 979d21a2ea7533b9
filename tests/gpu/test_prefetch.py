"""The next step's inputs on a copy stream of a real GPU: every step has its own, and the copies run beside the step before."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch

import msplit
from msplit.engines.cuda.ir.dtypes import to_numpy, to_torch
from msplit.engines.cuda.options import KernelMode, Torture
from msplit.opset import schema
from tests.engines.cuda.cases import flat_of, step_then
from tests.training_graphs import BATCH, STORED, stored

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
STEPS = 6
CASES = [("deepfm", "Adam", "resource"), *(case for case in STORED if case[0] != "deepfm")]
SLOW = 20_000_000
"""Cycles, about 10 ms, that each kernel is delayed by at most."""


@pytest.mark.parametrize("capture", [True, False])
@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_training_is_the_same_to_the_bit(build, case, capture):
    flat, training = stored(*case)
    feeds = [training.feeds(BATCH, step) for step in range(STEPS + 1)]
    for streams, mode in ((1, KernelMode.PLAIN), (4, KernelMode.FUSED_AND_GROUPED)):
        plain, sent = (build(flat, feeds[0], streams, training.state(), mode, capture=capture) for _ in range(2))
        wanted = [plain.step(one)["loss"] for one in feeds[:STEPS]]
        found = []
        for at in range(STEPS):
            outputs = step_then(sent, feeds[at], feeds[at + 1], on_device=at % 2 == 1)
            found.append(to_numpy(outputs["loss"]) if at % 2 else outputs["loss"])
        np.testing.assert_array_equal(found, wanted)
        state = plain.save_state()
        for name, value in sent.save_state().items():
            np.testing.assert_array_equal(value, state[name], err_msg=name)


def large(rows, columns=1000):
    """A graph of a large input and of a small one."""
    made = schema.graph_pb2.GraphDef()
    for name, shape in (("x", (rows, columns)), ("y", (1, columns))):
        node = made.node.add(op="Placeholder", name=name)
        node.attr["dtype"].type = 1
        for size in shape:
            node.attr["shape"].shape.dim.add(size=size)
    made.node.add(op="Mul", name="z", input=["x", "y"]).attr["T"].type = 1
    made.node.add(op="Neg", name="w", input=["x"]).attr["T"].type = 1
    return flat_of(made, outputs=["z", "w"])


@pytest.mark.parametrize("delay", [0, SLOW])
@pytest.mark.parametrize("rows", [1, 130, 1100, 9000])
def test_every_step_has_its_own_inputs_whoever_is_slow(build, rows, delay):
    """Arrays are written over as soon as their step has returned; steps that were not announced come between."""
    given = [
        {name: np.zeros(shape, np.float32) for name, shape in (("x", (rows, 1000)), ("y", (1, 1000)))} for _ in range(3)
    ]
    made = build(large(rows), given[0], 2, torture=Torture(delay_cycles=delay, seed=rows))
    chance = np.random.default_rng(rows)

    def fill(feeds, number):
        for name, value in feeds.items():
            value[...] = np.arange(value.size, dtype=np.float32).reshape(value.shape) % 97 + number * (
                1 + (name == "x")
            )

    def check(outputs, number):
        outputs = {name: value if isinstance(value, np.ndarray) else to_numpy(value) for name, value in outputs.items()}
        fill(given[2], number)
        np.testing.assert_array_equal(outputs["w"], -given[2]["x"])
        np.testing.assert_array_equal(outputs["z"], given[2]["x"] * given[2]["y"])

    fill(given[0], 0)
    for number in range(20):
        feeds, following = given[number % 2], given[1 - number % 2]
        fill(following, number + 1)
        check(step_then(made, feeds, following, on_device=bool(chance.integers(2))), number)
        if chance.integers(4) == 0:
            other = {name: value + 1 for name, value in following.items()}
            np.testing.assert_array_equal(made.step(other)["w"], -other["x"])
        if chance.integers(4) == 0:
            there = {name: to_torch(value + 2, DEVICE) for name, value in following.items()}
            np.testing.assert_array_equal(made.step(there)["w"], -following["x"] - 2)


def test_copies_run_beside_the_step_before(build):
    """With 128 MB to bring, a step of some 10 ms takes little longer than its graph; otherwise it waits for them."""
    rows = 32_000
    given = [{"x": np.full((rows, 1000), at, np.float32), "y": np.ones((1, 1000), np.float32)} for at in range(2)]
    made = build(large(rows), given[0], 1, torture=Torture(delay_cycles=4 * SLOW, seed=3))
    made.step_on_device(given[0])
    device = float(np.median(made.device_times(5)))

    def seconds(step):
        times = []
        for at in range(8):
            began = time.perf_counter()
            step(given[at % 2], given[1 - at % 2])
            times.append(time.perf_counter() - began)
        return float(np.median(times[2:]))

    sent = seconds(lambda feeds, then: step_then(made, feeds, then, on_device=True))
    waited = seconds(lambda feeds, then: made.step_on_device(feeds))
    told = f"device {1e3 * device:.2f} ms, sent ahead {1e3 * sent:.2f}, waited for {1e3 * waited:.2f}"
    assert device > 5e-3, f"the graph is too short to show anything: {told}"
    assert sent - device < 0.5 * (waited - device), told


def test_few_and_many_outputs_of_tensors_arrive_between_steps_on_arrays(build):
    """Few are fetched by a kernel that raises the number which the next captured step waits for."""
    made = schema.graph_pb2.GraphDef()
    node = made.node.add(op="Placeholder", name="x")
    node.attr["dtype"].type = 1
    for size in (70, 30):
        node.attr["shape"].shape.dim.add(size=size)
    for number in range(6):
        made.node.add(op="AddV2", name=f"y{number}", input=["x", f"y{number - 1}" if number else "x"]).attr[
            "T"
        ].type = 1
    for count in (1, 4, 6):
        names = [f"y{number}" for number in range(count)]
        x = np.arange(2100, dtype=np.float32).reshape(70, 30)
        executable = build(flat_of(made, outputs=names), {"x": x}, 2)
        for turn in range(12):
            value = x + turn
            fed = {"x": value if turn % 3 else to_torch(value, DEVICE)}
            outputs = executable.step(fed)
            for number, name in enumerate(names):
                np.testing.assert_array_equal(
                    outputs[name], value * (number + 2), err_msg=f"{name}, {count} outputs, turn {turn}"
                )


def test_a_trainer_sends_batches_ahead_and_takes_tensors():
    flat, training = stored(*CASES[0])
    feeds = [training.feeds(BATCH, step) for step in range(STEPS)]
    request = {"engine": "cuda", "device": DEVICE, "streams": (2,), "precision": "ieee", "effort": "fast"}
    with msplit.Trainer(flat, "train_op", ["loss"], **request, state=training.state()) as trainer:
        trainer.prepare(feeds[0])
        begun = trainer.variables
        wanted = [trainer.step(one)["loss"] for one in feeds]
        ended = trainer.variables
        for way in ("each", "tensors"):
            trainer.load(begun)
            if way == "each":
                found = [one.values["loss"] for one in trainer.run(iter(feeds))]
            else:
                there = [{name: to_torch(value, DEVICE) for name, value in one.items()} for one in feeds]
                found = [trainer.step(one, on_device=True)["loss"] for one in there]
                assert all(isinstance(one, torch.Tensor) and one.device.type == DEVICE for one in found)
                found = [to_numpy(one) for one in found]
            np.testing.assert_array_equal(found, wanted, err_msg=way)
            for name, value in trainer.variables.items():
                np.testing.assert_array_equal(value, ended[name], err_msg=f"{name} {way}")


def test_pictures_go_to_the_gpu_as_bytes_and_are_cast_there(build):
    made = schema.graph_pb2.GraphDef()
    node = made.node.add(op="Placeholder", name="picture")
    node.attr["dtype"].type = 4
    for size in (8, 299, 299, 3):
        node.attr["shape"].shape.dim.add(size=size)
    cast = made.node.add(op="Cast", name="light", input=["picture"])
    cast.attr["SrcT"].type, cast.attr["DstT"].type = 4, 1
    pictures = np.random.default_rng(0).integers(0, 256, (8, 299, 299, 3), np.uint8)
    executable = build(flat_of(made, outputs=["light"]), {"picture": pictures})
    for fed in (pictures, to_torch(pictures, DEVICE)):
        np.testing.assert_array_equal(executable.step({"picture": fed})["light"], pictures.astype(np.float32))
    assert executable._inputs.memory.is_cuda
    assert executable._inputs.memory.numel() < 1.01 * pictures.nbytes
