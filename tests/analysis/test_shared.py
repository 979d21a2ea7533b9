"""Work that inputs have to themselves, against a walk by hand; the words of `analyze`."""

from __future__ import annotations

from typing import Any

import pytest

from msplit.analysis.shared import shared_work
from msplit.assignment.model import price
from msplit.cost.profile import Workload
from msplit.errors import MsplitError
from msplit.run.prepare import prepare
from tests.cli.runner import fine, msplit
from tests.engines.cuda.cases import graph_of
from tests.engines.cuda.passes.test_shared_rows import ranker

pytestmark = pytest.mark.tf


@pytest.fixture(scope="module")
def flat() -> Any:
    return graph_of(ranker, outputs=["y", "who"])


def alone(flat: Any, prefix: str) -> set[int]:
    """Nodes below which there is nothing but inputs of this prefix, and one at least."""
    graph, inputs = flat.graph, {tensor.node: tensor.name for tensor in flat.inputs}
    below: list[set[str]] = [set() for _ in range(len(flat))]
    for node in graph.topological.tolist():
        below[node] |= {inputs[node]} if node in inputs else set()
        for edge in range(graph.in_start[node], graph.in_start[node + 1]):
            below[node] |= below[graph.edges.src[edge]]
    return {node for node, names in enumerate(below) if names and all(name.startswith(prefix) for name in names)}


@pytest.mark.parametrize("prefix", ["user", "item"])
def test_named_inputs_have_what_lies_below_them_alone(flat: Any, prefix: str) -> None:
    _, costs = price(flat, Workload(batch=64))
    found = shared_work(flat, costs, [f"{prefix}*"])
    nodes = sorted(alone(flat, prefix))
    assert found is not None
    assert found.nodes == len(nodes)
    assert found.time_us == pytest.approx(float(costs.time_us[nodes].sum()))
    assert found.flops == pytest.approx(float(costs.flops[nodes].sum()))
    assert found.named


def test_without_names_the_largest_set_is_found_that_is_not_all(flat: Any) -> None:
    _, costs = price(flat, Workload(batch=64))
    found = shared_work(flat, costs)
    assert found is not None
    assert set(found.inputs) == {"user_clicks", "user_age"}
    assert not found.named
    with pytest.raises(MsplitError, match=r"no input is called 'nobody'"):
        shared_work(flat, costs, ["nobody"])


def test_analyze_says_it(flat: Any) -> None:
    path = flat.model.path
    told = fine("analyze", path, "--batch", "64", "--format", "json").json["shared"]
    assert told["words"].startswith("user_clicks, user_age alone:")
    assert "shared" not in fine("analyze", path, "--format", "json").json, "at one row there is nothing to save"
    assert fine("analyze", path, "--shared", "item*", "--format", "json").json["shared"]["inputs"] == [
        "item",
        "item_price",
    ]
    said = fine("analyze", path, "--batch", "64", "--shared", "user_clicks", "--shared", "user_a*").out.replace(
        "\\\n", ""
    )
    following = [" ".join(line.split()) for line in said.partition("Next:")[2].splitlines()]
    for command in ("bench", "build"):
        assert any(
            f"msplit {command} {path} --batch 64 --shared user_clicks --shared 'user_a*'" in one for one in following
        )
    done = msplit("analyze", path, "--shared", "nobody")
    assert (done.code, "no input is called 'nobody'" in done.err) == (2, True)


def test_what_can_not_be_computed_once_is_not_advised() -> None:
    def build(tf: Any, v1: Any) -> None:
        user, item = (v1.placeholder(tf.float32, [None, 16], name) for name in ("user", "item"))
        normal = user - tf.reduce_mean(user @ tf.ones([16, 16]), 0)
        tf.reduce_sum(normal * item, 1, name="y")

    flat = graph_of(build, outputs=["y"])
    _, costs = price(flat, Workload(batch=64))
    assert shared_work(flat, costs) is None
    found = shared_work(flat, costs, ["user"])
    assert found is not None
    assert "which --shared can not compute once: rows of a batch depend on each other" in found.words
    with pytest.raises(MsplitError, match="rows can not be shared: rows of a batch depend on each other"):
        prepare(flat, batch=64, shared=["user"], engine="cuda", device="cpu")
