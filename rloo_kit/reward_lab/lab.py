"""Try the rewards of a run before it trains: sample or read completions, call, probe, tell.

The model is the run's own, with its fresh adapter; or completions come from a file, and then no
model is loaded and nothing heavy is imported.
"""

import functools
import json
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rloo_kit.config.run_file import EXAMPLES, RunConfig
from rloo_kit.config.settings import RULES
from rloo_kit.data.files import read_rows
from rloo_kit.data.prompts import prompt_ids
from rloo_kit.errors import ConfigError, DataError
from rloo_kit.evaluation.evaluator import RESERVED, evaluate, settings_of
from rloo_kit.machine.environment import setup
from rloo_kit.machine.memory import add_to_session, session
from rloo_kit.output_folder import free_folder
from rloo_kit.reward_lab.check import RewardCheck, draw, text_of
from rloo_kit.reward_lab.probes import TOLD_BY_TOKENIZER, probe
from rloo_kit.reward_lab.rules import find_all, verdict
from rloo_kit.reward_lab.statistics import (
    Batch,
    Probed,
    Settings,
    signal_of,
    statistics_of,
    total_scores,
)
from rloo_kit.sampling.choice import start_engine
from rloo_kit.scoring.contract import CheckedReward
from rloo_kit.scoring.loading import LoadedReward, RewardSpec, load_rewards
from rloo_kit.text.redaction import redact_tree
from rloo_kit.training.preparation import (
    fitting_prompts,
    load_policy,
    make_trainer_args,
    read_config,
    read_prompts,
)
from rloo_kit.types import Row, Score

Say = Callable[[str], None]
# What a run file that is silent means; read where `LeaveOneOutConfig` would import torch
UNSET: dict[str, Any] = {
    "beta": 0.05,
    "max_completion_length": 512,
    "num_generations": 4,
    "temperature": 1.0,
}


@dataclass(frozen=True)
class _Material:
    """What the rewards are called with, and what is known of it."""

    columns: dict[str, Any]
    batch: Batch
    rewards: list[LoadedReward]
    settings: Settings
    timeout: float | None = None
    think_ids: dict[str, int] = field(default_factory=dict)
    """Of ``<think>`` and ``</think>``, by the names that rewards give them."""
    bound: bool = False
    """Whether the rewards know all that the tokenizer could tell them."""


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
    """Call every reward on completions of the model, and tell what is wrong with it.

    Args:
        source: A run file, the name of one that ships with the kit, or a ``RunConfig``. None: only
            the rewards and the completions are given.
        overrides: ``section.key=value``, as after ``--set``.
        rewards: Rewards in place of those of the run file.
        completions: A .jsonl file (or rows) with ``prompt``, ``completion`` and the columns that
            the rewards ask for, in place of sampling; no model is loaded.
        num_prompts: Prompts to sample.
        num_generations: Completions of each; None: as in the run file.
        output_dir: Write the check, the completions and a picture into this folder.
        say: Called with each line for the user.

    Returns:
        The check; ``has_errors`` says whether the run could not learn.

    Raises:
        KitError: A setting, the file, the model or the loading of a reward is at fault. A fault of
            a reward that was called is a finding.
    """
    if completions is None and source is None:
        raise ConfigError("there is nothing to check: give a run file, or completions and rewards")
    if source is None and rewards is None:
        raise ConfigError("completions alone cannot be scored: give a run file, or rewards")
    for name, value in (("num_prompts", num_prompts), ("num_generations", num_generations)):
        if value is not None and value < 1:
            raise ConfigError(f"{name} is {value}, must be at least 1")
    folder = None if output_dir is None else free_folder(output_dir)
    config, base = RunConfig(), None
    if source is not None:
        config, base = read_config(source, overrides)
    with session() as opened:
        if completions is None:
            chosen = (num_prompts, num_generations)
            material = _sampled(config, base or Path(), rewards, chosen, say)
        else:
            material = _read(completions, config, base, rewards, say)
        check = _examined(material)
    say(f"\n{check}")
    if folder is not None:
        _write(folder, check, material, say)
    if completions is None:
        say(f"\n{opened.released}")
    return check


# --- where completions come from -----------------------------------------------------------------


def _sampled(
    config: RunConfig,
    base: Path,
    specs: Sequence[RewardSpec] | None,
    chosen: tuple[int, int | None],
    say: Say,
) -> _Material:
    """Return completions that the run's model draws from some of its prompts."""
    load = functools.partial(_load, config, base, specs)
    load(say=say)  # a wrong name costs a second then, not a model load
    setup(config.model.backend)
    prompts, _ = read_prompts(config, base)
    args = make_trainer_args(config, Path(config.output_dir))
    model, tokenizer = load_policy(config, base, args)
    prompts, _ = fitting_prompts(tokenizer, prompts, None, config, args, say)
    num_prompts, size = min(chosen[0], len(prompts)), chosen[1] or args.num_generations
    numbers = sorted(random.Random(config.seed).sample(range(len(prompts)), num_prompts))
    rewards = load(tokenizer, args.chat_template_kwargs)
    say(
        f"sampling {num_prompts} prompts x {size} completions of {config.model.name}, "
        f"temperature {args.temperature:g}, at most {args.max_completion_length} tokens"
    )
    repeated = prompts.select([number for number in numbers for _ in range(size)])
    columns, seconds = _complete(model, tokenizer, repeated, args)
    count = num_prompts * size
    say(f"{count} completions in {seconds:.1f} s")
    ends = {*model.generation_config.eos_token_id, tokenizer.pad_token_id}
    batch = Batch(
        texts=[text_of(completion) for completion in columns["completions"]],
        groups=[list(range(first, first + size)) for first in range(0, count, size)],
        num_tokens=[len(ids) for ids in columns["completion_ids"]],
        truncated=[ids[-1] not in ends for ids in columns["completion_ids"]],
        thought_opened=_opened(tokenizer, columns["prompts"], args.chat_template_kwargs),
        generation_seconds=seconds / count,
    )
    settings = _settings(functools.partial(getattr, args), config)
    think_ids = {
        name: tokenizer.convert_tokens_to_ids(token)
        for name, token in (("start_token_id", "<think>"), ("end_token_id", "</think>"))
        if token in tokenizer.get_vocab()
    }
    return _Material(
        columns, batch, rewards, settings, args.reward_timeout_seconds, think_ids, bound=True
    )


def _complete(model: Any, tokenizer: Any, prompts: Any, args: Any) -> tuple[dict[str, Any], float]:
    """Complete each row as evaluation does; return what a reward is called with, and seconds."""
    engine, _ = start_engine(model, args)
    columns: dict[str, Any] = {}

    def keep(**given: Any) -> list[Score]:
        columns.update(given)
        return [None] * len(given["completions"])

    started = time.perf_counter()
    evaluate(
        model,
        tokenizer,
        prompts,
        [LoadedReward(keep, "kept")],
        engine=engine,
        **settings_of(args),
    )
    return columns, time.perf_counter() - started


def _opened(tokenizer: Any, prompts: list[Any], settings: dict[str, Any] | None) -> list[bool]:
    """Return whether each prompt, as the model sees it, ends with an opened ``<think>``."""
    known: dict[str, bool] = {}
    for prompt in prompts:
        key = repr(prompt)
        if key not in known:
            end = tokenizer.decode(prompt_ids(tokenizer, prompt, settings)[-8:])
            known[key] = end.rstrip().endswith("<think>")
    return [known[repr(prompt)] for prompt in prompts]


def _read(
    completions: str | Path | Sequence[Row],
    config: RunConfig,
    base: Path | None,
    specs: Sequence[RewardSpec] | None,
    say: Say,
) -> _Material:
    """Return the completions of a file, scored by rewards that no tokenizer is there for."""
    rewards = _load(config, base or Path(), specs, say=say)
    if isinstance(completions, str | Path):
        rows = [_checked(row, place) for place, row in read_rows(Path(completions))]
    else:
        rows = [_checked(dict(row), f"row {n}") for n, row in enumerate(completions, 1)]
    if not rows:
        raise DataError("there are no completions: give rows with `prompt` and `completion`")
    names = dict.fromkeys(name for row in rows for name in row if name not in RESERVED)
    columns: dict[str, Any] = {n: [row.get(n) for row in rows] for n in names if n != "completion"}
    columns |= {
        "prompts": [row["prompt"] for row in rows],
        "completions": [row["completion"] for row in rows],
        "trainer_state": None,
        "log_extra": lambda column, values: None,
        "log_metric": lambda name, value: None,
    }
    with_ids = [row.get("completion_ids") is not None for row in rows]
    if all(with_ids):
        columns["completion_ids"] = [row["completion_ids"] for row in rows]
    settings, timeout = Settings(), None
    if base is not None:
        given = {**UNSET, **config.trainer}
        settings = _settings(lambda name, default=None: given.get(name, default), config)
        timeout = given.get("reward_timeout_seconds")
    known_ids: dict[str, Any] = {
        name: columns[name][0] for name in TOLD_BY_TOKENIZER if _is_one(columns.get(name))
    }
    rewards = [replace(reward, func=_with_ids(reward.func, known_ids)) for reward in rewards]
    think_ids = {name: value for name, value in known_ids.items() if name != "thought_opened"}
    batch = _batch_of(rows, columns, settings)
    bound = len(known_ids) == len(TOLD_BY_TOKENIZER)
    return _Material(columns, batch, rewards, settings, timeout, think_ids, bound)


def _is_one(values: list[Any] | None) -> bool:
    """Return whether a column is there and holds one value throughout."""
    return bool(values) and values[0] is not None and all(value == values[0] for value in values)


def _with_ids(reward: Any, known_ids: dict[str, Any]) -> Any:
    """Return a reward, and those within it, with what the file says of the tokenizer."""
    if not is_dataclass(reward) or isinstance(reward, type):
        return reward
    changed = {}
    for item in (item for item in fields(reward) if item.init):
        value = getattr(reward, item.name)
        new = known_ids.get(item.name) if value is None else _with_ids(value, known_ids)
        if new is not value:
            changed[item.name] = new
    return replace(reward, **changed) if changed else reward


def _checked(row: Any, place: str) -> Row:
    """Return a row that has a prompt and a completion."""
    if not isinstance(row, dict):
        raise DataError(f"{place}: holds a {type(row).__name__}, must be an object")
    for name in ("prompt", "completion"):
        value = row.get(name)
        if not isinstance(value, str) and not _is_chat(value):
            raise DataError(f"{place}: {name} is {value!r}, must be text or chat messages")
    ids = row.get("completion_ids")
    if ids is not None and not (isinstance(ids, list) and all(isinstance(i, int) for i in ids)):
        raise DataError(f"{place}: completion_ids is {ids!r}, must be a list of whole numbers")
    return row


def _is_chat(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(message, dict) for message in value)


def _batch_of(rows: list[Row], columns: dict[str, Any], settings: Settings) -> Batch:
    """Return what is known of completions from a file."""
    groups: dict[str, list[int]] = {}
    for number, row in enumerate(rows):
        key = [row["prompt"]] if row.get("group") is None else [row.get("step"), row["group"]]
        groups.setdefault(json.dumps(key, default=str), []).append(number)
    ids, limit = columns.get("completion_ids"), settings.max_completion_length
    truncated = columns.get("truncated")
    if truncated is None and ids is not None and limit:
        truncated = [len(row) >= limit for row in ids]
    opened = columns.get("thought_opened")
    if opened is None and all(isinstance(row["prompt"], str) for row in rows):
        opened = [row["prompt"].rstrip().endswith("<think>") for row in rows]
    seconds = [s for s in columns.get("generation_seconds", []) if isinstance(s, int | float)]
    return Batch(
        texts=[text_of(row["completion"]) for row in rows],
        groups=list(groups.values()),
        num_tokens=None if ids is None else [len(row) for row in ids],
        truncated=truncated and [bool(value) for value in truncated],
        thought_opened=opened and [bool(value) for value in opened],
        generation_seconds=sum(seconds) / len(seconds) if seconds else None,
    )


def _load(
    config: RunConfig,
    base: Path,
    specs: Sequence[RewardSpec] | None,
    tokenizer: Any = None,
    template_settings: dict[str, Any] | None = None,
    say: Say | None = None,
) -> list[LoadedReward]:
    """Return the rewards to check with their weights at the start of the run."""
    load = functools.partial(
        load_rewards, tokenizer=tokenizer, chat_template_kwargs=template_settings, say=say
    )
    if specs is not None:
        found = load(specs)
    else:
        found = load(config.rewards, base_dir=Path() if base == EXAMPLES else base)
        weights = config.trainer.get("reward_weights")
        if weights is not None:
            if len(weights) != len(found):
                raise ConfigError(
                    f"trainer.reward_weights holds {len(weights)} numbers for {len(found)} "
                    "rewards: give one for each"
                )
            pairs = zip(found, weights, strict=True)
            found = [replace(reward, weight=float(weight)) for reward, weight in pairs]
    if not any(isinstance(reward.func, CheckedReward) for reward in found):
        raise ConfigError(
            "there is no reward to check: give at least one that is a function (a reward model "
            "as {name: reward_model, model: ...})"
        )
    return found


def _settings(get: Callable[..., Any], config: RunConfig) -> Settings:
    """Return the settings that findings depend on."""
    plain = [one.name for one in fields(Settings) if one.name in RULES and one.type is not bool]
    return Settings(
        **{name: get(name, None) for name in plain},
        max_seq_length=config.model.max_seq_length,
        mask_truncated_completions=bool(get("mask_truncated_completions", False)),
        normalized=bool(get("normalize_reward", None) or get("normalize_advantages", False)),
    )


# --- calling the rewards -------------------------------------------------------------------------


def _examined(material: _Material) -> RewardCheck:
    """Call and probe every reward, and draw the conclusions."""
    columns, batch, settings = material.columns, material.batch, material.settings
    callable_ones = [r for r in material.rewards if isinstance(r.func, CheckedReward)]
    notes = [
        f"note: {reward.name} is a model object, which the trainer scores with itself; it was not "
        "checked (give it as {name: reward_model, model: ...})"
        for reward in material.rewards
        if reward not in callable_ones
    ]
    probed = []
    for reward in callable_ones:
        add_to_session(reward.func)
        probed.append(probe(reward, columns, batch, timeout=material.timeout, bound=material.bound))
    totals = total_scores(probed, batch, settings)
    signal = signal_of(totals, batch, settings)
    findings = find_all(probed, batch, settings, signal)
    groups = {row: number for number, rows in enumerate(batch.groups) for row in rows}
    samples = [
        {
            "group": groups[row],
            "prompt": prompt,
            "completion": batch.texts[row],
            "truncated": batch.truncated[row] if batch.truncated else None,
            "rewards": {reward.name: reward.scores[row] for reward in probed},
            "score": totals[row],
        }
        for row, prompt in enumerate(columns["prompts"])
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


# --- what is written -----------------------------------------------------------------------------


def _write(folder: Path, check: RewardCheck, material: _Material, say: Say) -> None:
    try:
        folder.mkdir(parents=True)
        text = json.dumps(redact_tree(check.as_dict()), indent=1, default=str)
        (folder / "rewards_check.json").write_text(f"{text}\n", encoding="utf-8")
        with (folder / "completions.jsonl").open("w", encoding="utf-8") as lines:
            rows = map(redact_tree, _rows(material))
            lines.writelines(f"{json.dumps(row, default=str)}\n" for row in rows)
        if find_spec("matplotlib") is None:
            say('no picture without matplotlib: pip install "rloo-kit[notebook]"')
        else:
            draw(check.table, folder / "rewards_check.png")
    except OSError as exc:
        raise ConfigError(
            f"output_dir {str(folder)!r} cannot be written ({exc}): choose another"
        ) from exc
    say(f"\nwritten to {folder}; again without the model: --completions {folder}/completions.jsonl")


def _rows(material: _Material) -> Iterator[Row]:
    """Yield the completions as ``--completions`` reads them."""
    columns, batch = material.columns, material.batch
    groups = {row: number for number, rows in enumerate(batch.groups) for row in rows}
    ids = columns.get("completion_ids")
    others = [name for name, value in columns.items() if isinstance(value, list)]
    others = [name for name in others if name not in RESERVED]
    for row, prompt in enumerate(columns["prompts"]):
        about = {
            "group": groups[row],
            "truncated": batch.truncated[row] if batch.truncated else None,
            "thought_opened": batch.thought_opened[row] if batch.thought_opened else None,
            "generation_seconds": batch.generation_seconds,
            **material.think_ids,
        }
        yield {
            "prompt": prompt,
            "completion": columns["completions"][row],
            **({} if ids is None else {"completion_ids": ids[row]}),
            **{name: value for name, value in about.items() if value is not None},
            **{name: columns[name][row] for name in others},
        }
