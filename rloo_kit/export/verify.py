"""Check that an exported model answers as the one it was made from.

The first one's greedy answers are kept with the log-probability of each token; the second one gives
its log-probabilities of the same tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rloo_kit.data.lengths import prompt_ids
from rloo_kit.errors import DataError, ModelError
from rloo_kit.evaluation.evaluator import evaluate
from rloo_kit.types import Model, Tokenizer

DEFAULT_PROMPTS = (
    "What is 17 + 25?",
    "Write one sentence about the sea.",
    "How many days has a week?",
    "Give a short definition of a triangle.",
)


@dataclass(frozen=True)
class Answers:
    """What a model answered."""

    prompts: list[str | list[dict[str, Any]]]
    settings: dict[str, Any]  # of the chat template
    ids: list[list[int]]  # of prompt and answer, as this model's tokenizer reads them
    starts: list[int]  # tokens of each prompt
    log_probs: list[list[float]]  # of each token of each answer, in nats


def default_prompts(tokenizer: Tokenizer) -> list[Any]:
    """Return prompts for a model of which no run is known."""
    if tokenizer.chat_template:
        return [[{"role": "user", "content": text}] for text in DEFAULT_PROMPTS]
    return list(DEFAULT_PROMPTS)


def ask(
    model: Model,
    tokenizer: Tokenizer,
    prompts: Sequence[Any],
    settings: dict[str, Any] | None = None,
    *,
    max_tokens: int = 48,
) -> Answers:
    """Return a model's greedy answers and their log-probabilities.

    Args:
        model: A causal language model, with or without an adapter.
        tokenizer: Its tokenizer.
        prompts: Texts or chat messages, at least one.
        settings: Of the chat template.
        max_tokens: Of an answer.
    """
    rows: Any = [{"prompt": prompt} for prompt in prompts]
    found = evaluate(
        model,
        tokenizer,
        rows,
        [],
        temperature=0,
        max_completion_length=max_tokens,
        chat_template_kwargs=settings,
    )
    ids, starts = [], []
    for prompt, sample in zip(prompts, found.samples, strict=True):
        head = prompt_ids(tokenizer, prompt, settings)
        answer = tokenizer(sample["completion"], add_special_tokens=False)["input_ids"]
        ids.append([*head, *answer])
        starts.append(len(head))
    log_probs = _log_probs(model, ids, starts)
    return Answers(list(prompts), settings or {}, ids, starts, log_probs)


def compare(first: Answers, model: Model, tokenizer: Tokenizer) -> float:
    """Return how far another model's log-probabilities of these answers are, in nats.

    It is the mean over tokens of the absolute difference.

    Raises:
        ModelError: Its tokenizer reads a prompt as other tokens.
    """
    for prompt, ids, start in zip(first.prompts, first.ids, first.starts, strict=True):
        try:
            read = prompt_ids(tokenizer, prompt, first.settings)
        except DataError as exc:
            raise ModelError(f"its chat template was lost: {exc}") from exc
        if read != ids[:start]:
            raise ModelError(f"its tokenizer reads a prompt as {len(read)} tokens, not {start}")
    now = [value for row in _log_probs(model, first.ids, first.starts) for value in row]
    before = [value for row in first.log_probs for value in row]
    total = sum(abs(a - b) for a, b in zip(now, before, strict=True))
    return total / max(1, len(now))


def _log_probs(model: Model, ids: list[list[int]], starts: list[int]) -> list[list[float]]:
    import torch

    model.eval()
    found = []
    for row, start in zip(ids, starts, strict=True):
        tokens = torch.tensor([row], device=model.device)  # (1, T)
        with torch.no_grad():
            logits = model(input_ids=tokens).logits[0, start - 1 : -1].float()  # (answer, V)
        chosen = logits.log_softmax(-1).gather(-1, tokens[0, start:, None])
        found.append(chosen[:, 0].tolist())
    return found
