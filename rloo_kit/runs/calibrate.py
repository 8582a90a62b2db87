"""Calibrate a run: sample the model at every difficulty level, and choose a level to train on.

If the completions of a prompt are all right or all wrong, their advantages are 0. A run therefore
learns only from prompts that its model solves sometimes, but not always.
"""

import math
import os
import random
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from statistics import fmean
from typing import Any

import yaml

from rloo_kit.config.run_file import SECTIONS, RunConfig
from rloo_kit.data.prompts import count_levels
from rloo_kit.errors import ConfigError, DataError
from rloo_kit.evaluation.evaluator import evaluate, settings_of
from rloo_kit.job import PreparedJob, read_config, system_message
from rloo_kit.machine.cleanup import session
from rloo_kit.machine.environment import setup
from rloo_kit.output_folder import check_writable, write_atomically, write_rows
from rloo_kit.runs.child import call_in_child
from rloo_kit.runs.precision import PRECISIONS, job_in, mismatch
from rloo_kit.scoring.specs import with_weights
from rloo_kit.text.redaction import redact_tree, redacting
from rloo_kit.text.wording import format_value, shell_path
from rloo_kit.types import Row, Say

# A level may be chosen only if its mean score, the share of solved completions, is in this range
LOW = 0.2
HIGH = 0.8


@dataclass(frozen=True)
class Level:
    """Scores of the model's completions at one difficulty level."""

    level: Any  # None if the prompts have no levels
    num_prompts: int
    solved: float  # mean score that the reward gives the completions, in [0, 1]
    signal: float  # share of the prompts whose completions have different scores
    with_signal: list[Row]  # the prompts whose completions have different scores


def calibrate(  # noqa: PLR0913
    source: str | Path | RunConfig,
    *,
    overrides: Sequence[str] = (),
    num_prompts: int = 32,
    num_generations: int | None = None,
    output: str | Path | None = None,
    precision: bool = False,
    say: Say = print,
) -> Path:
    """Find the difficulty level to train on, and write a run file that uses it.

    The model completes prompts of every level, and the run's reward with the largest weight scores
    the completions. A level can be chosen if its mean score is between 0.2 and 0.8. Among these
    levels, the one with the largest share of prompts whose completions have different scores is
    chosen.

    For a built-in or reasoning-gym task with levels, the new run file sets ``data.level``. Other
    prompts are grouped by their column ``level``; without this column they form one level. In this
    second case, the prompts of the new run are written to a new .jsonl file next to the run file:
    first the prompts of the chosen level, without sampled prompts that are always or never solved,
    and then the held-out prompts.

    In both cases, the sampled completions are written to another .jsonl file, which ``warm_up`` can
    use as examples.

    Args:
        source: A run file or another source that ``train`` accepts; it is not changed.
        overrides: Settings in the form ``section.key=value``, as after ``--set``. The new run file
            has them too.
        num_prompts: Number of prompts per level.
        num_generations: Number of completions per prompt; None: as in the run file.
        output: Path of the new run file. None: the name of ``source`` with ``-calibrated`` added,
            in the folder of ``source`` if ``source`` is a file, otherwise in the working folder.
        precision: Also measure in which precision, bf16 or float16, the log-probabilities of
            sampler and learner differ less (``precision.mismatch``), and set this precision in the
            new run file.
        say: Called with each line that is printed for the user.

    Returns:
        The path of the new run file.

    Raises:
        ConfigError: A setting is wrong, or the new file exists already. Nothing is written.
        DataError: No level can be chosen. Nothing is written.
        KitError: Any other error that ``train`` raises before its first step. Nothing is written.
    """
    if num_prompts < 1 or (num_generations is not None and num_generations < 2):
        given = f"num_prompts is {num_prompts} and num_generations is {num_generations}"
        raise ConfigError(f"{given}: num_prompts must be at least 1, num_generations at least 2")
    say = redacting(say)
    file, prompts_file, completions_file = _free_files(source, output)
    config, base = read_config(source, overrides)
    job = PreparedJob(_with_every_level(config, num_prompts), base, say)
    if precision and job.environment.hardware.mixed_precision == "fp16":
        raise ConfigError("this card has no bf16, so float16 is always used: leave --precision out")
    for name in PRECISIONS if precision else ():  # checked now, because sampling takes minutes
        job_in(name, config, base)
    with session():
        levels, others, held_out, sampled = _tried(job, num_prompts, num_generations)
    say(table := _table(levels))
    chosen = _chosen(levels)
    if precision:
        config, line = _in_best_precision(config, base, chosen.with_signal, say)
        say(line)
        table += f"\n{line}"
    made = PreparedJob(config, base).config
    data, what = {"level": chosen.level}, f"data.level: {chosen.level}"
    if not count_levels(config.data.prompts):
        held_out = [row for row in held_out if row.get("level") == chosen.level] or held_out
        kept = [row for row in others if row.get("level") == chosen.level]
        data = _write_prompts(prompts_file, chosen.with_signal + kept, held_out) | {
            "system": system_message(config.data)  # its default depends on the name of the task
        }
        dropped = chosen.num_prompts - len(chosen.with_signal)
        what = f"prompts of the level, except {dropped} that are always or never solved"
    write_rows(completions_file, sampled)
    _write_run_file(file, replace(made, data=replace(made.data, **data)), table)
    say(f"{what}; train with rloo-kit train {shell_path(file)}")
    return file


def _write_run_file(file: Path, config: RunConfig, table: str) -> None:
    """Write a run file: a table as comment, and the settings that differ from the defaults."""
    changed = _changed(config.as_dict(), RunConfig().as_dict())
    settings = yaml.safe_dump(redact_tree(changed), sort_keys=False)
    comment = f"made by rloo-kit calibrate\n{table}".replace("\n", "\n# ")
    write_atomically(file, f"# {comment}\n{settings}".encode())


def _write_prompts(file: Path, train: list[Row], held_out: list[Row]) -> dict[str, Any]:
    """Write training and held-out prompts to one .jsonl file.

    Returns:
        The settings under ``data:`` with which a run reads both splits from this file.
    """
    write_rows(file, [*train, *held_out])
    used_up = ("num_prompts", "columns", "config", "level", "settings", "max_prompt_quantile")
    return dict.fromkeys(used_up) | {
        "prompts": file.name,
        "split": "train",
        "held_out": len(held_out),
    }


def _in_best_precision(
    config: RunConfig, base: Path, rows: Sequence[Row], say: Say
) -> tuple[RunConfig, str]:
    """Measure the mismatch of sampler and learner in bf16 and float16, and choose the better one.

    Args:
        config: Settings of the run.
        base: Folder that relative paths in the settings start from.
        rows: Prompts to sample.
        say: Called with each line that is printed for the user.

    Returns:
        The settings with ``trainer.bf16`` or ``trainer.fp16`` set, and a line with the values.
    """
    on_cpu = setup(config.model.backend).hardware.device == "cpu"
    found = {}
    for name in PRECISIONS:
        measured = (config, base, rows, name)
        # a process can have only one vLLM engine with sleep mode, and Unsloth only one precision
        found[name] = mismatch(*measured) if on_cpu else call_in_child(mismatch, measured, say)
    best = min(found, key=lambda name: (math.isnan(found[name]), found[name]))
    others = {name: value for name, value in config.trainer.items() if name not in PRECISIONS}
    values = ", ".join(f"{name} {value:.1e}" for name, value in found.items())
    line = f"difference of sampler and learner (nats a token): {values}; trainer.{best}: true"
    return replace(config, trainer={**others, best: True}), line


def _free_files(
    source: str | Path | RunConfig, output: str | Path | None
) -> tuple[Path, Path, Path]:
    """Return the paths of the new files: the run file, its prompts, and the sampled completions.

    Raises:
        ConfigError: One of the files exists already, the run file is not a .yaml file, or its
            folder does not exist.
    """
    old = Path("run.yaml" if isinstance(source, RunConfig) else source)
    place = old.parent if old.is_file() else Path()
    name = old.stem if old.suffix in (".yaml", ".yml") else old.name  # qwen3-0.6b-8gb has no suffix
    file = place / f"{name}-calibrated.yaml" if output is None else Path(output)
    files = (file, file.with_suffix(".jsonl"), file.with_name(f"{file.stem}-completions.jsonl"))
    if (
        any(map(os.path.lexists, files))
        or file.suffix != ".yaml"
        or not file.absolute().parent.is_dir()
    ):
        raise ConfigError(
            f"the output {format_value(str(file))} must be a new .yaml file in a folder that "
            "exists, and no .jsonl file of that name may exist: choose another one with --output"
        )
    check_writable(file.absolute().parent)
    return files


def _changed(settings: dict[str, Any], default: dict[str, Any]) -> dict[str, Any]:
    """Return the settings that differ from the defaults; rewards are always included."""
    parts = {n: _changed(v, default[n]) if n in SECTIONS else v for n, v in settings.items()}
    return {n: v for n, v in parts.items() if n == "rewards" or v not in ({}, default.get(n))}


def _with_every_level(config: RunConfig, num_prompts: int) -> RunConfig:
    """Return settings that load ``num_prompts`` prompts of every level of a task.

    No prompts are held out. If ``data.level`` is a list, only the levels in it are loaded. If the
    prompts are not a task with levels (built-in or of reasoning-gym), the settings are returned
    unchanged.
    """
    data = config.data
    last = count_levels(data.prompts)
    if not last:
        return config
    levels = data.level if isinstance(data.level, list) else [*range(1, last + 1)]
    data = replace(data, level=levels, num_prompts=num_prompts * len(levels), held_out=0)
    return replace(config, data=data)


def _tried(
    job: PreparedJob, num_prompts: int, size: int | None
) -> tuple[list[Level], Iterable[Row], list[Row], list[Row]]:
    """Sample and score prompts of every level.

    Args:
        job: The run.
        num_prompts: Number of prompts per level.
        size: Number of completions per prompt; None: ``trainer.num_generations``.

    Returns:
        The scores of each level, the prompts that were not sampled, the held-out prompts, and the
        sampled completions with their scores.
    """
    job.prepare()
    prompts, held_out = job.splits
    drawn = _drawn(prompts, num_prompts, job.config.seed)
    size = size or job.args.num_generations
    rows = [*prompts.select(drawn)]
    rewards = with_weights(job.rewards, job.args.reward_weights)
    judge = job.guarded(max(rewards, key=lambda reward: reward.weight_at(0.0)), "stop")
    engine, _ = job.engine
    job.say(f"sampling {len(rows)} prompts x {size} completions of {job.model_name}")
    found = evaluate(
        *job.policy,
        rows,
        [judge],
        engine=engine,
        num_samples=size,
        tool_loop=job.tool_loop,
        **settings_of(job.args),
    )
    scores = [[one["rewards"][judge.name] for one in group] for group in found.by_prompt]
    others = prompts.select(sorted(set(range(len(prompts))) - set(drawn)))
    sampled = [
        {
            "prompt": one["prompt"],
            "completion": one["completion"],
            "truncated": one["cut_off"],
            "score": one["rewards"][judge.name],
        }
        for one in found.samples
    ]
    return _by_level(rows, scores, judge.name), others, [*(held_out or [])], sampled


def _drawn(prompts: Any, num: int, seed: int) -> list[int]:
    """Return the row numbers of ``num`` random prompts of each level of a ``datasets.Dataset``.

    For a level with fewer prompts, all of its row numbers are returned.
    """
    levels = prompts["level"] if "level" in prompts.column_names else [None] * len(prompts)
    places = defaultdict(list)
    for place, level in enumerate(levels):
        places[str(level)].append(place)  # str, because a level may be a list
    order = random.Random(seed)
    drawn = []
    for _, own in sorted(places.items()):
        drawn += order.sample(own, min(num, len(own)))
    return drawn


def _by_level(rows: list[Row], scores: list[list[float | None]], judge: str) -> list[Level]:
    """Return the scores of every level.

    Args:
        rows: Prompts, sorted by level.
        scores: Scores of the completions of each prompt; None for an unscored completion.
        judge: Name of the reward that scored the completions, for the message.

    Raises:
        ConfigError: A score is not in [0, 1], or no completion has a score.
    """
    known = [[score for score in group if score is not None] for group in scores]
    if not any(known) or not all(0 <= score <= 1 for group in known for score in group):
        wrong = "its scores are not in [0, 1]" if any(known) else "it scored no completion"
        raise ConfigError(
            f"the reward {judge} has the largest weight, but {wrong}: rescale it with scaled_by, "
            "or raise the weight of another reward"
        )
    scored = [(row, group) for row, group in zip(rows, known, strict=True) if group]
    levels = []
    for level, of_level in groupby(scored, lambda pair: pair[0].get("level")):
        own = [*of_level]
        differ = [row for row, group in own if min(group) < max(group)]
        solved = fmean(fmean(group) for _, group in own)
        levels.append(Level(level, len(own), solved, len(differ) / len(own), differ))
    return levels


def _chosen(levels: list[Level]) -> Level:
    """Return the level to train on.

    Raises:
        DataError: No level is solved 20 to 80% of the time, or in these levels, all completions of
            each prompt have the same score.
    """
    fitting = [one for one in levels if LOW <= one.solved <= HIGH and one.with_signal]
    if fitting:
        return max(fitting, key=lambda one: one.signal)
    shares = [one.solved for one in levels]
    if any(LOW <= share <= HIGH for share in shares):
        raise DataError(
            "a level is solved 20 to 80% of the time, but all completions of each of its prompts "
            "have the same score: raise --num-generations or trainer.temperature, or use other "
            "prompts"
        )
    what = "other prompts"
    if min(shares) > HIGH:
        what = "harder prompts"
    elif max(shares) < LOW:
        what = "easier prompts, allow longer completions, or run rloo-kit warm-up on examples first"
    raise DataError(
        "no level of the prompts is solved 20 to 80% of the time "
        f"(lowest {min(shares):.0%}, highest {max(shares):.0%}): use {what}"
    )


def _table(levels: list[Level]) -> str:
    """Return a table with one line for each level."""
    lines = ["level     prompts  solved  with signal"]
    for one in levels:
        name = "all" if one.level is None else str(one.level)
        lines.append(f"{name:<10}{one.num_prompts:>7}{one.solved:>8.0%}{one.signal:>13.0%}")
    return "\n".join(lines)
