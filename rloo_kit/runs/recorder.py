"""Recorder of a run: it writes metrics, completions, scores and the report during training.

The rows of a step are written when the step ends, so that they are not lost if the run is killed.
"""

import contextlib
import json
import os
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerState, TrainingArguments

from rloo_kit.data.images import save_thumbnails
from rloo_kit.diagnosis.watch import RunWatch
from rloo_kit.errors import DiskError
from rloo_kit.evaluation.evaluator import Evaluation
from rloo_kit.output_folder import read_json, without_nan, write_json
from rloo_kit.report.page import write_report
from rloo_kit.text.redaction import redact_tree

# The fields of an evaluation during training that are written. Other evaluations are written in
# full
KEPT_DURING_TRAINING = ("rewards", "num_prompts", "mean_length")
# Files to which each step appends rows
ROW_FILES = ("metrics.jsonl", "completions.jsonl")
# Maximum share of the training time that is spent on writing the report
REPORT_SHARE = 0.012


class RunRecorder(TrainerCallback):
    """Callback that writes the record of a run into its folder.

    Args:
        folder: Folder of the run; it exists.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.steps = 0  # optimizer steps that were recorded
        self.resumed_at: list[int] = []  # steps after which the run was resumed
        # Prepares the folder of a run that resumes, once the trainer has accepted its checkpoint;
        # None for a new run, whose folder is ready
        self.make_ready: Callable[[], None] | None = None
        self._started = time.monotonic()
        self._earlier = 0.0
        self._evaluation: dict[str, Any] = {}
        self._next_report = 0.0

    def on_log(  # pyright: ignore[reportIncompatibleMethodOverride]  # transformers passes logs
        self,
        args: TrainingArguments,
        state: TrainerState,
        *_: Any,
        logs: dict[str, Any],
        **__: Any,
    ) -> None:
        """Append a line to metrics.jsonl; write the report too if ``REPORT_SHARE`` allows it."""
        self.steps = state.global_step
        self._append("metrics.jsonl", [{"step": self.steps, "time": time.time(), **logs}])
        if self.steps > 1 and time.monotonic() > self._next_report:
            self.write_report()

    def on_completions(self, *_: Any, records: list[dict[str, Any]], **__: Any) -> None:
        """Append the completions of one generation batch to completions.jsonl.

        Each record has one completion with its rewards, KL and advantage.
        """
        self._append("completions.jsonl", records)

    # --- checkpoints -----------------------------------------------------------------------------

    def on_state(self, *_: Any, held: dict[str, Any]) -> None:
        """Store the present state of the record in the checkpoint.

        The state is the size of each file in bytes, the steps at which the run was resumed, and the
        duration of the run so far.
        """
        held["record"] = {
            "sizes": {name: _size(self.folder / name) for name in ROW_FILES},
            "resumed_at": list(self.resumed_at),
            "seconds": self._earlier + time.monotonic() - self._started,
        }

    def on_resume(
        self,
        args: TrainingArguments,
        state: TrainerState,
        *_: Any,
        held: dict[str, Any],
    ) -> None:
        """Prepare the folder, and remove the rows and scores of steps after the checkpoint.

        These steps are trained again, and then write their rows and scores again.
        """
        # A training without a recorder, started in Python, may have written the checkpoint
        record = held.get("record") or {"sizes": {}, "resumed_at": [], "seconds": 0.0}
        self.steps, self._earlier = state.global_step, record["seconds"]
        if self.make_ready is not None:
            self.make_ready()
        self.resumed_at = [*record["resumed_at"], state.global_step]
        for name in ROW_FILES:  # not the names in the checkpoint, which may be any path
            path = self.folder / name
            size = record["sizes"].get(name)
            if size is not None and _size(path) > size:
                os.truncate(path, size)
        if found := read_json(self.folder / "evaluation.json"):
            found.pop("after", None)
            if "during" in found:
                found["during"] = [row for row in found["during"] if row["step"] <= self.steps]
            self._evaluation = found
            self._write_scores()

    def on_checkpoint(self, *_: Any) -> None:
        """Sync the files to disk before a checkpoint that records their sizes is written."""
        for name in ROW_FILES:
            with contextlib.suppress(OSError), (self.folder / name).open("rb") as file:
                os.fsync(file.fileno())

    # --- files -----------------------------------------------------------------------------------

    def _append(self, name: str, rows: list[dict[str, Any]]) -> None:
        """Append rows to a .jsonl file in the folder; secrets are masked.

        Raises:
            DiskError: The disk is full, or the file cannot be written.
        """
        try:
            rows = save_thumbnails(rows, self.folder)
            lines = (
                json.dumps(redact_tree(without_nan(row)), ensure_ascii=False) + "\n" for row in rows
            )
            with (self.folder / name).open("ab") as file:
                # a tokenizer may return lone surrogates, which UTF-8 cannot encode: write their
                # JSON escapes
                file.write("".join(lines).encode("utf-8", "backslashreplace"))
        except OSError as exc:
            raise DiskError(
                f"{name} cannot be written ({exc.strerror or exc}): free some space on the disk of "
                f"{str(self.folder)!r} and resume with --resume"
            ) from exc

    def write_evaluation(self, evaluation: Evaluation, step: int | None = None) -> None:
        """Add the scores of the held-out prompts to evaluation.json.

        Args:
            evaluation: The scores.
            step: Number of optimizer steps before this evaluation; 0: before training; None: after
                training.
        """
        found = save_thumbnails(evaluation.as_dict(), self.folder)
        if step:
            found = {"step": step, **{name: found[name] for name in KEPT_DURING_TRAINING}}
            self._evaluation.setdefault("during", []).append(found)
        else:
            self._evaluation["after" if step is None else "before"] = found
        self._write_scores()

    def _write_scores(self) -> None:
        """Write all evaluations so far to evaluation.json."""
        write_json(self.folder / "evaluation.json", redact_tree(self._evaluation))

    def write_end(
        self, how: str, reason: str, steps: int, seconds: float, watch: RunWatch | None = None
    ) -> None:
        """Write to end.json how the run ended, and write the report for the last time.

        Args:
            how: finished, interrupted, stopped or failed.
            reason: The reason in a sentence; "" for a finished run.
            steps: Number of optimizer steps of the run.
            seconds: Duration of the training since the start or the last resume.
            watch: The callback that stops a run because of a finding. If it did so, the finding
                and the step of the best weights are written too.
        """
        end = {"how": how, "reason": reason, "steps": steps, "seconds": self._earlier + seconds}
        if self.resumed_at:
            end["resumed_at"] = self.resumed_at
        if watch is not None and watch.stopped_on:
            end["finding"] = asdict(watch.stopped_on)
            end["kept_step"] = watch.best.step if watch.best else None
        write_json(self.folder / "end.json", redact_tree({**end, "time": time.time()}))
        self.write_report()

    def write_report(self) -> None:
        """Write report.html; if that fails, warn and continue the run."""
        started = time.monotonic()
        try:
            write_report([self.folder])
        except Exception as exc:
            warnings.warn(f"report.html was not written: {exc}", RuntimeWarning, stacklevel=2)
        now = time.monotonic()
        self._next_report = now + (now - started) / REPORT_SHARE


def _size(path: Path) -> int:
    """Return the size of a file in bytes; 0 if it does not exist."""
    return path.stat().st_size if path.exists() else 0
