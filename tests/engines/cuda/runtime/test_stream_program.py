"""Streams: any assignment of any graph gives the same, whatever order the events allow, and no memory goes too early."""

import itertools
import time
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from msplit.core.dag import Dag
from msplit.engines.cuda.ir.graph import Op
from msplit.engines.cuda.ir.program import KernelCall, Program
from msplit.engines.cuda.runtime.executables import SimulatedExecutable, plan_for
from msplit.engines.cuda.runtime.stream_program import StreamProgram, arrange
from msplit.engines.tensorflow.engine import reference
from msplit.errors import EngineError
from msplit.verify.compare import compare
from tests.campaign import examples
from tests.engines.cuda.cases import bits, flat_of, graph_of, program_of, scattered
from tests.engines.cuda.random_graphs import random_graphs

QUICK = settings(max_examples=examples(10, 100), deadline=None, suppress_health_check=list(HealthCheck))
STREAMS = (1, 2, 4, 8)


def load(case):
    graph_def, feeds, outputs = case
    flat = flat_of(graph_def, outputs=outputs)
    return flat, {tensor.name: feeds[tensor.name] for tensor in flat.inputs}


def stream_program_of(program, ids):
    plan = plan_for(program, ids, None)
    return arrange(program, plan), plan


@given(random_graphs())
@QUICK
def test_any_streams_and_interleaving_equal_one_stream_to_the_bit(case):
    flat, feeds = load(case)
    program = program_of(flat, feeds)
    one, _ = stream_program_of(program, np.zeros(len(flat), np.int32))
    expected = bits(SimulatedExecutable(program, one, {}).step(feeds))
    for streams in STREAMS:
        stream_program, _ = stream_program_of(program, scattered(flat, streams, streams))
        executable = SimulatedExecutable(program, stream_program, {}, seed=streams)
        for _ in range(4):
            assert bits(executable.step(feeds)) == expected, f"{streams} streams"


@pytest.mark.tf
@given(random_graphs())
@QUICK
def test_a_random_graph_equals_tensorflow(case):
    flat, feeds = load(case)
    expected = reference(flat, feeds)
    program = program_of(flat, feeds)
    for streams in (1, 4):
        stream_program, _ = stream_program_of(program, scattered(flat, streams, 7))
        found = compare(SimulatedExecutable(program, stream_program, {}).step(feeds), expected, tolerance=2e-4)
        assert found.passed, found.describe()


def happens_before(stream_program: StreamProgram) -> dict[tuple[int, int], bool]:
    """Whether one step is over before another starts, by brute force over the order of streams and the waits."""
    steps = [instruction.step for instruction in stream_program.instructions]
    before: dict[int, set[int]] = {}
    last: dict[int, int] = {}
    for instruction in stream_program.instructions:
        direct = set(instruction.waits) | ({last[instruction.lane]} if instruction.lane in last else set())
        before[instruction.step] = direct.union(*(before[step] for step in direct))
        last[instruction.lane] = instruction.step
    return {(first, second): first in before[second] for first in steps for second in steps}


def owner_of(program: Program) -> dict:
    return {(step.op.node, port): base for step in program.steps for port, base in enumerate(step.bases)}


def assert_frees_are_safe(program: Program, stream_program: StreamProgram) -> None:
    """Whatever is let go is over for every reader when the next thing of its stream starts; outputs and inputs stay."""
    over = happens_before(stream_program)
    owners = owner_of(program)
    at = {instruction.step: instruction for instruction in stream_program.instructions}
    released = [(instruction, key) for instruction in stream_program.instructions for key in instruction.frees]
    keys = [key for _, key in released]
    assert len(keys) == len(set(keys)), "let go twice"
    fetched = {owners.get(key, -1) for key in program.fetches.values()}
    for instruction, key in released:
        owner = owners[key]
        assert owner not in fetched
        assert at[owner].lane == instruction.lane, "memory goes back to the stream that it was allocated on"
        assert owner == instruction.step or over[owner, instruction.step]
        for number, step in enumerate(program.steps):
            if step.launches and any(owners.get(other) == owner for other in step.inputs):
                done = number == instruction.step or over[number, instruction.step]
                assert done, f"step {number} may still read {key}"


def peak_of(program: Program, stream_program: StreamProgram) -> int:
    """Highest memory per stream, added up, by going through the instructions one by one."""
    peaks = {}
    for lane in range(stream_program.count):
        live = highest = 0
        for instruction in stream_program.instructions:
            if instruction.lane == lane:
                live += program.steps[instruction.step].bytes
                highest = max(highest, live)
                owners = {owner_of(program)[key] for key in instruction.frees}
                live -= sum(program.steps[owner].bytes for owner in owners)
        peaks[lane] = highest
    return sum(peaks.values())


@given(random_graphs(), st.sampled_from(STREAMS), st.integers(0, 99))
@QUICK
def test_nothing_is_let_go_before_its_readers_are_over(case, streams, seed):
    flat, feeds = load(case)
    program = program_of(flat, feeds)
    stream_program, _ = stream_program_of(program, scattered(flat, streams, seed))
    assert_frees_are_safe(program, stream_program)
    assert stream_program.peak_bytes == peak_of(program, stream_program)


@given(random_graphs(), st.integers(0, 99))
@QUICK
def test_peak_memory_lies_between_the_largest_step_and_all_of_them(case, seed):
    flat, feeds = load(case)
    program = program_of(flat, feeds)
    sizes = [step.bytes for step in program.steps]
    assume(sizes)
    for streams in STREAMS:
        stream_program, _ = stream_program_of(program, scattered(flat, streams, seed))
        assert max(sizes) <= stream_program.peak_bytes <= sum(sizes)


@given(random_graphs(most=40), st.integers(0, 99))
@QUICK
def test_a_missing_wait_shows(case, seed):
    """The simulator is worth something: without one of the waits some order gives another result or none."""
    flat, feeds = load(case)
    program = program_of(flat, feeds)
    stream_program, plan = stream_program_of(program, scattered(flat, 4, seed))
    assume(plan.waits)
    expected = bits(SimulatedExecutable(program, stream_program, {}).step(feeds))
    number = seed % plan.waits
    node, on = int(plan.wait_node[number]), int(plan.wait_on[number])
    instructions = tuple(
        _without(instruction, on) if instruction.step == node else instruction
        for instruction in stream_program.instructions
    )
    broken = StreamProgram(
        instructions,
        stream_program.first_views,
        stream_program.fork,
        stream_program.join,
        stream_program.count,
        stream_program.peak_bytes,
    )
    for attempt in range(400):
        executable = SimulatedExecutable(program, broken, {}, seed=attempt)
        try:
            if bits(executable.step(feeds)) != expected:
                return
        except EngineError:  # a value is not there yet, or not any more
            return
    raise AssertionError(f"step {node} need not wait for {on}")


def _without(instruction, on):
    return replace(instruction, waits=tuple(other for other in instruction.waits if other != on))


def chain_program(steps: int, width: int) -> Program:
    """`width` chains that all read one another's last value at every step: waits everywhere, values that live long."""
    made, src, dst = [], [], []
    for number in range(steps):
        inputs = [number - 1] if number % width else []
        inputs += [number - width] if number >= width else []
        inputs += [0] if number and number % 7 == 0 else []
        keys = tuple((node, 0) for node in dict.fromkeys(inputs))
        for key in keys:
            src.append(key[0])
            dst.append(number)
        op = Op(number, f"n{number}", "AddN", {}, list(keys), [number])
        made.append(KernelCall(op, lambda *xs: (sum(xs, torch.zeros(1)) + 1,), keys, 1, True, 4, (number,)))
    last = steps - 1
    return Program(tuple(made), {}, {}, {"out": (last, 0)}, {}, Dag.of(steps, src, dst))


def seconds(steps: int) -> float:
    program = chain_program(steps, 10)
    ids = np.arange(steps, dtype=np.int32) % 10
    plan = plan_for(program, ids, None)
    start = time.process_time()
    arrange(program, plan)
    return time.process_time() - start


def test_arranging_is_near_linear():
    """As an unrolled LSTM has it: thousands of steps on ten streams, a wait at nearly each."""
    small = min(seconds(2_500) for _ in range(3))
    large = seconds(10_000)
    assert large < 10 * small + 0.25
    assert large < 2.5


def test_many_steps_with_waits_everywhere_are_safe():
    program = chain_program(120, 5)
    stream_program, _ = stream_program_of(program, np.arange(120, dtype=np.int32) % 5)
    assert_frees_are_safe(program, stream_program)
    results = [SimulatedExecutable(program, stream_program, {}, seed=seed).step({})["out"] for seed in range(5)]
    assert all(a.tolist() == b.tolist() for a, b in itertools.pairwise(results))


def program(*steps: tuple) -> Program:
    """Steps as (inputs, outputs, launches, bases)."""
    made, src, dst = [], [], []
    owner = {(number, port): number for number, step in enumerate(steps) for port in range(step[1])}
    for number, (inputs, outputs, launches, bases) in enumerate(steps):
        for key in inputs:
            src.append(owner[key])
            dst.append(number)
        op = Op(number, f"n{number}", "Test", {}, list(inputs), [number])
        call = (lambda *xs, n=outputs: tuple(torch.ones(2) for _ in range(n))) if launches else (lambda *xs: xs)
        made.append(
            KernelCall(op, call, tuple(inputs), outputs, launches, 8 * outputs if launches else 0, tuple(bases))
        )
    return Program(tuple(made), {}, {}, {"out": (len(steps) - 1, 0)}, {}, Dag.of(len(steps), src, dst))


def test_a_view_of_two_values_of_which_one_is_never_read_keeps_both_until_it_is_made():
    """As IdentityN: its second value is made late, its first one is not read by anything."""
    p = program(
        ([], 1, True, [0]),
        ([(0, 0)], 1, True, [1]),
        ([(0, 0), (1, 0)], 2, False, [0, 1]),
        ([(2, 1)], 1, True, [3]),
    )
    for ids in itertools.product(range(3), repeat=4):
        stream_program, _ = stream_program_of(p, np.array(ids, np.int32))
        for seed in range(6):
            assert SimulatedExecutable(p, stream_program, {}, seed=seed).step({})["out"].tolist() == [1, 1]


def test_a_value_that_nobody_reads_is_let_go_at_once():
    p = program(([], 2, True, [0, 0]), ([], 1, True, [1]))
    stream_program, _ = stream_program_of(p, np.zeros(2, np.int32))
    assert stream_program.instructions[
        [instruction.step for instruction in stream_program.instructions].index(0)
    ].frees == ((0, 0), (0, 1))
    assert stream_program.peak_bytes == 16


def test_what_another_stream_reads_stays_until_its_stream_knows():
    """Stream 0 makes a value that stream 1 reads; stream 0 learns that only through its wait for stream 1's result."""
    p = program(
        ([], 1, True, [0]),
        ([(0, 0)], 1, True, [1]),  # on stream 1
        ([(0, 0)], 1, True, [2]),
        ([(1, 0), (2, 0)], 1, True, [3]),
        ([(3, 0)], 1, True, [4]),
    )
    stream_program, _ = stream_program_of(p, np.array([0, 1, 0, 0, 0], np.int32))
    where = {key: instruction.step for instruction in stream_program.instructions for key in instruction.frees}
    assert where[0, 0] == 3
    assert (1, 0) not in where, "stream 1 ends without knowing that stream 0 has read its result"


@pytest.mark.parametrize("last", [False, True], ids=["what a step reads", "an output"])
def test_memory_that_is_let_go_too_early_is_told_as_a_fault_of_the_engine(last):
    graph = graph_of(
        lambda tf, v1: tf.matmul(tf.nn.relu(v1.placeholder(tf.float32, [2, 2], "x")), [[1.0, 2], [3, 4]], name="y"),
        outputs=["y"],
    )
    feeds = {"x": np.ones((2, 2), np.float32)}
    program = program_of(graph, feeds)
    stream_program, _ = stream_program_of(program, np.zeros(len(graph), np.int32))
    instructions = list(stream_program.instructions)
    number = len(instructions) - 1 if last else 0
    made = program.steps[instructions[number].step].op.node, 0
    instructions[number] = replace(instructions[number], frees=(made,))
    early = replace(stream_program, instructions=tuple(instructions))
    with pytest.raises(EngineError, match=r"internal error.*let go too early") as told:
        SimulatedExecutable(program, early, {}).step(feeds)
    assert told.value.where
    assert "report" in told.value.fix
