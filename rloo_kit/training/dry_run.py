"""Worst-case dry run: one step at full length before the first, so that a run fails early.

One step at the longest prompt and the longest completions a run can have, of which nothing stays:
weights, random states, counters and metrics are restored. Only as much is computed as shows the
peak; which passes that takes, and why, is in docs/how-to/plan.md.
"""

import contextlib
import copy
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from rloo_kit.checkpoints.store import random_states, set_random_states
from rloo_kit.data.files import raw_prompts
from rloo_kit.data.prompts import prompt_ids
from rloo_kit.errors import MemoryRanOutError
from rloo_kit.machine.hardware import GIB, detect_hardware
from rloo_kit.machine.memory import is_out_of_memory, measure, return_to_system, take_peak
from rloo_kit.models.shared_engine import notes_of
from rloo_kit.processes import ALONE
from rloo_kit.rloo.batching import TokenRows
from rloo_kit.rloo.learner import NO_GRAD_FACTOR, Learner
from rloo_kit.rloo.metrics import Tally
from rloo_kit.rloo.rollout import Rollout, ScoredBatch
from rloo_kit.sampling.choice import blame_generation_kwargs, make_sampling

# Tokens that an engine samples, whose cache of keys and values is reserved anyway
ENGINE_TOKENS = 8
# Optimizers, by parts of their names, that make no step: the first keep their states in main
# memory and never give them back, the others hook into the backward pass
NOT_STEPPED = ("paged", "layerwise", "lomo")


@dataclass(frozen=True)
class DryRun:
    """What one step in the worst case took; of this process where several train."""

    peak_bytes: int
    """The most that was held at once: on a GPU by tensors and by what lies outside of torch's
    allocator (CUDA context, an engine, other programs), on a CPU the process's resident memory."""
    device_bytes: int
    """Memory of the card that this process may use, or of the machine."""
    seconds: float
    rows: int
    """Completions of a generation batch."""
    tokens: int
    """Of each, its prompt included."""
    budget: int
    """``tokens_per_micro_batch`` from here on."""
    phase: str
    """In which the peak was: ``optimizer``, ``sampling``, ``scoring`` or ``learning``."""
    lowered: tuple[str, ...] = ()
    """What had to be made smaller because memory ran out, in words."""

    def __str__(self) -> str:
        text = (
            f"dry run: worst case of {self.rows:,} rows x {self.tokens:,} tokens peaks at "
            f"{self.peak_bytes / GIB:.1f} GiB of {self.device_bytes / GIB:.1f} GiB in "
            f"{self.seconds:.0f} s"
        )
        return "; ".join([text, *self.lowered])


def dry_run_if_wanted(
    trainer: Any,
    say: Callable[[str], None],
    *,
    max_prompt_tokens: int | None = None,
    remedy: Callable[[], str] | None = None,
) -> DryRun | None:
    """Make the dry run where ``args.dry_run`` asks for it; by default (None) on a GPU.

    Args:
        trainer: A ``LeaveOneOutTrainer`` that has not begun to train.
        say: For one line.
        max_prompt_tokens: As for ``dry_run``.
        remedy: As for ``dry_run``.

    Returns:
        What it took; None where none was made.

    Raises:
        MemoryRanOutError: The worst case does not fit.
    """
    wanted = trainer.args.dry_run
    if wanted is None:
        limit = max_prompt_tokens or notes_of(trainer.model).max_seq_length
        bounded = limit is not None or hasattr(trainer.train_dataset, "__len__")
        if trainer.accelerator.device.type == "cpu" or not bounded:
            return None
    elif not wanted:
        return None
    if trainer.why_trl_path:
        if wanted and trainer.team.is_first:
            say(f"dry run: not made, since TRL's own code trains ({trainer.why_trl_path})")
        trainer.dry_run_done = True
        return None
    found = dry_run(trainer, max_prompt_tokens=max_prompt_tokens, remedy=remedy)
    if trainer.team.is_first:
        say(str(found))
    return found


def dry_run(
    trainer: Any,
    *,
    max_prompt_tokens: int | None = None,
    remedy: Callable[[], str] | None = None,
) -> DryRun:
    """Take the memory of one step in the worst case, and give it back.

    Example:
        print(dry_run(trainer))
        trainer.train()

    Args:
        trainer: A ``LeaveOneOutTrainer`` that has not begun to train. Nothing of it changes, but
            for the two sizes that halve where memory runs out: the token budget of its passes, and
            the completions it samples at one time.
        max_prompt_tokens: The longest prompt of a stream, whose prompts are not known; None: what
            the model's ``max_seq_length`` leaves.
        remedy: Called when memory ran out: what to change, as a part of a sentence.

    Raises:
        MemoryRanOutError: The worst case does not fit, not even a single completion of it.
    """
    started = time.perf_counter()
    step = _WorstStep(trainer, longest_prompt(trainer, max_prompt_tokens))
    budget, at_once = step.learner.budget, step.sampling.size
    try:
        with _explained(trainer, step.batch, remedy), _restored(trainer, step.learner):
            peak_bytes, phase = step.run()
    finally:
        return_to_system()
        take_peak()  # what training reports as its own peak begins here
    lowered = []
    if step.learner.budget < budget:
        lowered.append(f"memory ran out: tokens_per_micro_batch is now {step.learner.budget}")
    if step.sampling.size != at_once:
        lowered.append(f"{step.sampling.size} completions are now sampled at a time")
    trainer.dry_run_done = True
    return DryRun(
        peak_bytes=peak_bytes,
        device_bytes=_device_bytes(),
        seconds=time.perf_counter() - started,
        rows=step.batch.rows,
        tokens=step.batch.width,
        budget=step.learner.budget,
        phase=phase,
        lowered=tuple(lowered),
    )


# --- the worst case ------------------------------------------------------------------------------


@dataclass(frozen=True)
class WorstBatch:
    """The largest batch that a run can sample; of this process where several train."""

    rows: int
    step_rows: int
    """Of an optimizer step."""
    prompt: int
    completion: int

    @property
    def width(self) -> int:
        """Tokens of a row."""
        return self.prompt + self.completion


def longest_prompt(trainer: Any, max_prompt_tokens: int | None) -> int:
    """Return the tokens of the longest prompt; of a stream, of the longest that is allowed."""
    dataset, settings = trainer.train_dataset, trainer.chat_template_kwargs
    if hasattr(dataset, "__len__"):
        tokenizer = trainer._tokenizer
        return max(len(prompt_ids(tokenizer, prompt, settings)) for prompt in raw_prompts(dataset))
    longest = notes_of(trainer.model).max_seq_length
    if longest is None:
        longest = trainer.model.config.get_text_config().max_position_embeddings
    left = max(1, longest - trainer.args.max_completion_length)
    return min(max_prompt_tokens or left, left)


def largest_passes(worst: WorstBatch, at_most: int, budget: int) -> list[tuple[int, int]]:
    """Return (rows, width) of the micro-batches that take the most memory.

    The longest rows, as many as fit into the budget; and where they leave some of it free, rows
    just short enough for one more.

    >>> worst = WorstBatch(rows=64, step_rows=64, prompt=1000, completion=8000)
    >>> largest_passes(worst, 64, 16_384)
    [(1, 9000), (2, 8192)]
    >>> largest_passes(worst, 64, 18_000)
    [(2, 9000)]

    Args:
        worst: With the longest row.
        at_most: Rows that a micro-batch can hold.
        budget: Positions.
    """
    rows = min(at_most, max(1, budget // worst.width))
    found = [(rows, worst.width)]
    if rows < at_most:
        width = budget // (rows + 1)
        if (rows + 1) * width > rows * worst.width and width > 1:
            found.append((rows + 1, width))
    return found


class _WorstStep:
    """The phases of one step of a trainer in the worst case."""

    def __init__(self, trainer: Any, prompt: int) -> None:
        self.trainer = trainer
        self.args = trainer.args
        self.learner: Learner = trainer.steps.make_learner()  # its budget: what is free now
        self.sampling = trainer.sampler.pieces
        self.tokenizer = trainer._tokenizer
        self.device = trainer.accelerator.device
        args, size = trainer.args, trainer.team.size
        rows = args.generation_batch_size
        step_rows = rows // args.steps_per_generation * args.gradient_accumulation_steps
        completion = args.max_completion_length
        self.batch = WorstBatch(-(-rows // size), -(-step_rows // size), prompt, completion)

    def run(self) -> tuple[int, str]:
        """Run the phases in their order; return the highest peak in bytes, and its phase."""
        peaks: dict[str, int] = {}
        take_peak()
        with (
            self._stepped_optimizer()
        ):  # its states are there while a later step samples and learns
            for phase, call in (
                ("optimizer", lambda: None),
                ("sampling", self._sample),
                ("scoring", self._score),
                ("learning", self._learn),
            ):
                call()
                peaks[phase] = take_peak() + measure().gpu_other
        phase = max(peaks, key=lambda phase: peaks[phase])
        return peaks[phase], phase

    def _random_ids(self, rows: int, width: int) -> list[list[int]]:
        """Return rows of ids that are no special tokens, from a random state of their own."""
        known = min(len(self.tokenizer), self.trainer.model.config.get_text_config().vocab_size)
        plain = torch.tensor(sorted(set(range(known)) - set(self.tokenizer.all_special_ids)))
        generator = torch.Generator().manual_seed(rows * width)
        return plain[torch.randint(len(plain), (rows, width), generator=generator)].tolist()

    def _rollout(self, rows: int, width: int) -> Rollout:
        """Return a rollout of whole groups, each with signal: every second row is right."""
        group = self.trainer.num_generations
        rows = -(-rows // group) * group
        # equal scores would give advantages of 0, and such groups run no pass
        prompt = width - min(self.batch.completion, width - 1)
        ids = self._random_ids(rows, width)
        scores = torch.arange(rows, device=self.device).remainder(group).remainder(2.0)
        scored = ScoredBatch(
            prompts=[""] * rows,
            completions=[""] * rows,
            tokens=TokenRows([row[:prompt] for row in ids], [row[prompt:] for row in ids]),
            ended=[True] * rows,
            rewards=scores.unsqueeze(1),
            scores=scores,
        )
        return Rollout.scored(scored, group, self.args.shaping.with_plain_scores())

    # --- the phases ------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _stepped_optimizer(self) -> Iterator[None]:
        """Hold an optimizer like the run's that has made a step; the weights are put back.

        None where the optimizer exists already or cannot be tried.
        """
        trainer, parameters = self.trainer, self.learner.parameters
        name = str(getattr(self.args.optim, "value", self.args.optim))
        if trainer.optimizer is not None or any(mark in name for mark in NOT_STEPPED):
            yield
            return
        kept = [p.detach().to("cpu", copy=True) for p in parameters]
        try:
            optimizer = trainer.create_optimizer()
            for parameter in parameters:
                parameter.grad = torch.zeros_like(parameter)
            if hasattr(optimizer, "train"):  # schedule-free optimizers
                optimizer.train()
            optimizer.step()
        finally:
            trainer.optimizer = None
            for parameter, values in zip(parameters, kept, strict=True):
                parameter.grad = None
                parameter.data.copy_(values)
        yield
        del optimizer

    def _sample(self) -> None:
        """Read the prompts, and hold a cache of keys and values at full length."""
        trainer, batch = self.trainer, self.batch
        if trainer.engine is not None:
            how = make_sampling(self.args, trainer.eos_token_ids)
            others = {name: value for name, value in how.others.items() if name != "min_tokens"}
            short = min(ENGINE_TOKENS, batch.completion)
            trainer.engine.sync(trainer.model)
            ids = self._random_ids(batch.rows, batch.prompt)
            trainer.engine.generate(ids, replace(how, max_tokens=short, others=others), 0)
            return
        if trainer.use_vllm or trainer.use_transformers_continuous_batching:
            return  # reserved by others, or page by page as far as memory allows
        done = False

        def draw(rows: Sequence[int]) -> list[int]:
            nonlocal done
            if not done:  # the other pieces of the batch are no larger
                self._fill_cache(len(rows))
                done = True
            return list(rows)

        self.sampling.run(draw, range(batch.rows), batch.rows)

    def _fill_cache(self, rows: int) -> None:
        """Generate as sampling does, at its first token and at its last.

        One row is read at full width and its keys and values are repeated for all rows: reading all
        of them at full width would take activations that sampling never takes.
        """
        settings = copy.deepcopy(self.trainer.generation_config)
        settings.max_new_tokens, settings.min_new_tokens, settings.min_length = 1, None, 0
        settings.return_dict_in_generate, settings.use_cache = True, True
        model = self.trainer.accelerator.unwrap_model(self.trainer.model)

        # ids and mask: (rows, width)
        def generate(rows: int, width: int, **others: Any) -> Any:
            ids = torch.tensor(self._random_ids(rows, width), device=self.device)
            mask = torch.ones_like(ids)
            return model.generate(ids, attention_mask=mask, generation_config=settings, **others)

        with (
            blame_generation_kwargs(self.args),
            _modes_kept(model),
            _sampling_mode(model),
            torch.no_grad(),
            self.trainer.accelerator.autocast(),
        ):
            generate(rows, self.batch.prompt)
            width = self.batch.width
            if settings.cache_implementation not in (None, "dynamic") or width < 2:
                return
            try:
                cache = generate(1, width - 1).past_key_values
                cache.batch_repeat_interleave(rows)
                generate(rows, width, past_key_values=cache)
            except Exception as exc:  # what a model's own kind of cache cannot do differs by model
                if is_out_of_memory(exc):
                    raise
                warnings.warn(
                    f"dry run: the memory of {rows} completions at full length is not counted, "
                    f"since this model's cache cannot be filled ({type(exc).__name__}: {exc})",
                    UserWarning,
                    stacklevel=2,
                )

    def _score(self) -> None:
        """Let the kit's reward models read as much at one time as they ever do."""
        if self.trainer.engine is not None:
            self.trainer.engine.sleep()  # as training does
        batch, decode = self.batch, self.tokenizer.batch_decode
        for model in _reward_models(self.trainer.reward_funcs):
            ids = self._random_ids(
                min(batch.rows, 1 + model.tokens_per_batch // batch.width), batch.width
            )
            prompts = decode([row[: batch.prompt] for row in ids])
            completions = decode([row[batch.prompt :] for row in ids])
            was_loaded, scores = model.is_loaded, copy.copy(model._cache)
            try:
                model(completions=completions, prompts=prompts)
            finally:
                if not was_loaded:
                    model.release()
                model._cache = scores

    def _learn(self) -> None:
        """Run the largest passes of a step; again where the budget had to be lowered."""
        self.trainer.model.train()
        self._enable_checkpointing()
        worst, budget = self.batch, None
        while budget != self.learner.budget:
            budget = self.learner.budget
            if self.args.beta or self._has_old_pass():
                for rows, width in largest_passes(worst, worst.rows, NO_GRAD_FACTOR * budget):
                    self._pass_without_gradient(rows, width)
            for rows, width in largest_passes(worst, worst.step_rows, budget):
                self._pass(rows, width, several=worst.step_rows * worst.width > budget)

    def _has_old_pass(self) -> bool:
        """Return whether a step of the worst case has an old-log-prob pass of its own."""
        args, group = self.args, self.trainer.num_generations
        later = args.steps_per_generation > args.gradient_accumulation_steps
        waits = bool(args.beta) and (
            args.normalize_advantages or group * self.batch.width > self.learner.budget
        )
        return not args.skip_old_pass or later or waits

    def _pass_without_gradient(self, rows: int, width: int) -> None:
        numbers, tokens = list(range(rows)), self._rollout(rows, width).sampled.tokens
        if self.args.beta:
            self.trainer.policy.reference_log_probs(self.learner, tokens, numbers)
        if self._has_old_pass():
            self.learner.log_probs(tokens, numbers, self.learner.forward)

    def _pass(self, rows: int, width: int, *, several: bool) -> None:
        """Learn from rows; ``several``: gradients of the step's former passes are there."""
        # a later pass of a step finds the gradients of the earlier ones in memory
        rollout = self._rollout(rows, width)
        weights = torch.zeros(len(rollout), device=self.device)
        weights[:rows] = 1 / rows
        for parameter in self.learner.parameters:
            parameter.grad = torch.zeros_like(parameter) if several else None
        with self.trainer.compute_loss_context_manager():
            self.learner.learn(rollout, weights)
        for parameter in self.learner.parameters:
            parameter.grad = None

    def _enable_checkpointing(self) -> None:
        """Turn gradient checkpointing on as transformers' trainer does when it begins."""
        args, model = self.args, self.trainer.model
        if not args.gradient_checkpointing or model.is_gradient_checkpointing:
            return
        kwargs = dict(args.gradient_checkpointing_kwargs or {})
        names = ("every_n_layers", "offload")
        others = {name: kwargs.pop(name) for name in names if name in kwargs}
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=kwargs or None, **others)


def _reward_models(rewards: Sequence[Any]) -> list[Any]:
    """Return the reward models of ``rewards/reward_model.py``, inside of other rewards too."""
    found, waiting = [], list(rewards)
    while waiting:
        reward = waiting.pop()
        if hasattr(reward, "is_loaded") and hasattr(reward, "tokens_per_batch"):
            found.append(reward)
        parts = (getattr(reward, name, None) for name in ("reward", "by"))
        waiting += [part for part in parts if part is not None]
    return found


# --- what is restored, and what is said ----------------------------------------------------------


@contextlib.contextmanager
def _restored(trainer: Any, learner: Learner) -> Iterator[None]:
    """Put back what the passes change."""
    team, learner.team = learner.team, ALONE  # every process runs the largest pass on its own
    states = random_states()
    gradients = [(p, p.grad) for p in learner.parameters]
    try:
        with _modes_kept(trainer.model), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="memory ran out")  # the result says it
            yield
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient
        learner.team, learner.tally = team, Tally()
        set_random_states(states)


@contextlib.contextmanager
def _modes_kept(model: Any) -> Iterator[None]:
    """Put back which modules train and which checkpoint."""
    modules = [(m, m.training, _own(m, "gradient_checkpointing")) for m in model.modules()]
    try:
        yield
    finally:
        for module, training, checkpointing in modules:
            module.training = training
            if checkpointing is not None:
                module.gradient_checkpointing = checkpointing


def _own(module: Any, name: str) -> Any:
    """Return an attribute that a module has itself: a wrapper also shows those of what it wraps."""
    return vars(module).get(name, getattr(type(module), name, None))


@contextlib.contextmanager
def _sampling_mode(model: Any) -> Iterator[None]:
    switch = getattr(model, "for_inference", None)  # Unsloth's fast decoding
    switch() if switch else model.eval()
    try:
        yield
    finally:
        back = getattr(model, "for_training", None)
        back() if back else model.train()


@contextlib.contextmanager
def _explained(trainer: Any, worst: WorstBatch, remedy: Callable[[], str] | None) -> Iterator[None]:
    """Say what to change where memory runs out."""
    try:
        yield
    except Exception as exc:
        if not (isinstance(exc, MemoryRanOutError) or is_out_of_memory(exc)):
            raise
        change = (remedy() if remedy is not None else "") or _default_remedy(trainer)
        raise MemoryRanOutError(
            f"the worst case of this run, {worst.rows:,} rows x {worst.width:,} tokens, does not "
            f"fit into {_device_bytes() / GIB:.1f} GiB of memory: {change}"
        ) from exc


def _default_remedy(trainer: Any) -> str:
    """Return the changes that save memory and are not made yet, the least harmful first."""
    args, changes = trainer.args, []
    optimizer = str(getattr(args.optim, "value", args.optim))
    if trainer.accelerator.device.type != "cpu" and "8bit" not in optimizer:
        changes.append("set trainer.optim: adamw_8bit")
    if not args.gradient_checkpointing:
        changes.append("set trainer.gradient_checkpointing: true")
    if not any(type(module).__name__ == "Linear4bit" for module in trainer.model.modules()):
        changes.append("set model.load_in_4bit: true")
    changes.append("lower lora.r")
    return f"{', '.join(changes)}, or last lower trainer.max_completion_length"


def _device_bytes() -> int:
    """Return the memory that this process may use, in bytes."""
    total = detect_hardware().total_memory
    if torch.cuda.is_available():
        return int(total * torch.cuda.get_per_process_memory_fraction())
    return total
