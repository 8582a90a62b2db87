"""Conversion of command lines of TRL's ``rloo.py`` and ``rloo_tldr.py`` (v0.21.0) to run files."""

from collections.abc import Sequence
from typing import Any

import yaml

from rloo_kit.config.other_names import MOVED
from rloo_kit.config.run_file import PROJECTIONS, make_run_config, read_value
from rloo_kit.errors import ConfigError

# Defaults of the older trainer that differ from the kit's. The older trainer did not clip gradients
DEFAULTS = {
    "learning_rate": 5e-5,
    "max_grad_norm": 0.0,
    "num_ppo_epochs": 4,
    "response_length": 53,
    "rloo_k": 2,
    "temperature": 0.7,
}
NEEDED = ("dataset_name", "model_name_or_path", "reward_model_path", "total_episodes")
# Linear layers of GPT-NeoX, for the scripts' Pythia models
NEOX = ("query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h")
# Flag -> key of the run file, for flags that are not trainer settings
PLACES = {
    **{name: place for name, (place, _) in MOVED.items()},
    "output_dir": "output_dir",
    "seed": "seed",
}


def legacy_run_file(words: Sequence[str]) -> str:
    """Convert a command line of TRL's older RLOO scripts to a run file, and return its YAML text.

    The settings of the run file are checked.

    Args:
        words: The words of the command line. The launcher and the script's name are ignored.

    Raises:
        ConfigError: A flag is missing or unknown, the kit has no setting for it, or its value is
            wrong.
    """
    given = DEFAULTS | _flags(words)
    if missing := [f"--{name}" for name in NEEDED if name not in given]:
        raise ConfigError(f"the command line does not give {' and '.join(missing)}: add them")
    content: dict[str, Any] = {
        "model": {"load_in_4bit": False},
        "lora": {"target_modules": [*PROJECTIONS, *NEOX]},
        "data": {"chat": False, "max_prompt_tokens": 512, "held_out": 100},
        "trainer": {},
    }
    for name in sorted(given):  # sorted, so that sft_model_path replaces model_name_or_path
        section, _, key = PLACES.get(name, f"trainer.{name}").rpartition(".")
        (content[section] if section else content)[key] = given[name]
    content["rewards"] = [
        {"name": "reward_model", "model": content["rewards"], "policy_tokens": True}
    ]
    content["trainer"] = make_run_config(content).trainer
    note = "# Only an adapter is trained: it usually needs ten times the learning rate.\n"
    return note + yaml.safe_dump(content, sort_keys=False)


def _flags(words: Sequence[str]) -> dict[str, Any]:
    """Parse a command line as ``HfArgumentParser`` does; return a dict from flag to value.

    The value is True if the flag has no value, and a list if it has several.
    """
    start = next((place for place, word in enumerate(words) if word.endswith(".py")), 0)
    found = {}
    values = []  # values of the latest flag; words before the first flag are dropped
    for word in words[start:]:
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            values = [read_value(value)] if equals else []
            found[name.replace("-", "_")] = values
        else:
            values.append(read_value(word))
    return {name: many if len(many) > 1 else (many or [True])[0] for name, many in found.items()}
