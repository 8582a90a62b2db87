"""Rewards of the thought: its form, its length in tokens, its questions; bases of other rewards."""

import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, Self

from rloo_kit.errors import RewardLoadError
from rloo_kit.text.thoughts import Mark, ThoughtMarks, opens_thought, thought_marks, token_id
from rloo_kit.types import Completion, Completions, Score, Scores, Tokenizer, Turns

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
    """Return the id of ``</think>`` in the tokenizer's vocabulary (151668 in Qwen3's).

    None if the vocabulary has no single token for it. There is no guess, since the id of another
    family would stand for an ordinary word.
    """
    return token_id(tokenizer, THINK_CLOSE)


def part_text(text: str, part: Part, *, opened: bool) -> str | None:
    """Return one part of a completion; None if an open thought leaves it unfinished.

    The thought ends at the first ``</think>``, the answer begins after the last one.
    """
    if part == "completion":
        return text
    if part == "thought":
        return thought_text(text)
    return None if is_unclosed(text, opened=opened) else text_after_thought(text)


@dataclass(frozen=True, kw_only=True)
class Bound:
    """A reward that may read a tokenizer, which ``bind`` gives it."""

    __name__: ClassVar[str]
    _tokenizer: Tokenizer | None = field(default=None, repr=False, compare=False)

    def bind(self, tokenizer: Tokenizer) -> Self:
        """Return this reward for a tokenizer."""
        return replace(self, _tokenizer=tokenizer)


@dataclass(frozen=True, kw_only=True)
class TemplateAware(Bound):
    """A reward that tells an unfinished thought from an answer, by who opened the thought."""

    thought_opened: bool | None = None
    """Whether the chat template of conversational prompts ends with an open ``<think>``; None:
    ``bind`` sets it, and it is False in a reward that is never bound. Plain prompts are read."""

    def bind(self, tokenizer: Tokenizer) -> Self:
        """Return this reward with ``thought_opened`` as the tokenizer's chat template has it."""
        opened = self.thought_opened
        if opened is None:
            opened = template_opens_thought(tokenizer)
        return replace(super().bind(tokenizer), thought_opened=opened)

    def check_columns(self, names: Iterable[str]) -> None:
        """Check that a dataset with these columns has the one that the reward reads.

        Raises:
            RewardContractError: The column is missing.
        """
        column = getattr(self, "column", None)
        if column is not None:
            column_of(dict.fromkeys(names), column, self.__name__)

    def is_opened(self, prompt: Completion) -> bool:
        """Return whether the thought was opened in the prompt."""
        if not isinstance(prompt, str):
            return bool(self.thought_opened)
        return opens_thought(self._tokenizer, prompt)

    def rows(
        self, completions: Completions, prompts: Completions | None, *columns: list[Any]
    ) -> list[tuple[Any, ...]]:
        """Return B rows: a text, whether the prompt opened its thought, the values of columns."""
        opened = [False] * len(completions) if prompts is None else map(self.is_opened, prompts)
        return list(zip(map(completion_text, completions), opened, *columns, strict=True))


class TextReward(TemplateAware):
    """A reward that scores each row alone, by its text and the value in its column, if any."""

    _score: Callable[..., Score]

    def __call__(
        self,
        completions: Completions,
        prompts: Completions | None = None,
        **columns: Any,
    ) -> Scores:
        """Return one score per completion; None for a row to which the reward does not apply."""
        column = getattr(self, "column", None)
        read = [] if column is None else [column_of(columns, column, self.__name__)]
        return [self._score(*row) for row in self.rows(completions, prompts, *read)]


@dataclass(frozen=True, kw_only=True)
class AnswerReward(TemplateAware):
    """A reward of the answer, which an open thought leaves unfinished."""

    require_closed_thought: bool = True
    """Score 0.0 for a thought that was opened, in the prompt or the completion, and not closed."""

    def answer(self, text: str, opened: bool) -> str | None:
        """Return the text after the thought; None if the thought has to be closed and is not."""
        if self.require_closed_thought and is_unclosed(text, opened=opened):
            return None
        return text_after_thought(text)


@dataclass(frozen=True, kw_only=True)
class ThoughtTokens(Bound):
    """A reward that finds the thought among the token ids."""

    end_token_id: int | None = None
    """Id of the token that closes a thought; None: the model's own, which ``bind`` finds, and
    Qwen3's 151668 (``</think>``) in a reward that is never bound."""
    start_token_id: int | None = None
    """Id of the token that opens a thought; None: the model's own, and 151667 if the end is
    Qwen3's."""

    def bind(self, tokenizer: Tokenizer) -> Self:
        """Return this reward with the marks of a tokenizer; ids given by hand are kept.

        Raises:
            RewardLoadError: The tokenizer has no known mark, and ``end_token_id`` is None.
        """
        marks = thought_marks(tokenizer)
        end = self.end_token_id
        start = self.start_token_id
        if marks is not None:
            end = marks.end.token if end is None else end
            start = marks.start.token if start is None else start
        elif end is None:
            raise RewardLoadError(
                f"reward {self.__name__!r} looks for the end of a thought, and this tokenizer has "
                "no known mark for it: use a thinking model, give its marks as thinking: "
                "{start: ..., end: ...} in the run file, or give end_token_id"
            )
        return replace(super().bind(tokenizer), end_token_id=end, start_token_id=start)

    @property
    def marks(self) -> ThoughtMarks:
        """The marks of thoughts, by the ids or else by the text of the model's own marks."""
        own = thought_marks(self._tokenizer)
        if own is not None and self.end_token_id == own.end.token:
            return own
        end = QWEN3_THINK_CLOSE_ID if self.end_token_id is None else self.end_token_id
        start = self.start_token_id
        if start is None and end == QWEN3_THINK_CLOSE_ID:
            start = QWEN3_THINK_OPEN_ID
        return ThoughtMarks(Mark(THINK_OPEN, token=start), Mark(THINK_CLOSE, token=end))


class TokenReward:
    """A reward that scores a completion by its text and the token ids of its turns."""

    _score: Callable[[str, list[list[int]]], float]

    def __call__(
        self,
        completions: Completions,
        completion_ids: list[list[int]],
        completion_turns: Turns | None = None,
        **_: object,
    ) -> Scores:
        """Return one score per completion; without tools it has one turn, ``completion_ids``."""
        texts = map(completion_text, completions)
        turns = completion_turns or [[ids] for ids in completion_ids]
        return [self._score(*row) for row in zip(texts, turns, strict=True)]


@dataclass(frozen=True)
class Thinking(ThoughtTokens, TokenReward):
    """Reward a closed thought by its number of tokens.

    The thought is every token before the first ``</think>``; a ``<think>`` that begins the
    completion is not counted. With tools the thoughts of all turns count together. Range with the
    defaults: [-1.0, 1.1], higher is better.

    A "?" in the text before ``</think>`` earns a bonus in the two longer bands, unless the decoded
    text lost ``</think>`` (a tokenizer that calls it special; Qwen3's does not).

    Source: the thinking reward of the notebook this kit grew from; departure: a leading
    ``<think>`` is not counted.

    >>> reward = Thinking(end_token_id=9)
    >>> reward(completions=["never closed"], completion_ids=[[1, 2, 3]])
    [-1.0]
    >>> reward(completions=["hm</think>4", "?" * 30 + "</think>4"],
    ...        completion_ids=[[1, 9, 2], [*[3] * 30, 9, 2]])
    [0.3, 1.1]
    """

    __name__ = "thinking"

    short: int = 10
    """Tokens from which a thought is of medium length."""
    long: int = 30
    """Tokens from which a thought is long."""
    unclosed_score: float = -1.0
    """Score without ``</think>``."""
    short_score: float = 0.3
    """Score of fewer than ``short`` tokens."""
    medium_score: float = 0.7
    """Score from ``short`` to ``long - 1`` tokens."""
    long_score: float = 1.0
    """Score of ``long`` tokens or more."""
    question_bonus: float = 0.1
    """Added to the medium and the long score if the thought holds a "?"."""

    def __post_init__(self) -> None:
        """Refuse bands in the wrong order."""
        check_order(self, "short", "long")

    def _score(self, text: str, turns: list[list[int]]) -> float:
        thought = self.marks.thought_of(turns)
        if thought is None:
            return self.unclosed_score
        if len(thought) < self.short:
            return self.short_score
        score = self.medium_score if len(thought) < self.long else self.long_score
        return score + self.question_bonus if "?" in (thought_text(text) or "") else score


@dataclass(frozen=True)
class ClosedOnce(ThoughtTokens, TemplateAware):
    """Reward a thought that is closed exactly once: 1.0 if it is, 0.0 if not.

    Token ids are counted, and the decoded text is not read. ``</think>`` must occur once in the
    completion, with tools once in each turn. ``<think>`` may occur once in prompt and completion
    together, before ``</think>``. A thought that is never closed, one that is closed again, and a
    second thought all score 0.0.

    >>> reward = ClosedOnce(start_token_id=8, end_token_id=9)
    >>> reward(completions=[""] * 4, completion_ids=[[1, 9, 2], [8, 1, 9, 2], [1, 9, 9], [1]])
    [1.0, 1.0, 0.0, 0.0]
    >>> reward(completions=[""] * 2, completion_ids=[[1, 9, 8, 2], [8, 1, 9]],
    ...        prompts=["2 + 2 = ", "2 + 2 = <think>"])
    [0.0, 0.0]
    """

    __name__ = "thinking_closed_once"

    def __call__(
        self,
        completions: Completions,
        completion_ids: list[list[int]],
        prompts: Completions | None = None,
        completion_turns: Turns | None = None,
        **_: object,
    ) -> Scores:
        """Return one score per completion, in {0.0, 1.0}."""
        turns = completion_turns or [[ids] for ids in completion_ids]
        rows = self.rows(completions, prompts, turns)
        return [float(all(self._is_once(opened, ids) for ids in own)) for _, opened, own in rows]

    def _is_once(self, opened: bool, ids: Sequence[int]) -> bool:
        closes = self.marks.closed(ids)
        opens = self.marks.opened(ids)
        # A missing opening mark is in order too
        return len(closes) == 1 and opened + len(opens) <= 1 and opens[:1] < closes


@dataclass(frozen=True)
class ThinkingBudget(ThoughtTokens, TokenReward):
    """Reward a thought that keeps to a number of tokens: 1.0 up to the budget, then less.

    Range with the defaults: [0.0, 1.0], higher is better. The thought is counted as ``thinking``
    counts it: the tokens before the first ``</think>``, without a leading ``<think>``. Between
    ``budget`` and ``limit`` the score follows half a cosine from 1.0 to 0.0. A cosine has no edge
    at the budget, which would set two nearly equal thoughts of a group apart. Yeo et al. 2025
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
    """Tokens from which a thought scores 0.0; a limit above the trainer's max_completion_length is
    never reached."""
    unclosed_score: float = 0.0
    """Score without ``</think>``."""

    def __post_init__(self) -> None:
        """Refuse a limit that is not above the budget."""
        if not 0 <= self.budget < self.limit:
            raise ValueError(
                f"budget {self.budget!r} and limit {self.limit!r} are not in order; "
                "set 0 <= budget < limit (tokens)"
            )

    def _score(self, text: str, turns: list[list[int]]) -> float:
        thought = self.marks.thought_of(turns)
        if thought is None:
            return self.unclosed_score
        # Half a cosine from 1 at the budget to 0 at the limit.
        way = (len(thought) - self.budget) / (self.limit - self.budget)
        return (1.0 + math.cos(math.pi * min(max(way, 0.0), 1.0))) / 2.0


# Question marks of Latin, of Chinese and Japanese, and of Arabic script.
_QUESTION_MARK = re.compile("[?\uff1f\u061f]")
# A full stop inside a number ends no sentence, so white space must follow it.
_SENTENCE_END = re.compile(r"[.!]\s|[\u3002\uff01\n]")


@dataclass(frozen=True)
class SelfQuestions(ThoughtTokens, TokenReward):
    """Reward the questions in a thought: their number, at most ``most``, divided by ``most``.

    Range: [0.0, 1.0], higher is better. A question is a sentence of the thought that ends with a
    question mark and holds a letter. The same words count once, so that repeating a question earns
    nothing. A thought without ``</think>``, by token id, scores 0.0.

    The questions are looked for in the text before the first ``</think>``. A tokenizer that calls
    ``</think>`` special (Qwen3's does not) removes it, and then no question is found.

    >>> reward = SelfQuestions(most=2, end_token_id=9)
    >>> texts = ["Is it 3.5? Yes.</think>", "Why? Why? How so?</think>", "Hm? Hm??</think>", "Why?"]
    >>> reward(completions=texts, completion_ids=[[1, 9], [1, 9], [1, 9], [1]])
    [0.5, 1.0, 0.5, 0.0]
    """

    __name__ = "thinking_questions"

    most: int = 3
    """Questions that earn 1.0; more earn no more."""

    def __post_init__(self) -> None:
        """Refuse a number of questions below one."""
        check_least("most", self.most, 1)

    def _score(self, text: str, turns: list[list[int]]) -> float:
        if self.marks.thought_of(turns) is None:
            return 0.0
        return min(len(_questions(thought_text(text) or "")), self.most) / self.most


def _questions(text: str) -> set[str]:
    """Return the questions of a text, without what tells repetitions apart: case, white space."""
    sentences = (_SENTENCE_END.split(asked)[-1] for asked in _QUESTION_MARK.split(text)[:-1])
    return {
        " ".join(sentence.casefold().split())
        for sentence in sentences
        if any(character.isalpha() for character in sentence)
    }


@dataclass(frozen=True)
class ThinkingFormat(TextReward):
    """Reward one thought that is opened, closed once, and followed by an answer: 1.0, else 0.0.

    Opened means that ``<think>`` ends the prompt and is not in the completion, or that it begins
    the completion, white space aside, and occurs nowhere else. A plain prompt is read itself; for a
    conversation the chat template decides, which only a bound reward knows. Closed means that
    ``</think>`` occurs once. The answer follows it and must not be blank.

    The decoded text is read, so a ``</think>`` spelled out in several tokens counts here, unlike in
    ``thinking_closed_once``.

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
    """Score the share of the three conditions that hold: opened, closed once, answered."""

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
