"""What a run left in its folder, read back; and what its rows amount to."""

import json
import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from rloo_kit.config.run_file import RunConfig, read_run_file
from rloo_kit.config.settings import DEFAULTS
from rloo_kit.config.trainer_settings import batch_plan
from rloo_kit.diagnosis.rules import Finding
from rloo_kit.errors import ConfigError, DataError

KEPT_ROWS = 4000
"""Completions that are read from the beginning of a large file, and as many from its end."""
KEPT_SIZE = 1 << 25
"""Bytes of them that are read of each end (characters, while a run goes)."""
WINDOW = 20
"""Steps, at most, that count as the beginning of a run and as its end; a quarter of a short one."""
SURE = 3.0
"""Standard errors from which a change is none of chance."""


# --- the folder ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class RunRecord:
    """What a run left in its folder."""

    metrics: list[dict[str, Any]]
    """A row a step, as in metrics.jsonl."""
    completions: list[dict[str, Any]] = field(default_factory=list)
    """A row a completion; of a large file the first and the last ones (``BothEnds``)."""
    evaluation: dict[str, Any] | None = None
    """``before`` and ``after`` on held-out prompts; None where the run made none."""
    config: RunConfig | None = None
    """None where run.yaml is missing or cannot be read."""
    end: dict[str, Any] = field(default_factory=dict)
    """How it ended: ``how``, ``reason``, ``steps``, ``seconds``, ``time``, and of a run that a
    finding ended ``finding`` and ``kept_step``; {} while it goes, and of one that was killed."""
    folder: Path | None = None

    @property
    def ended_by(self) -> Finding | None:
        """The finding that ended the run."""
        found = self.end.get("finding")
        if not isinstance(found, dict) or not isinstance(found.get("kind"), str):
            return None
        try:
            told = {name: "" if v is None else str(v) for name, v in found.items()}
            return Finding(**{**told, "reward": told.get("reward") or None})
        except TypeError:  # other fields than a finding has
            return None


def read_run(folder: str | Path) -> RunRecord:
    """Read what a run left; a line that a killed run wrote half is left out.

    Args:
        folder: Of the run, with metrics.jsonl in it.

    Raises:
        DataError: It is no folder of a run, or its metrics cannot be read.
    """
    place = Path(folder)
    try:
        return _read_folder(place)
    except OSError as exc:
        raise DataError(f"run folder {str(folder)!r} cannot be read: {exc}") from exc


def _read_folder(place: Path) -> RunRecord:
    if not (place / "metrics.jsonl").is_file() and not (place / "run.yaml").is_file():
        raise DataError(
            f"{str(place)!r} is no folder of a run: it holds neither metrics.jsonl nor run.yaml; "
            f"give the folder that rloo-kit train wrote"
        )
    metrics, damaged = _read_rows(place / "metrics.jsonl", BothEnds())
    ends = BothEnds(KEPT_ROWS, KEPT_SIZE)
    completions, _ = _read_rows(place / "completions.jsonl", ends)
    if damaged and not metrics:
        raise DataError(
            f"{str(place / 'metrics.jsonl')!r} holds no line of JSON: it was not written by a run, "
            f"or is damaged; give another folder"
        )
    completions = [row for row in completions if _has_place(row)]
    return RunRecord(
        metrics,
        completions,
        read_json(place / "evaluation.json"),
        _read_config(place / "run.yaml"),
        read_json(place / "end.json") or {},
        place,
    )


class BothEnds:
    """The first and the last of many rows, the middle left out.

    Args:
        rows: Most that are kept of each end.
        size: What those of each end may have together; the very last row is kept in any case.
    """

    def __init__(self, rows: float = math.inf, size: float = math.inf) -> None:
        self._most, self._size = rows, size
        self._first: list[Any] = []
        self._last: deque[tuple[Any, int]] = deque()
        self._room, self._held = size, 0

    def add(self, row: Any, size: int) -> None:
        """Take in the next row, of so many bytes or characters."""
        if not self._last and len(self._first) < self._most and size <= self._room:
            self._first.append(row)
            self._room -= size
            return
        self._last.append((row, size))
        self._held += size
        while len(self._last) > self._most or (self._held > self._size and len(self._last) > 1):
            self._held -= self._last.popleft()[1]

    @property
    def rows(self) -> list[Any]:
        """All that are kept, in order."""
        return [*self._first, *(row for row, _ in self._last)]


def _read_rows(path: Path, ends: BothEnds) -> tuple[list[dict[str, Any]], int]:
    """Return the objects of a JSONL file and how many lines are none; [] where it is missing."""
    if not path.is_file():
        return [], 0
    with path.open("rb") as lines:
        for line in lines:
            ends.add(line, len(line))
    rows, damaged = [], 0
    for line in ends.rows:
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            row = None
        if isinstance(row, dict):
            rows.append(row)
        else:
            damaged += bool(line.strip())
    return rows, damaged


def _has_place(row: dict[str, Any]) -> bool:
    """Return whether step and group can be places in the run: a damaged row may hold a list."""
    return not any(isinstance(row.get(name), list | dict) for name in ("step", "group"))


def read_json(path: Path) -> dict[str, Any] | None:
    """Return the object in a JSON file; None where it is missing, damaged or none."""
    if not path.is_file():
        return None
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) else None


def _read_config(path: Path) -> RunConfig | None:
    try:
        return read_run_file(path)
    except (ConfigError, RecursionError):
        return None


# --- what the rows amount to ---------------------------------------------------------------------


def finite_number(value: object) -> float | None:
    """Return a finite number, else None."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if abs(value) < 1e300 else None


def finite_numbers(values: Iterable[object]) -> list[float]:
    """Return the finite numbers among the values."""
    return [number for value in values if (number := finite_number(value)) is not None]


def mean_or_none(values: Sequence[float]) -> float | None:
    """Return the mean; None of nothing."""
    return fmean(values) if values else None


def trend(values: Sequence[float]) -> float:
    """Return the slope of the least squares line over its standard error; 0 where none is known."""
    count = len(values)
    if count < 4:
        return 0.0
    middle, mean = (count - 1) / 2, fmean(values)
    size = sum((place - middle) ** 2 for place in range(count))
    slope = sum((place - middle) * (y - mean) for place, y in enumerate(values)) / size
    rest = sum((y - mean - slope * (place - middle)) ** 2 for place, y in enumerate(values))
    error = math.sqrt(rest / (count - 2) / size)
    if abs(slope) * count < 1e-9 * max(1.0, abs(mean)):
        return 0.0
    return slope / error if error > 0 else math.copysign(math.inf, slope)


@dataclass(frozen=True)
class HeldOut:
    """One reward on the held-out prompts, before and after."""

    name: str
    before: float
    after: float
    error: float
    """Standard error of the difference; the prompts are the same."""
    num: int

    @property
    def change(self) -> float:
        """Standard errors by which it rose; 0 where it moved by less than a hundredth."""
        moved = self.after - self.before
        if abs(moved) < 0.01 * max(1.0, abs(self.before)):
            return 0.0
        return moved / self.error if self.error else math.copysign(math.inf, moved)

    def __str__(self) -> str:
        moved = "rose" if self.after > self.before else "fell"
        where = f"{self.name} on {self.num} held-out prompts"
        if not self.change:
            return f"{where} stayed at {self.after:.3f}"
        chance = "" if abs(self.change) > 2 else ", which may be chance"
        return f"{where} {moved} from {self.before:.3f} to {self.after:.3f}{chance}"


@dataclass(frozen=True)
class RunStatistics:
    """What the rows of a record amount to."""

    record: RunRecord

    @cached_property
    def rows(self) -> list[dict[str, Any]]:
        """Of steps that sampled: a further pass over a batch, and the summary, have no reward."""
        return [row for row in self.record.metrics if "reward" in row]

    @property
    def num_steps(self) -> int:
        """Steps that sampled."""
        return len(self.rows)

    @property
    def window(self) -> int:
        """Steps that are the beginning, or the end."""
        return max(2, min(WINDOW, self.num_steps // 4))

    def step(self, place: int) -> int:
        """Return the number of the step in that row."""
        given = finite_number(self.rows[place].get("step"))
        return int(given or range(1, self.num_steps + 1)[place])

    def series(self, *names: str) -> list[float]:
        """Return the values of the first of these metrics that the run has."""
        for name in names:
            values = finite_numbers(row.get(name) for row in self.record.metrics)
            if values:
                return values
        return []

    def first(self, *names: str) -> float | None:
        """Return the mean over the beginning."""
        return mean_or_none(self.series(*names)[: self.window])

    def last(self, *names: str) -> float | None:
        """Return the mean over the end."""
        return mean_or_none(self.series(*names)[-self.window :])

    def setting(self, name: str) -> Any:
        """Return a setting of the trainer."""
        given = self.record.config.trainer if self.record.config else {}
        return given.get(name, DEFAULTS.get(name))

    @cached_property
    def groups_per_step(self) -> int:
        """Prompts that an optimizer step samples; 1 where the run file is not known."""
        if self.record.config is None:
            return 1
        plan = batch_plan({k: v for k, v in self.record.config.trainer.items() if v})
        batches = (self.setting("gradient_accumulation_steps") or 1) // plan.steps_per_generation
        return max(1, plan.num_prompts * max(1, batches))

    # --- completions -----------------------------------------------------------------------------

    def completions(self, *, at_end: bool) -> list[dict[str, Any]]:
        """Return the kept completions of the beginning, or of the end."""
        if not self.rows:
            return []

        def step_of(row: dict[str, Any]) -> float:
            return finite_number(row.get("step")) or 0

        if at_end:
            bound = self.step(-min(self.window, self.num_steps))
            return [row for row in self.record.completions if step_of(row) >= bound]
        bound = self.step(min(self.window, self.num_steps) - 1)
        return [row for row in self.record.completions if step_of(row) <= bound]

    def scores(self) -> list[float]:
        """Return the kept scores."""
        return finite_numbers(row.get("score") for row in self.record.completions)

    def others(self, *, at_end: bool) -> float | None:
        """Return how many different texts a group holds beside one, in the mean."""
        groups: dict[tuple[Any, Any], set[str]] = {}
        for row in self.completions(at_end=at_end):
            groups.setdefault((row.get("step"), row.get("group")), set()).add(text_of_row(row))
        return mean_or_none([len(texts) - 1.0 for texts in groups.values()])

    # --- how it went -----------------------------------------------------------------------------

    @cached_property
    def with_signal(self) -> list[float]:
        """Share of the groups of each step whose scores differ."""
        return [1.0 - v for v in self.series("signal/groups_without", "frac_reward_zero_std")]

    @cached_property
    def trend(self) -> float:
        """Standard errors by which the reward rose over the run."""
        return trend(self.series("reward"))

    @cached_property
    def scored_twice(self) -> list[HeldOut]:
        """Every reward on the held-out prompts, accuracy first, those never above 0 last."""
        found = self.record.evaluation or {}
        parts = [found.get(name) for name in ("before", "after")]
        means = [part.get("rewards") if isinstance(part, dict) else None for part in parts]
        if not all(isinstance(mean, dict) for mean in means):
            return []
        twice = [
            _held_out(name, parts)
            for name in means[0]
            if None not in (finite_number(means[0][name]), finite_number(means[1].get(name)))
        ]
        # Accuracy is also measured where the run does not pay it, and then may never be above 0.
        return sorted(
            twice, key=lambda one: (not (one.before or one.after), one.name != "accuracy")
        )

    @property
    def held_out(self) -> HeldOut | None:
        """Accuracy before and after where there is one, else the first reward."""
        return next(iter(self.scored_twice), None)

    @property
    def paid_more(self) -> HeldOut | None:
        """Another reward than that which rose on the held-out prompts."""
        return next((one for one in self.scored_twice[1:] if one.change > 2), None)

    @property
    def better(self) -> bool:
        """Held-out prompts went up by more than chance."""
        return self.held_out is not None and self.held_out.change > 2

    @property
    def worse(self) -> bool:
        """Held-out prompts went down by more than chance."""
        return self.held_out is not None and self.held_out.change < -2

    @property
    def rose(self) -> bool:
        """The training reward went up by more than chance."""
        return self.trend > SURE

    @property
    def fell(self) -> bool:
        """The training reward went down by more than chance."""
        return self.trend < -SURE

    @property
    def learned(self) -> bool:
        """Whether held-out prompts say so, or, where they say nothing, the reward."""
        return self.better or (self.rose and not self.worse)


def _held_out(name: str, parts: list[dict[str, Any]]) -> HeldOut:
    before, after = (float(part["rewards"][name]) for part in parts)
    size = int(finite_number(parts[0].get("num_samples")) or 1)
    old, new = (_by_prompt(part.get("samples"), name, max(1, size)) for part in parts)
    twice = zip(old, new, strict=True) if len(old) == len(new) else ()
    moved = [b - a for a, b in twice if a is not None and b is not None]
    num = len(moved) or int(finite_number(parts[1].get("num_prompts")) or 1)
    error = stdev(moved) / math.sqrt(num) if len(moved) > 1 else 0.5 / math.sqrt(num)
    return HeldOut(name, before, after, error, num)


def _by_prompt(samples: object, name: str, size: int) -> list[float | None]:
    """Return the mean score of each held-out prompt, ``size`` completions each."""
    if not isinstance(samples, list):
        return []
    try:
        scores = [sample["rewards"][name] for sample in samples]
    except (KeyError, TypeError, IndexError):
        return []
    groups = (scores[at : at + size] for at in range(0, len(scores), size))
    return [mean_or_none(finite_numbers(group)) for group in groups]


def text_of_row(row: dict[str, Any]) -> str:
    """Return the completion of a row of completions.jsonl as text."""
    completion = row.get("completion")
    if isinstance(completion, list) and completion and isinstance(completion[-1], dict):
        completion = completion[-1].get("content")
    return completion if isinstance(completion, str) else ""
