"""Groups of completions that are worth a look, found in a long completions.jsonl and read from it.

The file of a long run is too large to parse for a page: its lines are indexed by their first and
last bytes, a few groups are chosen, and only those are parsed.
"""

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rloo_kit.diagnosis.record import RunRecord, finite_number
from rloo_kit.report.page_json import page_json, shortened

HEAD = re.compile(rb'\{"step": (\d{1,9}), "group": (\d{1,9}),')
"""How a row begins."""
ADVANTAGE = b'"advantage": '
"""In a text the quotation mark would have a backslash before it."""
NUMBER = re.compile(rb"-?\d+(\.\d+)?([eE][-+]?\d+)?")
CLOSE, OPEN = "</think>", "<think>"
LONGEST, SHORTEST = 6000, 300
"""Characters of a completion that are kept: of a usual group, and at least of a huge one."""
SHARE = 24
"""So many groups fit into the room there is, if need be with their texts cut shorter."""
MOST = 800
"""Groups that are chosen at most."""
AT_THE_ENDS = 4
"""Groups of the first step, and of the last, that come before all others."""


@dataclass(frozen=True)
class GroupPlace:
    """Where the rows of one group lie in the file."""

    step: int
    group: int
    start: int
    """Bytes from the beginning of the file."""
    size: int
    """Bytes."""
    num_rows: int
    extreme: float
    """The largest advantage, by size."""


@dataclass(frozen=True)
class KeptGroups:
    """The groups that were chosen and read."""

    groups: list[dict[str, Any]]
    """In order of step and group."""
    num_groups: int
    """In the file."""
    num_completions: int
    """In the file."""


# --- the index -----------------------------------------------------------------------------------


def index_groups(path: Path) -> list[GroupPlace]:
    """Return where every group of a completions.jsonl lies, in order of step and group.

    A group that a resumed run wrote again replaces the first; what is no row is left out.

    Args:
        path: Of the file; it may be missing.

    Raises:
        OSError: It cannot be read.
    """
    found: dict[tuple[int, int], GroupPlace] = {}
    if not path.is_file():
        return []
    at = 0
    key, begin, rows, extreme = None, 0, 0, 0.0
    with path.open("rb") as lines:
        for line in lines:
            here = _key(line)
            if here != key and here is not None:
                if key is not None:
                    found[key] = GroupPlace(*key, begin, at - begin, rows, extreme)
                key, begin, rows, extreme = here, at, 0, 0.0
            at += len(line)
            if here is not None:
                rows += 1
                extreme = max(extreme, _extreme(line))
    if key is not None:
        found[key] = GroupPlace(*key, begin, at - begin, rows, extreme)
    return [found[key] for key in sorted(found)]


def _key(line: bytes) -> tuple[int, int] | None:
    """Return step and group of a whole row, by its first bytes where it is written as usual."""
    if (match := HEAD.match(line)) and line.endswith(b"\n"):
        return int(match[1]), int(match[2])
    row = _row(line)
    return None if row is None else place_of_row(row)


def place_of_row(row: dict[str, Any]) -> tuple[int, int] | None:
    """Return step and group of a row of completions.jsonl; None where one is no number.

    Args:
        row: As the file has it.
    """
    step, group = finite_number(row.get("step")), finite_number(row.get("group"))
    return None if step is None or group is None else (int(step), int(group))


def _extreme(line: bytes) -> float:
    place = line.rfind(ADVANTAGE)
    match = NUMBER.match(line, place + len(ADVANTAGE)) if place >= 0 else None
    return abs(float(match[0])) if match else 0.0


def _row(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None


# --- the choice ----------------------------------------------------------------------------------


def by_interest(places: Sequence[GroupPlace]) -> Iterator[GroupPlace]:
    """Yield every group: some of the first and last step, then three evenly to one extreme.

    Args:
        places: In order of step and group.
    """
    spread = _spread_evenly(len(places))
    extreme = sorted(spread, key=lambda n: -places[n].extreme)
    first = [n for n, place in enumerate(places) if place.step == places[0].step]
    last = [n for n, place in enumerate(places) if place.step == places[-1].step]
    seen: set[int] = set()
    for number in (*first[:AT_THE_ENDS], *last[-AT_THE_ENDS:], *_interleaved(spread, extreme)):
        if number not in seen:
            seen.add(number)
            yield places[number]


def _spread_evenly(num: int) -> list[int]:
    """Return 0 to num - 1 in an order of which every beginning is spread evenly."""
    bits = max(1, (num - 1).bit_length())
    mirrored = (int(f"{n:0{bits}b}"[::-1], 2) for n in range(1 << bits))
    return [n for n in mirrored if n < num]


def _interleaved(often: Sequence[int], seldom: Sequence[int]) -> Iterator[int]:
    """Yield three of the one to one of the other; all of both."""
    for place, number in enumerate(seldom):
        yield from often[3 * place : 3 * place + 3]
        yield number


# --- what is kept --------------------------------------------------------------------------------


def kept_groups(record: RunRecord, budget: int) -> KeptGroups:
    """Return groups of a run for a page, evenly over its steps and with the extremes.

    A group is ``{step, group, prompt, completions}``; a completion has ``thought`` (null where
    none was closed), ``answer``, ``truncated``, ``rewards``, ``score``, ``kl``, ``baseline``,
    ``advantage``, ``tokens`` and ``thought_tokens``. A long text is ``[head, characters left out,
    tail]``.

    Args:
        record: As ``read_run`` returns it; completions are read from its folder.
        budget: Bytes of JSON that the groups may take, about.
    """
    if record.folder is None:
        return _from_rows(record.completions, budget)
    path = record.folder / "completions.jsonl"
    try:
        places = index_groups(path)
        with path.open("rb") as file:
            kept = _read_chosen(file, places, budget)
    except OSError:
        return KeptGroups([], 0, 0)
    return KeptGroups(kept, len(places), sum(place.num_rows for place in places))


def _read_chosen(file: Any, places: Sequence[GroupPlace], budget: int) -> list[dict[str, Any]]:
    kept, refused = [], 0
    for place in by_interest(places):
        if len(kept) == MOST or refused == SHARE:
            break
        file.seek(place.start)
        rows = [_row(line) for line in file.read(place.size).splitlines()]
        group = _group([row for row in rows if row is not None], budget)
        size = len(page_json(group).encode())
        if size > budget or not group["completions"]:
            refused += 1
            continue
        budget -= size
        kept.append(group)
    return sorted(kept, key=lambda group: (group["step"], group["group"]))


def _from_rows(rows: Iterable[dict[str, Any]], budget: int) -> KeptGroups:
    """Return the groups of rows that are in memory, the first ones that fit."""
    found: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for row in rows:
        if (key := place_of_row(row)) is not None:
            found.setdefault(key, []).append(row)
    kept, left = [], budget
    for key in sorted(found):
        group = _group(found[key], budget)
        left -= len(page_json(group).encode())
        if left < 0 or len(kept) == MOST:
            break
        kept.append(group)
    return KeptGroups(kept, len(found), sum(map(len, found.values())))


def _group(rows: Sequence[dict[str, Any]], budget: int) -> dict[str, Any]:
    limit = min(LONGEST, max(SHORTEST, budget // (SHARE * max(1, len(rows)))))
    first = rows[0] if rows else {}
    return {
        "step": finite_number(first.get("step")) or 0,
        "group": finite_number(first.get("group")) or 0,
        "prompt": messages_of(first.get("prompt"), limit),
        "completions": [_completion(row, limit) for row in rows],
    }


def _completion(row: dict[str, Any], limit: int) -> dict[str, Any]:
    rewards = row.get("rewards")
    numbers = ("score", "kl", "baseline", "advantage", "tokens", "thought_tokens")
    return {
        **completion_parts(row, limit),
        "truncated": row.get("truncated") is True,
        "rewards": {name: _rounded(value) for name, value in rewards.items()}
        if isinstance(rewards, dict)
        else {},
        **{name: _rounded(row.get(name)) for name in numbers},
    }


def completion_parts(row: dict[str, Any], limit: int) -> dict[str, Any]:
    """Return ``thought`` and ``answer`` of a row, each cut to its share of the limit.

    Args:
        row: Of completions.jsonl, or a sample of evaluation.json.
        limit: Characters that are kept of both together, about.
    """
    told = row.get("completion")
    several = isinstance(told, list) and len(told) > 1
    thought, answer = thought_and_answer(_text(told), None if several else row.get("answer_at"))
    if thought is None:
        return {"thought": None, "answer": shortened(answer, limit)}
    return {"thought": shortened(thought, limit // 2), "answer": shortened(answer, limit // 2)}


def _rounded(value: object) -> float | None:
    number = finite_number(value)
    return None if number is None else float(f"{number:.6g}")


def thought_and_answer(text: str, answer_at: object = None) -> tuple[str | None, str]:
    """Return the two parts of a completion, ``</think>`` in neither.

    Args:
        text: Of the completion.
        answer_at: Characters before the answer, as completions.jsonl has them; where there are
            none, the last ``</think>`` of the text divides it.

    Returns:
        The thought, None where none was closed, and the answer: then the whole text.

    >>> thought_and_answer("<think>4+5=9</think> 9")
    ('4+5=9', ' 9')
    """
    known = isinstance(answer_at, int) and not isinstance(answer_at, bool)
    if known and 0 < answer_at <= len(text):
        thought, answer = text[:answer_at].removesuffix(CLOSE), text[answer_at:]
    else:
        thought, close, answer = text.rpartition(CLOSE)
        if not close:
            return None, text
    return thought.lstrip().removeprefix(OPEN), answer


def messages_of(prompt: object, limit: int) -> list[dict[str, Any]]:
    """Return a prompt as messages of ``role`` and ``text``; of a plain one the role is "".

    Args:
        prompt: As completions.jsonl and evaluation.json have it: a text, or chat messages.
        limit: Characters that are kept of each.
    """
    messages = prompt if isinstance(prompt, list) else [prompt]
    return [
        {
            "role": str(message.get("role") or "") if isinstance(message, dict) else "",
            "text": shortened(_content(message), limit),
        }
        for message in messages
    ]


def _text(completion: object) -> str:
    """Return the texts of a completion; of messages of several turns each after its role."""
    if not isinstance(completion, list):
        return _content(completion)
    if len(completion) == 1:
        return _content(completion[0])
    return "\n\n".join(
        f"[{message.get('role') if isinstance(message, dict) else '?'}] {_content(message)}"
        for message in completion
    )


def _content(message: object) -> str:
    """Return the text of a message, whatever stands in its place."""
    if isinstance(message, dict):
        message = message.get("content")
    if isinstance(message, list):
        return "".join(_part(part) for part in message)
    return message if isinstance(message, str) else "" if message is None else str(message)


def _part(part: object) -> str:
    if not isinstance(part, dict):
        return str(part)
    return str(part.get("text") or f"[{part.get('type')}]")
