"""Copies are told apart by what they belong to, so that other names swap copies and nothing else."""

from __future__ import annotations

import random
import time

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from msplit.analysis.order import Cells, canonical, colours
from msplit.core.graph import CONTROL
from tests.campaign import examples
from tests.graphs import build, parse

OPS = ("MatMul", "Relu", "AddN")


@st.composite
def circles(draw):
    """Copies of one small graph around a circle, some of whose nodes read nodes of another copy so many places further, and a few
    nodes that all read: (nodes, edges, class per node, label per node)."""
    size, copies = draw(st.integers(1, 5)), draw(st.integers(2, 6))
    shared = 1
    ops = ["Placeholder"]
    template = [
        (
            draw(st.sampled_from(OPS)),
            draw(st.lists(st.tuples(st.integers(-1, node - 1), st.integers(0, copies - 1)), max_size=3)),
        )
        for node in range(size)
    ]
    tied = [draw(st.sampled_from([None, None, 0, 1])) for _ in range(size)]
    edges, classes = [], [""]
    for copy in range(copies):
        for node, (op, inputs) in enumerate(template):
            ops.append(op)
            shift = tied[node]
            classes.append("" if shift is None else f"g{(copy + shift) % copies}")
            number = shared + copy * size + node
            for slot, (producer, further) in enumerate(inputs):
                source = 0 if producer < 0 else shared + (copy + further) % copies * size + producer
                edges.append((source, 0, number, slot))
            if draw(st.integers(0, 20)) == 20 and number > 1 and node > 0:
                edges.append((number - 1, CONTROL, number, CONTROL))
    labels = [draw(st.sampled_from([0] * 15 + [1])) for _ in ops]
    return ops, edges, classes, labels


def form(ops, edges, classes, labels, place):
    """The graph as the canonical order sees it, from a file that has node n at a place, under the name of that."""
    back = np.argsort(place).tolist()
    flat, costs = build(
        [f"n{spot * 7 % 1009}" for spot in range(len(ops))],
        [ops[node] for node in back],
        [(place[source], port, place[target], slot) for source, port, target, slot in edges],
        [0.0 if ops[node] == "Placeholder" else 1.0 for node in back],
        attrs=[{"_class": (f"loc:@{classes[node]}",)} if classes[node] else {} for node in back],
    )
    found = canonical(flat, costs.time_us, np.asarray([labels[node] for node in back]))
    nodes = [back[spot] for spot in found.tolist()]
    number = {node: rank for rank, node in enumerate(nodes)}
    tied = [name if classes.count(name) > 1 else "" for name in classes]
    groups: dict[str, int] = {}
    kinds = [
        (ops[node], labels[node], groups.setdefault(tied[node], len(groups)) if tied[node] else -1) for node in nodes
    ]
    return kinds, sorted((number[source], port, number[target], slot) for source, port, target, slot in edges)


@settings(max_examples=examples(60, 1000))
@given(circles(), st.randoms(use_true_random=False))
def test_other_names_and_places_give_the_same_graph_in_the_same_order(circle, source):
    place = list(range(len(circle[0])))
    first = form(*circle, place)
    for _ in range(3):
        source.shuffle(place)
        assert form(*circle, place) == first


def order(text: str, labels: list[int] | None = None) -> list[str]:
    flat, costs = parse(text)
    further = () if labels is None else (np.asarray(labels),)
    return [flat.graph.names[node] for node in canonical(flat, costs.time_us, *further)]


def test_companions_follow_whoever_is_first():
    # a and b are copies, and so are p and q. Whichever of a and b is first, its reader comes before the other's.
    graph = "x:Placeholder; {0}:Relu(x); a:MatMul({0}); {1}:Relu(x); b:MatMul({1}); p:Tanh({2}); q:Tanh({3})"
    for text, ends in (
        (graph.format("s", "t", "s", "t"), ["a", "b", "p", "q"]),
        (graph.format("s", "t", "t", "s"), ["a", "b", "q", "p"]),
    ):
        found = order(text)
        assert [name for name in found if name in "abpq"] == ends


def test_what_shares_a_class_follows_whoever_is_first():
    text = "x:Placeholder; a:MatMul(x)[_class=loc:@{0}]; b:MatMul(x)[_class=loc:@{1}]; p:Tanh(x)[_class=loc:@h]; q:Tanh(x)[_class=loc:@g]"
    assert [name for name in order(text.format("g", "h")) if name in "abpq"] == ["a", "b", "q", "p"]
    assert [name for name in order(text.format("h", "g")) if name in "abpq"] == ["a", "b", "p", "q"]


def test_labels_tell_copies_apart_before_names_do():
    text = "x:Placeholder; a:MatMul(x); b:MatMul(x); c:MatMul(x)"
    assert order(text) == ["x", "a", "b", "c"]
    assert order(text, [0, 2, 1, 1]) == ["x", "b", "c", "a"]


def rings(sizes: list[int]):
    """Pairs of neighbours around rings, for `form`."""
    ops, edges, start = ["Relu"] * sum(sizes) + ["AddV2"] * sum(sizes), [], 0
    for size in sizes:
        for number in range(size):
            reader = sum(sizes) + start + number
            edges += [(start + number, 0, reader, 0), (start + (number + 1) % size, 0, reader, 1)]
        start += size
    return ops, edges, [""] * len(ops), [0] * len(ops)


def test_rings_of_several_sizes_are_told_apart_by_trying_not_by_refinement():
    ops, edges, *_ = circle = rings([3, 6, 3])
    flat, costs = build([f"n{node}" for node in range(24)], ops, edges, np.ones(24))
    cells = Cells(flat, colours(flat, costs.time_us), ())
    assert len(set(cells.of)) == 2
    leading = cells.leading(cells.of[12])
    assert leading is not None
    assert sorted(leading) in ([15, 16, 17, 18, 19, 20], [12, 13, 14, 21, 22, 23])
    place = list(range(24))
    first = form(*circle, place)
    source = random.Random(0)
    for _ in range(20):
        source.shuffle(place)
        assert form(*circle, place) == first


def test_trying_changes_nothing_and_ends():
    ops, edges, *_ = rings([4, 4])
    flat, costs = build([f"n{node}" for node in range(16)], ops, edges, np.ones(16))
    cells = Cells(flat, colours(flat, costs.time_us), ())
    before = list(cells.of)
    assert len(cells.leading(cells.of[8]) or ()) == 8
    assert cells.of == before
    cells.single_out(8)
    assert len(set(cells.of)) == 2 * 4 + 2
    cells._budget = 0
    assert cells.leading(cells.of[12]) is None
    assert cells.leading(cells.of[8]) == [8]


def test_what_is_linked_with_nothing_is_not_tried(monkeypatch):
    """Trials of it spend no budget: all of one set, once per member, were quadratic."""
    flat, costs = build([f"n{node}" for node in range(3000)], ["MatMul"] * 3000, [], np.ones(3000))
    trials = []
    monkeypatch.setattr(Cells, "_undo", lambda cells: trials.append(cells))
    assert sorted(canonical(flat, costs.time_us).tolist()) == list(range(3000))
    assert not trials
    assert Cells(flat, colours(flat, costs.time_us), ()).leading(0) is None


def test_time_grows_with_the_number_of_copies():
    def seconds(copies: int) -> float:
        names = ["x"]
        edges = []
        for copy in range(copies):
            base = 1 + 4 * copy
            names += [f"{letter}{copy}" for letter in "suab"]
            edges += [(0, 0, base, 0), (0, 0, base + 1, 0), (base, 0, base + 2, 0), (base + 1, 0, base + 2, 1)]
            edges += [(base, 0, base + 3, 0), (base + 1, 0, 1 + 4 * ((copy + 1) % copies) + 3, 1)]
        flat, costs = build(
            names, ["Placeholder"] + ["MatMul", "Relu", "AddV2", "Mul"] * copies, edges, np.ones(len(names))
        )
        begin = time.process_time()
        found = canonical(flat, costs.time_us)
        spent = time.process_time() - begin
        assert len(found) == len(names)
        return spent

    some, many = min(seconds(1000) for _ in range(3)), seconds(8000)
    assert many < 30 * some


def test_seeds_of_the_generator_cover_copies_that_only_companions_tell_apart():
    """Without singling out, sets of several roots are left: the property above is not about discrete graphs only."""
    flat, costs = parse("x:Placeholder; s:Relu(x); t:Relu(x); a:MatMul(s); b:MatMul(t); p:Tanh(s); q:Tanh(t)")
    cells = Cells(flat, colours(flat, costs.time_us), ())
    at = flat.graph.index
    assert cells.of[at["a"]] == cells.of[at["b"]]
    assert cells.of[at["p"]] == cells.of[at["q"]]
    cells.single_out(at["b"])
    assert len({cells.of[at[name]] for name in "abpqst"}) == 6


def test_an_order_that_is_asked_for_with_more_is_the_same_one_where_that_tells_no_copies_apart() -> None:
    flat, costs = parse("x:Placeholder; a:Relu(x)@2us; b:Relu(x)@2us; c:Relu(x)@3us")
    of_time = canonical(flat, costs.time_us)
    assert canonical(flat, costs.time_us, np.asarray([5, 1, 1, 7])) is of_time
    names = [flat.graph.names[node] for node in canonical(flat, costs.time_us, np.asarray([5, 2, 1, 7])).tolist()]
    assert names.index("b") < names.index("a")
