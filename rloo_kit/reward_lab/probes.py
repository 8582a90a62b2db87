"""Probes of a reward: repeated calls, calls in another order, and calls on altered completions."""

import random
import re
import time
from itertools import chain
from typing import Any

from rloo_kit.diagnosis.registry import Seen
from rloo_kit.errors import KitError
from rloo_kit.reward_lab.score_statistics import Batch, Probed, is_constant
from rloo_kit.scoring.contract import (
    CheckedReward,
    OverdueError,
    call_reward,
    columns_read,
    guarded,
    take_rows,
)
from rloo_kit.scoring.specs import LoadedReward
from rloo_kit.text.redaction import redact
from rloo_kit.text.wording import first_line, printable, text_of
from rloo_kit.types import Completion, Score

# A probe has as many rows as the reward can score in this time, but at least `FEWEST_ROWS`
PROBE_SECONDS = 0.5
FEWEST_ROWS = 4
# Time limit for a very long completion, for which a reward may need quadratic time
REPEATED_SECONDS = 5.0


def probe(
    reward: LoadedReward, columns: dict[str, Any], batch: Batch, timeout: float | None
) -> Probed:
    """Score completions with a reward, first unchanged and then altered.

    The first call scores all completions of the batch. If it succeeds, more calls score some of
    them again: unchanged, in another order, and altered (see ``_ALTERED``).

    Args:
        reward: The reward.
        columns: Keyword arguments that the trainer would pass to the reward.
        batch: The completions, with their groups and lengths.
        timeout: Time limit of a call, in seconds. None means no limit.

    Returns:
        The scores of all calls. If the first call fails, there are no other calls, every score is
        None, and ``fault`` says why.
    """
    func: CheckedReward = guarded(reward.func, timeout, "stop")
    count = len(batch.texts)
    weight = reward.weight_at(0.0)
    started = time.perf_counter()
    try:
        scores = call_reward(func, columns)
    except KitError as exc:
        fault = _fault(func, columns, exc)
        return Probed(reward.name, weight, [None] * count, fault=fault)
    seconds = (time.perf_counter() - started) / count
    num = min(count, max(FEWEST_ROWS, int(PROBE_SECONDS / max(seconds, 1e-9))))
    rows = [row * count // num for row in range(num)]
    order = random.Random(0).sample(range(num), num)
    limit = min(timeout or REPEATED_SECONDS, REPEATED_SECONDS)
    probes = {"first": [scores[row] for row in rows]}
    errors = {}
    for name, given in _calls(take_rows(columns, rows), order, scores, batch.texts).items():
        asked = guarded(func, limit, "stop") if name == "repeated" else func
        started = time.perf_counter()
        try:
            probes[name] = call_reward(asked, given)
        except KitError as exc:
            cause = exc.__cause__
            own = printable(redact(str(exc)))  # an error of the kit is a single sentence
            errors[name] = f"{type(cause).__name__}: {first_line(cause)}" if cause else own
        if name == "again":
            # The first call also had to import modules
            seconds = min(seconds, (time.perf_counter() - started) / num)
    if "permuted" in probes:
        in_place = sorted(zip(order, probes["permuted"], strict=True))
        probes["permuted"] = [score for _, score in in_place]
    return Probed(reward.name, weight, scores, seconds, probes=probes, probe_errors=errors)


def _calls(
    own: dict[str, Any], order: list[int], scores: list[Score], texts: list[str]
) -> dict[str, dict[str, Any]]:
    """Return the calls after the first one, as probe -> keyword arguments of the reward.

    Args:
        own: Keyword arguments for the completions that are probed.
        order: Another order of these completions.
        scores: Scores of all completions in the first call.
        texts: Texts of all completions.
    """
    calls = {"first": own} if len(order) < len(scores) else {}
    calls |= {"again": own, "permuted": take_rows(own, order)}
    names = ["empty", "unclosed"]
    if is_constant(scores):
        # The text is very long, so there is only one row
        calls["repeated"] = _altered("repeated", take_rows(own, [0]))
    else:
        names.append("masked")
    closed = [text for text in texts if "</think>" in text]
    if sum("<think>" not in text for text in closed) > len(closed) / 2:
        # Most thoughts are closed without being opened, because the prompt opens them
        names += ["opened", "prefixed"]
    return calls | {name: _altered(name, own) for name in names}


def _fault(func: CheckedReward, columns: dict[str, Any], exc: KitError) -> Seen:
    """Return the kind of fault that made a call fail, with the error as evidence."""
    kind = "raises"
    if columns_read(func.reward) - columns.keys():
        kind = "missing_column"
    elif isinstance(exc.__cause__, OverdueError):
        kind = "timeout"
    elif exc.__cause__ is None and " returned " in str(exc):
        kind = "wrong_output"
    return Seen(printable(str(exc)), kind=kind)


# --- altered completions -------------------------------------------------------------------------


# Probe -> function that alters the text, function that alters the token ids
_ALTERED = {
    # No text
    "empty": (lambda text: "", lambda ids: []),
    # Cut off in the middle of the thought
    "unclosed": (
        lambda text: text.partition("</think>")[0][: max(1, len(text) // 2)],
        lambda ids: ids[: len(ids) // 2],
    ),
    # Used if all scores are equal. The beginning is repeated 200 times, so that the thought is long
    # but still closed
    "repeated": (
        lambda text: text[: len(text) // 4 + 1][:500] * 200 + text,
        lambda ids: ids[: len(ids) // 4 + 1][:100] * 200 + ids,
    ),
    # Used if scores differ. All characters except white space are replaced, and the length stays
    "masked": (lambda text: re.sub(r"\S", "x", text), lambda ids: [0] * len(ids)),
    # Used if the prompts open the thought
    "opened": (
        lambda text: text if "<think>" in text else f"<think>\n{text}",
        lambda ids: ids,
    ),
    # For comparison with "opened": another tag of the same length
    "prefixed": (
        lambda text: text if "<think>" in text else f"<other>\n{text}",
        lambda ids: ids,
    ),
}


def _altered(name: str, columns: dict[str, Any]) -> dict[str, Any]:
    """Return the columns with the text and token ids of every completion altered.

    ``name`` is the probe, a key of ``_ALTERED``. In a conversation only the last message changes.
    """
    new_text, new_ids = _ALTERED[name]
    changed = [_with_text(one, new_text(text_of(one))) for one in columns["completions"]]
    altered = {**columns, "completions": changed}
    if turns := columns.get("completion_turns"):
        altered["completion_turns"] = [[*others, new_ids(last)] for *others, last in turns]
        altered["completion_ids"] = [[*chain(*row)] for row in altered["completion_turns"]]
    elif "completion_ids" in columns:
        altered["completion_ids"] = [new_ids(row) for row in columns["completion_ids"]]
    return altered


def _with_text(completion: Completion, text: str) -> Completion:
    if isinstance(completion, str):
        return text
    last = completion[-1] if completion else {"role": "assistant"}
    return [*completion[:-1], {**last, "content": text}]
