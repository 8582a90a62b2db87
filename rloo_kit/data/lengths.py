"""How many tokens prompts have: counted where their bytes leave it open.

A token covers a byte of its text at least, so most prompts of a large file need no tokenizer.
"""

import heapq
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from rloo_kit.data.files import iter_prompts
from rloo_kit.errors import DataError
from rloo_kit.text.wording import first_line

if TYPE_CHECKING:
    from datasets import Dataset

# Bytes that a tokenizer's normalisation (NFKC) makes of one, at most; ASCII stays as it is
EXPANSION = 11
# Prompts among which the longest is looked for
COUNTED = 1000
KEYS = {"role", "content"}


def prompt_ids(
    tokenizer: Any, prompt: str | list[dict[str, Any]], settings: dict[str, Any] | None = None
) -> list[int]:
    """Return the tokens of a prompt as the policy sees it: T ints."""
    if isinstance(prompt, str):
        return tokenizer(prompt)["input_ids"]
    try:
        return tokenizer.apply_chat_template(
            prompt, add_generation_prompt=True, tokenize=True, return_dict=True, **(settings or {})
        )["input_ids"]
    except Exception as exc:
        # A template is a program of its own: it may divide by zero.
        raise DataError(
            f"the model's chat template cannot render a prompt ({first_line(exc)}): set data.chat: "
            "false for a model without one, or change roles and data.system"
        ) from exc


def longer_prompts(
    dataset: "Dataset", tokenizer: Any, limit: int, settings: dict[str, Any] | None = None
) -> dict[int, int]:
    """Return row -> number of tokens, images aside, of the prompts of more than ``limit``."""
    lengths = (
        (row, len(prompt_ids(tokenizer, prompt, settings)))
        for row, prompt, most in _bounded(dataset, tokenizer, settings)
        if most > limit
    )
    return {row: length for row, length in lengths if length > limit}


def longest_prompt(
    dataset: "Dataset", tokenizer: Any, settings: dict[str, Any] | None = None
) -> list[int]:
    """Return the tokens of the longest prompt: of the ``COUNTED`` that may be longest."""
    rows = ((most, -row, prompt) for row, prompt, most in _bounded(dataset, tokenizer, settings))
    candidates = heapq.nlargest(COUNTED, rows, key=lambda one: one[:2])
    return max((prompt_ids(tokenizer, prompt, settings) for *_, prompt in candidates), key=len)


def drop_long_prompts(
    dataset: "Dataset", tokenizer: Any, limit: int, settings: dict[str, Any] | None = None
) -> "tuple[Dataset, int]":
    """Return the prompts of at most ``limit`` tokens, and how many were left out."""
    longer = longer_prompts(dataset, tokenizer, limit, settings)
    if not longer:
        return dataset, 0
    if len(longer) == len(dataset):
        raise DataError(
            f"max_prompt_tokens {limit} leaves none of the {len(longer)} prompts: raise it, the "
            f"shortest has {min(longer.values())} tokens"
        )
    kept = [row for row in range(len(dataset)) if row not in longer]
    return dataset.select(kept), len(longer)


def _bounded(
    dataset: "Dataset", tokenizer: Any, settings: dict[str, Any] | None
) -> Iterator[tuple[int, Any, float]]:
    """Yield row, prompt, and how many tokens it has at most."""
    template: dict[tuple[str, ...], int] = {}  # roles -> tokens of the first prompt with these
    for row, prompt in enumerate(iter_prompts(dataset)):
        messages = [{"role": "", "content": prompt}] if isinstance(prompt, str) else prompt
        # what a message lacks, a table holds as None
        if any({key for key in one if one[key] is not None} != KEYS for one in messages):
            yield row, prompt, float("inf")
            continue
        roles = tuple(one["role"] for one in messages)
        if roles not in template:
            template[roles] = len(prompt_ids(tokenizer, prompt, settings))
        yield row, prompt, template[roles] + sum(_most_tokens(one["content"]) for one in messages)


def _most_tokens(text: Any) -> float:
    if not isinstance(text, str):
        return float("inf")  # parts, with or without images
    return len(text) if text.isascii() else EXPANSION * len(text.encode())
