"""Reward of the calls in a trajectory: whether there are any, whether they work, what they cost."""

import json
from dataclasses import dataclass
from typing import ClassVar

from rloo_kit.types import Completion, Score

from ._text import check_least

# How TRL begins the result of a call that failed
_ERROR = "{'error':"


@dataclass(frozen=True)
class ToolUse:
    """Reward a call of a tool, and subtract for calls that fail, repeat or cost.

    Range: at most ``called``, higher is better. A completion without calls scores 0.0.

    >>> call = {"role": "assistant", "tool_calls": [{"function": {"name": "search"}}]}
    >>> turns = [call, {"role": "tool", "content": "4"}, {"role": "assistant", "content": "4"}]
    >>> ToolUse(cost=0.25)(completions=[turns, "no call"])
    [0.75, 0.0]
    """

    __name__: ClassVar[str] = "tool_use"

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
        for name in ("called", "failed", "repeated", "cost"):
            check_least(name, getattr(self, name), 0.0)

    def __call__(self, completions: list[Completion], **_: object) -> list[Score]:
        """Return one score per completion."""
        return [self._score(completion) for completion in completions]

    def _score(self, completion: Completion) -> float:
        turns = [] if isinstance(completion, str) else completion
        calls = [
            json.dumps(call.get("function"), sort_keys=True, default=str)
            for turn in turns[:-1]  # the result of a call in the last turn is missing
            for call in turn.get("tool_calls") or ()
        ]
        results = [str(turn.get("content")) for turn in turns if turn.get("role") == "tool"]
        lost = self.failed * sum(text.startswith(_ERROR) for text in results)
        lost += self.repeated * (len(calls) - len(set(calls))) + self.cost * len(calls)
        return (self.called if calls else 0.0) - lost
