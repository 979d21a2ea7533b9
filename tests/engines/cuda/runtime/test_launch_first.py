"""A graph that is launched before its inputs are copied: on a fake GPU, which reads what is announced at once, the worst that it can do."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from msplit.engines.cuda.device.device import Device
from msplit.engines.cuda.ir.dtypes import to_numpy, to_torch
from msplit.engines.cuda.runtime import input_staging
from msplit.engines.cuda.runtime.executable import CudaExecutable
from msplit.engines.cuda.runtime.input_staging import InputStaging
from msplit.engines.cuda.runtime.output_staging import CapturedGraph, GraphExec
from msplit.errors import EngineError
from tests.campaign import examples

CPU = torch.device("cpu")
SHAPES = {"ids": (3,), "more": (5, 2), "picture": (700, 90), "wide": (300, 200), "none": (0, 4), "rate": ()}
TYPES = {"ids": "int64", "more": "int64", "picture": "uint8", "wide": "float32", "none": "float32", "rate": "float32"}
WORDS = r"no value for input|was prepared as|another input's buffer|given a list"


def values(number):
    rng = np.random.default_rng(number)
    return {name: np.asarray(rng.integers(1, 255, shape), TYPES[name]) for name, shape in SHAPES.items()}


class Gpu:
    """Replays one after the other. The first of them that is not over copies each byte of its inputs as soon as it is announced.

    Attributes:
        log: What happened, in order: "launch" with the bytes that were announced then, "announce" with those that are now.
        impatient: How many of the next replays wait for nothing, and say so.
        done: How many are over.
        interrupted: At which of the next announcements Ctrl-C comes.
    """

    def __init__(self):
        self.log, self.impatient, self.done, self.interrupted = [], 0, 0, set()
        self.inputs = InputStaging(
            {name: to_torch(np.zeros(SHAPES[name], TYPES[name])) for name in SHAPES}, Device.of(CPU)
        )
        self.inputs.input_copy = self
        self.there = self.size = self.inputs.block.host.numel()
        self.late = False
        self.replays = []  # how many bytes each has copied
        self.outputs = {}

    def launch(self):
        self.log.append(("launch", self.there))
        self.replays.append(0)
        self.work()

    def work(self):
        host, memory = self.inputs.block.host, self.inputs.memory
        while self.replays:
            first = self.replays[0]
            last = self.there
            if self.impatient and last < self.size:
                self.impatient, self.late, last = self.impatient - 1, True, self.size
            if last > first:
                memory[first:last].copy_(host[first:last])
                self.replays[0] = last
            if self.replays[0] < self.size:
                break
            self.replays.pop(0)
            self.done += 1
            self.outputs = {name: to_numpy(tensor).copy() for name, tensor in self.inputs.on_device.items()}

    def hold(self):
        self.log.append(("hold", 0))
        self.late, self.there = False, 0

    def announce(self, last):
        comes, self.interrupted = 0 in self.interrupted, {one - 1 for one in self.interrupted}
        if comes:
            raise KeyboardInterrupt
        self.log.append(("announce", last))
        self.there = last
        self.work()

    def announce_all(self):
        self.announce(self.size)

    def gave_up(self):
        late, self.late = self.late, False
        return late


class Outputs:
    """The number that replays raise, as the host sees it."""

    def __init__(self, gpu):
        self.gpu, self.number, self.asked = gpu, 0, 0

    def expect(self):
        self.number += 1

    def arrived(self):
        return self.number == self.gpu.done

    def settle(self):
        self.asked += 1
        assert not self.gpu.replays, "the GPU waits for ever"
        self.number = self.gpu.done

    def read(self):
        return {name: value.copy() for name, value in self.gpu.outputs.items()}


def executable_on(gpu):
    made = CudaExecutable.__new__(CudaExecutable)
    made.device, made._capture, made._prefetch, made._inputs = Device.of(CPU), True, None, gpu.inputs
    made.program = SimpleNamespace(dynamic=(), known_outputs=dict)
    made._graphs = {CapturedGraph.STEP: SimpleNamespace(start_holding=gpu.launch, finish=lambda: None)}
    made._outputs = Outputs(gpu)
    made._step = lambda feeds: pytest.fail("it can be begun")
    return made


def assert_gives(outputs, number):
    for name, value in values(number).items():
        np.testing.assert_array_equal(outputs[name], value, err_msg=f"{name} of step {number}")


@pytest.fixture
def gpu():
    return Gpu()


@pytest.fixture
def made(gpu):
    return executable_on(gpu)


def test_a_step_is_launched_first_and_has_its_own_inputs(gpu, made):
    for number in range(6):
        gpu.log.clear()
        assert_gives(made.step(values(number)), number)
        assert gpu.log[:2] == [("hold", 0), ("launch", 0)]
        announced = [last for what, last in gpu.log[2:]]
        assert announced == sorted(announced)
        assert announced[-1] == gpu.size
        assert len(set(announced)) > 5, "piece by piece"
    assert made._outputs.asked == 0
    assert gpu.done == 6


def test_an_input_of_some_size_comes_in_eight_pieces(gpu, made):
    made.step(values(0))
    start = gpu.inputs.block.starts["wide"]
    size = 4 * 300 * 200
    announced = {last - start for what, last in gpu.log if what == "announce"}
    assert {one for one in announced if 0 < one <= size} == {min(1 << 16, size), 2 << 16, 3 << 16, size}


def another(feeds, name, value):
    return {**feeds, name: value}


@pytest.mark.parametrize(
    "wrong",
    [
        lambda feeds, places: {name: value for name, value in feeds.items() if name != "wide"},
        lambda feeds, places: another(feeds, "wide", feeds["wide"][1:]),
        lambda feeds, places: another(feeds, "wide", feeds["wide"].astype(np.float64)),
        lambda feeds, places: another(feeds, "wide", feeds["wide"].astype(feeds["wide"].dtype.newbyteorder())),
        lambda feeds, places: another(feeds, "more", feeds["more"].T),
        lambda feeds, places: another(feeds, "rate", [1.0]),
        lambda feeds, places: another(
            feeds, "picture", places["wide"].view(np.uint8).reshape(-1)[:63_000].reshape(700, 90)
        ),
    ],
    ids=["missing", "shape", "type", "order", "turned", "list", "place"],
)
def test_what_is_refused_is_refused_before_the_launch(gpu, made, wrong):
    made.step(values(0))
    before, block = list(gpu.log), gpu.inputs.block.host.clone()
    with pytest.raises(EngineError, match=WORDS):
        made.step(wrong(values(1), gpu.inputs.block.arrays))
    assert gpu.log == before
    assert gpu.inputs.block.host.equal(block)
    assert_gives(made.step(values(2)), 2)


def test_tensors_are_left_to_who_takes_them_where_they_lie(gpu, made):
    feeds = values(1)
    assert not made.begin({**feeds, "wide": to_torch(feeds["wide"])})
    assert gpu.log == []
    assert_gives(made.step(values(2)), 2)


def test_own_places_are_announced_and_views_of_them_copied_as_they_were(gpu, made):
    places = gpu.inputs.block.arrays
    for name, value in values(3).items():
        places[name][...] = value
    gpu.log.clear()
    assert_gives(made.step(places), 3)
    assert gpu.log[1] == ("launch", 0)
    turned = made.step({**places, "wide": places["wide"][::-1], "picture": places["picture"][...]})
    np.testing.assert_array_equal(turned["wide"], values(3)["wide"][::-1])
    np.testing.assert_array_equal(turned["picture"], values(3)["picture"])


def test_arrays_that_are_not_contiguous_are_copied_first(gpu, made):
    feeds = values(4)
    outputs = made.step({**feeds, "wide": np.asfortranarray(feeds["wide"])})
    assert_gives(outputs, 4)
    assert ("launch", gpu.size) in gpu.log
    assert_gives(made.step({**feeds, "more": np.asfortranarray(feeds["more"])}), 4)  # small ones are joined as ever
    assert gpu.log[-1] == ("announce", gpu.size)
    assert gpu.log.count(("launch", 0)) == 1


def test_scalars_of_numpy_and_arrays_that_can_not_be_written_arrive(gpu, made):
    feeds = values(5)
    frozen = {name: value.copy() for name, value in feeds.items()}
    for value in frozen.values():
        value.flags.writeable = False
    assert_gives(made.step({**frozen, "rate": np.float32(feeds["rate"])}), 5)
    assert gpu.log.count(("launch", 0)) == 1


@settings(deadline=None, max_examples=examples(40, 1000))
@given(
    st.lists(
        st.tuples(st.sampled_from(["right", "turned", "late", "failed"]), st.sets(st.integers(0, 12), max_size=3)),
        max_size=14,
    )
)
def test_whatever_happens_a_step_that_returns_has_its_own_inputs(steps):
    """Ctrl-C at any announcement, at the last of all, too, and again; a launch that fails; a GPU that gives up."""
    gpu = Gpu()
    made = executable_on(gpu)
    for number, (what, interrupted) in enumerate(steps):
        gpu.interrupted, gpu.impatient = interrupted, int(what == "late")
        made._graphs[CapturedGraph.STEP].start_holding = failing if what == "failed" else gpu.launch
        feeds = values(number)
        if what == "turned":  # it is copied first
            feeds["wide"] = np.asfortranarray(feeds["wide"])
        try:
            outputs = made.step(feeds)
        except (KeyboardInterrupt, OSError):
            continue
        assert_gives(outputs, number)
    gpu.interrupted, gpu.impatient = set(), len(gpu.replays)
    made._graphs[CapturedGraph.STEP].start_holding = gpu.launch
    assert_gives(made.step(values(99)), 99)


def failing():
    raise OSError("no")


def test_after_ctrl_c_nothing_waits_and_the_next_step_is_right(gpu, made, monkeypatch):
    def interrupted(*arguments):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(input_staging, "copy_holding", interrupted)
        with pytest.raises(KeyboardInterrupt):
            made.step(values(0))
    assert gpu.there == gpu.size
    assert gpu.replays == []
    assert_gives(made.step(values(1)), 1)
    assert made._outputs.asked == 0, "the number that the interrupted step raises was announced"


def test_a_launch_that_fails_leaves_nothing_held(gpu, made, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(made._graphs[CapturedGraph.STEP], "start_holding", failing)
        with pytest.raises(OSError, match="no"):
            made.step(values(0))
    assert gpu.there == gpu.size
    assert_gives(made.step(values(1)), 1)


def test_a_step_that_was_not_waited_for_is_run_once_more(gpu, made):
    for number in range(3):
        gpu.impatient = number % 2
        gpu.log.clear()
        assert_gives(made.step(values(number)), number)
        launches = [there for what, there in gpu.log if what == "launch"]
        assert launches == ([0, gpu.size] if number % 2 else [0])


def test_where_the_gpu_waits_in_vain_again_and_again_inputs_are_copied_first(gpu, made):
    for number in range(input_staging._MOST_GIVEN_UP):
        gpu.impatient = 1
        assert_gives(made.step(values(number)), number)
    gpu.impatient = 1
    gpu.log.clear()
    for number in range(3):
        assert_gives(made.step(values(number)), number)
    assert [there for what, there in gpu.log if what == "launch"] == [gpu.size] * 3
    assert gpu.impatient == 1


def test_who_copies_first_launches_as_ever(gpu, made):
    """Without the kernel that waits: everything else that is fed by a captured graph."""
    gpu.inputs.input_copy = None
    log = []

    def launch():
        log.append(gpu.inputs.block.arrays["wide"].copy())
        gpu.launch()

    made._graphs[CapturedGraph.STEP].start = launch
    for number in range(3):
        assert_gives(made.step(values(number)), number)
        np.testing.assert_array_equal(log[-1], values(number)["wide"])
    assert [what for what, _ in gpu.log] == ["launch"] * 3


@pytest.mark.parametrize(
    ("size", "rest", "fits"),
    [
        (input_staging._FIRST_BYTES - 256, None, False),
        (input_staging._FIRST_BYTES, None, True),
        (588 * 1024, None, True),
        (input_staging._AHEAD_BYTES - 256, None, True),
        (input_staging._AHEAD_BYTES, None, False),
        (input_staging._AHEAD_BYTES, 1 << 17, False),
    ],
)
def test_of_which_size_inputs_are_for_that(size, rest, fits):
    assert input_staging._fits_first(size, size if rest is None else rest) == fits


def test_a_replay_keeps_the_interpreters_lock_where_the_gpu_waits_for_the_host(monkeypatch):
    called = []
    graph = GraphExec.__new__(GraphExec)
    graph._executable, graph._index, graph._current, graph._stream = 7, 0, lambda: 0, lambda index: 3
    graph._launch = lambda *arguments: called.append(("letting go", arguments)) or 0
    graph._launch_holding = lambda *arguments: called.append(("holding", arguments)) or 0
    graph.start()
    graph.start_holding()
    assert called == [("letting go", (7, 3)), ("holding", (7, 3))]
