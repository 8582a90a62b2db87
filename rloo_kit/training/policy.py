"""Forward passes of the policy and of the reference model over micro-batches."""

import contextlib
import functools
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
    """Runner of forward passes over micro-batches, with the policy or the reference model."""

    model: Any  # the policy, with or without an adapter
    # A separate reference model; None if the reference is the adapter `ref` of the policy's model,
    # or that model without adapter
    ref_model: Any
    accelerator: Accelerator  # for autocast and unwrapping
    args: LeaveOneOutConfig

    def run(self, batch: MicroBatch, model: Any = None) -> PassOutput:
        """Run a model on a micro-batch.

        Args:
            batch: The micro-batch.
            model: The model to run; None for the policy.

        Returns:
            The log-probabilities of the completion tokens and, if gradients are enabled, their
            detached entropies. Both are ``(N, C)`` for N rows, with C the length of the longest
            completion, and 0 on masked tokens.
        """
        model = self.accelerator.unwrap_model(self.model if model is None else model)
        with self.accelerator.autocast():
            # No attention mask is needed, because rows are padded on the right only. (Unsloth's
            # kernels may drop a mask in training; left-padded rows would then attend to padding.)
            after = _run_prompts(model, batch.shared, batch.labels) if batch.shared else {}
            output = model(
                input_ids=batch.input_ids, labels=batch.labels, fused_lm_head=True, **after
            )
        # TRL's head returns the values of a token one column before the token
        before = (batch.places - 1).clamp(min=0)

        def of_completions(values: torch.Tensor) -> torch.Tensor:  # (N, W) -> (N, C)
            return values.gather(1, before).masked_fill(~batch.completion_mask, 0.0)

        wanted = torch.is_grad_enabled()
        return PassOutput(
            of_completions(output.log_probs),
            of_completions(output.entropy.detach()) if wanted else None,
        )

    def may_share(self) -> bool:
        """Return True if one pass over a prompt can serve several completions.

        The model must support this, and the pass must not use gradient checkpointing.
        """
        checkpoints = self.args.gradient_checkpointing or self.model.is_gradient_checkpointing
        return not (checkpoints and torch.is_grad_enabled()) and continues_prompts(self.model)

    @contextlib.contextmanager
    def no_grad(self) -> Iterator[None]:
        """Disable gradients and gradient checkpointing during a ``with`` block."""
        with torch.no_grad(), without_checkpointing(self.model):
            yield

    def reference_log_probs(
        self, learner: Learner, tokens: TokenRows, rows: list[int]
    ) -> torch.Tensor:
        """Compute the reference model's log-probabilities of the completion tokens of some rows.

        Args:
            learner: Runs the passes, and counts their rows in its tally.
            tokens: The tokens of all B rows.
            rows: Numbers of the rows to compute.

        Returns:
            ``(B, T)`` float32, with T the length of the longest completion. The value is 0 in rows
            that are not computed, on tokens that came from tools, and after a completion's end.
        """
        forward = functools.partial(self.run, model=self.ref_model)
        place = contextlib.nullcontext()
        if self.ref_model is None:
            model = self.accelerator.unwrap_model(self.model)
            place = use_adapter(model, "ref" if "ref" in model.peft_config else None)
        with place:
            learner.tally.reference_rows += len(rows)
            return learner.log_probs(tokens, rows, forward)


def enable_checkpointing(model: Model, args: LeaveOneOutConfig) -> None:
    """Turn gradient checkpointing on in the same way as transformers' training loop."""
    kwargs = {**cast(dict[str, Any], args.gradient_checkpointing_kwargs or {})}
    # these two are arguments of transformers; the others are passed on to torch
    own = {name: kwargs.pop(name) for name in ("every_n_layers", "offload") if name in kwargs}
    # by name: Unsloth's replacement for Gemma 3n and 4 accepts no positional arguments
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=kwargs or None, **own)


@contextlib.contextmanager
def without_checkpointing(model: Model) -> Iterator[None]:
    """Turn gradient checkpointing off during a ``with`` block, and restore it at the end.

    The flags of the modules are changed directly. transformers' own method would add another hook
    to the embedding each time it turns checkpointing on.
    """
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    checkpointed = {
        one: one.gradient_checkpointing
        for one in base.modules()
        if getattr(one, "gradient_checkpointing", False)
    }
    for module in checkpointed:
        module.gradient_checkpointing = False
    try:
        yield
    finally:
        for module, value in checkpointed.items():
            module.gradient_checkpointing = value


def _run_prompts(model: Model, shared: SharedPrompts, rows: torch.Tensor) -> dict[str, Any]:
    """Run each shared prompt once.

    The key-value cache is part of the autograd graph, so the gradient of a prompt is the sum over
    the rows that continue it.

    Args:
        model: The model.
        shared: The distinct prompts of a micro-batch.
        rows: ``(N, W)``, a tensor of the shape of the micro-batch's rows.

    Returns:
        Keyword arguments for the model's pass over the rows, so that each row continues its prompt:
        cache, attention mask and positions.
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
