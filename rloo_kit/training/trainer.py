"""The leave-one-out trainer: TRL's RLOO with the same gradient for less work, and honest metrics.

Loaded after ``setup()`` (the lazy public names see to it), so that ``trl.RLOOTrainer`` is Unsloth's
patched class wherever Unsloth patches it. Four of TRL's hooks are overridden: ``_prepare_inputs``,
``_generate_and_score_completions`` and ``training_step`` (docs/explanation/trainer.md says what
that saves and why it is exact), and ``_generate_single_turn``, where vLLM samples
(docs/how-to/generation.md).
"""

import asyncio
import contextlib
import copy
import dataclasses
import math
import statistics
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PrinterCallback, TrainerCallback
from transformers.trainer import DEFAULT_PROGRESS_CALLBACK
from trl import RLOOConfig, RLOOTrainer
from trl.models.utils import disable_gradient_checkpointing, unwrap_model_for_generation
from trl.trainer.utils import use_adapter

from rloo_kit.checkpoints.resume import ExactResume
from rloo_kit.config.run_file import (
    ModelSection,
    RunConfig,
)
from rloo_kit.config.settings import DEFAULTS, KIT_ONLY
from rloo_kit.diagnosis.watch import RunWatch
from rloo_kit.errors import ConfigError, DataError
from rloo_kit.live.display import live_progress
from rloo_kit.machine.environment import precision_as_asked
from rloo_kit.machine.hardware import GIB, detect_hardware
from rloo_kit.machine.memory import add_to_session, take_peak
from rloo_kit.models.shared_engine import notes_of
from rloo_kit.processes import current_team, why_sharded
from rloo_kit.rloo.batching import MicroBatch, TokenRows, default_token_budget, pass_overhead
from rloo_kit.rloo.guards import Pieces, StepGuard, check_finite, finite_logits
from rloo_kit.rloo.learner import Learner, Scored, Tally
from rloo_kit.rloo.objective import RunningMoments
from rloo_kit.rloo.rollout import Rollout, ScoredBatch
from rloo_kit.sampling.canary import Canary
from rloo_kit.sampling.choice import (
    blame_generation_kwargs,
    check_engine,
    make_sampling,
    requested_engine,
    start_engine,
)
from rloo_kit.sampling.engine import Engine
from rloo_kit.scoring.composition import WeightSchedule
from rloo_kit.scoring.contract import AsyncCheckedReward, guarded
from rloo_kit.scoring.loading import LoadedReward, load_rewards, with_tokenizers
from rloo_kit.text.redaction import redact, redact_tree
from rloo_kit.text.thoughts import ThoughtFinder
from rloo_kit.text.wording import format_value
from rloo_kit.training.config import LeaveOneOutConfig, _own_config
from rloo_kit.training.dry_run import dry_run_if_wanted

NO_SIGNAL_BATCHES = 10
"""Generation batches that ``max_no_signal_fraction`` looks back on."""
SAMPLING_REMEDY = (
    "lower trainer.max_completion_length, take a smaller model, or set model.load_in_4bit"
)
"""Where a single completion does not fit."""
RENAMED_PARTS = {
    "reward_model": "reward_funcs",
    "config": "args",
    "policy": "model",
    "tokenizer": "processing_class",
}
"""Older names of the trainer's arguments; ``ref_policy`` has no successor (adapter off)."""


class LeaveOneOutTrainer(ExactResume, RLOOTrainer):
    """TRL's ``RLOOTrainer``: same gradient, fewer passes, checked scores, honest metrics.

    In several processes the batch is divided between them, and the step is the one that one process
    would make (docs/how-to/processes.md). Prompts with images, and weights that FSDP or DeepSpeed
    divides, are trained by TRL's own code; there the kit's own settings must keep their defaults.

    Args:
        model: As ``attach_lora`` returned it; anything TRL takes works too.
        reward_funcs: One or several of: a built-in name, ``file.py:function``,
            ``package.module:function`` (each with ``:weight`` if wanted), a table, a function, an
            object with ``get_rewards(prompts, completions)``, a sequence-classification model, its
            folder, or its name on the hub (``org/name``).
        args: A ``LeaveOneOutConfig``, or TRL's ``RLOOConfig``, whose values are all taken.
        train_dataset: Rows with ``prompt``; other columns reach the rewards by name.
        processing_class: The tokenizer; TRL pads prompts on the left whatever it says.
        callbacks: Added to the kit's own progress.
        engine: One that ``start_engine`` started for this model; None: as ``args.generation`` says.
        **others: TRL's other arguments, and the older names ``reward_model``, ``config``,
            ``policy`` and ``tokenizer``, each with a warning.

    Raises:
        ConfigError: An argument is missing, unknown or given twice.
        DataError: The dataset has no rows, or no column ``prompt``.
        RewardError: A reward cannot be loaded, or returns something else than scores.
        GenerationError: The engine that was asked for by name cannot sample.
    """

    def __init__(  # noqa: PLR0913
        self,
        model: Any = None,
        reward_funcs: Any = None,
        args: RLOOConfig | None = None,
        train_dataset: Any = None,
        processing_class: Any = None,
        callbacks: list[Any] | None = None,
        engine: Engine | None = None,
        **others: Any,
    ) -> None:
        parts = {
            "model": model,
            "reward_funcs": reward_funcs,
            "args": args,
            "train_dataset": train_dataset,
            "processing_class": processing_class,
        }
        _translate_parts(parts, others)
        asked = _own_config(parts.pop("args"))
        args = copy.copy(asked)  # the caller's stays as it is
        self.team = current_team()
        if engine is None:
            check_engine(asked)
        _follow_model(args, parts["model"])
        _check_prompts(parts["train_dataset"], "train_dataset")
        rewards = _load_weighted(parts.pop("reward_funcs"), args, parts["processing_class"])
        rewards = with_tokenizers(rewards, others.get("reward_processing_classes"))
        if requested_engine(args) != "trl":
            args.use_vllm = False  # the kit samples; TRL need not start an engine of its own
        _drop_old_reference(parts["model"])
        adapter = _adapter_values(parts["model"])
        with precision_as_asked(args), _without_engine(parts["model"]):
            super().__init__(
                reward_funcs=[
                    guarded(reward.func, args.reward_timeout_seconds, args.on_reward_error)
                    for reward in rewards
                ],
                args=args,
                callbacks=[
                    _Boundary(self),
                    *(callbacks or []),
                    *(self._views(args, model) if self.team.is_first else ()),
                ],
                **parts,
                **others,
            )
        _restore(self.model, adapter)
        if not args.beta or _starts_at_base(adapter):
            _drop_old_reference(self.model)  # the adapter switched off is the same, and cheaper
        for callback in (DEFAULT_PROGRESS_CALLBACK, PrinterCallback):  # one calm line instead
            self.remove_callback(callback)
        self._use_trl_path = why_trl_path(self)
        self._staged = [
            (place, reward)
            for place, reward in enumerate(rewards)
            if isinstance(reward.weight, WeightSchedule)
        ]
        self._begin()
        self.engine = engine
        if engine is None:
            self.engine, choice = start_engine(self.model, asked, why_not=self._use_trl_path)
            if choice.reason and not args.use_cpu:
                warnings.warn(f"vLLM does not sample: {choice.reason}", UserWarning, stacklevel=2)
        add_to_session(self)

    def _begin(self) -> None:
        """Set what a training keeps from batch to batch."""
        self.reward_moments = RunningMoments()
        self.stop_reason: str | None = None
        self._groups_of_step = (0, 0)
        self._thoughts = ThoughtFinder(self._tokenizer)
        self._learner: Learner | None = None
        self._window: list[tuple[Rollout, torch.Tensor]] = []
        self._window_at: tuple[Any, int] = (None, -1)
        self._no_signal: deque[float] = deque(maxlen=NO_SIGNAL_BATCHES)
        self._prompt_order: deque[int] = deque()
        self._elsewhere = 0.0
        self._episodes = 0
        self._first_started: float | None = None
        self.dry_run_done = False
        self._canary: Canary | None = None
        self._synced: tuple[Any, int] = (None, -1)
        self._drawn_log_probs: list[list[float]] | None = None
        self._guard = StepGuard(self.args.max_skipped_steps)
        self._sampling = Pieces("sampling", SAMPLING_REMEDY)

    watch: RunWatch | None = None
    """The doctor's rules on this training; None where ``args.doctor`` is off."""

    def _views(self, args: LeaveOneOutConfig, model: Any) -> list[TrainerCallback]:
        """Return what speaks of the training: the first process's part."""
        if not args.doctor:
            return [live_progress()]
        self.watch = RunWatch(
            _config_of(args, model),
            tell=lambda findings: self._tell("on_findings", findings=findings),
            stop=self.stop,
            stop_on=args.stop_on or (),
            parameters=lambda: [p for p in self.model.parameters() if p.requires_grad],
        )
        return [self.watch, live_progress()]

    def _tell(self, event: str, **values: Any) -> None:
        """Call the callbacks that know one of the kit's events.

        - ``on_completions(args, state, control, records, rollout)``: once for every generation
          batch of training, when its advantages are final and before its first optimizer step;
          records as ``Rollout.records`` gives them, with ``step``.
        - ``on_findings(args, state, control, findings)``: what the doctor finds has changed.
        - ``on_state(args, state, control, held)``: after every step, and before a checkpoint; what
          a callback puts into the dict is kept.
        - ``on_checkpoint(args, state, control)``: right before a checkpoint is written.
        - ``on_resume(args, state, control, held)``: that dict, when a training goes on.
        - ``on_rescue(args, state, control, folder)``: a checkpoint had to go to another folder.
        """
        for callback in self.callback_handler.callbacks:
            heard = getattr(callback, event, None)
            if heard is not None:
                heard(self.args, self.state, self.control, **values)

    def train(
        self, resume_from_checkpoint: str | Path | bool | None = None, *args: Any, **kwargs: Any
    ) -> Any:
        """Make the dry run, then train or resume; views are closed however it ends.

        Raises:
            MemoryRanOutError: The worst case does not fit (``args.dry_run``).
        """
        try:
            if not (resume_from_checkpoint or self.dry_run_done):
                dry_run_if_wanted(self, print)
            output = super().train(resume_from_checkpoint, *args, **kwargs)
            if not self._use_trl_path:  # the first process may have put its best weights back
                self.team.broadcast_tensors(list(self._trained().values()))
            return output
        finally:
            for callback in self.callback_handler.callbacks:
                close = getattr(callback, "close", None)
                if close is not None:
                    close()

    # --- what a checkpoint keeps of it -----------------------------------------------------------

    def _held(self) -> dict[str, Any]:
        """Return what this trainer keeps from step to step, in copies."""
        in_use = self._step % (self.args.steps_per_generation * self.num_iterations) != 0
        started = self._first_started
        return {
            "micro_step": self._step,
            "slices": self.args.steps_per_generation,
            "batch": self._batch_in_use() if in_use and self._buffered_inputs else None,
            "moments": dataclasses.asdict(self.reward_moments),
            "no_signal": list(self._no_signal),
            "prompt_order": list(self._prompt_order),
            "episodes": self._episodes,
            "seconds": 0.0 if started is None else time.perf_counter() - started,
            "budget": None if self._learner is None else self._learner.budget,
            "at_once": self._sampling.size,
            "skipped": (self._guard.skipped, self._guard.in_a_row),
            "groups_of_step": self._groups_of_step,
            "times": (self._current_train_step_time, self._elsewhere),
            "metrics": {name: list(values) for name, values in self._metrics["train"].items()},
        }

    def _batch_in_use(self) -> dict[str, Any]:
        if self._use_trl_path:
            return {"inputs": [dict(part) for part in self._buffered_inputs]}
        rollout = self._buffered_inputs[0][0]
        return {"rollout": rollout.as_tree(), "order": [rows for _, rows in self._buffered_inputs]}

    def _take_up(self, held: dict[str, Any]) -> None:
        """Take up what ``_held`` returned."""
        batch, slices = held["batch"], self.args.steps_per_generation
        self._step = held["micro_step"] * slices // held.get("slices", slices)
        self._buffered_inputs = None
        self._learner = None if self._use_trl_path else self._make_learner()
        if self._learner is not None and not self.args.tokens_per_micro_batch:
            self._learner.budget = held["budget"] or self._learner.budget
        if batch is not None and "inputs" in batch:
            device = self.accelerator.device
            self._buffered_inputs = [
                {n: v.to(device) if isinstance(v, torch.Tensor) else v for n, v in part.items()}
                for part in batch["inputs"]
            ]
        elif batch is not None:
            rollout = Rollout.from_tree(batch["rollout"], self.accelerator.device)
            order = torch.cat(batch["order"]).split(len(rollout) // slices)
            self._buffered_inputs = [(rollout, rows) for rows in order]
        self._sampling.size = held["at_once"]
        self._guard.skipped, self._guard.in_a_row = held["skipped"]
        self.reward_moments = RunningMoments(**held["moments"])
        self._no_signal = deque(held["no_signal"], maxlen=NO_SIGNAL_BATCHES)
        self._prompt_order = deque(held["prompt_order"])
        self._episodes = held["episodes"]
        self._first_started = time.perf_counter() - held["seconds"]
        self._groups_of_step = held["groups_of_step"]
        self._current_train_step_time, self._elsewhere = held["times"]
        self._metrics["train"].clear()
        self._metrics["train"].update(held["metrics"])

    # --- sampling --------------------------------------------------------------------------------

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        """Return (rollout, rows) of one slice in training; TRL's inputs otherwise.

        A generation batch is sampled when it is due and cut into slices in TRL's random order.
        """
        if self._use_trl_path or not self.model.training:
            return super()._prepare_inputs(generation_batch)
        slices = self.args.steps_per_generation
        if self._step % (slices * self.num_iterations) == 0 or self._buffered_inputs is None:
            rollout = self._generate_and_score_completions(generation_batch)
            order = self.team.broadcast(torch.randperm(len(rollout))).split(len(rollout) // slices)
            self._run_old_pass(rollout, order)
            self._buffered_inputs = [(rollout, rows) for rows in order]
        return self._buffered_inputs[self._step % slices]

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> Any:
        """Return a ``Rollout`` in training; TRL's inputs otherwise."""
        self._stage_weights()
        if self._use_trl_path or not self.model.training:
            return super()._generate_and_score_completions(inputs)
        args, shaping = self.args, self.args.shaping
        if self._learner is None:
            self._learner = self._make_learner()
        # Async rewards run while the reference pass computes, unless they decide who gets a pass.
        overlap = bool(self.beta) and not (args.gate_on_score or args.dynamic_sampling)
        overlap = overlap and self.team.size == 1
        sampled, reference = self._sample(inputs, overlap=overlap)
        without = ~sampled.has_signal(shaping, self.num_generations)
        self._note("signal/groups_without", without.float().mean().item())
        if args.dynamic_sampling:
            self._note("signal/groups_drawn_again", self._draw_again(sampled))
        rollout = Rollout.scored(sampled, self.num_generations, shaping, self.reward_moments)
        if reference is not None:
            rollout.reference_log_probs = reference
        elif self.beta:
            rows = rollout.learnable.nonzero().flatten().tolist()
            rollout.reference_log_probs = self._reference_log_probs(sampled.tokens, rows)
        self._episodes += len(rollout)
        self._watch_signal(without)
        return rollout

    def _stage_weights(self) -> None:
        """Set the weights that change over training to what they are at this step."""
        progress = self.state.global_step / max(1, self.state.max_steps)
        for place, reward in self._staged:
            self.reward_weights[place] = reward.weight_at(progress)
            self._note(f"rewards/{reward.name}/weight", self.reward_weights[place].item())

    def _generate_single_turn(
        self, prompt_ids: list[list[int]], images: Any, multimodal_fields: Any
    ) -> list[list[int]]:
        """Let the engine sample, where there is one, from the adapter as it is now.

        Raises:
            StalePolicyError: It sampled from another policy.
            DivergedError: The weights are no finite numbers any more.
            MemoryRanOutError: Not even a single completion fits.
        """
        self._drawn_log_probs = None
        if self.model.training and self._learner is not None:
            check_finite(self._learner.parameters, self.state.global_step)
        if self.engine is None:
            return self._generate_here(prompt_ids, images, multimodal_fields)
        sampling = make_sampling(self.args, self.eos_token_ids)
        self._sync_engine(prompt_ids)
        seed = int(torch.randint(2**31, ()))  # of the run's own random state
        drawn = self.engine.generate(prompt_ids, sampling, seed)
        self.engine.sleep()  # the canary, the rewards and the learning step need its memory
        self._drawn_log_probs = drawn.log_probs
        if self._canary is not None and self.model.training:
            tokens = TokenRows(prompt_ids, drawn.completion_ids)
            found = self._canary.check(tokens, drawn.log_probs, self.engine.name)
            for name, value in found.items():
                self._note(name, value)
        return drawn.completion_ids

    def _generate_here(
        self, prompt_ids: list[list[int]], images: Any, multimodal_fields: Any
    ) -> list[list[int]]:
        """Let the model sample, fewer rows at a time where memory runs out."""
        sample = super()._generate_single_turn

        def draw(prompts: list[list[int]]) -> list[list[int]]:
            # TRL turns checkpointing off to sample, and where that fails not on again.
            kwargs = self.args.gradient_checkpointing_kwargs
            off = disable_gradient_checkpointing(self.model, kwargs)
            with blame_generation_kwargs(self.args), finite_logits(), off:
                return sample(prompts, images, multimodal_fields)

        if images or multimodal_fields or self.use_vllm:
            return draw(prompt_ids)  # what belongs to which row is TRL's to know
        return self._sampling.run(draw, prompt_ids, len(prompt_ids))

    @contextlib.contextmanager
    def whole_weights(self) -> Iterator[None]:
        """Gather the weights that ZeRO-3 divides, to sample outside of a step; in all processes.

        Where an engine samples, nothing is gathered.
        """
        if self.engine is not None or not self._is_sharded():
            yield
            return
        args = self.args
        begun = self.model_wrapped is not self.model  # until then only gathering brings weights
        with (
            disable_gradient_checkpointing(self.model, args.gradient_checkpointing_kwargs),
            unwrap_model_for_generation(
                self.model_wrapped,
                self.accelerator,
                gather_deepspeed3_params=args.ds3_gather_for_generation or not begun,
            ),
        ):
            yield

    def _sync_engine(self, prompt_ids: list[list[int]]) -> None:
        """Send the adapter where it has changed; before the first step, prove that it arrives."""
        if self.args.canary and self.weights_are_divided:
            self.args.canary = False  # its passes differ in number between processes
            warnings.warn(
                f"canary is off: it needs whole weights, and {why_sharded()} divides them",
                UserWarning,
                stacklevel=2,
            )
        if self.args.canary and self.model.training and self._canary is None:
            self.engine.sync(self.model)
            canary = self._make_canary()
            canary.prove(self.engine, prompt_ids, self.args.seed)
            self._canary = canary
        else:
            state, step = self._synced
            if state is self.state and step == self.state.global_step:
                return
            self.engine.sync(self.model)
        self._synced = (self.state, self.state.global_step)
        self._note("sampling/sync_seconds", self.engine.sync_seconds)
        if self._canary is not None:
            self._canary.sent(self.engine.adapter_dtype)

    def _make_canary(self) -> Canary:
        model = self.accelerator.unwrap_model(self.model)

        def score(batch: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
            with self._no_grad():
                scored = self._score(self.model, batch, entropies=True)
            return scored.log_probs, scored.entropies

        return Canary(
            score=score,
            model=model,
            without_adapter=lambda: use_adapter(model, None),
            pad_token_id=self._tokenizer.pad_token_id,
            dtype=torch.bfloat16 if self.args.bf16 else model.dtype,
            sampling=make_sampling(self.args, self.eos_token_ids),
        )

    def _sample(
        self, inputs: list[dict[str, Any]], *, overlap: bool
    ) -> tuple[ScoredBatch, torch.Tensor | None]:
        """Generate and score; with ``overlap`` and async rewards, run the reference pass meanwhile.

        Args:
            inputs: The rows of this process; as many in each.
            overlap: Only in one process.

        Returns:
            The sample of all processes, and the reference's ``(B, T)`` log-probabilities where they
            were computed.
        """
        started = time.perf_counter()
        prompts = [row["prompt"] for row in inputs]
        prompt_ids, completion_ids, completions = self._generate(prompts)
        tokens = TokenRows(prompt_ids, completion_ids)
        generated = time.perf_counter()
        last = {*self.eos_token_ids, self._tokenizer.pad_token_id}
        ended = [ids[-1] in last for ids in completion_ids]

        waiting = self._start_async_rewards(inputs, prompts, completions, completion_ids)
        reference, reference_seconds = None, 0.0
        if waiting and overlap:
            masks = self.args.mask_truncated_completions
            rows = [row for row, end in enumerate(ended) if end or not masks]
            reference = self._reference_log_probs(tokens, rows)
            reference_seconds = time.perf_counter() - generated
        functions = self.reward_funcs
        self.reward_funcs = [waiting.get(i, function) for i, function in enumerate(functions)]
        try:
            rewards = self._calculate_rewards(inputs, prompts, completions, completion_ids)
        finally:
            self.reward_funcs = functions
        log_probs = self._drawn_log_probs
        scores = self._weighted(rewards)
        sampled = ScoredBatch(prompts, completions, tokens, ended, rewards, scores, log_probs)
        if self.team.size > 1:
            sampled = self._with_the_others(sampled)
        num_tokens = sum(map(len, sampled.tokens.completion_ids))
        self._note("speed/generation_tokens_per_second", num_tokens / (generated - started))
        self._elsewhere += time.perf_counter() - started - reference_seconds
        return sampled, reference

    def _weighted(self, rewards: torch.Tensor) -> torch.Tensor:
        """Return ``(B,)`` weighted sums of ``(B, F)`` rewards; NaN where no function applied."""
        scores = (rewards * self.reward_weights.to(rewards.device)).nansum(dim=1)
        return scores.masked_fill(rewards.isnan().all(dim=1), torch.nan)

    def _with_the_others(self, sampled: ScoredBatch) -> ScoredBatch:
        """Return what all processes sampled; the scores are those of all of them already."""
        mine = dataclasses.replace(sampled, rewards=None, scores=None)
        return ScoredBatch.joined(self.team.gather(mine), sampled.rewards, sampled.scores)

    def _start_async_rewards(
        self,
        inputs: list[dict[str, Any]],
        prompts: list[Any],
        completions: list[Any],
        completion_ids: list[list[int]],
    ) -> dict[int, Callable[..., Any]]:
        """Start every async reward; return, by its place, a function that waits for its scores."""
        places = [
            i for i, func in enumerate(self.reward_funcs) if isinstance(func, AsyncCheckedReward)
        ]
        if not places:
            return {}
        columns = {name: [row[name] for row in inputs] for name in inputs[0] if name != "prompt"}
        keywords = {
            **columns,
            "prompts": prompts,
            "completions": completions,
            "completion_ids": completion_ids,
            "trainer_state": self.state,
            "log_extra": self._log_completion_extra,
            "log_metric": self._log_metric,
        }
        futures = {
            i: asyncio.run_coroutine_threadsafe(self.reward_funcs[i](**keywords), self.async_loop)
            for i in places
        }
        return {i: lambda future=future, **_: future.result() for i, future in futures.items()}

    def _draw_again(self, sampled: ScoredBatch) -> int:
        """Exchange groups without signal for groups of further prompts; return how many were drawn.

        Prompts come from a random order of the training set that is this method's own.
        """
        drawn = 0
        for _ in range(self.args.dynamic_sampling_rounds):
            signal = sampled.has_signal(self.args.shaping, self.num_generations)
            leaving = (~signal).nonzero().flatten().tolist()
            if not leaving:
                break
            inputs = []
            for _ in leaving:
                inputs += [self.train_dataset[self._next_prompt()]] * self.num_generations
            more, _ = self._sample(self._my_part(inputs), overlap=False)
            more = more.first(len(inputs))
            sampled.exchange(self.args.shaping, self.num_generations, leaving, more)
            drawn += len(leaving)
        return drawn

    def _my_part(self, inputs: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the rows of this process, as many as the others have: the last row fills up."""
        size, rank = self.team.size, self.team.rank
        each = -(-len(inputs) // size)
        filled = inputs + [inputs[-1]] * (each * size - len(inputs))
        return filled[rank * each : (rank + 1) * each]

    def _next_prompt(self) -> int:
        if not self._prompt_order:
            generator = torch.Generator().manual_seed(self.args.seed + self._step)
            order = torch.randperm(len(self.train_dataset), generator=generator)
            self._prompt_order.extend(order.tolist())
        return self._prompt_order.popleft()

    def _watch_signal(self, without: torch.Tensor) -> None:
        """Stop the training where too many of the last batches' groups carry no signal."""
        limit = self.args.max_no_signal_fraction
        self._no_signal.append(without.float().mean().item())
        share = sum(self._no_signal) / len(self._no_signal)
        if limit is None or len(self._no_signal) < NO_SIGNAL_BATCHES or share <= limit:
            return
        self.stop(
            f"{share:.0%} of the groups of the last {NO_SIGNAL_BATCHES} batches have equal scores "
            f"(max_no_signal_fraction {limit:g}): choose prompts the model sometimes solves, raise "
            f"trainer.temperature or trainer.num_generations, or look at the reward"
        )

    # --- passes ----------------------------------------------------------------------------------

    def _make_learner(self) -> Learner:
        args = self.args
        if self.engine is not None:
            self.engine.sleep()  # the budget of a pass is measured without its memory
        return Learner(
            forward=self._policy,
            backward=self.accelerator.backward,
            no_grad=self._no_grad,
            parameters=[p for p in self.model.parameters() if p.requires_grad],
            **_cutting(self),
            pad_token_id=self._tokenizer.pad_token_id,
            device=self.accelerator.device,
            epsilon=(self.epsilon_low, self.epsilon_high),
            reuse=args.skip_old_pass,
            token_ratios=args.legacy_metrics,
            correction=(args.rollout_correction, args.rollout_correction_cap)
            if args.rollout_correction
            else None,
            pad_to_multiple_of=self.pad_to_multiple_of,
            team=self.team,
        )

    def _policy(self, batch: MicroBatch) -> Scored:
        return self._score(self.model, batch)

    def _score(self, model: Any, batch: MicroBatch, *, entropies: bool | None = None) -> Scored:
        """Return log-probabilities of a micro-batch, and entropies (None: where gradients are).

        No attention mask: rows are padded on the right alone. (Unsloth's kernels may drop the
        mask while they train, and TRL's left-padded prompts would then attend to their padding.)
        """
        model = self.accelerator.unwrap_model(model)  # the learner sums gradients, not DDP
        with self.accelerator.autocast():
            output = model(input_ids=batch.input_ids, labels=batch.labels, fused_lm_head=True)
        before = (batch.places - 1).clamp(min=0)  # TRL's head scores a token one column before it

        def of_completions(values: torch.Tensor) -> torch.Tensor:
            return values.gather(1, before).masked_fill(~batch.completion_mask, 0.0)

        log_probs = of_completions(output.log_probs)
        if not (torch.is_grad_enabled() if entropies is None else entropies):
            return Scored(log_probs)
        return Scored(log_probs, of_completions(output.entropy.detach()))

    @contextlib.contextmanager
    def _no_grad(self) -> Iterator[None]:
        kwargs = self.args.gradient_checkpointing_kwargs
        with torch.no_grad(), disable_gradient_checkpointing(self.model, kwargs):
            yield

    def _reference_log_probs(self, tokens: TokenRows, rows: list[int]) -> torch.Tensor:
        """Return ``(B, T)`` log-probabilities under the reference, 0 in other rows.

        The reference is a model of its own, the adapter's starting copy, or the adapter off.
        """

        def reference(batch: MicroBatch) -> Scored:
            return self._score(self.ref_model or self.model, batch)

        place = contextlib.nullcontext()
        if self.ref_model is None:
            model = self.accelerator.unwrap_model(self.model)
            place = use_adapter(model, "ref" if "ref" in model.peft_config else None)
        with place:
            self._learner.tally.reference_rows += len(rows) * self.team.is_first
            return self._learner.log_probs(tokens, rows, reference)

    def _run_old_pass(self, rollout: Rollout, order: tuple[torch.Tensor, ...]) -> None:
        """Run the old-log-prob pass for the rows whose training forward cannot stand in for it.

        It can where the row is trained before any optimizer step, and, at beta > 0, every other row
        that its advantage depends on is in that same step.
        """
        coming = self.current_gradient_accumulation_steps - len(self._window)
        first = {row for rows in order[:coming] for row in rows.tolist()}
        rows = rollout.learnable.nonzero().flatten().tolist()
        if self.args.skip_old_pass:
            if not self.beta:
                rows = [row for row in rows if row not in first]
            elif len(first) == len(rollout) and not rollout.needs_whole_batch:
                rows = []
        self._learner.fill_old(rollout, rows)
        if rows and self.beta:
            rollout.compute_advantages()

    # --- learning --------------------------------------------------------------------------------

    def training_step(
        self, model: Any, inputs: Any, num_items_in_batch: Any = None
    ) -> torch.Tensor:
        """Collect a slice; learn from all slices of an optimizer step when the last one is in.

        Together they can be sorted and cut by length; every row keeps its weight in the mean.
        """
        if self._use_trl_path:
            loss = super().training_step(model, inputs, num_items_in_batch)
            if self.accelerator.sync_gradients:
                self._guard_step(float(loss), [p for p in model.parameters() if p.requires_grad])
            return loss
        started = time.perf_counter()
        self._first_started = self._first_started or started
        model.train()
        if hasattr(self.optimizer, "train"):  # schedule-free optimizers
            self.optimizer.train()
        state, step = self._window_at
        if state is not self.state or step != self.state.global_step:
            self._window, self._window_at = [], (self.state, self.state.global_step)
            if self.team.size > 1:
                self.team.reseed(self.args.seed, self.state.global_step)
        self._window.append(self._prepare_inputs(inputs))
        loss = torch.zeros((), device=self.accelerator.device)
        if self.accelerator.sync_gradients:
            loss = self._learn()
        self._step += 1
        self._current_train_step_time += time.perf_counter() - started
        if self.accelerator.sync_gradients:
            self._note_step()
        return loss

    def _learn(self) -> torch.Tensor:
        """Add the gradient of the collected slices; return their loss.

        Where it is no finite number, no gradient is left, and the optimizer's step moves nothing.

        Raises:
            DivergedError: That has happened too often in a row, or the weights are at fault.
        """
        share = 1 / sum(len(rows) for _, rows in self._window)
        rollouts = {id(rollout): rollout for rollout, _ in self._window}
        for key, rollout in rollouts.items():
            weights = torch.zeros(len(rollout), device=self.accelerator.device)
            for other, rows in self._window:
                if id(other) == key:
                    weights[rows] += share
            with self.compute_loss_context_manager():
                self._learner.learn(rollout, weights)
        for parameter in self._learner.parameters:  # TRL steps with a gradient of 0, not with none
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        if self.team.size > 1:
            self.team.all_reduce([parameter.grad for parameter in self._learner.parameters])
            self._learner.tally = Tally.of_all(self.team.gather(self._learner.tally))
        for rollout in rollouts.values():
            if rollout.on_policy:
                self._note_rollout(rollout)
            rollout.on_policy = False
        loss = self._learner.tally.loss
        self._guard_step(loss, self._learner.parameters)
        return torch.tensor(loss, device=self.accelerator.device)

    def _guard_step(self, loss: float, parameters: list[Any]) -> None:
        step = self.state.global_step + 1
        if not self._guard.check(loss, parameters, step, self.accelerator.scaler):
            self._note("grad_norm", math.nan)  # not the 0 of a norm over no gradients

    # --- metrics ---------------------------------------------------------------------------------

    def _note(self, name: str, value: float) -> None:
        self._metrics["train"][name].append(value)

    def _note_rollout(self, rollout: Rollout) -> None:
        found = rollout.metrics(self.reward_func_names)
        if self.args.legacy_metrics:
            found |= rollout.older_metrics()
        for name, value in found.items():
            self._note(name, value)
        step = self.state.global_step + 1
        of_step, first = self._groups_of_step
        first = first if of_step == step else 0  # a step may learn from several batches
        self._groups_of_step = (step, first + len(rollout) // self.num_generations)
        records = [
            {
                "step": step,
                **record,
                "group": first + record["group"],
                **self._thoughts(ids, record["completion"]),
            }
            for record, ids in zip(
                rollout.records(self.reward_func_names),
                rollout.sampled.tokens.completion_ids,
                strict=True,
            )
        ]
        self._logs["prompt"].extend(redact_tree(rollout.sampled.prompts))
        self._logs["completion"].extend(redact_tree(rollout.sampled.completions))
        self._logs["advantages"].extend(record["advantage"] for record in records)
        for name in self.reward_func_names:
            values = (record["rewards"][name] for record in records)
            self._logs["rewards"][name].extend(math.nan if v is None else v for v in values)
        self._flush_reward_logs(len(rollout))
        self._tell("on_completions", records=records, rollout=rollout)

    def _flush_reward_logs(self, num_rows: int) -> None:
        """Move what rewards logged (``log_extra``, ``log_metric``) to TRL's logs."""
        logged = dict(self._pending_extra_logs), dict(self._pending_metrics)
        columns, metrics = (
            {name: [v for part in parts for v in part.get(name, ())] for name in _names(parts)}
            for parts in zip(*self.team.gather(logged), strict=True)
        )
        for column, values in columns.items():
            # Dynamic sampling scores more rows than it trains: which is whose is then not known.
            of_rows = values if len(values) == num_rows else [None] * num_rows
            self._logs["extra"][redact(column)].extend(redact_tree(of_rows))
        self._pending_extra_logs.clear()
        for name, values in metrics.items():
            self._note(name, sum(values) / len(values))
        self._pending_metrics.clear()

    def _note_step(self) -> None:
        tally, self._learner.tally = self._learner.tally, Tally()
        seconds = self._current_train_step_time
        learning = max(1e-9, seconds - self._elsewhere)
        self._note("step_time", seconds)
        self._note("speed/learning_tokens_per_second", tally.step_tokens / learning)
        self._note("memory/peak_gib", max(self.team.gather(take_peak())) / GIB)
        self._note("lr", self._get_learning_rate())
        found = tally.metrics()
        if self.args.legacy_metrics:
            found |= tally.older_metrics()
        for name, value in found.items():
            self._note(name, value)
        if self.args.legacy_metrics:  # over the optimizer steps since the last line
            ratios = self._metrics["train"]["val/ratio"]
            spread = statistics.variance(ratios) if len(ratios) > 1 else 0.0
            self._metrics["train"]["val/ratio_var"] = [spread]
        if self._guard.skipped:
            self._note("loss", tally.loss)  # transformers would put 0 or a mean for NaN
            self._metrics["train"]["step/skipped"] = [self._guard.skipped]
        elapsed = time.perf_counter() - self._first_started
        for name, value in (("episode", self._episodes), ("eps", self._episodes / elapsed)):
            self._metrics["train"][name] = [value]  # a count so far, not a mean of counts
        self._current_train_step_time = self._elsewhere = 0.0


class _Boundary(TrainerCallback):
    """Tell the trainer when a step ends, and when the next one is about to change the weights."""

    def __init__(self, trainer: "LeaveOneOutTrainer") -> None:
        self.forget, self.keep = trainer.forget_boundary, trainer.keep_boundary
        self.check = trainer.check_weights

    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        self.forget()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.check()
        self.keep()


def _config_of(args: LeaveOneOutConfig, model: Any) -> RunConfig:
    """Return what a run file would say of a trainer that has none."""
    names = {*DEFAULTS, "steps_per_generation", "max_steps"}
    path = str(getattr(getattr(model, "config", None), "_name_or_path", ""))
    return RunConfig(
        model=ModelSection(name=Path(path).name, max_seq_length=4 * args.max_completion_length),
        trainer={name: getattr(args, name) for name in sorted(names)},
    )


def _names(parts: Sequence[dict[str, Any]]) -> list[str]:
    """Return the keys of all of them, each once."""
    return list(dict.fromkeys(name for part in parts for name in part))


def _load_weighted(specs: Any, args: LeaveOneOutConfig, tokenizer: Any) -> list[LoadedReward]:
    """Load the rewards and put their weights into ``args``."""
    listed = specs if isinstance(specs, list | tuple) else [specs]
    rewards = load_rewards(
        listed, tokenizer=tokenizer, chat_template_kwargs=args.chat_template_kwargs
    )
    if args.reward_weights is None:
        args.reward_weights = [reward.weight_at(0.0) for reward in rewards]
    elif any(reward.weight != 1.0 for reward in rewards):
        raise ConfigError("reward weights are given both by name and as reward_weights: keep one")
    return rewards


def _check_prompts(dataset: Any, name: str) -> None:
    """Refuse a dataset without rows or without the column ``prompt``, where that is known.

    Raises:
        DataError: It is one.
    """
    if hasattr(dataset, "__len__") and not len(dataset):
        raise DataError(f"{name} has no rows: give at least one prompt")
    columns = getattr(dataset, "column_names", None)
    if columns is not None and "prompt" not in columns:
        raise DataError(
            f"{name} has no column 'prompt', only {format_value(sorted(columns))}: rename the one "
            f"that is meant, as in {name}.rename_column({next(iter(columns), 'question')!r}, "
            "'prompt')"
        )


def _translate_parts(parts: dict[str, Any], others: dict[str, Any]) -> None:
    """Move arguments under older names into ``parts``; raise ConfigError for what is missing."""
    for old, new in RENAMED_PARTS.items():
        value = others.pop(old, None)
        if value is None:
            continue
        if parts[new] is not None:
            raise ConfigError(f"{old} is the old name of {new}, and both are given: keep {new}")
        warnings.warn(f"{old} is now called {new}", FutureWarning, stacklevel=3)
        parts[new] = value
    if others.pop("ref_policy", None) is not None:
        warnings.warn(
            "ref_policy is not needed: the reference is the model with its adapter off",
            FutureWarning,
            stacklevel=3,
        )
    missing = [name for name in ("model", "reward_funcs", "train_dataset") if parts[name] is None]
    if missing:
        raise ConfigError(f"LeaveOneOutTrainer needs {' and '.join(missing)}")


def _drop_old_reference(model: Any) -> None:
    """Let a second trainer on the same model take its own copy of the adapter as the reference."""
    if "ref" in getattr(model, "peft_config", {}):
        model.delete_adapter("ref")


def _follow_model(args: LeaveOneOutConfig, model: Any) -> None:
    """Let an unset ``gradient_checkpointing`` follow what ``attach_lora`` was told."""
    choice = notes_of(model).gradient_checkpointing
    if choice is not None and getattr(args, "follows_model", False):
        args.gradient_checkpointing = bool(choice)


@contextlib.contextmanager
def _without_engine(model: Any) -> Iterator[None]:
    """Hide the engine that a model carries: Unsloth's class would let TRL sample by it.

    TRL's own vLLM layer sets variables of torch.distributed and puts the engine to sleep.
    """
    modules = model.modules() if isinstance(model, torch.nn.Module) else ()
    held = [(vars(m), vars(m).pop("vllm_engine")) for m in modules if "vllm_engine" in vars(m)]
    try:
        yield
    finally:
        for attributes, engine in held:
            attributes["vllm_engine"] = engine


def _adapter_values(model: Any) -> dict[str, torch.Tensor]:
    """Return copies of an adapter's trained parameters; none of a model without adapter."""
    if not hasattr(model, "peft_config"):
        return {}
    return {n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad}


def _restore(model: Any, adapter: dict[str, torch.Tensor]) -> None:
    """Undo TRL's cast of a 4-bit model's adapter to bf16, and its rounding.

    With 8 bits of mantissa an update smaller than 1/256 of a weight is lost, and at learning rates
    of 1e-6 to 1e-5 nearly all are.
    """
    for name, parameter in model.named_parameters():
        if name in adapter:
            parameter.data = adapter[name].to(parameter.device).float()


def _starts_at_base(adapter: dict[str, torch.Tensor]) -> bool:
    """Return whether a new LoRA adapter adds nothing yet, so that off and its copy are the same."""
    kinds = {
        "a": [values for name, values in adapter.items() if "lora_A" in name],
        "b": [values for name, values in adapter.items() if "lora_B" in name],
    }
    only_lora = len(kinds["a"]) + len(kinds["b"]) == len(adapter)
    return bool(kinds["b"]) and only_lora and not any(values.any() for values in kinds["b"])


def why_trl_path(trainer: LeaveOneOutTrainer) -> str | None:
    """Return why TRL's own code must train (images, divided weights, a router's loss), or None.

    Raises:
        ConfigError: It must, and a setting is given that only the kit's path has.
    """
    columns = set(getattr(trainer.train_dataset, "column_names", None) or ())
    reason = None
    is_stream = not hasattr(trainer.train_dataset, "__len__")
    if columns & {"image", "images"}:
        reason = "prompts with images"
    elif trainer.accelerator.num_processes > 1 and (why_sharded() or is_stream):
        reason = f"several processes with {why_sharded() or 'a stream of prompts'}"
    elif trainer.aux_loss_enabled:
        reason = "a mixture of experts with a router loss (router_aux_loss_coef 0 turns it off)"
    given = [name for name in KIT_ONLY if getattr(trainer.args, name) != DEFAULTS[name]]
    if reason and given:
        raise ConfigError(
            f"{reason} cannot be trained with {' and '.join(given)} yet: leave them out"
        )
    if trainer.args.dynamic_sampling and is_stream:
        raise ConfigError("dynamic_sampling needs a dataset with random access, not a stream")
    return reason


def _cutting(trainer: LeaveOneOutTrainer) -> dict[str, int]:
    """Return the token budget and the overhead of a pass, from the model and the machine."""
    args, config = trainer.args, trainer.model.config.get_text_config()
    hardware = detect_hardware()
    on_cpu = hardware.device == "cpu"
    hidden, layers = config.hidden_size, config.num_hidden_layers
    inner = getattr(config, "intermediate_size", None) or 4 * hidden
    budget = args.tokens_per_micro_batch or default_token_budget(
        hardware.free_memory,
        hidden,
        layers,
        intermediate_size=inner,
        bytes_per_value=2 if args.bf16 or args.fp16 else 4,
        checkpointing=args.gradient_checkpointing,
        on_cpu=on_cpu,
    )
    weights = layers * hidden * (4 * hidden + 3 * inner)  # 4-bit weights would be counted packed
    return {"budget": budget, "overhead": pass_overhead(layers, weights, on_cpu=on_cpu)}
