"""Aliases and protocols shared by every package; no behaviour.

Legend used in docstrings: P prompts, G generations per prompt (the group), B = P*G completions,
T completion tokens.
"""

from typing import Any, TypeAlias

Message: TypeAlias = dict[str, Any]
# One completion: a string, or a list of chat messages whose last one is the assistant's
Completion: TypeAlias = str | list[Message]

# One row of a dataset: `prompt` and whatever columns the rewards ask for
Row: TypeAlias = dict[str, Any]

# One reward; None means the function does not apply to the row (it leaves the baseline alone)
Score: TypeAlias = float | None
