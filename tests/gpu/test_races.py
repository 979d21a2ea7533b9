"""Races on a real GPU: random graphs on random streams, delays injected, freed memory poisoned. Run by `benchmarks/visit.py`."""

from __future__ import annotations

import os

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from msplit.core.arguments import Precision
from msplit.engines.base import Job
from msplit.engines.cuda.engine import CudaEngine
from msplit.engines.cuda.options import Torture
from msplit.opset import schema
from tests.engines.cuda.cases import flat_of, options_of, scattered
from tests.engines.cuda.random_graphs import random_graphs

pytestmark = pytest.mark.gpu

GRAPHS = int(os.environ.get("MSPLIT_RACE_GRAPHS", "40"))
STREAMS = (1, 2, 4, 8)
REPLAYS = 4


def fresh(feeds, seed):
    """Other inputs of the same shapes."""
    rng = np.random.default_rng(seed)
    return {
        name: rng.standard_normal(value.shape).astype(value.dtype) if value.dtype.kind == "f" else np.roll(value, seed)
        for name, value in feeds.items()
    }


def build(engine, flat, feeds, streams, **options):
    ids = scattered(flat, streams, streams)
    return engine.build(Job(flat, ids, streams, feeds, precision=Precision.IEEE, options=options_of("cuda", **options)))


def dense_branches(branches=8, width=64, depth=3):
    """Independent chains of products from one input, joined by a concat: what cuBLAS workspaces are shared between, if they are."""
    rng = np.random.default_rng(1)
    graph = schema.graph_pb2.GraphDef()

    def add(op, name, inputs=(), **attrs):
        node = graph.node.add(op=op, name=name, input=list(inputs))
        for key, value in attrs.items():
            if isinstance(value, np.ndarray):
                tensor = node.attr[key].tensor
                tensor.dtype = 1 if value.dtype == np.float32 else 3
                tensor.tensor_content = value.tobytes()
                for size in value.shape:
                    tensor.tensor_shape.dim.add(size=size)
            elif isinstance(value, tuple):
                for size in value:
                    node.attr[key].shape.dim.add(size=size)
            elif isinstance(value, bool):
                node.attr[key].b = value
            elif key == "N":
                node.attr[key].i = value
            else:
                node.attr[key].type = value
        return name

    x = add("Placeholder", "x", dtype=1, shape=(32, width))
    ends = []
    for branch in range(branches):
        last = x
        for layer in range(depth):
            name = f"b{branch}/l{layer}"
            weights = (rng.standard_normal((width, width)) / 8).astype(np.float32)
            add("Const", f"{name}/w", dtype=1, value=weights)
            product = add("MatMul", f"{name}/MatMul", [last, f"{name}/w"], T=1, transpose_a=False, transpose_b=False)
            last = add("Tanh", f"{name}/Tanh", [product], T=1)
        ends.append(last)
    add("Const", "axis", dtype=3, value=np.array(1, np.int32))
    add("ConcatV2", "out", [*ends, "axis"], N=branches, T=1, Tidx=3)
    return flat_of(graph), {"x": rng.standard_normal((32, width)).astype(np.float32)}


@settings(max_examples=GRAPHS, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(random_graphs(), st.integers(0, 1000))
@pytest.mark.timeout(900)
def test_streams_equal_one_stream_under_delays_with_freed_memory_poisoned(graph, seed):
    graph_def, feeds, outputs = graph
    flat = flat_of(graph_def, outputs=outputs)
    engine = CudaEngine()
    plain = build(engine, flat, feeds, 1)
    expected = [plain.step(fresh(feeds, number)) for number in range(REPLAYS)]
    plain.close()
    for streams in STREAMS:
        tortured = build(engine, flat, feeds, streams, torture=Torture(poison=True, delay_cycles=20_000, seed=seed))
        for number in range(REPLAYS):
            got = tortured.step(fresh(feeds, number))
            for name, value in expected[number].items():
                np.testing.assert_array_equal(got[name], value, err_msg=f"{name}, {streams} streams, replay {number}")
        tortured.close()


@pytest.mark.parametrize("capture", [True, False])
def test_several_engines_live_at_once_and_replay_in_any_order(capture):
    rng = np.random.default_rng(0)
    flat, feeds = dense_branches()
    engine = CudaEngine()
    live = [build(engine, flat, feeds, streams, capture=capture) for streams in (1, 2, 4, 8)]
    for number in range(12):
        inputs = fresh(feeds, number)
        wanted = None
        for which in rng.permutation(len(live)):
            got = live[which].step(inputs)
            wanted = wanted or got
            for name, value in wanted.items():
                np.testing.assert_array_equal(got[name], value)
    for executable in live[1:]:
        executable.close()
    again = live[0].step(fresh(feeds, 0))
    assert all(np.isfinite(value).all() for value in again.values())
    live[0].close()
