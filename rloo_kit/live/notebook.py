"""A run as a figure in a notebook."""

import base64
import html
import io
import math
import time
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

from rloo_kit.live.view import REFRESH_SECONDS, LiveView, Progress, finding_line, thinned

# Of the run's time, at most, that goes into the drawings of a notebook
DRAWING_SHARE = 0.02
# Points of a curve, at most; of a longer run each is the mean of several steps
CHART_POINTS = 400


class NotebookFigure(LiveView):
    """A figure with a line of numbers and the findings, updated in place without a widget.

    It is drawn at the first and the last step, and between them as often as fits into 2% of the
    run's time. Without matplotlib only the text is updated.
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
        if self._can_draw:  # its import is no part of a drawing's cost
            import matplotlib.backends.backend_agg
            import matplotlib.figure
            import matplotlib.style  # noqa: F401
        self._spent = self._cost = 0.0
        self.num_drawings = 0
        self._handle = display(self._content(b""), raw=True, display_id=True)
        self._started = self._updated = time.monotonic()

    def _show_step(self) -> None:
        now = time.monotonic()
        # The next drawing is expected to cost as much as the last one.
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
        findings = findings or ["the doctor finds nothing"] * bool(self.progress.steps)
        text = "\n".join([line, *findings])
        page = f'<pre style="white-space: pre-wrap; margin: 0 0 4px">{html.escape(text)}</pre>'
        if picture:
            source = f"data:image/png;base64,{base64.b64encode(picture).decode('ascii')}"
            page += f'<img alt="{html.escape(line)}" width="{FIGURE_WIDTH}" src="{source}">'
        return {"text/plain": text, "text/html": page}


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
    points_at = thinned(steps, CHART_POINTS)
    for number, (name, values) in enumerate(curves.items()):
        points = [math.nan if y is None else y for y in thinned(values, CHART_POINTS)]
        colour = COLOURS[number % len(COLOURS)]
        mark = "." if len(points) < 3 else None
        label = name.encode("ascii", "backslashreplace").decode("ascii")  # the font's letters
        axis.plot(points_at, points, color=colour, linewidth=1.2, marker=mark, label=label)
    if any(curves):
        for text in axis.legend(fontsize=6, loc="best", framealpha=0.6).get_texts():
            text.set_parse_math(False)


def _band(
    axis: Any, steps: Sequence[int], values: Sequence[float | None], spread: Sequence[float | None]
) -> None:
    """Shade one standard deviation within a group to both sides of the reward."""
    places, means, widths = (thinned(part, CHART_POINTS) for part in (steps, values, spread))
    pairs = zip(means, widths, strict=True)
    known = [(math.nan, 0.0) if m is None or w is None else (m, w) for m, w in pairs]
    low, high = ([mean + sign * wide for mean, wide in known] for sign in (-1, 1))
    axis.fill_between(places, low, high, color=COLOURS[0], alpha=0.15, linewidth=0)
