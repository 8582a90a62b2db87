"""Functions that format values, errors, durations and suggestions for messages.

A value may be huge, contain itself, or have unprintable characters. Its formatted text is always
short and on one line.
"""

import difflib
import glob
import os
import reprlib
import shlex
from collections.abc import Iterable
from pathlib import Path, PurePath, PurePosixPath, PureWindowsPath
from typing import Any

from rloo_kit.text.redaction import redact
from rloo_kit.types import Completion

# Maximum number of characters of a value in a message
LONGEST_VALUE = 100
# Maximum number of characters of another library's error in a message
LONGEST_REASON = 300
# Maximum number of errors that one message lists after the first
MORE_ERRORS = 11


class _Short(reprlib.Repr):
    """``reprlib.Repr`` that also masks secrets and shortens large integers."""

    def repr_str(self, x: str, level: int) -> str:
        """Return the short ``repr`` of a text, with its secrets masked.

        Secrets are masked before the text is cut, because a secret cut in half would not be
        recognised later.
        """
        return super().repr_str(redact(x), level)

    def repr_int(self, x: int, level: int) -> str:
        """Return the ``repr`` of an integer, or only its size if it has 256 bits or more."""
        return repr(x) if x.bit_length() < 256 else f"a whole number of {x.bit_length()} bits"


_SHORT = _Short()
_SHORT.maxlevel = 3
_SHORT.maxlist = _SHORT.maxtuple = _SHORT.maxset = _SHORT.maxdict = 12
_SHORT.maxstring = _SHORT.maxother = LONGEST_VALUE


def resume_command(run: str | PurePath) -> str:
    """Return the command that resumes the run in a folder, ready to be pasted into a shell."""
    return f"rloo-kit train {shell_path(run)} --resume"


def shell_path(path: str | PurePath) -> str:
    """Return a path in a form that can be pasted into a shell.

    The path has forward slashes on Windows too. With a backslash, ``shlex.quote`` would add single
    quotes, which cmd.exe treats as part of the name.
    """
    return shlex.quote(PurePath(path).as_posix())


def format_value(value: object) -> str:
    """Return ``repr(value)`` on one line, with its middle cut out if it exceeds 100 characters."""
    text = printable(_SHORT.repr(value))
    half = LONGEST_VALUE // 2
    return text if len(text) <= LONGEST_VALUE else f"{text[: half + 2]}...{text[3 - half :]}"


def format_name(value: object) -> str:
    """Return ``format_value(value)``, without the quotation marks if the value is a string."""
    text = format_value(value)
    return text[1:-1] if isinstance(value, str) else text


def first_line(exc: BaseException) -> str:
    """Return the first line of an exception's message, cut to 300 characters.

    Return the name of the exception's type if it has no message.
    """
    try:
        lines = redact(str(exc)).strip().splitlines()
    except Exception:  # str() of a user's own error class may fail
        lines = []
    return printable(lines[0][:LONGEST_REASON]) if lines else type(exc).__name__


def encodable(text: str) -> str:
    """Return the text with a ``?`` for each lone surrogate, which a tokenizer refuses."""
    return text.encode("utf-8", "replace").decode()


def printable(text: str) -> str:
    """Return the text on one line, with escapes for line breaks and unprintable characters."""
    return "".join(
        c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text
    )


def format_errors(errors: Iterable[str]) -> str:
    """Return one message that lists the first 12 errors and counts the others."""
    text, *others = errors
    shown = "; ".join([text, *others[:MORE_ERRORS]])
    left = len(others) - MORE_ERRORS
    return shown if left <= 0 else f"{shown}; and {left} more errors, shown once these are fixed"


def did_you_mean(word: object, candidates: Iterable[str]) -> str:
    """Return ``; did you mean 'NAME'?``, to be appended to a message about an unknown word.

    NAME is the candidate most similar to the word. Return "" if no candidate is similar.
    """
    # A key of YAML may be a number.
    near = difflib.get_close_matches(word, list(candidates), 1) if isinstance(word, str) else []
    return f"; did you mean {near[0]!r}?" if near else ""


def where_missing(name: str, base: Path) -> str:
    """Return the part of a message that says in which folders a missing path was looked for.

    The path is looked for relative to the current folder and relative to ``base``. If a file or
    folder there has a similar name, the text suggests it.
    """
    path = Path(os.path.expanduser(name))
    places = dict.fromkeys(os.path.abspath((start / path).parent) for start in (Path(), base))
    names = [one for place in places for one in glob.glob("*", root_dir=place)]
    where = " or ".join(map(printable, places))
    return f"does not exist in {where}{did_you_mean(path.name, names)}"


def format_duration(seconds: float) -> str:
    """Return a duration in its two largest units, such as ``2 h 3 min`` for 7380 seconds."""
    if seconds < 9.95:
        return f"{max(0.0, seconds):.1f} s"
    whole = round(seconds)
    names = ("min", "s")
    if whole >= 3600:
        whole = round(seconds / 60)
        names = ("h", "min")
    parts = zip(divmod(whole, 60), names, strict=True)
    return " ".join(f"{number} {name}" for number, name in parts if number)


def text_of(completion: object) -> str:
    """Return the text of a completion, or of its last message if it is a list of messages."""
    if isinstance(completion, list) and completion and isinstance(completion[-1], dict):
        completion = completion[-1].get("content")
    return content_text(completion)


def content_text(content: object) -> str:
    """Return the content of a message as one string.

    If the content is a list of parts, join the texts of the parts. Return "" if there is no text.
    """
    if isinstance(content, list):
        parts = (part for part in content if isinstance(part, dict))
        return "".join(str(part.get("text") or "") for part in parts)
    return content if isinstance(content, str) else ""


# Beginning of the tool result that TRL writes if a tool call failed
TOOL_ERROR = "{'error':"


def calls_of(completion: Completion) -> list[Any]:
    """Return the tool calls in a completion, in order."""
    return [call for turn in _turns(completion) for call in turn.get("tool_calls") or ()]


def results_of(completion: Completion) -> list[str]:
    """Return the text of each tool result in a completion, in order."""
    return [str(turn.get("content")) for turn in _turns(completion) if turn.get("role") == "tool"]


def _turns(completion: Completion) -> list[dict[str, Any]]:
    return [] if isinstance(completion, str) else completion


def without_folders(value: object) -> Any:
    """Return a value of a run file, with each absolute or ``~`` path cut to its last part."""
    if isinstance(value, str):
        for path in (PurePosixPath(value), PureWindowsPath(value)):
            if path.is_absolute() or path.parts[:1] == ("~",):
                return path.name
    if isinstance(value, dict):
        return {name: without_folders(one) for name, one in value.items()}
    return [without_folders(one) for one in value] if isinstance(value, list) else value
