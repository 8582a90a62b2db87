"""Reward for calling a tool, with penalties for failed, repeated or many calls."""

import json
from dataclasses import dataclass

from rloo_kit.text.wording import TOOL_ERROR, calls_of, results_of
from rloo_kit.types import Completion, Completions, Scores

from ._text import check_least


@dataclass(frozen=True)
class ToolUse:
    """Reward a completion that calls a tool, and subtract penalties for its calls.

    Range: at most ``called``, higher is better. A completion without calls scores 0.0. Any other
    scores ``called``, minus ``failed`` for each call that failed, ``repeated`` for each call that
    is identical to an earlier one, and ``cost`` for every call.

    >>> call = {"role": "assistant", "tool_calls": [{"function": {"name": "search"}}]}
    >>> turns = [call, {"role": "tool", "content": "4"}, {"role": "assistant", "content": "4"}]
    >>> ToolUse(cost=0.25)(completions=[turns, "no call"])
    [0.75, 0.0]
    """

    __name__ = "tool_use"

    called: float = 1.0
    """Score of a completion with at least one call."""
    failed: float = 0.5
    """Penalty for each call that failed."""
    repeated: float = 0.5
    """Penalty for each call that is identical to an earlier one."""
    cost: float = 0.0
    """Penalty for every call."""

    def __post_init__(self) -> None:
        """Check that no parameter is negative."""
        for name in vars(self):
            check_least(self, name, 0.0)

    def __call__(self, completions: Completions, **_: object) -> Scores:
        """Return one score per completion."""
        return [self._score(completion) for completion in completions]

    def _score(self, completion: Completion) -> float:
        # Calls in the last turn do not count, since they have no result
        calls = [
            json.dumps(call.get("function"), sort_keys=True, default=str)
            for call in calls_of(completion[:-1])
        ]
        lost = self.failed * sum(text.startswith(TOOL_ERROR) for text in results_of(completion))
        lost += self.repeated * (len(calls) - len(set(calls))) + self.cost * len(calls)
        return (self.called if calls else 0.0) - lost
