"""Type aliases and protocols for every package, without behaviour.

Legend used in docstrings: P prompts, G generations per prompt (the group), B = P*G completions,
T completion tokens.
"""

from collections.abc import Callable, Iterator
from typing import Any, Protocol, TypeAlias

Message: TypeAlias = dict[str, Any]
# One completion: a string, or a list of chat messages whose last one is the assistant's
Completion: TypeAlias = str | list[Message]

# The token ids of B completions, turn by turn
Turns: TypeAlias = list[list[list[int]]]

# Those of a batch, or its prompts: a column of B values
Completions: TypeAlias = list[Completion]

# One prompt, in the same form
Prompt: TypeAlias = str | list[Message]

# One row of a dataset: `prompt`, and the columns that the rewards read
Row: TypeAlias = dict[str, Any]

# One reward; None if the reward does not apply to the row, which then does not affect the baseline
Score: TypeAlias = float | None

# Those of a batch: B values
Scores: TypeAlias = list[Score]

# Prints, logs or collects a line for the user
Say: TypeAlias = Callable[[str], None]

# A reward in TRL's form: called with columns by keyword, returns a list of B scores
Reward: TypeAlias = Callable[..., Any]


class Tokenizer(Protocol):
    """Members of transformers' tokenizers that the kit uses."""

    chat_template: Any  # a Jinja template, or None for a base model
    eos_token: Any
    eos_token_id: Any
    bos_token: Any
    pad_token: Any
    pad_token_id: Any
    padding_side: str
    truncation_side: str
    model_max_length: int
    name_or_path: str
    clean_up_tokenization_spaces: bool
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
    """Members of transformers' causal language models, alone or in PEFT's wrapper.

    PEFT and Unsloth add attributes of their own, so any other attribute is `Any`.
    """

    config: Any
    training: bool
    _unsloth_gradient_checkpointing: bool | str  # Unsloth's training step follows it

    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __getattr__(self, name: str) -> Any: ...
    def parameters(self, recurse: bool = True) -> Iterator[Any]: ...
    def named_parameters(self) -> Iterator[tuple[str, Any]]: ...
    def modules(self) -> Iterator[Any]: ...
    def named_modules(self) -> Iterator[tuple[str, Any]]: ...
    def train(self, mode: bool = True) -> Any: ...
    def eval(self) -> Any: ...
