"""Sampling of completions from the current policy, and the weighted sum of their rewards.

Shapes: B completions, F reward functions.
"""

import contextlib
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from trl.trainer import rloo_trainer  # the module, because Unsloth replaces its names

from rloo_kit.config.engine_settings import blame_generation_kwargs
from rloo_kit.errors import GenerationError
from rloo_kit.rloo.advantages import weighted_sum
from rloo_kit.rloo.batching import MicroBatch, TokenRows
from rloo_kit.rloo.rollout import Completions, ScoredBatch
from rloo_kit.rloo.step import Pending, Row
from rloo_kit.sampling.canary import Canary, Policies
from rloo_kit.sampling.choice import make_sampling
from rloo_kit.sampling.completer import Completer
from rloo_kit.sampling.decoding import Pieces, complete, finite_logits, grow
from rloo_kit.sampling.engine import (
    Begun,
    Engine,
    Generations,
    Sampling,
    ThoughtLimit,
    draw_from,
)
from rloo_kit.sampling.vllm_inprocess import is_4bit
from rloo_kit.scoring.composition import WeightSchedule
from rloo_kit.scoring.specs import LoadedReward
from rloo_kit.training.arguments import LeaveOneOutConfig
from rloo_kit.training.policy import Policy, without_checkpointing
from rloo_kit.training.step_log import StepLog
from rloo_kit.types import TokenIds

# Advice in the error message if a single completion does not fit into memory
SAMPLING_REMEDY = (
    "lower trainer.max_completion_length, use a smaller model, or set model.load_in_4bit"
)


@dataclass(kw_only=True, eq=False)
class Sampler:
    """Sampler of completions of tokenized prompts, from the current policy."""

    model: Any
    accelerator: Accelerator
    args: LeaveOneOutConfig
    policy: Policy  # the canary compares its log-probabilities with those of the engine
    log: StepLog
    pad_token_id: int
    eos_token_ids: list[int]
    thought: ThoughtLimit | None  # None if the length of thoughts is not limited
    generation_config: Any  # transformers' settings of sampling, used if the model itself samples
    generation_kwargs: dict[str, Any]  # the same settings as a dict
    trl_generate: Callable[[Any, Any, Any], TokenIds]  # TRL's method, for continuous batching
    engine: Engine | None = None  # None if the model itself samples
    canary: Canary | None = None  # checks that the engine samples from the current policy
    is_synced: bool = False  # True if the engine has the current weights
    # Draws during `turns`, which are checked when the engine has freed its memory. None outside of
    # `turns`, where each draw is checked at once
    unchecked: list[tuple[TokenIds, Generations]] | None = None
    pieces: Pieces = field(default_factory=lambda: Pieces("sampling", SAMPLING_REMEDY))

    def draw(self, prompt_ids: TokenIds) -> tuple[TokenIds, list[list[float]] | None]:
        """Sample one completion of each prompt.

        Returns:
            The token ids of the completions, and the log-probabilities of these tokens. The
            log-probabilities are None if the model itself samples and ``partial_rollouts`` is off.

        Raises:
            StalePolicyError: The engine did not sample from the current policy.
            MemoryRanOutError: Not even a single completion fits into memory.
        """
        if self.engine:
            draw = functools.partial(draw_from, self.engine, prompt_ids)
            drawn = self._draw_by(self.engine, prompt_ids, draw)
        elif self.args.partial_rollouts:
            drawn = Generations.of(self.pieces.run(self._draw_rows, prompt_ids, len(prompt_ids)))
        else:
            return self.pieces.run(self.generate, prompt_ids, len(prompt_ids)), None
        return drawn.completion_ids, drawn.log_probs

    def grow(self, begun: Begun) -> Generations:
        """Continue unfinished completions until enough of them have ended.

        Args:
            begun: The completions so far. Its function ``is_enough`` decides when sampling stops;
                without it, sampling continues until all have ended.

        Returns:
            The new tokens of each completion in ``begun``, and the log-probabilities of these
            tokens.

        Raises:
            StalePolicyError: The engine did not sample from the current policy.
            Exception: Memory ran out; ``is_out_of_memory`` recognises the error.
        """
        engine: Any = self.engine  # `check_partial` accepts only an engine with a method `grow`
        if engine is None:
            return self._grow_here(begun)
        return self._draw_by(engine, begun.all_ids, functools.partial(engine.grow, begun))

    def has_ended(self, prompt_ids: list[int], ids: list[int]) -> bool:
        """Return True if the completion ``ids`` has an end token or has reached a limit.

        The limits are the maximum length of a completion, the maximum length of its thought, and
        the engine's maximum length of prompt and completion together. A completion without tokens
        has not ended.
        """
        if not ids:  # it is still waiting for a free slot of the engine
            return False
        is_over = len(ids) >= self.args.max_completion_length or ids[-1] in self.eos_token_ids
        if self.engine is not None:  # the engine has no room for another token
            is_over |= len(prompt_ids) + len(ids) >= self.engine.max_length
        return is_over or bool(self.thought and self.thought.exceeds(prompt_ids, ids))

    def _draw_by(
        self,
        engine: Engine,
        prompt_ids: TokenIds,
        draw: Callable[[Sampling, int], Generations],
    ) -> Generations:
        """Call ``draw`` after syncing the weights, and check that the engine used them.

        In a block of ``turns``, the check follows at the end of the block.

        Args:
            engine: The engine that samples.
            prompt_ids: The tokens that are continued: the prompts, each followed by the tokens of
                its unfinished completion, if there are any.
            draw: Function that samples; it is called with the sampling settings and a seed.

        Raises:
            StalePolicyError: The engine did not sample from the current policy.
        """
        self._sync(engine, prompt_ids)
        seed = int(torch.randint(2**31, ()))  # drawn from the run's random state
        drawn = draw(make_sampling(self.args, self.eos_token_ids, self.thought), seed)
        self.log.note_used()
        if self.unchecked is not None:
            self.unchecked.append((prompt_ids, drawn))
            return drawn
        engine.sleep()  # the canary, the rewards and the learning step need its memory
        self._check(engine, prompt_ids, drawn)
        return drawn

    @contextlib.contextmanager
    def turns(self) -> Iterator[None]:
        """Keep the engine awake during a ``with`` block that samples all turns of a batch.

        All turns can then use the engine's KV cache. At the end of the block the engine frees its
        memory, and after that the canary checks all samples of the block.

        Raises:
            StalePolicyError: In one of the draws the engine did not sample from the current policy.
        """
        engine = self.engine
        if engine is None:
            yield
            return
        drawn = self.unchecked = []
        try:
            yield
        finally:
            self.unchecked = None
            engine.sleep()
        for pair in drawn:
            self._check(engine, *pair)

    def _check(self, engine: Engine, prompt_ids: TokenIds, drawn: Generations) -> None:
        """Check that the engine sampled from the current policy.

        There is no check without a canary, or if the model is not in training mode.

        Raises:
            StalePolicyError: The engine did not sample from the current policy.
        """
        if self.canary and self.model.training:
            rows = zip(prompt_ids, drawn.completion_ids, drawn.log_probs, strict=True)
            # a row that waited for a free slot of the engine may have no new token
            prompts, ids, known = zip(*(row for row in rows if row[1]), strict=True)
            tokens = TokenRows([*prompts], [*ids])
            self.log.note_all(self.canary.check(tokens, [*known], engine.name))

    def generate(self, prompt_ids: Sequence[list[int]]) -> TokenIds:
        """Sample one completion of each prompt with the model itself; return the token ids.

        Raises:
            GenerationError: Continuous batching failed; transformers only logs the error.
        """
        args = self.args
        if args.use_transformers_continuous_batching:
            given = args.bf16, args.fp16
            args.bf16 = args.fp16 = False  # TRL would cast the policy
            try:
                with self._samples():
                    drawn = self.trl_generate(prompt_ids, None, {})
            finally:
                args.bf16, args.fp16 = given
            if sum(map(self.has_ended, prompt_ids, drawn)) < len(prompt_ids):
                raise GenerationError(
                    "transformers' continuous batching failed before all completions had ended, "
                    "and logged the reason: lower trainer.max_completion_length, or leave "
                    "trainer.use_transformers_continuous_batching out"
                )
            if self.thought:
                drawn = map(self.thought.cut, prompt_ids, drawn)
            return [*drawn]
        with self._samples(), self.unwrapped() as model, torch.no_grad():
            return complete(
                model,
                prompt_ids,
                self.pad_token_id,
                self.eos_token_ids,
                self.thought,
                generation_config=self.generation_config,
            )

    def _grow_here(self, begun: Begun) -> Generations:
        """Continue unfinished completions with the model itself; return their new tokens."""
        with self._samples(), self.unwrapped() as model, torch.no_grad():
            return grow(
                model,
                begun,
                self.pad_token_id,
                self.thought,
                generation_config=self.generation_config,
            )

    def _draw_rows(self, prompt_ids: Sequence[list[int]]) -> list[Any]:
        """Sample like ``generate``; return the tokens and log-probabilities of each row."""
        drawn = self._grow_here(Begun([*prompt_ids], [[] for _ in prompt_ids]))
        return [*zip(drawn.completion_ids, drawn.log_probs, strict=True)]

    def unwrapped(self) -> Any:
        """Return a context manager that yields the policy as TRL prepares it for sampling."""
        # Unsloth replaces this function with its own
        return rloo_trainer.unwrap_model_for_generation(  # pyright: ignore[reportPrivateImportUsage]
            self.model,
            self.accelerator,
            generation_kwargs=self.generation_kwargs,
        )

    @contextlib.contextmanager
    def _samples(self) -> Iterator[None]:
        """Prepare the model for sampling in a ``with`` block, and add advice to errors in it."""
        # TRL turns checkpointing off for sampling, but not on again if sampling fails
        off = without_checkpointing(self.model)
        training = self.model.training
        with blame_generation_kwargs(self.args.generation_kwargs), finite_logits(), off:
            try:
                yield
            finally:  # Unsloth leaves the model in training mode, or in eval mode after an error
                self.model.train(training)

    def _sync(self, engine: Engine, prompt_ids: TokenIds) -> None:
        """Send the weights to the engine if they have changed.

        Before the sampler's first batch in training mode, a test also proves that the engine
        receives the weights, if the setting ``canary`` is on. The test changes the adapter for a
        moment, so a model without an adapter is not tested.

        Raises:
            StalePolicyError: The test showed that the engine does not use the sent adapter.
        """
        wanted = self.args.canary and hasattr(self.model, "peft_config")
        prove = wanted and self.model.training and self.canary is None
        if self.is_synced and not prove:
            return
        engine.sync(self.model)
        if prove:
            canary = self._make_canary()
            canary.prove(engine, prompt_ids, self.args.seed)
            self.canary = canary
        self.is_synced = True
        self.log.note("sampling/sync_seconds", engine.sync_seconds)
        if self.canary:
            self.canary.sent(engine.adapter_dtype)

    def _make_canary(self) -> Canary:
        model = self.accelerator.unwrap_model(self.model)

        def log_probs(batch: MicroBatch) -> torch.Tensor:
            with self.policy.no_grad():
                return self.policy.run(batch).log_probs

        # On a GPU, vLLM computes 4-bit layers in bf16 (vllm_bnb_plugin: _apply_4bit_weight)
        in_bf16 = self.args.bf16 or (is_4bit(model) and model.device.type != "cpu")
        dtype = torch.bfloat16 if in_bf16 else model.dtype
        policies = Policies(log_probs, model, self.pad_token_id, dtype)
        return Canary(policies, make_sampling(self.args, self.eos_token_ids))


# --- completions and their scores -----------------------------------------------------------------


@dataclass(kw_only=True, eq=False)
class TrainingCompleter(Completer):
    """Completer for training: it also logs, and sums the rewards with their current weights."""

    log: StepLog
    rewards: list[LoadedReward]  # the F rewards, with names and weights
    weights: torch.Tensor  # (F,) current weights of the rewards
    device: torch.device

    def sample(self, rows: Sequence[Row]) -> Completions:
        """Sample one completion of each row, and log lengths and speed."""
        started = time.perf_counter()
        completions = super().sample(rows)
        self.log.note_sampled(completions, time.perf_counter() - started)
        if self.tool_loop:
            self.log.note("tools/seconds", self.tool_loop.seconds)
        return completions

    def score(self, rows: Sequence[Row], completions: Completions) -> Pending:
        """Start to compute the rewards of completions; return a handle for the scored batch.

        Async rewards run in the background. The handle's ``result`` runs the other rewards, waits
        for all of them and returns the batch.
        """
        pending = super().score(rows, completions)

        def result() -> ScoredBatch:
            begun = time.perf_counter()
            columns = np.array(pending.result(), dtype=np.float32)  # (F, B), NaN for None
            rewards = torch.tensor(columns, device=self.device).T  # (B, F)
            follow_schedules(self.weights, self.rewards, self.log)
            weights = self.weights.to(self.device)  # (F,)
            scores = weighted_sum(rewards, weights)  # (B,)
            self.log.elsewhere += time.perf_counter() - begun
            return ScoredBatch(
                **vars(completions), rewards=rewards, scores=scores, weights=weights.clone()
            )

        return Pending(pending.in_background, result)


def follow_schedules(weights: torch.Tensor, rewards: Sequence[LoadedReward], log: StepLog) -> None:
    """Update and log the weights of the rewards whose weight has a schedule.

    Args:
        weights: ``(F,)`` weights of the rewards, changed in place.
        rewards: The F rewards.
        log: Records the new weights, and knows the state of the training.
    """
    state = log.state()
    progress = state.global_step / max(1, state.max_steps)  # finished fraction, in [0, 1]
    for place, reward in enumerate(rewards):
        if isinstance(reward.weight, WeightSchedule):
            weights[place] = weight = reward.weight_at(progress)
            log.note(f"rewards/{reward.name}/weight", weight)
