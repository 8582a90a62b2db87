"""Function that writes the thought of the embedded model: a sum, computed digit by digit."""

from collections.abc import Callable


def worked_thought(a: int, b: int, forgets: Callable[[], bool] = lambda: False) -> tuple[str, int]:
    """Add two 3-digit numbers digit by digit, from right to left, and return (thought, answer).

    ``forgets`` is called at every carry. If it returns True, the carry is forgotten, in the thought
    and in the answer.

    >>> worked_thought(347, 286)
    ('7+6=13 4+8+1=13 3+2+1=6', 633)
    """
    lines = []
    carry = 0
    answer = 0
    for place in range(3):
        x = a // 10**place % 10
        y = b // 10**place % 10
        total = x + y + carry
        lines.append(f"{x}+{y}+1={total}" if carry else f"{x}+{y}={total}")
        if place == 2:
            answer += total * 100
        else:
            answer += total % 10 * 10**place
            carry = 1 if total >= 10 and not forgets() else 0
    return " ".join(lines), answer
