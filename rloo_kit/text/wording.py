"""How values and other people's errors are shown in the kit's own: short, on one line.

What a user gave may be endless (a text of megabytes, lists in lists, a number of a million digits)
and may not be printable; the remedy behind it has to be read all the same.
"""

import itertools
import reprlib
from collections.abc import Iterable
from typing import Any

from rloo_kit.text.redaction import redact

LONGEST_VALUE = 100
"""Characters of a value."""
LONGEST_REASON = 160
"""Characters of another library's error."""
LONGEST_MESSAGE = 600
"""Characters of several faults together; the first is always told."""


class _Short(reprlib.Repr):
    """``repr`` that looks at a few items of a few levels alone."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel = 3
        self.maxlist = self.maxtuple = self.maxset = self.maxdict = 12
        self.maxstring = self.maxother = LONGEST_VALUE

    def repr_dict(self, x: dict[Any, Any], level: int) -> str:
        """Return a dict in its own order."""
        if x and level <= 0:
            return "{...}"
        pairs = [
            f"{self.repr1(key, level - 1)}: {self.repr1(value, level - 1)}"
            for key, value in itertools.islice(x.items(), self.maxdict)
        ]
        return f"{{{', '.join([*pairs, *(['...'] if len(x) > self.maxdict else [])])}}}"

    def repr_str(self, x: str, level: int) -> str:
        """Return a text without the secrets in it; what is cut off here is not seen later."""
        return super().repr_str(redact(x), level)

    def repr_int(self, x: int, level: int) -> str:
        """Return a whole number, or its size where Python refuses to write it out."""
        return repr(x) if x.bit_length() < 256 else f"a whole number of {x.bit_length()} bits"


_SHORT = _Short()


def shown(value: object) -> str:
    """Return ``repr(value)``, cut in its middle to about 100 characters.

    >>> shown("x" * 1000)[-8:]
    "xxxxxxx'"

    Args:
        value: Anything, however large; it may hold itself.
    """
    text = printable(_SHORT.repr(value))
    half = LONGEST_VALUE // 2
    return text if len(text) <= LONGEST_VALUE else f"{text[: half + 2]}...{text[3 - half :]}"


def bare(value: object) -> str:
    """Return ``shown(value)``, of a text without the quotation marks.

    Args:
        value: A name, such as a key.
    """
    return shown(value)[1:-1] if isinstance(value, str) else shown(value)


def why(exc: BaseException) -> str:
    """Return the first line of an error's text, cut to 160 characters; its kind where it is mute.

    Args:
        exc: Raised by another library.
    """
    try:
        lines = [line.strip() for line in redact(str(exc)).splitlines() if line.strip()]
    except Exception:  # errors of a user's own classes may not even have a text
        lines = []
    return printable(lines[0][:LONGEST_REASON]) if lines else type(exc).__name__


def printable(text: str) -> str:
    """Return text on one line, with an escape for what cannot be printed."""
    if text.isprintable():
        return text
    return "".join(
        c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text
    )


def told(faults: Iterable[str]) -> str:
    """Return several faults as one message; of very many the first, and how many are left.

    Args:
        faults: A sentence each, at least one.
    """
    first, *others = faults
    text = first
    for place, fault in enumerate(others):
        if len(text) + len(fault) > LONGEST_MESSAGE:
            return f"{text}; and {len(others) - place} more, told when these are mended"
        text += f"; {fault}"
    return text
