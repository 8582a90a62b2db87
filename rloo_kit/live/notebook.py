"""A run as a figure in a notebook."""

import base64
import html
import io
import math
import time
from importlib.util import find_spec
from typing import Any

from rloo_kit.live.view import LiveView, Progress, finding_line

# Least time between two drawings, each of which takes a part of a second
DRAWING_SECONDS = 10.0


class NotebookFigure(LiveView):
    """A figure with a line of numbers and the findings, updated in place without a widget.

    It is drawn at the first and the last step, and between them every ten seconds. Without
    matplotlib only the text is updated.
    """

    def __init__(self) -> None:
        super().__init__()
        self._handle: Any = None
        self._due = 0.0

    def _begin(self) -> None:
        from IPython.display import display

        self._handle = display(page_of(self.progress), raw=True, display_id=True)
        self._due = time.monotonic()

    def _show_step(self) -> None:
        if time.monotonic() >= self._due:
            self._update()

    def _end(self) -> None:
        if self._handle is not None:
            self._update()
            self._handle = None

    def _update(self) -> None:
        self._handle.update(page_of(self.progress), raw=True)
        self._due = time.monotonic() + DRAWING_SECONDS


def page_of(progress: Progress) -> dict[str, str]:
    """Return a run so far as HTML and as plain text."""
    line = progress.line
    findings = [finding_line(finding) for finding in progress.findings]
    findings = findings or ["the doctor finds nothing"] * bool(progress.steps)
    text = "\n".join([line, *findings])
    page = f'<pre style="white-space: pre-wrap; margin: 0 0 4px">{html.escape(text)}</pre>'
    if progress.steps and find_spec("matplotlib") is not None:
        picture = base64.b64encode(figure_png(progress)).decode("ascii")
        source = f"data:image/png;base64,{picture}"
        page += f'<img alt="{html.escape(line)}" width="900" src="{source}">'
    return {"text/plain": text, "text/html": page}


def figure_png(progress: Progress) -> bytes:
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
        # Half as many pixels again as the page shows, for sharp screens.
        figure = Figure(figsize=(9, 4), dpi=150)
        figure.subplots_adjust(0.05, 0.07, 0.99, 0.93, wspace=0.18, hspace=0.35)
        canvas = FigureCanvasAgg(figure)
        axes = figure.subplots(2, 3).flat
        for axis, (title, curves) in zip(axes, charts, strict=True):
            axis.set_title(title, fontsize=8, loc="left")
            axis.tick_params(labelsize=7)
            for name, values in curves.items():
                label = name.encode("ascii", "backslashreplace").decode("ascii")  # font's letters
                points = [math.nan if value is None else value for value in values]
                axis.plot(
                    progress.steps, points, linewidth=1.2, marker=".", markersize=2, label=label
                )
            if any(curves):
                for text in axis.legend(fontsize=6, framealpha=0.6).get_texts():
                    text.set_parse_math(False)
        pairs = zip(series["reward"], series["spread"], strict=True)
        known = [(math.nan, 0.0) if m is None or s is None else (m, s) for m, s in pairs]
        low, high = ([mean + sign * spread for mean, spread in known] for sign in (-1, 1))
        figure.axes[0].fill_between(progress.steps, low, high, alpha=0.15, linewidth=0)
        picture = io.BytesIO()
        canvas.print_png(picture)
    return picture.getvalue()
