"""Which kernels are guessed, and what the user could tell.

What is called dense is what the cuda engine proves dense.
"""

from __future__ import annotations

import pytest

from msplit.analysis.advice import guesses, proved, suggest
from msplit.analysis.embeddings import columns
from msplit.cost import estimate
from msplit.engines.cuda.engine import CudaEngine
from msplit.rules.ruleset import available
from msplit.shapes.infer import infer
from tests.graphs import parse
from tests.model_shapes import inception, lstm, mmoe
from tests.shapes.small import Builder


def test_an_input_of_open_shape_is_named_where_a_guess_depends_on_it() -> None:
    b = Builder()
    open_, batch = b.input("open", (None, None), "float32"), b.input("batch", (None, 8), "float32")
    b.add("MatMul", open_, b.weight(8, 8), T="float32")
    b.add("MatMul", batch, b.weight(8, 8), T="float32")
    flat = b.flat()
    shapes = infer(flat, batch=4)
    found = guesses(flat, estimate(flat, shapes), shapes)
    assert (len(found.nodes), found.kernels, found.share, found.inputs) == (1, 2, 0.5, ("open",))
    assert found.mend == "--shape open=… may settle it."
    shapes = infer(flat, batch=4, shapes={"open": (4, 8)})
    assert guesses(flat, estimate(flat, shapes), shapes).share == 0


def test_where_shapes_depend_on_values_no_option_is_proposed() -> None:
    b = Builder()
    where = b.add("Where", b.input("x", (None, 8), "bool"), T="bool")
    b.add("Cast", where, SrcT="int64", DstT="float32")
    flat = b.flat()
    shapes = infer(flat, batch=4)
    found = guesses(flat, estimate(flat, shapes), shapes)
    assert list(found.ops) == ["Where", "Cast"]
    assert found.inputs == ()
    assert "No option settles it" in found.mend


def buckets(shift: str = "AddV2", by: int = 0, least: int = 0) -> tuple[list[str], float]:
    """`Where` over buckets that a constant is added to: ops that are guessed, and the share of the kernels."""
    b = Builder()
    ids = b.add("Bucketize", b.input("x", (None, 1), "float32"), T="float32", boundaries=[0.0, 1.0])
    moved = b.add(shift, ids, b.const([by], "int32"), T="int32")
    valid = b.add("GreaterEqual", moved, b.const([least], "int32"), T="int32")
    where = b.add("Where", valid, T="bool")
    b.add("GatherNd", moved, where, Tparams="int32", Tindices="int64")
    flat = b.flat()
    shapes = infer(flat, batch=8)
    found = guesses(flat, estimate(flat, shapes), shapes)
    assert (proved(flat.graph, shapes).all()) == (not found.nodes.size)
    return list(found.ops), found.share


def test_buckets_are_never_negative() -> None:
    assert buckets() == ([], 0.0)
    assert buckets(by=3) == ([], 0.0)
    assert buckets("Mul", by=3) == ([], 0.0)


@pytest.mark.parametrize(("shift", "by", "least"), [("AddV2", -1, 0), ("Sub", 1, 0), ("AddV2", 0, 1), ("Mul", -2, 0)])
def test_what_may_be_negative_proves_nothing(shift: str, by: int, least: int) -> None:
    assert buckets(shift, by, least)[0] == ["Where", "GatherNd"]


@pytest.mark.tf
def test_whatever_is_called_dense_is_dense_to_the_engine() -> None:
    pytest.importorskip("torch", reason="PyTorch, the cuda engine's kernel library, is not installed")
    from tests.engines.cuda.cases import job
    from tests.engines.cuda.passes.embedding.models import feeds_of, flat_columns
    from tests.engines.cuda.passes.embedding.test_static_shapes import COLUMNS

    dense = set()
    for name, (make, feature) in COLUMNS.items():
        flat = flat_columns(lambda columns, make=make, feature=feature: ([make(columns)], {"x": feature}))
        shapes = infer(flat, batch=7)
        found = guesses(flat, estimate(flat, shapes), shapes)
        if not len(found.nodes):
            dense.add(name)
            assert CudaEngine().compile(job(flat, feeds_of(flat, {"x": feature}, 7, 0, 6))).program.dynamic == ()
    assert dense >= {"one bucket", "mean of buckets", "root of buckets", "sum of buckets", "buckets as they are"}


TWO_COLUMNS = (
    "".join(f"{n}:Const[value=9x4]; {n}g:GatherV2({n})@9us; {n}m:MatMul({n}g)@9us;" for n in "abc")
    + "j:AddN(am,bm,cm)@9us"
)


def suggested(graph, **named):
    flat, costs = parse(graph, **named) if isinstance(graph, str) else graph
    found = suggest(flat, costs, columns(flat, costs))
    assert found.rule_set in available()
    return found


@pytest.mark.parametrize(
    ("graph", "rule_set", "words"),
    [
        (TWO_COLUMNS, "recsys", "3 embedding columns take 86 %"),
        (inception(modules=3), "vision", "Convolutions take"),
        (lstm(layers=4, steps=12), "rnn", "up to 12 times"),
        (mmoe(8), "default", "spreads all branches"),
    ],
)
def test_what_takes_the_time_decides(graph, rule_set, words):
    found = suggested(graph)
    assert found.rule_set == rule_set
    assert words in found.why


def test_variables_read_in_every_step_are_an_unrolled_network_too():
    steps = "; ".join(f"r{i}:ReadVariableOp(w); c{i}:Cast(r{i}); m{i}:MatMul(x,c{i})@5us" for i in range(9))
    assert suggested(f"x:Placeholder; w:VarHandleOp; {steps}").rule_set == "rnn"
    own = "; ".join(f"w{i}:VarHandleOp; r{i}:ReadVariableOp(w{i}); m{i}:MatMul(x,r{i})@5us" for i in range(9))
    assert suggested(f"x:Placeholder; z:Identity(x); {own}").rule_set == "default"
