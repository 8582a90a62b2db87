"""Check the trainer settings: their names, their values, and the sizes of a batch.

Names of other trainers are translated to the names of the installed TRL. The names and types of
TRL's own fields are read from its source code, because importing TRL takes ten seconds.
"""

import ast
import contextlib
import math
import os
import typing
import warnings
from collections.abc import Mapping, Set
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any

from pydantic import Field, Json

from rloo_kit.config.other_names import MOVED, OF_GRPO, REFUSED, RENAMED, why_not_needed
from rloo_kit.config.settings import DEFAULTS, RULES, KitSettings, Rule
from rloo_kit.config.sources import fields_of
from rloo_kit.config.values import check_value
from rloo_kit.errors import ConfigError
from rloo_kit.text.wording import did_you_mean, format_errors, format_value

# Package, file and class that define TRL's fields; each class comes after its base class
SOURCES = (
    ("transformers", "training_args.py", "TrainingArguments"),
    ("trl", "trainer/base_config.py", "_BaseConfig"),
    ("trl", "trainer/rloo_config.py", "RLOOConfig"),
)
# Setting -> the setting that must be on for it to have an effect
ONLY_WITH = {
    "dynamic_sampling_rounds": "dynamic_sampling",
    "kl_estimator": "beta",
    "max_rollout_age": "partial_rollouts",
    "rollout_correction_cap": "rollout_correction",
    "rows_in_flight": "partial_rollouts",
    "token_level_kl": "beta",
}
# Setting -> the only value that it may have with `partial_rollouts`. Other values of some settings
# select a sampler that cannot stop before all completions have ended. Other values of the rest
# change the distribution that tokens are sampled from, but the loss compares log-probabilities of
# tokens from several steps
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
# Annotation in TRL's source -> type that a value must have; TRL checks values of all other types
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
    # YAML has lists, but no tuples
    "tuple[float, float]": Annotated[list[float], Field(min_length=2, max_length=2)],
}
# Settings for which `generate` of transformers refuses a whole number such as 2
FLOATS = ("repetition_penalty", "temperature")
KIT_TYPES: dict[str, Any] = {
    **typing.get_type_hints(KitSettings),
    "chat_template_kwargs": Mapping | Json[dict] | None,  # TRL accepts JSON text too
    "fsdp": Any,  # true, or text as in older versions of transformers
    # TRL also accepts None, and then uses its own default
    "max_completion_length": int,
    "num_generations": int,
}


def known_trainer_fields() -> frozenset[str]:
    """Return the name of every field of ``LeaveOneOutConfig``, without importing TRL or torch."""
    return frozenset(_types())


def _trl_fields() -> dict[str, ast.AnnAssign]:
    """Return a dict from the name of each TRL field to the AST node that defines it.

    Private fields are left out.
    """
    return {
        name: node
        for source in SOURCES
        for name, node in fields_of(*source).items()
        if not name.startswith("_")
    }


@cache
def _types() -> dict[str, Any]:
    """Return a dict from the name of each field of ``LeaveOneOutConfig`` to its type.

    A part of an annotation that is not in ``TYPE_NAMES``, such as a class of TRL, becomes ``Any``.
    """
    found = {}
    for name, node in _trl_fields().items():
        kinds = ast.unparse(node.annotation).split(" | ")
        found[name] = typing.Union[tuple(TYPE_NAMES.get(kind, Any) for kind in kinds)]  # noqa: UP007
    return found | KIT_TYPES


def trl_defaults() -> dict[str, Any]:
    """Return a dict from the name of each TRL field to its default.

    Fields whose default is not a literal in TRL's source are left out.
    """
    found = {}
    for name, node in _trl_fields().items():
        keywords = {key.arg: key.value for key in getattr(node.value, "keywords", ())}  # of field()
        with contextlib.suppress(ValueError):
            found[name] = ast.literal_eval(keywords.get("default", node.value))
    return found


def grpo_fields() -> Set[str]:
    """Return the names of the fields that TRL's ``GRPOConfig`` itself defines."""
    return fields_of("trl", "trainer/grpo_config.py", "GRPOConfig").keys()


def check_values(
    values: Mapping[str, Any], *, all_types: bool = False, recorded: bool = False
) -> list[str]:
    """Return an error message for each invalid trainer setting.

    Args:
        values: Settings with the names of the installed TRL and of the kit.
        all_types: Also check the types of TRL's fields that have neither a range nor choices. True
            for run files; Python code may pass objects of other types, which TRL converts.
        recorded: As in ``run_file.make_run_config``.
    """
    errors = []
    for name, value in values.items():
        rule = RULES.get(name, Rule())
        has_range = rule.choices or rule.minimum is not None or rule.above is not None
        if all_types or has_range or name in KIT_TYPES:
            errors += check_value(f"trainer.{name}", value, _types()[name], rule)
    return errors or ([] if recorded else _check_together(values))


def _check_together(given: Mapping[str, Any]) -> list[str]:
    """Return an error message for each combination of settings that contradict each other."""
    values = {**DEFAULTS, **given}
    budget = values["thinking_budget"]
    longest = values["max_completion_length"]
    clip = values.get("reward_clip_range")
    is_wrong = {
        f"trainer.reward_clip_range is {format_value(clip)}: write the lower limit first": (
            clip and None not in clip and clip[0] > clip[1]
        ),
        "trainer.stop_on needs the doctor, but trainer.doctor is false: leave one of them out": (
            values["stop_on"] and not values["doctor"]
        ),
        f"trainer.thinking_budget {budget} leaves no room for an answer in "
        f"trainer.max_completion_length {longest}: lower the former, or raise the latter": (
            budget and budget >= longest
        ),
        "trainer.rollout_correction corrects for a sampler that differs from the trained model, "
        "but if trainer.generation is transformers, the trained model itself samples: leave one "
        "of these settings out": (
            values["rollout_correction"]
            and values["generation"] == "transformers"
            and not values["partial_rollouts"]
        ),
        "trainer.partial_rollouts is on, but vLLM's server cannot stop before all completions have "
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
                f"trainer.{name} has no effect if trainer.{other} is "
                f"{format_value(values[other])}: leave trainer.{name} out, or set trainer.{other}"
            )
    return errors


# --- names of other trainers ---------------------------------------------------------------------


def translate_trainer_arguments(
    arguments: Mapping[str, Any], *, all_types: bool = False, recorded: bool = False
) -> dict[str, Any]:
    """Check trainer settings, and return them with the names of the installed TRL and of the kit.

    Names of another trainer are translated, or ignored if the setting is not needed here. Both
    cases cause a warning.

    Args:
        arguments: Settings with the names of this trainer or of another one (``other_names.py``).
        all_types: As in ``check_values``.
        recorded: As in ``run_file.make_run_config``.

    Raises:
        ConfigError: A name is unknown or given twice, a value is wrong, settings contradict each
            other, or a batch would not consist of whole groups. One message lists the first 12
            errors. Contradictions are checked only if every value is valid, and the batch only if
            there is no other error.
    """
    errors = []
    notes = []
    values = {}
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
    errors += check_values(values, all_types=all_types, recorded=recorded)
    errors = errors or ([] if recorded else check_batch(values))
    if errors:
        raise ConfigError(format_errors(errors))
    values |= {name: float(values[name]) for name in FLOATS if name in values}
    if "total_episodes" in arguments:
        values["max_steps"] = _steps_of(values)
    for old in filter(RENAMED.get, arguments):
        new = RENAMED[old]
        notes.append(f"{old} is {new} here: {new}={values[new]!r} is used")
    for note in notes:
        # stacklevel 2 is a file of the kit; Unsloth hides warnings that come from TRL's parser
        warnings.warn(note, FutureWarning, stacklevel=2)
    return values


def _instead_of(name: str) -> str:
    """Return the remedy for an unknown trainer setting, as the end of an error message."""
    if name in MOVED:
        key, in_python = MOVED[name]
        return f": give it as {key} in a run file; in Python, pass it to {in_python}"
    if name in REFUSED or name in grpo_fields():
        return f": {REFUSED.get(name, OF_GRPO)}"
    hint = did_you_mean(name, known_trainer_fields() | set(RENAMED))
    return hint or "; docs/reference/run_file.md lists all settings"


def _rename(old: str, value: object, values: dict[str, Any], given: Mapping[str, Any]) -> list[str]:
    """Convert a setting of another trainer to the kit's name and meaning; add it to ``values``.

    Args:
        old: Name of the setting in the other trainer, a key of ``RENAMED``.
        value: Its value.
        values: The setting is added to this dict.
        given: All settings that the user gave.

    Returns:
        A list with the error message; [] if the setting was added.
    """
    new = RENAMED[old]
    if new in given or new in values:
        return [f"{old} is {new} here, and both are given: keep {new}"]
    if old == "total_episodes" and (type(value) is not int or value < 1):
        return [f"total_episodes is {format_value(value)}, must be a whole number of completions"]
    accumulation = given.get("gradient_accumulation_steps")
    if old == "num_mini_batches" and isinstance(value, int) and isinstance(accumulation, int):
        # In TRL's older trainer, a mini-batch was an optimizer step of `accumulation` micro-batches
        value *= accumulation
    # `sum_then_normalize` is a value of TRL's multi_objective_aggregation
    values[new] = "sum" if value == "sum_then_normalize" else value
    return []


def _steps_of(trainer: Mapping[str, Any]) -> int:
    """Convert ``total_episodes``, a number of completions, to a number of optimizer steps.

    Args:
        trainer: Checked trainer settings. ``max_steps`` holds the value to convert, because
            ``total_episodes`` has been renamed already: the number of completions of the whole
            training, on all processes.
    """
    values = {**DEFAULTS, **trainer}
    batch = batch_plan(trainer)
    processes = int(os.environ.get("WORLD_SIZE", "1")) if "RANK" in os.environ else 1
    batches = math.ceil(values["max_steps"] / (batch.num_completions * processes))
    passes = batches * values["num_iterations"] * batch.steps_per_generation
    return math.ceil(passes / batch.accumulation)


# --- the batch -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class BatchPlan:
    """Sizes of one generation batch: the completions that one process samples in one round.

    The batch is divided into slices of ``per_device_train_batch_size`` completions.
    """

    num_completions: int
    num_generations: int  # completions per prompt, which form a group
    steps_per_generation: int  # slices per batch
    accumulation: int  # slices per optimizer step
    in_flight: int  # completions that are sampled at the same time

    @property
    def step_rows(self) -> int:
        """Number of completions in one optimizer step."""
        return self.num_completions // self.steps_per_generation * self.accumulation

    @property
    def is_on_policy(self) -> bool:
        """True if ``accumulation`` is a multiple of ``steps_per_generation``.

        Each optimizer step then uses one or several whole batches, so the policy does not change
        between the sampling of a batch and the end of the first training pass over it. This pass
        therefore also computes the log-probabilities of the policy that sampled the batch.

        If it is False, an optimizer step changes the policy in the middle of a training pass. The
        log-probabilities of the sampling policy must then be computed before that step, in a
        forward pass without gradient.
        """
        return self.accumulation % self.steps_per_generation == 0

    @property
    def num_prompts(self) -> int:
        """Number of prompts in the batch, each with a group of completions."""
        return self.num_completions // self.num_generations


def batch_plan(trainer: Mapping[str, Any]) -> BatchPlan:
    """Return the sizes of one generation batch.

    Args:
        trainer: Checked trainer settings. Defaults are used for missing ones.
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
    """Return a list with the error message for wrong batch sizes, or [] if they are right.

    A generation batch must consist of whole slices of ``per_device_train_batch_size`` completions,
    and of whole groups of ``num_generations`` completions. ``rows_in_flight`` must also consist of
    whole groups, and be between one and ``max_rollout_age + 1`` generation batches.

    Args:
        trainer: Trainer settings, each of which is valid on its own.
    """
    values = {**DEFAULTS, **trainer}
    total = values.get("generation_batch_size")
    if total and values.get("steps_per_generation"):
        return [
            "generation_batch_size and steps_per_generation both set the size of a generation "
            "batch: give one of them"
        ]
    plan = batch_plan(trainer)
    batch = plan.num_completions
    group = plan.num_generations
    rows = values["per_device_train_batch_size"]
    name = "generation_batch_size" if total else "per_device_train_batch_size"
    size = values[name]
    step = math.lcm(rows, group) if total else group // math.gcd(group, batch // rows)
    if size % step:
        below = size // step * step
        sizes = " or ".join(str(number) for number in (below, below + step) if number)
        return [
            f"a generation batch would have {batch} completions, which do not divide into groups "
            f"of num_generations {group} and into slices of {rows}: set trainer.{name} to {sizes}"
        ]
    max_age = values["max_rollout_age"]
    most = batch * (max_age + 1)  # a group must be trained before it is too old
    if batch <= plan.in_flight <= most and not plan.in_flight % group:
        return []
    return [
        f"trainer.rows_in_flight is {plan.in_flight}, must be a multiple of num_generations "
        f"{group}, at least {batch} (the completions of one generation batch) and at most {most} "
        f"(those of max_rollout_age + 1 batches, where max_rollout_age is {max_age})"
    ]
