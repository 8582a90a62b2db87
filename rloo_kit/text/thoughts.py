"""Where the thought of a completion ends, by token id."""

from typing import Any

from rloo_kit.types import Tokenizer

THOUGHT_ENDS = "</think>"


def token_id(tokenizer: Tokenizer, token: str) -> int | None:
    """Return the id of a token in the tokenizer's vocabulary; None where it is no single one."""
    found = tokenizer.convert_tokens_to_ids(token)
    # A token the vocabulary lacks comes back as None or as the id of the unknown token.
    known = isinstance(found, int) and tokenizer.convert_ids_to_tokens(found) == token
    return found if known else None


class ThoughtFinder:
    """Separate the thought of a completion from its answer, by the id of the closing token."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.closing_id = token_id(tokenizer, THOUGHT_ENDS)

    def __call__(self, completion_ids: list[int], completion: Any) -> dict[str, int | None]:
        """Return what a row of completions.jsonl says about the thought.

        ``thought_tokens`` are those before the first closing token, ``answer_at`` the characters
        up to and including the last one; both are None where no thought was closed.
        """
        found = {"tokens": len(completion_ids), "thought_tokens": None, "answer_at": None}
        if self.closing_id not in completion_ids:
            return found
        found["thought_tokens"] = completion_ids.index(self.closing_id)
        end = len(completion_ids) - completion_ids[::-1].index(self.closing_id)
        thought = self._tokenizer.decode(completion_ids[:end], skip_special_tokens=True)
        text = completion if isinstance(completion, str) else completion[-1].get("content")
        if isinstance(text, str) and text.startswith(thought):
            found["answer_at"] = len(thought)
        return found
