"""Run the quickstart and put its output into the README.

.venv/bin/python scripts/update_readme.py
.venv/bin/python scripts/update_readme.py --pictures   # docs/pictures too; needs Chromium
"""

import subprocess
import sys
import tempfile
from pathlib import Path

from pages import write_part

README = Path(__file__).parents[1] / "README.md"


def shortened(lines: list[str]) -> list[str]:
    """Return the output with only the first two steps, the middle step and the last step.

    ``...`` stands for the steps that are left out.
    """
    steps = [i for i, line in enumerate(lines) if line.startswith("step ")]
    kept = {steps[0], steps[1], steps[len(steps) // 2], steps[-1]}
    found: list[str] = []
    for number, line in enumerate(lines):
        if number not in steps or number in kept:
            found.append(line)
        elif found[-1] != "...":
            found.append("...")
    return found


def main() -> None:
    """Run the quickstart, shorten its output, and write it into the README."""
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, "-m", "rloo_kit", "quickstart"],
            cwd=folder, stdout=subprocess.PIPE, text=True, check=True,
        )  # fmt: skip
        if "--pictures" in sys.argv:
            script = Path(__file__).with_name("make_pictures.py")
            subprocess.run([sys.executable, script, "runs/quickstart"], cwd=folder, check=True)
    text = "\n".join(shortened(done.stdout.rstrip().splitlines()))
    write_part(README, "quickstart", f"```text\n{text}\n```")
    print(text)


if __name__ == "__main__":
    main()
