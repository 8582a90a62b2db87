"""Checks of a reward's parameters, with the same wording in every reward."""

import math
from collections.abc import Sequence


def check_choice(name: str, value: object, options: Sequence[str]) -> None:
    """Raise ValueError where a parameter is not one of its options."""
    if value not in options:
        raise ValueError(f"{name} is {value!r}; give one of: {', '.join(options)}")


def check_least(name: str, value: float, least: float, below: float = math.inf) -> None:
    """Raise ValueError where a parameter is not a number from ``least`` to under ``below``."""
    if not least <= value < below:
        raise ValueError(f"{name} is {value!r}; set it to {least} or more")
