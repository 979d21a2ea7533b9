"""An interval holds every value that its op can give, whatever is fed: checked on the lowerings themselves."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from msplit.engines.cuda.ir.graph import Op
from msplit.engines.cuda.ir.interpret import evaluate
from msplit.engines.cuda.ir.lowering import table
from msplit.engines.cuda.passes.embedding import intervals as ranges
from tests.campaign import examples

SMALL = st.integers(-4, 4)
BINARY = ["AddV2", "Sub", "Mul", "FloorMod", "FloorDiv", "Minimum", "Maximum"]
COMPARE = ["Equal", "NotEqual", "GreaterEqual", "Greater", "LessEqual", "Less"]
LOGIC = ["LogicalAnd", "LogicalOr"]


class Given:
    """Facts: each input somewhere in an interval."""

    def __init__(self, intervals, shapes):
        self.intervals, self.shapes = intervals, shapes

    def array(self, key):
        return None

    def range(self, key):
        return self.intervals[key[0]]

    def shape(self, key):
        return self.shapes[key[0]]


@st.composite
def arrays(draw, dtype, size):
    values = draw(st.lists(st.integers(0, 1) if dtype == "bool" else SMALL, min_size=size, max_size=size))
    array = np.array(values).astype(dtype)
    slack = 0 if dtype == "bool" else draw(st.integers(0, 2))
    known = (int(array.min()) - slack, int(array.max()) + draw(st.integers(0, slack)))
    return array, draw(st.sampled_from([known, known, None]))


@given(data=st.data())
@settings(max_examples=examples(80, 300), deadline=None)
def test_every_result_is_in_its_interval(data):
    name = data.draw(
        st.sampled_from([*BINARY, *COMPARE, *LOGIC, "LogicalNot", "Abs", "Neg", "SelectV2", "ClipByValue"])
    )
    dtype = "bool" if "Logical" in name else data.draw(st.sampled_from(["int32", "int64"]))
    count = {"LogicalNot": 1, "Abs": 1, "Neg": 1, "SelectV2": 3, "ClipByValue": 3}.get(name, 2)
    kinds = ["bool", dtype, dtype] if name == "SelectV2" else [dtype] * count
    drawn = [data.draw(arrays(kind, 1 if name == "ClipByValue" and slot else 3)) for slot, kind in enumerate(kinds)]
    inputs = [array.reshape(()) if array.size == 1 else array for array, _ in drawn]
    if name in ("FloorMod", "FloorDiv") and not inputs[1].all():
        return
    op = Op(9, "op", name, {"T": dtype}, [(slot, 0) for slot in range(count)], [9])
    (result,) = evaluate(op, inputs)
    found = ranges.within(ranges.of(Given([known for _, known in drawn], [i.shape for i in inputs]), op), result.dtype)
    if found is not None:
        assert found[0] <= int(result.min()) <= int(result.max()) <= found[1], (name, inputs, found)


def test_where_both_are_known_something_is_said():
    known = Given([(0, 3), (2, 2)], [(4,), ()])
    said = {
        name: ranges.of(known, Op(9, "", name, {}, [(0, 0), (1, 0)], [9])) for name in [*BINARY, "GreaterEqual", "Less"]
    }
    assert said == {
        "AddV2": (2, 5),
        "Sub": (-2, 1),
        "Mul": (0, 6),
        "FloorMod": (0, 1),
        "FloorDiv": (0, 1),
        "Minimum": (0, 2),
        "Maximum": (2, 3),
        "GreaterEqual": ranges.EITHER,
        "Less": ranges.EITHER,
    }
    never = Op(9, "", "Less", {}, [(0, 0), (1, 0)], [9])
    assert ranges.of(Given([(2, 3), (2, 2)], [(4,), ()]), never) == ranges.FALSE
    assert ranges.of(Given([(2, 3), (4, 9)], [(4,), ()]), never) == ranges.TRUE


def test_what_is_cut_off_at_both_ends_needs_no_interval():
    """Keras asks for as many categories as there are by a minimum and a maximum around what it finds in the data."""
    unknown = Op(9, "", "Maximum", {"T": "int64"}, [(0, 0), (1, 0)], [9])
    least = ranges.of(Given([(5, 5), None], [(), ()]), unknown)
    assert least == (5, np.iinfo(np.int64).max)
    unknown.op = "Minimum"
    assert ranges.of(Given([least, (5, 5)], [(), ()]), unknown) == (5, 5)
    assert ranges.of(Given([None, None], [(), ()]), unknown) is None
    unknown.attrs["T"] = "float32"
    assert ranges.of(Given([(5, 5), None], [(), ()]), unknown) is None


def test_what_a_type_can_not_hold_is_dropped():
    assert ranges.within((0, 2**31), np.dtype("int32")) is None
    assert ranges.within((0, 2**31 - 1), np.dtype("int32")) == (0, 2**31 - 1)
    assert ranges.within((-1, 3), np.dtype("uint8")) is None
    assert ranges.within((0, 3), np.dtype("float32")) is None


def test_every_rule_is_of_an_op_that_has_a_lowering():
    assert {name for name in ranges._RULES if name not in table()} <= {"Concat", "Gather", "Reverse", "Add"}
    assert torch.iinfo(torch.int64).max > 2**62  # positions of Where
