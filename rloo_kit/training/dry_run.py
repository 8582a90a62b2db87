"""Worst-case dry run: one learning step at full length, to find memory problems before training.

The dry run makes the largest forward and backward passes that can occur in the run, and then
restores weights, random states and metrics. It does not sample, because sampling halves its batch
by itself if memory runs out. docs/how-to/plan.md explains which passes are made, and why.
"""

import contextlib
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from transformers.training_args import OptimizerNames

from rloo_kit.checkpoints.state import random_states, set_random_states
from rloo_kit.config.trainer_settings import batch_plan
from rloo_kit.data.lengths import longest_prompt
from rloo_kit.errors import MemoryRanOutError
from rloo_kit.machine.cleanup import is_out_of_memory, measure, return_to_system, take_peak
from rloo_kit.machine.hardware import GIB, detect_hardware
from rloo_kit.models.notes import notes_of
from rloo_kit.rloo.batching import TokenRows
from rloo_kit.rloo.learner import Learner
from rloo_kit.rloo.rollout import Rollout, ScoredBatch, Shaping
from rloo_kit.rloo.token_budget import NO_GRAD_FACTOR, SMALLEST_BUDGET
from rloo_kit.sampling.decoding import as_learned
from rloo_kit.training.policy import Policy, enable_checkpointing
from rloo_kit.training.trl_step import TrlStep

# The dry run makes no optimizer step if the optimizer's name contains one of these words. Paged
# optimizers keep their states in main memory and never free them; the others hook into the backward
# pass
NOT_STEPPED = ("paged", "layerwise", "lomo")
REMEDY = (
    "set model.load_in_4bit and trainer.gradient_checkpointing, lower lora.r, or, if that is not "
    "enough, lower trainer.max_completion_length"
)


@dataclass(frozen=True)
class DryRun:
    """Result of a dry run: memory and time of one learning step in the worst case."""

    # On a GPU, the peak memory of all tensors and of everything that torch's allocator does not
    # manage (CUDA context, an engine). On a CPU, the peak resident memory of the process
    peak_bytes: int
    device_bytes: int  # total memory of the GPU; on a CPU, of the machine
    seconds: float  # duration of the dry run
    rows: int  # number of completions of a generation batch
    tokens: int  # number of tokens of a prompt and its completion together
    budget: int  # `tokens_per_micro_batch` after the dry run
    lowered: bool  # True if memory ran out and the budget was lowered

    def __str__(self) -> str:
        text = (
            f"dry run: worst case of {self.rows:,} rows x {self.tokens:,} tokens peaks at "
            f"{self.peak_bytes / GIB:.1f} GiB of {self.device_bytes / GIB:.1f} GiB in "
            f"{self.seconds:.0f} s"
        )
        if self.lowered:
            text += f"; memory ran out, so tokens_per_micro_batch is now {self.budget}"
        return text


@dataclass(eq=False)
class WorstCase:
    """Runner of the largest learning step that can occur, used before a training begins."""

    trainer: TrlStep
    policy: Policy
    learner: Learner
    # Number of tokens of the longest prompt of a stream. If it is None, this prompt together with a
    # completion of maximum length is assumed to fill the model's context length. If the dataset is
    # not a stream, this field has no effect, and the longest prompt of the dataset is used
    max_prompt_tokens: int | None = None
    # Called if memory runs out; returns advice for the error message, such as "lower lora.r", or
    # None for general advice
    remedy: Callable[[], str | None] = lambda: None

    def is_wanted(self) -> bool:
        """Return True if the settings ask for a dry run.

        The setting ``dry_run`` decides. If it is None, a dry run is wanted if the run trains on a
        GPU, the length of its prompts has an upper bound, and its batches are not small (see
        ``_is_small``). The prompts of a stream have this bound only if ``max_prompt_tokens`` or the
        model's ``max_seq_length`` is set.
        """
        trainer = self.trainer
        if trainer.args.dry_run is not None:
            return trainer.args.dry_run
        limit = self.max_prompt_tokens or notes_of(trainer.model).max_seq_length
        has_bound = limit or hasattr(trainer.train_dataset, "__len__")
        return bool(has_bound) and self.learner.device.type != "cpu" and not self._is_small()

    def _is_small(self) -> bool:
        """Return True if a whole generation batch needs at most half of the token budget.

        A pass that uses the whole token budget is estimated to fill at most half of the free
        memory, so such a batch fills at most a quarter. This holds only if the budget was estimated
        from the free memory. If the budget is the setting ``tokens_per_micro_batch`` or the
        smallest possible budget, no batch counts as small.
        """
        args = self.trainer.args
        budget = self.learner.budget
        longest = args.max_completion_length
        positions = budget // 2 // args.generation_batch_size
        is_estimate = budget > SMALLEST_BUDGET and not args.tokens_per_micro_batch
        return (
            is_estimate
            and longest < positions  # otherwise no prompt needs to be tokenized
            and len(self._longest_prompt()) + longest <= positions
        )

    def run(self) -> DryRun:
        """Run one learning step in the worst case; return the memory and time that it needed.

        The memory is freed again. The step changes nothing but the learner's token budget, which is
        halved if memory runs out.

        Raises:
            MemoryRanOutError: Not even a single completion of the worst case fits.
        """
        started = time.perf_counter()
        args, learner = self.trainer.args, self.learner
        ids = self._longest_prompt()
        width = len(ids) + args.max_completion_length
        rows = args.generation_batch_size
        shares = learner.may_share
        learner.may_share = lambda: False  # all rows have the same prompt here
        budget = learner.budget
        total = detect_hardware().total_memory
        take_peak()
        try:
            with self._restored(), self._stepped_optimizer(), as_learned(self.trainer.model):
                self._learn(ids, rows, width)
            peak_bytes = take_peak() + measure().gpu_other
        except Exception as exc:
            if not (isinstance(exc, MemoryRanOutError) or is_out_of_memory(exc)):
                raise
            raise MemoryRanOutError(
                f"the worst case of this run, {rows:,} rows x {width:,} tokens, does not fit into "
                f"{total / GIB:.1f} GiB of memory: {self.remedy() or REMEDY}"
            ) from exc
        finally:
            learner.may_share = shares
            # Drop the code that torch.compile made, so that the training compiles its own: code
            # that was compiled outside of a training can give gradients of zero or NaN. Unsloth
            # drops it too, but only before `train` (`_unsloth_reset_stray_compile_cache`)
            torch.compiler.reset()
            return_to_system()
            take_peak()  # the peak that the training reports is measured from here on
        return DryRun(
            peak_bytes,
            total,
            time.perf_counter() - started,
            rows,
            width,
            learner.budget,
            learner.budget < budget,
        )

    def _longest_prompt(self) -> list[int]:
        """Return the token ids of the longest prompt; for a stream, made-up ids of that length."""
        trainer, args = self.trainer, self.trainer.args
        if hasattr(trainer.train_dataset, "__len__"):
            return longest_prompt(
                trainer.train_dataset, trainer.tokenizer, args.chat_template_kwargs
            )
        longest = notes_of(trainer.model).max_seq_length
        if longest is None:
            longest = trainer.model.config.get_text_config().max_position_embeddings
        left = max(1, longest - args.max_completion_length)
        return trainer.tokenizer("1").input_ids[:1] * min(self.max_prompt_tokens or left, left)

    def _learn(self, ids: list[int], rows: int, width: int) -> None:
        """Run the largest passes of a step, and repeat them whenever the budget was lowered.

        Args:
            ids: Token ids of the longest prompt.
            rows: Number of completions of a generation batch.
            width: Number of tokens of the longest prompt and completion together.
        """
        trainer = self.trainer
        args, learner = trainer.args, self.learner
        budget = None
        batch = batch_plan(vars(args))
        while budget != learner.budget:
            budget = learner.budget
            if args.beta or not batch.is_on_policy:
                for number, longest in largest_passes(rows, width, NO_GRAD_FACTOR * budget):
                    rollout = self._rollout(ids, number, longest)
                    numbers = [*range(number)]
                    if args.beta:
                        tokens = rollout.sampled.tokens
                        self.policy.reference_log_probs(learner, tokens, numbers)
                    else:
                        learner.with_old(rollout, numbers)
            # a step that uses several rollouts learns from one at a time
            for number, longest in largest_passes(min(rows, batch.step_rows), width, budget):
                rollout = self._rollout(ids, number, longest)
                weights = torch.zeros(len(rollout), device=learner.device)  # (B,)
                weights[:number] = 1 / number
                # a later pass of a step finds the gradients of the earlier ones in memory
                for parameter in learner.parameters:
                    parameter.grad = torch.zeros_like(parameter)
                learner.learn(rollout, weights)

    def _rollout(self, ids: list[int], rows: int, width: int) -> Rollout:
        """Return a made-up rollout of whole groups, whose scores differ so that every row trains.

        Args:
            ids: Token ids that the rows repeat.
            rows: The number of rows, which is rounded up to whole groups.
            width: Number of tokens of each row, prompt and completion together.
        """
        args = self.trainer.args
        group = args.num_generations
        rows = -(-rows // group) * group
        row = (ids * (width // len(ids) + 1))[:width]
        prompt = max(1, width - args.max_completion_length)
        scores = torch.arange(rows, device=self.learner.device).remainder(2.0)  # (B,)
        scored = ScoredBatch(
            prompts=[],
            completions=[],
            tokens=TokenRows([row[:prompt]] * rows, [row[prompt:]] * rows),
            ended=[True] * rows,
            rewards=scores.unsqueeze(1),
            scores=scores,
        )
        # the other settings are left out, because some make all advantages of these scores 0
        shaping = Shaping(beta=args.beta, token_level_kl=args.token_level_kl)
        return Rollout.scored(scored, group, shaping)

    @contextlib.contextmanager
    def _stepped_optimizer(self) -> Iterator[None]:
        """Keep an optimizer of the run's kind, with its states, in memory during a ``with`` block.

        The optimizer makes one step to allocate its states; the weights are then restored, and the
        gradients are None. Nothing happens if the trainer has its optimizer already, or if the
        optimizer's name contains one of the words in ``NOT_STEPPED``.
        """
        trainer = self.trainer
        parameters = self.learner.parameters
        name = OptimizerNames(trainer.args.optim).value
        if trainer.optimizer is not None or any(mark in name for mark in NOT_STEPPED):
            yield
            return
        kept = [p.detach().to("cpu", copy=True) for p in parameters]
        try:
            optimizer: Any = trainer.create_optimizer()
            for parameter in parameters:
                parameter.grad = torch.zeros_like(parameter)
            if hasattr(optimizer, "train"):  # schedule-free optimizers
                optimizer.train()
            optimizer.step()
        finally:
            trainer.optimizer = None  # the training makes its own
            for parameter, values in zip(parameters, kept, strict=True):
                parameter.grad = None
                parameter.data.copy_(values)
        yield
        del optimizer

    @contextlib.contextmanager
    def _restored(self) -> Iterator[None]:
        """Prepare the model for training in a ``with`` block, and undo all changes at its end."""
        args, model = self.trainer.args, self.trainer.model
        states = random_states()
        training = model.training
        enables = args.gradient_checkpointing and not model.is_gradient_checkpointing
        if enables:
            enable_checkpointing(model, args)
        try:
            with warnings.catch_warnings():
                # the result of the dry run reports this
                warnings.filterwarnings("ignore", message="memory ran out")
                model.train()
                yield
        finally:
            model.train(training)
            if enables:
                model.gradient_checkpointing_disable()
            for parameter in self.learner.parameters:
                parameter.grad = None
            set_random_states(states)


def largest_passes(at_most: int, longest: int, budget: int) -> list[tuple[int, int]]:
    """Return the sizes (rows, width) of the one or two micro-batches that need the most memory.

    The first has as many rows of the longest length as fit into the budget, but at least one. If
    this leaves a part of the budget unused, there is a second micro-batch. It has one more row, and
    its rows are short enough to fit.

    Args:
        at_most: Maximum number of rows of a micro-batch.
        longest: Number of tokens of the longest row.
        budget: Maximum number of positions of a micro-batch, which is rows times width.

    >>> largest_passes(64, 9000, 16_384)
    [(1, 9000), (2, 8192)]
    """
    rows = min(at_most, max(1, budget // longest))
    found = [(rows, longest)]
    if rows < at_most:
        width = budget // (rows + 1)
        if (rows + 1) * width > rows * longest and width > 1:
            found.append((rows + 1, width))
    return found
