"""Models that are fed strings: Keras' two-tower, wide-and-deep and text, ragged words, an Estimator's export, and one like TF Ranking's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

USERS = [f"user_{number}" for number in range(50)]
WORDS = [b"user_3", b"user_47", b"", b"\xff\xfe\x00x", b"nobody", "ümläut".encode(), b"user_3", b"x" * 300]


def strings(*items: bytes) -> NDArray[Any]:
    """A vector of strings."""
    made = np.empty(len(items), object)
    made[:] = items
    return made


def two_tower(path: Path) -> dict[str, NDArray[Any]]:
    """Lookups with several out-of-vocabulary buckets and with masks, of words and of numbers, and hashes with and without a salt."""
    import keras
    from keras import layers

    user, item, city = (keras.Input((), dtype="string", name=name) for name in ("user", "item", "city"))
    year, tags = keras.Input((), dtype="int64", name="year"), keras.Input((3,), dtype="string", name="tags")
    ids = layers.StringLookup(vocabulary=USERS, num_oov_indices=2)(user)
    years = layers.IntegerLookup(vocabulary=[*range(1990, 2000)], num_oov_indices=1)(year)
    some = layers.StringLookup(vocabulary=USERS, mask_token="", num_oov_indices=1, output_mode="multi_hot")(tags)
    hashed = [layers.Hashing(64)(item), layers.Hashing(64, salt=[3, 5])(city), layers.Hashing(64, mask_value="")(item)]
    left = layers.Concatenate()([layers.Embedding(53, 4)(ids), layers.Embedding(12, 4)(years), layers.Dense(4)(some)])
    right = layers.Concatenate()([layers.Embedding(64, 4)(one) for one in hashed])
    scores = layers.Dot(1)([layers.Dense(8, activation="relu")(left), layers.Dense(8)(right)])
    keras.Model([user, item, city, year, tags], scores).export(str(path), verbose=False)
    return {
        "user": strings(*WORDS),
        "item": strings(*WORDS[::-1]),
        "city": strings(*WORDS),
        "year": np.array([1990, 1999, 2050, -1, 0, 1995, 1995, 2**62]),
        "tags": strings(*[b"user_1", b"", b"zz"] * 7, b"", b"", b"").reshape(8, 3),
    }


def wide_deep(path: Path) -> dict[str, NDArray[Any]]:
    """Crosses of words and numbers, as ids and as one-hot vectors."""
    import keras
    from keras import layers

    word, number = keras.Input((1,), dtype="string", name="word"), keras.Input((1,), dtype="int32", name="number")
    wide = layers.HashedCrossing(20, output_mode="one_hot")((word, number))
    deep = layers.Flatten()(layers.Embedding(50, 4)(layers.HashedCrossing(50)((word, number))))
    scores = layers.Dense(1)(layers.Concatenate()([layers.Dense(4, activation="relu")(deep), wide]))
    keras.Model([word, number], scores).export(str(path), verbose=False)
    return {"word": strings(*WORDS)[:, None], "number": np.arange(8, dtype=np.int32)[:, None] - 3}


def vectorized(path: Path) -> dict[str, NDArray[Any]]:
    """Text made alike, split, looked up, and padded or cut to one length."""
    import keras
    from keras import layers

    text = keras.Input((), dtype="string", name="text")
    ids = layers.TextVectorization(vocabulary=["the", "cat", "dog"], output_sequence_length=6)(text)
    scores = layers.Dense(2)(layers.Flatten()(layers.Embedding(6, 4)(ids)))
    keras.Model(text, scores).export(str(path), verbose=False)
    some = [b"The cat, the DOG!", b"", b"\xff cat", b"dog " * 8, b" \t!", b"a-b c_d", "Dög cat".encode(), b"the"]
    return {"text": strings(*some)}


def pooled(path: Path) -> dict[str, NDArray[Any]]:
    """Words of each text as a ragged tensor: the mean and the largest of their vectors, and weights among the words of a text."""
    import tensorflow as tf

    rng = np.random.default_rng(0)
    table, last = (tf.constant(rng.standard_normal(size).astype(np.float32)) for size in ((30, 4), (12, 2)))

    @tf.function(input_signature=[tf.TensorSpec([None], tf.string, "text")])
    def scores(text: Any) -> dict[str, Any]:
        words = tf.strings.split(text)
        ids = tf.ragged.map_flat_values(lambda word: tf.strings.to_hash_bucket_fast(word, 30), words)
        rows = tf.ragged.map_flat_values(lambda some: tf.gather(table, some), ids)
        exact = tf.math.exp(tf.reduce_sum(rows, axis=2))
        shares = exact.values / tf.gather(tf.reduce_sum(exact, axis=1), exact.value_rowids())
        weighted = tf.reduce_sum(rows.with_values(rows.values * shares[:, tf.newaxis]), axis=1)
        largest = tf.where(rows.row_lengths()[:, tf.newaxis] > 0, tf.reduce_max(rows, axis=1), 0.0)
        mean = tf.math.divide_no_nan(
            tf.reduce_sum(rows, axis=1), tf.cast(rows.row_lengths(), tf.float32)[:, tf.newaxis]
        )
        return {"scores": tf.concat([mean, largest, weighted], 1) @ last}

    module = tf.Module()
    module.scores = scores
    tf.saved_model.save(module, str(path), signatures=scores)
    return {"text": strings(b"the cat", b"", b"\xff cat dog", b"dog " * 8, b" ", b"a b c d e f g h i", b"cat", b"")}


def ragged(path: Path) -> dict[str, NDArray[Any]]:
    """Words of the parts of each text, and rows of a ragged constant by word: cut, masked, joined, and pooled in several ways."""
    import tensorflow as tf

    rng = np.random.default_rng(0)
    table, last = (tf.constant(rng.standard_normal(size).astype(np.float32)) for size in ((60, 8), (8, 2)))
    related = tf.ragged.constant([[number, number // 2][: number % 3] for number in range(60)], dtype=tf.int64)
    words = tf.lookup.KeyValueTensorInitializer(tf.constant(USERS), tf.range(50, dtype=tf.int64))
    module = tf.Module()
    module.words = tf.lookup.StaticVocabularyTable(words, 10)

    @tf.function(input_signature=[tf.TensorSpec([None], tf.string, "text")])
    def scores(text: Any) -> dict[str, Any]:
        parts = tf.ragged.map_flat_values(module.words.lookup, tf.strings.split(tf.strings.split(text, "|")))
        rows = tf.ragged.map_flat_values(lambda some: tf.gather(table, some), parts)
        ids = parts.merge_dims(1, 2)
        near = tf.gather(related, ids[:, :4]).merge_dims(1, 2)
        near = tf.concat([tf.ragged.boolean_mask(ids, ids < 30), ids[:, -3:], near], 1)
        sparse = ids.to_sparse()
        shares = sparse.with_values(tf.gather(tf.abs(table[:, 0]), sparse.values))
        pooled = [
            tf.reduce_sum(tf.reduce_mean(rows, axis=2), axis=1),
            tf.reduce_sum(tf.ragged.map_flat_values(lambda some: tf.gather(table, some), near), axis=1),
            tf.nn.safe_embedding_lookup_sparse(table, sparse, shares, combiner="mean"),
            tf.nn.safe_embedding_lookup_sparse(table, sparse, combiner="sqrtn"),
        ]
        return {"scores": tf.add_n(pooled) @ last}

    module.scores = scores
    tf.saved_model.save(module, str(path), signatures=scores)
    some = [
        b"user_1 user_2|user_3",
        b"",
        b"|",
        b"\xff nobody | user_40",
        b"user_7 " * 20,
        b" ",
        b"user_49|user_0|x",
        b"user_9",
    ]
    return {"text": strings(*some)}


def example(**features: list[Any]) -> bytes:
    """A serialized `tf.Example`; a feature without values has no list."""
    import tensorflow as tf

    made = tf.train.Example()
    for name, values in features.items():
        feature = made.features.feature[name]
        if values:
            kind = {bytes: "bytes_list", int: "int64_list", float: "float_list"}[type(values[0])]
            getattr(feature, kind).value.extend(values)
    return made.SerializeToString()


def estimator(path: Path) -> dict[str, NDArray[Any]]:
    """Feature columns over examples, as an Estimator exports them: a vocabulary file, a list, hashes, and a cross."""
    import tensorflow as tf

    v1, columns = tf.compat.v1, tf.feature_column
    vocabulary = path.with_suffix(".txt")
    vocabulary.write_text("red\ngreen\nblue\n")
    with tf.Graph().as_default():
        serialized = v1.placeholder(tf.string, [None], name="examples")
        color = columns.categorical_column_with_vocabulary_file("color", str(vocabulary), num_oov_buckets=1)
        tags = columns.categorical_column_with_hash_bucket("tags", 20)
        size = columns.categorical_column_with_vocabulary_list("size", ["s", "m", "l"], default_value=0)
        some = [
            columns.numeric_column("price"),
            columns.indicator_column(color),
            columns.embedding_column(tags, 4, combiner="mean"),
            columns.indicator_column(columns.crossed_column(["color", "size"], 10)),
            columns.embedding_column(size, 3),
        ]
        features = tf.io.parse_example(serialized, columns.make_parse_example_spec(some))
        x = v1.feature_column.input_layer(features, some)
        score = tf.sigmoid(x @ v1.get_variable("w", [x.shape[1], 1]), name="score")
        with v1.Session() as session:
            session.run([v1.global_variables_initializer(), v1.tables_initializer()])
            v1.saved_model.simple_save(
                session, str(path), {"examples": serialized}, {"score": score}, legacy_init_op=v1.tables_initializer()
            )
    rows = [
        example(price=[1.5], color=[b"red", b"??"], tags=[b"a", b"b", b"\xff"], size=[b"m"]),
        example(price=[2.0], size=[b"l"], color=[]),
        example(price=[0.0], color=[b"green"], tags=[], size=[b"zzz"]),
        example(price=[-1.0], color=[b""], size=[b"s", b"m"]),
        example(price=[3.0]),
        example(price=[3.0], unknown=[1]),
        example(price=[4.0], color=[b"blue"] * 3, size=[b"s"]),
        example(price=[9.0], tags=[b"t"] * 20),
    ]
    return {"examples": strings(*rows)}


def ranking(path: Path) -> dict[str, NDArray[Any]]:
    """Examples parsed in the signature, ragged and sparse features padded to one size, words made alike before they are looked up."""
    import tensorflow as tf

    lookup, io = tf.lookup, tf.io

    class Ranker(tf.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            users = lookup.KeyValueTensorInitializer(tf.constant(USERS), tf.range(50, dtype=tf.int64))
            sizes = lookup.KeyValueTensorInitializer(tf.constant(["a", "b"]), tf.constant([1.0, 2.0]))
            self.users, self.sizes = lookup.StaticVocabularyTable(users, 3), lookup.StaticHashTable(sizes, -1.0)
            self.rows = tf.Variable(np.random.default_rng(0).standard_normal((53, 4)).astype(np.float32))
            self.weights = tf.Variable(np.random.default_rng(1).standard_normal((6, 1)).astype(np.float32))

        @tf.function(input_signature=[tf.TensorSpec([None], tf.string, name="examples")])  # type: ignore[misc]
        def __call__(self, examples: Any) -> Any:
            spec = {
                "user": io.FixedLenFeature([], tf.string, ""),
                "x": io.FixedLenFeature([1], tf.float32, [0.0]),
                "tags": io.VarLenFeature(tf.string),
                "history": io.RaggedFeature(tf.int64),
                "size": io.FixedLenFeature([], tf.string, "b"),
            }
            found = io.parse_example(examples, spec)
            tags = tf.sparse.to_dense(found["tags"], default_value="")[:, :3]
            said = tf.reduce_sum(tf.cast(tf.not_equal(tags, ""), tf.float32), 1, keepdims=True)
            history = tf.cast(found["history"].to_tensor(0, shape=[None, 4]), tf.float32)
            size = self.sizes.lookup(tf.strings.lower(tf.strings.strip(found["size"])))
            more = found["x"] + said + 0.1 * tf.reduce_sum(history, 1, keepdims=True)
            x = tf.concat([tf.gather(self.rows, self.users.lookup(found["user"])), more, size[:, None]], 1)
            return {"score": tf.sigmoid(x @ self.weights)}

    model = Ranker()
    tf.saved_model.save(model, str(path), signatures={"serving_default": model.__call__})
    rows = [
        example(user=[b"user_5"], x=[2.0], tags=[b"a", b"", b"b", b"c"], history=[1, 2, 3, 4, 5, 6], size=[b" A "]),
        example(),
        example(user=[b"nobody"], size=[b"\xffB"]),
        example(tags=[b"x"]),
        example(history=[-5]),
        example(user=[b""], size=[b"b"]),
        b"",
        example(x=[1e9], unknown=[b"q"]),
    ]
    return {"examples": strings(*rows)}


MODELS = {made.__name__: made for made in (two_tower, wide_deep, vectorized, pooled, ragged, estimator, ranking)}
