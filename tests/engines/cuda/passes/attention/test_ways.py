"""Each way in which models write attention is one kernel, with TensorFlow's result."""

import numpy as np
import pytest

from msplit.engines.cuda.engine import ENGINE
from msplit.verify.compare import compare
from tests.engines.cuda.cases import (
    assert_equals_tensorflow,
    built_sample,
    flat_of,
    graph_of,
    job,
    kernels,
    program_of,
    run,
    saved_keras,
)
from tests.engines.cuda.passes.harness import normal

pytestmark = pytest.mark.tf

B, H, L, D = 3, 2, 6, 8


def qkv(tf, v1, length=L):
    """Inputs as dense layers give them: [batch, length, width]."""
    sizes = {"q": L, "k": length, "v": length}
    return [v1.placeholder(tf.float32, [None, size, H * D], name=name) for name, size in sizes.items()]


def feeds(length=L, **more):
    return {"q": normal(B, L, H * D), "k": normal(B, length, H * D), "v": normal(B, length, H * D), **more}


def heads(tf, x):
    return tf.transpose(tf.reshape(x, (-1, x.shape[1], H, D)), (0, 2, 1, 3))


def merged(tf, x):
    return tf.reshape(tf.transpose(x, (0, 2, 1, 3)), (-1, L, H * D))


def around(scores, length=L, split=heads, join=merged):
    """A model with these scores between its products."""

    def build(tf, v1):
        q, k, v = (split(tf, x) for x in qkv(tf, v1, length))
        weights = scores(tf, v1, tf.matmul(q, k, transpose_b=True))
        tf.identity(join(tf, tf.matmul(weights, v)), name="out")

    return build


def attention_of(program):
    return [step.op for step in program.steps if step.op.op == "_Attention"]


def check(build, given, others=(), tolerance=None):
    """One attention and these kernels beside it, with TensorFlow's result. Gives the op."""
    flat = graph_of(build, outputs=["out"])
    assert_equals_tensorflow(flat, given, tolerance=tolerance)
    program = program_of(flat, given)
    assert kernels(program) == sorted(["_Attention", *others])
    (op,) = attention_of(program)
    return op


def padding(seed=0, lost=False):
    mask = np.random.default_rng(seed).integers(0, 2, (B, L)).astype(np.int32)
    mask[:, 1] = 1
    if lost:
        mask[1] = 0  # a sequence of nothing but padding
    return mask


def mask_input(tf, v1):
    return v1.placeholder(tf.int32, [None, L], name="mask")


SCALED = {
    "before": lambda tf, q, k: tf.matmul(q * 0.25, k, transpose_b=True),
    "after": lambda tf, q, k: tf.matmul(q, k, transpose_b=True) * 0.25,
    "divided": lambda tf, q, k: tf.matmul(q, k, transpose_b=True) / tf.math.sqrt(tf.cast(tf.shape(k)[-1], tf.float32)),
    "keys transposed": lambda tf, q, k: tf.matmul(q, tf.transpose(k, (0, 1, 3, 2))) * 0.25,
    "queries last": lambda tf, q, k: tf.transpose(tf.matmul(k, q, transpose_b=True), (0, 1, 3, 2)) * 0.25,
}


@pytest.mark.parametrize("how", SCALED)
def test_scaled_scores(how):
    def build(tf, v1):
        q, k, v = (heads(tf, x) for x in qkv(tf, v1, 5))
        tf.identity(merged(tf, tf.matmul(tf.nn.softmax(SCALED[how](tf, q, k)), v)), name="out")

    check(build, feeds(5), ["Mul"] if how == "before" else [])


def test_einsum_and_softmax_written_out():
    def build(tf, v1):
        q, k, v = (tf.reshape(x, (-1, x.shape[1], H, D)) for x in qkv(tf, v1, 5))
        raised = tf.einsum("blhd,bshd->bhls", q, k) * 0.3
        raised = tf.exp(raised - tf.reduce_max(raised, -1, keepdims=True))
        weights = raised / tf.reduce_sum(raised, -1, keepdims=True)
        tf.reshape(tf.einsum("bhls,bshe->blhe", weights, v), (-1, L, H * D), name="out")

    assert check(build, feeds(5)).attrs["scale"] == pytest.approx(0.3)


def test_one_head_of_keys_for_all_queries():
    def build(tf, v1):
        q, k, v = qkv(tf, v1, 5)
        q = tf.reshape(q, (-1, L, H, D))
        scores = tf.einsum("...qhd,...kd->...hqk", q, k[..., :D])
        tf.identity(tf.einsum("bhqk,bkd->bqhd", tf.nn.softmax(scores), v[..., :D]), name="out")

    def broadcast(tf, v1):
        q, k, v = qkv(tf, v1, 5)
        weights = tf.nn.softmax(tf.matmul(heads(tf, q), k[:, None, :, :D], transpose_b=True))
        tf.matmul(weights, v[:, None, :, :D], name="out")

    check(build, feeds(5))
    check(broadcast, feeds(5))


def test_heads_as_batch():
    """Heads and batch in one axis, scores reshaped for the mask and back, as BART has it."""

    def split(tf, x):
        return tf.reshape(heads(tf, x), (-1, x.shape[1], D))

    def join(tf, x):
        return merged(tf, tf.reshape(x, (-1, H, L, D)))

    def scores(tf, v1, x):
        bias = tf.cast(1 - mask_input(tf, v1), tf.float32)[:, None, None] * -1e9
        x = tf.reshape(tf.reshape(x, (-1, H, L, L)) + bias, (-1, L, L))
        return tf.nn.softmax(x)

    op = check(around(scores, split=split, join=join), feeds(mask=padding()), ["Cast", "Mul", "Sub"])
    assert op.attrs["equation"] == "ABqd,ABkd,ABkv->ABqv"


def test_windows_with_a_mask_for_each():
    """As Swin has it: a bias of positions per head, and a mask per window."""
    windows = np.where(np.random.default_rng(1).random((1, 3, 1, L, L)) < 0.3, -100.0, 0.0).astype(np.float32)
    positions = normal(1, H, L, L)

    def scores(tf, v1, x):
        x = tf.reshape(x + positions, (-1, 3, H, L, L)) + windows
        return tf.nn.softmax(tf.reshape(x, (-1, H, L, L)))

    check(around(scores), feeds())


@pytest.mark.parametrize("lost", [False, True])
@pytest.mark.parametrize("least", [-10000.0, -1e9])
def test_a_mask_that_is_added(least, lost):
    def scores(tf, v1, x):
        open_to = tf.cast(mask_input(tf, v1), tf.float32)
        return tf.nn.softmax(x * 0.25 + ((1.0 - open_to) * least)[:, None, None])

    # Where nothing counts, -10000 leaves of a score what its last bits are: TensorFlow's own order of summands shows.
    check(
        around(scores), feeds(mask=padding(lost=lost)), ["Cast", "Mul", "Sub"], 2e-3 if lost and least > -1e9 else None
    )


def test_a_mask_and_positions_that_are_scaled_with_the_scores():
    positions = normal(H, L, L)

    def scores(tf, v1, x):
        x = x - (1.0 - tf.cast(mask_input(tf, v1), tf.float32))[:, None, None] * 1e9
        return tf.nn.softmax((x + positions) * 0.5)

    check(around(scores), feeds(mask=padding()), ["AddV2", "Cast", "Mul", "Mul", "Sub"])


CHOSEN = {
    "then": lambda tf, kept, x, least: tf.where(kept, x, least),
    "else": lambda tf, kept, x, least: tf.where(tf.logical_not(kept), least, x),
    "full": lambda tf, kept, x, least: tf.where(tf.broadcast_to(kept, tf.shape(x)), x, tf.fill(tf.shape(x), least)),
    "both": lambda tf, kept, x, least: tf.where(tf.logical_and(kept, tf.ones((H, L, L), tf.bool)), x, least),
}


@pytest.mark.parametrize("least", [-1e9, float(np.finfo(np.float32).min)])
@pytest.mark.parametrize("how", CHOSEN)
def test_a_mask_that_chooses(how, least):
    def scores(tf, v1, x):
        kept = (mask_input(tf, v1) > 0)[:, None, None]
        return tf.nn.softmax(CHOSEN[how](tf, kept, x, tf.constant(least)))

    given = feeds(mask=padding(lost=True))
    given["q"] *= 30  # scores of which the last bits would show
    flat = graph_of(around(scores), outputs=["out"])
    assert_equals_tensorflow(flat, given)
    found = kernels(program_of(flat, given))
    assert found.count("_Attention") == 1
    assert "Softmax" not in found


def test_where_nothing_counts():
    def infinite(tf, v1, x):
        return tf.nn.softmax(tf.where((mask_input(tf, v1) > 0)[:, None, None], x, -np.inf))

    def zeros(tf, v1, x):
        kept = (mask_input(tf, v1) > 0)[:, None, None]
        return tf.where(kept, tf.nn.softmax(tf.where(kept, x, -1e9)), 0.0)

    def added(tf, v1, x):
        return tf.nn.softmax(x + tf.where((mask_input(tf, v1) > 0)[:, None, None], 0.0, -np.inf))

    def added_otherwise(tf, v1, x):
        return tf.nn.softmax(tf.where((mask_input(tf, v1) > 0)[:, None, None], tf.zeros([B, 1, 1, L]), -np.inf) + x)

    others = ["Any", "Greater", "SelectV2", "SelectV2"]
    for scores in (infinite, added, added_otherwise):
        check(around(scores), feeds(mask=padding(lost=True)), others)
    check(around(zeros), feeds(mask=padding(lost=True)), others)


POSITIONS = np.linspace(-2, 2, L * L, dtype=np.float32).reshape(L, L)
BEHIND = (1 - np.tril(np.ones((L, L), np.float32))) * np.float32(-1e9)
EVERYWHERE = np.full((L, L), -1e9, np.float32)


def lowered(tf, kept, least=-1e9):
    return (1 - tf.cast(kept, tf.float32)) * least


SEVERAL = {
    # What replaces, and what adds: neither may hide a whole row alone.
    "chosen, known added before": (False, lambda tf, x, kept, fed: tf.where(kept, x + BEHIND, -1e9)),
    "chosen, known added behind": (False, lambda tf, x, kept, fed: tf.where(kept, x, -1e9) + BEHIND),
    "chosen, added behind": (False, lambda tf, x, kept, fed: tf.where(BEHIND == 0, x, -1e9) + lowered(tf, kept)),
    "chosen, added before": (False, lambda tf, x, kept, fed: tf.where(BEHIND == 0, x + lowered(tf, kept), -1e9)),
    "chosen, all hidden": (False, lambda tf, x, kept, fed: tf.where(kept, x + EVERYWHERE, -1e9)),
    "chosen, positions behind": (False, lambda tf, x, kept, fed: tf.where(kept, x, -1e9) + 60 * POSITIONS),
    "added twice": (False, lambda tf, x, kept, fed: x + lowered(tf, kept) + lowered(tf, kept[:, :, :, ::-1])),
    "added, known added": (False, lambda tf, x, kept, fed: x + lowered(tf, kept) + BEHIND),
    "known added twice": (False, lambda tf, x, kept, fed: x + EVERYWHERE + BEHIND),
    "positions, added": (False, lambda tf, x, kept, fed: x + 15 * POSITIONS + lowered(tf, kept)),
    "ones and zeros, added": (False, lambda tf, x, kept, fed: x * (BEHIND == 0) + BEHIND + lowered(tf, kept)),
    # One mask, or several of which the same is left.
    "chosen twice": (True, lambda tf, x, kept, fed: tf.where(BEHIND == 0, tf.where(kept, x, -1e9), -1e9)),
    "positions, chosen": (True, lambda tf, x, kept, fed: tf.where(kept, x + POSITIONS, -1e9)),
    "added, positions": (True, lambda tf, x, kept, fed: x + lowered(tf, kept) + POSITIONS),
    "known added, positions": (True, lambda tf, x, kept, fed: x + BEHIND + POSITIONS),
    "known chosen, positions": (True, lambda tf, x, kept, fed: tf.where(BEHIND == 0, x, -1e9) + POSITIONS),
    "infinite, added": (True, lambda tf, x, kept, fed: tf.where(BEHIND == 0, x, -np.inf) + lowered(tf, kept)),
    "fed": (True, lambda tf, x, kept, fed: x + fed),
    "fed, chosen": (
        True,
        lambda tf, x, kept, fed: x + tf.where(kept, tf.zeros([B, 1, 1, L]), tf.fill([B, 1, 1, L], -1e9)),
    ),
}


@pytest.mark.parametrize("how", SEVERAL)
def test_of_several_masks_a_key_must_be_known_to_count(how):
    fuses, masked = SEVERAL[how]

    def scores(tf, v1, x):
        fed = v1.placeholder(tf.float32, [None, 1, 1, L], name="fed")
        tf.identity(fed, name="same")
        return tf.nn.softmax(masked(tf, x, (mask_input(tf, v1) > 0)[:, None, None], fed))

    hidden = np.where(padding(lost=True) > 0, 0, -np.inf).astype(np.float32)[:, None, None]
    given = feeds(mask=padding(lost=True), fed=hidden)
    given["q"] *= 30  # scores of which -1e9 leaves something
    given["mask"][0, 0] = 0  # the first query of a causal mask has no other key
    flat = graph_of(around(scores), outputs=["out", "same"])
    assert_equals_tensorflow(flat, given)
    assert ("_Attention" in kernels(program_of(flat, given))) == fuses


def test_a_causal_mask():
    below = np.tril(np.ones((L, L), np.float32))

    def chosen(tf, v1, x):
        kept = tf.linalg.band_part(tf.ones((tf.shape(x)[2], L), tf.bool), -1, 0)
        return tf.nn.softmax(tf.where(kept, x * 0.3, -np.inf))

    def added(tf, v1, x):
        return tf.nn.softmax(x + (1 - below) * -1e9)

    def multiplied(tf, v1, x):
        return tf.nn.softmax(x * below - 1e4 * (1 - below))

    for scores in (chosen, added, multiplied):
        assert check(around(scores), feeds()).attrs["causal"]


def test_a_causal_mask_with_padding():
    def scores(tf, v1, x):
        kept = tf.linalg.band_part(tf.ones((L, L), tf.bool), -1, 0) & (mask_input(tf, v1) > 0)[:, None, None]
        return tf.nn.softmax(tf.where(kept, x, -1e9))

    op = check(around(scores), feeds(mask=padding()), ["Greater", "LogicalAnd", "SelectV2"])
    assert not op.attrs["causal"]


def test_layers_share_a_mask():
    """T5's bias of positions, with the mask in it, is made once."""

    def build(tf, v1):
        x = heads(tf, v1.placeholder(tf.float32, [None, L, H * D], name="q"))
        kept = (mask_input(tf, v1) > 0)[:, None, None]
        for _ in range(3):
            scores = tf.where(kept, tf.matmul(x, x, transpose_b=True), -1e9)
            x = tf.matmul(tf.nn.softmax(scores), x)
        tf.identity(x, name="out")

    flat = graph_of(build, outputs=["out"])
    given = {"q": normal(B, L, H * D), "mask": padding()}
    assert_equals_tensorflow(flat, given)
    assert kernels(program_of(flat, given)) == ["Greater", "SelectV2", *["_Attention"] * 3]


@pytest.mark.parametrize("group", [False, True])
def test_the_bert_sample(group):
    sample = built_sample("bert", layers=2, hidden=16, heads=2, sequence=4, vocabulary=30)
    flat = flat_of(sample.graph_def, outputs=sample.outputs)
    given = {
        "input_ids": np.arange(12, dtype=np.int32).reshape(3, 4),
        "input_mask": np.asarray([[1, 1, 1, 0], [1, 1, 1, 1], [1, 0, 0, 0]], np.int32),
    }
    assert_equals_tensorflow(flat, given, group=group)
    found = kernels(program_of(flat, given))
    assert found.count("_Attention") == 2
    assert not {"BatchMatMulV2", "Softmax"} & set(found)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_with_a_softmax_in_float32(dtype):
    """As Keras's mixed precision has it. The mask is narrowed once, and stays finite. In float16 what is left of 1e9 is too little where no
    key counts, and whether that is so is known in the run alone."""

    def build(tf, v1):
        q, k, v = (tf.cast(heads(tf, x), dtype) for x in qkv(tf, v1))
        scores = tf.cast(tf.einsum("bhld,bhsd->bhls", q, k), tf.float32) * 0.3
        scores -= (1.0 - tf.cast(mask_input(tf, v1), tf.float32))[:, None, None] * 1e9
        weights = tf.cast(tf.nn.softmax(scores), dtype)
        tf.cast(merged(tf, tf.einsum("bhls,bhse->bhle", weights, v)), tf.float32, name="out")

    if dtype == "bfloat16":
        check(build, feeds(mask=padding()), [*["Cast"] * 6, "Maximum", "Mul", "Mul", "Sub"], 2e-2)
    else:
        flat, given = graph_of(build, outputs=["out"]), feeds(mask=padding(lost=True))
        assert_equals_tensorflow(flat, given, tolerance=2e-2)
        assert "_Attention" not in kernels(program_of(flat, given))


def test_float16_has_no_number_that_leaves_nothing():
    """A dynamic mask by a condition stays as it is, unless what comes of rows without a key is put in afterwards."""

    def build(zeros):
        def made(tf, v1):
            q, k, v = (tf.cast(heads(tf, x), tf.float16) for x in qkv(tf, v1))
            kept = (mask_input(tf, v1) > 0)[:, None, None]
            weights = tf.nn.softmax(tf.where(kept, tf.matmul(q, k, transpose_b=True), -6e4))
            weights = tf.where(kept, weights, tf.constant(0, tf.float16)) if zeros else weights
            tf.cast(merged(tf, tf.matmul(weights, v)), tf.float32, name="out")

        return made

    given = feeds(mask=padding(lost=True))
    for zeros in (False, True):
        flat = graph_of(build(zeros), outputs=["out"])
        assert_equals_tensorflow(flat, given, tolerance=2e-2)
        assert ("_Attention" in kernels(program_of(flat, given))) == zeros


def test_one_query():
    """A step of a decoder, whose keys are there already."""

    def build(tf, v1):
        q = v1.placeholder(tf.float32, [None, H, 1, D], name="q")
        k, v = (v1.placeholder(tf.float32, [None, H, L, D], name=name) for name in "kv")
        scores = tf.matmul(q, k, transpose_b=True) + normal(L)
        tf.identity(tf.matmul(tf.nn.softmax(scores), v), name="out")

    check(build, {"q": normal(B, H, 1, D), "k": normal(B, H, L, D), "v": normal(B, H, L, D)})


def test_layers_of_keras(tmp_path):
    import keras
    from keras import layers

    x, mask = keras.Input((5, 8), name="x"), keras.Input((5, 5), name="mask", dtype="bool")
    y = layers.MultiHeadAttention(2, 4)(x, x)
    y = layers.MultiHeadAttention(2, 4, value_dim=3)(y, y, attention_mask=mask)
    y = layers.MultiHeadAttention(2, 4, dropout=0.1)(y, x, attention_mask=mask)
    y = layers.MultiHeadAttention(2, 4)(y, y, use_causal_mask=True)
    y = layers.GroupQueryAttention(2, 4, 2)(y, y, attention_mask=mask)
    y = layers.Attention(use_scale=False)([y, x], mask=[None, mask[:, 0]])
    flat = saved_keras(keras.Model([x, mask], y), tmp_path)
    kept = np.random.default_rng(3).random((3, 5, 5)) < 0.7
    kept[:, :, 0], kept[1, 2] = True, False
    given = {"x": normal(3, 5, 8), "mask": kept}
    given = {
        tensor.name: given[tensor.name.rpartition("_")[2]] if tensor.name not in given else given[tensor.name]
        for tensor in flat.inputs
    }
    assert_equals_tensorflow(flat, given)
    found = kernels(program_of(flat, given))
    assert found.count("_Attention") == 6
    assert not {"BatchMatMulV2", "Einsum", "Softmax"} & set(found)


def test_on_several_gpus_each_has_its_own_masks():
    windows = np.where(np.random.default_rng(1).random((L, L)) < 0.3, -100.0, 0.0).astype(np.float32)

    def build(tf, v1):
        x = heads(tf, v1.placeholder(tf.float32, [None, L, H * D], name="q"))
        kept = (mask_input(tf, v1) > 0)[:, None, None]
        for layer in ("one", "two"):
            with v1.name_scope(layer):
                scores = tf.where(kept, tf.matmul(x, x, transpose_b=True) + windows, -1e9)
                x = tf.matmul(tf.nn.softmax(scores), x)
        tf.identity(x, name="out")

    flat = graph_of(build, outputs=["out"])
    given = {"q": normal(B, L, H * D), "mask": padding()}
    ids = np.asarray([int(name.startswith("two/")) for name in flat.graph.names], np.int32)
    executable = ENGINE.build(job(flat, given, ids, streams=2, split=(0, 1)))
    assert sum(step.op.op == "_Attention" for step in executable.program.steps) == 2
    assert compare(executable.step(given), run(flat, given)).passed


@pytest.mark.parametrize("way", ["squeezed", "widened in front", "widened between", "widened behind"])
def test_a_view_that_counts_axes_counts_those_of_the_product(way):
    """Of one query, as additive attention of Keras has it (``Dot`` of weights and values): what the kernel makes has no axis for it."""

    def build(tf, v1):
        query = v1.placeholder(tf.float32, [None, D], name="query")
        key = v1.placeholder(tf.float32, [None, L, D], name="key")
        weights = tf.nn.softmax(tf.matmul(query[:, None, :], key, transpose_b=True))
        pooled = tf.matmul(key, weights, transpose_a=True, transpose_b=True)  # [B, D, 1]
        if way == "squeezed":
            result = tf.squeeze(pooled, -1)
        else:
            result = tf.expand_dims(pooled, {"in front": 0, "between": 2, "behind": -1}[way.removeprefix("widened ")])
        tf.identity(result, name="out")

    check(build, {"query": normal(B, D), "key": normal(B, L, D)})
