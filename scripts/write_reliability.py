"""Write docs/reference/reliability.md from what the suite of faults saw.

    RLOO_KIT_FAULTS=build/faults python -m pytest tests/faults
    python tests/scripts/kill_and_resume.py --kills 200 --rows build/faults
    python scripts/write_reliability.py build/faults

Every test of tests/faults that is marked ``fault`` must have left its row there.
"""

import ast
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "reference" / "reliability.md"
SECTIONS = {
    "test_reward_faults": "Rewards",
    "test_server_faults": "Servers",
    "test_memory_faults": "Memory and numbers",
    "test_disk_faults": "A full disk",
    "test_checkpoint_faults": "Checkpoints",
    "test_data_faults": "Prompts",
    "test_signal_faults": "Signals, clocks, two runs at once",
}
"""Test file -> heading, in the order of the page."""
INTRO = """\
# When something goes wrong

<!-- written by scripts/write_reliability.py from what tests/faults saw; do not edit -->

What the kit promises a training that is hit by a fault:

- **The last finished step is saved**, whatever goes wrong in the next one: a reward, a server,
  memory, Ctrl-C. After SIGKILL or a power cut it is the last checkpoint (`trainer.save_steps`).
- **A checkpoint is whole or absent.** What a disk or a person does to it later is noticed, and the
  one before it is used.
- **A resumed run is the run that nobody interrupted**: on a CPU the same adapter and the same
  completions, bit for bit.
- **The message says what to change**, and the exit code is 2; after Ctrl-C it is 130, after
  SIGTERM 143.

To go on, once the cause is gone:

```bash
rloo-kit train RUN.yaml --resume          # the newest run of its output_dir
rloo-kit train runs/quickstart --resume   # this run
```

[resume.md](resume.md) says what a checkpoint holds, and what may change between two parts of a
run.

Each row below is a test that makes the fault on purpose in a real training of the embedded model,
and most of them then resume it and compare it with an uninterrupted run. *Tries* is how often the
fault was made, *lost* how many runs could not go on.
"""
KILLED = """\
## Killed at any moment

`python tests/scripts/kill_and_resume.py` kills trainings by SIGKILL at random moments, half of
them within a third of a second of the beginning of a checkpoint, and resumes each until it
finishes. *Loading*: killed before a step was done; *writing*: while a checkpoint was half written;
*ending*: with the adapter written and the run's last files not. *Resumed after* counts different
steps, 0 included: without a checkpoint a run begins anew. *Differ*: finished runs whose adapter,
completions, metrics or scores were not those of the uninterrupted run (times and memory aside).
"""


@dataclass(frozen=True)
class Fault:
    """A fault as its test declares it."""

    file: str
    test: str
    name: str
    promise: str


def declared_faults(folder: Path = ROOT / "tests" / "faults") -> list[Fault]:
    """Return the faults that the tests of a folder are marked with, in the page's order."""
    found = []
    for file in SECTIONS:
        tree = ast.parse((folder / f"{file}.py").read_text(encoding="utf-8"))
        for node in tree.body:
            if isinstance(node, ast.FunctionDef):
                marks = [ast.literal_eval(arg) for arg in _arguments_of_mark(node)]
                if marks:
                    found.append(Fault(file, node.name, *marks))
    return found


def _arguments_of_mark(node: ast.FunctionDef) -> list[ast.expr]:
    for decorator in node.decorator_list:
        if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == "pytest.mark.fault":
            return decorator.args
    return []


def make_page(rows: Path) -> str:
    """Return the page made of a folder of rows.

    Raises:
        SystemExit: A row is missing, or is an older test's.
    """
    parts, faults = [INTRO], declared_faults()
    for file, heading in SECTIONS.items():
        lines = [
            f"## {heading}\n",
            "| fault | promise | seen | tries | lost |",
            "|---|---|---|---|---|",
        ]
        for fault in faults:
            if fault.file == file:
                row = _row_of(fault, rows)
                cells = [fault.name, fault.promise, row["seen"], row["tries"], row["lost"]]
                lines.append(_line(cells))
        parts.append("\n".join(lines) + "\n")
    parts.append(f"{KILLED}\n{_table_of_kills(json.loads((rows / 'kills.json').read_text()))}\n")
    return "\n".join(parts)


def _row_of(fault: Fault, rows: Path) -> dict[str, Any]:
    file = rows / f"{fault.file}.{fault.test}.json"
    row = json.loads(file.read_text()) if file.exists() else {}
    if (row.get("fault"), row.get("promise")) != (fault.name, fault.promise):
        raise SystemExit(f"no row of {fault.test} as it is now in {rows}: run pytest tests/faults")
    return row


def _table_of_kills(counts: list[dict[str, Any]]) -> str:
    lines = [
        "| setting | kills | loading | writing | ending | resumed after | lost | differ |",
        "|---|---|---|---|---|---|---|---|",
    ]
    totals = [0] * 6
    for count in counts:
        differ = len(count["different"]) - count["lost"]
        numbers = [count[n] for n in ("kills", "while_loading", "while_writing", "while_ending")]
        places = f"{len(set(count['resumed_from']))} steps"
        lines.append(_line([count["what"], *numbers, places, count["lost"], differ]))
        totals = [a + b for a, b in zip(totals, [*numbers, count["lost"], differ], strict=True)]
    lines.append(_line(["all", *totals[:4], "", *totals[4:]]))
    return "\n".join(lines)


def _line(cells: list[object]) -> str:
    return f"| {' | '.join(str(cell).replace('|', chr(92) + '|') for cell in cells)} |"


def main() -> None:
    """Write the page from the rows of the folder that is named."""
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    PAGE.write_text(make_page(Path(sys.argv[1])), encoding="utf-8")
    print(f"wrote {PAGE.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
