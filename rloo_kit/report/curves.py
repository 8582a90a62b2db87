"""The curves of a run: which there are, what they show, and their points for a page."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from rloo_kit.diagnosis.record import RunRecord
from rloo_kit.live.view import METRICS
from rloo_kit.text.numbers import finite_number, finite_numbers, mean_or_none

# Of a curve; of a longer run each is the mean of neighbouring steps
MAX_POINTS = 500
NO_METRICS = {"step", "time", "epoch"}


@dataclass(frozen=True)
class Line:
    """One line of a chart."""

    label: str
    metrics: tuple[str, ...]  # names in metrics.jsonl; the first that the run has is drawn
    band: tuple[str, ...] = ()  # one: the spread around the line. Two: from the one to the other
    from_one: bool = False  # draws one minus the metric


@dataclass(frozen=True)
class Chart:
    """What is drawn over the steps, and what it means."""

    id: str
    title: str
    note: str  # unit and meaning, in a line
    lines: tuple[Line, ...]
    band_note: str = ""  # what the band is
    share: bool = False  # values are shares from 0 to 1
    held_out: tuple[str, ...] = ()  # rewards whose means on held-out prompts are drawn as points


_SPREAD, _LENGTHS = ("score/raw_group_std",), ("completions/min_length", "completions/max_length")
# In the order of the page; the charts of the single rewards come after the first
CHARTS = (
    Chart("reward", "Reward", "mean score of a step", (Line("reward", METRICS["reward"], _SPREAD),),
          band_note="band: one standard deviation within a group"),
    Chart("kl_sequence", "KL of a completion",
          "nats from the reference, summed over the completion",
          (Line("KL", METRICS["kl/sequence"]),)),
    Chart("kl_token", "KL of a token", "nats from the reference",
          (Line("KL", METRICS["kl/token"]),)),
    Chart("signal", "Groups with signal",
          "share of groups whose scores differ: the others teach nothing",
          (Line("with signal", METRICS["without_signal"], from_one=True),), share=True),
    Chart("entropy", "Entropy", "nats a token; near 0 all completions of a prompt are alike",
          (Line("entropy", ("policy/entropy_avg", "entropy")),)),
    Chart("length", "Length", "tokens of a completion",
          (Line("mean length", METRICS["length"], _LENGTHS),),
          band_note="band: the shortest to the longest"),
    Chart("truncated", "Cut off", "share of completions that reached max_completion_length",
          (Line("cut off", METRICS["truncated"]),), share=True),
    Chart("grad_norm", "Gradient norm", "before it is clipped to max_grad_norm",
          (Line("norm", METRICS["gradient"]),)),
    Chart("learning_rate", "Learning rate", "of the step",
          (Line("rate", ("learning_rate", "lr")),)),
    Chart("speed", "Speed", "tokens a second",
          (Line("sampling", METRICS["sampling"]), Line("learning", METRICS["learning"]))),
    Chart("memory", "Peak memory", "GiB", (Line("peak", METRICS["memory"]),)),
)  # fmt: skip


@dataclass(frozen=True)
class Rows:
    """The metrics of a run, a row a step."""

    steps: list[int]
    rows: list[dict[str, Any]]

    def values(self, names: Sequence[str]) -> list[float | None]:
        """Return the values of the first of these metrics that the run has; else []."""
        for name in names:
            found = [finite_number(row.get(name)) for row in self.rows]
            if any(value is not None for value in found):
                return found
        return []


def rows_of(record: RunRecord) -> Rows:
    """Return the metrics of every step; of a step that a resumed run repeated, the newer ones."""
    found: dict[int, dict[str, Any]] = {}
    step = 0
    for row in record.metrics:
        if "train_runtime" in row:
            continue
        given = finite_number(row.get("step"))  # TRL's own log has none
        step = step + 1 if given is None else int(given)
        found.setdefault(step, {}).update(row)
    steps = sorted(found)
    return Rows(steps, [found[step] for step in steps])


def charts_of(records: Sequence[RunRecord]) -> list[Chart]:
    """Return the charts that at least one of the runs has something for."""
    runs = [rows_of(record) for record in records]
    present = {name for run in runs for row in run.rows for name in row}
    rewards = {n[8:-5]: 0 for run in runs for row in run.rows for n in row if _is_reward(n)}
    rewards |= {name: 0 for record in records for name in held_out_points(record)}
    first, *others = CHARTS
    of_rewards = [
        Chart(
            f"reward-{place}",
            f"Reward {name}",
            "mean of a step, without its weight",
            (Line(name, (f"rewards/{name}/mean",)),),
            held_out=(name,),
        )
        for place, name in enumerate(rewards)
    ]
    if len(of_rewards) == 1 and all(_is_the_reward(run, of_rewards[0]) for run in runs):
        first = replace(first, held_out=of_rewards[0].held_out)
        of_rewards = []
    return [
        chart
        for chart in (first, *of_rewards, *others)
        if any(present & set(line.metrics) for line in chart.lines) or chart in of_rewards
    ]


def _is_reward(name: str) -> bool:
    return name.startswith("rewards/") and name.endswith("/mean") and len(name) > 13


def _is_the_reward(run: Rows, chart: Chart) -> bool:
    """Return whether this one reward is all that the run pays, so that one curve shows both."""
    return run.values(chart.lines[0].metrics) == run.values(("reward",))


def held_out_points(record: RunRecord) -> dict[str, list[tuple[int, float]]]:
    """Return the means of every reward on the held-out prompts, as pairs of step and value.

    ``before`` is at step 0, ``after`` at the last step or that of the weights that were kept.
    """
    found = record.evaluation or {}
    during = found.get("during")
    last = finite_number(record.end.get("kept_step"))
    last = max(rows_of(record).steps, default=0) if last is None else last
    parts = [
        {"step": 0, **as_dict(found.get("before"))},
        *map(as_dict, during if isinstance(during, list) else []),
        {"step": last, **as_dict(found.get("after"))},
    ]
    points: dict[str, list[tuple[int, float]]] = {}
    for part in parts:
        for name, value in as_dict(part.get("rewards")).items():
            if (number := finite_number(value)) is not None:
                step = int(finite_number(part.get("step")) or 0)
                points.setdefault(name, []).append((step, number))
    return points


def as_dict(value: object) -> dict[str, Any]:
    """Return a dict; an empty one for a damaged or missing value."""
    return value if isinstance(value, dict) else {}


def curves_of(record: RunRecord, charts: Sequence[Chart]) -> dict[str, Any]:
    """Return the points of every chart, at most ``MAX_POINTS`` a curve.

    ``from`` and ``to`` are the first and last step of each point; ``lines``, by ``ID/NUMBER`` of
    the chart's line, have ``y`` and, where there is a band or a point stands for several steps,
    ``lo`` and ``hi``; ``more`` has, by name, the metrics that no chart shows.
    """
    run = rows_of(record)
    # Steps for each point, rounded up.
    width = max(1, -(-len(run.steps) // MAX_POINTS))
    cuts = [slice(at, at + width) for at in range(0, len(run.steps), width)]
    lines = {}
    for chart in charts:
        for place, line in enumerate(chart.lines):
            if values := run.values(line.metrics):
                lines[f"{chart.id}/{place}"] = _points(run, line, values, cuts)
    return {
        "from": [run.steps[cut][0] for cut in cuts],
        "to": [run.steps[cut][-1] for cut in cuts],
        "lines": lines,
        "more": {name: _means(run.values((name,)), cuts) for name in _other_metrics(run, charts)},
    }


def _points(
    run: Rows, line: Line, values: list[float | None], cuts: list[slice]
) -> dict[str, list[float | None]]:
    """Return the values and the edges of their band, each point the mean of its steps."""
    if line.from_one:
        values = [None if value is None else 1.0 - value for value in values]
    edges = [run.values((name,)) for name in line.band]
    low = high = values
    if len(edges) == 1 and edges[0]:
        pairs = [(v, s or 0.0) for v, s in zip(values, edges[0], strict=True)]
        low, high = ([None if v is None else v + sign * s for v, s in pairs] for sign in (-1, 1))
    elif len(edges) == 2 and all(edges):
        low, high = edges
    found = {"y": _means(values, cuts)}
    if low is not values or len(cuts) < len(values):
        found["lo"] = [rounded(min(finite_numbers(low[cut]), default=None)) for cut in cuts]
        found["hi"] = [rounded(max(finite_numbers(high[cut]), default=None)) for cut in cuts]
    return found


def _means(values: Sequence[float | None], cuts: list[slice]) -> list[float | None]:
    return [rounded(mean_or_none(finite_numbers(values[cut]))) for cut in cuts]


def rounded(value: object) -> float | None:
    """Return a finite number with six digits, which a page need not exceed; else None."""
    number = finite_number(value)
    return None if number is None else float(f"{number:.6g}")


def _other_metrics(run: Rows, charts: Sequence[Chart]) -> list[str]:
    """Return the metrics that no chart shows, in the order in which they first came."""
    shown = {name for chart in charts for line in chart.lines for name in line.metrics + line.band}
    names = dict.fromkeys(name for row in run.rows for name in row)
    # A reward without a chart is the only one, and the first chart shows it.
    wanted = [n for n in names if n not in shown and n not in NO_METRICS and not _is_reward(n)]
    return [name for name in wanted if run.values((name,))]
