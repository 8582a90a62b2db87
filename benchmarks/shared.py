"""Arms in turn, results in JSON, intervals and pictures, the same way in every benchmark."""

import json
import math
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "scripts"))
from pages import write_part  # noqa: F401 # for reports

RESULTS = ROOT / "benchmarks" / "results"
PACKAGES = ("torch", "trl", "transformers", "peft", "unsloth", "vllm")
T_95 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}  # of Student's t, by the number of seeds
Found = TypeVar("Found")


def in_turn(
    arms: Mapping[str, Callable[[], Found]],
    pairs: int,
    say: Callable[[str, Found], None] = lambda name, found: None,
) -> dict[str, list[Found]]:
    """Run the arms A B A B ... and return what each found; the first of each warms up."""
    found: dict[str, list[Found]] = {name: [] for name in arms}
    for _ in range(pairs + 1):
        for name, arm in arms.items():
            found[name].append(arm())
            say(name, found[name][-1])
    return {name: all_found[1:] for name, all_found in found.items()}


def ratios(ones: Sequence[float], others: Sequence[float]) -> tuple[float, list[float]]:
    """Return the median of the ratios pair by pair, and all of them."""
    found = [one / other for one, other in zip(ones, others, strict=True)]
    return statistics.median(found), found


def interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the mean of two to five seeds, and the ends of its 95% interval."""
    mean = statistics.fmean(values)
    half = T_95[len(values)] * statistics.stdev(values) / math.sqrt(len(values))
    return mean, mean - half, mean + half


def write_result(name: str | None, **content: Any) -> None:
    """Write a result with command, machine and versions; without a name nothing is written.

    It is called after each row, so that a benchmark that is stopped leaves the rows before.
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


def start_pyplot() -> Any:
    """Return pyplot for files in SVG; the same results give the same file."""
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = "rloo-kit"
    from matplotlib import pyplot

    return pyplot
