"""The choice of the live view: by the output, or by an environment variable."""

import os
import sys
from typing import TextIO

from rloo_kit.errors import ConfigError
from rloo_kit.live.notebook import NotebookFigure
from rloo_kit.live.terminal import TerminalPanel
from rloo_kit.live.view import LiveView, PlainLines

# Environment variable that chooses the view
VARIABLE = "RLOO_KIT_LIVE"
CHOICES = ("auto", "panel", "notebook", "plain", "off")
MIN_COLUMNS = 60


def live_progress(stream: TextIO | None = None) -> LiveView:
    """Return the view that fits the output, or the one that RLOO_KIT_LIVE names.

    Args:
        stream: Where it is written; None: stdout, and in a notebook its output.

    Raises:
        ConfigError: RLOO_KIT_LIVE has another value.
    """
    choice = os.environ.get(VARIABLE) or "auto"
    if choice not in CHOICES:
        raise ConfigError(f"{VARIABLE} is {choice!r}, must be one of {', '.join(CHOICES)}")
    in_notebook = stream is None and _in_notebook()
    target = stream or sys.stdout
    if choice == "auto":
        choice = "notebook" if in_notebook else "panel" if _can_redraw(target) else "plain"
    if choice == "notebook":
        return NotebookFigure()
    if choice == "panel":
        return TerminalPanel(target)
    return LiveView() if choice == "off" else PlainLines(target)


def _in_notebook() -> bool:
    """Return whether this process is a kernel; IPython in a terminal is none."""
    ipython = sys.modules.get("IPython")
    return hasattr(ipython.get_ipython(), "kernel") if ipython else False


def _can_redraw(stream: TextIO) -> bool:
    """Return whether the stream is a terminal that can hold the panel and move its cursor."""
    if os.environ.get("TERM", "") in ("", "dumb") or not stream.isatty():
        return False
    is_utf = (stream.encoding or "").lower().startswith("utf")
    return is_utf and os.get_terminal_size(stream.fileno()).columns >= MIN_COLUMNS
