"""Statistics of times: summaries, ratios with a confidence interval, and what makes a measurement doubtful."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

CONFIDENCE = 0.98
"""Confidence of the interval of a ratio: few enough false alarms that a table of 50 ratios has one at most."""

UNSTABLE = 0.025
"""Coefficient of variation, outliers left out, above which a machine is called unstable."""

UNDECIDED = 2.0
"""An interval that includes 1 and whose ends are further apart than by this factor does not show that there is no difference."""

_OUTLIER = 10.0
"""Standard deviations from the median, by the median absolute deviation, beyond which a time is an outlier."""

_BLOCKS = 100
_MAD_TO_SIGMA = 1.4826


@dataclass(frozen=True)
class Summary:
    """Statistics of a set of times. Times are in seconds.

    Attributes:
        p90: 90 % are no longer.
        p99: 99 % are no longer.
        iqr: Distance of the quartiles.
        cv: Standard deviation over mean, outliers left out.
        outliers: Times further from the median than 10 standard deviations (estimated by the median absolute deviation).
    """

    count: int
    median: float
    mean: float
    p90: float
    p99: float
    minimum: float
    iqr: float
    cv: float
    outliers: int

    def to_dict(self) -> dict[str, Any]:
        """As plain data: seconds, and with the unit in the key µs."""
        times = ("median", "mean", "p90", "p99", "minimum", "iqr")
        return {**asdict(self), **{f"{key}_us": getattr(self, key) * 1e6 for key in times}}


@dataclass(frozen=True)
class Ratio:
    """Speedup of something over what it is compared with.

    Attributes:
        over: Label of what it is compared with.
        clock: "host" (a user's step, with its copies) or "device" (the GPU's own clock).
        value: Median of the other over median of this one; above 1 is faster.
        low: Lower end of the interval; 0 where there are too few rounds to tell.
        high: Upper end; infinite where there are too few rounds to tell.
        rounds: Rounds that it rests on.
        builds: How many times both were built anew. With 1 the interval does not cover what differs from one build to the next: the
            same graph built twice can differ by several per cent for as long as it lives.
    """

    over: str
    clock: str
    value: float
    low: float
    high: float
    confidence: float
    rounds: int
    builds: int = 1

    @property
    def significant(self) -> bool:
        """True if the interval leaves 1 out."""
        return not self.low <= 1.0 <= self.high

    @property
    def undecided(self) -> str:
        """The reason why the interval can not tell a difference from none: "" where it leaves 1 out, or lies close enough around it."""
        if self.low > 0 and (self.significant or self.high <= UNDECIDED * self.low):
            return ""
        return "too few rounds" if self.low <= 0 or self.builds == 1 else "too few builds"

    def to_dict(self) -> dict[str, Any]:
        """As plain data; ends of an interval that can not be told are None."""
        told = math.isfinite(self.high)
        return {**asdict(self), "low": self.low if told else None, "high": self.high if told else None}


def summarize(times: Sequence[float]) -> Summary:
    """Describes times.

    Raises:
        ValueError: There are none.
    """
    values = np.asarray(times, dtype=np.float64)
    if not len(values):
        raise ValueError("no times to summarize")
    far = outliers(values)
    kept = values[~far]
    quartiles = np.percentile(values, [25, 75])
    return Summary(
        count=len(values),
        median=float(np.median(values)),
        mean=float(values.mean()),
        p90=float(np.percentile(values, 90)),
        p99=float(np.percentile(values, 99)),
        minimum=float(values.min()),
        iqr=float(quartiles[1] - quartiles[0]),
        cv=float(kept.std(ddof=1) / kept.mean()) if len(kept) > 1 and kept.mean() > 0 else 0.0,
        outliers=int(far.sum()),
    )


def outliers(values: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Mask of the times that are outliers, by the modified z-score (Iglewicz and Hoaglin 1993)."""
    center = np.median(values)
    deviation = np.abs(values - center)
    spread = float(np.median(deviation)) * _MAD_TO_SIGMA
    if spread == 0.0:
        # More than half of the times are equal: the clock's own steps are no outliers.
        spread = max(float(deviation.mean()), 1e-9)
    far: NDArray[np.bool_] = deviation > _OUTLIER * spread
    return far


def ratio(
    baseline: Sequence[Sequence[float]],
    times: Sequence[Sequence[float]],
    *,
    over: str,
    clock: str = "host",
) -> Ratio:
    """Compares two variants that were measured in the same rounds.

    The value is the ratio of the medians. The interval covers two things, and is the wider of both. Within builds: the
    distribution-free interval for the median of the rounds' own ratios, by the binomial order statistics of the sign test; what
    slows a whole round down cancels, and no shape of the noise is assumed. Beyond 100 rounds, neighbouring rounds are taken
    together, so that what lasts over several rounds does not count several times. Between builds: Student's interval for the mean
    logarithm of the builds' ratios.

    Args:
        baseline: What is compared with: per build, one time per round.
        times: Likewise, of the same builds and rounds.
        over: Label for `Ratio.over`.

    Raises:
        ValueError: The numbers of builds or rounds differ, or there are none.
    """
    shapes = [[len(rounds) for rounds in builds] for builds in (baseline, times)]
    if shapes[0] != shapes[1] or not shapes[0] or not all(shapes[0]):
        raise ValueError(f"rounds {shapes[0]} and {shapes[1]} can not be paired")
    a, b = (np.concatenate([np.asarray(rounds, dtype=np.float64) for rounds in builds]) for builds in (baseline, times))
    value = float(np.median(a) / np.median(b))
    builds = len(shapes[0])
    low, high = _within(a, b)
    if builds > 1:
        each = np.log([np.median(x) / np.median(y) for x, y in zip(baseline, times, strict=True)])
        reach = _STUDENT[min(builds, len(_STUDENT) + 1) - 2] * each.std(ddof=1) / math.sqrt(builds)
        low, high = min(low, float(np.exp(each.mean() - reach))), max(high, float(np.exp(each.mean() + reach)))
    return Ratio(over, clock, value, min(low, value), max(high, value), CONFIDENCE, len(a), builds)


_STUDENT = (31.821, 6.965, 4.541, 3.747, 3.365, 3.143, 2.998, 2.896, 2.821)
"""Two-sided quantiles of Student's distribution at `CONFIDENCE`, for 1, 2, … degrees of freedom; more take the last."""


def _within(a: NDArray[np.float64], b: NDArray[np.float64]) -> tuple[float, float]:
    """The interval by the sign test; 0 and infinity where there are too few rounds to tell."""
    blocks = min(_BLOCKS, len(a))
    bounds = np.linspace(0, len(a), blocks + 1).astype(int)
    ratios = np.sort([np.median(a[start:end]) / np.median(b[start:end]) for start, end in itertools.pairwise(bounds)])
    rank = _sign_test_rank(blocks)
    if rank < 0:
        return 0.0, math.inf
    return float(ratios[rank]), float(ratios[blocks - 1 - rank])


def _sign_test_rank(count: int) -> int:
    """Greatest k so that order statistics k and count-1-k (from 0) enclose the median with `CONFIDENCE`; -1 for none."""
    rank, tail = -1, 0.0
    for k in range(count // 2):
        tail += math.comb(count, k) / 2**count
        if 2 * tail > 1 - CONFIDENCE:
            break
        rank = k
    return rank


def warnings(label: str, times: Sequence[float]) -> list[str]:
    """Doubts about the times of a variant, in words. They are in the order in which they were taken."""
    values = np.asarray(times, dtype=np.float64)
    if len(values) < 3:
        return [f"{label}: only {len(values)} steps were measured; a longer --measure duration= would tell more"]
    summary = summarize(times)
    found = []
    if summary.cv > UNSTABLE:
        found.append(
            f"{label}: times vary by {summary.cv:.1%} (standard deviation over mean); is something else running on this machine?"
        )
    if values[0] > 3 * summary.median:
        found.append(
            f"{label}: the first measured step took {values[0] / summary.median:.1f} times the median; "
            "a longer --measure warmup= would help"
        )
    if summary.outliers > max(1, len(values) // 50):
        found.append(f"{label}: {summary.outliers} of {len(values)} steps are outliers")
    return found
