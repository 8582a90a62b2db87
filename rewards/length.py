"""Rewards for the length of a completion: a medium number of words, a band, a soft upper limit."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Literal, Self

from rloo_kit.types import Tokenizer

from ._text import check_choices, check_least, check_order
from .thinking import Part, RowReward, TemplateAware, ThoughtTokens, TokenReward, part_text


@dataclass(frozen=True)
class Length(RowReward):
    """Reward a medium number of words, and a full stop at the end.

    With the defaults, 10 to 50 words score 1.0, fewer words -0.5, and more words 0.0. A full stop
    at the end adds 0.5. Range with the defaults: [-0.5, 1.5], higher is better. White space
    separates words, and the words of the thought count too. Source: the length reward of the
    notebook from which this kit was developed, unchanged.

    >>> Length()(completions=["Too short.", "one two three four five six seven eight nine ten."])
    [0.0, 1.5]
    >>> Length(min_words=2)(completions=["Just right."])
    [1.5]
    """

    __name__ = "length"

    min_words: int = 10
    """Fewest words of a medium length."""
    max_words: int = 50
    """Most words of a medium length."""
    medium: float = 1.0
    """Score of a completion with ``min_words`` to ``max_words`` words, both included."""
    too_short: float = -0.5
    """Score of a completion with fewer than ``min_words`` words. A completion with more than
    ``max_words`` words scores 0."""
    full_stop: float = 0.5
    """Added to the score if the completion ends with a full stop; white space after it is
    ignored."""

    def __post_init__(self) -> None:
        """Check that ``min_words`` is not greater than ``max_words``."""
        check_order(self, "min_words", "max_words")

    def _score(self, text: str, opened: bool) -> float:
        num_words = len(text.split())
        score = 0.0
        if num_words < self.min_words:
            score = self.too_short
        elif num_words <= self.max_words:
            score = self.medium
        return score + self.full_stop if text.rstrip().endswith(".") else score


@dataclass(frozen=True)
class LengthBand(ThoughtTokens, TokenReward, TemplateAware):
    """Reward a length inside a band: 1.0 from ``low`` to ``high``, falling to 0.0 outside.

    Range: [0.0, 1.0], higher is better. Outside the band the score falls linearly, and it is 0.0 at
    a distance of ``falloff`` units. The thought is the part before the first ``</think>``, without
    a leading ``<think>``. The answer is the part after the last ``</think>``. If the thought is not
    closed, thought and answer score 0.0. For tokens, ``</think>`` is found by its token id; for
    words and characters, in the decoded text.

    >>> LengthBand(low=2, high=3, falloff=2)(completions=["", "one", "one two", "1 2 3 4"])
    [0.0, 0.5, 1.0, 0.5]
    >>> LengthBand(low=1, high=2, falloff=4, unit="tokens", part="thought", end_token_id=9)(
    ...     completions=["a b</think>4", "a b"], completion_ids=[[1, 1, 1, 9, 2], [1, 1]])
    [0.75, 0.0]
    """

    __name__ = "length_band"

    low: float = 10
    """Shortest length that scores 1.0."""
    high: float = 50
    """Longest length that scores 1.0."""
    falloff: float = 10
    """Distance from the band, in units, at which the score has fallen to 0.0. With 0, every length
    outside the band scores 0.0."""
    unit: Literal["words", "tokens", "characters"] = "words"
    """Unit of length. ``words``: words separated by white space. ``tokens``: token ids; a
    completion and an answer include the end-of-sequence token. ``characters``: characters of the
    decoded text, white space included."""
    part: Part = "completion"
    """Part that is measured: ``completion`` (all of it), ``thought`` or ``answer``."""

    def __post_init__(self) -> None:
        """Check the band, the falloff, the unit and the part."""
        check_order(self, "low", "high")
        check_least(self, "falloff", 0)
        check_choices(self)

    def bind(self, tokenizer: Tokenizer) -> Self:
        """Return a copy of this reward with the settings that it needs from a tokenizer.

        These are ``thought_opened`` and, if ``unit`` is ``tokens``, the tokens that mark a thought.
        A setting that is not None is kept. If ``part`` is ``completion``, no setting is needed, and
        the reward itself is returned.

        Raises:
            RewardLoadError: ``unit`` is ``tokens``, the tokenizer has no known mark, and
                ``end_token_id`` is None.
        """
        if self.part == "completion":
            return self
        if self.unit == "tokens":
            return super().bind(tokenizer)
        return super(ThoughtTokens, self).bind(tokenizer)  # words need no token ids

    def _tokens(self, turns: list[list[int]], opened: bool) -> Sequence[int] | None:
        if self.part == "completion":
            return [*chain(*turns)]
        if self.part == "thought":
            return self.marks.thought_of(turns)
        ids = turns[-1]
        closed = self.marks.end.places(ids)
        if self.marks.is_open(ids) or (opened and not closed):
            return None
        return ids[closed[-1][1] :] if closed else ids

    def _score(self, text: str, opened: bool, turns: list[list[int]] | None = None) -> float:
        part: Sequence[object] | None = part_text(text, self.part, opened=opened)
        if turns is not None:
            part = self._tokens(turns, opened)
        elif part is not None and self.unit == "words":
            part = part.split()
        if part is None:
            return 0.0
        outside = max(self.low - len(part), len(part) - self.high, 0)
        return max(1.0 - outside / self.falloff, 0.0) if self.falloff else float(not outside)


@dataclass(frozen=True)
class SoftOverlong(TokenReward):
    """Penalise completions that come close to the maximum length, counted in tokens.

    Range: [-1.0, 0.0], higher is better. Let L be the number of tokens of the completion, L_max =
    ``max_completion_length``, and L_cache = ``soft_punish_cache``. The score is 0 up to L_max -
    L_cache tokens, then ((L_max - L_cache) - L) / L_cache, and -1 above L_max. The thought and the
    end-of-sequence token count too. Source: DAPO (arXiv 2503.14476), equation 13.

    >>> reward = SoftOverlong(max_completion_length=100, soft_punish_cache=20)
    >>> reward(completions=[""] * 4, completion_ids=[[1] * n for n in (80, 90, 100, 101)])
    [0.0, -0.5, -1.0, -1.0]
    """

    __name__ = "soft_overlong"

    max_completion_length: int
    """Number of tokens at which the score reaches -1. Set it to at most the trainer's
    max_completion_length, at which completions are truncated."""
    soft_punish_cache: int
    """Length, in tokens, of the range that ends at ``max_completion_length`` and in which the score
    falls from 0 to -1. With 0, the score falls at once above ``max_completion_length``. DAPO uses a
    fifth of ``max_completion_length`` (4,096 of 20,480)."""

    def __post_init__(self) -> None:
        """Check that ``soft_punish_cache`` is not greater than ``max_completion_length``."""
        check_order(self, "soft_punish_cache", "max_completion_length")

    def _score(self, text: str, opened: bool, turns: list[list[int]]) -> float:
        num_tokens = sum(map(len, turns))
        if num_tokens > self.max_completion_length:
            return -1.0
        over = num_tokens - (self.max_completion_length - self.soft_punish_cache)
        return -over / self.soft_punish_cache if over > 0 else 0.0


# The reward with its defaults
length = Length()
