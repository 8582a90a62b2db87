"""Calls and accuracy before and after ``rloo-kit train tools``, over several seeds.

    python benchmarks/tools.py --seeds 5 --name tools_cpu        # about two minutes a seed

Both are measured on held-out sums. A large sum needs a call of the calculator, a small one does
not. docs/how-to/tools.md shows the result.
"""

import tempfile
from typing import Any

from shared import ROOT, interval, markdown, parser_of, write_part, write_result

import rloo_kit as rk


def shares(samples: list[dict[str, Any]]) -> dict[str, float]:
    """Return the accuracy and the share of completions with a call, for small and large sums."""
    found = {}
    for size in ("small", "large"):
        rewards = [
            one["rewards"]
            for one in samples
            if (len(one["prompt"][-1]["content"]) > len("What is 12 + 12?")) == (size == "large")
        ]
        found[f"{size} right"] = sum(one["accuracy"] for one in rewards) / len(rewards)
        found[f"{size} called"] = sum(one["tool_use"] < 0 for one in rewards) / len(rewards)
    return found


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--set", nargs="*", default=[], help="settings of the run")
    parser.add_argument("--name", help="name of the file in benchmarks/results")
    options = parser.parse_args()
    rows = []
    for seed in range(1, options.seeds + 1):
        with tempfile.TemporaryDirectory() as folder:
            settings = [f"seed={seed}", f"output_dir={folder}/run", *options.set]
            result = rk.train("tools", settings, say=lambda line: None)
        assert result.before is not None
        assert result.after is not None
        row = {"seed": seed, "seconds": result.seconds}
        row |= {f"{key} before": value for key, value in shares(result.before.samples).items()}
        row |= shares(result.after.samples)
        rows.append(row)
        print({key: round(value, 3) for key, value in row.items()}, flush=True)
        write_result(options.name, rows=rows)
    if not options.name:
        return
    lines = []
    for key, what in (
        ("large right", "large sums right"),
        ("large called", "large sums with a call"),
        ("small right", "small sums right"),
        ("small called", "small sums with a needless call"),
    ):
        mean, low, high = interval([row[key] for row in rows])
        before = interval([row[f"{key} before"] for row in rows])[0]
        after = f"{mean:.2f} ({max(low, 0):.2f} to {min(high, 1):.2f})"
        lines.append([what, f"{before:.2f}", after])
    shown = markdown([f"held-out sums, {len(rows)} seeds", "before", "after"], lines)
    write_part(ROOT / "docs" / "how-to" / "tools.md", "tools", shown)


if __name__ == "__main__":
    main()
