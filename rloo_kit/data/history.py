"""Which prompts are worth sampling, by the scores of their last groups (``prompt_selection``)."""

import hashlib
import json
import random
from collections.abc import Iterable
from typing import Any

from rloo_kit.types import Prompt

# Share of the times that a prompt is kept after one group without signal; after k it is the k-th
# power, and never less than the second number
KEPT_AFTER_ONE, LEAST_KEPT = 0.5, 0.01


class PromptHistory:
    """Skips, more and more often, prompts whose last groups had equal scores.

    Zheng et al. 2025 (GRESO, arXiv 2506.02177), section 4: a prompt whose last k groups had no
    signal is skipped with probability ``1 - p^k``; numbers and floor are those of their code. A
    prompt retires when the mean score of its group reaches a share, as in Khatri et al. 2025
    (ScaleRL, arXiv 2510.13786), "no positive resampling".

    Prompts are known by their content, so equal rows of a training set have one history.

    Args:
        retire_at: Mean score of a group from which on its prompt is skipped always; None: never.
    """

    def __init__(self, retire_at: float | None = None) -> None:
        self.retire_at = retire_at
        self.streaks: dict[str, int] = {}  # prompt -> groups without signal since one with
        self.retired: set[str] = set()
        self.looked_at: list[bool] = []  # since the last call of `metrics`: whether it was kept

    def note(self, prompts: Iterable[Any], means: Iterable[float], signal: Iterable[bool]) -> None:
        """Note groups that were sampled: their mean scores, and whether their scores differ."""
        for prompt, mean, has_signal in zip(prompts, means, signal, strict=True):
            key = _key(prompt)
            streak = self.streaks.pop(key, 0)
            if not has_signal:
                self.streaks[key] = streak + 1
            if self.retire_at is not None and mean >= self.retire_at:
                self.retired.add(key)

    def chance(self, prompt: Prompt) -> float:
        """Return the probability with which a prompt is kept when its turn comes."""
        key = _key(prompt)
        if key in self.retired:
            return 0.0
        return max(KEPT_AFTER_ONE ** self.streaks.get(key, 0), LEAST_KEPT)

    def keeps(self, prompt: Prompt) -> bool:
        """Return whether to sample a prompt now, by the run's own random state."""
        kept = random.random() < self.chance(prompt)
        self.looked_at.append(kept)
        return kept

    def metrics(self) -> dict[str, float]:
        """Return the share skipped since the last call, and how many have retired so far."""
        looked_at, self.looked_at = self.looked_at, []
        return {
            "signal/prompts_skipped": looked_at.count(False) / max(1, len(looked_at)),
            "signal/prompts_retired": len(self.retired),
        }

    def state_dict(self) -> dict[str, Any]:
        """Return what is kept from batch to batch, in copies."""
        return {"streaks": dict(self.streaks), "retired": sorted(self.retired)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what ``state_dict`` returned."""
        self.streaks, self.retired = dict(state["streaks"]), set(state["retired"])


def _key(prompt: Prompt) -> str:
    """Return a short text that is the same for equal prompts, in every process."""
    content = json.dumps(prompt, sort_keys=True, default=str).encode()
    return hashlib.blake2b(content, digest_size=8).hexdigest()
