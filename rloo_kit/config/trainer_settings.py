"""Checks of trainer settings under TRL's present names: names, values and the batch.

The names and types of TRL's own fields are read from the source of the installed TRL, because
importing TRL takes ten seconds.
"""

import ast
import contextlib
import math
import os
import typing
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from rloo_kit.config.other_names import MOVED, OF_GRPO, REFUSED, RENAMED, why_not_needed
from rloo_kit.config.settings import DEFAULTS, RULES, KitSettings
from rloo_kit.config.values import NO_RULE, check_value
from rloo_kit.errors import ConfigError
from rloo_kit.text.wording import did_you_mean, format_errors, format_value

# Package, file and class that define TRL's fields, each before the one that it inherits from
SOURCES = (
    ("trl", "trainer/rloo_config.py", "RLOOConfig"),
    ("trl", "trainer/base_config.py", "_BaseConfig"),
    ("transformers", "training_args.py", "TrainingArguments"),
)


# Setting -> the setting without which it has no effect
ONLY_WITH = {
    "dynamic_sampling_rounds": "dynamic_sampling",
    "kl_estimator": "beta",
    "max_rollout_age": "partial_rollouts",
    "rollout_correction_cap": "rollout_correction",
    "rows_in_flight": "partial_rollouts",
    "token_level_kl": "beta",
}
# Setting -> its only value with `partial_rollouts`. Some would change the distribution of tokens,
# whose log-probabilities the loss compares; others are for samplers that cannot end early
WITH_PARTIAL: dict[str, Any] = {
    "cache_implementation": None,
    "generation_kwargs": None,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "top_k": 0,
    "top_p": 1.0,
    "use_transformers_continuous_batching": False,
    "use_transformers_paged": False,
}
# Types in TRL's source that a value can be checked against; TRL checks the others
TYPE_NAMES = {
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
    # a list in YAML
    "tuple[float, float]": Annotated[list[float], Field(min_length=2, max_length=2)],
}
KIT_TYPES: dict[str, Any] = {
    **typing.get_type_hints(KitSettings),
    "fsdp": Any,  # true, or older text
    # TRL accepts None too, for its own default
    "max_completion_length": int,
    "num_generations": int,
}


def known_trainer_fields() -> frozenset[str]:
    """Return the name of every field of ``LeaveOneOutConfig``; imports neither TRL nor torch."""
    return frozenset({*_trl_types(), *KIT_TYPES})


@cache
def _trl_fields() -> dict[str, ast.AnnAssign]:
    """Return name -> the statement of TRL's source that defines the field."""
    found: dict[str, ast.AnnAssign] = {}
    for source in SOURCES:
        found = _fields_of(*source) | found
    return {name: node for name, node in found.items() if not name.startswith("_")}


@cache
def _trl_types() -> dict[str, Any]:
    """Return name -> type of TRL's fields; ``Any`` for a class of its libraries."""
    return {name: _type_of(ast.unparse(node.annotation)) for name, node in _trl_fields().items()}


def trl_defaults() -> dict[str, Any]:
    """Return name -> default of each field of TRL whose default is a literal in TRL's source."""
    found: dict[str, Any] = {}
    for name, node in _trl_fields().items():
        keywords = {key.arg: key.value for key in getattr(node.value, "keywords", ())}  # of field()
        with contextlib.suppress(ValueError):
            found[name] = ast.literal_eval(keywords.get("default", node.value))
    return found


@cache
def grpo_fields() -> frozenset[str]:
    """Return the names of the fields that TRL's ``GRPOConfig`` adds to those that it inherits."""
    return frozenset(_fields_of("trl", "trainer/grpo_config.py", "GRPOConfig"))


def _fields_of(package: str, file: str, name: str) -> dict[str, ast.AnnAssign]:
    """Return name -> the statement that defines the field in the source of a class."""
    spec = find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError(f"{package} is not installed: rloo-kit doctor names the version")
    tree = ast.parse((Path(spec.submodule_search_locations[0]) / file).read_text("utf-8"))
    (source,) = (n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == name)
    return {
        node.target.id: node
        for node in source.body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }


def _type_of(annotation: str) -> Any:
    return typing.Union[tuple(TYPE_NAMES.get(kind, Any) for kind in annotation.split(" | "))]  # noqa: UP007


def check_values(values: Mapping[str, Any], *, all_types: bool = False) -> list[str]:
    """Return the errors in trainer settings, a sentence each.

    Args:
        values: Settings under their present names.
        all_types: Also check fields of TRL without a rule, by the types in TRL's source. It is for
            run files, because Python code may give objects that TRL converts.
    """
    errors = []
    hints = {**_trl_types(), **KIT_TYPES}
    for name, value in values.items():
        rule = RULES.get(name, NO_RULE)
        has_range = rule.choices or rule.minimum is not None or rule.above is not None
        if all_types or has_range or name in KIT_TYPES:
            errors += check_value(f"trainer.{name}", value, hints.get(name, Any), rule)
    return errors or _check_together(values)


def _check_together(given: Mapping[str, Any]) -> list[str]:
    """Return errors in combinations of settings that are each valid."""
    values = {**DEFAULTS, **given}
    budget = values["thinking_budget"]
    longest = values["max_completion_length"]
    is_wrong = {
        "trainer.stop_on needs the doctor, and trainer.doctor is false: remove one": (
            values["stop_on"] and not values["doctor"]
        ),
        f"trainer.thinking_budget {budget} leaves no room for an answer in "
        f"trainer.max_completion_length {longest}: lower it, or raise the latter": (
            budget and budget >= longest
        ),
        "trainer.rollout_correction needs log-probabilities of another sampler, and "
        "trainer.generation is transformers: leave one of them out": (
            values["rollout_correction"]
            and values["generation"] == "transformers"
            and not values["partial_rollouts"]
        ),
        "trainer.partial_rollouts is on, and vLLM's server cannot end before all completions have "
        "ended: set trainer.generation to vllm": (
            values["partial_rollouts"]
            and (values["generation"] == "server" or values.get("vllm_mode") == "server")
        ),
    }
    errors = [error for error, wrong in is_wrong.items() if wrong]
    if values["partial_rollouts"]:
        errors += [
            f"trainer.partial_rollouts cannot be used with trainer.{name} "
            f"{format_value(values[name])}: leave one of them out"
            for name, fits in WITH_PARTIAL.items()
            if values.get(name, fits) not in (fits, None)
        ]
    for name, other in ONLY_WITH.items():
        if values[name] != DEFAULTS[name] and not values[other]:
            errors.append(
                f"trainer.{name} has no effect while trainer.{other} is "
                f"{format_value(values[other])}: remove it, or set trainer.{other}"
            )
    return errors


# --- names of other trainers ---------------------------------------------------------------------


def translate_trainer_arguments(
    arguments: Mapping[str, Any], *, all_types: bool = False
) -> dict[str, Any]:
    """Return checked settings under TRL's present names; warn of each name of another trainer.

    Args:
        arguments: Settings under names of this trainer or of another one (``other_names.py``).
        all_types: As in ``check_values``.

    Raises:
        ConfigError: A name is unknown or given twice, a value is out of range, or the batch does
            not hold whole groups; all errors are in the one message.
    """
    errors: list[str] = []
    notes: list[str] = []
    values: dict[str, Any] = {}
    known = known_trainer_fields()
    for name, value in arguments.items():
        if name in known:
            # YAML reads `no` as false
            values[name] = "no" if name.endswith("_strategy") and value is False else value
        elif name in RENAMED:
            errors += _rename(name, value, values, arguments)
        elif reason := why_not_needed(name, value):
            notes.append(f"{name}={format_value(value)} is not needed: {reason}")
        else:
            errors.append(f"unknown trainer setting {format_value(name)}{_instead_of(name)}")
    errors += check_values(values, all_types=all_types)
    errors = errors or check_batch(values)
    if errors:
        raise ConfigError(format_errors(errors))
    if "total_episodes" in arguments:
        values["max_steps"] = _steps_of(values["max_steps"], values)
    renamed = {old: RENAMED[old] for old in arguments if old in RENAMED}
    notes += [f"{old} is {new} here: {new}={values[new]!r} is used" for old, new in renamed.items()]
    for note in notes:  # from a file of the kit: Unsloth hides warnings of TRL's parser
        warnings.warn(note, FutureWarning, stacklevel=2)
    return values


def _instead_of(name: str) -> str:
    """Return the end of a message about a name that is not a setting here."""
    if name in MOVED:
        key, in_python = MOVED[name]
        return f": give it as {key} in a run file, or in Python to {in_python}"
    if name in REFUSED or name in grpo_fields():
        return f": {REFUSED.get(name, OF_GRPO)}"
    hint = did_you_mean(name, known_trainer_fields() | set(RENAMED))
    return hint or "; docs/reference/run_file.md lists them"


def _rename(old: str, value: object, values: dict[str, Any], given: Mapping[str, Any]) -> list[str]:
    """Add another trainer's setting under its name here; return the errors."""
    new = RENAMED[old]
    if new in given or new in values:
        return [f"{old} is {new} here, and both are given: keep {new}"]
    if old == "total_episodes" and (type(value) is not int or value < 1):
        return [f"total_episodes is {format_value(value)}, must be a whole number of completions"]
    accumulation = given.get("gradient_accumulation_steps")
    if old == "num_mini_batches" and isinstance(value, int) and isinstance(accumulation, int):
        # Each mini-batch was an optimizer step of this many slices
        value *= accumulation
    # a value of multi_objective_aggregation
    values[new] = "sum" if value == "sum_then_normalize" else value
    return []


def _steps_of(episodes: int, values: Mapping[str, Any]) -> int:
    """Return the number of optimizer steps that sample and learn this many completions."""
    batch = batch_plan(values)
    processes = int(os.environ.get("WORLD_SIZE", "1")) if "RANK" in os.environ else 1
    batches = math.ceil(episodes / (batch.num_completions * processes))
    iterations = values.get("num_iterations", DEFAULTS["num_iterations"])
    return math.ceil(batches * iterations * batch.steps_per_generation / batch.accumulation)


# --- the batch -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class BatchPlan:
    """Counts of one generation batch."""

    num_completions: int
    num_generations: int
    steps_per_generation: int
    accumulation: int  # slices of an optimizer step
    in_flight: int  # completions that are sampled at the same time

    @property
    def step_rows(self) -> int:
        """Completions of an optimizer step."""
        return self.num_completions // self.steps_per_generation * self.accumulation

    @property
    def is_on_policy(self) -> bool:
        """True if no optimizer step comes between sampling and learning.

        Otherwise a pass without gradient computes the log-probabilities of the policy that sampled.
        """
        return self.steps_per_generation <= self.accumulation

    @property
    def num_prompts(self) -> int:
        """Whole groups in the batch."""
        return self.num_completions // self.num_generations


def batch_plan(trainer: Mapping[str, Any]) -> BatchPlan:
    """Return the counts of one generation batch.

    Args:
        trainer: Checked trainer settings; those that are missing have their defaults.
    """
    values = {**DEFAULTS, **trainer}
    per_slice = values["per_device_train_batch_size"]
    accumulation = values["gradient_accumulation_steps"]
    size = values.get("generation_batch_size")
    slices = values.get("steps_per_generation")
    if slices is None:
        slices = size // per_slice if size else accumulation
    total = size or per_slice * slices
    in_flight = total
    if values["partial_rollouts"]:
        in_flight = values["rows_in_flight"] or min(2, values["max_rollout_age"] + 1) * total
    return BatchPlan(total, values["num_generations"], slices, accumulation, in_flight)


def check_batch(trainer: Mapping[str, Any]) -> list[str]:
    """Return the error in a batch of checked values: [] or one sentence.

    A generation batch must hold whole slices of ``per_device_train_batch_size`` rows, and whole
    groups of ``num_generations`` completions.
    """
    total = trainer.get("generation_batch_size")
    if total and trainer.get("steps_per_generation"):
        return [
            "generation_batch_size and steps_per_generation both set the size of a generation "
            "batch: give one of them"
        ]
    plan = batch_plan(trainer)
    rows = {**DEFAULTS, **trainer}["per_device_train_batch_size"]
    group = plan.num_generations
    if total:
        name = "generation_batch_size"
        size = total
        step = math.lcm(rows, group)
    else:
        slices = plan.num_completions // rows
        name = "per_device_train_batch_size"
        size = rows
        step = group // math.gcd(group, slices)
    if size % step == 0:
        return _check_in_flight(plan, {**DEFAULTS, **trainer}["max_rollout_age"])
    below = size // step * step
    sizes = " or ".join(str(number) for number in (below, below + step) if number)
    return [
        f"one generation makes {plan.num_completions} completions, which are not whole groups of "
        f"num_generations {group} in passes of {rows}: set trainer.{name} to {sizes}"
    ]


def _check_in_flight(plan: BatchPlan, max_age: int) -> list[str]:
    """Return the error in ``rows_in_flight``: [] or one sentence."""
    most = plan.num_completions * (max_age + 1)  # a group must be trained before it is too old
    if plan.num_completions <= plan.in_flight <= most and not plan.in_flight % plan.num_generations:
        return []
    return [
        f"trainer.rows_in_flight is {plan.in_flight}: set it to whole groups of num_generations "
        f"{plan.num_generations}, from the {plan.num_completions} completions of a batch to {most} "
        f"(these times one more than max_rollout_age {max_age})"
    ]
