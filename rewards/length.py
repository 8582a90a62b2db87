"""Length: a medium number of words, ended by a full stop."""

from dataclasses import dataclass
from typing import ClassVar

from rloo_kit.types import Completion, Score

from ._text import completion_text


@dataclass(frozen=True)
class Length:
    """Reward a completion of a medium number of words, and one that ends with a full stop.

    Range with the defaults: [-0.5, 1.5], higher is better. Words are runs of characters between
    white space, and a thought counts as part of the completion. Source: the length reward of the
    notebook this kit grew from, unchanged.

    >>> Length()(completions=["Too short.", "one two three four five six seven eight nine ten."])
    [0.0, 1.5]
    >>> Length(min_words=2)(completions=["Just right."])
    [1.5]
    """

    __name__: ClassVar[str] = "length"

    min_words: int = 10
    """Fewest words of a medium length."""
    max_words: int = 50
    """Most words of a medium length."""
    medium: float = 1.0
    """Score from ``min_words`` to ``max_words`` words, both included."""
    too_short: float = -0.5
    """Score below ``min_words`` words; above ``max_words`` the score is 0."""
    full_stop: float = 0.5
    """Added where the last character, white space aside, is a full stop."""

    def __post_init__(self) -> None:
        """Refuse an empty range."""
        if not 0 <= self.min_words <= self.max_words:
            raise ValueError(
                f"min_words {self.min_words!r} and max_words {self.max_words!r} leave no length; "
                "set 0 <= min_words <= max_words"
            )

    def __call__(self, completions: list[Completion], **_: object) -> list[Score]:
        """Return one score per completion.

        Args:
            completions: B completions, conversational or plain.
        """
        return [self._score(completion_text(completion)) for completion in completions]

    def _score(self, text: str) -> float:
        num_words = len(text.split())
        score = 0.0
        if num_words < self.min_words:
            score = self.too_short
        elif num_words <= self.max_words:
            score = self.medium
        return score + self.full_stop if text.rstrip().endswith(".") else score


length = Length()
"""The reward with its defaults."""
