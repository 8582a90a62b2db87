"""What a run file asks for, made ready: settings, prompts, trainer arguments, the policy."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rloo_kit.config import RunConfig, find_run_file, read_run_file
from rloo_kit.data import BUILTIN, MAX_HELD_OUT, load_prompts, split_held_out
from rloo_kit.engines import asked_for
from rloo_kit.errors import DataError
from rloo_kit.evaluation import prompt_ids
from rloo_kit.generation import room_for_rank
from rloo_kit.models import attach_lora, load_model


def read_config(source: str | Path | RunConfig, overrides: Sequence[str]) -> tuple[RunConfig, Path]:
    """Return the run's settings and the folder that its paths start from."""
    if isinstance(source, RunConfig):
        return source, Path()
    return read_run_file(source, overrides), find_run_file(source).parent


def _beside(name: str, base: Path) -> str:
    """Return a path relative to the run file where one exists there, else the name as it is."""
    candidate = base / name
    return str(candidate) if not Path(name).exists() and candidate.exists() else name


def read_prompts(config: RunConfig, base: Path) -> tuple[Any, Any]:
    """Return the prompts to train on, and those held out or None."""
    data = config.data
    common = {
        "num_prompts": data.num_prompts,
        "system": data.system,
        "chat": data.chat,
        "seed": config.seed,
    }
    if data.prompts in BUILTIN:
        held_out = MAX_HELD_OUT if data.held_out is None else data.held_out
        kept = None
        if held_out:
            kept = load_prompts(
                data.prompts, split="held_out", **{**common, "num_prompts": held_out}
            )
        return load_prompts(data.prompts, **common), kept
    everything = load_prompts(_beside(data.prompts, base), split=data.split, **common)
    return split_held_out(everything, data.held_out)


def make_trainer_args(config: RunConfig, folder: Path) -> Any:
    """Return the run's ``LeaveOneOutConfig``."""
    from rloo_kit.trainer import LeaveOneOutConfig

    return LeaveOneOutConfig(
        **{"save_strategy": "no", **config.trainer}, output_dir=str(folder), seed=config.seed
    )


def load_policy(config: RunConfig, base: Path, args: Any) -> tuple[Any, Any]:
    """Return the model with its adapter, and the tokenizer."""
    model, tokenizer = load_model(
        _beside(config.model.name, base),
        max_seq_length=config.model.max_seq_length,
        load_in_4bit=config.model.load_in_4bit,
        backend=config.model.backend,
        fast_inference=asked_for(args) in ("auto", "vllm"),
        max_lora_rank=room_for_rank(config.lora.r),
    )
    return attach_lora(model, **asdict(config.lora), seed=config.seed), tokenizer


def check_prompt_lengths(tokenizer: Any, rows: list[Any], config: RunConfig, args: Any) -> None:
    """Refuse a prompt that leaves no room for its completion."""
    room = config.model.max_seq_length - args.max_completion_length
    for number, row in enumerate(rows, 1):
        length = len(prompt_ids(tokenizer, row["prompt"], args.chat_template_kwargs))
        if length > room:
            raise DataError(
                f"prompt {number} has {length} tokens, and {room} fit before a completion of "
                f"{args.max_completion_length}: set model.max_seq_length to at least "
                f"{length + args.max_completion_length}, or shorten the prompt"
            )
