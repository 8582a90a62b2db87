"""Program that runs a model's program and its tests inside the sandbox.

``code.py`` runs the source of this file in the sandbox. Before the model's program starts, the
expected values are computed, reported and removed, so that the program cannot find them. This file
imports only the standard library.
"""

import contextlib
import json
import os
import sys
from typing import Any

# The input has three parts: the length of the job as text, the job as JSON, and the secret
HEADER_BYTES = 16
SECRET_BYTES = 32


def canonical(value: Any) -> Any:
    """Return a JSON value that is the same for two Python values if, and only if, they are equal.

    This is true for None, text, bytes, finite numbers of Python's own types, and lists, tuples,
    sets and dicts of these. Any other object, such as NaN or an infinite number, is represented by
    the name of its type and its ``repr``. The function never calls ``__eq__``, which the model's
    program could have replaced.

    >>> canonical((1.0, True)) == canonical((1, 1)), canonical([1]) == canonical((1,))
    (True, False)
    """
    match value:
        case None | str():
            return value
        case list():
            return ["list", *map(canonical, value)]
        case tuple():
            return ["tuple", *map(canonical, value)]
        case set() | frozenset():
            return ["set", *sorted(map(_text, value))]
        case dict():
            return ["dict", *sorted([_text(key), _text(value[key])] for key in value)]
        case bytes() | bytearray():
            return ["bytes", value.hex()]
        case complex():
            real = canonical(value.real)
            return ["complex", real, canonical(value.imag)] if value.imag else real
    try:  # int, float, Fraction, Decimal
        numerator, denominator = value.as_integer_ratio()
    except (AttributeError, OverflowError, TypeError, ValueError):
        return ["object", f"{type(value).__module__}.{type(value).__qualname__}", repr(value)]
    return ["number", f"{numerator:x}/{denominator:x}"]


def _text(value: object) -> str:
    return json.dumps(canonical(value))


def expected_values(cases: list[dict[str, Any]]) -> dict[int, str]:
    """Evaluate the expected value of each test that is an equation, before the program runs.

    In such a test, ``sides`` has the source code of both sides of the equation; in any other test
    it is None. The side that can be evaluated without the program gives the expected value. The
    other side becomes the test's ``value``, which is evaluated with the program later. The tests in
    ``cases`` are changed in place: ``sides`` is removed from each, so that the program cannot find
    the expected values there.

    Returns:
        Dict from the index of each test with an expected value to this value, as the JSON text of
        ``canonical``.
    """
    found = {}
    for number, case in enumerate(cases):
        case["value"] = ""
        left, right = case.pop("sides") or ("", "")
        for side, other in ((right, left), (left, right)):
            names: dict[str, Any] = {"__name__": "program"}  # the module of the program's classes
            try:
                for statement in case["setup"]:
                    with contextlib.suppress(Exception):
                        exec(statement, names)
                text = _text(eval(side, names))
            except BaseException:
                continue
            if " at 0x" in text:  # the address of an object without a repr of its own
                continue
            found[number] = text
            case["value"], case["check"] = other, ""
            break
    return found


def run(job: dict[str, Any], report: Any) -> None:
    """Run the program, then each test, and report the result of each test that did not raise.

    Args:
        job: Dict with ``program`` (source code) and ``cases`` (the tests). A test has ``setup``
            (statements to run first) and either ``value`` (an expression to evaluate) or ``check``
            (statements that must not raise). ``value`` is "" in a test with ``check``.
        report: Function that is called with the index of the test in ``cases`` and its result:
            the value as the JSON text of ``canonical`` or, for ``check``, ``passed``.
    """
    module = type(sys)("program")
    sys.modules["program"] = module
    names = module.__dict__
    text = _text  # the program may replace the global name
    try:
        exec(compile(job["program"], "program.py", "exec", dont_inherit=True), names)
    except BaseException:
        return
    for number, case in enumerate(job["cases"]):
        try:
            for statement in case["setup"]:
                exec(statement, names)
            if case["value"]:
                answer = text(eval(case["value"], names))
            else:
                exec(case["check"], names)
                answer = "passed"
            report(number, answer)
        except BaseException:
            continue


def main() -> None:
    """Read the job from standard input, hide standard input and output, and run the program.

    Each result is written to the hidden output together with a secret, so that text that the
    program prints does not count as a result. A program that searches its open files can find the
    secret. It can then forge the result of a test that uses ``check``, but it does not learn the
    expected value of a test that has one.
    """
    begin = os.lseek(0, 0, os.SEEK_CUR) + HEADER_BYTES
    size = int(os.read(0, HEADER_BYTES))
    job = json.loads(os.read(0, size))
    # The program may find the file of the input, which must not have the expected values any more
    with contextlib.suppress(OSError):  # a job larger than the limit of a file
        os.pwrite(0, bytes(size), begin)
    questions = os.dup(0)
    answers = os.dup(1)
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    pread = os.pread
    write = os.write

    def report(number: int, answer: str) -> None:
        # Read it only now, so that the secret is not in memory while the program runs
        secret = pread(questions, SECRET_BYTES, begin + size)
        write(answers, secret + f" {number} {answer}\n".encode())

    # The first line needs no secret, since nothing of the program has run yet
    write(answers, json.dumps(expected_values(job["cases"])).encode() + b"\n")
    end = os._exit  # does not wait for threads of the program
    run(job, report)
    end(0)


if __name__ == "__main__":
    main()
