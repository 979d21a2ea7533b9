"""Convolutions of the same data as one op: found, merged, equal to the plain program. That one kernel does them is tested on a GPU."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from msplit.engines.cuda.compile import optimize
from msplit.engines.cuda.engine import CudaEngine
from msplit.engines.cuda.ir.windows import SIBLINGS
from msplit.engines.cuda.passes.convolution import concat_into
from msplit.engines.cuda.passes.convolution.concat_into import SIBLING_CONVOLUTIONS, Times, find_siblings
from msplit.engines.cuda.passes.measured import deciding
from msplit.engines.cuda.runtime.plan_binding import groups_of
from tests.campaign import examples
from tests.engines.cuda.cases import CPU, flat_of, job, kernels, run, scattered
from tests.engines.cuda.random_graphs import FLOAT, _Graph

TILES = (32, 32, 64, 4, 3, 1)


class Block(_Graph):
    """Convolutions of one placeholder and of each other."""

    def conv(
        self, data, channels, results, *, window=(1, 1), stride=1, padding="SAME", bias=True, relu=True, filter=None
    ):
        filter = filter or self.normal(*window, channels, results)
        y = self.node(
            "Conv2D", [data, filter], T=FLOAT, strides=[1, stride, stride, 1], padding=padding, data_format="NHWC"
        )
        if bias:
            y = self.node("BiasAdd", [y, self.normal(results)], T=FLOAT, data_format="NHWC")
        return self.node("Relu", [y], T=FLOAT) if relu else y

    def finish(self, ends):
        outputs = [self.node("Identity", [end], T=FLOAT) for end in ends]
        return flat_of(self.graph_def, outputs=outputs)


def block(seed=0):
    class Fixed:
        def __call__(self, strategy):
            return seed

    return Block(Fixed())


def data(*shape):
    return {"x": np.random.default_rng(1).standard_normal(shape).astype(np.float32)}


def source_of(flat, feeds):
    return optimize(flat, feeds, CPU, group=True).graph


@pytest.fixture
def merges_everywhere():
    """Siblings are merged on the CPU too, where nothing can be measured."""
    with deciding({SIBLING_CONVOLUTIONS: lambda graph, members: (True, TILES)}):
        yield


CONVOLUTION = st.fixed_dictionaries(
    {
        "source": st.integers(0, 2),
        "results": st.sampled_from([1, 3, 4, 8, 33]),
        "window": st.sampled_from([(1, 1), (1, 1), (3, 3), (1, 3)]),
        "stride": st.sampled_from([1, 1, 2]),
        "padding": st.sampled_from(["SAME", "VALID"]),
        "bias": st.booleans(),
        "relu": st.booleans(),
    }
)


@settings(max_examples=examples(8, 25), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    wanted=st.lists(CONVOLUTION, min_size=2, max_size=9),
    batch=st.integers(1, 2),
    streams=st.integers(1, 4),
    fuse=st.booleans(),
)
def test_merged_programs_give_what_plain_ones_give(merges_everywhere, wanted, batch, streams, fuse):
    graph = block(len(wanted))
    values = [(graph.placeholder("x", [batch, 9, 8, 5]), 5)]
    for one in wanted:
        options = {name: value for name, value in one.items() if name not in ("source", "results")}
        where, channels = values[one["source"] % min(len(values), 3)]
        if where != "x":  # whatever the size of what is read, the window fits
            options |= {"padding": "SAME"}
        values.append((graph.conv(where, channels, one["results"], **options), one["results"]))
    flat = graph.finish([value for value, _ in values[1:]])
    feeds = data(batch, 9, 8, 5)
    plain = run(flat, feeds, 1)
    merged = run(flat, feeds, streams, group=True, fuse=fuse, steps=2)
    assert plain.keys() == merged.keys()
    for name, value in plain.items():
        np.testing.assert_allclose(merged[name], value, rtol=1e-4, atol=1e-5)


def inception():
    """A block of four branches, of which three begin with siblings; outputs of each."""
    graph = block()
    x = graph.placeholder("x", [1, 6, 6, 8])
    one = graph.conv(x, 8, 16)
    three = graph.conv(graph.conv(x, 8, 4), 4, 6, window=(3, 3))
    double = graph.conv(graph.conv(graph.conv(x, 8, 5), 5, 6, window=(3, 3)), 6, 7, window=(3, 3))
    pool = graph.node(
        "AvgPool", [x], T=FLOAT, ksize=[1, 3, 3, 1], strides=[1, 1, 1, 1], padding="SAME", data_format="NHWC"
    )
    return graph.finish([one, three, double, graph.conv(pool, 8, 3)])


def test_a_block_of_inception_begins_with_one_step(merges_everywhere):
    flat, feeds = inception(), data(1, 6, 6, 8)
    plain, merged = (CudaEngine().compile(job(flat, feeds, group=group)) for group in (False, True))
    assert kernels(merged.program) == ["AvgPool", *["_FusedConv2D"] * 4, "_SiblingConv2D"]
    assert len(kernels(plain.program)) == 8
    assert merged.facts["groups"] == 1
    assert merged.facts["group_sizes"] == {"3": 1}
    numbers = [sum(tensor.numel() for tensor in made.program.constants.values()) for made in (plain, merged)]
    assert numbers[0] == numbers[1], "weights are held once"
    step = next(step for step in merged.program.steps if step.op.op == "_SiblingConv2D")
    assert step.outputs == 3
    names = [flat.graph.names[node] for node in step.op.source_nodes if flat.graph.ops[node] == "Conv2D"]
    assert len(names) == 3
    # What the longest way to an output begins with decides where all run: here the branch of three convolutions.
    assert step.op.attrs[SIBLINGS][0] == 5
    ids = scattered(flat, 3)
    group = next(
        group
        for group in groups_of(merged.program, merged.plan(job(flat, feeds, ids, streams=3)))
        if group.kind == "grouped"
    )
    assert set(names) <= {flat.graph.names[node] for node in group.nodes}


def test_only_alike_convolutions_of_one_tensor_are_siblings():
    graph = block()
    x = graph.placeholder("x", [1, 6, 6, 8])
    pair = [graph.conv(x, 8, 4), graph.conv(x, 8, 5)]
    shared = graph.normal(1, 1, 8, 3)
    different = [
        graph.conv(x, 8, 4, relu=False),
        graph.conv(x, 8, 4, bias=False, relu=False),
        graph.conv(x, 8, 4, window=(3, 3)),
        graph.conv(x, 8, 4, stride=2),
        graph.conv(graph.conv(x, 8, 8, window=(1, 3)), 8, 4),
        graph.conv(x, 8, 3, filter=shared),  # held twice if merged, for the next one reads it too
        graph.conv(graph.conv(x, 8, 8, window=(3, 1)), 8, 3, filter=shared, relu=False),
    ]
    source = source_of(graph.finish([*pair, *different]), data(1, 6, 6, 8))
    found = find_siblings(source)
    assert [len(members) for members in found] == [2]
    assert {source.constants[op.inputs[1]].shape[-1] for op in found[0]} == {4, 5}


def test_many_siblings_are_several_sets():
    graph = block()
    x = graph.placeholder("x", [1, 3, 3, 4])
    flat = graph.finish([graph.conv(x, 4, 2 + number) for number in range(9)])
    sets = find_siblings(source_of(flat, data(1, 3, 3, 4)))
    assert [len(members) for members in sets] == [3, 3, 3]
    assert max(map(len, sets)) <= concat_into.MOST


def test_what_is_not_decided_stays():
    source = source_of(inception(), data(1, 6, 6, 8))
    before = list(source.ops)
    assert SIBLING_CONVOLUTIONS.run(source, CPU) is False
    assert SIBLING_CONVOLUTIONS.run(source, CPU, measure=False) is False
    assert list(source.ops) == before


def test_one_kernel_must_win_alone_on_streams_and_under_load():
    wins = Times(TILES, merged=5, loaded=9, one_by_one=12, one_by_one_loaded=20, beside=6)
    assert wins.wins()
    for worse in ({"merged": 7}, {"loaded": 25}, {"one_by_one": 5}, {"beside": 4.5}):
        assert not replace(wins, **worse).wins()
    assert replace(wins, beside=5).wins(), "members of their own must fork and join, too"
