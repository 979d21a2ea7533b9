"""Models with inputs that only fit together, or only fit a vocabulary: sparse tensors, words, serialized examples, switches."""

from __future__ import annotations

import functools


def _table(tf, keys, kind="int64"):
    values = tf.range(len(keys), dtype=tf.int64)
    keys = tf.constant(keys, tf.string if isinstance(keys[0], str) else kind)
    return tf.lookup.StaticHashTable(tf.lookup.KeyValueTensorInitializer(keys, values), -1)


def _weights(tf, shape):
    return tf.constant(0.01, tf.float32, shape) * tf.cast(tf.reshape(tf.range(shape[0]), [-1, 1]), tf.float32)


# --- sparse tensors


def sparse_of_open_rank(tf, v1):
    x = v1.sparse_placeholder(tf.float32, name="x")
    tf.sparse.sparse_dense_matmul(x, _weights(tf, (10, 3)), name="y")


def sparse_of_open_rows(tf, v1):
    x = v1.sparse_placeholder(tf.float32, (None, 10), name="x")
    tf.matmul(tf.sparse.to_dense(x), _weights(tf, (10, 3)), name="y")


def sparse_of_known_shape(tf, v1):
    x = v1.sparse_placeholder(tf.float32, (3, 10), name="x")
    tf.matmul(tf.sparse.to_dense(x), _weights(tf, (10, 3)), name="y")


def sparse_with_names_of_their_own(tf, v1):
    at = v1.placeholder(tf.int64, (None, 2), "where")
    what = v1.placeholder(tf.float32, (None,), "what")
    size = v1.placeholder(tf.int64, (2,), "size")
    tf.sparse.sparse_dense_matmul(tf.SparseTensor(at, what, size), _weights(tf, (10, 3)), name="y")


def sparse_of_rank_three(tf, v1):
    x = v1.sparse_placeholder(tf.float32, (None, 4, 5), name="x")
    tf.reduce_sum(tf.sparse.to_dense(x), [1, 2], name="y")


def sparse_vector(tf, v1):
    x = v1.sparse_placeholder(tf.float32, (None,), name="x")
    tf.sparse.to_dense(x, name="y")


def sparse_ids_with_weights(tf, v1):
    ids, weights = v1.sparse_placeholder(tf.int64, name="ids"), v1.sparse_placeholder(tf.float32, name="weights")
    v1.nn.embedding_lookup_sparse(_weights(tf, (20, 4)), ids, weights, combiner="mean", name="y")


def sparse_words(tf, v1):
    words = v1.sparse_placeholder(tf.string, (None, None), name="words")
    ids = tf.SparseTensor(words.indices, _table(tf, ["a", "b", "c"]).lookup(words.values), words.dense_shape)
    v1.nn.safe_embedding_lookup_sparse(_weights(tf, (3, 4)), ids, name="y")


def sparse_softmax(tf, v1):
    x = v1.sparse_placeholder(tf.float32, (None, 7), name="x")
    tf.sparse.to_dense(tf.sparse.softmax(tf.sparse.reorder(x)), name="y")


def two_sparse(tf, v1):
    a, b = (v1.sparse_placeholder(tf.float32, (None, 6), name=name) for name in "ab")
    tf.sparse.to_dense(tf.sparse.add(a, b), name="y")


def sparse_transposed(tf, v1):
    x = v1.sparse_placeholder(tf.float32, name="x")
    tf.sparse.sparse_dense_matmul(x, tf.transpose(_weights(tf, (8, 3))), adjoint_b=True, name="y")


SPARSE = [
    *(sparse_of_open_rank, sparse_of_open_rows, sparse_of_known_shape, sparse_with_names_of_their_own),
    *(sparse_of_rank_three, sparse_vector, sparse_ids_with_weights, sparse_words, sparse_softmax, two_sparse),
]

# --- vocabularies

CITIES = [f"city_{number}" for number in range(40)]


def words(tf, v1):
    x = v1.placeholder(tf.string, (None,), "x")
    tf.gather(_weights(tf, (40, 3)), tf.maximum(_table(tf, CITIES).lookup(x), 0), name="y")


def lower_case_words(tf, v1):
    x = v1.placeholder(tf.string, (None, 2), "x")
    cleaned = tf.strings.regex_replace(tf.strings.lower(tf.strings.strip(x)), "[^a-z_0-9]", "")
    tf.identity(_table(tf, CITIES).lookup(cleaned), name="y")


def sentences(tf, v1):
    x = v1.placeholder(tf.string, (None,), "x")
    tokens = tf.strings.split(tf.strings.lower(x))
    tf.identity(_table(tf, CITIES).lookup(tokens.flat_values), name="y")


def integer_keys(tf, v1):
    x = v1.placeholder(tf.int64, (None,), "x")
    tf.identity(_table(tf, [7, 70, 700, 7000]).lookup(x), name="y")


def numbers_as_words(tf, v1):
    x = v1.placeholder(tf.int32, (None,), "x")
    tf.identity(_table(tf, ["101", "202", "303"]).lookup(tf.strings.as_string(x)), name="y")


def words_as_numbers(tf, v1):
    x = v1.placeholder(tf.string, (None,), "x")
    tf.gather(_weights(tf, (40, 3)), tf.strings.to_number(x, tf.int32), name="y")


def compared_words(tf, v1):
    x = v1.placeholder(tf.string, (None, 1), "x")
    tf.argmax(tf.cast(tf.equal(x, tf.constant([CITIES[:8]])), tf.int32), 1, name="y")


VOCABULARIES = [
    words, lower_case_words, sentences, integer_keys, numbers_as_words, words_as_numbers, compared_words,
]  # fmt: skip

# --- settings


def dropout(tf, v1, *, rank=None):
    x = v1.placeholder(tf.float32, (None, 8), "x")
    keep, training = v1.placeholder(tf.float32, rank, "keep_prob"), v1.placeholder(tf.bool, rank, "is_training")
    h = v1.nn.dropout(tf.matmul(x, _weights(tf, (8, 4))), keep_prob=keep)
    v1.cond(training, lambda: h * 2.0, lambda: h + 1.0, name="y")


def scaled(tf, v1):
    x, factor = v1.placeholder(tf.float32, None, "x"), v1.placeholder(tf.float32, None, "factor")
    w = _weights(tf, (1, 4))
    tf.multiply(tf.matmul(tf.reshape(x, [-1, 1]), w), tf.exp(-factor) / 2.0, name="y")


def learning_rate(tf, v1):
    x, rate = v1.placeholder(tf.float32, (None, 4), "x"), v1.placeholder(tf.float32, name="alpha")
    loss = tf.reduce_mean((x @ v1.get_variable("w", (4, 1))) ** 2, name="loss")
    v1.train.GradientDescentOptimizer(rate).minimize(loss, name="train")


# --- serialized examples


def _features(tf):
    return {
        "age": tf.io.FixedLenFeature([], tf.int64),
        "scores": tf.io.FixedLenFeature([3], tf.float32),
        "city": tf.io.FixedLenFeature([], tf.string, ""),
        "history": tf.io.VarLenFeature(tf.int64),
        "tags": tf.io.VarLenFeature(tf.string),
    }


def _scored(tf, parsed, axis):
    city = tf.gather(_weights(tf, (40, 3)), tf.maximum(_table(tf, CITIES).lookup(parsed["city"]), 0))
    history = tf.gather(_weights(tf, (30, 3)), tf.sparse.to_dense(parsed["history"]))
    age = tf.one_hot(parsed["age"], 10)
    tags = tf.strings.length(tf.sparse.to_dense(parsed["tags"]))
    parts = [city, tf.reduce_sum(history, axis), age, parsed["scores"], tf.cast(tags, tf.float32)]
    return tf.concat(parts, axis, name="y")


def examples(tf, v1):
    x = v1.placeholder(tf.string, (None,), "x")
    _scored(tf, v1.io.parse_example(x, _features(tf)), 1)


def examples_v1(tf, v1):
    x = v1.placeholder(tf.string, (None,), "x")
    found = tf.raw_ops.ParseExample(
        serialized=x, names=[], sparse_keys=["history"], dense_keys=["age", "name"],
        dense_defaults=[tf.constant(0, tf.int64), tf.constant("")],
        sparse_types=[tf.int64], dense_shapes=[[], []],
    )  # fmt: skip
    tf.identity(found.dense_values[0], name="y")
    tf.identity(found.sparse_values[0], name="history")


def one_example(tf, v1):
    x = v1.placeholder(tf.string, (), "x")
    _scored(tf, tf.io.parse_single_example(x, _features(tf)), 0)


def ragged_examples(tf, v1):
    x = v1.placeholder(tf.string, (None,), "x")
    features = {"ids": tf.io.RaggedFeature(tf.int64), "more": tf.io.FixedLenSequenceFeature([2], tf.float32, True)}
    parsed = tf.io.parse_example(x, features)
    tf.gather(_weights(tf, (30, 3)), parsed["ids"].flat_values, name="y")
    tf.reduce_sum(parsed["more"], [1, 2], name="z")


def sequence_examples(tf, v1):
    x = v1.placeholder(tf.string, (None,), "x")
    context, steps, _ = tf.io.parse_sequence_example(
        x,
        {"city": tf.io.FixedLenFeature([], tf.string), "tags": tf.io.VarLenFeature(tf.int64)},
        {"history": tf.io.FixedLenSequenceFeature([3], tf.int64), "more": tf.io.RaggedFeature(tf.float32)},
    )
    tf.identity(_table(tf, CITIES).lookup(context["city"]), name="y")
    tf.gather(_weights(tf, (30, 3)), steps["history"], name="history")
    tf.identity(context["tags"].values, name="tags")
    tf.identity(steps["more"].flat_values, name="more")


def one_sequence_example(tf, v1):
    x = v1.placeholder(tf.string, (), "x")
    _, steps = tf.io.parse_single_sequence_example(x, None, {"ids": tf.io.FixedLenSequenceFeature([], tf.int64)})
    tf.gather(_weights(tf, (30, 3)), steps["ids"], name="y")


EXAMPLES = [sequence_examples, one_sequence_example, examples, examples_v1, one_example, ragged_examples]


def images(tf, v1):
    x = v1.placeholder(tf.string, (), "x")
    tf.image.resize(tf.image.decode_jpeg(x, channels=3)[None], [8, 8], name="y")


def mapped_images(tf, v1):
    x = v1.placeholder(tf.string, (None,), "x")

    def decoded(one):
        return tf.image.resize(tf.cast(tf.image.decode_image(one, 3, expand_animations=False), tf.float32), [8, 8])

    tf.identity(tf.map_fn(decoded, x, fn_output_signature=tf.float32), name="y")


def mapped_images_in_a_function(tf, v1):
    v1.enable_control_flow_v2()
    mapped_images(tf, v1)


def raw_bytes(tf, v1):
    x = v1.placeholder(tf.string, (None,), "x")
    tf.cast(tf.reshape(tf.io.decode_raw(x, tf.uint8), [-1, 4, 3]), tf.float32, name="y")


def csv(tf, v1):
    x = v1.placeholder(tf.string, (None,), "x")
    number, word, whole = tf.io.decode_csv(x, [[0.0], [""], tf.constant([0], tf.int64)])
    tf.identity(number, name="number")
    tf.identity(_table(tf, CITIES).lookup(word), name="word")
    tf.identity(whole, name="whole")


DECODED = [images, mapped_images, mapped_images_in_a_function, raw_bytes, csv]


@functools.cache
def written(build, folder):
    """A GraphDef on disk, tables' initializers in it; loaded."""
    import tensorflow as tf

    from msplit import api

    v1 = tf.compat.v1
    before = v1.control_flow_v2_enabled()
    v1.disable_control_flow_v2()
    try:
        with tf.Graph().as_default() as graph:
            v1.set_random_seed(1)
            build(tf, v1)
            meta = v1.train.export_meta_graph()
    finally:
        (v1.enable_control_flow_v2 if before else v1.disable_control_flow_v2)()
    path = folder / f"{build.__name__}.meta"
    path.write_bytes(meta.SerializeToString())
    del graph
    return api.load(path)
