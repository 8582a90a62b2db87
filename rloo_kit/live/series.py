"""Charts of a run's metrics, with their titles, notes and values.

Both the notebook's figure and the report draw ``CHARTS``.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from rloo_kit.text.numbers import finite_number, finite_numbers, mean_or_none

Values = list[float | None]


@dataclass(frozen=True)
class Line:
    """A line in a chart: the metric that it draws, and the band around it."""

    label: str
    metrics: tuple[str, ...]  # names in metrics.jsonl; the first one that the run has is drawn
    band: tuple[str, ...] = ()  # metrics of the band: one is its half width, two are its edges
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
# The charts in the order of the report, which shows a chart for each reward after the first one
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

    def values(self, names: Iterable[str]) -> Values:
        """Return the values of a metric, one per row; None for a row that does not have it.

        ``names`` are alternatives, of which the first that the run has is used. The result is [] if
        the run has none of them.
        """
        for name in names:
            found = [finite_number(row.get(name)) for row in self.rows]
            if any(value is not None for value in found):
                return found
        return []

    def newest(self, line: Line) -> float | None:
        """Return the value of a line at the last step, or None if there is none."""
        return next(iter(self.curve(line)[0][-1:]), None)

    def curve(self, line: Line) -> tuple[Values, Values, Values]:
        """Return the values of a line, and the lower and the upper edge of its band.

        If the line has no band, both edges equal the values. All three lists are empty if the run
        has none of the line's metrics.
        """
        values = self.values(line.metrics)
        if line.from_one:
            values = [None if value is None else 1.0 - value for value in values]
        edges = [self.values((name,)) for name in line.band]
        if not values or not edges or not all(edges):
            return values, values, values
        if len(edges) == 2:
            low, high = edges
            return values, low, high
        spread = [s or 0.0 for s in edges[0]]
        low, high = (
            [None if v is None else v + sign * s for v, s in zip(values, spread, strict=True)]
            for sign in (-1, 1)
        )
        return values, low, high

    def reward_lines(self) -> list[Line]:
        """Return a line for each reward, which draws its mean, in the order of first appearance."""
        names = dict.fromkeys(name for row in self.rows for name in row if is_reward(name))
        return [reward_line(name.removeprefix("rewards/").removesuffix("/mean")) for name in names]


def reward_line(name: str) -> Line:
    """Return the line that draws the mean of the reward ``name``."""
    return Line(name, (f"rewards/{name}/mean",))


def is_reward(name: str) -> bool:
    """Return True if a metric is the mean of a reward, named ``rewards/NAME/mean``."""
    return name.startswith("rewards/") and name.endswith("/mean")


def cut(num_steps: int, most: int) -> list[slice]:
    """Divide ``num_steps`` steps into at most ``most`` slices of equal width, and return them."""
    width = max(1, -(-num_steps // most))
    return [slice(at, at + width) for at in range(0, num_steps, width)]


def means(values: Sequence[float | None], cuts: list[slice]) -> Values:
    """Return the mean of the values in each slice, or None for a slice without values."""
    return [rounded(mean_or_none(finite_numbers(values[part]))) for part in cuts]


def rounded(value: object) -> float | None:
    """Return a number rounded to six significant digits, or None if it is not a finite number."""
    number = finite_number(value)
    return None if number is None else float(f"{number:.6g}")
