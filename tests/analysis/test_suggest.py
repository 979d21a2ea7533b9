import pytest

from msplit.analysis.branches import find
from msplit.analysis.columns import columns
from msplit.analysis.contract import Blocks, Kernels
from msplit.analysis.suggest import suggest
from msplit.rules import available
from tests.graphs import parse
from tests.shapes import inception, lstm, mmoe

TWO_COLUMNS = (
    "".join(f"{n}:Const[value=9x4]; {n}g:GatherV2({n})@9us; {n}m:MatMul({n}g)@9us;" for n in "abc")
    + "j:AddN(am,bm,cm)@9us"
)


def suggested(graph, **named):
    flat, costs = parse(graph, **named) if isinstance(graph, str) else graph
    found = suggest(flat, costs, find(Blocks.from_kernels(Kernels.of(flat, costs))), columns(flat, costs))
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
    assert (found.rule_set, found.helps) == (rule_set, True)
    assert words in found.why


def test_a_chain_is_told_plainly():
    found = suggested("a:MatMul@9us; b:Relu(a)@9us; c:Conv2D(b)@9us; d:Relu(a)@1us")
    assert (found.rule_set, found.helps) == ("vision", False)
    assert found.why.startswith("Streams can not help: 96 % of the work is on one path")


def test_kernels_that_fill_the_gpu_are_told_plainly():
    found = suggested("a:MatMul@9us; b:MatMul@9us; c:MatMul@9us", share=0.95)
    assert not found.helps
    assert "fill 95 % of the GPU" in found.why


def test_nothing_on_the_gpu_is_told_plainly():
    found = suggested("a:Const; b:StringJoin@5us host")
    assert (found.helps, "no node launches" in found.why) == (False, True)


def test_variables_read_in_every_step_are_an_unrolled_network_too():
    steps = "; ".join(f"r{i}:ReadVariableOp(w); c{i}:Cast(r{i}); m{i}:MatMul(x,c{i})@5us" for i in range(9))
    assert suggested(f"x:Placeholder; w:VarHandleOp; {steps}").rule_set == "rnn"
    own = "; ".join(f"w{i}:VarHandleOp; r{i}:ReadVariableOp(w{i}); m{i}:MatMul(x,r{i})@5us" for i in range(9))
    assert suggested(f"x:Placeholder; z:Identity(x); {own}").rule_set == "default"
