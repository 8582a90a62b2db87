"""Figure of a run's progress for a notebook. matplotlib is imported only to draw it."""

import base64
import html
import io
from importlib.util import find_spec

from rloo_kit.live.progress import Progress, finding_line
from rloo_kit.live.series import FOLLOWED

# Minimum number of seconds between two drawings; a drawing takes less than a second
DRAWING_SECONDS = 10.0


def page_of(progress: Progress) -> dict[str, str]:
    """Return the progress of a run as plain text and as HTML, under their MIME types.

    The HTML contains the figure if matplotlib is installed and the run has made a step.
    """
    line = progress.line
    text = "\n".join([line, *map(finding_line, progress.findings)])
    page = f'<pre style="white-space: pre-wrap; margin: 0 0 4px">{html.escape(text)}</pre>'
    if progress.metrics.rows and find_spec("matplotlib") is not None:
        picture = base64.b64encode(figure_png(progress)).decode("ascii")
        source = f"data:image/png;base64,{picture}"
        page += f'<img alt="{html.escape(line)}" width="900" src="{source}">'
    return {"text/plain": text, "text/html": page}


def figure_png(progress: Progress) -> bytes:
    """Return a PNG file with the curves of a run.

    It is drawn without pyplot, so that the user's own figures and settings are not touched.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    metrics = progress.metrics
    charts = [(chart.title, chart.lines[:1]) for chart in FOLLOWED]
    charts.append(("Reward functions", tuple(metrics.reward_lines())))
    picture = io.BytesIO()
    # A $ in a reward's name would start a formula
    with rc_context({"font.size": 7, "lines.linewidth": 1.2, "text.parse_math": False}):
        # 1.5 times the pixels that the page shows, for sharp screens
        figure = Figure(figsize=(9, 4), dpi=150, layout="constrained")
        axes = [*figure.subplots(2, 4).flat]
        for axis, (title, lines) in zip(axes, charts, strict=True):
            axis.set_title(title, loc="left")
            for line in lines:
                values, low, high = metrics.curve(line)
                if len(values):
                    axis.plot(metrics.steps, values, marker=".", markersize=2, label=line.label)
                    axis.fill_between(metrics.steps, low, high, alpha=0.15, linewidth=0)
        # Without `handles`, matplotlib leaves out a name that begins with "_", and warns if no
        # line has a name
        if drawn := axes[-1].lines:
            axes[-1].legend(handles=drawn, framealpha=0.6)
        figure.savefig(picture, format="png")
    return picture.getvalue()
