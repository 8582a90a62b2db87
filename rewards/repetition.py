"""Penalty for repeated n-grams."""

import math
from dataclasses import dataclass
from itertools import chain
from typing import Literal

from ._text import check_choices, check_least, n_grams
from .thinking import TokenReward


@dataclass(frozen=True)
class Repetition(TokenReward):
    """Penalise n-grams that are repeated in a completion, including its thought.

    Range: [max_penalty, 0.0], higher is better. The score is ``max_penalty`` times the share of
    repeated n-grams, which is 1 - distinct / all. A completion shorter than one n-gram scores 0.0.

    Source: Yeo et al. 2025 (arXiv 2502.03373, appendix C.2), who penalise each repeated token by
    itself. This reward instead gives one score to the whole completion, as the repetition rewards
    of open-r1 (for words) and TRL (for tokens) do.

    >>> Repetition(ngram_size=2)(completions=[""] * 2, completion_ids=[[1, 2, 3, 4], [5] * 5])
    [0.0, -0.75]
    >>> Repetition(ngram_size=1, unit="words")(completions=["The cat, the dog, the end"])
    [-0.3333333333333333]
    """

    __name__ = "repetition"

    ngram_size: int = 3
    """Number of units (tokens or words) in an n-gram."""
    max_penalty: float = -1.0
    """Lower limit of the score, 0 or less. The score of a completion that only repeats itself comes
    close to it."""
    unit: Literal["tokens", "words"] = "tokens"
    """Unit of the n-grams. ``tokens``: token ids, for any language. ``words``: words separated by
    white space, in lower case."""

    def __post_init__(self) -> None:
        """Check the size of the n-grams, the penalty and the unit."""
        check_least(self, "ngram_size", 1)
        if not -math.inf < self.max_penalty <= 0:
            raise ValueError(
                f"max_penalty is {self.max_penalty!r}; give a finite number of 0 or less"
            )
        check_choices(self)

    def _score(self, text: str, opened: bool, turns: list[list[int]] | None = None) -> float:
        units = text.lower().split() if turns is None else [*chain(*turns)]
        found = n_grams(units, self.ngram_size)
        repeated = len(found) - len(set(found))
        return self.max_penalty * repeated / len(found) if repeated else 0.0


# The reward with its defaults
repetition = Repetition()
