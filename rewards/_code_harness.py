"""Harness that runs a program against its tests, inside the sandbox, without the expected values.

This file is the source of a program that ``code.py`` runs. It imports only the standard library.
"""

import contextlib
import json
import os
import sys
from typing import Any

# The input is the length of the job as text, the job, and the secret
HEADER_BYTES = 16
SECRET_BYTES = 32


def canonical(value: Any) -> Any:
    """Return plain JSON that is the same for two values if, and only if, they are equal.

    This holds for None, text, bytes, numbers of any type, and lists, tuples, sets and dictionaries
    of these; any other object becomes its type's name and its ``repr``. No ``__eq__`` is called.

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
    """Evaluate the side of each equation that needs no program, before the program runs.

    The other side becomes the ``value`` that the program has to compute. The texts of both sides
    are removed from the cases, so that the program cannot find them.
    """
    found = {}
    for number, case in enumerate(cases):
        case["value"] = ""
        left, right = case.pop("sides") or ("", "")
        for side, other in ((right, left), (left, right)):
            names: dict[str, Any] = {}
            try:
                for statement in case["setup"]:
                    with contextlib.suppress(Exception):
                        exec(statement, names)
                found[number] = _text(eval(side, names))
            except BaseException:
                continue
            case["value"], case["check"] = other, ""
            break
    return found


def run(job: dict[str, Any], report: Any) -> None:
    """Run the program, then each case; report a value, or that a check passed.

    Args:
        job: ``program``; ``cases`` of ``setup`` (statements), ``value`` (an expression or "") and
            ``check`` (statements).
        report: Called with the number of each case that did not fail, and its answer.
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
    """Read the job from standard input, take the pipes away from the program, and run it."""
    begin = os.lseek(0, 0, os.SEEK_CUR) + HEADER_BYTES
    size = int(os.read(0, HEADER_BYTES))
    job = json.loads(os.read(0, size))
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
