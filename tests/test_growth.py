"""Work grows with the graph, not with its square, in shapes where it once did. Counted where it can be: a busy clock says little."""

from __future__ import annotations

import time

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from msplit import api
from msplit.checks import ms013_too_many_crossings as ms013
from msplit.core.dag import Dag, distinct
from msplit.formats import write
from msplit.opset import schema
from msplit.schedule.algorithms import list_schedule as module
from msplit.schedule.problem import Problem
from tests.graphs import parse


def test_list_scheduling_looks_at_what_waits_behind_a_barrier_once(monkeypatch):
    """Only one block waits for the stream that the last producer ran on: thousands did, and were looked at again at every end."""
    seen = []
    arrival = module._Run._arrival
    monkeypatch.setattr(module._Run, "_arrival", lambda run, *rest: seen.append(rest) or arrival(run, *rest))
    half = 400
    dag = Dag.of(2 * half + 1, [*range(half), *[half] * half], [*[half] * half, *range(half + 1, 2 * half + 1)])
    problem = Problem.of(dag, [1.0] * half + [0.0] + [1.0] * half, 0.05)
    lanes = module.list_schedule(problem, 16)
    assert len(seen) < 4 * len(problem)
    assert np.bincount(lanes[~problem.joints]).min() > half / 16  # and all streams have their share


@given(st.lists(st.integers(0, 50), max_size=60))
def test_distinct_values_are_those_of_numpy(values):
    found = distinct(np.asarray(values, np.int64))
    assert found.tolist() == sorted(set(values))


def test_nothing_hashes_edges(monkeypatch):
    """NumPy's `unique` without indices hashes: 4 s for the three million dependencies of a graph of barriers, sorting takes 0.05 s."""
    wide, hashed = 2000, []
    unique = np.unique

    def counted(values, **asked):
        if not asked and len(values) > wide:
            hashed.append(len(values))
        return unique(values, **asked)

    monkeypatch.setattr(np, "unique", counted)
    layers = [f"a{n}:Relu(x)" for n in range(wide)]
    layers.append(f"wait:NoOp({','.join(f'^a{n}' for n in range(wide))})")
    layers += [f"b{n}:Tanh(a{n},^wait)" for n in range(wide)]
    flat, _ = parse(f"x:Placeholder; {'; '.join(layers)}")
    assert api.assign(flat, "default", streams=4).prediction.makespan_us > 0
    assert hashed == []


def test_crossings_through_a_node_that_hands_on_many_tensors_are_not_multiplied(monkeypatch):
    gathered = []
    of = ms013._Makers.of
    monkeypatch.setattr(
        ms013._Makers, "of", lambda kernels, stream: gathered.append(len(kernels)) or of(kernels, stream)
    )
    wide = 500
    makers = "; ".join(f"a{n}:Relu(x)" for n in range(wide))
    readers = "; ".join(f"b{n}:Relu(all:{n})" for n in range(wide))
    flat, costs = parse(f"x:Placeholder; {makers}; all:IdentityN({','.join(f'a{n}' for n in range(wide))}); {readers}")
    ids = np.arange(len(flat)) % 4
    edges, _, share = ms013.crossings(flat, costs, costs.time_us > 0, ids)
    assert sum(gathered) == wide
    assert edges == 3 * wide
    assert share == 0.75


@given(
    edges=st.lists(st.tuples(st.integers(0, 11), st.integers(0, 11)), max_size=40),
    free=st.lists(st.booleans(), min_size=12, max_size=12),
    ids=st.lists(st.integers(0, 2), min_size=12, max_size=12),
)
def test_crossings_are_those_that_counting_pairs_finds(edges, free, ids):
    inputs = [sorted({src for src, dst in edges if dst == node and src < node}) for node in range(12)]
    text = "; ".join(
        f"n{node}:{'Identity' if free[node] else 'Relu'}({','.join(f'n{src}' for src in inputs[node])})"
        for node in range(12)
    )
    flat, costs = parse(text)
    makers: list[set[int]] = []
    pairs = set()
    for node in range(12):
        makers.append(set().union(*(makers[src] if free[src] else {src} for src in inputs[node])))
        if not free[node]:
            pairs |= {(maker, node) for maker in makers[node]}
    crossed = {(maker, node) for maker, node in pairs if ids[maker] != ids[node]}
    found = ms013.crossings(flat, costs, costs.time_us > 0, np.asarray(ids))
    assert found[0] == len({(maker, ids[node]) for maker, node in crossed})
    assert found[2] == (len(crossed) / len(pairs) if pairs else 0.0)


def test_ids_of_many_functions_are_written_in_one_pass(tmp_path):
    def seconds(count: int) -> float:
        graph_def = schema.graph_pb2.GraphDef()
        graph_def.node.add(name="n", op="NoOp")
        for number in range(count):
            function = graph_def.library.function.add()
            function.signature.name = f"f{number}"
            function.node_def.add(name="n", op="NoOp")
        path = tmp_path / f"{count}.pb"
        path.write_bytes(graph_def.SerializeToString())
        model = api.load(path).model
        ids = {(f"f{number}", "n"): 1 for number in range(count)}
        begin = time.process_time()
        write(model, ids, tmp_path / "out.pb", force=True)
        return time.process_time() - begin

    few = min(seconds(500) for _ in range(2))
    assert min(seconds(4000) for _ in range(2)) < 24 * few  # 8 times as many; it was over 50 times as long
