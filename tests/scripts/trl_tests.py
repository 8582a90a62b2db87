"""TRL's own tests of RLOOTrainer, run on TRL's class and on the kit's: one table of both.

    python tests/scripts/trl_tests.py TRL_CHECKOUT/tests/test_rloo_trainer.py
    python tests/scripts/trl_tests.py TRL_CHECKOUT/tests/test_grpo_trainer.py

Of GRPOTrainer's tests, only those of tools and environments run, which RLOOTrainer does not have.

The test file is TRL's (Apache 2.0, of the installed version) and is not part of this repository.
Models and data sets are made once (``trl_models.py``); nothing is downloaded. The classes are
``trl``, ``kit`` (the kit's trainer with TRL's ``RLOOConfig``, so that only the class is replaced),
``kit-config`` (with ``LeaveOneOutConfig`` too) and ``kit-trl`` (with ``step: trl`` too).
"""

import argparse
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

from trl_models import END, IDS, PAD, make_all, make_callers

CLASSES = ("trl", "kit", "kit-config", "kit-trl")
AROUND = ("__init__.py", "conftest.py", "testing_constants.py", "testing_utils.py")
"""Files that TRL's test files import from their folder."""
CALLS = "(tools or tool_calls or environment) and not multimodal"
"""Expression of pytest's -k that selects the tests of GRPOTrainer."""
QWEN_IDS = {151643: PAD, 151645: END}
HERE = Path(__file__).parent
FOLDER = HERE.parents[1] / ".cache" / "trl"


@dataclass(frozen=True)
class Outcome:
    """How a test ended: ``passed``, ``failed``, ``error`` or ``skipped``, and why."""

    kind: str
    why: str = ""

    def __str__(self) -> str:
        return self.kind


def run_all(
    file: Path, classes: list[str], selected: str | None = None, backend: str = "transformers"
) -> dict[str, dict[str, Outcome]]:
    """Make the missing models and data sets, and run TRL's file on each class."""
    folder = FOLDER
    if "grpo" in file.name:
        folder = FOLDER.with_name("trl_callers")
        selected = selected or CALLS
        make_callers(folder)
    else:
        make_all(folder)
    return {kind: run(file.resolve(), folder, kind, selected, backend) for kind in classes}


def run(
    file: Path, folder: Path, kind: str, selected: str | None, backend: str
) -> dict[str, Outcome]:
    """Run TRL's file on one of ``CLASSES``; return the outcome of each test."""
    env = os.environ | {
        "HF_HUB_CACHE": str(folder / "hub"),
        "HF_HUB_OFFLINE": "1",
        "HF_MODULES_CACHE": str(folder / "modules"),
        "HF_DATASETS_CACHE": str(folder / "prepared"),
        "CUDA_VISIBLE_DEVICES": "-1",
        "OMP_NUM_THREADS": "1",  # small tensors: a second thread only waits
        "PYTHONPATH": os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")]),
        "TRL_TESTS_FOLDER": str(folder),
        "TRL_TESTS_CLASS": kind,
    }
    if backend == "transformers":
        env["UNSLOTH_DISABLE_CPU_FALLBACK"] = "1"
    with tempfile.TemporaryDirectory() as place:
        results = Path(place, "results.xml")
        copied = Path(place, "trl_own")
        copied.mkdir()
        for one in (file, *(file.parent / name for name in AROUND)):
            text = one.read_text()
            (copied / one.name).write_text(_with_local_ids(text) if folder == FOLDER else text)
        options = ["-q", "--tb=short", "-W", "ignore", "-p", "trl_plugin", "-p", "no:cacheprovider"]
        options += [f"--rootdir={place}", "-c", os.devnull, f"--basetemp={place}/tmp"]
        options += [f"--junitxml={results}", *(["-k", selected] if selected else [])]
        command = [sys.executable, "-m", "pytest", *options, str(copied)]
        subprocess.run(command, env=env, cwd=place, check=False)
        return read(results)


def _with_local_ids(text: str) -> str:
    """Return a test file with the ids of Qwen's tokens replaced by those of the local tokenizer."""
    for theirs, ours in QWEN_IDS.items():
        text = text.replace(str(theirs), str(IDS[ours]))
    return text


def read(results: Path) -> dict[str, Outcome]:
    """Return the outcomes in a file of JUnit's format."""
    outcomes = {}
    for case in ElementTree.parse(results).iter("testcase"):
        kinds = {"failure": "failed", "error": "error", "skipped": "skipped"}
        ends = [(kinds[one.tag], one.get("message", "")) for one in case if one.tag in kinds]
        kind, why = ends[0] if ends else ("passed", "")
        outcomes[case.get("name", "")] = Outcome(kind, " ".join(why.split()))
    return outcomes


def table(runs: dict[str, dict[str, Outcome]]) -> list[str]:
    """Return a Markdown table, a line for each test, and the sums."""
    names = list(dict.fromkeys(name for outcomes in runs.values() for name in outcomes))
    lines = [f"| test | {' | '.join(runs)} | why |", "|---" * (len(runs) + 2) + "|"]
    missing = Outcome("missing")
    for name in names:
        ends = [outcomes.get(name, missing) for outcomes in runs.values()]
        why = next((end.why for end in reversed(ends) if end.why), "").replace("|", "/")
        lines.append(f"| `{name}` | {' | '.join(map(str, ends))} | {why[:200]} |")
    sums = []
    for outcomes in runs.values():
        kinds = [end.kind for end in outcomes.values()]
        skipped = kinds.count("skipped")
        sums.append(f"{kinds.count('passed')} of {len(kinds) - skipped} pass, {skipped} skipped")
    return [*lines, f"| **all** | {' | '.join(sums)} | |"]


def main() -> int:
    """Print the table; return 1 if the kit fails a test that TRL passes, else 0."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--classes", default="trl,kit", help=f"some of {', '.join(CLASSES)}")
    parser.add_argument("--backend", choices=("transformers", "unsloth"), default="transformers")
    parser.add_argument("-k", help="expression that selects tests, as pytest's")
    asked = parser.parse_args()
    runs = run_all(asked.file, asked.classes.split(","), asked.k, asked.backend)
    print("\n".join(table(runs)))
    passed = {name for name, end in runs.get("trl", {}).items() if end.kind == "passed"}
    lost = [name for name in passed for one in runs.values() if one[name].kind != "passed"]
    return 1 if lost else 0


if __name__ == "__main__":
    sys.exit(main())
