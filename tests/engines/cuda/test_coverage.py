"""What `analyze` says of a model and what its build does are one verdict, and what runs gives TensorFlow's outputs for other texts, too."""

import importlib
import itertools

import numpy as np
import pytest

from msplit.engines.cuda.coverage import cover
from msplit.engines.cuda.engine import ENGINE
from msplit.errors import EngineError, WrongShape
from msplit.flatten.build import flatten
from msplit.formats import read
from msplit.report.analysis import _coverage_note
from msplit.serving.server import tensors
from msplit.shapes import infer
from msplit.verify.compare import compare
from tests.engines.cuda import cases
from tests.engines.cuda.cases import SAMPLES, graph_of, job

pytestmark = pytest.mark.tf

RNG = np.random.default_rng(0)
TEXTS = np.array([b"a b c", b"d", b"", b"e f a"], object)
OTHERS = np.array([b"", b"f e d c b a", b"b b", b""], object)
WORDS = {"text": TEXTS}, {"text": OTHERS}
ROWS = ({"x": RNG.standard_normal((4, 4)).astype(np.float32)}, {"x": RNG.standard_normal((4, 4)).astype(np.float32)})
IDS = {"ids": np.array([1, 2, 2, 0])}, {"ids": np.array([0, 1, 2, 1])}


def weights(*shape):
    return RNG.standard_normal(shape).astype(np.float32)


def saved(tf, folder, call, kept=(), **inputs):
    """The flat graph of the SavedModel of a function of these inputs (name -> type and shape), which uses what is kept."""
    specs = [tf.TensorSpec(shape, dtype, name=name) for name, (dtype, shape) in inputs.items()]
    return cases.saved(call, specs, kept, folder)


def texts(tf, folder, call, *kept):
    return saved(tf, folder, lambda text: {"y": call(text)}, kept, text=("string", [None]))


def rows(tf, folder, call, *kept):
    return saved(tf, folder, lambda x: {"y": call(x)}, kept, x=("float32", [None, 4]))


def hashed(tf, words, count=20):
    return tf.strings.to_hash_bucket_fast(words, count)


def names_behind(tf, folder):
    """A retrieval index: the names of the best are a variable of strings."""
    users, items = tf.Variable(weights(3, 4)), tf.Variable(weights(9, 4))
    names = tf.Variable([f"item{number}" for number in range(9)])

    def call(ids):
        scores, best = tf.math.top_k(tf.gather(users, ids) @ tf.transpose(items), 3)
        return {"scores": scores, "names": tf.gather(names, best)}

    return saved(tf, folder, call, [users, items, names], ids=("int64", [None])), IDS


def names_before(tf, folder):
    names, table = tf.Variable(["aa", "b", "cccc"]), tf.Variable(weights(5, 4))
    given = ("int64", [None])

    def call(ids):
        return {"y": tf.gather(table, tf.strings.length(tf.gather(names, ids))), "names": names}

    return saved(tf, folder, call, [names, table], ids=given), IDS


def data_set(tf, folder):
    """A data set whose function reads a variable that the device has, too."""
    w = tf.Variable(weights(4, 4))

    def call(x):
        found = tf.data.Dataset.from_tensor_slices(x).map(lambda row: tf.nn.relu(row[None] @ w)[0])
        return {"sum": found.reduce(tf.zeros([4]), lambda a, b: a + b), "y": x @ w}

    return saved(tf, folder, call, [w], x=("float32", [None, 4])), ROWS


def data_set_behind(tf, folder):
    w = tf.Variable(weights(4, 4))

    def call(x):
        found = tf.data.Dataset.from_tensor_slices(x @ w).map(lambda row: tf.linalg.matvec(w, row))
        return found.reduce(tf.zeros([4]), lambda a, b: a + b)

    return rows(tf, folder, call, w), ROWS


def data_set_between(tf, folder):
    w = tf.Variable(weights(4, 4))

    def call(x):
        found = tf.data.Dataset.from_tensor_slices(x @ w)
        return tf.linalg.matvec(w, found.reduce(tf.zeros([4]), lambda a, b: a + b))

    return rows(tf, folder, call, w), ROWS


def data_set_of_what_is_written(tf, folder):
    w = tf.Variable(weights(4, 4))

    def call(x):
        found = tf.data.Dataset.from_tensor_slices(x).map(lambda row: tf.linalg.matvec(w, row))
        y = found.reduce(tf.zeros([4]), lambda a, b: a + b)
        w.assign_add(tf.ones([4, 4]))
        return y

    return rows(tf, folder, call, w), ROWS


def writes_in_a_loop_on_the_host(tf, folder):
    seen = tf.Variable(0)

    def call(text):
        def count(one):
            seen.assign_add(1)
            return tf.strings.length(one)

        return tf.map_fn(count, text, fn_output_signature=tf.int32)

    return texts(tf, folder, call, seen), WORDS


def lengths(tf, folder):
    """A table's rows for words, of which those count that are there."""
    table = tf.Variable(weights(20, 4))

    def call(text):
        words = tf.strings.split(text)
        mask = tf.sequence_mask(words.row_lengths(), 5, tf.float32)[:, :, None]
        return tf.reduce_sum(tf.gather(table, hashed(tf, words.to_tensor(shape=[None, 5]))) * mask, 1)

    return texts(tf, folder, call, table), WORDS


def crossed(tf, folder):
    w = tf.Variable(weights(10, 4))

    def call(text):
        pair = tf.sparse.cross_hashed([text[:, None], text[::-1, None]], 10)
        return tf.reshape(tf.one_hot(tf.reshape(tf.sparse.to_dense(pair), [-1]), 10), [-1, 10]) @ w

    return texts(tf, folder, call, w), WORDS


def bag_of_words(tf, folder):
    """The mean of the rows of all words: how many there are is another number in each step."""
    table, w = tf.Variable(weights(20, 4)), tf.Variable(weights(4, 2))

    def call(text):
        words = tf.strings.split(text).to_sparse()
        ids = tf.sparse.SparseTensor(words.indices, hashed(tf, words.values), words.dense_shape)
        return tf.nn.safe_embedding_lookup_sparse(table, ids, combiner="mean") @ w

    return texts(tf, folder, call, table, w), WORDS


def sorted_words(tf, folder):
    """An op of sparse tensors that has no lowering, behind strings."""
    w = tf.Variable(weights(5, 4))

    def call(text):
        words = tf.sparse.reorder(tf.strings.split(text).to_sparse())
        sizes = tf.sparse.to_dense(
            tf.sparse.SparseTensor(words.indices, tf.strings.length(words.values), words.dense_shape)
        )
        return tf.cast(tf.pad(sizes, [[0, 0], [0, 5]])[:, :5], tf.float32) @ w

    return texts(tf, folder, call, w), WORDS


def masked_words(tf, folder):
    table = tf.Variable(weights(20, 4))

    def call(text):
        kept = tf.boolean_mask(text, tf.strings.length(text) > 1)
        return tf.reduce_sum(tf.gather(table, hashed(tf, kept)), 0)

    return texts(tf, folder, call, table), WORDS


def recurrent_on_words(tf, folder):
    """A loop over lists whose state begins with zeros for each text: it is the device's."""
    table, w = tf.Variable(weights(20, 4)), tf.Variable(weights(8, 4))

    def call(text):
        steps = tf.gather(table, hashed(tf, tf.strings.split(text).to_tensor(shape=[None, 3])))
        steps = tf.unstack(tf.ensure_shape(steps, [None, 3, 4]), axis=1)
        state = tf.zeros([tf.shape(text)[0], 4])
        return tf.while_loop(
            lambda turn, _: turn < 3,
            lambda turn, now: (turn + 1, tf.tanh(tf.concat([now, tf.gather(tf.stack(steps), turn)], 1) @ w)),
            [0, state],
        )[1]

    return texts(tf, folder, call, table, w), WORDS


def images(tf, folder):
    """The export of an image classifier: bytes are decoded in a loop."""
    w = tf.Variable(weights(3, 2))

    def decode(data):
        return tf.image.resize(tf.cast(tf.io.decode_png(data, channels=3), tf.float32), [8, 8])

    def call(text):
        pixels = tf.map_fn(decode, text, fn_output_signature=tf.TensorSpec([8, 8, 3], tf.float32))
        return tf.reduce_mean(pixels, [1, 2]) @ w

    def made(seed):
        sizes = [(5, 7), (9, 3)]
        drawn = [np.random.default_rng(seed).integers(0, 255, (*size, 3), np.uint8) for size in sizes]
        return {"text": np.array([tf.io.encode_png(one).numpy() for one in drawn], object)}

    return texts(tf, folder, call, w), (made(0), made(1))


def table_in_a_loop(tf, folder):
    table = tf.lookup.StaticHashTable(tf.lookup.KeyValueTensorInitializer(["a b c", "d"], [1, 2]), 0)
    w, v = tf.Variable(weights(3, 2)), tf.Variable(weights(2))

    def call(text):
        found = tf.map_fn(lambda one: tf.cast(table.lookup(one), tf.float32) * v, text, fn_output_signature=tf.float32)
        return tf.nn.relu(found) @ w[:2]

    return texts(tf, folder, call, table, w, v), WORDS


def labels_in_a_loop(tf, folder):
    """Behind: a list of what the device makes goes into a loop of the host's."""
    w = tf.Variable(weights(4, 4))

    def call(x):
        return tf.map_fn(lambda row: tf.strings.as_string(tf.argmax(row)), x @ w, fn_output_signature=tf.string)

    return rows(tf, folder, call, w), ROWS


def text_of_a_loop_between(tf, folder):
    w = tf.Variable(weights(4, 4))

    def call(x):
        found = tf.map_fn(
            lambda row: tf.strings.length(tf.strings.as_string(tf.argmax(row))), x @ w, fn_output_signature=tf.int32
        )
        return tf.gather(w, found) @ w

    return rows(tf, folder, call, w), ROWS


def choice_by_text(tf, folder):
    def call(text):
        first = tf.equal(text[0], "a b c")
        return tf.cond(first, lambda: tf.strings.length(text), lambda: tf.strings.length(tf.strings.join([text, "!"])))

    return texts(tf, folder, call), WORDS


def v1_loop(tf, v1):
    v1.disable_control_flow_v2()
    text = v1.placeholder(tf.string, [None], name="text")
    _, longer = v1.while_loop(
        lambda turn, _: turn < 3, lambda turn, now: (turn + 1, v1.strings.join([now, "x"])), [0, text]
    )
    sizes = v1.map_fn(lambda one: v1.cast(v1.strings.length(one), tf.float32), longer, dtype=tf.float32)
    v1.enable_control_flow_v2()
    v1.multiply(sizes[:, None], weights(1, 4), name="y")


def frames(tf, folder):
    """TensorFlow 1's loops, and arrays of strings."""
    return graph_of(v1_loop, outputs=["y"]), WORDS


def parts(tf, folder, strategy="div"):
    """A lookup in a table of three parts in front of an array, as dynamic_rnn has it: the array is as long as the ids' second axis."""
    table = [weights(size, 4) for size in (7, 7, 6)]

    def graph(tf, v1):
        v1.disable_control_flow_v2()
        ids = v1.placeholder(tf.int32, [None, 3], name="ids")
        found = v1.nn.embedding_lookup([tf.constant(part) for part in table], ids, partition_strategy=strategy)
        steps = v1.transpose(found, [1, 0, 2])
        count = v1.shape(steps)[0]
        array = v1.TensorArray(tf.float32, count).unstack(steps)

        def turn(number, state):
            return number + 1, v1.tanh(state + array.read(number))

        state = v1.while_loop(lambda number, _: number < count, turn, [0, v1.zeros([v1.shape(ids)[0], 4])])[1]
        v1.enable_control_flow_v2()
        tf.identity(state, name="y")

    drawn = [{"ids": RNG.integers(0, 20, (4, 3)).astype(np.int32)} for _ in range(2)]
    return graph_of(graph, outputs=["y"]), tuple(drawn)


def parts_mod(tf, folder):
    return parts(tf, folder, "mod")


def distinct_ids(tf, folder):
    table = tf.Variable(weights(3, 4))

    def call(ids):
        found, places = tf.unique(ids)
        return {"y": tf.gather(tf.gather(table, found), places), "count": tf.size(found)}

    return saved(tf, folder, call, [table], ids=("int64", [None])), IDS


def without_a_lowering(tf, folder):
    return rows(tf, folder, lambda x: tf.linalg.eigh(tf.matmul(x, x, transpose_a=True))[1]), ROWS


CAPTURED, LAUNCHED, REFUSED = "captured", "launched", "refused"
MODELS = {
    names_behind: CAPTURED,
    names_before: CAPTURED,
    data_set: CAPTURED,
    data_set_behind: CAPTURED,
    data_set_between: REFUSED,
    data_set_of_what_is_written: REFUSED,
    writes_in_a_loop_on_the_host: REFUSED,
    lengths: CAPTURED,
    crossed: CAPTURED,
    bag_of_words: CAPTURED,
    sorted_words: CAPTURED,
    masked_words: CAPTURED,
    recurrent_on_words: CAPTURED,
    images: CAPTURED,
    table_in_a_loop: CAPTURED,
    labels_in_a_loop: CAPTURED,
    text_of_a_loop_between: REFUSED,
    choice_by_text: CAPTURED,
    frames: CAPTURED,
    parts: CAPTURED,
    parts_mod: CAPTURED,
    distinct_ids: LAUNCHED,
    without_a_lowering: REFUSED,
}


def told(flat, feeds):
    """What is said before anything runs, and in words."""
    found = cover(flat, infer(flat, shapes={name: value.shape for name, value in feeds.items()}), build=True)
    said = REFUSED if found.reasons else LAUNCHED if found.uncaptured else CAPTURED
    return said, found, _coverage_note(found)


def built(flat, feeds):
    """What the build does, with what runs."""
    problems = []
    for does, capture in ((CAPTURED, True), (LAUNCHED, False)):
        try:
            return does, ENGINE.build(job(flat, feeds, capture=capture)), problems
        except EngineError as problem:
            problems.append(str(problem))
    return REFUSED, None, problems


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.__name__)
def test_what_is_said_is_what_happens(model, tmp_path):
    tf = importlib.import_module("tensorflow")
    flat, (feeds, others) = model(tf, tmp_path / "model")
    said, found, words = told(flat, feeds)
    does, executable, problems = built(flat, feeds)
    assert (said, does) == (MODELS[model], MODELS[model]), (words, problems)
    if does == REFUSED:
        named = {*found.missing, *found.stuck, *itertools.chain(*found.missing.values()), *found.effects}
        assert any(name in problems[0] for name in named)
        assert "can not run this model" in words
        return
    if does == LAUNCHED:
        op, (name, *_) = next(iter(sorted(found.uncaptured.items())))
        for text in (words, problems[0]):
            assert f"{op} ({name})" in " ".join(text.split())
            assert "--cuda capture=no" in text
            assert "capture=False" in text
    assert ("served, not built" in words) == bool(found.kept_out)
    for one in (feeds, others):
        assert compare(executable.step(one), cases.outputs_of_tensorflow(flat, one)).passed
    executable.close()


def test_what_takes_one_size_of_the_hosts_values_says_so_and_refuses_others(tmp_path):
    """Words of a text, padded to the longest: a step has room for as many as it was prepared with."""
    tf = importlib.import_module("tensorflow")
    table = tf.Variable(weights(20, 4))

    def call(text):
        ids = tf.strings.to_hash_bucket_fast(tf.strings.split(text), 20)
        return {"y": tf.reduce_sum(tf.gather(table, ids.to_tensor()), 1)}

    flat = saved(tf, tmp_path / "model", call, [table], text=("string", [None]))
    feeds, longer = ({"text": np.array([b"a b", b"c" + b" d" * more], object)} for more in (1, 4))
    said, found, words = told(flat, feeds)
    does, executable, _ = built(flat, feeds)
    assert (said, does) == (CAPTURED, CAPTURED)
    (name,) = found.sized
    assert f"The size of {name}, which the host makes, depends on values" in words
    assert compare(executable.step(feeds), cases.outputs_of_tensorflow(flat, feeds)).passed
    with pytest.raises(
        WrongShape, match=r"with these values .* is int64 \(2, 5\), and steps are prepared for \(2, 2\)"
    ) as caught:
        executable.step(longer)
    executable.close()
    assert name in caught.value.what
    assert caught.value.fix
    assert name in caught.value.fix
    assert tensors.refusal(caught.value, ran=True).code is tensors.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize("begun", [False, True])
def test_an_iterator_that_a_program_begins_is_told(begun, tmp_path):
    tf = importlib.import_module("tensorflow")
    v1 = tf.compat.v1
    graph = tf.Graph()
    with graph.as_default():
        iterator = v1.data.make_initializable_iterator(
            tf.data.Dataset.from_tensors(np.ones((2, 4), np.float32)).repeat()
        )
        tf.identity(tf.tanh(iterator.get_next()), name="y")
        if begun:
            v1.add_to_collection(v1.GraphKeys.TABLE_INITIALIZERS, tf.group(iterator.initializer))
        v1.train.export_meta_graph(str(tmp_path / "m.meta"))
    flat = flatten(read(tmp_path / "m.meta", outputs=["y:0"]))
    said = "it takes its data from an iterator, and nothing in the file says what it goes over (Iterator"
    assert any(reason.startswith(said) for reason in cover(flat, build=True).reasons) is not begun


@pytest.mark.parametrize(
    "name",
    [
        "mmoe_small.pb",
        "cond_v1.pb",
        "control_flow_v2",
        "feature_columns",
        "keras_lookup",
        "tf1_saved_model",
        "ragged_sparse",
    ],
)
def test_the_same_of_samples(name):
    flat = flatten(read(SAMPLES / name))
    from msplit.inputs.make import make_inputs

    feeds = make_inputs(flat, {}, batch=3)
    said, _, words = told(flat, feeds)
    does, executable, problems = built(flat, feeds)
    assert said == does, (words, problems)
    if executable is not None:
        executable.close()
