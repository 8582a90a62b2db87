"""What became of an input: a right result, an error of the kit with its remedy, or a failure."""

import contextlib
import io
import os
import signal
import time
import traceback
import warnings
from dataclasses import dataclass

from rloo_kit.errors import KitError

LIMIT = 10.0
"""Seconds that an input may take, of a processor; what waits has six times as many."""
LONGEST = 900
"""Characters of an error's text."""
RIGHT, REFUSED, FAILED = "right", "refused", "failed"


class TooSlowError(BaseException):
    """No ``except Exception`` catches it."""


@dataclass(frozen=True)
class Verdict:
    outcome: str
    seconds: float
    detail: str = ""


def fault_of_text(text):
    """What is wrong with an error's text; "" where it is one sentence a person can act on."""
    if not text.strip():
        return "is empty"
    if len(text.splitlines()) > 1 or not text.isprintable():
        return "is no single line"
    if len(text) > LONGEST:
        return f"has {len(text)} characters"
    if " object at 0x" in text or "Traceback" in text:
        return "shows the inside of a program"
    return (
        ""
        if any(mark in text for mark in (":", ";", ", must ", "did you mean"))
        else "has no remedy"
    )


@contextlib.contextmanager
def time_limit(seconds):
    """Raise TooSlowError in the body once it takes longer."""

    def ring(number, frame):
        raise TooSlowError(f"{frame.f_code.co_filename}:{frame.f_lineno}")

    clocks = ((signal.ITIMER_PROF, signal.SIGPROF, 1), (signal.ITIMER_REAL, signal.SIGALRM, 6))
    before = [signal.signal(number, ring) for _, number, _ in clocks]
    for clock, _, times in clocks:
        signal.setitimer(clock, times * seconds, 1.0)
    try:
        yield
    finally:
        for (clock, number, _), handler in zip(clocks, before, strict=True):
            signal.setitimer(clock, 0)
            signal.signal(number, handler)


def judged(one, data):
    """Call a target with an input; what it prints and warns is dropped."""
    start = time.process_time()
    outcome, detail = RIGHT, ""
    here = os.getcwd()
    try:
        with (
            time_limit(LIMIT),
            warnings.catch_warnings(),
            contextlib.redirect_stdout(io.StringIO()),
            contextlib.redirect_stderr(io.StringIO()),
        ):
            warnings.simplefilter("ignore")
            one(data)
    except KitError as exc:
        text = str(exc)
        fault = fault_of_text(text)
        outcome = FAILED if fault else REFUSED
        detail = f"the text {fault}: {text[:1500]!r}" if fault else text
    except KeyboardInterrupt:
        raise
    except TooSlowError as exc:
        outcome, detail = FAILED, f"more than {LIMIT:g} s, at {exc}"
    except BaseException:  # SystemExit too
        outcome, detail = FAILED, traceback.format_exc()
    finally:
        os.chdir(here)
    return Verdict(outcome, time.process_time() - start, detail)
