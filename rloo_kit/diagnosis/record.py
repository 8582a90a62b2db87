"""Record of a run: its folder read back, and statistics over its steps and completions."""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from pathlib import Path
from statistics import correlation, fmean, stdev
from typing import Any

from rloo_kit.config.run_file import RunConfig, read_run_file
from rloo_kit.config.settings import DEFAULTS
from rloo_kit.config.trainer_settings import batch_plan
from rloo_kit.diagnosis.registry import Finding
from rloo_kit.errors import ConfigError, DataError
from rloo_kit.output_folder import read_json, read_object
from rloo_kit.text.numbers import finite_number, finite_numbers, mean_or_none
from rloo_kit.text.wording import text_of

# Completions kept from the beginning, and from the end, of a run: the rules compare these
KEPT_ROWS = 2000
# Most steps that count as the beginning, or the end, of a run; a quarter of a short run
WINDOW = 20
# Standard errors above which a change is not chance
SIGNIFICANT = 3.0


# --- numbers -------------------------------------------------------------------------------------


def mean(values: Sequence[float]) -> float:
    """Return the mean; NaN for no values, so that every comparison with it is false."""
    return fmean(values) if values else math.nan


def trend(values: Sequence[float]) -> float:
    """Return the slope of the least squares line over its standard error; 0 for a flat series.

    Values above ``SIGNIFICANT``, or below its negative, are a rise or a fall.
    """
    count = len(values)
    flat = count < 4 or max(values) - min(values) < 1e-9 * max(1.0, abs(fmean(values)))
    if flat:
        return 0.0
    r = correlation(range(count), values)
    # The slope's t statistic is a function of Pearson's r alone.
    rest = 1.0 - r * r
    return r * math.sqrt((count - 2) / rest) if rest > 1e-12 else math.copysign(math.inf, r)


# --- held-out prompts ----------------------------------------------------------------------------


@dataclass(frozen=True)
class HeldOut:
    """One reward on the held-out prompts, before and after training."""

    name: str
    before: float
    after: float
    error: float  # standard error of the difference; the prompts are the same
    num: int

    @property
    def change(self) -> float:
        """Rise of the mean score in standard errors, negative for a fall.

        It is 0 if the score changed by less than 0.01, or by less than 1% of an earlier score
        above 1.
        """
        moved = self.after - self.before
        if abs(moved) < 0.01 * max(1.0, abs(self.before)):
            return 0.0
        return moved / self.error if self.error else math.copysign(math.inf, moved)

    def __str__(self) -> str:
        where = f"{self.name} on {self.num} held-out prompts"
        if not self.change:
            return f"{where} stayed at {self.after:.3f}"
        moved = "rose" if self.after > self.before else "fell"
        chance = "" if abs(self.change) > 2 else ", which may be chance"
        return f"{where} {moved} from {self.before:.3f} to {self.after:.3f}{chance}"


def _held_out(name: str, before: dict[str, Any], after: dict[str, Any]) -> HeldOut | None:
    """Return one reward of two evaluations; None if its mean is missing in one of them."""
    old_mean = finite_number(before["rewards"][name])
    new_mean = finite_number(after["rewards"].get(name))
    if old_mean is None or new_mean is None:
        return None
    size = before.get("num_samples", 1)
    old, new = (_prompt_means(part["samples"], name, size) for part in (before, after))
    pairs = zip(old, new, strict=True) if len(old) == len(new) else ()
    moved = [b - a for a, b in pairs if a is not None and b is not None]
    num = len(moved) or int(finite_number(after.get("num_prompts")) or 1)
    # Without paired scores: the largest standard deviation that scores in [0, 1] can have.
    error = (stdev(moved) if len(moved) > 1 else 0.5) / math.sqrt(num)
    return HeldOut(name, old_mean, new_mean, error, num)


def _prompt_means(samples: list[dict[str, Any]], name: str, size: int) -> list[float | None]:
    """Return the mean score of each held-out prompt, ``size`` completions each."""
    scores = [sample["rewards"][name] for sample in samples]
    groups = (scores[at : at + size] for at in range(0, len(scores), size))
    return [mean_or_none(finite_numbers(group)) for group in groups]


# --- the record ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class RunRecord:
    """Content of a run's folder, and statistics over its steps and completions."""

    metrics: list[dict[str, Any]]  # one row per step, as in metrics.jsonl
    completions: list[dict[str, Any]] = field(default_factory=list)
    """One row per completion; from a large file the first and the last ones."""
    evaluation: dict[str, Any] = field(default_factory=dict)
    """``before`` and ``after`` on held-out prompts; {} without an evaluation."""
    config: RunConfig | None = None  # None if run.yaml is missing or cannot be read
    end: dict[str, Any] = field(default_factory=dict)
    """The end: ``how``, ``reason``, ``steps``, ``seconds``, ``time``, and if a finding stopped the
    run ``finding`` and ``kept_step``. {} while the run trains, and after it was killed."""
    folder: Path = Path()
    environment: dict[str, Any] = field(default_factory=dict)
    """``hardware``, ``backend``, ``versions`` and more; {} if environment.json cannot be read."""

    @property
    def ended_by(self) -> Finding | None:
        """The finding that stopped the run."""
        found = self.end.get("finding")
        try:
            return Finding(**found) if found else None
        except TypeError:  # damaged, or of another version with other fields
            return None

    # --- statistics over steps and completions ---------------------------------------------------

    @cached_property
    def rows(self) -> list[dict[str, Any]]:
        """Rows of steps that sampled; only these have a reward."""
        return [row for row in self.metrics if "reward" in row]

    @property
    def num_steps(self) -> int:
        """Number of steps that sampled."""
        return len(self.rows)

    @property
    def window(self) -> int:
        """Number of steps that count as the beginning, or as the end."""
        return max(2, min(WINDOW, self.num_steps // 4))

    def step(self, place: int) -> int:
        """Return the number of the optimizer step in a row.

        Args:
            place: Index of the row in ``rows``; a negative one counts from the end.
        """
        given = finite_number(self.rows[place].get("step"))
        return int(given or range(1, self.num_steps + 1)[place])

    def series(self, name: str) -> list[float]:
        """Return the values of a metric; [] if the run does not have it."""
        return finite_numbers(row.get(name) for row in self.metrics)

    def first(self, name: str) -> float:
        """Return the mean of a metric over the beginning; NaN if the run does not have it."""
        return mean(self.series(name)[: self.window])

    def last(self, name: str) -> float:
        """Return the mean of a metric over the end; NaN if the run does not have it."""
        return mean(self.series(name)[-self.window :])

    def setting(self, name: str) -> Any:
        """Return the value of a trainer setting, or else its default; None for an unknown name."""
        given = self.config.trainer if self.config else {}
        return given.get(name, DEFAULTS.get(name))

    @cached_property
    def groups_per_step(self) -> int:
        """Prompts sampled per optimizer step; 1 without a run file."""
        if self.config is None:
            return 1
        plan = batch_plan({k: v for k, v in self.config.trainer.items() if v})
        return max(1, plan.num_prompts * max(1, plan.accumulation // plan.steps_per_generation))

    def completions_of(self, *, at_end: bool) -> list[dict[str, Any]]:
        """Return the kept completions of the first ``window`` steps, or of the last ones."""
        num = self.window
        rows = self.completions
        first, last = (self.step(-num), math.inf) if at_end else (0, self.step(num - 1))
        return [row for row in rows if first <= (finite_number(row.get("step")) or 0) <= last]

    def num_texts(self, *, at_end: bool) -> float:
        """Return the mean number of different texts in a group, in the steps of ``completions_of``.

        NaN without completions.
        """
        groups: dict[tuple[Any, Any], set[str]] = {}
        for row in self.completions_of(at_end=at_end):
            key = (finite_number(row.get("step")), finite_number(row.get("group")))
            groups.setdefault(key, set()).add(text_of(row.get("completion")))
        return mean([len(texts) for texts in groups.values()])

    @cached_property
    def signal(self) -> list[float]:
        """Share of groups with differing scores, for each step."""
        return [1.0 - v for v in self.series("signal/groups_without")]

    @cached_property
    def scored_twice(self) -> list[HeldOut]:
        """All rewards on the held-out prompts: accuracy first, those with only zeros last."""
        try:
            before = self.evaluation["before"]
            after = self.evaluation["after"]
            twice = [_held_out(name, before, after) for name in before["rewards"]]
        except (AttributeError, KeyError, TypeError, ValueError):  # not there, or damaged
            return []
        # accuracy is measured even if the run does not reward it, and may stay at 0
        return sorted(
            filter(None, twice),
            key=lambda one: (not (one.before or one.after), one.name != "accuracy"),
        )

    @property
    def held_out(self) -> HeldOut | None:
        """The first of ``scored_twice``; None without an evaluation."""
        return next(iter(self.scored_twice), None)

    @property
    def better(self) -> bool:
        """True if held-out prompts improved by more than chance."""
        return self.held_out is not None and self.held_out.change > 2

    @property
    def worse(self) -> bool:
        """True if held-out prompts got worse by more than chance."""
        return self.held_out is not None and self.held_out.change < -2

    @cached_property
    def rose(self) -> bool:
        """True if the training reward rose by more than chance."""
        return trend(self.series("reward")) > SIGNIFICANT

    @cached_property
    def fell(self) -> bool:
        """True if the training reward fell by more than chance."""
        return trend(self.series("reward")) < -SIGNIFICANT

    @property
    def learned(self) -> bool:
        """True if held-out prompts improved, or if only the training reward shows a rise."""
        return self.better or (self.rose and not self.worse)


# --- the folder ----------------------------------------------------------------------------------


def read_run(folder: str | Path) -> RunRecord:
    """Read the record of a run; the half-written last line of a killed run is skipped.

    Raises:
        DataError: ``folder`` is not the folder of a run, or its metrics cannot be read.
    """
    place = Path(folder)
    metrics = place / "metrics.jsonl"
    if not metrics.is_file() and not (place / "run.yaml").is_file():
        raise DataError(
            f"{str(place)!r} is not a run folder: it has neither metrics.jsonl nor run.yaml; give "
            "the folder that rloo-kit train wrote"
        )
    try:
        rows = read_rows(metrics)
        completions = read_rows(place / "completions.jsonl", KEPT_ROWS)
    except OSError as exc:
        raise DataError(f"run folder {str(folder)!r} cannot be read: {exc}") from exc
    if not rows and metrics.is_file() and metrics.stat().st_size:
        raise DataError(
            f"{str(metrics)!r} holds no line of JSON: it is damaged, or no run wrote it; give "
            "another folder"
        )
    return RunRecord(
        rows,
        completions,
        read_json(place / "evaluation.json") or {},
        _read_config(place / "run.yaml"),
        read_json(place / "end.json") or {},
        place,
        read_json(place / "environment.json") or {},
    )


def read_rows(path: Path, num: int | None = None) -> list[dict[str, Any]]:
    """Return the objects of a JSONL file without bad lines; [] if the file is missing.

    Args:
        path: The file.
        num: Number of lines to read from its beginning, and from its end; None for all.
    """
    if not path.is_file():
        return []
    with path.open("rb") as lines:
        # first and last rows; without a number `islice` reads all of them
        kept = [*islice(lines, num), *deque(lines, maxlen=num)]
    return [row for line in kept if (row := read_object(line)) is not None]


def _read_config(path: Path) -> RunConfig | None:
    try:
        return read_run_file(path)
    except (ConfigError, RecursionError):
        return None
