"""Charts of a report page, and the points of their curves."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from rloo_kit.diagnosis.record import REWARD_MEAN, RunRecord
from rloo_kit.live.series import CHARTS, Chart, Metrics, reward_line, rounded
from rloo_kit.text.numbers import finite_number, finite_numbers, mean_or_none

# Maximum number of points of a curve. In a longer run a point is the mean of neighbouring steps.
MAX_POINTS = 500
Points = list[float | None]


def metrics_of(record: RunRecord) -> Metrics:
    """Return the metrics of every step of a run.

    If a resumed run repeated a step, the newer metrics are used.
    """
    found: dict[int, dict[str, Any]] = {}
    for row in record.metrics:
        step = finite_number(row.get("step"))
        if step is None:
            continue
        if "train_runtime" in row:  # the summary, which also has metrics that no log had yet
            row = {k: v for k, v in row.items() if not k.startswith(("train_", "total_flos"))}
            if "reward" not in row:
                continue
        found.setdefault(int(step), {}).update(row)
    steps = sorted(found)
    return Metrics(steps, [found[step] for step in steps])


def charts_of(records: Sequence[RunRecord]) -> list[Chart]:
    """Return the charts for which at least one of the runs has values."""
    runs = [metrics_of(record) for record in records]
    rewards = {line.label: None for run in runs for line in run.reward_lines()}
    rewards |= {name: None for record in records for name in held_out_points(record)}
    first, *others = CHARTS.values()
    note = "mean of a step, without its weight"
    of_rewards = [
        Chart(f"reward-{place}", f"Reward {name}", note, (reward_line(name),), held_out=(name,))
        for place, name in enumerate(rewards)
    ]
    # If the runs have only one reward, the first chart already shows it
    if len(of_rewards) == 1 and all(
        np.array_equal(
            run.values(of_rewards[0].lines[0].metrics), run.values(("reward",)), equal_nan=True
        )
        for run in runs
    ):
        first = replace(first, held_out=of_rewards[0].held_out)
        of_rewards = []
    return [
        chart
        for chart in (first, *of_rewards, *others)
        if chart in of_rewards
        or any(len(run.values(line.metrics)) for run in runs for line in chart.lines)
    ]


def held_out_points(record: RunRecord) -> dict[str, list[tuple[int, float]]]:
    """Return the mean of each reward on held-out prompts at each evaluation of a run.

    The result is name of the reward -> pairs of step and mean. The evaluation before training is at
    step 0. The evaluation after training is at the step of the weights that were kept or, if that
    step is not recorded, at the last step.
    """
    last = finite_number(record.end.get("kept_step"))
    last = max(metrics_of(record).steps, default=0) if last is None else last
    parts = [
        {"step": 0, **scored(record, "before")},
        *map(as_dict, as_list(record.evaluation.get("during"))),
        {"step": last, **scored(record, "after")},
    ]
    points: dict[str, list[tuple[int, float]]] = {}
    for part in parts:
        for name, value in as_dict(part.get("rewards")).items():
            if (number := finite_number(value)) is not None:
                step = int(finite_number(part.get("step")) or 0)
                points.setdefault(name, []).append((step, number))
    return points


def scored(record: RunRecord, when: str) -> dict[str, Any]:
    """Return the evaluation from ``before`` or ``after`` training; {} if there is none.

    ``when`` is ``before`` or ``after``.
    """
    return as_dict(record.evaluation.get(when))


def as_dict(value: object) -> dict[str, Any]:
    """Return the value if it is a dict, otherwise an empty dict."""
    return value if isinstance(value, dict) else {}


def as_list(value: object) -> list[Any]:
    """Return the value if it is a list, otherwise an empty list."""
    return value if isinstance(value, list) else []


def curves_of(record: RunRecord, charts: Sequence[Chart]) -> dict[str, Any]:
    """Return the points of all curves, at most ``MAX_POINTS`` for each curve.

    Returns:
        A dict. ``from`` and ``to`` have the first and the last step of each point. ``lines`` is
        ``CHART_ID/LINE_INDEX`` -> curve. A curve is a dict with the values ``y``. It also has the
        edges ``lo`` and ``hi`` if the line has a band, or if a point is the mean of several steps.
        ``more`` is name -> values, for the metrics that no chart shows.
    """
    run = metrics_of(record)
    width = max(1, -(-len(run.steps) // MAX_POINTS))  # rounded up
    cuts = [slice(at, at + width) for at in range(0, len(run.steps), width)]
    lines = {
        f"{chart.id}/{place}": _points(*curve, cuts)
        for chart in charts
        for place, line in enumerate(chart.lines)
        if len((curve := run.curve(line))[0])
    }
    shown = {name for chart in charts for line in chart.lines for name in line.metrics + line.band}
    shown |= {"step", "time", "epoch"}
    # A reward without its own chart is the only reward, and the first chart shows it
    others = [name for name in run.names if name not in shown and not REWARD_MEAN.fullmatch(name)]
    return {
        "from": [run.steps[part][0] for part in cuts],
        "to": [run.steps[part][-1] for part in cuts],
        "lines": lines,
        "more": {
            name: _means(values, cuts) for name in others if len(values := run.values((name,)))
        },
    }


def _means(values: np.ndarray, cuts: list[slice]) -> Points:
    """Return the mean of the values in each slice, or None for a slice without values."""
    return [rounded(mean_or_none(finite_numbers(values[part]))) for part in cuts]


def _points(
    values: np.ndarray, low: np.ndarray, high: np.ndarray, cuts: list[slice]
) -> dict[str, Points]:
    """Return the points of a curve, each from the steps of one slice in ``cuts``.

    ``y`` has the mean of each point, and ``lo`` and ``hi`` have the extremes of the band.
    """
    found = {"y": _means(values, cuts)}
    if low is not values or len(cuts) < len(values):
        found["lo"] = [rounded(min(finite_numbers(low[part]), default=None)) for part in cuts]
        found["hi"] = [rounded(max(finite_numbers(high[part]), default=None)) for part in cuts]
    return found
