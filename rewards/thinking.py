"""Thinking: the thought is closed, and long enough; counted in tokens, not in words."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, ClassVar

from rloo_kit.errors import RewardLoadError
from rloo_kit.types import Completion, Score

from ._text import THINK_CLOSE, THINK_OPEN, completion_text, thought_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

QWEN3_THINK_OPEN_ID = 151667
QWEN3_THINK_CLOSE_ID = 151668


def end_of_thinking_id(tokenizer: "PreTrainedTokenizerBase") -> int | None:
    """Return the id of ``</think>`` in the tokenizer's vocabulary (151668 in Qwen3's).

    None means that the vocabulary has no single token for it. There is no guess: an id of another
    family would stand for an ordinary word.
    """
    return _token_id(tokenizer, THINK_CLOSE)


def _token_id(tokenizer: "PreTrainedTokenizerBase", token: str) -> int | None:
    token_id = tokenizer.convert_tokens_to_ids(token)
    # A token the vocabulary lacks comes back as None or as the id of the unknown token.
    if not isinstance(token_id, int) or tokenizer.convert_ids_to_tokens(token_id) != token:
        return None
    return token_id


@dataclass(frozen=True)
class Thinking:
    """Reward a closed thought by its number of tokens.

    The thought is every token before the FIRST ``</think>``, whether ``<think>`` stood in the
    prompt (as many chat templates have it) or begins the completion; in the latter case that one
    token is not counted. Range with the defaults: [-1.0, 1.1], higher is better.

    A question in the thought earns a bonus in the two longer bands. It is looked for in the text
    before ``</think>``. Where the decoded text lost ``</think>`` (a tokenizer that calls it
    special; Qwen3's does not), the ids of the thought are searched for tokens that hold a "?",
    which only a bound reward knows; an unbound one then gives no bonus.

    Source: the thinking reward of the notebook this kit grew from; departure: a leading
    ``<think>`` is not counted.

    >>> reward = Thinking(end_token_id=9)
    >>> reward(completions=["never closed"], completion_ids=[[1, 2, 3]])
    [-1.0]
    >>> reward(completions=["hm</think>4", "?" * 30 + "</think>4"],
    ...        completion_ids=[[1, 9, 2], [*[3] * 30, 9, 2]])
    [0.3, 1.1]
    """

    __name__: ClassVar[str] = "thinking"

    end_token_id: int | None = None
    """Id of ``</think>``; None: set by ``bind``, and Qwen3's 151668 in a reward never bound."""
    start_token_id: int | None = None
    """Id of ``<think>``; None: set by ``bind``, and 151667 where the end is Qwen3's."""
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
    """Added to the medium and the long score where the thought holds a "?"."""
    question_token_ids: frozenset[int] = field(default=frozenset(), repr=False)
    """Ids of the tokens that hold a "?"; set by ``bind``."""

    def __post_init__(self) -> None:
        """Refuse bands in the wrong order."""
        if not 0 <= self.short <= self.long:
            raise ValueError(
                f"short {self.short!r} and long {self.long!r} are not in order; "
                "set 0 <= short <= long (tokens)"
            )

    def bind(self, tokenizer: "PreTrainedTokenizerBase") -> "Thinking":
        """Return this reward with the token ids of a tokenizer; ids given by hand are kept.

        Raises:
            RewardLoadError: The tokenizer has no single token for ``</think>``.
        """
        end = self.end_token_id if self.end_token_id is not None else end_of_thinking_id(tokenizer)
        if end is None:
            raise RewardLoadError(
                f"reward {self.__name__!r} needs '</think>' to be one token, and this tokenizer "
                "has none; use a thinking model, or give end_token_id"
            )
        start = self.start_token_id
        if start is None:
            start = _token_id(tokenizer, THINK_OPEN)
        questions = frozenset(i for token, i in tokenizer.get_vocab().items() if "?" in token)
        return replace(self, end_token_id=end, start_token_id=start, question_token_ids=questions)

    def __call__(
        self, completions: list[Completion], completion_ids: list[list[int]], **_: object
    ) -> list[Score]:
        """Return one score per completion.

        Args:
            completions: B completions, conversational or plain.
            completion_ids: B lists of the completion's own T token ids; T differs by row.
        """
        return [
            self._score(completion_text(completion), ids)
            for completion, ids in zip(completions, completion_ids, strict=True)
        ]

    def _score(self, text: str, ids: Sequence[int]) -> float:
        thought = self._thought_ids(ids)
        if thought is None:
            return self.unclosed_score
        if len(thought) < self.short:
            return self.short_score
        score = self.medium_score if len(thought) < self.long else self.long_score
        return score + self.question_bonus if self._asks(text, thought) else score

    def _thought_ids(self, ids: Sequence[int]) -> Sequence[int] | None:
        """Return the ids of the thought, or None where it is not closed."""
        end, start = self.end_token_id, self.start_token_id
        if end is None:
            end = QWEN3_THINK_CLOSE_ID
        if start is None and end == QWEN3_THINK_CLOSE_ID:
            start = QWEN3_THINK_OPEN_ID
        if end not in ids:
            return None
        begins_with_open = start is not None and ids[0] == start
        return ids[int(begins_with_open) : ids.index(end)]

    def _asks(self, text: str, thought: Sequence[int]) -> bool:
        written = thought_text(text)
        if written is None:
            return not self.question_token_ids.isdisjoint(thought)
        return "?" in written


thinking = Thinking()
"""The reward with its defaults."""
