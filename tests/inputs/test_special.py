"""Special inputs: what each kind holds, and that TensorFlow runs the model on it."""

import numpy as np
import pytest

from msplit.engines.tensorflow.engine import reference
from msplit.inputs.lookups import use_of
from msplit.inputs.make import make_inputs
from msplit.inputs.special import LARGE, RANDOM, SMALL, Fresh, InputKind, InputKindName, kinds, lengths, nested_boxes
from tests.engines.cuda.cases import graph_of

from . import foreign

BATCH = 9


def safe(tf, v1, strategy="mod"):
    ids = v1.placeholder(tf.int64, [20], "ids")
    at = np.array([[row, column] for row in range(10) for column in range(2)], np.int64)
    table = np.ones((11, 3), np.float32)
    sparse = tf.SparseTensor(at, ids, [10, 3])
    tf.identity(v1.nn.safe_embedding_lookup_sparse([table[:6], table[6:]], sparse, partition_strategy=strategy), "y")


def several(tf, v1):
    x = v1.placeholder(tf.float32, [None, 5], "x")
    ids, hot = v1.placeholder(tf.int32, [None, 4], "ids"), v1.placeholder(tf.int32, [None], "hot")
    length, mask = v1.placeholder(tf.int32, [None], "length"), v1.placeholder(tf.bool, [None, 3], "mask")
    parts = [
        x,
        tf.reshape(tf.gather(np.ones((7, 2), np.float32), ids), [-1, 8]),
        tf.one_hot(hot, 4),
        tf.cast(tf.sequence_mask(length, 6), tf.float32),
        tf.cast(mask, tf.float32),
    ]
    tf.concat(parts, 1, name="y")


@pytest.fixture(scope="module")
def flat():
    return graph_of(several, outputs=["y"])


def made(flat, batch=BATCH, seed=0):
    return [(kind, make_inputs(flat, {}, batch=batch, seed=seed, kind=kind)) for kind in kinds(batch)]


def together(flat, name, batch=BATCH):
    return np.concatenate([feeds[name].reshape(-1) for _, feeds in made(flat, batch)])


@pytest.mark.tf
@pytest.mark.parametrize("batch", [1, 2, BATCH])
def test_all_kinds_are_there_at_every_batch(flat, batch):
    """Of one row there are more sets."""
    ids, hot = set(together(flat, "ids", batch).tolist()), set(together(flat, "hot", batch).tolist())
    assert {0, 6} <= ids <= set(range(7))
    assert {0, 3} <= hot
    assert {-1, 4, 6} & hot, "outside of what is one-hot"
    length = set(together(flat, "length", batch).tolist())
    assert {0, (1 << 30) + 1} <= length
    finite = [feeds for kind, feeds in made(flat, batch) if kind.name is not InputKindName.NAN]
    x = np.concatenate([feeds["x"].reshape(-1) for feeds in finite])
    assert np.isfinite(x).all()
    assert np.isnan(together(flat, "x", batch)).any() == (batch > 1)
    assert (x == 0).any()
    assert np.abs(x).max() > LARGE / 2
    assert 0 < np.abs(x[x != 0]).min() < SMALL[2 if batch > 2 else 0]
    mask = np.concatenate([feeds["mask"] for _, feeds in made(flat, batch)])
    assert mask.all(1).any()
    assert not mask.any(1).all()
    for feeds in finite:
        assert feeds["x"].shape == (batch, 5)
        assert np.isfinite(reference(flat, feeds)["y"]).all()


@pytest.mark.tf
def test_rows_of_edges_are_special_each_in_its_way(flat):
    edges = [feeds["x"] for kind, feeds in made(flat) if kind.name is InputKindName.EDGES]
    rows = np.concatenate(edges)
    halves, same, zeros = rows * 2 == np.round(rows * 2), rows == rows[:, :1], rows == 0
    assert (halves.all(1) & ~same.all(1)).any()
    assert (same.all(1) & ~zeros.all(1)).any()
    assert (zeros.all(1) & np.signbit(rows).any(1)).any()
    assert any((one[1:] == one[:-1]).all(1).any() for one in edges), "a row that repeats"


@pytest.mark.tf
@pytest.mark.parametrize("strategy", ["mod", "div"])
def test_ids_meet_the_ends_of_parts_and_what_a_safe_lookup_prunes(strategy):
    flat = graph_of(lambda tf, v1: safe(tf, v1, strategy), outputs=["y"])
    (found,) = use_of(flat, flat.inputs[0].node, 0).lookups
    assert (found.rows, found.parts) == (11, (6, 5))
    assert {0, 1, 5, 6, 9, 10, -1} <= set(together(flat, "ids").tolist()) <= set(range(-1, 11))
    edges = np.concatenate(
        [feeds["ids"].reshape(-1, 2) for kind, feeds in made(flat) if kind.name is InputKindName.EDGES]
    )
    assert (edges == -1).all(1).any(), "a row of which nothing is left"
    assert set(make_inputs(flat, {}, seed=1)["ids"].tolist()) <= set(range(11))
    for _, feeds in made(flat):
        reference(flat, feeds)


def limited(tf, v1):
    i, j = v1.placeholder(tf.int64, [None, 4], "i"), v1.placeholder(tf.int32, [None, 3], "j")
    k, n = v1.placeholder(tf.int32, [None, 4], "k"), v1.placeholder(tf.int32, [None, 4], "n")
    sides, plain = v1.placeholder(tf.int64, [None, 4], "sides"), v1.placeholder(tf.int32, [None, 4], "plain")
    table = np.ones((50, 2), np.float32)
    parts = [
        tf.gather(table, tf.clip_by_value(i + 5, 0, 40)),
        tf.gather(table[:7], tf.math.floormod(j[:, 1] * j[:, 2], 7)),
        tf.gather(table, tf.math.floormod(k, [3, 5, 7, 50])) + tf.gather(table, k // 4),
        tf.gather(table, tf.minimum(tf.cast(tf.math.floormod(n, 9), tf.int64), 49)),
        tf.gather(table, tf.cast(tf.clip_by_value(sides, -3, 50), tf.int32) + 3 - 4 * tf.cast(sides > 46, tf.int32)),
        tf.gather(table, tf.minimum(plain, 30)) + tf.gather(table[:20], plain),
    ]
    for number, part in enumerate(parts):
        tf.reduce_sum(part, [1, 2] if part.shape.rank == 3 else 1, name=f"y{number}")


@pytest.mark.tf
@pytest.mark.parametrize("batch", [2, BATCH])
def test_ids_meet_limits_and_remainders_and_what_is_beyond_where_that_is_defined(batch):
    flat = graph_of(limited, outputs=[f"y{number}" for number in range(6)])
    for kind, feeds in [
        *made(flat, batch),
        *((RANDOM, make_inputs(flat, {}, batch=batch, seed=seed)) for seed in range(9)),
    ]:
        reference(flat, feeds)  # does not refuse them
        assert kind is not RANDOM or min(value.min() for value in feeds.values()) >= 0
    if batch == BATCH:
        assert {-6, -5, -4, 34, 35, 36} <= set(together(flat, "i").tolist())
        assert {-1, 6, 7, 8} <= set(together(flat, "j").tolist())
        assert {0, 3, 5, 49} <= set(together(flat, "k").tolist()) <= set(range(50))
        assert {-1, 8, 9, 10} <= set(together(flat, "n").tolist())
        assert {0, 19} <= set(together(flat, "plain").tolist()) <= set(range(20))
    usual = np.concatenate([make_inputs(flat, {}, batch=99, seed=seed)["i"] for seed in range(3)])
    assert set(usual.reshape(-1).tolist()) == set(range(45))


def buckets(tf, v1):
    x = v1.placeholder(tf.float32, [None, 2], "x")
    tf.cast(
        tf.raw_ops.Bucketize(input=tf.reshape(x, [-1, 1]), boundaries=[-2.5, 0.1, 99.9, 1234.5]), tf.float32, name="y"
    )


@pytest.mark.tf
def test_numbers_meet_boundaries_of_buckets_and_what_is_beside_them():
    flat = graph_of(buckets, outputs=["y"])
    at = np.array([-2.5, 0.1, 99.9, 1234.5], np.float32)
    beside = {
        *at.tolist(),
        *np.nextafter(at, np.float32(np.inf)).tolist(),
        *np.nextafter(at, -np.float32(np.inf)).tolist(),
    }
    assert beside <= set(together(flat, "x").tolist())


@pytest.mark.tf
@pytest.mark.parametrize("build", [*foreign.SPARSE, *foreign.VOCABULARIES], ids=lambda build: build.__name__)
def test_tensorflow_runs_foreign_models_on_all_kinds(build, tmp_path):
    flat = foreign.written(build, tmp_path)
    usual = make_inputs(flat, {}, batch=5)
    for _, feeds in made(flat, 5):
        assert {name: value.shape for name, value in feeds.items()} == {
            name: value.shape for name, value in usual.items()
        }
        reference(flat, feeds)


@pytest.mark.parametrize("kind", kinds(BATCH), ids=lambda kind: f"{kind.name}{kind.first}")
@pytest.mark.parametrize(("rows", "usual", "most"), [(1, 2, 2), (1, 2, 9), (3, 2, 3), (10, 2, 4), (7, 1, 1)])
def test_rows_have_as_many_entries_in_all_as_ever(kind, rows, usual, most):
    found = lengths(rows, usual, most, kind)
    assert sum(found) == rows * usual
    assert len(found) == rows
    assert min(found) >= 0
    assert max(found) <= most
    if kind.name is InputKindName.NAN:
        assert found == [usual] * rows
    elif rows > 3 and most > usual:
        assert 0 in found
        assert max(found) > usual


@pytest.mark.tf
def test_equal_seeds_give_equal_values_and_what_is_given_stays(flat, tmp_path):
    np.save(tmp_path / "x.npy", np.full((BATCH, 5), 0.3, np.float32))
    for kind in kinds(BATCH):
        one, two = (make_inputs(flat, {}, batch=BATCH, seed=3, kind=kind) for _ in range(2))
        assert all(one[name].tobytes() == two[name].tobytes() for name in one)
        given = make_inputs(flat, {}, batch=BATCH, kind=kind, given={"x": tmp_path / "x.npy"})
        assert (given["x"] == np.float32(0.3)).all()


def test_what_was_covered_is_said():
    fresh = Fresh(
        lambda seed, kind: {},
        (RANDOM, InputKind(InputKindName.ZEROS), InputKind(InputKindName.EDGES), InputKind(InputKindName.EDGES, 9)),
    )
    assert fresh.covered(0.25) == ("verified on 4 sets of made-up inputs (random, zeros, edges) in 0.2 s",)
    fresh.refused["zeros"] = "it divides by it"
    (said,) = fresh.covered(1)
    assert said == "verified on 4 sets of made-up inputs (random, edges) in 1.0 s; not on zeros: it divides by it"
    assert Fresh(lambda seed, kind: {}).covered(1) == ()


def test_inputs_that_keep_usual_values_are_named():
    fresh = Fresh(lambda seed, kind: {}, (InputKind(InputKindName.EDGES),))
    fresh.usual["edges"] = dict.fromkeys("abcdef"), "no such row"
    (said,) = fresh.covered(1)
    assert said.endswith("(edges) in 1.0 s; on edges with usual values of 'a', 'b', 'c', 'd' and 2 more: no such row")


def scattered(tf, v1):
    at, cell = v1.placeholder(tf.int32, [None, 1], "at"), v1.placeholder(tf.int64, [None, 2], "cell")
    pair, spot = v1.placeholder(tf.int64, [None], "pair"), v1.placeholder(tf.int64, [], "spot")
    many = v1.placeholder(tf.int64, [None, 2], "many")
    x = v1.placeholder(tf.float32, [None], "x")
    dense = np.ones((5, 3, 2), np.float32)
    tf.scatter_nd(at, x, [11], name="y0")
    tf.tensor_scatter_nd_max(dense[:, :, 0], cell, x, name="y1")
    tf.scatter_nd(tf.stack([tf.zeros_like(pair), pair], 1), x, [2, 7], name="y2")
    tf.raw_ops.SparseToDense(sparse_indices=spot, output_shape=[9], sparse_values=1.0, default_value=0.0, name="y3")
    tf.gather_nd(dense, many, name="y4")


@pytest.mark.tf
def test_coordinates_meet_the_ends_of_what_they_lie_in():
    flat = graph_of(scattered, outputs=[f"y{number}" for number in range(5)])
    for _, feeds in [*made(flat), *((RANDOM, make_inputs(flat, {}, batch=BATCH, seed=seed)) for seed in range(5))]:
        reference(flat, feeds)
    assert {0, 10} <= set(together(flat, "at").tolist()) <= set(range(11))
    for name in ("cell", "many"):
        cells = set(map(tuple, together(flat, name).reshape(-1, 2).tolist()))
        assert {(0, 0), (4, 2)} <= cells <= {(row, column) for row in range(5) for column in range(3)}
    assert {0, 1} <= set(together(flat, "pair").tolist()) <= {0, 1}


def wrapped(tf, v1):
    names = ("cast", "added", "both", "given")
    ids = {name: v1.placeholder(tf.int64, [None], name) for name in names}
    table = np.ones((7, 2), np.float32)
    tf.gather(table, tf.cast(ids["cast"][:, None], tf.int32), name="y0")
    tf.gather(table, tf.cast(ids["added"] + 2, tf.int32), name="y1")
    tf.add(tf.gather(table, tf.cast(ids["both"], tf.int32)), tf.gather(table, ids["both"]), name="y2")
    tf.gather(table, tf.cast(ids["given"], tf.int32), name="y3")
    tf.add(ids["given"], tf.zeros([], tf.int64), name="y4")


@pytest.mark.tf
def test_ids_that_are_cast_to_32_bits_have_more_where_nothing_else_reads_them():
    flat = graph_of(wrapped, outputs=[f"y{number}" for number in range(5)])
    for _, feeds in made(flat):
        reference(flat, feeds)
    for name, rows in (("cast", 7), ("added", 5), ("both", 7), ("given", 7)):
        values = together(flat, name)
        assert (values.max() >= 1 << 32) == (name in ("cast", "added")), name
        assert rows - 1 in values
        assert set((values % (1 << 32)).tolist()) <= set(range(rows)), name


@pytest.mark.parametrize("threshold", [0.3, 0.45, 0.5, 0.6, 0.7])
def test_boxes_overlap_by_the_threshold(threshold):
    made = nested_boxes(np.zeros((8, 4), np.float32), [threshold], InputKind(InputKindName.EDGES))
    pairs = made.reshape(4, 2, 4)[::2]
    assert made.dtype == np.float32
    for outer, inner in pairs:
        area, part = ((box[2] - box[0]) * (box[3] - box[1]) for box in (outer, inner))
        assert part / (area + part - part) == np.float32(threshold)


@pytest.mark.tf
def test_edges_have_strings_that_no_table_has(tmp_path):
    def build(tf, v1):
        words = v1.placeholder(tf.string, (None,), "words")
        plain = v1.placeholder(tf.string, (None,), "plain")
        keys = tf.lookup.KeyValueTensorInitializer(["a", "b", "c"], [0, 1, 2], tf.string, tf.int32)
        tf.identity(tf.lookup.StaticHashTable(keys, -1).lookup(tf.strings.split(words, ",").values), name="y")
        tf.identity(tf.strings.to_hash_bucket_fast(plain, 9), name="z")

    flat = foreign.written(build, tmp_path)
    for batch in (1, 12):
        sets = [(kind.name, feeds) for kind, feeds in made(flat, batch)]
        edges = [feeds for name, feeds in sets if name is InputKindName.EDGES]
        found = {text for feeds in edges for text in feeds["plain"].tolist()}
        odd = {b"", b"\xff\xc3(", b"no such word", b"9" * 300}
        assert odd <= found if batch > 1 else odd & found
        pieces = {piece for feeds in edges for text in feeds["words"].tolist() for piece in text.split(b",")}
        assert {*odd, b"a", b"c"} <= pieces if batch > 1 else odd & pieces
        usual = make_inputs(flat, {}, batch=batch)["words"].tolist()
        assert {piece for text in usual for piece in text.split(b",")} <= {b"a", b"b", b"c"}
