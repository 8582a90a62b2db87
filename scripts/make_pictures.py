"""Draw the pictures of the README and the docs from the folder of a finished run.

.venv/bin/python scripts/make_pictures.py RUN

The script writes the reward curve and screenshots of the report to docs/pictures. It needs
Chromium (Debian's packages chromium and chromium-driver).
"""

import argparse
import io
import shutil
import time
from pathlib import Path
from typing import Any

from rloo_kit.diagnosis.record import RunRecord, read_run
from rloo_kit.report.page import write_report

PICTURES = Path(__file__).parents[1] / "docs" / "pictures"
REPORT_SIZE = (1280, 1720)
GROUP_SIZE = (1280, 1100)


def reward_svg(record: RunRecord) -> str:
    """Draw the reward curve of a run and return it as SVG.

    The curve has the reward of each step, its spread within groups, and the accuracy on held-out
    prompts before and after the training.
    """
    from matplotlib.figure import Figure

    rows = record.rows
    steps = [row["step"] for row in rows]
    reward = [row["reward"] for row in rows]
    spread = [row["score/raw_group_std"] for row in rows]
    figure = Figure(figsize=(7, 2.8), layout="constrained")
    axis = figure.subplots()
    low, high = zip(*((r - s, r + s) for r, s in zip(reward, spread, strict=True)), strict=True)
    axis.fill_between(steps, low, high, alpha=0.2, label="spread within a group", linewidth=0)
    axis.plot(steps, reward, marker=".", label="reward in training")
    scores = [record.evaluation[when]["rewards"]["accuracy"] for when in ("before", "after")]
    axis.plot([0, steps[-1]], scores, "D", color="black", label="held-out prompts")
    for place, score, side in zip((0, steps[-1]), scores, ("left", "right"), strict=True):
        axis.annotate(f"{score:.2f}", (place, score), (0, 7), textcoords="offset points", ha=side)
    axis.set(xlabel="step", ylim=(0, 1.15))
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(loc="lower right", frameon=False)
    drawn = io.StringIO()
    figure.savefig(drawn, format="svg", metadata={"Date": None})
    return drawn.getvalue()


def mixed_group(record: RunRecord) -> str:
    """Return ``STEP-GROUP`` for the group whose mean score is closest to 0.5.

    The report's URL names a group in this form.
    """
    scores: dict[tuple[int, int], list[float]] = {}
    for row in record.completions:
        scores.setdefault((row["step"], row["group"]), []).append(row["score"])
    step, group = min(scores, key=lambda place: abs(sum(scores[place]) / len(scores[place]) - 0.5))
    return f"{step}-{group}"


def browser(size: tuple[int, int]) -> Any:
    """Start a headless Chromium with a window of this width and height, and return its driver."""
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium")
    for flag in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage"):
        options.add_argument(flag)
    options.add_argument(f"--window-size={size[0]},{size[1]}")
    options.add_argument("--hide-scrollbars")
    service = webdriver.ChromeService(shutil.which("chromedriver"))
    return webdriver.Chrome(options=options, service=service)


def shoot(report: Path, target: Path, size: tuple[int, int], anchor: str = "") -> None:
    """Write a screenshot of the report to a PNG file.

    Args:
        report: HTML file of the report.
        target: File to write.
        size: Width and height of the browser window.
        anchor: Fragment of the URL, to which the browser scrolls; "": the top of the page.
    """
    from PIL import Image

    window = browser(size)
    try:
        window.get(report.resolve().as_uri() + anchor)
        time.sleep(1)  # charts are drawn
        shown = Image.open(io.BytesIO(window.get_screenshot_as_png()))
    finally:
        window.quit()
    shown.convert("RGB").quantize(128).save(target, optimize=True)


def main() -> None:
    """Draw all pictures and print their sizes."""
    parser = argparse.ArgumentParser(description="Draw the pictures of the README and the docs.")
    parser.add_argument("run", type=Path, help="the folder of a run, such as runs/quickstart")
    record = read_run(parser.parse_args().run)
    PICTURES.mkdir(exist_ok=True)
    (PICTURES / "reward.svg").write_text(reward_svg(record), encoding="utf-8")
    report = write_report([record.folder])
    shoot(report, PICTURES / "report.png", REPORT_SIZE)
    shoot(report, PICTURES / "group.png", GROUP_SIZE, f"#group={mixed_group(record)}")
    for path in sorted(PICTURES.iterdir()):
        print(f"{path.name}: {path.stat().st_size / 1024:.0f} KiB")


if __name__ == "__main__":
    main()
