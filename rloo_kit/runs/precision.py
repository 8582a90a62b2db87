"""bf16 or float16: in which of them sampler and learner differ less.

The sampler draws a token at a time, the learner reads whole rows, so their log-probabilities differ
by rounding; float16 has three more bits for it than bf16 (arXiv 2510.26788).
"""

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from transformers import GenerationConfig
from trl.trainer import rloo_trainer  # whose names Unsloth replaces

from rloo_kit.config.run_file import RunConfig
from rloo_kit.data.lengths import prompt_ids
from rloo_kit.errors import ConfigError
from rloo_kit.job import PreparedJob
from rloo_kit.machine.memory import session
from rloo_kit.rloo.batching import TokenRows
from rloo_kit.sampling.canary import PROBE_TOKENS, PROBE_TOKENS_PER_ROW
from rloo_kit.sampling.choice import make_sampling
from rloo_kit.sampling.decoding import as_sampled, until_end
from rloo_kit.sampling.engine import Generations
from rloo_kit.training.trainer import LeaveOneOutTrainer
from rloo_kit.types import Row

PRECISIONS = ("bf16", "fp16")
# Every token can be drawn, with the probability that the policy gives it
WHOLE_DISTRIBUTION = {
    "top_p": 1.0, "top_k": 0, "min_p": None, "repetition_penalty": 1.0, "generation_kwargs": None,
    "thinking_budget": None, "max_completion_length": PROBE_TOKENS_PER_ROW,
}  # fmt: skip


# No more prompts than there are, and one reward
ONE_GROUP = {
    "per_device_train_batch_size": 8, "num_generations": 8, "gradient_accumulation_steps": 1,
    "steps_per_generation": None, "generation_batch_size": None, "reward_weights": None,
}  # fmt: skip


def mismatch(config: RunConfig, base: Path, rows: Sequence[Row], precision: str) -> float:
    """Return the mean |log p(sampler) - log p(learner)| of drawn tokens, in nats.

    The model is loaded in ``precision`` as the run loads it, draws at most 512 tokens as the run
    samples, and is given back.
    """
    settings = {**config.trainer, **WHOLE_DISTRIBUTION, **ONE_GROUP}
    config = replace(config, trainer=settings | {name: name == precision for name in PRECISIONS})
    rows = rows[: PROBE_TOKENS // PROBE_TOKENS_PER_ROW]
    with tempfile.TemporaryDirectory() as folder, session():
        from datasets import Dataset

        job = PreparedJob(replace(config, output_dir=folder), base)
        args = job.args
        if not getattr(args, precision):  # Unsloth has changed it
            raise ConfigError(
                f"Unsloth does not compute in {precision} here: set model.backend: transformers, "
                "or leave --precision out"
            )
        model, tokenizer = job.policy
        trainer = LeaveOneOutTrainer(model, _no_reward, args, Dataset.from_list([*rows]), tokenizer)
        prompts = [prompt_ids(tokenizer, row["prompt"], args.chat_template_kwargs) for row in rows]
        drawn = _drawn(trainer, prompts)
        tokens = TokenRows(prompts, drawn.completion_ids)
        learner = trainer.learner
        found = learner.log_probs(tokens, [*range(len(prompts))], trainer.policy.forward)  # (B, T)
        return fmean(
            abs(sampled - learnt)
            for own, row in zip(drawn.log_probs, found.tolist(), strict=True)
            for sampled, learnt in zip(own, row, strict=False)  # the row is padded
        )


def _no_reward(completions: list[Any], **_: Any) -> list[float]:
    return [0.0] * len(completions)


def _drawn(trainer: LeaveOneOutTrainer, prompts: list[list[int]]) -> Generations:
    """Complete each prompt once with the run's sampler."""
    if trainer.engine is None:
        return _drawn_by_transformers(trainer, prompts)
    trainer.engine.sync(trainer.model)
    sampling = make_sampling(trainer.args, trainer.eos_token_ids)
    drawn = trainer.engine.generate(prompts, sampling, trainer.args.seed)
    trainer.engine.sleep()
    return drawn


def _drawn_by_transformers(trainer: LeaveOneOutTrainer, prompts: list[list[int]]) -> Generations:
    unwrapped = rloo_trainer.unwrap_model_for_generation(  # pyright: ignore[reportPrivateImportUsage]
        trainer.model_wrapped, trainer.accelerator, generation_kwargs=trainer.generation_kwargs
    )
    padded = trainer.tokenizer.pad({"input_ids": prompts}, padding_side="left", return_tensors="pt")
    with unwrapped as model, torch.no_grad(), as_sampled(model):
        found = model.generate(
            **padded.to(model.device),
            generation_config=GenerationConfig.from_dict(
                trainer.generation_config.to_dict()
                | {"return_dict_in_generate": True, "output_scores": True}
            ),
        )
        scores = model.compute_transition_scores(
            found.sequences, found.scores, normalize_logits=True
        )  # (B, C)
    width = found.sequences.size(1) - scores.size(1)
    ids = [until_end(row[width:].tolist(), trainer.eos_token_ids) for row in found.sequences]
    pairs = zip(scores.tolist(), ids, strict=True)
    return Generations(ids, [row[: len(own)] for row, own in pairs])
