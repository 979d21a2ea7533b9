"""What each kernel mode is predicted to take."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from msplit.cost import estimate
from msplit.engines.cuda.engine import ENGINE
from msplit.shapes.infer import infer
from tests.campaign import examples
from tests.engines.cuda.alike_branches import Branches, alike_branches
from tests.engines.cuda.cases import flat_of, job

FLOAT = 1


class First:
    """Draws nothing: only the seed of the constants is asked for."""

    def __call__(self, strategy):
        return 0


def towers(count: int, *, pointwise: int = 1):
    """Alike towers of two layers on inputs of their own, side by side in the end."""
    g = Branches(First())
    ends, feeds = [], {}
    for number in range(count):
        value = g.placeholder(f"x{number}", (3, 4))
        feeds[value] = np.ones((3, 4), np.float32)
        for _ in range(2):
            value, _ = g.dense(value, 4, 4, g.normal(4, 4))
            for _ in range(pointwise):
                value = g.node("Tanh", [value], T=FLOAT)
        ends.append(value)
    g.node("Pack", ends, T=FLOAT)
    g.graph_def.node[-1].attr["N"].i = count
    return g.graph_def, feeds


def simulated(graph_def, feeds, **options):
    flat = flat_of(graph_def)
    costs = estimate(flat, infer(flat))
    own = replace(job(flat, feeds), costs=costs)
    return ENGINE.variants(own, np.full(len(flat), -1, np.int32)).simulate(4, **options)


@pytest.mark.parametrize("count", [2, 5, 16])
def test_alike_branches_are_predicted_to_gain_as_one(count):
    found = simulated(*towers(count, pointwise=2))
    plain, fused, grouped, both = (found.variants[name] for name in ("plain", "fused", "grouped", "fused and grouped"))
    assert grouped.one.makespan_us < plain.one.makespan_us
    assert fused.one.makespan_us < plain.one.makespan_us
    assert both.best.makespan_us < min(plain.best.makespan_us, grouped.best.makespan_us)
    assert found.favourite is both or (
        count == 2 and found.favourite is fused
    )  # two branches are as fast on two streams
    assert found.gain(both) == pytest.approx(plain.one.makespan_us / both.best.makespan_us)
    assert found.same == ()


def test_ways_that_change_nothing_are_named():
    g = Branches(First())
    g.node("MatMul", [g.placeholder("x", (3, 4)), g.normal(4, 4)], T=FLOAT, transpose_a=False, transpose_b=False)
    found = simulated(g.graph_def, {"x": np.ones((3, 4), np.float32)})
    assert found.same == ("fused", "grouped", "fused and grouped")
    assert found.favourite is found.plain
    assert found.gain(found.plain) == 1


def test_where_nothing_is_launched_there_is_nothing_to_choose():
    g = Branches(First())
    g.node("Identity", [g.placeholder("x", (3, 4))], T=FLOAT)
    assert simulated(g.graph_def, {"x": np.ones((3, 4), np.float32)}) is None


def test_dear_waits_leave_everything_on_one_stream():
    found = simulated(*towers(3), wait_us=1000.0)
    assert {variant.best.streams for variant in found.variants.values()} == {1}


def kernels(variant):
    """What launches, whatever it is called."""
    steps = [step for step in variant.compiled.compiled.program.steps if step.launches]
    return tuple(sorted((step.op.op, step.op.batch, len(step.op.source_nodes), step.traffic) for step in steps))


@settings(deadline=None, max_examples=examples(5, 20))
@given(alike_branches(), st.integers(0, 1000))
def test_the_same_kernels_cost_the_same_in_whatever_order_the_file_has_them(case, seed):
    graph_def, feeds, outputs = case
    nodes = list(graph_def.node)
    random.Random(seed).shuffle(nodes)
    other = type(graph_def)(node=nodes, versions=graph_def.versions)
    times = []
    for one in (graph_def, other):
        flat = flat_of(one, outputs=outputs)
        own = replace(job(flat, feeds), costs=estimate(flat, infer(flat)))
        found = ENGINE.variants(own, np.full(len(flat), -1, np.int32)).simulate(3, candidates=["list"])
        times.append(
            {} if found is None else {kernels(variant): variant.one.makespan_us for variant in found.variants.values()}
        )
        if found is None:
            continue
        assert found.favourite.best.score_us <= min(variant.best.score_us for variant in found.variants.values()) * 1.04
        for variant in found.variants.values():
            assert variant.best.makespan_us <= variant.one.makespan_us
            alone = replace(variant.compiled.job, ids=np.zeros(len(flat), np.int32))
            alone = ENGINE.compile(alone).predicted_us(alone)
            assert alone == pytest.approx(variant.one.makespan_us)
    # Which ops are merged may depend on the order in which they are visited; what the same kernels cost may not.
    for same in times[0].keys() & times[1].keys():
        assert times[0][same] == pytest.approx(times[1][same])
    plain = [next(iter(of)) for of in times if of]
    assert plain[:1] == plain[1:]
