"""The reward library: one family per file, each a small callable class that pickles.

Every reward is called by keyword with whole columns of B values: ``completions`` and ``prompts``
(plain or conversational), ``completion_ids`` (token ids) and dataset columns. It returns B scores
(float, or None where it does not apply). Importing this package imports nothing heavy. A run names
a reward by its key in ``BUILTIN``; it must not know of rloo_kit beyond text, errors and types.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .accuracy import Accuracy
    from .code import Code
    from .countdown import Countdown
    from .format import JsonFormat, RegexFormat, TagFormat
    from .gym import ReasoningGym
    from .judge import Judge
    from .language import Language
    from .length import Length, LengthBand, SoftOverlong
    from .math import Math
    from .repetition import Repetition
    from .reward_model import RewardModel
    from .rouge import Coverage, Rouge
    from .thinking import (
        ClosedOnce,
        SelfQuestions,
        Thinking,
        ThinkingBudget,
        ThinkingFormat,
        end_of_thinking_id,
    )

# Name of a built-in reward -> "module:attribute" of the class or factory that makes it
BUILTIN: dict[str, str] = {
    "accuracy": "rloo_kit.rewards.accuracy:Accuracy",
    "code": "rloo_kit.rewards.code:Code",
    "countdown": "rloo_kit.rewards.countdown:Countdown",
    "coverage": "rloo_kit.rewards.rouge:Coverage",
    "format": "rloo_kit.rewards.format:make_format",
    "judge": "rloo_kit.rewards.judge:Judge",
    "language": "rloo_kit.rewards.language:Language",
    "length": "rloo_kit.rewards.length:Length",
    "length_band": "rloo_kit.rewards.length:LengthBand",
    "math": "rloo_kit.rewards.math:Math",
    "reasoning_gym": "rloo_kit.rewards.gym:ReasoningGym",
    "repetition": "rloo_kit.rewards.repetition:Repetition",
    "reward_model": "rloo_kit.rewards.reward_model:RewardModel",
    "rouge": "rloo_kit.rewards.rouge:Rouge",
    "soft_overlong": "rloo_kit.rewards.length:SoftOverlong",
    "thinking": "rloo_kit.rewards.thinking:Thinking",
    "thinking_budget": "rloo_kit.rewards.thinking:ThinkingBudget",
    "thinking_closed_once": "rloo_kit.rewards.thinking:ClosedOnce",
    "thinking_format": "rloo_kit.rewards.thinking:ThinkingFormat",
    "thinking_questions": "rloo_kit.rewards.thinking:SelfQuestions",
}

# Public name -> its module
_HOMES = {
    **{target.split(":")[1]: target.split(":")[0] for target in BUILTIN.values()},
    **dict.fromkeys(("JsonFormat", "RegexFormat", "TagFormat"), "rloo_kit.rewards.format"),
    "end_of_thinking_id": "rloo_kit.rewards.thinking",
}

__all__ = [
    "BUILTIN",
    "Accuracy",
    "ClosedOnce",
    "Code",
    "Countdown",
    "Coverage",
    "JsonFormat",
    "Judge",
    "Language",
    "Length",
    "LengthBand",
    "Math",
    "ReasoningGym",
    "RegexFormat",
    "Repetition",
    "RewardModel",
    "Rouge",
    "SelfQuestions",
    "SoftOverlong",
    "TagFormat",
    "Thinking",
    "ThinkingBudget",
    "ThinkingFormat",
    "end_of_thinking_id",
]


def __getattr__(name: str) -> Any:
    """Load a public name when it is first asked for.

    ``rewards.length`` is always the submodule, never the instance ``rewards.length.length``:
    importing a submodule sets that attribute, so any other value would depend on import order.
    """
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    try:
        return importlib.import_module(f"{__name__}.{name}")
    except ModuleNotFoundError:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None
