"""Soft overlong punishment: what a completion loses when it comes near its token limit."""

from dataclasses import dataclass
from typing import ClassVar

from rloo_kit.types import Completion, Score


@dataclass(frozen=True)
class SoftOverlong:
    """Punish completions that come near the longest length, counted in tokens.

    Range: [-1.0, 0.0], higher is better. With L tokens, L_max = ``max_completion_length`` and
    L_cache = ``soft_punish_cache``: 0 up to L_max - L_cache, then
    ((L_max - L_cache) - L) / L_cache, and -1 above L_max. The tokens are the completion's own, the
    end-of-sequence token and the thought included. Source: DAPO (Yu et al. 2025, arXiv 2503.14476),
    equation 13, checked by hand and against TRL's ``get_soft_overlong_punishment``.

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

    def __call__(
        self, completions: list[Completion], completion_ids: list[list[int]], **_: object
    ) -> list[Score]:
        """Return one score per completion."""
        return [
            self._score(len(ids)) for _text, ids in zip(completions, completion_ids, strict=True)
        ]

    def _score(self, num_tokens: int) -> float:
        if num_tokens > self.max_completion_length:
            return -1.0
        over = num_tokens - (self.max_completion_length - self.soft_punish_cache)
        return -over / self.soft_punish_cache if over > 0 else 0.0
