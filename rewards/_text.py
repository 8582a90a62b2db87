"""What rewards share: a completion's thought and answer, the expected one, checks of parameters."""

import ast
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rloo_kit.errors import RewardContractError
from rloo_kit.text.thoughts import THOUGHT_BEGINS, THOUGHT_ENDS, opens_thought
from rloo_kit.types import Completion

if TYPE_CHECKING:
    from rloo_kit.types import Tokenizer

THINK_OPEN = THOUGHT_BEGINS
THINK_CLOSE = THOUGHT_ENDS


def completion_text(completion: Completion) -> str:
    """Return the text of one completion, plain or conversational.

    Of chat messages it is the content of the last assistant message; "" where there is none.
    """
    if isinstance(completion, str):
        return completion
    for message in reversed(completion):
        if message.get("role", "assistant") == "assistant":
            return content_text(message.get("content"))
    return ""


def content_text(content: str | list[dict[str, Any]] | None) -> str:
    """Return a message's content as one string; of a list of parts, the text parts joined."""
    if isinstance(content, list):
        return "".join(part.get("text") or "" for part in content)
    return content or ""


def thought_text(text: str) -> str | None:
    """Return what stands before the first ``</think>``, without a leading ``<think>``.

    None means that the text holds no ``</think>``.
    """
    thought, close, _ = text.partition(THINK_CLOSE)
    return thought.lstrip().removeprefix(THINK_OPEN) if close else None


def text_after_thought(text: str) -> str:
    """Return what stands after the last ``</think>``.

    A text without ``</think>`` is returned whole, or as "" when it begins with ``<think>``: then
    all of it is an unfinished thought.
    """
    _, close, answer = text.rpartition(THINK_CLOSE)
    if not close and answer.lstrip().startswith(THINK_OPEN):
        return ""
    return answer


def template_opens_thought(tokenizer: "Tokenizer") -> bool:
    """Return whether the tokenizer's chat template ends a prompt with an opened thought."""
    if not tokenizer.chat_template:
        return False
    try:
        rendered: Any = tokenizer.apply_chat_template(
            [{"role": "user", "content": "?"}], tokenize=False, add_generation_prompt=True
        )
    except Exception:  # a broken template is reported where the prompts are rendered
        return False
    return opens_thought(tokenizer, rendered)


def is_unclosed(text: str, *, opened: bool) -> bool:
    """Return whether a thought, ``opened`` before the completion or in it, is open at its end."""
    _, close, tail = text.rpartition(THINK_CLOSE)
    return THINK_OPEN in tail or (opened and not close)


def column_of(columns: Mapping[str, Any], name: str, reward: str) -> list[Any]:
    """Return the dataset column that a reward compares with."""
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
    before, close, _ = answer.rpartition("</answer>")
    _, opened, tagged = before.rpartition("<answer>")
    return (tagged if close and opened else answer).strip()


def parsed_expression(text: str) -> ast.expr | None:
    """Return the syntax tree of a Python expression, which is not run; None where it is none."""
    try:
        return ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def check_choice(name: str, value: object, options: Sequence[str]) -> None:
    """Raise ValueError where a parameter is not one of its options."""
    if value not in options:
        raise ValueError(f"{name} is {value!r}; give one of: {', '.join(options)}")


def check_least(name: str, value: float, least: float, below: float = math.inf) -> None:
    """Raise ValueError where a parameter is not a number from ``least`` to under ``below``."""
    if not least <= value < below:
        most = "" if below == math.inf else f", below {below}"
        raise ValueError(f"{name} is {value!r}; set it to {least} or more{most}")
