"""The learning step: rloo-kit against stock TRL, same completions, same gradient, one process.

    python benchmarks/learn_step.py                      # every cell: hours on two CPU cores
    python benchmarks/learn_step.py --longest 256        # shorter completions: minutes a pair
    python benchmarks/learn_step.py --cells skewed/half  # some of them
    python benchmarks/learn_step.py --geometry qwen3-0.6b --load-in-4bit   # on a GPU
    python benchmarks/learn_step.py --report             # tables and picture from the results

Both arms get the completions of one length distribution and the same scores, and run in the order
A B A B (A: TRL's RLOOTrainer, B: LeaveOneOutTrainer) from the same adapter. What is timed is
``training_step`` without generation: log-prob passes, advantages, loss and backward. The weights
are random. Stock TRL needs Unsloth's kernel on a CPU, so Unsloth is imported in both arms. The
first pair is not timed: it warms up, and its peaks of memory are the ones reported.
"""

import argparse
import gc
import itertools
import json
import random
import statistics
import tempfile
import time
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path

from shared import RESULTS, ROOT, ratios, start_pyplot, write_part, write_result

import rloo_kit as rk

environment = rk.setup()

import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoTokenizer,
    PrinterCallback,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.utils import logging
from trl import RLOOConfig, RLOOTrainer

from rloo_kit.config.run_file import PROJECTIONS
from rloo_kit.live.view import LiveView
from rloo_kit.machine.cleanup import take_peak
from rloo_kit.models.shape import TINY_THINKER
from rloo_kit.training.trl_step import route_trl_lm_head

TABLE = RESULTS / "learn_step_cpu.json"
LONG = RESULTS / "learn_step_cpu_long.json"
# One pair of every cell with two iterations, gradients of both steps
SECOND = RESULTS / "learn_step_cpu_second_step.json"
PICTURE = ROOT / "docs" / "pictures" / "learn_step.svg"
GENERATIONS = 4
PROMPTS = 4
# Rows of a micro-batch in the stock arm: per_device_train_batch_size
MICRO_BATCH = 4

GEOMETRIES = {
    # 12 million parameters in the proportions of Qwen3-4B: the head is a tenth of the weights
    "12m": {
        "vocab_size": 3072, "hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 6,
        "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 64,
    },
    "qwen3-0.6b": {
        "vocab_size": 151936, "hidden_size": 1024, "intermediate_size": 3072,
        "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8,
        "head_dim": 128,
    },
    "qwen3-4b": {
        "vocab_size": 151936, "hidden_size": 2560, "intermediate_size": 9728,
        "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8,
        "head_dim": 128,
    },
}  # fmt: skip


def uniform(longest: int) -> list[int]:
    """Every completion within a tenth of the same length."""
    rng = random.Random(0)
    return [round(longest / 3 * rng.uniform(0.9, 1.1)) for _ in range(PROMPTS * GENERATIONS)]


def skewed(longest: int) -> list[int]:
    """As thinking runs are: log-normal, about three padded tokens for each real one."""
    rng = random.Random(3)
    raw = [rng.lognormvariate(0.0, 0.9) for _ in range(PROMPTS * GENERATIONS)]
    return [max(4, round(length / max(raw) * longest)) for length in raw]


def outlier(longest: int) -> list[int]:
    """One completion ten times as long as the others."""
    rng = random.Random(2)
    short = [round(longest / 10 * rng.uniform(0.9, 1.1)) for _ in range(PROMPTS * GENERATIONS - 1)]
    return [*short[:13], longest, *short[13:]]


DISTRIBUTIONS = {"uniform": uniform, "skewed": skewed, "outlier": outlier}
SIGNALS = {"all": 1.0, "half": 0.5, "none": 0.0}


@dataclass(frozen=True)
class Cell:
    """One setting of the comparison."""

    lengths: str
    signal: str
    beta: float
    iterations: int

    def __str__(self) -> str:
        return f"{self.lengths}/{self.signal}/{self.beta:g}/{self.iterations}"


@dataclass
class Measured:
    """One run of one arm."""

    seconds: float
    peak: int
    gradients: list[torch.Tensor]


def make_model(
    geometry: str, load_in_4bit: bool, checkpointing: bool, device: str
) -> torch.nn.Module:
    """A random Qwen3 with a LoRA adapter of rank 16 that already does something."""
    torch.manual_seed(0)
    config = Qwen3Config(
        **GEOMETRIES[geometry], max_position_embeddings=32768, tie_word_embeddings=True
    )
    if load_in_4bit:  # as users load it: through Unsloth where it can
        folder = Path(tempfile.gettempdir()) / f"learn_step_{geometry}"
        if not (folder / "tokenizer.json").exists():
            with torch.device(device):
                Qwen3ForCausalLM(config).bfloat16().save_pretrained(folder)
            AutoTokenizer.from_pretrained(TINY_THINKER).save_pretrained(folder)
        model, _ = rk.load_model(str(folder), max_seq_length=8192, load_in_4bit=True)
        model = rk.attach_lora(model, r=16, lora_alpha=16, use_gradient_checkpointing=checkpointing)
    else:
        model = Qwen3ForCausalLM(config).to(device)
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
            model.enable_input_require_grads()
        model = get_peft_model(
            model, LoraConfig(r=16, lora_alpha=16, target_modules=list(PROJECTIONS))
        )
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.02)
    return model


def lengths_of(cell: Cell, longest: int) -> list[int]:
    """Lengths of the completions, group after group."""
    lengths = DISTRIBUTIONS[cell.lengths](longest)
    random.Random(3).shuffle(lengths)
    return lengths


def completions_of(cell: Cell, longest: int, vocabulary: int, eos: int) -> list[list[int]]:
    """Random tokens of those lengths, each ended by EOS."""
    rng = random.Random(3)
    lengths = lengths_of(cell, longest)
    return [[rng.randrange(5, vocabulary) for _ in range(n - 1)] + [eos] for n in lengths]


def scores_of(cell: Cell, longest: int) -> list[float]:
    """Scores that differ in as many groups as asked for, and there only.

    Which groups: those that together hold nearest to their share of all tokens, so that the result
    does not hang on whether the longest completion is among them.
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
    """``base`` that keeps gradients and counts the seconds of its steps."""

    class Timed(base):
        seconds = 0.0

        def training_step(self, *args: object, **kwargs: object) -> torch.Tensor:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            start = time.perf_counter()
            loss = super().training_step(*args, **kwargs)
            if torch.cuda.is_available():
                torch.cuda.synchronize()
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
    """TRL's, with recorded completions in the place of generation."""

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
        self.models = {
            name: make_model(
                options.geometry, options.load_in_4bit, options.checkpointing, self.device
            )
            for name in ("trl", "kit")
        }
        self.start = {
            name: {n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad}
            for name, model in self.models.items()
        }
        self.vocabulary = GEOMETRIES[options.geometry]["vocab_size"]

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
            "optim": "sgd",  # Adam steps by the sign at first, and so turns rounding into steps
            "max_grad_norm": 1e9,
            "save_strategy": "no",
            "report_to": "none",
            "bf16": options.load_in_4bit,
            "gradient_checkpointing": options.checkpointing,
            "gradient_checkpointing_kwargs": {"use_reentrant": False},
            "logging_strategy": "no",
            "disable_tqdm": True,
            "epsilon": 1e6,  # a random adapter leaves the trust region in one step
            "use_cpu": self.device == "cpu",
        }
        if not options.load_in_4bit:
            common["mixed_precision"] = "no"
        scores = scores_of(cell, options.longest)
        rows = PROMPTS * GENERATIONS
        prompts = ["12 + 34" for _ in range(PROMPTS)]
        made = {}
        for name, base, config in (
            ("trl", Recorded, RLOOConfig),
            ("kit", rk.LeaveOneOutTrainer, rk.LeaveOneOutConfig),
        ):
            self.place(name, noise=0.0)  # where the reference, a copy of now, belongs
            extra = {}
            if name == "kit":
                extra = {"dry_run": False, "tokens_per_micro_batch": options.budget}
            settings = {k: v for k, v in common.items() if k != "mixed_precision"}
            args = config(output_dir=tempfile.gettempdir(), **settings, **extra)
            args.mixed_precision = common.get("mixed_precision", args.mixed_precision)
            trainer = arm(base)(
                model=self.models[name],
                reward_funcs=lambda completions, **_: scores,
                args=args,
                train_dataset=Dataset.from_dict({"prompt": prompts * 4}),
                processing_class=self.tokenizer,
            )
            for callback in (PrinterCallback, LiveView):
                trainer.remove_callback(callback)
            trainer.recorded = completions_of(
                cell, options.longest, self.vocabulary, self.tokenizer.eos_token_id
            )
            assert len(trainer.recorded) == rows
            if name == "kit":
                recorded = trainer.recorded
                trainer.sampler.generate = lambda _, ids=recorded: [[*one] for one in ids]
            made[name] = trainer
        return made

    def place(self, name: str, noise: float) -> None:
        """Put the adapter of one arm at its starting weights plus so much noise."""
        for parameter_name, parameter in self.models[name].named_parameters():
            if parameter_name in self.start[name]:
                start = self.start[name][parameter_name]
                generator = torch.Generator(start.device).manual_seed(len(parameter_name))
                step = torch.randn(start.shape, generator=generator, device=start.device)
                parameter.data = start + noise * step

    def run(self, name: str, trainer: object, *, trim: bool = False) -> Measured:
        """One optimizer step per iteration; ``trim`` starts from as little memory as possible."""
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
        return Measured(trainer.seconds, peak, trainer.gradients)


def relative_difference(a: torch.Tensor, b: torch.Tensor) -> float:
    """Return the norm of the difference over the norm of ``a``; where that is 0, of ``b``."""
    size = float(a.norm())
    return float((a - b).norm()) / size if size else float(b.norm())


def compare(bench: Bench, cell: Cell, pairs: int) -> dict[str, object]:
    """Run A B A B and return ratios (stock over kit) and the largest gradient differences.

    A second iteration has a ratio other than 1, and TRL takes it from the difference of two sums of
    a completion's log-probabilities: at 2,000 nats float32 is 1e-4 apart, and so are gradients. The
    first pair is run with those sums in float64, to tell that from a difference of method.
    """
    trainers = bench.trainers(cell)
    runs: dict[str, list[Measured]] = {"trl": [], "kit": []}
    for pair in range(pairs + 1):  # the first pair warms up, and shows the peaks
        trainers["trl"].double_sums = pair == 0
        for name, trainer in trainers.items():
            runs[name].append(bench.run(name, trainer, trim=pair == 0))
    peaks = {name: measured[0].peak for name, measured in runs.items()}
    pairwise = [
        [relative_difference(a, b) for a, b in zip(one.gradients, other.gradients, strict=True)]
        for one, other in zip(runs["trl"], runs["kit"], strict=True)
    ]
    trl = runs["trl"][1:]
    kit = runs["kit"][1:]
    faster, all_ratios = ratios([run.seconds for run in trl], [run.seconds for run in kit])
    lengths = DISTRIBUTIONS[cell.lengths](bench.options.longest)
    row = {
        "cell": str(cell),
        **asdict(cell),
        "seconds_trl": statistics.median(run.seconds for run in trl),
        "seconds_kit": statistics.median(run.seconds for run in kit),
        "time_ratio": faster,
        "time_ratios": all_ratios,
        "peak_trl": peaks["trl"],
        "peak_kit": peaks["kit"],
        "gradient_difference": max(steps[0] for steps in pairwise),
        "second_step_difference": max(steps[-1] for steps in pairwise[1:]),
        "second_step_difference_double_sums": pairwise[0][-1],
        "mean_length": statistics.mean(lengths),
        "padded_per_real": max(lengths) * len(lengths) / sum(lengths),
    }
    row["peak_ratio"] = row["peak_kit"] / row["peak_trl"]
    for trainer in trainers.values():
        trainer.model = trainer.model_wrapped = None
    for model in bench.models.values():
        if "ref" in model.peft_config:
            model.delete_adapter("ref")
    return row


HEADER = (
    "cell                      TRL s    kit s   ratio  TRL GiB  kit GiB  memory   gradient"
    "   2nd step  (float64)"
)


def line(row: dict[str, object]) -> str:
    gib = 2**30
    return (
        f"{row['cell']:<22} {row['seconds_trl']:>8.2f} {row['seconds_kit']:>8.2f}"
        f" {row['time_ratio']:>6.2f}x {row['peak_trl'] / gib:>8.2f} {row['peak_kit'] / gib:>8.2f}"
        f" {row['peak_ratio']:>7.2f} {row['gradient_difference']:>10.1e}"
        f" {row['second_step_difference']:>10.1e}"
        f" {row['second_step_difference_double_sums']:>10.1e}"
    )


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
    figure, axes = start_pyplot().subplots(figsize=(7.2, 4.6), layout="constrained")
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
    write_part(ROOT / "docs" / "explanation" / "trainer.md", "learn-step-long", table(long))
    write_part(
        ROOT / "docs" / "explanation" / "trainer.md", "learn-step-second", second_steps(second)
    )
    write_part(ROOT / "README.md", "learn-step", summary(long))
    picture(short)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--cells", nargs="*", default=[""], help="parts of LENGTHS/SIGNAL/BETA/ITERATIONS"
    )
    parser.add_argument("--geometry", choices=GEOMETRIES, default="12m")
    parser.add_argument("--load-in-4bit", action="store_true")
    parser.add_argument("--checkpointing", action="store_true")
    parser.add_argument(
        "--longest", type=int, default=2048, help="tokens of the longest completion"
    )
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--budget", type=int, help="tokens_per_micro_batch of the kit")
    parser.add_argument("--name", help="of the file in benchmarks/results")
    parser.add_argument("--report", action="store_true", help="tables and picture from results")
    options = parser.parse_args()
    if options.report:
        write_report()
        return
    warnings.filterwarnings("ignore")
    logging.set_verbosity_error()
    route_trl_lm_head()
    cells = [
        Cell(lengths, signal, beta, iterations)
        for lengths in DISTRIBUTIONS
        for signal in SIGNALS
        for beta in (0.05, 0.0)
        for iterations in (1, 2)
    ]
    cells = [cell for cell in cells if any(part in str(cell) for part in options.cells)]
    bench = Bench(options)
    print(HEADER)
    rows: list[dict[str, object]] = []
    for cell in cells:
        rows.append(compare(bench, cell, options.pairs))
        print(line(rows[-1]), flush=True)
        write_result(options.name, longest=options.longest, pairs=options.pairs, rows=rows)


if __name__ == "__main__":
    main()
