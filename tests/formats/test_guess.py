"""Outputs that are guessed: TensorFlow can fetch each of them, and a user would have named them."""

from collections import Counter
from itertools import pairwise

import pytest

from msplit.flatten.build import flatten
from msplit.formats.guess import guessed, left_out_text
from msplit.inputs.make import make_inputs
from tests.formats.foreign import WANTED, built
from tests.formats.models import FLOAT, PLACEHOLDER, graph, names, read
from tests.graphs import flat


@pytest.mark.tf
@pytest.mark.parametrize("v2", [False, True], ids=["v1", "v2"])
@pytest.mark.parametrize("build", WANTED, ids=lambda build: build.__name__)
def test_each_can_be_fetched_and_is_wanted(tmp_path, build, v2):
    import tensorflow as tf

    v1 = tf.compat.v1
    made = built(build, v2=v2)
    model = read(tmp_path, made.as_graph_def())
    wanted = WANTED[build]
    assert names(model.outputs) == (wanted[v2] if isinstance(wanted, tuple) else wanted)
    assert model.targets == (("train",) if "train" in build.__name__ else ())
    assert not set(names(model.outputs)) & set(model.left_out)
    made_up = make_inputs(flatten(model), {}, batch=2)
    feeds = {end.tensor: made_up[end.name] for end in model.inputs}
    with made.as_default(), v1.Session(graph=made) as session:
        session.run([v1.global_variables_initializer(), v1.local_variables_initializer(), v1.tables_initializer()])
        for end in model.outputs:
            session.run(end.tensor, feeds)
        session.run(list(model.targets), feeds)


def test_the_same_in_a_meta_graph(tmp_path):
    import tensorflow as tf

    from tests.formats.foreign import training_with_summaries

    made = built(training_with_summaries)
    with made.as_default():
        model = read(tmp_path, tf.compat.v1.train.export_meta_graph())
    assert names(model.outputs) == WANTED[training_with_summaries]
    assert model.targets == ("train",)


def test_what_was_left_out_is_said_with_the_way_out(tmp_path):
    text = f"x Placeholder | {PLACEHOLDER}\np Placeholder\ns Switch x p | {FLOAT}\na Relu s:1 | {FLOAT}\nb Relu x | {FLOAT}"
    model = read(tmp_path, graph(text))
    assert names(model.outputs) == ["b"]
    assert model.left_out == ("a",)
    assert "nothing reads a, and it is no output" in left_out_text(model)
    assert "--part outputs=" in left_out_text(model)
    named = read(tmp_path, graph(text), outputs=["a"])
    assert named.left_out is None
    assert left_out_text(named) == ""


def test_where_nothing_at_the_end_can_be_fetched_what_is_before_it_is_taken(tmp_path):
    variant = 'attr { key: "T" value { type: DT_VARIANT } }'
    text = f"""
        x Placeholder | {PLACEHOLDER}
        p Placeholder
        a Relu x | {FLOAT}
        b Tanh a | {FLOAT}
        s Switch b p | {FLOAT}
        c Relu s:1 | {FLOAT}
        list TensorListPushBack b a
        last Identity list | {variant}
    """
    assert names(read(tmp_path, graph(text)).outputs) == ["b"]


@pytest.mark.no_cover  # it is about time
def test_a_chain_of_nested_switches_takes_time_linear_in_its_length(tmp_path):
    lines = [f"x Placeholder | {PLACEHOLDER}", f"s0 Switch x x | {FLOAT}"]
    lines += [f"s{n} Switch s{n - 1}:1 x | {FLOAT}" for n in range(1, 20_000)]
    model = read(tmp_path, graph("\n".join([*lines, f"y Relu x | {FLOAT}"])))
    assert names(model.outputs) == ["y"]


@pytest.mark.timeout(60)
def test_a_file_name_that_goes_many_ways_is_followed_once() -> None:
    layers = [["x"], *([f"l{layer}_{node}" for node in range(150)] for layer in range(4))]
    joined = [f"{name}:StringJoin({','.join(before)})" for before, names in pairwise(layers) for name in names]
    view = flat(";".join(["x:Placeholder[dtype=string]", *joined]))
    assert [end.name for end in guessed(view.graph).inputs] == ["x"]


def queue_of(kind):
    def take(tf, v1, rows):
        queue = getattr(v1.queue, kind)(100, *([10] if kind == "RandomShuffleQueue" else []), [rows.dtype], [[8]])
        v1.train.add_queue_runner(v1.train.QueueRunner(queue, [queue.enqueue_many([rows])]))
        return queue.dequeue_up_to(16, name="taken") if kind == "FIFOQueue" else queue.dequeue_many(16, name="taken")

    return take


def batched(tf, v1, rows):
    return v1.train.shuffle_batch([rows], 16, 100, 10, enqueue_many=True, name="taken")


def stage(tf, v1, rows):
    from tensorflow.python.ops.data_flow_ops import StagingArea

    area = StagingArea([rows.dtype], [rows.shape])
    v1.group(area.put([rows]), v1.global_variables_initializer())
    taken = area.get(name="taken")
    taken = taken[0] if isinstance(taken, list) else taken
    taken.set_shape(rows.shape)
    return taken


def iterator(tf, v1, rows):
    made = v1.data.make_initializable_iterator(tf.data.Dataset.from_tensor_slices(rows).repeat().batch(16))
    v1.group(v1.global_variables_initializer(), made.initializer)  # as trainers do
    return made.get_next(name="taken")


def switched_off(tf, v1, rows):
    """What is fed beside a queue stays an input."""
    return v1.nn.dropout(queue_of("FIFOQueue")(tf, v1, rows), rate=v1.placeholder("float", [], "rate"))


TAKES = [
    *map(queue_of, ("FIFOQueue", "PaddingFIFOQueue", "RandomShuffleQueue")),
    batched,
    stage,
    iterator,
    switched_off,
]


@pytest.mark.tf
@pytest.mark.parametrize("take", TAKES, ids=lambda take: getattr(take, "__name__", "queue"))
def test_behind_a_queue_is_what_would_be_behind_a_placeholder(tmp_path, take):
    """Estimators feed their input functions' queues from placeholders: those are a program's, and the model begins at what it takes."""
    import tensorflow as tf

    def model_of(take):
        def build(tf, v1):
            x = take(tf, v1, v1.placeholder("float", [None, 8], "rows"))
            w = v1.get_variable("w", [8, 1], use_resource=True)
            logits = tf.matmul(x, w)
            tf.sigmoid(logits, name="predictions")
            loss = tf.reduce_mean(tf.square(logits), name="loss")
            v1.train.FtrlOptimizer(0.1).minimize(loss, global_step=v1.train.get_or_create_global_step(), name="train")

        made = built(build)
        with made.as_default():
            return read(tmp_path, tf.compat.v1.train.export_meta_graph())

    model, plain = model_of(take), model_of(lambda tf, v1, rows: rows)
    assert names(model.outputs) == names(plain.outputs) == ["predictions", "loss"]
    assert model.targets == plain.targets
    assert model.targets
    expected = [] if take is iterator else ["taken"]  # an iterator may have data of its own
    assert [end.node for end in model.inputs] == (["rate", *expected] if take is switched_off else expected)
    known = [end.shape for end in model.inputs if end.node == "taken" and take is not stage]
    assert all(shape in ((None, 8), (16, 8)) for shape in known)
    assert "may launch kernels" not in left_out_text(model)
    counts = [Counter(flatten(one).graph.ops) for one in (model, plain)]
    assert all(counts[0][op] == counts[1][op] > 0 for op in ("MatMul", "Sigmoid", "ResourceApplyFtrl"))


def test_a_guess_that_needs_hardly_anything_of_the_graph_says_so(tmp_path):
    chain = "".join(f"\nm{i} Relu m{i - 1} | {FLOAT}" for i in range(1, 30))
    model = read(
        tmp_path,
        graph(f"c Const | {FLOAT}\nm0 Relu c | {FLOAT}{chain}\nx Placeholder | {PLACEHOLDER}\ny Relu x | {FLOAT}"),
    )
    assert names(model.outputs) == ["y"]
    assert "need 1 of the 31 nodes that may launch kernels" in left_out_text(model)
    assert left_out_text(model).endswith(
        "--part outputs= names others"
    ) or "--part outputs= names them" in left_out_text(model)
