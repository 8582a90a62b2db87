"""Measure how much the log-probabilities of sampler and learner differ in bf16 and in float16.

The sampler computes one token at a time, and the learner computes whole rows. Rounding therefore
makes their log-probabilities differ. float16 has three more bits of precision than bf16
(arXiv 2510.26788).
"""

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from rloo_kit.config.run_file import RunConfig
from rloo_kit.config.settings import DEFAULTS, OF_TRL_STEP
from rloo_kit.data.lengths import tokenize_prompts
from rloo_kit.errors import ConfigError
from rloo_kit.job import PreparedJob
from rloo_kit.machine.cleanup import session
from rloo_kit.rloo.batching import TokenRows
from rloo_kit.sampling.canary import PROBE_TOKENS, PROBE_TOKENS_PER_ROW
from rloo_kit.types import Row

if TYPE_CHECKING:
    from rloo_kit.training.trainer import LeaveOneOutTrainer

PRECISIONS = ("bf16", "fp16")
# Settings of the run that are replaced by their defaults for a measurement. The defaults of `top_p`
# to `thinking_budget` make the sampler draw each token with the policy's own probability. The other
# defaults give a trainer that works with few prompts and one reward, and that uses the kit's step,
# because the learner of this step is compared with the sampler
RESET = {
    *OF_TRL_STEP, "top_p", "top_k", "min_p", "repetition_penalty", "generation_kwargs",
    "thinking_budget",
    "per_device_train_batch_size", "rows_in_flight", "gradient_accumulation_steps",
    "steps_per_generation", "generation_batch_size", "reward_weights",
    "max_tool_calling_iterations", "tool_timeout_seconds", "on_tool_error", "step",
}  # fmt: skip


def job_in(precision: str, config: RunConfig, base: Path) -> PreparedJob:
    """Return the run prepared in ``bf16`` or ``fp16``, without the settings in ``RESET``.

    Raises:
        ConfigError: Unsloth does not compute in this precision here.
    """
    settings = {name: value for name, value in config.trainer.items() if name not in RESET}
    # with 8 generations in a batch of 8 completions, a single row is enough for a trainer
    settings |= {"canary": False, "router_aux_loss_coef": 0.0, "num_generations": 8}
    settings |= {name: name == precision for name in PRECISIONS}
    # not longer than in the run, whose prompts may leave no room for longer completions
    limit = config.trainer.get("max_completion_length", DEFAULTS["max_completion_length"])
    settings["max_completion_length"] = min(limit, PROBE_TOKENS_PER_ROW)
    job = PreparedJob(replace(config, trainer=settings), base, lambda _: None)  # prints nothing
    if not getattr(job.args, precision):  # Unsloth has turned it off
        raise ConfigError(
            f"Unsloth does not compute in {precision} here: set model.backend: transformers, "
            "or leave --precision out"
        )
    return job


def mismatch(config: RunConfig, base: Path, rows: Sequence[Row], precision: str) -> float:
    """Return the mean |log p(sampler) - log p(learner)| of sampled tokens, in nats.

    The model is loaded in ``precision`` with the settings of the run, it samples at most 512
    tokens, and it is released.

    Args:
        config: Settings of the run.
        base: Folder that relative paths in the settings start from.
        rows: Rows with ``prompt``. Only the first 8 are used.
        precision: ``bf16`` or ``fp16``.

    Raises:
        ConfigError: Unsloth does not compute in this precision here.
    """
    rows = rows[: PROBE_TOKENS // PROBE_TOKENS_PER_ROW]
    with tempfile.TemporaryDirectory() as folder, session():
        job = job_in(precision, replace(config, output_dir=folder), base)
        args = job.args
        from datasets import Dataset

        from rloo_kit.sampling.decoding import as_learned
        from rloo_kit.training.trainer import LeaveOneOutTrainer  # TRL, after Unsloth

        model, tokenizer = job.policy
        dataset = Dataset.from_list([*rows])
        trainer = LeaveOneOutTrainer(model, "length", args, dataset, tokenizer)  # never trains
        asked = [row["prompt"] for row in rows]
        prompts = tokenize_prompts(tokenizer, asked, args.chat_template_kwargs)
        if trainer.engine is None:
            ids, log_probs = _drawn_by_transformers(trainer, prompts)
        else:
            ids, log_probs = trainer.sampler.draw(prompts)
            assert log_probs is not None  # an engine reports them
        tokens = TokenRows(prompts, ids)
        numbers = [*range(len(prompts))]
        with as_learned(trainer.model):
            learnt = trainer.learner.log_probs(tokens, numbers, trainer.policy.run)  # (B, T)
        return fmean(
            abs(of_sampler - of_learner)
            for row in zip(ids, log_probs, learnt.tolist(), strict=True)
            for _, of_sampler, of_learner in zip(*row, strict=False)  # ids are not padded
        )


def _drawn_by_transformers(
    trainer: "LeaveOneOutTrainer", prompts: list[list[int]]
) -> tuple[list[list[int]], list[list[float]]]:
    """Sample one completion of each prompt with ``generate`` of transformers.

    Args:
        trainer: Trainer with the model.
        prompts: Token ids of each prompt.

    Returns:
        The token ids of each completion up to its end, and the log-probabilities of its tokens,
        which are padded to the length of the longest completion.
    """
    import torch

    from rloo_kit.sampling.decoding import generate, until_end

    with trainer.sampler.unwrapped() as model, torch.no_grad():
        found = generate(
            model,
            prompts,
            trainer.tokenizer.pad_token_id,
            generation_config=trainer.generation_config,
            return_dict_in_generate=True,
            output_scores=True,
        )
        scores = model.compute_transition_scores(
            found.sequences, found.scores, normalize_logits=True
        )  # (B, C)
    drawn = found.sequences[:, -scores.size(1) :].tolist()
    return [until_end(row, trainer.eos_token_ids) for row in drawn], scores.tolist()
