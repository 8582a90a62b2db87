"""Prompts and completions for a page: which groups it keeps, their texts cut to a limit."""

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rloo_kit.report.curves import rounded
from rloo_kit.text.numbers import finite_number
from rloo_kit.text.thoughts import THOUGHT_ENDS

# Characters of a completion
LONGEST, SHORTEST = 6000, 300
# So many groups are kept at least, with their texts cut shorter
MIN_GROUPS = 24
THOUGHT_BEGINS = "<think>"
NUMBERS = ("score", "kl", "baseline", "advantage", "tokens", "thought_tokens")

Shortened = str | list[str | int]
# Step and group of a row of completions.jsonl.
Place = tuple[int, int]


# --- groups of completions -----------------------------------------------------------------------


def kept_groups(folder: Path | None, budget: int) -> dict[str, Any]:
    """Return groups of a run for a page, spread evenly over its steps.

    A group is ``{step, group, prompt, completions}``; a completion has ``thought`` (null where
    none was closed), ``answer``, ``truncated``, ``rewards`` and ``NUMBERS``.

    Args:
        folder: Of the run.
        budget: Bytes of JSON that the groups may take, about.

    Returns:
        ``groups``, and of the whole run ``num_groups`` and ``num_completions``.
    """
    path = folder / "completions.jsonl" if folder else None
    if path is None or not path.is_file():
        return {"groups": [], "num_groups": 0, "num_completions": 0}
    # The file may be larger than memory: it is read once to count, and once for what is kept.
    sizes = Counter(place for place, _ in _rows(path))
    num_rows, places = sizes.total(), sorted(sizes)
    per_group = path.stat().st_size / max(1, len(places))
    num = min(len(places), max(MIN_GROUPS, int(budget / max(1.0, per_group))))
    # The first and the last group, and others as far apart as can be.
    chosen = {places[n * (len(places) - 1) // max(1, num - 1)] for n in range(num)}
    rows: dict[Place, list[dict[str, Any]]] = {place: [] for place in sorted(chosen)}
    for place, row in _rows(path):
        if place in rows:
            rows[place].append(row)
    largest = max(map(len, rows.values()), default=1)
    limit = min(LONGEST, max(SHORTEST, budget // (MIN_GROUPS * max(1, largest))))
    groups = [_group(place, found, limit) for place, found in rows.items() if found]
    return {"groups": groups, "num_groups": len(places), "num_completions": num_rows}


def _rows(path: Path) -> Iterator[tuple[Place, dict[str, Any]]]:
    """Yield the rows of completions.jsonl with their places; other lines are left out."""
    with path.open("rb") as lines:
        for line in lines:
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):  # a line that a killed run cut off
                continue
            if isinstance(row, dict):
                step, group = finite_number(row.get("step")), finite_number(row.get("group"))
                if step is not None and group is not None:
                    yield (int(step), int(group)), row


def _group(place: Place, rows: list[dict[str, Any]], limit: int) -> dict[str, Any]:
    return {
        "step": place[0],
        "group": place[1],
        "prompt": messages_of(rows[0].get("prompt"), limit),
        "completions": [_completion(row, limit) for row in rows],
    }


def _completion(row: dict[str, Any], limit: int) -> dict[str, Any]:
    rewards = row.get("rewards")
    rewards = rewards if isinstance(rewards, dict) else {}
    return {
        **completion_parts(row, limit),
        "truncated": row.get("truncated") is True,
        "rewards": {name: rounded(value) for name, value in rewards.items()},
        **{name: rounded(row.get(name)) for name in NUMBERS},
    }


# --- texts ---------------------------------------------------------------------------------------


def shortened(text: str, limit: int) -> Shortened:
    """Return a text, or ``[head, characters left out, tail]`` of one that is longer than the limit.

    >>> shortened("abcdefghij", 6)
    ['abcd', 4, 'ij']
    """
    if len(text) <= limit:
        return text
    tail = limit // 3
    return [text[: limit - tail], len(text) - limit, text[len(text) - tail :]]


def messages_of(prompt: object, limit: int) -> list[dict[str, Any]]:
    """Return a text or chat messages as ``role`` ("" of a plain text) and ``text``, each cut."""
    messages = prompt if isinstance(prompt, list) else [prompt]
    return [{"role": _role(one), "text": shortened(_content(one), limit)} for one in messages]


def completion_parts(row: dict[str, Any], limit: int) -> dict[str, Any]:
    """Return ``thought`` and ``answer`` of a row, cut to ``limit`` characters together."""
    completion = row.get("completion")
    if not isinstance(completion, list):
        completion = [completion]
    several = len(completion) > 1
    text = "\n\n".join(
        f"[{_role(one)}] {_content(one)}" if several else _content(one) for one in completion
    )
    thought, answer = thought_and_answer(text, None if several else row.get("answer_at"))
    if thought is None:
        return {"thought": None, "answer": shortened(answer, limit)}
    return {"thought": shortened(thought, limit // 2), "answer": shortened(answer, limit // 2)}


def thought_and_answer(text: str, answer_at: object = None) -> tuple[str | None, str]:
    """Return the two parts of a completion, ``</think>`` in neither.

    ``answer_at`` is the number of characters before the answer; without it the last ``</think>``
    divides the text. The thought is None where none was closed.

    >>> thought_and_answer("<think>4+5=9</think> 9")
    ('4+5=9', ' 9')
    """
    if type(answer_at) is int and 0 < answer_at <= len(text):
        thought, answer = text[:answer_at].removesuffix(THOUGHT_ENDS), text[answer_at:]
    else:
        thought, end, answer = text.rpartition(THOUGHT_ENDS)
        if not end:
            return None, text
    return thought.lstrip().removeprefix(THOUGHT_BEGINS), answer


def _role(message: object) -> str:
    return str(message.get("role") or "") if isinstance(message, dict) else ""


def _content(message: object) -> str:
    """Return the text of a message; its content may be parts, as of images."""
    if isinstance(message, dict):
        message = message.get("content")
    if isinstance(message, list):
        parts = (part if isinstance(part, dict) else {"text": part} for part in message)
        return "".join(str(part.get("text") or f"[{part.get('type')}]") for part in parts)
    return "" if message is None else str(message)
