"""Functions that build a reward from other rewards, and weights that change over training.

    reward_funcs=[gated(Accuracy(), by=ThinkingFormat()), routed(Math(), task="math")]

Each function returns a reward that is used like any other. In a run file, the key ``only_if``
applies ``gated``, ``only_for`` applies ``routed``, and ``scaled_by`` and ``clipped_to`` apply
``rescaled``. A weight such as ``weight: {0: 1.0, 0.5: 0.0}`` is a ``WeightSchedule``.
"""

import math
from collections.abc import Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from rloo_kit.errors import RewardContractError
from rloo_kit.scoring.contract import (
    AsyncCheckedReward,
    CheckedReward,
    checked,
    columns_read,
    guarded,
    take_rows,
)
from rloo_kit.text.wording import format_name, format_value
from rloo_kit.types import Score, Tokenizer


def gated(
    reward: Callable[..., Any],
    by: Callable[..., Any],
    *,
    at_least: float = 1.0,
    otherwise: float = 0.0,
) -> "Composed":
    """Return a reward that counts only for the completions that pass a gate.

    The gate is another reward, ``by``. If the gate gives a completion a score of ``at_least`` or
    higher, ``reward`` scores the completion. If the gate gives a lower score or None, the
    completion scores ``otherwise``.

    Args:
        reward: Reward that scores the completions that pass the gate.
        by: Reward that serves as the gate.
        at_least: Minimum gate score of a completion that passes.
        otherwise: Score of the completions that do not pass.
    """
    return _Gated((checked(reward), checked(by)), float(at_least), float(otherwise))


def routed(reward: Callable[..., Any], **only_for: Any) -> "Composed":
    """Return a reward that scores only the rows with given values in given dataset columns.

    All other rows get the score None: the reward does not apply to them.

    Args:
        reward: Reward that scores the chosen rows.
        **only_for: Dataset column = value that a row must have there, or list of allowed values.
            With several columns, a row must have an allowed value in each of them.

    Raises:
        ValueError: No column is given.
    """
    if not only_for:
        raise ValueError("routed() names no column; give one, such as routed(reward, task='math')")
    wanted = {
        column: list(values) if isinstance(values, list | tuple | set) else [values]
        for column, values in only_for.items()
    }
    return _Routed((checked(reward),), wanted)


def rescaled(
    reward: Callable[..., Any],
    *,
    scale: float = 1.0,
    clip: tuple[float, float] | None = None,
) -> "Composed":
    """Return a reward whose scores are multiplied by ``scale`` and then clipped.

    Args:
        reward: Reward whose scores are changed.
        scale: Factor for every score.
        clip: Lowest and highest score, as (low, high); None: no clipping.

    Raises:
        ValueError: In ``clip``, low is not less than high.
    """
    low, high = clip or (-math.inf, math.inf)
    if not low < high:
        raise ValueError(
            f"clip {format_value(clip)} is not (low, high); give the lower number first"
        )
    return _Rescaled((checked(reward),), float(scale), float(low), float(high))


@dataclass(frozen=True)
class WeightSchedule:
    """Weight of a reward that changes over training, linearly between given points.

    A point is (progress, weight). Progress is the finished share of the training, from 0 to 1.

    >>> schedule = WeightSchedule.of({0: 1.0, 0.5: 0.0})
    >>> [schedule.at(progress) for progress in (0, 0.25, 0.9)]
    [1.0, 0.5, 0.0]
    """

    points: tuple[tuple[float, float], ...]  # (progress, weight), in order of progress

    @classmethod
    def of(cls, points: Mapping[Any, Any]) -> "WeightSchedule":
        """Return the schedule for a mapping from progress to weight.

        Raises:
            ValueError: The mapping is empty, a progress is not in [0, 1], or a weight is not a
                finite number.
        """
        try:
            pairs = sorted((float(progress), float(weight)) for progress, weight in points.items())
        except (TypeError, ValueError, OverflowError):
            pairs = []
        if not pairs or not all(0 <= p <= 1 and math.isfinite(w) for p, w in pairs):
            raise ValueError(
                f"weight {format_value(dict(points))} is not a schedule; map progress (0 to 1) to "
                f"weight, such as {{0: 1.0, 0.5: 0.2}}"
            )
        return cls(tuple(pairs))

    def at(self, progress: float) -> float:
        """Return the weight at ``progress``, from 0 to 1.

        Before the first point, it is the weight of the first point. After the last point, it is the
        weight of the last point.
        """
        import numpy as np

        places, weights = zip(*self.points, strict=True)
        return float(np.interp(progress, places, weights))


# --- the composed rewards ------------------------------------------------------------------------


@dataclass(frozen=True)
class Composed:
    """Base class of rewards that compute their scores from other rewards, their parts.

    A composed reward is async if one of its parts is async.
    """

    # The first part gives the composed reward its scores and its name
    parts: tuple[CheckedReward, ...]

    async def scores(self, columns: dict[str, Any]) -> list[Score]:
        """Return one score per completion.

        Raises:
            NotImplementedError: Always; each kind of composed reward has its own method.
        """
        raise NotImplementedError

    @property
    def __name__(self) -> str:
        return self.parts[0].name

    @property
    def is_async(self) -> bool:
        """True if a call returns a coroutine."""
        return any(isinstance(part, AsyncCheckedReward) for part in self.parts)

    def bind(self, tokenizer: Tokenizer) -> "Composed":
        """Return a copy of this reward whose parts are bound to a tokenizer."""
        return replace(self, parts=tuple(part.bind(tokenizer) for part in self.parts))

    def guarded(self, timeout: float | None, on_error: str) -> "Composed":
        """Return a copy of this reward whose parts are guarded; see ``contract.guarded``."""
        parts = tuple(guarded(part, timeout, on_error) for part in self.parts)
        return replace(self, parts=parts)

    @property
    def reads(self) -> tuple[str, ...]:
        """Names of the arguments that the parts require."""
        return tuple(name for part in self.parts for name in columns_read(part.reward))

    def check_columns(self, names: Iterable[str]) -> None:
        """Check that a dataset has the columns that the parts read.

        Raises:
            RewardContractError: A column is missing.
        """
        for part in self.parts:
            part.check_columns(names)

    def release(self) -> None:
        """Release the memory of the parts."""
        for part in self.parts:
            part.release()

    def __call__(self, **columns: Any) -> list[Score] | Coroutine[Any, Any, list[Score]]:
        """Return one score per completion; if a part is async, return a coroutine for them."""
        coroutine = self.scores(columns)
        if self.is_async:
            return coroutine
        # No part is async, so the coroutine ends at its first step. asyncio.run() would fail in a
        # notebook, which already has a running loop
        try:
            coroutine.send(None)
        except StopIteration as done:
            return done.value
        raise AssertionError("no part of this reward is async, but its call awaited something")


@dataclass(frozen=True)
class _Gated(Composed):
    """Reward whose second part, the gate, decides for which rows the first part is called.

    The share of rows that passed is logged as the metric ``rewards/NAME/gate_open``.
    """

    at_least: float
    otherwise: float

    async def scores(self, columns: dict[str, Any]) -> list[Score]:
        """Call the gate, then call the reward for the rows that passed the gate."""
        reward, by = self.parts
        gate = await _call(by, columns)
        least = self.at_least
        rows = [row for row, score in enumerate(gate) if score is not None and score >= least]
        if "log_metric" in columns and gate:
            columns["log_metric"](f"rewards/{reward.name}/gate_open", len(rows) / len(gate))
        return await _scores_of(reward, rows, columns, self.otherwise)


@dataclass(frozen=True)
class _Routed(Composed):
    """Reward that is called for the rows whose columns have given values."""

    only_for: dict[str, list[Any]]

    @property
    def reads(self) -> tuple[str, ...]:
        """Names of the arguments that the part and ``only_for`` require."""
        return (*super().reads, *self.only_for)

    def check_columns(self, names: Iterable[str]) -> None:
        """Check that a dataset has the columns that the part and ``only_for`` read.

        Raises:
            RewardContractError: A column is missing.
        """
        super().check_columns(names)
        self._check_only_for(names)

    def _check_only_for(self, names: Iterable[str]) -> None:
        for column in self.only_for.keys() - set(names):
            raise RewardContractError(
                f"reward {self.__name__!r} is only for some values of {format_name(column)}, but "
                f"the dataset has no column {format_value(column)}; add the column, or drop "
                "only_for"
            )

    async def scores(self, columns: dict[str, Any]) -> list[Score]:
        """Call the reward for the chosen rows; the others get None."""
        self._check_only_for(columns)
        rows = [
            row
            for row in range(len(columns["completions"]))
            if all(columns[column][row] in values for column, values in self.only_for.items())
        ]
        return await _scores_of(self.parts[0], rows, columns, None)


@dataclass(frozen=True)
class _Rescaled(Composed):
    """Reward whose scores are multiplied by ``scale`` and clipped to [``low``, ``high``]."""

    scale: float
    low: float
    high: float

    async def scores(self, columns: dict[str, Any]) -> list[Score]:
        """Call the reward, then scale and clip its scores."""
        found = await _call(self.parts[0], columns)
        return [
            None if score is None else min(max(score * self.scale, self.low), self.high)
            for score in found
        ]


async def _scores_of(
    reward: CheckedReward, rows: list[int], columns: dict[str, Any], other: Score
) -> list[Score]:
    """Call the reward for the given rows, and return the scores of all rows.

    All other rows get the score ``other``, and None in the columns that the reward logs with
    ``log_extra``.
    """
    count = len(columns["completions"])

    def filled(values: Iterable[Any], other: Score) -> list[Any]:
        by_row = dict(zip(rows, values, strict=True))
        return [by_row.get(row, other) for row in range(count)]

    if not rows:
        return [other] * count
    chosen = take_rows(columns, rows)
    if "log_extra" in columns:
        log = columns["log_extra"]
        chosen["log_extra"] = lambda column, values: log(column, filled(values, None))
    return filled(await _call(reward, chosen), other)


async def _call(reward: CheckedReward, columns: dict[str, Any]) -> list[Score]:
    found: Any = reward(**columns)
    return await found if isinstance(reward, AsyncCheckedReward) else found
