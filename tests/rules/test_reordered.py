"""The order of the file never changes a stream; other names swap the streams of copies, and nothing else."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from msplit import rules
from msplit.analysis.order import canonical, colours
from msplit.cost import estimate
from msplit.errors import MsplitError
from msplit.flatten.build import flatten
from msplit.formats import read
from msplit.opset import schema
from msplit.shapes.infer import infer
from tests.campaign import examples
from tests.strategies import graph_defs

pytestmark = pytest.mark.no_cover  # traced, the searches of `auto` take four times as long

NAMES = ("auto", "default", "recsys", "rnn", "vision")

DRAWN = settings(
    max_examples=examples(25, 300),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    phases=[Phase.explicit, Phase.reuse, Phase.generate],  # graphs of many nodes shrink for minutes
)


@dataclass(frozen=True)
class Found:
    """What the rules make of a graph: per node its colour and its stream, and the streams in the canonical order."""

    streams: dict[str, tuple[int, int]]
    in_order: list[int]


def assigned(path: Path, graph_def: Any, name: str) -> Found | None:
    """What a rule set makes of a graph; None where the rules contradict it."""
    path.write_bytes(graph_def.SerializeToString())
    flat = flatten(read(path))
    costs = estimate(flat, infer(flat))
    try:
        found = rules.assign(flat, costs, rules.load(name))
    except MsplitError:
        return None
    manual = np.asarray([flat.graph.attrs[node].get("_stream_id", -1) for node in range(len(flat))], np.int64)
    order = canonical(flat, costs.time_us, costs.share, costs.bytes, manual)
    by_name = zip(flat.graph.names, zip(colours(flat, costs.time_us), found.ids.tolist(), strict=True), strict=True)
    return Found(dict(by_name), found.ids[order].tolist())


def reordered(graph_def: Any, source: random.Random) -> Any:
    """The same graph with its nodes, its functions and their nodes in another order."""
    other = type(graph_def)()
    other.CopyFrom(graph_def)
    for nodes in (other.node, other.library.function, *(function.node_def for function in other.library.function)):
        shuffled = [type(node).FromString(node.SerializeToString()) for node in nodes]
        source.shuffle(shuffled)
        del nodes[:]
        nodes.extend(shuffled)
    return other


def renamed(graph_def: Any, source: random.Random) -> Any:
    """The same graph with other names of its own nodes."""
    other = type(graph_def)()
    other.CopyFrom(graph_def)
    numbers = source.sample(range(1000), len(other.node))
    new = {node.name: f"n{number}" for node, number in zip(other.node, numbers, strict=True)}
    for node in other.node:
        node.name = new[node.name]
        for slot, text in enumerate(node.input):
            producer, _, port = text.lstrip("^").partition(":")
            node.input[slot] = ("^" if text.startswith("^") else "") + new[producer] + (f":{port}" if port else "")
        places = node.attr["_class"].list.s if "_class" in node.attr else []
        for slot, place in enumerate(places):
            node.attr["_class"].list.s[slot] = b"loc:@" + new[place.removeprefix(b"loc:@").decode()].encode()
    return other


@pytest.mark.parametrize("name", NAMES)
@DRAWN
@given(graph_def=graph_defs(), seed=st.integers(0, 2**32))
def test_generated_graphs(name: str, graph_def: Any, seed: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.getbasetemp() / "model"
    found = assigned(path, graph_def, name)
    assert assigned(path, reordered(graph_def, random.Random(seed)), name) == found
    other = assigned(path, renamed(graph_def, random.Random(seed)), name)
    assert (other is None) == (found is None)
    if other is not None and found is not None:
        assert Counter(other.streams.values()) == Counter(found.streams.values())
        assert other.in_order == found.in_order


@pytest.mark.parametrize("name", NAMES)
def test_an_id_on_one_of_two_copies_decides_between_them_not_their_names(name: str, tmp_path: Path) -> None:
    graph_def = schema.graph_pb2.GraphDef()
    for node, op, *inputs in (
        ("x", "Placeholder"),
        ("up", "Acme>Custom", "x"),
        *(("one", "Relu", "up"), ("two", "Relu", "up"), ("three", "Relu", "x"), ("four", "Relu", "x")),
    ):
        graph_def.node.add(name=node, op=op, input=inputs)
    graph_def.node[2].attr["_stream_id"].i = 0
    found = assigned(tmp_path / "model", graph_def, name)
    assert found is not None
    for seed in range(10):
        other = assigned(tmp_path / "model", renamed(graph_def, random.Random(seed)), name)
        assert other is not None
        assert other.in_order == found.in_order


def test_a_node_with_inputs_from_two_loops_belongs_to_the_first_of_them(tmp_path: Path) -> None:
    graph_def = schema.graph_pb2.GraphDef()

    def add(name: str, op: str, *inputs: str) -> Any:
        node = graph_def.node.add(name=name, op=op, input=inputs)
        node.attr["T"].type = 1
        return node

    add("x", "Placeholder").attr["dtype"].type = 1
    for loop in "ab":
        add(f"{loop}/enter", "Enter", "x").attr["frame_name"].s = loop.encode()
        add(f"{loop}/body", "Relu", f"{loop}/enter")
    add("both", "AddV2", "a/body", "b/body")
    found = set()
    for seed in range(10):
        (tmp_path / "model").write_bytes(reordered(graph_def, random.Random(seed)).SerializeToString())
        flat = flatten(read(tmp_path / "model"))
        found.add(flat.regions[flat.region[flat.graph.index["both"]]].name)
    assert found == {"a"}
