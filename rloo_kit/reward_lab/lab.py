"""Check of a run's rewards before training.

The check samples completions, calls every reward on them, calls it again on altered completions,
and reports the faults it finds. It samples with the run's own model and a new adapter. If the
completions come from a file instead, only the run's tokenizer is loaded.
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
from rloo_kit.evaluation.evaluator import make_completer
from rloo_kit.job import PreparedJob, read_config, template_settings
from rloo_kit.machine.cleanup import add_to_session, session
from rloo_kit.machine.environment import load_env_file
from rloo_kit.output_folder import check_writable, free_folder, write_json
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
from rloo_kit.scoring.contract import CheckedReward, keywords_of, reward_columns
from rloo_kit.scoring.specs import LoadedReward, RewardSpec, load_rewards, with_weights
from rloo_kit.text.redaction import redact_tree
from rloo_kit.text.wording import text_of
from rloo_kit.tools.numbers import call_numbers
from rloo_kit.types import Row, Say, Tokenizer

# Column of a sampled row with the rewards that its environment returned
OF_ENVIRONMENTS = "environment_rewards"
# Other columns of sampled rows. A run's completions.jsonl has `group` and `truncated` instead, but
# a sampled row also has the columns of the user's prompts, which may have these names
GROUP = "completion_group"
TRUNCATED = "completion_truncated"
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

    On a GPU a separate process loads the model and samples. The rewards are called in this process.

    Args:
        source: Path of a run file, name of a run file that ships with the kit, or a ``RunConfig``.
            It may be None if both ``rewards`` and ``completions`` are given.
        overrides: Changes to the run file, each as ``section.key=value`` (like ``--set``).
        rewards: Rewards to check instead of those in the run file.
        completions: Completions to check instead of sampled ones: the path of a .jsonl file, or
            rows. Each has ``prompt``, ``completion`` and the columns that the rewards read. The
            model is then not loaded.
        num_prompts: Number of prompts to sample completions for; None: 16.
        num_generations: Number of completions for each prompt. None uses the run's number.
        output_dir: New folder for the check and its completions. None writes no files.
        say: Function that is called with each line of output.

    Returns:
        The check. Its ``has_errors`` is True if the run cannot learn. A reward that fails when it
        is called does not raise here: the failure is one of the check's findings.

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
    folder = None if output_dir is None else free_folder(output_dir)
    if folder is not None:
        check_writable(folder.parent)
    load_env_file()
    has_run = source is not None
    config, base = read_config(source, overrides) if has_run else (RunConfig(), Path())
    job = PreparedJob(config, base, say)
    _load(job, rewards, say=say)  # a wrong name costs a second here, and not a model load
    with session() as opened:
        if completions is None:
            rows = _sample(job, num_prompts or NUM_PROMPTS, num_generations)
        else:
            rows = [row for _, row in placed_rows(completions, ("prompt", "completion"))]
        tokenizer = None
        if has_run:
            # Completions in a file can be checked without the model
            with contextlib.suppress(KitError, OSError, ValueError):
                tokenizer = job.tokenizer
        notes = [NO_TOKENIZER] if tokenizer is None else []
        check = _examined(rows, _load(job, rewards, tokenizer), config if has_run else None, notes)
    say(f"\n{check}")
    if folder is not None:
        _write(folder, check, rows, say)
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


def _sample(job: PreparedJob, num_prompts: int, num_generations: int | None) -> list[Row]:
    """Sample completions with the run's model and return them as rows.

    On a GPU this happens in a separate process. When that process ends, all of its GPU memory is
    free again for a training that may follow.
    """
    asked = (job.config, job.base, num_prompts, num_generations)
    if job.environment.hardware.device == "cpu":
        return _sampled(*asked, job.say)
    return call_in_child(_sampled, asked, job.say)


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
        One row for each completion: the columns of its prompt, its text, its token ids and its
        group.
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
    repeated = prompts.select([number for number in numbers for _ in range(size)])
    ends = model.generation_config.eos_token_id
    how = make_sampling(args, ends, thought_limit(tokenizer, args.thinking_budget))
    batch_size = args.per_device_train_batch_size
    own = load_rewards(job.of_environments)  # their environments exist only in this process
    completer = make_completer(
        model, tokenizer, how, args.chat_template_kwargs, batch_size, args.seed, engine, own
    )
    completer.tool_loop = job.tool_loop
    at_once = batch_size if config.environment else len(repeated)  # environments are used again
    found: list[Row] = []
    for at in range(0, len(repeated), at_once):
        rows = list(repeated.select(range(at, min(at + at_once, len(repeated)))))
        drawn = completer.sample(rows)
        scores = completer.score(rows, drawn).result()
        columns = (rows, drawn.completions, drawn.tokens.turns, drawn.ended)
        found += [
            {
                **row,
                "completion": completion,
                "completion_ids": [*chain(*turns)],
                **({"completion_turns": turns} if job.tool_loop is not None else {}),
                GROUP: (at + place) // size,
                TRUNCATED: not ended,
                **(
                    {OF_ENVIRONMENTS: {r.name: s[place] for r, s in zip(own, scores, strict=True)}}
                    if own
                    else {}
                ),
            }
            for place, (row, completion, turns, ended) in enumerate(zip(*columns, strict=True))
        ]
    return found


def _load(
    job: PreparedJob,
    specs: Sequence[RewardSpec] | None,
    tokenizer: Tokenizer | None = None,
    say: Say | None = None,
) -> list[LoadedReward]:
    """Load the rewards to check.

    These are the rewards in ``specs``, with the weights in ``specs``. If ``specs`` is None, they
    are those of the run file, with the weights that the run gives them.
    """
    template = template_settings(job.config)
    if specs is not None:
        return load_rewards(specs, tokenizer, None, template, say)
    found = load_rewards(job.config.rewards, tokenizer, job.rewards_base, template, say)
    return with_weights(found, job.config.trainer.get("reward_weights"))


# --- calling the rewards -------------------------------------------------------------------------


def columns_of(rows: list[Row]) -> dict[str, Any]:
    """Return the keyword arguments that the trainer would pass to a reward for these rows.

    Args:
        rows: Rows with ``prompt``, ``completion`` and, if known, ``completion_ids``.
    """
    ids: list[Any] = [row.get("completion_ids") for row in rows]
    completions = [row["completion"] for row in rows]
    return reward_columns(rows, completions, ids if all(ids) else None)


def _batch_of(rows: list[Row], columns: dict[str, Any], config: RunConfig | None) -> Batch:
    limit = longest = None
    if config is not None:
        longest = config.model.max_seq_length
        limit = config.trainer.get("max_completion_length") or DEFAULTS["max_completion_length"]
    texts = [text_of(row["completion"]) for row in rows]
    ids = columns.get("completion_ids")
    truncated = columns.get(TRUNCATED, columns.get("truncated"))
    groups: dict[str, list[int]] = {}
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
        lengths=[len(one) for one in ids or texts],
        truncated=truncated,
        max_completion_length=limit,
        max_seq_length=longest,
    )


def _examined(
    rows: list[Row], rewards: list[LoadedReward], config: RunConfig | None, notes: list[str]
) -> RewardCheck:
    """Call and probe every reward on the rows, and return the resulting check.

    ``config`` has the run's limits and its time limit for rewards; None means that there is no
    run. ``notes`` gets one more line for each reward that could not be checked.
    """
    columns = columns_of(rows)
    probed = []
    batch = _batch_of(rows, columns, config)
    timeout = config.trainer.get("reward_timeout_seconds") if config is not None else None
    for reward in rewards:
        asked = keywords_of(getattr(reward.func, "reward", reward.func))[2]
        if "environments" in asked:
            notes.append(f"note: {reward.name} reads the environments, so it was not checked")
        elif isinstance(reward.func, CheckedReward):
            add_to_session(reward.func)
            probed.append(probe(reward, columns, batch, timeout))
        else:
            notes.append(f"note: {reward.name} is a model object, which was not checked")
    played = [row.get(OF_ENVIRONMENTS) or {} for row in rows]
    probed.extend(
        Probed(name, 1.0, [scores.get(name) for scores in played])
        for name in dict.fromkeys(name for scores in played for name in scores)
    )
    totals = total_scores(probed, batch)
    signal = signal_of(totals, batch)
    calls = None
    if config is not None and (config.tools or config.environment):
        calls = call_numbers([row["completion"] for row in rows], totals, batch.groups)
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
    folder.mkdir(parents=True)
    write_json(folder / "rewards_check.json", redact_tree(asdict(check)), indent=1)
    with (folder / "completions.jsonl").open("w", encoding="utf-8") as lines:
        lines.writelines(f"{json.dumps(redact_tree(row), default=str)}\n" for row in rows)
    say(
        f"\nwritten to {folder}; to check again without the model, add "
        f"--completions {folder}/completions.jsonl"
    )
