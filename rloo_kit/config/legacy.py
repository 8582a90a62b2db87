"""Command lines of TRL's ``examples/scripts/rloo/rloo.py`` before 0.22, as run files.

Source: TRL v0.21.0, ``examples/scripts/rloo/rloo.py`` and ``rloo_tldr.py``, and
``trl/trainer/rloo_trainer.py`` (``RLOOTrainer.__init__`` and ``train``), where

- an episode is a completion;
- an *update* samples ``batch_size = per_device_train_batch_size * gradient_accumulation_steps *
  num_mini_batches * processes`` completions, ``rloo_k`` of each prompt, and there are
  ``ceil(total_episodes / batch_size)`` of them;
- an update makes ``num_ppo_epochs * num_mini_batches`` optimizer steps of
  ``per_device_train_batch_size * gradient_accumulation_steps * processes`` completions, and one
  line of metrics;
- without ``total_episodes`` there are ``num_train_epochs * prompts`` episodes, so each prompt is
  seen ``num_train_epochs / rloo_k`` times;
- warm-up and checkpoints are counted in updates, and gradients are never clipped.

Here ``steps_per_generation`` is ``gradient_accumulation_steps * num_mini_batches`` slices,
``max_steps`` the optimizer steps, and a line of metrics is written once an update.
"""

import math
import os
import shlex
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from rloo_kit.config.run_file import (
    PROJECTIONS,
    RENAMED,
    RunConfig,
    did_you_mean,
    known_trainer_fields,
    make_run_config,
    read_value,
    translate_trainer_arguments,
)
from rloo_kit.errors import ConfigError
from rloo_kit.text.redaction import redact, redact_tree
from rloo_kit.text.wording import first_line, format_errors, format_value

DEFAULTS: dict[str, Any] = {
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "num_mini_batches": 1,
    "num_ppo_epochs": 4,
    "rloo_k": 2,
    "kl_coef": 0.05,
    "cliprange": 0.2,
    "learning_rate": 5e-5,
    "response_length": 53,
    "temperature": 0.7,
    "num_train_epochs": 3.0,
}
"""Of the older ``RLOOConfig``, ``OnPolicyConfig`` and ``TrainingArguments``."""
COUNTS = (
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "num_mini_batches",
    "num_ppo_epochs",
    "rloo_k",
    "num_processes",
)
"""Flags that the batch is computed from."""
MOVED = {
    "load_in_4bit": "model.load_in_4bit",
    "trust_remote_code": "model.trust_remote_code",
    "lora_r": "lora.r",
    "lora_alpha": "lora.lora_alpha",
    "lora_target_modules": "lora.target_modules",
    "dataset_name": "data.prompts",
    "dataset_train_split": "data.split",
    "output_dir": "output_dir",
    "seed": "seed",
}
"""Flags whose value stays, and where it goes in a run file."""
PARTS = ("model_name_or_path", "sft_model_path", "reward_model_path", "total_episodes")
"""Flags that become something else than a setting of the same value, like those of ``COUNTS``."""
SAME = {"normalize_advantage": "normalize_advantages", "save_total_limit": "keep_last"}
"""Names of trainer settings that ``config.RENAMED`` does not hold."""
IN_UPDATES = ("warmup_steps", "save_steps")
TEXTS = frozenset(
    {"model_name_or_path", "sft_model_path", "reward_model_path", "dataset_name", "output_dir"}
    | {"dataset_train_split", "run_name"}
)
"""Flags whose value is text, whatever it looks like."""
NEOX = ("query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h")
"""Linear layers of GPT-NeoX, which the seeds' Pythia models are made of."""

_EVALUATION = (
    "do_train", "do_eval", "do_predict", "eval_strategy", "eval_steps", "eval_delay",
    "eval_on_start", "eval_accumulation_steps", "per_device_eval_batch_size",
)  # fmt: skip
_DROPPED = (
    "fp16_backend", "fp16_opt_level", "half_precision_backend", "jit_mode_eval", "past_index",
    "logging_dir", "mp_parameters", "per_gpu_eval_batch_size", "ray_scope", "torchdynamo",
    "tpu_metrics_debug", "tpu_num_cores", "use_ipex", "use_legacy_prediction_loop",
    "use_mps_device", "include_inputs_for_metrics", "include_tokens_per_second",
    "group_by_length", "fsdp_min_num_params", "fsdp_transformer_layer_cls_to_wrap",
)  # fmt: skip
_UPLOAD = (
    "push_to_hub", "hub_model_id", "hub_token", "hub_strategy", "hub_private_repo",
    "hub_always_push", "hub_revision", "push_to_hub_model_id", "push_to_hub_organization",
    "push_to_hub_token",
)  # fmt: skip
_UNREAD = "the older script never read it"
_FITS = "what fits into a pass is found out here"
_EVERY = "a line of metrics is written every update, as it was"
_ALWAYS_LORA = "an adapter is always trained here"
NEEDLESS: dict[str, str] = {
    "num_sample_generations": "report.html and completions.jsonl hold all completions",
    "local_rollout_forward_batch_size": _FITS,
    "auto_find_batch_size": _FITS,
    "whiten_rewards": _UNREAD,
    "token_level_kl": "the older trainer summed it over the completion all the same, which is what "
    "a penalty on the completion is",
    "max_grad_norm": "the older trainer clipped no gradients, so it is 0 here",
    "exp_name": "output_dir names the run",
    "run_name": "the older trainer wrote over it, and output_dir names the run",
    "world_size": "the older trainer wrote over it; num_processes says it",
    "num_total_batches": "it is computed from total_episodes",
    "micro_batch_size": "it is computed",
    "local_batch_size": "it is computed",
    "batch_size": "it is computed",
    "local_mini_batch_size": "it is computed",
    "mini_batch_size": "it is computed",
    "ds3_gather_for_generation": "DeepSpeed is not used",
    "config_file": "give num_processes for the number of processes in it, or one is assumed",
    "dataset_num_proc": "prompts are read as they are needed",
    "dataset_test_split": "the last prompts of the training split are held out",
    "dataset_streaming": _UNREAD,
    "gradient_checkpointing_use_reentrant": _UNREAD,
    "ignore_bias_buffers": _UNREAD,
    "use_peft": _ALWAYS_LORA,
    "lora_dropout": "the older trainer switched every dropout off, so it is 0 here",
    "lora_task_type": "the kit knows it",
    "torch_dtype": "the device decides it, as for every run",
    "dtype": "the device decides it, as for every run",
    "attn_implementation": "the model's own is used",
    "use_bnb_nested_quant": "it is always on",
    "remove_unused_columns": "columns stay, for the rewards",
    "overwrite_output_dir": "a folder that exists is never overwritten: a number is added",
    "save_safetensors": "weights are always written so",
    "disable_tqdm": "RLOO_KIT_LIVE chooses the view",
    **dict.fromkeys(("logging_steps", "logging_strategy", "logging_first_step"), _EVERY),
    **dict.fromkeys(_EVALUATION, "held-out prompts are scored before and after; more often with "
                    "--set data.held_out_every=10"),
    **dict.fromkeys(_DROPPED, "transformers has dropped it"),
}  # fmt: skip
"""Flags that change nothing here, and why."""
_NO_UPLOAD = "nothing is uploaded by a training: leave it out, and export the finished run"
_NO_SHARDS = (
    "the weights are not divided: leave it out, write the run file with --write FILE.yaml "
    "and start it with rloo-kit train FILE.yaml --processes N"
)
REFUSED: dict[str, str] = {
    "stop_token": "completions end at the EOS token: give eos, or leave it out",
    "bnb_4bit_quant_type": "4-bit weights are nf4: leave it out",
    "stop_token_id": "completions end at the tokenizer's EOS token: leave it out, or set eos_token "
    "in the model's tokenizer_config.json",
    "dataset_config": "only a dataset's default configuration is read: save the one you mean as a "
    ".jsonl file and give its path as --dataset_name",
    "model_revision": "only a model's main revision is loaded: download the one you mean and give "
    "its folder as --sft_model_path",
    "load_in_8bit": "the base is loaded in 16 bit or in 4: leave it out, or give --load_in_4bit",
    "use_dora": "the adapter is plain LoRA: leave it out",
    "use_rslora": "the adapter is plain LoRA: leave it out, and give --lora_alpha for its scale",
    "lora_modules_to_save": "only the adapter is trained: leave it out",
    "lora_target_parameters": "the adapter sits on linear layers: give --lora_target_modules",
    "max_steps": "the older script never read it: leave it out and give --total_episodes",
    "resume_from_checkpoint": "the older script never went on: leave it out; rloo-kit train RUN "
    "--resume goes on with a run of the kit",
    "adafactor": "it is an optimizer now: give --optim adafactor",
    "no_cuda": "it has another name now: give --use_cpu",
    "per_gpu_train_batch_size": "it has another name: give --per_device_train_batch_size",
    **dict.fromkeys(("deepspeed", "fsdp", "fsdp_config"), _NO_SHARDS),
    **dict.fromkeys(_UPLOAD, _NO_UPLOAD),
}
"""Flags that would mean something else here, and what to do instead."""
SO_ANYWAY = {"model_revision": "main", "stop_token": "eos", "bnb_4bit_quant_type": "nf4"}
"""The one value of such a flag that is no other here; of all others ``False``."""
LAUNCHERS = frozenset({"python", "python3", "accelerate", "launch", "torchrun", "-i", "-u"})
TLDR = "rloo_tldr.py"


@dataclass(frozen=True)
class Translation:
    """An older command line as a run file."""

    config: RunConfig
    lines: tuple[str, ...]
    """What became of every flag, and what differs."""

    def as_text(self) -> str:
        """Return the run file, the lines above it as comments; without secrets."""
        head = "".join(f"# {line}\n" for line in ("rloo-kit legacy:", *self.lines))
        content = redact_tree(self.config.as_short_dict())
        return redact(head) + yaml.safe_dump(content, sort_keys=False, allow_unicode=True)

    def write(self, path: str | Path) -> None:
        """Write the run file.

        Raises:
            ConfigError: The file exists or cannot be written.
        """
        try:
            with open(path, "x", encoding="utf-8") as file:
                file.write(self.as_text())
        except FileExistsError:
            raise ConfigError(
                f"{format_value(os.fspath(path))} exists: give another name, or remove it first"
            ) from None
        except OSError as exc:
            raise ConfigError(
                f"the run file cannot be written to {format_value(os.fspath(path))} "
                f"({first_line(exc)}): give another path"
            ) from exc


def translate(words: Sequence[str], overrides: Sequence[str] = ()) -> Translation:
    """Return the run file of an older command line; nothing is read or loaded.

    Args:
        words: The flags, after ``python examples/scripts/rloo/rloo.py`` or with it; a launcher's
            ``--num_processes`` counts.
        overrides: ``section.key=value``, as after ``--set``.

    Raises:
        ConfigError: A flag is unknown (with the nearest name), would mean something else here, or
            is missing; all in the one message.
    """
    launcher, script, flags = _split(words)
    given = _read(flags)
    if "num_processes" in (before := _read(launcher)):
        given["num_processes"] = before["num_processes"]
    if faults := _faults(given):
        raise ConfigError(format_errors(faults))
    skipped = [*launcher, *([script] if script else [])]
    lines = [f"{shlex.join(skipped)} is skipped"] if skipped else []
    for name in [name for name in given if name in NEEDLESS or name in REFUSED]:
        reason = NEEDLESS.get(name, "it is so anyway")
        lines.append(f"--{name} {_as_text(given.pop(name))} is needless: {reason}")
    settings = _sections(given, lines, is_tldr=Path(script).name == TLDR)
    settings["trainer"] = _trainer(given, lines)
    room = settings["trainer"]["max_completion_length"] + 512
    settings["model"]["max_seq_length"] = max(1024, room)
    return Translation(make_run_config(settings, overrides), tuple(lines))


# --- reading -------------------------------------------------------------------------------------


def _split(words: Sequence[str]) -> tuple[list[str], str, list[str]]:
    """Return what stands before the script, the script or "", and the flags.

    Raises:
        ConfigError: The line begins with a word that is neither a flag nor a launcher.
    """
    words = [word for word in words if word.strip(" \\\n")]
    for place, word in enumerate(words):
        if word.endswith(".py"):
            return list(words[:place]), word, list(words[place + 1 :])
    flags = next((i for i, word in enumerate(words) if word.startswith("--")), len(words))
    for word in words[:flags]:
        if word not in LAUNCHERS:
            raise ConfigError(
                f"{format_value(word)} is no flag of the older script: write --NAME VALUE, as in "
                f"--dataset_name prompts.jsonl"
            )
    return list(words[:flags]), "", list(words[flags:])


def _read(words: Sequence[str]) -> dict[str, Any]:
    """Return flag -> value, as ``HfArgumentParser`` reads them: a flag without a value is true."""
    found: dict[str, list[str]] = {}
    name = ""
    for word in words:
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            name = name.replace("-", "_")
            found[name] = [value] if equals else []
        elif name:
            found[name].append(word)
    return {
        negated if (negated := _without_no(name)) else name: not negated and _value(name, values)
        for name, values in found.items()
    }


def _without_no(name: str) -> str:
    """Return the flag that ``--no_FLAG`` switches off, or ""."""
    return name[3:] if name.startswith("no_") and name not in _known() else ""


def _value(name: str, values: list[str]) -> Any:
    if not values:
        return True
    if name in TEXTS:
        return " ".join(values)
    parts = [read_value(text) for text in values]
    return parts if len(parts) > 1 or name == "lora_target_modules" else parts[0]


def _known() -> set[str]:
    fields = known_trainer_fields() - set(RENAMED.values())
    return {*fields, *RENAMED, *COUNTS, *MOVED, *PARTS, *SAME, *NEEDLESS, *REFUSED} | {
        "reward_clip_range",
        "warmup_ratio",
    }


def _faults(given: Mapping[str, Any]) -> list[str]:
    """Return what is wrong with the flags."""
    known, older = _known(), {new: old for old, new in reversed(RENAMED.items())}
    faults = []
    for name, value in given.items():
        if name in older:
            faults.append(f"--{name} is today's name: the older script has --{older[name]}")
        elif name not in known:
            faults.append(f"unknown flag --{name}{did_you_mean(name, known)}")
        elif name in REFUSED and value != SO_ANYWAY.get(name, False):
            faults.append(f"--{name}: {REFUSED[name]}")
        elif name in COUNTS and (type(value) is not int or value < 1):
            faults.append(
                f"--{name} is {format_value(value)}, must be a whole number of at least 1"
            )
    if "dataset_name" not in given:
        faults.append("no prompts are named: give --dataset_name, a file or a hub dataset")
    if not {"sft_model_path", "model_name_or_path"} & set(given):
        faults.append("no model is named: give --sft_model_path or --model_name_or_path")
    if "reward_model_path" not in given:
        faults.append("no reward model is named: give --reward_model_path, a folder or a hub name")
    return faults


# --- translating ---------------------------------------------------------------------------------


def _sections(given: dict[str, Any], lines: list[str], *, is_tldr: bool) -> dict[str, Any]:
    """Return all of the run file but ``trainer:``; tell it in ``lines``."""
    policy, named = given.get("sft_model_path"), given.get("model_name_or_path")
    lines.append(f"--sft_model_path {policy} -> model.name: {policy}" if policy else
                 f"--model_name_or_path {named} -> model.name: {named} (the older script trained "
                 f"--sft_model_path, by default EleutherAI/pythia-160m)")  # fmt: skip
    if policy and named and policy != named:
        lines.append(f"--model_name_or_path {named} is needless: the tokenizer of {policy} is used")
    reward = given["reward_model_path"]
    settings: dict[str, Any] = {
        "model": {"name": policy or named, "max_seq_length": 1024, "load_in_4bit": False},
        "lora": {"r": 16, "lora_alpha": 32, "target_modules": [*PROJECTIONS, *NEOX]},
        "data": {"prompts": given["dataset_name"], "chat": False, "held_out": 100},
        "rewards": [{"name": "reward_model", "model": reward, "policy_tokens": True}],
    }
    lines.append(f"--reward_model_path {reward} -> rewards: reward_model {reward}, which reads the "
                 f"policy's own tokens, as it did")  # fmt: skip
    for name, place in MOVED.items():
        if name in given:
            section, _, key = place.rpartition(".")
            (settings[section] if section else settings)[key] = given[name]
            lines.append(f"--{name} {_as_text(given[name])} -> {place}: {given[name]}")
    if is_tldr:
        settings["data"]["max_prompt_tokens"] = 512
        lines.append(f"{TLDR} -> data.max_prompt_tokens: 512; the column prompt is read as it is, "
                     "where that script put the first message through a chat template")  # fmt: skip
    lines += [
        "data.held_out: 100, the last prompts, as the older script kept them out; "
        "--set data.held_out=N keeps out N",
        "all weights were trained; here a LoRA adapter learns, which usually wants a learning rate "
        "ten times as high",
    ]
    return settings


def _trainer(given: dict[str, Any], lines: list[str]) -> dict[str, Any]:
    """Return ``trainer:``; tell it in ``lines``."""
    fields = {*known_trainer_fields(), *RENAMED, *SAME, "total_episodes"} - {*MOVED}
    old = {**DEFAULTS, **{name: given[name] for name in given if name in fields}}
    processes = given.get("num_processes", 1)
    epochs = old.pop("num_train_epochs")
    per_update = old["num_ppo_epochs"] * old["num_mini_batches"]
    if "total_episodes" not in old:
        old["num_train_epochs"] = _number("num_train_epochs", epochs) / old["rloo_k"]
    old["gradient_accumulation_steps"] *= processes
    if processes > 1:
        lines.append(f"--num_processes {processes}: their batches are accumulated in one process")
    if "warmup_ratio" in given:
        old["warmup_steps"] = _number("warmup_ratio", given["warmup_ratio"])
    for name in IN_UPDATES:
        if _number(name, old.get(name, 0)) >= 1:
            old[name] *= per_update
    size = math.prod(old[name] for name in COUNTS[:3])
    clip = old.pop("reward_clip_range", None)
    lines += _told_clip(clip, size, normalised=bool(old.get("normalize_reward")))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # each older name is told below
        renamed = {SAME.get(name, name): value for name, value in old.items()}
        values = translate_trainer_arguments(renamed)
    for name in old:
        new = {"total_episodes": "max_steps", **RENAMED, **SAME}.get(name, name)
        origin = f"--{name} {_as_text(given[name])}" if name in given else f"(default) {name}"
        lines.append(f"{origin} -> trainer.{new}: {values[new]}")
    lines.append(
        f"an update: {size} completions, {old['rloo_k']} of each of {size // old['rloo_k']} "
        f"prompts; optimizer steps: {per_update}; metrics have the older names too"
    )
    return values | {"max_grad_norm": 0.0, "logging_steps": per_update, "legacy_metrics": True}


def _told_clip(clip: Any, size: int, *, normalised: bool) -> list[str]:
    """Return what becomes of ``reward_clip_range``, which older scores met after normalisation.

    Of ``size`` numbers none is farther than ``(size - 1) / sqrt(size)`` standard deviations from
    their mean, so most batches never meet it.

    Raises:
        ConfigError: It was given, and the batch is large enough for it.
    """
    limit = _number("reward_clip_range", 10.0 if clip is None else clip)
    meets = normalised and size - 1 > limit * math.sqrt(size)
    if meets and clip is not None:
        raise ConfigError(
            f"--reward_clip_range {limit:g} was applied to normalised scores, which is not done "
            f"here: leave it out"
        )
    if meets:
        return [f"normalised scores were cut at {limit:g}, and are not here"]
    reason = "no score can be that far away" if normalised else "--normalize_reward is off"
    return [] if clip is None else [f"--reward_clip_range {limit:g} is needless: {reason}"]


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(f"--{name} is {format_value(value)}, must be a number")
    return value


def _as_text(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)
