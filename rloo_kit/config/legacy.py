"""Command lines of TRL's ``examples/scripts/rloo/rloo.py`` before 0.22, as run files.

Source: TRL v0.21.0, ``rloo.py``, ``rloo_tldr.py`` and ``trl/trainer/rloo_trainer.py``, where

- an episode is a completion;
- an *update* samples ``batch_size = per_device_train_batch_size * gradient_accumulation_steps *
  num_mini_batches * processes`` completions, ``rloo_k`` of each prompt, makes ``num_ppo_epochs *
  num_mini_batches`` optimizer steps and one line of metrics; warm-up and checkpoints count updates;
- without ``total_episodes`` each prompt is seen ``num_train_epochs / rloo_k`` times.
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
        ConfigError: Flags are unknown, would mean something else here, or are missing.
    """
    words = [word for word in words if word.strip(" \\\n")]
    script = next((word for word in words if word.endswith(".py")), "")
    before = words.index(script) if script else 0
    given = _read(words[before + bool(script) :])
    if "num_processes" in (launcher := _read(words[:before])):
        given["num_processes"] = launcher["num_processes"]
    if errors := _errors(given):
        raise ConfigError(format_errors(errors))
    lines = [f"{shlex.join(words[: before + 1])} is skipped"] if script else []
    for name in [name for name in given if name in NEEDLESS or name in REFUSED]:
        reason = NEEDLESS.get(name, "it is so anyway")
        lines.append(f"--{name} {_as_text(given.pop(name))} is needless: {reason}")
    settings = _sections(given, lines, is_tldr=Path(script).name == TLDR)
    settings["trainer"] = _trainer(given, lines)
    longest = settings["trainer"]["max_completion_length"] + 512
    settings["model"]["max_seq_length"] = max(1024, longest)
    return Translation(make_run_config(settings, overrides), tuple(lines))


# --- reading -------------------------------------------------------------------------------------


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
    model = given.get("sft_model_path") or given.get("model_name_or_path")
    reward = given["reward_model_path"]
    settings: dict[str, Any] = {
        "model": {"name": model, "max_seq_length": 1024, "load_in_4bit": False},
        "lora": {"r": 16, "lora_alpha": 32, "target_modules": [*PROJECTIONS, *NEOX]},
        "data": {"chat": False, "held_out": 100},
        "rewards": [{"name": "reward_model", "model": reward, "policy_tokens": True}],
    }
    lines += [f"model.name: {model}", f"--reward_model_path -> rewards: reward_model {reward}"]
    for name, place in MOVED.items():
        if name in given:
            section, _, key = place.rpartition(".")
            (settings[section] if section else settings)[key] = given[name]
            lines.append(f"--{name} {_as_text(given[name])} -> {place}: {given[name]}")
    if is_tldr:
        settings["data"]["max_prompt_tokens"] = 512
        lines.append(f"{TLDR} -> data.max_prompt_tokens: 512; the column prompt is read as it is")
    lines += [
        "data.held_out: 100, the last prompts, as the older script kept them out",
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
    with warnings.catch_warnings():
        # The lines below give each older name
        warnings.simplefilter("ignore", FutureWarning)
        renamed = {SAME.get(name, name): value for name, value in old.items()}
        values = translate_trainer_arguments(renamed)
    for name in old:
        new = {"total_episodes": "max_steps", **RENAMED, **SAME}.get(name, name)
        origin = f"--{name} {_as_text(given[name])}" if name in given else f"(default) {name}"
        lines.append(f"{origin} -> trainer.{new}: {values[new]}")
    lines.append(
        f"an update: {size} completions, {old['rloo_k']} of each of {size // old['rloo_k']} "
        f"prompts; optimizer steps: {per_update}"
    )
    return values | {"max_grad_norm": 0.0, "logging_steps": per_update}


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(f"--{name} is {format_value(value)}, must be a number")
    return value


def _as_text(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)
