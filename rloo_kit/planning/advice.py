"""Search for changes of a run's settings that make the run fit into the memory."""

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain

from rloo_kit.config.run_file import RunConfig, make_run_config
from rloo_kit.config.settings import DEFAULTS
from rloo_kit.errors import ConfigError
from rloo_kit.planning.facts import Facts, make_job
from rloo_kit.planning.memory import Job, plan_memory

# Settings that are changed together, each written `section.key=value`, as after `--set`
Option = list[str]


@dataclass(frozen=True)
class Change:
    """One or more settings to change in a run file, and the memory that the change saves."""

    settings: Option
    saves: float  # bytes by which the peak falls, if the earlier changes are already made

    def __str__(self) -> str:
        return "set " + ", ".join(one.replace("=", " to ") for one in self.settings)


def apply(config: RunConfig, options: Sequence[Option]) -> RunConfig:
    """Return a copy of a run's settings with changes made to it.

    Args:
        config: Settings of the run, which stay as they are.
        options: The changes. Each is a list of ``section.key=value``. A later change overrides an
            earlier one of the same setting.

    Raises:
        ConfigError: A change contradicts another setting.
    """
    # An adapter that is trained further may have settings that a run file cannot have
    content = config.as_dict() | {"lora": {"r": config.lora.r}}
    made = make_run_config(content, [*chain.from_iterable(options)])
    return replace(made, lora=replace(config.lora, r=made.lora.r))


def peak_with(config: RunConfig, facts: Facts, options: Sequence[Option]) -> float:
    """Return the planned peak memory of a run after the changes ``options``, in bytes.

    The changes are written as for ``apply``. The result is infinite if they contradict another
    setting.
    """
    try:
        return plan_memory(make_job(apply(config, options), facts)).peak_bytes
    except ConfigError:
        return math.inf


def find_changes(config: RunConfig, facts: Facts, room: int) -> list[Change]:
    """Return changes that make a run fit into ``room`` bytes, the least harmful first.

    The list is empty if the run already fits, or if all changes together do not make it fit. A
    change that contradicts another setting of the run is left out.
    """
    peak = partial(peak_with, config, facts)
    # Each family is tried on top of the changes so far, so that it changes no more than needed
    found = []
    for family in range(len(_families(config, facts))):
        now = peak(found)
        if now <= room:
            break
        options = _families(apply(config, found), facts)[family]
        lower = [one for one in options if peak([*found, one]) < now]
        fitting = [one for one in lower if peak([*found, one]) <= room]
        found += fitting[:1] or lower[-1:]
    if peak(found) > room:
        return []
    # Drop changes that are not needed, the most harmful first. The last one is always needed.
    for option in found[-2::-1]:
        without = [one for one in found if one is not option]
        if peak(without) <= room:
            found = without
    return [
        Change(option, peak(found[:place]) - peak(found[: place + 1]))
        for place, option in enumerate(found)
    ]


# --- families of changes -------------------------------------------------------------------------


def _families(config: RunConfig, facts: Facts) -> list[list[Option]]:
    """Return families of changes, from the least to the most harmful family.

    The options of a family are alternatives, such as values of one setting, the mildest first.
    """
    job = make_job(config, facts)
    trainer = config.trainer
    # If the trained model itself samples, a correction is allowed only with partial rollouts
    corrects = trainer.get("rollout_correction") and not trainer.get("partial_rollouts")
    by_transformers = ["trainer.generation=transformers"]
    by_transformers += [
        f"trainer.{name}={json.dumps(DEFAULTS[name])}"
        for name in ("rollout_correction", "rollout_correction_cap")
        if corrects and name in trainer
    ]
    return [
        [
            [f"trainer.optim={name}"]
            for name in ("adamw_8bit", "paged_adamw_8bit")
            if facts.card.on_gpu and "8bit" not in job.optimizer
        ],
        [["trainer.gradient_checkpointing=true"]] if job.checkpointing == "none" else [],
        [] if job.in_4bit else [["model.load_in_4bit=true"]],
        # Smaller passes, down to one row each: training gets slower, but the gradient is the same
        [
            [f"trainer.tokens_per_micro_batch={budget}"]
            for budget in _halves(plan_memory(job).budget, job.width)
        ],
        [by_transformers] if job.engine in ("vllm", "shared") else [],
        [[f"trainer.rows_in_flight={job.rows}"]] if job.at_once > job.rows else [],
        # Fewer completions at once, and more gradient accumulation for the same optimizer step
        [
            [
                f"trainer.per_device_train_batch_size={rows}",
                f"trainer.gradient_accumulation_steps={job.step_rows // rows}",
                "trainer.steps_per_generation=1",
            ]
            for rows in range(job.rows - 1, job.group - 1, -1)
            if rows % job.group == 0 and job.step_rows % rows == 0
            if not trainer.get("generation_batch_size")
        ],
        [] if facts.continues else [[f"lora.r={rank}"] for rank in _halves(job.rank, 8)],
        list(_shorter_completions(config, job)),
    ]


def _halves(value: int, lowest: int) -> Iterator[int]:
    """Yield half of a value, a quarter and so on, down to ``lowest``."""
    while value > lowest:
        value = max(lowest, value // 2)
        yield value


def _shorter_completions(config: RunConfig, job: Job) -> Iterator[Option]:
    """Yield changes that shorten completions by about a quarter each, down to 128 tokens."""
    length = job.completion
    while length > 128:
        length = max(128, length // 4 * 3 // 64 * 64)
        longest = config.model.max_seq_length - job.completion + length
        option = [f"trainer.max_completion_length={length}", f"model.max_seq_length={longest}"]
        if (config.trainer.get("thinking_budget") or 0) >= length:
            option.append(f"trainer.thinking_budget={length // 2}")  # leaves room for an answer
        yield option
