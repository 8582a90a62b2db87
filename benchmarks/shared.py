"""Functions that the benchmarks share: arms in turn, results in JSON, intervals, tables, run files.

An arm is one of the variants that a benchmark compares, such as a trainer class.
"""

import argparse
import json
import math
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "scripts"))
from pages import write_part  # noqa: F401 # for reports

RESULTS = ROOT / "benchmarks" / "results"
SMOLLM2 = ROOT / ".cache" / "smollm2" / "SmolLM2-135M-Instruct.Q4_1.gguf"
PACKAGES = ("torch", "trl", "transformers", "peft", "unsloth", "vllm")
T_95 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}  # Student's t by number of seeds
Found = TypeVar("Found")


def parser_of(doc: str | None) -> argparse.ArgumentParser:
    """Return a parser whose description is the first line of a program's docstring."""
    return argparse.ArgumentParser(description=str(doc).splitlines()[0])


def in_turn(
    arms: Mapping[str, Callable[[], Found]],
    pairs: int,
    say: Callable[[str, Found], None] = lambda name, found: None,
) -> dict[str, list[Found]]:
    """Run the arms in turn, A B A B ..., and return the results of each arm.

    The first run of each arm is a warm-up, whose result is left out.

    Args:
        arms: Name of an arm -> function that runs it once.
        pairs: Number of runs of each arm after the warm-up.
        say: Function that is called with the name and the result of every run.
    """
    found: dict[str, list[Found]] = {name: [] for name in arms}
    for _ in range(pairs + 1):
        for name, arm in arms.items():
            found[name].append(arm())
            say(name, found[name][-1])
    return {name: all_found[1:] for name, all_found in found.items()}


def ratios(ones: Sequence[float], others: Sequence[float]) -> tuple[float, list[float]]:
    """Return the median of the ratios of each pair (one / other), and all of these ratios."""
    found = [one / other for one, other in zip(ones, others, strict=True)]
    return statistics.median(found), found


def interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the mean of the values of two to five seeds, and the ends of its 95% interval."""
    mean = statistics.fmean(values)
    half = T_95[len(values)] * statistics.stdev(values) / math.sqrt(len(values))
    return mean, mean - half, mean + half


def write_result(name: str | None, **content: Any) -> None:
    """Write a result to ``benchmarks/results/NAME.json``, with command, machine and versions.

    If there is no name, nothing is written. Benchmarks call this function after each row, so that
    the rows that are finished remain if the benchmark is stopped.
    """
    if not name:
        return
    from rloo_kit.machine.hardware import detect_hardware, installed_version

    hardware = detect_hardware()
    facts = {
        "command": " ".join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]]),
        "machine": f"{hardware.name}, {hardware.total_memory / 2**30:.0f} GiB",
        "versions": {package: installed_version(package) for package in PACKAGES},
    }
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.json").write_text(json.dumps(facts | content, indent=1) + "\n")


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a JSON Lines file, or [] if there is no such file."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def write_lines(path: str | Path, rows: Iterable[dict[str, Any]]) -> Path:
    """Write rows to a JSON Lines file, and return its path."""
    Path(path).write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return Path(path)


def append_line(path: Path, row: dict[str, Any]) -> None:
    """Append a row to a JSON Lines file."""
    with path.open("a") as file:
        file.write(json.dumps(row) + "\n")


def write_run(
    name: str, prompts: str, rows: Iterable[dict[str, Any]], held_out: int, **trainer: Any
) -> str:
    """Write a file of prompts, and a run file that trains on them; return the run file's name.

    Args:
        name: Name of the run.
        prompts: Name of the file of prompts.
        rows: The prompts.
        held_out: Number of held-out prompts, the last ones.
        **trainer: Settings of the section ``trainer`` that differ from the quickstart's.
    """
    import yaml

    from rloo_kit.config.run_file import EXAMPLES

    write_lines(prompts, rows)
    run = yaml.safe_load((EXAMPLES / "quickstart.yaml").read_text())
    run["data"] = {"prompts": prompts, "held_out": held_out}
    run["trainer"] |= trainer
    run["output_dir"] = f"runs/{name}"
    Path(f"{name}.yaml").write_text(yaml.safe_dump(run))
    return f"{name}.yaml"


def random_qwen3(
    shape: Mapping[str, int], *, checkpointing: bool, device: str = "cpu", **config: Any
) -> Any:
    """Return a Qwen3 with random weights and a LoRA adapter of rank 16."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from rloo_kit.config.run_file import PROJECTIONS

    torch.manual_seed(0)
    limits = {"max_position_embeddings": 32768, "tie_word_embeddings": True}
    model = Qwen3ForCausalLM(Qwen3Config(**{**limits, **shape, **config})).to(device)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.enable_input_require_grads()
    return get_peft_model(model, LoraConfig(r=16, lora_alpha=16, target_modules=list(PROJECTIONS)))


def markdown(columns: Sequence[str], rows: Iterable[Iterable[str]]) -> str:
    """Return a Markdown table."""
    head, *lines = (f"| {' | '.join(line)} |" for line in (columns, *rows))
    return "\n".join([head, "|---" * len(columns) + "|", *lines])


def start_pyplot() -> Any:
    """Return pyplot, set up so that equal results give identical SVG files."""
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = "rloo-kit"
    from matplotlib import pyplot

    return pyplot
