"""The choice between kernels of a product: what it does with the times that it measures. The kernels' own tests need a GPU."""

import contextlib
import functools
from dataclasses import replace

import numpy as np
import pytest
import torch

from msplit import samples
from msplit.core.arguments import Precision
from msplit.engines.cuda import compile
from msplit.engines.cuda.autotune import batched_matmul, conv
from msplit.engines.cuda.autotune import matmul as products
from msplit.engines.cuda.autotune.tuner import CALLS, LANES, SECONDS, RotatingWeights, Tuner
from msplit.engines.cuda.device import device as devices
from msplit.engines.cuda.device.device import precision
from msplit.engines.cuda.engine import CudaEngine
from msplit.engines.cuda.ir.graph import Op, OpGraph
from msplit.engines.cuda.ir.interpret import as_tuple, call
from msplit.engines.cuda.ir.lowering import table
from msplit.engines.cuda.ir.windows import ROUNDED, to_tf32
from msplit.engines.cuda.passes import pipeline, tracing
from msplit.engines.cuda.passes.pointwise_fusion import fuse
from msplit.verify.compare import compare
from tests.engines.cuda.cases import built_sample, flat_of, job, run

CPU = torch.device("cpu")


class Tile:
    def __init__(self, name, exact=False):
        self.name, self.exact = name, exact

    def __str__(self):
        return self.name


def normal(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def matmul(**attrs):
    return Op(3, "product", "MatMul", {"T": "float32", **attrs}, [(1, 0), (2, 0)], [3])


def dense(*steps):
    return Op(3, "product", "_FusedMatMul", {"T": "float32", "fused_ops": steps}, [(1, 0), (2, 0), (4, 0)], [3])


def batched(**attrs):
    return Op(3, "product", "BatchMatMulV2", {"T": "float32", **attrs}, [(1, 0), (2, 0)], [3])


LAYER = {"start": 0, "count": 3}
GROUPED = Op(3, "group", "_GroupedMatMul", {"T": "float32", "count": 3, "layers": (LAYER,)}, [(1, 0), (2, 0)], [3])


def lowered(op):
    return lambda *tensors: as_tuple(call(table()[op.op], op, list(tensors)))


def is_turned(call):
    """Whether the weights of a call that is timed lie with the summands of an output side by side."""
    weights = next(call.weights)
    return weights.stride(-1) != 1 and weights.shape[-1] > 1


@pytest.fixture
def measured(monkeypatch):
    """Times by name, in ms, in the place of a GPU's; all tiles compute by the library what the kernel would."""
    times, tiles, wrong = {"library": 1.0, "library, turned": 1.0}, [Tile("a"), Tile("b"), Tile("c", exact=True)], set()
    last = []

    def by_kernel(work, tile, result=None):
        last.append(tile.name)
        return batched_matmul.by_library(work) * (2 if tile.name in wrong else 1)

    def milliseconds(self, call, lanes=1, *, cold=False):
        last.clear()
        call()
        name = f"triton {last[0]}" if last else "library"
        if not last and isinstance(call, RotatingWeights) and is_turned(call):
            name = "library, turned"
        return times.get(name, 9.0) * lanes

    monkeypatch.setattr(devices, "_DEVICES", {})
    monkeypatch.setattr(batched_matmul, "by_kernel", by_kernel)
    monkeypatch.setattr(batched_matmul, "tiles", lambda work: list(tiles))
    monkeypatch.setattr(Tuner, "milliseconds", milliseconds)
    with precision(ieee=False):
        yield times, wrong


def choose(op, arguments, movable=True):
    found, weights = products.choose(op, arguments, lowered, movable=movable)
    torch.testing.assert_close(weights, arguments[1], rtol=0, atol=0)
    torch.testing.assert_close(
        lowered(found)(arguments[0], weights, *arguments[2:]), lowered(op)(*arguments), rtol=1e-4, atol=1e-4
    )
    tile = found.attrs.get(batched_matmul.TILE)
    return None if tile is None else tile.name, weights.stride(0) == 1 and weights.shape[1] > 1


def test_the_fastest_tile_that_beats_the_library(measured):
    times, _ = measured
    times |= {"triton a": 0.8, "triton b": 0.7, "triton c": 0.9}
    assert choose(dense("BiasAdd", "Relu"), [normal(4, 8), normal(8, 5), normal(5)]) == ("b", True)


def test_a_tie_leaves_the_library_and_the_weights(measured):
    times, _ = measured
    times |= {"triton a": 0.99}
    assert choose(matmul(), [normal(4, 8), normal(8, 5)]) == (None, False)


def test_the_library_with_turned_weights(measured):
    times, _ = measured
    times |= {"library, turned": 0.5, "triton a": 0.6}
    assert choose(matmul(), [normal(4, 8), normal(8, 5)]) == (None, True)


def test_a_tile_that_gives_other_numbers_is_not_taken(measured):
    times, wrong = measured
    times |= {"triton a": 0.1, "triton b": 0.8}
    wrong.add("a")
    assert choose(dense("BiasAdd"), [normal(4, 8), normal(8, 5), normal(5)]) == ("b", True)


def test_ieee_precision_gets_only_kernels_that_multiply_in_float32(measured):
    times, _ = measured
    times |= {"triton a": 0.1, "triton c": 0.5}
    with precision(ieee=True):
        assert choose(dense("BiasAdd", "Sigmoid"), [normal(4, 8), normal(8, 5), normal(5)]) == ("c", False)


def test_weights_are_not_turned_for_tensor_cores_where_their_rows_would_begin_anywhere(measured):
    times, _ = measured
    times |= {"triton a": 0.5}
    assert choose(matmul(), [normal(4, 6), normal(6, 5)]) == ("a", False)


def test_no_tile_where_more_follows_than_it_can_do(measured):
    times, _ = measured
    times |= {"triton a": 0.1}
    op = dense("BiasAdd", "Add")
    assert choose(op, [normal(4, 8), normal(8, 5), normal(5), normal(4, 5)]) == (None, False)


def test_weights_that_others_read_stay_as_they_lie(measured):
    times, _ = measured
    times |= {"library, turned": 0.1, "triton a": 0.5}
    assert choose(matmul(), [normal(4, 8), normal(8, 5)], movable=False) == ("a", False)
    assert choose(matmul(transpose_b=True), [normal(4, 8), normal(5, 8)]) == ("a", False)


@pytest.mark.parametrize("movable", [True, False])
@pytest.mark.parametrize(
    ("op", "shapes", "cold"),
    [
        (matmul(), [(4, 8), (8, 5)], True),
        (dense("BiasAdd", "Relu"), [(4, 8), (8, 5), (5,)], True),
        (GROUPED, [(3, 4, 8), (3, 8, 5)], True),
        (batched(), [(6, 4, 8), (6, 8, 5)], False),
    ],
)
def test_weights_are_not_in_the_cache_but_what_was_just_computed_is(measured, monkeypatch, op, shapes, cold, movable):
    """What is timed reads other weights in each call, on all streams; the two operands of a batched product stay what they are."""
    read, timed = set(), []

    def milliseconds(self, call, lanes=1, *, cold=False):
        read.clear()
        for _ in range(CALLS * LANES):
            call()
        timed.append((len(read), cold))
        return 1.0

    def lowered_noting(op):
        def noted(data, weights, *rest):
            read.add(weights.data_ptr())
            return lowered(op)(data, weights, *rest)

        return noted

    run = batched_matmul.run

    def run_noting(work, attrs):
        read.add(work.one.weights.data_ptr())
        return run(work, attrs)

    monkeypatch.setattr(batched_matmul, "run", run_noting)
    monkeypatch.setattr(Tuner, "milliseconds", milliseconds)
    products.choose(op, [normal(*shape) for shape in shapes], lowered_noting, movable=movable)
    assert len(timed) >= 4
    assert set(timed) == {(CALLS * LANES if cold else 1, cold)}


@pytest.mark.parametrize("shapes", [((2, 3, 4, 8), (2, 3, 8, 5)), ((6, 4, 8), (6, 8, 5))])
@pytest.mark.parametrize("adjoint", [False, True])
def test_batched_products(measured, shapes, adjoint):
    times, _ = measured
    times |= {"triton b": 0.5}
    x, y = (normal(*shape) for shape in shapes)
    y = y.mT.contiguous() if adjoint else y
    op = batched(adj_y=adjoint)
    found, same = products.choose(op, [x, y], lowered, movable=False)
    assert same is y
    assert found.attrs[batched_matmul.TILE].name == "b"
    torch.testing.assert_close(lowered(found)(x, y), lowered(op)(x, y))


def test_batch_axes_that_broadcast_or_are_no_single_axis_are_the_library_s(measured):
    times, _ = measured
    times |= {"triton b": 0.5}
    op = batched()
    for x, y in ((normal(2, 4, 8), normal(1, 8, 5)), (normal(2, 4, 3, 8).transpose(1, 2), normal(2, 3, 8, 5))):
        assert products.choose(op, [x, y], lowered, movable=False)[0] is op


def test_a_program_that_shares_the_weights_of_another_makes_the_same_choice_without_measuring(measured):
    times, _ = measured
    times |= {"triton a": 0.5}
    arguments = [normal(4, 8), normal(8, 5)]
    op, arguments[1] = products.choose(matmul(), arguments, lowered, movable=True)
    assert arguments[1].stride() == (1, 8)
    times["triton a"] = 2.0
    again, weights = products.choose(matmul(), arguments, lowered, movable=False)
    assert again.attrs == op.attrs
    assert weights is arguments[1]
    assert len(Tuner.of(CPU).chosen(products.FAMILY)) == 1


def test_when_the_time_is_spent_the_library_stays(measured):
    times, _ = measured
    times |= {"triton a": 0.1}
    Tuner.of(CPU).spent = SECONDS + 1
    assert choose(matmul(), [normal(4, 8), normal(8, 5)]) == (None, False)


@pytest.mark.parametrize(
    ("op", "shapes"),
    [(batched(), [(2, 4, 8), (2, 8, 5)]), (matmul(), [(4, 8), (8, 5)]), (GROUPED, [(3, 4, 8), (3, 8, 5)])],
)
@pytest.mark.parametrize("lost", ["before", "now"])
def test_a_kernel_that_wins_where_it_rounds_data_wins_where_they_are_rounded(measured, op, shapes, lost):
    """It has less to do, and the library as much. A contest that says otherwise was disturbed."""
    times, _ = measured
    data, weights = (normal(*shape) for shape in shapes)
    data = to_tf32(data)

    def chosen(op, fast):
        times["triton a"] = 0.5 if fast else 2.0
        found, _ = products.choose(op, [data, weights], lowered, movable=False)
        return getattr(found.attrs.get(batched_matmul.TILE), "name", None)

    assert chosen(op, lost == "now") == ("a" if lost == "now" else None)
    assert chosen(replace(op, attrs={**op.attrs, ROUNDED: True}), lost == "before") == "a"


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("faster", [False, True])
def test_stacked_weights_of_grouped_products(measured, monkeypatch, wide, faster):
    times, _ = measured
    times["library, turned"] = 0.5 if faster else 2.0
    monkeypatch.setattr(batched_matmul, "tiles", lambda work: [])
    layer = {"start": 0, "count": 3, **({"wide": 1} if wide else {})}
    op = Op(3, "group", "_GroupedMatMul", {"T": "float32", "count": 3, "layers": (layer,)}, [(1, 0), (2, 0)], [3])
    weights = normal(6, 3, 5) if wide else normal(3, 6, 5)
    found, laid = products.choose(op, [normal(4, 6), weights], lowered, movable=True)
    assert found is op
    np.testing.assert_array_equal(laid, weights)
    assert (laid.stride(0 if wide else 1) == 1) is faster
    matrices = laid.permute(1, 0, 2) if wide else laid
    torch.testing.assert_close(lowered(op)(normal(4, 6), laid)[0], normal(4, 6) @ matrices)
    if faster:
        assert matrices.permute(0, 2, 1).is_contiguous()


def sample(name, batch, **sizes):
    made = built_sample(name, **sizes)
    return flat_of(made.graph_def, outputs=list(made.outputs)), samples.make_inputs(made, batch)


@functools.cache
def unmeasured(name, sizes):
    """The outputs of a sample whose kernels nobody has chosen."""
    return run(*sample(name, 3, **dict(sizes)), 2, group=True, fuse=True)


@pytest.mark.tf
@pytest.mark.parametrize(
    "faster", [{"triton c": 0.1}, {"library, turned": 0.1}, {"triton c": 0.1, "library, turned": 0.5}]
)
@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("mmoe", {"experts": 4, "features": 24, "units": (16, 12)}),
        ("deepfm", {"categorical": 5, "rows": 20, "width": 4, "units": (8,)}),
        ("bert", {"layers": 2, "hidden": 16, "heads": 2, "sequence": 4, "vocabulary": 30}),
    ],
)
def test_whatever_is_chosen_a_program_computes_the_same(measured, monkeypatch, name, sizes, faster):
    expected = unmeasured(name, tuple(sizes.items()))
    measured[0].update(faster)
    begin = tracing.Tracer.__init__

    def measures(self, *arguments, **options):
        begin(self, *arguments, **options)
        self.measures = True

    monkeypatch.setattr(tracing.Tracer, "__init__", measures)
    other, feeds = sample(name, 3, **sizes)  # programs are kept per graph
    found = run(other, feeds, 2, group=True, fuse=True)
    assert compare(found, expected).passed
    made = Tuner.of(CPU).chosen(products.FAMILY).values()
    if "library, turned" in faster and (
        name != "mmoe" or "triton c" not in faster
    ):  # to a kernel of ours, which all of MMoE's grouped products then have, it is all the same
        assert any(choice.turned for choice in made)
    if "triton c" in faster:
        grouped = Tuner.of(CPU).chosen(batched_matmul.FAMILY).values()
        assert any(choice.tile is not None for choice in made) or any(kernel == "triton c" for kernel, _ in grouped)


def test_who_computes_most_with_shared_weights_says_how_they_lie(measured, monkeypatch):
    """As in a recurrent network's waves: the first reader has one member of the stack, those in the middle all of them."""
    monkeypatch.setattr(batched_matmul, "tiles", lambda work: [])
    stack = np.random.default_rng(0).standard_normal((3, 6, 5), np.float32)
    graph = OpGraph({}, {(50, 0): stack}, {}, {}, numbers=100)
    graph.feeds = {name: (number, 0) for number, name in enumerate("abc")}
    graph.shapes = {(0, 0): (4, 6), (1, 0): (3, 4, 6), (2, 0): (3, 4, 6)}
    for number, start, count in ((10, 1, 1), (11, 0, 3), (12, 0, 3)):
        layer = {"start": start, "count": count}
        attrs = {"T": "float32", "count": count, "layers": (layer,)}
        graph.ops[number] = Op(number, f"wave_{number}", GROUPED.op, attrs, [(number - 10, 0), (50, 0)], [number])
        graph.shapes[number, 0] = (count, 4, 5)
    graph.fetches = {f"out_{number}": (number, 0) for number in graph.ops}
    assert {key: op.node for key, op in products.heaviest(graph).items()} == {(50, 0): 11}
    feeds = {name: normal(*graph.shapes[key]).numpy() for name, key in graph.feeds.items()}
    tried = []

    def milliseconds(self, call, lanes=1, *, cold=False):
        call()
        if not isinstance(call, RotatingWeights):  # among our own kernels, of which there is none here
            return 9.0
        tried.append(tuple(call._data.shape))
        many = call._data.dim() == 3
        return lanes * (
            1.0 if is_turned(call) == many else 2.0
        )  # the wide waves want them turned, the narrow one does not

    monkeypatch.setattr(Tuner, "milliseconds", milliseconds)
    tracer = tracing.Tracer(graph, CPU, nchw=False)
    tracer.measures = True
    tracer.feed(feeds)
    for op in graph.ops.values():
        tracer.run(op)
    assert tracer.constants[50, 0].stride(1) == 1
    assert tried[0] == (3, 4, 6)
    for number, name in ((10, "a"), (11, "b"), (12, "c")):
        matrices = stack[1:2] if number == 10 else stack
        np.testing.assert_allclose(tracer.values[number, 0], feeds[name] @ matrices, rtol=1e-5, atol=1e-6)


class Noted:
    """Kernels that would be compiled ahead, in the place of `launch.Precompiler`."""

    def __init__(self):
        self.weights = {}

    def noting(self, note):
        return contextlib.nullcontext()


@pytest.mark.parametrize("movable", [True, False])
@pytest.mark.parametrize(
    ("op", "shapes"),
    [
        (matmul(), [(4, 8), (8, 5)]),
        (matmul(), [(4, 7), (7, 5)]),
        (dense("BiasAdd", "Relu"), [(4, 8), (8, 5), (5,)]),
        (GROUPED, [(3, 4, 8), (3, 8, 5)]),
    ],
)
def test_all_that_is_timed_was_listed(measured, monkeypatch, op, shapes, movable):
    """Kernels and how the data lie that they are compiled for; nothing is chosen while they are listed."""
    times, _ = measured
    times |= {"library, turned": 0.5, "triton a": 0.3, "triton c": 0.2}
    launched, by_kernel = set(), batched_matmul.by_kernel

    def noted(work, tile, result=None):
        launched.add((tile.name, work.one.x.stride(), work.one.weights.stride()))
        return by_kernel(work, tile, result)

    monkeypatch.setattr(batched_matmul, "by_kernel", noted)
    arguments = [normal(*shape) for shape in shapes]
    tuner = Tuner.of(CPU)
    tuner._noted = listing = Noted()
    found, weights = products.choose(op, list(arguments), lowered, movable=movable)
    tuner._noted = None
    assert batched_matmul.TILE not in found.attrs
    assert weights is arguments[1]
    assert max(listing.weights.values()) > 0
    assert tuner.known(products.FAMILY, ()) is None
    listed = set(launched)
    launched.clear()
    products.choose(op, list(arguments), lowered, movable=movable)
    assert launched
    assert launched <= listed


@pytest.fixture
def asked(measured, monkeypatch):
    """The choices that a program asks for on the CPU: those that are listed ahead, and those that are made. Products' kernels of ours win
    where "triton c" is fast; convolutions are the library's."""
    found = {True: set(), False: set()}
    choose, begin = Tuner.choose, tracing.Tracer.__init__

    @contextlib.contextmanager
    def listing(self, meanwhile=None):
        self._noted = Noted()
        yield
        self._noted = None

    def asking(self, family, key, *rest, **options):
        if family.name != "listed choices":
            found[self._noted is not None].add((family.name, repr(key)))
        return None if family is conv.FAMILY else choose(self, family, key, *rest, **options)

    def measures(self, *arguments, **options):
        begin(self, *arguments, **options)
        self.measures = True

    monkeypatch.setattr(Tuner, "listing", listing)
    monkeypatch.setattr(Tuner, "can_list", lambda self: True)
    monkeypatch.setattr(Tuner, "choose", asking)
    monkeypatch.setattr(tracing.Tracer, "__init__", measures)
    monkeypatch.setattr(conv, "can_compile", lambda: True)
    for module in (compile, fuse, pipeline, tracing):
        monkeypatch.setattr(module, "takes_tf32", lambda device: True)
    return found


@pytest.mark.tf
@pytest.mark.parametrize("faster", [{}, {"triton a": 0.1}, {"triton a": 0.1, "library, turned": 0.5}])
@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("mmoe", {"experts": 4, "features": 24, "units": (16, 12)}),
        ("bert", {"layers": 2, "hidden": 16, "heads": 2, "sequence": 4, "vocabulary": 30}),
        ("squeezenet", {"image": 32}),
    ],
)
def test_all_that_a_program_chooses_was_listed(measured, asked, name, sizes, faster):
    """Whoever's kernels win, and so whether they round their results to TF32 for the next: kernels that are compiled late are compiled one
    choice after the other."""
    measured[0].update(faster)
    flat, feeds = sample(name, 3, **sizes)
    for fused in (False, True):  # what was listed for the first is not listed again for the second
        CudaEngine().compile(replace(job(flat, feeds, group=True, fuse=fused), precision=Precision.TF32))
    assert asked[False]
    assert asked[False] <= asked[True]
