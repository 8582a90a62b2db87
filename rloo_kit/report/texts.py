"""Prompts and completions as a page shows them: cut to a limit, thought apart from answer."""

import json
import re
from typing import Any

from rloo_kit.output_folder import without_nan
from rloo_kit.text.thoughts import THOUGHT_ENDS

THOUGHT_BEGINS = "<think>"
# Characters that could end a script or open a tag; in JSON they occur only inside texts
ESCAPED = "<>&\u2028\u2029"
SURROGATE = re.compile("[\ud800-\udfff]")

Shortened = str | list[str | int]


def page_json(value: Any) -> str:
    """Return JSON for the inside of a ``<script type="application/json">``.

    NaN and infinities become null, a lone surrogate U+FFFD, other types their text.
    """
    text = json.dumps(
        without_nan(value), ensure_ascii=False, separators=(",", ":"), allow_nan=False, default=str
    )
    for character in ESCAPED:
        text = text.replace(character, f"\\u{ord(character):04x}")
    return SURROGATE.sub("\ufffd", text)


def shortened(text: str, limit: int) -> Shortened:
    """Return a text, or ``[head, characters left out, tail]`` of one that is longer than the limit.

    >>> shortened("abcdefghij", 6)
    ['abcd', 4, 'ij']
    """
    if len(text) <= limit:
        return text
    tail = limit // 3
    return [text[: limit - tail], len(text) - limit, text[len(text) - tail :]]


def messages_of(prompt: object, limit: int) -> list[dict[str, Any]]:
    """Return a text or chat messages as ``role`` ("" of a plain text) and ``text``, each cut."""
    messages = prompt if isinstance(prompt, list) else [prompt]
    return [{"role": _role(one), "text": shortened(_content(one), limit)} for one in messages]


def completion_parts(row: dict[str, Any], limit: int) -> dict[str, Any]:
    """Return ``thought`` and ``answer`` of a row, cut to ``limit`` characters together."""
    completion = row.get("completion")
    several = isinstance(completion, list) and len(completion) > 1
    answer_at = None if several else row.get("answer_at")
    thought, answer = thought_and_answer(_text(completion), answer_at)
    if thought is None:
        return {"thought": None, "answer": shortened(answer, limit)}
    return {"thought": shortened(thought, limit // 2), "answer": shortened(answer, limit // 2)}


def thought_and_answer(text: str, answer_at: object = None) -> tuple[str | None, str]:
    """Return the two parts of a completion, ``</think>`` in neither.

    Args:
        text: Of the completion.
        answer_at: Characters before the answer, as in completions.jsonl; None: the last
            ``</think>`` divides the text.

    Returns:
        The thought, None where none was closed, and the answer: then the whole text.

    >>> thought_and_answer("<think>4+5=9</think> 9")
    ('4+5=9', ' 9')
    """
    if type(answer_at) is int and 0 < answer_at <= len(text):
        thought, answer = text[:answer_at].removesuffix(THOUGHT_ENDS), text[answer_at:]
    else:
        thought, end, answer = text.rpartition(THOUGHT_ENDS)
        if not end:
            return None, text
    return thought.lstrip().removeprefix(THOUGHT_BEGINS), answer


def _text(completion: object) -> str:
    """Return the texts of a completion; of several messages each after its role."""
    if not isinstance(completion, list):
        return _content(completion)
    if len(completion) == 1:
        return _content(completion[0])
    return "\n\n".join(f"[{_role(message)}] {_content(message)}" for message in completion)


def _role(message: object) -> str:
    return str(message.get("role") or "") if isinstance(message, dict) else ""


def _content(message: object) -> str:
    """Return the text of a message; its content may be parts, as of images."""
    if isinstance(message, dict):
        message = message.get("content")
    if isinstance(message, list):
        parts = (part if isinstance(part, dict) else {"text": part} for part in message)
        return "".join(str(part.get("text") or f"[{part.get('type')}]") for part in parts)
    return "" if message is None else str(message)
