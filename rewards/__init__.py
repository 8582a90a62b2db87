"""Library of reward functions, with one file for each family of rewards.

A reward is an instance of a small class that can be called and pickled. It is called with a batch
of B completions. Each keyword argument is a column, which is a list of B values: ``completions``
and ``prompts`` (plain or conversational), ``completion_ids`` (token ids) and the columns of the
dataset. A reward returns B scores. A score is a float, or None for a row to which the reward does
not apply.

A run file names a reward by its key in ``BUILTIN``. Importing this package does not import large
libraries. The rewards use only those modules of rloo_kit that handle text, errors and types.
"""

from collections.abc import Callable

from .accuracy import Accuracy
from .code import Code
from .countdown import Countdown
from .format import JsonFormat, RegexFormat, TagFormat, make_format
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
from .tool_use import ToolUse

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
    "ToolUse",
    "end_of_thinking_id",
]

# Name of a built-in reward -> class, or factory function, that creates it
BUILTIN: dict[str, Callable[..., Callable]] = {
    "accuracy": Accuracy,
    "code": Code,
    "countdown": Countdown,
    "coverage": Coverage,
    "format": make_format,
    "judge": Judge,
    "language": Language,
    "length": Length,
    "length_band": LengthBand,
    "math": Math,
    "reasoning_gym": ReasoningGym,
    "repetition": Repetition,
    "reward_model": RewardModel,
    "rouge": Rouge,
    "soft_overlong": SoftOverlong,
    "thinking": Thinking,
    "thinking_budget": ThinkingBudget,
    "thinking_closed_once": ClosedOnce,
    "thinking_format": ThinkingFormat,
    "tool_use": ToolUse,
    "thinking_questions": SelfQuestions,
}
