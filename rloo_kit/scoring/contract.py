"""Wrapper that checks the calls, the time limit and the scores of a reward."""

import asyncio
import functools
import inspect
import math
import signal
import threading
import traceback
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

from rloo_kit.errors import KitError, RewardContractError, RewardLoadError
from rloo_kit.text.redaction import redact
from rloo_kit.text.wording import first_line, format_value, text_of
from rloo_kit.types import Reward, Score, Tokenizer

T = TypeVar("T")
# The largest float32: scores are stored as float32
MAX_SCORE = 3.4028234663852886e38


# Columns of a dataset that are not passed on as such: rewards get other values under these names
RESERVED = ("prompt", "prompts", "completion", "completions", "completion_ids")
# Argument that a trainer passes to a reward -> its value if there is no trainer
OUTSIDE_OF_TRAINING = {
    "trainer_state": None,  # TrainerState of transformers
    "log_extra": lambda column, values: None,  # adds a column to the table of completions
    "log_metric": lambda name, value: None,  # logs a metric of the reward
}


def reward_columns(
    rows: Sequence[Mapping[str, Any]],
    completions: Sequence[Any],
    completion_ids: list[list[int]] | None,
    **of_trainer: object,
) -> dict[str, Any]:
    """Return the keyword arguments with which TRL calls a reward.

    They are the columns, each a list with one value per completion, and the trainer's arguments.

    Args:
        rows: Row of the dataset for each completion, with a ``prompt``. If a row lacks a column
            that another row has, its value there is None.
        completions: The completions, as texts or conversations.
        completion_ids: Token ids of each completion; None if they are not known.
        **of_trainer: The trainer's values for ``trainer_state``, ``log_extra`` and ``log_metric``.
    """
    names = sorted({name for row in rows for name in row} - set(RESERVED))
    known = {} if completion_ids is None else {"completion_ids": completion_ids}
    return {
        **{name: [row.get(name) for row in rows] for name in names},
        **known,
        "prompts": [row["prompt"] for row in rows],
        "completions": completions,
        **OUTSIDE_OF_TRAINING,
        **of_trainer,
    }


def _copied(value: Any) -> Any:
    """Return a copy of a value, with new lists and dicts at every level.

    A reward may change its arguments, but the trainer and other rewards use the same completions.
    """
    if type(value) is dict:
        return {key: _copied(item) for key, item in value.items()}
    if type(value) is not list:
        return value
    if value and isinstance(value[0], int):  # token ids, which need no copy of their own
        return value.copy()
    return [_copied(item) for item in value]


@dataclass(frozen=True)
class CheckedReward:
    """Wrapper that calls a reward with the keywords it accepts and checks every returned score."""

    reward: Any  # a callable, which may have the methods ``bind(tokenizer)`` and ``release()``
    name: str  # name of the reward's metric
    timeout: float | None = None  # seconds a call may take; None: no limit
    on_error: str = "stop"
    """Behaviour if rows cannot be scored. ``stop``: raise an error. ``skip``: give these rows None,
    and count them in the metric ``rewards/NAME/errors``."""

    @property
    def __name__(self) -> str:
        """Name of the reward's metric."""
        return self.name

    def __call__(self, **columns: Any) -> list[Score]:
        """Return one score per completion, each a finite float or None.

        If ``on_error`` is ``skip``, rows without a valid score get None.

        Raises:
            RewardContractError: A column that the reward needs is missing; or ``on_error`` is
                ``stop``, and the reward raised an error, took too long, or did not return one
                valid score per completion.
        """
        try:
            output = within(self.timeout, lambda: self.reward(**self._select(columns)))
        except (KitError, *_PASSED_ON):
            # The message of a KitError already says what to do
            raise
        except BaseException as exc:
            # A sys.exit() in a reward must not end a run silently
            return self._raised(exc, columns)
        return self._scores(output, columns)

    def check_columns(self, names: Iterable[str]) -> None:
        """Check that a dataset has the columns that the reward reads, without calling the reward.

        Args:
            names: Names of the dataset's columns.

        Raises:
            RewardContractError: A column is missing.
        """
        if hasattr(self.reward, "check_columns"):
            self.reward.check_columns(names)
        columns = reward_columns([dict.fromkeys(["prompt", *names])], [""], [[]])
        self._require(columns_read(self.reward), columns)

    def release(self) -> None:
        """Release the memory that the reward holds, such as the weights of a reward model."""
        if hasattr(self.reward, "release"):
            self.reward.release()

    def bind(self, tokenizer: Tokenizer) -> "CheckedReward":
        """Return a copy of this wrapper whose reward is bound to a tokenizer.

        If the reward has no ``bind`` method, return this wrapper itself.
        """
        if not hasattr(self.reward, "bind"):
            return self
        return replace(self, reward=self.reward.bind(tokenizer))

    def _require(self, needed: Iterable[str], columns: dict[str, Any]) -> None:
        if missing := set(needed) - columns.keys():
            raise RewardContractError(
                f"reward {self.name!r} asks for {', '.join(map(repr, sorted(missing)))}, which the "
                "dataset lacks; add the column, rename another column with data.columns, or give "
                f"the parameter a default (available arguments: {', '.join(sorted(columns))})"
            )

    def _select(self, columns: dict[str, Any]) -> dict[str, Any]:
        accepted, takes_any, required = keywords_of(self.reward)
        self._require(required, columns)
        chosen = {
            name: _copied(value) for name, value in columns.items() if takes_any or name in accepted
        }
        if log := chosen.get("log_metric"):
            # A reward does not know the number in its name, as in accuracy_2
            kind, own = (f"rewards/{name}/" for name in (name_of(self.reward), self.name))
            # The names end up in trackers and checkpoints, so secrets in them are masked
            chosen["log_metric"] = lambda name, value: log(
                redact(str(name).replace(kind, own, 1)), float(value)
            )
        return chosen

    def _failed(
        self, fault: str, columns: dict[str, Any], cause: BaseException | None = None
    ) -> list[Score]:
        """Report that a call failed: raise an error, or if ``on_error`` is ``skip``, only warn.

        After a warning, return None for every row.

        Args:
            fault: What is wrong, as the end of a message that begins with the reward's name.
            columns: The arguments of the call.
            cause: Exception of the reward, if it raised one.

        Raises:
            RewardContractError: ``on_error`` is ``stop``.
        """
        if self.on_error == "stop":
            raise RewardContractError(f"reward {self.name!r}{fault}") from cause
        count = len(columns["completions"])
        self._count_errors(count, columns)
        message = f"{count} completions count as unscorable: reward {self.name!r}{fault}"
        warnings.warn(message, RuntimeWarning, stacklevel=2)
        return [None] * count

    def _count_errors(self, count: int, columns: dict[str, Any]) -> None:
        if "log_metric" in columns:
            columns["log_metric"](f"rewards/{self.name}/errors", float(count))

    def _raised(self, exc: BaseException, columns: dict[str, Any]) -> list[Score]:
        if isinstance(exc, OverdueError):
            fault = (
                f" took more than {self.timeout:g} s ({exc}); make it faster, or raise "
                "trainer.reward_timeout_seconds"
            )
        else:
            fault = (
                f" raised {type(exc).__name__}: {first_line(exc)}{_place_of(exc)}; correct it, or "
                "return None for a row it cannot score"
            )
        return self._failed(fault, columns, exc)

    def _scores(self, output: Any, columns: dict[str, Any]) -> list[Score]:
        completions = columns["completions"]
        got = ""
        # Tensors and arrays have tolist()
        values = output.tolist() if hasattr(output, "tolist") else output
        if not isinstance(values, list | tuple):
            got = f"a {type(output).__name__}"
        elif len(values) != len(completions):
            got = f"{len(values)} scores for {len(completions)} completions"
        if got:
            return self._failed(
                f" returned {got}; return a list with one float (or None) for each completion, in "
                "order",
                columns,
            )
        scores = [_number(value) for value in values]
        wrong = [row for row, score in enumerate(scores) if score != score]
        if self.on_error == "skip":
            self._count_errors(len(wrong), columns)
        elif wrong:
            self._failed(
                f" returned {format_value(values[wrong[0]])} in row {wrong[0]}; return a finite "
                f"float, or None (completion: {format_value(text_of(completions[wrong[0]]))})",
                columns,
            )
        return [None if row in wrong else score for row, score in enumerate(scores)]


class AsyncCheckedReward(CheckedReward):
    """Checked reward that is async; TRL awaits all async rewards at the same time."""

    async def __call__(  # pyright: ignore[reportIncompatibleMethodOverride] - awaited, see above
        self, **columns: Any
    ) -> list[Score]:
        """Return one score per completion, with the checks of ``CheckedReward.__call__``."""
        limit = asyncio.timeout(self.timeout)
        try:
            async with limit:
                output = await self.reward(**self._select(columns))
        except (KitError, *_PASSED_ON):
            raise
        except BaseException as exc:
            task = asyncio.current_task()
            if isinstance(exc, asyncio.CancelledError) and task is not None and task.cancelling():
                # The caller cancelled the task
                raise
            is_overdue = isinstance(exc, TimeoutError) and limit.expired()
            return self._raised(OverdueError("it was waiting") if is_overdue else exc, columns)
        return self._scores(output, columns)


def checked(
    func: Callable[..., Any], name: str | None = None, given: object = None
) -> CheckedReward:
    """Return a wrapper around a reward that checks its calls and its scores.

    The wrapper passes only the keyword arguments that the reward accepts, so that
    ``def f(completions, prompts=None)`` works. If the reward is async, so is the wrapper. The
    wrapper can be pickled if the reward can.

    Args:
        func: The reward, or a wrapper of a reward.
        name: Name of its metric; None: the name of the function or class.
        given: What the user wrote for the reward, for the error message; None: ``func``.

    Raises:
        RewardLoadError: ``func`` cannot be called.
    """
    if isinstance(func, CheckedReward):
        return replace(func, name=name or func.name)
    if inspect.isclass(func) or not callable(func):
        raise RewardLoadError(
            f"reward {format_value(given or func)} is a {type(func).__name__}, which cannot be "
            "called as a reward; give a function, an instance with __call__, or, in place of a "
            "name, load_rewards(name)[0].func"
        )
    kind = AsyncCheckedReward if _is_async(func) else CheckedReward
    return kind(func, name or name_of(func))


def guarded(reward: Reward, timeout: float | None, on_error: str) -> Any:
    """Return a checked reward with a time limit and a rule for rows that cannot be scored.

    In a composed reward, each part gets the limit and the rule. If a part fails, only the rows for
    which it was called count as unscorable.

    Args:
        reward: A ``CheckedReward``. A torch module is returned unchanged.
        timeout: Seconds that a call may take; None: no limit.
        on_error: ``stop`` or ``skip`` (see ``CheckedReward.on_error``).
    """
    if not isinstance(reward, CheckedReward):
        return reward
    if hasattr(reward.reward, "guarded"):
        return replace(reward, reward=reward.reward.guarded(timeout, on_error))
    return replace(reward, timeout=timeout, on_error=on_error)


def call_reward(func: Callable[..., Any], columns: dict[str, Any]) -> list[Score]:
    """Call a reward, wait for the result if the reward is async, and return the scores."""
    found = func(**columns)
    if not inspect.iscoroutine(found):
        return found
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(found)
    with ThreadPoolExecutor(1) as pool:  # a notebook's thread has a running loop
        return pool.submit(asyncio.run, found).result()


def take_rows(columns: dict[str, Any], rows: Sequence[int]) -> dict[str, Any]:
    """Return a reward's keyword arguments, with each column reduced to the given rows.

    A column is a list with one value per completion. All other arguments are returned unchanged.

    Args:
        columns: The keyword arguments, with ``completions``.
        rows: Indices of the rows, counted from 0.
    """
    count = len(columns["completions"])
    return {
        name: [values[row] for row in rows]
        if isinstance(values, list | tuple) and len(values) == count
        else values
        for name, values in columns.items()
    }


def keywords_of(func: Reward) -> tuple[list[str], bool, list[str]]:
    """Return which keyword arguments a reward accepts.

    The result is (accepted names, whether ``**kwargs`` accepts every name, required names).
    """
    try:
        parameters = inspect.signature(func).parameters.values()
    except (TypeError, ValueError):
        # Some callables of C extensions have no signature
        return [], True, []
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    required = [p.name for p in named if p.default is p.empty]
    return [p.name for p in named], any(p.kind is p.VAR_KEYWORD for p in parameters), required


def columns_read(func: Reward) -> set[str]:
    """Return the names of the arguments that a reward requires.

    They are its parameters without a default and, for a built-in reward, the names in ``reads``.
    """
    reads = getattr(func, "reads", ())
    return {*keywords_of(func)[2], *(reads if isinstance(reads, tuple) else ())}


def name_of(func: Reward) -> str:
    """Return the name of a reward's metric: the name of its function or class."""
    func = _innermost(func)
    return getattr(func, "__name__", type(func).__name__)


def _is_async(func: Any) -> bool:
    """Return whether calling a function, partial or callable object returns a coroutine."""
    func = _innermost(func)
    if hasattr(func, "is_async"):
        return func.is_async
    return inspect.iscoroutinefunction(func) or inspect.iscoroutinefunction(func.__call__)


def _innermost(func: Reward) -> Any:
    while isinstance(func, functools.partial):
        func = func.func
    return func


def _number(value: Any) -> Score:
    """Return a score as a float, None if it is None, or NaN if it is not a valid score.

    A valid score is a finite number that float32 can store.
    """
    if value is None:
        return None
    try:
        number = value.item() if getattr(value, "ndim", None) == 0 else value
        score = float(number) if isinstance(number, int | float) else math.nan
    except OverflowError:
        # A whole number too large for a float
        return math.nan
    return score if abs(score) <= MAX_SCORE else math.nan


def _place_of(exc: BaseException) -> str:
    """Return `` (FILE:LINE)`` for the place in the reward's own file where it raised an error.

    Return "" if the traceback has no such place.
    """
    frames = traceback.extract_tb(exc.__traceback__)
    kit = Path(__file__).parents[1]
    callers = (kit / "scoring", kit / "tools")  # tools calls the get_reward of an environment
    frames = [one for one in frames if Path(one.filename).parent not in callers]
    own = [one for one in frames if one.filename == frames[0].filename]
    return f" ({Path(own[-1].filename).name}:{own[-1].lineno})" if own else ""


# --- time limit ----------------------------------------------------------------------------------


class OverdueError(TimeoutError):
    """A call exceeded its time limit.

    It is a separate class, so that it cannot be confused with a TimeoutError that the call raises.
    """


class _Alarm(BaseException):
    """Exception that interrupts a call at its time limit.

    It is not an ``Exception``, so that no ``except Exception`` in the call catches it.
    """


# Exceptions that are passed on, because the reward did not cause them
_PASSED_ON = (KeyboardInterrupt, GeneratorExit, _Alarm)


def within(seconds: float | None, call: Callable[[], T]) -> T:
    """Return the result of ``call()``, or raise OverdueError if it takes longer than ``seconds``.

    SIGALRM interrupts the call, even inside a regular expression that backtracks. C code that never
    checks signals, such as ``sum(range(10**12))``, is not interrupted; the error is raised when it
    returns. The limit works only in the main thread and only on Unix; elsewhere, and if ``seconds``
    is None, the call may take any time.

    Raises:
        OverdueError: The call took too long. The message names the file and line that it had
            reached.
    """
    on_main = threading.current_thread() is threading.main_thread()
    if seconds is None or not on_main or not hasattr(signal, "setitimer"):
        return call()
    place = ""
    has_ended = False

    def ring(_number: int, frame: FrameType | None) -> None:
        """Interrupt the call, and remember the line that it had reached.

        Raises:
            _Alarm: The call has not ended.
        """
        nonlocal place
        if not has_ended:
            # A late alarm must not leave this function
            place = f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame else "an unknown line"
            raise _Alarm

    handler = signal.signal(signal.SIGALRM, ring)
    earlier = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        try:
            result = call()
        finally:
            has_ended = True
    except BaseException as exc:
        if not place or isinstance(exc, KeyboardInterrupt):
            raise
        raise OverdueError(f"it was at {place}") from None
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        signal.setitimer(signal.ITIMER_REAL, *earlier)
    return result
