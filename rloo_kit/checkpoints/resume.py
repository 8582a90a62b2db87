"""Exact resume of a training: checkpoints, crash recovery, graceful stop.

A checkpoint (docs/how-to/resume.md) is a folder ``checkpoint-N`` without any pickle:

- ``adapter_model.safetensors`` and ``adapter_config.json``, which PEFT loads too (``ref/`` has the
  same of a reference that is a copy of the adapter);
- ``state.json`` and ``state.safetensors``: optimizer, schedule, random states, the generation batch
  in use, moving statistics, the state of callbacks;
- ``trainer_state.json`` of transformers, and ``manifest.json`` with the checksum of every file.

After every optimizer step a snapshot of the small part of that state is kept in memory. Until the
next optimizer step the weights and the optimizer still belong to it. So an error in sampling, in a
reward or in a pass loses no step, because the checkpoint of the last finished step is written then.

If TRL's step trains (``by_trl``), transformers writes and reads weights, optimizer and random
states in its own way, on every process. The kit then adds its ``state.json`` and the manifest.
"""

import copy
import importlib.metadata
import json
import shutil
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainerCallback, TrainerState, TrainingArguments
from transformers.trainer import TRAINER_STATE_NAME

from rloo_kit.checkpoints.state import (
    checksum_of_rows,
    checksum_of_weights,
    random_states,
    read_tree,
    set_random_states,
    write_tree,
)
from rloo_kit.checkpoints.stopping import interrupt_for, stop_signals
from rloo_kit.checkpoints.store import (
    Checkpoint,
    find_checkpoint,
    list_steps,
    prune_checkpoints,
    read_checkpoint,
    seal_checkpoint,
    write_checkpoint,
)
from rloo_kit.checkpoints.weights import read_weights, write_weights
from rloo_kit.config.settings import OWN_FIELDS, on_resume
from rloo_kit.errors import CheckpointError, KitError
from rloo_kit.machine.processes import is_cut_off
from rloo_kit.models.adapters import trained_parameters
from rloo_kit.rloo.guards import check_finite
from rloo_kit.text.numbers import finite_numbers, mean_or_none
from rloo_kit.types import Model

# Settings that decide what is sampled and learned: another value would be another run.
# `rows_per_step` is what an optimizer step learns from: how it is divided into
# `per_device_train_batch_size` and `gradient_accumulation_steps` may change.
MUST_STAY = sorted([*on_resume("must"), "rows_per_step"])
# Settings whose new value is used from the next step on, and reported
MAY_CHANGE = on_resume("may")
# Settings among those that determine the learning rate of a step
OF_SCHEDULE = (
    "learning_rate", "lr_scheduler_type", "max_steps", "num_train_epochs", "warmup_steps",
)  # fmt: skip
# Number of last steps whose mean reward is the checkpoint's score if no held-out prompts are scored
SCORED_STEPS = 4


class ResumableTrainer(Trainer):
    """A trainer of transformers that writes exact checkpoints, resumes, and stops gracefully.

    A subclass adds its own state to ``state_dict`` and ``load_state_dict``.
    """

    # transformers types these too widely, or not at all
    args: Any
    optimizer: Any
    lr_scheduler: Any
    reward_funcs: Any
    reward_func_names: Any
    stop_reason: str | None = None  # why the training ended before its last step
    resumed_from: Checkpoint | None = None
    state_read: dict[str, Any] | None = None  # a checkpoint's, until the first step
    saved_at = 0  # step of the last checkpoint
    # True if TRL's step trains; transformers then saves weights and optimizer
    by_trl = False
    _snapshot: dict[str, Any] | None = None
    _loop: TrainerState  # as it was at the snapshot
    _facts: dict[str, Any]  # identify the run

    def train(
        self,
        resume_from_checkpoint: str | Path | bool | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> Any:
        """Train, and lose no finished step.

        After Ctrl-C or SIGTERM the optimizer step in progress ends, a checkpoint is written, and
        KeyboardInterrupt is raised. A second signal raises it at once.

        Args:
            resume_from_checkpoint: A checkpoint, the folder of a run, or True for ``output_dir``.
            trial: As in transformers.
            ignore_keys_for_eval: As in transformers.

        Raises:
            CheckpointError: The checkpoint is missing, broken or from another run.
            KeyboardInterrupt: A signal stopped the training; Terminated if it was SIGTERM.
        """
        self._snapshot = self.state_read = self.stop_reason = None
        self.saved_at = 0
        self.resumed_from = self._checkpoint_at(resume_from_checkpoint)
        self._facts = facts_of(
            self.args,
            self.accelerator.unwrap_model(self.model),
            self.train_dataset,
            self.reward_func_names,
        ) | {"step": "trl" if self.by_trl else "kit"}
        folder = None
        if self.resumed_from is not None:
            check_same_run(self.resumed_from, self._facts)
            self.state_read = read_tree(self.resumed_from.folder)
            folder = str(self.resumed_from.folder)
        # After the callbacks whose state it restores
        self.add_callback(last := _Restore(self))
        self._started = time.monotonic()
        with stop_signals(say=print) as self._signals:
            try:
                output = super().train(folder, trial, ignore_keys_for_eval)
            except Exception as exc:
                self._save_last_step()
                # Ctrl-C reaches child processes too, so the error is only its consequence
                if self._signals.received is not None and not is_cut_off(exc):
                    raise interrupt_for(self._signals.received) from exc
                raise
            finally:
                self.state_read = None
                self.remove_callback(last)
        if self._signals.received is not None:  # perhaps after the last step
            raise interrupt_for(self._signals.received)
        return output

    # --- stopping --------------------------------------------------------------------------------

    def stop(self, reason: str) -> None:
        """End the training after this step, and say why."""
        self.stop_reason = reason
        warnings.warn(f"training stops: {reason}", RuntimeWarning, stacklevel=3)

    def stop_if_asked(self) -> bool:
        """End transformers' loop if a signal, the clock or a callback asks for it.

        Returns:
            True if the last step must still be saved.
        """
        args = self.args
        hours = (time.monotonic() - self._started) / 3600
        if args.max_hours is not None and hours >= args.max_hours and not self.stop_reason:
            self.stop(f"max_hours {args.max_hours:g} has passed: resume with --resume")
        self._tell_other_processes()
        if not self.stop_reason and self._signals.received is None:
            return False
        self.control.should_training_stop = True
        return args.save_strategy != "no" and self.saved_at != self.state.global_step

    def _tell_other_processes(self) -> None:
        """Make all processes stop after the same step if one of them must stop."""
        if self.accelerator.num_processes == 1:
            return
        mine = [self._signals.received or 0, bool(self.stop_reason)]
        everyone: Any = self.accelerator.gather(torch.tensor(mine, device=self.accelerator.device))
        signal, is_stopped = everyone.view(-1, 2).amax(0).tolist()
        self._signals.received = self._signals.received or signal or None
        if is_stopped and not self.stop_reason:
            self.stop_reason = "another process of this training was stopped"

    # --- the snapshot of the last finished step --------------------------------------------------

    def take_snapshot(self) -> dict[str, Any]:
        """Keep the state of the step that has just ended, without weights and optimizer; return it.

        It is called only if the weights are finite.
        """
        callbacks: dict[str, Any] = {}
        self.notify("on_state", held=callbacks)
        # A later step may be in progress when it is written
        self._loop = copy.copy(self.state)
        self._loop.log_history = [*self.state.log_history]
        self._snapshot = {
            "loop": {"epoch": self.state.epoch},
            "callbacks": callbacks,
            "rewards": [_state_of(reward) for reward in self.reward_funcs],
            "random": random_states(),
            **self.state_dict(),
        }
        return self._snapshot

    def invalidate_snapshot(self) -> None:
        """Drop the snapshot; called right before the optimizer changes the weights."""
        self._snapshot = None

    # --- writing ---------------------------------------------------------------------------------

    def _maybe_log_save_evaluate(self, *args: Any, **keywords: Any) -> None:
        self.control.should_save |= self.stop_if_asked()
        super()._maybe_log_save_evaluate(*args, **keywords)
        if self.stop_if_asked():  # a callback may stop the training because of the log
            self._save_checkpoint(self.model, None)
        self.take_snapshot()

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Write a checkpoint of the step that has just ended."""
        if self.by_trl:
            super()._save_checkpoint(model, trial)
            self.accelerator.wait_for_everyone()
        else:
            self.store_flos()
            self._note_best()
        self._write_checkpoint(self.take_snapshot())

    def _note_best(self) -> None:
        """Name the checkpoint of the best step for ``load_best_model_at_end``."""
        best = self.state.best_global_step
        folder = Path(self.args.output_dir) / f"checkpoint-{best}"
        if best and (best == self.state.global_step or folder.exists()):
            self.state.best_model_checkpoint = str(folder)

    def check_weights(self) -> None:
        """Check the trained weights.

        Raises:
            DivergedError: A weight holds NaN or Inf.
        """
        check_finite(self.trained_parameters().values(), self.state.global_step)

    def _save_last_step(self) -> None:
        """After an error, save the last finished step."""
        if self._snapshot is None or self.by_trl or self.args.save_strategy == "no":
            return
        step = self._loop.global_step
        if step == self.saved_at:
            return
        try:
            self._write_checkpoint(self._snapshot)
        except KitError as exc:  # the first error is the one to raise
            warnings.warn(f"step {step} was not saved: {exc}", RuntimeWarning, stacklevel=2)

    def _write_checkpoint(self, snapshot: dict[str, Any]) -> None:
        """Write the checkpoint of a snapshot; if TRL's step trains, only the kit's part of it."""
        run = Path(self.args.output_dir)
        step = self._loop.global_step
        if self.accelerator.is_main_process:
            self.notify("on_checkpoint")
            about = {"facts": self._facts, "score": self._checkpoint_score(snapshot["callbacks"])}
            if self.by_trl:
                write_tree(run / f"checkpoint-{step}", snapshot)
                seal_checkpoint(run / f"checkpoint-{step}", step, **about)
            else:
                write_checkpoint(run, step, lambda folder: self._fill(folder, snapshot), **about)
            self._remove_others(run, step)
        self.saved_at = step

    def _fill(self, folder: Path, snapshot: dict[str, Any]) -> None:
        """Write the files of a checkpoint of the kit's step."""
        self.check_weights()
        scaler = getattr(self.accelerator, "scaler", None)
        state = {
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.lr_scheduler.state_dict(),
            "scaler": None if scaler is None else scaler.state_dict(),
        }
        policy: Any = self.accelerator.unwrap_model(self.model)
        write_weights(policy, folder)
        write_tree(folder, snapshot | state)
        self._loop.save_to_json(str(folder / TRAINER_STATE_NAME))

    def _remove_others(self, run: Path, step: int) -> None:
        """Remove the checkpoints that are not kept."""
        # Later checkpoints belong to an abandoned branch of this run, left by a resume
        for later in list_steps(run):
            if later > step:
                shutil.rmtree(run / f"checkpoint-{later}", ignore_errors=True)
        best = (self.args.load_best_model_at_end and self.state.best_model_checkpoint) or ""
        prune_checkpoints(run, self.args.keep_last, self.args.keep_best, spare=Path(best).name)

    def _checkpoint_score(self, callbacks: dict[str, Any]) -> float | None:
        """Return the score that ``keep_best`` compares: of held-out prompts, or the mean reward."""
        if "held_out" in callbacks:
            return callbacks["held_out"]
        rows = self._loop.log_history[-SCORED_STEPS:]
        rewards = finite_numbers(row.get("reward") for row in rows)
        return mean_or_none(rewards)

    # --- reading ---------------------------------------------------------------------------------

    def _checkpoint_at(self, wanted: str | Path | bool | None) -> Checkpoint | None:
        if not wanted:
            return None
        place = Path(self.args.output_dir if wanted is True else wanted)
        if place.name.startswith("checkpoint-") or (place / TRAINER_STATE_NAME).exists():
            return read_checkpoint(place)
        found = find_checkpoint(place)
        if found is None:
            raise CheckpointError(
                f"{str(place)!r} has no valid checkpoint: leave resume_from_checkpoint out to "
                f"start from scratch"
            )
        return found

    def _get_train_sampler(  # pyright: ignore[reportIncompatibleMethodOverride]  # as TRL's
        self, dataset: Any = None
    ) -> Any:
        """Draw the orders of finished epochs, because transformers skips them without drawing."""
        sampler: Any = super()._get_train_sampler(dataset)
        if self.state_read is not None and getattr(sampler, "shuffle", False):
            for _ in range(int(self.state_read["loop"]["epoch"] or 0)):
                torch.randperm(sampler.num_samples, generator=sampler.generator)
        return sampler

    def _load_from_checkpoint(
        self, resume_from_checkpoint: str, model: torch.nn.Module | None = None
    ) -> None:
        """Load the checkpoint's weights into the model."""
        if self.by_trl:
            super()._load_from_checkpoint(resume_from_checkpoint, model)
            return
        assert self.resumed_from is not None
        policy: Any = self.accelerator.unwrap_model(self.model)
        read_weights(policy, self.resumed_from.folder)

    def restore_checkpoint(self) -> None:
        """Load the checkpoint's state, apart from weights and random states, before the first step.

        It is called when every callback has begun. Without a checkpoint it does nothing.

        Raises:
            CheckpointError: The checkpoint has the state of another optimizer.
        """
        state = self.state_read
        if state is None or self.resumed_from is None:
            return
        if not self.by_trl:
            self._restore_optimizer(state, self.resumed_from.folder.name)
        # The steps that today's arguments ask for, not the checkpoint's
        self.state.compute_steps(self.args, self.state.max_steps)
        self.notify("on_resume", held=state["callbacks"])
        self.load_state_dict(state)
        for reward, kept in zip(self.reward_funcs, state["rewards"], strict=True):
            if kept is not None:
                _inner(reward).load_state_dict(kept)

    def _restore_optimizer(self, state: dict[str, Any], name: str) -> None:
        """Load optimizer, schedule and scaler of the checkpoint of that name."""
        try:
            self.optimizer.load_state_dict(state.pop("optimizer"))
            self._restore_schedule(state.pop("scheduler"))
        except (ValueError, KeyError, TypeError, AttributeError) as exc:
            raise CheckpointError(
                f"the optimizer of {name} does not fit this one ({exc}): put trainer.optim back "
                f"to what it was"
            ) from exc
        scaler = getattr(self.accelerator, "scaler", None)
        if scaler is not None and state["scaler"]:
            scaler.load_state_dict(state["scaler"])

    def _run_epoch(self, *args: Any, **keywords: Any) -> None:
        """Run the steps of an epoch; transformers would run one more after the last step."""
        if self.state.global_step < self.state.max_steps:
            super()._run_epoch(*args, **keywords)
        else:
            self.control.should_training_stop = True

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Set the random states; transformers calls this last, right before the first step."""
        if self.by_trl:
            super()._load_rng_state(checkpoint)
            self.state_read = None
        elif self.state_read is not None:
            set_random_states(self.state_read["random"])
            self.state_read = None

    def _restore_schedule(self, kept: dict[str, Any]) -> None:
        """Load the schedule; if the settings ask for another one, advance that to this step."""
        assert self.resumed_from is not None
        then = self.resumed_from.facts["settings"]
        now = self._facts["settings"]
        schedule = self.lr_scheduler
        is_same = all(then.get(name) == now[name] for name in OF_SCHEDULE)
        if is_same or not isinstance(schedule, torch.optim.lr_scheduler.LambdaLR):
            schedule.load_state_dict(kept)
            return
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step")
            for _ in range(kept["last_epoch"]):
                schedule.step()

    # --- what belongs to a step ------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return copies of the state that this trainer keeps from step to step."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state that ``state_dict`` returned."""

    def notify(self, event: str, **values: Any) -> None:
        """Call the callbacks that have a method for one of the kit's events.

        - ``on_completions(args, state, control, records, rollout)``: once for every generation
          batch of training, when its advantages are final and before its first optimizer step.
          ``records`` are those of ``completion_records``, each with its ``step``.
        - ``on_findings(args, state, control, findings)``: when the findings of the doctor change.
        - ``on_state(args, state, control, held)``: after every step, and before a checkpoint. A
          callback puts into ``held`` the values that the checkpoint must keep.
        - ``on_checkpoint(args, state, control)``: right before a checkpoint is written.
        - ``on_resume(args, state, control, held)``: when a training resumes, with the saved values.
        """
        for callback in self.callback_handler.callbacks:
            method = getattr(callback, event, None)
            if method is not None:
                method(self.args, self.state, self.control, **values)

    def trained_parameters(self) -> dict[str, torch.nn.Parameter]:
        """Return the trained parameters, by name."""
        policy: Any = self.accelerator.unwrap_model(self.model)
        return trained_parameters(policy)


class Boundary(TrainerCallback):
    """Callback that keeps the snapshot of a ``ResumableTrainer`` in step with its weights."""

    def __init__(self, trainer: ResumableTrainer) -> None:
        self._trainer = trainer

    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        """Drop the snapshot: the weights are about to change."""
        self._trainer.invalidate_snapshot()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Check the new weights, and keep the state that belongs to them."""
        self._trainer.check_weights()
        self._trainer.take_snapshot()


class _Restore(TrainerCallback):
    """Last of all callbacks, which replaces the fresh state of the others by the checkpoint's."""

    def __init__(self, trainer: ResumableTrainer) -> None:
        self._trainer = trainer

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """Restore the checkpoint's state."""
        self._trainer.restore_checkpoint()


# --- which run -----------------------------------------------------------------------------------


def facts_of(
    args: TrainingArguments, model: Model, prompts: Any, rewards: list[str]
) -> dict[str, Any]:
    """Return the facts that identify a run: versions, model, prompts, reward names, settings."""
    settings = json.loads(json.dumps(args.to_dict(), default=str))
    settings["rows_per_step"] = args.per_device_train_batch_size * args.gradient_accumulation_steps
    return {
        "versions": {
            name: importlib.metadata.version(name)
            for name in ("rloo-kit", "torch", "transformers", "trl", "peft")
        },
        "threads": torch.get_num_threads(),
        "model": checksum_of_weights(model),
        "prompts": checksum_of_rows(prompts),
        "rewards": list(rewards),
        "settings": {name: settings.get(name) for name in sorted({*MUST_STAY, *MAY_CHANGE})},
    }


def check_same_run(checkpoint: Checkpoint, now: dict[str, Any]) -> None:
    """Reject a checkpoint of another run; warn about changes that are allowed.

    Args:
        checkpoint: The checkpoint to resume from.
        now: The facts of this run, as ``facts_of`` returns them.

    Raises:
        CheckpointError: The model, prompts, rewards or a setting that must stay the same differ.
    """
    name = checkpoint.folder.name
    then = checkpoint.facts
    if (step := then.get("step", "kit")) != now.get("step", "kit"):
        raise CheckpointError(
            f"{name} was written by the other training step: set trainer.step to {step}, and start "
            f"as many processes as before, or begin a new run"
        )
    for what, text in (
        ("model", "another model: put model.name, model.load_in_4bit and lora"),
        ("prompts", "other prompts: put data, or the file that it names,"),
        ("rewards", "other rewards: put rewards"),
    ):
        if then.get(what) != now[what]:
            raise CheckpointError(
                f"{name} was written with {text} back to what was there, or begin a new run"
            )
    # a setting that the version of the checkpoint did not have has its default
    old = {field.name: field.default for field in OWN_FIELDS} | then["settings"]
    new = now["settings"]
    changed = ", ".join(
        f"trainer.{s} was {old[s]!r} and is {new[s]!r}"
        for s in MUST_STAY
        if s in old and old[s] != new[s]
    )
    if changed:
        run = checkpoint.folder.parent
        own = f" (rloo-kit train {run} --resume has them)" if (run / "run.yaml").is_file() else ""
        raise CheckpointError(
            f"{name} was written with other settings: {changed}; put them back{own}, or begin a "
            f"new run"
        )
    notes = [
        f"trainer.{s} is {new[s]!r} from here on, and was {old.get(s)!r}"
        for s in MAY_CHANGE
        if old.get(s) != new[s]
    ]
    if any(then.get(what) != now[what] for what in ("versions", "threads")):
        notes.append(
            f"{name} was written with other versions, or another number of threads: the run "
            f"resumes, but not bit for bit"
        )
    for note in notes:
        warnings.warn(note, UserWarning, stacklevel=4)


# --- rewards --------------------------------------------------------------------------------------


def _inner(reward: Any) -> Any:
    return getattr(reward, "reward", reward)


def _state_of(reward: Any) -> Any:
    """Return a reward's ``state_dict``; None if it has no ``load_state_dict`` or is a model."""
    inner = _inner(reward)
    if isinstance(inner, torch.nn.Module) or not hasattr(inner, "load_state_dict"):
        return None
    return inner.state_dict()
