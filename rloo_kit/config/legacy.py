"""Command lines of TRL's ``examples/scripts/rloo/rloo.py`` before 0.22, as run files.

Source: TRL v0.21.0, ``rloo.py``, ``rloo_tldr.py`` and ``trl/trainer/rloo_trainer.py``, where

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

from rloo_kit.config.run_file import PROJECTIONS, RunConfig, make_run_config, read_value
from rloo_kit.config.trainer_settings import (
    RENAMED,
    known_trainer_fields,
    translate_trainer_arguments,
)
from rloo_kit.errors import ConfigError
from rloo_kit.text.redaction import redact, redact_tree
from rloo_kit.text.wording import did_you_mean, first_line, format_errors, format_value

_FLAGS = yaml.safe_load(Path(__file__).with_name("legacy_flags.yaml").read_text("utf-8"))
DEFAULTS: dict[str, Any] = _FLAGS["defaults"]
COUNTS: list[str] = _FLAGS["counts"].split()
MOVED: dict[str, str] = _FLAGS["moved"]
SAME: dict[str, str] = _FLAGS["same"]
# Flags that change nothing here, and why
NEEDLESS = {flag: why for why, flags in _FLAGS["needless"].items() for flag in flags.split()}
# Flags that would mean something else here, and what to do instead
REFUSED = {flag: why for why, flags in _FLAGS["refused"].items() for flag in flags.split()}
HARMLESS: dict[str, str] = _FLAGS["harmless"]
# Linear layers of GPT-NeoX, of which the older examples' Pythia models are made
NEOX = ("query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h")
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
        name = format_value(os.fspath(path))
        try:
            with open(path, "x", encoding="utf-8") as file:
                file.write(self.as_text())
        except FileExistsError:
            raise ConfigError(f"{name} exists: give another name, or remove it first") from None
        except OSError as exc:
            raise ConfigError(
                f"the run file cannot be written to {name} ({first_line(exc)}): give another path"
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
    if errors := _errors(given):
        raise ConfigError(format_errors(errors))
    skipped = [*launcher, *([script] if script else [])]
    lines = [f"{shlex.join(skipped)} is skipped"] if skipped else []
    for name in [name for name in given if name in NEEDLESS or name in REFUSED]:
        reason = NEEDLESS.get(name, "it is so anyway")
        lines.append(f"--{name} {_as_text(given.pop(name))} is needless: {reason}")
    settings = _sections(given, lines, is_tldr=Path(script).name == TLDR)
    settings["trainer"] = _trainer(given, lines)
    longest = settings["trainer"]["max_completion_length"] + 512
    settings["model"]["max_seq_length"] = max(1024, longest)
    return Translation(make_run_config(settings, overrides), tuple(lines))


# --- reading -------------------------------------------------------------------------------------


def _split(words: Sequence[str]) -> tuple[list[str], str, list[str]]:
    """Return the words before the script, the script or "", and the flags.

    Raises:
        ConfigError: The line begins with a word that is neither a flag nor a launcher.
    """
    words = [word for word in words if word.strip(" \\\n")]
    for place, word in enumerate(words):
        if word.endswith(".py"):
            return words[:place], word, words[place + 1 :]
    flags = next((i for i, word in enumerate(words) if word.startswith("--")), len(words))
    for word in words[:flags]:
        if word not in LAUNCHERS:
            raise ConfigError(
                f"{format_value(word)} is no flag of the older script: write --NAME VALUE, as in "
                f"--dataset_name prompts.jsonl"
            )
    return words[:flags], "", words[flags:]


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
    known, values = _known(), {}
    for name, texts in found.items():
        if name.startswith("no_") and name not in known:
            values[name[3:]] = False
        else:
            values[name] = _value(name, texts) if texts else True
    return values


def _value(name: str, texts: list[str]) -> Any:
    if name in _FLAGS["texts"].split():
        return " ".join(texts)
    values = [read_value(text) for text in texts]
    return values if len(values) > 1 or name == "lora_target_modules" else values[0]


def _known() -> set[str]:
    fields = known_trainer_fields() - set(RENAMED.values())
    return {
        *fields, *RENAMED, *COUNTS, *MOVED, *SAME, *NEEDLESS, *REFUSED, *_FLAGS["computed"].split(),
    }  # fmt: skip


def _errors(given: Mapping[str, Any]) -> list[str]:
    """Return what is wrong with the flags."""
    known, older = _known(), {new: old for old, new in reversed(RENAMED.items())}
    errors = []
    for name, value in given.items():
        if name in older:
            errors.append(f"--{name} is today's name: the older script has --{older[name]}")
        elif name not in known:
            errors.append(f"unknown flag --{name}{did_you_mean(name, known)}")
        elif name in REFUSED and value != HARMLESS.get(name, False):
            errors.append(f"--{name}: {REFUSED[name]}")
        elif name in COUNTS and (type(value) is not int or value < 1):
            errors.append(
                f"--{name} is {format_value(value)}, must be a whole number of at least 1"
            )
    if "dataset_name" not in given:
        errors.append("no prompts are named: give --dataset_name, a file or a hub dataset")
    if not {"sft_model_path", "model_name_or_path"} & set(given):
        errors.append("no model is named: give --sft_model_path or --model_name_or_path")
    if "reward_model_path" not in given:
        errors.append("no reward model is named: give --reward_model_path, a folder or a hub name")
    return errors


# --- translating ---------------------------------------------------------------------------------


def _sections(given: dict[str, Any], lines: list[str], *, is_tldr: bool) -> dict[str, Any]:
    """Return all of the run file but ``trainer:``; report it in ``lines``."""
    policy, named = given.get("sft_model_path"), given.get("model_name_or_path")
    if policy:
        lines.append(f"--sft_model_path {policy} -> model.name: {policy}")
    else:
        lines.append(
            f"--model_name_or_path {named} -> model.name: {named} (the older script trained "
            f"--sft_model_path, by default EleutherAI/pythia-160m)"
        )
    if policy and named and policy != named:
        lines.append(f"--model_name_or_path {named} is needless: the tokenizer of {policy} is used")
    reward = given["reward_model_path"]
    settings: dict[str, Any] = {
        "model": {"name": policy or named, "max_seq_length": 1024, "load_in_4bit": False},
        "lora": {"r": 16, "lora_alpha": 32, "target_modules": [*PROJECTIONS, *NEOX]},
        "data": {"chat": False, "held_out": 100},
        "rewards": [{"name": "reward_model", "model": reward, "policy_tokens": True}],
    }
    lines.append(
        f"--reward_model_path {reward} -> rewards: reward_model {reward}, which reads the policy's "
        f"own tokens, as it did"
    )
    for name, place in MOVED.items():
        if name in given:
            section, _, key = place.rpartition(".")
            (settings[section] if section else settings)[key] = given[name]
            lines.append(f"--{name} {_as_text(given[name])} -> {place}: {given[name]}")
    if is_tldr:
        settings["data"]["max_prompt_tokens"] = 512
        lines.append(
            f"{TLDR} -> data.max_prompt_tokens: 512; the column prompt is read as it is, where "
            f"that script put the first message through a chat template"
        )
    lines += [
        "data.held_out: 100, the last prompts, as the older script kept them out; "
        "--set data.held_out=N keeps out N",
        "all weights were trained; here a LoRA adapter learns, which usually wants a learning rate "
        "ten times as high",
    ]
    return settings


def _trainer(given: dict[str, Any], lines: list[str]) -> dict[str, Any]:
    """Return ``trainer:``; report it in ``lines``."""
    fields = {*known_trainer_fields(), *RENAMED, *SAME, "total_episodes"} - {*MOVED}
    old = {**DEFAULTS, **{name: given[name] for name in given if name in fields}}
    epochs = _number("num_train_epochs", old.pop("num_train_epochs"))
    per_update = old["num_ppo_epochs"] * old["num_mini_batches"]
    if "total_episodes" not in old:
        old["num_train_epochs"] = epochs / old["rloo_k"]
    if (processes := given.get("num_processes", 1)) > 1:
        old["gradient_accumulation_steps"] *= processes
        lines.append(f"--num_processes {processes}: their batches are accumulated in one process")
    if "warmup_ratio" in given:
        old["warmup_steps"] = _number("warmup_ratio", given["warmup_ratio"])
    for name in ("warmup_steps", "save_steps"):
        if _number(name, old.get(name, 0)) >= 1:
            old[name] *= per_update
    size = math.prod(old[name] for name in COUNTS[:3])
    clip = old.pop("reward_clip_range", None)
    lines += _clip_lines(clip, size, bool(old.get("normalize_reward")))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # the lines below give each older name
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
    return values | {"max_grad_norm": 0.0, "logging_steps": per_update}


def _clip_lines(clip: Any, size: int, is_normalised: bool) -> list[str]:
    """Return what becomes of ``reward_clip_range``, which older scores met after normalisation.

    Of ``size`` numbers none is farther than ``(size - 1) / sqrt(size)`` standard deviations from
    their mean, so most batches never meet it.

    Raises:
        ConfigError: It was given, and the batch is large enough for it.
    """
    limit = _number("reward_clip_range", 10.0 if clip is None else clip)
    meets = is_normalised and size - 1 > limit * math.sqrt(size)
    if meets and clip is not None:
        raise ConfigError(
            f"--reward_clip_range {limit:g} was applied to normalised scores, which is not done "
            f"here: leave it out"
        )
    if meets:
        return [f"normalised scores were cut at {limit:g}, and are not here"]
    reason = "no score can be that far away" if is_normalised else "--normalize_reward is off"
    return [] if clip is None else [f"--reward_clip_range {limit:g} is needless: {reason}"]


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(f"--{name} is {format_value(value)}, must be a number")
    return value


def _as_text(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)
