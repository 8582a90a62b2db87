"""Accuracy: what follows the thought is the expected answer, as text or as a number."""

import re
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import TYPE_CHECKING, Any, ClassVar

from rloo_kit.errors import RewardContractError
from rloo_kit.types import Completion, Score

from ._text import (
    completion_text,
    is_opened_in_prompt,
    is_unclosed,
    template_opens_thought,
    text_after_thought,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Answer = str | int | float | None

# A sign, digits (whole, or in groups of three), a decimal part, an exponent, a full stop.
_NUMBER = re.compile(
    r"(?P<number>[+-]?(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]{1,3})?)\.?"
)


def parse_number(text: str) -> Decimal | None:
    """Return the number that the whole text is, exactly, or None.

    Accepted, and nothing else: an optional sign, digits with or without correct thousands
    separators, a decimal part, an exponent, one full stop at the end. Not accepted: currency and
    percent signs, units, fractions, ``.5``.

    >>> parse_number("1,234.50."), parse_number("$5"), parse_number("12,34")
    (Decimal('1234.50'), None, None)
    """
    match = _NUMBER.fullmatch(text.strip())
    return Decimal(match["number"].replace(",", "")) if match else None


@dataclass(frozen=True)
class Accuracy:
    """Reward the expected answer: 1.0 if it is given, 0.0 if not.

    The answer given is all that follows the last ``</think>``, white space at its ends aside. It
    is right if it equals the expected text, or if both are numbers of the same value (see
    ``parse_number``): 85 equals 85.0, and 1,234 equals 1234. None where the expected answer is
    missing (None, NaN or blank). Cutting the thought off needs ``</think>`` in the decoded text,
    so a tokenizer that calls it special (Qwen3's does not) scores 0.0 throughout.

    >>> Accuracy()(completions=["2+2...</think>4", "5"], answer=[4, "4"])
    [1.0, 0.0]
    >>> Accuracy(column="total")(completions=["1,234."], total=[1234.0])
    [1.0]
    >>> Accuracy()(completions=["17"], prompts=["8 + 9 = <think>"], answer=["17"])
    [0.0]
    """

    __name__: ClassVar[str] = "accuracy"

    column: str = "answer"
    """Dataset column of the expected answers."""
    require_closed_thought: bool = True
    """Score 0.0 for a thought that was opened, in the prompt or the completion, and not closed."""
    thought_opened: bool | None = None
    """Whether the chat template of conversational prompts ends with an opened ``<think>``; None:
    set by ``bind``, and taken for False in a reward never bound. A plain prompt is read itself."""

    def bind(self, tokenizer: "PreTrainedTokenizerBase") -> "Accuracy":
        """Return this reward knowing whether the tokenizer's chat template opens the thought."""
        if self.thought_opened is not None:
            return self
        return replace(self, thought_opened=template_opens_thought(tokenizer))

    def __call__(
        self,
        completions: list[Completion],
        prompts: list[Completion] | None = None,
        **columns: Any,
    ) -> list[Score]:
        """Return one score per completion, in {0.0, 1.0}, or None without an expected answer.

        Args:
            completions: B completions, conversational or plain.
            prompts: B prompts, conversational or plain.
            **columns: Other columns of B values; the one named ``column`` holds the answers.

        Raises:
            RewardContractError: The answer column is not there.
        """
        if self.column not in columns:
            raise RewardContractError(
                f"reward {self.__name__!r} needs the dataset column {self.column!r}, which is not "
                "there; add it, or name another one with the parameter 'column'"
            )
        asked: list[Completion] = [""] * len(completions) if prompts is None else prompts
        return [
            self._score(completion_text(completion), prompt, answer)
            for completion, prompt, answer in zip(
                completions, asked, columns[self.column], strict=True
            )
        ]

    def _score(self, text: str, prompt: Completion, answer: Answer) -> Score:
        expected = _expected(answer)
        if expected is None:
            return None
        opened = is_opened_in_prompt(prompt, self.thought_opened)
        if self.require_closed_thought and is_unclosed(text, opened=opened):
            return 0.0
        return 1.0 if _is_same(text_after_thought(text).strip(), expected) else 0.0


def _expected(answer: Answer) -> str | None:
    """Return the expected answer as text; None where it is missing (None, NaN or blank)."""
    if answer is None or answer != answer:  # only NaN differs from itself
        return None
    return str(answer).strip() or None


def _is_same(given: str, expected: str) -> bool:
    if given == expected:
        return True
    number = parse_number(expected)
    return number is not None and parse_number(given) == number


accuracy = Accuracy()
"""The reward with its defaults."""
