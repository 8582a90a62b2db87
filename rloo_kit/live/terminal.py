"""A run as a panel in a terminal, redrawn in place."""

import os
import sys
import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, TextIO

from rloo_kit.live.view import (
    REFRESH_SECONDS,
    LiveView,
    Progress,
    finding_line,
    number_text,
)
from rloo_kit.text.numbers import finite_number, finite_numbers, mean_or_none
from rloo_kit.text.thoughts import THOUGHT_ENDS
from rloo_kit.text.wording import format_duration, printable, text_of

MAX_COLUMNS = 120
MAX_REWARDS, MAX_FINDINGS = 3, 3
# Blocks of a curve
CURVE_WIDTH = 24
BLOCKS = "▁▂▃▄▅▆▇█"


class TerminalPanel(LiveView):
    """A panel that is redrawn in place; what is printed meanwhile appears above it."""

    def __init__(self, stream: TextIO | None = None) -> None:
        super().__init__()
        self.stream = stream or sys.stdout
        self._live: Any = None
        self._drawn = 0.0

    def _begin(self) -> None:
        from rich.console import Console
        from rich.live import Live

        console = Console(file=self.stream, force_terminal=True)
        # rich redirects print() and stderr above the panel, unless they go to a file.
        self._live = Live(
            console=console,
            auto_refresh=False,
            redirect_stdout=sys.stdout.isatty(),
            redirect_stderr=sys.stderr.isatty(),
            vertical_overflow="crop",
        )
        self._live.start()
        self._draw()
        console.show_cursor(True)  # a killed run would leave a hidden cursor

    def _show_step(self) -> None:
        if time.monotonic() - self._drawn >= REFRESH_SECONDS:
            self._draw()

    def _draw(self) -> None:
        size = os.get_terminal_size(self.stream.fileno())
        self._live.console.size = size
        self._live.update(panel_of(self.progress, size.columns), refresh=True)
        self._drawn = time.monotonic()

    def _end(self) -> None:
        live, self._live = self._live, None
        if live is not None:
            try:
                columns = os.get_terminal_size(self.stream.fileno()).columns
                live.update(panel_of(self.progress, columns))
            finally:
                live.stop()


def panel_of(progress: Progress, columns: int) -> Any:
    """Return the panel, as wide as the terminal up to ``MAX_COLUMNS``."""
    from rich.console import Group
    from rich.panel import Panel
    from rich.progress_bar import ProgressBar
    from rich.table import Table

    left = f"{format_duration(progress.seconds_left)} left"
    bar = Table.grid(expand=True, padding=(0, 1))
    bar.add_column(ratio=1)
    bar.add_column(no_wrap=True)
    bar.add_row(
        ProgressBar(max(1, progress.total), progress.step, complete_style="green"),
        left if progress.steps else "waiting for the first step",
    )
    parts = [bar, _findings(progress), _metrics(progress), *_completions(progress)]
    return Panel(
        Group(*(part for part in parts if part is not None)),
        title=f"step {progress.step}/{progress.total}",
        title_align="left",
        width=min(columns, MAX_COLUMNS),
    )


def _grid(*columns: dict[str, Any]) -> Any:
    """Return a table without lines; a text that is too long for its cell is cut."""
    from rich.table import Table

    grid = Table.grid(padding=(0, 1))
    for column in columns:
        grid.add_column(no_wrap=True, overflow="ellipsis", **column)
    return grid


def _text(content: str, style: str = "") -> Any:
    """Return text of a model, or a user, on one line: neither markup nor control characters."""
    from rich.text import Text

    return Text(printable(" ".join(content[:2000].split())), style, overflow="ellipsis")


def _findings(progress: Progress) -> Any:
    lines = [finding_line(finding) for finding in progress.findings[:MAX_FINDINGS]]
    if (hidden := len(progress.findings) - MAX_FINDINGS) > 0:
        lines[-1] += f" (and {hidden} more)"
    if not lines and progress.steps:
        lines = ["nothing found"]
    grid = _grid({"style": "bold", "width": 11}, {"style": "red" if progress.findings else "green"})
    for number, line in enumerate(lines):
        grid.add_row("" if number else "doctor", _text(line))
    return grid if lines else None


def _metrics(progress: Progress) -> Any:
    """Return a line for each metric: name, newest value, curve, trend; None before the first."""
    if not progress.steps:
        return None
    series, cut_off = progress.series, progress.last("truncated")
    rows = [
        ("reward", series["reward"], ".3f", f"spread {number_text(progress.last('spread'), 3)}")
    ]
    shown = list(progress.rewards.items())[:MAX_REWARDS]
    rows += [(f" {name}", values, ".3f", "") for name, values in shown]
    rows += [
        ("kl/token", series["kl/token"], ".4f", ""),
        ("kl/sequence", series["kl/sequence"], ".3f", ""),
        ("length", series["length"], ".1f", f"{cut_off or 0.0:.0%} cut off"),
        ("signal", progress.with_signal, ".0%", "of groups"),
        ("gradient", series["gradient"], ".3g", ""),
    ]
    grid = _grid({"style": "bold", "width": 11}, {"justify": "right"}, {"style": "cyan"}, {})
    for name, values, digits, note in rows:
        if any(value is not None for value in values):
            newest = "none" if values[-1] is None else f"{values[-1]:{digits}}"
            grid.add_row(_text(name), newest, sparkline(values, CURVE_WIDTH), note)
    return grid


def _completions(progress: Progress) -> list[Any]:
    """Return the speed, and the best and the worst completion of the newest batch."""
    if not progress.steps:
        return []
    grid = _grid({"style": "bold", "width": 11}, {})
    speeds = [(name, progress.last(name)) for name in ("sampling", "learning")]
    words = [f"{value:,.0f} {name}" for name, value in speeds if value is not None]
    if (memory := progress.last("memory")) is not None:
        words.append(f"peak {memory:.1f} GiB")
    grid.add_row("tokens/s", ", ".join(words))
    scored = [row for row in progress.completions if finite_number(row.get("score")) is not None]
    ranked = sorted(scored, key=lambda row: row["score"])
    for name, row in [("best", row) for row in ranked[-1:]] + [
        ("worst", row) for row in ranked[:-1][:1]
    ]:
        thought, end, answer = text_of(row.get("completion")).rpartition(THOUGHT_ENDS)
        prompt = text_of(row.get("prompt"))
        grid.add_row(f"{name} {row['score']:.3f}", _text(prompt, "dim"))
        if end:
            grid.add_row(" thought", _text(thought, "italic dim"))
        cut_off = "(cut off) " if row.get("truncated") else ""
        grid.add_row(" answer" if end else " text", _text(cut_off + answer))
    return [grid]


def sparkline(values: Sequence[float | None], width: int) -> str:
    """Return a series as at most ``width`` blocks, from its lowest to its highest value."""
    num = min(width, len(values))
    edges = [place * len(values) // num for place in range(num + 1)]
    # Each block is the mean of neighbouring steps.
    points = [mean_or_none(finite_numbers(values[low:high])) for low, high in pairwise(edges)]
    known = finite_numbers(points)
    low, high = min(known, default=0.0), max(known, default=0.0)
    scale = (len(BLOCKS) - 1) / (high - low) if high > low else 0.0
    base = 0 if scale else len(BLOCKS) // 2  # a constant series is a line at half height
    return "".join(" " if v is None else BLOCKS[base + round((v - low) * scale)] for v in points)
