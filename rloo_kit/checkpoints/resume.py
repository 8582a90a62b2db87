"""Resume a training exactly: write and read checkpoints, stop on a signal, save after an error.

A checkpoint (docs/how-to/resume.md) is a folder ``checkpoint-N`` without any pickle. It has these
files:

- ``adapter_model.safetensors`` and ``adapter_config.json``, which PEFT can load too. If the
  reference model is a copy of the adapter, the folder ``ref/`` has the same files for it.
- ``state.json`` and ``state.safetensors``: the state of optimizer, learning rate schedule, random
  generators and callbacks, the generation batch in use, and moving statistics.
- ``trainer_state.json`` of transformers.
- ``manifest.json`` with the checksum of every file.

After every optimizer step, a snapshot of the state is kept in memory. It does not include the
weights and the optimizer state, which do not change before the next optimizer step. If sampling, a
reward, or a forward or backward pass fails before then, the checkpoint of the last finished step is
written from the snapshot and the present weights, and no step is lost.

With TRL's training step (``by_trl``), transformers itself writes and reads the weights, the
optimizer state and the random states of every process. The kit adds ``state.json``,
``state.safetensors`` and the manifest.
"""

import contextlib
import copy
import importlib.metadata
import json
import shutil
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object
from transformers import Trainer, TrainerCallback
from transformers.trainer import SCHEDULER_NAME, TRAINER_STATE_NAME

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
    checkpoint_errors,
    find_checkpoint,
    list_steps,
    prune_checkpoints,
    read_checkpoint,
    seal_checkpoint,
    write_checkpoint,
)
from rloo_kit.checkpoints.weights import read_weights, write_weights
from rloo_kit.config.settings import BY_DEVICE, OWN_FIELDS, on_resume
from rloo_kit.errors import CheckpointError, DiskError, KitError
from rloo_kit.machine.processes import is_cut_off
from rloo_kit.models.adapters import trained_parameters
from rloo_kit.output_folder import LOCKED, lock_folder, make_run_folder
from rloo_kit.rloo.guards import check_finite
from rloo_kit.text.numbers import finite_numbers, mean_or_none
from rloo_kit.text.wording import resume_command

# Settings that must not change when a run resumes, because they affect what is sampled and learned.
# `rows_per_step` is the number of completions in an optimizer step: the product of the settings
# `per_device_train_batch_size` and `gradient_accumulation_steps`, which may change separately
MUST_STAY = sorted([*on_resume("must"), "rows_per_step"])
# Settings that may change. The new value is used from the next step on, and the change is reported
MAY_CHANGE = on_resume("may")
# Those of MAY_CHANGE that determine the learning rate of a step
OF_SCHEDULE = (
    "learning_rate", "lr_scheduler_kwargs", "lr_scheduler_type", "max_steps", "num_train_epochs",
    "warmup_steps",
)  # fmt: skip
# Without held-out scores, the score of a checkpoint is the mean reward of this many last steps
SCORED_STEPS = 4


class ResumableTrainer(Trainer):
    """A ``Trainer`` that resumes exactly from its checkpoints, and saves before a signal ends it.

    After Ctrl-C, SIGTERM or SIGHUP it finishes the step in progress, writes a checkpoint (unless
    ``save_strategy`` is "no") and stops. A subclass saves and loads its own state in
    ``state_dict`` and ``load_state_dict``.
    """

    # attributes for which transformers declares no type, or a type that is too wide
    args: Any
    optimizer: Any
    lr_scheduler: Any
    reward_funcs: Any
    reward_func_names: Any
    stop_reason: str | None = None  # why the training ended before its last step
    resumed_from: Checkpoint | None = None
    # state that was read from the checkpoint; None once the first step has begun
    state_read: dict[str, Any] | None = None
    # True if TRL's training step is used; transformers then saves weights and optimizer
    by_trl = False

    def train(
        self,
        resume_from_checkpoint: str | Path | bool | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> Any:
        """Train, and save the last finished step if training ends early.

        After Ctrl-C, SIGTERM or SIGHUP the optimizer step in progress is finished, a checkpoint is
        written (unless ``save_strategy`` is "no"), and KeyboardInterrupt is raised. At a second
        signal, KeyboardInterrupt is raised at once.

        Args:
            resume_from_checkpoint: The folder of a checkpoint or of a run; True for the run in
                ``output_dir``; None or False to start from step 0.
            trial: As in transformers.
            ignore_keys_for_eval: As in transformers.

        Raises:
            CheckpointError: The checkpoint is missing, broken or from another run.
            ConfigError: Another process trains in ``output_dir``.
            KeyboardInterrupt: A signal stopped the training; the subclass ``Terminated`` if it was
                SIGTERM or SIGHUP.
        """
        self._snapshot = self.state_read = self.stop_reason = None
        self.saved_at = 0  # step of the last checkpoint
        self.resumed_from = checkpoint = self._checkpoint_at(resume_from_checkpoint)
        self._facts = self.facts()
        is_main = self.accelerator.is_main_process
        if checkpoint is not None:
            check_same_run(checkpoint, self._facts)
            self._check_optimizer(checkpoint.folder)
        saves = is_main and self.args.save_strategy != "no"
        lock = _own_folder(Path(self.args.output_dir), checkpoint)
        folder = checkpoint and str(checkpoint.folder)
        self._started = time.monotonic()
        signals = stop_signals(print) if is_main else stop_signals()
        with lock if saves else contextlib.nullcontext(), signals as self._signals:
            self.state_read = checkpoint and read_tree(checkpoint.folder)
            # Last, because it replaces the state that the other callbacks begin with
            self.add_callback(last := _Restore(self))
            try:
                output = super().train(folder, trial, ignore_keys_for_eval)
            except Exception as exc:
                self._save_last_step()
                # Ctrl-C also ends child processes, so the error may be a consequence of the signal
                if self._signals.received is not None and not is_cut_off(exc):
                    raise interrupt_for(self._signals.received) from exc
                raise
            finally:
                self.state_read = None
                self.remove_callback(last)
        # A signal may arrive after the last step, and in one process only; then all of them raise
        if signal := next(filter(None, gather_object([self._signals.received])), None):
            raise interrupt_for(signal)
        return output

    # --- stopping --------------------------------------------------------------------------------

    def stop(self, reason: str) -> None:
        """Let the training end after the present step, and issue a warning with the reason."""
        self.stop_reason = reason
        warnings.warn(f"training stops: {reason}", RuntimeWarning, stacklevel=3)

    def stop_if_asked(self) -> bool:
        """Let transformers' training loop end if it must stop now.

        It must stop after a signal, after ``max_hours``, or if a callback called ``stop``. If one
        process must stop, all of them stop after the same step.

        Returns:
            True if the loop must stop and the last step still has to be saved.
        """
        args = self.args
        hours = (time.monotonic() - self._started) / 3600
        if args.max_hours is not None and hours >= args.max_hours and not self.stop_reason:
            self.stop(f"max_hours {args.max_hours:g} has passed: resume with --resume")
        # Only the gathered values count, because a signal may arrive later in one process alone
        everyone = gather_object([(self._signals.received, self.stop_reason)])
        signal, self.stop_reason = (
            next(filter(None, of_all), None) for of_all in zip(*everyone, strict=True)
        )
        if not (signal or self.stop_reason):
            return False
        if signal and self._signals.received is None:
            # The same signal may still arrive in this process, and must not count as a second one
            self._signals.received_at = time.monotonic()
            self._signals.received = signal
        self.control.should_training_stop = True
        return args.save_strategy != "no" and self.saved_at != self.state.global_step

    # --- the snapshot of the last finished step --------------------------------------------------

    def take_snapshot(self) -> dict[str, Any]:
        """Store and return the state after the present step, without weights and optimizer.

        The caller must have checked that the weights are finite.
        """
        callbacks: dict[str, Any] = {}
        self.notify("on_state", held=callbacks)
        # The state of transformers' loop. A copy, because a later step may be in progress when the
        # snapshot is written
        self._loop = copy.copy(self.state)
        self._loop.log_history = [*self.state.log_history]
        self._snapshot = {
            "loop": {"epoch": self.state.epoch},
            "callbacks": callbacks,
            "rewards": [_state_of(reward) for reward in self.reward_funcs],
            "random": random_states(),
            "trainer": self.state_dict(),
        }
        return self._snapshot

    def invalidate_snapshot(self) -> None:
        """Drop the snapshot, because the optimizer is about to change the weights."""
        self._snapshot = None

    # --- writing ---------------------------------------------------------------------------------

    def _maybe_log_save_evaluate(self, *args: Any, **keywords: Any) -> None:
        """Log and save as transformers does; if ``stop_if_asked`` returns True, save too."""
        self.control.should_save |= self.stop_if_asked()
        super()._maybe_log_save_evaluate(*args, **keywords)
        if self.stop_if_asked():  # again, because a callback may call `stop` when it gets the log
            self._save_checkpoint(self.model, None)
        self.take_snapshot()

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Write a checkpoint for the step that has just ended."""
        if self.by_trl:
            with checkpoint_errors(Path(self.args.output_dir), self.state.global_step):
                super()._save_checkpoint(model, trial)
            self.accelerator.wait_for_everyone()
        else:
            self.store_flos()
            best = self.state.best_global_step
            folder = Path(self.args.output_dir) / f"checkpoint-{best}"
            if best and (best == self.state.global_step or folder.exists()):
                self.state.best_model_checkpoint = str(folder)  # for `load_best_model_at_end`
        self._write_checkpoint(self.take_snapshot())

    def check_weights(self) -> None:
        """Check that the trained weights are finite.

        Raises:
            DivergedError: A weight is NaN or Inf.
        """
        check_finite(self.trained_parameters().values(), self.state.global_step)

    def _save_last_step(self) -> None:
        """Write a checkpoint for the last finished step, after training has failed.

        Nothing is written if that step was saved already, if the weights have changed since, if
        TRL's step is used, or if ``save_strategy`` is "no".
        """
        if self._snapshot is None or self.by_trl or self.args.save_strategy == "no":
            return
        step = self._loop.global_step
        if step == self.saved_at:
            return
        try:
            self._write_checkpoint(self._snapshot)
        except KitError as exc:  # only a warning, because the error of the training is raised
            warnings.warn(f"step {step} was not saved: {exc}", RuntimeWarning, stacklevel=2)

    def _write_checkpoint(self, snapshot: dict[str, Any]) -> None:
        """Write the checkpoint for a snapshot, and remove the checkpoints that are not kept.

        With TRL's step, transformers has written its files already, and only the kit's are added.
        """
        run = Path(self.args.output_dir)
        step = self._loop.global_step
        if self.accelerator.is_main_process:
            self.notify("on_checkpoint")
            callbacks = snapshot["callbacks"]
            score_of = "held_out" if "held_out" in callbacks else "reward"
            facts = self._facts | {"score_of": score_of}
            about = {"facts": facts, "score": self._checkpoint_score(callbacks)}
            if self.by_trl:
                folder = run / f"checkpoint-{step}"
                with checkpoint_errors(run, step):
                    write_tree(folder, snapshot)
                    seal_checkpoint(folder, step, **about)
            else:
                write_checkpoint(run, step, lambda folder: self._fill(folder, snapshot), **about)
            # Later checkpoints are left from before the run was resumed at an earlier step
            for later in list_steps(run):
                if later > step:
                    shutil.rmtree(run / f"checkpoint-{later}", ignore_errors=True)
            best = self.args.load_best_model_at_end and self.state.best_model_checkpoint
            spare = Path(best).name if best else ""
            prune_checkpoints(run, self.args.keep_last, self.args.keep_best, spare)
        self.saved_at = step

    def _fill(self, folder: Path, snapshot: dict[str, Any]) -> None:
        """Write the files of a checkpoint into a folder, if the kit's training step is used."""
        self.check_weights()
        scaler = self.accelerator.scaler
        state = {
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.lr_scheduler.state_dict(),
            "scaler": None if scaler is None else scaler.state_dict(),
        }
        write_weights(self._policy, folder)
        write_tree(folder, snapshot | state)
        self._loop.save_to_json(str(folder / TRAINER_STATE_NAME))

    def _checkpoint_score(self, callbacks: dict[str, Any]) -> float | None:
        """Return the score that ``keep_best`` compares, or None if the checkpoint has no score.

        It is the score of the held-out prompts after this step. If held-out prompts are not scored
        during training, it is the mean reward of the last steps.
        """
        if "held_out" in callbacks:
            return callbacks["held_out"]
        rows = self._loop.log_history[-SCORED_STEPS:]
        return mean_or_none(finite_numbers(row.get("reward") for row in rows))

    # --- reading ---------------------------------------------------------------------------------

    def _checkpoint_at(self, wanted: str | Path | bool | None) -> Checkpoint | None:
        """Return the checkpoint for the argument ``resume_from_checkpoint`` of ``train``.

        Raises:
            CheckpointError: There is no valid checkpoint.
        """
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

    def _check_optimizer(self, folder: Path) -> None:
        """Check that a checkpoint has the states of optimizer and schedule if TRL's step is used.

        Raises:
            CheckpointError: The checkpoint has only the weights.
        """
        has_both = self.is_deepspeed_enabled or (folder / SCHEDULER_NAME).is_file()
        if self.by_trl and not has_both:
            raise CheckpointError(
                f"{folder.name} has no optimizer state, because trainer.save_only_model was true: "
                f"begin a new run that trains its adapter further (model.name: {folder})"
            )

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Store the base learning rates of the present settings; load optimizer and schedule."""
        self._fresh_rates: Any = getattr(self.lr_scheduler, "base_lrs", None)
        super()._load_optimizer_and_scheduler(checkpoint)

    def _get_train_sampler(  # pyright: ignore[reportIncompatibleMethodOverride]  # as TRL's
        self, dataset: Any = None
    ) -> Any:
        """Return the sampler of prompts; if training resumes, draw the orders of finished epochs.

        transformers skips finished epochs without drawing their orders. Here they are drawn, so
        that the order of the present epoch is the same as without the interruption.
        """
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
            # If the checkpoint has the adapter `ref`, transformers loads only this adapter. With
            # FSDP, one file has both adapters
            if Path(resume_from_checkpoint, "ref").is_dir() and not self.is_fsdp_enabled:
                self._policy.load_adapter(resume_from_checkpoint, "default", is_trainable=True)
            return
        read_weights(self._policy, Path(resume_from_checkpoint))

    def restore_checkpoint(self) -> None:
        """Load the state of the checkpoint, except weights and random states.

        It is called before the first step, after ``on_train_begin`` of all other callbacks. If
        there is no checkpoint, it does nothing.

        Raises:
            CheckpointError: The optimizer state in the checkpoint does not fit the optimizer.
        """
        state = self.state_read
        if state is None:
            return
        if self.by_trl:
            self._restore_schedule(None)
        else:
            try:
                self.optimizer.load_state_dict(state.pop("optimizer"))
                self._restore_schedule(state.pop("scheduler"))
            except (ValueError, KeyError, TypeError, AttributeError) as exc:
                raise CheckpointError(
                    f"the optimizer state of the checkpoint does not fit ({exc}): train with the "
                    "optimizer that the run had"
                ) from exc
            if self.accelerator.scaler is not None and state["scaler"]:
                self.accelerator.scaler.load_state_dict(state["scaler"])
        # Intervals for logging and saving follow the present arguments, not the checkpoint
        self.state.compute_steps(self.args, self.state.max_steps)
        self.load_state_dict(state["trainer"])
        for reward, kept in zip(self.reward_funcs, state["rewards"], strict=True):
            if kept is not None:
                _inner(reward).load_state_dict(kept)
        # last, because the recorder then removes what the earlier run wrote about its end
        self.notify("on_resume", held=state["callbacks"])

    def _run_epoch(self, *args: Any, **keywords: Any) -> None:
        """Run the steps of an epoch, unless the training has made all of its steps already.

        Without this method, transformers would make one more step when a finished training resumes.
        """
        if self.state.global_step < self.state.max_steps:
            super()._run_epoch(*args, **keywords)
        else:
            self.control.should_training_stop = True

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Set the random states of the checkpoint.

        transformers calls this method right before the first step, when all else is restored.
        """
        if self.by_trl:
            super()._load_rng_state(checkpoint)
        elif self.state_read is not None:
            set_random_states(self.state_read["random"])
        self.state_read = None

    def _restore_schedule(self, kept: dict[str, Any] | None) -> None:
        """Restore the learning rate schedule; the optimizer must have been restored before.

        If the settings of the schedule have changed since the checkpoint, only the step number of a
        ``LambdaLR`` is restored, and its learning rate follows the new settings. A warning is
        issued if this changes the learning rate. A schedule of any other class gets its whole state
        from the checkpoint.

        Args:
            kept: State of the schedule in the checkpoint; None if transformers has already loaded
                it, with the old learning rate.
        """
        assert self.resumed_from is not None
        then = self.resumed_from.facts["settings"]
        now = self._facts["settings"]
        schedule = self.lr_scheduler
        changed = [name for name in OF_SCHEDULE if name in then and then[name] != now[name]]
        if not changed or not isinstance(schedule, torch.optim.lr_scheduler.LambdaLR):
            if kept is not None:
                schedule.load_state_dict(kept)
            return
        if kept is None:
            schedule.base_lrs = self._fresh_rates
        else:
            schedule.last_epoch = kept["last_epoch"]
        old = float(self.optimizer.param_groups[0]["lr"])
        schedule.last_epoch -= 1
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step")
            schedule.step()
        new = float(schedule.get_last_lr()[0])
        if new != old:
            warnings.warn(
                f"the learning rate is {new:.3g} in the next step, and was {old:.3g} before the "
                f"change of {', '.join(changed)}",
                UserWarning,
                stacklevel=2,
            )

    def facts(self) -> dict[str, Any]:
        """Return facts that identify this run, so that a checkpoint of another run can be refused.

        They are the versions of packages, the number of threads, checksums of the frozen weights
        and of the prompts, the names of the rewards, the kind of training step (the kit's or
        TRL's), the number of processes, and the settings that matter for a resume.
        """
        args = self.args
        settings = json.loads(json.dumps(args.to_dict(), default=str))
        settings["rows_per_step"] = (
            args.per_device_train_batch_size * args.gradient_accumulation_steps
        )
        return {
            "versions": {
                name: importlib.metadata.version(name)
                for name in ("rloo-kit", "torch", "transformers", "trl", "peft")
            },
            "threads": torch.get_num_threads(),
            "model": checksum_of_weights(self._policy),
            "prompts": checksum_of_rows(self.train_dataset),
            "rewards": self.reward_func_names,
            "step": "trl" if self.by_trl else "kit",
            "processes": args.world_size,
            "settings": {name: settings.get(name) for name in sorted({*MUST_STAY, *MAY_CHANGE})},
        }

    # --- what belongs to a step ------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return copies of the state that this trainer keeps from step to step.

        Raises:
            NotImplementedError: The subclass does not define this method.
        """
        raise NotImplementedError

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state that ``state_dict`` returned.

        Raises:
            NotImplementedError: The subclass does not define this method.
        """
        raise NotImplementedError

    def notify(self, event: str, **values: Any) -> None:
        """Call the method ``event`` of every callback that has it.

        The kit has these events:

        - ``on_completions(args, state, control, records, rollout)``: called once for every
          generation batch, when its advantages are final and before its first optimizer step.
          ``records`` is the result of ``completion_records`` with a ``step`` in each record.
        - ``on_findings(args, state, control, findings)``: called when the findings of the doctor
          have changed.
        - ``on_state(args, state, control, held)``: called after every step, and before a checkpoint
          is written. A callback adds to the dict ``held`` the values that the checkpoint must keep.
        - ``on_checkpoint(args, state, control)``: called right before a checkpoint is written.
        - ``on_resume(args, state, control, held)``: called when a training resumes; ``held`` has
          the values from the checkpoint.
        """
        for callback in self.callback_handler.callbacks:
            method = getattr(callback, event, None)
            if method is not None:
                method(self.args, self.state, self.control, **values)

    @property
    def _policy(self) -> Any:
        """The model that is trained, without the wrappers of accelerate."""
        return self.accelerator.unwrap_model(self.model)

    def trained_parameters(self) -> dict[str, torch.nn.Parameter]:
        """Return a dict from the name of each trained parameter to the parameter."""
        return trained_parameters(self._policy)


@dataclass
class Boundary(TrainerCallback):
    """Callback that takes a new snapshot of a ``ResumableTrainer`` after the weights changed."""

    trainer: ResumableTrainer

    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        """Drop the snapshot, because the weights are about to change."""
        self.trainer.invalidate_snapshot()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Check the new weights, and take a snapshot of the state that belongs to them."""
        self.trainer.check_weights()
        self.trainer.take_snapshot()


@contextlib.contextmanager
def _own_folder(run: Path, resumed: Checkpoint | None) -> Iterator[None]:
    """Lock the folder of a training, and move the checkpoints of another training out of it.

    Args:
        run: The folder. It is not locked again if ``runs.train`` has already locked it.
        resumed: As in ``_set_aside``.

    Raises:
        ConfigError: Another process trains in the folder.
    """
    with contextlib.ExitStack() as stack:
        if run.resolve() not in LOCKED:
            with contextlib.suppress(DiskError):  # a disk without locks
                stack.enter_context(lock_folder(run))
        _set_aside(run, resumed)
        yield


def _set_aside(run: Path, resumed: Checkpoint | None) -> None:
    """Move the checkpoints of another training from this folder to a folder of their own.

    Otherwise this training would remove them, or a resume of it could use them by mistake.

    Args:
        run: The folder that this training writes to.
        resumed: The checkpoint that this training resumes from; None if it starts at step 0.
    """
    steps = list_steps(run)
    # A checkpoint in the folder may be a link to another disk, so compare both the folder of the
    # link and the folder of its target
    places = resumed and (resumed.folder.absolute(), resumed.folder.resolve())
    if not steps or (places and any(place.parent.samefile(run) for place in places)):
        return
    kept = make_run_folder(run / "_earlier")
    for step in steps:
        name = f"checkpoint-{step}"
        (run / name).rename(kept / name)
    warnings.warn(
        f"the checkpoints of an earlier training were moved to {str(kept)!r}: to continue that "
        f"training, call train(resume_from_checkpoint={str(kept)!r})",
        stacklevel=6,  # the caller of LeaveOneOutTrainer.train
    )


@dataclass
class _Restore(TrainerCallback):
    """Callback that restores the state of a checkpoint.

    It must be the last callback, because it replaces the fresh state of the others.
    """

    trainer: ResumableTrainer

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """Restore the checkpoint's state."""
        self.trainer.restore_checkpoint()


# --- checks before a resume ----------------------------------------------------------------------


def check_same_run(checkpoint: Checkpoint, now: dict[str, Any]) -> None:
    """Check that a checkpoint belongs to this run, and warn about changes that are allowed.

    Args:
        checkpoint: The checkpoint to resume from.
        now: The facts of this run, as ``ResumableTrainer.facts`` returns them.

    Raises:
        CheckpointError: The model, the prompts, the rewards, the kind of training step, the number
            of processes, or a setting that must stay the same differs.
    """
    name = checkpoint.folder.name
    # a checkpoint of an older version does not have these two facts
    then: dict[str, Any] = {"step": "kit", "processes": now["processes"]} | checkpoint.facts
    # settings that a newer version added get their defaults, which keep the old behaviour
    old = {field.name: field.default for field in OWN_FIELDS} | then["settings"]
    new = now["settings"]
    changed = {
        s: f"trainer.{s} was {old[s]!r} and now is {new[s]!r}"
        for s in MUST_STAY
        if s in old and old[s] != new[s]
    }
    if precision := [changed.pop(s) for s in sorted(BY_DEVICE) if s in changed]:
        raise CheckpointError(
            f"{name} was written in another precision ({', '.join(precision)}): set these settings "
            f"back, and resume on a device that has the old precision, or begin a new run"
        )
    step = then["step"]
    for what, text in (
        ("step", f"trainer.step {step}: set trainer.step={step} and the old number of processes"),
        ("processes", f"another number of processes: start {then['processes']} of them"),
        ("model", "another model: restore the old model.name, model.load_in_4bit and lora"),
        ("prompts", "other prompts: restore the old section data, and the content of its file"),
        ("rewards", "other rewards: restore the old rewards"),
    ):
        if then.get(what) != now[what]:
            raise CheckpointError(f"{name} was written with {text}, or begin a new run")
    if changed:
        run = checkpoint.folder.parent
        own = f" (`{resume_command(run)}` does so if its run.yaml is unchanged)"
        own = own if (run / "run.yaml").is_file() else ""
        raise CheckpointError(
            f"{name} was written with other settings: {', '.join(changed.values())}; set them "
            f"back{own}, or begin a new run"
        )
    notes = [
        f"trainer.{s} is {new[s]!r} from here on, and was {old[s]!r}"
        for s in MAY_CHANGE
        if s in old and old[s] != new[s]
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
    """Return the user's reward inside the kit's wrapper, or ``reward`` if it is not a wrapper."""
    return getattr(reward, "reward", reward)


def _state_of(reward: Any) -> Any:
    """Return the ``state_dict`` of a reward.

    Return None if the reward has no ``load_state_dict`` or is a model, so that nothing is saved.
    """
    inner = _inner(reward)
    if isinstance(inner, torch.nn.Module) or not hasattr(inner, "load_state_dict"):
        return None
    return inner.state_dict()
