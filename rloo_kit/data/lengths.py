"""Functions that measure prompts in tokens and leave out or reject the ones that are too long.

A token covers at least one byte of text, so the number of bytes is an upper bound on the number of
tokens. Only prompts whose upper bound is too high are tokenized.
"""

import heapq
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from rloo_kit.data.files import iter_column
from rloo_kit.errors import DataError
from rloo_kit.text.wording import first_line
from rloo_kit.types import Prompt, Tokenizer

if TYPE_CHECKING:
    from datasets import Dataset

# Maximum number of bytes that one byte becomes if a tokenizer normalises text (NFKC). ASCII text
# does not change
EXPANSION = 11
# Number of prompts that are tokenized to find the longest
COUNTED = 1000
# Keys of a message whose number of tokens has an upper bound
KEYS = {"role", "content"}
# Keyword arguments for the chat template
TemplateSettings: TypeAlias = dict[str, Any] | None


def tokenize_prompts(
    processing_class: Tokenizer,
    prompts: Sequence[Prompt],
    settings: TemplateSettings = None,
) -> list[list[int]]:
    """Return the token ids of each prompt, exactly as the policy receives them.

    Args:
        processing_class: The tokenizer, or a processor that has a tokenizer.
        prompts: Texts, or conversations, which the chat template renders.
        settings: Keyword arguments for the chat template.

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
            f"the model's chat template cannot render a prompt ({first_line(exc)}): if the "
            "model has no chat template, set data.chat: false; otherwise change the roles of the "
            "messages, or data.system"
        ) from exc


def prompt_ids(
    tokenizer: Tokenizer, prompt: Prompt, settings: TemplateSettings = None
) -> list[int]:
    """Return the token ids of one prompt; see ``tokenize_prompts`` for the arguments."""
    return tokenize_prompts(tokenizer, [prompt], settings)[0]


def longer_prompts(
    dataset: "Dataset", tokenizer: Tokenizer, limit: int, settings: TemplateSettings = None
) -> dict[int, int]:
    """Return the prompts that have more than ``limit`` tokens, as row number -> number of tokens.

    Row numbers start at 0. Tokens of images are not counted. ``settings`` are keyword arguments for
    the chat template.
    """
    return {
        row: length
        for row, prompt, most in _bounded(dataset, tokenizer, settings)
        if most > limit and (length := len(prompt_ids(tokenizer, prompt, settings))) > limit
    }


def longest_prompt(
    dataset: "Dataset", tokenizer: Tokenizer, settings: TemplateSettings = None
) -> list[int]:
    """Return the token ids of the longest prompt.

    Only the 1,000 prompts with the highest upper bounds on their number of tokens are compared, so
    in a larger dataset another prompt may be longer. To compute the bounds, the first prompt with
    each sequence of roles is also tokenized. ``settings`` are keyword arguments for the chat
    template.
    """
    rows = _bounded(dataset, tokenizer, settings)
    candidates = heapq.nlargest(COUNTED, rows, key=lambda one: one[2])
    return max((prompt_ids(tokenizer, prompt, settings) for _, prompt, _ in candidates), key=len)


def quantile_of_lengths(
    dataset: "Dataset", tokenizer: Tokenizer, share: float, settings: TemplateSettings = None
) -> int:
    """Return a quantile of the lengths of all prompts, in tokens.

    Args:
        dataset: Rows with a column ``prompt``.
        tokenizer: The tokenizer, or a processor that has a tokenizer.
        share: Share of the prompts, above 0 and at most 1. The result is the smallest N such that
            at least this share of the prompts has N tokens or fewer; for 0.5 it is the median.
        settings: Keyword arguments for the chat template.
    """
    prompts = iter_column(dataset, "prompt")
    lengths = sorted(len(prompt_ids(tokenizer, prompt, settings)) for prompt in prompts)
    return lengths[math.ceil(share * len(lengths)) - 1]


def drop_long_prompts(
    dataset: "Dataset", tokenizer: Tokenizer, limit: int, settings: TemplateSettings = None
) -> "tuple[Dataset, int]":
    """Return the prompts of at most ``limit`` tokens, and the number of prompts left out.

    Tokens of images are not counted. ``settings`` are keyword arguments for the chat template.

    Raises:
        DataError: Every prompt has more than ``limit`` tokens.
    """
    longer = longer_prompts(dataset, tokenizer, limit, settings)
    if not longer:
        return dataset, 0
    if len(longer) == len(dataset):
        raise DataError(
            f"max_prompt_tokens {limit} leaves out all {len(longer)} prompts: raise it to at least "
            f"{min(longer.values())}, the tokens of the shortest prompt"
        )
    kept = [row for row in range(len(dataset)) if row not in longer]
    return dataset.select(kept), len(longer)


def _bounded(
    dataset: "Dataset", tokenizer: Tokenizer, settings: TemplateSettings
) -> Iterator[tuple[int, Any, float]]:
    """Yield (row number, prompt, upper bound on its number of tokens) for each prompt.

    The bound is infinite if a message has content parts, tool calls or other keys than ``KEYS``.
    """
    # Roles of the messages -> number of tokens of the first prompt with these roles
    template = {}
    for row, prompt in enumerate(iter_column(dataset, "prompt")):
        messages = [{"role": "", "content": prompt}] if isinstance(prompt, str) else prompt
        # in a table, a key that a message does not have is None
        if any({key for key in one if one[key] is not None} != KEYS for one in messages):
            yield row, prompt, math.inf
            continue
        roles = tuple(one["role"] for one in messages)
        if roles not in template:
            template[roles] = len(prompt_ids(tokenizer, prompt, settings))
        yield row, prompt, template[roles] + sum(_most_tokens(one["content"]) for one in messages)


def _most_tokens(text: Prompt) -> float:
    if not isinstance(text, str):
        return math.inf  # content parts, with or without images
    return len(text) if text.isascii() else EXPANSION * len(text.encode())


def check_lengths(
    dataset: "Dataset",
    tokenizer: Tokenizer,
    args: Any,
    longest: int,
    *,
    before: int = 0,
    remedy: str = "load the model with max_seq_length {} (model.max_seq_length in a run file)",
) -> None:
    """Check that the context length suffices for each prompt and a completion of full length.

    Args:
        dataset: Rows with a column ``prompt``.
        tokenizer: The model's tokenizer.
        args: The trainer's settings.
        longest: The context length of the model or of its engine, in tokens.
        before: Number of prompts that come before this dataset. The error message adds it to the
            row number.
        remedy: First advice of the error message, with {} for the length that is needed.

    Raises:
        DataError: A prompt is too long. The message gives its number and says what to change.
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
        f"prompt {before + row + 1} has {length} tokens, but only {room} fit before a completion "
        f"of {completion} tokens: {remedy.format(least)}, lower max_completion_length, or leave "
        f"out long prompts with data.max_prompt_tokens: {room}"
    )
