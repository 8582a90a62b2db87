"""Write the results of whole_step.py into docs/explanation/whole_step.md, the README, a picture.

.venv/bin/python benchmarks/whole_step_report.py
"""

import json
import statistics

from shared import RESULTS, ROOT, start_pyplot, write_part

pyplot = start_pyplot()
PAGE = ROOT / "docs" / "explanation" / "whole_step.md"
PICTURE = ROOT / "docs" / "pictures" / "whole_step.svg"
ARMS = {"kit": "kit", "trl-rloo": "TRL RLOO", "trl-grpo": "TRL GRPO"}
COLORS = {"sampling": "#3b6ea5", "rewards": "#999999", "learning": "#d08c3c"}
CELLS = {
    "embedded": "embedded model, 64 completions of about 28 tokens",
    "smollm2": "SmolLM2-135M, 16 completions of at most 256 tokens",
    "long-prompt": "SmolLM2-135M, long prompts, answers of at most 16 tokens",
}


def rows() -> list[dict]:
    """The cells of every result file."""
    files = sorted(RESULTS.glob("whole_step_*.json"))
    found = [row for file in files for row in json.loads(file.read_text())["rows"]]
    return sorted(found, key=lambda row: (list(CELLS).index(row["cell"]), row["sampler"]))


def table() -> str:
    """Seconds of a step and ratios, as Markdown."""
    lines = [
        "| cell, the kit's sampler | kit s | TRL RLOO | TRL GRPO | faster than RLOO | than GRPO "
        "| sampled tokens a second against RLOO |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows():
        seconds = " | ".join(f"{row[arm]['step']:.1f}" for arm in ARMS)
        ratios = " | ".join(f"{row[f'faster than {arm}']:.2f}x" for arm in list(ARMS)[1:])
        lines.append(
            f"| {CELLS[row['cell']]}; {row['sampler']} | {seconds} | {ratios} "
            f"| {row['tokens a second against trl-rloo']:.2f}x |"
        )
    return "\n".join(lines)


def sentence() -> str:
    """What the README says."""
    found = [
        f"{row['faster than trl-rloo']:.1f}x and {row['faster than trl-grpo']:.1f}x ({name})"
        for cell, name in (("embedded", "embedded model"), ("smollm2", "SmolLM2-135M"))
        for row in rows()
        if (row["cell"], row["sampler"]) == (cell, "transformers")
    ]
    return (
        f"Whole step against TRL's RLOO and GRPO, all sampling by transformers: {', '.join(found)}."
    )


def sampler() -> str:
    """Speed and memory of the sampler against ``generate``, as Markdown."""
    content = json.loads((RESULTS / "sampler_smollm2.json").read_text())
    lines = ["| sampler | tokens a second | peak memory, MiB |", "|---|---|---|"]
    for name in ("kit", "generate"):
        row = content[name]
        lines.append(f"| {name} | {row['tokens_per_second']:.1f} | {row['peak_mib']:+.0f} |")
    pairs = ", ".join(f"{one:.2f}x" for one in content["ratios"])
    return "\n".join(lines) + f"\n\n{content['ratio']:.2f}x; single pairs: {pairs}."


def scores() -> str:
    """Median wall time and steps to the score, with the lowest and the highest, as Markdown."""
    content = json.loads((RESULTS / "time_to_score_cpu.json").read_text())
    lines = [
        f"| to a score of {content['score']:g} | seconds (lowest, highest) | steps |",
        "|---|---|---|",
    ]
    for arm, name in ARMS.items():
        found = [row for row in content["rows"] if row["arm"] == arm and row["seconds"]]
        seconds = [row["seconds"] for row in found]
        steps = statistics.median(row["steps"] for row in found)
        lines.append(
            f"| {name}, {len(found)} seeds | {statistics.median(seconds):.0f} "
            f"({min(seconds):.0f}, {max(seconds):.0f}) | {steps:g} |"
        )
    return "\n".join(lines)


def picture() -> None:
    """What a step consists of, for each cell and arm."""
    found = rows()
    figure, axes = pyplot.subplots(
        1, len(found), figsize=(3.2 * len(found), 3.2), layout="constrained", squeeze=False
    )
    for axis, row in zip(axes[0], found, strict=True):
        bottom = [0.0] * len(ARMS)
        for part, color in COLORS.items():
            heights = [row[arm][part] for arm in ARMS]
            axis.bar(list(ARMS.values()), heights, bottom=bottom, label=part, color=color)
            bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
        axis.set_title(f"{row['cell']}, {row['sampler']}", fontsize=9)
        axis.set_ylabel("seconds a step")
        axis.tick_params(labelsize=8)
    axes[0][0].legend(fontsize=8)
    figure.savefig(PICTURE, metadata={"Date": None})


def main() -> None:
    write_part(PAGE, "whole-step", table())
    write_part(PAGE, "sampler", sampler())
    write_part(PAGE, "time-to-score", scores())
    write_part(ROOT / "README.md", "whole-step", sentence())
    picture()


if __name__ == "__main__":
    main()
