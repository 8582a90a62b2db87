"""Lengths of prompts in tokens, bounded by their bytes and counted if necessary.

A token covers at least one byte of its text, so most prompts of a large file need no tokenizer.
"""

import heapq
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from rloo_kit.data.files import iter_column
from rloo_kit.errors import DataError
from rloo_kit.text.wording import first_line
from rloo_kit.types import Prompt, Tokenizer

if TYPE_CHECKING:
    from datasets import Dataset

# Most bytes that a tokenizer's normalisation (NFKC) makes of one; ASCII does not change
EXPANSION = 11
# Candidates for the longest prompt that are counted
COUNTED = 1000
KEYS = {"role", "content"}


def tokenize_prompts(
    processing_class: Tokenizer,
    prompts: Sequence[str] | Sequence[list[dict[str, Any]]],
    settings: dict[str, Any] | None = None,
) -> list[list[int]]:
    """Return the tokens of prompts as the policy reads them.

    Args:
        processing_class: The tokenizer, or a processor that has one.
        prompts: Texts, or conversations, for which the chat template is used.
        settings: Arguments of the chat template.

    Raises:
        DataError: The chat template cannot render a prompt.
    """
    if isinstance(prompts[0], str):
        return processing_class(text=list(prompts))["input_ids"]
    try:
        return processing_class.apply_chat_template(
            list(prompts), add_generation_prompt=True, tokenize=True, return_dict=True,
            **(settings or {}),
        )["input_ids"]  # fmt: skip
    except Exception as exc:
        # A template is a program and may raise anything
        raise DataError(
            f"the model's chat template cannot render a prompt ({first_line(exc)}): set data.chat: "
            "false for a model without one, or change roles and data.system"
        ) from exc


def prompt_ids(
    tokenizer: Tokenizer, prompt: str | list[dict[str, Any]], settings: dict[str, Any] | None = None
) -> list[int]:
    """Return the T token ids of one prompt; the arguments are those of ``tokenize_prompts``."""
    return tokenize_prompts(tokenizer, [prompt], settings)[0]  # pyright: ignore[reportArgumentType]


def longer_prompts(
    dataset: "Dataset", tokenizer: Tokenizer, limit: int, settings: dict[str, Any] | None = None
) -> dict[int, int]:
    """Return row number -> tokens for each prompt of more than ``limit`` tokens.

    Tokens of images are not counted. ``settings`` are arguments of the chat template.
    """
    lengths = (
        (row, len(prompt_ids(tokenizer, prompt, settings)))
        for row, prompt, most in _bounded(dataset, tokenizer, settings)
        if most > limit
    )
    return {row: length for row, length in lengths if length > limit}


def longest_prompt(
    dataset: "Dataset", tokenizer: Tokenizer, settings: dict[str, Any] | None = None
) -> list[int]:
    """Return the tokens of the longest prompt.

    Only the ``COUNTED`` prompts whose bytes allow the most tokens are tokenized, so in a very large
    dataset another prompt may be longer.
    """
    rows = _bounded(dataset, tokenizer, settings)
    candidates = heapq.nlargest(COUNTED, rows, key=lambda one: one[2])
    return max((prompt_ids(tokenizer, prompt, settings) for _, prompt, _ in candidates), key=len)


def quantile_of_lengths(
    dataset: "Dataset", tokenizer: Tokenizer, share: float, settings: dict[str, Any] | None = None
) -> int:
    """Return the least length in tokens that the fraction ``share`` of prompts does not exceed."""
    prompts = iter_column(dataset, "prompt")
    lengths = sorted(len(prompt_ids(tokenizer, prompt, settings)) for prompt in prompts)
    return lengths[math.ceil(share * len(lengths)) - 1]


def drop_long_prompts(
    dataset: "Dataset", tokenizer: Tokenizer, limit: int, settings: dict[str, Any] | None = None
) -> "tuple[Dataset, int]":
    """Return the prompts of at most ``limit`` tokens, and the number of those left out.

    Raises:
        DataError: No prompt is left.
    """
    longer = longer_prompts(dataset, tokenizer, limit, settings)
    if not longer:
        return dataset, 0
    if len(longer) == len(dataset):
        raise DataError(
            f"max_prompt_tokens {limit} leaves no prompt of {len(longer)}: raise it, the shortest "
            f"has {min(longer.values())} tokens"
        )
    kept = [row for row in range(len(dataset)) if row not in longer]
    return dataset.select(kept), len(longer)


def _bounded(
    dataset: "Dataset", tokenizer: Tokenizer, settings: dict[str, Any] | None
) -> Iterator[tuple[int, Any, float]]:
    """Yield row, prompt, and an upper bound of its tokens."""
    template: dict[tuple[str, ...], int] = {}  # roles -> tokens of the first prompt with these
    for row, prompt in enumerate(iter_column(dataset, "prompt")):
        messages = [{"role": "", "content": prompt}] if isinstance(prompt, str) else prompt
        # a table holds None for keys that a message lacks
        if any({key for key in one if one[key] is not None} != KEYS for one in messages):
            yield row, prompt, float("inf")
            continue
        roles = tuple(one["role"] for one in messages)
        if roles not in template:
            template[roles] = len(prompt_ids(tokenizer, prompt, settings))
        yield row, prompt, template[roles] + sum(_most_tokens(one["content"]) for one in messages)


def _most_tokens(text: Prompt) -> float:
    if not isinstance(text, str):
        return float("inf")  # parts, with or without images
    return len(text) if text.isascii() else EXPANSION * len(text.encode())


def check_lengths(
    dataset: "Dataset",
    tokenizer: Tokenizer,
    args: Any,
    longest: int,
    *,
    before: int = 0,
) -> None:
    """Check that prompts and their completions fit into the model's longest sequence.

    Args:
        dataset: Rows with ``prompt``.
        tokenizer: The tokenizer that counts.
        args: The trainer's settings.
        longest: The model's ``max_seq_length``.
        before: Number of rows before these, for the number in the message.

    Raises:
        DataError: A prompt is too long; the message has its number and the remedy.
    """
    completion = args.max_completion_length
    multiple = args.pad_to_multiple_of or 1
    room = longest // multiple * multiple - completion  # rows are padded up to a multiple
    longer = longer_prompts(dataset, tokenizer, room, args.chat_template_kwargs)
    if not longer:
        return
    row, length = next(iter(longer.items()))
    least = -(-(max(longer.values()) + completion) // multiple) * multiple
    raise DataError(
        f"prompt {before + row + 1} has {length} tokens, and {room} fit before a completion of "
        f"{completion}: load the model with max_seq_length {least} (model.max_seq_length in a run "
        "file), lower max_completion_length, or leave such prompts out with "
        f"data.max_prompt_tokens: {room}"
    )
