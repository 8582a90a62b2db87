"""Thinking format: one thought, opened, closed once, and followed by an answer."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Self

from rloo_kit.errors import RewardLoadError
from rloo_kit.types import Completion, Score

from ._text import THINK_CLOSE, THINK_OPEN
from .thinking import TemplateAware, end_of_thinking_id

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class ThinkingFormat(TemplateAware):
    """Reward one thought that is opened, closed once, and followed by an answer: 1.0, else 0.0.

    Opened means: ``<think>`` ends the prompt and stands nowhere in the completion, or it begins the
    completion, white space aside, and stands nowhere else. So models whose chat template opens the
    thought can earn 1.0 as well as models that open it themselves. A plain prompt is read itself;
    for a conversation the chat template decides, which only a bound reward knows (an unbound one
    takes it for one that opens nothing). Closed means that ``</think>`` stands once; the answer is
    what follows it, and must not be blank.

    Read in the decoded text, as ``accuracy`` and whoever uses the model read it: a ``</think>``
    spelled out in several tokens counts here, and not in ``thinking_closed_once``.

    >>> reward = ThinkingFormat()
    >>> reward(completions=["<think>hm</think>4", "hm</think>4"], prompts=["2+2", "2+2 <think>"])
    [1.0, 1.0]
    >>> reward(completions=["hm</think>4", "<think>hm</think>"], prompts=["2+2", "2+2"])
    [0.0, 0.0]
    >>> ThinkingFormat(thought_opened=True, partial=True)(
    ...     completions=["hm", "hm</think>", "hm</think>4"], prompts=[[], [], []])
    [0.3333333333333333, 0.6666666666666666, 1.0]
    """

    __name__: ClassVar[str] = "thinking_format"

    partial: bool = False
    """Score the share that holds of the three: opened, closed once, answered."""

    def bind(self, tokenizer: "PreTrainedTokenizerBase") -> Self:
        """Return this reward knowing whether the tokenizer's chat template opens the thought.

        Raises:
            RewardLoadError: The tokenizer calls ``</think>`` special, so that no decoded text holds
                it and every score would be 0.0.
        """
        end = end_of_thinking_id(tokenizer)
        if end is not None and THINK_CLOSE not in tokenizer.decode([end], skip_special_tokens=True):
            raise RewardLoadError(
                f"reward {self.__name__!r} reads '</think>' in the text, and this tokenizer drops "
                "it there as a special token; use 'thinking_closed_once', which reads token ids"
            )
        return super().bind(tokenizer)

    def __call__(
        self,
        completions: list[Completion],
        prompts: list[Completion] | None = None,
        **_: object,
    ) -> list[Score]:
        """Return one score per completion, in [0.0, 1.0]."""
        return [self._score(*row) for row in self.rows(completions, prompts)]

    def _score(self, text: str, opened_before: bool) -> float:
        head, close, tail = text.partition(THINK_CLOSE)
        opens = text.count(THINK_OPEN)
        begins_with_open = opens == 1 and head.lstrip().startswith(THINK_OPEN)
        is_opened = opens == 0 if opened_before else begins_with_open
        is_closed = bool(close) and THINK_CLOSE not in tail
        is_answered = bool(close) and bool(tail.rpartition(THINK_CLOSE)[2].strip())
        held = is_opened + is_closed + is_answered
        return held / 3 if self.partial else float(held == 3)


# The reward with its defaults
thinking_format = ThinkingFormat()
