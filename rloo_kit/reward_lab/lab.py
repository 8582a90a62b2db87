"""Check of a run's rewards before training.

The check samples completions, calls every reward on them and on altered copies of them, and reports
the faults it finds. It samples with the run's own model and a new adapter. If the completions come
from a file instead, only the run's tokenizer is loaded.
"""

import contextlib
import json
import random
from collections.abc import Sequence
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import Any

from rloo_kit.config.run_file import RunConfig
from rloo_kit.config.settings import DEFAULTS
from rloo_kit.data.files import placed_rows
from rloo_kit.errors import ConfigError, KitError
from rloo_kit.evaluation.evaluator import sample_and_score
from rloo_kit.job import PreparedJob, read_config, template_settings
from rloo_kit.machine.cleanup import add_to_session, session
from rloo_kit.output_folder import (
    check_writable,
    free_folder,
    make_run_folder,
    write_json,
    write_rows,
)
from rloo_kit.reward_lab.check import RewardCheck
from rloo_kit.reward_lab.probes import probe
from rloo_kit.reward_lab.rules import find_all, verdict
from rloo_kit.reward_lab.score_statistics import (
    Batch,
    Probed,
    signal_of,
    statistics_of,
    total_scores,
)
from rloo_kit.runs.child import call_in_child
from rloo_kit.sampling.choice import make_sampling, thought_limit
from rloo_kit.scoring.contract import CheckedReward, columns_read, reward_columns
from rloo_kit.scoring.specs import LoadedReward, RewardSpec, load_rewards, with_weights
from rloo_kit.text.redaction import redact_tree, redacting
from rloo_kit.text.wording import shell_path, text_of
from rloo_kit.tools.numbers import call_numbers
from rloo_kit.types import Row, Say

# Column of a sampled row with the scores from its environment, as reward -> score
OF_ENVIRONMENTS = "environment_rewards"
# Other columns of sampled rows. A run's completions.jsonl calls them `group` and `truncated`. These
# two names are not used here, because the dataset may have columns with the same names
GROUP = "completion_group"
TRUNCATED = "completion_truncated"
# Columns that a run writes to its completions.jsonl
OF_A_RUN = {
    "step", "group", "prompt", "completion", "truncated", "rewards", "score", "kl", "baseline",
    "advantage", "tokens", "thought_tokens", "answer_at",
}  # fmt: skip
NUM_PROMPTS = 16  # prompts to sample completions for, by default
NO_TOKENIZER = (
    "note: no tokenizer is loaded, so rewards that look for thinking tokens use those of Qwen3"
)


def check_rewards(  # noqa: PLR0913
    source: str | Path | RunConfig | None = None,
    *,
    overrides: Sequence[str] = (),
    rewards: Sequence[RewardSpec] | None = None,
    completions: str | Path | Sequence[Row] | None = None,
    num_prompts: int | None = None,
    num_generations: int | None = None,
    output_dir: str | Path | None = None,
    say: Say = print,
) -> RewardCheck:
    """Call every reward of a run on completions of its model, and report the faults found.

    On a GPU a separate process loads the model and samples, so that all of its GPU memory is free
    again for a training that may follow. The rewards are called in this process.

    Args:
        source: Path of a run file, name of a run file that ships with the kit, or a ``RunConfig``.
            It may be None if both ``rewards`` and ``completions`` are given.
        overrides: Changes to the run file, each as ``section.key=value`` (like ``--set``).
        rewards: Rewards to check instead of those in the run file. Their weights come from these
            specs, not from the run file.
        completions: Completions to check instead of sampled ones: the path of a .jsonl file, or
            rows. Each row has ``prompt``, ``completion`` and the columns that the rewards read. The
            model is not loaded.
        num_prompts: Number of prompts to sample completions for; None: 16.
        num_generations: Number of completions for each prompt. None uses the run's number.
        output_dir: New folder for the check and its completions. None writes no files.
        say: Function that is called with each line of output.

    Returns:
        The check. Its ``has_errors`` is True if the run cannot learn. If a reward raises an error,
        the error becomes a finding of the check.

    Raises:
        ConfigError: A setting is wrong, or there is nothing to check.
        DataError: Prompts or completions cannot be read.
        ModelError: The model cannot be loaded.
        RewardLoadError: A reward cannot be loaded.
        RewardContractError: The ``get_reward`` method of an environment raised an exception.
    """
    if source is None and (completions is None or rewards is None):
        raise ConfigError("there is nothing to check: give a run file, or completions and rewards")
    _check_counts(completions, num_prompts=num_prompts, num_generations=num_generations)
    if output_dir is not None:
        check_writable(free_folder(output_dir).parent)
    config, base = read_config(RunConfig() if source is None else source, overrides)
    say = redacting(say)
    job = PreparedJob(config, base, say)
    loaded = _load(job, rewards)  # before the model, so that a wrong name is reported in a second
    with session() as opened:
        if completions is None:
            asked = (config, base, num_prompts or NUM_PROMPTS, num_generations)
            on_cpu = job.environment.hardware.device == "cpu"
            rows = _sampled(*asked, say) if on_cpu else call_in_child(_sampled, asked, say)
        else:
            found = [row for _, row in placed_rows(completions, ("prompt", "completion"))]
            rows = found if source is None else _with_columns(found, job)
        limit = tokenizer = None
        if source is not None:
            limit = config.trainer.get("max_completion_length") or DEFAULTS["max_completion_length"]
            # Completions in a file can be checked without the model
            with contextlib.suppress(KitError, OSError, ValueError):
                tokenizer = job.tokenizer
        bound = load_rewards(loaded, tokenizer, None, template_settings(config))
        check = _examined(rows, bound, config, limit, [NO_TOKENIZER] * (tokenizer is None))
    say(f"\n{check}")
    if output_dir is not None:
        _write(make_run_folder(output_dir), check, rows, say)
    if completions is None:
        say(f"\n{opened.released}")
    return check


def _check_counts(completions: object, **counts: int | None) -> None:
    for name, value in counts.items():
        if value is not None and value < 1:
            raise ConfigError(f"{name} is {value}, must be at least 1")
        if value is not None and completions is not None:
            raise ConfigError(f"{name} has no effect on the completions of a file: leave it out")


# --- completions ---------------------------------------------------------------------------------


def _with_columns(rows: list[Row], job: PreparedJob) -> list[Row]:
    """Add the columns of the run's prompts to the rows of a run's completions.jsonl.

    A run writes its prompts there without their other columns, which the rewards may read. If any
    row has a column that a run does not write, the rows are from elsewhere, and all are returned
    unchanged. A row is also returned unchanged if the run does not have its prompt.
    """
    if any(row.keys() - OF_A_RUN for row in rows):
        return rows
    known = {}
    with contextlib.suppress(KitError):  # the file of the prompts may be gone
        known = {json.dumps(row["prompt"]): row for part in job.prompts for row in part or ()}
    return [{**known.get(json.dumps(row["prompt"]), {}), **row} for row in rows]


def _sampled(
    config: RunConfig,
    base: Path,
    num_prompts: int,
    num_generations: int | None,
    say: Say = print,
) -> list[Row]:
    """Sample completions in this process for randomly chosen prompts of the run.

    Args:
        config: The run's settings.
        base: Folder that relative paths in the settings start from.
        num_prompts: Number of prompts, at most as many as the run has.
        num_generations: Number of completions for each prompt. None uses the run's number.
        say: Function that is called with each line of output.

    Returns:
        One row for each completion, with the columns of its prompt, the completion, its token ids
        and its group. The prompt ends with the observation of an environment, if there is one.
    """
    job = PreparedJob(config, base, say)
    prompts, _ = job.splits
    args = job.args
    model, processor = job.policy
    engine, _ = job.engine
    tokenizer = getattr(processor, "tokenizer", processor)
    num_prompts = min(num_prompts, len(prompts))
    size = num_generations or args.num_generations
    numbers = sorted(random.Random(config.seed).sample(range(len(prompts)), num_prompts))
    say(
        f"sampling {num_prompts} prompts x {size} completions of {config.model.name}, "
        f"temperature {args.temperature:g}, at most {args.max_completion_length} tokens"
    )
    repeated = list(prompts.select([number for number in numbers for _ in range(size)]))
    ends = model.generation_config.eos_token_id
    how = make_sampling(args, ends, thought_limit(tokenizer, args.thinking_budget))
    own = load_rewards(job.of_environments)  # their environments exist only in this process
    found = []
    sampled = sample_and_score(
        model,
        tokenizer,
        repeated,
        how,
        own,
        template_settings=args.chat_template_kwargs,
        batch_size=args.per_device_train_batch_size,
        seed=args.seed,
        engine=engine,
        tool_loop=job.tool_loop,
    )
    for row, prompt, completion, turns, ended, scores in sampled:
        more: Row = {} if job.tool_loop is None else {"completion_turns": turns}
        if own:
            more[OF_ENVIRONMENTS] = scores
        found.append(
            {
                **row,
                "prompt": prompt,
                "completion": completion,
                "completion_ids": [*chain(*turns)],
                GROUP: len(found) // size,
                TRUNCATED: not ended,
                **more,
            }
        )
    return found


def _load(job: PreparedJob, specs: Sequence[RewardSpec] | None) -> list[LoadedReward]:
    """Load the rewards to check, without a tokenizer.

    These are the rewards in ``specs``, with their weights there. If ``specs`` is None, they are the
    rewards of the run, with the weights that the run gives them.
    """
    if specs is not None:
        return load_rewards(specs, say=job.say)
    found = load_rewards(job.config.rewards, base_dir=job.rewards_base, say=job.say)
    return with_weights(found, job.config.trainer.get("reward_weights"))


# --- calling the rewards -------------------------------------------------------------------------


def _batch_of(
    rows: list[Row], columns: dict[str, Any], limit: int | None, max_seq_length: int
) -> Batch:
    texts = [text_of(row["completion"]) for row in rows]
    ids = columns.get("completion_ids")
    truncated = columns.get(TRUNCATED, columns.get("truncated"))
    groups = {}
    for number, row in enumerate(rows):
        # A run's completions.jsonl counts the groups of every step from 0
        group = row.get(GROUP, row.get("group"))
        key = [row["prompt"]] if group is None else [row.get("step"), group]
        groups.setdefault(json.dumps(key, default=str), []).append(number)
    if truncated is None and ids is not None and limit is not None:
        truncated = [len(row) >= limit for row in ids]
    return Batch(
        texts=texts,
        groups=list(groups.values()),
        lengths=list(map(len, ids or texts)),
        truncated=truncated,
        max_completion_length=limit,
        max_seq_length=max_seq_length,
    )


def _examined(
    rows: list[Row],
    rewards: list[LoadedReward],
    config: RunConfig,
    limit: int | None,
    notes: list[str],
) -> RewardCheck:
    """Call and probe every reward on the rows, and return the resulting check.

    Args:
        rows: The completions, with their prompts and the columns that the rewards read.
        rewards: The rewards.
        config: Settings of the run, or the default settings if there is no run.
        limit: Maximum number of tokens in a completion; None if it is not known.
        notes: Lines for the user. A line is added for each reward that cannot be checked.
    """
    ids: list[Any] = [row.get("completion_ids") for row in rows]
    completions = [row["completion"] for row in rows]
    columns = reward_columns(rows, completions, ids if all(ids) else None)
    probed = []
    batch = _batch_of(rows, columns, limit, config.model.max_seq_length)
    timeout = config.trainer.get("reward_timeout_seconds")
    for reward in rewards:
        if not isinstance(reward.func, CheckedReward):
            notes.append(f"note: {reward.name} is a model object, which was not checked")
        elif "environments" in columns_read(reward.func.reward):
            notes.append(f"note: {reward.name} reads the environments, so it was not checked")
        else:
            add_to_session(reward.func)
            probed.append(probe(reward, columns, batch, timeout))
    played = [row.get(OF_ENVIRONMENTS) or {} for row in rows]
    probed.extend(
        Probed(name, 1.0, [scores.get(name) for scores in played])
        for name in dict.fromkeys(chain(*played))
    )
    totals = total_scores(probed, batch)
    signal = signal_of(totals, batch)
    has_tools = config.tools or config.environment
    calls = call_numbers(completions, totals, batch.groups) if has_tools else None
    findings = find_all(probed, batch, signal, calls)
    samples = [
        {
            "prompt": row["prompt"],
            "completion": batch.texts[number],
            "rewards": {reward.name: reward.scores[number] for reward in probed},
            "score": totals[number],
        }
        for number, row in enumerate(rows)
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
    write_json(folder / "rewards_check.json", redact_tree(asdict(check)), indent=1)
    # Each column is masked on its own. Otherwise the name of a column, such as answer_key, could
    # mask all of its values, which a reward must be able to read in the next check
    shown = ({name: redact_tree(value) for name, value in row.items()} for row in rows)
    write_rows(folder / "completions.jsonl", shown)
    say(
        f"\nwritten to {folder}; to check again without the model, add "
        f"--completions {shell_path(folder / 'completions.jsonl')}"
    )
