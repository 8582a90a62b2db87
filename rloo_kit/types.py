"""Type aliases and protocols that all packages use.

Docstrings use these letters for shapes: P is the number of prompts, G the number of completions per
prompt (the group), B = P * G the number of completions, and T the number of completion tokens.
"""

from collections.abc import Callable, Iterator
from typing import Any, Protocol, TypeAlias

Message: TypeAlias = dict[str, Any]
# One completion: a string, or a list of chat messages that ends with the assistant's turn
Completion: TypeAlias = str | list[Message]

# Token ids of B texts: one list of ids for each text
TokenIds: TypeAlias = list[list[int]]

# Token ids of B completions: for each completion its turns, and for each turn its ids
Turns: TypeAlias = list[list[list[int]]]

# B completions, or B prompts, which have the same type
Completions: TypeAlias = list[Completion]

# One prompt: a string, or a list of chat messages
Prompt: TypeAlias = str | list[Message]

# One row of a dataset: `prompt`, and columns that the rewards read
Row: TypeAlias = dict[str, Any]

# The score that a reward gives a completion. None means that the reward does not apply to the
# completion. A completion whose scores are all None is left out of the baseline
Score: TypeAlias = float | None

# The scores of a batch: a list of B values
Scores: TypeAlias = list[Score]

# A function that prints, logs or collects a line for the user
Say: TypeAlias = Callable[[str], None]

# A reward function. It is called as by TRL, with the columns of a batch as keyword arguments, and
# returns B scores
Reward: TypeAlias = Callable[..., Any]


class Tokenizer(Protocol):
    """The attributes and methods of transformers' tokenizers that the kit uses."""

    chat_template: Any  # a Jinja template, or None for a base model
    eos_token: Any
    eos_token_id: Any
    pad_token: Any
    pad_token_id: Any
    padding_side: str
    truncation_side: str
    model_max_length: int
    name_or_path: str
    all_special_tokens: list[str]
    init_kwargs: dict[str, Any]

    def __len__(self) -> int: ...
    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...
    def encode(self, *args: Any, **kwargs: Any) -> list[int]: ...
    def decode(self, *args: Any, **kwargs: Any) -> Any: ...
    def batch_decode(self, *args: Any, **kwargs: Any) -> list[str]: ...
    def apply_chat_template(self, *args: Any, **kwargs: Any) -> Any: ...
    def convert_ids_to_tokens(self, *args: Any, **kwargs: Any) -> Any: ...
    def convert_tokens_to_ids(self, *args: Any, **kwargs: Any) -> Any: ...
    def get_vocab(self) -> dict[str, int]: ...
    def add_tokens(self, *args: Any, **kwargs: Any) -> int: ...
    def get_added_vocab(self) -> dict[str, int]: ...
    def save_pretrained(self, *args: Any, **kwargs: Any) -> Any: ...


class Model(Protocol):
    """The attributes and methods of causal language models that the kit uses.

    The model is a transformers model, or PEFT's wrapper around one. PEFT and Unsloth add attributes
    of their own, so any other attribute is accepted with the type `Any`.
    """

    config: Any
    training: bool
    _unsloth_gradient_checkpointing: bool | str  # Unsloth's training step uses this value

    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __getattr__(self, name: str) -> Any: ...
    def parameters(self, recurse: bool = True) -> Iterator[Any]: ...
    def named_parameters(self) -> Iterator[tuple[str, Any]]: ...
    def modules(self) -> Iterator[Any]: ...
    def named_modules(self) -> Iterator[tuple[str, Any]]: ...
    def train(self, mode: bool = True) -> Any: ...
    def eval(self) -> Any: ...
