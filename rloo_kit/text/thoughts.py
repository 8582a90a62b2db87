"""Where the thought of a completion ends, by token id."""

from typing import Any

from rloo_kit.text.wording import text_of
from rloo_kit.types import Tokenizer

THOUGHT_ENDS = "</think>"


def token_id(tokenizer: Tokenizer, token: str) -> int | None:
    """Return the id of a token in the tokenizer's vocabulary; None where it is no single one."""
    found = tokenizer.convert_tokens_to_ids(token)
    # A token the vocabulary lacks comes back as None or as the id of the unknown token.
    known = isinstance(found, int) and tokenizer.convert_ids_to_tokens(found) == token
    return found if known else None


def find_thought(
    tokenizer: Tokenizer, completion_ids: list[int], completion: Any
) -> dict[str, int | None]:
    """Return what a row of completions.jsonl says about the thought, by the id of its end.

    ``thought_tokens`` are those before the first closing token, ``answer_at`` the characters
    up to and including the last one; both are None where no thought was closed.
    """
    found = {"tokens": len(completion_ids), "thought_tokens": None, "answer_at": None}
    closing_id = token_id(tokenizer, THOUGHT_ENDS)
    if closing_id not in completion_ids:
        return found
    found["thought_tokens"] = completion_ids.index(closing_id)
    end = len(completion_ids) - completion_ids[::-1].index(closing_id)
    thought = tokenizer.decode(completion_ids[:end], skip_special_tokens=True)
    text = text_of(completion)
    if text.startswith(thought):
        found["answer_at"] = len(thought)
    return found
