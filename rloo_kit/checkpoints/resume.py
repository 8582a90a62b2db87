"""What a trainer needs to go on as if nothing had happened: checkpoints, faults, stopping in order.

A checkpoint (docs/how-to/resume.md) is a folder ``checkpoint-N`` that holds, without any pickle:

- ``adapter_model.safetensors`` and ``adapter_config.json``, which PEFT loads too (``ref/`` beside
  it where the reference is a copy of the adapter);
- ``state.json`` and ``state.safetensors``: optimizer, schedule, random states, the generation batch
  in use, moving statistics, what callbacks hold;
- ``trainer_state.json`` of transformers, and ``manifest.json`` with a sum of every file.

After every optimizer step the small part of that state is taken into memory. Until the next
optimizer step the weights and the optimizer still belong to it, so that a fault in sampling, in a
reward or in a pass costs nothing: the checkpoint of the last finished step is then written.

Several processes hold the same state, so that any of them can write it, and any number of processes
can go on from it. Weights that FSDP or DeepSpeed divides are left to transformers' own checkpoints.
"""

import contextlib
import copy
import importlib.metadata
import logging
import math
import shutil
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from transformers.trainer import TRAINER_STATE_NAME

from rloo_kit.checkpoints.stopping import SleepWatch, StopSignals, TimeLimit, interrupt_for
from rloo_kit.checkpoints.store import (
    Checkpoint,
    find_checkpoint,
    list_steps,
    prune_checkpoints,
    random_states,
    read_checkpoint,
    read_tree,
    set_random_states,
    sum_of_rows,
    sum_of_weights,
    write_checkpoint,
    write_tree,
)
from rloo_kit.config.settings import on_resume
from rloo_kit.diagnosis.record import finite_numbers
from rloo_kit.errors import CheckpointError, DiskError, KitError, ProcessLostError
from rloo_kit.output_folder import one_at_a_time
from rloo_kit.processes import Team, check_resumable, gathered, raise_if_peer_lost, why_sharded
from rloo_kit.rloo.guards import check_finite

MUST_STAY = sorted([*on_resume("must"), "rows_per_step"])
"""Settings that decide what is sampled and learned: another value would be another run.

``rows_per_step`` is what an optimizer step learns from: how it is divided into
``per_device_train_batch_size``, ``gradient_accumulation_steps`` and processes may change.
"""
MAY_CHANGE = on_resume("may")
"""Settings whose new value is used from the next step on, and reported."""
OF_SCHEDULE = (
    "learning_rate",
    "lr_scheduler_type",
    "max_steps",
    "num_train_epochs",
    "warmup_steps",
)
"""Of those, the ones that make the learning rate of a step."""
OF_LOOP = ("epoch", "global_step", "num_input_tokens_seen", "total_flos")
"""What of transformers' state changes within a step."""
BEST_OVER = 4
"""Steps whose mean reward is the score of a checkpoint without held-out prompts."""
WEIGHTS, ADAPTER = "model.safetensors", "adapter_model.safetensors"


class ExactResume:
    """A mixin for a trainer of TRL, before it in the bases.

    The trainer gives ``_held()``, its own state as a tree, ``_take_up(tree)``, and ``team``, the
    processes that train.
    """

    team: Team

    stop_reason: str | None
    rescued: Path | None = None
    """The folder a checkpoint went to because the disk of ``output_dir`` refused it."""
    resumed_from: Checkpoint | None = None
    """Where the training went on from."""
    _state_read: dict[str, Any] | None = None
    _at_boundary: dict[str, Any] | None = None
    _signals: StopSignals | None = None
    _received: int | None = None
    _known_facts: dict[str, Any]
    _steps_per_epoch: int = 1
    _saved_at: int = -1

    def train(
        self, resume_from_checkpoint: str | Path | bool | None = None, *args: Any, **kwargs: Any
    ) -> Any:
        """Train, as TRL's trainer does, and lose nothing.

        Ctrl-C and SIGTERM are heard when the optimizer step in progress is done: a checkpoint is
        written, and KeyboardInterrupt is raised. A second one is raised at once.

        Args:
            resume_from_checkpoint: A checkpoint, the folder of a run, or True for ``output_dir``:
                train on from its newest whole checkpoint.
            *args: As of transformers' trainer.
            **kwargs: As of transformers' trainer.

        Returns:
            transformers' ``TrainOutput``.

        Raises:
            CheckpointError: There is none, it is broken, or of another run.
        """
        self._at_boundary = self.rescued = self._state_read = self.stop_reason = None
        self._received = None
        self._saved_at = -1
        self.resumed_from = self._checkpoint_at(resume_from_checkpoint)
        self._known_facts = self._facts()
        place = None
        if self.resumed_from is not None:
            self._check_same_run(self.resumed_from)
            self._state_read = read_tree(self.resumed_from.folder)
            place = str(self.resumed_from.folder)
        self._limit, self._sleep = TimeLimit(self.args.max_hours), SleepWatch()
        self._limit.begin()
        with StopSignals(say=print if self.team.is_first else None) as self._signals:
            try:
                with raise_if_peer_lost():
                    output = super().train(place, *args, **kwargs)
                    self._agree()  # a signal may have come after the last step
            except Exception as exc:
                saved = self._keep_last_step()
                if self._signals.received is not None:  # it also ended what the step had started
                    raise interrupt_for(self._signals.received) from exc
                if isinstance(exc, ProcessLostError):
                    raise _lost(exc, saved) from exc
                raise
        if self._received is not None:
            raise interrupt_for(self._received)
        return output

    def save_checkpoint(self, folder: str | Path | None = None) -> Path:
        """Write a checkpoint of the last finished step; return its folder.

        Args:
            folder: In which ``checkpoint-N`` is made; None: ``output_dir``.

        Raises:
            CheckpointError: No step is finished, or a later one has begun to change the weights.
            DiskError: The disk is full, or refuses.
        """
        if self._at_boundary is None:
            raise CheckpointError(
                "there is no finished step to save: train first, or use the last checkpoint"
            )
        return self._write(Path(folder or self.args.output_dir)).folder

    # --- stopping --------------------------------------------------------------------------------

    def stop(self, reason: str) -> None:
        """End the training after this step, and say why."""
        self.stop_reason = reason
        warnings.warn(f"training stops: {reason}", RuntimeWarning, stacklevel=2)

    def _stop_if_asked(self) -> None:
        """Let transformers' loop end, and save, where somebody or something wants it."""
        self._agree()
        if self.stop_reason or self._received is not None:
            self.control.should_training_stop = True
            saved = self._saved_at == self.state.global_step
            self.control.should_save |= self.args.save_strategy != "no" and not saved

    def _agree(self) -> None:
        """Let several processes know of each other's signals and reasons to stop.

        So they all make the same steps.
        """
        mine = (None if self._signals is None else self._signals.received, self.stop_reason)
        received, reasons = zip(*self.team.gather(mine), strict=True)
        self._received = next((number for number in received if number is not None), None)
        self.stop_reason = next((reason for reason in reasons if reason), None)

    # --- transformers' hooks, in the order of a training -----------------------------------------

    def _get_train_sampler(self, dataset: Any = None) -> Any:
        """Bring the order of the prompts to the epoch that is gone on with.

        transformers skips whole epochs without drawing their orders.
        """
        sampler = super()._get_train_sampler(dataset)
        epochs = 0 if self._state_read is None else int(self._state_read["epochs"])
        for _ in range(epochs if getattr(sampler, "shuffle", False) else 0):
            torch.randperm(sampler.num_samples, generator=sampler.generator)
        return sampler

    def _init_training_state(
        self, max_steps: int, num_update_steps_per_epoch: int, *args: Any, **kwargs: Any
    ) -> Any:
        self._steps_per_epoch = num_update_steps_per_epoch
        teller = logging.getLogger("transformers.trainer_utils")
        teller.disabled = True  # it warns of what is put right below
        try:
            found = super()._init_training_state(
                max_steps, num_update_steps_per_epoch, *args, **kwargs
            )
        finally:
            teller.disabled = False
        self.state.compute_steps(self.args, max_steps)  # the run file's, not the checkpoint's
        return found

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        if self._state_read is None:
            return super()._load_from_checkpoint(resume_from_checkpoint, model)
        return self._load_weights(Path(resume_from_checkpoint))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if self._state_read is None:
            return super()._load_optimizer_and_scheduler(checkpoint)
        state = self._state_read
        try:
            self.optimizer.load_state_dict(state.pop("optimizer"))
            self.lr_scheduler.load_state_dict(state.pop("scheduler"))
        except (ValueError, KeyError, TypeError, AttributeError) as exc:
            raise CheckpointError(
                f"the optimizer of {self.resumed_from.folder.name} does not fit this one ({exc}): "
                f"put trainer.optim back to what it was"
            ) from exc
        self._use_asked_learning_rate()
        return None

    def _load_scaler(self, checkpoint: str | None) -> None:
        if self._state_read is None:
            return super()._load_scaler(checkpoint)
        scaler, kept = getattr(self.accelerator, "scaler", None), self._state_read["scaler"]
        if scaler is not None and kept:
            scaler.load_state_dict(kept)
        return None

    def _run_epoch(self, **kwargs: Any) -> None:
        """Do nothing where the run already has all its steps; transformers would make one more."""
        if self._state_read is not None and self.state.global_step >= self.state.max_steps:
            self.control.should_training_stop = True
            return
        super()._run_epoch(**kwargs)

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        if self._state_read is not None:  # no epoch was left to begin
            self._load_rng_state(str(self.resumed_from.folder))
        return super()._finalize_training(*args, **kwargs)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Take up all the rest: transformers calls this last, right before the first step."""
        if self._state_read is None:
            return super()._load_rng_state(checkpoint)
        state, self._state_read = self._state_read, None
        loss = state["loss"]
        self._tr_loss += loss["since_log"]
        self._total_loss_scalar, self._globalstep_last_logged = loss["total"], loss["last_log"]
        self._tell("on_resume", held=state["callbacks"])
        self._take_up(state["trainer"])
        for reward, kept in zip(self.reward_funcs, state["rewards"], strict=True):
            if kept is not None:
                _of_reward(reward).load_state_dict(kept)
        set_random_states(state["random"])
        return None

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        over = self._limit.over()
        if over and not self.stop_reason:
            self.stop(over)
        slept = self._sleep.look()
        if slept:
            warnings.warn(f"{slept}, and training goes on", UserWarning, stacklevel=2)
        self._stop_if_asked()
        super()._maybe_log_save_evaluate(*args, **kwargs)
        self.keep_boundary()

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log, as TRL does; what callbacks find then may end the training, and is saved."""
        super().log(logs, *args, **kwargs)
        self._stop_if_asked()

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        if self._is_sharded():
            super()._save_checkpoint(model, trial)
            return
        self._saved_at = self.state.global_step
        self.store_flos()
        self.keep_boundary()
        if self.team.is_first:
            self._write_or_rescue()

    def gathered_weights(self) -> dict[str, Any] | None:
        """Return whole weights where they are divided, else None; all processes call it."""
        if not self._is_sharded():
            return None
        if why_sharded() == "DeepSpeed":  # accelerate would gather the base, too, in rank 0
            trained = self._trained()
            with gathered(trained.values()):
                return {name: p.detach().to("cpu", copy=True) for name, p in trained.items()}
        return self.accelerator.get_state_dict(self.model_wrapped)

    @property
    def weights_are_divided(self) -> bool:
        """Whether a process holds a part of the weights: under FSDP and ZeRO-3, not ZeRO-2."""
        return self._is_sharded() and (why_sharded() != "DeepSpeed" or self._dist.is_zero3)

    def _is_sharded(self) -> bool:
        return self.team.size > 1 and why_sharded() is not None

    # --- writing ---------------------------------------------------------------------------------

    def _small_state(self) -> dict[str, Any]:
        """Return all that changes but the weights and the optimizer, in copies."""
        callbacks: dict[str, Any] = {}
        self._tell("on_state", held=callbacks)
        return {
            "step": self.state.global_step,
            "loop": {name: getattr(self.state, name) for name in OF_LOOP},
            "rows": len(self.state.log_history),
            "epochs": self.state.global_step // self._steps_per_epoch,
            "trainer": self._held(),
            "callbacks": callbacks,
            "rewards": [_state_of(reward) for reward in self.reward_funcs],
            "loss": {
                "since_log": float(self._tr_loss),
                "total": self._total_loss_scalar,
                "last_log": self._globalstep_last_logged,
            },
            "random": random_states(),
        }

    def forget_boundary(self) -> None:
        """From here on weights may change: called right before the optimizer's step."""
        self._at_boundary = None

    def keep_boundary(self) -> None:
        """Take the small state into memory: called when a step is done, and its weights are good.

        What the first process has recorded goes to all, since any may have to write it.
        """
        self._at_boundary = small = self._small_state()
        if self.team.size > 1:
            told = {n: held for n, held in small["callbacks"].items() if not _bytes_of(held)}
            small["callbacks"] |= self.team.broadcast(told)

    def _keep_last_step(self) -> int | None:
        """After a fault, write the checkpoint of the last finished step where there is none.

        Returns:
            The step of the newest checkpoint, where it is that one.
        """
        if self._at_boundary is None or self.args.save_strategy == "no" or self._is_sharded():
            return None
        step = self._at_boundary["step"]
        if not step:
            return None
        run = Path(self.args.output_dir)
        try:
            with one_at_a_time(run) if self.team.size > 1 else contextlib.nullcontext():
                if not (run / f"checkpoint-{step}").exists():
                    self._write_or_rescue()
        except KitError as exc:  # the fault itself must be what is raised
            warnings.warn(f"step {step} was not saved: {exc}", RuntimeWarning, stacklevel=2)
            return None
        return step

    def _write_or_rescue(self) -> None:
        run = Path(self.args.output_dir)
        try:
            self._write(run)
        except DiskError as exc:
            place = Path(self.args.rescue_dir or Path(tempfile.gettempdir()) / "rloo-kit-rescue")
            place = place / f"{run.name}-{time.strftime('%Y%m%d-%H%M%S')}"
            try:
                place.mkdir(parents=True, exist_ok=True)
                self._write(place)
            except (DiskError, OSError):
                shutil.rmtree(place, ignore_errors=True)
                raise exc from None
            self.rescued = place
            self._tell("on_rescue", folder=place)
            self.stop(
                f"{exc}; step {self.state.global_step} is saved in {str(place)!r} instead: go on "
                f"with rloo-kit train {place} --resume"
            )
            self.control.should_training_stop = True

    def _write(self, run: Path) -> Checkpoint:
        small = self._at_boundary
        self.check_weights()
        optimizer = self.optimizer.state_dict()
        scaler = getattr(self.accelerator, "scaler", None)
        loop = copy.copy(self.state)  # a fault may come in the middle of the next step
        loop.log_history = loop.log_history[: small["rows"]]
        for name, value in small["loop"].items():
            setattr(loop, name, value)
        state = {
            **small,
            "optimizer": optimizer,
            "scheduler": self.lr_scheduler.state_dict(),
            "scaler": None if scaler is None else scaler.state_dict(),
        }

        def fill(folder: Path) -> None:
            self._write_weights(folder)
            write_tree(folder, state)
            loop.save_to_json(str(folder / TRAINER_STATE_NAME))

        try:
            run.mkdir(parents=True, exist_ok=True)
        except OSError as exc:
            raise DiskError(
                f"{str(run)!r} cannot be made ({exc}): choose another output_dir"
            ) from exc
        self._tell("on_checkpoint")
        checkpoint = write_checkpoint(
            run,
            small["step"],
            fill,
            facts=self._known_facts,
            score=self._score_of_checkpoint(small["callbacks"]),
            expected_bytes=_bytes_of([optimizer, *self._trained().values()]),
        )
        for later in list_steps(run):  # of another future of this run, that was not gone on with
            if later > checkpoint.step:
                shutil.rmtree(run / f"checkpoint-{later}", ignore_errors=True)
        prune_checkpoints(run, self.args.keep_last, self.args.keep_best)
        return checkpoint

    def check_weights(self) -> None:
        """Refuse to keep weights that are no numbers.

        Raises:
            DivergedError: Some hold NaN or infinity.
        """
        check_finite(self._trained().values(), self.state.global_step)

    def _score_of_checkpoint(self, callbacks: dict[str, Any]) -> float | None:
        """Return what ``keep_best`` compares: held-out prompts where they are scored on the way."""
        if "held_out" in callbacks:
            return callbacks["held_out"]
        rows = self.state.log_history[-BEST_OVER:]
        rewards = finite_numbers(row.get("reward") for row in rows)
        return sum(rewards) / len(rewards) if rewards else None

    def _trained(self) -> dict[str, torch.Tensor]:
        model = self.accelerator.unwrap_model(self.model)
        return {n: p for n, p in model.named_parameters() if p.requires_grad}

    def _write_weights(self, folder: Path) -> None:
        from safetensors.torch import save_file

        model = self.accelerator.unwrap_model(self.model)
        if not hasattr(model, "peft_config"):
            save_file({n: _own(p) for n, p in self._trained().items()}, str(folder / WEIGHTS))
            return
        for name, config in model.peft_config.items():
            place = folder if name == "default" else folder / name
            place.mkdir(exist_ok=True)
            values = {n: _own(p) for n, p in _adapter(model, name).items()}
            save_file(values, str(place / ADAPTER))
            config.save_pretrained(str(place))

    # --- reading ---------------------------------------------------------------------------------

    def _checkpoint_at(self, wanted: str | Path | bool | None) -> Checkpoint | None:
        if wanted is None or wanted is False:
            return None
        check_resumable()
        place = Path(self.args.output_dir if wanted is True else wanted)
        if place.name.startswith("checkpoint-") or (place / TRAINER_STATE_NAME).exists():
            return read_checkpoint(place)
        found = find_checkpoint(place)
        if found is None:
            raise CheckpointError(
                f"{str(place)!r} holds no whole checkpoint: leave resume_from_checkpoint out to "
                f"begin anew"
            )
        return found

    def _facts(self) -> dict[str, Any]:
        args = _plain(self.args.to_dict())
        args["rows_per_step"] = _rows_per_step(args) * self.team.size
        return {
            "versions": {
                name: importlib.metadata.version(name)
                for name in ("rloo-kit", "torch", "transformers", "trl", "peft")
            },
            "threads": torch.get_num_threads(),
            "processes": self.team.size,
            "model": sum_of_weights(self.accelerator.unwrap_model(self.model)),
            "prompts": sum_of_rows(self.train_dataset),
            "rewards": list(self.reward_func_names),
            "settings": {name: args.get(name) for name in sorted({*MUST_STAY, *MAY_CHANGE})},
        }

    def _check_same_run(self, checkpoint: Checkpoint) -> None:
        """Refuse a checkpoint of another run; tell what has changed where that may be.

        Raises:
            CheckpointError: Model, prompts, rewards or a setting that must stay differ.
        """
        name, then, now = checkpoint.folder.name, checkpoint.facts, self._known_facts
        for what, told in (
            ("model", "another model: put model.name, model.load_in_4bit and lora"),
            ("prompts", "other prompts: put data, or the file that it names,"),
            ("rewards", "other rewards: put rewards"),
        ):
            if then.get(what) != now[what]:
                raise CheckpointError(
                    f"{name} was written with {told} back to what was there, or begin a new run"
                )
        old = then.get("settings", {})
        old.setdefault("rows_per_step", _rows_per_step(old))
        others = [s for s in MUST_STAY if old.get(s) != now["settings"][s]]
        if others:
            changed = ", ".join(
                f"trainer.{s} was {old.get(s)!r} and is {now['settings'][s]!r}" for s in others
            )
            raise CheckpointError(
                f"{name} was written with other settings: {changed}; put them back, or begin a "
                f"new run"
            )
        for setting in MAY_CHANGE:
            if old.get(setting) != now["settings"][setting]:
                warnings.warn(
                    f"trainer.{setting} is {now['settings'][setting]!r} from here on, and was "
                    f"{old.get(setting)!r}",
                    UserWarning,
                    stacklevel=3,
                )
        if any(then.get(what) != now[what] for what in ("versions", "threads", "processes")):
            warnings.warn(
                f"{name} was written with other versions, or another number of threads or "
                f"processes: training goes on, not bit for bit",
                UserWarning,
                stacklevel=3,
            )

    def _load_weights(self, folder: Path) -> None:
        from safetensors.torch import load_file

        model = self.accelerator.unwrap_model(self.model)
        if not hasattr(model, "peft_config"):
            _copy_into(self._trained(), load_file(str(folder / WEIGHTS)), folder.name)
            return
        has_reference = (folder / "ref" / ADAPTER).exists()
        if "ref" in model.peft_config and not has_reference:
            model.delete_adapter("ref")  # a copy of an adapter that had been trained already
        if has_reference and "ref" not in model.peft_config:
            model.add_adapter("ref", model.peft_config["default"])
        for name in model.peft_config:
            place = folder if name == "default" else folder / name
            _copy_into(_adapter(model, name), load_file(str(place / ADAPTER)), folder.name)
        model.set_adapter("default")

    def _use_asked_learning_rate(self) -> None:
        """Let the run file's learning rate and schedule win over the checkpoint's."""
        then, now = self.resumed_from.facts["settings"], self._known_facts["settings"]
        if all(then.get(name) == now[name] for name in OF_SCHEDULE):
            return
        schedule, factor = self.lr_scheduler, 1.0
        if then.get("learning_rate"):
            factor = now["learning_rate"] / then["learning_rate"]
        rates = [group["lr"] * factor for group in self.optimizer.param_groups]
        schedule.base_lrs = [rate * factor for rate in schedule.base_lrs]
        if isinstance(schedule, torch.optim.lr_scheduler.LambdaLR):
            parts = zip(schedule.base_lrs, schedule.lr_lambdas, strict=True)
            rates = [rate * share(schedule.last_epoch) for rate, share in parts]
        for group, first, rate in zip(
            self.optimizer.param_groups, schedule.base_lrs, rates, strict=True
        ):
            group["lr"], group["initial_lr"] = rate, first
        schedule._last_lr = rates


def _rows_per_step(settings: dict[str, Any]) -> int:
    """Return the rows that a process learns from in an optimizer step."""
    names = ("per_device_train_batch_size", "gradient_accumulation_steps")
    return math.prod(settings.get(name) or 0 for name in names)


def _lost(exc: ProcessLostError, saved: int | None) -> ProcessLostError:
    """Say what is left of a training that lost a process."""
    if saved is None:
        return exc
    return ProcessLostError(f"{exc}; step {saved} is saved: go on with --resume")


def _of_reward(reward: Any) -> Any:
    return getattr(reward, "reward", reward)


def _state_of(reward: Any) -> Any:
    """Return what a reward with ``state_dict`` and ``load_state_dict`` keeps; None of others."""
    inner = _of_reward(reward)
    if isinstance(inner, torch.nn.Module) or not hasattr(inner, "load_state_dict"):
        return None
    return inner.state_dict()


def _adapter(model: Any, name: str) -> dict[str, torch.Tensor]:
    """Return the tensors of an adapter under the names that PEFT's files have."""
    from peft import get_peft_model_state_dict

    mine = {n: p for n, p in model.named_parameters() if f".{name}." in f"{n}."}
    return get_peft_model_state_dict(model, mine, adapter_name=name, save_embedding_layers=False)


def _own(values: torch.Tensor) -> torch.Tensor:
    return values.detach().to("cpu", copy=True).contiguous()


def _copy_into(own: dict[str, Any], kept: dict[str, Any], name: str) -> None:
    """Copy values into tensors that are there: no second model, no other type."""
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


def _bytes_of(tree: Any) -> int:
    if isinstance(tree, torch.Tensor):
        return tree.numel() * tree.element_size()
    if isinstance(tree, dict):
        return sum(map(_bytes_of, tree.values()))
    return sum(map(_bytes_of, tree)) if isinstance(tree, list | tuple) else 0


def _plain(value: Any) -> Any:
    """Return settings as JSON gives them back."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value if isinstance(value, str | int | float | None) else str(value)
