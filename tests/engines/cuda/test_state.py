"""Variables in the engine's graph: what a node sees of them, in which order they are read and written, and what proves it.

TensorFlow runs the same graphs, wherever it orders what is tested.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from msplit.core.arguments import Precision
from msplit.core.dag import Dag
from msplit.engines.base import Job
from msplit.engines.cuda.compile import compile_job
from msplit.engines.cuda.engine import ENGINE
from msplit.engines.cuda.ir import graph as graphs
from msplit.engines.cuda.ir.program import ALIGNED, StateMemory
from msplit.engines.cuda.options import EngineOptions, KernelMode
from msplit.engines.cuda.runtime.executables import executable_for, plan_for
from msplit.engines.tensorflow.placed import unplaced
from msplit.engines.tensorflow.runtime import session_config
from msplit.engines.tensorflow.session import SessionExecutable
from msplit.errors import EngineError, LoadError
from msplit.schedule.plan import make_plan, record_order
from msplit.schedule.plan_check import check
from msplit.verify.compare import compare_state
from msplit.verify.tensorflow_process import initial_state
from tests.campaign import examples
from tests.engines.cuda.cases import graph_of, scattered

pytestmark = pytest.mark.tf
X = np.asarray([1.0, 2.0, 3.0], np.float32)


def variables(tf, v1, resource, *names):
    """Variables of three numbers, x of 0.5 and so on."""
    made = []
    for place, name in enumerate(names):
        value = np.full(3, 0.5 + place, np.float32)
        made.append(v1.get_variable(name, initializer=tf.constant(value), use_resource=resource))
    return made


def read(tf, variable):
    return tf.identity(variable.read_value() if hasattr(variable, "handle") else variable)


def started(flat):
    """A session, and the values that variables begin with. TensorFlow's optimizer stays out: it reads variables in front of writes that
    control edges put before (seen in 2.21, in the test of two variables below).
    """
    config, state = session_config(1, cpu_only=True, optimized=False), initial_state(flat)
    session = SessionExecutable(flat.model, unplaced(flat), config, ieee=True, facts={})
    session.load_state(state)
    return session, state


def executable_of(flat, state, streams=4, seed=0, mode=KernelMode.FUSED_AND_GROUPED):
    options = EngineOptions("cpu", mode=mode)
    return ENGINE.build(
        Job(flat, scattered(flat, streams, seed), streams, {"x": X}, Precision.IEEE, options, state=state)
    )


def assert_trains_as_tensorflow(build, outputs, steps=3):
    flat = graph_of(build, outputs=outputs)
    session, state = started(flat)
    running = [executable_of(flat, state, seed=seed, mode=mode) for seed, mode in enumerate(KernelMode)]
    for step in range(steps):
        feeds = {"x": X + step}
        expected = session.step(feeds)
        for one in running:
            got = one.step(feeds)
            assert got.keys() == expected.keys()
            for name, value in expected.items():
                np.testing.assert_allclose(got[name], value, rtol=1e-6, err_msg=f"{name} at step {step}")
    expected = session.save_state()
    for one in running:
        found = compare_state(one.save_state(), expected, dict.fromkeys(expected, 1e-4))
        assert found.passed, found.describe()


@pytest.mark.parametrize("resource", [False, True])
def test_a_read_sees_what_control_edges_put_before_it(resource):
    def build(tf, v1):
        x = v1.placeholder(tf.float32, [3], name="x")
        (a,) = variables(tf, v1, resource, "a")
        before = tf.multiply(read(tf, a), 2.0)
        with tf.control_dependencies([before]):
            first = v1.assign_add(a, x)
        with tf.control_dependencies([first]):
            between = tf.multiply(read(tf, a), 3.0)
        with tf.control_dependencies([between]):
            second = v1.assign(a, tf.negative(x))
        with tf.control_dependencies([second]):
            after = tf.multiply(read(tf, a), 5.0)
        for name, value in (("before", before), ("between", between), ("after", after)):
            tf.identity(value, name=name)

    assert_trains_as_tensorflow(build, ["before", "between", "after"])


def test_what_is_wanted_of_a_value_after_it_is_overwritten_is_a_copy():
    """The old value of a resource stays what it was when it was read, however late it is used or fetched."""

    def build(tf, v1):
        x = v1.placeholder(tf.float32, [3], name="x")
        (a,) = variables(tf, v1, True, "a")
        old = read(tf, a)
        with tf.control_dependencies([old]):
            written = a.assign_add(x, read_value=False)
        with tf.control_dependencies([written]):
            tf.add(old, a.read_value(), name="sum")
        tf.identity(old, name="old")

    assert_trains_as_tensorflow(build, ["old", "sum"])


OLD = {
    "the second part": lambda tf, old: tf.split(old, 3)[1],
    "by given sizes": lambda tf, old: tf.split(old, [1, 2])[1],
    "one of all": lambda tf, old: tf.unstack(old)[2],
    "across": lambda tf, old: tf.transpose(tf.reshape(old, [1, 3])),
    "of a cond that is decided": lambda tf, old: tf.cond(tf.constant(True), lambda: old, lambda: old * 2.0),
    "of a cond": lambda tf, old: tf.cond(tf.reduce_sum(old) > -1e6, lambda: old, lambda: old * 2.0),
    "through a loop": lambda tf, old: tf.while_loop(lambda at, _: at < 2, lambda at, x: (at + 1, x), (0, old))[1],
}


@pytest.mark.parametrize("v2", [True, False], ids=["functions", "frames"])
@pytest.mark.parametrize("how", OLD)
def test_what_lies_in_an_old_value_is_a_copy_too(how, v2):
    def build(tf, v1):
        before = v1.control_flow_v2_enabled()
        (v1.enable_control_flow_v2 if v2 else v1.disable_control_flow_v2)()
        try:
            x = v1.placeholder(tf.float32, [3], name="x")
            (a,) = variables(tf, v1, True, "a")
            part = OLD[how](tf, read(tf, a))
        finally:
            (v1.enable_control_flow_v2 if before else v1.disable_control_flow_v2)()
        with tf.control_dependencies([part]):
            written = a.assign_add(x, read_value=False)
        with tf.control_dependencies([written]):
            tf.add(tf.reduce_sum(part), tf.reduce_sum(a.read_value()), name="both")
        tf.identity(part, name="part")

    assert_trains_as_tensorflow(build, ["part", "both"])


def test_an_output_that_lies_in_what_was_overwritten_is_never_given(monkeypatch):
    """Where the engine does not know that an op gives a view of what it reads."""

    def build(tf, v1):
        (a,) = variables(tf, v1, True, "a")
        part = tf.reshape(read(tf, a), [3, 1])
        with tf.control_dependencies([part]):
            written = a.assign_add(v1.placeholder(tf.float32, [3], name="x"), read_value=False)
        with tf.control_dependencies([written]):
            tf.identity(a.read_value(), name="both")
        tf.identity(part, name="part")

    flat = graph_of(build, outputs=["part", "both"])
    _, state = started(flat)
    np.testing.assert_array_equal(executable_of(flat, state).step({"x": X})["part"], state["a"].reshape(3, 1))
    monkeypatch.setattr(graphs, "_ALIASES", frozenset())
    with pytest.raises(EngineError, match="internal error: output part lies in a variable that was overwritten"):
        executable_of(graph_of(build, outputs=["part", "both"]), state)


def test_two_variables_that_take_each_others_value():
    def build(tf, v1):
        x = v1.placeholder(tf.float32, [3], name="x")
        a, b = variables(tf, v1, True, "a", "b")
        first, second = tf.reshape(read(tf, a), [3, 1]), tf.reshape(read(tf, b), [3, 1])
        with tf.control_dependencies([first, second]):
            writes = [
                a.assign(tf.reshape(second, [3]) + x, read_value=False),
                b.assign(tf.reshape(first, [3]), read_value=False),
            ]
        with tf.control_dependencies(writes):
            tf.add(a.read_value(), 10.0 * b.read_value(), name="out")

    assert_trains_as_tensorflow(build, ["out"])


def test_only_what_a_step_needs_is_written():
    def build(tf, v1):
        x = v1.placeholder(tf.float32, [3], name="x")
        a, b = variables(tf, v1, True, "a", "b")
        with tf.control_dependencies([a.assign_add(x, read_value=False)]):
            tf.identity(x, name="out")
        b.assign(x, name="unasked", read_value=False)

    flat = graph_of(build, outputs=["out"])
    assert "b" not in executable_of(flat, initial_state(flat)).save_state()
    assert_trains_as_tensorflow(build, ["out"])


def branches(tf, v1):
    """Branches that are trained side by side, variables read in views, too."""
    x = v1.placeholder(tf.float32, [3], name="x")
    losses = []
    for branch in range(4):
        with v1.variable_scope(f"branch_{branch}"):
            weights = v1.get_variable("w", initializer=tf.constant(np.eye(3, dtype=np.float32)), use_resource=True)
            bias = v1.get_variable("b", initializer=tf.constant(X), use_resource=True)
            hidden = tf.nn.tanh(tf.matmul(tf.reshape(x, [1, 3]), weights) + tf.reshape(bias, [1, 3]))
            hidden = tf.matmul(hidden, v1.get_variable("v", initializer=tf.constant(2 * np.eye(3, dtype=np.float32))))
            losses.append(tf.reduce_sum(tf.square(tf.nn.relu(hidden) - branch)))
    loss = tf.add_n(losses, name="loss")
    v1.train.MomentumOptimizer(0.01, 0.9).minimize(loss, name="train_op")


OUTPUTS = ["loss", "train_op"]


@pytest.fixture(scope="module")
def trained():
    flat = graph_of(branches, outputs=OUTPUTS)
    session, state = started(flat)
    session.close()
    return flat, state


def compiled_of(trained, mode=KernelMode.PLAIN):
    flat, state = trained
    return compile_job(
        Job(
            flat,
            np.zeros(len(flat), np.int32),
            1,
            {"x": X},
            Precision.IEEE,
            EngineOptions("cpu", mode=mode),
            state=state,
        )
    )


def test_branches_train_as_in_tensorflow():
    assert_trains_as_tensorflow(branches, OUTPUTS)


@pytest.mark.parametrize("mode", KernelMode)
def test_the_plan_has_every_order_that_addresses_ask_for(trained, mode):
    program = compiled_of(trained, mode).program
    conflicts = program.conflicts()
    assert len(conflicts.src) >= 8
    for seed in range(5):
        plan = plan_for(program, scattered(trained[0], 8, seed), None)
        assert not check(plan, conflicts)


def test_a_plan_that_lets_a_variable_be_overwritten_too_early_is_refused(trained):
    """Without the edges from readers to writers, data alone leave some orders open; the second look tells of each."""
    flat, _ = trained
    program = compiled_of(trained).program
    data = program.producers()
    edges = [(data[key], place) for place, step in enumerate(program.steps) for key in step.inputs if key in data]
    loose = replace(
        program, dag=Dag.of(len(program.steps), [first for first, _ in edges], [second for _, second in edges])
    )
    lanes, _ = program.lanes(scattered(flat, 8, 3))
    plan = make_plan(loose.dag, lanes, record_order(loose.dag, (lanes >= 0).astype(np.float64)))
    assert not check(plan, loose.dag)
    assert check(plan, loose.conflicts())
    with pytest.raises(EngineError, match="internal error: the plan does not hold"):
        plan_for(loose, scattered(flat, 8, 3), None)


@given(st.integers(0, 10_000))
@settings(max_examples=examples(6, 200), deadline=None, suppress_health_check=list(HealthCheck))
def test_whatever_order_events_allow_the_same_bits_are_trained(trained, seed):
    flat, state = trained
    compiled = compiled_of(trained, list(KernelMode)[seed % 4])
    found = []
    for ids in (np.zeros(len(flat), np.int32), scattered(flat, 6, seed)):
        plan = plan_for(compiled.program, ids, None)
        running = executable_for(compiled, plan, EngineOptions("cpu"), ieee=True)
        running.load_state(state)
        for step in range(3):
            running.step({"x": X + step})
        found.append({name: value.tobytes() for name, value in running.save_state().items()})
    assert found[0] == found[1]


def test_variables_of_a_group_lie_side_by_side(trained):
    compiled = compiled_of(trained, KernelMode.GROUPED)
    state = compiled.program.state
    stacks = [names for names in state.stacks.values() if len(names) == 4]
    assert any(all(name.endswith("/w") for name in names) for names in stacks)
    memory = StateMemory(state, torch.device("cpu"))
    for key, names in state.stacks.items():
        stack = memory.values()[key]
        for place, name in enumerate(names):
            assert torch.equal(stack[place], memory.tensors[name])
            assert stack[place].data_ptr() == memory.tensors[name].data_ptr()
            assert memory.tensors[name].data_ptr() % ALIGNED == 0
        assert memory.lies_in(stack) == names
        assert memory.lies_in(stack[1]) == (names[1],)
    assert memory.lies_in(torch.ones(3)) == ()


def test_a_timeline_trains_nothing(trained):
    running = executable_of(*trained)
    running.step({"x": X})
    before = running.save_state()
    running.timeline()
    for name, value in running.save_state().items():
        np.testing.assert_array_equal(value, before[name], err_msg=name)


def test_values_of_another_model_are_refused(trained):
    running = executable_of(*trained)
    before = running.save_state()
    with pytest.raises(EngineError, match=r"variable branch_0/w is float32 \(3, 3\), not float32 \(2, 3\)"):
        running.load_state({"branch_0/b": X + 1, "branch_0/w": np.zeros((2, 3), np.float32)})
    np.testing.assert_array_equal(running.save_state()["branch_0/b"], before["branch_0/b"])
    running.load_state({"elsewhere": X})


def test_a_variable_without_a_value_is_told():
    flat = graph_of(branches, outputs=OUTPUTS)
    with pytest.raises(LoadError, match="without the values of its variables"):
        ENGINE.build(Job(flat, np.zeros(len(flat), np.int32), 1, {"x": X}, Precision.IEEE, EngineOptions("cpu")))


def queue(tf, v1):
    x = v1.placeholder(tf.float32, [3], name="x")
    (a,) = variables(tf, v1, True, "a")
    line = tf.queue.FIFOQueue(10, [tf.float32], name="line")
    with tf.control_dependencies([line.enqueue([x], name="push"), a.assign(x, read_value=False)]):
        tf.identity(x, name="out")


def in_a_loop(tf, v1):
    before = v1.control_flow_v2_enabled()
    v1.enable_control_flow_v2()
    try:
        x = v1.placeholder(tf.float32, [3], name="x")
        (a,) = variables(tf, v1, True, "a")

        def turn(i):
            with tf.control_dependencies([a.assign_add(x, read_value=False, name="add")]):
                return i + 1

        with tf.control_dependencies(tf.nest.flatten(tf.while_loop(lambda i: i < 3, turn, [0], name="turns"))):
            tf.identity(a.read_value(), name="out")
    finally:
        (v1.enable_control_flow_v2 if before else v1.disable_control_flow_v2)()


def of_strings(tf, v1):
    word = v1.get_variable("word", initializer=tf.constant(["a"]), use_resource=True)
    x = v1.placeholder(tf.float32, [3], name="x")
    with tf.control_dependencies([word.assign(["b"], name="named", read_value=False)]):
        tf.identity(x, name="out")


@pytest.mark.parametrize(("build", "named"), [(queue, "push"), (in_a_loop, "turns"), (of_strings, "named")])
def test_effects_that_the_engine_does_not_have_are_refused_by_name(build, named):
    from msplit.engines.cuda.coverage import cover

    flat = graph_of(build, outputs=["out"])
    assert named in "; ".join(cover(flat).reasons)
    with pytest.raises(EngineError, match=rf"an effect that the cuda engine does not have \(.*{named}"):
        executable_of(flat, {"a": X})
