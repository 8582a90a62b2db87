"""The run file: one dataclass tree, read from YAML and ``--set``, checked all at once.

Nothing heavy is imported to check it: the names that ``trainer:`` may hold are read from the source
of the TRL that is installed.
"""

import ast
import dataclasses
import difflib
import functools
import math
import operator
import os
import re
import types
import typing
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml

from rloo_kit.config.engine_tables import FIXED, SET_ELSEWHERE, TABLES, known_names
from rloo_kit.errors import ConfigError
from rloo_kit.text.redaction import remember_settings, without_hidden
from rloo_kit.text.wording import first_line, format_errors, format_name, format_value

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class ModelSection:
    """``model:``, what is trained."""

    name: str = "tiny-thinker"
    """A hub name, a local folder, an adapter's folder (to train it further), a .gguf file, or
    tiny-thinker (embedded)."""
    max_seq_length: int = 1024
    """Longest prompt plus completion, tokens."""
    load_in_4bit: bool = True
    """NF4 base weights."""
    load_in_fp8: bool = False
    """FP8 base weights, shared with vLLM by Unsloth; a GPU of compute capability 8.9 (9.0 where the
    model is a folder here), and load_in_4bit: false."""
    fp8_kv_cache: bool = False
    """vLLM keeps keys and values in FP8: half the memory; a GPU of compute capability 8.0."""
    fp32_lm_head: bool = False
    """vLLM computes the logits in float32."""
    backend: str = "auto"
    """auto, unsloth or transformers."""
    trust_remote_code: bool = False
    """Run the code that comes with the model, where it needs any; only for a source you trust."""


@dataclass(frozen=True)
class LoraSection:
    """``lora:``, the adapter that learns."""

    r: int = 16
    """Rank."""
    lora_alpha: int = 16
    """The adapter is scaled by lora_alpha / r."""
    lora_dropout: float = 0.0
    target_modules: list[str] = field(default_factory=lambda: list(PROJECTIONS))
    """Linear layers that get an adapter."""

    def __new__(cls, *values: Any, **given: Any) -> "LoraSection":
        """Remember which settings were given: the others follow an adapter that is continued."""
        section = super().__new__(cls)
        names = [one.name for one in dataclasses.fields(cls)][: len(values)]
        object.__setattr__(section, "given", frozenset([*names, *given]))
        return section


@dataclass(frozen=True)
class DataSection:
    """``data:``, the prompts."""

    prompts: str = "arithmetic"
    """A built-in task, ``reasoning_gym:TASK``, a .jsonl, .csv or .parquet file, or a hub
    dataset."""
    split: str = "train"
    """Split of a hub dataset."""
    num_prompts: int | None = None
    """Use only the first so many; all when null (1,024 of a built-in task)."""
    held_out: int | None = None
    """Prompts kept out of training for before and after; null: 256 of a built-in task, an eighth of
    a file (at most 256); 0: none, and no before and after."""
    held_out_every: int | None = None
    """Score them every so many steps during training too; null: before and after only."""
    held_out_samples: int = 1
    """Completions of each held-out prompt; of several, pass@k and maj@k are told."""
    held_out_rewards: list[Any] = field(default_factory=list)
    """Rewards that judge the held-out prompts and are never paid, as in ``rewards:``."""
    system: str | None = None
    """A system message put before every prompt."""
    chat: bool = True
    """Make a plain text a user message; false for a model without a chat template."""
    columns: dict[str, str] | None = None
    """Names in the kit -> names in the source, such as ``{prompt: question, answer: solution}``."""
    level: int | list[int] | None = None
    """Difficulty of a built-in task, one or several; null: the task's first."""
    curriculum: bool = False
    """Train in the order of the column ``level``, easiest first, instead of a random one."""
    settings: dict[str, Any] | None = None
    """Of a reasoning-gym task, under its own names."""
    enable_thinking: bool | None = None
    """Passed to the chat template of models that can switch the thought off; null: its default."""
    max_prompt_tokens: int | None = None
    """Leave out prompts that are longer; null: a prompt that leaves no room is an error."""


@dataclass(frozen=True)
class RunConfig:
    """A whole run, as ``rloo-kit train RUN.yaml`` reads it."""

    model: ModelSection = field(default_factory=ModelSection)
    lora: LoraSection = field(default_factory=LoraSection)
    data: DataSection = field(default_factory=DataSection)
    rewards: list[Any] = field(default_factory=lambda: ["accuracy"])
    """Reward functions: NAME, FILE.py:FUNCTION or package.module:FUNCTION, each with :WEIGHT if
    wanted; or a table with name, weight and the reward's own parameters."""
    trainer: dict[str, Any] = field(default_factory=dict)
    """Every field of LeaveOneOutConfig, in TRL's names."""
    unsloth: dict[str, Any] = field(default_factory=dict)
    """Further arguments of Unsloth's FastLanguageModel.from_pretrained, and of its load_vllm."""
    vllm: dict[str, Any] = field(default_factory=dict)
    """Further arguments of vLLM (fields of its EngineArgs), where it has a copy of the weights of
    its own in this process."""
    output_dir: str = "runs/run"
    """Where the run's folder is made; a number is added when it exists."""
    seed: int = 42

    def as_dict(self) -> dict[str, Any]:
        """Return plain dicts and lists, as written to run.yaml."""
        return dataclasses.asdict(self)

    def as_short_dict(self) -> dict[str, Any]:
        """Return what differs from the defaults, and always model, rewards, trainer and seed."""
        usual, content = RunConfig().as_dict(), {}
        for name, value in self.as_dict().items():
            if name in SECTIONS:
                value = {key: one for key, one in value.items() if one != usual[name][key]}
                value = {"name": self.model.name, **value} if name == "model" else value
            if value or name in ("rewards", "trainer", "seed"):
                content[name] = value
        return content


SECTIONS: dict[str, type] = {"model": ModelSection, "lora": LoraSection, "data": DataSection}
EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
if not EXAMPLES.is_dir():  # an editable install: the folder lies beside the package
    EXAMPLES = EXAMPLES.parents[1] / "examples"


def read_run_file(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a run file and apply ``section.key=value`` overrides.

    Args:
        path: A YAML file, or the name of one that ships with the kit (``quickstart``).
        overrides: As given to ``--set``; values are YAML.

    Raises:
        ConfigError: The file is missing or not YAML, or any setting is wrong; all faults are in the
            one message.
    """
    name = format_value(str(path))
    try:
        text = _read_text(find_run_file(path), name)
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
        content = _parse(text)
    except yaml.YAMLError as exc:
        mark = getattr(exc, "problem_mark", None)
        line = f" in line {mark.line + 1}" if mark else ""
        problem = ValueError(getattr(exc, "problem", None) or exc)
        raise ConfigError(
            f"run file {name} is not valid YAML{line}: {first_line(problem)}; check the "
            "indentation and quotes there"
        ) from exc
    return make_run_config({} if content is None else content, overrides)


LARGEST_FILE = 1 << 18
"""Bytes of a run file; reading more would take longer than a minute."""
LONGEST_INT = 1024
"""Bits of a whole number: what a float can hold."""
MOST_VALUES, DEEPEST = 20_000, 24
"""Of a run file, every alias counted as often as it is used; levels of lists and tables."""


def _read_text(file: Path, name: str) -> str:
    if os.path.isfile(file) and file.stat().st_size > LARGEST_FILE:
        raise ConfigError(
            f"run file {name} has {file.stat().st_size:,} bytes, and a run file has at most "
            f"{LARGEST_FILE:,}: keep prompts in a file of their own, named in data.prompts"
        )
    return file.read_text(encoding="utf-8-sig")


class _Loader(yaml.SafeLoader):
    """YAML's safe loader, that names the line of every fault and takes a key only once."""

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        """Return the value of a node.

        Raises:
            yaml.YAMLError: It is not what its tag says: 2026-13-01 looks like a date.
        """
        try:
            return super().construct_object(node, deep)
        except (AttributeError, LookupError, TypeError, ValueError) as exc:
            kind = node.tag.rpartition(":")[2]
            raise yaml.constructor.ConstructorError(
                None, None, f"{format_value(node.value)} is no {kind}", node.start_mark
            ) from exc

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> Any:
        """Return the table of a node.

        Raises:
            yaml.YAMLError: A key is there twice; YAML would keep the last one and not say so.
        """
        given = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and (key.tag, key.value) in given:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {format_value(key.value)} is there twice", key.start_mark
                )
            given.add((key.tag, key.value) if isinstance(key, yaml.ScalarNode) else id(key))
        return super().construct_mapping(node, deep)


def _parse(text: str) -> Any:
    """Return what YAML says.

    Raises:
        yaml.YAMLError: It is not valid, or nested too deeply.
    """
    try:
        return yaml.load(text, _Loader)
    except RecursionError as exc:
        raise yaml.YAMLError("lists and tables are nested too deeply") from exc


def _check_size(content: object) -> None:
    """Refuse what a few aliases of YAML make endless, and numbers that cannot be written out.

    Raises:
        ConfigError: It is.
    """
    level, count = [content], 0
    for _ in range(DEEPEST):
        items = [item for value in level for item in _items(value)]
        count += len(items)
        if huge := [item for item in items if isinstance(item, int) and not _finite(item)]:
            raise ConfigError(
                f"the run file holds {format_value(huge[0])}, and no setting takes more than "
                f"{LONGEST_INT} bits: write a smaller number"
            )
        if not items:
            return
        if count > MOST_VALUES:
            break
        level = items
    raise ConfigError(
        f"the run file holds more than {MOST_VALUES:,} values or {DEEPEST} levels of lists and "
        f"tables, its aliases (*NAME) counted out: write what is needed without them"
    )


def _items(value: object) -> list[Any]:
    """Return what stands directly in a value; of an endless level no more than is too much."""
    found: typing.Iterable[Any] = ()
    if isinstance(value, Mapping):
        found = (part for pair in value.items() for part in pair)
    elif isinstance(value, list | tuple | set | frozenset):
        found = value
    return list(found)


def find_run_file(path: str | Path) -> Path:
    """Return the file, or the one of that name that ships with the kit."""
    shipped = EXAMPLES / f"{Path(path).name}.yaml"
    is_name = not os.path.isfile(path) and str(path) == shipped.stem
    return shipped if is_name and shipped.exists() else Path(path)


def make_run_config(content: object, overrides: Sequence[str] = ()) -> RunConfig:
    """Check a mapping as read from YAML and return the RunConfig; see ``read_run_file``."""
    if not isinstance(content, Mapping):
        raise ConfigError(
            f"a run file holds `section: {{key: value}}`, not a {type(content).__name__}; start "
            f"from examples/quickstart.yaml"
        )
    _check_size(content)
    content = {str(key): value for key, value in content.items()}
    faults: list[str] = []
    for override in overrides:
        _apply_override(content, override, faults)
    remember_settings(content)
    known = {f.name: f for f in dataclasses.fields(RunConfig)}
    values: dict[str, Any] = {}
    hints = typing.get_type_hints(RunConfig)
    for key, value in content.items():
        if key not in known:
            faults.append(f"unknown section {format_value(key)}{did_you_mean(key, known)}")
        elif key in SECTIONS:
            values[key] = _make_section(key, value, faults)
        elif key in ("trainer", *TABLES):
            check = _check_trainer if key == "trainer" else functools.partial(_check_table, key)
            values[key] = check(value, faults)
        elif _fits(value, hints[key]):
            values[key] = value
        else:
            faults.append(_wrong_type(key, value, hints[key]))
    _take_eval_steps(values, faults)
    if not faults:
        config = RunConfig(**values)
        faults = _check_ranges(config)
        if not faults:
            return config
    raise ConfigError(format_errors(faults))


def _take_eval_steps(values: dict[str, Any], faults: list[str]) -> None:
    """Let transformers' ``eval_strategy`` and ``eval_steps`` mean ``data.held_out_every``."""
    trainer = dict(values.get("trainer") or {})
    strategy, steps = (trainer.pop(name, None) for name in ("eval_strategy", "eval_steps"))
    if strategy in (None, "no", False) and (steps is None or strategy is not None):
        if "trainer" in values:
            values["trainer"] = trainer
        return
    if strategy not in (None, "steps") or not _fits(steps, int):
        faults.append(
            f"trainer.eval_strategy {format_value(strategy)} with eval_steps "
            f"{format_value(steps)}: held-out prompts are scored every so many steps: set "
            "data.held_out_every, such as 10"
        )
        return
    data = values.get("data") or DataSection()
    if data.held_out_every not in (None, steps):
        faults.append(
            f"trainer.eval_steps is {steps} and data.held_out_every {data.held_out_every}, which "
            f"are the same setting: remove one"
        )
        return
    values["trainer"], values["data"] = trainer, replace(data, held_out_every=steps)


def did_you_mean(name: str, known: typing.Iterable[str]) -> str:
    """Return ``; did you mean 'x'?`` with the nearest name, else what there is to choose from."""
    known = sorted(known)
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    if near:
        return f"; did you mean {near[0]!r}?"
    if len(known) > 12:
        return "; none of the names there are is near it: check the spelling, or remove it"
    return f"; known are {', '.join(known)}"


def read_settings(overrides: Sequence[str]) -> dict[str, Any]:
    """Return ``key=value`` settings that are in no section; values are YAML, and ``1e-3`` a number.

    Raises:
        ConfigError: One is not of that form.
    """
    found: dict[str, Any] = {}
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals or not key.strip().isidentifier():
            raise ConfigError(
                f"--set {format_value(override)} is not of the form key=value: write it so"
            )
        found[key.strip()] = read_value(text)
    remember_settings(found)
    return found


def read_overrides(overrides: Sequence[str]) -> dict[str, Any]:
    """Return what ``section.key=value`` settings alone say, a table for each section.

    Raises:
        ConfigError: One is not of that form.
    """
    content: dict[str, Any] = {}
    faults: list[str] = []
    for override in overrides:
        _apply_override(content, override, faults)
    if faults:
        raise ConfigError("; ".join(faults))
    return content


def without_hidden_settings(config: RunConfig) -> RunConfig:
    """Return a run's settings without what was hidden when they were written.

    It is then looked for where it is kept, in the environment and .env.
    """
    settings, names = without_hidden(config.as_dict())
    return make_run_config(settings) if names else config


def read_value(text: str) -> Any:
    """Return what a value says after ``--set``: YAML, and ``1e-3`` a number.

    Raises:
        ConfigError: It is larger than any setting.
    """
    if re.fullmatch(r"\s*[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+\s*", text):
        return float(text)  # YAML 1.1 wants a point and a sign: 1.0e-3
    try:
        value = _parse(text)
    except yaml.YAMLError:
        return text
    _check_size([value])
    return value


def _apply_override(content: dict[str, Any], override: str, faults: list[str]) -> None:
    path, equals, text = override.partition("=")
    keys = path.strip().split(".")
    if not equals or not all(keys) or len(keys) > 2:
        faults.append(
            f"--set {format_value(override)} is not of the form section.key=value: write it so"
        )
        return
    table = content
    if len(keys) == 2:
        section = content.get(keys[0]) or {}
        if not isinstance(section, Mapping) or keys[0] not in (*SECTIONS, "trainer", *TABLES):
            faults.append(
                f"--set {format_value(override)}: {format_value(keys[0])} is no section with keys "
                "of its own"
            )
            return
        table = content[keys[0]] = dict(section)
    table[keys[-1]] = read_value(text)


def _make_section(name: str, value: object, faults: list[str]) -> object:
    section = SECTIONS[name]
    hints = typing.get_type_hints(section)
    if value is None:
        return section()
    if not isinstance(value, Mapping):
        faults.append(f"{name}: holds `key: value` lines, not {format_value(value)}")
        return section()
    good = {}
    for key, item in value.items():
        if key not in hints:
            faults.append(f"unknown key {name}.{format_name(key)}{did_you_mean(str(key), hints)}")
        elif not _fits(item, hints[key]):
            faults.append(_wrong_type(f"{name}.{key}", item, hints[key]))
        else:
            good[key] = item
    return section(**good)


def _check_table(table: str, value: object, faults: list[str]) -> dict[str, Any]:
    """Return ``unsloth:`` or ``vllm:``; names are checked where the library is installed."""
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        faults.append(f"{table}: holds `key: value` lines, not {format_value(value)}")
        return {}
    known = known_names(table) if value else frozenset()
    own = known - FIXED[table] - set(SET_ELSEWHERE[table])
    for key in map(str, value):
        if place := SET_ELSEWHERE[table].get(key):
            faults.append(f"{table}.{key} is {place} in a run file: write it there")
        elif key in FIXED[table]:
            faults.append(f"{table}.{key} is set by rloo-kit itself: leave it out")
        elif known and key not in known:
            faults.append(f"unknown key {table}.{format_name(key)}{did_you_mean(key, own)}")
    return {str(key): item for key, item in value.items()}


def _fits(value: object, hint: Any) -> bool:
    if hint is Any:
        return True
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return any(_fits(value, option) for option in typing.get_args(hint))
    if typing.get_origin(hint) is list:
        item = typing.get_args(hint)[0]
        return isinstance(value, list) and all(_fits(v, item) for v in value)
    if typing.get_origin(hint) is dict:
        return isinstance(value, dict)
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool) and _finite(value)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, hint)


def _finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number beyond any float
        return False


def _wrong_type(path: str, value: object, hint: Any) -> str:
    words = {
        int: "a whole number",
        float: "a number",
        bool: "true or false",
        str: "text",
        dict: "a table",
        list[str]: "a list of texts",
        list[int]: "a list of whole numbers",
        list[float]: "a list of numbers",
    }
    options = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    wanted = [
        words.get(option) or words.get(typing.get_origin(option), "a list")
        for option in options
        if option is not type(None)
    ]
    hint_e = " (YAML reads 1e-5 as text: write 1.0e-5)" if isinstance(value, str) else ""
    must = f"must be {' or '.join(wanted)}{hint_e if float in options else ''}"
    return f"{path} is {format_value(value)}, {must}"


# --- trainer: names of TRL, of the seeds, and of batches ---------------------------------------

RENAMED = {
    "kl_coef": "beta",
    "kl_coeff": "beta",
    "rloo_k": "num_generations",
    "cliprange": "epsilon",
    "num_ppo_epochs": "num_iterations",
    "num_mini_batches": "steps_per_generation",
    "response_length": "max_completion_length",
}
"""Names of TRL before 0.22 on the left; ``total_episodes`` is computed instead."""

CHOICES: dict[str, tuple[Any, ...]] = {
    "dry_run": (None, False, True),
    "enable_jit_checkpoint": (False,),  # SIGTERM saves anyway, and this would handle it too
    "generation": ("auto", "vllm", "transformers", "server"),
    "rollout_correction": (None, "sequence", "token"),
    "kl_estimator": ("k1", "k3"),
    "normalize_reward": (None, False, True, "batch", "moving"),
    "on_reward_error": ("stop", "skip"),
}
"""Trainer settings of the kit that take one of a few values."""
FLAGS = frozenset(
    {
        "canary",
        "doctor",
        "dynamic_sampling",
        "gate_on_score",
        "legacy_metrics",
        "skip_no_signal",
        "skip_old_pass",
        "token_level_kl",
        "truncated_in_baseline",
    }
)
"""Trainer settings of the kit that are true or false."""


def known_trainer_fields() -> frozenset[str]:
    """Return every field of LeaveOneOutConfig, read from source; imports neither TRL nor torch."""
    return frozenset(_annotations())


@cache
def _annotations() -> dict[str, tuple[str, ...]]:
    """Return name -> the types that the classes in its source give it."""
    found: dict[str, tuple[str, ...]] = {}
    for package, file in (
        ("rloo_kit", "config/settings.py"),
        ("trl", "trainer/rloo_config.py"),
        ("trl", "trainer/base_config.py"),
        ("transformers", "training_args.py"),
    ):
        spec = find_spec(package)
        if spec is None or not spec.submodule_search_locations:
            raise ConfigError(f"{package} is not installed: pip install rloo-kit brings it")
        tree = ast.parse((Path(spec.submodule_search_locations[0]) / file).read_text("utf-8"))
        wanted = ("KitSettings", "RLOOConfig", "_BaseConfig", "TrainingArguments")
        for cls in (n for n in tree.body if isinstance(n, ast.ClassDef) and n.name in wanted):
            for node in cls.body:
                if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                    name, kind = node.target.id, ast.unparse(node.annotation)
                    found[name] = (*found.get(name, ()), kind)
    return {name: kinds for name, kinds in found.items() if not name.startswith("_")}


PLAIN_TYPES: dict[str, Any] = {
    "bool": bool,
    "dict": dict,
    "dict[str, Any]": dict,
    "dict[str, bool]": dict,
    "float": float,
    "int": int,
    "list[float]": list[float],
    "list[str]": list[str],
    "None": type(None),
    "str": str,
    "tuple[float, float]": list[float],
}
"""Types in the source of TRL that a run file's value can be held against."""


def _check_types(values: Mapping[str, Any]) -> list[str]:
    """Return which settings of TRL are of another type than its source says."""
    faults = []
    for name, value in values.items():
        options = {part for kind in _annotations().get(name, ()) for part in kind.split(" | ")}
        if not options or not options <= set(PLAIN_TYPES):
            continue
        kinds = [PLAIN_TYPES[option] for option in sorted(options)]
        if not any(_fits(value, kind) for kind in kinds):
            hint = functools.reduce(operator.or_, kinds)
            faults.append(_wrong_type(f"trainer.{name}", value, hint))
    return faults


def translate_trainer_arguments(
    arguments: Mapping[str, Any], num_processes: int = 1
) -> dict[str, Any]:
    """Return the arguments under TRL's present names; warn once per older name.

    Args:
        arguments: As the user wrote them.
        num_processes: That each take a batch of ``per_device_train_batch_size``.

    Raises:
        ConfigError: A name is unknown (with the nearest one), is given under its old and its new
            name, a value is out of range, or the batch does not hold whole groups; all at once.
    """
    faults: list[str] = []
    values: dict[str, Any] = {}
    known = known_trainer_fields()
    for name, value in arguments.items():
        if name in known:
            values[name] = value
        elif name in RENAMED:
            _rename(name, value, values, arguments, faults)
        elif name != "total_episodes":
            hint = did_you_mean(str(name), known | set(RENAMED))
            faults.append(f"unknown trainer setting {format_value(name)}{hint}")
    faults += check_values(values)
    faults = faults or check_batch(values, num_processes)
    if faults:
        raise ConfigError(format_errors(faults))
    if "total_episodes" in arguments:
        values["max_steps"] = _steps_for(
            arguments["total_episodes"], values, arguments, num_processes
        )
    return values


def _rename(
    old: str, value: object, values: dict[str, Any], given: Mapping[str, Any], faults: list[str]
) -> None:
    """Put an older name's value under its new name, with a warning."""
    new = RENAMED[old]
    if new in given or new in values:
        faults.append(f"{old} is the old name of {new}, and both are given: keep {new}")
        return
    accumulation = given.get("gradient_accumulation_steps")
    if old == "num_mini_batches" and _fits(value, int) and _fits(accumulation, int):
        value *= accumulation  # each of them made an optimizer step of so many slices
    _warn_renamed(old, new, value)
    values[new] = value


def _warn_renamed(old: str, new: str, value: object) -> None:
    warnings.warn(
        f"{old} is now called {new}: {new}={format_value(value)} is used",
        FutureWarning,
        stacklevel=5,
    )


def _steps_for(
    episodes: Any, values: Mapping[str, Any], arguments: Mapping[str, Any], num_processes: int
) -> int:
    """Return the optimizer steps that ``episodes`` completions make (older TRL's count)."""
    if "max_steps" in arguments:
        raise ConfigError("total_episodes computes max_steps, and both are given: keep max_steps")
    if not _fits(episodes, int) or episodes < 1:
        raise ConfigError(
            f"total_episodes is {format_value(episodes)}, must be a whole number of completions"
        )
    batch = batch_plan(values, num_processes)
    accumulation = values.get("gradient_accumulation_steps") or 1
    per_batch = batch.steps_per_generation * (values.get("num_iterations") or 1) / accumulation
    steps = max(1, math.ceil(math.ceil(episodes / batch.num_completions) * per_batch))
    _warn_renamed("total_episodes", "max_steps", steps)
    return steps


@dataclass(frozen=True)
class BatchPlan:
    """What one generation holds."""

    num_completions: int
    num_generations: int
    steps_per_generation: int

    @property
    def num_prompts(self) -> int:
        """Whole groups in the batch."""
        return self.num_completions // self.num_generations


DEFAULT_BATCH = {
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "num_generations": 4,
}


def batch_plan(trainer: Mapping[str, Any], num_processes: int = 1) -> BatchPlan:
    """Return completions, group size and training slices of one generation batch."""
    values = {**DEFAULT_BATCH, **trainer}
    per_slice = values["per_device_train_batch_size"] * num_processes
    size, slices = values.get("generation_batch_size"), values.get("steps_per_generation")
    if slices is None:
        slices = size // per_slice if size else values["gradient_accumulation_steps"]
    return BatchPlan(size or per_slice * slices, values["num_generations"], slices)


def check_batch(trainer: Mapping[str, Any], num_processes: int = 1) -> list[str]:
    """Return what is wrong with the batch, in words of prompts and generations; [] when right."""
    names = (*DEFAULT_BATCH, "generation_batch_size", "steps_per_generation")
    values = {**DEFAULT_BATCH, **trainer}
    bad = [
        f"trainer.{name} is {format_value(values[name])}, must be a whole number of at least 1"
        for name in names
        if (name in values and not _fits(values[name], int | None))
        or (values.get(name) is None and name in DEFAULT_BATCH)
        or (values.get(name) is not None and values[name] < 1)
    ]
    if bad:
        return bad
    group = values["num_generations"]
    if group < 2:
        return [
            f"num_generations is {group}: leave-one-out compares a completion with its siblings, "
            f"so it must be at least 2 (4 to 8 are usual)"
        ]
    if trainer.get("generation_batch_size") and trainer.get("steps_per_generation"):
        return ["generation_batch_size and steps_per_generation say the same: give one of them"]
    plan = batch_plan(trainer, num_processes)
    slice_size = values["per_device_train_batch_size"] * num_processes
    if plan.num_completions % slice_size:
        return [
            f"generation_batch_size {plan.num_completions} is not a multiple of the "
            f"{slice_size} completions of per_device_train_batch_size: make it one"
        ]
    left = plan.num_completions % group
    if left and trainer.get("generation_batch_size"):
        step = math.lcm(slice_size, group)
        below = plan.num_completions // step * step
        fits = " or ".join(str(n) for n in (below, below + step) if n)
        return [
            f"generation_batch_size {plan.num_completions} is no whole number of prompts at "
            f"num_generations {group}: set generation_batch_size to {fits}"
        ]
    if left:
        unit = plan.num_completions // values["per_device_train_batch_size"]
        step = group // math.gcd(group, unit)
        below = values["per_device_train_batch_size"] // step * step
        fits = " or ".join(str(n) for n in (below, below + step) if n)
        return [
            f"one generation makes {plan.num_completions} completions "
            f"(per_device_train_batch_size {values['per_device_train_batch_size']} x {unit}), "
            f"which is no whole number of prompts at num_generations {group}: set "
            f"per_device_train_batch_size to {fits}"
        ]
    return []


def _check_trainer(value: object, faults: list[str]) -> dict[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        faults.append(f"trainer: holds `key: value` lines, not {format_value(value)}")
        return {}
    for name, place in (("output_dir", "output_dir"), ("seed", "seed")):
        if name in value:
            faults.append(f"trainer.{name} belongs at the top of the run file, as `{place}:`")
    if value.get("trust_remote_code"):
        faults.append("trainer.trust_remote_code has no effect here: write it under `model:`")
    try:
        values = translate_trainer_arguments(value)
    except ConfigError as exc:
        faults.append(str(exc))
        return dict(value)
    faults += _check_types(values)
    return values


STOP_ON = (
    "stale_sampler",
    "clip_noise",
    "negative_kl",
    "kl_explosion",
    "all_truncated",
    "empty_output",
    "length_explosion",
    "constant_reward",
    "saturated_reward",
    "cold_start",
    "reward_collapse",
    "reward_hacking",
    "entropy_collapse",
    "no_signal",
    "learning_rate_too_low",
    "high_variance",
)
"""What ``trainer.stop_on`` may name: the doctor's findings that can make a run worthless."""
TEXTS = frozenset({"rescue_dir", "vllm_adapter_dir"})
"""Trainer settings of the kit that are text or null."""
NUMBERS: dict[str, tuple[type, float, float]] = {
    "beta": (float, 0.0, 100.0),
    "dynamic_sampling_rounds": (int, 1, 100),
    "epsilon": (float, 0.0, 1.0e6),
    "keep_best": (int, 0, 1_000_000),
    "keep_last": (int, 1, 1_000_000),
    "learning_rate": (float, 1e-12, 1.0),
    "max_completion_length": (int, 1, 1_000_000),
    "max_grad_norm": (float, 0.0, 1.0e9),
    "max_hours": (float, 1e-6, 1.0e6),
    "max_no_signal_fraction": (float, 0.0, 1.0),
    "max_skipped_steps": (int, 1, 1_000_000),
    "max_steps": (int, -1, 1e9),
    "missing_eos_penalty": (float, 0.0, 1.0e9),
    "num_iterations": (int, 1, 1000),
    "reward_timeout_seconds": (float, 1e-3, 1.0e9),
    "rollout_correction_cap": (float, 1.0, 1.0e6),
    "temperature": (float, 1e-3, 10.0),
    "tokens_per_micro_batch": (int, 1, 1_000_000_000),
    "top_p": (float, 1e-6, 1.0),
}
"""Trainer settings whose range is checked before anything is loaded."""
OPTIONAL_NUMBERS = frozenset(
    {
        "max_hours",
        "max_no_signal_fraction",
        "missing_eos_penalty",
        "reward_timeout_seconds",
        "tokens_per_micro_batch",
    }
)
"""Those that may be null."""


def check_values(values: Mapping[str, Any]) -> list[str]:
    """Return what is wrong with single trainer settings, under their present names."""
    faults = []
    for name, item in values.items():
        if name in CHOICES and item not in CHOICES[name]:
            options = ", ".join(yaml.safe_dump(v).split()[0] for v in CHOICES[name])
            faults.append(f"trainer.{name} is {format_value(item)}, must be one of {options}")
        if name in FLAGS and not _fits(item, bool):
            faults.append(_wrong_type(f"trainer.{name}", item, bool))
        if name == "stop_on":
            faults += _check_stop_on(item)
        if name in TEXTS and not _fits(item, str | None):
            faults.append(_wrong_type(f"trainer.{name}", item, str | None))
        kind, low, high = NUMBERS.get(name, (None, 0, 0))
        if kind is None or (item is None and name in OPTIONAL_NUMBERS):
            continue
        if not _fits(item, kind):
            faults.append(_wrong_type(f"trainer.{name}", item, kind))
        elif not low <= item <= high:
            faults.append(
                f"trainer.{name} is {format_value(item)}, must be between {low:g} and {high:g}"
            )
    if values.get("stop_on") and values.get("doctor") is False:
        faults.append("trainer.stop_on needs the doctor, and trainer.doctor is false: remove one")
    return faults


def _check_stop_on(kinds: object) -> list[str]:
    """Return what is wrong with the findings that are to end a run."""
    if kinds is None:
        return []
    if isinstance(kinds, list) and all(isinstance(k, str) and k in STOP_ON for k in kinds):
        return []
    wrong = [k for k in kinds if k not in STOP_ON] if isinstance(kinds, list) else []
    near = "".join(did_you_mean(str(kind), STOP_ON) for kind in wrong[:1]).removeprefix("; ")
    return [
        f"trainer.stop_on is {format_value(kinds)}, must be a list of findings, such as "
        f"[kl_explosion], among {', '.join(STOP_ON)}{near and f' ({near})'}"
    ]


def _check_held_out(config: RunConfig) -> list[str]:
    """Return what is wrong with scoring held-out prompts during training."""
    every, stops = config.data.held_out_every, config.trainer.get("stop_on")
    if every and config.data.held_out == 0:
        return ["data.held_out_every needs held-out prompts: set data.held_out above 0"]
    if isinstance(stops, list) and "reward_hacking" in stops and not every:
        return [
            "trainer.stop_on names reward_hacking, which only held-out prompts show: set "
            "data.held_out_every, such as 10"
        ]
    return []


MOST = 1_000_000_000
"""Of what is counted."""


def _check_paths(config: RunConfig) -> list[str]:
    """Return which texts cannot be a path, nor a name anywhere."""
    faults = []
    texts = {
        "output_dir": config.output_dir,
        "model.name": config.model.name,
        "data.prompts": config.data.prompts,
    }
    for name, text in texts.items():
        try:
            parts = os.fsencode(text).split(b"/")
        except UnicodeError:
            parts = [b"\0"]
        if any(b"\0" in part or len(part) > LONGEST_NAME for part in parts) or len(parts) > 1000:
            faults.append(
                f"{name} is {format_value(text)}, must be a name or a path: of parts up to "
                f"{LONGEST_NAME} bytes, without the character 0 or half of a character"
            )
    return faults


LONGEST_NAME = 255
"""Bytes of a file's name."""


def _check_model(model: ModelSection) -> list[str]:
    faults = []
    if model.backend not in ("auto", "unsloth", "transformers"):
        faults.append(f"model.backend is {model.backend!r}, must be auto, unsloth or transformers")
    if model.load_in_fp8 and model.load_in_4bit:
        faults.append(
            "model.load_in_fp8 and model.load_in_4bit are both true: set model.load_in_4bit to "
            "false, which is true unless a run file says otherwise"
        )
    return faults


def _check_ranges(config: RunConfig) -> list[str]:
    faults = []
    ranges = {
        "model.max_seq_length": (config.model.max_seq_length, 2, MOST),
        "lora.r": (config.lora.r, 1, 1 << 16),
        "lora.lora_alpha": (config.lora.lora_alpha, 1, MOST),
        "data.num_prompts": (config.data.num_prompts, 1, MOST),
        "data.held_out": (config.data.held_out, 0, MOST),
        "data.held_out_every": (config.data.held_out_every, 1, MOST),
        "data.held_out_samples": (config.data.held_out_samples, 1, 1 << 16),
        "data.max_prompt_tokens": (config.data.max_prompt_tokens, 1, MOST),
        "seed": (config.seed, 0, (1 << 32) - 1),  # NumPy takes no larger one
    }
    for name, (value, low, high) in ranges.items():
        if value is not None and value < low:
            faults.append(f"{name} is {format_value(value)}, must be at least {low}")
        elif value is not None and value > high:
            faults.append(f"{name} is {format_value(value)}, must be at most {high}")
    faults += _check_paths(config)
    if not 0 <= config.lora.lora_dropout < 1:
        faults.append(f"lora.lora_dropout is {config.lora.lora_dropout}, must be in [0, 1)")
    if not config.lora.target_modules:
        faults.append(
            "lora.target_modules is empty: name at least one linear layer, such as q_proj"
        )
    faults += _check_model(config.model)
    faults += _check_held_out(config)
    if not config.rewards:
        faults.append("rewards: is empty, so there is nothing to learn from: give at least one")
    if not Path(config.output_dir).name:
        faults.append(f"output_dir is {config.output_dir!r}, must name a folder to make")
    completion = config.trainer.get("max_completion_length") or 512
    if completion >= config.model.max_seq_length:
        faults.append(
            f"trainer.max_completion_length {completion} leaves no room for a prompt in "
            f"model.max_seq_length {config.model.max_seq_length}: raise the latter or lower the "
            f"former"
        )
    return faults
