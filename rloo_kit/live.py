"""What a person sees of a run while it goes: lines, a terminal's panel, a notebook's figure.

Every view is a callback of the trainer. It follows the run in a ``Progress`` and shows that in its
own way; whatever goes wrong in it ends the view and never the run.
"""

import base64
import contextlib
import html
import io
import logging
import math
import os
import sys
import time
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from statistics import fmean, median, variance
from typing import Any, TextIO

from rloo_kit.errors import ConfigError
from rloo_kit.findings import Finding, escaped
from rloo_kit.run_record import finite_number, finite_numbers, mean_or_none

VARIABLE = "RLOO_KIT_LIVE"
"""Environment variable that chooses the view."""
CHOICES = ("auto", "panel", "notebook", "plain", "off")
PACE_STEPS = 20
"""Steps whose median tells the time that is left."""
TREND_STEPS = 10
"""Steps, at most, that are compared with as many before them."""
SURE = 2.0
"""Standard errors from which a difference is a trend."""
REFRESH_SECONDS = 0.25
"""Least time between two drawings."""
DRAWING_SHARE = 0.02
"""Of the run's time, at most, that goes into the drawings of a notebook."""
CHART_POINTS = 400
"""Points of a curve, at most; of a longer run each is the mean of several steps."""
NARROWEST, WIDEST, HIGHEST = 60, 120, 24
"""Columns of a terminal that can hold the panel; columns and lines of the panel, at most."""
MOST_REWARDS, MOST_FINDINGS, FINDING_LINES, THOUGHT_LINES = 4, 3, 2, 2
"""Shown in the panel, at most."""
BLOCKS = "▁▂▃▄▅▆▇█"
FOLLOWED: dict[str, tuple[str, ...]] = {
    "reward": ("reward",),
    "spread": ("score/group_std", "reward_std"),
    "kl/token": ("kl/token", "kl"),
    "kl/sequence": ("kl/sequence", "objective/kl"),
    "length": ("completions/mean_length",),
    "truncated": ("completions/truncated", "completions/clipped_ratio"),
    "without_signal": ("signal/groups_without", "frac_reward_zero_std"),
    "gradient": ("grad_norm",),
    "sampling": ("speed/generation_tokens_per_second",),
    "learning": ("speed/learning_tokens_per_second",),
    "memory": ("memory/peak_gib",),
}
"""Name of a series -> metrics, of which the first that a row has is taken."""


def live_progress(stream: TextIO | None = None) -> "LiveView":
    """Return the view that fits where the run is watched, or the one that RLOO_KIT_LIVE names.

    Args:
        stream: Where it is written; None: stdout, and in a notebook its output.

    Raises:
        ConfigError: RLOO_KIT_LIVE has another value, or names the notebook outside of one.
    """
    choice = os.environ.get(VARIABLE) or "auto"
    if choice not in CHOICES:
        raise ConfigError(f"{VARIABLE} is {choice!r}, must be one of {', '.join(CHOICES)}")
    in_notebook = stream is None and _in_notebook()
    if choice == "notebook" and not in_notebook:
        raise ConfigError(
            f"{VARIABLE} is 'notebook', and this is no kernel of a notebook: set it to auto"
        )
    target = stream or sys.stdout
    if choice == "auto":
        choice = "notebook" if in_notebook else "panel" if _can_move(target) else "plain"
    if choice == "off":
        return LiveView()
    if choice == "notebook":
        return NotebookFigure()
    return TerminalPanel(target) if choice == "panel" else PlainLines(target)


def _in_notebook() -> bool:
    """Return whether this process is a kernel; IPython in a terminal is none."""
    ipython = sys.modules.get("IPython")
    return hasattr(ipython.get_ipython(), "kernel") if ipython else False


def _can_move(stream: TextIO) -> bool:
    """Return whether the stream is a terminal that can hold the panel and move its cursor."""
    if find_spec("rich") is None or os.environ.get("TERM", "") in ("", "dumb"):
        return False
    if not stream.isatty() or not (stream.encoding or "").lower().startswith("utf"):
        return False
    return _size_of(stream)[0] >= NARROWEST


def _size_of(stream: TextIO) -> tuple[int, int]:
    """Return columns and lines of a terminal; 80 and 24 where it does not say."""
    try:
        columns, lines = os.get_terminal_size(stream.fileno())
    except (OSError, ValueError, AttributeError):
        columns = lines = 0
    return columns or 80, lines or 24


# --- what is known of the run --------------------------------------------------------------------


class Progress:
    """Where a run is, from the events of its trainer.

    Args:
        step: Optimizer steps done when it begins.
        total: Optimizer steps of the run.
        now: Seconds of a monotonic clock.
    """

    def __init__(self, step: int = 0, total: int = 0, now: float = 0.0) -> None:
        self.step, self.total = step, total
        self.logs: dict[str, Any] = {}
        self.steps: list[int] = []
        self.series: dict[str, list[float | None]] = {name: [] for name in FOLLOWED}
        self.rewards: dict[str, list[float | None]] = {}
        """Name of a reward function -> its mean at each step."""
        self.completions: list[dict[str, Any]] = []
        self.findings: list[Finding] = []
        self.tokens_per_second = 0.0
        self._paces: deque[float] = deque(maxlen=PACE_STEPS)
        self._last, self._tokens = now, 0.0

    def add(self, step: int, total: int, logs: dict[str, Any], now: float) -> None:
        """Take in the metrics of a step that sampled."""
        seconds = max(1e-9, now - self._last)
        self._paces.append(seconds / max(1, step - self.step))
        tokens = finite_number(logs.get("num_tokens")) or self._tokens
        self.tokens_per_second = (tokens - self._tokens) / seconds
        self._last, self._tokens = now, tokens
        self.step, self.total, self.logs = step, total, logs
        self.steps.append(step)
        for name, metrics in FOLLOWED.items():
            self.series[name].append(next(iter(finite_numbers(map(logs.get, metrics))), None))
        for name in reward_names(logs):
            self.rewards.setdefault(name, [None] * (len(self.steps) - 1))
        for name, values in self.rewards.items():
            values.append(finite_number(logs.get(f"rewards/{name}/mean")))

    def last(self, name: str) -> float | None:
        """Return the newest value of a series."""
        return self.series[name][-1] if self.series[name] else None

    @property
    def with_signal(self) -> list[float | None]:
        """Share of the groups of each step whose scores differ."""
        return [None if value is None else 1.0 - value for value in self.series["without_signal"]]

    @property
    def seconds_left(self) -> float:
        """By the median of the last steps; 0 before the first."""
        return median(self._paces) * max(0, self.total - self.step) if self._paces else 0.0

    @property
    def line(self) -> str:
        """The newest step as one line."""
        if not self.steps:
            return f"step {self.step}/{self.total}"
        return progress_line(
            self.step, self.total, self.logs, self.tokens_per_second, self.seconds_left
        )


def reward_names(logs: dict[str, Any]) -> list[str]:
    """Return the names of the reward functions in a row of metrics."""
    ends = ("rewards/", "/mean")
    return [
        key[len(ends[0]) : -len(ends[1])]
        for key in logs
        if key.startswith(ends[0]) and key.endswith(ends[1])
    ]


def progress_line(
    step: int, total: int, logs: dict[str, Any], tokens_per_second: float, seconds_left: float
) -> str:
    """Return one step as text: rewards, KL, length, speed, time left.

    Args:
        step: Optimizer steps done.
        total: Optimizer steps of the run.
        logs: As TRL logs them.
        tokens_per_second: Prompt and completion tokens of this step over its wall time.
        seconds_left: Estimate for the rest.
    """
    parts = [f"step {step:>{len(str(total))}}/{total}", f"reward {_number(logs.get('reward'), 3)}"]
    names = reward_names(logs)
    if len(names) > 1:
        parts += [
            f"{escaped(name)} {_number(logs.get(f'rewards/{name}/mean'), 3)}" for name in names
        ]
    for name, metric, digits in (("kl", "kl", 4), ("length", "completions/mean_length", 1)):
        if metric in logs:
            parts.append(f"{name} {_number(logs[metric], digits)}")
    shares = (("no signal", "signal/groups_without"), ("cut off", "completions/clipped_ratio"))
    for name, metric in shares:
        if share := finite_number(logs.get(metric)):
            parts.append(f"{name} {share:.0%}")
    parts += [f"{tokens_per_second:.0f} tokens/s", f"{_clock(seconds_left)} left"]
    return "  ".join(parts)


def finding_line(finding: Finding) -> str:
    """Return a finding as one line: what it is, and the setting to change or what was seen."""
    of = f" ({finding.reward})" if finding.reward else ""
    rest = f"set {finding.setting}" if finding.setting else finding.remedy
    return escaped(f"{finding.level}: {finding.kind}{of}; {rest}")


def trend(values: Sequence[float | None]) -> str:
    """Return how a series moves: ``up 0.12``, ``down 0.03``, ``steady``, or "" of a short one.

    The last steps, at most ten, are compared with as many before them; what is less than two
    standard errors is steady.
    """
    known = _known(values[-4 * TREND_STEPS :])
    num = min(TREND_STEPS, len(known) // 2)
    if num < 2:
        return ""
    new, old = known[-num:], known[-2 * num : -num]
    moved = fmean(new) - fmean(old)
    error = math.sqrt((variance(new) + variance(old)) / num)
    if abs(moved) <= max(SURE * error, 1e-9 * max(1.0, abs(fmean(old)))):
        return "steady"
    return f"{'up' if moved > 0 else 'down'} {abs(moved):.2g}"


def sparkline(values: Sequence[float | None], width: int) -> str:
    """Return a series as at most ``width`` blocks, from its lowest to its highest value."""
    points = _thinned(values, width)
    known = _known(points)
    if not known:
        return ""
    low, high = min(known), max(known)
    scale = (len(BLOCKS) - 1) / (high - low) if high > low else 0.0
    flat = "" if scale else BLOCKS[len(BLOCKS) // 2]
    return "".join(
        " " if value is None else flat or BLOCKS[round((value - low) * scale)] for value in points
    )


def _thinned(values: Sequence[float | None], most: int) -> list[float | None]:
    """Return at most so many values, each the mean of its neighbours."""
    count = len(values)
    if count <= most:
        return list(values)
    edges = [place * count // most for place in range(most + 1)]
    return [mean_or_none(_known(values[edges[place] : edges[place + 1]])) for place in range(most)]


def _known(values: Sequence[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _number(value: object, digits: int) -> str:
    number = finite_number(value)
    return "none" if number is None else f"{number:.{digits}f}"


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(max(0.0, seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


# --- the views -----------------------------------------------------------------------------------


class LiveView:
    """Follow a run and show nothing of it; the views say what is done at its events.

    A trainer's callback without transformers' base class, whose import takes seconds: the view is
    chosen, and a wrong ``RLOO_KIT_LIVE`` refused, before anything heavy is loaded.
    """

    def __init__(self) -> None:
        self.progress = Progress()
        self._open = False

    def __getattr__(self, name: str) -> Callable[..., None]:
        """Let the trainer's other events pass."""
        if name.startswith("on_"):
            return lambda *_, **__: None
        raise AttributeError(f"{type(self).__name__!r} has no attribute {name!r}")

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Start the clock; only the first of several processes shows anything."""
        self.close()
        self._open = bool(getattr(state, "is_world_process_zero", True))

        def begin() -> None:
            self.progress = Progress(state.global_step, state.max_steps, time.monotonic())
            self._begin()

        self._safely(begin)

    def on_completions(
        self, args: Any, state: Any, control: Any, records: Any = (), **_: Any
    ) -> None:
        """Keep the completions of the newest batch, rows as in completions.jsonl."""
        self._safely(lambda: setattr(self.progress, "completions", list(records or ())))

    def on_findings(
        self, args: Any, state: Any, control: Any, findings: Any = (), **_: Any
    ) -> None:
        """Take in what the doctor finds now; an empty list when it is gone."""

        def take() -> None:
            self.progress.findings = list(findings or ())
            self._show_findings()

        self._safely(take)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        """Show a step; a further pass over a batch, and the summary, have no reward."""

        def show() -> None:
            if logs and "reward" in logs:
                self.progress.add(state.global_step, state.max_steps, logs, time.monotonic())
                self._show_step()

        self._safely(show)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Leave the last state standing."""
        self.close()

    def close(self) -> None:
        """Leave the last state standing and give the terminal back; harmless when done before."""
        self._safely(self._end)
        self._open = False

    def _begin(self) -> None:
        """Get ready; nothing has been sampled yet."""

    def _show_step(self) -> None:
        """Show the newest step of ``self.progress``."""

    def _show_findings(self) -> None:
        """Show findings that are new, or gone."""

    def _end(self) -> None:
        """Finish."""

    def _safely(self, act: Callable[[], None]) -> None:
        """Do it while the view is open; a fault closes the view, with a warning."""
        if not self._open:
            return
        try:
            act()
        except Exception as exc:
            self._open = False
            with contextlib.suppress(Exception):
                self._end()
            with contextlib.suppress(Warning):  # where warnings are errors
                warnings.warn(
                    f"the live view ended and the run goes on: {type(exc).__name__}: {exc}",
                    RuntimeWarning,
                    stacklevel=2,
                )


class PlainLines(LiveView):
    """One line a step, and one for each finding when it first appears.

    Args:
        stream: Where it is written; None: stdout.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        super().__init__()
        self.stream = stream or sys.stdout
        self._told: set[tuple[str, str | None]] = set()

    def _begin(self) -> None:
        self._told.clear()

    def _show_step(self) -> None:
        self._write(self.progress.line)

    def _show_findings(self) -> None:
        for finding in self.progress.findings:
            name = (finding.kind, finding.reward)
            if name not in self._told:
                self._told.add(name)
                self._write(finding_line(finding))

    def _write(self, line: str) -> None:
        encoding = self.stream.encoding or "utf-8"
        self.stream.write(line.encode(encoding, "backslashreplace").decode(encoding) + "\n")
        self.stream.flush()


# --- the terminal --------------------------------------------------------------------------------


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

        columns, lines = _size_of(self.stream)
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
        self._live.console.size = _size_of(self.stream)
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
            live.console.size = _size_of(self.stream)
            live.update(self._panel())
        finally:
            live.stop()

    def _panel(self) -> Any:
        from rich.console import Group
        from rich.panel import Panel
        from rich.text import Text

        columns, lines = _size_of(self.stream)
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
    note = f"  {done:.0%}  {_clock(progress.seconds_left) + ' left' if progress.steps else waiting}"
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
    rows = [("reward", series["reward"], ".3f", f"spread {_number(spread, 3)}")]
    rows += [
        (f" {escaped(name)}", values, ".3f", "")
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
    return escaped(" ".join(text[: 4 * limit].split()))[:limit]


# --- the notebook --------------------------------------------------------------------------------


class NotebookFigure(LiveView):
    """A figure with a line of numbers and the findings, updated in place; no widget is needed.

    It is drawn at the first and at the last step, and between them as often as fits into 2% of the
    run's time. Without matplotlib the text alone is updated.
    """

    def __init__(self) -> None:
        super().__init__()
        self._handle: Any = None
        self._spent = self._cost = self._started = self._updated = 0.0
        self._can_draw = False
        self.num_drawings = 0
        """Since the run began."""

    def _begin(self) -> None:
        from IPython.display import display

        self._can_draw = find_spec("matplotlib") is not None
        if self._can_draw:  # loading it is no part of a drawing's cost
            import matplotlib.backends.backend_agg
            import matplotlib.figure
            import matplotlib.style  # noqa: F401
        self._spent = self._cost = 0.0
        self.num_drawings = 0
        self._handle = display(self._content(b""), raw=True, display_id=True)
        self._started = self._updated = time.monotonic()

    def _show_step(self) -> None:
        now = time.monotonic()
        affordable = self._spent + self._cost <= DRAWING_SHARE * (now - self._started)
        if len(self.progress.steps) == 1 or (affordable and now - self._updated >= REFRESH_SECONDS):
            self._update()

    def _end(self) -> None:
        if self._handle is not None:
            self._update()
            self._handle = None

    def _update(self) -> None:
        start = time.monotonic()
        picture = _figure_png(self.progress) if self._can_draw and self.progress.steps else b""
        self._handle.update(self._content(picture), raw=True)
        self.num_drawings += bool(picture)
        self._updated = time.monotonic()
        self._cost = self._updated - start
        self._spent += self._cost

    def _content(self, picture: bytes) -> dict[str, str]:
        """Return the output as HTML and as plain text."""
        line = self.progress.line
        findings = [finding_line(finding) for finding in self.progress.findings]
        told = findings or ["the doctor finds nothing"] * bool(self.progress.steps)
        text = html.escape("\n".join([line, *told]))
        parts = [f'<pre style="white-space: pre-wrap; margin: 0 0 4px">{text}</pre>']
        if picture:
            data = base64.b64encode(picture).decode("ascii")
            parts.append(
                f'<img alt="{html.escape(line)}" width="{FIGURE_WIDTH}" '
                f'src="data:image/png;base64,{data}">'
            )
        return {"text/plain": "\n".join([line, *told]), "text/html": "".join(parts)}


FIGURE_WIDTH, FIGURE_HEIGHT = 900, 400
"""Pixels of a page; the picture has half as many again, for sharp screens."""
COLOURS = ("#1f5fa8", "#c4571b", "#2b7a3d", "#8a3a8f", "#7a6a1f", "#555555")


def _figure_png(progress: Progress) -> bytes:
    """Return the curves of a run as a PNG; pyplot and its settings are not touched."""
    from matplotlib import style
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    series = progress.series
    charts: list[tuple[str, dict[str, list[float | None]]]] = [
        ("reward, and its spread within a group", {"": series["reward"]}),
        ("reward functions", progress.rewards),
        ("KL of a completion (nats)", {"": series["kl/sequence"]}),
        ("length of a completion (tokens)", {"": series["length"]}),
        ("share of completions cut off", {"": series["truncated"]}),
        ("share of groups with signal", {"": progress.with_signal}),
    ]
    with style.context("default"):
        size = (FIGURE_WIDTH / 100, FIGURE_HEIGHT / 100)
        figure = Figure(figsize=size, dpi=150, facecolor="white")
        canvas = FigureCanvasAgg(figure)
        figure.subplots_adjust(0.05, 0.07, 0.99, 0.93, wspace=0.18, hspace=0.35)
        axes = figure.subplots(2, 3).flat
        for axis, (title, curves) in zip(axes, charts, strict=True):
            _chart(axis, title, progress.steps, curves)
            if title.startswith("share"):
                axis.set_ylim(-0.03, 1.03)
            if curves.get("") is series["reward"]:
                _band(axis, progress.steps, series["reward"], series["spread"])
        picture = io.BytesIO()
        canvas.print_png(picture)
    return picture.getvalue()


def _chart(
    axis: Any, title: str, steps: Sequence[int], curves: dict[str, list[float | None]]
) -> None:
    """Draw curves over steps; names are shown where there are several."""
    axis.set_title(title, fontsize=8, loc="left")
    axis.tick_params(labelsize=7)
    axis.grid(visible=True, color="#dddddd", linewidth=0.5)
    places = _thinned(steps, CHART_POINTS)
    for number, (name, values) in enumerate(curves.items()):
        points = [math.nan if y is None else y for y in _thinned(values, CHART_POINTS)]
        colour = COLOURS[number % len(COLOURS)]
        mark = "." if len(points) < 3 else None
        axis.plot(places, points, color=colour, linewidth=1.2, marker=mark, label=_plain(name))
    if any(curves):
        for text in axis.legend(fontsize=6, loc="best", framealpha=0.6).get_texts():
            text.set_parse_math(False)


def _band(axis: Any, steps: Sequence[int], values: Sequence[float | None], spread: Any) -> None:
    """Shade one standard deviation within a group to both sides of the reward."""
    pairs = [
        (math.nan, math.nan) if None in (mean, wide) else (mean - wide, mean + wide)
        for mean, wide in zip(
            _thinned(values, CHART_POINTS), _thinned(spread, CHART_POINTS), strict=True
        )
    ]
    places = _thinned(steps, CHART_POINTS)
    low, high = zip(*pairs, strict=True)
    axis.fill_between(places, low, high, color=COLOURS[0], alpha=0.15, linewidth=0)


def _plain(name: str) -> str:
    """Return a name in letters that the figure's font has."""
    return name.encode("ascii", "backslashreplace").decode("ascii")
