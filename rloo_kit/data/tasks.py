"""Built-in tasks, which generate prompts in levels of difficulty, with a fixed held-out split."""

import hashlib
import operator
import random
from collections.abc import Iterator
from itertools import cycle, islice

from rloo_kit.errors import DataError
from rloo_kit.text.wording import format_value
from rloo_kit.types import Row

SPLITS = ("train", "held_out")
HELD_OUT_ONE_IN = 8
# Levels of every task; 1 is the easiest
LEVELS = 5


def make_rows(
    name: str,
    num: int,
    *,
    split: str = "train",
    seed: int = 42,
    level: int | list[int] | None = None,
) -> list[Row]:
    """Return ``num`` problems of a built-in task, as rows of a dataset.

    Rows have the columns ``prompt``, ``task`` and ``level``, and ``answer`` if only one text is
    correct. Rows of ``countdown`` also have ``numbers`` and ``target``, and rows of ``sums`` have
    ``size``. A prompt is never in both splits, whatever the seed. The only exception is the small
    sums of the task ``sums``.

    Args:
        name: Name of the task.
        num: Number of problems.
        split: ``train`` or ``held_out``.
        seed: Seed of the problems.
        level: Level of difficulty, 1 to 5, or a list of levels to alternate between. None: level 1.

    Raises:
        DataError: The task has no such level.
    """
    levels = level if isinstance(level, list) else [1 if level is None else level]
    if not levels or any(type(one) is not int or not 1 <= one <= LEVELS for one in levels):
        raise DataError(
            f"{name} has the levels 1 to {LEVELS}, not {format_value(level)}: give one of them, or "
            "a list of them"
        )
    streams = [_problems(name, one, split, seed) for one in levels]
    return list(islice((next(stream) for stream in cycle(streams)), num))


def _problems(name: str, level: int, split: str, seed: int) -> Iterator[Row]:
    # The embedded model was trained on the prompts of level 1, so their seed must not change
    first = name == "arithmetic" and level == 1
    rng = random.Random(f"{seed} {split}" if first else f"{seed} {split} {name} {level}")
    while True:
        columns, held_out = TASKS[name](rng, level)
        if held_out == (split == "held_out"):
            yield {**columns, "task": name, "level": level}


def is_kept_by_hash(text: str, one_in: int) -> bool:
    """Return whether a problem belongs to the held-out split, according to the hash of its text.

    About one in ``one_in`` problems belongs to it. The result is the same on every machine.
    """
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest[:8], "big") % one_in == 0


def _is_kept(*key: object) -> bool:
    return is_kept_by_hash(repr(key), HELD_OUT_ONE_IN)


# --- arithmetic ----------------------------------------------------------------------------------


def _arithmetic(rng: random.Random, level: int) -> tuple[Row, bool]:
    """Make an arithmetic problem of a level, and return (columns, whether it is held out).

    Level 1 adds two numbers of 3 digits. Level 2 adds three numbers of 3 digits. Level 3 adds or
    subtracts numbers of 5 digits. Level 4 multiplies and adds. Level 5 has brackets and three
    operators.
    """
    if level == 1:
        a = rng.randint(100, 999)
        b = rng.randint(100, 999)
        return {"prompt": arithmetic_prompt(a, b), "answer": str(a + b)}, is_held_out(a, b)
    if level == 2:
        a, b, c = (rng.randint(100, 999) for _ in range(3))
        text = f"{a} + {b} + {c}"
        value = a + b + c
    elif level == 3:
        a = rng.randint(10_000, 99_999)
        b = rng.randint(10_000, 99_999)
        sign = rng.choice("+-")
        text = f"{a} {sign} {b}"
        value = _OPERATORS[sign](a, b)
    elif level == 4:
        a = rng.randint(11, 99)
        b = rng.randint(11, 99)
        c = rng.randint(100, 999)
        text = f"{a} * {b} + {c}"
        value = a * b + c
    else:
        a, b, c, d = (rng.randint(11, 99) for _ in range(4))
        text = f"({a} + {b}) * {c} - {d}"
        value = (a + b) * c - d
    return {"prompt": f"What is {text}?", "answer": str(value)}, _is_kept("arithmetic", text)


def is_held_out(a: int, b: int) -> bool:
    """Return whether the sum ``a + b`` is in the held-out split, so that training never uses it.

    About one in 16 sums is held out.
    """
    return (a * 1009 + b * 2003) % 16 == 7


def arithmetic_prompt(a: int, b: int) -> str:
    """Return the question for the sum ``a + b``, in the words that ``tiny-thinker`` knows."""
    return f"What is {a} + {b}?"


# --- countdown -----------------------------------------------------------------------------------

# Level -> (number of numbers, largest number, operators of the solution)
_COUNTDOWN = {1: (3, 10, "+-"), 2: (3, 20, "+-*"), 3: (4, 50, "+-*/"), 4: (5, 99, "+-*/")}
_LARGE = (25, 50, 75, 100)
_OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.floordiv}


def _countdown(rng: random.Random, level: int) -> tuple[Row, bool]:
    numbers, target, _ = countdown_problem(rng, level)
    shown = ", ".join(map(str, numbers[:-1])) + f" and {numbers[-1]}"
    prompt = (
        f"Reach {target} from the numbers {shown} with + - * / and brackets, each number at most "
        "once. Answer with the expression alone."
    )
    row = {"prompt": prompt, "numbers": numbers, "target": target}
    return row, _is_kept("countdown", sorted(numbers), target)


def countdown_problem(rng: random.Random, level: int) -> tuple[list[int], int, str]:
    """Make a countdown problem and return (numbers, target, expression).

    The expression uses all of the numbers, and its value is the target.
    """
    while True:
        if level == 5:
            numbers = [*rng.sample(_LARGE, 2), *(rng.randint(1, 10) for _ in range(4))]
            operators = "+-*/"
            low = 101
        else:
            how_many, largest, operators = _COUNTDOWN[level]
            numbers = [rng.randint(1, largest) for _ in range(how_many)]
            low = 1
        rng.shuffle(numbers)
        value, text = _combined(rng, numbers, operators)
        if low <= value <= 999 and value not in numbers:
            return numbers, value, text


def _combined(rng: random.Random, numbers: list[int], operators: str) -> tuple[int, str]:
    """Combine the numbers at random with the operators, and return (value, expression).

    No intermediate result is 0, negative or a fraction.
    """
    left = [(number, str(number)) for number in numbers]
    while len(left) > 1:
        a, b = (left.pop(rng.randrange(len(left))) for _ in range(2))
        sign = rng.choice(operators)
        if (sign == "-" and a[0] <= b[0]) or (sign == "/" and a[0] % b[0]):
            sign = "+"
        left.append((_OPERATORS[sign](a[0], b[0]), f"({a[1]} {sign} {b[1]})"))
    return left[0][0], left[0][1][1:-1]


# --- sums ----------------------------------------------------------------------------------------


def _sums(rng: random.Random, level: int) -> tuple[Row, bool]:
    """Make a sum of two numbers, and return (columns, whether it is held out).

    Half of the sums are small, with one-digit numbers. The other half are large, with numbers of
    ``level + 2`` digits. There are so few different small sums that they occur in both splits.
    """
    size = rng.choice(("small", "large"))
    low, high = (1, 9) if size == "small" else (10 ** (level + 1), 10 ** (level + 2) - 1)
    a = rng.randint(low, high)
    b = rng.randint(low, high)
    row = {"prompt": arithmetic_prompt(a, b), "answer": str(a + b), "size": size}
    kept = rng.random() < 1 / HELD_OUT_ONE_IN if size == "small" else _is_kept("sums", a, b)
    return row, kept


# Name of a task -> function that makes one problem. It is called with a random generator and a
# level (counted from 1), and returns the problem's columns and whether it is held out.
TASKS = {"arithmetic": _arithmetic, "countdown": _countdown, "sums": _sums}
