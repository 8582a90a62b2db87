"""Selection of groups of completions for a report page, with their texts shortened."""

import base64
import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rloo_kit.live.series import rounded
from rloo_kit.output_folder import read_object
from rloo_kit.report.curves import as_dict, as_list
from rloo_kit.text.numbers import finite_number
from rloo_kit.text.thoughts import THOUGHT_BEGINS, THOUGHT_ENDS
from rloo_kit.text.wording import text_of

# The maximum number of characters of a completion is chosen between these two values
LONGEST = 6000
SHORTEST = 300
# Minimum number of kept groups. If they exceed the budget, their texts are shortened more
MIN_GROUPS = 24
THUMBNAIL = re.compile(r"images/[0-9a-f]{16}\.jpg")
NUMBERS = ("score", "kl", "baseline", "advantage", "tokens", "thought_tokens")

# Step and group of a row of completions.jsonl.
Place = tuple[int, int]


# --- groups of completions -----------------------------------------------------------------------


def kept_groups(folder: Path, budget: int) -> dict[str, Any]:
    """Select groups of completions for a page, spread evenly over the steps of the run.

    A group is ``{step, group, prompt, completions}``. A completion has ``thought`` (null if it has
    no closed thought), ``answer``, ``truncated``, ``rewards``, and numbers such as ``advantage``
    (the keys in ``NUMBERS``). If it called tools, it also has ``turns``, all messages before the
    last one.

    Args:
        folder: Folder of the run.
        budget: Approximate size of all groups as JSON, in bytes.

    Returns:
        A dict with the selected ``groups``, and with ``num_groups`` and ``num_completions`` of the
        whole run.
    """
    path = folder / "completions.jsonl"
    # The file may be larger than memory, so it is read twice: to count, and for the kept groups
    sizes = Counter(place for place, _ in _rows(path))
    places = sorted(sizes)
    rows: dict[Place, list[dict[str, Any]]] = {}
    limit = LONGEST
    if places:
        per_group = path.stat().st_size / len(places)
        num = min(len(places), max(MIN_GROUPS, int(budget / per_group)))
        # The first group, the last one, and others at equal distances between them
        rows = {places[n * (len(places) - 1) // max(1, num - 1)]: [] for n in range(num)}
        limit = min(LONGEST, max(SHORTEST, budget // (MIN_GROUPS * max(sizes.values()))))
    for place, row in _rows(path):
        if place in rows:
            rows[place].append(row)
    groups = [
        {
            "step": step,
            "group": group,
            "prompt": messages_of(found[0].get("prompt"), limit),
            "completions": [_completion(row, limit) for row in found],
        }
        for (step, group), found in rows.items()
    ]
    return {"groups": groups, "num_groups": len(places), "num_completions": sizes.total()}


def _rows(path: Path) -> Iterator[tuple[Place, dict[str, Any]]]:
    """Yield the rows of completions.jsonl, each with its step and group.

    Lines that are not valid JSON, or that have no step or group, are skipped.
    """
    if not path.is_file():
        return
    with path.open("rb") as lines:
        for line in lines:
            row = read_object(line) or {}  # the last line of a killed run may be incomplete
            step = finite_number(row.get("step"))
            group = finite_number(row.get("group"))
            if step is not None and group is not None:
                yield (int(step), int(group)), row


def _completion(row: dict[str, Any], limit: int) -> dict[str, Any]:
    earlier = as_list(row.get("completion"))[:-1]
    return {
        **completion_parts(row, limit),
        **({"turns": messages_of(earlier, limit)} if earlier else {}),
        "truncated": row.get("truncated") is True,
        "rewards": {name: rounded(value) for name, value in as_dict(row.get("rewards")).items()},
        **{name: rounded(row.get(name)) for name in NUMBERS},
    }


# --- texts ---------------------------------------------------------------------------------------


def shortened(text: str, limit: int) -> str | list[str | int]:
    """Return a text, or ``[head, number of characters left out, tail]`` if it is too long.

    A text is too long if it has more than ``limit`` characters.

    >>> shortened("abcdefghij", 6)
    ['abcd', 4, 'ij']
    """
    if len(text) <= limit:
        return text
    tail = limit // 3
    return [text[: limit - tail], len(text) - limit, text[len(text) - tail :]]


def messages_of(prompt: object, limit: int) -> list[dict[str, Any]]:
    """Return a prompt (plain text or chat messages) as a list of dicts for the page.

    Each dict has ``role`` ("" for a plain text), ``text`` (shortened by ``shortened`` if it has
    more than ``limit`` characters) and ``images`` (the names of its thumbnails).
    """
    return [
        {
            "role": str(as_dict(one).get("role") or ""),
            "text": shortened(_content(one), limit),
            "images": [
                str(part["image"])
                for part in map(as_dict, as_list(as_dict(one).get("content")))
                if part.get("image")
            ],
        }
        for one in (prompt if isinstance(prompt, list) else [prompt])
    ]


def read_thumbnails(folder: Path, content: object, budget: int) -> dict[str, str]:
    """Return the thumbnails that a page's content refers to, as file name -> ``data:`` URL.

    Args:
        folder: Folder of the run.
        content: The content, made of nested dicts and lists.
        budget: Maximum number of characters of all URLs together. Thumbnails that exceed it are
            left out.
    """
    found = {}
    for name in sorted(set(THUMBNAIL.findall(json.dumps(content, default=str)))):
        path = folder / name
        if path.is_file():
            url = f"data:image/jpeg;base64,{base64.b64encode(path.read_bytes()).decode()}"
            budget -= len(url)
            if budget >= 0:
                found[name] = url
    return found


def _content(message: object) -> str:
    """Return the text of a message, with its tool calls as ``name({arguments})``."""
    if not isinstance(message, dict):
        return text_of(message)
    calls = [as_dict(as_dict(call).get("function")) for call in as_list(message.get("tool_calls"))]
    shown = [f"{one.get('name')}({json.dumps(one.get('arguments'))})" for one in calls]
    return "\n".join(filter(None, [text_of([message]), *shown]))


def completion_parts(row: dict[str, Any], limit: int) -> dict[str, Any]:
    """Split the completion of a row into ``thought`` and ``answer``, and shorten both.

    If the completion has several turns, only the last one is used. Together the two parts have at
    most ``limit`` characters. If the row has ``answer_at``, the answer begins at that character.
    Otherwise the text is split at the last ``</think>``, which is in neither part. ``thought`` is
    None if no thought is closed.

    >>> completion_parts({"completion": "<think>4+5=9</think> 9"}, 100)
    {'thought': '4+5=9', 'answer': ' 9'}
    """
    turns = row.get("completion")
    text = _content((as_list(turns) or [turns])[-1])
    at = row.get("answer_at")
    if type(at) is int and 0 < at <= len(text):
        thought = text[:at].removesuffix(THOUGHT_ENDS)
        answer = text[at:]
    else:
        thought, end, answer = text.rpartition(THOUGHT_ENDS)
        if not end:
            return {"thought": None, "answer": shortened(text, limit)}
    thought = thought.lstrip().removeprefix(THOUGHT_BEGINS)
    return {"thought": shortened(thought, limit // 2), "answer": shortened(answer, limit // 2)}
