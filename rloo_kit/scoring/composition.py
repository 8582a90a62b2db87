"""Rewards composed of rewards: gated, routed, rescaled; weights that change over training.

    reward_funcs=[gated(Accuracy(), by=ThinkingFormat()), routed(Math(), task="math")]

Each function returns a reward that is called, checked, bound and released like any other. In a run
file the keys ``only_if``, ``only_for``, ``scaled_by`` and ``clipped_to`` do the same, and
``weight: {0: 1.0, 0.5: 0.0}`` makes a ``WeightSchedule``.
"""

import math
from collections.abc import Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from rloo_kit.errors import RewardContractError
from rloo_kit.scoring.contract import AsyncCheckedReward, CheckedReward, checked, take_rows
from rloo_kit.text.wording import format_name, format_value
from rloo_kit.types import Score, Tokenizer


def gated(
    reward: Callable[..., Any],
    by: Callable[..., Any],
    *,
    at_least: float = 1.0,
    otherwise: float = 0.0,
) -> "Composed":
    """Return a reward with the scores of ``reward`` where ``by`` scores at least ``at_least``.

    All other rows score ``otherwise``, also those for which ``by`` returns None.
    """
    limits = {"at_least": float(at_least), "otherwise": float(otherwise)}
    return Composed((checked(reward), checked(by)), _gated, limits)


def routed(reward: Callable[..., Any], **only_for: Any) -> "Composed":
    """Return a reward that scores the rows whose columns hold given values, and None elsewhere.

    Args:
        reward: The reward.
        **only_for: The allowed value of each dataset column, or a list of allowed values.

    Raises:
        ValueError: No column is named.
    """
    if not only_for:
        raise ValueError("routed() names no column; give one, such as routed(reward, task='math')")
    wanted = {
        column: list(values) if isinstance(values, list | tuple | set) else [values]
        for column, values in only_for.items()
    }
    return Composed((checked(reward),), _routed, {"only_for": wanted})


def rescaled(
    reward: Callable[..., Any],
    *,
    scale: float = 1.0,
    clip: tuple[float, float] | None = None,
) -> "Composed":
    """Return the reward times ``scale``, then cut to the range ``clip`` (low, high).

    Raises:
        ValueError: ``clip`` is not a range.
    """
    low, high = clip or (-math.inf, math.inf)
    if not low < high:
        raise ValueError(
            f"clip {format_value(clip)} is not (low, high); give the lower number first"
        )
    limits = {"scale": float(scale), "low": float(low), "high": float(high)}
    return Composed((checked(reward),), _rescaled, limits)


@dataclass(frozen=True)
class WeightSchedule:
    """A weight that changes over training, linearly between (progress, weight) points.

    >>> schedule = WeightSchedule.of({0: 1.0, 0.5: 0.0})
    >>> [schedule.at(progress) for progress in (0, 0.25, 0.9)]
    [1.0, 0.5, 0.0]
    """

    points: tuple[tuple[float, float], ...]  # progress in [0, 1] and the weight there, in order

    @classmethod
    def of(cls, points: Mapping[Any, Any]) -> "WeightSchedule":
        """Return the schedule of a mapping from progress, in [0, 1], to the weight there.

        Raises:
            ValueError: The mapping holds anything else than progress and weights.
        """
        try:
            pairs = sorted((float(progress), float(weight)) for progress, weight in points.items())
        except (TypeError, ValueError, OverflowError):
            pairs = []
        if not pairs or not all(0 <= p <= 1 and math.isfinite(w) for p, w in pairs):
            raise ValueError(
                f"weight {format_value(dict(points))} is not a schedule; give progress (0 to 1): "
                f"weight, such as {{0: 1.0, 0.5: 0.2}}"
            )
        return cls(tuple(pairs))

    def at(self, progress: float) -> float:
        """Return the weight at ``progress`` (0 to 1), constant before and after all points."""
        import numpy as np

        places, weights = zip(*self.points, strict=True)
        return float(np.interp(progress, places, weights))


# --- the composed rewards ------------------------------------------------------------------------


@dataclass(frozen=True)
class Composed:
    """A reward that calls other rewards; it is async if one of them is."""

    parts: tuple[CheckedReward, ...]  # the first one scores, and gives its name
    scores: Callable[..., Coroutine[Any, Any, list[Score]]]  # called with columns, parts, settings
    settings: dict[str, Any]

    @property
    def __name__(self) -> str:
        return self.parts[0].name

    @property
    def is_async(self) -> bool:
        """True if a call returns a coroutine."""
        return any(isinstance(part, AsyncCheckedReward) for part in self.parts)

    def bind(self, tokenizer: Tokenizer) -> "Composed":
        """Return this reward with its parts bound to a tokenizer."""
        return replace(self, parts=tuple(part.bind(tokenizer) for part in self.parts))

    def check_columns(self, names: Iterable[str]) -> None:
        """Check that a dataset has the columns that the parts read.

        Raises:
            RewardContractError: A column is missing.
        """
        for part in self.parts:
            part.check_columns(names)
        for column in set(self.settings.get("only_for", ())) - set(names):
            raise _without_routing(self.parts[0], column)

    def release(self) -> None:
        """Release the memory of the parts."""
        for part in self.parts:
            part.release()

    def __call__(self, **columns: Any) -> list[Score] | Coroutine[Any, Any, list[Score]]:
        """Return B scores, or a coroutine that does."""
        coroutine = self.scores(columns, *self.parts, **self.settings)
        if self.is_async:
            return coroutine
        # No part is async, so the coroutine ends at its first step. asyncio.run() would fail in the
        # running loop of a notebook
        try:
            coroutine.send(None)
        except StopIteration as done:
            return done.value
        raise AssertionError("a reward that is not async awaited something")


async def _gated(
    columns: dict[str, Any],
    reward: CheckedReward,
    by: CheckedReward,
    *,
    at_least: float,
    otherwise: float,
) -> list[Score]:
    """Call the gate, then the reward for the rows that passed."""
    gate = await _call(by, columns)
    rows = [row for row, score in enumerate(gate) if score is not None and score >= at_least]
    if "log_metric" in columns and gate:
        columns["log_metric"](f"rewards/{reward.name}/gate_open", len(rows) / len(gate))
    return await _scores_of(reward, rows, columns, otherwise)


async def _routed(
    columns: dict[str, Any], reward: CheckedReward, *, only_for: dict[str, list[Any]]
) -> list[Score]:
    """Call the reward for its own rows."""
    rows = list(range(len(columns["completions"])))
    for column, values in only_for.items():
        if column not in columns:
            raise _without_routing(reward, column)
        rows = [row for row in rows if columns[column][row] in values]
    return await _scores_of(reward, rows, columns, None)


def _without_routing(reward: CheckedReward, column: str) -> RewardContractError:
    return RewardContractError(
        f"reward {reward.name!r} is only for rows with some {format_name(column)}, but the "
        f"dataset has no column {format_value(column)}; add it, or drop only_for"
    )


async def _rescaled(
    columns: dict[str, Any], reward: CheckedReward, *, scale: float, low: float, high: float
) -> list[Score]:
    """Scale and clip the scores of the reward."""
    scores = await _call(reward, columns)
    return [None if score is None else min(max(score * scale, low), high) for score in scores]


async def _scores_of(
    reward: CheckedReward, rows: list[int], columns: dict[str, Any], other: Score
) -> list[Score]:
    """Call the reward for some rows; the others get the score ``other``."""
    found = await _call(reward, _only(columns, rows)) if rows else []
    by_row = dict(zip(rows, found, strict=True))
    return [by_row.get(row, other) for row in range(len(columns["completions"]))]


async def _call(reward: CheckedReward, columns: dict[str, Any]) -> list[Score]:
    if isinstance(reward, AsyncCheckedReward):
        return await reward(**columns)
    return reward(**columns)


def _only(columns: dict[str, Any], rows: list[int]) -> dict[str, Any]:
    """Return the columns of some rows; ``log_extra`` gets None for the others."""
    chosen = take_rows(columns, rows)
    count = len(columns["completions"])
    if "log_extra" in columns:

        def log_extra(column: str, values: list[Any]) -> None:
            by_row = dict(zip(rows, values, strict=True))
            columns["log_extra"](column, [by_row.get(row) for row in range(count)])

        chosen["log_extra"] = log_extra
    return chosen
