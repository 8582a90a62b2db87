"""Charts of a run's metrics, with their titles, notes and values.

Both the notebook's figure and the report draw ``CHARTS``.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np

from rloo_kit.diagnosis.record import REWARD_MEAN
from rloo_kit.text.numbers import finite_number


@dataclass(frozen=True)
class Line:
    """A line in a chart: the metric that it draws, and the band around it."""

    label: str
    metrics: tuple[str, ...]  # names in metrics.jsonl; the first one that the run has is drawn
    # One metric: half the width of the band. Two metrics: its lower and its upper edge
    band: tuple[str, ...] = ()
    from_one: bool = False  # True: draw 1 minus the metric


@dataclass(frozen=True)
class Chart:
    """A chart of metrics over the steps of a run."""

    id: str
    title: str
    note: str  # unit and meaning of the values, in one line
    lines: tuple[Line, ...]
    band_note: str = ""  # meaning of the band
    share: bool = False  # True if values are shares from 0 to 1, which are shown in percent
    held_out: tuple[str, ...] = ()  # rewards whose means on held-out prompts are drawn as points
    digits: int = 3  # number of decimal places in texts

    def text(self, value: object) -> str:
        """Return a value formatted for this chart, or ``none`` if it is not a finite number."""
        number = finite_number(value)
        if number is None:
            return "none"
        return f"{number:.0%}" if self.share else f"{number:.{self.digits}f}"


_SPREAD = ("score/raw_group_std",)
_LENGTHS = ("completions/min_length", "completions/max_length")
# The charts in the order of the report, which adds a chart for each reward after the first chart
CHARTS = {chart.id: chart for chart in (
    Chart("reward", "Reward", "mean score of a step", (Line("reward", ("reward",), _SPREAD),),
          band_note="band: one standard deviation within a group"),
    Chart("kl_sequence", "KL of a completion",
          "nats from the reference, summed over the completion",
          (Line("KL", ("kl/sequence", "objective/kl")),)),
    Chart("kl_token", "KL of a token", "nats from the reference",
          (Line("KL", ("kl/token", "kl")),), digits=4),
    Chart("signal", "Groups with signal",
          "share of groups whose scores differ; groups of equal scores train nothing",
          (Line("with signal", ("signal/trained_groups_without", "signal/groups_without",
                                "frac_reward_zero_std"), from_one=True),),
          share=True),
    Chart("entropy", "Entropy", "nats a token; near 0 all completions of a prompt are alike",
          (Line("entropy", ("policy/entropy_avg", "entropy")),)),
    Chart("length", "Length", "tokens of a completion",
          (Line("mean length", ("completions/mean_length",), _LENGTHS),),
          band_note="band: the shortest to the longest", digits=1),
    Chart("truncated", "Cut off", "share of completions that reached max_completion_length",
          (Line("cut off", ("completions/truncated", "completions/clipped_ratio")),), share=True),
    Chart("grad_norm", "Gradient norm", "norm before clipping to max_grad_norm",
          (Line("norm", ("grad_norm",)),)),
    Chart("learning_rate", "Learning rate", "learning rate of the step",
          (Line("rate", ("learning_rate", "lr")),)),
    Chart("speed", "Speed", "tokens a second",
          (Line("sampling", ("speed/generation_tokens_per_second",)),
           Line("learning", ("speed/learning_tokens_per_second",)))),
    Chart("memory", "Peak memory", "GiB", (Line("peak", ("memory/peak_gib",)),)),
)}  # fmt: skip
# Charts in the notebook's figure while the run trains
FOLLOWED = [
    CHARTS[name]
    for name in (
        "reward",
        "kl_sequence",
        "kl_token",
        "length",
        "truncated",
        "signal",
        "grad_norm",
    )
]


@dataclass(frozen=True)
class Metrics:
    """Metrics of a run, with one row for each step."""

    steps: list[int]
    rows: list[dict[str, Any]]  # row -> metrics of the step at the same index in `steps`

    @property
    def names(self) -> list[str]:
        """Names of all metrics, in the order of first appearance."""
        return [*dict.fromkeys(chain(*self.rows))]

    def values(self, names: Iterable[str]) -> np.ndarray:
        """Return the values of a metric, one per row; NaN for a row that does not have it.

        ``names`` are alternative names of the metric. The first name that the run has is used. The
        result is empty if the run has none of the names.
        """
        for name in names:
            # None becomes NaN
            found = np.array([finite_number(row.get(name)) for row in self.rows], dtype=float)
            if not np.isnan(found).all():
                return found
        return np.array([])

    def newest(self, chart: str) -> float:
        """Return the value of a chart's first line at the last step, or NaN if there is none."""
        return next(iter(self.curve(CHARTS[chart].lines[0])[0][-1:]), math.nan)

    def curve(self, line: Line) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the values of a line, and the lower and the upper edge of its band.

        If the line has no band, both edges are the values. All three are empty if the run has none
        of the line's metrics.
        """
        values = self.values(line.metrics)
        if line.from_one:
            values = 1.0 - values
        edges = [self.values((name,)) for name in line.band]
        if not len(values) or not all(map(len, edges)):
            edges = []
        if len(edges) == 1:
            spread = np.nan_to_num(edges[0])
            edges = [values - spread, values + spread]
        low, high = edges or (values, values)
        return values, low, high

    def reward_lines(self) -> list[Line]:
        """Return a line for the mean of each reward, in the order of first appearance."""
        return [reward_line(match[1]) for match in map(REWARD_MEAN.fullmatch, self.names) if match]


def reward_line(name: str) -> Line:
    """Return the line that draws the mean of the reward ``name``."""
    return Line(name, (f"rewards/{name}/mean",))


def rounded(value: object) -> float | None:
    """Return a number rounded to six significant digits, or None if it is not a finite number."""
    number = finite_number(value)
    return None if number is None else float(f"{number:.6g}")
