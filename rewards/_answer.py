"""The answer of a completion, apart from what stands around it; and the one expected of it."""

import ast
from collections.abc import Mapping
from typing import Any

from rloo_kit.errors import RewardContractError

from ._text import text_after_thought

_OPEN, _CLOSE = "<answer>", "</answer>"


def column_of(columns: Mapping[str, Any], name: str, reward: str) -> list[Any]:
    """Return the dataset column that a reward compares with.

    Raises:
        RewardContractError: It is not there.
    """
    if name not in columns:
        raise RewardContractError(
            f"reward {reward!r} needs the dataset column {name!r}, which is not there; add it, or "
            "name another one with the parameter 'column'"
        )
    return columns[name]


def tagged_answer(text: str) -> str:
    """Return what stands in the last ``<answer>`` after the thought, else all after the thought.

    White space at both ends is left out.

    >>> tagged_answer("hm</think>It is <answer> 4 </answer>."), tagged_answer("hm</think> 4")
    ('4', '4')
    """
    answer = text_after_thought(text)
    end = answer.rfind(_CLOSE)
    start = answer.rfind(_OPEN, 0, max(end, 0))
    return (answer[start + len(_OPEN) : end] if start >= 0 else answer).strip()


def parsed_expression(text: str) -> ast.expr | None:
    """Return the syntax tree of a Python expression, which is not run; None where it is none."""
    try:
        return ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
