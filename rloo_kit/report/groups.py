"""Choose groups of completions that are worth a look from a long completions.jsonl.

The file may be larger than memory: one pass notes where each group lies, a few groups are chosen,
and only those are read again.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

from rloo_kit.diagnosis.record import RunRecord, finite_number
from rloo_kit.report.texts import completion_parts, messages_of, page_json

LONGEST, SHORTEST = 6000, 300
"""Characters of a completion that are kept: of a usual group, and at least of a huge one."""
# So many groups fit into the budget, if need be with their texts cut shorter
MIN_GROUPS = 24
MAX_GROUPS = 800
# Groups of the first step, and of the last, that come before all others
AT_THE_ENDS = 4
NUMBERS = ("score", "kl", "baseline", "advantage", "tokens", "thought_tokens")


@dataclass
class GroupPlace:
    """Where the rows of one group lie."""

    step: int
    group: int
    start: int
    """Bytes from the beginning of the file."""
    size: int = 0
    """Bytes."""
    num_rows: int = 0
    extreme: float = 0.0
    """The largest absolute advantage."""


@dataclass(frozen=True)
class KeptGroups:
    """The groups that were chosen, in order of step and group, and how many there are."""

    groups: list[dict[str, Any]]
    num_groups: int
    num_completions: int


def index_groups(path: Path) -> list[GroupPlace]:
    """Return where every group of a completions.jsonl lies, in order of step and group.

    A group that a resumed run wrote again replaces the first; other lines are left out.

    Raises:
        OSError: The file cannot be read.
    """
    if not path.is_file():
        return []
    with path.open("rb") as lines:
        return _index((len(line), _row(line)) for line in lines)


def _index(rows: Iterable[tuple[int, dict[str, Any] | None]]) -> list[GroupPlace]:
    """Index rows, each with its size."""
    found: dict[tuple[int, int], GroupPlace] = {}
    current, at = None, 0
    for size, row in rows:
        key = None if row is None else place_of_row(row)
        if row is not None and key is not None:
            if current is None or key != (current.step, current.group):
                current = found[key] = GroupPlace(*key, start=at)
            # The rows of a group follow each other: they are written with their batch.
            current.num_rows += 1
            current.size = at + size - current.start
            current.extreme = max(current.extreme, abs(finite_number(row.get("advantage")) or 0.0))
        at += size
    return [found[key] for key in sorted(found)]


def place_of_row(row: dict[str, Any]) -> tuple[int, int] | None:
    """Return step and group of a row of completions.jsonl; None where one is no number."""
    step, group = finite_number(row.get("step")), finite_number(row.get("group"))
    return None if step is None or group is None else (int(step), int(group))


def _row(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):  # a line that a killed run cut off
        return None
    return row if isinstance(row, dict) else None


def by_interest(places: Sequence[GroupPlace]) -> Iterator[GroupPlace]:
    """Yield every group once: some of the first and last step, then three evenly to one extreme.

    Args:
        places: In order of step and group.
    """
    spread = _spread_evenly(len(places))
    extreme = sorted(spread, key=lambda n: -places[n].extreme)
    first = [n for n, place in enumerate(places) if place.step == places[0].step]
    last = [n for n, place in enumerate(places) if place.step == places[-1].step]
    mixed = chain.from_iterable(zip_longest(spread[::3], spread[1::3], spread[2::3], extreme))
    order = (*first[:AT_THE_ENDS], *last[-AT_THE_ENDS:], *(n for n in mixed if n is not None))
    for number in dict.fromkeys(order):
        yield places[number]


def _spread_evenly(num: int) -> list[int]:
    """Return 0 to num - 1 in an order of which every beginning is spread evenly."""
    # Bit-reversed counting (the van der Corput sequence).
    bits = max(1, (num - 1).bit_length())
    mirrored = (int(f"{n:0{bits}b}"[::-1], 2) for n in range(1 << bits))
    return [n for n in mirrored if n < num]


def kept_groups(record: RunRecord, budget: int) -> KeptGroups:
    """Return groups of a run for a page, evenly over its steps and with the extremes.

    A group is ``{step, group, prompt, completions}``; a completion has ``thought`` (null where
    none was closed), ``answer``, ``truncated``, ``rewards`` and ``NUMBERS``. A long text is
    ``[head, characters left out, tail]``.

    Args:
        record: Completions are read from its folder, if it has one.
        budget: Bytes of JSON that the groups may take, about.
    """
    if record.folder is None:
        rows = record.completions
        places = _index((1, row) for row in rows)
        kept = _choose(places, budget, lambda place: rows[place.start :][: place.size])
        return _counted(kept, places)
    path = record.folder / "completions.jsonl"
    try:
        places = index_groups(path)
        with path.open("rb") as file:

            def read(place: GroupPlace) -> list[dict[str, Any]]:
                file.seek(place.start)
                rows = map(_row, file.read(place.size).splitlines())
                return [row for row in rows if row is not None]

            kept = _choose(places, budget, read)
    except OSError:
        return KeptGroups([], 0, 0)
    return _counted(kept, places)


def _counted(kept: list[dict[str, Any]], places: Sequence[GroupPlace]) -> KeptGroups:
    return KeptGroups(kept, len(places), sum(place.num_rows for place in places))


def _choose(
    places: Sequence[GroupPlace],
    budget: int,
    read: Callable[[GroupPlace], list[dict[str, Any]]],
) -> list[dict[str, Any]]:
    kept, num_refused = [], 0
    for place in by_interest(places):
        if len(kept) == MAX_GROUPS or num_refused == MIN_GROUPS:
            break
        rows = read(place)
        if not rows:  # a resumed run has cut the file meanwhile
            continue
        group = _group(place, rows, budget)
        size = len(page_json(group).encode())
        if size > budget:  # a smaller group may still fit
            num_refused += 1
        else:
            budget -= size
            kept.append(group)
    return sorted(kept, key=lambda group: (group["step"], group["group"]))


def _group(place: GroupPlace, rows: Sequence[dict[str, Any]], budget: int) -> dict[str, Any]:
    limit = min(LONGEST, max(SHORTEST, budget // (MIN_GROUPS * max(1, len(rows)))))
    return {
        "step": place.step,
        "group": place.group,
        "prompt": messages_of(rows[0].get("prompt"), limit),
        "completions": [_completion(row, limit) for row in rows],
    }


def _completion(row: dict[str, Any], limit: int) -> dict[str, Any]:
    rewards = row.get("rewards")
    rewards = rewards if isinstance(rewards, dict) else {}
    return {
        **completion_parts(row, limit),
        "truncated": row.get("truncated") is True,
        "rewards": {name: _rounded(value) for name, value in rewards.items()},
        **{name: _rounded(row.get(name)) for name in NUMBERS},
    }


def _rounded(value: object) -> float | None:
    number = finite_number(value)
    return None if number is None else float(f"{number:.6g}")
