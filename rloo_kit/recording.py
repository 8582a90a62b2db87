"""What a run leaves in its folder while it goes: metrics, completions, scores, the report."""

import json
import math
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from rloo_kit.evaluation import Evaluation
from rloo_kit.report import write_report
from rloo_kit.watch import RunWatch

ALONG_THE_WAY = ("rewards", "num_prompts", "mean_length")
"""What is kept of an evaluation during training."""
REPORT_SHARE = 0.012
"""Of the run's time, at most, that writing the report takes while it goes."""


class RunRecorder(TrainerCallback):
    """Write what belongs to a run into its folder: while it goes, so that a killed run has it too.

    Args:
        folder: Of the run; it exists.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.steps = 0
        """Optimizer steps that were recorded."""
        self._evaluation: dict[str, Any] = {}
        self._next_report = 0.0

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **_: Any) -> None:
        """Append one line to metrics.jsonl."""
        row = {"step": state.global_step, "time": time.time(), **logs}
        _append(self.folder / "metrics.jsonl", [row])
        self.steps = state.global_step
        if self.steps > 1 and time.monotonic() > self._next_report:
            self.write_report()

    def on_completions(
        self, args: Any, state: Any, control: Any, records: list[dict[str, Any]], **_: Any
    ) -> None:
        """Append the completions of one generation batch, with rewards, KL and advantages."""
        _append(self.folder / "completions.jsonl", records)

    def write_evaluation(self, evaluation: Evaluation, step: int | None = None) -> None:
        """Write scores on held-out prompts to evaluation.json.

        Args:
            evaluation: The scores.
            step: Optimizer steps before it; 0 is before the training, None after it.
        """
        found = evaluation.as_dict()
        if step:
            found = {"step": step, **{name: found[name] for name in ALONG_THE_WAY}}
            self._evaluation.setdefault("during", []).append(found)
        else:
            self._evaluation["after" if step is None else "before"] = found
        _write(self.folder / "evaluation.json", self._evaluation)

    def write_end(
        self, how: str, reason: str, steps: int, seconds: float, watch: RunWatch | None = None
    ) -> None:
        """Write how the run ended to end.json.

        Args:
            how: finished, interrupted, stopped or failed.
            reason: In a sentence; "" where it finished.
            steps: Optimizer steps.
            seconds: Of the training.
            watch: What may have ended it.
        """
        end = {"how": how, "reason": reason, "steps": steps, "seconds": seconds}
        if watch is not None and watch.stopped_on:
            end["finding"] = watch.stopped_on.as_dict()
            end["kept_step"] = watch.best.step if watch.best else None
        _write(self.folder / "end.json", {**end, "time": time.time()})

    def write_report(self) -> None:
        """Write report.html; a report that cannot be written ends no run."""
        started = time.monotonic()
        try:
            write_report([self.folder])
        except Exception as exc:
            warnings.warn(f"report.html was not written: {exc}", RuntimeWarning, stacklevel=2)
        now = time.monotonic()
        self._next_report = now + (now - started) / REPORT_SHARE


class HeldOutScores(TrainerCallback):
    """Score held-out prompts every so many steps of a training.

    Args:
        every: Steps.
        score: Scores them.
        tell: Called with the scores and the steps done.
        rest: Called after that; an engine gives the memory of its weights back.
    """

    def __init__(
        self,
        every: int,
        score: Callable[[], Evaluation],
        tell: Callable[[Evaluation, int], None],
        rest: Callable[[], None],
    ) -> None:
        self.every, self.score, self.tell, self.rest = every, score, tell, rest

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Score when it is time; the end of the training has a score of its own."""
        if state.global_step % self.every == 0 and state.global_step < state.max_steps:
            self.tell(self.score(), state.global_step)
            self.rest()


def _write(path: Path, content: dict[str, Any]) -> None:
    """Write JSON beside the file, and then in its place: a killed run leaves no half of it."""
    beside = path.with_suffix(".part")
    beside.write_text(json.dumps(_finite(content), ensure_ascii=False) + "\n", encoding="utf-8")
    beside.replace(path)


def _append(path: Path, rows: list[dict[str, Any]]) -> None:
    with path.open("a", encoding="utf-8") as lines:
        for row in rows:
            lines.write(json.dumps(_finite(row), ensure_ascii=False) + "\n")


def _finite(value: Any) -> Any:
    """Return ``value`` with NaN and infinities as None: JSON has neither."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
