"""Comparison of an exported model with the trained model.

The trained model generates greedy answers. Both models then compute the log-probability of each
token of these answers, and the values are compared.
"""

from collections.abc import Sequence
from statistics import fmean
from typing import Any

from rloo_kit.data.lengths import prompt_ids
from rloo_kit.errors import DataError, ModelError
from rloo_kit.evaluation.evaluator import evaluate
from rloo_kit.types import Model, Tokenizer

# Maximum number of tokens in an answer that is compared
MAX_TOKENS = 48


class Answers:
    """Greedy answers of a model to prompts, with the log-probabilities of their tokens.

    Args:
        model: A causal language model, with or without an adapter.
        tokenizer: The model's tokenizer.
        prompts: Texts or lists of chat messages, at least one.
        settings: Arguments of the chat template.
    """

    def __init__(
        self,
        model: Model,
        tokenizer: Tokenizer,
        prompts: Sequence[Any],
        settings: dict[str, Any] | None,
    ) -> None:
        self._settings = settings
        found = evaluate(
            model,
            tokenizer,
            [{"prompt": prompt} for prompt in prompts],
            [],
            temperature=0,
            max_completion_length=MAX_TOKENS,
            chat_template_kwargs=settings,
        )
        # For each prompt: the prompt, its token ids, and the token ids of its answer
        self._rows = [
            (
                sample["prompt"],
                prompt_ids(tokenizer, sample["prompt"], settings),
                # of an empty answer, the token that ended it is compared
                tokenizer(sample["completion"], add_special_tokens=False)["input_ids"]
                or [tokenizer.eos_token_id],
            )
            for sample in found.samples
        ]
        self._log_probs = self._log_probs_by(model)

    def difference(self, model: Model, tokenizer: Tokenizer) -> float:
        """Return the mean absolute difference of two models' token log-probabilities, in nats.

        The mean is over all tokens of all answers.

        Args:
            model: The second model, which computes the log-probabilities of the same tokens.
            tokenizer: Tokenizer of the second model.

        Raises:
            ModelError: The second tokenizer encodes a prompt as different tokens, or has lost its
                chat template.
        """
        for prompt, ids, _ in self._rows:
            try:
                read = prompt_ids(tokenizer, prompt, self._settings)
            except DataError as exc:
                raise ModelError(f"the export has lost its chat template: {exc}") from exc
            if read != ids:
                raise ModelError(
                    f"the export's tokenizer reads a prompt as {len(read)} tokens that differ from "
                    f"the {len(ids)} tokens of the trained model's tokenizer: pass --no-check to "
                    "keep the export"
                )
        pairs = zip(self._log_probs_by(model), self._log_probs, strict=True)
        return fmean(abs(now - before) for now, before in pairs)

    def _log_probs_by(self, model: Model) -> list[float]:
        """Return a model's log-probability of each token of all answers, in nats."""
        import torch
        from trl.trainer.utils import selective_log_softmax

        model.eval()
        found = []
        for _, prompt, answer in self._rows:
            tokens = torch.tensor([prompt + answer], device=model.device)  # (1, T)
            with torch.no_grad():
                logits = model(input_ids=tokens).logits[0, len(prompt) - 1 : -1]  # (answer, V)
            found += selective_log_softmax(logits.float(), tokens[0, len(prompt) :]).tolist()
        return found
