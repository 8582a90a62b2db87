"""TRL's own training step, with the same log as the kit's step.

TRL samples, scores and learns with its own code. Each batch is gathered from all processes into a
``Rollout``, so that the metrics and the records of completions are the same as with the kit's step.

Shapes: B completions on this process, T tokens in the longest completion, F reward functions.
"""

import contextlib
import functools
import time
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any, cast

import torch
from accelerate.utils import gather_object
from trl import RLOOTrainer  # pyright: ignore[reportPrivateImportUsage]  # Unsloth replaces it
from trl.data_utils import prepare_multimodal_messages

from rloo_kit.machine.engines import shut_down_engine
from rloo_kit.machine.lm_head import PlainTorchLogProb
from rloo_kit.machine.processes import with_seed
from rloo_kit.rloo.advantages import weighted_sum
from rloo_kit.rloo.batching import TokenRows
from rloo_kit.rloo.rollout import Completions, Rollout, ScoredBatch
from rloo_kit.sampling.completer import as_completions
from rloo_kit.scoring.specs import LoadedReward
from rloo_kit.text.thoughts import completion_texts
from rloo_kit.training.arguments import LeaveOneOutConfig
from rloo_kit.training.sampler import follow_schedules
from rloo_kit.training.step_choice import StepChoice
from rloo_kit.training.step_log import StepLog
from rloo_kit.types import Model, TokenIds, Tokenizer

# Methods of TRL: one samples, one computes rewards, one runs the policy and the reference
GENERATE = "_generate"
REWARD = "_calculate_rewards"
PASS = "_get_per_token_logps_and_entropies"


def _keep(found: list[Any], method: Callable[..., Any], *args: Any, **keywords: Any) -> Any:
    """Call a method, and append its result and its duration in seconds to ``found``."""
    started = time.perf_counter()
    output = method(*args, **keywords)
    found.append((output, time.perf_counter() - started))
    return output


def with_images(rows: list[Any]) -> list[Any]:
    """Return the prompts of rows, with the images of each row in its messages, as in TRL."""
    prompts = []
    for row in rows:
        prompt = row["prompt"]
        images = row.get("images") or ([row["image"]] if row.get("image") else [])
        prompts.append(prepare_multimodal_messages(prompt, images=images) if images else prompt)
    return prompts


class TrlStep(RLOOTrainer):
    """TRL's ``RLOOTrainer``, whose training step also reports to the kit's log."""

    # TRL and transformers leave these untyped, or type them too widely
    args: LeaveOneOutConfig  # pyright: ignore[reportIncompatibleVariableOverride]
    model: Model
    optimizer: Any
    processing_class: Tokenizer
    reward_funcs: list[Any]
    train_dataset: Any
    num_generations: int
    reward_processing_classes: Any
    chat_template_kwargs: Any
    generation_config: Any
    generation_kwargs: Any
    step_choice = StepChoice()
    step_log: StepLog
    loaded_rewards: list[LoadedReward]

    @property
    def tokenizer(self) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The tokenizer; if ``processing_class`` is a processor, the tokenizer of the processor."""
        return getattr(self.processing_class, "tokenizer", self.processing_class)

    @property
    def tables(self) -> dict[str, Any]:
        """Columns of TRL's table of completions (``log_completions``)."""
        return self._logs

    def _generate(self, prompts: Any) -> Any:
        """Sample with TRL's method, but decode the completions as the kit's step does.

        The texts then keep the marks of thoughts.
        """
        prompt_ids, ids, _, *others = super()._generate(prompts)
        completions = as_completions(prompts, completion_texts(self.tokenizer, ids))
        return (prompt_ids, ids, completions, *others)

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        if not (self.step_choice.by_trl and self.model.training):
            return super()._generate_and_score_completions(inputs)
        follow_schedules(self.reward_weights, self.loaded_rewards, self.step_log)
        with self._kept() as returned:
            output = super()._generate_and_score_completions(inputs)
        if returned[GENERATE] and returned[REWARD]:  # a subclass may not call these methods
            self._log_batch(with_images(inputs), returned)
        return output

    @contextlib.contextmanager
    def _kept(self) -> Iterator[dict[str, list[Any]]]:
        """Record the results of three methods during a ``with`` block: GENERATE, REWARD and PASS.

        If a subclass overrides one of these methods of TRL, the results of its method are recorded.

        Yields:
            A dict with a list for each method's name. Each call of the method appends its result
            and its duration in seconds to the list.
        """
        returned = {name: [] for name in (GENERATE, REWARD, PASS)}
        for name, found in returned.items():
            setattr(self, name, functools.partial(_keep, found, getattr(self, name)))
        try:
            yield returned
        finally:
            for name in returned:
                delattr(self, name)

    def _log_batch(self, prompts: list[Any], returned: dict[str, list[Any]]) -> None:
        """Gather a generation batch from all processes, and log it as a rollout.

        Args:
            prompts: The prompts of this process.
            returned: The results that ``_kept`` recorded.
        """
        ((sampled, seconds),) = returned[GENERATE]
        ((rewards, _),) = returned[REWARD]  # (all processes' B, F)
        prompt_ids, completion_ids, completions = (gather_object([*one]) for one in sampled)
        weights = self.reward_weights.to(rewards.device)
        batch = ScoredBatch(
            prompts=gather_object(prompts),
            completions=completions,
            tokens=TokenRows(prompt_ids, completion_ids),
            ended=self._ended(completion_ids),
            rewards=rewards,
            scores=weighted_sum(rewards, weights),
            weights=weights,
        )
        rollout = Rollout.scored(batch, self.num_generations, self.args.shaping)
        passes = returned[PASS]
        if self.beta and len(passes) == 2:
            width = rollout.completion_mask.size(1)
            # (own B, T) on each process, padded to the longest row of all processes
            padded: Any = self.accelerator.pad_across_processes([of[0] for of, _ in passes], dim=1)
            old, reference = (one[:, :width] for one in self.accelerator.gather(padded))
            rollout = rollout.with_old(slice(None), old).with_reference(reference)
            rollout = rollout.with_advantages()
        without = ~batch.has_signal(rollout.shaping, self.num_generations)
        self.step_log.note("signal/groups_without", without.float().mean().item())
        self.step_log.note_rollout(rollout, self.state.global_step + 1)
        num_tokens = sum(map(len, completion_ids))
        self.step_log.note("speed/generation_tokens_per_second", num_tokens / seconds)

    def release_tables_and_engine(self) -> None:
        """Free TRL's tables of completions and its vLLM engine in this process.

        The tables may have images. If several processes train, their engines stay, because the
        shutdown of an engine ends torch's process group.
        """
        self.tables.clear()
        llm = getattr(getattr(self, "vllm_generation", None), "llm", None)
        if llm is not None and self.args.world_size == 1:
            shut_down_engine(llm, on_gpu=True)

    # --- evaluation ------------------------------------------------------------------------------

    def sample_rows(self, rows: list[Any], seed: int) -> Completions:
        """Sample one completion of each row with TRL; each process samples a part of the rows.

        The random states of the training do not change.

        Args:
            rows: N rows with ``prompt``; they must be the same on all processes.
            seed: Seed of the samples.

        Returns:
            All N completions in the order of the rows, on every process.
        """
        world = cast(int, self.accelerator.num_processes)
        index = self.accelerator.process_index
        # equally many rows on each process: the last one is repeated
        mine = [*rows, *rows[-1:] * (-len(rows) % world)][index::world]
        size = self.args.per_device_train_batch_size
        was_training = self.model.training
        generations = self.num_generations_eval
        self.model.eval()
        self.num_generations_eval = 1
        try:
            with with_seed(seed + index):
                parts = [
                    self._generate(with_images(mine[at : at + size]))
                    for at in range(0, len(mine), size)
                ]
        finally:
            self.num_generations_eval = generations
            self.model.train(was_training)
            self._metrics["eval"].clear()
        # each column has one list per process, and a process sampled every `world`-th row
        columns = (cast(Any, gather_object)([[*chain(*one)]]) for one in zip(*parts, strict=True))
        prompt_ids, ids, completions = (
            [*chain(*zip(*column, strict=True))][: len(rows)] for column in columns
        )
        return Completions(
            prompts=with_images(rows),
            completions=completions,
            tokens=TokenRows(prompt_ids, ids),
            ended=self._ended(ids),
        )

    def _ended(self, completion_ids: TokenIds) -> list[bool]:
        ends = {*self.eos_token_ids, self.tokenizer.pad_token_id}
        return [ids[-1] in ends for ids in completion_ids]


def route_trl_lm_head() -> bool:
    """Replace TRL's fused LM head with one in plain torch if Triton or a CUDA GPU is missing.

    Returns:
        True if the head was replaced now. False if TRL's head works, or if this function or Unsloth
        replaced it before.
    """
    import trl.trainer.utils

    utils: Any = trl.trainer.utils  # a private name of TRL 1.15 and 1.16; tests check its signature
    kernel = utils._ChunkedLogProbFunction
    has_triton = kernel is not None and torch.cuda.is_available()
    if has_triton or kernel is PlainTorchLogProb or hasattr(kernel, "_unsloth_cpu_dispatch"):
        return False
    utils._ChunkedLogProbFunction = PlainTorchLogProb
    return True


def run_tool_loop(attributes: dict[str, Any], *arguments: Any) -> Any:
    """Call the tool loop of TRL's ``GRPOTrainer``, ``_tool_call_loop``, and return its results.

    Args:
        attributes: Values of the attributes that the loop reads from a trainer, by name.
        *arguments: The arguments of the loop.
    """
    from trl.trainer.grpo_trainer import GRPOTrainer

    trainer = object.__new__(GRPOTrainer)
    vars(trainer).update(attributes)
    return trainer._tool_call_loop(*arguments)
