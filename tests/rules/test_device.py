"""The rule `device`: what is placed on which GPU, and when all stays on one."""

from __future__ import annotations

import pytest

from msplit.core.graph import Assignment
from msplit.errors import AssignError, RulesError
from msplit.rules import parse as parse_rules
from msplit.rules.base import RuleContext
from msplit.rules.device import Device
from tests.graphs import by_name, nodes, parse


def tower(name):
    return f"""
    {name}/x:Placeholder; {name}/w:VarHandleOp[shape=2000x1000,dtype=float32,shared_name={name}] stateful
    {name}/read:ReadVariableOp({name}/w) stateful
    {name}/one:MatMul({name}/x,{name}/read)@300us; {name}/two:MatMul({name}/one,{name}/read)@300us
    """


TOWERS = tower("a") + tower("b") + "join:ConcatV2(a/two,b/two)@3us"


def apply(text, streams=2, rule=None, claims=(), **named):
    flat, costs = parse(text, **{"share": 1.0, "bytes_": 1e4, **named})
    assignment = Assignment.empty(len(flat))
    for stream, *names in claims:
        assignment = assignment.claim(nodes(flat, *names), stream, "regex", "test")
    after, remarks = (rule or Device()).apply(RuleContext(flat, costs, streams), assignment)
    return flat, after, by_name(flat, after.ids), remarks


def test_towers_are_on_two_gpus_with_their_weights():
    flat, after, ids, remarks = apply(TOWERS)
    assert {ids["a/one"], ids["b/one"]} == {0, 1}
    for tower in "ab":
        assert len({ids[f"{tower}/{part}"] for part in ("w", "read", "one", "two")}) == 1
    assert ids["join"] == 0  # the outputs are wanted on the first
    assert [remark.kind for remark in remarks] == ["split"]
    assert "divided over 2 GPUs, 1 each: 2 GPUs pay" in remarks[0].text
    rule, why = after.why(flat.graph.index["a/one"])
    assert rule == "device"
    assert "2 GPUs pay for a shorter step" in why


def test_streams_are_divided_evenly_and_each_gpu_uses_its_own():
    text = TOWERS.replace("@300us", "@100us") + "".join(
        f"\nc{number}/x:Placeholder; c{number}/one:MatMul(c{number}/x)@200us" for number in range(4)
    )
    ids = apply(text, streams=4, share=0.3)[2]
    assert {ids[name] // 2 for name in ids if ids[name] >= 0} == {0, 1}
    assert max(ids.values()) <= 3
    assert len(set(ids.values())) > 2


def test_what_is_small_stays_on_the_first_gpu_and_the_remark_says_why():
    _, _, ids, remarks = apply(TOWERS.replace("@300us", "@5us"), streams=4)
    assert set(ids.values()) <= {0, 1}
    assert [remark.kind for remark in remarks] == ["no-gain"]
    assert "all stays on the first GPU: 2 GPUs do not pay" in remarks[0].text


def test_where_a_split_must_be_needed_speed_is_no_reason():
    rule = Device(needed=True)
    assert set(apply(TOWERS, rule=rule)[2].values()) == {0}
    # 8 MB of weights in each tower, and 9 MB on each GPU.
    ids = apply(TOWERS.replace("@300us", "@5us"), rule=Device(needed=True, memory_gb=0.01))[2]
    assert {ids["a/one"], ids["b/one"]} == {0, 1}


def test_weights_that_fit_nowhere_are_refused():
    with pytest.raises(AssignError, match="2 GPUs can not hold this model: its weights take 16") as caught:
        apply(TOWERS, rule=Device(memory_gb=0.005))
    assert "more `gpus`" in caught.value.fix


def test_what_is_placed_by_hand_stays():
    ids = apply(TOWERS, claims=[(1, "a/one")])[2]
    assert ids["a/one"] == 1


def test_streams_have_to_be_divided_evenly():
    with pytest.raises(AssignError, match="3 streams can not be divided evenly over 2 GPUs"):
        apply(TOWERS, streams=3)
    with pytest.raises(AssignError, match="1 stream can not be divided evenly"):
        apply(TOWERS, streams=1)


def test_nothing_to_place_is_said():
    assert apply("x:Placeholder; y:Identity(x)")[3][0].text == "no node launches a kernel"


def test_options_are_read_and_mistakes_named():
    text = "version: 1\nstreams: 8\nrules:\n  - device: {gpus: 4, memory_gb: 24, needed: true}\n"
    assert parse_rules(text, "mine").rules == (Device(4, 24.0, True),)
    with pytest.raises(RulesError, match="gpus"):
        parse_rules(text.replace("gpus: 4", "gpus: 0"), "mine")
