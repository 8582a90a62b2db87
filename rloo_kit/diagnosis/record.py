"""Record of a run: what its folder contains, with statistics over its steps and completions."""

import contextlib
import math
import re
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
from rloo_kit.config.trainer_settings import batch_plan, trl_defaults
from rloo_kit.diagnosis.registry import Finding
from rloo_kit.errors import ConfigError, DataError
from rloo_kit.output_folder import read_json, read_object
from rloo_kit.text.numbers import finite_number, finite_numbers, mean_or_none
from rloo_kit.text.wording import text_of

# Number of completions that are kept from the beginning of a run; as many are kept from its end
KEPT_ROWS = 2000
# Maximum number of steps in the beginning of a run, and in its end. Each is at most a quarter of
# the run
WINDOW = 20
# Name of the metric with the mean score of a reward
REWARD_MEAN = re.compile(r"rewards/(.+)/mean")
# A trend of more than this many standard errors is not chance
SIGNIFICANT = 3.0


# --- numbers -------------------------------------------------------------------------------------


def mean(values: Sequence[float]) -> float:
    """Return the mean of the values, or NaN if there are none.

    ``<`` and ``>`` with NaN are false, so a rule finds nothing in a metric that is missing.
    """
    return fmean(values) if values else math.nan


def trend(values: Sequence[float]) -> float:
    """Return the slope of a series (least squares) divided by its standard error.

    A result above ``SIGNIFICANT`` (3) means that the series rises, and a result below -3 that it
    falls. The result is 0 for a flat series, and for one of fewer than 4 values.
    """
    count = len(values)
    if count < 4 or max(values) - min(values) < 1e-9 * max(1.0, abs(fmean(values))):
        return 0.0
    r = correlation(range(count), values)
    # The t statistic of the slope follows from Pearson's r and the number of values
    rest = 1.0 - r * r
    return r * math.sqrt((count - 2) / rest) if rest > 1e-12 else math.copysign(math.inf, r)


# --- held-out prompts ----------------------------------------------------------------------------


@dataclass(frozen=True)
class HeldOut:
    """Mean score of one reward on the held-out prompts, before and after training."""

    name: str  # the reward
    before: float
    after: float
    error: float  # standard error of the mean change, computed from the change of each prompt
    num: int  # number of prompts

    @property
    def change(self) -> float:
        """Change of the mean score, in standard errors; negative if the score fell.

        A change counts as 0 if its absolute value is below ``0.01 * max(1, abs(before))``. Any
        other change is infinite if the standard error is 0.
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
    """Return the scores of one reward in two evaluations; None if one of them has no mean."""
    old_mean = finite_number(before["rewards"][name])
    new_mean = finite_number(after["rewards"].get(name))
    if old_mean is None or new_mean is None:
        return None
    size = before.get("num_samples", 1)
    old, new = (_prompt_means(part["samples"], name, size) for part in (before, after))
    pairs = zip(old, new, strict=True) if len(old) == len(new) else ()
    moved = [b - a for a, b in pairs if a is not None and b is not None]
    num = max(1, len(moved))
    # Without pairs: the largest standard deviation that scores in [0, 1] can have
    error = stdev(moved) / math.sqrt(num) if num > 1 else 0.5
    return HeldOut(name, old_mean, new_mean, error, num)


def _prompt_means(samples: list[dict[str, Any]], name: str, size: int) -> list[float | None]:
    """Return the mean score of each held-out prompt. A prompt has ``size`` consecutive samples."""
    scores = [sample["rewards"][name] for sample in samples]
    groups = (scores[at : at + size] for at in range(0, len(scores), size))
    return [mean_or_none(finite_numbers(group)) for group in groups]


# --- the record ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class RunRecord:
    """Content of a run's folder, with statistics over its steps and completions."""

    metrics: list[dict[str, Any]]  # one row per step, as in metrics.jsonl
    completions: list[dict[str, Any]] = field(default_factory=list)
    """One row per completion. Of a long run only the first and the last completions are kept."""
    evaluation: dict[str, Any] = field(default_factory=dict)
    """Evaluations on held-out prompts ``before`` and ``after`` training; {} if there are none."""
    config: RunConfig | None = None  # None if run.yaml is missing or cannot be read
    end: dict[str, Any] = field(default_factory=dict)
    """How the run ended: ``how``, ``reason``, ``steps``, ``seconds`` and ``time``. If a finding
    stopped the run, also ``finding`` and ``kept_step``. {} while the run trains or if it was
    killed."""
    folder: Path = Path()
    environment: dict[str, Any] = field(default_factory=dict)
    """``hardware``, ``backend``, ``versions`` and more; {} if environment.json cannot be read."""

    @property
    def ended_by(self) -> Finding | None:
        """The finding that stopped the run, or None if no finding did."""
        found = self.end.get("finding")
        try:
            return Finding(**found) if found else None
        except TypeError:  # damaged, or written by a version with other fields
            return None

    # --- statistics over steps and completions ---------------------------------------------------

    @cached_property
    def rows(self) -> list[dict[str, Any]]:
        """Rows of ``metrics`` for the steps that sampled completions; only these have a reward.

        A damaged row without a step is left out.
        """
        return [row for row in self.metrics if "reward" in row and finite_number(row.get("step"))]

    @property
    def num_steps(self) -> int:
        """Number of steps that sampled completions."""
        return len(self.rows)

    @property
    def window(self) -> int:
        """Number of steps that count as the beginning of the run; as many count as its end."""
        return max(2, min(WINDOW, self.num_steps // 4))

    def step(self, place: int) -> int:
        """Return the optimizer step of a row, counted from 1.

        Args:
            place: Index of the row in ``rows``. A negative index counts from the end.
        """
        return int(self.rows[place]["step"])

    def series(self, name: str) -> list[float]:
        """Return the values of a metric; [] if the run does not have it."""
        return finite_numbers(row.get(name) for row in self.metrics)

    def first(self, name: str) -> float:
        """Return a metric's mean over the first ``window`` steps; NaN if the run lacks it."""
        return mean(self.series(name)[: self.window])

    def last(self, name: str) -> float:
        """Return a metric's mean over the last ``window`` steps; NaN if the run lacks it."""
        return mean(self.series(name)[-self.window :])

    def setting(self, name: str) -> Any:
        """Return the value of a trainer setting, or its default if the run does not set it.

        The result is None for an unknown name.
        """
        given = self.config.trainer if self.config else {}
        return given.get(name, DEFAULTS.get(name))

    @property
    def planned_steps(self) -> int:
        """Number of optimizer steps of the whole run; 0 if it is not known (yet)."""
        steps = max(0, self.setting("max_steps") or 0)
        if not self.rows:
            return steps
        last = self.step(-1)
        # If the number of epochs ends the run, each row logs how many are done
        done = finite_number(self.rows[-1].get("epoch"))
        if not steps and self.config is not None and done:
            epochs = (trl_defaults() | self.config.trainer)["num_train_epochs"]
            steps = math.ceil(last / done * epochs - 1e-6)  # the division may round up
        return max(last, steps) if steps else 0

    @cached_property
    def groups_per_step(self) -> int:
        """Number of prompts that are sampled for each optimizer step; 1 if there is no run file."""
        if self.config is None:
            return 1
        plan = batch_plan(self.config.trainer)
        return plan.num_prompts * max(1, plan.accumulation // plan.steps_per_generation)

    def completions_of(self, *, at_end: bool) -> list[dict[str, Any]]:
        """Return the kept completions of the last ``window`` steps, or of the first ones.

        ``at_end`` is True for the last steps.
        """
        num = self.window
        rows = self.completions
        first, last = (self.step(-num), math.inf) if at_end else (0, self.step(num - 1))
        return [row for row in rows if first <= (finite_number(row.get("step")) or 0) <= last]

    def num_texts(self, *, at_end: bool) -> float:
        """Return the mean number of different texts in a group, at the end or beginning of the run.

        ``at_end`` is True for the end. The result is NaN if there are no completions.
        """
        groups: dict[tuple[Any, Any], set[str]] = {}
        for row in self.completions_of(at_end=at_end):
            key = (finite_number(row.get("step")), finite_number(row.get("group")))
            groups.setdefault(key, set()).add(text_of(row.get("completion")))
        return mean([len(texts) for texts in groups.values()])

    @cached_property
    def signal(self) -> list[float]:
        """For each step, the share of trained groups whose completions have different scores."""
        of_trained = self.series("signal/trained_groups_without")  # only with dynamic sampling
        return [1.0 - v for v in of_trained or self.series("signal/groups_without")]

    @cached_property
    def scored_twice(self) -> list[HeldOut]:
        """Scores of all rewards on held-out prompts before and after training.

        Rewards with a mean of 0 both times come after all other rewards. Within each of these two
        parts, ``accuracy`` comes first.
        """
        try:
            before = self.evaluation["before"]
            after = self.evaluation["after"]
            twice = [_held_out(name, before, after) for name in before["rewards"]]
        except (AttributeError, KeyError, TypeError, ValueError):  # missing or damaged
            return []
        # Accuracy is measured even if it is not a reward of the run, and then it may stay at 0
        return sorted(
            filter(None, twice),
            key=lambda one: (not (one.before or one.after), one.name != "accuracy"),
        )

    @property
    def held_out(self) -> HeldOut | None:
        """The first entry of ``scored_twice``; None if the run was not evaluated twice."""
        return next(iter(self.scored_twice), None)

    @property
    def better(self) -> bool:
        """True if the score on held-out prompts rose by more than chance."""
        return self.held_out is not None and self.held_out.change > 2

    @property
    def worse(self) -> bool:
        """True if the score on held-out prompts fell by more than chance."""
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
        """True if the held-out score rose, or if the reward rose and that score did not fall."""
        return self.better or (self.rose and not self.worse)


# --- the folder ----------------------------------------------------------------------------------


def read_run(folder: str | Path) -> RunRecord:
    """Read the record of a run from its folder.

    Lines that are not valid JSON are skipped. The last line of a killed run may be incomplete.

    Raises:
        DataError: ``folder`` is not the folder of a run, or its metrics cannot be read.
    """
    place = Path(folder)
    metrics = place / "metrics.jsonl"
    try:
        if not metrics.is_file() and not (place / "run.yaml").is_file():
            raise DataError(
                f"{str(place)!r} is not a run folder: it has neither metrics.jsonl nor run.yaml; "
                "name a folder that rloo-kit train wrote"
            )
        rows = read_rows(metrics)
        completions = read_rows(place / "completions.jsonl", KEPT_ROWS)
    except OSError as exc:
        raise DataError(
            f"run folder {str(folder)!r} cannot be read ({exc}): check the permissions of its files"
        ) from exc
    if not rows and metrics.is_file() and metrics.stat().st_size:
        raise DataError(
            f"{str(metrics)!r} contains no line of JSON: it is damaged, or no run wrote it; name "
            "another folder"
        )
    config = None
    with contextlib.suppress(ConfigError, RecursionError):
        config = read_run_file(place / "run.yaml", recorded=True)
    return RunRecord(
        rows,
        completions,
        read_json(place / "evaluation.json") or {},
        config,
        read_json(place / "end.json") or {},
        place,
        read_json(place / "environment.json") or {},
    )


def read_rows(path: Path, num: int | None = None) -> list[dict[str, Any]]:
    """Return the objects in a JSONL file; [] if the file is missing.

    Lines that are not a JSON object are skipped.

    Args:
        path: The file.
        num: Number of lines to read from the beginning; the same number is read from the end. None
            reads all lines.
    """
    if not path.is_file():
        return []
    with path.open("rb") as lines:
        # First and last lines; if `num` is None, `islice` reads all lines
        kept = [*islice(lines, num), *deque(lines, maxlen=num)]
    return [row for line in kept if (row := read_object(line)) is not None]
