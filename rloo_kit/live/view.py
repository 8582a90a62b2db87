"""Live views as callbacks of the trainer: no output, plain lines, or a figure in a notebook.

An error in a view closes the view, but does not end the run.
"""

import sys
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from rloo_kit.diagnosis.registry import Finding
from rloo_kit.live.figure import DRAWING_SECONDS, page_of
from rloo_kit.live.progress import Progress, finding_line


class LiveView(TrainerCallback):
    """View that records the progress of a run but shows nothing. Subclasses show it."""

    def __init__(self) -> None:
        self.progress = Progress()
        self._open = False

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Open the view, and reset its progress to the beginning of the training."""
        self._open = True
        seen = state.num_input_tokens_seen
        self.progress = Progress(state.global_step, state.max_steps, time.monotonic(), seen)
        self._safely(self._begin)

    def on_findings(self, *_: object, findings: Sequence[Finding], **__: object) -> None:
        """Replace the findings with the current ones.

        The doctor calls this method when its findings change, right before the step is logged.
        ``on_log`` then shows the new findings with that step.
        """
        self.progress.findings = [*findings]

    def on_log(  # pyright: ignore[reportIncompatibleMethodOverride]  # transformers passes logs
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any],
        **_: Any,
    ) -> None:
        """Show the step that was logged.

        Logs without a reward are skipped: they belong to a further pass over a batch, or to the
        summary at the end.
        """
        if "reward" in logs:
            self.progress.add(state.global_step, state.max_steps, logs, time.monotonic())
            self._safely(self._show_step)

    def close(self) -> None:
        """Show the final state and close the view. A second call does nothing."""
        self._safely(self._end)
        self._open = False

    def _begin(self) -> None:
        """Prepare the view before the first step."""

    def _show_step(self) -> None:
        """Show the newest step of ``self.progress``."""

    def _end(self) -> None:
        """Show the final state of the run."""

    def _safely(self, act: Callable[[], None]) -> None:
        """Call a function if the view is open. An error closes the view, with a warning."""
        if not self._open:
            return
        try:
            act()
        except Exception as exc:
            self._open = False
            warnings.warn(
                f"the live view failed and was closed, but the run continues: "
                f"{type(exc).__name__}: {exc}",
                RuntimeWarning,
                stacklevel=2,
            )


class PlainLines(LiveView):
    """View that prints a line for each step, and a line for each finding when it first appears."""

    def _begin(self) -> None:
        self._shown: set[str] = set()

    def _show_step(self) -> None:
        # A step's line is always new. A finding's line is new only when the finding first appears
        for line in (self.progress.line, *map(finding_line, self.progress.findings)):
            if line not in self._shown:
                self._shown.add(line)
                sys.stdout.write(f"{line}\n")
        sys.stdout.flush()


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
