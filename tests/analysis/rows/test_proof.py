"""What the proof takes and gives, that it holds at other batches, and that it finds what is put into a model. No TensorFlow."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from msplit.analysis.rows import walk
from msplit.analysis.rows.node import FIXED, LinearSizes, PerRow
from msplit.analysis.rows.walk import RowPass, independent_rows
from msplit.assignment.model import load
from msplit.errors import MsplitError
from msplit.flatten.build import flatten
from msplit.formats import read
from msplit.opset import schema
from msplit.shapes.infer import inferred
from msplit.shapes.result import key_of
from msplit.shapes.values import missing
from tests.campaign import examples
from tests.graphs import build as build_flat
from tests.graphs import flat, table
from tests.shapes.test_fuzz import nonsense

GRAPHS = Path(__file__).parents[3] / "sample_graphs"


def test_it_needs_no_framework():
    code = (
        "import sys; from msplit.analysis.rows import independent_rows; from msplit.assignment.model import load;"
        f"independent_rows(load({str(GRAPHS / 'mmoe_small.pb')!r}));"
        "print([m for m in ('torch', 'tensorflow', 'networkx') if m in sys.modules])"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert said.stdout.strip() == "[]"


def test_an_input_may_have_several_entries_per_row():
    """By shapes at a batch: pairs of a query and a document, and one label for both."""
    view = flat("a:Placeholder; b:Placeholder; r:Relu(a); s:Tanh(b)", outputs=[2, 3])
    rows = independent_rows(view, batch=4, shapes={"a": (8, 3), "b": (4,)})
    assert rows.inputs == {"a": 2, "b": 1}
    assert rows.outputs == {"r": 2, "s": 1}


def test_rows_of_another_length_do_not_meet():
    view = flat("a:Placeholder; b:Placeholder; r:AddV2(a,b)")
    assert independent_rows(view, batch=4, shapes={"a": (4, 3), "b": (4, 3)}).outputs == {"r": 1}
    # Of one row each b would be spread over both entries, of more it does not run.
    assert independent_rows(view, batch=4, shapes={"a": (8, 3), "b": (4, 3)}).refusals["r"].op == "AddV2"
    assert independent_rows(view, batch=4, shapes={"a": (4, 3), "b": (4,)}).refusals["r"].op == "AddV2"


def test_the_smallest_first_dimension_is_the_batch_where_none_is_given():
    view = flat("a:Placeholder; b:Placeholder; r:Relu(a); s:Tanh(b)", outputs=[2, 3])
    assert independent_rows(view, shapes={"a": (6, 3), "b": (3,)}).inputs == {"a": 2, "b": 1}


def test_a_first_dimension_that_is_no_multiple_of_the_batch_is_an_error():
    view = flat("a:Placeholder; r:Relu(a)")
    with pytest.raises(MsplitError, match="no multiple of the 4 rows"):
        independent_rows(view, batch=4, shapes={"a": (6, 3)})


def test_a_scalar_that_is_fed_is_the_same_for_all_rows():
    view = flat("a:Placeholder; keep:Placeholder; r:Mul(a,keep)")
    rows = independent_rows(view, batch=4, shapes={"a": (4, 3), "keep": ()})
    assert (rows.inputs, rows.outputs) == ({"a": 1, "keep": 0}, {"r": 1})


def test_what_is_open_elsewhere_is_refused():
    """What `--batch` fills in may be the length of a text as well."""
    view = build_flat(["a", "r"], ["Placeholder", "Relu"], [(0, 0, 1, 0)], [0, 1], attrs=[{"shape": (3, None)}, {}])[0]
    assert str(independent_rows(view).refusals["r"]) == "Placeholder (a) has another size open than its first"
    assert independent_rows(view, shapes={"a": (3, 5)}).outputs == {"r": 0}


def test_an_unknown_shape_is_no_reason_to_give_up():
    view = flat("a:Placeholder; r:Relu(a); m:MatMul(a,a)", outputs=[1, 2])
    rows = independent_rows(view)
    assert rows.outputs == {"r": 1}
    assert rows.refusals["m"].op == "MatMul"


def test_names_of_a_model_are_escaped_where_they_are_printed():
    view = build_flat(["a", "evil\x1b[2J\nname"], ["Placeholder", "MyOp"], [(0, 0, 1, 0)], [0, 1])[0]
    rows = independent_rows(view)
    with pytest.raises(MsplitError) as raised:
        rows.check()
    assert "\x1b" not in str(raised.value)
    assert "MyOp" in str(raised.value)


def test_only_the_outputs_that_are_asked_for_are_checked():
    view = flat("a:Placeholder; r:Relu(a); m:MyOp(a)", outputs=[1, 2])
    rows = independent_rows(view)
    rows.check(["r"])
    with pytest.raises(MsplitError, match="output 'm': MyOp \\(m\\) is an op that msplit does not know"):
        rows.check()


def test_what_writes_a_variable_is_refused_though_nothing_reads_it():
    view = flat("a:Placeholder; v:VarHandleOp stateful; w:AssignAddVariableOp(v,a) stateful; r:Relu(a,^w)", outputs=[3])
    assert independent_rows(view).refusals["r"].why == "changes a state"


@pytest.mark.parametrize(
    "name", ["gru_while", "inception_v3_stripped.pb", "mmoe_small.pb", "tf1_saved_model", "feature_columns"]
)
def test_states_say_the_shapes_and_sizes_of_other_batches(name):
    """What was found at one batch, held against what shape inference says of others."""
    view = load(GRAPHS / name)
    walked, _ = walk.walked(view, 2, {})
    held = 0
    for batch in (1, 3, 7):
        result, _ = inferred(view, batch, {})
        for node, states in enumerate(walked.states):
            for port, state in enumerate(states or ()):
                shape, value = result.shape(node, port), result.value(key_of(node, port))
                if isinstance(state, PerRow) and shape and shape[state.axis] is not None and state.inner is not None:
                    assert shape[state.axis] == state.outer * state.inner * batch
                    held += 1
                if isinstance(state, LinearSizes) and value is not None:
                    ours = state.base + batch * state.slope
                    np.testing.assert_array_equal(value, np.where(missing(value), value, ours))
                    held += 1
    assert held > 50


def _float_edges(view, walked: RowPass) -> list[tuple[int, int, int]]:
    """(consumer, slot, axis of the rows) of edges that carry rows of floats to an output."""
    needed = view.graph.ancestors([tensor.node for tensor in view.outputs])
    edges, found = view.graph.edges, []
    for src, port, dst, slot in zip(
        *(column.tolist() for column in (edges.src, edges.port, edges.dst, edges.slot)), strict=True
    ):
        state = walked.state(src, port) if port >= 0 else FIXED
        if needed[dst] and isinstance(state, PerRow) and view.graph.attrs[dst].get("T") == "float32":
            found.append((dst, slot, state.axis))
    return found


@settings(max_examples=examples(20, 2_000))
@given(st.data(), st.sampled_from(["mmoe_small.pb", "towers_small.pb", "inception_v3_stripped.pb", "while_v1.pb"]))
def test_what_mixes_rows_inside_of_a_model_is_found(tmp_path_factory, data, name):
    """One edge leads through an op that mixes rows."""
    view = load(GRAPHS / name)
    walked, _ = walk.walked(view, 2, {})
    edges = _float_edges(view, walked)
    assume(edges)
    consumer, slot, axis = data.draw(st.sampled_from(edges))
    graph_def = schema.graph_pb2.GraphDef()
    graph_def.CopyFrom(view.model.graph_def)
    function, index = view.origin(consumer)
    assert function is None
    _splice(graph_def, index, slot, axis, data.draw(st.sampled_from(["ReverseV2", "Cumsum", "Mean"])))
    path = tmp_path_factory.mktemp("mutant") / "model.pb"
    path.write_bytes(graph_def.SerializeToString())
    rows = independent_rows(flatten(read(path, outputs=[tensor.name for tensor in view.outputs])))
    before = independent_rows(view)
    reached = view.graph.descendants([consumer])
    for tensor in view.outputs:
        if reached[tensor.node]:
            assert tensor.name in before.outputs
            assert tensor.name in rows.refusals


def _splice(graph_def, index: int, slot: int, axis: int, op: str) -> None:
    """Puts an op that mixes rows between a node and one of its inputs."""
    source = graph_def.node[index].input[slot]
    constant = graph_def.node.add(name="mutant/axis", op="Const")
    constant.attr["dtype"].type = 3
    tensor = constant.attr["value"].tensor
    tensor.dtype = 3
    tensor.int_val.append(axis)
    if op != "Cumsum":
        tensor.tensor_shape.dim.add(size=1)
    mixer = graph_def.node.add(name="mutant/mixer", op=op, input=[source, "mutant/axis"])
    mixer.attr["T"].type = 1
    mixer.attr["Tidx"].type = 3
    if op == "Mean":
        mixer.attr["keep_dims"].b = True
        mixer = graph_def.node.add(name="mutant/sum", op="AddV2", input=[source, "mutant/mixer"])
        mixer.attr["T"].type = 1
    graph_def.node[index].input[slot] = mixer.name


@settings(max_examples=examples(80, 20_000), suppress_health_check=[HealthCheck.too_slow])
@given(nonsense())
def test_nonsense_is_answered(flat):
    """Whatever a file says: an answer for each output, and no exception."""
    rows = independent_rows(flat, batch=2)
    assert rows.outputs.keys() | rows.refusals.keys() == {tensor.name for tensor in flat.outputs}


def test_many_nodes_take_seconds():
    """Layers of 20 branches of products, biases and activations, joined: 100,000 took under 2 s on one core when it was written."""
    count = examples(20_000, 100_000)
    names, ops, edges, attrs = ["x", "w", "b", "axis"], ["Placeholder", "Const", "Const", "Const"], [], [{}] * 4
    attrs = [{"shape": (None, 8)}, {"value": table(8, 8)}, {"value": table(1, 8)}, {}]
    last = 0
    while len(names) < count:
        ends = []
        for _ in range(20):
            at = len(names)
            names += [f"n{at}", f"n{at + 1}", f"n{at + 2}"]
            ops += ["MatMul", "AddV2", "Relu"]
            attrs += [{}, {}, {}]
            edges += [(last, 0, at, 0), (1, 0, at, 1), (at, 0, at + 1, 0), (2, 0, at + 1, 1), (at + 1, 0, at + 2, 0)]
            ends.append(at + 2)
        last = len(names)
        names.append(f"n{last}")
        ops.append("AddN")
        attrs.append({})
        edges += [(end, 0, last, slot) for slot, end in enumerate(ends)]
    view = build_flat(names, ops, edges, np.zeros(len(names)), attrs=attrs, outputs=[last])[0]
    start = time.process_time()
    assert independent_rows(view).independent
    assert time.process_time() - start < count / 5_000
