"""Calculator, a tool for exact arithmetic."""

from rloo_kit.rewards.countdown import evaluate_expression


def calculator(expression: str) -> str:
    """Compute an arithmetic expression exactly.

    Args:
        expression: Whole numbers, + - * / and brackets, such as "(12 + 30) * 7".

    Returns:
        The value: a whole number, or else a fraction such as "7/2".

    Raises:
        ValueError: The text is not such an expression.
    """
    found = evaluate_expression(expression)
    if found is None:
        raise ValueError("not an expression of whole numbers, + - * / and brackets")
    return str(found[0])
