"""View of a run as a figure in a notebook."""

import time
from typing import Any

from rloo_kit.live.figure import DRAWING_SECONDS, page_of
from rloo_kit.live.view import LiveView


class NotebookFigure(LiveView):
    """Figure with a line of numbers and the findings, updated in place without a widget.

    It is drawn at the first and the last step, and every ten seconds in between. Without matplotlib
    only the text is shown.
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
