"""Views as callbacks of the trainer: none at all, and plain lines.

An error in a view closes the view and never ends the run.
"""

import contextlib
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any, TextIO

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from rloo_kit.diagnosis.registry import Finding
from rloo_kit.live.progress import Progress, finding_line


class LiveView(TrainerCallback):
    """Follow a run and show nothing; subclasses show it.

    Args:
        stream: Where text is written; None: stdout.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self.stream = stream or sys.stdout
        self.progress = Progress()
        self._open = False

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Start the clock."""
        self._open = True
        seen = state.num_input_tokens_seen
        self.progress = Progress(state.global_step, state.max_steps, time.monotonic(), seen)
        self._safely(self._begin)

    def on_findings(self, *_: object, findings: Sequence[Finding], **__: object) -> None:
        """Replace the findings by those of now."""
        self.progress.findings = [*findings]
        if self.progress.metrics.rows:
            self._safely(self._show_step)

    def on_log(  # pyright: ignore[reportIncompatibleMethodOverride]  # transformers passes logs
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any],
        **_: Any,
    ) -> None:
        """Show a step; a further pass over a batch, and the summary, have no reward."""
        if "reward" in logs:
            self.progress.add(state.global_step, state.max_steps, logs, time.monotonic())
            self._safely(self._show_step)

    def close(self) -> None:
        """Keep the last state on the screen; may be called again."""
        self._safely(self._end)
        self._open = False

    def _begin(self) -> None:
        """Prepare; nothing has been sampled yet."""

    def _show_step(self) -> None:
        """Show the newest step of ``self.progress``."""

    def _end(self) -> None:
        """Finish."""

    def _safely(self, act: Callable[[], None]) -> None:
        """Call while the view is open; an error closes the view, with a warning."""
        if not self._open:
            return
        try:
            act()
        except Exception as exc:
            self._open = False
            with contextlib.suppress(Exception):
                self._end()
            warnings.warn(
                f"the live view ended, the run continues: {type(exc).__name__}: {exc}",
                RuntimeWarning,
                stacklevel=2,
            )


class PlainLines(LiveView):
    """One line a step, and one for each finding when it first appears."""

    def _begin(self) -> None:
        self._shown: set[str] = set()

    def _show_step(self) -> None:
        # The line of a step is new, findings are lines that were not shown before.
        for line in (self.progress.line, *map(finding_line, self.progress.findings)):
            if line not in self._shown:
                self._shown.add(line)
                self.stream.write(f"{line}\n")
        self.stream.flush()
