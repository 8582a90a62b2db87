"""The leave-one-out trainer: TRL's RLOO, no name ever dropped and every score checked.

Loaded after ``setup()`` (the lazy public names see to it), so that ``trl.RLOOTrainer`` is Unsloth's
patched class wherever Unsloth patches it.
"""

import copy
import dataclasses
import warnings
from collections.abc import Callable
from typing import Any

import torch
from transformers import PrinterCallback, ProgressCallback
from trl import RLOOConfig, RLOOTrainer

from rloo_kit.config import DEFAULT_BATCH, translate_trainer_arguments
from rloo_kit.environment import setup
from rloo_kit.errors import ConfigError
from rloo_kit.recording import LiveProgress
from rloo_kit.reward_loading import load_rewards

RENAMED_PARTS = {
    "reward_model": "reward_funcs",
    "config": "args",
    "policy": "model",
    "tokenizer": "processing_class",
}
"""Older names of the trainer's arguments; ``ref_policy`` has no successor (adapter off)."""


class LeaveOneOutConfig(RLOOConfig):
    """Every field of TRL's ``RLOOConfig`` under TRL's name; older names are translated.

    Defaults that differ from TRL's, for one consumer GPU and a LoRA adapter: ``num_generations`` 4,
    ``learning_rate`` 1e-5, ``logging_steps`` 1, ``report_to`` none, ``bf16``/``fp16`` by the
    device, ``gradient_checkpointing`` on a GPU only. Defaults that Unsloth's patched class changes
    are TRL's again, so that one file means the same with and without Unsloth.

    Raises:
        ConfigError: An unknown name (with the nearest one), an old name beside its new one, or a
            batch that does not hold whole groups.
    """

    def __init__(self, output_dir: str | None = None, **arguments: Any) -> None:
        values = translate_trainer_arguments(arguments)
        hardware = setup().hardware
        on_cpu = hardware.device == "cpu"
        if not values.get("bf16") and not values.get("fp16"):
            values.setdefault("bf16", hardware.mixed_precision == "bf16")
            values.setdefault("fp16", hardware.mixed_precision == "fp16")
        if on_cpu and any(mark in str(values.get("optim", "")) for mark in ("8bit", "paged")):
            warnings.warn(
                f"optim={values['optim']!r} needs a GPU: adamw_torch is used",
                UserWarning,
                stacklevel=2,
            )
            values["optim"] = "adamw_torch"
        defaults = {
            **{
                field.name: field.default
                for field in dataclasses.fields(RLOOConfig)
                if field.init and field.default is not dataclasses.MISSING
            },
            **DEFAULT_BATCH,
            "learning_rate": 1e-5,
            "logging_steps": 1,
            "report_to": "none",
            "gradient_checkpointing": not on_cpu,
            "dataloader_pin_memory": not on_cpu,
            "use_cpu": on_cpu,
        }
        try:
            super().__init__(**{**defaults, **values, "output_dir": output_dir or "runs/trainer"})
        except (ValueError, TypeError) as exc:
            raise ConfigError(f"TRL refuses the trainer settings: {exc}") from exc
        if not self.bf16 and not self.fp16:
            self.mixed_precision = "no"  # else accelerate reads the variable that setup() sets
        self.follows_model = "gradient_checkpointing" not in arguments


class LeaveOneOutTrainer(RLOOTrainer):
    """TRL's ``RLOOTrainer``, with rewards by name, checked scores and calm progress.

    Args:
        model: As ``attach_lora`` returned it; anything TRL takes works too.
        reward_funcs: One or several of: a built-in name, ``file.py:function``,
            ``package.module:function`` (each with ``:weight`` if wanted), a table, a function, an
            object with ``get_rewards(prompts, completions)``, a sequence-classification model or
            its folder.
        args: A ``LeaveOneOutConfig``.
        train_dataset: Rows with ``prompt``; other columns reach the rewards by name.
        processing_class: The tokenizer; TRL pads prompts on the left whatever it says.
        callbacks: Added to the kit's own progress.
        **others: TRL's other arguments, and the older names ``reward_model``, ``config``,
            ``policy`` and ``tokenizer``, each with a warning.

    Raises:
        ConfigError: An argument is missing, unknown or given twice.
        RewardError: A reward cannot be loaded, or returns something else than scores.
    """

    def __init__(
        self,
        model: Any = None,
        reward_funcs: Any = None,
        args: LeaveOneOutConfig | None = None,
        train_dataset: Any = None,
        processing_class: Any = None,
        callbacks: list[Any] | None = None,
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
        args = copy.copy(parts.pop("args") or LeaveOneOutConfig())  # the caller's stays as it is
        _follow_model(args, parts["model"])
        specs = parts.pop("reward_funcs")
        rewards = load_rewards(
            specs if isinstance(specs, list | tuple) else [specs],
            tokenizer=parts["processing_class"],
        )
        if args.reward_weights is None:
            args.reward_weights = [reward.weight for reward in rewards]
        elif any(reward.weight != 1.0 for reward in rewards):
            raise ConfigError(
                "reward weights are given both by name and as reward_weights: keep one"
            )
        _drop_old_reference(parts["model"])
        adapter = _adapter_values(parts["model"])
        super().__init__(
            reward_funcs=[reward.func for reward in rewards],
            args=args,
            callbacks=[*(callbacks or []), LiveProgress()],
            **parts,
            **others,
        )
        _restore(self.model, adapter)
        for callback in (ProgressCallback, PrinterCallback):  # the kit prints one calm line a step
            self.remove_callback(callback)

    on_completions: Callable[[int, dict[str, Any], int], None] | None = None
    """Called after every generation of training with (step, TRL's logs, num_generations)."""

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        """TRL's, and hand the scored completions on."""
        output = super()._generate_and_score_completions(inputs)
        if self.on_completions and self.model.training:
            self.on_completions(self.state.global_step + 1, self._logs, self.num_generations)
        return output


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
    choice = getattr(model, "rloo_kit_gradient_checkpointing", None)
    if choice is not None and getattr(args, "follows_model", False):
        args.gradient_checkpointing = bool(choice)


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
