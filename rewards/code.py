"""Reward for a program that passes its tests in a sandbox."""

import ast
import inspect
import json
import os
import re
import secrets
import threading
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from rloo_kit.errors import RewardContractError
from rloo_kit.types import Completions, Score, Scores

from . import _code_harness
from ._sandbox import Limits, run_python
from ._text import check_least, column_of, is_missing
from .thinking import AnswerReward

_TAGS = {"python", "python3", "py", ""}
_FENCE = re.compile(r"([ \t]*)(`{3,}|~{3,})[ \t]*([^\s`{]*)[^`\n]*\n?")


def fenced_code(text: str) -> str | None:
    r"""Return the code in the last fenced code block whose language is Python.

    If there is no such block, return the last fenced block without a language, or None. A block
    that is not closed does not count.

    >>> fenced_code("So:\n```python\nx = 1\n```\nIt prints:\n```\n1\n```")
    'x = 1\n'
    >>> fenced_code("x = 1") is None
    True
    """
    found: dict[bool, str] = {}  # whether the block names Python as its language -> its text
    lines = iter(text.splitlines(keepends=True))
    for fence in filter(None, map(_FENCE.fullmatch, lines)):
        indent, marks, tag = fence.groups()
        block = []
        for line in lines:
            end = line.strip()
            if end.startswith(marks) and not end.strip(marks):
                if tag.lower() in _TAGS:
                    found[tag != ""] = "".join(block)
                break
            block.append(line.removeprefix(indent))
    return found.get(True, found.get(False))


# One test has one of two forms:
# - `input` and `output` for a program that reads standard input and prints
# - Python code: `setup` (statements), `check` (a statement), and `sides` (the two sides of a check
#   that is an equation, or None)
_Test = dict[str, Any]


@dataclass(frozen=True)
class Code(AnswerReward):
    r"""Reward a program by the share of its tests that pass.

    Range: [0.0, 1.0]; with ``all_or_nothing``, 1.0 or 0.0. The program is the last Python block
    between ``` fences after the last ``</think>`` or, if there is none, the last block without a
    language. It runs in a separate process with only the standard library, in the sandbox that
    docs/how-to/code_sandbox.md describes. A program can lower only the score of its own completion,
    whatever it does. The score is None if there are no tests.

    Each row has a list of tests in the column that ``column`` names. The list may also be given as
    JSON text. There are two kinds of test, and all tests of a row are of the same kind:

    - A string is Python code, such as one assert (MBPP), or a function ``check`` and its call
      (HumanEval). It runs after the program in the same process. The two values of
      ``assert a == b`` are compared outside that process.
    - An object with ``input`` and ``output`` is one separate run of the program. It passes if the
      program prints the output. White space at the end of a line or of the whole output is ignored.
      If a run takes too long, all later runs count as failed.

    Instead of a list, an object with two lists, ``inputs`` and ``outputs`` (APPS), describes
    several such runs.

    >>> row = {"tests": [["assert add(1, 2) == 3", "assert add(1, 1) == 2"]]}
    >>> Code()(completions=["```python\ndef add(a, b): return 3\n```"], **row)
    [0.5]
    >>> Code()(completions=["No program.", "Nothing to test."], tests=[row["tests"][0], None])
    [0.0, None]
    """

    __name__ = "code"

    column: str = "tests"
    """Dataset column of the tests."""
    all_or_nothing: bool = False
    """Score 1.0 if all tests pass, else 0.0."""
    require_fence: bool = True
    """Score 0.0 if the answer has no program, which is a closed block between fences, in Python or
    without a language. False: run the whole answer as the program in that case."""
    timeout_seconds: float = 5.0
    """Limit of one run's wall time, in seconds. All tests of a row that are Python code share one
    run; each test with ``input`` and ``output`` has its own run."""
    memory_mib: int = 512
    """Limit of one run's memory (address space), in MiB."""
    max_workers: int | None = None
    """Number of programs that run at the same time; None: one per core that the process may use."""
    allow_weak: bool = False
    """Run programs even on a machine that cannot keep them from files and the network."""

    def __post_init__(self) -> None:
        """Check that the system can run the sandbox, and that the limits are large enough."""
        _ = self._limits
        if self.max_workers is not None:
            check_least(self, "max_workers", 1)

    @property
    def _limits(self) -> Limits:
        return Limits(self.timeout_seconds, self.memory_mib, allow_weak=self.allow_weak)

    def __call__(
        self, completions: Completions, prompts: Completions | None = None, **columns: Any
    ) -> Scores:
        """Return one score per completion; None for a row without tests.

        Raises:
            RewardContractError: The column is missing, or holds a value that is not a list of
                tests.
            BackendError: This machine lacks a protection that the sandbox requires.
        """
        column = column_of(columns, self.column, self.__name__)
        tests = [_read_tests(value, self.column) for value in column]
        rows = self.rows(completions, prompts, tests)
        stopped = threading.Event()
        # With more programs than cores, each takes longer and may exceed its limit of wall time
        affinity = getattr(os, "sched_getaffinity", None)  # None on macOS
        cores = len(affinity(0)) if affinity else os.cpu_count()
        with ThreadPoolExecutor(self.max_workers or cores, "rloo-kit code") as pool:
            try:
                return list(pool.map(lambda row: self._score(*row, stopped=stopped), rows))
            finally:  # an error, Ctrl-C and a time limit wait only for the programs that run
                stopped.set()

    def _score(
        self, text: str, opened: bool, tests: list[_Test], stopped: threading.Event
    ) -> Score:
        if not tests or stopped.is_set():
            return None
        answer = self.answer(text, opened)
        program = fenced_code(answer or "")
        if program is None and not self.require_fence:
            program = answer
        if program is None:
            return 0.0
        count = self._runs_passed if "input" in tests[0] else self._checks_passed
        passed = count(program, tests, stopped)
        return float(passed == len(tests)) if self.all_or_nothing else passed / len(tests)

    def _runs_passed(self, program: str, tests: list[_Test], stopped: threading.Event) -> int:
        passed = 0
        for test in tests:
            if stopped.is_set():
                break
            outcome = run_python(program, stdin=test["input"], limits=self._limits)
            right = outcome.ok and _lines(outcome.stdout) == _lines(test["output"])
            passed += right
            if outcome.reason == "timeout" or (self.all_or_nothing and not right):
                break
        return passed

    def _checks_passed(self, program: str, tests: list[_Test], _: object) -> int:
        # The harness is the program of the sandbox; its input is the length of the job, the job and
        # a secret that marks the answers it sent itself.
        text = json.dumps({"program": program, "cases": tests})
        secret = secrets.token_hex(_code_harness.SECRET_BYTES // 2)
        harness = inspect.getsource(_code_harness)
        stdin = f"{len(text):{_code_harness.HEADER_BYTES}}{text}{secret}"
        outcome = run_python(harness, stdin=stdin, limits=self._limits)
        first, *lines = outcome.stdout.split("\n")
        if not lines:  # the tests themselves took too long
            return 0
        right = json.loads(first)
        reports = {line.split(" ")[1]: line for line in lines if line.startswith(f"{secret} ")}
        return sum(
            reports.get(number) == f"{secret} {number} {right.get(number, 'passed')}"
            for number in map(str, range(len(tests)))
        )


# --- tests as datasets store them -----------------------------------------------------------------


def _read_tests(value: Any, column: str) -> list[_Test]:
    """Convert the value of one row to a list of tests; return [] if the value is missing.

    Raises:
        RewardContractError: The value is not a list of tests.
    """
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            value = [value] if value.strip() else None
    if is_missing(value):
        return []
    if isinstance(value, dict) and "fn_name" not in value:
        # {"inputs": [...], "outputs": [...]}; each key may also be singular
        given = value.get("inputs", value.get("input"))
        wanted = value.get("outputs", value.get("output"))
        if isinstance(given, list) and isinstance(wanted, list) and len(given) == len(wanted):
            pairs = zip(given, wanted, strict=True)
            value = [{"input": one, "output": other} for one, other in pairs]
    if isinstance(value, list | tuple):
        if all(isinstance(test, str) for test in value):
            return [check for test in value for check in _checks(test, column)]
        if all(isinstance(test, dict) and {"input", "output"} <= {*test} for test in value):
            return [{key: _joined(test[key]) for key in ("input", "output")} for test in value]
    raise RewardContractError(
        f"the column {column!r} holds {str(value)[:200]!r}, which is not a list of tests; give a "
        'list of asserts, or of {"input": ..., "output": ...}'
    )


def _joined(text: object) -> str:
    return "\n".join(map(str, text)) if isinstance(text, list) else str(text)


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]


def _checks(source: str, column: str) -> list[_Test]:
    """Split Python code into tests, one for each assert.

    If the code has other statements after an assert, or no assert, it becomes a single test.

    Raises:
        RewardContractError: The code is not Python, or every program would pass it.
    """
    try:
        body = _unfolded(ast.parse(source).body)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as exc:
        raise RewardContractError(
            f"the column {column!r} holds the test {source[:200]!r}, which is not Python ({exc}); "
            "correct it"
        ) from exc
    asyncs = (node for node in body if isinstance(node, ast.AsyncFunctionDef))
    coroutines = {node.name for node in asyncs if not node.decorator_list}
    body = [node for node in body if not _does_nothing(node, coroutines)]
    asserts = [node for node in body if isinstance(node, ast.Assert)]
    setup = [node for node in body if not isinstance(node, ast.Assert)]
    idle = (
        *(ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef),
        *(ast.Import, ast.ImportFrom, ast.Assign, ast.AnnAssign),
    )
    if not asserts and all(isinstance(node, idle) for node in body):
        raise RewardContractError(
            f"the column {column!r} holds the test {source[:200]!r}, which every program passes; "
            "add an assert, or a call of the function that has the asserts (by asyncio.run if it "
            "is async), outside of `if __name__ == '__main__'`"
        )
    if not asserts or body != [*setup, *asserts]:
        return [{"setup": [], "check": source, "sides": None}]
    before = list(map(ast.unparse, setup))
    return [
        {"setup": before, "check": ast.unparse(node), "sides": _sides(node.test)}
        for node in asserts
    ]


def _unfolded(body: list[ast.stmt]) -> list[ast.stmt]:
    """Replace the call of a function that consists of asserts by the asserts themselves.

    Return the new list of statements. HumanEval writes its tests as such a function, ``check``.
    """
    found: list[ast.stmt] = []
    checks: dict[str, ast.FunctionDef] = {}
    for node in body:
        match node:
            case ast.Expr(ast.Call(ast.Name(name), [argument], [])) if name in checks:
                check = checks[name]
                parameter = ast.Name(check.args.args[0].arg, ast.Store())
                # Remove the function that was called, since it contains the expected values
                found = [one for one in found if one is not check]
                found.append(ast.fix_missing_locations(ast.Assign([parameter], argument)))
                found += check.body
                continue
            case ast.FunctionDef(name, ast.arguments(args=[_])):
                if all(isinstance(one, ast.Assert) or _does_nothing(one) for one in node.body):
                    checks[name] = node
        found.append(node)
    return found


def _does_nothing(node: ast.stmt, coroutines: Collection[str] = ()) -> bool:
    """Return whether a statement has no effect: ``pass``, a bare constant, or ``assert True``.

    Code under ``if __name__ == "__main__"`` has no effect either, since the tests run in a module.
    A call of a function in ``coroutines`` has no effect if it is not awaited.
    """
    match node:
        case ast.Pass() | ast.Expr(ast.Constant()):
            return True
        case ast.Expr(ast.Call(ast.Name(name))):
            return name in coroutines
        case ast.If(
            ast.Compare(ast.Name("__name__"), [ast.Eq()], [ast.Constant("__main__")])
            | ast.Compare(ast.Constant("__main__"), [ast.Eq()], [ast.Name("__name__")]),
            orelse=[],
        ):
            return True
        case ast.Assert(ast.Constant(value)):
            return bool(value)
    return False


def _sides(test: ast.expr) -> tuple[str, str] | None:
    match test:
        case ast.Compare(left, [ast.Eq()], [right]):
            return ast.unparse(left), ast.unparse(right)
    return None
