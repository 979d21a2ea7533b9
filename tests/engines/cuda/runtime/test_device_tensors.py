"""Inputs that are tensors of some library are taken where they lie, and outputs stay there when asked: streams simulated on the CPU, which
stands in for the GPU as the place where tensors lie."""

from __future__ import annotations

import contextlib
from functools import partial
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from msplit.engines.cuda.device.device import Device
from msplit.engines.cuda.device.ranks import Ranks
from msplit.engines.cuda.engine import ENGINE
from msplit.engines.cuda.ir.dtypes import numpy_dtype, to_numpy, to_torch
from msplit.engines.cuda.runtime import executables, input_staging, memcpy
from msplit.engines.cuda.runtime.executable import CudaExecutable
from msplit.engines.cuda.runtime.input_staging import InputStaging, arrays_on_host
from msplit.engines.cuda.runtime.output_staging import CapturedGraph, OutputStaging
from msplit.errors import EngineError
from tests.campaign import examples
from tests.engines.cuda.cases import graph_of, job, kernels, program_of
from tests.engines.cuda.interpreted import run_interpreted

CPU = torch.device("cpu")
TYPES = ("float16", "bfloat16", "float32", "float64", "int8", "int32", "int64", "uint8", "uint16", "bool", "complex64")


class Speaks:
    """A tensor of a library that nobody has heard of."""

    def __init__(self, tensor):
        self._tensor, self.shape, self.dtype = tensor, tuple(tensor.shape), numpy_dtype(str(tensor.dtype)[6:])
        self.asked = []

    def __dlpack__(self, **asked):
        self.asked.append(asked)
        return self._tensor.__dlpack__()

    def __dlpack_device__(self):
        return self._tensor.__dlpack_device__()

    def __array__(self, *arguments, **named):
        raise AssertionError("it went through NumPy")


def array_of(dtype, shape, seed):
    numbers = np.random.default_rng(seed).integers(0, 2 if dtype == "bool" else 100, shape)
    return np.asarray(numbers).astype(numpy_dtype(dtype))


arrays = st.dictionaries(
    st.sampled_from("abcdefgh"),
    st.tuples(st.sampled_from(TYPES), st.lists(st.integers(0, 4), max_size=3).map(tuple), st.integers(0, 99)),
    min_size=1,
).map(lambda asked: {name: array_of(*one) for name, one in asked.items()})


@given(arrays, st.data())
def test_inputs_arrive_wherever_they_are(values, data):
    """Any of them as a tensor, by this library or another, the rest as arrays."""
    found = InputStaging({name: to_torch(np.zeros_like(value)) for name, value in values.items()}, Device.of(CPU))
    ways = {name: data.draw(st.sampled_from([lambda x: x, to_torch, lambda x: Speaks(to_torch(x))])) for name in values}
    fed = {name: ways[name](value.copy()) for name, value in values.items()}
    all_arrays = all(isinstance(value, np.ndarray) for value in fed.values())
    assert found.fill(fed, ahead=True) == found.fill(fed) == all_arrays
    found.bring(fed)
    for name, value in values.items():
        np.testing.assert_array_equal(to_numpy(found.on_device[name]), value, err_msg=name)
        if not isinstance(fed[name], np.ndarray):
            assert not found.block.arrays[name].any(), "the block is for what comes from the host"


@given(arrays)
def test_tensors_of_the_host_are_taken_as_arrays_where_the_device_is_a_gpu(values):
    """Forty of them one by one took a step of 61 µs to 595."""
    found = arrays_on_host({name: to_torch(value) for name, value in values.items()})
    assert found is not None
    for name, value in values.items():
        assert type(found[name]) is np.ndarray
        assert found[name].dtype == value.dtype
        np.testing.assert_array_equal(found[name], value)
    assert arrays_on_host({"a": torch.zeros(3, device="meta")}) is None
    assert arrays_on_host({"a": torch.eye(3).to_sparse()}) is None


def test_tensors_that_fit_are_looked_at_together_and_only_once(monkeypatch):
    """To ask each of 40 tensors what an array is asked took 700 of a step's 1026 µs, and the copies one kernel."""
    types = ("int32", "float32", "int32", "bool", "bfloat16")
    values = {
        name: array_of(dtype, (3, 2), number) for number, (name, dtype) in enumerate(zip("abcde", types, strict=True))
    }
    found = InputStaging({name: to_torch(np.zeros_like(value)) for name, value in values.items()}, Device.of(CPU))
    tensors = {name: to_torch(value) for name, value in values.items()}
    with monkeypatch.context() as patched:
        patched.setattr(input_staging, "refuse_fed", None)
        patched.setattr(input_staging, "taken", None)
        assert not found.fill(tensors, ahead=True)
        found.bring({**tensors, "another": "which the host part takes"})
    for name, value in values.items():
        np.testing.assert_array_equal(to_numpy(found.on_device[name]), value, err_msg=name)
        assert not found.block.arrays[name].any()
    tensors["b"].requires_grad_()
    found.bring({**tensors, "c": tensors["c"].T.contiguous().T, "e": torch.zeros(3, 2, dtype=torch.bfloat16)})
    assert not found.on_device["b"].requires_grad
    np.testing.assert_array_equal(to_numpy(found.on_device["c"]), values["c"])


@pytest.mark.parametrize("wrong", ["missing", "shape", "dtype", "no array"])
@pytest.mark.parametrize("all_tensors", [True, False])
def test_what_does_not_fit_beside_tensors_is_refused_and_nothing_copied(wrong, all_tensors):
    found = InputStaging({"a": torch.zeros(3), "b": torch.zeros(2, dtype=torch.int32)}, Device.of(CPU))
    bad = {"shape": torch.ones(4), "dtype": torch.ones(3, dtype=torch.int32), "no array": "text"}
    fed = {"a": bad.get(wrong), "b": torch.ones(2, dtype=torch.int32) if all_tensors else np.ones(2, np.int32)}
    if wrong == "missing":
        del fed["a"]
    with pytest.raises(EngineError, match="input a"):
        found.bring(fed)
    assert not found.on_device["b"].any()


def test_small_inputs_are_not_sent_for_the_next_step(monkeypatch):
    """What they are is asked for while a step runs all the same, and the step is over when that fails."""
    did = []
    inputs = SimpleNamespace(pays_ahead=False)
    small = CudaExecutable.__new__(CudaExecutable)
    small._inputs, small._prefetch = inputs, None
    monkeypatch.setattr(small, "begin", lambda feeds: did.append(("begin", feeds)) or True)
    monkeypatch.setattr(small, "end", lambda: did.append("end") or {"y": 1})
    assert small.step_prefetching({"x": 0}, lambda: did.append("asked")) == {"y": 1}
    assert did == [("begin", {"x": 0}), "asked", "end"]
    with pytest.raises(KeyError):
        small.step_prefetching({"x": 0}, lambda: {}["no more"])
    assert did[-1] == "end"
    assert small._prefetch is None


@pytest.mark.parametrize("large", [False, True])
def test_what_is_on_the_device_is_not_copied_by_the_host(monkeypatch, large):
    if large:  # it would be sent ahead
        monkeypatch.setattr(input_staging, "_AHEAD_BYTES", 1 << 10)
    value = np.arange(9000, dtype=np.float32)
    found = InputStaging({"x": torch.zeros(9000), "ids": torch.zeros(3, dtype=torch.int64)}, Device.of(CPU))
    sent = []
    send = found._async_copy.send
    monkeypatch.setattr(found._async_copy, "send", lambda first, last: sent.append(last - first) or send(first, last))
    monkeypatch.setattr(memcpy.Memcpy, "copy", None)
    for fed in (to_torch(value), Speaks(to_torch(value))):
        found.on_device["x"].zero_()
        found.bring({"x": fed, "ids": to_torch(np.arange(3))})
        np.testing.assert_array_equal(to_numpy(found.on_device["x"]), value)
    assert sent == []
    monkeypatch.undo()
    found.bring({"x": to_torch(value), "ids": np.arange(3)})
    assert not found.block.arrays["x"].any()
    np.testing.assert_array_equal(to_numpy(found.on_device["ids"]), np.arange(3))


def test_tensors_that_lie_otherwise_arrive_too():
    found = InputStaging({"x": torch.zeros(4, 3), "z": torch.zeros(2, dtype=torch.complex64)}, Device.of(CPU))
    grown = torch.arange(12.0).reshape(3, 4).requires_grad_()
    z = torch.tensor([1 + 2j, 3j])
    found.bring({"x": grown.T, "z": z.conj()})
    np.testing.assert_array_equal(to_numpy(found.on_device["x"]), grown.detach().numpy().T)
    np.testing.assert_array_equal(to_numpy(found.on_device["z"]), z.numpy().conj())
    found.bring({"x": torch.ones(1, 3).expand(4, 3), "z": z})
    assert found.on_device["x"].eq(1).all()


@given(
    st.lists(st.tuples(st.integers(1, 3), st.lists(st.booleans(), min_size=4, max_size=4)), min_size=1, max_size=4),
    st.booleans(),
)
@settings(max_examples=examples(30, 1000))
def test_rows_of_requests_are_joined_wherever_they_lie(parts, large):
    """Small ones in the host block, from where the graph fetches them; what goes ahead in its place on the device."""
    entries = {"x": 1, "ids": 2, "half": 1, "k": 0}
    shapes = {"x": (12, 50), "ids": (24,), "half": (12, 0), "k": ()}
    types = {"x": "float32", "ids": "int64", "half": "bfloat16", "k": "float64"}
    arrays, fed = [], []
    for number, (rows, tensors) in enumerate(parts):
        arrays.append(
            {
                name: array_of(types[name], (rows * count, *shapes[name][1:]) if count else (), number)
                for name, count in entries.items()
            }
        )
        fed.append(
            {
                name: to_torch(arrays[-1][name].copy()) if there else arrays[-1][name]
                for name, there in zip(entries, tensors, strict=True)
            }
        )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(input_staging, "_AHEAD_BYTES", 1 << 10 if large else 1 << 20)
        like = {name: to_torch(np.zeros(shape, numpy_dtype(types[name]))) for name, shape in shapes.items()}
        joined, wanted = InputStaging(like, Device.of(CPU)), InputStaging(like, Device.of(CPU))
    joined.join_tensors(fed, entries)
    wanted.join(arrays, entries)
    for one in (joined, wanted):
        one.rest_to_device()
    for name, value in wanted.on_device.items():
        np.testing.assert_array_equal(to_numpy(joined.on_device[name]), to_numpy(value), err_msg=name)


@pytest.mark.parametrize("capture", [True, False])
@pytest.mark.parametrize("runs", [True, False])
def test_what_a_gpu_is_told_of_a_step_on_tensors(monkeypatch, capture, runs):
    """The graph without copies on the caller's stream, and one that delivers behind it where outputs are for the host; or launches on
    others, which wait for the caller's and it for them. Then the end. The block stays as it is: somebody may be filling it for a step.
    """
    log = []

    class Stream:
        def __init__(self, name):
            self.name = name

        def wait_stream(self, other):
            log.append(f"{self.name} waits for {other.name}")

        def synchronize(self):
            log.append(f"{self.name} ends")

    def start(kind):
        log.append(kind.name)
        if kind is CapturedGraph.DELIVER:
            made._outputs.copy(results)

    caller, device = Stream("caller"), Device.of(CPU)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *place: caller)
    for name in ("device", "stream"):
        monkeypatch.setattr(torch.cuda, name, lambda *place: contextlib.nullcontext())
    made = CudaExecutable.__new__(CudaExecutable)
    made.device, made.ieee, made._capture, made._origin = device, True, capture, Stream("origin")
    made._ranks, made._group, made._others, made._prefetch = device.owned(Ranks), None, (), None
    made._inputs = InputStaging({"x": torch.zeros(3), "n": torch.zeros(2, dtype=torch.int64)}, device)
    results = {"y": made._inputs.on_device["x"]}  # a graph gives what is made of its inputs' memory
    made.program = SimpleNamespace(dynamic=(), known_outputs=dict, known_tensors=lambda place: {"k": torch.ones(1)})
    made._outputs = OutputStaging(results, device, captured=False)
    captured = [CapturedGraph.STEP, *([CapturedGraph.RUN] if runs else []), CapturedGraph.DELIVER] if capture else []
    made._graphs = {kind: SimpleNamespace(start=partial(start, kind)) for kind in captured}
    made._results = dict.fromkeys(made._graphs, results)
    monkeypatch.setattr(made, "_record", lambda: log.append("launches") or results)
    launched = ["origin waits for caller", "launches", "caller waits for origin"]
    runs_by = (["RUN"] if runs else []) if capture else launched
    for value in (torch.arange(3.0), np.arange(3, dtype=np.float32) + 1):
        found = made.step_on_device({"x": value, "n": np.arange(2)})
        assert log == [*runs_by, "caller ends"]
        assert found["y"].tolist() == value.tolist()
        assert found["y"].data_ptr() != results["y"].data_ptr()
        assert found["k"].tolist() == [1]
        log.clear()
    assert made.step({"x": torch.full((3,), 9.0), "n": torch.arange(2)})["y"].tolist() == [9, 9, 9]
    assert log == [*runs_by, *(["DELIVER"] if capture else []), "caller ends"]
    np.testing.assert_array_equal(made._inputs.block.arrays["x"], [1, 2, 3])


class Mute(Speaks):
    """Of a library that hands its tensors to nobody."""

    def __dlpack__(self, **asked):
        raise BufferError("not today\nnor tomorrow")


def test_wrong_tensors_are_refused_in_the_words_of_arrays():
    found = InputStaging({"x": torch.zeros(4, 3), "flag": torch.zeros(2, dtype=torch.bool)}, Device.of(CPU))
    right = {"x": torch.ones(4, 3), "flag": torch.ones(2, dtype=torch.bool)}
    for wrong, words in (
        ({**right, "x": torch.ones(4, 4)}, r"input x was prepared as float32 \(4, 3\), not float32 \(4, 4\)"),
        ({**right, "x": torch.ones(4, 3).half()}, r"input x was prepared as float32 \(4, 3\), not float16 \(4, 3\)"),
        ({**right, "flag": torch.ones(2, dtype=torch.uint8)}, r"input flag was prepared as bool \(2,\), not uint8"),
        ({"x": right["x"]}, "no value for input flag"),
        ({**right, "x": Speaks(torch.ones(3))}, r"input x was prepared as .* not float32 \(3,\)"),
        ({**right, "x": [1.0]}, "input x is given a list, not an array"),
        ({**right, "x": torch.ones(4, 3, device="meta")}, "input x: a meta tensor can not be taken"),
        ({**right, "x": torch.ones(4, 3).to_sparse()}, "input x: a sparse tensor can not be taken"),
        ({**right, "x": Mute(torch.ones(4, 3))}, "input x: a Mute can not be taken as a tensor: not today\n  fix"),
    ):
        with pytest.raises(EngineError, match=words):
            found.bring(wrong)
    found.bring(right)
    assert found.on_device["flag"].all()


def model(tf, v1):
    x = v1.placeholder(tf.float32, [None, 3], name="x")
    ids = v1.placeholder(tf.int32, [None], name="ids")
    keep = v1.placeholder(tf.bool, [None], name="keep")
    half = v1.placeholder(tf.bfloat16, [None], name="half")
    picture = v1.placeholder(tf.uint8, [None], name="picture")
    table = tf.constant(np.random.default_rng(0).standard_normal((9, 3)).astype(np.float32))
    tf.add(tf.nn.relu(x), tf.gather(table, ids), name="sum")
    tf.logical_not(keep, name="gone")
    tf.multiply(half, half, name="square")
    tf.cast(picture, tf.float32, name="light")
    tf.identity(x, name="same")
    tf.identity(tf.transpose(x), name="turned")
    tf.constant([1, 2], name="fixed")


OUTPUTS = ["sum", "gone", "square", "light", "same", "turned", "fixed"]


@pytest.fixture(scope="module")
def flat():
    return graph_of(model, outputs=OUTPUTS)


def feeds_of(seed=0, rows=4):
    rng = np.random.default_rng(seed)
    return {
        "x": rng.standard_normal((rows, 3)).astype(np.float32),
        "ids": rng.integers(0, 9, rows).astype(np.int32),
        "keep": rng.integers(0, 2, rows).astype(bool),
        "half": rng.standard_normal(rows).astype(ml_dtypes.bfloat16),
        "picture": rng.integers(0, 256, rows).astype(np.uint8),
    }


@pytest.mark.tf
@pytest.mark.parametrize("streams", [1, 3])
def test_a_step_on_tensors_is_a_step_on_their_values(flat, streams):
    executable = ENGINE.build(job(flat, feeds_of(), streams=streams))
    for seed in range(5):
        feeds = feeds_of(seed)
        wanted = executable.step(feeds)
        tensors = {name: to_torch(value.copy()) for name, value in feeds.items()}
        for fed in (tensors, {**feeds, "x": tensors["x"], "half": Speaks(tensors["half"])}):
            found, there = executable.step(fed), executable.step_on_device(fed)
            assert found.keys() == there.keys() == wanted.keys() == set(OUTPUTS)
            for name, value in wanted.items():
                np.testing.assert_array_equal(found[name], value, err_msg=name)
                assert isinstance(there[name], torch.Tensor)
                assert there[name].is_contiguous()
                assert to_numpy(there[name]).dtype == value.dtype
                np.testing.assert_array_equal(to_numpy(there[name]), value, err_msg=name)
        for name, value in feeds.items():
            np.testing.assert_array_equal(to_numpy(tensors[name]), value, err_msg="inputs stay the caller's")


@pytest.mark.tf
def test_pictures_are_copied_as_bytes_and_cast_on_the_device(flat):
    feeds = feeds_of()
    program = program_of(flat, feeds)
    assert program.fed["picture"] == ((4,), "uint8")
    assert "Cast" in kernels(program)
    with pytest.raises(EngineError, match=r"input x was prepared as float32 \(4, 3\), not uint8"):
        ENGINE.build(job(flat, feeds)).step({**feeds, "x": feeds["x"].astype(np.uint8)})


@pytest.mark.tf
def test_outputs_on_the_device_are_the_callers_own(flat):
    executable, feeds = ENGINE.build(job(flat, feeds_of())), feeds_of()
    wanted = executable.step(feeds)
    tensors = {name: to_torch(value.copy()) for name, value in feeds.items()}
    first = executable.step_on_device(tensors)
    for value in first.values():
        value.zero_()
    for name, value in executable.step_on_device(feeds).items():
        np.testing.assert_array_equal(to_numpy(value), wanted[name], err_msg=name)
    for name, value in feeds.items():
        np.testing.assert_array_equal(
            to_numpy(tensors[name]), value, err_msg="an output that is an input is no part of it"
        )


@pytest.mark.tf
def test_steps_have_inputs_of_their_own_without_gaps(flat, monkeypatch):
    seen = []
    simulate = executables.simulate

    def watched(program, stream_program, values, *rest):
        seen.extend(values.values())
        simulate(program, stream_program, values, *rest)

    executable, feeds = ENGINE.build(job(flat, feeds_of())), feeds_of()
    wanted = executable.step(feeds)
    monkeypatch.setattr(executables, "simulate", watched)
    turned = to_torch(feeds["x"].T.copy()).T
    found = executable.step({**feeds, "x": turned})
    for name, value in wanted.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)
    assert len(seen) == len(feeds)
    assert all(value.is_contiguous() and value.data_ptr() != turned.data_ptr() for value in seen)


def labels(tf, v1):
    city = v1.placeholder(tf.string, [None], name="city")
    x = v1.placeholder(tf.float32, [None, 3], name="x")
    ids = tf.strings.to_hash_bucket_fast(city, 3)
    eye = np.eye(3, dtype=np.float32)
    scores = tf.nn.softmax(tf.matmul(x, eye) + tf.gather(tf.constant(eye), ids), name="scores")
    tf.gather(tf.constant(["cat", "dog", "bird"]), tf.argmax(scores, 1), name="names")


def drawn(tf, v1):
    x = v1.placeholder(tf.float32, [None, 3], name="x")
    tf.add(x, v1.random_uniform(tf.shape(x), seed=3), name="drawn")


@pytest.mark.tf
def test_what_runs_on_the_host_gets_its_part_and_gives_arrays():
    flat = graph_of(labels, outputs=["scores", "names", "city"])
    feeds = {"city": np.array([b"oslo", b"rom"], object), "x": np.ones((2, 3), np.float32)}
    fed = {**feeds, "x": to_torch(feeds["x"].copy())}
    executable = ENGINE.build(job(flat, feeds))
    wanted, found, there = executable.step(feeds), executable.step(fed), executable.step_on_device(fed)
    for name in ("names", "city"):
        assert wanted[name].tolist() == found[name].tolist() == there[name].tolist()
    np.testing.assert_array_equal(found["scores"], wanted["scores"])
    np.testing.assert_array_equal(to_numpy(there["scores"]), wanted["scores"])


@pytest.mark.tf
def test_every_step_draws_others_and_from_its_state_the_same():
    executable = ENGINE.build(job(graph_of(drawn, outputs=["drawn"]), feeds := {"x": np.ones((2, 3), np.float32)}))
    state = executable.save_state()
    first, second = executable.step(feeds)["drawn"], executable.step_on_device(feeds)["drawn"].numpy()
    assert not np.array_equal(first, second)
    executable.load_state(state)
    np.testing.assert_array_equal(executable.step_on_device(feeds)["drawn"], first)
    np.testing.assert_array_equal(executable.step(feeds)["drawn"], second)


@pytest.mark.tf
def test_tensors_of_tensorflow_are_taken_as_they_lie(flat):
    from msplit.engines.tensorflow.runtime import tensorflow

    tf = tensorflow()
    executable, feeds = ENGINE.build(job(flat, feeds_of())), feeds_of()
    found = executable.step({name: tf.constant(value) for name, value in feeds.items()})
    for name, value in executable.step(feeds).items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)
    with pytest.raises(EngineError, match="input x was prepared as float32"):
        executable.step({**feeds, "x": tf.constant("text")})


GATHERED = """
import numpy as np, torch
from msplit.engines.cuda.device.device import Device
from msplit.engines.cuda.runtime.input_staging import InputStaging

CPU = torch.device("cpu")
types = (torch.int32, torch.float32, torch.int64, torch.bfloat16, torch.uint8, torch.float64)
shapes = [(2 * n % 7 + 1, 4) for n in range(24)] + [(33, 64), (1024, 1), (4, 4)]


def drawn(seed):
    return {
        f"x{n}": (torch.from_numpy(np.random.default_rng((seed, n)).standard_normal(shape)) * 99).to(types[n % 6])
        for n, shape in enumerate(shapes)
    }


def run(fed):
    assert found.aim(fed)
    found.memory.zero_()
    found.gather()
    for name, value in found.on_device.items():
        assert torch.equal(fed[name], value), name


found = InputStaging(drawn(0), Device.of(CPU))
assert found.gathers()
for seed in range(4):
    fed = drawn(seed)
    run(fed)
    run({**fed, "another": None})
    for name, value in fed.items():
        value.copy_(drawn(seed + 10)[name])
    run(fed)
    fed["x3"] = fed["x3"].clone()
    run(fed)
    square = fed["x26"]
    square.data = square.data.clone() + 1
    run(fed)
    square.t_()  # the same object, at the same address, with the same shape
    assert not found.aim(fed)
    square.t_()
    run(fed)
    odd = torch.zeros(fed["x3"].numel() + 1, dtype=torch.bfloat16)[1:].view(fed["x3"].shape)
    assert odd.data_ptr() % 4 and odd.is_contiguous()
    for wrong in (
        {**fed, "x3": odd}, {**fed, "x0": fed["x0"].numpy()}, {**fed, "x0": fed["x0"][:0]}, {**fed, "x0": fed["x0"].float()},
        {**fed, "x1": torch._neg_view(fed["x1"])}, {**fed, "x1": torch.nn.Parameter(fed["x1"])}, {**fed, "x0": fed["x0"].to("meta")},
        {**fed, "x0": fed["x0"].to_sparse()}, {name: value for name, value in fed.items() if name != "x5"}, {},
    ):
        assert not found.aim(wrong)
    run(fed)

for like in (
    {"x": torch.zeros(4)}, {"x": torch.zeros(4), "y": torch.zeros(3, dtype=torch.bool)}, {"x": torch.zeros(4), "y": torch.zeros(1 << 20)},
    {"x": torch.zeros(4), "y": torch.zeros(4, dtype=torch.complex64)}, {"x": torch.zeros(0), "y": torch.zeros(0)}, {},
):
    assert not InputStaging(like, Device.of(CPU)).gathers()
assert InputStaging({"x": torch.zeros(4), "y": torch.zeros(0)}, Device.of(CPU)).gathers()
"""


@pytest.mark.needs_triton
def test_one_kernel_gathers_tensors_from_where_they_are_now():
    run_interpreted(GATHERED)


def test_tensors_are_gathered_before_the_graph_that_reads_them(monkeypatch):
    log = []
    made = CudaExecutable.__new__(CudaExecutable)
    made.device, made._capture, made._prefetch = Device.of(CPU), True, None
    made._outputs = SimpleNamespace(expect=lambda: log.append("expect"))
    made._inputs = SimpleNamespace(
        aim=lambda feeds: log.append("aim") or feeds == "tensors", fill=lambda feeds, **how: feeds == "arrays"
    )
    made._graphs = {kind: SimpleNamespace(start=partial(log.append, kind.name)) for kind in CapturedGraph}
    assert made.begin("tensors")
    assert log == ["aim", "expect", "GATHER", "RUN", "DELIVER"]
    log.clear()
    assert made.begin("arrays")
    assert not made.begin("others")
    assert log == ["aim", "expect", "STEP", "aim"]


@pytest.mark.gpu
@pytest.mark.tf
def test_a_gpu_gathers_the_tensors_that_a_step_is_fed_now():
    """Of dozens of inputs: in memory of others, changed where they are, transposed where they are, or mixed with arrays."""

    def build(tf, v1):
        ins = [v1.placeholder([tf.float32, tf.int32][n % 2], [6, 6], name=f"x{n}") for n in range(40)]
        tf.identity(tf.add_n([tf.cast(x, tf.float32) * (n + 1.0) for n, x in enumerate(ins)]), name="y")

    def drawn(seed):
        rng = np.random.default_rng(seed)
        return {f"x{n}": rng.integers(0, 99, (6, 6)).astype([np.float32, np.int32][n % 2]) for n in range(40)}

    made = ENGINE.build(job(graph_of(build, outputs=["y"]), drawn(0), device="cuda", capture=True))
    assert CapturedGraph.GATHER in made._graphs
    kept = {name: torch.from_numpy(value).cuda() for name, value in drawn(1).items()}
    for seed in range(6):
        fed = drawn(seed)
        expected = sum(value.astype(np.float32) * (n + 1.0) for n, value in enumerate(fed.values()))
        for name, value in fed.items():
            kept[name].copy_(torch.from_numpy(value))
        turned = {**kept, "x4": kept["x4"].t().contiguous().t_()}
        for one in (
            kept,
            {name: value.clone() for name, value in kept.items()},
            turned,
            {**kept, "x7": fed["x7"]},
            fed,
        ):
            np.testing.assert_allclose(made.step(one)["y"], expected)
    made.close()
