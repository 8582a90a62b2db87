"""Learning step of rloo-kit against that of stock TRL, on the same completions in one process.

    python benchmarks/learn_step.py                      # every cell: hours on two CPU cores
    python benchmarks/learn_step.py --longest 256        # shorter completions: minutes a pair
    python benchmarks/learn_step.py --cells skewed/half  # some cells
    python benchmarks/learn_step.py --geometry qwen3-0.6b --load-in-4bit   # on a GPU
    python benchmarks/learn_step.py --report             # tables and picture from the results

Both arms get the same completions, whose lengths follow one distribution, and the same scores. They
start from the same adapter, and run in turn, A B A B (A: TRL's RLOOTrainer, B: LeaveOneOutTrainer).
``training_step`` is timed without generation: log-prob passes, advantages, loss and backward. The
weights are random. On a CPU stock TRL needs Unsloth's kernel, so Unsloth is imported in both arms.
The first pair warms up and is not timed; the reported peaks of memory are those of this pair.
"""

import argparse
import gc
import itertools
import json
import random
import statistics
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import shared
from compared import make_trainer, prepare  # sets Unsloth up
from gpu_models import PUBLISHED, geometry_of, model_folder

# isort: split

import torch
from datasets import Dataset
from transformers import AutoTokenizer
from trl import RLOOTrainer

import rloo_kit as rk
from rloo_kit.machine.cleanup import take_peak
from rloo_kit.models.shape import TINY_THINKER

TABLE = shared.RESULTS / "learn_step_cpu.json"
LONG = shared.RESULTS / "learn_step_cpu_long.json"
# One pair of every cell with two iterations, with the gradients of both steps
SECOND = shared.RESULTS / "learn_step_cpu_second_step.json"
PICTURE = shared.ROOT / "docs" / "pictures" / "learn_step.svg"
GENERATIONS = 4
PROMPTS = 4
# Rows of a micro-batch in the stock arm: per_device_train_batch_size
MICRO_BATCH = 4


def uniform(longest: int) -> list[int]:
    """Return lengths that differ by at most 10% from the same value."""
    rng = random.Random(0)
    return [round(longest / 3 * rng.uniform(0.9, 1.1)) for _ in range(PROMPTS * GENERATIONS)]


def skewed(longest: int) -> list[int]:
    """Return log-normal lengths, as in runs with thoughts: three padded tokens per real token."""
    rng = random.Random(3)
    raw = [rng.lognormvariate(0.0, 0.9) for _ in range(PROMPTS * GENERATIONS)]
    return [max(4, round(length / max(raw) * longest)) for length in raw]


def outlier(longest: int) -> list[int]:
    """Return lengths, one of which is ten times as long as the others."""
    rng = random.Random(2)
    short = [round(longest / 10 * rng.uniform(0.9, 1.1)) for _ in range(PROMPTS * GENERATIONS - 1)]
    return [*short[:13], longest, *short[13:]]


DISTRIBUTIONS = {"uniform": uniform, "skewed": skewed, "outlier": outlier}
SIGNALS = {"all": 1.0, "half": 0.5, "none": 0.0}


@dataclass(frozen=True)
class Cell:
    """Settings of one comparison."""

    lengths: str
    signal: str
    beta: float
    iterations: int

    def __str__(self) -> str:
        return f"{self.lengths}/{self.signal}/{self.beta:g}/{self.iterations}"


def make_model(options: argparse.Namespace, device: str) -> torch.nn.Module:
    """Return a random Qwen3 with a LoRA adapter of rank 16 that changes the output."""
    name, again = options.geometry, options.checkpointing
    if options.load_in_4bit:  # as users load it: with Unsloth if possible
        folder = model_folder(Path(tempfile.gettempdir()), name, load_in_4bit=True, device=device)
        model, _ = rk.load_model(folder, max_seq_length=8192, load_in_4bit=True)
        model = rk.attach_lora(model, r=16, lora_alpha=16, use_gradient_checkpointing=again)
    else:
        model = shared.random_qwen3(geometry_of(name), checkpointing=again, device=device)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.02)
    return model


def lengths_of(cell: Cell, longest: int) -> list[int]:
    """Return the lengths of the completions, group after group."""
    lengths = DISTRIBUTIONS[cell.lengths](longest)
    random.Random(3).shuffle(lengths)
    return lengths


def completions_of(cell: Cell, longest: int, vocabulary: int, eos: int) -> list[list[int]]:
    """Return random token ids of these lengths, each ended by EOS."""
    rng = random.Random(3)
    lengths = lengths_of(cell, longest)
    return [[rng.randrange(5, vocabulary) for _ in range(n - 1)] + [eos] for n in lengths]


def scores_of(cell: Cell, longest: int) -> list[float]:
    """Return scores that differ within the share of groups that ``cell.signal`` asks for.

    In any other group all scores are equal. The groups are chosen so that their share of all tokens
    is as close as possible to their share of all groups. So the result does not depend on whether
    the longest completion is among them.
    """
    rng = random.Random(4)
    lengths = lengths_of(cell, longest)
    tokens = [sum(lengths[i : i + GENERATIONS]) for i in range(0, len(lengths), GENERATIONS)]
    wanted = SIGNALS[cell.signal]
    chosen = min(
        itertools.combinations(range(PROMPTS), round(PROMPTS * wanted)),
        key=lambda groups: abs(sum(tokens[g] for g in groups) / sum(tokens) - wanted),
    )
    return [
        rng.random() if prompt in chosen else 1.0
        for prompt in range(PROMPTS)
        for _ in range(GENERATIONS)
    ]


def arm(base: type) -> type:
    """Return a subclass of ``base`` that keeps its gradients and the seconds of its steps."""

    wait = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None

    class Timed(base):
        seconds = 0.0

        def training_step(self, *args: object, **kwargs: object) -> torch.Tensor:
            wait()
            start = time.perf_counter()
            loss = super().training_step(*args, **kwargs)
            wait()
            self.seconds += time.perf_counter() - start
            return loss

        def _clip_grad_norm(self, model: torch.nn.Module) -> torch.Tensor:
            wanted = [p for n, p in sorted(model.named_parameters()) if p.requires_grad]
            self.gradients.append(
                torch.cat([p.grad.detach().flatten().double().cpu() for p in wanted])
            )
            return super()._clip_grad_norm(model)

    return Timed


class Recorded(RLOOTrainer):
    """TRL's trainer with recorded completions instead of generation."""

    recorded: list[list[int]]
    double_sums = False

    def _get_per_token_logps_and_entropies(self, *args: object, **kwargs: object) -> tuple:
        log_probs, *others = super()._get_per_token_logps_and_entropies(*args, **kwargs)
        return (log_probs.double() if self.double_sums else log_probs), *others

    def _generate_single_turn(self, prompt_ids: list, *_: object) -> list[list[int]]:
        return [list(ids) for ids in self.recorded]


class Bench:
    """Two trainers on two models with the same weights."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.tokenizer = AutoTokenizer.from_pretrained(TINY_THINKER)
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.models = {name: make_model(options, self.device) for name in ("trl", "kit")}
        self.start = {
            name: {n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad}
            for name, model in self.models.items()
        }
        self.vocabulary = geometry_of(options.geometry)["vocab_size"]

    def trainers(self, cell: Cell) -> dict[str, object]:
        options = self.options
        common = {
            "max_steps": cell.iterations,
            "per_device_train_batch_size": MICRO_BATCH,
            "gradient_accumulation_steps": PROMPTS * GENERATIONS // MICRO_BATCH,
            "num_generations": GENERATIONS,
            "num_iterations": cell.iterations,
            "beta": cell.beta,
            "max_completion_length": options.longest,
            "learning_rate": 1e-4,
            "optim": "sgd",  # Adam's first step is the gradient's sign, which rounding may flip
            "max_grad_norm": 1e9,
            "bf16": options.load_in_4bit,
            "gradient_checkpointing": options.checkpointing,
            "gradient_checkpointing_kwargs": {"use_reentrant": False},
            "logging_strategy": "no",
            "epsilon": 1e6,  # a random adapter leaves the trust region in one step
        }
        scores = scores_of(cell, options.longest)
        prompts = Dataset.from_dict({"prompt": ["12 + 34"] * PROMPTS * 4})
        made = {}
        for name, kind, base in (
            ("trl", "trl-rloo", Recorded),
            ("kit", "kit", rk.LeaveOneOutTrainer),
        ):
            self.place(name, noise=0.0)  # the reference is a copy of these weights
            extra = {"tokens_per_micro_batch": options.budget} if name == "kit" else {}
            trainer = make_trainer(
                kind,
                (self.models[name], self.tokenizer),
                lambda completions, **_: scores,
                prompts,
                trainer_class=arm(base),
                **common,
                **extra,
            )
            trainer.recorded = completions_of(
                cell, options.longest, self.vocabulary, self.tokenizer.eos_token_id
            )
            assert len(trainer.recorded) == PROMPTS * GENERATIONS
            if name == "kit":
                recorded = trainer.recorded
                trainer.sampler.generate = lambda _, ids=recorded: [[*one] for one in ids]
            made[name] = trainer
        return made

    def place(self, name: str, noise: float) -> None:
        """Set the adapter of one arm to its starting weights plus ``noise`` times normal noise."""
        for parameter_name, parameter in self.models[name].named_parameters():
            if parameter_name in self.start[name]:
                start = self.start[name][parameter_name]
                generator = torch.Generator(start.device).manual_seed(len(parameter_name))
                step = torch.randn(start.shape, generator=generator, device=start.device)
                parameter.data = start + noise * step

    def run(
        self, name: str, trainer: object, *, trim: bool = False
    ) -> tuple[float, int, list[torch.Tensor]]:
        """Train one optimizer step per iteration; return (seconds, peak memory, gradients).

        ``trim`` releases unused memory first, so that the peak starts as low as possible.
        """
        self.place(name, noise=0.01)  # away from the reference
        trainer.gradients = []
        trainer.seconds = 0.0
        if name == "trl":
            trainer._step = 0
            trainer._buffered_inputs = None
        torch.manual_seed(0)
        gc.collect()
        if trim:
            rk.release()
        take_peak()
        trainer.train()
        peak = take_peak()
        trainer.optimizer = trainer.lr_scheduler = None
        return trainer.seconds, peak, trainer.gradients


def relative_difference(a: torch.Tensor, b: torch.Tensor) -> float:
    """Return the norm of ``a - b`` divided by that of ``a``; if ``a`` is 0, the norm of ``b``."""
    size = float(a.norm())
    return float((a - b).norm()) / size if size else float(b.norm())


def compare(bench: Bench, cell: Cell, pairs: int) -> dict[str, object]:
    """Run the arms A B A B, and return a row: ratios (stock / kit), largest gradient differences.

    In a second iteration, the probability ratios are not 1. TRL computes them from the difference
    between two sums of a completion's log-probabilities. For a sum of 2,000 nats, float32 has an
    error of 1e-4, and so have the gradients. In the first pair, these sums are in float64, which
    shows whether the gradients differ by rounding only.
    """
    trainers = bench.trainers(cell)
    runs: dict[str, list] = {"trl": [], "kit": []}
    for pair in range(pairs + 1):  # the first pair warms up, and shows the peaks
        trainers["trl"].double_sums = pair == 0
        for name, trainer in trainers.items():
            runs[name].append(bench.run(name, trainer, trim=pair == 0))
    peaks = {name: measured[0][1] for name, measured in runs.items()}
    pairwise = [
        list(map(relative_difference, one, other))
        for (*_, one), (*_, other) in zip(runs["trl"], runs["kit"], strict=True)
    ]
    seconds = {name: [one[0] for one in measured[1:]] for name, measured in runs.items()}
    faster, all_ratios = shared.ratios(seconds["trl"], seconds["kit"])
    lengths = DISTRIBUTIONS[cell.lengths](bench.options.longest)
    row = {
        "cell": str(cell),
        **asdict(cell),
        "seconds_trl": statistics.median(seconds["trl"]),
        "seconds_kit": statistics.median(seconds["kit"]),
        "time_ratio": faster,
        "time_ratios": all_ratios,
        "peak_trl": peaks["trl"],
        "peak_kit": peaks["kit"],
        "peak_ratio": peaks["kit"] / peaks["trl"],
        "gradient_difference": max(steps[0] for steps in pairwise),
        "second_step_difference": max(steps[-1] for steps in pairwise[1:]),
        "second_step_difference_double_sums": pairwise[0][-1],
        "mean_length": statistics.mean(lengths),
        "padded_per_real": max(lengths) * len(lengths) / sum(lengths),
    }
    for trainer in trainers.values():
        trainer.model = trainer.model_wrapped = None
    for model in bench.models.values():
        if "ref" in model.peft_config:
            model.delete_adapter("ref")
    return row


# Column of the tables -> (name in a row, format)
COLUMNS = {
    "lengths": ("lengths", ""),
    "signal": ("signal", ""),
    "beta": ("beta", "g"),
    "iterations": ("iterations", ""),
    "TRL s": ("seconds_trl", ".2f"),
    "kit s": ("seconds_kit", ".2f"),
    "faster": ("time_ratio", ".2f"),
    "memory": ("peak_ratio", ".2f"),
    "gradient": ("gradient_difference", ".0e"),
}


def cells_of(row: dict[str, object]) -> list[str]:
    """Return the table cells of a row; ratios end with an x."""
    return [
        f"{row[name]:{form}}{'x' if name.endswith('ratio') else ''}"
        for name, form in COLUMNS.values()
    ]


def second_steps(content: dict) -> str:
    """Return a sentence with the largest gradient differences of the cells with two iterations."""
    names = "gradient_difference", "second_step_difference", "second_step_difference_double_sums"
    first, second, exact = (max(row[name] for row in content["rows"]) for name in names)
    return (
        f"The gradients differ by at most {first:.0e} in the first step and {second:.0e} in the "
        f"second ({exact:.0e} with TRL's sums in float64)."
    )


def summary(content: dict) -> str:
    """Return the README's table, which has two rows."""
    rows = {row["cell"]: row for row in content["rows"]}
    head = ["learning step against stock TRL", "faster", "peak memory", "gradient differs by"]
    chosen = {
        "beta 0.05": rows["skewed/half/0.05/1"],
        "beta 0, half of the groups without signal": rows["skewed/half/0/1"],
    }
    lines = ([words, f"{r['time_ratio']:.1f}x", *cells_of(r)[-2:]] for words, r in chosen.items())
    return shared.markdown(head, lines)


def picture(content: dict) -> None:
    """Draw the speed-up of every cell with one iteration."""
    rows = [row for row in content["rows"] if row["iterations"] == 1]
    figure, axes = shared.start_pyplot().subplots(figsize=(7.2, 4.6), layout="constrained")
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


def write_report() -> None:
    """Write the tables and the picture."""
    short, long, second = (json.loads(path.read_text()) for path in (TABLE, LONG, SECOND))
    page = shared.ROOT / "docs" / "explanation" / "trainer.md"
    same = {name for name, (key, _) in COLUMNS.items() if len({r[key] for r in long["rows"]}) == 1}
    rows = [dict(zip(COLUMNS, cells_of(row), strict=True)) for row in long["rows"]]
    shown = [name for name in COLUMNS if name not in same]
    table = shared.markdown(shown, ([row[name] for name in shown] for row in rows))
    shared.write_part(page, "learn-step-long", table)
    shared.write_part(page, "learn-step-second", second_steps(second))
    shared.write_part(shared.ROOT / "README.md", "learn-step", summary(long))
    picture(short)


def main() -> None:
    parser = shared.parser_of(__doc__)
    add = parser.add_argument
    add("--cells", nargs="*", default=[""], help="any parts of LENGTHS/SIGNAL/BETA/ITERATIONS")
    add("--geometry", choices=["12m", *PUBLISHED], default="12m")
    add("--load-in-4bit", action="store_true")
    add("--checkpointing", action="store_true")
    add("--longest", type=int, default=2048, help="tokens of the longest completion")
    add("--pairs", type=int, default=5)
    add("--budget", type=int, help="tokens_per_micro_batch of the kit")
    add("--name", help="name of the file in benchmarks/results")
    add("--report", action="store_true", help="only write tables and picture, from the results")
    options = parser.parse_args()
    if options.report:
        write_report()
        return
    prepare()
    cells = [Cell(*one) for one in itertools.product(DISTRIBUTIONS, SIGNALS, (0.05, 0.0), (1, 2))]
    cells = [cell for cell in cells if any(part in str(cell) for part in options.cells)]
    bench = Bench(options)
    rows: list[dict[str, object]] = []
    for cell in cells:
        rows.append(compare(bench, cell, options.pairs))
        print(dict(zip(COLUMNS, cells_of(rows[-1]), strict=True)), flush=True)
        shared.write_result(options.name, longest=options.longest, pairs=options.pairs, rows=rows)


if __name__ == "__main__":
    main()
