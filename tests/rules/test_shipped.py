import itertools
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from msplit import api, rules
from msplit.cli.analyze import assign_command as assign_command
from msplit.cost import estimate
from msplit.errors import RulesError
from msplit.flatten.build import flatten
from msplit.formats import read
from msplit.rules.ruleset import RULES
from msplit.schedule.judge import predict
from msplit.shapes.infer import infer

SAMPLES = Path(__file__).parents[2] / "sample_graphs"
NAMES = ("auto", "default", "device", "example", "recsys", "rnn", "vision")


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
    shown = {rule.key for rule in found.rules}
    assert shown == set(RULES) - {"auto", "device"}, "rules/example.yaml shows every rule: add an entry for a new one"
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
    missing = [option for option in options if f"{option}:" not in text]
    assert not missing, f"rules/example.yaml shows every option: it lacks {missing}"


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.no_cover if name == "auto" else ()) for name in NAMES]
)
def test_each_runs_on_every_kind_of_model_and_is_settled_by_its_own_result(name, graphs):
    ruleset = rules.load(name)
    for flat, costs in graphs.values():
        outcome = rules.assign(flat, costs, ruleset)
        assert outcome.ids.min() >= 0
        assert outcome.ids.max() < ruleset.streams
        assert (outcome.ids[flat.host] == 0).all()
        annotated = replace(flat, graph=replace(flat.graph, attrs=Annotated(flat, outcome.ids)))
        again = rules.assign(annotated, costs, ruleset)
        assert again.ids.tolist() == outcome.ids.tolist()


@pytest.mark.parametrize(
    ("name", "sample"),
    [
        *itertools.product(
            ["default", "recsys", "rnn", "vision"], ["lstm_small.pb", "mmoe_small.pb", "towers_small.pb"]
        ),
        ("auto", "mmoe_small.pb"),
    ],
)
def test_neither_the_order_of_the_file_nor_names_matter(name, sample, tmp_path):
    model = read(SAMPLES / sample)
    found = _ids(model, name)
    shuffled = type(model.graph_def)()
    shuffled.CopyFrom(model.graph_def)
    order = list(shuffled.node)
    random.Random(7).shuffle(order)
    del shuffled.node[:]
    shuffled.node.extend(order)
    (tmp_path / "shuffled.pb").write_bytes(shuffled.SerializeToString())
    assert _ids(read(tmp_path / "shuffled.pb"), name) == found
    renamed = type(model.graph_def)()
    renamed.CopyFrom(model.graph_def)
    new = {node.name: f"n{number}" for number, node in enumerate(renamed.node)}
    for node in renamed.node:
        node.name = new[node.name]
        for slot, source in enumerate(node.input):
            producer, _, port = source.lstrip("^").partition(":")
            node.input[slot] = ("^" if source.startswith("^") else "") + new[producer] + (f":{port}" if port else "")
    (tmp_path / "renamed.pb").write_bytes(renamed.SerializeToString())
    assert _ids(read(tmp_path / "renamed.pb"), name) == {new[node]: stream for node, stream in found.items()}


def _ids(model, name):
    flat = flatten(model)
    outcome = rules.assign(flat, estimate(flat, infer(flat)), rules.load(name))
    return dict(zip(flat.graph.names, outcome.ids.tolist(), strict=True))


class Annotated(Sequence):
    """The attributes of a graph that was assigned."""

    def __init__(self, flat, ids):
        self.flat, self.ids = flat, ids

    def __len__(self):
        return len(self.flat)

    def __getitem__(self, node):
        attrs = dict(self.flat.graph.attrs[node])
        return attrs if self.flat.host[node] else {**attrs, "_stream_id": int(self.ids[node])}


@pytest.mark.parametrize(
    ("name", "graph", "streams"),
    [
        ("auto", "mmoe_small.pb", 4),
        ("recsys", "towers_small.pb", 5),
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
    assert "auto, default, device, example, recsys, rnn, vision" in error.value.fix


def test_a_file_beside_the_user_needs_its_suffix_or_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rnn").write_text("version: 1\nrules: []\n")
    assert rules.load("rnn").rules != ()
    assert rules.load("./rnn").rules == ()


@pytest.mark.parametrize("model", ["mmoe_small.pb", "towers_small.pb", "keras_lookup", "tf1_saved_model"])
def test_what_is_used_where_none_is_named_is_never_slower_than_by_structure(model: str) -> None:
    flat = api.load(SAMPLES / model)
    priced = api.price(flat, batch=4)
    standard, structure = (
        predict(flat, priced[1], api.assign(flat, *ruleset, streams=4, priced=priced).ids).makespan_us
        for ruleset in ((), ("default",))
    )
    assert standard <= structure * 1.001


def test_the_command_names_the_same_rule_set_as_the_library() -> None:
    option = next(option for option in assign_command.params if option.name == "ruleset")
    assert option.default == rules.STANDARD
