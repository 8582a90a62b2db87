"""Calibration before a run: sample the model at every level, and choose a level it can learn from.

A group of completions that are all right or all wrong has advantages of 0, so a run learns only
from prompts that its model sometimes solves.
"""

import json
import math
import os
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import yaml

from rloo_kit.config.run_file import SECTIONS, RunConfig
from rloo_kit.data.prompts import count_levels
from rloo_kit.errors import ConfigError, DataError
from rloo_kit.evaluation.evaluator import evaluate, settings_of
from rloo_kit.job import PreparedJob, read_config, with_whole_paths
from rloo_kit.machine.cleanup import session
from rloo_kit.machine.environment import setup
from rloo_kit.output_folder import check_writable, write_atomically
from rloo_kit.runs.child import call_in_child
from rloo_kit.runs.precision import PRECISIONS, mismatch
from rloo_kit.scoring.specs import with_weights
from rloo_kit.text.redaction import redact_tree, redacting
from rloo_kit.text.wording import format_value
from rloo_kit.types import Row

if TYPE_CHECKING:
    from datasets import Dataset

# Range of the share of right completions in which a level may be chosen
LOW = 0.2
HIGH = 0.8


@dataclass(frozen=True)
class Level:
    """Scores of the model's completions at one level."""

    level: Any  # None if the prompts have no levels
    num_prompts: int
    solved: float  # mean score of the judge, in [0, 1]
    signal: float  # share of the groups whose scores differ
    with_signal: list[Row]  # prompts of these groups


def calibrate(  # noqa: PLR0913
    source: str | Path | RunConfig,
    *,
    overrides: Sequence[str] = (),
    num_prompts: int = 32,
    num_generations: int | None = None,
    output: str | Path | None = None,
    precision: bool = False,
    say: Callable[[str], None] = print,
) -> Path:
    """Sample prompts of every level, write a run file with the level to train on, return its path.

    Among the levels that are solved 20 to 80% of the time, the one with the largest share of groups
    whose scores differ is chosen. The judge is the run's reward with the largest weight. For a task
    with levels ``data.level`` is set. Other prompts are grouped by their column ``level``, if there
    is one. Those of the chosen level are written to a .jsonl file next to the run file, without
    sampled prompts that are always or never solved, and followed by the level's held-out prompts.
    The completions are written next to it, for ``warm_up``.

    Args:
        source: A run file or another source of ``train``; it is not changed.
        overrides: ``section.key=value``, as after ``--set``; written to the new run file too.
        num_prompts: Number of prompts per level.
        num_generations: Number of completions per prompt; None for that of the run file.
        output: The new file; None for the name of ``source`` with ``-calibrated``, next to it.
        precision: Load the model in bf16 and in float16 too, and write the one in which sampler and
            learner differ less (``precision.mismatch``).
        say: Called with each line for the user.

    Raises:
        ConfigError: A setting is wrong, or the new file exists; nothing is written.
        DataError: No level is in range; nothing is written.
        KitError: Any other error of ``train`` before its first step; nothing is written.
    """
    if num_prompts < 1 or (num_generations or 2) < 2:
        given = f"num_prompts {num_prompts} and num_generations {num_generations}"
        raise ConfigError(f"{given} must be at least 1 and 2")
    say = redacting(say)
    file = _free_file(source, output)
    config, base = read_config(source, overrides)
    job = PreparedJob(_with_every_level(config, num_prompts), base, say)
    if precision and job.environment.hardware.mixed_precision == "fp16":
        raise ConfigError("this card has no bf16, so a run uses float16: leave --precision out")
    with session():
        levels, others, held_out, sampled = _tried(job, num_prompts, num_generations)
    say(table := _table(levels))
    chosen = _chosen(levels)
    if precision:
        config, line = _in_best_precision(config, base, chosen.with_signal, say)
        say(line)
        table += f"\n{line}"
    made = with_whole_paths(config, base, job.rewards_base)
    data, what = {"level": chosen.level}, f"data.level: {chosen.level}"
    if not count_levels(config.data.prompts):
        held_out = [row for row in held_out if row.get("level") == chosen.level] or held_out
        kept = [row for row in others if row.get("level") == chosen.level]
        data = _write_prompts(file.with_suffix(".jsonl"), chosen.with_signal + kept, held_out)
        dropped = chosen.num_prompts - len(chosen.with_signal)
        what = f"the level's prompts without {dropped} that are always or never solved"
    _write_rows(_completions_of(file), sampled)
    _write_run_file(file, replace(made, data=replace(made.data, **data)), table)
    say(f"{what}; train with rloo-kit train {file}")
    return file


def _write_run_file(file: Path, config: RunConfig, table: str) -> None:
    changed = _changed(config.as_dict(), RunConfig().as_dict())
    settings = yaml.safe_dump(redact_tree(changed), sort_keys=False)
    comment = f"made by rloo-kit calibrate\n{table}".replace("\n", "\n# ")
    write_atomically(file, f"# {comment}\n{settings}".encode())


def _write_rows(file: Path, rows: Iterable[Row]) -> None:
    text = "".join(f"{json.dumps(row, default=str)}\n" for row in rows)
    write_atomically(file, text.encode())


def _write_prompts(file: Path, train: list[Row], held_out: list[Row]) -> dict[str, Any]:
    """Write both splits into one file; return the settings under ``data:`` that read it."""
    _write_rows(file, [*train, *held_out])
    settings: dict[str, Any] = dict.fromkeys(("num_prompts", "columns", "level", "settings"))
    return settings | {"prompts": file.name, "held_out": len(held_out)}


def _in_best_precision(
    config: RunConfig, base: Path, rows: Sequence[Row], say: Callable[[str], None]
) -> tuple[RunConfig, str]:
    """Return the settings with ``bf16`` or ``fp16``, and a line with the measured values."""
    on_cpu = setup(config.model.backend).hardware.device == "cpu"
    found = {}
    for name in PRECISIONS:
        measured = (config, base, rows, name)
        # a process can have only one vLLM engine that sleeps, and one precision of Unsloth
        found[name] = mismatch(*measured) if on_cpu else call_in_child(mismatch, measured, say)
    best = min(found, key=lambda name: (math.isnan(found[name]), found[name]))
    others = {name: value for name, value in config.trainer.items() if name not in PRECISIONS}
    values = ", ".join(f"{name} {value:.5f}" for name, value in found.items())
    line = f"sampler and learner differ by (nats a token): {values}; trainer.{best}: true"
    return replace(config, trainer={**others, best: True}), line


def _free_file(source: str | Path | RunConfig, output: str | Path | None) -> Path:
    """Return the path of the new run file; raise ConfigError if it or its prompts exist."""
    old = Path("run.yaml" if isinstance(source, RunConfig) else source)
    place = old.parent if old.is_file() else Path()
    name = old.stem if old.suffix in (".yaml", ".yml") else old.name  # qwen3-0.6b-8gb has no suffix
    file = place / f"{name}-calibrated.yaml" if output is None else Path(output)
    made = (file, file.with_suffix(".jsonl"), _completions_of(file))
    taken = any(os.path.lexists(one) for one in made)
    if taken or file.suffix != ".yaml" or not file.absolute().parent.is_dir():
        raise ConfigError(
            f"the output {format_value(str(file))} must be a .yaml file in a folder that exists, "
            "and neither it nor a .jsonl of its name may exist: name one with --output"
        )
    check_writable(file.absolute().parent)
    return file


def _completions_of(file: Path) -> Path:
    """Return the path of the completions that a calibration samples."""
    return file.with_name(f"{file.stem}-completions.jsonl")


def _changed(settings: dict[str, Any], default: dict[str, Any]) -> dict[str, Any]:
    """Return the rewards, and the settings that differ from the defaults."""
    parts = {n: _changed(v, default[n]) if n in SECTIONS else v for n, v in settings.items()}
    return {n: v for n, v in parts.items() if n == "rewards" or v not in ({}, default.get(n))}


def _with_every_level(config: RunConfig, num_prompts: int) -> RunConfig:
    """Return the settings of a task with ``num_prompts`` prompts of each requested level."""
    data = config.data
    last = count_levels(config.data.prompts)
    if not last:
        return config
    wanted = data.level if isinstance(data.level, list) else list(range(1, last + 1))
    data = replace(data, level=wanted, num_prompts=num_prompts * len(wanted), held_out=0)
    return replace(config, data=data)


def _tried(
    job: PreparedJob, num_prompts: int, size: int | None
) -> tuple[list[Level], Iterable[Row], list[Row], list[Row]]:
    """Return the levels, the prompts not sampled, the held-out ones, and the completions."""
    job.prepare()
    prompts, held_out = job.splits
    drawn = _drawn(prompts, num_prompts, job.config.seed)
    size = size or job.args.num_generations
    rows = [*prompts.select(drawn)]
    rewards = with_weights(job.rewards, job.args.reward_weights)
    judge = job.guarded(max(rewards, key=lambda reward: reward.weight_at(0.0)), "stop")
    engine, _ = job.engine
    job.say(f"sampling {len(rows)} prompts x {size} completions of {job.config.model.name}")
    how = settings_of(job.args)
    found = evaluate(
        *job.policy,
        rows,
        [judge],
        engine=engine,
        num_samples=size,
        tool_loop=job.tool_loop,
        **how,
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


def _drawn(prompts: "Dataset", num: int, seed: int) -> list[int]:
    """Return the row numbers of ``num`` random prompts of every level, or of all its prompts."""
    levels = prompts["level"] if "level" in prompts.column_names else [None] * len(prompts)
    order = random.Random(seed)
    drawn = []
    for level in sorted(set(levels), key=str):
        own = [place for place, other in enumerate(levels) if other == level]
        drawn += order.sample(own, min(num, len(own)))
    return drawn


def _by_level(rows: list[Row], scores: list[list[float | None]], judge: str) -> list[Level]:
    """Return the scores of every level; the rows of a level must be neighbours."""
    known = [[score for score in group if score is not None] for group in scores]
    if not all(0 <= score <= 1 for group in known for score in group) or not any(known):
        remedy = "set its scaled_by, or raise the weight of another reward"
        raise ConfigError(
            f"the reward {judge} has the largest weight and is not in [0, 1]: {remedy}"
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
    fitting = [one for one in levels if LOW <= one.solved <= HIGH and one.with_signal]
    if fitting:
        return max(fitting, key=lambda one: one.signal)
    shares = [one.solved for one in levels]
    if any(LOW <= share <= HIGH for share in shares):
        raise DataError(
            "no prompt of a level that is solved 20 to 80% of the time has completions of "
            "different scores: raise --num-generations or trainer.temperature, or use other prompts"
        )
    what = "others"
    if min(shares) > HIGH:
        what = "harder ones"
    elif max(shares) < LOW:
        what = "easier ones, allow longer completions, or give examples to rloo-kit warm-up first"
    raise DataError(
        "no level of the prompts is solved 20 to 80% of the time "
        f"(the least {min(shares):.0%}, the most {max(shares):.0%}): use {what}"
    )


def _table(levels: list[Level]) -> str:
    lines = ["level     prompts  solved  with signal"]
    for one in levels:
        name = "all" if one.level is None else str(one.level)
        lines.append(f"{name:<10}{one.num_prompts:>7}{one.solved:>8.0%}{one.signal:>13.0%}")
    return "\n".join(lines)
