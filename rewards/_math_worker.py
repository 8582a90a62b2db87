"""Child process of ``math.py``, which compares answers with the library math-verify.

It is started with ``python -m``. It reads one JSON request from each line of standard input, and
writes one JSON reply to a line of standard output. A request that takes too long ends the process.
"""

import contextlib
import functools
import json
import logging
import os
import re
import signal
import sys
from collections.abc import Callable
from typing import Any

_DELIMITED = re.compile(r"(?<!\\)\$|\\\(|\\\[|\\boxed|\\begin\{(?:equation|align)")
# Most characters of a line of bare mathematics; a repetitive line of 4,000 takes seconds to parse
_MAX_LINE = 200
# Between thousands: thin space, narrow no-break space
_NARROW_SPACE = re.compile(r"(?<=[0-9])[\u2009\u202f](?=[0-9]{3}(?![0-9]))")
_WRAPPED = re.compile(r"\\text\{[^{}]*\}")
_COMMAND = re.compile(r"\\(?:begin|end)\{[A-Za-z*]+\}|\\[A-Za-z]+")
_WORD = re.compile(r"[A-Za-z]{2,}")
# Letters right after one of these characters are a product; @ stands for a LaTeX command
_STUCK = re.compile(r"(?:[0-9)\]}^_*=(+-]|@\s*)$")
_PLAIN_NAME = re.compile(r"(?<![\\A-Za-z])(pi|sin|cos|tan|log|ln|exp)(?![A-Za-z])")
_NO_PROSE = "or and pi sin cos tan log ln exp sqrt".split()  # noqa: SIM905 - a table
_UNITS = """
mm cm dm km in ft yd mi sq mg kg lb lbs oz ml mL cl dl gal sec min hr hrs ms mph kph kmh Hz kHz
MHz kW kWh cents cent degrees degree deg
""".split()  # noqa: SIM905 - a table


def main() -> None:
    """Report whether math-verify can be imported, then answer requests until the input ends."""
    # A batch system sends SIGTERM to every process of a job. The parent finishes its step, and this
    # process ends with its input.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Windows sends Ctrl-C to this process too
    seconds, mib = map(float, sys.argv[1:])
    memory = int(mib) << 20
    replies = os.fdopen(os.dup(1), "w")
    # What a library prints must not get between the replies
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    try:
        import math_verify

        logging.disable()
        with contextlib.suppress(ImportError, ValueError, OSError):  # Windows, macOS
            import resource

            resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    except Exception as exc:
        print(json.dumps({"error": f"{type(exc).__name__}: {exc}"}), file=replies, flush=True)
        return
    print(json.dumps({"ready": True}), file=replies, flush=True)

    parse: Any = math_verify.parse  # its annotation lacks the None that means "no limit"

    @functools.lru_cache(maxsize=1024)
    def read(text: str) -> list[Any]:
        return expressions(text, lambda text: parse(text, parsing_timeout=None))

    for line in sys.stdin.buffer:
        request = json.loads(line)
        _end_after(seconds + 1)  # the parent ends this process first, unless it is gone
        try:
            gold = read(request["gold"])
            reply = bool(gold)
            if "answer" in request:
                answer = read(request["answer"])
                reply = bool(math_verify.verify(gold, answer, timeout_seconds=None))
        except BaseException:  # memory that ran out, recursion
            reply = None
        _end_after(0)
        print(json.dumps({"reply": reply}), file=replies, flush=True)


def expressions(text: str, parse: Callable[[str], list[Any]]) -> list[Any]:
    r"""Return the mathematical expressions in a text.

    math-verify reads LaTeX only between delimiters: in a bare ``2\pi`` it would read only the 2. A
    text that is a single line of mathematics without delimiters is therefore read as a whole.

    Args:
        text: The text.
        parse: The function ``parse`` of math-verify.
    """
    text = _NARROW_SPACE.sub("", text).replace("\u2212", "-")
    line = text.strip().strip("*#").rstrip(".").strip()
    bare = "\\boxed{" + _PLAIN_NAME.sub(r"\\\1 ", line) + "}"
    is_line = len(line) <= _MAX_LINE and "\n" not in line and not _DELIMITED.search(line)
    if is_line and not _is_prose(line):
        return parse(bare) or parse(text)
    return parse(text) or (parse(bare) if is_line else [])


def _is_prose(line: str) -> bool:
    """Return whether a line has a word or a unit, so that it is not only mathematics.

    Letters next to each other that can be a product of variables do not count as a word.
    """
    bare = _COMMAND.sub("@", _WRAPPED.sub("", line))
    for match in _WORD.finditer(bare):
        word = match[0]
        if word in _NO_PROSE:
            continue
        is_before = bare.startswith(tuple("^_*=("), match.end())
        is_product = is_before or _STUCK.search(bare[: match.start()])
        if word in _UNITS or not is_product:
            return True
    return False


def _end_after(seconds: float) -> None:
    if hasattr(signal, "setitimer"):  # SIGALRM ends the process, even inside C code
        signal.setitimer(signal.ITIMER_REAL, seconds)


if __name__ == "__main__":
    main()
