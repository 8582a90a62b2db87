"""A reward that keeps the contract: called with the keywords it takes, its scores verified."""

import asyncio
import functools
import inspect
import math
import os
import signal
import sys
import sysconfig
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

from rloo_kit.errors import KitError, RewardContractError
from rloo_kit.scoring.process_state import put_back
from rloo_kit.text.redaction import redact
from rloo_kit.types import Completion, Score

_MAX_COMPLETION_CHARACTERS = 200
_LARGEST_SCORE = 3.4028234663852886e38
"""Of float32, in which scores are kept."""
_RINGS_BEFORE_TRACING = 10
"""Alarms that a reward may swallow, a tenth of a second apart, before each of its lines raises."""
MAX_ROWS_TRIED = 1024
"""A reward that raised is called again row by row, up to so many rows, to name the row."""


@dataclass(frozen=True)
class CheckedReward:
    """A reward called with the keywords it accepts, whose scores are verified at every call."""

    reward: Callable[..., Any]
    name: str
    accepted: frozenset[str] | None
    """Keywords it takes; None: all of them."""
    required: tuple[str, ...]
    """Keywords it cannot be called without."""
    timeout: float | None = None
    """Seconds a call may take; None: no limit."""
    on_error: str = "stop"
    """``stop`` raises; ``skip`` makes the rows that could not be scored None and counts them under
    the metric ``rewards/NAME/errors``."""

    @property
    def __name__(self) -> str:
        """The name of the metric."""
        return self.name

    def __call__(self, **columns: Any) -> list[Score]:
        """Return B scores, each a finite float or None.

        The reward gets lists of its own, so that it may change them; what else it changes in the
        process, such as the working directory, is put back (``put_back``).

        Raises:
            RewardContractError: The reward raised, took too long, lacks a column, or broke the
                contract.
        """
        try:
            with put_back():
                output = within(self.timeout, lambda: self._call(columns))
        except (KitError, *_NOT_ITS_OWN):  # the first already says what to change
            raise
        except OverdueError as exc:
            return self._failed(self._too_slow(exc), columns)
        except BaseException as exc:  # sys.exit() in a reward must not end a run in silence
            where = self._culprit(columns, type(exc))
            return self._failed(self._attributed(exc, where), columns)
        finally:
            self._leave_open()
        return self._scores(output, columns)

    def _call(self, columns: dict[str, Any]) -> Any:
        """Call the reward; a process that it forked and that comes back from it ends here."""
        process = os.getpid()
        try:
            return self.reward(**self._select(columns))
        finally:
            if os.getpid() != process:  # else it would train on beside its parent
                _end_process(sys.exc_info()[1])

    def _leave_open(self) -> None:
        for name in ("stdout", "stderr"):
            if getattr(getattr(sys, name), "closed", False):
                raise RewardContractError(
                    f"reward {self.name!r} closed sys.{name}, to which the run writes: leave it "
                    "open, and use contextlib.redirect_stdout to silence a library"
                )

    def release(self) -> None:
        """Release what the reward holds, such as a reward model's memory."""
        if callable(getattr(self.reward, "release", None)):
            self.reward.release()

    def bind(self, tokenizer: Any) -> "CheckedReward":
        """Return this reward with what it wraps bound to a tokenizer, where it can be."""
        if not callable(getattr(self.reward, "bind", None)):
            return self
        return replace(self, reward=self.reward.bind(tokenizer))

    def _select(self, columns: dict[str, Any]) -> dict[str, Any]:
        missing = [name for name in self.required if name not in columns]
        if missing:
            raise RewardContractError(
                f"reward {self.name!r} asks for {', '.join(map(repr, missing))}, which the "
                "dataset lacks; add the column, or give the parameter a default "
                f"(there are: {', '.join(sorted(columns))})"
            )
        return {
            name: self._checked_log(value) if name == "log_metric" else _own(value)
            for name, value in columns.items()
            if self.accepted is None or name in self.accepted
        }

    @staticmethod
    def _checked_log(log: Any) -> Any:
        """Return ``log_metric`` so that only numbers get through: a mean is taken of them later."""
        if not callable(log):  # a column of that name
            return log

        def log_metric(name: str, value: Any) -> None:
            try:
                log(redact(str(name)), float(value))
            except Exception as exc:  # of the reward's code, like any other that it raises
                raise TypeError(
                    f"log_metric wants a number, not {_shortened(_text_of(value))}"
                ) from exc

        return log_metric

    def _failed(self, error: RewardContractError, columns: dict[str, Any]) -> list[Score]:
        """Raise, or return all rows as unscorable where that was asked for."""
        if self.on_error == "stop":
            raise error from error.__cause__
        count = len(columns["completions"])
        self._count_errors(count, columns, str(error))
        return [None] * count

    def _count_errors(self, count: int, columns: dict[str, Any], reason: str = "") -> None:
        if "log_metric" in columns:
            columns["log_metric"](f"rewards/{self.name}/errors", float(count))
        if reason:
            warnings.warn(
                f"{count} completions count as unscorable: {reason}", RuntimeWarning, stacklevel=2
            )

    def _culprit(self, columns: dict[str, Any], kind: type[BaseException]) -> str:
        """Return the first row on which alone the reward raises the same, with an excerpt."""
        count = len(columns.get("completions", ()))
        if self.on_error != "stop" or count > MAX_ROWS_TRIED:
            return ""
        for row in range(count):
            one = {
                name: [value[row]] if isinstance(value, list) and len(value) == count else value
                for name, value in columns.items()
            }
            try:
                with put_back():
                    within(self.timeout, lambda one=one: self._call(one))
            except _NOT_ITS_OWN:
                raise
            except kind:
                return f" in row {row} (completion: {_excerpt(one['completions'][0])})"
            except BaseException:  # a single row is another case to it
                return ""
        return ""

    def _attributed(self, exc: BaseException, where: str = "") -> RewardContractError:
        said = _shortened(redact(" ".join(_text_of(exc, str).split())))
        error = RewardContractError(
            f"reward {self.name!r}{where} raised {type(exc).__name__}: {said}; correct it, or "
            "return None for a row it cannot score"
        )
        error.__cause__ = exc
        return error

    def _too_slow(self, exc: Exception) -> RewardContractError:
        error = RewardContractError(
            f"reward {self.name!r} took more than {self.timeout:g} s"
            f"{f' ({exc})' if str(exc) else ''}; make it faster, give its requests a time limit, "
            "or raise trainer.reward_timeout_seconds"
        )
        error.__cause__ = exc
        return error

    def _scores(self, output: Any, columns: dict[str, Any]) -> list[Score]:
        completions = columns["completions"]
        values = _listed(output)
        if not isinstance(values, list | tuple):
            error = (
                f"reward {self.name!r} returned a {type(output).__name__}; return a list of one "
                "float (or None) per completion, in order"
            )
            return self._failed(RewardContractError(error), columns)
        if len(values) != len(completions):
            error = (
                f"reward {self.name!r} returned {len(values)} scores for {len(completions)} "
                "completions; return one float (or None) per completion, in order"
            )
            return self._failed(RewardContractError(error), columns)
        scores = [_number(value) for value in values]
        wrong = [row for row, value in enumerate(scores) if value is not None and value != value]
        if wrong and self.on_error == "stop":
            row = wrong[0]
            raise RewardContractError(
                f"reward {self.name!r} returned {_shortened(_text_of(values[row]))} in row {row}; "
                f"return a finite float, or None where it does not apply; float32 holds up to "
                f"{_LARGEST_SCORE:.2g} (completion: {_excerpt(completions[row])})"
            )
        if self.on_error != "stop":
            self._count_errors(len(wrong), columns)
        return [None if row in wrong else value for row, value in enumerate(scores)]


def _own(value: Any) -> Any:
    """Return a copy of lists and dicts within lists and dicts; what else they hold is shared."""
    if type(value) is list:
        if not {list, dict} & set(map(type, value)):
            return value[:]
        return [_own(item) for item in value]
    if type(value) is dict:
        return {key: _own(item) for key, item in value.items()}
    return value


def _listed(output: Any) -> Any:
    """Return a tensor or an array as a list; anything else as it is."""
    try:
        return output.tolist() if hasattr(output, "tolist") else output
    except Exception:  # on the meta device, for one
        return output


def _number(value: Any) -> Score:
    """Return a score as a finite float of float32's range or None; NaN for what is neither."""
    if value is None:
        return None
    try:
        number = value.item() if getattr(value, "ndim", None) == 0 else value
        score = float(number) if isinstance(number, int | float) else math.nan  # a bool is 0 or 1
    except Exception:  # an int beyond any float, or an object of its own mind
        return math.nan
    return score if abs(score) <= _LARGEST_SCORE else math.nan


class AsyncCheckedReward(CheckedReward):
    """A checked reward whose call is awaited; TRL runs all of these at the same time."""

    async def __call__(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, **columns: Any
    ) -> list[Score]:
        """Return B scores; as in the base class."""
        try:
            async with asyncio.timeout(self.timeout) as limit:
                output = await self.reward(**self._select(columns))
        except (KitError, *_NOT_ITS_OWN):
            raise
        except BaseException as exc:
            if isinstance(exc, asyncio.CancelledError) and _is_cancelled():
                raise  # from outside
            too_slow = isinstance(exc, TimeoutError) and limit.expired()
            error = self._too_slow(exc) if too_slow else self._attributed(exc)
            return self._failed(error, columns)
        return self._scores(output, columns)


class OverdueError(TimeoutError):
    """A call took longer than it may; not to be confused with a TimeoutError of the call itself."""


class _Alarm(BaseException):
    """Raised inside a reward by its alarm; no ``except Exception`` of the reward catches it."""


_NOT_ITS_OWN = (KeyboardInterrupt, GeneratorExit, _Alarm)
"""What may pass through a reward and was not raised by it; ``sys.exit()`` and others were."""


def _end_process(exc: BaseException | None) -> None:
    """End a process without what its parent would do at its end, with the code it asked for."""
    code = exc.code if isinstance(exc, SystemExit) else 1
    os._exit(code if isinstance(code, int) else int(code is not None))


def _is_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def within(seconds: float | None, call: Callable[[], Any]) -> Any:
    """Return ``call()``, or raise OverdueError when it takes longer than ``seconds``.

    On the main thread of a Unix system an alarm interrupts it wherever Python looks at signals, in
    a regular expression that backtracks as well, and where the call catches everything; a call
    that uses SIGALRM itself takes the limit away, and C code that never looks at signals, such as
    ``sum(range(10**12))``, ends when it ends. Elsewhere the call runs in a thread of its own,
    which cannot be ended and is left behind.

    Raises:
        OverdueError: With the file and line it was at, where that is known.
    """
    if seconds is None:
        return call()
    on_main = threading.current_thread() is threading.main_thread()
    if not (on_main and hasattr(signal, "setitimer")):
        return _within_thread(seconds, call)

    ended, rings = False, 0
    tracing = sys.gettrace()

    def ring(number: int, frame: Any) -> None:
        nonlocal rings
        if ended:  # an alarm that comes late must not leave this function
            return
        rings += 1
        alarm = _Alarm(_place(frame))
        if rings > _RINGS_BEFORE_TRACING:
            _raise_at_next_line(frame, alarm)
        raise alarm

    handler = signal.signal(signal.SIGALRM, ring)
    # Rings again and again, in case a bare ``except:`` of the reward swallows the first one.
    left, interval = signal.setitimer(signal.ITIMER_REAL, seconds, 0.1)
    try:
        try:
            return call()
        finally:
            ended = True
    except _Alarm as exc:
        raise OverdueError(str(exc)) from None
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        if rings > _RINGS_BEFORE_TRACING:
            sys.settrace(tracing)
        signal.signal(signal.SIGALRM, handler)
        signal.setitimer(signal.ITIMER_REAL, left, interval)


def _raise_at_next_line(frame: Any, alarm: _Alarm) -> None:
    """Raise once more where the frame goes on: in the ``except:`` that has caught the alarm."""

    def trace(_: Any, event: str, __: Any) -> Any:
        if event == "line":
            raise alarm
        return trace

    while frame is not None and frame.f_code is not within.__code__:
        frame.f_trace = trace
        frame = frame.f_back
    sys.settrace(trace)


def _place(frame: Any) -> str:
    """Return the innermost file and line outside of Python's own library."""
    library = sysconfig.get_paths()["stdlib"]
    own = frame
    while own is not None and own.f_code.co_filename.startswith((library, "<frozen")):
        own = own.f_back
    own = own or frame
    return f"it was at {own.f_code.co_filename}:{own.f_lineno}"


def _within_thread(seconds: float, call: Callable[[], Any]) -> Any:
    result: Future[Any] = Future()

    def work() -> None:
        try:
            result.set_result(call())
        except BaseException as exc:  # handed to the caller
            result.set_exception(exc)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        raise OverdueError
    return result.result()


def checked(func: Callable[..., Any], name: str | None = None) -> CheckedReward:
    """Return the reward wrapped so that its call and its scores are verified.

    The wrapper has the reward's name, awaits an async reward, passes only the keywords the reward
    accepts (``def f(completions, prompts=None)`` works), and pickles if the reward does.

    >>> def polite(completions):
    ...     return ["please" in text for text in completions]
    >>> checked(polite)(completions=["please", "now"], prompts=["a", "b"])
    [1.0, 0.0]

    Args:
        func: The reward.
        name: Name of its metric; None: its own.
    """
    if isinstance(func, CheckedReward):
        return replace(func, name=name or func.name)
    accepted, takes_any, required = keywords_of(func)
    return (AsyncCheckedReward if _is_async(func) else CheckedReward)(
        reward=func,
        name=name or name_of(func),
        accepted=None if takes_any else frozenset(accepted),
        required=tuple(required),
    )


def guarded(reward: Any, timeout: float | None, on_error: str) -> Any:
    """Return a checked reward with a time limit, and a choice between ``stop`` and ``skip``.

    A torch module, which TRL scores with itself, is returned as it is.
    """
    if not isinstance(reward, CheckedReward):
        return reward
    return replace(reward, timeout=timeout, on_error=on_error)


def _is_async(func: Any) -> bool:
    """Return whether a call gives a coroutine, for functions, partials and callable objects."""
    while isinstance(func, functools.partial):
        func = func.func
    if hasattr(func, "is_async"):
        return func.is_async
    return inspect.iscoroutinefunction(func) or inspect.iscoroutinefunction(func.__call__)


def _excerpt(completion: Completion) -> str:
    if not isinstance(completion, str):
        completion = str(completion[-1].get("content")) if completion else ""
    return _shortened(repr(completion))


def _text_of(value: Any, of: Callable[[Any], str] = repr) -> str:
    try:
        return of(value)
    except Exception:  # an object that cannot even say what it is
        return f"a {type(value).__name__}"


def _shortened(text: str) -> str:
    if len(text) <= _MAX_COMPLETION_CHARACTERS:
        return text
    return f"{text[: _MAX_COMPLETION_CHARACTERS - 3]}..."


def keywords_of(func: Any) -> tuple[list[str], bool, list[str]]:
    """Return (names accepted by keyword, whether any keyword is accepted, the required names)."""
    try:
        parameters = inspect.signature(func).parameters.values()
    except (TypeError, ValueError):  # some callables of C extensions have no signature
        return [], True, []
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    names = [p.name for p in parameters if p.kind in by_name]
    required = [p.name for p in parameters if p.kind in by_name and p.default is p.empty]
    return names, any(p.kind is p.VAR_KEYWORD for p in parameters), required


def name_of(func: Any) -> str:
    """Return the name of a reward's metric."""
    while isinstance(func, functools.partial):
        func = func.func
    return getattr(func, "__name__", type(func).__name__)
