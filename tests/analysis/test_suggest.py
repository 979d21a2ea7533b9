import pytest

from msplit.analysis.embedding_columns import columns
from msplit.analysis.suggest import suggest
from msplit.rules import available
from tests.graphs import parse
from tests.model_shapes import inception, lstm, mmoe

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
