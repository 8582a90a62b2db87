"""Try the rewards of a run before it trains: sample or read completions, call, probe, report.

The model is the run's own, with its fresh adapter; or completions come from a file, and then only
the run's tokenizer is loaded.
"""

import contextlib
import functools
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from rloo_kit.config.run_file import RunConfig
from rloo_kit.data.files import read_rows
from rloo_kit.errors import ConfigError, DataError, KitError
from rloo_kit.evaluation.evaluator import evaluate, settings_of
from rloo_kit.job import PreparedJob, read_config, template_settings
from rloo_kit.machine.environment import load_env_file
from rloo_kit.machine.memory import add_to_session, session
from rloo_kit.output_folder import check_writable, free_folder
from rloo_kit.reward_lab.check import RewardCheck
from rloo_kit.reward_lab.probes import probe
from rloo_kit.reward_lab.rules import find_all, verdict
from rloo_kit.reward_lab.statistics import (
    Batch,
    Probed,
    signal_of,
    statistics_of,
    total_scores,
)
from rloo_kit.runs.child import call_in_child
from rloo_kit.scoring.contract import RESERVED, CheckedReward
from rloo_kit.scoring.loading import LoadedReward, RewardSpec, load_rewards, with_weights
from rloo_kit.text.redaction import redact_tree
from rloo_kit.text.wording import text_of
from rloo_kit.types import Row, Score, Tokenizer

Say = Callable[[str], None]


@dataclass(frozen=True)
class _Material:
    """What the rewards are called with, and what is known of it."""

    rows: list[Row]  # as `--completions` reads them
    rewards: list[LoadedReward]
    max_completion_length: int | None = None
    max_seq_length: int | None = None
    timeout: float | None = None
    notes: list[str] = field(default_factory=list)


def check_rewards(  # noqa: PLR0913
    source: str | Path | RunConfig | None = None,
    *,
    overrides: Sequence[str] = (),
    rewards: Sequence[RewardSpec] | None = None,
    completions: str | Path | Sequence[Row] | None = None,
    num_prompts: int = 16,
    num_generations: int | None = None,
    output_dir: str | Path | None = None,
    say: Say = print,
) -> RewardCheck:
    """Call every reward on completions of the model, and report what is wrong with it.

    On a GPU the model samples in a process of its own, and the rewards are called in this one.

    Args:
        source: A run file, the name of one that ships with the kit, or a ``RunConfig``; None where
            rewards and completions are given.
        overrides: ``section.key=value``, as after ``--set``.
        rewards: Rewards in place of those of the run file.
        completions: A .jsonl file (or rows) with ``prompt``, ``completion`` and the columns that
            the rewards ask for, in place of sampling; no model is loaded.
        num_prompts: Prompts to sample.
        num_generations: Completions of each; None: as in the run file.
        output_dir: Write the check and the completions into this folder.
        say: Called with each line for the user.

    Returns:
        The check; ``has_errors`` says whether the run could not learn.

    Raises:
        KitError: A setting, the file, the model or the loading of a reward is at fault. A fault of
            a reward that was called is a finding.
    """
    if source is None and (completions is None or rewards is None):
        raise ConfigError("there is nothing to check: give a run file, or completions and rewards")
    for name, value in (("num_prompts", num_prompts), ("num_generations", num_generations)):
        if value is not None and value < 1:
            raise ConfigError(f"{name} is {value}, must be at least 1")
    folder = None if output_dir is None else free_folder(output_dir)
    if folder is not None:
        check_writable(folder.parent)
    load_env_file()
    config, base = (RunConfig(), Path()) if source is None else read_config(source, overrides)
    job = PreparedJob(config, base, say)
    load = functools.partial(_load, job, rewards)
    load(say=say)  # a wrong name costs a second here, and not a model load
    with session() as opened:
        if completions is None:
            on_gpu = job.environment.hardware.device != "cpu"
            # A process that ends gives back all of a card's memory, and a training may follow
            asked = (config, base, num_prompts, num_generations)
            material = call_in_child(_sampled, asked, say) if on_gpu else _sampled(*asked, say)
            material = replace(material, rewards=load(job.tokenizer))
        else:
            material = _read(completions, job if source is not None else None, load)
        check = _examined(material)
    say(f"\n{check}")
    if folder is not None:
        _write(folder, check, material.rows, say)
    if completions is None:
        say(f"\n{opened.released}")
    return check


# --- where completions come from -----------------------------------------------------------------


def _sampled(
    config: RunConfig,
    base: Path,
    num_prompts: int,
    num_generations: int | None,
    say: Say = print,
) -> _Material:
    """Return completions that the run's model draws from some of its prompts, without rewards."""
    job = PreparedJob(config, base, say)
    (prompts, _), args = job.splits, job.args
    (model, tokenizer), (engine, _) = job.policy, job.engine
    num_prompts, size = min(num_prompts, len(prompts)), num_generations or args.num_generations
    numbers = sorted(random.Random(config.seed).sample(range(len(prompts)), num_prompts))
    say(
        f"sampling {num_prompts} prompts x {size} completions of {config.model.name}, "
        f"temperature {args.temperature:g}, at most {args.max_completion_length} tokens"
    )
    repeated = prompts.select([number for number in numbers for _ in range(size)])
    given: dict[str, Any] = {}

    def keep(**columns: Any) -> list[Score]:
        given.update(columns)
        return [None] * len(columns["completions"])

    kept = [LoadedReward(keep, "kept")]
    evaluate(model, tokenizer, repeated, kept, engine=engine, **settings_of(args))
    ends = {*model.generation_config.eos_token_id, tokenizer.pad_token_id}
    rows = [
        {
            **row,
            "completion": given["completions"][number],
            "completion_ids": (ids := given["completion_ids"][number]),
            "group": number // size,
            "truncated": not ids or ids[-1] not in ends,
        }
        for number, row in enumerate(repeated)
    ]
    return _Material(
        rows,
        [],
        args.max_completion_length,
        config.model.max_seq_length,
        args.reward_timeout_seconds,
    )


def _read(
    completions: str | Path | Sequence[Row],
    job: PreparedJob | None,
    load: Callable[..., list[LoadedReward]],
) -> _Material:
    """Return the completions of a file."""
    if isinstance(completions, str | Path):
        rows = [_checked(row, place) for place, row in read_rows(Path(completions))]
    else:
        rows = [_checked(row, f"row {n}") for n, row in enumerate(completions, 1)]
    if not rows:
        raise DataError("there are no completions: give rows with `prompt` and `completion`")
    tokenizer = None
    if job is not None:
        with contextlib.suppress(KitError, OSError, ValueError):  # it may not be on this machine
            tokenizer = job.tokenizer
    note = "note: without a tokenizer, rewards that look for thinking tokens use Qwen3's"
    material = _Material(rows, load(tokenizer), notes=[note] if tokenizer is None else [])
    if job is None:
        return material
    trainer = job.config.trainer
    return replace(
        material,
        max_completion_length=trainer.get("max_completion_length", 512),
        max_seq_length=job.config.model.max_seq_length,
        timeout=trainer.get("reward_timeout_seconds"),
    )


def _checked(row: Any, place: str) -> Row:
    """Return a row that has a prompt and a completion."""
    if not isinstance(row, dict):
        raise DataError(f"{place}: holds a {type(row).__name__}, must be an object")
    for name in ("prompt", "completion"):
        value = row.get(name)
        is_chat = isinstance(value, list) and all(isinstance(message, dict) for message in value)
        if not isinstance(value, str) and not is_chat:
            raise DataError(f"{place}: {name} is {value!r}, must be text or chat messages")
    return row


def _load(
    job: PreparedJob,
    specs: Sequence[RewardSpec] | None,
    tokenizer: Tokenizer | None = None,
    say: Say | None = None,
) -> list[LoadedReward]:
    """Return the rewards to check with their weights at the start of the run."""
    template = template_settings(job.config)
    if specs is not None:
        return load_rewards(specs, tokenizer, None, template, say)
    found = load_rewards(job.config.rewards, tokenizer, job.rewards_base, template, say)
    return with_weights(found, job.config.trainer.get("reward_weights"))


# --- calling the rewards -------------------------------------------------------------------------


def columns_of(rows: list[Row]) -> dict[str, Any]:
    """Return what the trainer would call a reward with."""
    names = dict.fromkeys(name for row in rows for name in row if name not in RESERVED)
    columns: dict[str, Any] = {name: [row.get(name) for row in rows] for name in names}
    if all(row.get("completion_ids") for row in rows):
        columns["completion_ids"] = [row["completion_ids"] for row in rows]
    return columns | {
        "prompts": [row["prompt"] for row in rows],
        "completions": [row["completion"] for row in rows],
        "trainer_state": None,
        "log_extra": lambda column, values: None,
        "log_metric": lambda name, value: None,
    }


def _batch_of(material: _Material, columns: dict[str, Any]) -> Batch:
    rows, ids = material.rows, columns.get("completion_ids")
    groups: dict[str, list[int]] = {}
    for number, row in enumerate(rows):
        # A run's completions.jsonl counts the groups of every step from 0.
        key = [row["prompt"]] if row.get("group") is None else [row.get("step"), row["group"]]
        groups.setdefault(json.dumps(key, default=str), []).append(number)
    truncated, limit = columns.get("truncated"), material.max_completion_length
    if truncated is None and ids is not None and limit:
        truncated = [len(row) >= limit for row in ids]
    return Batch(
        texts=[text_of(row["completion"]) for row in rows],
        groups=list(groups.values()),
        num_tokens=ids and [len(row) for row in ids],
        truncated=truncated and [bool(value) for value in truncated],
        max_completion_length=limit,
        max_seq_length=material.max_seq_length,
    )


def _examined(material: _Material) -> RewardCheck:
    columns = columns_of(material.rows)
    batch, notes, probed = _batch_of(material, columns), list(material.notes), []
    for reward in material.rewards:
        if isinstance(reward.func, CheckedReward):
            add_to_session(reward.func)
            probed.append(probe(reward, columns, batch, material.timeout))
        else:
            notes.append(f"note: {reward.name} is a model object, which was not checked")
    totals = total_scores(probed, batch)
    signal = signal_of(totals, batch)
    findings = find_all(probed, batch, signal)
    samples = [
        {
            "prompt": row["prompt"],
            "completion": batch.texts[number],
            "rewards": {reward.name: reward.scores[number] for reward in probed},
            "score": totals[number],
        }
        for number, row in enumerate(material.rows)
    ]
    return RewardCheck(
        verdict=verdict(signal, findings),
        findings=findings,
        table=[statistics_of(reward, batch) for reward in probed],
        total=statistics_of(Probed("score", 1.0, totals), batch),
        signal=signal,
        samples=samples,
        notes=notes,
    )


def _write(folder: Path, check: RewardCheck, rows: list[Row], say: Say) -> None:
    folder.mkdir(parents=True)
    text = json.dumps(redact_tree(asdict(check)), indent=1, default=str)
    (folder / "rewards_check.json").write_text(f"{text}\n", encoding="utf-8")
    with (folder / "completions.jsonl").open("w", encoding="utf-8") as lines:
        lines.writelines(f"{json.dumps(redact_tree(row), default=str)}\n" for row in rows)
    say(f"\nwritten to {folder}; again without the model: --completions {folder}/completions.jsonl")
