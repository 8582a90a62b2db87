"""JSON for the inside of an HTML page, and texts cut to what a page can hold."""

import json
import math
import re
from typing import Any

ESCAPED = "<>&\u2028\u2029"
"""No tag or comment is opened or closed by these; in JSON they occur inside texts alone."""
SURROGATE = re.compile("[\ud800-\udfff]")

Shortened = str | list[str | int]


def page_json(value: Any) -> str:
    """Return JSON that may stand in a ``<script type="application/json">``.

    NaN and infinities become null, half of a character U+FFFD, and what JSON has no form for its
    text.

    Args:
        value: Of dicts, lists, texts and numbers.
    """
    try:
        text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    except (ValueError, TypeError):
        plain = _plain(value)
        text = json.dumps(plain, ensure_ascii=False, separators=(",", ":"))
    for character in ESCAPED:
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text if text.isascii() else SURROGATE.sub("\ufffd", text)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if isinstance(value, str | int | float | None) else str(value)


def shortened(text: str, limit: int) -> Shortened:
    """Return a text, or ``[head, characters left out, tail]`` of one that is longer than the limit.

    Args:
        text: Any.
        limit: Characters that are kept of a longer one, two thirds of them from its head.

    >>> shortened("abcdefghij", 6)
    ['abcd', 4, 'ij']
    """
    if len(text) <= limit:
        return text
    tail = limit // 3
    head = limit - tail
    return [text[:head], len(text) - limit, text[len(text) - tail :]]
