"""Call a reward as a run would, and then in other ways: again, in another order, altered."""

import asyncio
import inspect
import math
import random
import re
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any

from rloo_kit.errors import RewardContractError
from rloo_kit.reward_lab.check import text_of
from rloo_kit.reward_lab.rules import wanted_probes
from rloo_kit.reward_lab.statistics import Batch, Fault, Probed
from rloo_kit.scoring.contract import CheckedReward, OverdueError, guarded
from rloo_kit.scoring.loading import LoadedReward
from rloo_kit.text.wording import printable
from rloo_kit.types import Completion, Score

# A probe is called with as many rows as take about so long, at least with `FEWEST_ROWS`
PROBE_SECONDS = 0.5
FEWEST_ROWS, ROWS_ALONE = 4, 8
ENDLESS_SECONDS = 5.0
# Probes that alter no completion
CALLS = ("first", "again", "permuted", "alone")
# Scores beyond it count as it: their squares would be no numbers
LARGEST_SCORE = 1e100
# What rewards learn from a tokenizer; the lab writes it beside a completion, with ...
TOLD_BY_TOKENIZER = ("thought_opened", "start_token_id", "end_token_id")
# ... what else it knows of it. These columns are not the dataset's.
ABOUT_ROWS = ("group", "truncated", "generation_seconds", *TOLD_BY_TOKENIZER)


def probe(
    reward: LoadedReward,
    columns: dict[str, Any],
    batch: Batch,
    *,
    timeout: float | None = None,
    bound: bool = True,
) -> Probed:
    """Return what a reward answers to completions and, where it can be called, to altered ones.

    Args:
        reward: A function, as ``load_rewards`` returned it.
        columns: What the trainer would call it with; B rows.
        batch: The same completions, and what is known of them.
        timeout: Seconds a call may take; None: no limit.
        bound: Whether the reward knows all that the tokenizer could tell it.
    """
    func = guarded(reward.func, timeout, "stop")
    count = len(batch.texts)
    bare = Probed(
        reward.name,
        reward.weight_at(0.0),
        [None] * count,
        unbound=frozenset() if bound else frozenset(_unbound(func)),
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
    return _with_probes(first, func, columns, batch)


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
            self.errors[name] = printable(f"{type(cause).__name__}: {cause}" if cause else str(exc))


def _with_probes(
    probed: Probed, func: CheckedReward, columns: dict[str, Any], batch: Batch
) -> Probed:
    """Return the same with the answers to other calls."""
    own, count = _take(columns, probed.rows), len(probed.rows)
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
    for name in wanted_probes(batch, probed):
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
    text = printable(str(exc))
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


# Probe -> (the text, the token ids) as it makes them; see `wanted_probes`
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
