"""Reward of the expected mathematical answer after the thought, by math-verify."""

import contextlib
import functools
import importlib.util
import json
import os
import subprocess
import sys
import threading
import weakref
from dataclasses import dataclass, field
from typing import Any

from rloo_kit.errors import RewardLoadError
from rloo_kit.types import Completions, Scores

from ._text import check_least, column_of, expected_text
from ._time_limit import time_limit
from .thinking import AnswerReward

# Importing sympy takes two seconds; on a loaded machine, many
_START_SECONDS = 120.0
# Only the end of an answer is read: math-verify's patterns are slow in long texts
_MAX_CHARACTERS = 4000


class _Worker:
    """A process with math-verify loaded, started at the first question and again after it died."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle without the running process; the copy starts its own."""
        return type(self), ()

    def ask(self, request: dict[str, str], timeout_seconds: float, memory_mib: int) -> bool | None:
        """Return the reply; None if the process took too long or died of the request.

        Raises:
            RewardLoadError: math-verify is missing, or the process does not start.
        """
        with self._lock:
            reply = None
            try:
                process = self._process
                if process is None or process.poll() is not None:
                    process = self._start(timeout_seconds, memory_mib)
                assert process.stdin is not None
                with contextlib.suppress(BrokenPipeError):
                    process.stdin.write(json.dumps(request).encode() + b"\n")
                    process.stdin.flush()
                reply = _reply(process, timeout_seconds)
            finally:  # after Ctrl-C too: a late reply must not count for the next request
                if reply is None:
                    self.end()
            return reply["reply"] if reply else None

    def end(self) -> None:
        """End the process, if there is one."""
        process = self._process
        self._process = None
        if process is not None:
            process.kill()
            with contextlib.suppress(BrokenPipeError):
                process.communicate()  # closes its pipes

    def _start(self, timeout_seconds: float, memory_mib: int) -> "subprocess.Popen[bytes]":
        if importlib.util.find_spec("math_verify") is None:
            raise RewardLoadError("the reward 'math' needs math-verify; pip install math-verify")
        self.end()
        self._process = process = subprocess.Popen(
            [
                sys.executable,
                "-P",
                "-m",
                f"{__package__}._math_worker",
                str(timeout_seconds),
                str(memory_mib),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={
                "PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path)),
                "SYSTEMROOT": os.environ.get("SYSTEMROOT", ""),  # without it Windows loads no DLL
            },
            start_new_session=True,  # Ctrl-C is for this process
        )
        weakref.finalize(self, process.kill)
        first = _reply(process, _START_SECONDS) or {"error": "it ended or took too long"}
        if "error" in first:
            raise RewardLoadError(
                "the process of the reward 'math' did not start: "
                f"{first['error']}; "
                "pip install math-verify, or raise memory_mib"
            )
        return process


def _reply(process: "subprocess.Popen[bytes]", seconds: float) -> dict[str, Any] | None:
    """Return the next line of a process as an object; None if it ends or takes too long."""
    assert process.stdout is not None
    with time_limit(seconds, process.kill) as was_in_time:
        line = process.stdout.readline()
    return json.loads(line) if was_in_time() and line.endswith(b"\n") else None


@dataclass(frozen=True)
class Math(AnswerReward):
    r"""Reward the expected mathematical answer: 1.0 if it is given, 0.0 if not.

    math-verify compares the last 4,000 characters after the last ``</think>``: numbers, fractions,
    percentages, roots, symbolic expressions, equations, sets, intervals and matrices, written
    plainly, in LaTeX or in ``\boxed``; units are ignored. If there are several, its rules choose
    the one that is called the final answer, then ``\boxed``, then the last one.

    None if the expected answer is missing or math-verify cannot read it (the metric
    ``rewards/math/gold_not_parsed`` counts these). The comparison runs in a process of its own,
    started at the first call; an answer that needs too much time or memory scores 0.0.

    Source: math-verify 0.9 (``parse`` and ``verify`` with their defaults); departure: a single
    line without delimiters is read as LaTeX.

    >>> reward = Math()
    >>> reward(completions=["hm</think>It is $\\frac{2}{4}$.", "0.51"], answer=["1/2", "1/2"])
    [1.0, 0.0]
    >>> reward.release()
    """

    __name__ = "math"

    column: str = "answer"
    """Dataset column of the expected answers."""
    require_boxed: bool = False
    r"""Read only the last ``\boxed{...}``, and score 0.0 without one."""
    timeout_seconds: float = 3.0
    """Wall time of one row. After a row that takes longer, a new process needs two seconds."""
    memory_mib: int = 1024
    """Address space of the process that compares, on Linux."""
    _worker: _Worker = field(default_factory=_Worker, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Refuse limits that nothing could keep."""
        check_least("timeout_seconds", self.timeout_seconds, 0.1, 2**22)
        check_least("memory_mib", self.memory_mib, 256, 2**31)

    def __call__(
        self,
        completions: Completions,
        prompts: Completions | None = None,
        **columns: Any,
    ) -> Scores:
        """Return one score per completion, in {0.0, 1.0}; None without an expected answer.

        Raises:
            RewardLoadError: math-verify is missing, or its process does not start.
        """
        golds = [*map(expected_text, column_of(columns, self.column, self.__name__))]
        ask = functools.cache(self._ask)  # rows that are the same cost one question
        unread = sum(gold is not None and not ask(gold=gold) for gold in golds)
        if unread and "log_metric" in columns:
            columns["log_metric"](f"rewards/{self.__name__}/gold_not_parsed", float(unread))
        scores: Scores = []
        for text, opened, gold in self.rows(completions, prompts, golds):
            answer = (self.answer(text, opened) or "").strip()
            answer = last_boxed(answer) if self.require_boxed else answer[-_MAX_CHARACTERS:]
            is_known = gold is not None and ask(gold=gold)
            is_right = is_known and answer and ask(gold=gold, answer=answer)
            scores.append(float(bool(is_right)) if is_known else None)
        return scores

    def release(self) -> None:
        """End the process that compares; the next call starts one again."""
        self._worker.end()

    def _ask(self, **request: str) -> bool | None:
        return self._worker.ask(request, self.timeout_seconds, self.memory_mib)


def last_boxed(text: str) -> str:
    r"""Return the last ``\boxed{...}`` with its braces; "" without one, or if it is not closed.

    >>> last_boxed(r"\boxed{1}, or \boxed{\frac{1}{2}}. Done.")
    '\\boxed{\\frac{1}{2}}'
    """
    _, boxed, rest = text.rpartition("\\boxed{")
    depth = 1 if boxed else 0
    for end, character in enumerate(rest[:_MAX_CHARACTERS]):
        depth += {"{": 1, "}": -1}.get(character, 0)
        if boxed and depth == 0:
            return boxed + rest[: end + 1]
    return ""


# The reward with its defaults
math = Math()
