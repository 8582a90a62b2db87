"""What scores over completions amount to: the table's numbers, and the signal RLOO learns from.

B completions, in groups of the same prompt. A score is a float, or None where a reward does not
apply. Nothing here calls a reward: ``Probed`` holds what one answered, on the completions as they
are and on altered ones.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import fmean, pstdev, stdev

from rloo_kit.types import Score

NUM_BINS = 8


# --- what is looked at ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Settings:
    """Settings of the run that findings depend on; None where they are not known."""

    temperature: float | None = None
    beta: float | None = None
    max_completion_length: int | None = None
    max_seq_length: int | None = None
    num_generations: int | None = None
    missing_eos_penalty: float | None = None
    reward_clip_range: tuple[float, float] | None = None
    mask_truncated_completions: bool = False
    normalized: bool = False
    """Whether scores or advantages are divided by their spread."""


@dataclass(frozen=True)
class Batch:
    """B completions and what is known of them."""

    texts: list[str]
    groups: list[list[int]]
    """Rows of each prompt."""
    num_tokens: list[int] | None = None
    truncated: list[bool] | None = None
    """Whether the completion ended because it reached the limit."""
    thought_opened: list[bool] | None = None
    """Whether the prompt ends with an opened ``<think>``."""
    generation_seconds: float | None = None
    """Of one completion."""

    @property
    def lengths(self) -> dict[str, list[int]]:
        """Length of each completion, by unit."""
        found = {} if self.num_tokens is None else {"tokens": self.num_tokens}
        return found | {
            "characters": [len(text) for text in self.texts],
            "words": [len(text.split()) for text in self.texts],
        }


@dataclass(frozen=True)
class Fault:
    """Why a reward gave no usable scores."""

    kind: str
    """``raises``, ``timeout``, ``missing_column``, ``wrong_output``, ``not_finite``; or
    ``missing_ids``, where a file holds no ``completion_ids``."""
    text: str


@dataclass(frozen=True)
class Probed:
    """One reward: its scores, and what it answered when it was called in other ways."""

    name: str
    weight: float
    scores: list[Score]
    """B, as the run would get them; all None with a fault."""
    seconds: float = 0.0
    """Of one completion."""
    fault: Fault | None = None
    rows: list[int] = field(default_factory=list)
    """Rows that the probes were called with."""
    probes: dict[str, list[Score]] = field(default_factory=dict)
    """Scores of those rows by probe; see ``wanted_probes``."""
    probe_errors: dict[str, str] = field(default_factory=dict)
    """What the reward raised on altered completions."""
    unbound: frozenset[str] = frozenset()
    """What only a tokenizer gives it, of ``end_token_id`` and ``thought_opened``."""
    blank_columns: dict[str, float] = field(default_factory=dict)
    """Share of blank values in the dataset columns it reads."""

    @property
    def counts(self) -> bool:
        """Whether it is part of the score at all; with weight 0 it is only logged."""
        return self.weight != 0

    def at_rows(self) -> list[Score]:
        """Return the scores of the probed rows."""
        return [self.scores[row] for row in self.rows]


@dataclass(frozen=True)
class RewardStats:
    """One row of the table."""

    name: str
    weight: float
    num_scored: int
    none_share: float
    mean: float | None
    std: float | None
    group_std: float | None
    """Mean standard deviation within a group."""
    low: float | None
    high: float | None
    fires: float | None
    """Share of the scores above 0."""
    milliseconds: float
    """Of one completion."""
    length_correlation: float | None
    """Spearman's rank correlation with the length, in tokens where they are known."""
    histogram: list[int]
    """Scores in equal bins from ``low`` to ``high``."""
    fault: str | None


@dataclass(frozen=True)
class Signal:
    """Whether scores differ within groups, which is all that RLOO learns from."""

    num_groups: int
    """With at least two scored completions."""
    num_with_signal: int
    group_std: float | None
    """Mean standard deviation of the score within a group."""
    all_lowest: int
    """Groups whose scores all are the lowest of the batch ..."""
    all_highest: int
    """... and the highest."""
    distinct: float | None
    """Different texts in a group, as a share of its completions."""
    forecast: dict[int, float]
    """Number of generations -> expected share of groups with signal; for scores of two values."""

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


def is_same(one: Score, other: Score) -> bool:
    """Return whether two scores are the same, rounding aside."""
    if one is None or other is None:
        return one is other
    return math.isclose(one, other, rel_tol=1e-6, abs_tol=1e-9)


def ranks(values: Sequence[float]) -> list[float]:
    """Return the rank of each value from 0 on; equal values share their mean rank."""
    order = sorted(range(len(values)), key=values.__getitem__)
    found = [0.0] * len(values)
    start = 0
    while start < len(order):
        end = start
        while end + 1 < len(order) and values[order[end + 1]] == values[order[start]]:
            end += 1
        for place in range(start, end + 1):
            found[order[place]] = (start + end) / 2
        start = end + 1
    return found


def correlation(xs: Sequence[float], ys: Sequence[float]) -> float | None:
    """Return Pearson's correlation; None where one side does not vary."""
    if len(xs) < 2:
        return None
    mean_x, mean_y = fmean(xs), fmean(ys)
    products = math.fsum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True))
    squares = math.fsum((x - mean_x) ** 2 for x in xs) * math.fsum((y - mean_y) ** 2 for y in ys)
    return max(-1.0, min(1.0, products / math.sqrt(squares))) if squares > 0 else None


def rank_correlation(xs: Sequence[float], ys: Sequence[float]) -> float | None:
    """Return Spearman's correlation; None where one side does not vary.

    >>> rank_correlation([1, 2, 3], [10, 30, 20])
    0.5
    """
    return correlation(ranks(xs), ranks(ys))


def relative_rank_correlation(xs: Sequence[float], ys: Sequence[float]) -> float | None:
    """Return Spearman's correlation over the largest one that the ties of both sides allow.

    Scores of two values cannot reach 1 with lengths of many; here they can, when a length parts
    them exactly.

    >>> relative_rank_correlation([1, 2, 3, 4], [0, 0, 0, 1])
    1.0
    """
    found = rank_correlation(xs, ys)
    if found is None:
        return None
    ordered = sorted(ranks(ys), reverse=found < 0)
    best = correlation(sorted(ranks(xs)), ordered)
    return None if not best else round(found / abs(best), 9)


def statistics_of(probed: Probed, batch: Batch) -> RewardStats:
    """Return the row of the table."""
    values = known(probed.scores)
    groups = [known(probed.scores[row] for row in rows) for rows in batch.groups]
    spreads = [stdev(group) for group in groups if len(group) > 1]
    unit = next(iter(batch.lengths))
    return RewardStats(
        name=probed.name,
        weight=probed.weight,
        num_scored=len(values),
        none_share=1 - len(values) / len(probed.scores),
        mean=fmean(values) if values else None,
        std=pstdev(values) if values else None,
        group_std=fmean(spreads) if spreads else None,
        low=min(values, default=None),
        high=max(values, default=None),
        fires=sum(value > 0 for value in values) / len(values) if values else None,
        milliseconds=probed.seconds * 1000,
        length_correlation=rank_correlation(*both_scored(batch.lengths[unit], probed.scores)),
        histogram=histogram(values),
        fault=probed.fault.text if probed.fault else None,
    )


def both_scored(ones: Sequence[Score], others: Sequence[Score]) -> tuple[list[float], list[float]]:
    """Return both columns without the rows in which one of them is None."""
    pairs = [(a, b) for a, b in zip(ones, others, strict=True) if a is not None and b is not None]
    return [a for a, _ in pairs], [b for _, b in pairs]


def histogram(values: Sequence[float], num_bins: int = NUM_BINS) -> list[int]:
    """Return how many values lie in each of ``num_bins`` equal bins from lowest to highest."""
    counts = [0] * num_bins
    if not values:
        return counts
    low, high = min(values), max(values)
    for value in values:
        # halved, so that the width of two huge numbers of opposite signs stays finite
        share = (value / 2 - low / 2) / (high / 2 - low / 2) if high / 2 > low / 2 else 0.5
        counts[min(num_bins - 1, int(share * num_bins))] += 1
    return counts


def total_scores(rewards: Sequence[Probed], batch: Batch, settings: Settings) -> list[Score]:
    """Return the score each completion would train with, before any KL; None: unscorable."""
    totals: list[Score] = []
    for row in range(len(batch.texts)):
        parts = [r.weight * s for r in rewards if (s := r.scores[row]) is not None]
        if not parts:
            totals.append(None)
            continue
        total = math.fsum(parts)
        if settings.missing_eos_penalty and batch.truncated and batch.truncated[row]:
            total -= settings.missing_eos_penalty
        if settings.reward_clip_range:
            low, high = settings.reward_clip_range
            total = min(max(total, low), high)
        totals.append(total)
    return totals


def signal_of(totals: Sequence[Score], batch: Batch, settings: Settings) -> Signal:
    """Return how many groups have scores that differ, and by how much."""
    values = known(totals)
    groups = [(rows, known(totals[row] for row in rows)) for rows in batch.groups]
    groups = [(rows, scores) for rows, scores in groups if len(scores) > 1]
    lowest, highest = min(values, default=0.0), max(values, default=0.0)
    equal = [scores[0] for _, scores in groups if is_constant(scores)]
    usable = sum(_trains(rows, totals, batch, settings) for rows, _ in groups)
    distinct = [len({batch.texts[row] for row in rows}) / len(rows) for rows, _ in groups]
    return Signal(
        num_groups=len(groups),
        num_with_signal=usable,
        group_std=fmean(stdev(scores) for _, scores in groups) if groups else None,
        all_lowest=sum(is_same(score, lowest) for score in equal),
        all_highest=sum(is_same(score, highest) for score in equal),
        distinct=fmean(distinct) if distinct else None,
        forecast=_forecast([scores for _, scores in groups], lowest, highest),
    )


def _trains(rows: list[int], totals: Sequence[Score], batch: Batch, settings: Settings) -> bool:
    """Return whether a group's scores differ and a row of it may train."""
    if is_constant(totals[row] for row in rows):
        return False
    if settings.mask_truncated_completions and batch.truncated:
        return not all(batch.truncated[row] for row in rows)
    return True


def _forecast(groups: list[list[float]], lowest: float, highest: float) -> dict[int, float]:
    """Return the expected share of groups with signal for other numbers of generations.

    A beta distribution of the pass rates, fitted by moments: prompts that were never or always
    solved stay mostly so.
    """
    two_valued = all(is_same(s, lowest) or is_same(s, highest) for scores in groups for s in scores)
    if len(groups) < 4 or not two_valued:
        return {}
    size = round(fmean(len(scores) for scores in groups))
    rates = [fmean(is_same(s, highest) for s in scores) for scores in groups]
    mean = fmean(rates)
    if not 0 < mean < 1:
        return {}
    overlap = (pstdev(rates) ** 2 / (mean * (1 - mean)) - 1 / size) / (1 - 1 / size)
    concentration = 1 / min(max(overlap, 0.001), 0.999) - 1
    a, b = mean * concentration, (1 - mean) * concentration

    def all_alike(one: float, num: int) -> float:
        ratio = math.lgamma(one + num) - math.lgamma(one)
        return math.exp(ratio + math.lgamma(a + b) - math.lgamma(a + b + num))

    return {num: 1 - all_alike(a, num) - all_alike(b, num) for num in (size, size * 2, size * 4)}
