"""Write the results of learn_step.py into docs/explanation/trainer.md, the README, a picture.

.venv/bin/python benchmarks/learn_step_report.py
"""

import json

from shared import RESULTS, ROOT, start_pyplot, write_part

pyplot = start_pyplot()
TABLE = RESULTS / "learn_step_cpu.json"
LONG = RESULTS / "learn_step_cpu_long.json"
# One pair of every cell with two iterations, gradients of both steps
SECOND = RESULTS / "learn_step_cpu_second_step.json"
PICTURE = ROOT / "docs" / "pictures" / "learn_step.svg"


def second_steps(content: dict) -> str:
    """Gradient differences of the cells with two iterations, as one Markdown row."""
    names = (
        "gradient_difference",
        "second_step_difference",
        "second_step_difference_double_sums",
    )
    worst = (max(row[name] for row in content["rows"]) for name in names)
    return (
        "| two iterations, largest of all cells | first step | second step "
        "| second step, TRL's sums in float64 |\n|---|---|---|---|\n"
        f"| gradient differs by | {' | '.join(f'{value:.0e}' for value in worst)} |"
    )


def table(content: dict) -> str:
    """Every cell of one result file, as Markdown."""
    lines = [
        "| lengths | signal | beta | iterations | TRL s | kit s | faster | memory | gradient |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in content["rows"]:
        lines.append(
            f"| {row['lengths']} | {row['signal']} | {row['beta']:g} | {row['iterations']} "
            f"| {row['seconds_trl']:.2f} | {row['seconds_kit']:.2f} | {row['time_ratio']:.2f}x "
            f"| {row['peak_ratio']:.2f}x | {row['gradient_difference']:.0e} |"
        )
    return "\n".join(lines)


def summary(content: dict) -> str:
    """The two rows that the README names."""
    rows = {row["cell"]: row for row in content["rows"]}
    lines = [
        "| learning step against stock TRL | faster | peak memory | gradient differs by |",
        "|---|---|---|---|",
    ]
    for cell, words in (
        ("skewed/half/0.05/1", "beta 0.05"),
        ("skewed/half/0/1", "beta 0, half of the groups without signal"),
    ):
        row = rows[cell]
        lines.append(
            f"| {words} | {row['time_ratio']:.1f}x | {row['peak_ratio']:.2f}x "
            f"| {row['gradient_difference']:.0e} |"
        )
    return "\n".join(lines)


def picture(content: dict) -> None:
    """Speed-up of every cell with one iteration."""
    rows = [row for row in content["rows"] if row["iterations"] == 1]
    figure, axes = pyplot.subplots(figsize=(7.2, 4.6), layout="constrained")
    names = [f"{r['lengths']}, signal in {r['signal']}, beta {r['beta']:g}" for r in rows]
    axes.barh(names, [row["time_ratio"] for row in rows], color="#3b6ea5")
    axes.axvline(1.0, color="black", linewidth=0.8)
    axes.set_xscale("log")
    axes.set_xlabel("learning step: seconds of stock TRL over seconds of rloo-kit (log scale)")
    axes.invert_yaxis()
    for place, row in enumerate(rows):
        axes.text(row["time_ratio"], place, f" {row['time_ratio']:.1f}x", va="center", fontsize=8)
    axes.margins(x=0.15)
    figure.savefig(PICTURE, metadata={"Date": None})


def main() -> None:
    """Write the tables and the picture."""
    short, long, second = (json.loads(path.read_text()) for path in (TABLE, LONG, SECOND))
    write_part(ROOT / "docs" / "explanation" / "trainer.md", "learn-step-long", table(long))
    write_part(
        ROOT / "docs" / "explanation" / "trainer.md", "learn-step-second", second_steps(second)
    )
    write_part(ROOT / "README.md", "learn-step", summary(long))
    picture(short)


if __name__ == "__main__":
    main()
