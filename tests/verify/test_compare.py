import json
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from msplit.core.arguments import Precision
from msplit.inputs.make import make_inputs
from msplit.verify import stepping
from msplit.verify.compare import WithChanges, best_of, compare, compare_state, computed_in, held_to
from msplit.verify.tolerances import _moved, least_state_tolerances, output_tolerances, state_tolerances
from tests.inputs.graphs import flat_of


def one(got, expected, **more):
    return compare({"y": np.asarray(got)}, {"y": np.asarray(expected)}, **more).outputs[0]


@given(st.lists(st.floats(-1e3, 1e3, width=32), min_size=1, max_size=20), st.floats(1e-7, 1.0))
def test_the_tolerance_that_is_told_passes_and_less_does_not(values, size):
    expected = np.array(values, np.float32)
    got = (expected + np.float32(size)).astype(np.float32)
    found = one(got, expected, tolerance=0.0)
    assume(not found.passed)  # float32 may not know the difference
    assert np.isfinite(found.needed)
    assert one(got, expected, tolerance=found.needed).passed
    assert not one(got, expected, tolerance=found.needed * 0.999).passed
    told = float(found.describe().rsplit(" would pass")[0].split()[-1])
    assert one(got, expected, tolerance=told).passed
    assert told <= found.needed * 1.1 + 1e-300


def test_the_worst_element_is_named():
    expected = np.ones((2, 3), np.float32)
    got = expected.copy()
    got[0, 1], got[1, 2] = 1.01, 1.5
    found = one(got, expected)
    assert (found.worst, found.mismatches, found.elements) == ((1, 2), 2, 6)
    assert "y[1, 2] is 1.5, not 1.0" in found.describe()
    assert found.needed == pytest.approx(0.25)


@pytest.mark.parametrize(
    ("got", "expected", "passed"),
    [
        ([np.nan, np.inf, -np.inf, 1], [np.nan, np.inf, -np.inf, 1], True),
        ([np.nan, 1], [1, 1], False),
        ([1, 1], [np.nan, 1], False),
        ([np.inf, 1], [-np.inf, 1], False),
        ([1e30, 1], [np.inf, 1], False),
        ([0.0, 0.0], [0.0, 0.0], True),
        ([1e-9, 0.0], [0.0, 0.0], False),
        ([1e-9, 1.0], [0.0, 1.0], True),
        ([], [], True),
    ],
)
def test_special_values(got, expected, passed):
    assert one(np.array(got, np.float32), np.array(expected, np.float32)).passed is passed


def test_no_tolerance_would_pass_where_an_infinity_is_wrong():
    found = one(np.float32([np.inf]), np.float32([1]))
    assert "no tolerance would pass" in found.describe()
    assert json.dumps(compare({"y": np.float32([np.inf])}, {"y": np.float32([1])}).to_dict(), allow_nan=False)


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.uint8, np.bool_])
def test_integers_must_be_equal_whatever_the_tolerance(dtype):
    a = np.array([0, 1, 1], dtype)
    b = np.array([0, 1, 0], dtype)
    assert one(a, a).passed
    found = one(b, a, tolerance=10.0)
    assert not found.passed
    assert found.worst == (2,)
    assert "tolerance" not in found.describe()


def test_strings_of_all_kinds_compare():
    assert one(np.array([b"a", b"\xc3\xa4"], object), np.array(["a", "ä"])).passed
    assert not one(np.array([b"a"], object), np.array([b"b"], object)).passed


@pytest.mark.parametrize(
    ("dtype", "error", "passed"),
    [
        (np.float64, 1e-10, True),
        (np.float64, 1e-7, False),
        (np.float32, 1e-5, True),
        (np.float32, 1e-3, False),
        (np.float16, 4e-3, True),
        (np.float16, 5e-2, False),
        (ml_dtypes.bfloat16, 2e-2, True),
        (ml_dtypes.bfloat16, 2e-1, False),
    ],
)
def test_tolerance_follows_the_type(dtype, error, passed):
    expected = np.ones(8).astype(dtype)
    assert one((np.ones(8) * (1 + error)).astype(dtype), expected).passed is passed


def test_tf32_is_looser_for_float32_only():
    expected, got = np.ones(4, np.float32), np.full(4, 1.004, np.float32)
    assert not one(got, expected, precision=Precision.IEEE).passed
    assert one(got, expected, precision=Precision.TF32).passed
    assert not one(got.astype(np.float64), expected.astype(np.float64), precision=Precision.TF32).passed


def test_what_was_close_before_is_held_to_that_in_a_coarse_precision():
    expected = {"y": np.linspace(0.5, 1.0, 8, dtype=np.float32), "n": np.arange(3)}

    def passes(by, needed, precision=Precision.TF32, far=0):
        got = {"y": expected["y"] * np.float32(1 + by), "n": expected["n"] + far}
        found = compare(got, expected, precision=precision)
        assert far or precision is Precision.IEEE or found.passed
        return held_to(found, needed, precision).passed

    assert passes(0.1, {})
    assert not passes(0.1, {"y": 0.0})
    assert not passes(0.1, {"y": 0.01})
    assert passes(0.1, {"y": 0.04})
    assert passes(1e-3, {"y": 0.0})
    assert not passes(1e-3, {"y": 0.0}, Precision.IEEE)  # its own tolerance is closer
    assert passes(1e-5, {"y": 0.0}, Precision.IEEE)
    assert not passes(0.0, {"y": 0.0, "n": 0.0}, far=1)
    assert passes(0.0, {"y": 0.0, "n": 0.0})


def test_shape_type_and_names_must_agree():
    y = np.zeros((2, 2), np.float32)
    assert "its shape is (4,), not (2, 2)" in one(y.reshape(4), y).describe()
    assert "its type is float64, not float32" in one(y.astype(np.float64), y).describe()
    missing = compare({"a": y}, {"a": y, "b": y})
    assert not missing.passed
    assert missing.describe() == "b: the output is missing"
    assert "not expected" in compare({"a": y, "b": y}, {"a": y}).describe()


def test_scalars_compare():
    assert one(np.float32(1), np.float32(1)).passed
    assert "y is 2.0, not 1.0" not in one(np.float32(1), np.float32(1)).describe()
    assert "2.0, not 1.0" in one(np.float32(2), np.float32(1)).describe()


def graph(dtype, outputs=("y", "z")):
    """y is computed in a narrow type and cast back, z is not."""
    return flat_of(
        [
            ("x", "Placeholder", [], {"dtype": "float32"}),
            ("down", "Cast", ["x"], {"SrcT": "float32", "DstT": dtype}),
            ("sum", "AddV2", ["down", "down"], {"T": dtype}),
            ("y", "Cast", ["sum"], {"SrcT": dtype, "DstT": "float32"}),
            ("z", "Tanh", ["x"], {"T": "float32"}),
        ],
        [("x", "float32", (2,))],
        outputs,
    )


@pytest.mark.parametrize(("dtype", "error"), [("bfloat16", 0.02), ("float16", 0.002)])
def test_an_output_is_held_to_what_it_was_computed_in(dtype, error):
    computed = computed_in(graph(dtype))
    assert computed == {"y": dtype}
    expected = {"y": np.ones(2, np.float32), "z": np.ones(2, np.float32)}
    got = {name: value * np.float32(1 + error) for name, value in expected.items()}
    found = compare(got, expected, computed=computed)
    assert {output.name: output.passed for output in found.outputs} == {"y": True, "z": False}
    assert not compare(got, expected, computed=computed, tolerance=1e-4).outputs[0].passed
    assert not compare({**expected, "y": got["y"] * np.float32(1.3)}, expected, computed=computed).passed


def test_weights_that_are_only_stored_in_a_narrow_type_round_nothing():
    flat = flat_of(
        [
            ("x", "Placeholder", [], {"dtype": "float32"}),
            ("w", "Const", [], {"dtype": "float16"}),
            ("kept", "Identity", ["w"], {"T": "float16"}),
            ("wide", "Cast", ["kept"], {"SrcT": "float16", "DstT": "float32"}),
            ("y", "Mul", ["x", "wide"], {"T": "float32"}),
        ],
        [("x", "float32", (2,))],
        ("y",),
    )
    assert not computed_in(flat)


@pytest.mark.tf
def test_a_loop_and_layers_of_keras_in_mixed_precision(tmp_path):
    import keras

    from msplit.engines.tensorflow.engine import reference
    from tests.engines.cuda.cases import exported, run

    keras.mixed_precision.set_global_policy("mixed_bfloat16")
    try:
        keras.utils.set_random_seed(1)
        x = keras.Input((5, 8))
        y = keras.layers.LSTM(16)(x)
        y = keras.layers.Dense(16, activation="relu")(y)
        flat = exported(keras.Model(x, keras.layers.Dense(4, dtype="float32")(y)), tmp_path)
    finally:
        keras.mixed_precision.set_global_policy("float32")
    feeds = make_inputs(flat, {}, batch=8)
    assert set(computed_in(flat).values()) == {"bfloat16"}
    found = compare(run(flat, feeds), reference(flat, feeds), computed=computed_in(flat))
    assert found.passed, found.describe()
    assert found.needed > 2e-4  # float32's own tolerance would not do


def variables(**values):
    return {name: np.asarray(value, np.float32) for name, value in values.items()}


def test_variables_are_held_by_their_root_mean_square():
    expected = variables(w=np.ones(10_000))
    one_off, all_off = np.ones(10_000), np.full(10_000, 1.001)
    one_off[3] = 1.005
    assert compare_state(variables(w=one_off), expected, {"w": 1e-4}).passed
    found = compare_state(variables(w=all_off), expected, {"w": 1e-4})
    assert not found.passed
    assert found.needed == pytest.approx(1e-3, rel=1e-3)
    assert "w[" in found.describe()


@pytest.mark.parametrize("wrong", [np.nan, np.inf])
def test_a_variable_with_a_nan_elsewhere_never_passes(wrong):
    expected = variables(w=np.ones(10_000))
    got = np.ones(10_000)
    got[3] = wrong
    assert not compare_state(variables(w=got), expected, {"w": 1e9}).passed
    assert compare_state(variables(w=got), variables(w=got), {"w": 1e-4}).passed


def test_counters_must_be_equal_and_shapes_too():
    assert not compare_state({"step": np.array(2)}, {"step": np.array(1)}, {"step": 9.0}).passed
    assert not compare_state(variables(w=[1, 2]), variables(w=[[1, 2]]), {"w": 9.0}).passed
    assert compare_state(variables(w=[1]), variables(other=[2]), {}).passed


def relu_step(state):
    """A step whose gradient is a sum over units that a rectifier lets through; the first unit lies on its edge."""
    return {"w": (state["w"] - 0.5 * (state["w"] > np.float32(1))).astype(np.float32)}


def test_what_rounding_does_to_a_step_is_allowed_and_no_more():
    begun = variables(w=[1.5, 2.0])
    smooth = state_tolerances(begun, relu_step(begun), relu_step, draws=False, precision=Precision.IEEE)
    assert smooth["w"] <= 3 * 2.0**-15 * 2
    begun = variables(w=[1.0, 1.0, 1.0, 1.0])
    edge = state_tolerances(begun, relu_step(begun), relu_step, draws=False, precision=Precision.IEEE)
    assert edge["w"] > 0.5  # half of the units learn or do not


def test_a_unit_that_few_moves_let_through_is_rounding(monkeypatch):
    """The unit lies so far from its edge that one move in five carries it over. What no move does stays wrong."""
    monkeypatch.setattr(stepping, "draws", lambda truth: False)
    monkeypatch.setattr(stepping, "variables_after", lambda truth, fed, state: relu_step(state))
    begun = variables(w=[1 + 2.0**-9, 3.0, 3.0, 3.0])
    after = relu_step(begun)
    moves = [relu_step(_moved(begun, 2.0**-8, seed))["w"][0] > 0.9 for seed in range(5)]
    assert any(moves)
    assert not moves[0]

    def learned(w):
        steps = stepping.Steps(None, [], begun, None, None)
        return steps.learned(variables(w=w), after, Precision.TF32, None, lambda names: None)

    assert learned([1 + 2.0**-9, 2.5, 2.5, 2.5]).passed
    assert not learned([after["w"][0], 2.5, 2.5, 0.0]).passed


def test_steps_that_draw_numbers_are_held_to_the_plain_tolerance_where_they_draw_others():
    generator = np.random.default_rng(0)
    begun = variables(w=np.ones(9))

    def stepped(state):
        return {"w": state["w"] * generator.uniform(0, 1, 9)}

    found = state_tolerances(begun, stepped(begun), stepped, draws=True, precision=Precision.IEEE)
    assert found == {"w": 1e-4, "change of w": 1e-4}


def test_what_another_order_of_sums_does_to_a_step_that_is_repeated_is_allowed():
    """A gradient that is rounding alone, divided by its own size, as RMSProp has it; another variable knows nothing of it."""
    generator = np.random.default_rng(0)
    begun = variables(w=np.ones(1000), v=np.ones(9))

    def stepped(state):
        gradient = generator.normal(0, 1e-9, 1000)
        return {"w": state["w"] - 0.01 * np.sign(gradient), "v": state["v"] * 0.5}

    found = state_tolerances(begun, stepped(begun), stepped, draws=False, precision=Precision.IEEE)
    assert 0.03 < found["w"] < 0.06
    assert found["v"] == 1e-4


def away(*distances):
    """What inputs say of a variable that is so far away on each."""
    expected = variables(w=np.ones(100))
    return best_of([compare_state(variables(w=np.full(100, 1 + d)), expected, {"w": 1e-4}) for d in distances])


def test_a_loss_that_rounding_throws_about_is_not_near_by_chance():
    """Steps that make anything around 6.8 of values that are moved, and of another order of sums: 1 in 300 is refused, and 57 were when
    values were moved once."""

    def refused(seed):
        def loss(values):
            (bits,) = values["w"].view(np.uint32)
            return {"loss": np.float32(6.8 + 0.02 * np.random.default_rng([seed, int(bits)]).standard_normal())}

        state = {"w": np.ones(1, np.float32)}
        elsewhere = loss({"w": np.nextafter(state["w"], np.float32(2))})
        allowed = output_tolerances(state, loss(state), loss, precision=Precision.IEEE)
        assert not compare({"loss": np.float32(8)}, loss(state), carried=allowed).passed
        return not compare(elsewhere, loss(state), carried=allowed).passed

    assert sum(map(refused, range(300))) <= 6


def test_a_variable_passes_that_is_close_on_one_input_and_never_far():
    assert away(0, 0).passed
    assert away(0.01, 0).passed  # a rectifier let another example through
    assert not away(0.01, 0.01).passed  # on every input: it is wrong
    assert not away(0, 0.2).passed  # more than an example can do
    assert not away(0, np.nan).passed
    exact = best_of([compare_state({"n": np.array(n)}, {"n": np.array(1)}, {}) for n in (1, 2)])
    assert not exact.passed


def test_in_half_precision_an_output_may_be_some_times_as_far_as_rounding_puts_it():
    expected = np.random.default_rng(0).standard_normal(1000).astype(np.float32)

    def passes(share, rounding, precision=Precision.BF16):
        got = {"out": expected * np.float32(1 - share)}
        (found,) = compare(got, {"out": expected}, precision=precision, rounding=rounding).outputs
        assert found.as_a_whole
        return found.passed

    assert passes(0.029, {"out": 0.01})
    assert not passes(0.031, {"out": 0.01})
    assert passes(0.031, {})  # nobody has emulated it
    assert passes(0.003, {"out": 0.0})  # a unit in the last place
    assert not passes(0.005, {"out": 0.0})
    assert not passes(0.003, {"out": 0.0}, Precision.FP16)
    assert not passes(0.6, {"out": 0.9})  # never more than what is allowed to any


@pytest.mark.parametrize(("precision", "most"), [(Precision.FP16, 0.1), (Precision.BF16, 0.5)])
def test_in_half_precision_it_is_the_distance_that_counts(precision, most):
    expected = np.random.default_rng(0).standard_normal(1000).astype(np.float32)
    for share, passes in ((0.9 * most, True), (1.1 * most, False)):
        found = one(expected * np.float32(1 - share), expected, precision=precision)
        assert (found.passed, found.as_a_whole, found.tolerance) == (passes, True, most)
        assert found.needed == found.distance == pytest.approx(share, rel=1e-5)
    assert f"tolerance {most:g}" in found.describe()
    assert "away (root mean square, relative)" in found.describe()
    far = expected.copy()
    far[7] += 3 * most  # one element alone
    assert one(far, expected, precision=precision).passed
    assert not one(np.zeros_like(expected), expected, precision=precision).passed
    assert not one(expected[::-1], expected, precision=precision).passed
    far[7] = np.nan
    assert not one(far, expected, precision=precision).passed
    assert not one(np.int32([1, 2]), np.int32([1, 3]), precision=precision).passed


def test_sentinels_do_not_hide_what_is_beside_them():
    """Logits of which most are masked by -1e9: the others are held to their own size."""
    expected = np.float32([-1e9] * 8 + list(np.linspace(-2, 2, 9)))
    got = expected + np.float32([0] * 8 + [1e-2] + [0] * 8)
    assert one(expected, expected).passed
    assert not one(got, expected).passed
    near = expected.copy()
    near[:8] += 1e4  # 1e-5 of them
    assert one(near, expected).passed


@pytest.mark.parametrize("wrong", ["a row of a table", "a small step"])
def test_what_steps_add_is_held_against_what_they_should(wrong):
    """To the whole variable it is nothing."""
    rng = np.random.default_rng(0)
    begun = variables(w=rng.standard_normal((10_000, 4)))
    step = np.zeros((10_000, 4)) if wrong == "a row of a table" else rng.standard_normal((10_000, 4))
    step[7] = 1
    right = {"w": (begun["w"] - np.float32(1e-5 if wrong == "a small step" else 1e-2) * step).astype(np.float32)}
    got = {"w": right["w"].copy()}
    if wrong == "a row of a table":
        got["w"][7] = begun["w"][7] - 0.012
    else:
        got["w"] = (begun["w"] - np.float32(1.1e-5) * step).astype(np.float32)
    tolerances = least_state_tolerances(begun, right, Precision.IEEE)
    assert compare_state(got, right, tolerances).passed
    assert not compare_state(got, right, tolerances, begun).passed
    assert compare_state(right, right, tolerances, begun).passed
    last_bit = {"w": np.where(step != 0, np.nextafter(right["w"], np.float32(9)), right["w"])}
    assert compare_state(last_bit, right, tolerances, begun).passed


@pytest.mark.parametrize("dtype", ["float32", "float16", "float64", "complex64", ml_dtypes.bfloat16])
@pytest.mark.parametrize("shape", [(), (0, 3), (5,), (3000, 7)])
def test_changes_of_variables_are_those_of_all_their_elements(dtype: Any, shape: tuple[int, ...]) -> None:
    """Also of those that are no numbers; most blocks of a large one are as they were."""
    before = np.random.default_rng(0).standard_normal(shape).astype(dtype)
    after = before.copy()
    if before.size > 4:
        before.flat[:3] = after.flat[:3] = [np.nan, np.inf, -np.inf]
        after.flat[-1] = 7
        after.flat[3] = np.nan
    with np.errstate(all="ignore"):
        found = WithChanges({"x": after}, {"x": before})["change of x"]
        wanted = np.asarray(after - before)
    assert found.dtype == wanted.dtype
    np.testing.assert_array_equal(found.astype(complex), wanted.astype(complex))
