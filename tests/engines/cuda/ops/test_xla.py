import numpy as np
import pytest

from msplit.engines.cuda.coverage import cover
from msplit.engines.cuda.ir.dtypes import to_numpy
from msplit.engines.cuda.ir.node import Unsupported
from tests.campaign import sampled
from tests.engines.cuda.cases import assert_equals_tensorflow
from tests.engines.cuda.frontend.test_control import graph_of_function

from .harness import BFLOAT16, check, run_lowering, values

pytestmark = pytest.mark.tf


@sampled(
    20,
    dtype=[np.float32, BFLOAT16, np.int64, np.bool_, np.complex64],
    start=[(1, 2, 0), (-3, 9, 1), (2, 3, -1)],
    sizes=[(2, 2, 5), (3, 4, 5), (1, 1, 1), (0, 4, 2)],
)
def test_a_slice_from_a_place_that_only_the_run_knows(sizes, start, dtype):
    x, place = values((3, 4, 5), dtype), np.array(start, np.int32)
    check("XlaDynamicSlice", [x, place, np.array(sizes, np.int32)])
    check("XlaDynamicUpdateSlice", [x, values(sizes, dtype, seed=1), place])


@pytest.mark.parametrize("index", [np.int32, np.int64])
def test_a_cache_of_a_decoder_is_written_at_its_position(index):
    cache, keys = values((2, 8, 3, 4)), values((2, 1, 3, 4), seed=1)
    (written,) = check("XlaDynamicUpdateSlice", [cache, keys, np.array([0, 5, 0, 0], index)], exact=True)
    assert np.array_equal(to_numpy(written)[:, 5:6], keys)
    check("XlaDynamicUpdateSlice", [np.float32(1), np.float32(2), np.zeros(0, index)])


def test_a_slice_that_does_not_fit_is_refused():
    with pytest.raises(Unsupported, match="elements from 1 indices on"):
        run_lowering("XlaDynamicUpdateSlice", [values((2,)), values((3,)), np.array([0], np.int32)])
    with pytest.raises(Unsupported):
        run_lowering("XlaDynamicSlice", [values((2,)), np.array([0], np.int32), np.array([3], np.int32)])


@pytest.mark.parametrize(
    ("low", "high", "between"),
    [
        ((0, 0), (0, 0), (0, 0)),
        ((1, 2), (3, 0), (0, 0)),
        ((0, 1), (2, 0), (1, 2)),
        ((-1, -2), (-1, 1), (0, 0)),
        ((-1, -2), (-2, 3), (2, 1)),
        ((-4, 0), (6, -4), (1, 0)),
        ((3, 0), (-12, -1), (2, 0)),
    ],
    ids=str,
)
def test_pad_at_the_edges_and_between(low, high, between):
    edges = [np.array(numbers, np.int32) for numbers in (low, high, between)]
    check("XlaPad", [values((5, 4)), np.float32(7), *edges], exact=True)


@pytest.mark.parametrize("size", [0, 1])
@pytest.mark.parametrize(("low", "high", "between"), [(2, 1, 3), (-1, 2, 0), (3, -2, 1)])
def test_pad_of_an_axis_with_nothing_between(low, high, between, size):
    edges = [np.array([number], np.int64) for number in (low, high, between)]
    check("XlaPad", [values((size,)), np.float32(7), *edges], exact=True)


def test_padding_that_takes_away_more_than_there_is_is_refused():
    edges = [np.array([number], np.int32) for number in (-2, -2, 0)]
    with pytest.raises(Unsupported, match="take away more"):
        run_lowering("XlaPad", [values((3,)), np.float32(7), *edges])


@pytest.mark.parametrize("dtype", [np.float32, np.int32, np.uint8])
def test_sort(dtype):
    keys = values((3, 9), dtype, low=0, high=5)
    check("XlaSort", [keys])
    distinct = np.stack([np.random.default_rng(row).permutation(9) for row in range(3)]).astype(dtype)
    check("XlaKeyValueSort", [distinct, values((3, 9), np.int64)])


def test_what_xla_calls_otherwise():
    check("XlaSharding", [values((2, 3))])
    check("XlaOptimizationBarrier", [values((2, 3)), values((4,), np.int32)])
    check("XlaEinsum", [values((2, 3, 4)), values((4, 5))], {"equation": "abc,cd->abd"})


def test_a_decoder_that_xla_compiles_writes_its_cache_at_a_fed_position():
    """The whole engine, on a model: the position is fed, so that it is not known before the run."""
    import tensorflow as tf
    from tensorflow.compiler.tf2xla.ops import gen_xla_ops

    weights = values((16, 16))

    @tf.function(jit_compile=True)
    def step(cache, x, position):
        key = tf.matmul(x, weights)
        cache = gen_xla_ops.xla_dynamic_update_slice(cache, key[:, None, :], tf.stack([0, position, 0]))
        attention = tf.nn.softmax(tf.einsum("bd,btd->bt", key, cache))
        return cache, tf.einsum("bt,btd->bd", attention, cache)

    def model(cache, x, position):
        cache, y = step(cache, x, position)
        square = 3.0 * tf.eye(16, batch_shape=[2]) + tf.matmul(cache, cache, transpose_a=True)
        return tf.linalg.solve(square, y[..., None]), cache

    feeds = {"c": values((2, 8, 16), seed=1), "x": values((2, 16), seed=2), "p": np.array(5, np.int32)}
    specs = [tf.TensorSpec(feed.shape, feed.dtype, name) for name, feed in feeds.items()]
    flat = graph_of_function(model, *specs)
    assert not cover(flat).missing
    assert_equals_tensorflow(flat, feeds, tolerance=1e-4)
