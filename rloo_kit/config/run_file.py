"""Run file: one dataclass tree, read from YAML and ``--set``; all errors come in one message.

Reading it loads neither torch nor TRL.
"""

import dataclasses
import os
import re
import typing
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

import yaml

from rloo_kit.config.engine_tables import TABLES, check_table
from rloo_kit.config.lora import check_lora, lora_fields
from rloo_kit.config.settings import DEFAULTS, NO_SYNC, setting
from rloo_kit.config.trainer_settings import translate_trainer_arguments
from rloo_kit.config.values import NO_RULE, check_value, suggest
from rloo_kit.errors import ConfigError
from rloo_kit.text.redaction import remember_settings, without_hidden
from rloo_kit.text.wording import (
    did_you_mean,
    first_line,
    format_errors,
    format_name,
    format_value,
)

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class ModelSection:
    """``model:``, the model to train."""

    name: str = setting(
        "tiny-thinker",
        "A hub name, a model's folder, an adapter's folder (to train it further), a .gguf file, or "
        "tiny-thinker or tiny-caller (embedded).",
    )
    max_seq_length: int = setting(1024, "Longest prompt plus completion, in tokens.", minimum=2)
    load_in_4bit: bool = setting(True, "Load the base in 4 bit (NF4).")
    backend: Literal["auto", "unsloth", "transformers"] = setting(
        "auto",
        "Library that loads the model: `unsloth`, `transformers`, or `auto` (Unsloth if it can "
        "start).",
    )
    trust_remote_code: bool = setting(
        False, "Run the code that comes with the model, if it needs any; only if you trust it."
    )
    revision: str | None = setting(None, "Branch, tag or commit of a hub name; null: main.")
    chat_template: str | None = setting(
        None, "A file with a chat template (Jinja); null: the model's own template."
    )


@dataclass(frozen=True)
class LoraSection:
    """``lora:``, the adapter to train; it also accepts every other field of ``LoraConfig``."""

    r: int = setting(16, "Rank of the adapter.", minimum=1, maximum=1 << 16)
    lora_alpha: int = setting(16, "The adapter is scaled by lora_alpha / r.", minimum=1)
    lora_dropout: float = setting(0.0, "Dropout on the adapter's input.", minimum=0, below=1)
    target_modules: list[str] | str = setting(
        help="Linear layers that get an adapter: their names, a regular expression for their full "
        "dotted names, or `all-linear` (all except the LM head).",
        default_factory=lambda: list(PROJECTIONS),
    )
    others: dict[str, Any] = field(default_factory=dict)
    """Further fields of ``LoraConfig``; a run file lists them with the others."""
    given: ClassVar[frozenset[str]] = frozenset()
    """Names of the settings that the user gave. If ``model.name`` is an adapter to train further,
    all other settings are taken from that adapter."""

    def __new__(cls, *values: Any, **given: Any) -> "LoraSection":
        """Remember which settings were given."""
        section = super().__new__(cls)
        names = [one.name for one in dataclasses.fields(cls)][: len(values)]
        object.__setattr__(section, "given", frozenset([*names, *given]) - {"others"})
        return section

    def as_dict(self) -> dict[str, Any]:
        """Return all settings, by the names of ``LoraConfig``."""
        settings = dataclasses.asdict(self)
        return settings | settings.pop("others")


@dataclass(frozen=True)
class ThinkingSection:
    """``thinking:``, the marks of thoughts, for a model whose family the kit does not know."""

    start: str | None = setting(None, "Text that opens a thought; null: from the tokenizer.")
    end: str | None = setting(None, "Text that closes a thought; null: from the tokenizer.")


@dataclass(frozen=True)
class DataSection:
    """``data:``, the prompts."""

    prompts: str = setting(
        "arithmetic",
        "A built-in task, `reasoning_gym:TASK`, `gsm8k`, `dapo-math`, a .jsonl, .csv or .parquet "
        "file, or a hub dataset.",
    )
    split: str = setting("train", "Split of a hub dataset.")
    config: str | None = setting(
        None, "Configuration (subset) of a hub dataset; null: the only one."
    )
    num_prompts: int | None = setting(
        None,
        "Use only the first N prompts; null: all (1,024 of a built-in or reasoning-gym task).",
        minimum=1,
    )
    held_out: int | None = setting(
        None,
        "Number of prompts kept out of training, which are scored before and after it; null: 256 "
        "if the task has a held-out split of its own, else the last eighth of the prompts (at most "
        "256); 0: none.",
        minimum=0,
    )
    held_out_every: int | None = setting(
        None,
        "Score the held-out prompts also every N steps; null: only before and after training.",
        minimum=1,
    )
    held_out_samples: int = setting(
        1,
        "Completions of each held-out prompt; with more than one, pass@k is reported.",
        minimum=1,
        maximum=1 << 16,
    )
    held_out_rewards: list[Any] = setting(
        help="Rewards that score only the held-out prompts, written as in `rewards:`.",
        default_factory=list,
    )
    system: str | None = setting(
        None,
        "System message put before every prompt; null: that of `gsm8k` or `dapo-math`, or none.",
    )
    chat: bool = setting(
        True, "Make a plain prompt a user message; false for a model without a chat template."
    )
    columns: dict[str, str] | None = setting(
        None,
        "Column names, kit -> source, for example `{prompt: question, answer: solution}`.",
    )
    level: int | list[int] | None = setting(
        None,
        "Difficulty of a built-in or reasoning-gym task, one or several levels; null: the first "
        "(in reasoning-gym: as `settings` say).",
    )
    settings: dict[str, Any] | None = setting(
        None, "Settings of a reasoning-gym task, under its own names."
    )
    enable_thinking: bool | None = setting(
        None,
        "Passed to the chat template of a model that can switch the thought off; null: its "
        "default.",
    )
    max_prompt_tokens: int | None = setting(
        None,
        "Leave out longer prompts; null: a prompt that leaves no room for a completion is an "
        "error.",
        minimum=1,
    )
    max_prompt_quantile: float | None = setting(
        None,
        "Keep this share of the prompts, the shortest ones, for example 0.9; null: all.",
        above=0,
        below=1,
    )
    skip_empty: bool = setting(False, "Leave out empty prompts; false: they are an error.")


@dataclass(frozen=True)
class RunConfig:
    """Settings of a whole run, as ``rloo-kit train RUN.yaml`` reads them."""

    model: ModelSection = field(default_factory=ModelSection)
    lora: LoraSection = field(default_factory=LoraSection)
    thinking: ThinkingSection = field(default_factory=ThinkingSection)
    data: DataSection = field(default_factory=DataSection)
    rewards: list[Any] = setting(
        help="Reward functions: NAME, FILE.py:FUNCTION or package.module:FUNCTION, each with an "
        "optional :WEIGHT; or a table with name, weight and the reward's own parameters.",
        default_factory=lambda: ["accuracy"],
    )
    tools: list[str | dict[str, Any]] = setting(
        help="Tools that the model may call: `calculator`, `python`, FILE.py:FUNCTION or "
        "package.module:FUNCTION; or a table that makes one, `{name: search, file: notes.jsonl}` "
        "([how](../how-to/tools.md)).",
        default_factory=list,
    )
    environment: str | dict[str, str] | None = setting(
        None,
        "Class whose methods are tools: `guess_number`, `maze`, `python_session`, FILE.py:CLASS or "
        "package.module:CLASS; or a table of classes by name, which a column `environment` of the "
        "prompts gives.",
    )
    trainer: dict[str, Any] = setting(
        help="Settings of the trainer, named as in TRL's RLOOConfig, and the kit's own.",
        default_factory=dict,
    )
    unsloth: dict[str, Any] = setting(
        help="Further arguments of Unsloth's FastLanguageModel.from_pretrained and of its "
        "load_vllm.",
        default_factory=dict,
    )
    vllm: dict[str, Any] = setting(
        help="Further arguments of vLLM (fields of its EngineArgs), if it runs in this process "
        "with its own copy of the weights.",
        default_factory=dict,
    )
    output_dir: str = setting(
        "runs/run", "Folder of the run; if it exists, a number is added to the name."
    )
    # NumPy accepts no larger seed
    seed: int = setting(42, "Seed of the run.", minimum=0, maximum=(1 << 32) - 1)

    def as_dict(self) -> dict[str, Any]:
        """Return plain dicts and lists, as written to run.yaml."""
        return dataclasses.asdict(self) | {"lora": self.lora.as_dict()}


# Task -> its reward, if the run file names none
_NUMBER = {"name": "accuracy", "match": "number"}
TASK_REWARDS: dict[str, Any] = {
    "countdown": "countdown",
    "gsm8k": _NUMBER,
    "dapo-math": _NUMBER,
    "math500": "math",
}
SECTIONS: dict[str, type] = {
    "model": ModelSection,
    "lora": LoraSection,
    "thinking": ThinkingSection,
    "data": DataSection,
}
WITH_KEYS = (*SECTIONS, *TABLES)
EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
# In an editable install the folder is next to the package
if not EXAMPLES.is_dir():
    EXAMPLES = EXAMPLES.parents[1] / "examples"
# Errors of PyYAML; other than its own for text such as 2026-13-01, which looks like a date
NOT_YAML = (yaml.YAMLError, RecursionError, LookupError, TypeError, ValueError)


# --- reading -------------------------------------------------------------------------------------


class _Loader(yaml.SafeLoader):
    """YAML's safe loader that refuses a key given twice; YAML would keep the last one silently."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        """Return the table of a node.

        Raises:
            ConfigError: A key is given twice.
        """
        keys = set()
        for key, _ in node.value:
            if key.value in keys:
                raise ConfigError(
                    f"line {key.start_mark.line + 1} of the run file gives the key "
                    f"{format_name(key.value)} again: keep one of them"
                )
            keys.add(key.value)
        return super().construct_mapping(node, deep)


def read_run_file(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read and check a run file.

    Args:
        path: A YAML file, or the name of one that ships with the kit, such as ``quickstart``.
        overrides: Settings ``section.key=value`` that replace those of the file.

    Raises:
        ConfigError: The file is missing or not YAML, or any setting is wrong; all errors are in the
            one message.
    """
    name = format_value(str(path))
    try:
        text = find_run_file(path).read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        shipped = ", ".join(sorted(f.stem for f in EXAMPLES.glob("*.yaml")))
        raise ConfigError(
            f"run file {name} does not exist: give the path of a YAML file, or one that "
            f"ships with the kit ({shipped})"
        ) from None
    except (OSError, UnicodeError) as exc:
        raise ConfigError(
            f"run file {name} cannot be read as text ({first_line(exc)}): save it as UTF-8"
        ) from exc
    try:
        content = yaml.load(text, _Loader)
    except ConfigError:
        raise
    except NOT_YAML as exc:
        mark = getattr(exc, "problem_mark", None)
        problem = getattr(exc, "problem", None)
        line = f" in line {mark.line + 1}" if mark else ""
        raise ConfigError(
            f"run file {name} is not valid YAML{line}: {first_line(ValueError(problem or exc))}; "
            f"check the indentation and quotes there"
        ) from exc
    return make_run_config({} if content is None else content, overrides)


def find_run_file(path: str | Path) -> Path:
    """Return the path of a run file: ``path``, or that of an example of the kit.

    If no file exists at ``path``, and ``path`` is the name of an example (without ``.yaml``), the
    example is returned. In all other cases ``path`` is returned, also if nothing exists there.
    """
    shipped = EXAMPLES / f"{Path(path).name}.yaml"
    is_name = not os.path.isfile(path) and str(path) == shipped.stem
    return shipped if is_name and shipped.exists() else Path(path)


# --- overrides -----------------------------------------------------------------------------------


def read_overrides(overrides: Sequence[str]) -> dict[str, Any]:
    """Return ``section.key=value`` settings as a table for each section.

    Raises:
        ConfigError: A setting has another form.
    """
    content: dict[str, Any] = {}
    if errors := _apply_overrides(content, overrides):
        raise ConfigError(format_errors(errors))
    remember_settings(content)
    return content


def read_value(text: str) -> Any:
    """Return the value of a text after ``--set``: YAML, but with ``1e-3`` as a number."""
    if re.fullmatch(r"\s*[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+\s*", text):
        # YAML 1.1 needs a point and a sign: 1.0e-3
        return float(text)
    try:
        return yaml.safe_load(text)
    except NOT_YAML:
        return text


def _apply_overrides(content: dict[str, Any], overrides: Sequence[str]) -> list[str]:
    """Write overrides into the content; return errors in their form."""
    errors = []
    for override in overrides:
        path, equals, text = override.partition("=")
        keys = path.strip().split(".")
        section = keys[0]
        table = content.get(section) or {}
        if not equals or not all(keys) or len(keys) > 2:
            errors.append(
                f"--set {format_value(override)} does not have the form section.key=value: write "
                "it like trainer.beta=0.1"
            )
        elif len(keys) == 1:
            content[section] = read_value(text)
        elif section not in WITH_KEYS or not isinstance(table, Mapping):
            errors.append(
                f"--set {format_value(override)}: {format_value(section)} is not a section with "
                "keys"
            )
        else:
            content[section] = {**table, keys[1]: read_value(text)}
    return errors


def without_hidden_settings(config: RunConfig) -> RunConfig:
    """Return a run's settings without the secrets that were masked in its run.yaml.

    They are then read from the environment and .env.
    """
    settings = config.as_dict()
    kept = without_hidden(settings)
    return config if kept == settings else make_run_config(kept)


# --- checking ------------------------------------------------------------------------------------


def make_run_config(content: object, overrides: Sequence[str] = ()) -> RunConfig:
    """Check the content of a run file, and return it as a ``RunConfig``.

    Args:
        content: The table of sections, as YAML gives it.
        overrides: Settings ``section.key=value`` that replace those of the content.

    Raises:
        ConfigError: A setting is wrong; all errors are in the one message.
    """
    if not isinstance(content, Mapping):
        raise ConfigError(
            f"a run file holds `section: {{key: value}}`, not a {type(content).__name__}; start "
            f"from examples/quickstart.yaml"
        )
    content = dict(content)
    errors = _apply_overrides(content, overrides)
    remember_settings(content)
    # A section may be empty
    content = {k: v for k, v in content.items() if v is not None or k not in WITH_KEYS}
    config: RunConfig = _make_section(RunConfig, content, "", errors)
    for name in TABLES:
        errors += check_table(name, getattr(config, name))
    try:
        trainer = translate_trainer_arguments(config.trainer, all_types=True)
        config = dataclasses.replace(config, trainer=trainer)
    except ConfigError as exc:
        errors.append(str(exc))
    reward = TASK_REWARDS.get(config.data.prompts.partition(":")[0])
    if reward is not None and "rewards" not in content:
        config = dataclasses.replace(config, rewards=[reward])
    errors = errors or _check_together(config)
    if errors:
        raise ConfigError(format_errors(errors))
    return config


def _make_section(kind: type, content: object, path: str, errors: list[str]) -> Any:
    """Return a section made of the correct values in the content; add the errors to ``errors``."""
    if not isinstance(content, Mapping):
        errors.append(f"{path[:-1]}: must hold `key: value` lines, not {format_value(content)}")
        return kind()
    hints = typing.get_type_hints(kind)
    known = {one.name: one.metadata.get("rule", NO_RULE) for one in dataclasses.fields(kind)}
    others = lora_fields() if known.pop("others", None) else ()
    good: dict[str, Any] = {}
    for key, value in content.items():
        if key not in known and key in others:
            good["others"] = {**good.get("others", {}), key: value}
        elif key not in known:
            near = did_you_mean(str(key), [*known, *others]) or suggest(str(key), known)
            errors.append(f"unknown key {path}{format_name(key)}{near}")
        elif dataclasses.is_dataclass(hints[key]):
            good[key] = _make_section(hints[key], value, f"{key}.", errors)
        elif wrong := check_value(f"{path}{key}", value, hints[key], known[key]):
            errors += wrong
        else:
            good[key] = value
    return kind(**good)


def _is_plain_accuracy(reward: object) -> bool:
    if isinstance(reward, dict):
        return reward.get("name") == "accuracy" and reward.keys() <= {"name", "weight"}
    return isinstance(reward, str) and reward.partition(":")[0] == "accuracy"


def _check_together(config: RunConfig) -> list[str]:
    """Return errors in combinations of settings that are each valid."""
    model = config.model
    data = config.data
    stops = config.trainer.get("stop_on") or ()
    completion = config.trainer.get("max_completion_length") or DEFAULTS["max_completion_length"]
    task = data.prompts.partition(":")[0]
    targets = config.lora.target_modules
    plain = [_is_plain_accuracy(one) for one in config.rewards]
    rules = [
        (
            not targets,
            "lora.target_modules is empty: name at least one linear layer, such as q_proj",
        ),
        (
            isinstance(targets, str) and re.fullmatch(r"\w*", targets),
            f"lora.target_modules is {format_value(targets)}, must be a list of names such as "
            "[q_proj], all-linear, or a regular expression for full dotted names such as .*q_proj",
        ),
        (
            bool(config.thinking.start) != bool(config.thinking.end),
            "thinking: needs both start and end: add the missing one",
        ),
        (
            config.environment == {},
            "environment: is empty: name a class, or leave it out",
        ),
        (
            not (config.rewards or config.environment),
            "rewards: is empty: give at least one reward",
        ),
        (
            TASK_REWARDS.get(task) == _NUMBER and data.system is None and any(plain),
            f"rewards: accuracy compares the whole answer, but {task} asks for worked answers: "
            "write {name: accuracy, match: number}",
        ),
        (
            not Path(config.output_dir).name,
            f"output_dir is {config.output_dir!r}, must be the name of a new folder",
        ),
        (
            completion >= model.max_seq_length,
            f"trainer.max_completion_length {completion} leaves no room for a prompt in "
            f"model.max_seq_length {model.max_seq_length}: raise the latter or lower the former",
        ),
        (
            data.max_prompt_quantile and data.max_prompt_tokens,
            "data.max_prompt_quantile and data.max_prompt_tokens both limit prompts: give one",
        ),
        (
            data.held_out_every and data.held_out == 0,
            "data.held_out_every needs held-out prompts: set data.held_out above 0",
        ),
        (
            config.lora.others.get("bias", "none") != "none"
            and config.trainer.get("beta", DEFAULTS["beta"]),
            "lora.bias trains biases of the base, but the base is the reference for trainer.beta: "
            "set trainer.beta: 0, or leave lora.bias out",
        ),
        (config.trainer.get("sync_ref_model"), NO_SYNC),
        (
            "reward_hacking" in stops and not data.held_out_every,
            "trainer.stop_on names reward_hacking, which only held-out prompts show: set "
            "data.held_out_every, for example to 10",
        ),
    ]
    wrong = [message for is_wrong, message in rules if is_wrong]
    return wrong + check_lora(config.lora.others, "lora.")
