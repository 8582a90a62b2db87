"""Statistics of evaluations: pass@k, confidence intervals, paired differences of two models.

Completions of one prompt are correlated. The bootstrap therefore resamples prompts, each with all
of its completions, and two models are compared prompt by prompt.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

CONFIDENCE = 0.95
RESAMPLES = 2000
SEED = 0  # for the bootstrap and the random signs


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Return pass@k: an estimate of the probability that at least one of k completions is right.

    The estimate is unbiased. With n = ``num_samples`` and c = ``num_correct`` it is
    1 - C(n - c, k) / C(n, k) (Chen et al. 2021, arXiv 2107.03374, equation 1). ``k`` is at most n.

    >>> pass_at_k(4, 1, 1), pass_at_k(4, 1, 2), pass_at_k(4, 3, 2)
    (0.25, 0.5, 1.0)
    """
    wrong = num_samples - num_correct
    return 1.0 - math.comb(wrong, k) / math.comb(num_samples, k)


# --- intervals and tests -------------------------------------------------------------------------


@dataclass(frozen=True)
class Estimate:
    """A mean over prompts with its 95% confidence interval."""

    mean: float
    low: float  # lower end of the interval
    high: float  # upper end of the interval
    num: int  # number of prompts

    def __str__(self) -> str:
        return f"{self.mean:.3f} [{self.low:.3f}, {self.high:.3f}]"


@dataclass(frozen=True)
class Difference(Estimate):
    """Mean difference of two models on the same prompts, with its interval and p-value."""

    p_value: float  # probability of a mean at least this far from 0 if the models were equal
    is_real: bool  # True if 0 is outside of the interval and the p-value is below 5%

    @property
    def verdict(self) -> str:
        """The p-value, followed by ``real`` or ``may be chance``."""
        p = "p < 0.001" if self.p_value < 0.001 else f"p = {self.p_value:.3f}"
        return f"{p}: {'real' if self.is_real else 'may be chance'}"

    def __str__(self) -> str:
        return f"{self.mean:+.3f} [{self.low:+.3f}, {self.high:+.3f}], {self.verdict}"


def estimate(values: Sequence[float]) -> Estimate:
    """Return the mean of one value per prompt, with its 95% bootstrap interval.

    The interval is a percentile interval (Efron 1979; Efron and Tibshirani 1993, chapter 13). It
    has no width if all n values are equal. If all values are 0 or all are 1 (for example, all
    answers are right), the interval is widened by 1 - 0.05 ** (1 / n), according to the rule of
    three, and clipped to [0, 1].

    Raises:
        ValueError: There is no value.
    """
    mean, low, high = _bootstrap(values)
    if low == high and set(values) <= {0.0, 1.0}:
        room = _room(len(values))
        low = max(0.0, low - room)
        high = min(1.0, high + room)
    return Estimate(mean, low, high, len(values))


def _room(num: int) -> float:
    """Return an upper bound on the share of other values if ``num`` sampled values are all equal.

    The bound holds with a confidence of 95%. It is about 3 / ``num`` (the rule of three).
    """
    return 1 - (1 - CONFIDENCE) ** (1 / num)


def difference(before: Sequence[float], after: Sequence[float]) -> Difference:
    """Return the mean of ``after`` - ``before`` over the prompts, with its interval and p-value.

    The 95% interval comes from a bootstrap over prompts. The p-value comes from Fisher's
    randomization test: each prompt's difference gets a random sign, and the p-value is the
    probability that the resulting mean is at least as far from 0 as the observed mean. If there
    are few prompts, all combinations of signs are tried instead of random ones.

    Args:
        before: One value per prompt.
        after: One value per prompt, in the same order.

    Raises:
        ValueError: There is no value, or the numbers of values differ.
    """
    moved = [b - a for a, b in zip(before, after, strict=True)]
    mean, low, high = _bootstrap(moved)
    if low == high:  # all prompts moved alike, but other prompts may move differently
        room = _room(len(moved)) * (abs(mean) or max(map(abs, [*before, *after])))
        low -= room
        high += room
    p_value = _sign_flip(moved)
    is_real = p_value < 1 - CONFIDENCE and not low <= 0 <= high
    return Difference(mean, low, high, len(moved), p_value, is_real)


def _bootstrap(values: Sequence[float]) -> tuple[float, float, float]:
    if not len(values):
        raise ValueError("an interval needs at least one value")
    array = np.asarray(values, dtype=np.float64)
    drawn = np.random.default_rng(SEED).integers(0, len(array), (RESAMPLES, len(array)))
    tail = 50 * (1 - CONFIDENCE)
    low, high = np.percentile(array[drawn].mean(axis=1), [tail, 100 - tail])
    return float(array.mean()), float(low), float(high)


def _sign_flip(moved: Sequence[float]) -> float:
    array = np.asarray([value for value in moved if value], dtype=np.float64)
    num = len(array)
    if not num:
        return 1.0
    seen = abs(array.sum()) * (1 - 1e-12)  # a sum in another order is rounded differently
    if 2**num <= RESAMPLES:
        signs = np.asarray(list(itertools.product((-1.0, 1.0), repeat=num)))  # (2 ** n, n)
        return float((abs(signs @ array) >= seen).mean())
    draw = np.random.default_rng(SEED)
    # In ten parts, so that the signs need no more memory than the bootstrap's resamples
    sums = [draw.choice((-1.0, 1.0), (RESAMPLES, num)) @ array for _ in range(10)]
    far = np.count_nonzero(np.abs(sums) >= seen)
    return (far + 1) / (10 * RESAMPLES + 1)  # the observed signs count as one of the draws
