"""The page and the picture of study.py: docs/explanation/study.md."""

import statistics
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

from shared import ROOT, interval, markdown, start_pyplot, write_part

pyplot = start_pyplot()
PAGE = ROOT / "docs" / "explanation" / "study.md"
PARTIAL_PAGE = ROOT / "docs" / "how-to" / "partial_rollouts.md"
PICTURE = ROOT / "docs" / "pictures" / "study.svg"
BASE = "kit RLOO"
Runs = dict[str, dict[Any, dict[str, Any]]]  # arm -> seed, or (task, seed) -> row
Columns = Callable[[Runs, str], dict[str, str]]


def shown(values: list[float], sign: str = "") -> str:
    """Return a mean with its interval; of fewer than three seeds the values."""
    if len(values) < 3:
        return ", ".join(f"{value:{sign}.2f}" for value in values)
    mean, low, high = interval(values)
    return f"{mean:{sign}.2f} [{low:{sign}.2f}, {high:{sign}.2f}]"


def score_at(row: dict[str, Any], seconds: float) -> float:
    """Return the score of a run after so many seconds, between two evaluations in proportion."""
    for (_, t0, y0, _), (_, t1, y1, _) in pairwise(row["curve"]):
        if seconds <= t1:
            return y0 + (y1 - y0) * (seconds - t0) / (t1 - t0)
    return row["curve"][-1][2]


def seconds_to(row: dict[str, Any], score: float) -> str:
    """Return the seconds until a run has a score, between evaluations in proportion."""
    for (_, t0, y0, _), (_, t1, y1, _) in pairwise(row["curve"]):
        if y0 < score <= y1:
            return f"{t0 + (t1 - t0) * (score - y0) / (y1 - y0):.0f}"
    return "never"


def above_base(runs: Runs, arm: str) -> list[float]:
    """Return by how much each seed ends above the kit's RLOO."""
    base = runs.get(BASE, {})
    mine = runs[arm]
    return [mine[s]["curve"][-1][2] - base[s]["curve"][-1][2] for s in base if s in mine]


def above_base_in_time(runs: Runs, arm: str) -> list[float]:
    """Return by how much each seed is above the kit's RLOO in the seconds that this one takes."""
    base = quiet(runs, BASE)
    mine = quiet(runs, arm)
    ends = {seed: row["curve"][-1] for seed, row in base.items() if seed in mine}
    return [score_at(mine[seed], end[1]) - end[2] for seed, end in ends.items()]


def quiet(runs: Runs, arm: str) -> dict[int, dict[str, Any]]:
    """Return the runs whose seconds count."""
    return {seed: row for seed, row in runs.get(arm, {}).items() if row["quiet"]}


def cells(runs: Runs, arm: str) -> dict[str, str]:
    """Return the columns of an arm."""
    curves = [row["curve"] for row in runs[arm].values()]
    timed = quiet(runs, arm)
    base = quiet(runs, BASE)
    paces = [row["curve"][-1][1] / row["curve"][-1][0] for row in timed.values()]
    return {
        "score at the end": shown([curve[-1][2] for curve in curves]),
        "above kit RLOO": "" if arm == BASE else shown(above_base(runs, arm), "+"),
        "KL": f"{statistics.fmean(curve[-1][3] for curve in curves):.2f}",
        "s a step": f"{statistics.median(paces):.2f}" if paces else "",
        "score when kit RLOO has ended": shown(
            [score_at(timed[s], base[s]["curve"][-1][1]) for s in base if s in timed]
        ),
    }


def seeds(runs: Runs) -> str:
    """Return how many seeds the arms of a task have."""
    counts = sorted({len(one) for one in runs.values()})
    return f"{' or '.join(map(str, counts))} seeds"


def verdict(runs: Runs, above: Callable[[Runs, str], list[float]]) -> str:
    """Return the arms that differ from the kit's RLOO by more than chance; "" if none can."""
    differences = {arm: above(runs, arm) for arm in runs if arm != BASE}
    apart = [
        f"{arm} {shown(values, '+')}"
        for arm, values in differences.items()
        if len(values) >= 3 and not interval(values)[1] <= 0 <= interval(values)[2]
    ]
    return "; ".join(apart)


def picture(tasks: dict[str, Runs]) -> None:
    """Score over steps, and over seconds where nothing else ran; means of the seeds."""
    timed = any(quiet(runs, arm) for runs in tasks.values() for arm in runs)
    units = ("steps", "seconds") if timed else ("steps",)
    size = 5.4 * len(units), 3 * len(tasks)
    figure, axes = pyplot.subplots(
        len(tasks), len(units), figsize=size, layout="constrained", squeeze=False
    )
    for (title, runs), pair in zip(tasks.items(), axes, strict=True):
        for place, (axis, unit) in enumerate(zip(pair, units, strict=True)):
            for arm in runs:
                counted = quiet(runs, arm) if place else runs[arm]
                steps = list(zip(*(row["curve"] for row in counted.values()), strict=True))
                x, y = (
                    [statistics.fmean(p[i] for p in step) for step in steps] for i in (place, 2)
                )
                if steps:
                    axis.plot(x, y, marker=".", label=arm)
            axis.set(xlabel=unit, ylabel="held-out score")
            axis.set_title(title, fontsize=10)
            axis.spines[["top", "right"]].set_visible(False)
    axes[0][0].legend(frameon=False, fontsize=8)
    figure.savefig(PICTURE, metadata={"Date": None})


def together(tasks: dict[str, Runs], model: str) -> dict[str, Runs]:
    """Return a model's tasks as one with the seeds of all, since each has few."""
    found = [runs for title, runs in tasks.items() if title.startswith(model)]
    if len(found) < 2:
        return {}
    return {
        f"{model}, {len(found)} tasks together": {
            arm: {
                (place, seed): row
                for place, runs in enumerate(found)
                for seed, row in runs.get(arm, {}).items()
            }
            for arm in found[0]
        }
    }


def write_table(
    page: Path, rows: list[dict[str, Any]], titles: dict[str, str], columns: Columns
) -> dict[str, Runs]:
    """Write the table into a page; return the runs of each task."""
    tasks: dict[str, Runs] = {}
    for row in rows:
        runs = tasks.setdefault(titles[row["task"]], {})
        runs.setdefault(row["arm"], {})[row["seed"]] = row
    table = [
        {"task": "" if place else f"{title}, {seeds(runs)}", "arm": arm} | columns(runs, arm)
        for title, runs in tasks.items()
        for place, arm in enumerate(runs)
    ]
    names = [name for name in table[0] if any(row[name] for row in table)]
    shown = markdown(names, ([row[name] for name in names] for row in table))
    write_part(page, "study", shown)
    return tasks


def partial_cells(runs: Runs, arm: str) -> dict[str, str]:
    """Return the columns of the table about partial rollouts."""
    ends = {seed: row["curve"][-1][2] for seed, row in runs[BASE].items()}
    seconds = [seconds_to(row, ends[seed]) for seed, row in runs[arm].items() if seed in ends]
    found = cells(runs, arm)
    kept = {name: found[name] for name in ("score at the end", "s a step")}
    ages = [statistics.fmean(row["ages"]) for row in runs[arm].values() if "ages" in row]
    kept["age"] = f"{statistics.fmean(ages):.2f}" if ages else ""
    return kept | {"s to the score of kit RLOO, by seed": ", ".join(seconds)}


def write_partial(rows: list[dict[str, Any]], titles: dict[str, str]) -> None:
    """Write the table about partial rollouts."""
    write_table(PARTIAL_PAGE, rows, titles, partial_cells)


def write(rows: list[dict[str, Any]], titles: dict[str, str]) -> None:
    """Write the table, the sentences and the picture."""
    tasks = write_table(PAGE, rows, titles, cells)
    said = []
    for title, runs in (tasks | together(tasks, "SmolLM2-135M")).items():
        equal = {"steps": above_base, "seconds": above_base_in_time}
        for what, above in equal.items():
            if found := verdict(runs, above):
                said.append(f"- **{title}**, equal {what}: {found}.")
    write_part(PAGE, "study-verdicts", "\n".join(said))
    picture(tasks)
