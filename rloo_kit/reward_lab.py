"""Try the rewards of a run before it trains: sample or read completions, call, probe, tell.

The model is the run's own, with its fresh adapter; or completions come from a file, and then no
model is loaded and nothing heavy is imported.
"""

import asyncio
import functools
import inspect
import json
import math
import random
import re
import sys
import textwrap
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rloo_kit.config import EXAMPLES, RunConfig
from rloo_kit.data import prompt_ids
from rloo_kit.data_files import read_rows
from rloo_kit.engines import start_engine
from rloo_kit.environment import setup
from rloo_kit.errors import ConfigError, DataError, RewardContractError
from rloo_kit.evaluation import RESERVED, evaluate, sampling_of
from rloo_kit.memory import belongs_to_session, session
from rloo_kit.output_folder import free_folder
from rloo_kit.preparation import (
    fitting_prompts,
    load_policy,
    make_trainer_args,
    read_config,
    read_prompts,
)
from rloo_kit.reward_contract import CheckedReward, OverdueError, guarded
from rloo_kit.reward_findings import Finding, find_all, verdict, wanted_probes
from rloo_kit.reward_loading import LoadedReward, RewardSpec, load_rewards
from rloo_kit.reward_statistics import (
    Batch,
    Fault,
    Probed,
    RewardStats,
    Settings,
    Signal,
    signal_of,
    statistics_of,
    total_scores,
)
from rloo_kit.types import Completion, Row, Score

Say = Callable[[str], None]
PROBE_SECONDS = 0.5
"""A probe is called with as many rows as take about so long, at least with ``FEWEST_ROWS``."""
FEWEST_ROWS, ROWS_ALONE = 4, 8
ENDLESS_SECONDS = 5.0
CALLS = ("first", "again", "permuted", "alone")
"""Probes that alter no completion."""
LARGEST_SCORE = 1e100
"""Scores beyond it count as it: their squares would be no numbers."""
UNSET: dict[str, Any] = {
    "beta": 0.05,
    "max_completion_length": 512,
    "num_generations": 4,
    "temperature": 1.0,
}
"""What a run file that is silent means; read where ``LeaveOneOutConfig`` would import torch."""
TOLD_BY_TOKENIZER = ("thought_opened", "start_token_id", "end_token_id")
"""What rewards learn from a tokenizer; the lab writes it beside a completion, with ..."""
ABOUT_ROWS = ("group", "truncated", "generation_seconds", *TOLD_BY_TOKENIZER)
"""... what else it knows of it. These columns are not the dataset's."""
BARS = " ▁▂▃▄▅▆▇█"


@dataclass(frozen=True, repr=False)
class RewardCheck:
    """What the rewards of a run say of the completions it would train on."""

    verdict: str
    """Whether RLOO will learn from them, in one sentence."""
    findings: list[Finding]
    """The most harmful first."""
    table: list[RewardStats]
    """One row a reward."""
    total: RewardStats
    """The same of the weighted sum."""
    signal: Signal
    samples: list[dict[str, Any]]
    """Every prompt, completion, its rewards and its score, in order."""
    notes: list[str] = field(default_factory=list)
    """What was not checked, and why."""

    @property
    def has_errors(self) -> bool:
        """Whether there is a fault from which the run cannot learn."""
        return any(finding.level == "error" for finding in self.findings)

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return asdict(self)

    def __repr__(self) -> str:
        return f"RewardCheck({self.verdict!r}, {len(self.findings)} findings)"

    def __str__(self) -> str:
        parts = [_table_text(self), textwrap.fill(self.verdict, 100), _findings_text(self.findings)]
        return "\n\n".join([*parts, _samples_text(self.samples), *self.notes])


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
            material = _read(completions, config, base, rewards)
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
    load()  # a wrong name costs a second then, not a model load
    setup(config.model.backend)
    prompts, _ = read_prompts(config, base)
    args = make_trainer_args(config, Path(config.output_dir))
    model, tokenizer = load_policy(config, base, args)
    prompts, _ = fitting_prompts(tokenizer, prompts, None, config, args, say)
    num_prompts, size = min(chosen[0], len(prompts)), chosen[1] or args.num_generations
    numbers = sorted(random.Random(config.seed).sample(range(len(prompts)), num_prompts))
    rewards = load(tokenizer)
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
        **sampling_of(args),
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
) -> _Material:
    """Return the completions of a file, scored by rewards that no tokenizer is there for."""
    rewards = _load(config, base or Path(), specs)
    if isinstance(completions, str | Path):
        rows = [_checked(row, place) for place, row in read_rows(Path(completions))]
    else:
        rows = [_checked(dict(row), f"row {n}") for n, row in enumerate(completions, 1)]
    if not rows:
        raise DataError("there are no completions: give rows with `prompt` and `completion`")
    names = dict.fromkeys(name for row in rows for name in row if name not in RESERVED)
    columns = {name: [row.get(name) for row in rows] for name in names if name != "completion"}
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
    told = {name: columns[name][0] for name in TOLD_BY_TOKENIZER if _is_one(columns.get(name))}
    rewards = [replace(reward, func=_with_told(reward.func, told)) for reward in rewards]
    think_ids = {name: value for name, value in told.items() if name != "thought_opened"}
    batch = _batch_of(rows, columns, settings)
    bound = len(told) == len(TOLD_BY_TOKENIZER)
    return _Material(columns, batch, rewards, settings, timeout, think_ids, bound)


def _is_one(values: list[Any] | None) -> bool:
    """Return whether a column is there and holds one value throughout."""
    return bool(values) and values[0] is not None and all(value == values[0] for value in values)


def _with_told(reward: Any, told: dict[str, Any]) -> Any:
    """Return a reward, and those within it, with what the file says of the tokenizer."""
    if not is_dataclass(reward) or isinstance(reward, type):
        return reward
    changed = {}
    for item in (item for item in fields(reward) if item.init):
        value = getattr(reward, item.name)
        new = told.get(item.name) if value is None else _with_told(value, told)
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
    config: RunConfig, base: Path, specs: Sequence[RewardSpec] | None, tokenizer: Any = None
) -> list[LoadedReward]:
    """Return the rewards to check with their weights at the start of the run."""
    if specs is not None:
        found = load_rewards(specs, tokenizer=tokenizer)
    else:
        home = Path() if base == EXAMPLES else base
        found = load_rewards(config.rewards, tokenizer=tokenizer, base_dir=home)
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
    plain = (
        *("temperature", "beta", "max_completion_length", "num_generations"),
        *("missing_eos_penalty", "reward_clip_range"),
    )
    return Settings(
        **{name: get(name, None) for name in plain},
        max_seq_length=config.model.max_seq_length,
        mask_truncated_completions=bool(get("mask_truncated_completions", False)),
        normalized=bool(get("normalize_reward", None) or get("normalize_advantages", False)),
    )


def text_of(completion: Completion) -> str:
    """Return the text of a completion, plain or conversational."""
    if isinstance(completion, str):
        return completion
    content = completion[-1].get("content") if completion else ""
    if isinstance(content, list):
        return "".join(part.get("text") or "" for part in content)
    return content or ""


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
        belongs_to_session(reward.func)
        probed.append(_probed(reward, material))
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


def _probed(reward: LoadedReward, material: _Material) -> Probed:
    """Return what one reward answers to the completions and, where it can be called, to probes."""
    columns, batch = material.columns, material.batch
    func = guarded(reward.func, material.timeout, "stop")
    count = len(batch.texts)
    bare = Probed(
        reward.name,
        reward.weight_at(0.0),
        [None] * count,
        unbound=frozenset() if material.bound else frozenset(_unbound(func)),
        blank_columns=_blank_columns(func, columns),
    )
    started = time.perf_counter()
    try:
        scores = _call(func, columns)
    except RewardContractError as exc:
        return replace(bare, fault=_fault(func, columns, exc))
    seconds = (time.perf_counter() - started) / count
    num = min(count, max(FEWEST_ROWS, int(PROBE_SECONDS / max(seconds, 1e-9))))
    first = replace(
        bare, scores=scores, seconds=seconds, rows=[row * count // num for row in range(num)]
    )
    return _with_probes(first, func, material)


@dataclass
class _Answers:
    """What a reward said to each probe: scores, or what it raised."""

    func: CheckedReward
    scores: dict[str, list[Score]] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)

    def ask(self, name: str, columns: dict[str, Any]) -> None:
        """Call the reward; of ``endless`` no more than one row, and not for long."""
        func = self.func
        if name == "endless":
            limit = min(func.timeout or ENDLESS_SECONDS, ENDLESS_SECONDS)
            func, columns = guarded(func, limit, "stop"), _take(columns, [0])
        try:
            self.scores[name] = _call(func, columns if name in CALLS else _altered(name, columns))
        except RewardContractError as exc:
            cause = exc.__cause__
            self.errors[name] = escaped(f"{type(cause).__name__}: {cause}" if cause else str(exc))


def _with_probes(probed: Probed, func: CheckedReward, material: _Material) -> Probed:
    """Return the same with the answers to other calls."""
    own, count = _take(material.columns, probed.rows), len(probed.rows)
    answers = _Answers(func)
    if count < len(probed.scores):
        answers.ask("first", own)
    started = time.perf_counter()
    answers.ask("again", own)
    seconds = (time.perf_counter() - started) / count
    order = random.Random(0).sample(range(count), count)
    answers.ask("permuted", _take(own, order))
    if "permuted" in answers.scores:
        moved = dict(zip(order, answers.scores["permuted"], strict=True))
        answers.scores["permuted"] = [moved[row] for row in range(count)]
    alone: list[Score] = []
    for row in range(min(count, ROWS_ALONE)):
        answers.ask("alone", _take(own, [row]))
        alone += answers.scores.get("alone", [None])
    answers.scores["alone"] = [] if "alone" in answers.errors else alone
    for name in wanted_probes(material.batch, probed):
        answers.ask(name, own)
    # The second call is without what the first one imports.
    seconds = min(seconds, probed.seconds)
    return replace(probed, probes=answers.scores, probe_errors=answers.errors, seconds=seconds)


def _call(func: CheckedReward, columns: dict[str, Any]) -> list[Score]:
    """Return the scores of one call, awaited where the reward is async."""
    found: Any = func(**columns)
    if inspect.isawaitable(found):
        with ThreadPoolExecutor(1) as pool:  # a notebook's thread has a running loop
            found = pool.submit(asyncio.run, found).result()  # type: ignore[arg-type]
    limit = LARGEST_SCORE
    return [None if score is None else min(max(score, -limit), limit) for score in found]


def _fault(func: CheckedReward, columns: dict[str, Any], exc: RewardContractError) -> Fault:
    """Return which part of the contract a reward broke."""
    text = escaped(str(exc))
    asked = getattr(func.reward, "column", None)
    missing = [name for name in func.required if name not in columns]
    if missing == ["completion_ids"]:
        return Fault("missing_ids", text)
    if missing or (isinstance(asked, str) and asked not in columns):
        return Fault("missing_column", text)
    if isinstance(exc.__cause__, OverdueError):
        return Fault("timeout", text)
    if exc.__cause__ is not None:
        return Fault("raises", text)
    num_bad: list[float] = []
    counting = {**columns, "log_metric": lambda name, value: num_bad.append(value)}
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            _call(replace(func, on_error="skip"), counting)
        except RewardContractError:  # of a reward within this one
            return Fault("raises", text)
    if any(issubclass(warning.category, RuntimeWarning) for warning in said):
        return Fault("wrong_output", text)
    count = len(columns["completions"])
    return Fault("not_finite", f"{max(num_bad):.0f} of {count} scores are no finite number; {text}")


def _unbound(reward: Any) -> Iterator[str]:
    """Yield what a reward, or one within it, has not learned from a tokenizer."""
    if not is_dataclass(reward) or isinstance(reward, type):
        return
    for item in fields(reward):
        value = getattr(reward, item.name)
        if item.name in ("end_token_id", "thought_opened") and value is None:
            yield item.name
        else:
            yield from _unbound(value)


def _blank_columns(func: CheckedReward, columns: dict[str, Any]) -> dict[str, float]:
    """Return the share of blank values in each dataset column that the reward may read."""
    given = ("prompts", "completions", "completion_ids", *ABOUT_ROWS)
    names = [name for name, value in columns.items() if isinstance(value, list)]
    asked = getattr(func.reward, "column", None)
    if isinstance(asked, str):
        names = [asked] if asked in names else []
    elif func.accepted is not None:
        names = [name for name in names if name in func.accepted]
    shares = {
        name: sum(map(_is_blank, columns[name])) / len(columns[name])
        for name in names
        if name not in given
    }
    return {name: share for name, share in shares.items() if share}


def _is_blank(value: Any) -> bool:
    if isinstance(value, str):
        return not value.strip()
    return value is None or (isinstance(value, float) and math.isnan(value))


# --- altered completions -------------------------------------------------------------------------


def _take(columns: dict[str, Any], rows: Sequence[int]) -> dict[str, Any]:
    """Return the columns of some rows."""
    count = len(columns["completions"])
    return {
        name: [value[row] for row in rows]
        if isinstance(value, list) and len(value) == count
        else value
        for name, value in columns.items()
    }


def _prefixed(tag: str) -> Callable[[str], str]:
    return lambda text: text if "<think>" in text else f"{tag}\n{text}"


def _same(ids: list[int]) -> list[int]:
    return ids


_ALTERED: dict[str, tuple[Callable[[str], str], Callable[[list[int]], list[int]]]] = {
    "opened": (_prefixed("<think>"), _same),
    "tagged": (_prefixed("<notes>"), _same),
    "masked": (lambda text: re.sub(r"\S", "x", text), lambda ids: [0] * len(ids)),
    "answerless": (lambda text: "".join(text.rpartition("</think>")[:2]) or text, _same),
    "repeated": (
        lambda text: text[: len(text) // 4 + 1][:2000] * 20 + text,
        lambda ids: ids[: len(ids) // 4 + 1][:500] * 20 + ids,
    ),
    "endless": (
        lambda text: f"{text or 'x'} " * (100_000 // (len(text) + 1) + 1),
        lambda ids: (ids or [0]) * (40_000 // (len(ids) or 1) + 1),
    ),
    "first_words": (lambda text: f"{' '.join(text.split()[:20])}.", lambda ids: ids[:20]),
    "empty": (lambda text: "", lambda ids: []),
    "unclosed": (
        lambda text: text.partition("</think>")[0][: max(1, len(text) // 2)],
        lambda ids: ids[: len(ids) // 2],
    ),
}
"""Probe -> (the text, the token ids) as it makes them; see ``wanted_probes``."""


def _altered(name: str, columns: dict[str, Any]) -> dict[str, Any]:
    """Return the columns with every completion altered."""
    completions, ids = columns["completions"], columns.get("completion_ids")
    if name == "swapped":
        num = len(completions)
        rows = [(row + num // 2) % num for row in range(num)]
        completions = [completions[row] for row in rows]
        ids = ids and [ids[row] for row in rows]
    else:
        new_text, new_ids = _ALTERED[name]
        completions = [_with_text(one, new_text(text_of(one))) for one in completions]
        ids = ids and [new_ids(row) for row in ids]
    changed = {**columns, "completions": completions}
    return changed if ids is None else {**changed, "completion_ids": ids}


def _with_text(completion: Completion, text: str) -> Completion:
    if isinstance(completion, str):
        return text
    last = completion[-1] if completion else {"role": "assistant"}
    return [*completion[:-1], {**last, "content": text}]


# --- on the screen -------------------------------------------------------------------------------


def escaped(text: str) -> str:
    """Return text that cannot steer a terminal: what is not printable as an escape."""
    return "".join(
        c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text
    )


def _table_text(check: RewardCheck) -> str:
    rows = [*check.table, *([check.total] if len(check.table) > 1 else [])]
    width = min(24, max(len("reward"), *(len(row.name) for row in rows)))
    head = (
        f"{'reward':<{width}} {'weight':>6} {'mean':>7} {'std':>6} {'in-group':>8} {'range':>15} "
        f"{'fires':>5} {'none':>5} {'ms':>6} {'length':>6}  scores"
    )
    return "\n".join([head, *(_row_text(row, width) for row in rows)])


def _row_text(row: RewardStats, width: int) -> str:
    name = escaped(row.name)
    start = f"{name if len(name) <= width else name[: width - 1] + '…':<{width}} {row.weight:>6.3g}"
    if row.mean is None:
        return f"{start}    {'no scores' if row.fault is None else 'faulty, see below'}"
    numbers = f"{_short(row.mean):>7} {_short(row.std):>6} {_short(row.group_std):>8}"
    span = f"{_short(row.low)} .. {_short(row.high)}"
    correlation = row.length_correlation
    length = "-" if correlation is None else f"{correlation:+.2f}"
    return (
        f"{start} {numbers} {span:>15} {row.fires or 0:>5.0%} {row.none_share:>5.0%} "
        f"{_milliseconds(row):>6} {length:>6}  {_bars(row.histogram)}"
    )


def _milliseconds(row: RewardStats) -> str:
    if 0 < row.milliseconds < 0.01:
        return "<0.01"
    return _short(row.milliseconds or None)


def _short(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.0f}" if 1000 <= abs(value) < 1e6 else f"{value:.3g}"


def _bars(counts: list[int]) -> str:
    """Return a histogram of one character a bin; what is not 0 can be seen."""
    bars = BARS if _can_print(BARS) else " .:-=+*#@"
    most = max(*counts, 1)
    return "".join(bars[math.ceil(8 * count / most)] for count in counts)


def _can_print(text: str) -> bool:
    try:
        text.encode(getattr(sys.stdout, "encoding", None) or "utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _findings_text(findings: list[Finding]) -> str:
    if not findings:
        return "nothing is wrong with the rewards"
    return "\n".join(
        line
        for number, finding in enumerate(findings, 1)
        for line in _finding_lines(finding, number)
    )


def _finding_lines(finding: Finding, number: int) -> list[str]:
    of = f" ({finding.reward})" if finding.reward else ""
    parts = {"seen": finding.evidence, "why": finding.why, "do": finding.remedy}
    if finding.setting:
        parts["set"] = finding.setting
    lines = [f"{number}. {finding.level}: {finding.kind}{escaped(of)}"]
    for name, text in parts.items():
        indent = {"initial_indent": f"   {name:<5}", "subsequent_indent": " " * 8}
        lines += textwrap.wrap(escaped(text), 100, **indent)
    return lines


def _samples_text(samples: list[dict[str, Any]], num: int = 2) -> str:
    """Return the best and the worst completions in a line each."""
    different = {(str(s["prompt"]), s["completion"]): s for s in samples if s["score"] is not None}
    scored = sorted(different.values(), key=lambda sample: -sample["score"])
    if not scored:
        return f"sample        {_sample_text(samples[0])}"
    lines = [f"{'best':<6}{_short(s['score']):>6}  {_sample_text(s)}" for s in scored[:num]]
    rest = [sample for sample in scored[num:] if sample["score"] < scored[0]["score"]]
    lines += [f"{'worst':<6}{_short(s['score']):>6}  {_sample_text(s)}" for s in rest[-num:]]
    return "\n".join(lines)


def _sample_text(sample: dict[str, Any]) -> str:
    return f"{_cut(text_of(sample['prompt']), 40)} -> {_cut(sample['completion'], 90)}"


def _cut(text: str, limit: int) -> str:
    """Return the beginning and, since the answer stands there, the end."""
    flat = text if len(text) <= limit else f"{text[: limit // 2]} ... {text[-limit // 2 :]}"
    return escaped(flat)


# --- what is written -----------------------------------------------------------------------------


def _write(folder: Path, check: RewardCheck, material: _Material, say: Say) -> None:
    try:
        folder.mkdir(parents=True)
        text = json.dumps(check.as_dict(), indent=1, default=str)
        (folder / "rewards_check.json").write_text(f"{text}\n", encoding="utf-8")
        with (folder / "completions.jsonl").open("w", encoding="utf-8") as lines:
            lines.writelines(f"{json.dumps(row, default=str)}\n" for row in _rows(material))
        if find_spec("matplotlib") is None:
            say('no picture without matplotlib: pip install "rloo-kit[notebook]"')
        else:
            _draw(check.table, folder / "rewards_check.png")
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


def _draw(table: list[RewardStats], path: Path) -> None:
    """Draw a histogram of every reward."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 0.6 + 1.9 * len(table)), layout="constrained")
    for place, row in enumerate(table, 1):
        axes = figure.add_subplot(len(table), 1, place)
        low, high = row.low or 0.0, row.high or 0.0
        span = (high - low) or 1.0
        start = low if high > low else low - 0.5
        width = span / len(row.histogram)
        places = [start + width * (n + 0.5) for n in range(len(row.histogram))]
        axes.bar(places, row.histogram, width * 0.92)
        spread = _short(row.group_std)
        axes.set_title(
            f"{escaped(row.name)}: mean {_short(row.mean)}, spread within a group {spread}",
            fontsize=10, loc="left", parse_math=False,
        )  # fmt: skip
        axes.set_ylabel("completions")
    figure.savefig(path, dpi=120)
