"""Rewards for the thought (its form, length and questions), and base classes of other rewards."""

import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, Self

from rloo_kit.errors import RewardLoadError
from rloo_kit.text.thoughts import Mark, ThoughtMarks, opens_thought, thought_marks, token_id
from rloo_kit.types import Completion, Completions, Score, Scores, Tokenizer

from ._text import (
    THINK_CLOSE,
    THINK_OPEN,
    check_least,
    check_order,
    column_of,
    completion_text,
    is_unclosed,
    template_opens_thought,
    text_after_thought,
    thought_text,
)

QWEN3_THINK_OPEN_ID = 151667
QWEN3_THINK_CLOSE_ID = 151668

Part = Literal["completion", "thought", "answer"]


def end_of_thinking_id(tokenizer: Tokenizer) -> int | None:
    """Return the token id of ``</think>`` in the tokenizer's vocabulary (Qwen3: 151668).

    Return None if the vocabulary has no single token for it. The id from another model family is
    never used instead, since in this vocabulary it would stand for an ordinary word.
    """
    return token_id(tokenizer, THINK_CLOSE)


def part_text(text: str, part: Part, *, opened: bool) -> str | None:
    """Return one part of a completion, or None if there is no such part.

    The thought ends at the first ``</think>``, and is None if there is no ``</think>``. The answer
    begins after the last ``</think>``. It is None if the completion ends inside a thought, and the
    whole text if there is no thought. The whole completion is never None.

    Args:
        text: Text of the completion.
        part: ``completion``, ``thought`` or ``answer``.
        opened: Whether the prompt ends with an opening ``<think>``.
    """
    if part == "completion":
        return text
    if part == "thought":
        return thought_text(text)
    return None if is_unclosed(text, opened=opened) else text_after_thought(text)


class Rows:
    """Base class of rewards that read the values of a batch row by row.

    A subclass that reads a column has a parameter ``column``, or sets ``_reads``.
    """

    __name__: ClassVar[str]
    _reads: ClassVar[tuple[str, ...]] = ()

    @property
    def reads(self) -> tuple[str, ...]:
        """Names of the dataset's columns, or of other arguments, that the reward reads."""
        column = getattr(self, "column", None)
        return self._reads if column is None else (column,)

    def opened(self, completions: Completions, prompts: Completions | None) -> Iterable[bool]:
        """Return for each row whether its prompt opens the thought.

        This base class does not read the prompts and returns False for every row. The subclass
        ``TemplateAware`` reads them.
        """
        return [False] * len(completions)

    def rows(
        self, completions: Completions, prompts: Completions | None, *columns: list[Any]
    ) -> list[tuple[Any, ...]]:
        """Return one tuple for each completion: (text, whether the prompt opens the thought, ...).

        Any further items are the row's values in ``columns``.
        """
        opened = self.opened(completions, prompts)
        return list(zip(map(completion_text, completions), opened, *columns, strict=True))


@dataclass(frozen=True, kw_only=True)
class Bound:
    """Base class of rewards that can use the policy's tokenizer, which ``bind`` sets."""

    __name__: ClassVar[str]
    _tokenizer: Tokenizer | None = field(default=None, repr=False, compare=False)

    def bind(self, tokenizer: Tokenizer) -> Self:
        """Return a copy of this reward that uses a tokenizer."""
        return replace(self, _tokenizer=tokenizer)


@dataclass(frozen=True, kw_only=True)
class TemplateAware(Bound, Rows):
    """Base class of rewards that must know whether the prompt opens the thought.

    Without this knowledge, an unfinished thought would look like an answer.
    """

    thought_opened: bool | None = None
    """Whether the chat template ends a prompt with an opening ``<think>``. None: ``bind`` finds it
    out from the tokenizer; a reward that is not bound assumes False. For a plain prompt, the text
    of the prompt decides instead."""

    def bind(self, tokenizer: Tokenizer) -> Self:
        """Return a copy of this reward for a tokenizer.

        If ``thought_opened`` is None, the tokenizer's chat template decides it.
        """
        opened = self.thought_opened
        if opened is None:
            opened = template_opens_thought(tokenizer)
        return replace(super().bind(tokenizer), thought_opened=opened)

    def opened(self, completions: Completions, prompts: Completions | None) -> Iterable[bool]:
        """Return for each row whether its prompt ends with an opening ``<think>``."""
        if prompts is None:
            return super().opened(completions, prompts)
        return map(self.is_opened, prompts)

    def is_opened(self, prompt: Completion) -> bool:
        """Return whether a prompt ends with an opening ``<think>``."""
        if not isinstance(prompt, str):
            return bool(self.thought_opened)
        return opens_thought(self._tokenizer, prompt)


class RowReward(Rows):
    """Base class of rewards that score each row by itself.

    A subclass defines ``_score``, which gets a row (see ``rows``) with the values of the columns in
    ``reads``.
    """

    _score: Callable[..., Score]

    def __call__(
        self, completions: Completions, prompts: Completions | None = None, **columns: Any
    ) -> Scores:
        """Return one score per completion; None for a row to which the reward does not apply."""
        columns["prompts"] = prompts
        read = [column_of(columns, name, self.__name__) for name in self.reads]
        return [self._score(*row) for row in self.rows(completions, prompts, *read)]


class TextReward(RowReward, TemplateAware):
    """Base class of rewards that score each row from its text and its values in columns."""


@dataclass(frozen=True, kw_only=True)
class AnswerReward(TemplateAware):
    """Base class of rewards for the answer, the text after the thought."""

    require_closed_thought: bool = True
    """Score 0.0 if a thought is opened, in the prompt or in the completion, but not closed."""

    def answer(self, text: str, opened: bool) -> str | None:
        """Return the text after the thought.

        Return None if ``require_closed_thought`` is set and the thought is not closed.

        Args:
            text: Text of the completion.
            opened: Whether the prompt ends with an opening ``<think>``.
        """
        if self.require_closed_thought and is_unclosed(text, opened=opened):
            return None
        return text_after_thought(text)


@dataclass(frozen=True, kw_only=True)
class ThoughtTokens(Bound):
    """Base class of rewards that find the thought by token ids instead of by text."""

    end_token_id: int | None = None
    """Id of the token that closes a thought. None: ``bind`` takes it from the tokenizer; a reward
    that is not bound uses Qwen3's 151668 (``</think>``)."""
    start_token_id: int | None = None
    """Id of the token that opens a thought. None: ``bind`` takes it from the tokenizer; a reward
    that is not bound uses Qwen3's 151667 (``<think>``) if the end token is Qwen3's."""

    def bind(self, tokenizer: Tokenizer) -> Self:
        """Return a copy of this reward that finds a thought by the tokenizer's marks.

        Token ids that are already set are kept.

        Raises:
            RewardLoadError: The tokenizer has no known mark, and ``end_token_id`` is None.
        """
        if self.end_token_id is None and thought_marks(tokenizer) is None:
            raise RewardLoadError(
                f"reward {self.__name__!r} looks for the end of a thought, and this tokenizer has "
                "no known mark for it: use a thinking model, give the model's marks in the run "
                "file as thinking: {start: ..., end: ...}, or give end_token_id"
            )
        return super().bind(tokenizer)

    @property
    def marks(self) -> ThoughtMarks:
        """Marks that open and close a thought.

        They are the tokens ``start_token_id`` and ``end_token_id``. If one of these is None, the
        mark is the model's own or, if the reward is not bound, Qwen3's.
        """
        start = self.start_token_id
        end = self.end_token_id
        own = thought_marks(self._tokenizer)
        if own is None:
            is_qwen3 = end in (None, QWEN3_THINK_CLOSE_ID)
            own = ThoughtMarks(
                Mark(THINK_OPEN, token=QWEN3_THINK_OPEN_ID if is_qwen3 else None),
                Mark(THINK_CLOSE, token=QWEN3_THINK_CLOSE_ID),
            )
        return ThoughtMarks(
            own.start if start is None else Mark(THINK_OPEN, token=start),
            own.end if end is None else Mark(THINK_CLOSE, token=end),
        )


class TokenReward(RowReward):
    """Base class of rewards that score each row from the token ids of each turn of the model.

    The last item of a row is a list with one list of token ids for each turn. Without tools, a
    completion is a single turn. If a subclass has a parameter ``unit`` and it is not ``tokens``,
    the reward reads no token ids.
    """

    _reads = ("completion_ids",)

    @property
    def reads(self) -> tuple[str, ...]:
        """Names of the arguments that the reward requires."""
        return super().reads if getattr(self, "unit", "tokens") == "tokens" else ()

    def __call__(  # pyright: ignore[reportIncompatibleMethodOverride] - ids before prompts
        self,
        completions: Completions,
        completion_ids: list[list[int]] | None = None,
        prompts: Completions | None = None,
        **columns: Any,
    ) -> Scores:
        """Return one score per completion; None for a row to which the reward does not apply."""
        if completion_ids is not None:
            turns = columns.get("completion_turns") or [[ids] for ids in completion_ids]
            columns["completion_ids"] = turns
        return super().__call__(completions, prompts, **columns)


@dataclass(frozen=True)
class Thinking(ThoughtTokens, TokenReward):
    """Reward a closed thought by its number of tokens.

    With the defaults, the score is -1.0 without ``</think>``, 0.3 for a thought of fewer than 10
    tokens, 0.7 for 10 to 29 tokens, and 1.0 for 30 tokens or more. A "?" in a thought of 10 tokens
    or more adds 0.1. Range with the defaults: [-1.0, 1.1], higher is better.

    The thought is every token before the first ``</think>``; a ``<think>`` at the beginning of the
    completion is not counted. With tools, the tokens of the thoughts of all turns are added up.

    The "?" is searched for in the decoded text before the first ``</think>`` (with tools, in the
    last message). If decoding drops ``</think>`` as a special token, no thought earns the bonus.
    Qwen3's tokenizer keeps ``</think>``.

    Source: the thinking reward of the notebook from which this kit was developed. One difference: a
    leading ``<think>`` is not counted.

    >>> reward = Thinking(end_token_id=9)
    >>> reward(completions=["never closed"], completion_ids=[[1, 2, 3]])
    [-1.0]
    >>> reward(completions=["hm</think>4", "?" * 30 + "</think>4"],
    ...        completion_ids=[[1, 9, 2], [*[3] * 30, 9, 2]])
    [0.3, 1.1]
    """

    __name__ = "thinking"

    short: int = 10
    """Fewest tokens of a thought of medium length."""
    long: int = 30
    """Fewest tokens of a long thought."""
    unclosed_score: float = -1.0
    """Score of a completion without ``</think>``."""
    short_score: float = 0.3
    """Score of a thought with fewer than ``short`` tokens."""
    medium_score: float = 0.7
    """Score of a thought with ``short`` to ``long - 1`` tokens."""
    long_score: float = 1.0
    """Score of a thought with ``long`` tokens or more."""
    question_bonus: float = 0.1
    """Added to the score of a thought with ``short`` tokens or more that contains a "?"."""

    def __post_init__(self) -> None:
        """Check that ``short`` is not greater than ``long``."""
        check_order(self, "short", "long")

    def _score(self, text: str, opened: bool, turns: list[list[int]]) -> float:
        thought = self.marks.thought_of(turns)
        if thought is None:
            return self.unclosed_score
        if len(thought) < self.short:
            return self.short_score
        score = self.medium_score if len(thought) < self.long else self.long_score
        return score + self.question_bonus if "?" in (thought_text(text) or "") else score


@dataclass(frozen=True)
class ClosedOnce(ThoughtTokens, TokenReward, TemplateAware):
    """Reward a thought that is closed exactly once: 1.0 if it is, 0.0 if not.

    Only token ids are read, not the decoded text. ``</think>`` must occur once in the completion.
    ``<think>`` may occur at most once in the prompt and the completion together, before
    ``</think>``. So a completion scores 0.0 if its thought is never closed or is closed more than
    once, or if it has a second thought. With tools, each turn is judged like a completion, and the
    score is 1.0 if all turns pass.

    >>> reward = ClosedOnce(start_token_id=8, end_token_id=9)
    >>> reward(completions=[""] * 4, completion_ids=[[1, 9, 2], [8, 1, 9, 2], [1, 9, 9], [1]])
    [1.0, 1.0, 0.0, 0.0]
    >>> reward(completions=[""] * 2, completion_ids=[[1, 9, 8, 2], [8, 1, 9]],
    ...        prompts=["2 + 2 = ", "2 + 2 = <think>"])
    [0.0, 0.0]
    """

    __name__ = "thinking_closed_once"

    def _score(self, text: str, opened: bool, turns: list[list[int]]) -> float:
        return float(all(self._is_once(opened, ids) for ids in turns))

    def _is_once(self, opened: bool, ids: Sequence[int]) -> bool:
        closes = self.marks.end.places(ids)
        opens = self.marks.start.places(ids)
        # The opening mark may be missing
        return len(closes) == 1 and opened + len(opens) <= 1 and opens[:1] < closes


@dataclass(frozen=True)
class ThinkingBudget(ThoughtTokens, TokenReward):
    """Reward a thought that stays within a budget of tokens: 1.0 up to the budget, then less.

    Range with the defaults: [0.0, 1.0], higher is better. The tokens of the thought are those
    before the first ``</think>``, without a leading ``<think>``, as in the reward ``thinking``.
    From ``budget`` to ``limit``, the score falls along half a cosine from 1.0 to 0.0. The curve is
    smooth, so that two thoughts of nearly equal length get nearly equal scores. Yeo et al. 2025
    (arXiv 2502.03373) scale rewards by length with the same curve.

    >>> reward = ThinkingBudget(budget=2, limit=6, end_token_id=9)
    >>> reward(completions=[""] * 4, completion_ids=[[1] * n + [9] for n in (2, 3, 4, 6)])
    [1.0, 0.8535533905932737, 0.5, 0.0]
    >>> reward(completions=["hm"], completion_ids=[[1]])
    [0.0]
    """

    __name__ = "thinking_budget"

    budget: int = 512
    """Most tokens of a thought that scores 1.0."""
    limit: int = 1024
    """Fewest tokens of a thought that scores 0.0. Keep it below the trainer's
    max_completion_length, or no thought reaches it."""
    unclosed_score: float = 0.0
    """Score of a completion without ``</think>``."""

    def __post_init__(self) -> None:
        """Check that the budget is not negative and the limit is greater than the budget."""
        if not 0 <= self.budget < self.limit:
            raise ValueError(
                f"budget {self.budget!r} and limit {self.limit!r} are not in order; "
                "set 0 <= budget < limit (tokens)"
            )

    def _score(self, text: str, opened: bool, turns: list[list[int]]) -> float:
        thought = self.marks.thought_of(turns)
        if thought is None:
            return self.unclosed_score
        # Half a cosine from 1 at the budget to 0 at the limit.
        way = (len(thought) - self.budget) / (self.limit - self.budget)
        return (1.0 + math.cos(math.pi * min(max(way, 0.0), 1.0))) / 2.0


# Question marks of Latin, of Chinese and Japanese, and of Arabic script.
_QUESTION_MARK = re.compile("[?\uff1f\u061f]")
# White space must follow a full stop, so that "3.5" is not split.
_SENTENCE_END = re.compile(r"[.!]\s|[\u3002\uff01\n]")


@dataclass(frozen=True)
class SelfQuestions(ThoughtTokens, TokenReward):
    """Reward the number of different questions in a thought, up to ``most`` questions.

    Range: [0.0, 1.0], higher is better. The score is the number of questions divided by ``most``,
    but never above 1.0. A question is a sentence of the thought that ends with a question mark and
    contains a letter. A repeated question counts only once. A completion without the token
    ``</think>`` scores 0.0.

    Questions are searched for in the decoded text before the first ``</think>``. If decoding drops
    ``</think>`` as a special token, no question is found. Qwen3's tokenizer keeps ``</think>``.

    >>> reward = SelfQuestions(most=2, end_token_id=9)
    >>> texts = ["Is it 3.5? Yes.</think>", "Why? Why? How so?</think>", "Hm? Hm??</think>", "Why?"]
    >>> reward(completions=texts, completion_ids=[[1, 9], [1, 9], [1, 9], [1]])
    [0.5, 1.0, 0.5, 0.0]
    """

    __name__ = "thinking_questions"

    most: int = 3
    """Number of questions that scores 1.0; more questions do not raise the score."""

    def __post_init__(self) -> None:
        """Check that ``most`` is at least 1."""
        check_least(self, "most", 1)

    def _score(self, text: str, opened: bool, turns: list[list[int]]) -> float:
        if self.marks.thought_of(turns) is None:
            return 0.0
        return min(len(_questions(thought_text(text) or "")), self.most) / self.most


def _questions(text: str) -> set[str]:
    """Return the different questions in a text; case and white space make no difference."""
    sentences = (_SENTENCE_END.split(asked)[-1] for asked in _QUESTION_MARK.split(text)[:-1])
    return {
        " ".join(sentence.casefold().split())
        for sentence in sentences
        if any(character.isalpha() for character in sentence)
    }


@dataclass(frozen=True)
class ThinkingFormat(TextReward):
    """Reward one thought, opened and closed once, with an answer after it: 1.0 if so, else 0.0.

    The thought is opened if ``<think>`` ends the prompt and is not in the completion, or if it
    begins the completion (after white space) and occurs nowhere else. For a conversation, the chat
    template decides whether ``<think>`` ends the prompt; ``bind`` finds this out. The thought is
    closed once if ``</think>`` occurs exactly once. The answer is the text after ``</think>``, and
    must not be blank. With ``partial``, the score is a third for each of the three conditions
    (opened, closed once, answered) that is met.

    Only the decoded text is read. A ``</think>`` that is spelled with several tokens therefore
    counts too, unlike in ``thinking_closed_once``.

    >>> reward = ThinkingFormat()
    >>> reward(completions=["<think>hm</think>4", "hm</think>4"], prompts=["2+2", "2+2 <think>"])
    [1.0, 1.0]
    >>> reward(completions=["hm</think>4", "<think>hm</think>"], prompts=["2+2", "2+2"])
    [0.0, 0.0]
    >>> ThinkingFormat(thought_opened=True, partial=True)(
    ...     completions=["hm", "hm</think>", "hm</think>4"], prompts=[[], [], []])
    [0.3333333333333333, 0.6666666666666666, 1.0]
    """

    __name__ = "thinking_format"

    partial: bool = False
    """Score the share of the three conditions that are met: opened, closed once, answered."""

    def _score(self, text: str, opened: bool) -> float:
        _, close, answer = text.rpartition(THINK_CLOSE)
        opens = text.count(THINK_OPEN)
        begins = text.lstrip().startswith(THINK_OPEN)
        is_opened = opens == 0 if opened else opens == 1 and begins
        is_closed = text.count(THINK_CLOSE) == 1
        is_answered = bool(close and answer.strip())
        held = is_opened + is_closed + is_answered
        return held / 3 if self.partial else float(held == 3)


# The rewards with their defaults
thinking = Thinking()
thinking_format = ThinkingFormat()
