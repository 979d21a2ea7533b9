import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from msplit.engines.cuda.ir.node import Unsupported
from msplit.engines.cuda.ops.random import unsigned_remainder
from tests.campaign import sampled

from .harness import check, ints, run_lowering, run_tensorflow, values

pytestmark = pytest.mark.tf

SHAPES = [(), (0,), (1,), (5,), (3, 7), (2, 3, 50)]
SEEDS = [np.array([1, 2], np.int64), np.array([-(2**62) - 7, 2**63 - 1], np.int64), np.array([-5, 2**31 - 1], np.int32)]
FLOAT_TYPES = ["float32", "float16", "bfloat16", "float64"]
# Sine, cosine and logarithm differ between the libraries by the last bits.
TOLERANCE = {"float32": 2e-5, "float16": 2e-3, "bfloat16": 2e-2, "float64": 1e-9}


@sampled(24, shape=SHAPES, dtype=FLOAT_TYPES, seed=SEEDS)
def test_uniform_floats_equal_those_of_tensorflow(shape, dtype, seed):
    check("StatelessRandomUniform", [ints(*shape), seed], {"dtype": dtype}, exact=True)


@sampled(16, op=["StatelessRandomNormal", "StatelessTruncatedNormal"], shape=SHAPES, dtype=FLOAT_TYPES)
def test_normal_floats_equal_those_of_tensorflow(op, shape, dtype):
    for seed in SEEDS:
        check(op, [ints(*shape), seed], {"dtype": dtype}, atol=TOLERANCE[dtype])


@sampled(4, op=["StatelessRandomNormal", "StatelessTruncatedNormal"], dtype=FLOAT_TYPES)
def test_many_normal_floats(op, dtype):
    # Enough for numbers that are drawn again, and for groups that draw far beyond their first four.
    check(op, [ints(50_001), SEEDS[0]], {"dtype": dtype}, atol=5 * TOLERANCE[dtype])


@sampled(
    16,
    op=["StatelessRandomUniformV2", "StatelessRandomNormalV2", "StatelessTruncatedNormalV2"],
    dtype=FLOAT_TYPES,
    counter=[(0, 0), (2**64 - 3, 5), (2**64 - 1, 2**64 - 1), (2**32 - 2, 0)],
)
def test_key_and_counter_with_its_carries(op, dtype, counter):
    inputs = [ints(99), np.array([2**64 - 5], np.uint64), np.array(counter, np.uint64)]
    for algorithm in (1, 3):
        check(op, [*inputs, np.int32(algorithm)], {"dtype": dtype}, atol=TOLERANCE[dtype])


def test_other_algorithms_are_refused():
    inputs = [ints(3), np.zeros(1, np.uint64), np.zeros(2, np.uint64), np.int32(2)]
    with pytest.raises(Unsupported, match="Philox"):
        run_lowering("StatelessRandomUniformV2", inputs)


@pytest.mark.parametrize(
    ("dtype", "low", "high"),
    [
        ("int32", 0, 10),
        ("int32", -5, 6),
        ("int32", -(2**31), 2**31 - 1),
        ("int64", 0, 10),
        ("int64", -(2**63), 2**63 - 1),
        ("int64", -3, 2**62),
        ("uint32", 5, 2**32 - 1),
        ("uint64", 7, 2**64 - 1),
        ("uint64", 0, 3),
    ],
)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_integers_equal_those_of_tensorflow(dtype, low, high, shape):
    limits = [np.array(low, dtype), np.array(high, dtype)]
    key = [np.array([123456789], np.uint64), np.array([9, 8], np.uint64), np.int32(1)]
    expected = None
    if dtype.startswith("uint"):  # TensorFlow has this kernel on the GPU only: what it does with its words is known.
        (words,) = run_tensorflow("StatelessRandomUniformFullIntV2", [ints(*shape), *key], {"dtype": dtype})
        expected = [(words % np.array(high - low, dtype) + limits[0]).astype(dtype)]
    check("StatelessRandomUniformIntV2", [ints(*shape), *key, *limits], expected=expected)
    if expected is None:
        check("StatelessRandomUniformInt", [ints(*shape), SEEDS[1], *limits])


@pytest.mark.parametrize("dtype", ["int32", "int64", "uint32", "uint64"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_words_equal_those_of_tensorflow(dtype, shape):
    check("StatelessRandomUniformFullInt", [ints(*shape), SEEDS[1]], {"dtype": dtype})
    key = [np.array([123456789], np.uint64), np.array([9, 8], np.uint64), np.int32(1)]
    check("StatelessRandomUniformFullIntV2", [ints(*shape), *key], {"dtype": dtype})


@pytest.mark.parametrize("seed", SEEDS, ids=str)
def test_key_and_counter_of_a_seed(seed):
    check("StatelessRandomGetKeyCounter", [seed])
    check("StatelessRandomGetKeyCounterAlg", [seed])


def test_algorithm():
    check("StatelessRandomGetAlg", [])


def test_truncated_normal_never_leaves_its_bounds():
    (numbers,) = run_lowering("StatelessTruncatedNormal", [ints(100_000), SEEDS[0]])
    assert numbers.abs().max() < 2


@given(st.lists(st.tuples(st.integers(0, 2**64 - 1), st.integers(1, 2**64 - 1)), min_size=1))
def test_unsigned_remainder(pairs):
    numbers, divisors = (
        torch.from_numpy(np.array(column, np.uint64)).view(torch.int64) for column in zip(*pairs, strict=True)
    )
    result = unsigned_remainder(numbers, divisors).view(torch.uint64).tolist()
    assert result == [number % divisor for number, divisor in pairs]


@pytest.mark.parametrize("dtype", ["int32", "int64"])
@pytest.mark.parametrize("shape", [(1, 3), (3, 5), (2, 1)])
def test_classes_by_their_logarithms(dtype, shape):
    for special in (None, -np.inf, np.nan):
        logits = values(shape, seed=shape[1])
        if special is not None and shape[1] > 1:
            logits[0, 1] = special
        for seed in ([3, 7], [-1, 2**40]):
            given = [logits, np.int32(6), np.array(seed, np.int64)]
            check("StatelessMultinomial", given, {"output_dtype": dtype})
