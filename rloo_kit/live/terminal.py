"""A run as a panel in a terminal, redrawn in place."""

import sys
from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from rloo_kit.live.progress import Progress, finding_line
from rloo_kit.live.series import CHARTS, FOLLOWED, cut, means
from rloo_kit.live.view import LiveView
from rloo_kit.text.numbers import finite_number, finite_numbers
from rloo_kit.text.thoughts import THOUGHT_ENDS
from rloo_kit.text.wording import format_duration, printable, text_of

MAX_COLUMNS = 120
MAX_REWARDS, MAX_FINDINGS = 3, 3
# Blocks of a curve
CURVE_WIDTH = 24
BLOCKS = "▁▂▃▄▅▆▇█"


class TerminalPanel(LiveView):
    """A panel that is redrawn in place; what is printed meanwhile appears above it."""

    def _begin(self) -> None:
        console = Console(file=self.stream, force_terminal=True)
        # rich redirects print() and stderr above the panel, unless they go to a file.
        self._live = Live(
            get_renderable=lambda: panel_of(self.progress, console.width),
            console=console,
            auto_refresh=False,
            redirect_stdout=sys.stdout.isatty(),
            redirect_stderr=sys.stderr.isatty(),
            vertical_overflow="crop",
        )
        self._live.start(refresh=True)
        console.show_cursor(True)  # a killed run would leave a hidden cursor

    def _show_step(self) -> None:
        self._live.refresh()

    def _end(self) -> None:
        self._live.stop()


def panel_of(progress: Progress, columns: int) -> Panel:
    """Return the panel, as wide as the terminal up to ``MAX_COLUMNS``."""
    return Panel(
        Group(*_parts(progress)),
        title=f"step {progress.step}/{progress.total}",
        title_align="left",
        width=min(columns, MAX_COLUMNS),
    )


def _parts(progress: Progress) -> Iterator[RenderableType]:
    """Yield the bar and, from the first step on, findings, metrics and completions."""
    has_steps = bool(progress.metrics.rows)
    left = f"{format_duration(progress.seconds_left)} left"
    bar = Table.grid(expand=True, padding=(0, 1))
    bar.add_column(ratio=1)
    bar.add_column(no_wrap=True)
    bar.add_row(
        ProgressBar(max(1, progress.total), progress.step, complete_style="green"),
        left if has_steps else "waiting for the first step",
    )
    yield bar
    if has_steps:
        yield _findings(progress)
        yield _metrics(progress)
        yield _completions(progress)


def _grid(*columns: dict[str, Any]) -> Table:
    """Return a table without lines, whose first column has names; long texts are cut."""
    grid = Table.grid(padding=(0, 1))
    for column in ({"style": "bold", "width": 11}, *columns):
        grid.add_column(no_wrap=True, overflow="ellipsis", **column)
    return grid


def _text(content: str, style: str = "") -> Text:
    """Return text of a model, or a user, on one line: neither markup nor control characters."""
    return Text(printable(" ".join(content[:2000].split())), style, overflow="ellipsis")


def _findings(progress: Progress) -> Table:
    lines = [finding_line(finding) for finding in progress.findings[:MAX_FINDINGS]]
    if (hidden := len(progress.findings) - MAX_FINDINGS) > 0:
        lines[-1] += f" (and {hidden} more)"
    grid = _grid({"style": "red" if lines else "green"})
    for number, line in enumerate(lines or ["nothing found"]):
        grid.add_row("" if number else "doctor", _text(line))
    return grid


def _metrics(progress: Progress) -> Table:
    """Return a row for each metric: name, newest value, curve, newest band."""
    rows = [(chart.id, chart, chart.lines[0]) for chart in FOLLOWED]
    rewards = progress.metrics.reward_lines()[:MAX_REWARDS]
    rows[1:1] = [(line.label, CHARTS["reward"], line) for line in rewards]
    grid = _grid({"justify": "right"}, {"style": "cyan"}, {})
    for name, chart, line in rows:
        values, low, high = progress.metrics.curve(line)
        if values:
            band = f"{chart.text(low[-1])} to {chart.text(high[-1])}"
            curve = sparkline(values, CURVE_WIDTH)
            grid.add_row(_text(name), chart.text(values[-1]), curve, "" if low is values else band)
    return grid


def _completions(progress: Progress) -> Table:
    """Return the speed, and the best and the worst completion of the newest batch."""
    grid = _grid({})
    speeds = [(line.label, progress.metrics.newest(line)) for line in CHARTS["speed"].lines]
    words = [f"{value:,.0f} {name}" for name, value in speeds if value is not None]
    if (memory := progress.metrics.newest(CHARTS["memory"].lines[0])) is not None:
        words.append(f"peak {memory:.1f} GiB")
    grid.add_row("tokens/s", ", ".join(words))
    scored = [row for row in progress.completions if finite_number(row.get("score")) is not None]
    ranked = sorted(scored, key=lambda row: row["score"])
    for name, rows in (("best", ranked[-1:]), ("worst", ranked[:-1][:1])):
        for row in rows:
            thought, end, answer = text_of(row.get("completion")).rpartition(THOUGHT_ENDS)
            grid.add_row(f"{name} {row['score']:.3f}", _text(text_of(row.get("prompt")), "dim"))
            if end:
                grid.add_row(" thought", _text(thought, "italic dim"))
            cut_off = "(cut off) " if row.get("truncated") else ""
            grid.add_row(" answer" if end else " text", _text(cut_off + answer))
    return grid


def sparkline(values: Sequence[float | None], width: int) -> str:
    """Return a series as at most ``width`` blocks, from its lowest to its highest value."""
    points = means(values, cut(len(values), width))
    known = finite_numbers(points)
    low, high = min(known), max(known)
    scale = (len(BLOCKS) - 1) / (high - low) if high > low else 0.0
    base = 0 if scale else len(BLOCKS) // 2  # a constant series is a line at half height
    return "".join(" " if v is None else BLOCKS[base + round((v - low) * scale)] for v in points)
