"""Helpers for rewards: they split a completion, read dataset columns and check parameters."""

import ast
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args, get_origin, get_type_hints

from rloo_kit.errors import RewardContractError
from rloo_kit.text.thoughts import THOUGHT_BEGINS, THOUGHT_ENDS, opens_thought
from rloo_kit.text.wording import content_text
from rloo_kit.types import Completion, Tokenizer

THINK_OPEN = THOUGHT_BEGINS
THINK_CLOSE = THOUGHT_ENDS


def completion_text(completion: Completion) -> str:
    """Return the text of a completion.

    For chat messages, it is the content of the last assistant message, or "" if there is none.
    """
    if isinstance(completion, str):
        return completion
    for message in reversed(completion):
        if message.get("role", "assistant") == "assistant":
            return content_text(message.get("content"))
    return ""


def thought_text(text: str) -> str | None:
    """Return the thought of a completion: the text before the first ``</think>``.

    A leading ``<think>`` is left out. Return None if the text has no ``</think>``.
    """
    thought, close, _ = text.partition(THINK_CLOSE)
    return thought.lstrip().removeprefix(THINK_OPEN) if close else None


def text_after_thought(text: str) -> str:
    """Return the answer of a completion: the text after the last ``</think>``.

    If there is no ``</think>``, return the whole text. But return "" if that text begins with
    ``<think>``, because it is only an unfinished thought.
    """
    _, close, answer = text.rpartition(THINK_CLOSE)
    if not close and answer.lstrip().startswith(THINK_OPEN):
        return ""
    return answer


def template_opens_thought(tokenizer: Tokenizer) -> bool:
    """Return whether the tokenizer's chat template ends the prompt with an opening ``<think>``."""
    try:
        rendered: Any = tokenizer.apply_chat_template(
            [{"role": "user", "content": "?"}], tokenize=False, add_generation_prompt=True
        )
    except Exception:  # no template, or a broken one, which is reported where prompts are rendered
        return False
    return opens_thought(tokenizer, rendered)


def is_unclosed(text: str, *, opened: bool) -> bool:
    """Return whether a completion ends inside a thought.

    Args:
        text: Text of the completion.
        opened: Whether the prompt ends with an opening ``<think>``.
    """
    _, close, tail = text.rpartition(THINK_CLOSE)
    return THINK_OPEN in tail or (opened and not close)


# Columns that the caller of a reward makes -> what to do if one is missing
_NOT_OF_THE_DATASET = {
    "prompts": "pass it",
    "completion_ids": "pass it, or set unit to 'words' if the reward is length_band or repetition",
}


def column_of(columns: Mapping[str, Any], name: str, reward: str) -> list[Any]:
    """Return the values of the column that a reward reads.

    Args:
        columns: All columns, by name.
        name: Name of the column.
        reward: Name of the reward, for the error message.

    Raises:
        RewardContractError: The column is missing.
    """
    if columns.get(name) is None:
        remedy = _NOT_OF_THE_DATASET.get(name, "add it, or name another column in data.columns")
        raise RewardContractError(
            f"reward {reward!r} needs the column {name!r}, which is missing; {remedy}"
        )
    return columns[name]


def tagged_answer(text: str) -> str:
    """Return the text in the last ``<answer>`` tag after the thought.

    If there is no such tag, return all text after the thought. White space at both ends is removed.

    >>> tagged_answer("hm</think>It is <answer> 4 </answer>."), tagged_answer("hm</think> 4")
    ('4', '4')
    """
    answer = text_after_thought(text)
    before, close, _ = answer.rpartition("</answer>")
    _, opened, tagged = before.rpartition("<answer>")
    return (tagged if close and opened else answer).strip()


def parsed_expression(text: str) -> ast.expr | None:
    """Parse a Python expression without running it, and return its syntax tree.

    Return None if the text is not a valid expression.
    """
    try:
        return ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def check_choices(reward: object) -> None:
    """Check that each parameter with a ``Literal`` type has one of the allowed values.

    Raises:
        ValueError: A parameter has another value.
    """
    for name, hint in get_type_hints(type(reward)).items():
        value = getattr(reward, name)
        if get_origin(hint) is Literal and value not in get_args(hint):
            options = ", ".join(get_args(hint))
            raise ValueError(f"{name} is {value!r}; give one of: {options}")


def check_least(reward: object, name: str, least: float, below: float = math.inf) -> None:
    """Check that the named parameter is at least ``least`` and less than ``below``.

    Raises:
        ValueError: The value is outside this range.
    """
    value = getattr(reward, name)
    if not least <= value < below:
        limit = f", below {below}" if below < math.inf else ", and to a finite number"
        most = "" if value < least else limit
        raise ValueError(f"{name} is {value!r}; set it to {least} or more{most}")


def check_order(reward: object, *names: str) -> None:
    """Check that the named parameters are 0 or more, and that none is greater than the next one.

    Raises:
        ValueError: A parameter is negative, or greater than the next one.
    """
    values = [getattr(reward, name) for name in names]
    if not all(low <= high for low, high in itertools.pairwise([0, *values])):
        given = " and ".join(map("{} {!r}".format, names, values))
        raise ValueError(f"{given} are not in order; set 0 <= {' <= '.join(names)}")


def is_missing(value: object) -> bool:
    """Return whether a value of a dataset column is missing: None or NaN."""
    return value is None or value != value  # only NaN differs from itself


def n_grams(units: Sequence[Any], n: int) -> list[tuple[Any, ...]]:
    """Return all n-grams of a sequence: every run of ``n`` neighbouring units, in order."""
    return list(zip(*(units[start:] for start in range(n)), strict=False))


def expected_text(value: object) -> str | None:
    """Return a dataset value as text without white space at its ends.

    Return None if the value is missing (None, NaN or blank).
    """
    return None if is_missing(value) else str(value).strip() or None
