import math

import numpy as np
import pytest

from msplit.core import statistics
from tests.campaign import examples


def noise(rng, count, kind):
    """Times as a machine gives them: skewed, drifting, with spikes."""
    base = 1e-3 * (1 + 0.02 * rng.gamma(2.0, 1.0, count))
    if kind == "drift":
        base *= 1 + 0.2 * np.sin(np.linspace(0, 6, count))
    if kind == "spikes":
        base[rng.random(count) < 0.05] *= 5
    return base


@pytest.mark.parametrize("count", [10, 25, 60, 400])
@pytest.mark.parametrize("kind", ["plain", "drift", "spikes"])
def test_equal_variants_are_found_different_in_at_most_5_of_100_runs(kind, count):
    rng = np.random.default_rng(7)
    wrong = 0
    runs = examples(100, 1000)
    for _ in range(runs):
        shared = noise(np.random.default_rng(rng.integers(1 << 30)), count, "drift") if kind == "drift" else 1.0
        a, b = noise(rng, count, "plain") * shared, noise(rng, count, kind if kind == "spikes" else "plain") * shared
        if kind == "spikes":
            a = noise(rng, count, kind)
        wrong += statistics.ratio([a], [b], over="a").significant
    assert wrong <= runs / 20


@pytest.mark.parametrize("builds", [3, 5])
def test_builds_that_differ_for_life_are_not_taken_for_a_difference(builds):
    """The same graph built twice differs by several per cent: seen with sessions of TensorFlow."""
    rng = np.random.default_rng(11)

    def measure():
        return [noise(rng, 40, "plain") * np.exp(rng.normal(0, 0.07)) for _ in range(builds)]

    runs = examples(120, 400)
    several = sum(statistics.ratio(measure(), measure(), over="a").significant for _ in range(runs))
    assert several <= runs / 20
    single = sum(statistics.ratio(measure()[:1], measure()[:1], over="a").significant for _ in range(40))
    assert single > 20, "one build alone can not tell"


@pytest.mark.parametrize("faster", [1.05, 2.0, 0.9])
def test_a_real_difference_is_found_and_enclosed(faster):
    rng = np.random.default_rng(1)
    found = [
        statistics.ratio([noise(rng, 60, "plain") * faster], [noise(rng, 60, "plain")], over="one stream")
        for _ in range(50)
    ]
    assert sum(ratio.significant for ratio in found) >= 46
    assert sum(ratio.low <= faster <= ratio.high for ratio in found) >= 46
    assert all(ratio.low <= ratio.value <= ratio.high for ratio in found)


def test_what_slows_whole_rounds_down_cancels():
    rng = np.random.default_rng(2)
    machine = np.exp(rng.normal(0, 0.5, 50))
    ratio = statistics.ratio([1.2e-3 * machine], [1e-3 * machine], over="a")
    assert ratio.value == pytest.approx(1.2)
    assert ratio.low == pytest.approx(1.2)
    assert ratio.high == pytest.approx(1.2)


def test_a_slow_stretch_over_many_rounds_does_not_count_as_many():
    """Noise that lasts over rounds and hits one variant only must not make a narrow interval."""
    rng = np.random.default_rng(3)
    wrong = 0
    for _ in range(200):
        a, b = (np.repeat(1 + 0.05 * rng.standard_normal(200), 10) for _ in range(2))
        wrong += statistics.ratio([a], [b], over="a").significant
    assert wrong <= 10


def test_too_few_rounds_tell_nothing():
    ratio = statistics.ratio([[2.0] * 4], [[1.0] * 4], over="a")
    assert (ratio.value, ratio.low, ratio.high) == (2.0, 0.0, math.inf)
    assert not ratio.significant
    assert ratio.to_dict()["high"] is None


def test_the_rank_of_the_interval_is_that_of_the_sign_test():
    """Against the binomial distribution summed by hand, at 98 %."""
    assert statistics._sign_test_rank(6) == -1  # 2 / 2^6 = 0.031
    assert statistics._sign_test_rank(7) == 0  # 2 / 2^7 = 0.016
    assert statistics._sign_test_rank(11) == 1  # 2 * 12 / 2^11 = 0.012, with 55 more 0.065


def test_rounds_must_pair():
    for a, b in (([[1, 2]], [[1, 2, 3]]), ([[1], [2]], [[1, 2]]), ([], []), ([[]], [[]])):
        with pytest.raises(ValueError, match="can not be paired"):
            statistics.ratio(a, b, over="a")
    with pytest.raises(ValueError, match="no times"):
        statistics.summarize([])


def test_summary_by_hand():
    summary = statistics.summarize([4.0, 1.0, 2.0, 3.0, 5.0])
    assert (summary.count, summary.median, summary.mean, summary.minimum) == (5, 3.0, 3.0, 1.0)
    assert summary.p90 == pytest.approx(4.6)
    assert summary.iqr == pytest.approx(2.0)
    assert summary.cv == pytest.approx(np.std([1, 2, 3, 4, 5], ddof=1) / 3)
    assert summary.outliers == 0


def test_outliers_are_counted_and_do_not_make_a_machine_unstable():
    times = [1.0, 1.001, 0.999, 1.0005, 0.9995] * 20
    times[50] = 9.0
    summary = statistics.summarize(times)
    assert summary.outliers == 1
    assert summary.cv < 0.01
    assert statistics.warnings("x", times) == []


def test_equal_times_have_no_outliers():
    assert statistics.summarize([1.0] * 30).outliers == 0
    assert statistics.summarize([1.0]).cv == 0.0


def test_warnings_name_what_is_wrong():
    rng = np.random.default_rng(0)
    assert "vary by" in statistics.warnings("x", list(1 + 0.1 * rng.random(100)))[0]
    assert any("longer --measure warmup=" in line for line in statistics.warnings("x", [9.0] + [1.0] * 50))
    assert any(
        "10 of 100 steps are outliers" in line for line in statistics.warnings("x", [1.0, 1.001] * 45 + [5.0] * 10)
    )
    assert "only 2 steps" in statistics.warnings("x", [1.0, 1.0])[0]
