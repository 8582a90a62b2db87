"""What scores over completions amount to: the table's numbers, and the signal RLOO learns from.

B completions, in groups of the same prompt. A score is a float, or None where a reward does not
apply. Nothing here calls a reward: ``Probed`` holds what one answered, on the completions as they
are and on altered ones.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import fmean, pstdev, stdev

import pandas as pd

from rloo_kit.diagnosis.registry import Seen
from rloo_kit.types import Score


@dataclass(frozen=True)
class Batch:
    """B completions and what is known of them, and of the run's limits."""

    texts: list[str]
    groups: list[list[int]]  # rows of each prompt
    lengths: list[int]  # tokens of each completion where they are known, else characters
    truncated: list[bool] | None = None  # whether the completion ended because it reached the limit
    max_completion_length: int | None = None
    max_seq_length: int | None = None


@dataclass(frozen=True)
class Probed:
    """One reward: its scores, and what it answered when it was called in other ways."""

    name: str
    weight: float
    scores: list[Score]  # B, as the run would get them; all None with a fault
    # Of one completion
    seconds: float = 0.0
    # Why there are no usable scores: `raises`, `timeout`, `missing_column` or `wrong_output`
    fault: Seen | None = None
    rows: list[int] = field(default_factory=list)  # that the probes were called with
    probes: dict[str, list[Score]] = field(default_factory=dict)  # those rows' scores by probe
    probe_errors: dict[str, str] = field(default_factory=dict)  # what the reward raised on them

    @property
    def counts(self) -> bool:
        """Whether it is part of the score; with weight 0 it is only logged."""
        return self.weight != 0

    @property
    def first(self) -> list[Score]:
        """The scores of the probed rows, from a call of their own if they are not all rows."""
        return self.probes.get("first") or [self.scores[row] for row in self.rows]


@dataclass(frozen=True)
class RewardStats:
    """One row of the table."""

    name: str
    weight: float
    none_share: float
    mean: float | None
    std: float | None
    # Mean within the groups
    group_std: float | None
    low: float | None
    high: float | None
    # Share above 0
    fires: float | None
    milliseconds: float
    length_correlation: float | None
    fault: str | None


@dataclass(frozen=True)
class Signal:
    """Whether scores differ within groups, which is all that RLOO learns from."""

    num_groups: int  # with at least two scored completions
    num_with_signal: int
    group_std: float | None  # mean standard deviation of the score within a group
    all_lowest: int  # groups whose scores all are the lowest of the batch ...
    all_highest: int  # ... and the highest

    @property
    def share(self) -> float:
        """Of groups with signal."""
        return self.num_with_signal / self.num_groups if self.num_groups else 0.0


# --- statistics ----------------------------------------------------------------------------------


def known(scores: Iterable[Score]) -> list[float]:
    """Return the scores that are not None."""
    return [score for score in scores if score is not None]


def is_constant(scores: Iterable[Score]) -> bool:
    """Return whether there are scores and all are the same, rounding aside."""
    values = known(scores)
    return bool(values) and is_same(min(values), max(values))


def is_same(one: Score, other: Score, slack: float = 1e-9) -> bool:
    """Return whether two scores are the same, rounding aside, or differ by at most ``slack``."""
    if one is None or other is None:
        return one is other
    return math.isclose(one, other, rel_tol=1e-6, abs_tol=slack)


def rank_correlation(xs: Sequence[Score], ys: Sequence[Score]) -> float | None:
    """Return Spearman's correlation of the rows without a None; None where one side is constant."""
    found = pd.DataFrame({"x": xs, "y": ys}, dtype=float).corr("spearman").loc["x", "y"]
    return None if math.isnan(found) else round(float(found), 9)


def scored_groups(scores: Sequence[Score], batch: Batch) -> list[list[float]]:
    """Return the scores of each group that has two or more."""
    groups = [known(scores[row] for row in rows) for rows in batch.groups]
    return [group for group in groups if len(group) > 1]


def statistics_of(probed: Probed, batch: Batch) -> RewardStats:
    """Return the row of the table."""
    values = known(probed.scores)
    spreads = [stdev(group) for group in scored_groups(probed.scores, batch)]
    return RewardStats(
        name=probed.name,
        weight=probed.weight,
        none_share=1 - len(values) / len(probed.scores),
        mean=fmean(values) if values else None,
        std=pstdev(values) if values else None,
        group_std=fmean(spreads) if spreads else None,
        low=min(values, default=None),
        high=max(values, default=None),
        fires=sum(value > 0 for value in values) / len(values) if values else None,
        milliseconds=round(probed.seconds * 1000, 2),
        length_correlation=rank_correlation(batch.lengths, probed.scores),
        fault=probed.fault.evidence if probed.fault else None,
    )


def total_scores(rewards: Sequence[Probed], batch: Batch) -> list[Score]:
    """Return the weighted sum of each completion, before any KL; None: no reward scored it."""
    totals: list[Score] = []
    for row in range(len(batch.texts)):
        parts = [r.weight * s for r in rewards if (s := r.scores[row]) is not None]
        totals.append(math.fsum(parts) if parts else None)
    return totals


def signal_of(totals: Sequence[Score], batch: Batch) -> Signal:
    """Return how many groups have scores that differ, and by how much."""
    values = known(totals)
    groups = scored_groups(totals, batch)
    equal = [scores[0] for scores in groups if is_constant(scores)]
    return Signal(
        num_groups=len(groups),
        num_with_signal=len(groups) - len(equal),
        group_std=fmean(map(stdev, groups)) if groups else None,
        all_lowest=sum(is_same(score, min(values)) for score in equal),
        all_highest=sum(is_same(score, max(values)) for score in equal),
    )
