"""Completions of 1k to 16k tokens on a CPU: seconds and peak memory of every phase of a step.

    python benchmarks/long_context.py           # about ten minutes of one core
    python benchmarks/long_context.py --draw    # write picture and tables, from the JSON
    python benchmarks/long_context.py --only window   # measure one arm again, keep the others

All completions of a step have the same given length. A step has one prompt with two completions,
and each completion has a forward pass of its own. Each arm runs in a process of its own, which
trains one step at each length, the shortest first, with the kit's own trainer. Weights are random,
except those of the embedded model. Seconds are CPU time of one thread, so that other programs
hardly change them. Memory is the peak of the resident memory, minus the resident memory right
before the step.
"""

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from statistics import linear_regression
from types import SimpleNamespace
from typing import Any

import shared

RESULT = shared.RESULTS / "long_context_cpu.json"
PICTURE = shared.ROOT / "docs" / "pictures" / "long_context.svg"
PAGE = shared.ROOT / "docs" / "explanation" / "long_contexts.md"
LENGTHS = (1024, 2048, 4096, 8192, 16384)
ROWS = 2
WINDOW = 1024
MIB = 1024**2
Fit = dict[str, float]

SMALL = {
    # two layers, but the vocabulary of a real model: the logits of 16k tokens would take 2 GiB
    "vocab_size": 32_768, "hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64,
}  # fmt: skip


@dataclass(frozen=True)
class Arm:
    """One model and one way to train it."""

    name: str
    words: str  # for tables
    colour: str  # in the picture
    window: int | None = None
    attention: str = "sdpa"
    checkpointing: bool = False
    embedded: bool = False
    """Run the whole of ``rloo-kit train`` on the embedded model, which samples. The other arms get
    given completions."""
    beta: float = 0.05
    """Weight of the KL penalty. With 0 there is no reference pass, and here no pass for the old
    log-probabilities either."""
    lengths: tuple[int, ...] = LENGTHS


FEW = (1024, 4096, 16384)
MASKED = (1024, 4096, 8192)
ARMS = (
    Arm("full", "full attention", "#3b6ea5"),
    Arm("window", "window, in blocks", "#2a9d8f", WINDOW, "blocks", lengths=FEW),
    Arm("window_mask", "window, by a mask", "#9b2226", WINDOW, beta=0.0, lengths=MASKED),
    Arm(
        "full_checkpointing", "checkpointing", "#c4622d", checkpointing=True, beta=0.0, lengths=FEW
    ),
    Arm("embedded", "embedded model", "#6a4c93", embedded=True, lengths=LENGTHS[:3]),
)

PASSES = ("reference pass", "old pass", "learning")


# --- measuring -----------------------------------------------------------------------------------


class Clock:
    """Clock for the seconds and the peak memory of each phase.

    If a phase calls a function that is a phase itself, that function counts only as its own phase.
    """

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        self.seconds: Counter[str] = Counter()
        self.peaks: dict[str, int] = {}
        self.phase = "rest"
        self.since = time.process_time()

    def switch(self, phase: str) -> str:
        from rloo_kit.machine.cleanup import take_peak

        self.seconds[self.phase] += time.process_time() - self.since
        self.peaks[self.phase] = max(self.peaks.get(self.phase, 0), take_peak())
        before = self.phase
        self.phase = phase
        self.since = time.process_time()
        return before

    def watch(self, owner: type, name: str, phase: str) -> None:
        method = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            before = self.switch(phase)
            try:
                return method(*args, **kwargs)
            finally:
                self.switch(before)

        setattr(owner, name, timed)


def watched() -> Clock:
    """Patch the kit's trainer and recorder, and return the clock that measures their phases."""
    from rloo_kit.rloo.learner import Learner
    from rloo_kit.runs.recorder import RunRecorder
    from rloo_kit.training.policy import Policy
    from rloo_kit.training.sampler import Sampler, TrainingCompleter
    from rloo_kit.training.step_log import StepLog

    clock = Clock()
    for owner, name, phase in (
        (Sampler, "draw", "sampling"),
        (Policy, "reference_log_probs", "reference pass"),
        (Learner, "with_old", "old pass"),
        (Learner, "learn", "learning"),
        (TrainingCompleter, "_batch", "rewards"),
        (StepLog, "note_rollout", "records"),
        (RunRecorder, "write_report", "report"),
    ):
        clock.watch(owner, name, phase)
    return clock


def blocks_attention(
    module: Any,
    query: Any,
    key: Any,
    value: Any,
    attention_mask: Any = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[Any, None]:
    """Compute attention to the last ``sliding_window`` tokens, in time linear in the length.

    For a window, transformers gives its attention functions a mask of shape ``(T, T)``. Here the
    tokens are split into blocks of the window's size. A block of queries attends only to the keys
    of its own block and of the block before.

    Args:
        module: The attention layer.
        query: Tensor of shape ``(B, heads, T, D)``.
        key: Tensor of shape ``(B, kv heads, T, D)``.
        value: Tensor of the shape of ``key``.
        attention_mask: Ignored, since no row is padded on the left.
        scaling: Factor of the scores; None: 1 / sqrt(D).
        sliding_window: Number of tokens to which a query attends, its own token included.

    Returns:
        The output of shape ``(B, T, heads, D)``, and None in the place of attention weights.
    """
    import torch
    from torch.nn.functional import scaled_dot_product_attention as attend

    groups = module.num_key_value_groups
    key = key.repeat_interleave(groups, 1)
    value = value.repeat_interleave(groups, 1)
    # split, not sliced: the gradient of a slice is as large as the tensor it was cut from
    queries, keys, values = (part.split(sliding_window, 2) for part in (query, key, value))
    found = [attend(queries[0], keys[0], values[0], is_causal=True, scale=scaling)]
    for place in range(1, len(queries)):
        own = queries[place].size(2)
        at = torch.arange(own).unsqueeze(1) + sliding_window
        seen = torch.arange(sliding_window + own)
        found.append(
            attend(
                queries[place],
                torch.cat(keys[place - 1 : place + 1], 2),
                torch.cat(values[place - 1 : place + 1], 2),
                attn_mask=(seen <= at) & (seen > at - sliding_window),
                scale=scaling,
            )
        )
    return torch.cat(found, 2).transpose(1, 2).contiguous(), None


def make_model(arm: Arm) -> Any:
    """Return a Qwen3 with random weights and a LoRA adapter, for an arm."""
    from transformers import AttentionInterface

    AttentionInterface.register("blocks", blocks_attention)
    windows = {"use_sliding_window": True, "sliding_window": arm.window, "max_window_layers": 0}
    how = {"attn_implementation": arm.attention} | (windows if arm.window else {})
    return shared.random_qwen3(SMALL, checkpointing=arm.checkpointing, **how)


class Given:
    """Engine whose completions are random tokens of a given length."""

    name = "given completions"
    sync_seconds = 0.0

    def __init__(self, length: int) -> None:
        import torch

        self.adapter_dtype = torch.float32
        self.length = length

    def sync(self, model: Any) -> None:
        pass

    def generate(self, prompt_ids: list[list[int]], sampling: Any, seed: int) -> Any:
        import torch

        from rloo_kit.sampling.engine import Generations

        shape = (len(prompt_ids), self.length)
        ids = torch.randint(300, SMALL["vocab_size"], shape, generator=torch.manual_seed(0))
        return Generations(ids.tolist(), torch.zeros(shape).tolist())

    def sleep(self) -> None:
        pass

    def close(self) -> None:
        pass


def attention_seconds(arm: Arm, length: int) -> float:
    """Return the seconds of attention in a step, measured by the same calls on random tensors."""
    import torch
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    attend = blocks_attention if arm.attention == "blocks" else sdpa_attention_forward
    heads = SMALL["num_attention_heads"]
    kv_heads = SMALL["num_key_value_heads"]
    layer = SimpleNamespace(num_key_value_groups=heads // kv_heads, is_causal=True)
    query, key, value = (
        torch.randn(1, n, length, SMALL["head_dim"], requires_grad=True)
        for n in (heads, kv_heads, kv_heads)
    )

    def forward() -> Any:
        return attend(layer, query, key, value, None, sliding_window=arm.window)[0]

    started = time.process_time()
    with torch.no_grad():
        forward()
    middle = time.process_time()
    forward().sum().backward()
    alone = middle - started
    both = time.process_time() - middle
    passes = 2 * (arm.beta > 0) + arm.checkpointing  # reference pass, old pass; recomputation
    return ROWS * SMALL["num_hidden_layers"] * (passes * alone + both)


# --- an arm --------------------------------------------------------------------------------------


def step_of_random(arm: Arm, length: int, folder: str) -> None:
    """Train one step of a random model with the kit's trainer."""
    from datasets import Dataset
    from transformers import AutoTokenizer

    import rloo_kit as rk
    from rloo_kit.models.shape import TINY_THINKER

    args = rk.LeaveOneOutConfig(
        folder,
        max_steps=1,
        per_device_train_batch_size=ROWS,
        num_generations=ROWS,
        beta=arm.beta,
        max_completion_length=length,
        tokens_per_micro_batch=LENGTHS[0],
        canary=False,
        dry_run=False,
        gradient_checkpointing=arm.checkpointing,
        gradient_checkpointing_kwargs={"use_reentrant": False},
        bf16=False,
        save_strategy="no",
        disable_tqdm=True,
    )
    trainer = rk.LeaveOneOutTrainer(
        model=make_model(arm),
        reward_funcs=lambda completions, **_: [float(n) for n in range(len(completions))],
        args=args,
        train_dataset=Dataset.from_dict({"prompt": ["12 + 34"]}),
        processing_class=AutoTokenizer.from_pretrained(TINY_THINKER),
        engine=Given(length),
    )
    trainer.train()
    rk.release(trainer)


def step_of_embedded(length: int, folder: str) -> None:
    """Run ``rloo-kit train`` on the embedded model: one step, its record, adapter and report."""
    import rloo_kit as rk
    from rloo_kit.config.run_file import make_run_config

    rewards = [
        {
            "name": "soft_overlong",
            "max_completion_length": length,
            "soft_punish_cache": length // 5,
        },
        "repetition",
        {"name": "length_band", "low": 0, "high": length, "unit": "tokens"},
    ]
    content = {
        "model": {"max_seq_length": length + 64, "load_in_4bit": False},
        "data": {"prompts": "arithmetic", "num_prompts": 8, "held_out": 0},
        "rewards": rewards,
        "trainer": {
            "max_steps": 1,
            "per_device_train_batch_size": ROWS,
            "num_generations": ROWS,
            "max_completion_length": length,
            "generation_kwargs": {"min_new_tokens": length},
            "tokens_per_micro_batch": LENGTHS[0],
            "beta": 0.05,
        },
        "output_dir": f"{folder}/run",
    }
    rk.train(make_run_config(content), say=lambda line: None)


def run_arm(arm: Arm) -> None:
    """Measure an arm in this process, and print one line of JSON for every length."""
    import rloo_kit as rk

    rk.setup()
    from transformers.utils import logging

    from rloo_kit.machine.cleanup import measure

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    clock = watched()
    for length in (arm.lengths[0] // 8, *arm.lengths):  # the first one warms up
        with tempfile.TemporaryDirectory() as folder:
            rk.release()
            before = measure().resident
            clock.begin()
            if arm.embedded:
                step_of_embedded(length, folder)
            else:
                step_of_random(arm, length, folder)
            clock.switch("rest")
        if length < arm.lengths[0]:
            continue
        point: dict[str, Any] = {
            "length": length,
            "tokens": ROWS * length,
            "seconds": dict(clock.seconds),
            "over": {name: peak - before for name, peak in clock.peaks.items()},
            "before": before,
        }
        if not arm.embedded and (arm.window is None or arm.attention == "blocks"):
            point["attention"] = attention_seconds(arm, length)
        print(json.dumps(point), flush=True)


def in_child(arm: Arm) -> list[dict[str, Any]]:
    """Measure an arm in a child process, and return its results, one dict for every length."""
    command = [sys.executable, __file__, "--arm", arm.name]
    environment = {**os.environ, "RLOO_KIT_LIVE": "off", "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as child:
        points = []
        for line in child.stdout:
            if line.startswith('{"length"'):
                points.append(json.loads(line))
                print(arm.name, line, end="", flush=True)
    if child.returncode:
        raise SystemExit(f"the arm {arm.name} ended with code {child.returncode}")
    return points


# --- results -------------------------------------------------------------------------------------


def passes_of(point: dict[str, Any]) -> float:
    """Return the seconds of a step's passes of the policy and of its reference."""
    return sum(point["seconds"].get(name, 0.0) for name in PASSES)


def others_of(point: dict[str, Any]) -> float:
    """Return the seconds of these passes without attention."""
    return passes_of(point) - point["attention"]


def peak_of(point: dict[str, Any]) -> float:
    """Return the peak memory of these passes in MiB, minus the memory before the step."""
    return max(point["over"].get(name, 0) for name in PASSES) / MIB


def sampling_of(point: dict[str, Any]) -> float:
    return point["seconds"]["sampling"]


def fitted(points: list[dict[str, Any]], value: Callable[[dict[str, Any]], float]) -> Fit:
    """Fit a straight line to a quantity over the length by least squares.

    Returns:
        Dict with the slope per token, the constant, the line's largest error divided by the largest
        value, and the factor by which the quantity grows if the length doubles. This factor comes
        from the last two lengths: 2 means linear, 4 means quadratic.
    """
    lengths = [p["length"] for p in points]
    values = [value(p) for p in points]
    slope, constant = linear_regression(lengths, values)
    errors = [abs(v - slope * n - constant) for n, v in zip(lengths, values, strict=True)]
    factor = (values[-1] / values[-2]) ** (1 / math.log2(lengths[-1] / lengths[-2]))
    return {
        "per_token": slope,
        "constant": constant,
        "largest_error": max(errors) / max(values),
        "last_doubling": factor,
    }


def fits(arms: dict[str, list[dict[str, Any]]]) -> dict[str, dict[str, Fit]]:
    """Return the fits of every quantity of every arm."""
    found = {}
    for name, points in arms.items():
        found[name] = {"seconds": fitted(points, passes_of), "mib": fitted(points, peak_of)}
        if "attention" in points[0]:
            found[name]["seconds_without_attention"] = fitted(points, others_of)
    return found


# Panel -> (arm, words, value, style) of each curve
CURVES = {
    "seconds of the passes": [
        ("full", "full attention", passes_of, "-"),
        ("full", "... attention taken off", others_of, ":"),
        ("window", "window of 1,024", passes_of, "-"),
    ],
    "peak memory, MiB": [
        ("full", "full attention", peak_of, "-"),
        ("full_checkpointing", "... checkpointing", peak_of, "-"),
        ("window", "window of 1,024", peak_of, ":"),
        ("window_mask", "window as a mask", peak_of, "-"),
    ],
    "embedded model, seconds": [
        ("embedded", "sampling", sampling_of, "-"),
        ("embedded", "passes", passes_of, ":"),
    ],
}


def picture(arms: dict[str, list[dict[str, Any]]]) -> None:
    """Draw seconds and memory over the number of tokens; the thin dashed lines are the fits."""
    figure = shared.start_pyplot().figure(figsize=(10, 3.6), layout="constrained")
    for axis, (title, curves) in zip(figure.subplots(1, 3), CURVES.items(), strict=True):
        for name, words, value, style in curves:
            lengths = [point["length"] for point in arms[name]]
            colour = ARM[name].colour
            values = [value(point) for point in arms[name]]
            axis.plot(lengths, values, style, marker="o", markersize=3, color=colour, label=words)
            fit = fitted(arms[name], value)
            ends = [0, lengths[-1]]
            line = [fit["constant"] + fit["per_token"] * end for end in ends]
            axis.plot(ends, line, "--", linewidth=0.6, color=colour)
        axis.set(title=title, xlabel="tokens of a completion", xlim=(0, None), ylim=(0, None))
        ticks = [n for n in LENGTHS[1:] if n <= 2 * lengths[-1]]
        axis.set_xticks(ticks, [f"{n // 1024}k" for n in ticks])
        axis.spines[["top", "right"]].set_visible(False)
        axis.legend(frameon=False, fontsize=8)
    figure.savefig(PICTURE, metadata={"Date": None})


def passes_table(arms: dict[str, list[dict[str, Any]]]) -> str:
    """Return a Markdown table: passes at the longest length, of arms with measured attention."""
    head = "model", "reference", "old", "learning", "attention", "without it, ms a token", "MiB"
    rows = []
    for name, points in arms.items():
        point = points[-1]
        if not point.get("attention"):
            continue
        took = {**point["seconds"], "attention": point["attention"]}
        names = (*PASSES, "attention")
        cells = [f"{took[n]:.1f}" if (took.get(n) or 0) > 0.05 else "" for n in names]
        cells.append(f"{others_of(point) / point['tokens'] * 1e3:.2f}")
        cells.append(f"{peak_of(point):,.0f}")
        rows.append([ARM[name].words, *cells])
    return shared.markdown(head, rows)


def growth_table(found: dict[str, dict[str, Fit]]) -> str:
    """Return a Markdown table of the factors by which a doubling of the length multiplies."""
    head = "model", "seconds", "without attention", "MiB at k thousand tokens", "off by"
    rows = []
    for name, fit in found.items():
        quantities = ("seconds", "seconds_without_attention")
        cells = [f"{fit[n]['last_doubling']:.2f}x" if n in fit else "" for n in quantities]
        memory = fit["mib"]
        cells.append(f"{memory['constant']:.0f} + {1000 * memory['per_token']:.0f} k")
        cells.append(f"{memory['largest_error']:.0%}")
        rows.append([ARM[name].words, *cells])
    return shared.markdown(head, rows)


def draw() -> None:
    """Write the picture, and the tables of the page."""
    arms = json.loads(RESULT.read_text())["arms"]
    picture(arms)
    shared.write_part(PAGE, "long-passes", passes_table(arms))
    shared.write_part(PAGE, "long-growth", growth_table(fits(arms)))


ARM = {arm.name: arm for arm in ARMS}


def main() -> None:
    parser = shared.parser_of(__doc__)
    parser.add_argument("--only", nargs="+", choices=list(ARM), help="measure these arms again")
    parser.add_argument("--draw", action="store_true", help="only write picture and tables")
    parser.add_argument("--arm", choices=list(ARM), help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.arm:
        run_arm(ARM[asked.arm])
        return
    if asked.draw:
        draw()
        return
    arms = json.loads(RESULT.read_text())["arms"] if asked.only and RESULT.exists() else {}
    for name in asked.only or ARM:
        arms[name] = in_child(ARM[name])
        measured = {name: arms[name] for name in ARM if name in arms}
        shared.write_result(RESULT.stem, model=SMALL, rows=ROWS, fits=fits(measured), arms=measured)
    print(growth_table(fits(arms)))
    if set(arms) == set(ARM):
        draw()


if __name__ == "__main__":
    main()
