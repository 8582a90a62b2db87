"""Repetition: a penalty for n-grams that come again."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

from rloo_kit.errors import RewardContractError
from rloo_kit.types import Completion, Score

from ._text import check_choice, check_least, completion_text

Unit = Literal["tokens", "words"]


@dataclass(frozen=True)
class Repetition:
    """Penalise n-grams that come again in a completion, the thought included.

    Range: [max_penalty, 0.0], higher is better. The score is ``max_penalty`` times the share of
    repeated n-grams, 1 - distinct / all; a completion shorter than one n-gram scores 0.0.

    Source: Yeo et al. 2025 (arXiv 2502.03373, appendix C.2), in the form of one score per
    completion, which open-r1 (words) and TRL (tokens) gave it.

    >>> Repetition(ngram_size=2)(completions=[""] * 2, completion_ids=[[1, 2, 3, 4], [5] * 5])
    [0.0, -0.75]
    >>> Repetition(ngram_size=1, unit="words")(completions=["The cat, the dog, the end"])
    [-0.3333333333333333]
    """

    __name__: ClassVar[str] = "repetition"

    ngram_size: int = 3
    """Units in an n-gram."""
    max_penalty: float = -1.0
    """What a completion that does nothing but repeat itself comes near to; 0 or less."""
    unit: Unit = "tokens"
    """``tokens``: the completion's token ids, in any language. ``words``: lower-cased runs of
    characters between white space, which says nothing about languages that write none."""

    def __post_init__(self) -> None:
        """Refuse empty n-grams, a positive penalty and another unit."""
        check_least("ngram_size", self.ngram_size, 1)
        if not (self.max_penalty <= 0 and math.isfinite(self.max_penalty)):
            raise ValueError(
                f"max_penalty is {self.max_penalty!r}; give a finite number of 0 or less"
            )
        check_choice("unit", self.unit, get_args(Unit))

    def __call__(
        self,
        completions: list[Completion],
        completion_ids: list[list[int]] | None = None,
        **_: object,
    ) -> list[Score]:
        """Return one score per completion."""
        if self.unit == "words":
            words = [completion_text(completion).lower().split() for completion in completions]
            return [self._score(units) for units in words]
        if completion_ids is None:
            raise RewardContractError(
                f"reward {self.__name__!r} counts tokens, and completion_ids is not there; pass "
                "it, or set unit to 'words'"
            )
        return [self._score(ids) for _text, ids in zip(completions, completion_ids, strict=True)]

    def _score(self, units: Sequence[object]) -> float:
        total = len(units) - self.ngram_size + 1
        if total < 1:
            return 0.0
        distinct = len(set(zip(*(units[i:] for i in range(self.ngram_size)), strict=False)))
        return self.max_penalty * (total - distinct) / total if distinct < total else 0.0


# The reward with its defaults
repetition = Repetition()
