"""A run as a panel in a terminal, redrawn in place."""

import io
import logging
import os
import sys
import time
from collections.abc import Sequence
from typing import Any, TextIO

from rloo_kit.diagnosis.record import finite_number
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

WIDEST, HIGHEST = 120, 24
"""Columns and lines of the panel."""
MOST_REWARDS, MOST_FINDINGS, FINDING_LINES, THOUGHT_LINES = 4, 3, 2, 2
"""Shown in the panel, at most."""


def size_of(stream: TextIO) -> tuple[int, int]:
    """Return columns and lines of a terminal; 80 and 24 where it does not say."""
    try:
        columns, lines = os.get_terminal_size(stream.fileno())
    except (OSError, ValueError, AttributeError):
        columns = lines = 0
    return columns or 80, lines or 24


class TerminalPanel(LiveView):
    """A panel that is redrawn in place; what is printed meanwhile appears above it.

    Args:
        stream: The terminal; None: stdout.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        super().__init__()
        self.stream = stream or sys.stdout
        self._live: Any = None
        self._drawn = self._height = 0
        self._handlers: list[tuple[Any, Any]] = []

    def _begin(self) -> None:
        from rich.console import Console
        from rich.live import Live

        columns, lines = size_of(self.stream)
        console = Console(file=self.stream, force_terminal=True, width=columns, height=lines)
        before = {"stdout": sys.stdout, "stderr": sys.stderr}
        on_screen = {f"redirect_{name}": stream.isatty() for name, stream in before.items()}
        self._height = 0
        self._live = Live(self._panel(), console=console, auto_refresh=False, **on_screen)
        self._live.start(refresh=True)
        self._drawn = time.monotonic()
        console.show_cursor(True)  # never hidden, so that not even a killed run leaves it so
        for name, stream in before.items():
            if getattr(sys, name) is not stream:
                setattr(sys, name, _Above(getattr(sys, name)))
        self._handlers = _logging_handlers(before.values())
        for handler, stream in self._handlers:
            handler.setStream(sys.stdout if stream is before["stdout"] else sys.stderr)

    def _show_step(self) -> None:
        self._refresh()

    def _show_findings(self) -> None:
        self._refresh()

    def _refresh(self) -> None:
        if self._live is None or time.monotonic() - self._drawn < REFRESH_SECONDS:
            return
        self._live.console.size = size_of(self.stream)
        self._live.update(self._panel(), refresh=True)
        self._drawn = time.monotonic()

    def _end(self) -> None:
        live, self._live = self._live, None
        if live is None:
            return
        for handler, stream in self._handlers:
            handler.setStream(stream)
        self._handlers = []
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
        width, most = min(columns, WIDEST), max(1, min(HIGHEST, lines - 1) - 2)
        shown = _panel_lines(self.progress, width - 4, most)[:most]
        self._height = max(min(self._height, most), len(shown))
        shown += [Text()] * (self._height - len(shown))  # else the lower edge jumps
        title = f"step {self.progress.step}/{self.progress.total}"
        return Panel(Group(*shown), title=title, title_align="left", width=width)


class _Above:
    """Rich's stand-in for a stream, without the way past it that rich's own consoles take.

    TRL prints its table of completions with such a console.
    """

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        if name == "rich_proxied_file":
            raise AttributeError(name)
        return getattr(self._stream, name)


def _logging_handlers(streams: Any) -> list[tuple[Any, Any]]:
    """Return the handlers that log to one of these streams, each with it."""
    known = [logging.root, *logging.root.manager.loggerDict.values()]
    handlers = {handler for logger in known for handler in getattr(logger, "handlers", ())}
    return [
        (handler, handler.stream)
        for handler in handlers
        if isinstance(handler, logging.StreamHandler)
        and any(handler.stream is stream for stream in streams)
    ]


def _panel_lines(progress: Progress, width: int, most: int) -> list[Any]:
    """Return the panel's lines; completions get what room is left of ``most``."""
    lines = [_bar(progress, width), *_doctor_lines(progress.findings, width)]
    if not progress.steps:
        return lines
    lines += _metric_lines(progress, width)
    ranked = sorted(
        (row for row in progress.completions if finite_number(row.get("score")) is not None),
        key=lambda row: row["score"],
    )
    if not ranked:
        return lines
    worst, best = ranked[0], ranked[-1]
    if worst["score"] == best["score"]:
        return lines + _completion_lines("all", best, width, most - len(lines))
    room = (most - len(lines)) // 2
    for name, row in (("best", best), ("worst", worst)):
        lines += _completion_lines(name, row, width, room)
    return lines


def _cut(parts: Sequence[tuple[str, str]], width: int) -> Any:
    """Return one line of (text, style), shortened to ``width`` columns; markup stays text."""
    from rich.text import Text

    line = Text.assemble(*parts, no_wrap=True)
    line.truncate(width, overflow="ellipsis")
    return line


def _bar(progress: Progress, width: int) -> Any:
    done = min(1.0, progress.step / progress.total) if progress.total > 0 else 0.0
    waiting = "waiting for the first step"
    left = f"{format_duration(progress.seconds_left)} left" if progress.steps else waiting
    note = f"  {done:.0%}  {left}"
    room = max(1, width - len(note))
    full = round(done * room)
    return _cut([("━" * full, "green"), ("─" * (room - full), "dim"), (note, "")], width)


def _doctor_lines(findings: Sequence[Finding], width: int) -> list[Any]:
    hidden = len(findings) - MOST_FINDINGS
    more = [(f"and {hidden} more", "dim")] if hidden > 0 else []
    told = [
        (line, "red" if finding.level == "error" else "yellow")
        for finding in findings[:MOST_FINDINGS]
        for line in _wrapped(finding_line(finding), width - 12, FINDING_LINES)
    ]
    texts = told + more or [("nothing found", "dim")]
    names = ["doctor", *[""] * (len(texts) - 1)]
    return [
        _cut([(f"{name:<12}", "bold"), text], width)
        for name, text in zip(names, texts, strict=True)
    ]


def _wrapped(text: str, width: int, most: int) -> list[str]:
    """Return a text as at most so many lines of ``width`` columns; dots where more was left."""
    from rich.console import Console
    from rich.text import Text

    console = Console(width=width, file=io.StringIO())
    lines = [line.plain.rstrip() for line in Text(text).wrap(console, width)]
    return [*lines[: most - 1], f"{lines[most - 1]}…"] if len(lines) > most else lines


def _metric_lines(progress: Progress, width: int) -> list[Any]:
    """Return a line a metric: name, newest value, curve, trend."""
    series, signal = progress.series, progress.with_signal
    spread, cut_off = (progress.last(name) for name in ("spread", "truncated"))
    rows = [("reward", series["reward"], ".3f", f"spread {number_text(spread, 3)}")]
    rows += [
        (f" {printable(name)}", values, ".3f", "")
        for name, values in list(progress.rewards.items())[:MOST_REWARDS]
    ]
    hidden = len(progress.rewards) - MOST_REWARDS
    if hidden > 0:
        rows[-1] = (*rows[-1][:3], f"and {hidden} more")
    rows += [
        ("kl/token", series["kl/token"], ".4f", ""),
        ("kl/sequence", series["kl/sequence"], ".3f", ""),
        ("length", series["length"], ".1f", f"{0.0 if cut_off is None else cut_off:.0%} cut off"),
        ("signal", signal, ".0%", "of groups"),
        ("gradient", series["gradient"], ".3g", ""),
    ]
    room = max(8, min(32, width - 46))
    lines = [
        _metric_line(*row, room, width)
        for row in rows
        if any(value is not None for value in row[1])
    ]
    speeds = [
        f"{value:,.0f} {name}"
        for name in ("sampling", "learning")
        if (value := progress.last(name)) is not None
    ]
    memory = progress.last("memory")
    if memory is not None:
        speeds.append(f"peak {memory:.1f} GiB")
    return [*lines, _cut([(f"{'tokens/s':<12}", "bold"), (", ".join(speeds), "")], width)]


def _metric_line(
    name: str, values: Sequence[float | None], digits: str, note: str, room: int, width: int
) -> Any:
    newest = values[-1]
    shown = "none" if newest is None else f"{newest:{digits}}"
    words = ", ".join(word for word in (trend(values), note) if word)
    label = name if len(name) < 12 else f"{name[:10]}…"
    return _cut(
        [
            (f"{label:<12}", "bold" if name[0] != " " else ""),
            (f"{shown:>8} ", ""),
            (f"{sparkline(values, room):<{room}} ", "cyan"),
            (words, "dim"),
        ],
        width,
    )


def _completion_lines(name: str, row: dict[str, Any], width: int, most: int) -> list[Any]:
    """Return score and prompt, then thought and answer, in at most ``most`` lines; [] below 2."""
    if most < 2:
        return []
    limit = width * (THOUGHT_LINES + 1)
    score = f"{name:<6}{row['score']:.3f}"
    thought, answer = _thought_and_answer(row)
    rows = [(f"{score:<12}", _flat(_text(row.get("prompt")), limit), "dim")]
    if thought and most > 2:
        texts = _wrapped(_flat(thought, limit), width - 12, min(most - 2, THOUGHT_LINES))
        names = ["  thought", *[""] * (len(texts) - 1)]
        rows += [(part, text, "italic dim") for part, text in zip(names, texts, strict=True)]
    cut_off = "(cut off) " if row.get("truncated") else ""
    shown = cut_off + (_flat(answer, limit) or "none")
    rows.append(("  answer" if thought else "  text", shown, ""))
    return [_cut([(f"{part:<12}", "bold"), (text, style)], width) for part, text, style in rows]


def _thought_and_answer(row: dict[str, Any]) -> tuple[str, str]:
    """Return both parts of a completion; all of it is the answer where no thought was closed."""
    text, place = _text(row.get("completion")), row.get("answer_at")
    if not isinstance(place, int):
        return "", text
    thought = text[:place].strip().removeprefix("<think>").removesuffix("</think>")
    return thought.strip() or "none", text[place:]


def _text(value: object) -> str:
    """Return text, or the content of the last message."""
    if isinstance(value, list | tuple) and value and isinstance(value[-1], dict):
        value = value[-1].get("content")
    return value if isinstance(value, str) else ""


def _flat(text: str, limit: int) -> str:
    """Return the beginning of a text in one line that cannot steer a terminal."""
    return printable(" ".join(text[: 4 * limit].split()))[:limit]
