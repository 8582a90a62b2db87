"""Length: a medium number of words, a band of any unit and part, or a distance from the limit."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Literal, Self, get_args

from rloo_kit.errors import RewardContractError
from rloo_kit.types import Completion, Score

from ._text import check_choice, check_least, completion_text
from .thinking import PARTS, Part, TemplateAware, ThoughtTokens, TokenReward, part_text

if TYPE_CHECKING:
    from rloo_kit.types import Tokenizer

Unit = Literal["words", "tokens", "characters"]


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
        """Return one score per completion."""
        return [self._score(completion_text(completion)) for completion in completions]

    def _score(self, text: str) -> float:
        num_words = len(text.split())
        score = 0.0
        if num_words < self.min_words:
            score = self.too_short
        elif num_words <= self.max_words:
            score = self.medium
        return score + self.full_stop if text.rstrip().endswith(".") else score


@dataclass(frozen=True)
class LengthBand(ThoughtTokens, TemplateAware):
    """Reward a length inside a band: 1.0 from ``low`` to ``high``, falling to 0.0 beyond it.

    Range: [0.0, 1.0], higher is better. Outside the band the score falls on a line and is 0.0
    ``falloff`` units away from it. The thought is what stands before the first ``</think>``, a
    leading ``<think>`` aside; the answer is what follows the last one. Where the thought is not
    closed, both score 0.0. Tokens are divided by the id of ``</think>``, words and characters by
    the decoded text.

    >>> LengthBand(low=2, high=3, falloff=2)(completions=["", "one", "one two", "1 2 3 4"])
    [0.0, 0.5, 1.0, 0.5]
    >>> LengthBand(low=1, high=2, falloff=4, unit="tokens", part="thought", end_token_id=9)(
    ...     completions=["a b</think>4", "a b"], completion_ids=[[1, 1, 1, 9, 2], [1, 1]])
    [0.75, 0.0]
    """

    __name__: ClassVar[str] = "length_band"

    low: float = 10
    """Least length that scores 1.0."""
    high: float = 50
    """Greatest length that scores 1.0."""
    falloff: float = 10
    """Units outside the band over which the score falls to 0.0; 0: it drops at once."""
    unit: Unit = "words"
    """``words``: runs of characters between white space. ``tokens``: the completion's token ids, of
    a completion or an answer with the end-of-sequence token. ``characters``: of the text as it is
    decoded, white space included."""
    part: Part = "completion"
    """``completion``, ``thought`` or ``answer``."""

    def __post_init__(self) -> None:
        """Refuse an empty band, a falloff below 0, and another unit or part."""
        if not 0 <= self.low <= self.high:
            raise ValueError(
                f"low {self.low!r} and high {self.high!r} leave no length; set 0 <= low <= high"
            )
        check_least("falloff", self.falloff, 0)
        check_choice("unit", self.unit, get_args(Unit))
        check_choice("part", self.part, PARTS)

    def bind(self, tokenizer: "Tokenizer") -> Self:
        """Return this reward with what its part needs of a tokenizer; what is given is kept."""
        if self.part == "completion":
            return self
        if self.unit == "tokens":
            return super().bind(tokenizer)
        return replace(self, thought_opened=self.opened_by(tokenizer), _tokenizer=tokenizer)

    def __call__(
        self,
        completions: list[Completion],
        completion_ids: list[list[int]] | None = None,
        prompts: list[Completion] | None = None,
        **_: object,
    ) -> list[Score]:
        """Return one score per completion."""
        if self.unit != "tokens":
            return [
                self._score(self._length_of_text(*row)) for row in self.rows(completions, prompts)
            ]
        if completion_ids is None:
            raise RewardContractError(
                f"reward {self.__name__!r} counts tokens, and completion_ids is not there; pass "
                "it, or set unit to 'words' or 'characters'"
            )
        opened = self.opened(completions, prompts)
        return [
            self._score(self._length_of_ids(*row))
            for row in zip(completion_ids, opened, strict=True)
        ]

    def _length_of_text(self, text: str, opened: bool) -> int | None:
        part = part_text(text, self.part, opened=opened)
        if part is None:
            return None
        return len(part.split()) if self.unit == "words" else len(part)

    def _length_of_ids(self, ids: list[int], opened: bool) -> int | None:
        if self.part == "completion":
            return len(ids)
        if self.part == "thought":
            part = self.thought_ids(ids)
        else:
            part = self.answer_ids(ids, opened=opened)
        return None if part is None else len(part)

    def _score(self, size: int | None) -> float:
        if size is None:
            return 0.0
        outside = max(self.low - size, size - self.high, 0)
        if not outside:
            return 1.0
        return 1.0 - outside / self.falloff if outside < self.falloff else 0.0


@dataclass(frozen=True)
class SoftOverlong(TokenReward):
    """Punish completions that come near the longest length, counted in tokens.

    Range: [-1.0, 0.0], higher is better. With L tokens, L_max = ``max_completion_length`` and
    L_cache = ``soft_punish_cache``: 0 up to L_max - L_cache, then
    ((L_max - L_cache) - L) / L_cache, and -1 above L_max. The tokens are the completion's own, the
    end-of-sequence token and the thought included. Source: DAPO (arXiv 2503.14476), equation 13.

    >>> reward = SoftOverlong(max_completion_length=100, soft_punish_cache=20)
    >>> reward(completions=[""] * 4, completion_ids=[[1] * n for n in (80, 90, 100, 101)])
    [0.0, -0.5, -1.0, -1.0]
    """

    __name__: ClassVar[str] = "soft_overlong"

    max_completion_length: int
    """Tokens from which the score is -1; the trainer's max_completion_length, at which completions
    are cut off, or less."""
    soft_punish_cache: int
    """Tokens below that limit over which the score falls from 0 to -1; 0: it drops at once. DAPO
    takes a fifth of the limit (4,096 of 20,480)."""

    def __post_init__(self) -> None:
        """Refuse a stretch that is longer than the completion."""
        if not 0 <= self.soft_punish_cache <= self.max_completion_length:
            raise ValueError(
                f"soft_punish_cache {self.soft_punish_cache!r} does not fit into "
                f"max_completion_length {self.max_completion_length!r}; "
                "set 0 <= soft_punish_cache <= max_completion_length (tokens)"
            )

    def _score(self, text: str, ids: Sequence[int]) -> float:
        num_tokens = len(ids)
        if num_tokens > self.max_completion_length:
            return -1.0
        over = num_tokens - (self.max_completion_length - self.soft_punish_cache)
        return -over / self.soft_punish_cache if over > 0 else 0.0


# The reward with its defaults
length = Length()
