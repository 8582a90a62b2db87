"""Whole step, with sampling and rewards: rloo-kit against TRL's RLOO and GRPO trainers.

    python benchmarks/whole_step.py                          # every cell: hours on two CPU cores
    python benchmarks/whole_step.py --cells embedded --pairs 1
    python benchmarks/whole_step.py --cells smollm2 --in-flight 3 --steps 10
    .venv-vllm/bin/python benchmarks/whole_step.py --cells smollm2 --sampler vllm --name ...
    python benchmarks/whole_step.py --report                 # tables and picture from the results

The arms (kit, trl-rloo, trl-grpo) train in one process and take their steps in turn, A B C A B C,
so that whatever slows the machine down slows all of them. They start from the same adapter, and
have the same prompts, reward, seed and settings. If Unsloth is installed, TRL's classes are those
that Unsloth has patched. Each arm samples its own completions, so the numbers of tokens differ and
are printed too. Each step is timed as a whole, and also its sampling, its rewards and its learning
(the rest). The first steps of each arm are a warm-up, which is not counted. With partial rollouts,
it lasts until the groups in flight have their usual ages. The counted steps form pairs, with
``--steps`` steps of each arm in a pair. scripts/fetch_smollm2.py fetches SmolLM2; with this model,
set MALLOC_ARENA_MAX=1, so that all arms share 13 GiB of memory instead of using 13 GiB each.
"""

import argparse
import json
import statistics
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import shared
from compared import TRAINERS, make_trainer, prepare  # sets Unsloth up

# isort: split

from datasets import Dataset
from transformers import TrainerCallback

import rloo_kit as rk

SEED = 42
PAGE = shared.ROOT / "docs" / "explanation" / "whole_step.md"
PARTIAL_PAGE = shared.ROOT / "docs" / "how-to" / "partial_rollouts.md"
PICTURE = shared.ROOT / "docs" / "pictures" / "whole_step.svg"
TITLES = {"kit": "kit", "trl-rloo": "TRL RLOO", "trl-grpo": "TRL GRPO"}
COLORS = {"sampling": "#3b6ea5", "rewards": "#999999", "learning": "#d08c3c"}
CELL_TITLES = {
    "embedded": "embedded model, 64 completions of about 28 tokens",
    "smollm2": "SmolLM2-135M, 16 completions of at most 256 tokens",
    "long-prompt": "SmolLM2-135M, long prompts, answers of at most 16 tokens",
}


@dataclass(frozen=True)
class Cell:
    """Model, prompts and batch of a comparison."""

    model: str
    prompts: str
    groups: int
    generations: int
    longest: int
    beta: float
    load_in_4bit: bool = False


CELLS = {
    # The quickstart: 48 tokens at most, nearly even lengths
    "embedded": Cell("tiny-thinker", "arithmetic", 8, 8, 48, 0.02, load_in_4bit=True),
    # Natural lengths: about 50 tokens on average, the longest cut at 256
    "smollm2": Cell(str(shared.SMOLLM2), "posts", 2, 8, 256, 0.02),
    # Prompts of 400 tokens, answers of at most 16
    "long-prompt": Cell(str(shared.SMOLLM2), "several-posts", 2, 8, 16, 0.02),
}


def prompts_of(cell: Cell, steps: int) -> Dataset:
    """Return the prompts for a number of steps."""
    if cell.prompts == "arithmetic":
        return rk.load_prompts("arithmetic", num_prompts=cell.groups * steps, seed=SEED)
    posts = shared.read_lines(shared.ROOT / "examples" / "posts.jsonl")
    at_once = 5 if cell.prompts == "several-posts" else 1
    texts = [
        "\n\n".join(post["post"] for post in posts[at_once * n : at_once * n + at_once])
        + "\n\nSum up in one short sentence."
        for n in range(cell.groups * steps)
    ]
    return Dataset.from_dict({"prompt": [[{"role": "user", "content": t}] for t in texts]})


@dataclass
class Clock:
    """Seconds of sampling and of rewards so far, and the lengths of the completions of a step."""

    sampling: float = 0.0
    rewards: float = 0.0
    tokens: list[int] = field(default_factory=list)

    def sampled(self, draw, ids_of=lambda drawn: drawn[0] if isinstance(drawn, tuple) else drawn):
        """Return a function that calls ``draw`` and measures it.

        ``ids_of`` returns the token ids of the completions in the result of ``draw``.
        """

        def timed(*args, **kwargs):
            start = time.perf_counter()
            drawn = draw(*args, **kwargs)
            self.sampling += time.perf_counter() - start
            self.tokens += map(len, ids_of(drawn))
            return drawn

        return timed

    def reward(self, completions, **columns):
        """Return cheap scores that differ between texts: the share of letters in each."""
        start = time.perf_counter()
        texts = [one[-1]["content"] if isinstance(one, list) else one for one in completions]
        scores = [sum(map(str.isalpha, text)) / (len(text) + 1) for text in texts]
        self.rewards += time.perf_counter() - start
        return scores


class Turns:
    """Order in which the arms, each in a thread of its own, take their steps."""

    def __init__(self, order: Sequence[str]) -> None:
        self.order = order
        self.place = 0
        self.changed = threading.Condition()
        self.failed: BaseException | None = None

    def wait(self, arm: str) -> None:
        """Wait until it is the arm's turn.

        Raises:
            RuntimeError: Another arm has failed.
        """
        with self.changed:
            self.changed.wait_for(lambda: self.failed or self.order[self.place] == arm)
            if self.failed:
                raise RuntimeError("another arm failed")

    def give_on(self, arm: str) -> bool:
        """Let the next arm take its step, and return whether this arm has another step."""
        with self.changed:
            self.place += 1
            self.changed.notify_all()
            return arm in self.order[self.place :]

    def fail(self, error: BaseException) -> None:
        """Keep the first error, and let every arm end."""
        with self.changed:
            self.failed = self.failed or error
            self.changed.notify_all()


class Arm(TrainerCallback):
    """One trainer class with its own model; ``steps`` has the seconds and tokens of each step."""

    def __init__(self, name: str, cell: Cell, options: argparse.Namespace, save) -> None:
        self.name = name
        self.save = save
        self.cell = cell
        self.options = options
        self.clock = Clock()
        self.steps: list[dict[str, float]] = []
        model, self.tokenizer = rk.load_model(
            cell.model, max_seq_length=1024, load_in_4bit=cell.load_in_4bit
        )
        self.model = rk.attach_lora(model, r=16, seed=SEED)

    @property
    def warm_up(self) -> int:
        """Number of steps that are not counted."""
        return max(1, 2 * self.options.in_flight if self.name == "kit" else 1)

    def trainer(self):
        """Make the trainer."""
        cell, clock = self.cell, self.clock
        # partial rollouts start no prompts near the end of a training, which is not counted either
        steps = 2 * self.warm_up + self.options.steps * self.options.pairs
        settings = {
            "max_steps": steps,
            "per_device_train_batch_size": cell.groups * cell.generations,
            "num_generations": cell.generations,
            "max_completion_length": cell.longest,
            "temperature": 1.0,
            "beta": cell.beta,
            "learning_rate": 1e-6,  # so small that lengths stay the same
            "logging_strategy": "no",
            "seed": SEED,
        }
        if self.name == "kit":
            settings["generation"] = self.options.sampler
            if self.options.in_flight:
                rows = self.options.in_flight * cell.groups * cell.generations
                settings |= {"partial_rollouts": True, "rows_in_flight": rows}
        policy = (self.model, self.tokenizer)
        prompts = prompts_of(cell, steps)
        made = make_trainer(self.name, policy, clock.reward, prompts, [self], **settings)
        if self.name == "kit" and self.options.in_flight:
            made.rloo.in_flight = clock.sampled(
                made.rloo.in_flight, lambda drawn: drawn[1].tokens.completion_ids
            )
        elif self.name == "kit":
            made.completer.draw = clock.sampled(made.completer.draw)
        else:
            made._generate_single_turn = clock.sampled(made._generate_single_turn)
        return made

    def train(self, turns: Turns) -> None:
        """Train, one step at each of the arm's turns."""
        self.turns = turns
        try:
            turns.wait(self.name)  # one arm at a time sets up and draws its prompts
            trainer = self.trainer()
            trainer.train()
            if getattr(trainer, "engine", None) is not None:
                trainer.engine.close()
        except BaseException as exc:
            turns.fail(exc)
            raise

    def on_step_begin(self, *_, **__):
        self.turns.wait(self.name)
        self.before = (time.perf_counter(), self.clock.sampling, self.clock.rewards)
        self.clock.tokens.clear()

    def on_step_end(self, args, state, control, **__):
        now = (time.perf_counter(), self.clock.sampling, self.clock.rewards)
        whole, sampling, rewards = (to - since for since, to in zip(self.before, now, strict=True))
        tokens = self.clock.tokens
        self.steps.append(
            {
                "step": whole,
                "sampling": sampling,
                "rewards": rewards,
                "learning": whole - sampling - rewards,
                "tokens": sum(tokens),
                "mean_length": statistics.mean(tokens),
                "longest": max(tokens),
            }
        )
        parts = ", ".join(f"{name} {value:.2f}" for name, value in self.steps[-1].items())
        print(f"{self.cell.model[-40:]:<12} {self.name:<9} {parts}", flush=True)
        if self.name == self.options.arms[-1]:
            self.save()
        control.should_training_stop = not self.turns.give_on(self.name)

    def pairs(self) -> list[dict[str, float]]:
        """Return the means of the counted steps, one for each complete pair."""
        steps = iter(self.steps[self.warm_up :])
        pairs = zip(*[steps] * self.options.steps, strict=False)
        return [{key: statistics.fmean(one[key] for one in of) for key in of[0]} for of in pairs]


def compare(name: str, options: argparse.Namespace, rows: list[dict]) -> None:
    """Let the arms take steps in turn; after each pair write ``rows`` and the results so far."""

    def save() -> None:
        found = [arm.pairs() for arm in arms]
        if found[0] and len(found[0]) > len(saved):
            saved.append(row_of(name, options, dict(zip(options.arms, found, strict=True))))
            shared.write_result(options.name, rows=[*rows, saved[-1]])

    saved: list[dict] = []
    arms = [Arm(one, CELLS[name], options, save) for one in options.arms]
    order = [arm.name for arm in arms for _ in range(arm.warm_up)]
    turns = Turns(order + options.arms * (options.steps * options.pairs))
    threads = [threading.Thread(target=arm.train, args=(turns,)) for arm in arms]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if turns.failed:
        raise turns.failed
    rows.append(saved[-1])


def row_of(name: str, options: argparse.Namespace, counted: dict[str, list]) -> dict[str, object]:
    """Return a row with the medians of all pairs, and the ratios of each pair."""
    row: dict[str, object] = {"cell": name, "sampler": options.sampler, "steps": options.steps}
    row["batches in flight"] = options.in_flight or 1
    for arm, found in counted.items():
        row[arm] = {key: statistics.median(one[key] for one in found) for key in found[0]}
    for arm in options.arms[1:]:
        steps = {one: [t["step"] for t in counted[one]] for one in (arm, "kit")}
        speeds = {one: [t["tokens"] / t["sampling"] for t in counted[one]] for one in (arm, "kit")}
        costs = {one: [t["step"] / t["tokens"] for t in counted[one]] for one in (arm, "kit")}
        faster, all_ratios = shared.ratios(steps[arm], steps["kit"])
        cheaper, _ = shared.ratios(costs[arm], costs["kit"])  # does not depend on the lengths
        speed, _ = shared.ratios(speeds["kit"], speeds[arm])
        row[f"faster than {arm}"] = faster
        row[f"ratios to {arm}"] = all_ratios
        row[f"faster a token than {arm}"] = cheaper
        row[f"tokens a second against {arm}"] = speed
        print(
            f"{name:<12} kit against {arm}: step {faster:.2f}x "
            f"({', '.join(f'{one:.2f}' for one in all_ratios)}), a token {cheaper:.2f}x, "
            f"sampled tokens a second {speed:.2f}x"
        )
    return row


def read_rows() -> list[dict]:
    """Return the rows of every result file."""
    files = sorted(shared.RESULTS.glob("whole_step_*.json"))
    found = [row for file in files for row in json.loads(file.read_text())["rows"]]
    return sorted(found, key=lambda row: (list(CELL_TITLES).index(row["cell"]), row["sampler"]))


def table() -> str:
    """Return a Markdown table of the seconds of a step and the ratios."""
    columns = ["cell, the kit's sampler", "kit s", "TRL RLOO", "TRL GRPO", "faster than RLOO"]
    columns += ["than GRPO", "sampled tokens a second against RLOO"]
    others = [f"faster than {arm}" for arm in list(TITLES)[1:]]
    others.append("tokens a second against trl-rloo")
    return shared.markdown(
        columns,
        (
            [
                f"{CELL_TITLES[row['cell']]}; {row['sampler']}",
                *(f"{row[arm]['step']:.1f}" for arm in TITLES),
                *(f"{row[name]:.2f}x" for name in others),
            ]
            for row in read_rows()
        ),
    )


def speedup(row: dict) -> str:
    """Return a text with the ratios of a row to TRL's two trainers, and the model."""
    names = {"embedded": "the embedded model", "smollm2": "SmolLM2-135M"}
    model = names.get(row["cell"], row["cell"])
    return f"{row['faster than trl-rloo']:.1f}x and {row['faster than trl-grpo']:.1f}x on {model}"


def sentence() -> str:
    """Return the sentence for the README."""
    found = [speedup(row) for row in read_rows() if row["sampler"] == "transformers"]
    return (
        "A whole step is faster than that of TRL's RLOO and of its GRPO, if all sample with "
        f"transformers: {', '.join(found)}."
    )


def in_flight() -> str:
    """Return the sentence for the page about partial rollouts."""
    names = ("embedded", "smollm2", "smollm2_vllm")
    files = [shared.RESULTS / f"partial_rollouts_{name}.json" for name in names]
    rows = [row for file in files for row in json.loads(file.read_text())["rows"]]
    found = [
        f"{speedup(row)} ({row['batches in flight']} batches in flight; {row['sampler']} samples)"
        for row in rows
    ]
    pairs = len(rows[0]["ratios to trl-rloo"])
    return (
        "A step with partial rollouts is faster than that of TRL's RLOO and of its GRPO (medians "
        f"of {pairs} pairs of {rows[0]['steps']} steps): {', '.join(found)}."
    )


def sampler() -> str:
    """Return the sentences about the sampler's speed and memory, against ``generate``."""
    content = json.loads((shared.RESULTS / "sampler_smollm2.json").read_text())
    kit, other = (
        f"{content[name]['tokens_per_second']:.1f} tokens a second with "
        f"{content[name]['peak_mib']:.0f} MiB"
        for name in ("kit", "generate")
    )
    pairs = content["ratios"]
    return (
        f"The kit samples {kit} of extra memory, `generate` {other}. The kit is "
        f"{content['ratio']:.2f}x as fast "
        f"({min(pairs):.2f}x to {max(pairs):.2f}x in {len(pairs)} pairs)."
    )


def picture() -> None:
    """Draw the parts of a step for each cell and arm."""
    found = read_rows()
    figure, axes = shared.start_pyplot().subplots(
        1, len(found), figsize=(3.2 * len(found), 3.2), layout="constrained", squeeze=False
    )
    for axis, row in zip(axes[0], found, strict=True):
        bottom = [0.0] * len(TITLES)
        for part, color in COLORS.items():
            heights = [row[arm][part] for arm in TITLES]
            axis.bar(list(TITLES.values()), heights, bottom=bottom, label=part, color=color)
            bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
        axis.set_title(f"{row['cell']}, {row['sampler']}", fontsize=9)
        axis.set_ylabel("seconds a step")
        axis.tick_params(labelsize=8)
    axes[0][0].legend(fontsize=8)
    figure.savefig(PICTURE, metadata={"Date": None})


def write_report() -> None:
    """Write the tables and the picture."""
    shared.write_part(PAGE, "whole-step", table())
    shared.write_part(PAGE, "sampler", sampler())
    shared.write_part(shared.ROOT / "README.md", "whole-step", sentence())
    shared.write_part(PARTIAL_PAGE, "in-flight", in_flight())
    picture()


def main() -> None:
    parser = shared.parser_of(__doc__)
    add = parser.add_argument
    add("--cells", nargs="*", default=list(CELLS), choices=CELLS)
    add("--arms", nargs="*", default=list(TRAINERS), choices=TRAINERS, help="kit must be first")
    add("--sampler", default="transformers", choices=["transformers", "vllm"])
    add("--steps", type=int, default=3, help="optimizer steps of each arm in a pair")
    add("--in-flight", type=int, default=0, help="batches in flight, with partial rollouts")
    add("--pairs", type=int, default=5)
    add("--name", help="name of the file in benchmarks/results")
    add("--report", action="store_true", help="only write tables and picture, from the results")
    options = parser.parse_args()
    if options.report:
        write_report()
        return
    prepare()
    rows = []
    for name in options.cells:
        compare(name, options, rows)


if __name__ == "__main__":
    main()
