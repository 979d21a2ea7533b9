"""All lookups of a stage are one op: the same result as TensorFlow, in the kernels that are expected."""

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from msplit.engines.cuda.engine import ENGINE, CudaEngine
from msplit.engines.cuda.passes.embedding.intervals import where_rows_lie
from msplit.errors import EngineError
from msplit.verify.compare import compare
from tests.campaign import examples
from tests.engines.cuda.cases import graph_of, job, kernels, outputs_of_tensorflow
from tests.engines.cuda.passes.embedding.models import EDGES, STRANGE

pytestmark = pytest.mark.tf

CHANCE = np.random.default_rng(0)


def table(rows, width, dtype=np.float32):
    return CHANCE.standard_normal((rows, width)).astype(dtype)


def grouped(build, feeds, *, streams=(1, 4), outputs=("out",)):
    """The program with lookups joined. It is equal to TensorFlow on 1 and 4 streams."""
    flat = graph_of(build, outputs=list(outputs))
    expected = outputs_of_tensorflow(flat, feeds)
    chance = np.random.default_rng(1)
    for count in streams:
        ids = chance.integers(0, count, len(flat)).astype(np.int32)
        executable = ENGINE.build(job(flat, feeds, ids, streams=count, group=True))
        for _ in range(2):
            found = compare(executable.step(feeds), expected)
            assert found.passed, found.describe()
        assert executable.facts()["weight_bytes"] <= ENGINE.build(job(flat, feeds)).facts()["weight_bytes"] + 64
    program = CudaEngine().compile(job(flat, feeds, group=True)).program
    for step in program.steps:
        if step.op.op == "_Columns":
            does = {flat.graph.ops[node] for node in step.op.source_nodes}
            assert "GatherV2" in does or "ResourceGather" in does
    return program


def ids_of(tf, v1, count, dtype="int32", shape=()):
    return [v1.placeholder(tf.as_dtype(dtype), (None, *shape), name=f"id_{number}") for number in range(count)]


def some_ids(count, high, batch=5, dtype=np.int32, shape=()):
    return {f"id_{number}": CHANCE.integers(0, high, (batch, *shape)).astype(dtype) for number in range(count)}


def test_unequal_tables_in_front_of_a_concat():
    def build(tf, v1):
        rows = [tf.gather(table(7, width), x) for width, x in zip((3, 8, 1), ids_of(tf, v1, 3), strict=True)]
        tf.concat(rows, 1, name="out")

    assert kernels(grouped(build, some_ids(3, 7))) == ["_Columns"]


def test_what_else_is_concatenated_comes_along():
    def build(tf, v1):
        dense = v1.placeholder(tf.float32, (None, 4), name="dense")
        first, second = ids_of(tf, v1, 2)
        hidden = tf.nn.relu(tf.matmul(dense, table(4, 6)))
        tf.concat([hidden, tf.gather(table(7, 3), first), dense, tf.gather(table(9, 2), second)], 1, name="out")

    feeds = {**some_ids(2, 7), "dense": table(5, 4)}
    assert kernels(grouped(build, feeds)) == ["_Columns", "_FusedMatMul"]


def test_what_is_read_in_two_shapes_is_filled_once():
    def build(tf, v1):
        whole = tf.concat([tf.gather(table(7, 4), x) for x in ids_of(tf, v1, 2)], 1, name="out")
        tf.reduce_sum(tf.reshape(whole, [-1, 2, 4]), 1, name="sum")

    program = grouped(build, some_ids(2, 7), outputs=("out", "sum"))
    assert kernels(program) == ["Sum", "_Columns"]
    (columns,) = [step for step in program.steps if step.op.op == "_Columns"]
    assert columns.outputs == 1


def test_fields_of_numbers_are_embedded_on_the_way():
    def build(tf, v1):
        numbers = v1.placeholder(tf.float32, (None, 3), name="numbers")
        embedded = tf.expand_dims(numbers, -1) * table(3, 4)
        rows = [tf.gather(table(7, 4), x) for x in ids_of(tf, v1, 2)]
        tf.concat([tf.stack(rows, 1), embedded], 1, name="out")

    feeds = {**some_ids(2, 7), "numbers": np.array([[1, np.nan, -2], [np.inf, 0, -0.0], *table(3, 3)], np.float32)}
    assert kernels(grouped(build, feeds)) == ["_Columns"]


def test_a_sum_of_lookups_does_not_wait_for_what_is_computed():
    def build(tf, v1):
        dense = v1.placeholder(tf.float32, (None, 4), name="dense")
        rows = [tf.gather(table(7, 3), x) for x in ids_of(tf, v1, 3)]
        tf.add_n([rows[0], tf.matmul(dense, table(4, 3)), *rows[1:]], name="out")

    program = grouped(build, {**some_ids(3, 7), "dense": table(5, 4)})
    assert kernels(program) == ["AddN", "MatMul", "_Columns"]
    numbers = {step.op.op: number for number, step in enumerate(program.steps)}
    (columns,) = [step for step in program.steps if step.op.op == "_Columns"]
    assert not {key[0] for key in columns.inputs} & {program.steps[numbers["MatMul"]].op.node}


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_scale_behind_lookups_is_one_kernel_with_them(dtype):
    def build(tf, v1):
        rows = [tf.gather(table(7, 4, np.dtype(dtype)), x) for x in ids_of(tf, v1, 2)]
        scaled = tf.stack(rows, 1, name="plain") * np.dtype(dtype).type(0.3)
        tf.multiply(scaled, np.dtype(dtype).type(3.3), name="out")

    program = grouped(build, some_ids(2, 7), outputs=("out", "plain"))
    assert kernels(program) == ["Mul", "_Columns"]  # a second factor would be rounded otherwise


def test_what_depends_on_a_lookup_does_not_come_along():
    def build(tf, v1):
        first, second = ids_of(tf, v1, 2)
        rows, others = tf.gather(table(7, 3), first), tf.gather(table(7, 2), second)
        tf.concat([rows, others, tf.matmul(rows, table(3, 3))], 1, name="out")

    assert kernels(grouped(build, some_ids(2, 7))) == ["ConcatV2", "MatMul", "_Columns"]


def test_lookups_of_ids_that_were_looked_up_are_a_later_stage():
    def build(tf, v1):
        first, second = ids_of(tf, v1, 2)
        near = [tf.gather(np.abs(table(7, 2)), x) for x in (first, second)]
        ids = [tf.cast(row[:, 0] * 2, tf.int32) for row in near]
        far = [tf.gather(table(9, 3), x) for x in ids]
        tf.concat([*near, *far], 1, name="out")

    found = kernels(grouped(build, some_ids(2, 7)))
    assert found.count("_Columns") == 2
    assert not {"GatherV2", "ConcatV2"} & set(found)


def test_lookups_that_only_a_later_stage_reads_are_joined():
    def build(tf, v1):
        first, second, third = ids_of(tf, v1, 3)
        early = [tf.gather(table(7, 2), first), tf.gather(table(7, 4), second)]
        ids = tf.cast(tf.gather(np.abs(table(7, 1)), third)[:, 0] * 2, tf.int32)
        late = [tf.gather(table(9, 3), ids), tf.gather(table(9, 1), ids + 1)]
        tf.concat([*early, *late], 1, name="out")

    found = kernels(grouped(build, some_ids(3, 7)))
    assert found.count("_Columns") == 2
    assert not {"GatherV2", "ConcatV2"} & set(found)


def test_stacks_sums_and_means():
    def build(tf, v1):
        x = ids_of(tf, v1, 4, "int64", (3,))
        bags = [tf.reduce_mean(tf.gather(table(7, 4), x[0]), 1), tf.reduce_sum(tf.gather(table(6, 4), x[1]), axis=[-2])]
        tf.stack(bags, 1, name="stack_1")
        tf.stack(bags, 0, name="stack_0")
        linear = [tf.reduce_sum(tf.gather(table(7, 1), part), 1) for part in x]
        tf.add_n(linear, name="add")
        tf.add(tf.reduce_sum(tf.gather(table(9, 4), x[2]), 1), bags[1], name="plus")

    outputs = ("stack_1", "stack_0", "add", "plus")
    assert kernels(grouped(build, some_ids(4, 6, dtype=np.int64, shape=(3,)), outputs=outputs)) == ["_Columns"]


def test_ids_are_computed_on_the_way():
    def build(tf, v1):
        wide, narrow = v1.placeholder(tf.int64, (None, 1), name="id_0"), v1.placeholder(tf.int32, (None,), name="id_1")
        value = v1.placeholder(tf.float32, (None, 3), name="value")
        buckets = tf.raw_ops.Bucketize(input=value, boundaries=EDGES) + np.array([0, 5, 10], np.int32)
        rows = [
            tf.reshape(tf.gather(table(7, 4), tf.cast(wide, tf.int32)), (-1, 4)),
            tf.gather(table(7, 4), tf.math.floormod(narrow, 7)),
            tf.gather(table(7, 4), tf.clip_by_value(narrow, 0, 6)),
            tf.gather(table(7, 4), tf.maximum(tf.minimum(narrow, 5), 1) + 1),
            tf.reduce_sum(tf.gather(table(15, 4), buckets), 1),
        ]
        tf.concat(rows, 1, name="out")

    feeds = {
        "id_0": np.array([[0], [2**32 + 3], [6], [1], [2]]),
        "id_1": np.array([-9, 3, 100, 2**31 - 1, -(2**31)], np.int32),
        "value": CHANCE.choice(STRANGE, (5, 3)).astype(np.float32),
    }
    assert kernels(grouped(build, feeds)) == ["_Columns"]


def test_one_lookup_is_left_alone():
    def build(tf, v1):
        (x,) = ids_of(tf, v1, 1)
        tf.gather(table(7, 3), x, name="out")

    assert kernels(grouped(build, some_ids(1, 7))) == ["GatherV2"]


def test_an_id_out_of_range_is_refused_on_the_cpu_as_before():
    def build(tf, v1):
        tf.concat([tf.gather(table(7, 2), x) for x in ids_of(tf, v1, 2)], 1, name="out")

    flat = graph_of(build, outputs=["out"])
    feeds = some_ids(2, 7)
    executable = ENGINE.build(job(flat, feeds, group=True))
    wrong = {**feeds, "id_1": np.full(5, 7, np.int32)}
    with pytest.raises(EngineError, match="out of range"):
        executable.step(wrong)


@st.composite
def sets_of_columns(draw):
    """Per column: kind, rows of the table, width, ids per example, combiner; and the axis of the join."""
    kind = st.sampled_from(["int32", "int64", "float32"])
    column = st.tuples(
        kind, st.integers(6, 9), st.integers(1, 9), st.integers(1, 3), st.sampled_from(["sum", "mean", "none"])
    )
    return draw(st.lists(column, min_size=1, max_size=6)), draw(st.booleans()), draw(st.integers(1, 4))


@given(drawn=sets_of_columns(), seed=st.integers(0, 9))
@settings(max_examples=examples(6, 15), deadline=None)
def test_any_set_of_columns(drawn, seed):
    columns, copies, batch = drawn
    chance = np.random.default_rng(seed)
    feeds = {"dense": chance.standard_normal((batch, 3)).astype(np.float32)}

    def build(tf, v1):
        dense = v1.placeholder(tf.float32, (None, 3), name="dense")
        parts = [tf.tanh(dense), dense] if copies else [dense]
        for number, (kind, size, width, count, combiner) in enumerate(columns):
            x = v1.placeholder(tf.as_dtype(kind), (None, count), name=f"x_{number}")
            if kind == "float32":
                feeds[f"x_{number}"] = chance.choice(STRANGE, (batch, count)).astype(np.float32)
                x = tf.raw_ops.Bucketize(input=x, boundaries=EDGES)
            else:
                feeds[f"x_{number}"] = chance.integers(0, size, (batch, count)).astype(kind)
            rows = tf.gather(chance.standard_normal((size, width)).astype(np.float32), x)
            if combiner == "none":
                rows = tf.reshape(rows, (-1, count * width))
            else:
                rows = tf.reduce_sum(rows, 1) if combiner == "sum" else tf.reduce_mean(rows, 1)
            parts.insert(number // 2, rows)
        tf.concat(parts, 1, name="out")

    program = grouped(build, feeds, streams=(2,))
    if len(columns) > 1:
        assert "GatherV2" not in kernels(program)


def test_columns_that_are_slices_of_one_input_are_read_where_they_lie():
    """Copied one by one, they would take a launch each: 60 of them 113 µs in place of 54 on streams (H200)."""

    def build(tf, v1):
        numbers = v1.placeholder(tf.float32, (None, 6), name="numbers")
        parts = []
        for number, column in enumerate((numbers[:, 0], numbers[:, 3:4], tf.slice(numbers, (0, 5), (-1, 1)))):
            bucket = tf.reshape(tf.raw_ops.Bucketize(input=column, boundaries=EDGES), (-1,))
            parts.append(tf.gather(table(len(EDGES) + 1, 2 + number), bucket))
        bags = v1.placeholder(tf.int32, (None, 4), name="bags")
        parts += [tf.reduce_sum(tf.gather(table(4, 3), bags[:, 1:3]), 1)]
        tf.concat(parts, 1, name="out")

    feeds = {
        "numbers": CHANCE.choice(STRANGE, (5, 6)).astype(np.float32),
        "bags": CHANCE.integers(0, 4, (5, 4), np.int32),
    }
    program = grouped(build, feeds)
    (columns,) = (step for step in program.steps if step.op.op == "_Columns")
    assert columns.scattered == 0


@given(
    shape=st.tuples(*[st.integers(1, 5)] * 3),
    slices=st.tuples(*[st.tuples(st.integers(0, 4), st.integers(1, 5), st.sampled_from([1, 2, 3, -1]))] * 3),
    per_row=st.integers(1, 4),
)
def test_where_rows_of_a_slice_lie(shape, slices, per_row):
    """Whatever is said to be the place of the rows of a slice is it; and of a column of a matrix it is said."""
    index = tuple(slice(*(first, first + count) if step > 0 else (None, None), step) for first, count, step in slices)
    whole = np.arange(np.prod(shape)).reshape(shape)
    taken = whole[index]
    if not taken.size or taken.size % per_row:
        return
    begin = np.asarray(
        [first if step > 0 else shape[axis] - 1 for axis, (first, _, step) in enumerate(slices)], np.int32
    )
    end = np.asarray(
        [first + count if step > 0 else -shape[axis] - 1 for axis, (first, count, step) in enumerate(slices)]
    )
    steps = np.asarray([step for *_, step in slices], np.int32)
    graph = SimpleNamespace(shapes={(0, 0): shape}, constants={(1, 0): begin, (2, 0): end, (3, 0): steps})
    op = SimpleNamespace(op="StridedSlice", attrs={}, inputs=[(0, 0), (1, 0), (2, 0), (3, 0)])
    lies = where_rows_lie(graph, op, per_row)
    if lies is not None:
        rows = np.arange(taken.size // per_row)[:, None] * lies[1] + lies[0] + np.arange(per_row)
        assert (rows == taken.reshape(-1, per_row)).all()
    elif per_row == 1 and min(steps) > 0:
        assert sum(size > 1 for size in taken.shape) > 1


def test_any_number_of_inputs_comes_along():
    def build(tf, v1):
        numbers = [v1.placeholder(tf.float32, (None,), name=f"number_{number}") for number in range(70)]
        columns = [tf.reshape(number, (-1, 1)) for number in numbers]
        tf.concat([*columns, *(tf.gather(table(7, 2), x) for x in ids_of(tf, v1, 2))], 1, name="out")

    feeds = {**some_ids(2, 7), **{f"number_{number}": CHANCE.normal(size=5).astype(np.float32) for number in range(70)}}
    assert kernels(grouped(build, feeds)) == ["_Columns"]
