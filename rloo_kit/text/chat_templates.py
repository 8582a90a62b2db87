"""What a chat template says of its model, and the settings it is given."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ANSWER = "rlookitanswer"
"""Stands for an assistant's turn: one word, so that templates keep it as it is."""


def end_of_turn_id(tokenizer: "PreTrainedTokenizerBase") -> int | None:
    """Return the id of the token that ends an assistant's turn in the chat template.

    None where there is no template, or where it closes the turn with no token of its own.
    """
    if not tokenizer.chat_template:
        return None
    turns = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": ANSWER}]
    try:
        text = str(tokenizer.apply_chat_template(turns, tokenize=False))
    except Exception:  # a template is a program of its own: it may divide by zero
        return None
    after = text.rpartition(ANSWER)[2].lstrip()
    vocabulary = tokenizer.get_vocab()  # where a plain word is no end: only added tokens count
    known = {*tokenizer.get_added_vocab(), *tokenizer.all_special_tokens}
    fits = [token for token in known if token in vocabulary and after.startswith(token)]
    return vocabulary[max(fits, key=len)] if fits else None


class WithSettings:
    """A tokenizer whose chat template is always given a run's settings.

    A reward that asks the template who opens the thought then sees what the policy is prompted
    with, such as a thought switched off by ``enable_thinking: false``.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", settings: dict[str, Any]) -> None:
        self._tokenizer = tokenizer
        self._settings = settings

    def __getattr__(self, name: str) -> Any:
        """Return what the tokenizer has."""
        return getattr(self._tokenizer, name)

    def apply_chat_template(self, conversation: Any, **kwargs: Any) -> Any:
        """Render as the tokenizer does, with the settings."""
        return self._tokenizer.apply_chat_template(conversation, **{**self._settings, **kwargs})
