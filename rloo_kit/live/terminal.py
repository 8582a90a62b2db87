"""A run as a panel in a terminal, redrawn in place."""

import io
import os
import sys
import time
from collections.abc import Sequence
from typing import Any, TextIO

from rloo_kit.diagnosis.record import finite_number, text_of_row
from rloo_kit.diagnosis.rules import Finding
from rloo_kit.live.view import (
    REFRESH_SECONDS,
    LiveView,
    Progress,
    finding_line,
    number_text,
    sparkline,
    trend,
)
from rloo_kit.text.wording import format_duration, printable

MAX_COLUMNS, MAX_LINES = 120, 24
MAX_REWARDS, MAX_FINDINGS, FINDING_LINES, THOUGHT_LINES = 4, 3, 2, 2
NAME_WIDTH = 12


def size_of(stream: TextIO) -> tuple[int, int]:
    """Return columns and lines of a terminal; 80 and 24 where they are unknown."""
    try:
        columns, lines = os.get_terminal_size(stream.fileno())
    except (OSError, ValueError, AttributeError):
        columns = lines = 0
    return columns or 80, lines or 24


class TerminalPanel(LiveView):
    """A panel that is redrawn in place; what is printed meanwhile appears above it."""

    def __init__(self, stream: TextIO | None = None) -> None:
        super().__init__()
        self.stream = stream or sys.stdout
        self._live: Any = None
        self._drawn = 0.0
        self._height = 0

    def _begin(self) -> None:
        from rich.console import Console
        from rich.live import Live

        columns, lines = size_of(self.stream)
        console = Console(file=self.stream, force_terminal=True, width=columns, height=lines)
        self._height = 0
        # rich redirects print() and stderr above the panel, unless they go to a file.
        self._live = Live(
            self._panel(),
            console=console,
            auto_refresh=False,
            redirect_stdout=sys.stdout.isatty(),
            redirect_stderr=sys.stderr.isatty(),
        )
        self._live.start(refresh=True)
        self._drawn = time.monotonic()
        console.show_cursor(True)  # a killed run would leave a hidden cursor

    def _show_step(self) -> None:
        if self._live is None or time.monotonic() - self._drawn < REFRESH_SECONDS:
            return
        self._live.console.size = size_of(self.stream)
        self._live.update(self._panel(), refresh=True)
        self._drawn = time.monotonic()

    def _show_findings(self) -> None:
        self._show_step()

    def _end(self) -> None:
        live, self._live = self._live, None
        if live is None:
            return
        try:
            live.console.size = size_of(self.stream)
            live.update(self._panel())
        finally:
            live.stop()

    def _panel(self) -> Any:
        from rich.console import Group
        from rich.panel import Panel
        from rich.text import Text

        columns, lines = size_of(self.stream)
        width, most = min(columns, MAX_COLUMNS), max(1, min(MAX_LINES, lines - 1) - 2)
        shown = _panel_lines(self.progress, width - 4, most)[:most]
        self._height = max(min(self._height, most), len(shown))
        shown += [Text()] * (self._height - len(shown))  # else the lower edge jumps
        title = f"step {self.progress.step}/{self.progress.total}"
        return Panel(Group(*shown), title=title, title_align="left", width=width)


def _panel_lines(progress: Progress, width: int, most: int) -> list[Any]:
    """Return the panel's lines; completions get the lines that are left of ``most``."""
    lines = [_bar(progress, width), *_finding_lines(progress.findings, width)]
    if not progress.steps:
        return lines
    lines += _metric_lines(progress, width)
    scored = (row for row in progress.completions if finite_number(row.get("score")) is not None)
    ranked = sorted(scored, key=lambda row: row["score"])
    if not ranked:
        return lines
    rows = {"best": ranked[-1], "worst": ranked[0]}
    if ranked[0]["score"] == ranked[-1]["score"]:
        rows = {"all": ranked[-1]}
    room = (most - len(lines)) // len(rows)  # lines for each completion
    return lines + [
        line for name, row in rows.items() for line in _completion_lines(name, row, width, room)
    ]


def _line(width: int, name: str, *parts: tuple[str, str], style: str = "bold") -> Any:
    """Return a name and (text, style) parts on one line of ``width`` columns; markup is text."""
    from rich.text import Text

    line = Text.assemble((f"{name:<{NAME_WIDTH}}", style), *parts, no_wrap=True)
    line.truncate(width, overflow="ellipsis")
    return line


def _named(name: str, count: int) -> list[str]:
    """Return names of lines: of the first, and "" for those that continue it."""
    return [name, *[""] * (count - 1)]


def _bar(progress: Progress, width: int) -> Any:
    from rich.text import Text

    done = min(1.0, progress.step / progress.total) if progress.total > 0 else 0.0
    waiting = "waiting for the first step"
    left = f"{format_duration(progress.seconds_left)} left" if progress.steps else waiting
    note = f"  {done:.0%}  {left}"
    room = max(1, width - len(note))
    full = round(done * room)
    return Text.assemble(("━" * full, "green"), ("─" * (room - full), "dim"), note, no_wrap=True)


def _finding_lines(findings: Sequence[Finding], width: int) -> list[Any]:
    texts = [
        (line, "red" if finding.level == "error" else "yellow")
        for finding in findings[:MAX_FINDINGS]
        for line in _wrapped(finding_line(finding), width - NAME_WIDTH, FINDING_LINES)
    ]
    if (hidden := len(findings) - MAX_FINDINGS) > 0:
        texts.append((f"and {hidden} more", "dim"))
    texts = texts or [("nothing found", "dim")]
    names = _named("doctor", len(texts))
    return [_line(width, name, text) for name, text in zip(names, texts, strict=True)]


def _wrapped(text: str, width: int, most: int) -> list[str]:
    """Return a text as at most so many lines of ``width`` columns; dots where more was left."""
    from rich.console import Console
    from rich.text import Text

    console = Console(width=width, file=io.StringIO())
    lines = [line.plain.rstrip() for line in Text(text).wrap(console, width)]
    return [*lines[: most - 1], f"{lines[most - 1]}…"] if len(lines) > most else lines


def _metric_lines(progress: Progress, width: int) -> list[Any]:
    """Return a line for each metric: name, newest value, curve, trend."""
    series = progress.series
    spread, cut_off = (progress.last(name) for name in ("spread", "truncated"))
    rows = [("reward", series["reward"], ".3f", f"spread {number_text(spread, 3)}")]
    shown = list(progress.rewards.items())[:MAX_REWARDS]
    rows += [(f" {printable(name)}", values, ".3f", "") for name, values in shown]
    if (hidden := len(progress.rewards) - MAX_REWARDS) > 0:
        rows[-1] = (*rows[-1][:3], f"and {hidden} more")
    rows += [
        ("kl/token", series["kl/token"], ".4f", ""),
        ("kl/sequence", series["kl/sequence"], ".3f", ""),
        ("length", series["length"], ".1f", f"{cut_off or 0.0:.0%} cut off"),
        ("signal", progress.with_signal, ".0%", "of groups"),
        ("gradient", series["gradient"], ".3g", ""),
    ]
    lines = [_metric_line(*row, width) for row in rows if any(v is not None for v in row[1])]
    values = ((name, progress.last(name)) for name in ("sampling", "learning"))
    speeds = [f"{value:,.0f} {name}" for name, value in values if value is not None]
    if (memory := progress.last("memory")) is not None:
        speeds.append(f"peak {memory:.1f} GiB")
    return [*lines, _line(width, "tokens/s", (", ".join(speeds), ""))]


def _metric_line(
    name: str, values: Sequence[float | None], digits: str, note: str, width: int
) -> Any:
    room = max(8, min(32, width - 46))
    newest = "none" if values[-1] is None else f"{values[-1]:{digits}}"
    return _line(
        width,
        name if len(name) < NAME_WIDTH else f"{name[: NAME_WIDTH - 2]}…",
        (f"{newest:>8} ", ""),
        (f"{sparkline(values, room):<{room}} ", "cyan"),
        (", ".join(word for word in (trend(values), note) if word), "dim"),
        style="bold" if name[0] != " " else "",
    )


def _completion_lines(name: str, row: dict[str, Any], width: int, most: int) -> list[Any]:
    """Return score and prompt, then thought and answer, in at most ``most`` lines; [] below 2."""
    if most < 2:
        return []
    limit = width * (THOUGHT_LINES + 1)
    thought, answer = _thought_and_answer(row)
    prompt = text_of_row({"completion": row.get("prompt")})
    rows = [(f"{name:<6}{row['score']:.3f}", _flat(prompt, limit), "dim")]
    if thought and most > 2:
        lines = min(most - 2, THOUGHT_LINES)
        texts = _wrapped(_flat(thought, limit), width - NAME_WIDTH, lines)
        names = _named("  thought", len(texts))
        rows += [(part, text, "italic dim") for part, text in zip(names, texts, strict=True)]
    # Without a closed thought nobody knows which part is the answer.
    cut_off = "(cut off) " if row.get("truncated") else ""
    rows.append(
        ("  answer" if thought else "  text", cut_off + (_flat(answer, limit) or "none"), "")
    )
    return [_line(width, part, (text, style)) for part, text, style in rows]


def _thought_and_answer(row: dict[str, Any]) -> tuple[str, str]:
    """Return both parts of a completion; without a closed thought all of it is the answer."""
    text, place = text_of_row(row), row.get("answer_at")
    if not isinstance(place, int):
        return "", text
    thought = text[:place].strip().removeprefix("<think>").removesuffix("</think>")
    return thought.strip() or "none", text[place:]


def _flat(text: str, limit: int) -> str:
    """Return the beginning of a text on one line that cannot steer a terminal."""
    return printable(" ".join(text[: 4 * limit].split()))[:limit]
