"""The thought that the embedded model was taught: a sum, digit by digit."""

from collections.abc import Callable


def worked_thought(a: int, b: int, forgets: Callable[[], bool] = lambda: False) -> tuple[str, int]:
    """Return (thought, answer): the sum of two 3-digit numbers digit by digit, right to left.

    ``forgets`` is asked at every carry; True drops it, in the thought and in the answer.

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
