"""Reward for the expected mathematical answer, which math-verify compares in another process."""

import contextlib
import functools
import json
import os
import subprocess
import sys
import threading
import weakref
from dataclasses import dataclass, field
from typing import Any

import regex  # re has no pattern for nested braces

from rloo_kit.errors import RewardLoadError
from rloo_kit.types import Completions, Scores

from ._text import check_least, column_of, expected_text, tagged_answer
from ._time_limit import time_limit
from .thinking import AnswerReward

# Importing sympy takes two seconds; on a loaded machine, many
_START_SECONDS = 120.0
# Only this many characters at the end of an answer are read: math-verify is slow in long texts
_MAX_CHARACTERS = 4000
_BOXED = r"\\boxed(\{(?:[^{}]++|(?1))*+\})"


class _Worker:
    """Process that has math-verify loaded.

    It is started at the first request, and started again after it has ended.
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle this object without its process; the copy starts its own process."""
        return type(self), ()

    def ask(self, request: dict[str, str], timeout_seconds: float, memory_mib: int) -> bool | None:
        """Send a request to the process and return its reply.

        Return None if the request took too long, if it failed, or if it ended the process.

        Args:
            request: ``gold`` (the expected answer) and optionally ``answer``. The reply is whether
                they are equal or, without ``answer``, whether ``gold`` can be read.
            timeout_seconds: Time limit of the request.
            memory_mib: Memory limit of the process, which is set when it starts.

        Raises:
            RewardLoadError: math-verify is missing, or the process does not start.
        """
        with self._lock:
            reply = None
            try:
                process = self._process
                if process is None or process.poll() is not None:
                    process = self._start(timeout_seconds, memory_mib)
                with contextlib.suppress(BrokenPipeError):
                    print(json.dumps(request), file=process.stdin, flush=True)
                reply = _reply(process, timeout_seconds)
            finally:  # after Ctrl-C too: a late reply must not count for the next request
                if reply is None:
                    self.end()
            return reply["reply"] if reply else None

    def end(self) -> None:
        """End the process if it is running."""
        process = self._process
        self._process = None
        if process is not None:
            process.kill()
            with contextlib.suppress(BrokenPipeError):
                process.communicate()  # closes its pipes

    def _start(self, timeout_seconds: float, memory_mib: int) -> "subprocess.Popen[str]":
        self.end()
        command = [sys.executable, "-P", "-m", f"{__package__}._math_worker"]
        self._process = process = subprocess.Popen(
            [*command, str(timeout_seconds), str(memory_mib)],
            encoding="utf-8",
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
                f"the process of the reward 'math' did not start: {first['error']}; run "
                "`pip install math-verify`, or raise memory_mib"
            )
        return process


def _reply(process: "subprocess.Popen[str]", seconds: float) -> dict[str, Any] | None:
    """Read a line of JSON from a process and return it as a dict.

    Return None if the process ends or takes longer than ``seconds``; it is killed then.
    """
    assert process.stdout is not None
    with time_limit(seconds, process.kill) as was_in_time:
        line = process.stdout.readline()
    return json.loads(line) if was_in_time() and line.endswith("\n") else None


@dataclass(frozen=True)
class Math(AnswerReward):
    r"""Reward the expected mathematical answer: 1.0 if it is given, 0.0 if not.

    math-verify reads the text in the last ``<answer>`` tag or, without tags, all text after the
    last ``</think>``; of a longer text it reads the last 4,000 characters. It knows numbers,
    fractions, percentages, roots, symbolic expressions, equations, sets, intervals and matrices, in
    plain text, LaTeX or ``\boxed``. Units are ignored. If the answer has several expressions,
    math-verify prefers one that is stated as the final answer, then one in ``\boxed``, then the
    last one.

    The score is None if the expected answer is missing, or if math-verify cannot read it. The
    metric ``rewards/math/gold_not_parsed`` counts the expected answers that cannot be read. The
    comparison runs in a separate process, which starts at the first call. An answer that needs too
    much time or memory scores 0.0.

    Source: math-verify 0.9 (``parse`` and ``verify`` with their defaults). One difference: a short
    line that is only mathematics is read as LaTeX even without delimiters.

    >>> reward = Math()
    >>> reward(completions=["hm</think>It is $\\frac{2}{4}$.", "0.51"], answer=["1/2", "1/2"])
    [1.0, 0.0]
    >>> reward.release()
    """

    __name__ = "math"

    column: str = "answer"
    """Dataset column of the expected answers."""
    require_boxed: bool = False
    r"""Read only the last ``\boxed{...}`` of the answer; score 0.0 if there is none."""
    timeout_seconds: float = 3.0
    """Time limit for comparing one row, in seconds. If a row takes longer, the process is ended,
    and a new one needs two seconds to start."""
    memory_mib: int = 1024
    """Limit of the process's memory (address space), in MiB; only on Linux."""
    _worker: _Worker = field(default_factory=_Worker, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Check that the limits are large enough for math-verify."""
        check_least(self, "timeout_seconds", 0.1, 2**22)
        check_least(self, "memory_mib", 256, 2**31)

    def __call__(
        self, completions: Completions, prompts: Completions | None = None, **columns: Any
    ) -> Scores:
        """Return one score per completion: 1.0, 0.0, or None.

        None means that the expected answer is missing, or that math-verify cannot read it.

        Raises:
            RewardContractError: The dataset has no column of expected answers.
            RewardLoadError: math-verify is missing, or its process does not start.
        """

        @functools.cache  # identical rows are compared only once
        def ask(**request: str) -> bool | None:
            return self._worker.ask(request, self.timeout_seconds, self.memory_mib)

        given = [*map(expected_text, column_of(columns, self.column, self.__name__))]
        golds = [gold if gold and ask(gold=gold) else None for gold in given]
        unread = golds.count(None) - given.count(None)
        if unread and "log_metric" in columns:
            columns["log_metric"](f"rewards/{self.__name__}/gold_not_parsed", float(unread))
        scores: Scores = []
        for text, opened, gold in self.rows(completions, prompts, golds):
            answer = (self.answer(text, opened) or "").strip()
            answer = last_boxed(answer) if self.require_boxed else tagged_answer(answer)
            answer = answer[-_MAX_CHARACTERS:]
            is_right = gold and answer and ask(gold=gold, answer=answer)
            scores.append(float(bool(is_right)) if gold else None)
        return scores

    def release(self) -> None:
        """End the process that compares answers; the next call starts a new one."""
        self._worker.end()


def last_boxed(text: str) -> str:
    r"""Return the last ``\boxed{...}`` in a text, with its braces.

    Return "" if there is none, or if the last one is not closed.

    >>> last_boxed(r"\boxed{1}, or \boxed{\frac{1}{2}}. Done.")
    '\\boxed{\\frac{1}{2}}'
    """
    found = regex.match(_BOXED, text[text.rfind("\\boxed{") :][:_MAX_CHARACTERS])
    return found[0] if found else ""


# The reward with its defaults
math = Math()
