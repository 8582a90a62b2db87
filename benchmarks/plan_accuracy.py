"""Planned memory against the measured peak of ``rloo-kit train`` processes, on a CPU.

    python benchmarks/plan_accuracy.py                     # all runs, into benchmarks/results/
    python benchmarks/plan_accuracy.py --only tiny-4bit    # one run, keep the other results
    python benchmarks/plan_accuracy.py --again             # new plans, keep the measured peaks

Each run is a process of its own with two steps. Weights are random, and all completions have full
length, so that the planned worst case is what happens. The peak is the largest of two measurements:
the kernel's (VmHWM, polled) and the trainer's in each step. The second step matters, because the
first one leaves memory in the heap.

``python benchmarks/plan_accuracy.py --libraries`` measures LIBRARIES (planning/memory.py), the
memory that a process still holds after it has trained and released everything.
"""

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from shared import RESULTS, ROOT, parser_of, read_lines, write_part, write_result

RESULT = RESULTS / "plan_accuracy_cpu.json"
PAGE = ROOT / "docs" / "how-to" / "plan.md"
MIB = 1024**2
TOKENIZER = ("chat_template.jinja", "tokenizer.json", "tokenizer_config.json")

# SmolLM2-135M, the same with six layers, and a small Qwen3. Each has: model type, hidden size,
# intermediate size, layers, heads, key-value heads, vocabulary. Heads have 64 dimensions.
GEOMETRIES = {
    "135M": ("llama", 576, 1536, 30, 9, 3, 49_152),
    "50M": ("llama", 576, 1536, 6, 9, 3, 49_152),
    "35M": ("qwen3", 512, 1536, 8, 8, 4, 8192),
}


def settings(model, bits, rows, length, *others):
    return [
        f"model.name={model}",
        f"model.load_in_4bit={'true' if bits == 4 else 'false'}",
        "model.max_seq_length=512",
        "data.held_out=0",
        "trainer.max_steps=2",
        'trainer.save_strategy="no"',
        f"trainer.per_device_train_batch_size={rows}",
        f"trainer.max_completion_length={length}",
        f"trainer.generation_kwargs={{min_new_tokens: {length}}}",
        *(other if "." in other else f"trainer.{other}" for other in others),
    ]


# Name -> settings that override examples/quickstart.yaml
RUNS = {
    "tiny-4bit": settings("tiny-thinker", 4, 64, 48),
    "tiny-4bit-long": settings("tiny-thinker", 4, 128, 128),
    "tiny-bf16-large": settings("tiny-thinker", 16, 256, 64),
    "35M-bf16": settings("35M", 16, 64, 48, "tokens_per_micro_batch=2048"),
    "35M-4bit": settings("35M", 4, 32, 64, "tokens_per_micro_batch=4096"),
    "50M-bf16": settings("50M", 16, 32, 24),
    "50M-4bit": settings("50M", 4, 16, 64, "tokens_per_micro_batch=2048"),
    "50M-bf16-long": settings("50M", 16, 8, 160, "tokens_per_micro_batch=1024"),
    "135M-bf16": settings("135M", 16, 16, 24),
    "135M-bf16-checkpointing": settings("135M", 16, 16, 32, "gradient_checkpointing=true"),
    "135M-4bit": settings("135M", 4, 8, 16, "tokens_per_micro_batch=1024"),
    "tiny-4bit-transformers": settings("tiny-thinker", 4, 128, 96, "model.backend=transformers"),
    "35M-bf16-checkpointing": settings("35M", 16, 16, 96, "gradient_checkpointing=true"),
    "50M-bf16-transformers": settings("50M", 16, 16, 64, "model.backend=transformers"),
    "135M-4bit-long": settings("135M", 4, 8, 96, "tokens_per_micro_batch=2048"),
    "35M-4bit-batch": settings("35M", 4, 64, 32, "tokens_per_micro_batch=2048"),
    "50M-4bit-batch": settings("50M", 4, 16, 96, "tokens_per_micro_batch=4096"),
    "50M-bf16-checkpointing": settings("50M", 16, 16, 96, "gradient_checkpointing=true"),
}


def make_model(geometry, folder):
    """Write a model with random weights and the embedded model's tokenizer to a folder."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    kind, hidden, inner, layers, heads, kv_heads, vocabulary = GEOMETRIES[geometry]
    config = AutoConfig.for_model(
        kind,
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=64,
        vocab_size=vocabulary,
        eos_token_id=258,
        pad_token_id=256,
        bos_token_id=None,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.generation_config.eos_token_id = 258
    model.generation_config.pad_token_id = 256
    model.save_pretrained(folder)
    for name in TOKENIZER:
        shutil.copy(ROOT / "rloo_kit" / "assets" / "tiny-thinker" / name, folder)


def with_model(name, scratch):
    """Return a run's settings with the folder of its model, which is made if it is missing."""
    model = RUNS[name][0].partition("=")[2]
    if model == "tiny-thinker":
        return RUNS[name]
    folder = scratch / model
    if not folder.is_dir():
        make_model(model, folder)
    return [f"model.name={folder}", *RUNS[name][1:]]


def planned(overrides):
    from rloo_kit.job import read_config
    from rloo_kit.planning.planner import make_plan

    config, base = read_config("quickstart", overrides)
    return make_plan(config, base=base)


def high_water(pid):
    """Return the peak resident memory (VmHWM) of a process in bytes, or 0 if it has ended."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
        return int(status.split("VmHWM:")[1].split()[0]) * 1024
    except (OSError, IndexError):
        return 0


def measured(overrides, folder):
    """Train, and return the peak resident memory in bytes and the printed text."""
    command = [sys.executable, "-m", "rloo_kit", "train", "quickstart"]
    for setting in [*overrides, f"output_dir={folder}"]:
        command += ["--set", setting]
    log = folder.with_suffix(".log")
    peak = 0
    with open(log, "w") as output:
        process = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT)
        while process.poll() is None:
            peak = max(peak, high_water(process.pid))
            time.sleep(0.02)
    text = log.read_text()
    if process.returncode:
        raise SystemExit(text[-2000:])
    rows = read_lines(folder / "metrics.jsonl")
    steps = [row["memory/peak_gib"] * 1024**3 for row in rows if "memory/peak_gib" in row]
    return int(max([peak, *steps])), text


def libraries():
    """Print for each backend what a process still holds after it has released everything."""
    for backend in ("unsloth", "transformers"):
        with tempfile.TemporaryDirectory() as scratch:
            overrides = [*RUNS["tiny-4bit"], f"model.backend={backend}"]
            _, text = measured(overrides, Path(scratch) / "run")
        line = next(line for line in text.splitlines() if "left in the process" in line)
        print(f"{backend}: {line}")


def compare(name, scratch):
    overrides = with_model(name, scratch)
    started = time.perf_counter()
    peak, _ = measured(overrides, scratch / f"run-{name}")
    seconds = round(time.perf_counter() - started, 1)
    row = {"name": name, "settings": RUNS[name], "measured": peak, "seconds": seconds}
    return planned_again(row, scratch)


def known():
    """Return the rows of the results."""
    return json.loads(RESULT.read_text())["rows"] if RESULT.is_file() else []


def planned_again(row, scratch):
    """Return a row with a new plan for its measured peak."""
    plan = planned(with_model(row["name"], scratch))
    error = plan.peak_bytes / row["measured"] - 1
    return row | {"planned": plan.peak_bytes, "error": error, "phase": plan.memory.phase}


def row_of(found):
    return (
        f"{found['name']:<26} planned {found['planned'] / MIB:6,.0f} MiB  "
        f"measured {found['measured'] / MIB:6,.0f} MiB  {found['error']:+6.1%}"
    )


def write(rows):
    largest = max(abs(row["error"]) for row in rows)
    threads = os.environ.get("OMP_NUM_THREADS")
    write_result(RESULT.stem, threads=threads, largest_error=largest, rows=rows)


def write_table(rows):
    """Put the errors into docs/how-to/plan.md."""
    errors = {row["name"]: abs(row["error"]) for row in rows}
    median = statistics.median(errors.values())
    name, largest = max(errors.items(), key=lambda one: one[1])
    line = f"{len(rows)} runs: median error {median:.1%}, largest {largest:.1%} ({name})."
    write_part(PAGE, "plan-accuracy", line)
    print(line)


def main():
    parser = parser_of(__doc__)
    parser.add_argument("--only", nargs="+", choices=sorted(RUNS), help="only these runs")
    parser.add_argument(
        "--again", action="store_true", help="only plan again, for the measured peaks"
    )
    parser.add_argument("--libraries", action="store_true", help="only measure the libraries")
    options = parser.parse_args()
    if options.libraries:
        libraries()
        return
    rows = {row["name"]: row for row in known() if options.again or options.only}
    with tempfile.TemporaryDirectory(prefix="plan-accuracy-") as folder:
        scratch = Path(folder)
        wanted = rows if options.again else options.only or RUNS
        for name in [name for name in RUNS if name in wanted]:
            row = planned_again(rows[name], scratch) if options.again else compare(name, scratch)
            rows[name] = row
            print(row_of(row), flush=True)
            write([rows[known] for known in RUNS if known in rows])
    write_table([rows[name] for name in RUNS if name in rows])


if __name__ == "__main__":
    main()
