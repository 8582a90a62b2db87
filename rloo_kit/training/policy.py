"""Forward passes of the policy and of its reference over micro-batches."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from accelerate import Accelerator
from transformers import DynamicCache
from trl.trainer.utils import use_adapter

from rloo_kit.rloo.batching import MicroBatch, SharedPrompts, TokenRows
from rloo_kit.rloo.learner import Learner, PassOutput
from rloo_kit.sampling.decoding import continues_prompts
from rloo_kit.training.arguments import LeaveOneOutConfig
from rloo_kit.types import Model


@dataclass(eq=False)
class Policy:
    """Forward passes over micro-batches, under the policy and under its reference."""

    model: Any  # the policy, with or without an adapter
    # A separate reference model; None if it is the adapter `ref`, or the model without adapter
    ref_model: Any
    accelerator: Accelerator  # casts and unwraps
    args: LeaveOneOutConfig

    def forward(self, batch: MicroBatch) -> PassOutput:
        """Return log-probabilities under the policy, and entropies if gradients are enabled."""
        return self.run(batch, entropies=torch.is_grad_enabled())

    def run(self, batch: MicroBatch, *, entropies: bool, model: Any = None) -> PassOutput:
        """Return ``(N, C)`` log-probabilities of a micro-batch's completions, and entropies.

        Args:
            batch: The rows.
            entropies: Return ``(N, C)`` entropies too, detached.
            model: The model that computes; None for the policy.
        """
        model = self.accelerator.unwrap_model(self.model if model is None else model)
        with self.accelerator.autocast():
            # No attention mask, since rows are padded on the right only. (Unsloth's kernels may
            # drop it while they train; left-padded prompts would then attend to their padding.)
            after = {} if batch.shared is None else _run_prompts(model, batch.shared, batch.labels)
            output = model(
                input_ids=batch.input_ids, labels=batch.labels, fused_lm_head=True, **after
            )
        before = (batch.places - 1).clamp(min=0)  # TRL's head scores a token one column before it

        def of_completions(values: torch.Tensor) -> torch.Tensor:  # (N, W) -> (N, C)
            return values.gather(1, before).masked_fill(~batch.completion_mask, 0.0)

        log_probs = of_completions(output.log_probs)
        return PassOutput(log_probs, of_completions(output.entropy.detach()) if entropies else None)

    def may_share(self) -> bool:
        """Return whether a prompt may run once for its group; not with gradient checkpointing."""
        checkpoints = self.args.gradient_checkpointing or self.model.is_gradient_checkpointing
        return not (checkpoints and torch.is_grad_enabled()) and continues_prompts(self.model)

    @contextlib.contextmanager
    def no_grad(self) -> Iterator[None]:
        """Run passes without gradient, and without gradient checkpointing."""
        with torch.no_grad(), without_checkpointing(self.model, self.args):
            yield

    def reference_log_probs(
        self, learner: Learner, tokens: TokenRows, rows: list[int]
    ) -> torch.Tensor:
        """Return ``(B, T)`` log-probabilities under the reference, 0 in other rows."""

        def forward(batch: MicroBatch) -> PassOutput:
            return self.run(batch, entropies=False, model=self.ref_model)

        place = contextlib.nullcontext()
        if self.ref_model is None:
            model = self.accelerator.unwrap_model(self.model)
            place = use_adapter(model, "ref" if "ref" in model.peft_config else None)
        with place:
            learner.tally.reference_rows += len(rows)
            return learner.log_probs(tokens, rows, forward)


def enable_checkpointing(model: Model, args: LeaveOneOutConfig) -> None:
    """Turn gradient checkpointing on as transformers' loop does."""
    kwargs = {**cast(dict[str, Any], args.gradient_checkpointing_kwargs or {})}
    # two arguments of transformers; the others are for torch
    own = {name: kwargs.pop(name) for name in ("every_n_layers", "offload") if name in kwargs}
    # by name: Unsloth's replacement for Gemma 3n and 4 accepts no positional arguments
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=kwargs or None, **own)


@contextlib.contextmanager
def without_checkpointing(model: Model, args: LeaveOneOutConfig) -> Iterator[None]:
    """Turn gradient checkpointing off for the body."""
    was_enabled = model.is_gradient_checkpointing
    if was_enabled:
        model.gradient_checkpointing_disable()
    try:
        yield
    finally:
        if was_enabled:
            enable_checkpointing(model, args)


def _run_prompts(model: Model, shared: SharedPrompts, rows: torch.Tensor) -> dict[str, Any]:
    """Run each prompt once; return the arguments with which ``(N, W)`` rows continue them.

    The cache is part of the graph: the gradient of a prompt is the sum over its rows.
    """
    cache = DynamicCache(config=model.config.get_text_config())
    model.get_decoder()(input_ids=shared.input_ids, past_key_values=cache, use_cache=True)
    cache.batch_select_indices(shared.of_row)
    begin = shared.lengths[shared.of_row].unsqueeze(1)  # (N, 1)
    is_prompt = torch.arange(shared.input_ids.size(1), device=begin.device) < begin  # (N, S)
    return {
        "past_key_values": cache,
        "use_cache": True,
        "attention_mask": torch.cat([is_prompt.long(), torch.ones_like(rows)], 1),  # (N, S + W)
        "position_ids": begin + torch.arange(rows.size(1), device=begin.device),  # (N, W)
    }
