"""Reward for an arithmetic expression that reaches a target with given numbers."""

import ast
import operator
import re
from collections import Counter
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from rloo_kit.errors import RewardContractError
from rloo_kit.types import Score

from ._text import check_least, is_missing, parsed_expression, tagged_answer
from .thinking import AnswerReward, TextReward

# A longer answer is not read: six numbers need about fifty characters
MAX_CHARACTERS = 200

_EXPRESSION = re.compile(r"[0-9+\-*/() \t\n]+")
_SIGNS = str.maketrans("\u00d7\u00f7\u2212", "*/-")
_OPERATIONS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def evaluate_expression(text: str) -> tuple[Fraction, list[int]] | None:
    """Compute an arithmetic expression, and return (exact value, whole numbers in it).

    Return None if the text is not a valid expression. A valid expression may contain whole numbers
    in digits, ``+ - * /`` (or the typographic signs for times, division and minus), brackets, and a
    minus before a term. It has at most 200 characters. It is parsed and computed with fractions,
    and is never run as Python code.

    >>> evaluate_expression("(7 - 3) / 8")
    (Fraction(1, 2), [7, 3, 8])
    >>> evaluate_expression("2 ** 9"), evaluate_expression("1 / 0"), evaluate_expression("x")
    (None, None, None)
    """
    text = text.translate(_SIGNS)
    if len(text) > MAX_CHARACTERS or not _EXPRESSION.fullmatch(text):
        return None
    try:
        # On one line, so that a line break is like any other white space
        value = _value(parsed_expression(" ".join(text.split())))
    except (ValueError, ZeroDivisionError):
        return None
    return value, list(map(int, re.findall("[0-9]+", text)))


def _value(node: ast.expr | None) -> Fraction:
    """Return the value of an expression's syntax tree.

    Raises:
        ValueError: The tree has a node that is not arithmetic.
    """
    match node:
        case ast.Constant(int(number)):
            return Fraction(number)
        case ast.UnaryOp(ast.USub(), operand):
            return -_value(operand)
        case ast.BinOp(left, operation, right) if type(operation) in _OPERATIONS:
            return _OPERATIONS[type(operation)](_value(left), _value(right))
    raise ValueError(type(node).__name__)


@dataclass(frozen=True)
class Countdown(AnswerReward, TextReward):
    """Reward an expression that reaches the target: 1.0 if it does, 0.0 if not.

    The expression is all text after the last ``</think>``, or the text in the last ``<answer>``
    there; ``= VALUE`` and a full stop may follow it. It may use each of the row's ``numbers`` at
    most once (twice if the number is listed twice), with ``+ - * /`` and brackets. It is computed
    exactly. Range: [0, 1]. The score is None if the row has no ``numbers`` or no ``target``.
    Source: TinyZero (github.com/Jiayi-Pan/TinyZero), with ``use_all=True, valid_score=0.1``. One
    difference: TinyZero gives 0.1 to any text in ``<answer>``, even if its numbers are wrong.

    >>> reward = Countdown()
    >>> reward(completions=["8*3</think>(7 - 3) * 6", "4 * 6 = 24."], numbers=[[7, 3, 6], [4, 6]],
    ...        target=[24, 24])
    [1.0, 1.0]
    >>> reward(completions=["6 * 6", "24", "5 * 5"], numbers=[[6, 4], [6, 4], None],
    ...        target=[36, 24, 25])
    [0.0, 0.0, None]
    """

    __name__ = "countdown"
    _reads = ("numbers", "target")

    use_all: bool = False
    """Require that the expression uses every number."""
    valid_score: float = 0.0
    """Score of an expression that follows the rules but misses the target."""

    def __post_init__(self) -> None:
        """Check that the score for a missed target is at least 0 and less than 1."""
        check_least(self, "valid_score", 0, 1)

    def _score(self, text: str, opened: bool, numbers: object, target: Any) -> Score:
        if numbers is None or is_missing(target):
            return None
        available = _whole_numbers(numbers)
        wanted = _fraction(target)
        answer = tagged_answer(self.answer(text, opened) or "").removesuffix(".")
        expression, equals, result = answer.partition("=")
        found = evaluate_expression(expression)
        stated = evaluate_expression(result) if equals else found
        if found is None or stated is None or stated[0] != found[0]:
            return 0.0
        value, used = found
        if Counter(used) - available or (self.use_all and available - Counter(used)):
            return 0.0
        return 1.0 if value == wanted else self.valid_score


def _whole_numbers(numbers: object) -> Counter:
    if isinstance(numbers, list | tuple) and all(
        isinstance(number, int | float) and number == number // 1 for number in numbers
    ):
        return Counter(map(int, numbers))
    raise RewardContractError(
        f"reward 'countdown' got {numbers!r} in the column 'numbers'; write a list of whole "
        "numbers such as [7, 3, 6] there"
    )


def _fraction(target: Any) -> Fraction:
    try:
        return Fraction(target)
    except (TypeError, ValueError, OverflowError):
        raise RewardContractError(
            f"reward 'countdown' got {target!r} in the column 'target'; write a finite number there"
        ) from None


# The reward with its defaults
countdown = Countdown()
