"""Exact resume of a training: checkpoints, crash recovery, graceful stop.

A checkpoint (docs/how-to/resume.md) is a folder ``checkpoint-N`` without any pickle:

- ``adapter_model.safetensors`` and ``adapter_config.json``, which PEFT loads too (``ref/`` has the
  same of a reference that is a copy of the adapter);
- ``state.json`` and ``state.safetensors``: optimizer, schedule, random states, the generation batch
  in use, moving statistics, the state of callbacks;
- ``trainer_state.json`` of transformers, and ``manifest.json`` with the checksum of every file.

After every optimizer step a snapshot of the small part of that state is kept in memory. Until the
next optimizer step the weights and the optimizer still belong to it. So an error in sampling, in a
reward or in a pass loses nothing: the checkpoint of the last finished step is written then.
"""

import copy
import importlib.metadata
import json
import math
import shutil
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback
from transformers.trainer import TRAINER_STATE_NAME

from rloo_kit.checkpoints.stopping import StopSignals, interrupt_for
from rloo_kit.checkpoints.store import (
    Checkpoint,
    checksum_of_rows,
    checksum_of_weights,
    find_checkpoint,
    list_steps,
    prune_checkpoints,
    random_states,
    read_checkpoint,
    read_tree,
    set_random_states,
    write_checkpoint,
    write_tree,
)
from rloo_kit.config.settings import OWN_FIELDS, on_resume
from rloo_kit.errors import CheckpointError, KitError
from rloo_kit.rloo.guards import check_finite
from rloo_kit.text.numbers import finite_numbers
from rloo_kit.types import Model

# Settings that decide what is sampled and learned: another value would be another run.
# `rows_per_step` is what an optimizer step learns from: how it is divided into
# `per_device_train_batch_size` and `gradient_accumulation_steps` may change.
MUST_STAY = sorted([*on_resume("must"), "rows_per_step"])
# Settings whose new value is used from the next step on, and reported
MAY_CHANGE = on_resume("may")
# Of those, the ones that make the learning rate of a step
OF_SCHEDULE = (
    "learning_rate", "lr_scheduler_type", "max_steps", "num_train_epochs", "warmup_steps",
)  # fmt: skip
# Fields of transformers' state that change within a step
LOOP_FIELDS = ("epoch", "global_step", "num_input_tokens_seen", "total_flos")
# Steps whose mean reward is the score of a checkpoint without held-out prompts
SCORED_STEPS = 4
WEIGHTS, ADAPTER = "model.safetensors", "adapter_model.safetensors"


class NothingLeftError(Exception):
    """The checkpoint has all steps of the run; transformers would make one more."""


class ExactResume:
    """Writes checkpoints of a trainer, resumes from them, and stops it gracefully.

    The trainer's hooks call its methods; ``run`` is around a whole training. Of the trainer it
    needs, besides what transformers' has: ``state_dict`` and ``load_state_dict`` (of its own state,
    in copies), ``trained_parameters``, and ``notify``, which calls the callbacks.
    """

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self.stop_reason: str | None = None
        self.resumed_from: Checkpoint | None = None
        self.state_read: dict[str, Any] | None = None  # a checkpoint's, until the first step
        self._snapshot: dict[str, Any] | None = None
        self._facts: dict[str, Any] = {}
        self.saved_at = -1  # step of the last checkpoint
        self._signals: StopSignals | None = None
        self._started = 0.0

    def run(self, train: Callable[[str | None], Any], resume_from: str | Path | bool | None) -> Any:
        """Train, and lose no finished step.

        Ctrl-C and SIGTERM stop after the optimizer step in progress: a checkpoint is written, and
        KeyboardInterrupt is raised. A second one is raised at once.

        Args:
            train: Trains, from scratch (None) or from the folder of a checkpoint.
            resume_from: A checkpoint, the folder of a run, or True for ``output_dir``.

        Raises:
            CheckpointError: There is none, it is broken, or of another run.
        """
        trainer = self.trainer
        self._snapshot = self.state_read = self.stop_reason = None
        self.saved_at = -1
        self.resumed_from = self._checkpoint_at(resume_from)
        self._facts = facts_of(trainer)
        folder, last = None, None
        if self.resumed_from is not None:
            check_same_run(self.resumed_from, self._facts)
            self.state_read = read_tree(self.resumed_from.folder)
            folder, last = str(self.resumed_from.folder), _Restore(self)
            # After the callbacks whose state it restores
            trainer.add_callback(last)
        self._started = time.monotonic()
        with StopSignals(say=print) as self._signals:
            try:
                output = train(folder)
            except Exception as exc:
                self._save_after(exc)
                raise
            finally:
                self.state_read = None
                if last is not None:
                    trainer.remove_callback(last)
        # It may have come after the last step
        if self._received is not None:
            raise interrupt_for(self._received)
        return output

    # --- stopping --------------------------------------------------------------------------------

    def stop(self, reason: str) -> None:
        """End the training after this step, and say why."""
        self.stop_reason = reason
        warnings.warn(f"training stops: {reason}", RuntimeWarning, stacklevel=3)

    def stop_if_asked(self) -> bool:
        """Let transformers' loop end where a signal, the clock or a callback asks for it.

        Returns:
            Whether the last step is still to be saved.
        """
        args, control = self.trainer.args, self.trainer.control
        hours = (time.monotonic() - self._started) / 3600
        if args.max_hours is not None and hours >= args.max_hours and not self.stop_reason:
            self.stop(f"max_hours {args.max_hours:g} is over: resume with --resume")
        if not self.stop_reason and self._received is None:
            return False
        control.should_training_stop = True
        return args.save_strategy != "no" and self.saved_at != self.trainer.state.global_step

    @property
    def _received(self) -> int | None:
        """The signal that asked to stop."""
        return None if self._signals is None else self._signals.received

    # --- the snapshot of the last finished step --------------------------------------------------

    def take_snapshot(self) -> None:
        """Keep the small state in memory: called when a step is done and its weights are good."""
        trainer, callbacks = self.trainer, {}
        trainer.notify("on_state", held=callbacks)
        self._snapshot = {
            "step": trainer.state.global_step,
            "loop": {name: getattr(trainer.state, name) for name in LOOP_FIELDS},
            "rows": len(trainer.state.log_history),
            "callbacks": callbacks,
            "rewards": [_state_of(reward) for reward in trainer.reward_funcs],
            "random": random_states(),
            **trainer.state_dict(),
        }

    def invalidate_snapshot(self) -> None:
        """Forget the snapshot: called right before the optimizer changes the weights."""
        self._snapshot = None

    # --- writing ---------------------------------------------------------------------------------

    def save_now(self) -> None:
        """Write the checkpoint of the step that has just ended: transformers asks for it."""
        self.take_snapshot()
        self._write(Path(self.trainer.args.output_dir))

    def check_weights(self) -> None:
        """Raise DivergedError where trained weights hold NaN or Inf."""
        check_finite(self.trainer.trained_parameters().values(), self.trainer.state.global_step)

    def _save_after(self, exc: Exception) -> None:
        """After an error, save the last finished step; raise what should be raised instead."""
        args, step = self.trainer.args, self._snapshot["step"] if self._snapshot else 0
        run = Path(args.output_dir)
        if step and args.save_strategy != "no" and not (run / f"checkpoint-{step}").exists():
            try:
                self._write(run)
            except KitError as other:  # the first error is the one to raise
                warnings.warn(f"step {step} was not saved: {other}", RuntimeWarning, stacklevel=2)
        # Ctrl-C reaches child processes too, so the error is only its consequence
        if self._received is not None:
            raise interrupt_for(self._received) from exc

    def _write(self, run: Path) -> Checkpoint:
        trainer, snapshot = self.trainer, self._snapshot
        assert snapshot is not None
        self.check_weights()
        scaler = getattr(trainer.accelerator, "scaler", None)
        state = snapshot | {
            "optimizer": trainer.optimizer.state_dict(),
            "scheduler": trainer.lr_scheduler.state_dict(),
            "scaler": None if scaler is None else scaler.state_dict(),
        }
        # A later step may be in progress, so its rows and counters are left out
        loop = copy.copy(trainer.state)
        loop.log_history = loop.log_history[: snapshot["rows"]]
        for name, value in snapshot["loop"].items():
            setattr(loop, name, value)

        def fill(folder: Path) -> None:
            write_weights(trainer, folder)
            write_tree(folder, state)
            loop.save_to_json(str(folder / TRAINER_STATE_NAME))

        trainer.notify("on_checkpoint")
        score = self._score(snapshot["callbacks"])
        checkpoint = write_checkpoint(run, snapshot["step"], fill, facts=self._facts, score=score)
        # Later checkpoints are of another future of this run, left by a resume
        for later in list_steps(run):
            if later > checkpoint.step:
                shutil.rmtree(run / f"checkpoint-{later}", ignore_errors=True)
        prune_checkpoints(run, trainer.args.keep_last, trainer.args.keep_best)
        return checkpoint

    def _score(self, callbacks: dict[str, Any]) -> float | None:
        """Return what ``keep_best`` compares: held-out prompts where they are scored on the way."""
        if "held_out" in callbacks:
            return callbacks["held_out"]
        rows = self.trainer.state.log_history[-SCORED_STEPS:]
        rewards = finite_numbers(row.get("reward") for row in rows)
        return sum(rewards) / len(rewards) if rewards else None

    # --- reading ---------------------------------------------------------------------------------

    def _checkpoint_at(self, wanted: str | Path | bool | None) -> Checkpoint | None:
        if wanted is None or wanted is False:
            return None
        place = Path(self.trainer.args.output_dir if wanted is True else wanted)
        if place.name.startswith("checkpoint-") or (place / TRAINER_STATE_NAME).exists():
            return read_checkpoint(place)
        found = find_checkpoint(place)
        if found is None:
            raise CheckpointError(
                f"{str(place)!r} has no valid checkpoint: leave resume_from_checkpoint out to "
                f"start from scratch"
            )
        return found

    def skip_finished_epochs(self, sampler: Any) -> None:
        """Draw the orders of finished epochs: transformers skips these without drawing them."""
        if self.state_read is None or not getattr(sampler, "shuffle", False):
            return
        for _ in range(int(self.state_read["loop"]["epoch"] or 0)):
            torch.randperm(sampler.num_samples, generator=sampler.generator)

    def load_weights(self) -> None:
        """Load the checkpoint's weights into the model."""
        assert self.resumed_from is not None
        read_weights(self.trainer, self.resumed_from.folder)

    def restore(self) -> None:
        """Load all the rest of the checkpoint: when callbacks have begun, before the first step.

        Raises:
            CheckpointError: The optimizer is another one.
            NothingLeftError: The run has all its steps.
        """
        trainer, state = self.trainer, self.state_read
        if state is None:
            return
        assert self.resumed_from is not None
        try:
            trainer.optimizer.load_state_dict(state.pop("optimizer"))
            self._restore_schedule(state.pop("scheduler"))
        except (ValueError, KeyError, TypeError, AttributeError) as exc:
            raise CheckpointError(
                f"the optimizer of {self.resumed_from.folder.name} does not fit this one ({exc}): "
                f"put trainer.optim back to what it was"
            ) from exc
        scaler = getattr(trainer.accelerator, "scaler", None)
        if scaler is not None and state["scaler"]:
            scaler.load_state_dict(state["scaler"])
        # The steps that today's arguments ask for, not the checkpoint's
        trainer.state.compute_steps(trainer.args, trainer.state.max_steps)
        trainer.notify("on_resume", held=state["callbacks"])
        trainer.load_state_dict(state)
        for reward, kept in zip(trainer.reward_funcs, state["rewards"], strict=True):
            if kept is not None:
                _inner(reward).load_state_dict(kept)
        self.restore_random_states()
        if trainer.state.global_step >= trainer.state.max_steps:
            raise NothingLeftError

    def restore_random_states(self) -> None:
        """Set the random states: transformers calls this last, right before the first step."""
        if self.state_read is not None:
            set_random_states(self.state_read["random"])

    def _restore_schedule(self, kept: dict[str, Any]) -> None:
        """Load the schedule; where the run file asks for another one, move that to this step."""
        assert self.resumed_from is not None
        then, now = self.resumed_from.facts["settings"], self._facts["settings"]
        schedule = self.trainer.lr_scheduler
        is_same = all(then.get(name) == now[name] for name in OF_SCHEDULE)
        if is_same or not isinstance(schedule, torch.optim.lr_scheduler.LambdaLR):
            schedule.load_state_dict(kept)
            return
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step")
            for _ in range(kept["last_epoch"]):
                schedule.step()


class Boundary(TrainerCallback):
    """Tells ``ExactResume`` when a step ends, and when the next one changes the weights."""

    def __init__(self, resume: ExactResume) -> None:
        self._resume = resume

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """Drop the checkpoint's state, which is restored."""
        self._resume.state_read = None

    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        """Weights are about to change."""
        self._resume.invalidate_snapshot()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Keep what belongs to the new weights."""
        self._resume.check_weights()
        self._resume.take_snapshot()


class _Restore(TrainerCallback):
    """The last of all callbacks: what they have begun is replaced by what the checkpoint holds."""

    def __init__(self, resume: ExactResume) -> None:
        self._resume = resume

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """Restore the checkpoint's state."""
        self._resume.restore()


# --- which run -----------------------------------------------------------------------------------


def facts_of(trainer: Any) -> dict[str, Any]:
    """Return what identifies a run: versions, model, prompts, rewards and settings."""
    args = json.loads(json.dumps(trainer.args.to_dict(), default=str))
    args["rows_per_step"] = _rows_per_step(args)
    return {
        "versions": {
            name: importlib.metadata.version(name)
            for name in ("rloo-kit", "torch", "transformers", "trl", "peft")
        },
        "threads": torch.get_num_threads(),
        "model": checksum_of_weights(trainer.accelerator.unwrap_model(trainer.model)),
        "prompts": checksum_of_rows(trainer.train_dataset),
        "rewards": list(trainer.reward_func_names),
        "settings": {name: args.get(name) for name in sorted({*MUST_STAY, *MAY_CHANGE})},
    }


def check_same_run(checkpoint: Checkpoint, now: dict[str, Any]) -> None:
    """Refuse a checkpoint of another run; warn of what has changed where it may.

    Raises:
        CheckpointError: Model, prompts, rewards or a setting that must stay differ.
    """
    name, then = checkpoint.folder.name, checkpoint.facts
    for what, text in (
        ("model", "another model: put model.name, model.load_in_4bit and lora"),
        ("prompts", "other prompts: put data, or the file that it names,"),
        ("rewards", "other rewards: put rewards"),
    ):
        if then.get(what) != now[what]:
            raise CheckpointError(
                f"{name} was written with {text} back to what was there, or begin a new run"
            )
    old, new = then.get("settings", {}), now["settings"]
    old.setdefault("rows_per_step", _rows_per_step(old))
    for field in OWN_FIELDS:  # a setting that the version of the checkpoint did not have
        old.setdefault(field.name, field.default)
    changed = ", ".join(
        f"trainer.{s} was {old.get(s)!r} and is {new[s]!r}"
        for s in MUST_STAY
        if s in old and old[s] != new[s]
    )
    if changed:
        raise CheckpointError(
            f"{name} was written with other settings: {changed}; put them back, or begin a new run"
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


def _rows_per_step(settings: dict[str, Any]) -> int:
    """Return the rows that an optimizer step learns from."""
    names = ("per_device_train_batch_size", "gradient_accumulation_steps")
    return math.prod(settings.get(name) or 0 for name in names)


# --- weights and other parts ---------------------------------------------------------------------


def write_weights(trainer: Any, folder: Path) -> None:
    """Write the adapters as PEFT does, or the trained weights of a model without adapter."""
    from safetensors.torch import save_file

    model = trainer.accelerator.unwrap_model(trainer.model)
    if not hasattr(model, "peft_config"):
        values = {n: _on_cpu(p) for n, p in trainer.trained_parameters().items()}
        save_file(values, str(folder / WEIGHTS))
        return
    for name, config in model.peft_config.items():
        place = folder if name == "default" else folder / name
        place.mkdir(exist_ok=True)
        values = {n: _on_cpu(p) for n, p in _adapter(model, name).items()}
        save_file(values, str(place / ADAPTER))
        config.save_pretrained(str(place))


def read_weights(trainer: Any, folder: Path) -> None:
    """Load what ``write_weights`` wrote into the model, in place."""
    from safetensors.torch import load_file

    model = trainer.accelerator.unwrap_model(trainer.model)
    if not hasattr(model, "peft_config"):
        _copy_into(trainer.trained_parameters(), load_file(str(folder / WEIGHTS)), folder.name)
        return
    has_reference = (folder / "ref" / ADAPTER).exists()
    if "ref" in model.peft_config and not has_reference:
        # TRL copied an adapter that had been trained already; the checkpoint's had none
        model.delete_adapter("ref")
    if has_reference and "ref" not in model.peft_config:
        model.add_adapter("ref", model.peft_config["default"])
    for name in model.peft_config:
        place = folder if name == "default" else folder / name
        _copy_into(_adapter(model, name), load_file(str(place / ADAPTER)), folder.name)
    model.set_adapter("default")


def _adapter(model: Model, name: str) -> dict[str, torch.Tensor]:
    """Return the tensors of an adapter under the names that PEFT's files have."""
    from peft import get_peft_model_state_dict

    mine = {n: p for n, p in model.named_parameters() if f".{name}." in f"{n}."}
    return get_peft_model_state_dict(model, mine, adapter_name=name, save_embedding_layers=False)


def _copy_into(own: dict[str, Any], kept: dict[str, Any], name: str) -> None:
    """Copy values into existing tensors, which keep their type and device."""
    wrong = sorted(
        n for n in {*own, *kept} if n not in own or n not in kept or own[n].shape != kept[n].shape
    )
    if wrong:
        raise CheckpointError(
            f"the adapter of {name} has other layers or another rank than this one ({wrong[0]}): "
            f"put lora back to what it was, or begin a new run"
        )
    with torch.no_grad():
        for key, values in kept.items():
            own[key].copy_(values)


def _inner(reward: Any) -> Any:
    return getattr(reward, "reward", reward)


def _state_of(reward: Any) -> Any:
    """Return the state of a reward with ``state_dict`` and ``load_state_dict``; None of others."""
    inner = _inner(reward)
    if isinstance(inner, torch.nn.Module) or not hasattr(inner, "load_state_dict"):
        return None
    return inner.state_dict()


def _on_cpu(values: torch.Tensor) -> torch.Tensor:
    return values.detach().to("cpu", copy=True).contiguous()
