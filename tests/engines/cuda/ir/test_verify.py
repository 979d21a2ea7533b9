"""What is asked of a graph behind every pass: each rule catches the wrong pass that is planted for it, and is told its name."""

import contextlib
from dataclasses import replace

import numpy as np
import pytest

from msplit.engines.cuda.compile import optimize
from msplit.engines.cuda.ir import verify
from msplit.engines.cuda.ir.graph import Op
from msplit.engines.cuda.ir.verify import IllegalGraph, Stage
from msplit.engines.cuda.passes import pipeline
from msplit.engines.cuda.passes.pipeline import PIPELINE, Pass, run_passes
from tests.engines.cuda.cases import CPU, flat_of, graph_of
from tests.engines.cuda.random_graphs import FLOAT, _Graph


@pytest.fixture(scope="module")
def optimized():
    """A product, and two ops behind it."""
    g = _Graph(lambda strategy: None)
    x = g.placeholder("x", (3, 4))
    product = g.node("MatMul", [x, g.constant(np.ones((4, 4), np.float32))], T=FLOAT)
    square = g.node("Square", [product], T=FLOAT)
    g.node("Mul", [square, product], T=FLOAT)
    return optimize(flat_of(g.graph_def), {"x": np.ones((3, 4), np.float32)}, CPU)


@pytest.fixture(scope="module")
def training():
    """A variable that is read, and then written."""

    def build(tf, v1):
        x = v1.placeholder(tf.float32, [3, 4], name="x")
        v = v1.get_variable("v", [3, 4], use_resource=True)
        square = tf.square(v.read_value())
        with tf.control_dependencies([square]):
            write = v.assign_add(x, read_value=False)
        with tf.control_dependencies([write]):
            tf.multiply(v.read_value(), square, name="out")

    state = {"v": np.ones((3, 4), np.float32)}
    return optimize(graph_of(build, outputs=["out"]), {"x": np.ones((3, 4), np.float32)}, CPU, state=state)


def op(graph, name):
    return next(one for one in graph.ops.values() if one.op == name)


def stands_elsewhere(graph):
    number = next(iter(graph.ops))
    graph.ops = {(graph.fresh() if key == number else key): one for key, one in graph.ops.items()}


def numbers_taken_twice(graph):
    graph.numbers = 0


def reads_what_is_not_there(graph):
    op(graph, "Square").inputs[0] = (graph.fresh(), 0)


def reads_an_output_that_is_not_there(graph):
    square = op(graph, "Square")
    square.inputs[0] = (square.inputs[0][0], 1)


def reads_too_early(graph):
    square = op(graph, "Square")
    graph.ops = {square.node: square, **{key: one for key, one in graph.ops.items() if one is not square}}


def fetches_what_is_not_there(graph):
    graph.fetches = dict.fromkeys(graph.fetches, (graph.fresh(), 0))


def is_fed_and_known(graph):
    graph.constants[graph.feeds["x"]] = np.ones((3, 4), np.float32)


def is_fed_twice(graph):
    graph.feeds["y"] = graph.feeds["x"]


def leaves_what_nobody_needs(graph):
    graph.add("Neg", op(graph, "Square"), {}, [(op(graph, "Square").node, 0)], (3, 4))


def does_the_work_of_nothing(graph):
    op(graph, "Square").source_nodes = []


def does_the_work_of_another_model(graph):
    op(graph, "Square").source_nodes = [graph.numbers + 7]


def replaces_kernels_of_another_model(graph):
    op(graph, "Square").replaces = [-1]


def does_nothing_side_by_side(graph):
    op(graph, "Square").batch = 0


def has_no_lowering(graph):
    op(graph, "Square").op = "Squared"


def keeps_a_loop(graph):
    op(graph, "Square").op = "While"


def has_an_array_for_an_attribute(graph):
    op(graph, "Square").attrs["T"] = np.ones(3)


def has_a_description_for_an_attribute(graph):
    op(graph, "Square").attrs["T"] = Op(0, "", "", {}, [])


def forgets_a_shape(graph):
    del graph.shapes[op(graph, "Square").node, 0]


def forgets_the_shape_of_an_input(graph):
    del graph.shapes[graph.feeds["x"]]


def mistakes_the_shape_of_a_constant(graph):
    graph.shapes[op(graph, "MatMul").inputs[1]] = (4, 5)


def writes_what_is_no_variable(graph):
    op(graph, "AssignAdd").inputs[0] = graph.feeds["x"]


def overwrites_a_value_twice(graph):
    write = op(graph, "AssignAdd")
    graph.add("AssignAdd", write, dict(write.attrs), list(write.inputs), (3, 4))


def leaves_a_variable_elsewhere(graph):
    graph.final["v"] = (op(graph, "Square").node, 0)


def writes_a_variable_from_nowhere(graph):
    graph.final["w"] = graph.final["v"]


def overwrites_before_it_is_read(graph):
    write = op(graph, "AssignAdd")
    graph.ops = {write.node: write, **{key: one for key, one in graph.ops.items() if one is not write}}


OF_TRAINING = {
    writes_what_is_no_variable: "is no variable that it could write",
    overwrites_a_value_twice: "overwrites .* a second time",
    leaves_a_variable_elsewhere: "which does not stay in its memory",
    writes_a_variable_from_nowhere: "is written and has no value before",
    overwrites_before_it_is_read: "overwrites what Square .* reads behind it",
}

MUTANTS = {
    stands_elsewhere: "stands under",
    numbers_taken_twice: "which is not taken",
    reads_what_is_not_there: "is not there when it is read",
    reads_an_output_that_is_not_there: "is not there when it is read",
    reads_too_early: "is not there when it is read",
    fetches_what_is_not_there: "which nothing makes",
    is_fed_and_known: "is fed, and known or made as well",
    is_fed_twice: "two inputs are one value",
    leaves_what_nobody_needs: "nothing needs Neg",
    does_the_work_of_nothing: "does the work of no node",
    does_the_work_of_another_model: "a node that is not in the model",
    replaces_kernels_of_another_model: "a node that is not in the model",
    does_nothing_side_by_side: "does 0 ops side by side",
    has_no_lowering: "has no lowering",
    keeps_a_loop: "has no lowering",
    has_an_array_for_an_attribute: "attribute T of Square",
    has_a_description_for_an_attribute: "attribute T of Square",
    forgets_a_shape: "Square .* has no shape",
    forgets_the_shape_of_an_input: "an input, .* has no shape",
    mistakes_the_shape_of_a_constant: "has the shape",
}


def planted(optimized, change, *, says=False):
    """Runs a wrong pass behind all others; it says that it changed nothing, so that nobody tidies up behind it."""

    def run(graph, context):
        change(graph)
        return says

    wrong = Pass(change.__name__, run, Stage.LAID_OUT)
    run_passes(optimized.graph.copy(), optimized.context, Stage.LAID_OUT, pipeline=(*PIPELINE, wrong))


@pytest.mark.parametrize("change", MUTANTS, ids=lambda change: change.__name__)
def test_a_wrong_pass_is_caught_and_named(change, optimized, monkeypatch):
    monkeypatch.setattr(verify, "fingerprint", lambda graph: ())
    monkeypatch.setattr(pipeline, "fingerprint", lambda graph: ())
    with pytest.raises(IllegalGraph, match=f"after the pass {change.__name__}: .*{MUTANTS[change]}"):
        planted(optimized, change)


@pytest.mark.tf
@pytest.mark.parametrize("change", OF_TRAINING, ids=lambda change: change.__name__)
def test_a_wrong_pass_over_a_training_graph_is_caught_and_named(change, training, monkeypatch):
    monkeypatch.setattr(verify, "fingerprint", lambda graph: ())
    monkeypatch.setattr(pipeline, "fingerprint", lambda graph: ())
    with pytest.raises(IllegalGraph, match=f"after the pass {change.__name__}: .*{OF_TRAINING[change]}"):
        planted(training, change)


@pytest.mark.tf
def test_every_rule_has_a_mutant(optimized, training, monkeypatch):
    """Without the rule some mutant lives."""
    monkeypatch.setattr(verify, "fingerprint", lambda graph: ())
    monkeypatch.setattr(pipeline, "fingerprint", lambda graph: ())
    for rule in verify.RULES:
        with monkeypatch.context() as without:
            without.setattr(verify, "RULES", tuple(one for one in verify.RULES if one is not rule))
            survivors = 0
            for change in (*MUTANTS, *OF_TRAINING):
                with contextlib.suppress(IllegalGraph):
                    planted(training if change in OF_TRAINING else optimized, change)
                    survivors += 1
        assert survivors, rule.__name__


def test_a_pass_that_hides_a_change_is_caught(optimized):
    def swaps(graph):
        op(graph, "Mul").inputs.reverse()

    with pytest.raises(IllegalGraph, match="after the pass swaps: it changed the graph and says that it did not"):
        planted(optimized, swaps)
    planted(optimized, swaps, says=True)


def test_nothing_is_verified_where_nobody_asks(optimized, monkeypatch):
    monkeypatch.delenv(pipeline.VERIFY)
    planted(optimized, does_the_work_of_nothing)


def test_the_tests_verify_every_pass(optimized, monkeypatch):
    """In every kernel mode, each pass that runs is looked at, where the graph is another than the one that was looked at last."""
    seen = []
    monkeypatch.setattr(pipeline, "snapshot", lambda graph: (object(),))
    monkeypatch.setattr(pipeline, "verify", lambda graph, stage, nodes, after, unchanged: seen.append(after))
    run_passes(optimized.graph.copy(), replace(optimized.context, group=True, half="bfloat16", fuse=True), *Stage)
    assert seen == [one.name for one in PIPELINE]
