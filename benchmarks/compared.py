"""Trainers that the benchmarks compare: the kit's, and TRL's RLOO and GRPO."""

import tempfile
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import rloo_kit as rk

environment = rk.setup()  # before TRL is imported

import torch
from datasets import Dataset
from transformers import PrinterCallback
from transformers.utils import logging
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

from rloo_kit.live.view import LiveView
from rloo_kit.training.trl_step import route_trl_lm_head

TRAINERS: dict[str, tuple[Any, Any]] = {
    "kit": (rk.LeaveOneOutTrainer, rk.LeaveOneOutConfig),
    "trl-rloo": (RLOOTrainer, RLOOConfig),
    "trl-grpo": (GRPOTrainer, GRPOConfig),
}
RECOMPUTES = torch.cuda.is_available()  # activations, in every arm


def prepare() -> None:
    """Silence warnings, and let TRL's trainers start without a GPU."""
    warnings.filterwarnings("ignore")
    logging.set_verbosity_error()
    route_trl_lm_head()


def make_trainer(
    kind: str,
    policy: tuple[Any, Any],
    reward: Callable[..., list[float]],
    prompts: Dataset,
    callbacks: Sequence[Any] = (),
    trainer_class: Any = None,
    **settings: Any,
) -> Any:
    """Return a trainer, by default in float32, without checkpoints, reports and progress bars.

    Args:
        kind: Key of the trainer in ``TRAINERS``.
        policy: The model and its tokenizer.
        reward: The reward function.
        prompts: Dataset of the prompts.
        callbacks: Additional callbacks.
        trainer_class: Class to use instead of the one in ``TRAINERS``.
        **settings: Settings of the trainer's config.
    """
    of_kind, config_class = TRAINERS[kind]
    fixed = {"bf16": False, "use_cpu": not torch.cuda.is_available()}
    fixed |= {"gradient_checkpointing": RECOMPUTES}
    fixed |= {"output_dir": tempfile.gettempdir(), "save_strategy": "no", "report_to": "none"}
    fixed |= {"doctor": False, "dry_run": False} if kind == "kit" else {}
    args = config_class(**{**fixed, "disable_tqdm": True, **settings})
    if not (args.bf16 or args.fp16):
        args.mixed_precision = "no"
    made = (trainer_class or of_kind)(
        model=policy[0],
        reward_funcs=reward,
        args=args,
        train_dataset=prompts,
        processing_class=policy[1],
        callbacks=list(callbacks),
    )
    for callback in (PrinterCallback, LiveView):
        made.remove_callback(callback)
    return made
