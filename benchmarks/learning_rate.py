"""Learning rate, rank, alpha and layers of the adapter: one short training for each combination.

    python benchmarks/learning_rate.py                            # the embedded model, all cells
    python benchmarks/learning_rate.py --cells /r8/ seed1        # cells with both texts in the name
    python benchmarks/learning_rate.py --model smollm2 --minutes 60
    python benchmarks/learning_rate.py --report                  # picture and page, of all models

A cell is a run file of examples/ with its own ``learning_rate``, ``r``, ``lora_alpha``,
``target_modules`` and ``seed``. Its result is appended as one line to a file in benchmarks/results.
Cells that are in this file are not run again, so the program can be stopped at any time and started
again. After ``--minutes``, it starts no further cell.
"""

import itertools
import math
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import shared

PAGE = shared.ROOT / "docs" / "explanation" / "learning-rate.md"
PICTURE = shared.ROOT / "docs" / "pictures" / "learning_rate.svg"
RATES = (3e-6, 1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3)
ATTENTION = "[q_proj,k_proj,v_proj,o_proj]"
# (rank, alpha, layers); each shape differs from the first one in one value
SHAPES = ((8, 16, "all"), (1, 16, "all"), (32, 16, "all"), (8, 32, "all"), (8, 16, "attention"))
LAYERS = {"all": f"{ATTENTION[:-1]},gate_proj,up_proj,down_proj]", "attention": ATTENTION}


@dataclass(frozen=True)
class Subject:
    """Run file of a model, with the number of seeds, the metric, and the settings to change."""

    run_file: str
    seeds: int
    metric: str  # of the held-out prompts
    rates: tuple[float, ...]
    overrides: tuple[str, ...]


SUBJECTS = {
    "tiny-thinker": Subject(
        "quickstart",
        5,
        "accuracy",
        RATES,
        ("trainer.max_steps=24", "trainer.per_device_train_batch_size=32", "data.held_out=128"),
    ),
    "smollm2": Subject(
        str(shared.ROOT / "examples" / "smollm2.yaml"), 2, "coverage", RATES[3:], ()
    ),
}


@dataclass(frozen=True)
class Cell:
    """One training."""

    learning_rate: float
    r: int
    alpha: int
    layers: str  # "all" or "attention"
    seed: int

    @property
    def name(self) -> str:
        """Name of the cell, from which ``--cells`` selects."""
        return f"{self.learning_rate:g}/r{self.r}/alpha{self.alpha}/{self.layers}/seed{self.seed}"

    def overrides(self) -> list[str]:
        """Return the settings as overrides of the run file."""
        return [
            f"trainer.learning_rate={self.learning_rate}",
            f"lora.r={self.r}",
            f"lora.lora_alpha={self.alpha}",
            f"lora.target_modules={LAYERS[self.layers]}",
            f"seed={self.seed}",
        ]


def cells(subject: Subject) -> Iterator[Cell]:
    """Yield every cell, seed by seed, so that a sweep that stops early has run every setting."""
    for seed in range(1, subject.seeds + 1):
        for shape in SHAPES:
            yield from (Cell(rate, *shape, seed) for rate in subject.rates)


def results(model: str) -> Path:
    """Return the path of the result file of a model."""
    return shared.RESULTS / f"learning_rate_{model}.jsonl"


def read(model: str) -> list[dict]:
    """Return the cells that have been run, one dict each."""
    return shared.read_lines(results(model))


def run(cell: Cell, subject: Subject) -> dict:
    """Train one cell, and return its settings and results."""
    import rloo_kit as rk
    from rloo_kit.diagnosis.record import read_run

    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        fixed = ["trainer.save_strategy='no'", "trainer.generation=transformers"]
        fixed += [f"output_dir={folder}/run", *subject.overrides]
        try:
            result = rk.train(subject.run_file, [*fixed, *cell.overrides()], say=str)
        except rk.DivergedError:
            return {**asdict(cell), "score": None, "diverged": True}
        metrics = [row for row in read_run(result.folder).metrics if "reward" in row]
    last = metrics[-max(1, len(metrics) // 4) :]
    return {
        **asdict(cell),
        "steps": result.steps,
        "before": result.before.rewards[subject.metric],
        "score": result.after.rewards[subject.metric],
        "scores": result.after.rewards,
        "reward": statistics.fmean(row["reward"] for row in last),
        "kl": statistics.fmean(row["kl/sequence"] for row in last),
        "seconds": round(time.monotonic() - began),
    }


def sweep(model: str, wanted: list[str], minutes: float) -> None:
    """Run the cells that are not in the result file."""
    subject = SUBJECTS[model]
    end = time.monotonic() + 60 * minutes
    known = {Cell(*(row[name] for name in Cell.__annotations__)) for row in read(model)}
    for cell in cells(subject):
        if cell in known or not all(text in cell.name for text in wanted):
            continue
        if time.monotonic() > end:
            print("out of time: start it again to continue")
            return
        row = run(cell, subject)
        shared.append_line(results(model), row)
        print(f"{cell.name}: {subject.metric} {row['score']}, {row.get('seconds')} s", flush=True)


def mean_and_range(rows: list[dict]) -> tuple[float, float, float]:
    """Return mean, lowest and highest score of some seeds; a run that diverged scores 0."""
    scores = [row["score"] or 0.0 for row in rows]
    return statistics.fmean(scores), min(scores), max(scores)


def grouped(model: str) -> dict[tuple, dict[float, list[dict]]]:
    """Return a dict: (layers, alpha, r) -> learning rate -> rows."""
    found: dict[tuple, dict[float, list[dict]]] = {}
    for row in sorted(read(model), key=lambda row: (row["layers"], row["alpha"], row["r"])):
        setting = row["layers"], row["alpha"], row["r"]
        found.setdefault(setting, {}).setdefault(row["learning_rate"], []).append(row)
    return found


# A rate teaches nothing if its mean score is closer than this to the score before training
NOTHING = 0.01


def table(model: str) -> str:
    """Return a Markdown table of the held-out scores, without rates too low to teach anything."""
    settings = grouped(model)
    rows = read(model)
    subject = SUBJECTS[model]
    before = statistics.fmean(row["before"] for row in rows if row.get("before") is not None)
    rates = sorted({rate for runs in settings.values() for rate in runs})
    low = list(itertools.takewhile(lambda rate: teaches_nothing(settings, rate, before), rates))
    rates = rates[len(low) :]
    lines = []
    for (layers, alpha, r), runs in settings.items():
        values = []
        for rate in rates:
            mean, lowest, highest = mean_and_range(runs[rate]) if rate in runs else (math.nan,) * 3
            spread = f" ({lowest:.2f} to {highest:.2f})" if lowest < highest else ""
            values.append("" if math.isnan(mean) else f"{mean:.2f}{spread}")
        lines.append([layers, str(alpha), str(r), *values])
    whole = len(list(cells(subject)))
    shown = shared.markdown(["layers", "alpha", "r", *(f"{rate:.0e}" for rate in rates)], lines)
    text = (
        f"{shown}\n\n{model}: held-out {subject.metric} by learning rate, mean (range) of the "
        f"seeds; {before:.2f} before training."
    )
    if low:
        text += f" At {low[0]:.0e} to {low[-1]:.0e} every mean is within {NOTHING} of that."
    if len(rows) < whole:
        text += f" {len(rows)} of {whole} cells have run."
    return text


def teaches_nothing(
    settings: dict[tuple, dict[float, list[dict]]], rate: float, before: float
) -> bool:
    """Return whether the rate leaves the score as it was, with every setting."""
    runs = [runs[rate] for runs in settings.values() if rate in runs]
    return all(abs(mean_and_range(one)[0] - before) < NOTHING for one in runs)


def picture(models: list[str]) -> None:
    """Draw the score over the learning rate, with one line for each setting.

    Bars reach from the lowest to the highest score of the seeds.
    """
    figure, panels = shared.start_pyplot().subplots(
        1, len(models), figsize=(6.4 * len(models), 3.8), layout="constrained", squeeze=False
    )
    for model, axes in zip(models, panels[0], strict=True):
        settings = grouped(model)
        for place, ((layers, alpha, r), runs) in enumerate(settings.items()):
            rates = sorted(runs)
            means, lows, highs = zip(*(mean_and_range(runs[rate]) for rate in rates), strict=True)
            bars = [[m - low for m, low in zip(means, lows, strict=True)],
                    [high - m for m, high in zip(means, highs, strict=True)]]  # fmt: skip
            aside = 1 + 0.03 * (place - len(settings) / 2)  # bars of equal rates stay apart
            label = f"r {r}, alpha {alpha}, {layers}"
            axes.errorbar([rate * aside for rate in rates], means, bars, marker=".", label=label)
        axes.set(xscale="log", xlabel="learning rate", title=model)
        axes.set_ylabel(f"held-out {SUBJECTS[model].metric}")
        axes.spines[["top", "right"]].set_visible(False)
    panels[0][0].legend(frameon=False, fontsize=8)
    figure.savefig(PICTURE, metadata={"Date": None})


def main() -> None:
    """Run cells, or write the picture and the page."""
    parser = shared.parser_of(__doc__)
    parser.add_argument("--model", choices=SUBJECTS, default="tiny-thinker")
    parser.add_argument("--cells", nargs="*", default=[], help="only cells with all these texts")
    parser.add_argument("--minutes", type=float, default=math.inf)
    parser.add_argument("--report", action="store_true", help="only write picture and page")
    arguments = parser.parse_args()
    if arguments.report:
        models = [model for model in SUBJECTS if read(model)]
        shared.write_part(PAGE, "learning-rate", "\n\n".join(table(model) for model in models))
        picture(models)
        return
    sweep(arguments.model, arguments.cells, arguments.minutes)


if __name__ == "__main__":
    main()
