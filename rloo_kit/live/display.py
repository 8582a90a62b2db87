"""Choose the view of a run: panel in a terminal, figure in a notebook, lines elsewhere."""

import os
import sys
from importlib.util import find_spec
from typing import TextIO

from rloo_kit.errors import ConfigError
from rloo_kit.live.notebook import NotebookFigure
from rloo_kit.live.terminal import TerminalPanel, size_of
from rloo_kit.live.view import LiveView, finding_line

# Environment variable that chooses the view
VARIABLE = "RLOO_KIT_LIVE"
CHOICES = ("auto", "panel", "notebook", "plain", "off")
MIN_COLUMNS = 60


def live_progress(stream: TextIO | None = None) -> LiveView:
    """Return the view that fits the output, or the one that RLOO_KIT_LIVE names.

    Args:
        stream: Where it is written; None: stdout, and in a notebook its output.

    Raises:
        ConfigError: RLOO_KIT_LIVE has another value, or is ``notebook`` outside of one.
    """
    choice = os.environ.get(VARIABLE) or "auto"
    if choice not in CHOICES:
        raise ConfigError(f"{VARIABLE} is {choice!r}, must be one of {', '.join(CHOICES)}")
    # A given stream is written to, even in a notebook.
    in_notebook = stream is None and _in_notebook()
    if choice == "notebook" and not in_notebook:
        raise ConfigError(
            f"{VARIABLE} is 'notebook', and this process is no notebook kernel: set it to auto"
        )
    target = stream or sys.stdout
    if choice == "auto":
        choice = "notebook" if in_notebook else "panel" if _can_redraw(target) else "plain"
    if choice == "off":
        return LiveView()
    if choice == "notebook":
        return NotebookFigure()
    return TerminalPanel(target) if choice == "panel" else PlainLines(target)


def _in_notebook() -> bool:
    """Return whether this process is a kernel; IPython in a terminal is none."""
    ipython = sys.modules.get("IPython")
    return hasattr(ipython.get_ipython(), "kernel") if ipython else False


def _can_redraw(stream: TextIO) -> bool:
    """Return whether the stream is a terminal that can hold the panel and move its cursor."""
    if find_spec("rich") is None or os.environ.get("TERM", "") in ("", "dumb"):
        return False
    is_utf = (stream.encoding or "").lower().startswith("utf")
    return stream.isatty() and is_utf and size_of(stream)[0] >= MIN_COLUMNS


class PlainLines(LiveView):
    """One line a step, and one for each finding when it first appears."""

    def __init__(self, stream: TextIO | None = None) -> None:
        super().__init__()
        self.stream = stream or sys.stdout
        self._shown: set[tuple[str, str | None]] = set()

    def _begin(self) -> None:
        self._shown.clear()

    def _show_step(self) -> None:
        self._write(self.progress.line)

    def _show_findings(self) -> None:
        for finding in self.progress.findings:
            name = (finding.kind, finding.reward)
            if name not in self._shown:
                self._shown.add(name)
                self._write(finding_line(finding))

    def _write(self, line: str) -> None:
        encoding = self.stream.encoding or "utf-8"
        self.stream.write(line.encode(encoding, "backslashreplace").decode(encoding) + "\n")
        self.stream.flush()
