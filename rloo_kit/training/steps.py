"""Optimizer steps: slices of rollouts are collected, and one learning step is made from all."""

import contextlib
import math
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from rloo_kit.machine.hardware import detect_hardware
from rloo_kit.rloo.batching import default_token_budget, pass_overhead
from rloo_kit.rloo.guards import StepGuard
from rloo_kit.rloo.learner import Learner
from rloo_kit.rloo.metrics import Tally
from rloo_kit.rloo.rollout import Rollout, rows_needing_old_pass
from rloo_kit.training.config import LeaveOneOutConfig

if TYPE_CHECKING:
    from rloo_kit.training.trainer import LeaveOneOutTrainer


class OptimizerSteps:
    """Collects the slices of an optimizer step and learns from them with the last one.

    Together they can be sorted and cut by length; every row keeps its weight in the mean. TRL's
    ``_step`` and ``_buffered_inputs`` count and hold the slices.
    """

    def __init__(self, trainer: "LeaveOneOutTrainer") -> None:
        self.trainer = trainer
        self.guard = StepGuard(trainer.args.max_skipped_steps)
        self.learner: Learner | None = None
        self._window: list[tuple[Rollout, torch.Tensor]] = []
        self._window_at: tuple[Any, int] = (None, -1)

    def micro_step(self, model: Any, inputs: Any) -> torch.Tensor:
        """Collect a slice; with the last one of an optimizer step, learn; return the loss."""
        trainer = self.trainer
        is_last = trainer.accelerator.sync_gradients
        with self._timed(is_last=is_last):
            self._begin(model)
            self._window.append(self._next_slice(inputs))
            loss = torch.zeros((), device=trainer.accelerator.device)
            if is_last:
                loss = self.learn()
            trainer._step += 1
        return loss

    @contextlib.contextmanager
    def _timed(self, *, is_last: bool) -> Iterator[None]:
        """Measure a micro-step, and log the optimizer step when it was the last one."""
        started, log = time.perf_counter(), self.trainer.step_log
        log.first_started = log.first_started or started
        yield
        log.seconds += time.perf_counter() - started
        if is_last:
            learner = self.make_learner()
            tally, learner.tally = learner.tally, Tally()
            log.note_step(tally, self.trainer._get_learning_rate(), self.guard.skipped)

    def _begin(self, model: Any) -> None:
        trainer, state = self.trainer, self.trainer.state
        model.train()
        if hasattr(trainer.optimizer, "train"):  # schedule-free optimizers
            trainer.optimizer.train()
        if self._window_at[0] is not state or self._window_at[1] != state.global_step:
            self._window, self._window_at = [], (state, state.global_step)

    def _next_slice(self, inputs: Any) -> tuple[Rollout, torch.Tensor]:
        """Return a rollout and the ``(rows,)`` of it that the next micro-step trains.

        A rollout is made when it is due, and cut into slices in TRL's random order.
        """
        trainer, slices = self.trainer, self.trainer.args.steps_per_generation
        is_due = trainer._step % (slices * trainer.num_iterations) == 0
        if is_due or trainer._buffered_inputs is None:
            self._stage_weights()
            learner = self.make_learner()
            rollout = trainer.rollouts.make(inputs, learner)
            parts = torch.randperm(len(rollout)).split(len(rollout) // slices)
            coming = trainer.current_gradient_accumulation_steps - len(self._window)
            first_step = {row for rows in parts[:coming] for row in rows.tolist()}
            rows = rows_needing_old_pass(rollout, first_step)
            learner.fill_old(rollout, rows)
            if rows and trainer.beta:
                rollout.compute_advantages()
            trainer._buffered_inputs = [(rollout, rows) for rows in parts]
        return trainer._buffered_inputs[trainer._step % slices]

    def _stage_weights(self) -> None:
        """Set the reward weights that follow a schedule to what they are at this step."""
        trainer = self.trainer
        progress = trainer.state.global_step / max(1, trainer.state.max_steps)
        for place, reward in trainer.scheduled_rewards.items():
            trainer.reward_weights[place] = weight = reward.weight_at(progress)
            trainer.step_log.note(f"rewards/{reward.name}/weight", weight)

    def learn(self) -> torch.Tensor:
        """Add the gradient of the collected slices; return their loss.

        Where it is NaN or Inf, no gradient is left, and the optimizer's step moves nothing.
        """
        trainer, learner = self.trainer, self.make_learner()
        device = trainer.accelerator.device
        share = 1 / sum(len(rows) for _, rows in self._window)
        rollouts = {id(rollout): rollout for rollout, _ in self._window}
        for key, rollout in rollouts.items():
            weights = torch.zeros(len(rollout), device=device)  # (B,)
            for other, rows in self._window:
                if id(other) == key:
                    weights[rows] += share
            with trainer.compute_loss_context_manager():
                learner.learn(rollout, weights)
        for parameter in learner.parameters:  # TRL steps with a gradient of 0, not with none
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        for rollout in rollouts.values():
            if rollout.on_policy:
                records = trainer.step_log.note_rollout(rollout, trainer.state.global_step + 1)
                trainer.notify("on_completions", records=records, rollout=rollout)
            rollout.on_policy = False
        loss, step = learner.tally.loss, trainer.state.global_step + 1
        if not self.guard.check(loss, learner.parameters, step, trainer.accelerator.scaler):
            # not the 0 of a norm over no gradients
            trainer.step_log.note("grad_norm", math.nan)
        return torch.tensor(loss, device=device)

    def make_learner(self) -> Learner:
        """Return what runs the passes; the first call sets its token budget by the free memory."""
        if self.learner is not None:
            return self.learner
        trainer, args = self.trainer, self.trainer.args
        if trainer.engine is not None:
            trainer.engine.sleep()  # the budget of a pass is measured without its memory
        level, cap = args.rollout_correction, args.rollout_correction_cap
        budget, overhead = _pass_sizes(args, trainer.model.config.get_text_config())
        self.learner = Learner(
            forward=trainer.policy.forward,
            backward=trainer.accelerator.backward,
            no_grad=trainer.policy.no_grad,
            parameters=[p for p in trainer.model.parameters() if p.requires_grad],
            budget=budget,
            overhead=overhead,
            pad_token_id=trainer._tokenizer.pad_token_id,
            device=trainer.accelerator.device,
            epsilon=(trainer.epsilon_low, trainer.epsilon_high),
            correction=(level, cap) if level else None,
            pad_to_multiple_of=trainer.pad_to_multiple_of,
            may_share=trainer.policy.may_share,
        )
        return self.learner

    def release(self) -> None:
        """Drop the learner and the rollouts."""
        self.learner, self._window, self.trainer._buffered_inputs = None, [], None

    def state_dict(self) -> dict[str, Any]:
        """Return what is kept from step to step, in copies."""
        trainer, slices = self.trainer, self.trainer.args.steps_per_generation
        parts, batch = trainer._buffered_inputs, None
        in_use = trainer._step % (slices * trainer.num_iterations) != 0
        if in_use and parts:
            batch = {"rollout": parts[0][0].state_dict(), "order": [rows for _, rows in parts]}
        return {
            "micro_step": trainer._step,
            "slices": slices,
            "batch": batch,
            "budget": None if self.learner is None else self.learner.budget,
            "at_once": trainer.sampler.pieces.size,
            "skipped": (self.guard.skipped, self.guard.in_a_row),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what ``state_dict`` returned; the batch may be divided into other slices."""
        trainer, slices = self.trainer, self.trainer.args.steps_per_generation
        trainer._step = state["micro_step"] * slices // state.get("slices", slices)
        trainer._buffered_inputs = self.learner = None
        learner = self.make_learner()
        if not trainer.args.tokens_per_micro_batch:
            learner.budget = state["budget"] or learner.budget
        if batch := state["batch"]:
            rollout = Rollout.from_state_dict(batch["rollout"], trainer.accelerator.device)
            order = torch.cat(batch["order"]).split(len(rollout) // slices)
            trainer._buffered_inputs = [(rollout, rows) for rows in order]
        trainer.sampler.pieces.size = state["at_once"]
        self.guard.skipped, self.guard.in_a_row = state["skipped"]


def _pass_sizes(args: LeaveOneOutConfig, config: Any) -> tuple[int, int]:
    """Return the token budget and the overhead of a pass, from the model and the machine."""
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
    return budget, pass_overhead(layers, weights, on_cpu=on_cpu)
