"""Whatever the branches are, merging them changes no result, holds no weights twice, and launches no more than before."""

import itertools

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from msplit.engines.cuda.compile import optimize
from msplit.engines.cuda.passes.horizontal_fusion.weights import SMALL_BYTES
from msplit.engines.cuda.passes.tracing import trace
from msplit.engines.cuda.runtime.executables import SimulatedExecutable, plan_for
from msplit.engines.cuda.runtime.stream_program import arrange
from msplit.verify.compare import compare
from tests.campaign import examples
from tests.engines.cuda.alike_branches import alike_branches
from tests.engines.cuda.cases import CPU, flat_of, scattered
from tests.engines.cuda.passes.harness import weight_bytes
from tests.engines.cuda.random_graphs import random_graphs


def programs(flat, feeds):
    """The program as it is, and with branches merged."""
    for group in (False, True):
        optimized = optimize(flat, feeds, CPU, group=group)
        yield trace(optimized.graph, optimized.feeds, CPU)


def results(program, flat, feeds, streams, seed=0):
    plan = plan_for(program, scattered(flat, streams, seed), None)
    return SimulatedExecutable(program, arrange(program, plan), {}, seed=seed).step(feeds)


def check(flat, feeds, streams, seed):
    plain, merged = programs(flat, feeds)
    found = compare(results(merged, flat, feeds, streams, seed), results(plain, flat, feeds, 1))
    assert found.passed, found.describe()
    launches = [sum(step.launches for step in program.steps) for program in (plain, merged)]
    assert launches[1] <= launches[0]
    covered = [{node for step in program.steps for node in step.op.source_nodes} for program in (plain, merged)]
    busy = {node for step in plain.steps if step.launches for node in step.op.source_nodes}
    assert busy <= covered[1]
    return plain, merged


@given(alike_branches(), st.integers(1, 3), st.integers(0, 99))
@settings(max_examples=examples(6, 40))
def test_alike_and_nearly_alike_branches(case, streams, seed):
    graph_def, feeds, outputs = case
    plain, merged = check(flat_of(graph_def, outputs=outputs), feeds, streams, seed)
    small = [tensor for tensor in merged.constants.values() if tensor.untyped_storage().nbytes() <= SMALL_BYTES]
    assert weight_bytes(merged) <= weight_bytes(plain) + sum(tensor.untyped_storage().nbytes() for tensor in small)


@given(random_graphs(most=40), st.integers(1, 3), st.integers(0, 99))
@settings(max_examples=examples(6, 40))
def test_any_graph(case, streams, seed):
    graph_def, feeds, outputs = case
    check(flat_of(graph_def, outputs=outputs), feeds, streams, seed)


@given(alike_branches(), st.integers(0, 99))
@settings(max_examples=examples(6, 15))
def test_nan_and_infinity_come_out_where_they_came_out_before(case, seed):
    graph_def, feeds, outputs = case
    chance = np.random.default_rng(seed)
    for value, wrong in zip(feeds.values(), itertools.cycle([np.nan, np.inf, -np.inf])):
        if value.dtype == np.float32:
            value.flat[chance.integers(value.size)] = wrong
    flat = flat_of(graph_def, outputs=outputs)
    plain, merged = (results(program, flat, feeds, 1) for program in programs(flat, feeds))
    for name, value in plain.items():
        np.testing.assert_allclose(merged[name], value, rtol=1e-4, atol=1e-5, equal_nan=True)
