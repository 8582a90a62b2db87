"""Type aliases and protocols that all packages use.

Docstrings use these letters for shapes: P is the number of prompts, G the number of completions per
prompt (the group), B = P * G the number of completions, and T the number of completion tokens.
"""

from collections.abc import Callable
from typing import Any, Protocol, TypeAlias

Message: TypeAlias = dict[str, Any]
# One completion: a string, or a list of chat messages whose last one is the assistant's
Completion: TypeAlias = str | list[Message]

# Token ids of B texts: text -> ids
TokenIds: TypeAlias = list[list[int]]

# Token ids of B completions: completion -> turn -> ids
Turns: TypeAlias = list[list[list[int]]]

# The completions of a batch, or its prompts: a list of B values
Completions: TypeAlias = list[Completion]

# One prompt: a string, or a list of chat messages
Prompt: TypeAlias = str | list[Message]

# One row of a dataset: `prompt`, and columns that the rewards read
Row: TypeAlias = dict[str, Any]

# Score of one completion by one reward. None if the reward does not apply to the completion, which
# then does not affect the baseline
Score: TypeAlias = float | None

# The scores of a batch: a list of B values
Scores: TypeAlias = list[Score]

# A function that prints, logs or collects a line for the user
Say: TypeAlias = Callable[[str], None]

# A reward function as TRL calls it, with the columns of a batch as keywords; it returns B scores
Reward: TypeAlias = Callable[..., Any]


class Tokenizer(Protocol):
    """A tokenizer of transformers, whose own annotations are narrower than what it accepts.

    The attributes that the kit sets are listed. Any other is accepted with the type `Any`.
    """

    eos_token: Any
    bos_token: Any
    pad_token: Any
    padding_side: str
    truncation_side: str
    model_max_length: int
    clean_up_tokenization_spaces: bool

    def __len__(self) -> int: ...
    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __getattr__(self, name: str) -> Any: ...


class Model(Protocol):
    """A causal language model of transformers, or PEFT's wrapper around it.

    PEFT and Unsloth add attributes of their own, so any attribute is accepted with the type `Any`.
    """

    _unsloth_gradient_checkpointing: bool | str  # Unsloth's training step follows it

    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __getattr__(self, name: str) -> Any: ...
