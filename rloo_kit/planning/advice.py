"""Changes that make a run fit, the least harmful first."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain

from rloo_kit.config.run_file import RunConfig, read_overrides
from rloo_kit.planning.facts import Facts, make_job
from rloo_kit.planning.memory import Job, plan_memory

# Settings that are changed together, each `section.key=value`, as after `--set`
Option = list[str]


@dataclass(frozen=True)
class Change:
    """One or more settings to change in a run file, and the memory that this saves."""

    settings: Option
    saves: int  # bytes of the peak, after the changes before it

    def __str__(self) -> str:
        return "set " + ", ".join(one.replace("=", " to ") for one in self.settings)


def apply(config: RunConfig, options: Sequence[Option]) -> RunConfig:
    """Return the settings of a run after the changes, of which later ones override earlier ones.

    Args:
        config: Settings of the run; not changed.
        options: Each a list of ``section.key=value``.
    """
    changes = read_overrides(list(chain.from_iterable(options)))
    trainer = config.trainer | changes.pop("trainer", {})
    sections = {name: replace(getattr(config, name), **keys) for name, keys in changes.items()}
    return replace(config, trainer=trainer, **sections)


def peak_with(config: RunConfig, facts: Facts, options: Sequence[Option]) -> int:
    """Return the planned peak memory in bytes of a run with ``options`` (see ``apply``)."""
    return plan_memory(make_job(apply(config, options), facts)).peak_bytes


def find_changes(config: RunConfig, facts: Facts, room: int) -> list[Change]:
    """Return the changes that make a run fit into ``room`` bytes, the least harmful first.

    The list is empty if the run fits already, or if all changes together do not suffice.
    """
    peak = partial(peak_with, config, facts)
    # later families are tried with the changes so far, so that each change is as mild as possible
    found: list[Option] = []
    for family in range(len(_families(config, facts))):
        if peak(found) <= room:
            break
        options = _families(apply(config, found), facts)[family]
        fitting = next((one for one in options if peak([*found, one]) <= room), None)
        chosen = fitting or (options[-1] if options else None)
        if chosen and peak([*found, chosen]) < peak(found):
            found.append(chosen)
    if peak(found) > room:
        return []
    for option in found[-2::-1]:  # the most harmful of the earlier ones first; the last is needed
        without = [one for one in found if one is not option]
        if peak(without) <= room:
            found = without
    return [
        Change(option, peak(found[:place]) - peak(found[: place + 1]))
        for place, option in enumerate(found)
    ]


# --- families of changes -------------------------------------------------------------------------


def _families(config: RunConfig, facts: Facts) -> list[list[Option]]:
    """Return the options of each family, the mildest first; families in the order of harm."""
    job = make_job(config, facts)
    return [
        [
            [f"trainer.optim={name}"]
            for name in ("adamw_8bit", "paged_adamw_8bit")
            if facts.card.on_gpu and "8bit" not in job.optimizer
        ],
        [["trainer.gradient_checkpointing=true"]] if job.checkpointing == "none" else [],
        [] if job.in_4bit else [["model.load_in_4bit=true"]],
        # smaller passes, down to a single row: slower, and the same gradient
        [
            [f"trainer.tokens_per_micro_batch={budget}"]
            for budget in _halves(plan_memory(job).budget, job.width)
        ],
        [["trainer.generation=transformers"]] if job.engine in ("vllm", "shared") else [],
        [[f"trainer.rows_in_flight={job.rows}"]] if job.at_once > job.rows else [],
        # fewer completions at once for the same step: more accumulation
        [
            [
                f"trainer.per_device_train_batch_size={rows}",
                f"trainer.gradient_accumulation_steps={job.step_rows // rows}",
                "trainer.steps_per_generation=1",
            ]
            for rows in range(job.rows - 1, job.group - 1, -1)
            if rows % job.group == 0 and job.step_rows % rows == 0
            if not config.trainer.get("generation_batch_size")
        ],
        [] if facts.continues else [[f"lora.r={rank}"] for rank in _halves(job.rank, 8)],
        _shorter_completions(config, job),
    ]


def _halves(value: int, lowest: int) -> Iterator[int]:
    while value > lowest:
        value = max(lowest, value // 2)
        yield value


def _shorter_completions(config: RunConfig, job: Job) -> list[Option]:
    length = job.completion
    options = []
    while length > 128:
        length = max(128, length // 4 * 3 // 64 * 64)
        longest = config.model.max_seq_length - job.completion + length
        options.append(
            [f"trainer.max_completion_length={length}", f"model.max_seq_length={longest}"]
        )
    return options
