from pathlib import Path

import pytest

from msplit import rules
from msplit.cost import estimate, infer
from msplit.errors import RulesError
from msplit.flatten import flatten
from msplit.formats import read
from msplit.rules.registry import RULES

SAMPLES = Path(__file__).parents[2] / "sample_graphs"
NAMES = ("auto", "default", "example", "recsys", "rnn", "vision")


@pytest.fixture(scope="module")
def graphs():
    result = {}
    for name in (
        "lstm_small.pb",
        "mmoe_small.pb",
        "towers_small.pb",
        "training.meta",
        "feature_columns",
        "while_v1.pb",
    ):
        flat = flatten(read(SAMPLES / name))
        result[name] = (flat, estimate(flat, infer(flat)))
    return result


def test_all_of_them_ship():
    assert rules.available() == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_each_can_be_named_without_a_path(name):
    found = rules.load(name)
    assert found.source == f"{name} (shipped)"
    assert found.streams >= 4
    assert {rule.key for rule in found.rules} >= {"manual", "colocation", "propagate"}


def test_the_example_shows_every_rule_and_every_option():
    found = rules.load("example")
    assert {rule.key for rule in found.rules} == set(RULES) - {"auto"}
    text = (Path(__file__).parents[2] / "rules" / "example.yaml").read_text()
    options = (
        "patterns",
        "match",
        "file",
        "balance",
        "streams",
        "include_zero",
        "min_cost_us",
        "ops",
        "handles",
        "default",
    )
    assert [option for option in options if f"{option}:" not in text] == []


@pytest.mark.parametrize("name", NAMES)
def test_each_runs_on_every_kind_of_model_and_is_settled_by_its_own_result(name, graphs):
    ruleset = rules.load(name)
    for flat, costs in graphs.values():
        outcome = rules.assign(flat, costs, ruleset)
        assert outcome.ids.min() >= 0
        assert outcome.ids.max() < ruleset.streams
        assert (outcome.ids[flat.host] == 0).all()
        assert rules.assign(flat, costs, ruleset).ids.tolist() == outcome.ids.tolist()


@pytest.mark.parametrize(
    ("name", "graph", "streams"),
    [
        ("auto", "mmoe_small.pb", 4),
        ("recsys", "towers_small.pb", 6),
        ("default", "mmoe_small.pb", 4),
        ("rnn", "lstm_small.pb", 3),
        ("recsys", "training.meta", 2),
    ],
)
def test_each_spreads_what_it_is_for(name, graph, streams, graphs):
    flat, costs = graphs[graph]
    outcome = rules.assign(flat, costs, rules.load(name))
    assert len(set(outcome.ids[costs.time_us > 0].tolist())) >= streams


def test_a_name_that_is_nearly_right_gets_a_hint():
    with pytest.raises(RulesError, match="did you mean 'recsys'") as error:
        rules.load("recsis")
    assert "auto, default, example, recsys, rnn, vision" in error.value.fix


def test_a_file_beside_the_user_needs_its_suffix_or_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rnn").write_text("version: 1\nrules: []\n")
    assert rules.load("rnn").rules != ()
    assert rules.load("./rnn").rules == ()
