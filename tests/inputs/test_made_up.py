"""Inputs that are made up for foreign models: TensorFlow runs the model on them, and they meet its tables."""

import numpy as np
import pytest

from msplit.engines.tensorflow.engine import reference
from msplit.errors import LoadError
from msplit.flatten.build import flatten
from msplit.inputs.examples import decode, hits
from msplit.inputs.make import make_inputs
from tests.formats.foreign import built
from tests.formats.models import read

from . import foreign

pytestmark = pytest.mark.tf


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("foreign")


def made(build, folder, batch=5, seed=0):
    flat = foreign.written(build, folder)
    return flat, make_inputs(flat, {}, batch=batch, seed=seed)


def named(build):
    return build.__name__


@pytest.mark.parametrize("build", foreign.SPARSE, ids=named)
def test_parts_of_a_sparse_tensor_fit_together_and_into_the_model(build, folder):
    flat, feeds = made(build, folder)
    stems = {name.removesuffix("indices") for name in feeds if name.endswith("indices")} or {""}
    for stem in stems:
        parts = ("where", "what", "size") if stem == "" else (f"{stem}indices", f"{stem}values", f"{stem}shape")
        indices, values, shape = (feeds.get(part) for part in parts)
        assert indices.dtype == np.int64
        assert len(indices) == len(values) > 0
        rows = list(map(tuple, indices.tolist()))
        assert rows == sorted(set(rows))
        if shape is not None:
            assert shape.dtype == np.int64
            assert indices.shape[1] == len(shape)
            assert (indices < shape).all()
    outputs = reference(flat, feeds)
    assert any(np.any(value) for value in outputs.values())
    other = make_inputs(flat, {}, batch=5, seed=1)
    assert {name: value.shape for name, value in other.items()} == {name: value.shape for name, value in feeds.items()}


def test_a_part_of_a_sparse_tensor_alone_is_refused(folder, tmp_path):
    flat = foreign.written(foreign.sparse_of_open_rows, folder)
    np.save(tmp_path / "v.npy", np.ones(3, np.float32))
    with pytest.raises(
        LoadError, match=r"parts of one sparse tensor(.|\n)*--input x/indices=FILE --input x/shape=FILE"
    ):
        make_inputs(flat, {}, batch=5, given={"x/values": tmp_path / "v.npy"})


def test_rows_of_a_sparse_tensor_differ_from_each_other_and_from_seed_to_seed(folder):
    _, one = made(foreign.sparse_of_open_rows, folder, batch=20)
    _, two = made(foreign.sparse_of_open_rows, folder, batch=20, seed=1)
    assert len(set(one["x/indices"][:, 1].tolist())) > 5
    assert (one["x/indices"] != two["x/indices"]).any()


@pytest.mark.parametrize("build", foreign.VOCABULARIES, ids=named)
def test_words_and_ids_are_in_the_table_that_the_model_carries(build, folder):
    flat, feeds = made(build, folder, batch=200)
    found = hits(flat, feeds)
    assert found
    for one in found:
        assert one.hits == one.values > 0, one
        assert one.distinct > 0.8 * one.size, one
    (output, *_) = (value for name, value in reference(flat, feeds).items() if name.startswith("y"))
    assert (np.asarray(output) >= 0).all()


def test_misses_are_counted(folder):
    flat, feeds = made(foreign.words, folder, batch=4)
    feeds["x"] = np.array([b"city_1", b"nowhere", "city_1", b"elsewhere"], object)
    (found,) = hits(flat, feeds)
    assert (found.input, found.kind, found.size) == ("x", "keys", 40)
    assert (found.values, found.hits, found.distinct) == (4, 2, 1)


@pytest.mark.parametrize("rank", [None, ()], ids=["open", "scalar"])
def test_switches_are_scalars_and_as_in_inference(rank, folder, tmp_path):
    def build(tf, v1):
        foreign.dropout(tf, v1, rank=rank)

    flat = foreign.written(build, tmp_path)
    feeds = make_inputs(flat, {}, batch=5)
    assert feeds["x"].shape == (5, 8)
    assert feeds["keep_prob"].item() == 1.0
    assert feeds["keep_prob"].dtype == np.float32
    assert feeds["is_training"].item() is False
    first, second = (reference(flat, feeds) for _ in range(2))
    for name in first:
        np.testing.assert_array_equal(first[name], second[name])


@pytest.mark.parametrize(
    ("build", "scalar", "data"), [(foreign.scaled, "factor", "x"), (foreign.learning_rate, "alpha", "x")]
)
def test_what_scales_is_a_scalar_and_what_is_worked_on_is_not(build, scalar, data, folder):
    flat, feeds = made(build, folder)
    assert feeds[scalar].shape == ()
    assert feeds[data].shape[0] == 5
    reference(flat, feeds)


@pytest.mark.parametrize("build", foreign.EXAMPLES, ids=named)
def test_serialized_examples_have_the_features_that_the_parser_names(build, folder):
    flat, feeds = made(build, folder, batch=40)
    serialized = feeds["x"].reshape(-1).tolist()
    assert len(set(serialized)) == len(serialized)
    reference(flat, feeds)
    for one in hits(flat, feeds):
        assert one.hits == one.values > 0, one
    _, again = made(build, folder, batch=40)
    assert again["x"].tolist() == feeds["x"].tolist()


def test_features_of_an_example_meet_their_own_tables(folder):
    flat, feeds = made(foreign.examples, folder, batch=100)
    features = decode(feeds["x"][0])
    assert features.keys() == {"age", "scores", "city", "history", "tags"}
    assert len(features["scores"]) == 3
    assert {one.input: one.size for one in hits(flat, feeds)} == {"x.city": 40, "x.history": 30, "x.age": 10}


@pytest.mark.parametrize("build", foreign.DECODED, ids=named)
def test_what_is_decoded_can_be(build, folder):
    flat, feeds = made(build, folder)
    assert all(np.any(value) for value in reference(flat, feeds).values())


def test_vocabularies_are_found_in_files_of_the_model_and_in_what_keras_adapted(tmp_path):
    import keras

    from msplit import api

    def looked_up(layer, name):
        x = keras.Input((1,), dtype="string", name="x")
        keras.Model(x, keras.layers.Embedding(40, 2)(layer(x))).export(tmp_path / name, verbose=False)
        flat = api.load(tmp_path / name)
        feeds = make_inputs(flat, {}, batch=100)
        (found,) = hits(flat, feeds)
        assert found.hits == found.values
        return {word for text in feeds["x"].reshape(-1).tolist() for word in text.split()}

    (tmp_path / "words.txt").write_text("\n".join(foreign.CITIES))
    assert looked_up(keras.layers.StringLookup(vocabulary=str(tmp_path / "words.txt")), "file") <= {
        city.encode() for city in foreign.CITIES
    }
    adapted = keras.layers.TextVectorization(output_sequence_length=4)
    adapted.adapt(["The quick brown fox.", "jumps over"])
    assert looked_up(adapted, "adapted") == {b"the", b"quick", b"brown", b"fox", b"jumps", b"over"}


def test_a_vocabulary_file_outside_of_what_can_be_read_is_no_error(tmp_path):
    from msplit import api

    path = tmp_path / "words.txt"
    path.write_text("a\nb\n")

    def build(tf, v1):
        x = v1.placeholder(tf.string, (None,), "x")
        values = tf.lookup.TextFileInitializer(
            str(path), tf.string, tf.lookup.TextFileIndex.WHOLE_LINE, tf.int64, tf.lookup.TextFileIndex.LINE_NUMBER
        )
        tf.identity(tf.lookup.StaticHashTable(values, -1).lookup(x), name="y")

    flat = foreign.written(build, tmp_path)
    assert set(make_inputs(flat, {}, batch=50)["x"].tolist()) == {b"a", b"b"}
    path.unlink()
    again = api.load(flat.model.path)
    assert all(word.startswith(b"token_") for word in make_inputs(again, {}, batch=5)["x"])
    assert hits(again, make_inputs(again, {}, batch=5)) == ()


def in_text(tf, v1):
    """Images as JSON has them, in base64 for the web."""
    images = v1.placeholder(tf.string, [None], "images")

    def small(text):
        image = tf.io.decode_jpeg(tf.io.decode_base64(text), channels=3)
        return tf.image.resize(tf.cast(image, tf.float32), [8, 8])

    tf.identity(tf.map_fn(small, images, fn_output_signature=tf.float32), name="y")


def one_in_text(tf, v1):
    image = tf.io.decode_png(tf.io.decode_base64(v1.placeholder(tf.string, [], "image")), channels=1)
    tf.cast(image, tf.float32, name="y")


def numbers_in_text(tf, v1):
    lines = v1.placeholder(tf.string, [None], "lines")
    tf.identity(tf.map_fn(tf.strings.to_number, lines, fn_output_signature=tf.float32), name="y")


@pytest.mark.parametrize("build", [in_text, one_in_text, numbers_in_text], ids=named)
@pytest.mark.parametrize("v2", [False, True], ids=["v1", "v2"])
def test_what_text_holds_is_found_in_it(build, v2, tmp_path):
    flat = flatten(read(tmp_path, built(build, v2=v2).as_graph_def(), outputs=["y"]))
    y = reference(flat, make_inputs(flat, {}, batch=3))["y"]
    assert np.isfinite(y).all()
    assert y.size


READS = {
    "ReadFile": lambda tf, text: tf.io.decode_png(tf.io.read_file(text)),
    "ParseTensor": lambda tf, text: tf.io.parse_tensor(text, tf.float32),
    "DecodeJSONExample": lambda tf, text: tf.strings.length(tf.io.decode_json_example(text)),
    "DecodeCompressed": lambda tf, text: tf.strings.length(tf.io.decode_compressed(text, "GZIP")),
    "DecodeWav": lambda tf, text: tf.audio.decode_wav(text)[0],
    "DecodeBase64": lambda tf, text: tf.io.decode_raw(tf.io.decode_base64(text), tf.float32),
}


@pytest.mark.parametrize("many", [False, True], ids=["one", "in a loop"])
@pytest.mark.parametrize("op", READS)
def test_strings_that_can_not_be_made_up_are_told_before_anything_runs(op, many, tmp_path):
    def build(tf, v1):
        text = v1.placeholder(tf.string, [None] if many else [], "text")

        def number(one):
            return tf.reduce_sum(tf.cast(READS[op](tf, one), tf.float32))

        tf.identity(tf.map_fn(number, text, fn_output_signature=tf.float32) if many else number(text), name="y")

    flat = flatten(read(tmp_path, built(build, v2=True).as_graph_def(), outputs=["y"]))
    with pytest.raises(LoadError, match=f"read by {op}: its strings can not be made up") as told:
        make_inputs(flat, {}, batch=3)
    assert "--input text=FILE" in told.value.fix
