"""The next step's inputs travel while a step runs, and no step reads others than its own: on a fake GPU, whose streams run at any pace."""

from __future__ import annotations

import contextlib
import random
from collections import deque
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import event, given, settings
from hypothesis import strategies as st

from msplit.engines.cuda.device.device import Device
from msplit.engines.cuda.device.ranks import Ranks
from msplit.engines.cuda.engine import ENGINE
from msplit.engines.cuda.ir.dtypes import to_torch
from msplit.engines.cuda.runtime import executable, input_staging
from msplit.engines.cuda.runtime.executable import CudaExecutable
from msplit.engines.cuda.runtime.input_staging import InputStaging
from msplit.engines.cuda.runtime.memcpy import HostMemory
from msplit.engines.cuda.runtime.output_staging import CapturedGraph
from msplit.errors import EngineError
from msplit.opset import schema
from tests.campaign import examples
from tests.engines.cuda.cases import flat_of, job, step_then

CPU = torch.device("cpu")
SHAPES = {"ids": (3,), "more": (5, 2), "label": (9,), "picture": (40, 30), "wide": (700, 2)}
TYPES = {"ids": np.int64, "more": np.int64, "label": np.float32, "picture": np.uint8, "wide": np.float32}
CALLER, COPIES = 1, 2


class Gpu:
    """Streams that execute what was issued on them in order, as far as events let them, at a pace of their own.

    Args:
        deaf: Streams, or "host", that wait for no event: mistakes that tests must find.
        paces: How much is executed, of all streams, when more is issued: one of these.
    """

    def __init__(self, seed, deaf=(), paces=(0, 0, 1, 5)):
        self.chance, self.deaf, self.paces = random.Random(seed), deaf, paces
        self.issued = {CALLER: deque(), COPIES: deque()}

    def issue(self, stream, do, ready=lambda: True):
        self.issued[stream].append((ready, do))
        self.work(self.chance.choice(self.paces))

    def work(self, most=10**6, until=lambda: False):
        for _ in range(most):
            able = [stream for stream in self.issued.values() if stream and stream[0][0]()]
            if until() or not able:
                break
            self.chance.choice(able).popleft()[1]()
        assert most < 10**6 or until(), "nothing goes on"

    def stream(self, number):
        return SimpleNamespace(
            cuda_stream=number,
            wait_event=lambda event: self.issue(number, lambda: None, self.heard(number, event)),
            synchronize=lambda: self.work(until=lambda: not self.issued[number]),
        )

    def heard(self, who, event):
        at = event.issued
        return lambda: who in self.deaf or event.done >= at

    def event(self):
        made = SimpleNamespace(issued=0, done=0)

        def record(stream):
            made.issued += 1
            self.issue(stream.cuda_stream, lambda at=made.issued: setattr(made, "done", at))

        made.record = record
        made.synchronize = lambda: self.work(until=self.heard("host", made))
        return made

    def own_copy(self, tensor):
        copied = torch.zeros_like(tensor)
        self.issue(CALLER, lambda: copied.copy_(tensor))
        return copied

    def copier(self):
        gpu = self

        class Copy:
            """In two halves, at whatever time."""

            def __init__(self, source, target, stream=None):
                self.source, self.target, self.stream = source, target, stream or CALLER

            def send(self, first, last):
                middle = (first + last) // 2
                for begin, end in ((first, middle), (middle, last)):
                    gpu.issue(self.stream, lambda a=begin, b=end: self.target[a:b].copy_(self.source[a:b].clone()))

            def send_from(self, array, first):
                source = torch.from_numpy(array.reshape(-1).view(np.uint8))
                gpu.issue(self.stream, lambda: self.target[first : first + array.nbytes].copy_(source))
                return True

        return Copy


@contextlib.contextmanager
def made_on(gpu):
    """An executable on a fake GPU, of a graph whose outputs are its inputs; it reads each at a time of its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(input_staging, "_AHEAD_BYTES", 1 << 10)
        patch.setattr(input_staging, "_AHEAD_ALONE_BYTES", 1 << 10)
        patch.setattr(input_staging, "_PREFETCHED_BYTES", 1 << 10)
        for module in (input_staging,):
            patch.setattr(module, "AsyncCopy", gpu.copier())
        patch.setattr(torch.cuda, "current_stream", lambda *place: gpu.stream(CALLER))
        patch.setattr(torch.cuda, "Event", gpu.event)
        patch.setattr(executable, "own_copy", gpu.own_copy)
        for name in ("device", "stream"):
            patch.setattr(torch.cuda, name, lambda *place: contextlib.nullcontext())
        yield executable_on(gpu)


def executable_on(gpu):
    streams = SimpleNamespace(lease=lambda count: [gpu.stream(COPIES)], give_back=lambda streams: None)
    device = Device(CPU)
    device.streams = streams
    made = CudaExecutable.__new__(CudaExecutable)
    made.device, made.ieee, made._capture, made._prefetch = device, True, True, None
    made._ranks, made._group, made._others = device.owned(Ranks), None, ()
    made.program = SimpleNamespace(dynamic=(), known_outputs=dict, known_tensors=lambda place: {})
    made._inputs = InputStaging(
        {name: torch.zeros(SHAPES[name], dtype=to_torch(np.zeros(1, TYPES[name])).dtype) for name in SHAPES}, device
    )
    there, given = made._inputs.on_device, {name: np.zeros(SHAPES[name], TYPES[name]) for name in SHAPES}
    results = {name: torch.zeros_like(tensor) for name, tensor in there.items()}

    def start(graph):
        if graph is CapturedGraph.STEP:  # it fetches what was not sent ahead
            gpu.issue(CALLER, made._inputs.rest_to_device)
        for name in gpu.chance.sample(list(SHAPES), len(SHAPES)) if graph is not CapturedGraph.DELIVER else ():
            gpu.issue(CALLER, lambda name=name: results[name].copy_(there[name]))
        if graph is not CapturedGraph.RUN:
            fetch(results)

    def fetch(tensors):
        gpu.issue(CALLER, lambda: [np.copyto(given[name], tensor.numpy()) for name, tensor in tensors.items()])

    wait = gpu.stream(CALLER).synchronize
    made._graphs = {graph: SimpleNamespace(start=partial(start, graph), finish=wait) for graph in CapturedGraph}
    made._results = dict.fromkeys(made._graphs, results)
    made._outputs = SimpleNamespace(
        expect=lambda: None,
        arrived=lambda: False,
        settle=lambda: None,
        read=lambda into=None: {name: value.copy() for name, value in given.items()},
    )
    return made


def values(number):
    rng = np.random.default_rng(number)
    return {name: rng.integers(0, 255, shape).astype(TYPES[name]) for name, shape in SHAPES.items()}


def assert_gives(outputs, number):
    for name, value in values(number).items():
        np.testing.assert_array_equal(outputs[name], value, err_msg=f"{name} of step {number}")


def train(gpu, count):
    """Steps whose successors are known; what was fed is written over as soon as its step has returned."""
    following = values(0)
    with made_on(gpu) as made:
        for number in range(count):
            feeds, following = following, values(number + 1)
            assert_gives(step_then(made, feeds, following), number)
            for value in feeds.values():
                value[...] = 7


def test_every_step_has_its_own_inputs_at_whatever_pace_streams_run():
    for seed in range(examples(15, 200)):
        train(Gpu(seed), 6)


@pytest.mark.parametrize("deaf", ["host", CALLER, COPIES])
def test_each_of_the_three_waits_is_needed(deaf):
    """Otherwise pinned memory is written while it is copied, or half of the inputs are those of another step, or they come too soon."""

    def is_wrong(seed):
        try:
            train(Gpu(seed, deaf=(deaf,)), 6)
        except AssertionError:
            return True
        return False

    assert any(map(is_wrong, range(100)))


@given(
    st.integers(0, 10**6),
    st.lists(
        st.tuples(st.sampled_from(["next", "another", "wrong", "missing", "tensor", "nothing"]), st.booleans()),
        min_size=1,
        max_size=8,
    ),
)
@settings(deadline=None, max_examples=examples(40, 1000))
def test_whatever_was_announced_a_step_gives_what_it_is_fed(seed, steps):
    """Announced in vain, wrongly, as tensors, or not at all; outputs on the host or on the device."""
    following = values(0)
    with made_on(Gpu(seed)) as made:
        for number, (then, on_device) in enumerate(steps):
            feeds, following = following, values(number + 1)
            if then == "tensor":
                feeds["wide"] = to_torch(feeds["wide"])
            announced = {
                "next": following,
                "another": values(99),
                "wrong": {**following, "wide": following["wide"][1:]},
                "missing": {name: value for name, value in following.items() if name != "ids"},
                "tensor": {**following, "label": to_torch(following["label"].copy())},
            }.get(then)
            event(then)
            if announced is not None:
                outputs = step_then(made, feeds, announced, on_device=on_device)
            else:
                outputs = made.step_on_device(feeds) if on_device else made.step(feeds)
            assert_gives(outputs, number)
            if then in ("wrong", "missing"):  # said by the step itself
                with pytest.raises(EngineError, match=r"input wide was prepared|no value for input ids"):
                    made.step(announced)
            if then == "another":  # what was sent of a mapping is for one step
                announced.update(values(98))
                made.step(values(97))
                assert_gives(step_then(made, announced, following), 98)
            for value in feeds.values():
                value[...] = 7


@pytest.mark.parametrize("deaf", [(), ("host",)])
def test_memory_that_the_gpu_reads_itself_is_written_over_when_it_has(deaf):
    """By the function that gives the next inputs, too, which may reuse it. Without a wait some step reads another one's."""

    def is_right(seed):
        with made_on(Gpu(seed, deaf, (0, 0, 0, 1))) as made:
            shared, registered = values(0), made.device.owned(HostMemory)
            for value in shared.values():
                registered.register(value.ctypes.data, value.nbytes)
            for number in range(6):

                def following(number=number):
                    for name, value in values(number + 1).items():
                        shared[name][...] = value

                ask = partial(made._step, then=following) if number % 3 else made.step
                outputs = ask(shared)
                if not all(np.array_equal(outputs[name], value) for name, value in values(number).items()):
                    return False
                following()
            assert not made._inputs.block.arrays["picture"].any()
        return True

    found = [is_right(seed) for seed in range(examples(30, 300))]
    assert all(found) == (not deaf)


def test_values_are_those_of_the_time_when_they_were_sent():
    """On a CPU, too, which stands in for the GPU: who changes them before their step is told by tests without one."""
    made = schema.graph_pb2.GraphDef()
    x = made.node.add(op="Placeholder", name="x")
    x.attr["dtype"].type = 1
    x.attr["shape"].shape.dim.add(size=2)
    made.node.add(op="AddV2", name="y", input=["x", "x"]).attr["T"].type = 1
    made = ENGINE.build(job(flat_of(made, outputs=["y"]), {"x": np.zeros(2, np.float32)}))
    first, second = ({"x": np.full(2, value, np.float32)} for value in (1, 2))
    assert step_then(made, first, second)["y"].tolist() == [2, 2]
    second["x"][...] = 9
    assert made.step(second)["y"].tolist() == [4, 4]
    assert made.step(second)["y"].tolist() == [18, 18]
    assert step_then(made, second, {"x": np.zeros(3, np.float32)})["y"].tolist() == [18, 18]
