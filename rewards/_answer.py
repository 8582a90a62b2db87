"""The answer of a completion, apart from the thought and from what is written around it."""

import ast

from ._text import text_after_thought

_OPEN, _CLOSE = "<answer>", "</answer>"


def tagged_answer(text: str) -> str:
    """Return what stands in the last ``<answer>`` after the thought, else all after the thought.

    White space at both ends is left out.

    >>> tagged_answer("hm</think>It is <answer> 4 </answer>."), tagged_answer("hm</think> 4")
    ('4', '4')
    """
    answer = text_after_thought(text)
    end = answer.rfind(_CLOSE)
    start = answer.rfind(_OPEN, 0, max(end, 0))
    return (answer[start + len(_OPEN) : end] if start >= 0 else answer).strip()


def parsed_expression(text: str) -> ast.expr | None:
    """Return the syntax tree of a Python expression, which is not run; None where it is none."""
    try:
        return ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
