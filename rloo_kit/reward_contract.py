"""A reward that keeps the contract: called with the keywords it takes, its scores verified."""

import functools
import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rloo_kit.errors import KitError, RewardContractError
from rloo_kit.types import Completion, Score

_MAX_COMPLETION_CHARACTERS = 200


@dataclass(frozen=True)
class CheckedReward:
    """A reward called with the keywords it accepts, whose scores are verified at every call."""

    reward: Callable[..., Any]
    name: str
    accepted: frozenset[str] | None
    """Keywords it takes; None: all of them."""
    required: tuple[str, ...]
    """Keywords it cannot be called without."""

    @property
    def __name__(self) -> str:
        """The name of the metric."""
        return self.name

    def __call__(self, **columns: Any) -> list[Score]:
        """Return B scores, each a finite float or None.

        Raises:
            RewardContractError: The reward raised, lacks a column, or broke the contract.
        """
        keywords = self._select(columns)
        try:
            output = self.reward(**keywords)
        except KitError:  # it already says what to change
            raise
        except Exception as exc:
            raise self._attributed(exc) from exc
        return self._scores(output, columns["completions"])

    def release(self) -> None:
        """Release what the reward holds, such as a reward model's memory."""
        if hasattr(self.reward, "release"):
            self.reward.release()

    def _select(self, columns: dict[str, Any]) -> dict[str, Any]:
        missing = [name for name in self.required if name not in columns]
        if missing:
            raise RewardContractError(
                f"reward {self.name!r} asks for {', '.join(map(repr, missing))}, which the "
                "dataset lacks; add the column, or give the parameter a default "
                f"(there are: {', '.join(sorted(columns))})"
            )
        if self.accepted is None:
            return columns
        return {name: value for name, value in columns.items() if name in self.accepted}

    def _attributed(self, exc: Exception) -> RewardContractError:
        return RewardContractError(
            f"reward {self.name!r} raised {type(exc).__name__}: {exc}; correct it, or return None "
            "for a row it cannot score"
        )

    def _scores(self, output: Any, completions: Sequence[Completion]) -> list[Score]:
        values = output.tolist() if hasattr(output, "tolist") else output  # tensor, ndarray
        if not isinstance(values, list | tuple):
            raise RewardContractError(
                f"reward {self.name!r} returned a {type(output).__name__}; return a list of one "
                "float (or None) per completion, in order"
            )
        if len(values) != len(completions):
            raise RewardContractError(
                f"reward {self.name!r} returned {len(values)} scores for {len(completions)} "
                "completions; return one float (or None) per completion, in order"
            )
        pairs = enumerate(zip(values, completions, strict=True))
        return [self._score(value, row, completion) for row, (value, completion) in pairs]

    def _score(self, value: Any, row: int, completion: Completion) -> Score:
        if value is None:
            return None
        number = value.item() if getattr(value, "ndim", None) == 0 else value
        if isinstance(number, int | float) and math.isfinite(number):  # bool is an int: 0 or 1
            return float(number)
        raise RewardContractError(
            f"reward {self.name!r} returned {_shortened(repr(value))} in row {row}; return a "
            f"finite float, or None where it does not apply (completion: {_excerpt(completion)})"
        )


class AsyncCheckedReward(CheckedReward):
    """A checked reward whose call is awaited; TRL runs all of these at the same time."""

    async def __call__(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, **columns: Any
    ) -> list[Score]:
        """Return B scores; as in the base class."""
        keywords = self._select(columns)
        try:
            output = await self.reward(**keywords)
        except KitError:  # it already says what to change
            raise
        except Exception as exc:
            raise self._attributed(exc) from exc
        return self._scores(output, columns["completions"])


def checked(func: Callable[..., Any], name: str | None = None) -> CheckedReward:
    """Return the reward wrapped so that its call and its scores are verified.

    The wrapper has the reward's name, awaits an async reward, passes only the keywords the reward
    accepts (``def f(completions, prompts=None)`` works), and pickles if the reward does.

    >>> def polite(completions):
    ...     return ["please" in text for text in completions]
    >>> checked(polite)(completions=["please", "now"], prompts=["a", "b"])
    [1.0, 0.0]

    Args:
        func: The reward.
        name: Name of its metric; None: its own.
    """
    if isinstance(func, CheckedReward):
        return replace(func, name=name or func.name)
    accepted, takes_any, required = keywords_of(func)
    return (AsyncCheckedReward if _is_async(func) else CheckedReward)(
        reward=func,
        name=name or name_of(func),
        accepted=None if takes_any else frozenset(accepted),
        required=tuple(required),
    )


def _is_async(func: Any) -> bool:
    """Return whether a call gives a coroutine, for functions, partials and callable objects."""
    while isinstance(func, functools.partial):
        func = func.func
    return inspect.iscoroutinefunction(func) or inspect.iscoroutinefunction(func.__call__)


def _excerpt(completion: Completion) -> str:
    if not isinstance(completion, str):
        completion = str(completion[-1].get("content")) if completion else ""
    return _shortened(repr(completion))


def _shortened(text: str) -> str:
    if len(text) <= _MAX_COMPLETION_CHARACTERS:
        return text
    return f"{text[: _MAX_COMPLETION_CHARACTERS - 3]}..."


def keywords_of(func: Any) -> tuple[list[str], bool, list[str]]:
    """Return (names accepted by keyword, whether any keyword is accepted, the required names)."""
    try:
        parameters = inspect.signature(func).parameters.values()
    except (TypeError, ValueError):  # some callables of C extensions have no signature
        return [], True, []
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    names = [p.name for p in parameters if p.kind in by_name]
    required = [p.name for p in parameters if p.kind in by_name and p.default is p.empty]
    return names, any(p.kind is p.VAR_KEYWORD for p in parameters), required


def name_of(func: Any) -> str:
    """Return the name of a reward's metric."""
    while isinstance(func, functools.partial):
        func = func.func
    return getattr(func, "__name__", type(func).__name__)
