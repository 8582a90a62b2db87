"""The reward library: one family per file, each a small callable class that pickles.

Every reward is called by keyword with whole columns of B values and returns B scores (float, or
None where it does not apply). Importing this package imports nothing heavy: the names below and
the submodules are loaded when first asked for. A run names a reward by its key in ``BUILTIN``;
``rloo_kit.reward_loading`` turns the key into an instance.
"""

import importlib
from typing import TYPE_CHECKING, Any

if __name__ != "rloo_kit.rewards":
    raise ImportError(
        f"this folder was imported as {__name__!r}; write 'import rloo_kit.rewards' instead "
        "(it is part of rloo-kit, and the bare name is left to your own rewards.py)"
    )

if TYPE_CHECKING:
    from .accuracy import Accuracy
    from .length import Length
    from .reward_model import RewardModel
    from .thinking import Thinking, end_of_thinking_id

BUILTIN: dict[str, str] = {
    "accuracy": "rloo_kit.rewards.accuracy:Accuracy",
    "length": "rloo_kit.rewards.length:Length",
    "reward_model": "rloo_kit.rewards.reward_model:reward_model",
    "thinking": "rloo_kit.rewards.thinking:Thinking",
}
"""Name of a built-in reward -> "module:attribute" of the class or factory that makes it."""

_HOMES = {
    "Accuracy": "accuracy",
    "Length": "length",
    "RewardModel": "reward_model",
    "Thinking": "thinking",
    "end_of_thinking_id": "thinking",
}

__all__ = [
    "BUILTIN",
    "Accuracy",
    "Length",
    "RewardModel",
    "Thinking",
    "end_of_thinking_id",
]


def __getattr__(name: str) -> Any:
    """Load a public name, or a submodule, when it is first asked for.

    ``rewards.length`` is always the submodule, never the instance ``rewards.length.length``:
    importing a submodule sets that attribute, so any other value would depend on import order.
    """
    if name in _HOMES:
        return getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)
    if name in _HOMES.values():
        return importlib.import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """List the lazy names too."""
    return sorted({*globals(), *_HOMES, *_HOMES.values()})
