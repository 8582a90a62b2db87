"""Reward of the calls in a trajectory: whether there are any, whether they work, what they cost."""

import json
from dataclasses import dataclass

from rloo_kit.text.wording import TOOL_ERROR, calls_of, results_of
from rloo_kit.types import Completion, Completions, Scores

from ._text import check_least


@dataclass(frozen=True)
class ToolUse:
    """Reward a call of a tool, and subtract for calls that fail, repeat or cost.

    Range: at most ``called``, higher is better. A completion without calls scores 0.0.

    >>> call = {"role": "assistant", "tool_calls": [{"function": {"name": "search"}}]}
    >>> turns = [call, {"role": "tool", "content": "4"}, {"role": "assistant", "content": "4"}]
    >>> ToolUse(cost=0.25)(completions=[turns, "no call"])
    [0.75, 0.0]
    """

    __name__ = "tool_use"

    called: float = 1.0
    """Score of a completion with at least one call."""
    failed: float = 0.5
    """Subtracted for each call that failed."""
    repeated: float = 0.5
    """Subtracted for each call that is the same as an earlier one."""
    cost: float = 0.0
    """Subtracted for each call."""

    def __post_init__(self) -> None:
        """Refuse parameters below 0."""
        for name, value in vars(self).items():
            check_least(name, value, 0.0)

    def __call__(self, completions: Completions, **_: object) -> Scores:
        """Return one score per completion."""
        return [self._score(completion) for completion in completions]

    def _score(self, completion: Completion) -> float:
        # the result of a call in the last turn is missing
        calls = [
            json.dumps(call.get("function"), sort_keys=True, default=str)
            for call in calls_of(completion[:-1])
        ]
        lost = self.failed * sum(text.startswith(TOOL_ERROR) for text in results_of(completion))
        lost += self.repeated * (len(calls) - len(set(calls))) + self.cost * len(calls)
        return (self.called if calls else 0.0) - lost
