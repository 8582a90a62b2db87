"""Live view of a run as a figure in a notebook."""

import time
from typing import Any

from rloo_kit.live.figure import DRAWING_SECONDS, page_of
from rloo_kit.live.view import LiveView


class NotebookFigure(LiveView):
    """View that shows a line of numbers, the findings and a figure in the output of a cell.

    The output is updated in place, without a widget: at the first step, at the last step, and at
    most every ten seconds in between. If matplotlib is not installed, there is no figure.
    """

    def _begin(self) -> None:
        from IPython.display import display

        self._handle: Any = display(page_of(self.progress), raw=True, display_id=True)
        self._due = time.monotonic()

    def _show_step(self) -> None:
        if time.monotonic() >= self._due:
            self._end()
            self._due = time.monotonic() + DRAWING_SECONDS

    def _end(self) -> None:
        self._handle.update(page_of(self.progress), raw=True)
