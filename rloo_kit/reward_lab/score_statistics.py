"""Statistics of reward scores: the numbers of the table, and the signal that RLOO learns from.

The completions of one prompt are a group. A score is a float, or None if the reward does not apply.
The functions here call no reward. They read its scores from ``Probed``.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import pstdev, stdev

import pandas as pd

from rloo_kit.diagnosis.registry import Seen
from rloo_kit.text.numbers import mean_or_none
from rloo_kit.types import Score


@dataclass(frozen=True)
class Batch:
    """Completions with their groups and lengths, and the run's length limits.

    A group is the list of the indices of the completions of one prompt.
    """

    texts: list[str]
    groups: list[list[int]]  # for each prompt, the indices of its completions
    lengths: list[int]  # tokens of each completion, or characters if tokens are unknown
    truncated: list[bool] | None = None  # True for each that reached the limit; None: unknown
    max_completion_length: int | None = None  # in tokens; None: unknown
    max_seq_length: int | None = None  # in tokens; None: unknown


@dataclass(frozen=True)
class Probed:
    """Scores that one reward returned for the completions and in the probes.

    A probe is another call of the reward, on some of the completions, which may be altered.
    """

    name: str
    weight: float  # 0: the reward is only logged
    scores: list[Score]  # one for each unaltered completion; all None if the call failed
    seconds: float = 0.0  # time of a call, divided by the number of completions
    # Why the call failed: `raises`, `timeout`, `missing_column` or `wrong_output`
    fault: Seen | None = None
    # Probe -> scores of the completions that were probed
    probes: dict[str, list[Score]] = field(default_factory=dict)
    probe_errors: dict[str, str] = field(default_factory=dict)  # probe -> error of the reward

    @property
    def first(self) -> list[Score]:
        """Scores of the probed completions without alterations.

        If only some of the completions are probed, these scores come from a separate call or, if
        that failed, from the call on all completions.
        """
        return self.probes.get("first", [])


@dataclass(frozen=True)
class RewardStats:
    """Statistics of the scores of one reward: a row of the table in a reward check.

    A field is None if there are no scores to compute it from.
    """

    name: str
    weight: float
    none_share: float  # share of completions without a score
    mean: float | None
    std: float | None
    group_std: float | None  # mean standard deviation within a group (completions of one prompt)
    low: float | None
    high: float | None
    fires: float | None  # share of scores above 0
    milliseconds: float  # time of a call, divided by the number of completions
    length_correlation: float | None  # rank correlation with the length; None if it is undefined
    fault: str | None  # why the call failed; None if it did not


@dataclass(frozen=True)
class Signal:
    """Statistics of the score differences within groups.

    RLOO learns only from these differences.
    """

    num_groups: int  # groups with at least two scored completions
    num_with_signal: int
    group_std: float | None  # mean standard deviation of the score within a group
    all_lowest: int  # groups in which every score is the lowest score of the batch
    all_highest: int  # groups in which every score is the highest score of the batch

    @property
    def share(self) -> float:
        """Share of groups whose scores differ, from 0 to 1."""
        return self.num_with_signal / self.num_groups if self.num_groups else 0.0


# --- statistics ----------------------------------------------------------------------------------


def known(scores: Iterable[Score]) -> list[float]:
    """Return the scores that are not None."""
    return [score for score in scores if score is not None]


def is_constant(scores: Iterable[Score]) -> bool:
    """Return True if there is at least one score and all scores are equal up to rounding."""
    values = known(scores)
    return bool(values) and is_same(min(values), max(values))


def is_same(one: Score, other: Score, slack: float = 1e-9) -> bool:
    """Return True if two scores are equal up to rounding, or differ by at most ``slack``.

    None is equal to None only.
    """
    if one is None or other is None:
        return one is other
    return math.isclose(one, other, rel_tol=1e-6, abs_tol=slack)


def rank_correlation(xs: Sequence[Score], ys: Sequence[Score]) -> float | None:
    """Return Spearman's rank correlation of two lists, or None if one of them is constant.

    Positions at which either list has a None are ignored.
    """
    found = pd.DataFrame({"x": xs, "y": ys}, dtype=float).corr("spearman").loc["x", "y"]
    return None if math.isnan(found) else round(float(found), 9)


def scored_groups(scores: Sequence[Score], batch: Batch) -> list[list[float]]:
    """Return the scores of each group in which two or more completions have a score."""
    groups = [known(scores[row] for row in rows) for rows in batch.groups]
    return [group for group in groups if len(group) > 1]


def statistics_of(probed: Probed, batch: Batch) -> RewardStats:
    """Return the statistics of the scores of one reward."""
    values = known(probed.scores)
    spreads = map(stdev, scored_groups(probed.scores, batch))
    return RewardStats(
        name=probed.name,
        weight=probed.weight,
        none_share=1 - len(values) / len(probed.scores),
        mean=mean_or_none(values),
        std=pstdev(values) if values else None,
        group_std=mean_or_none(spreads),
        low=min(values, default=None),
        high=max(values, default=None),
        fires=mean_or_none(value > 0 for value in values),
        milliseconds=round(probed.seconds * 1000, 2),
        length_correlation=rank_correlation(batch.lengths, probed.scores),
        fault=probed.fault.evidence if probed.fault else None,
    )


def total_scores(rewards: Sequence[Probed], batch: Batch) -> list[Score]:
    """Return the weighted sum of the rewards for each completion, before any KL penalty.

    The sum is None if no reward scored the completion.
    """
    totals = []
    for row in range(len(batch.texts)):
        parts = [r.weight * s for r in rewards if (s := r.scores[row]) is not None]
        totals.append(math.fsum(parts) if parts else None)
    return totals


def signal_of(totals: Sequence[Score], batch: Batch) -> Signal:
    """Return the signal: how many groups have different scores, and the spread within a group.

    Args:
        totals: Total score of each completion, from ``total_scores``.
        batch: The completions, with their groups.
    """
    values = known(totals)
    groups = scored_groups(totals, batch)
    equal = [scores[0] for scores in groups if is_constant(scores)]
    return Signal(
        num_groups=len(groups),
        num_with_signal=len(groups) - len(equal),
        group_std=mean_or_none(map(stdev, groups)),
        all_lowest=sum(is_same(score, min(values)) for score in equal),
        all_highest=sum(is_same(score, max(values)) for score in equal),
    )
