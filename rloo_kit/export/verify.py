"""Comparison of an exported model's answers with those of the trained model.

The trained model answers greedily, and both models give the log-probability of each of its tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rloo_kit.data.lengths import prompt_ids
from rloo_kit.errors import DataError, ModelError
from rloo_kit.evaluation.evaluator import evaluate
from rloo_kit.types import Model, Tokenizer

# Longest answer to compare
MAX_TOKENS = 48


@dataclass(frozen=True)
class Answers:
    """Answers of a model."""

    prompts: Sequence[Any]
    settings: dict[str, Any] | None  # of the chat template
    rows: list[tuple[list[int], list[int]]]  # tokens of prompt and answer
    log_probs: list[float]  # of each token of each answer, in nats


def ask(
    model: Model, tokenizer: Tokenizer, prompts: Sequence[Any], settings: dict[str, Any] | None
) -> Answers:
    """Return a model's greedy answers and their log-probabilities.

    Args:
        model: A causal language model, with or without an adapter.
        tokenizer: Its tokenizer.
        prompts: Texts or chat messages, at least one.
        settings: Arguments of the chat template.
    """
    found = evaluate(
        model,
        tokenizer,
        [{"prompt": prompt} for prompt in prompts],
        [],
        temperature=0,
        max_completion_length=MAX_TOKENS,
        chat_template_kwargs=settings,
    )
    rows = [
        (
            prompt_ids(tokenizer, sample["prompt"], settings),
            tokenizer(sample["completion"], add_special_tokens=False)["input_ids"],
        )
        for sample in found.samples
    ]
    return Answers(prompts, settings, rows, _log_probs(model, rows))


def compare(first: Answers, model: Model, tokenizer: Tokenizer) -> float:
    """Return how far two models' log-probabilities of a token of an answer differ, in nats.

    Returns the mean of the absolute differences over all tokens of all answers.

    Args:
        first: Answers of the first model, with their log-probabilities.
        model: The second model, which computes the log-probabilities of the same tokens.
        tokenizer: Tokenizer of the second model.

    Raises:
        ModelError: This tokenizer reads a prompt as other tokens, or has lost its chat template.
    """
    for prompt, (ids, _) in zip(first.prompts, first.rows, strict=True):
        try:
            read = prompt_ids(tokenizer, prompt, first.settings)
        except DataError as exc:
            raise ModelError(f"its chat template was lost: {exc}") from exc
        if read != ids:
            raise ModelError(f"its tokenizer reads a prompt as {len(read)} tokens, not {len(ids)}")
    now = _log_probs(model, first.rows)
    total = sum(abs(a - b) for a, b in zip(now, first.log_probs, strict=True))
    return total / max(1, len(now))


def _log_probs(model: Model, rows: list[tuple[list[int], list[int]]]) -> list[float]:
    import torch
    from trl.trainer.utils import selective_log_softmax

    model.eval()
    found = []
    for prompt, answer in rows:
        tokens = torch.tensor([prompt + answer], device=model.device)  # (1, T)
        with torch.no_grad():
            logits = model(input_ids=tokens).logits[0, len(prompt) - 1 : -1]  # (answer, V)
        found += selective_log_softmax(logits.float(), tokens[0, len(prompt) :]).tolist()
    return found
