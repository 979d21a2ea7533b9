"""Updates that become one op: which do, in what order, and that variables become what they became before."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from msplit.engines.cuda.ir.graph import Op, OpGraph
from msplit.engines.cuda.ir.verify import Stage, verify
from msplit.engines.cuda.kernels.optimizer_formulas import OPTIMIZERS
from msplit.engines.cuda.passes.pipeline import tidy
from msplit.engines.cuda.passes.tracing import trace
from msplit.engines.cuda.passes.updates import merge_updates as passing
from msplit.engines.cuda.passes.updates.merge_updates import merge_assigns, merge_updates
from msplit.engines.cuda.runtime.executables import SimulatedExecutable, plan_for
from msplit.engines.cuda.runtime.stream_program import arrange
from tests.campaign import examples
from tests.engines.cuda.cases import CPU

NODES = 1000


class Making:
    """A graph that trains, made op by op."""

    def __init__(self):
        self.graph = OpGraph({}, {}, {}, {})

    def variable(self, name, value):
        key = (self.graph.fresh(), 0)
        self.graph.state[name] = self.graph.final[name] = key
        self.graph.initial = {**self.graph.initial, name: np.asarray(value, np.float32)}
        self.graph.shapes[key] = np.shape(value)
        self.graph.dtypes[key] = "float32"
        return key

    def constant(self, value):
        return self.graph.constant(np.asarray(value, np.float32))

    def op(self, op, *inputs, outputs=1, **attrs):
        number = self.graph.fresh()
        self.graph.ops[number] = Op(number, f"{op} {number}", op, {"T": "float32", **attrs}, list(inputs), [number])
        for port in range(outputs):
            self.graph.shapes[number, port] = self.graph.shape(inputs[port if outputs > 1 else 0])
        return number, 0

    def update(self, op, names, numbers, gradient, **attrs):
        """An optimizer's op on variables, which afterwards have its outputs."""
        inputs = [*(self.graph.final[name] for name in names), *numbers]
        inputs.insert(OPTIMIZERS[op].gradient, gradient)
        number, _ = self.op(op, *inputs, outputs=len(names), **attrs)
        for port, name in enumerate(names):
            self.graph.final[name] = number, port
            self.graph.shapes[number, port] = self.graph.initial[name].shape

    def assign(self, op, name, value):
        """A variable that is given a value, or changed by it, and is that afterwards."""
        key = self.op(op, self.graph.final[name], value)
        self.graph.dtypes[key] = "float32"
        self.graph.final[name] = key

    def finish(self):
        self.graph.final = {name: key for name, key in self.graph.final.items() if key != self.graph.state[name]}
        tidy(self.graph)
        return self.graph


def ops(graph):
    return sorted(op.op for op in graph.ops.values())


def state_after(graph, steps=2):
    """Variables after some steps, on streams that interleave at random."""
    program = trace(graph, {}, CPU)
    plan = plan_for(program, np.arange(NODES, dtype=np.int32) % 3, None)
    executable = SimulatedExecutable(program, arrange(program, plan), {})
    for _ in range(steps):
        executable.step({})
    return executable.save_state()


def merged(graph):
    """A copy after the pass, verified, that leaves the variables that the graph itself leaves."""
    found = graph.copy()
    changed = merge_updates(found)
    changed |= merge_assigns(found)
    tidy(found)
    verify(found, Stage.SPECIALIZED, NODES, after="merge_updates")
    assert changed == (ops(found) != ops(graph))
    wanted, got = state_after(graph), state_after(found)
    assert got.keys() == wanted.keys()
    for name, value in wanted.items():
        np.testing.assert_array_equal(got[name], value, name)
    return found


def test_updates_alike_become_one_with_slots_side_by_side():
    making = Making()
    numbers = [making.constant(value) for value in (0.9, 0.99, 0.1, 0.9, 0.99, 1e-3)]
    for place, shape in enumerate([(2, 3), (), (4,)]):
        names = [f"{slot}{place}" for slot in ("w", "m", "v")]
        for name in names:
            making.variable(name, np.full(shape, 1.0 + place))
        making.update("ApplyAdam", names, numbers, making.constant(np.full(shape, 0.5)), use_nesterov=True)
    graph = making.finish()
    found = merged(graph)
    assert ops(found) == ["_ApplyFlat"]
    (op,) = found.ops.values()
    assert op.inputs[:9] == [found.state[f"{slot}{place}"] for slot in ("w", "m", "v") for place in range(3)]
    assert [found.final[f"{slot}{place}"] for slot in ("w", "m", "v") for place in range(3)] == [
        (op.node, port) for port in range(9)
    ]
    assert op.attrs["use_nesterov"]
    assert (op.batch, len(op.source_nodes)) == (3, 3)
    assert [(merge.op, merge.members) for merge in found.merges] == [("ApplyAdam", 3)]


@pytest.mark.parametrize("what", ["numbers", "attributes", "op", "size", "read"])
def test_what_differs_or_is_read_or_large_stays_apart(what, monkeypatch):
    making = Making()
    rate, momentum = making.constant(0.1), making.constant(0.9)
    for place in range(2):
        other, names = what if place else "", [f"w{place}", f"m{place}"]
        for name in names:
            making.variable(name, np.ones(8 if other == "size" else 4))
        gradient = making.constant(np.full(8 if other == "size" else 4, 0.5))
        numbers = [making.constant(0.2) if other == "numbers" else rate, momentum]
        making.update(
            "ApplyKerasMomentum" if other == "op" else "ApplyMomentum",
            names,
            numbers,
            gradient,
            use_nesterov=other == "attributes",
        )
    if what == "read":
        making.graph.fetches["out"] = making.op("Neg", making.graph.final["w1"])
    monkeypatch.setattr(passing, "LARGEST", 4)
    assert "_ApplyFlat" not in ops(merged(making.finish()))


def test_what_is_assigned_and_read_is_joined_where_no_member_needs_another():
    making = Making()
    for name in "abc":
        making.variable(name, np.ones(3))
    for name, value in (("a", 2.0), ("b", 3.0)):
        making.assign("AssignSub", name, making.constant(np.full(3, value)))
    making.assign("AssignSub", "c", making.graph.final["a"])
    found = merged(making.finish())
    assert ops(found) == ["AssignSub", "_AssignAll"]
    assert {name: value.tolist() for name, value in state_after(found, 1).items()} == {
        "a": [-1.0] * 3,
        "b": [-2.0] * 3,
        "c": [2.0] * 3,
    }


def test_constants_of_one_value_are_one_number():
    making = Making()
    for name in "ab":
        making.variable(name, np.ones(3))
        making.update("ApplyGradientDescent", [name], [making.constant(0.1)], making.constant(np.ones(3)))
    assert ops(merged(making.finish())) == ["_ApplyFlat"]


def test_updates_whose_shapes_nobody_knew_have_those_of_their_variables():
    """As where a gradient is made of as many rows as a mask has true values."""
    making = Making()
    for name in "ab":
        making.variable(name, np.ones(3))
        making.update("ApplyGradientDescent", [name], [making.constant(0.1)], making.constant(np.ones(3)))
        del making.graph.shapes[making.graph.final[name]]
    found = merged(making.finish())
    assert ops(found) == ["_ApplyFlat"]
    assert [found.shapes[key] for key in found.final.values()] == [(3,), (3,)]


def test_what_waits_for_another_update_is_not_joined_with_it():
    """The first update reads what a count is before it goes on; the gradient of the second is made of what it is then."""
    making = Making()
    rate, count = making.constant(0.1), making.variable("count", np.zeros(3))
    making.variable("a", np.ones(3))
    making.variable("b", np.ones(3))
    making.update("ApplyGradientDescent", ["a"], [rate], count)
    after = making.op("AssignAdd", count, making.constant(np.ones(3)))
    making.graph.final["count"] = after
    making.update("ApplyGradientDescent", ["b"], [rate], making.op("Mul", after, making.constant(np.full(3, 2.0))))
    assert ops(merged(making.finish())) == ["ApplyGradientDescent", "ApplyGradientDescent", "AssignAdd", "Mul"]


def test_variables_that_are_each_others_gradients_are_read_before_they_are_written():
    making = Making()
    rate, keys = (
        making.constant(0.5),
        [making.variable(name, np.full(3, value)) for name, value in (("a", 1.0), ("b", 2.0), ("c", 3.0))],
    )
    for name, gradient in (("a", keys[1]), ("b", keys[2])):
        making.update("ApplyGradientDescent", [name], [rate], gradient)
    making.update("ApplyGradientDescent", ["c"], [rate], making.constant(np.ones(3)))
    found = merged(making.finish())
    assert ops(found) == ["_ApplyFlat"]
    assert {name: value.tolist() for name, value in state_after(found, 1).items()} == {
        "a": [0.0] * 3,
        "b": [0.5] * 3,
        "c": [2.5] * 3,
    }


@given(st.data())
@settings(max_examples=examples(30, 3000), deadline=None)
def test_any_updates(data):
    """Gradients and rates are made of any values there are, old and new ones of variables among them."""
    making, draw = Making(), data.draw
    rates = [making.constant(value) for value in (0.5, 0.5, 0.25)]
    vectors = [making.variable(f"v{place}", np.arange(3) - place) for place in range(4)]
    for _ in range(draw(st.integers(2, 9))):
        chosen = draw(st.sampled_from(["update", "update", "Assign", "AssignSub", "AssignSub", "Mul", "AddV2"]))
        pair = [draw(st.sampled_from(vectors)) for _ in range(2)]
        if chosen == "update":
            name = f"v{draw(st.integers(0, 3))}"
            making.update("ApplyGradientDescent", [name], [draw(st.sampled_from(rates))], pair[0])
            vectors.append(making.graph.final[name])
        elif chosen.startswith("Assign"):
            name = f"v{draw(st.integers(0, 3))}"
            making.assign(chosen, name, pair[0])
            vectors.append(making.graph.final[name])
        else:
            vectors.append(making.op(chosen, *pair))
    merged(making.finish())
