"""Built-in tasks: prompts made on the spot, each with an answer and a fixed held-out split."""

import random
from collections.abc import Callable

from rloo_kit.errors import DataError
from rloo_kit.types import Row


def make_arithmetic(num: int, *, split: str = "train", seed: int = 42) -> list[Row]:
    """Return ``num`` sums of two three-digit numbers: ``prompt`` (text) and ``answer`` (text).

    Args:
        num: How many; sums may recur beyond the 50,625 held-out or 759,375 training pairs.
        split: ``train`` or ``held_out``; the two share no pair of numbers.
        seed: Which ones.

    Raises:
        DataError: Another split.
    """
    if split not in ("train", "held_out"):
        raise DataError(f"arithmetic has the splits train and held_out, not {split!r}")
    rng = random.Random(f"{seed} {split}")
    rows = []
    while len(rows) < num:
        a, b = rng.randint(100, 999), rng.randint(100, 999)
        if is_held_out(a, b) == (split == "held_out"):
            rows.append({"prompt": arithmetic_prompt(a, b), "answer": str(a + b)})
    return rows


def is_held_out(a: int, b: int) -> bool:
    """Return whether the sum ``a + b`` is kept for evaluation (1 in 16); no stage trains on it."""
    return (a * 1009 + b * 2003) % 16 == 7


def arithmetic_prompt(a: int, b: int) -> str:
    """Return the question the embedded model was trained on."""
    return f"What is {a} + {b}?"


def worked_thought(a: int, b: int, forgets: Callable[[], bool] = lambda: False) -> tuple[str, int]:
    """Return (thought, answer): the sum digit by digit, right to left.

    Args:
        a: First number, three digits.
        b: Second number, three digits.
        forgets: Asked at every carry; True drops it, in the thought and in the answer.

    >>> worked_thought(347, 286)
    ('7+6=13 4+8+1=13 3+2+1=6', 633)
    """
    lines, carry, answer = [], 0, 0
    for place in range(3):
        x, y = a // 10**place % 10, b // 10**place % 10
        total = x + y + carry
        lines.append(f"{x}+{y}+1={total}" if carry else f"{x}+{y}={total}")
        if place == 2:
            answer += total * 100
        else:
            answer += total % 10 * 10**place
            carry = 1 if total >= 10 and not forgets() else 0
    return " ".join(lines), answer
