import itertools

import numpy as np
import pytest

from msplit.engines.cuda.ir.dtypes import to_numpy, to_torch
from msplit.engines.cuda.ir.lowering import table
from msplit.engines.cuda.ir.node import Node, Unsupported

from .harness import run_lowering, run_tensorflow, values

pytestmark = pytest.mark.tf

STORED = {"quint8": "uint8", "qint8": "int8", "quint16": "uint16", "qint16": "int16", "qint32": "int32"}
RANGES = [(-1.0, 2.0), (0.0, 3.0), (-3.0, 0.5), (1.0, 1.5), (0.0, 0.0)]


def ends(low, high, axis):
    return [np.float32(one) if axis < 0 else np.linspace(one, 2 * one, 4, dtype=np.float32) for one in (low, high)]


@pytest.mark.parametrize("dtype", ["quint8", "qint8", "quint16", "qint16"])
@pytest.mark.parametrize("mode", ["MIN_COMBINED", "SCALED"])
@pytest.mark.parametrize("axis", [-1, 1])
def test_floats_become_integers(dtype, mode, axis):
    x = values((3, 4), low=-4, high=4)
    x[0] = [0.0, -0.0, np.inf, -np.inf]
    for (low, high), narrow in itertools.product(RANGES, (False, True)):
        if axis == 1 and low == high:
            continue  # TensorFlow refuses
        # oneDNN's kernels of 8 bits for HALF_TO_EVEN have other scales than TensorFlow's own.
        rounds = ["HALF_AWAY_FROM_ZERO", "HALF_TO_EVEN"] if mode == "SCALED" and "16" in dtype else [""]
        for how in rounds:
            attrs = {"T": dtype, "mode": mode, "axis": axis, "narrow_range": narrow}
            attrs |= {"round_mode": how} if how else {}
            wanted = run_tensorflow("QuantizeV2", [x, *ends(low, high, axis)], attrs)
            places, *limits = map(to_numpy, run_lowering("QuantizeV2", [x, *ends(low, high, axis)], attrs))
            np.testing.assert_array_equal(places, wanted[0].view(STORED[dtype]), f"{attrs} {low} {high}")
            for mine, theirs in zip(limits, wanted[1:], strict=True):
                np.testing.assert_allclose(mine, theirs, rtol=1e-6)


@pytest.mark.parametrize("dtype", STORED)
@pytest.mark.parametrize("mode", ["MIN_COMBINED", "SCALED"])
def test_integers_become_floats(dtype, mode):
    import tensorflow as tf

    limits = np.iinfo(STORED[dtype])
    x = np.random.default_rng(0).integers(limits.min, limits.max, (3, 4)).astype(STORED[dtype])
    x[0, :2] = [limits.min, limits.max - 2**7 * (dtype == "qint32")]  # the largest but one that float32 has
    for axis, narrow, result in itertools.product((-1, 1), (False, True), ("float32", "bfloat16")):
        if (axis == 1 or result == "bfloat16") and dtype == "qint32":
            continue
        low, high = ends(-1.5, 2.0, axis)
        attrs = {"T": dtype, "mode": mode, "narrow_range": narrow, "axis": axis, "dtype": result}
        try:
            wanted = tf.raw_ops.Dequantize(
                input=tf.bitcast(tf.constant(x), dtype),
                min_range=low,
                max_range=high,
                **{key: value for key, value in attrs.items() if key != "T"},
            ).numpy()
        except tf.errors.OpError:  # bfloat16 has kernels for some
            continue
        given = [to_torch(np.asarray(one)) for one in (x, low, high)]
        found = to_numpy(table()["Dequantize"].function(Node("node", "Dequantize", attrs, False), *given))
        assert found.dtype == wanted.dtype
        np.testing.assert_allclose(
            found.astype(float), wanted.astype(float), rtol=1e-2 if result == "bfloat16" else 1e-6, atol=1e-6
        )


def test_the_old_mode_is_refused_by_name():
    for op in ("QuantizeV2", "Dequantize"):
        x = np.zeros(2, np.uint8 if op == "Dequantize" else np.float32)
        given = [to_torch(np.asarray(one, x.dtype)) for one in (x, 0, 1)]
        with pytest.raises(Unsupported, match="mode MIN_FIRST is not supported"):
            table()[op].function(Node("node", op, {"T": "quint8", "mode": "MIN_FIRST"}, False), *given)
