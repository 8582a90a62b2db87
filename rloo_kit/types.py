"""Aliases and protocols shared by every package; no behaviour.

Legend used in docstrings: P prompts, G generations per prompt (the group), B = P*G completions,
T completion tokens.
"""

from typing import Any, Protocol, TypeAlias

Message: TypeAlias = dict[str, Any]
# One completion: a string, or a list of chat messages whose last one is the assistant's
Completion: TypeAlias = str | list[Message]

# One row of a dataset: `prompt` and whatever columns the rewards ask for
Row: TypeAlias = dict[str, Any]

# One reward; None means the function does not apply to the row (it leaves the baseline alone)
Score: TypeAlias = float | None


class RewardFunc(Protocol):
    """What TRL calls: always by keyword, with whole columns of B values.

    Keywords: ``prompts``, ``completions``, ``completion_ids`` (token ids up to and including EOS),
    every other dataset column, ``trainer_state``, ``log_extra``, ``log_metric``.
    """

    __name__: str

    def __call__(self, **kwargs: Any) -> list[Score]:
        """Return B scores, in order."""
        ...
