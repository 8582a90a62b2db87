"""Functions that find the tokens that end a completion."""

from collections.abc import Sequence

from rloo_kit.text.thoughts import token_id
from rloo_kit.types import Tokenizer

ANSWER = "rlookitanswer"  # one word, so that a template keeps it as it is


def end_token_ids(given: int | Sequence[int] | None, tokenizer: Tokenizer) -> list[int]:
    """Return the ids of the tokens that end a completion, each once.

    They are the EOS token, the token that ends a turn in the chat template, and the tokens of
    ``given``, the ``eos_token_id`` of the model's ``generation_config``.
    """
    ends = [given] if isinstance(given, int | None) else given
    ends = [*ends, tokenizer.eos_token_id, end_of_turn_id(tokenizer)]
    return list(dict.fromkeys(end for end in ends if end is not None))


def end_of_turn_id(tokenizer: Tokenizer) -> int | None:
    """Return the id of the token that ends an assistant's turn in the chat template.

    Return None if there is no chat template, or if the template does not end a turn with a special
    token.
    """
    turns = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": ANSWER}]
    try:
        text = tokenizer.apply_chat_template(turns, tokenize=False)
    except Exception:  # no template, or one that raises: it is a program and may raise anything
        return None
    after = text.rpartition(ANSWER)[2].lstrip()
    # a plain word does not end a turn
    known = {*tokenizer.get_added_vocab(), *tokenizer.all_special_tokens}
    fits = [token for token in known if after.startswith(token)]
    return token_id(tokenizer, max(fits, key=len)) if fits else None
