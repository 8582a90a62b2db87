"""TRL's trainer with the kit's training step: builds the parts of ``rloo.step.Step``.

If ``step_choice`` selects TRL's own step, TRL trains, and the methods here call TRL's methods.
"""

import functools
import itertools
import logging
import math
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils.memory import clear_device_cache
from trl.trainer.utils import RepeatSampler

from rloo_kit.checkpoints.resume import ResumableTrainer
from rloo_kit.config.trainer_settings import batch_plan
from rloo_kit.data.lengths import check_lengths
from rloo_kit.errors import ConfigError, RewardContractError
from rloo_kit.machine.cleanup import take_peak
from rloo_kit.machine.hardware import GIB, detect_hardware
from rloo_kit.machine.processes import divided_by_launcher, num_processes
from rloo_kit.models.loading import save_adapter
from rloo_kit.models.notes import notes_of
from rloo_kit.models.shape import largest_size
from rloo_kit.rloo.batching import TokenRows
from rloo_kit.rloo.guards import StepGuard
from rloo_kit.rloo.learner import Learner
from rloo_kit.rloo.objective import LOSSES
from rloo_kit.rloo.rollout import Rollout
from rloo_kit.rloo.step import Row, Step, all_rows
from rloo_kit.rloo.token_budget import default_token_budget, pass_overhead
from rloo_kit.sampling.choice import thought_limit
from rloo_kit.sampling.decoding import as_learned
from rloo_kit.sampling.engine import Engine
from rloo_kit.scoring.specs import LoadedReward
from rloo_kit.text.wording import format_value, text_of
from rloo_kit.tools.environments import Environments
from rloo_kit.tools.loop import ToolLoop
from rloo_kit.training.dry_run import DryRun, WorstCase
from rloo_kit.training.dynamic_sampling import DynamicSampling
from rloo_kit.training.partial_rollouts import InFlight
from rloo_kit.training.policy import Policy
from rloo_kit.training.sampler import Sampler, TrainingCompleter
from rloo_kit.training.step_log import StepLog
from rloo_kit.training.trl_step import TrlStep, route_trl_lm_head
from rloo_kit.types import Say, TokenIds, Tokenizer


class StepTrainer(ResumableTrainer, TrlStep):
    """TRL's ``RLOOTrainer``, whose training step is ``rloo.step.Step`` or TRL's own code."""

    tool_loop: ToolLoop | None = None  # runs the tools that completions call

    def _make_parts(self, rewards: list[LoadedReward]) -> None:
        """Create the log and, unless TRL's step trains, all parts of the kit's step.

        The engine of ``sampler`` is set later, after it has started.
        """
        route_trl_lm_head()
        args = self.args
        longest = notes_of(self.model).max_seq_length  # Unsloth would cut longer prompts
        if longest and hasattr(self.train_dataset, "__len__"):
            check_lengths(self.train_dataset, self.tokenizer, args, longest)
        self.loaded_rewards = rewards
        self.dry_run_done = False
        self.collected: list[list[Row]] = []  # the rows of the optimizer step in progress
        self.is_first_batch = True
        self.warned_of_rows = False  # True after the warning about rows that no reward scores
        self.fault: RewardContractError | None = None  # the error that stopped the training
        self.step_log = StepLog(
            names=self.reward_func_names,
            tokenizer=self.tokenizer,
            tables={} if self.by_trl else self.tables,
            state=lambda: self.state,
            tell=self._take_batch,
        )
        if self.by_trl:
            return
        if self.accelerator.mixed_precision == "fp16":
            _scale_loss(self.accelerator)
        self.policy = Policy(self.model, self.ref_model, self.accelerator, args)
        self.sampler = Sampler(
            model=self.model,
            accelerator=self.accelerator,
            args=args,
            policy=self.policy,
            log=self.step_log,
            pad_token_id=self.tokenizer.pad_token_id,
            eos_token_ids=self.eos_token_ids,
            thought=thought_limit(self.tokenizer, args.thinking_budget),
            generation_config=self.generation_config,
            generation_kwargs=self.generation_kwargs,
            trl_generate=super()._generate_single_turn,
        )
        self.completer = TrainingCompleter(
            draw=self.sampler.draw,
            processing_class=self.processing_class,
            template_settings=self.chat_template_kwargs,
            ends=frozenset((*self.eos_token_ids, self.tokenizer.pad_token_id)),
            functions=lambda: self.reward_funcs,
            tokenizers=self.reward_processing_classes,
            for_rewards=lambda: {
                "trainer_state": self.state,
                "log_extra": self.step_log.note_extra,
                "log_metric": self.step_log.note,
            },
            tool_loop=self.tool_loop,
            turns=self.sampler.turns,
            loop=getattr(self, "async_loop", None),  # TRL's, if a reward is async
            log=self.step_log,
            rewards=rewards,
            weights=self.reward_weights,
            device=self.accelerator.device,
        )
        self.dynamic_sampling = DynamicSampling(
            args=args, dataset=lambda: self.train_dataset, log=self.step_log
        )
        self.in_flight = self._make_in_flight() if args.partial_rollouts else None

        def reference(tokens: TokenRows, rows: list[int]) -> torch.Tensor:
            return self.policy.reference_log_probs(self.learner, tokens, rows)

        self.rloo = Step(
            sample=self.completer.sample,
            score=self.completer.score,
            reference=reference if args.beta else None,
            learner=lambda: self.learner,
            guard=StepGuard(args.max_skipped_steps, self.accelerator.scaler),
            log=self.step_log,
            shaping=args.shaping,
            num_generations=self.num_generations,
            num_slices=args.steps_per_generation,
            num_iterations=self.num_iterations,
            in_flight=self.in_flight,
            after_scoring=self.dynamic_sampling.after_scoring,
            overlap=not args.dynamic_sampling,
        )

    def _restart(self) -> None:
        """Forget the state of an earlier training."""
        self.step_log.restart()
        if not self.by_trl:
            self.collected = []
            self.sampler.is_synced = False
            self.dynamic_sampling.restart()
            self.rloo.load_state_dict({"batch": None, "moments": {}, "skipped": (0, 0)})
            if self.in_flight:
                self.in_flight.restart()

    def _take_batch(self, records: list[dict[str, Any]], rollout: Rollout) -> None:
        """Pass the batch to the callbacks, and warn about rows and rewards without any score.

        If no reward function scored any completion of the first batch, the training stops.
        """
        missing = rollout.sampled.rewards.isnan()  # (B, F)
        rows = missing.all(dim=1).tolist()
        silent = missing.all(dim=0).tolist()
        if any(rows) and not (self.by_trl or self.warned_of_rows):  # TRL's step has its own warning
            self.warned_of_rows = True
            prompt = format_value(text_of(records[rows.index(True)]["prompt"]))
            logging.getLogger(__name__).warning(  # begins with TRL's words
                "All reward functions returned None for the following kwargs: "
                f"prompt={prompt}. {sum(rows)} of {len(rows)} rows of this batch are not trained: "
                "let a reward return a number for such rows, or remove their prompts"
            )
        if self.is_first_batch and any(silent):
            names = ", ".join(itertools.compress(self.reward_func_names, silent))
            text = (
                f"reward {names} returned None for every completion of the first batch: let it "
                "return a number for rows that it can judge (test it with rloo-kit rewards check)"
            )
            if all(silent):
                self.fault = RewardContractError(text)
                self.stop(text)
            else:
                warnings.warn(text, stacklevel=2)
        self.is_first_batch = False
        self.notify("on_completions", records=records, rollout=rollout)

    def _make_in_flight(self) -> InFlight:
        args = self.args
        batch = batch_plan(vars(args))

        def order() -> Iterator[int]:
            each_once = RepeatSampler(
                self.train_dataset, 1, batch.num_prompts,
                shuffle=bool(self.shuffle_dataset), seed=args.seed,
            )  # fmt: skip
            while True:
                yield from each_once

        def num_wanted() -> int:
            steps = self.state.max_steps * batch.accumulation
            batches = steps / (batch.steps_per_generation * self.num_iterations)
            return math.ceil(batches) * batch.num_prompts

        return InFlight(
            completer=self.completer,
            sampler=self.sampler,
            order=order,
            dataset=lambda: self.train_dataset,
            num_generations=batch.num_generations,
            num_groups=batch.in_flight // batch.num_generations,
            max_age=args.max_rollout_age,
            num_wanted=num_wanted,
        )

    @functools.cached_property
    def learner(self) -> Learner:
        """The learner.

        It is created when it is first used, because its token budget depends on the memory that is
        free at that moment.
        """
        args = self.args
        if self.engine:
            self.engine.sleep()  # the budget can then use the engine's memory
        level = args.rollout_correction
        hardware = detect_hardware()
        on_cpu = hardware.device == "cpu"
        config = self.model.config.get_text_config()
        layers, hidden = config.num_hidden_layers, config.hidden_size
        inner = largest_size(config, "intermediate_size") or 4 * hidden
        budget = args.tokens_per_micro_batch or default_token_budget(
            hardware.free_memory,
            hidden,
            layers,
            intermediate_size=inner,
            bytes_per_value=2 if args.bf16 or args.fp16 else 4,
            checkpointing=args.gradient_checkpointing,
            on_cpu=on_cpu,
        )
        # estimated from the config, because numel() of packed 4-bit weights is too small
        weights = layers * hidden * (4 * hidden + 3 * inner)
        return Learner(
            forward=self.policy.run,
            backward=self.accelerator.backward,
            no_grad=self.policy.no_grad,
            with_grad=self.compute_loss_context_manager,
            parameters=list(self.trained_parameters().values()),
            budget=budget,
            overhead=pass_overhead(layers, weights, on_cpu=on_cpu),
            pad_token_id=self.tokenizer.pad_token_id,
            device=self.accelerator.device,
            epsilon=(self.epsilon_low, self.epsilon_high),
            loss=LOSSES[args.loss],
            correction=(level, args.rollout_correction_cap) if level else None,
            pad_to_multiple_of=self.pad_to_multiple_of,
            may_share=self.policy.may_share,
        )

    @property
    def by_trl(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """True if TRL's own training step is used."""
        return self.step_choice.by_trl

    @property
    def tools(self) -> list[Any]:
        """All tools of the training, including those of environments, as in TRL's GRPO trainer."""
        return self.tool_loop.tools if self.tool_loop else []

    @property
    def pool(self) -> Environments | None:
        """The pool of environments; None if there are none."""
        return self.tool_loop and self.tool_loop.environments

    @property
    def environments(self) -> list[Any] | None:
        """The environments of the newest batch, one for each completion; None if there are none."""
        return self.pool and self.pool.current

    @property
    def engine(self) -> Engine | None:
        """The engine that samples; None if the model itself or TRL's step samples."""
        return None if self.by_trl else self.sampler.engine

    def save_adapter(self, folder: str | Path, tokenizer: Tokenizer) -> None:
        """Write the trained adapter to a folder, with ``models.loading.save_adapter``.

        Every process must call this method, because the tensors are gathered from all processes.
        Only the first process writes files.
        """
        state = None
        if num_processes() > 1 or divided_by_launcher():
            state = self.accelerator.get_state_dict(self.model_wrapped)
        if self.accelerator.is_main_process:
            save_adapter(self.accelerator.unwrap_model(self.model), tokenizer, folder, state)
        self.accelerator.wait_for_everyone()

    def dry_run_if_wanted(self, say: Say, **how: Any) -> None:
        """Make the dry run if the settings ask for it, and report its result.

        Args:
            say: Called with one line that describes the result.
            **how: The fields ``max_prompt_tokens`` and ``remedy`` of ``WorstCase``.

        Raises:
            MemoryRanOutError: The worst case does not fit into memory.
        """
        if not self.by_trl and WorstCase(self, self.policy, self.learner, **how).is_wanted():
            say(str(self.dry_run(**how)))

    def dry_run(self, **how: Any) -> DryRun:
        """Run one learning step in the worst case, and return the memory and time that it needed.

        Args:
            **how: The fields ``max_prompt_tokens`` and ``remedy`` of ``WorstCase``.

        Raises:
            MemoryRanOutError: The worst case does not fit into memory.
        """
        found = WorstCase(self, self.policy, self.learner, **how).run()
        self.dry_run_done = True
        return found

    def _generate_single_turn(
        self, prompt_ids: TokenIds, images: object, multimodal_fields: object
    ) -> TokenIds:
        """Sample completions for TRL's code: for TRL's step, and always for an ``eval_dataset``.

        If TRL's step was chosen, TRL's method samples, otherwise the kit's sampler.
        """
        if self.by_trl:
            return super()._generate_single_turn(prompt_ids, images, multimodal_fields)
        return self.sampler.draw(prompt_ids)[0]

    def training_step(  # pyright: ignore[reportIncompatibleMethodOverride]  # as TRL's
        self, model: torch.nn.Module, inputs: Any, num_items_in_batch: Any
    ) -> torch.Tensor:
        """Collect the rows in ``inputs``; in the last call for an optimizer step, run the step.

        transformers calls this method ``gradient_accumulation_steps`` times for each optimizer
        step. If TRL's step was chosen, run TRL's method instead.

        Returns:
            In the last call for an optimizer step, the loss of this step; in the earlier calls, 0.
            With TRL's step, the result of TRL's method.

        Raises:
            ConfigError: ``which_prompts`` is set although ``partial_rollouts`` is on, or ``beta``
                was 0 when the trainer was made and is above 0 now.
        """
        if self.by_trl:
            return super().training_step(model, inputs, num_items_in_batch)
        model.train()
        self.optimizer.train()  # for schedule-free optimizers; accelerate's wrapper always has it
        self.collected.append(inputs)
        if not self.accelerator.sync_gradients:
            return torch.zeros((), device=self.accelerator.device)
        batches = self.collected
        self.collected = []
        self.rloo.shaping = self.args.shaping  # a callback may have changed a setting
        if self.args.beta and self.rloo.reference is None:
            raise ConfigError(
                "trainer.beta was 0 at the start, so the trainer has no reference policy for a KL "
                "penalty: start with a beta above 0, such as 1e-9"
            )
        if self.in_flight and self.rloo.which_prompts is not all_rows:
            raise ConfigError(
                "trainer.rloo.which_prompts has no effect with trainer.partial_rollouts, because "
                "sampling then begins before the step that chooses prompts: leave one of the two "
                "out"
            )
        with as_learned(self.model):
            loss = self.rloo.run(batches, self.state.global_step + 1)
        steps = self.args.torch_empty_cache_steps
        if steps and self.state.global_step % steps == 0:
            clear_device_cache()
        self.sampler.is_synced = False  # the optimizer changes the weights now
        self.step_log.note("lr", float(self.optimizer.param_groups[0]["lr"]))
        return loss

    def log(self, logs: dict[str, Any], start_time: float | None = None) -> None:
        """Write a line of the log, with the means of the kit's metrics since the last line.

        With the kit's step, ``loss`` is the mean since the last line, and ``train_loss`` the mean
        over all optimizer steps. The kit computes ``train_loss`` itself, because transformers
        forgets earlier losses when a training is resumed.
        """
        if self.model.training:
            logs.update(self.step_log.take_means())
        if self.by_trl and "learning_rate" in logs:  # metrics that the kit's own step logs
            logs["step/by_trl"] = 1.0
            logs["lr"] = logs["learning_rate"]
            logs["episode"] = self.step_log.episodes
            logs["memory/peak_gib"] = take_peak() / GIB
        elif "train_loss" in logs and not self.by_trl:
            logs["train_loss"] = self.step_log.loss_sum / max(1, self.state.global_step)
        super().log(logs, start_time)


def _scale_loss(accelerator: Accelerator) -> None:
    """Add a gradient scaler for fp16, also on a CPU, where accelerate adds none.

    The scale starts at 2^10 instead of torch's 2^16, because each overflow skips a step and so
    wastes a whole sampled batch.
    """
    accelerator.native_amp = True
    accelerator.scaler = torch.amp.GradScaler(accelerator.device.type, init_scale=2.0**10)
    # The scaler creates its scale at the first use, but needs it even in a step without any loss
    accelerator.scaler.scale(torch.zeros((), device=accelerator.device))
