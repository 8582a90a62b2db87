"""Aliases and protocols shared by every package; no behaviour.

Legend used in docstrings: P prompts, G generations per prompt (the group), B = P*G completions,
T completion tokens.
"""

from collections.abc import Callable, Iterator
from typing import Any, Protocol, TypeAlias

Message: TypeAlias = dict[str, Any]
# One completion: a string, or a list of chat messages whose last one is the assistant's
Completion: TypeAlias = str | list[Message]

# One prompt, written the same way
Prompt: TypeAlias = str | list[Message]

# One row of a dataset: `prompt` and whatever columns the rewards ask for
Row: TypeAlias = dict[str, Any]

# One reward; None means the function does not apply to the row (it leaves the baseline alone)
Score: TypeAlias = float | None

# A reward as TRL calls it: columns by keyword in, a list of B scores out
Reward: TypeAlias = Callable[..., Any]


class Tokenizer(Protocol):
    """A tokenizer of transformers: the members that the kit uses."""

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
    """A causal language model of transformers, alone or in PEFT's wrapper: the members all have.

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
