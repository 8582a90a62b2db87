"""Read a run file (YAML) and ``--set`` options into a tree of dataclasses, and check all settings.

All errors are reported in one message. Neither torch nor TRL is imported.
"""

import dataclasses
import math
import os
import re
import typing
from collections.abc import Hashable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

import yaml

from rloo_kit.config.engine_tables import TABLES, check_table
from rloo_kit.config.lora import check_lora, lora_fields
from rloo_kit.config.settings import DEFAULTS, NO_SYNC, setting
from rloo_kit.config.trainer_settings import translate_trainer_arguments
from rloo_kit.config.values import check_value, suggest
from rloo_kit.errors import ConfigError
from rloo_kit.text.redaction import remember_settings, without_hidden
from rloo_kit.text.wording import did_you_mean, first_line, format_errors, format_name, format_value

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class ModelSection:
    """Section ``model:``, the model to train."""

    name: str = setting(
        "tiny-thinker",
        "Name of a model on the hub, folder of a model, folder of an adapter (to train it "
        "further), a .gguf file, or a tiny built-in model: tiny-thinker or tiny-caller.",
    )
    max_seq_length: int = setting(
        1024, "Maximum length of prompt plus completion, in tokens.", minimum=2
    )
    load_in_4bit: bool = setting(True, "Load the base model in 4 bit (NF4).")
    backend: Literal["auto", "unsloth", "transformers"] = setting(
        "auto",
        "Library that loads the model: `unsloth`, `transformers`, or `auto`, which uses Unsloth "
        "if it works on this machine.",
    )
    trust_remote_code: bool = setting(
        False,
        "When the model is loaded, run the Python code in its folder or hub repository; set true "
        "only for a model that you trust.",
    )
    revision: str | None = setting(
        None, "Branch, tag or commit of a model on the hub; null: the branch main."
    )
    chat_template: str | None = setting(
        None, "A file with a chat template (Jinja); null: the model's own template."
    )


@dataclass(frozen=True, kw_only=True)
class LoraSection:
    """Section ``lora:``, the adapter to train; other fields of ``LoraConfig`` are keys here too."""

    r: int = setting(16, "Rank of the adapter.", minimum=1, maximum=1 << 16)
    lora_alpha: int = setting(16, "The adapter is scaled by lora_alpha / r.", minimum=1)
    lora_dropout: float = setting(0.0, "Dropout on the adapter's input.", minimum=0, below=1)
    target_modules: list[str] | str = setting(
        help="Linear layers that get an adapter: a list of their names, a regular expression that "
        "matches their full dotted names, or `all-linear` (all except the LM head).",
        default_factory=lambda: list(PROJECTIONS),
    )
    others: dict[str, Any] = field(default_factory=dict)
    """Other fields of ``LoraConfig``. In a run file they are direct keys of ``lora:``."""
    given: ClassVar[Set[str]]
    """Names of the settings that the user gave. If ``model.name`` is an adapter to train further,
    the settings that are not in this set are read from that adapter."""

    def __new__(cls, **given: Any) -> "LoraSection":
        """Create a section that remembers in ``given`` which settings were passed."""
        section = super().__new__(cls)
        object.__setattr__(section, "given", given.keys() - {"others"})
        return section

    def as_dict(self) -> dict[str, Any]:
        """Return all settings in one dict, with the names that ``LoraConfig`` uses."""
        settings = dataclasses.asdict(self)
        return settings | settings.pop("others")


@dataclass(frozen=True)
class ThinkingSection:
    """Section ``thinking:``, the texts around a thought, for a model family unknown to the kit."""

    start: str | None = setting(
        None, "Text that begins a thought, such as `<think>`; null: detected from the tokenizer."
    )
    end: str | None = setting(
        None, "Text that ends a thought, such as `</think>`; null: detected from the tokenizer."
    )


@dataclass(frozen=True)
class DataSection:
    """Section ``data:``, the prompts."""

    prompts: str = setting(
        "arithmetic",
        "Source of the prompts: a built-in task, `reasoning_gym:TASK`, `gsm8k`, `dapo-math`, a "
        ".jsonl, .csv or .parquet file, or a dataset on the hub.",
    )
    split: str = setting("train", "Split of a hub dataset.")
    config: str | None = setting(
        None,
        "Configuration (subset) of a hub dataset; null: the default configuration, or the only "
        "one if there is no default.",
    )
    num_prompts: int | None = setting(
        None,
        "Use only the first N prompts; null: all prompts, or 1,024 for a built-in or reasoning-gym "
        "task.",
        minimum=1,
    )
    held_out: int | None = setting(
        None,
        "Number of held-out prompts: they are not trained on, and are scored before and after "
        "training. null: 256 if the task has a held-out split, else the last eighth of the prompts "
        "(at most 256); 0: none.",
        minimum=0,
    )
    held_out_every: int | None = setting(
        None,
        "Score the held-out prompts every N steps too; null: only before and after training.",
        minimum=1,
    )
    held_out_samples: int = setting(
        1,
        "Number of completions sampled for each held-out prompt; with more than one, pass@k is "
        "reported too.",
        minimum=1,
        maximum=1 << 16,
    )
    held_out_rewards: list[Any] = setting(
        help="Rewards that score only the held-out prompts, written as in `rewards:`.",
        default_factory=list,
    )
    system: str | None = setting(
        None,
        "System message that is put before every prompt; null: none, except for `gsm8k` and "
        "`dapo-math`, which have a system message of their own.",
    )
    chat: bool = setting(
        True,
        "Turn each prompt that is plain text into a user message and apply the chat template; set "
        "false for a model without a chat template.",
    )
    columns: dict[str, str] | None = setting(
        None,
        "Column names, from the kit's name to the name in your data, for example "
        "`{prompt: question, answer: solution}`.",
    )
    level: int | list[int] | None = setting(
        None,
        "Difficulty of a built-in or reasoning-gym task: one level or a list of levels; null: "
        "level 1 of a built-in task, or the default difficulty of a reasoning-gym task, which "
        "`settings` can change.",
    )
    settings: dict[str, Any] | None = setting(
        None, "Settings of a reasoning-gym task, with the names that the task uses."
    )
    enable_thinking: bool | None = setting(
        None,
        "Value of `enable_thinking` for the chat template of a model whose thinking can be "
        "switched off; null: the template's default.",
    )
    max_prompt_tokens: int | None = setting(
        None,
        "Leave out prompts with more tokens than this; null: keep all prompts, and report an error "
        "if a prompt leaves no room for a completion.",
        minimum=1,
    )
    max_prompt_quantile: float | None = setting(
        None,
        "Keep only this share of the prompts, the shortest ones, for example 0.9; null: keep all.",
        above=0,
        below=1,
    )
    skip_empty: bool = setting(False, "Leave out empty prompts; false: they are an error.")


@dataclass(frozen=True)
class RunConfig:
    """All settings of a run; ``rloo-kit train RUN.yaml`` reads them from a run file."""

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
        help="Tools that the model may call: `calculator`, `python`, FILE.py:FUNCTION, "
        "package.module:FUNCTION, or a table with a tool's name and parameters, such as `{name: "
        "search, file: notes.jsonl}` ([how](../how-to/tools.md)).",
        default_factory=list,
    )
    environment: str | dict[str, str] | None = setting(
        None,
        "Class whose methods the model may call as tools: `guess_number`, `maze`, "
        "`python_session`, FILE.py:CLASS or package.module:CLASS. To use several classes, give a "
        "table from names to classes; each prompt then gives the name of its class in the column "
        "`environment`.",
    )
    trainer: dict[str, Any] = setting(
        help="Settings of the trainer: all fields of TRL's RLOOConfig, and the kit's own.",
        default_factory=dict,
    )
    unsloth: dict[str, Any] = setting(
        help="Further arguments for Unsloth's FastLanguageModel.from_pretrained and load_vllm.",
        default_factory=dict,
    )
    vllm: dict[str, Any] = setting(
        help="Further arguments for vLLM (fields of its EngineArgs), used if vLLM runs in this "
        "process with its own copy of the weights.",
        default_factory=dict,
    )
    output_dir: str = setting(
        "runs/run", "Folder for the results of the run; if it exists, a number is added."
    )
    # NumPy accepts no larger seed
    seed: int = setting(
        42, "Seed of all random number generators.", minimum=0, maximum=(1 << 32) - 1
    )

    def as_dict(self) -> dict[str, Any]:
        """Return all settings as plain dicts and lists, in the form of run.yaml."""
        return dataclasses.asdict(self) | {"lora": self.lora.as_dict()}


_NUMBER = {"name": "accuracy", "match": "number"}
# Task -> its default reward, used if the run file has no `rewards:`
TASK_REWARDS: dict[str, Any] = {
    "countdown": "countdown",
    "gsm8k": _NUMBER,
    "dapo-math": _NUMBER,
    "math500": "math",
    "reasoning_gym": "reasoning_gym",
}
SECTIONS: dict[str, type] = {
    "model": ModelSection,
    "lora": LoraSection,
    "thinking": ThinkingSection,
    "data": DataSection,
}
WITH_KEYS = (*SECTIONS, *TABLES)
EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
# In an editable install, the folder of the examples is next to the package
if not EXAMPLES.is_dir():
    EXAMPLES = EXAMPLES.parents[1] / "examples"
EXAMPLE_NAMES = sorted(file.stem for file in EXAMPLES.glob("*.yaml"))
# Errors that PyYAML raises; some of them only for text such as 2026-13-01, an invalid date
NOT_YAML = (yaml.YAMLError, RecursionError, LookupError, TypeError, ValueError)


# --- reading -------------------------------------------------------------------------------------


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader, but a key that is given twice is an error.

    PyYAML itself would silently use the last value.
    """

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        """Return the dict for a YAML mapping.

        Raises:
            ConfigError: A key is given twice.
        """
        keys = set()
        for key, _ in node.value:
            if key.value in keys:
                raise ConfigError(
                    f"line {key.start_mark.line + 1} of the run file gives the key "
                    f"{format_name(key.value)} again: remove one of the two lines"
                )
            keys.add(key.value)
        return super().construct_mapping(node, deep)


def read_run_file(
    path: str | Path, overrides: Sequence[str] = (), *, recorded: bool = False
) -> RunConfig:
    """Read and check a run file.

    Args:
        path: A YAML file, or the name of one that ships with the kit, such as ``quickstart``.
        overrides: Settings in the form ``section.key=value`` that replace those of the file.
        recorded: As in ``make_run_config``.

    Raises:
        ConfigError: The file is missing or not YAML, or any setting is wrong. One message lists up
            to 12 wrong settings. Some errors, such as settings that contradict each other, are
            reported only if there is no other error.
    """
    name = format_value(str(path))
    try:
        text = find_run_file(path).read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise ConfigError(
            f"run file {name} does not exist: give the path of a YAML file, or the name of an "
            f"example that comes with rloo-kit ({', '.join(EXAMPLE_NAMES)})"
        ) from None
    except (OSError, ValueError) as exc:  # not UTF-8, or a path with a null byte
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
    return make_run_config({} if content is None else content, overrides, recorded=recorded)


def find_run_file(path: str | Path) -> Path:
    """Return the path of a run file, which may be given by the name of an example.

    If no file exists at ``path``, and ``path`` is the name of one of the kit's examples (without
    ``.yaml``), the path of that example is returned. In all other cases ``path`` is returned
    unchanged, even if the file does not exist.
    """
    is_example = str(path) in EXAMPLE_NAMES and not os.path.isfile(path)
    return EXAMPLES / f"{path}.yaml" if is_example else Path(path)


# --- overrides -----------------------------------------------------------------------------------


def read_overrides(
    overrides: Sequence[str], content: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Parse ``--set`` options, and return them as a dict in the form of a run file.

    Args:
        overrides: Settings in the form ``section.key=value``, or ``key=value`` at the top level.
        content: Content of a run file, to which the settings are added; it is not changed.

    Raises:
        ConfigError: A setting does not have this form, or ``section`` is not a section with keys.
    """
    content = dict(content or {})
    if errors := _apply_overrides(content, overrides):
        raise ConfigError(format_errors(errors))
    remember_settings(content)
    return content


def read_value(text: str) -> Any:
    """Parse the value of a ``--set`` option as YAML, but read ``1e-3`` as a number.

    A text that is not valid YAML is returned as it is.
    """
    if re.fullmatch(r"\s*[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+\s*", text):
        # YAML 1.1 needs a point and a sign: 1.0e-3
        return float(text)
    try:
        return yaml.safe_load(text)
    except NOT_YAML:
        return text


def _apply_overrides(content: dict[str, Any], overrides: Sequence[str]) -> list[str]:
    """Write ``--set`` options into ``content``; return a message for each malformed option."""
    errors = []
    for override in [overrides] if isinstance(overrides, str) else overrides:
        form = re.fullmatch(r"\s*([^.=\s]+)(?:\.([^.=\s]+))?\s*=(.*)", override, re.DOTALL)
        if form is None:
            errors.append(
                f"--set {format_value(override)} does not have the form section.key=value: write "
                "it like --set trainer.beta=0.1"
            )
            continue
        section, key, value = form[1], form[2], read_value(form[3])
        table = content.get(section) or {}
        if key is None:
            content[section] = value
        elif section in WITH_KEYS and isinstance(table, Mapping):
            content[section] = {**table, key: value}
        else:
            errors.append(
                f"--set {format_value(override)} cannot be used, because {format_value(section)} "
                "is not a section with keys: correct its name"
            )
    return errors


def without_hidden_settings(config: RunConfig) -> RunConfig:
    """Return settings that were read from a run.yaml, without those that are masked secrets.

    When a run.yaml is written, each secret is replaced by a mask such as ``[hidden]``. A setting
    whose whole value is a mask is left out, and its secret must come from the environment or the
    file .env.
    """
    settings = config.as_dict()
    kept = without_hidden(settings)
    return config if kept == settings else make_run_config(kept, recorded=True)


# --- checking ------------------------------------------------------------------------------------


def make_run_config(
    content: object, overrides: Sequence[str] = (), *, recorded: bool = False
) -> RunConfig:
    """Check the content of a run file, and return it as a ``RunConfig``.

    Args:
        content: The content of the file, as YAML returns it; anything but a dict is an error.
        overrides: Settings in the form ``section.key=value`` that replace those of the content.
        recorded: True for the settings of a run that has begun, perhaps with an older version of
            the kit. Batch sizes and contradictions between settings are then not checked.

    Raises:
        ConfigError: A setting is wrong. One message lists the first 12 errors and counts the
            others. Settings that contradict each other are reported only if there is no other
            error.
    """
    if not isinstance(content, Mapping):
        raise ConfigError(
            f"a run file must consist of sections with `key: value` lines, not a "
            f"{type(content).__name__}; start from examples/quickstart.yaml"
        )
    content = dict(content)
    errors = _apply_overrides(content, overrides)
    remember_settings(content)
    # A section may be empty
    content = {k: v for k, v in content.items() if v is not None or k not in WITH_KEYS}
    config = _make_section(RunConfig, content, "", errors)
    for name in TABLES:
        errors += check_table(name, getattr(config, name))
    try:
        trainer = translate_trainer_arguments(config.trainer, all_types=True, recorded=recorded)
        config = dataclasses.replace(config, trainer=trainer)
    except ConfigError as exc:
        errors.append(str(exc))
    reward = TASK_REWARDS.get(config.data.prompts.partition(":")[0])
    if reward is not None and "rewards" not in content:
        config = dataclasses.replace(config, rewards=[reward])
    errors = errors or ([] if recorded else _check_together(config))
    if errors:
        raise ConfigError(format_errors(errors))
    return config


def _make_section(kind: type, content: object, path: str, errors: list[str]) -> Any:
    """Create a section from those values of ``content`` that are valid.

    Args:
        kind: The dataclass of the section.
        content: The section as YAML returns it.
        path: Prefix for keys in messages, such as ``model.``; "" at the top level.
        errors: A message for each invalid value is added to this list.
    """
    if not isinstance(content, Mapping):
        errors.append(f"{path[:-1]}: must have `key: value` lines, not {format_value(content)}")
        return kind()
    hints = typing.get_type_hints(kind)
    known: dict[str, Any] = {
        one.name: one.metadata.get("rule")
        for one in dataclasses.fields(kind)
        if one.name != "others"
    }
    others = lora_fields() if kind is LoraSection else ()
    good = {}
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
    """Return True for the reward ``accuracy`` without parameters, which compares whole answers."""
    if isinstance(reward, dict):
        return reward.get("name") == "accuracy" and reward.keys() <= {"name", "weight"}
    return isinstance(reward, str) and reward.partition(":")[0] == "accuracy"


def _check_together(config: RunConfig) -> list[str]:
    """Return an error message for each combination of settings that contradict each other."""
    model = config.model
    data = config.data
    trainer = {**DEFAULTS, **config.trainer}
    completion = trainer["max_completion_length"]
    task = data.prompts.partition(":")[0]
    targets = config.lora.target_modules
    save = trainer["save_steps"]
    every = data.held_out_every
    rules = [
        (
            not targets,
            "lora.target_modules is empty: name at least one linear layer, such as q_proj",
        ),
        (
            isinstance(targets, str) and re.fullmatch(r"\w*", targets),
            f"lora.target_modules is {format_value(targets)}, must be a list of names such as "
            "[q_proj], or all-linear, or a regular expression that matches full dotted names, such "
            "as .*q_proj",
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
            TASK_REWARDS.get(task) == _NUMBER
            and data.system is None
            and any(map(_is_plain_accuracy, config.rewards)),
            f"rewards: accuracy compares the whole answer, but the prompts of {task} ask for the "
            "steps of the solution too: write {name: accuracy, match: number}",
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
            data.held_out == 0
            and (data.held_out_every or data.held_out_rewards or data.held_out_samples > 1),
            "data.held_out_every, held_out_rewards and held_out_samples need held-out prompts: set "
            "data.held_out above 0",
        ),
        (config.trainer.get("sync_ref_model"), NO_SYNC),
        (
            config.trainer.get("eval_on_start"),
            "trainer.eval_on_start has no effect, because data.held_out is scored before training "
            "anyway: leave it out",
        ),
        (
            config.trainer.get("keep_best")
            and config.trainer.get("save_strategy", "steps") == "steps"
            and every
            and isinstance(save, int)
            and math.gcd(save, every) not in (save, every),
            "trainer.keep_best compares the held-out scores of checkpoints, but steps that are "
            f"multiples of both trainer.save_steps {save} and data.held_out_every {every} are "
            "rare: set one to a multiple of the other",
        ),
        (
            "reward_hacking" in (trainer["stop_on"] or ()) and not every,
            "trainer.stop_on has reward_hacking, which can be found only if held-out prompts are "
            "scored during training: set data.held_out_every, for example to 10",
        ),
    ]
    wrong = [message for is_wrong, message in rules if is_wrong]
    return wrong + check_lora(config.lora.as_dict(), "lora.")
