"""Short forms for messages: values, errors, durations, the nearest known name.

A value may be huge, may hold itself and may not be printable; the message must stay one line.
"""

import difflib
import glob
import os
import reprlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rloo_kit.text.redaction import redact
from rloo_kit.types import Completion

# Characters of a value
LONGEST_VALUE = 100
# Characters of another library's error
LONGEST_REASON = 160
# Errors of one message, after the first
MORE_ERRORS = 11


class _Short(reprlib.Repr):
    """``repr`` that reads only a few items of a few levels."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel = 3
        self.maxlist = self.maxtuple = self.maxset = self.maxdict = 12
        self.maxstring = self.maxother = LONGEST_VALUE

    def repr_str(self, x: str, level: int) -> str:
        """Return a text without secrets, since half of a secret is not recognised later."""
        return super().repr_str(redact(x), level)

    def repr_int(self, x: int, level: int) -> str:
        """Return a whole number, or its size if it has many digits."""
        return repr(x) if x.bit_length() < 256 else f"a whole number of {x.bit_length()} bits"


_SHORT = _Short()


def format_value(value: object) -> str:
    """Return ``repr(value)``, cut in its middle to about 100 characters."""
    text = printable(_SHORT.repr(value))
    half = LONGEST_VALUE // 2
    return text if len(text) <= LONGEST_VALUE else f"{text[: half + 2]}...{text[3 - half :]}"


def format_name(value: object) -> str:
    """Return ``format_value(value)``; a text, such as a key, without quotation marks."""
    return format_value(value)[1:-1] if isinstance(value, str) else format_value(value)


def first_line(exc: BaseException) -> str:
    """Return the first line of an error's text, cut to 160 characters; its type if it has none."""
    try:
        lines = redact(str(exc)).strip().splitlines()
    except Exception:  # str() of a user's own error class may fail
        lines = []
    return printable(lines[0][:LONGEST_REASON]) if lines else type(exc).__name__


def printable(text: str) -> str:
    """Return text on one line, with escapes for characters that cannot be printed."""
    if text.isprintable():
        return text
    return "".join(
        c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text
    )


def format_errors(errors: Iterable[str]) -> str:
    """Return several errors as one message: the first ones, and the number of others."""
    text, *others = errors
    shown = "; ".join([text, *others[:MORE_ERRORS]])
    left = len(others) - MORE_ERRORS
    return shown if left <= 0 else f"{shown}; and {left} more errors, shown once these are fixed"


def did_you_mean(word: object, candidates: Iterable[str]) -> str:
    """Return the end of a message about an unknown word; "" without a near candidate."""
    # A key of YAML may be a number.
    near = difflib.get_close_matches(word, list(candidates), 1) if isinstance(word, str) else []
    return f"; did you mean {near[0]!r}?" if near else ""


def where_missing(name: str, base: Path) -> str:
    """Return a clause on where a path is missing, here and from ``base``, with a similar name."""
    path = Path(os.path.expanduser(name))
    places = dict.fromkeys(os.path.abspath((start / path).parent) for start in (Path(), base))
    names = [one for place in places for one in glob.glob("*", root_dir=place)]
    where = " or ".join(map(printable, places))
    return f"does not exist in {where}{did_you_mean(path.name, names)}"


def format_duration(seconds: float) -> str:
    """Return a duration in its two largest units, such as ``2 h 3 min``."""
    if seconds < 9.95:
        return f"{max(0.0, seconds):.1f} s"
    whole = round(seconds)
    names = ("min", "s")
    if whole >= 3600:
        whole = round(seconds / 60)
        names = ("h", "min")
    many, few = divmod(whole, 60)
    parts = [f"{number} {name}" for number, name in zip((many, few), names, strict=True) if number]
    return " ".join(parts)


def text_of(completion: object) -> str:
    """Return the text of a completion, plain or conversational: that of its last message."""
    if isinstance(completion, list) and completion and isinstance(completion[-1], dict):
        completion = completion[-1].get("content")
    return content_text(completion)


def content_text(content: object) -> str:
    """Return the content of a message as one string; the text parts of a list are joined."""
    if isinstance(content, list):
        parts = (part for part in content if isinstance(part, dict))
        return "".join(str(part.get("text") or "") for part in parts)
    return content if isinstance(content, str) else ""


# How TRL begins the result of a call that failed
TOOL_ERROR = "{'error':"


def calls_of(completion: Completion) -> list[Any]:
    """Return the calls of tools in a completion."""
    return [call for turn in _turns(completion) for call in turn.get("tool_calls") or ()]


def results_of(completion: Completion) -> list[str]:
    """Return the results of tools that a completion has."""
    return [str(turn.get("content")) for turn in _turns(completion) if turn.get("role") == "tool"]


def _turns(completion: Completion) -> list[dict[str, Any]]:
    return [] if isinstance(completion, str) else completion
