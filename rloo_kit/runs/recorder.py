"""What a run leaves in its folder while it goes: metrics, completions, scores, the report."""

import contextlib
import json
import math
import os
import shutil
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from rloo_kit.diagnosis.record import finite_number, read_json
from rloo_kit.diagnosis.watch import RunWatch
from rloo_kit.errors import DiskError
from rloo_kit.evaluation.evaluator import Evaluation
from rloo_kit.output_folder import without_nan, write_json
from rloo_kit.report.page import write_report
from rloo_kit.text.redaction import redact_tree

ALONG_THE_WAY = ("rewards", "num_prompts", "mean_length")
"""What is kept of an evaluation during training."""
APPENDED = ("metrics.jsonl", "completions.jsonl")
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
        self.resumed_at: list[int] = []
        """Steps that the run was gone on with after."""
        self.begin: Callable[[], None] = lambda: None
        """Called once, when the training begins."""
        self.began = False
        self.stop: Callable[[str], None] = lambda reason: None
        """Ends the run when the disk refuses what happened; rows then wait in memory."""
        self._started, self._earlier = time.monotonic(), 0.0
        self._waiting: dict[str, list[dict[str, Any]]] = {}
        self._evaluation: dict[str, Any] = {}
        self._next_report = 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Take the folder into use: from here on nothing refuses the run."""
        if not self.began:
            self.began = True
            self.begin()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **_: Any) -> None:
        """Append one line to metrics.jsonl."""
        row = {"step": state.global_step, "time": time.time(), **logs}
        self._append("metrics.jsonl", [row])
        self.steps = state.global_step
        if self.steps > 1 and time.monotonic() > self._next_report:
            self.write_report()

    def on_completions(
        self, args: Any, state: Any, control: Any, records: list[dict[str, Any]], **_: Any
    ) -> None:
        """Append the completions of one generation batch, with rewards, KL and advantages."""
        self._append("completions.jsonl", records)

    def on_state(self, args: Any, state: Any, control: Any, held: dict[str, Any], **_: Any) -> None:
        """Keep how much of each file belongs to the steps that are done."""
        sizes = {}
        for name in APPENDED:
            path = self.folder / name
            waiting = _lines(self._waiting.get(name, []))
            sizes[name] = (path.stat().st_size if path.exists() else 0) + len(waiting)
        held["record"] = {
            "sizes": sizes,
            "resumed_at": list(self.resumed_at),
            "seconds": self._earlier + time.monotonic() - self._started,
        }

    def on_resume(
        self, args: Any, state: Any, control: Any, held: dict[str, Any], **_: Any
    ) -> None:
        """Cut off what the files say of later steps, which are made again."""
        record = held.get("record")
        if record is None:
            return
        self.steps, self._earlier = state.global_step, record["seconds"]
        self.resumed_at = [*record["resumed_at"], state.global_step]
        for name in APPENDED:  # and no name that a file says
            path, size = self.folder / name, record["sizes"][name]
            there = path.stat().st_size if path.exists() else 0
            if there > size:
                os.truncate(path, size)
            elif there < size:
                self._cut_half_a_line(path)
        self._take_up_scores(state.global_step)

    def _take_up_scores(self, step: int) -> None:
        """Take up the scores of the steps that are done; what is damaged counts as none."""
        path = self.folder / "evaluation.json"
        found, self._evaluation = read_json(path) or {}, {}
        before, during = found.get("before"), found.get("during")
        if isinstance(before, dict):
            self._evaluation["before"] = before
        rows = during if isinstance(during, list) else ()
        done = [row for row in rows if isinstance(row, dict)]
        done = [row for row in done if (finite_number(row.get("step")) or math.inf) <= step]
        if done:
            self._evaluation["during"] = done
        if path.exists():
            write_json(path, redact_tree(self._evaluation))

    @staticmethod
    def _cut_half_a_line(path: Path) -> None:
        warnings.warn(
            f"{path.name} lost its end, as after a power cut: the run goes on, without those rows",
            RuntimeWarning,
            stacklevel=2,
        )
        if path.exists():
            os.truncate(path, path.read_bytes().rfind(b"\n") + 1)

    def on_checkpoint(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Bring the rows to the disk, so that they do not end before the checkpoint does."""
        for name in APPENDED:
            with contextlib.suppress(OSError), (self.folder / name).open("rb") as file:
                os.fsync(file.fileno())

    def on_rescue(self, args: Any, state: Any, control: Any, folder: Path, **_: Any) -> None:
        """Take what was recorded to the folder that the checkpoint went to."""
        for path in self.folder.iterdir():
            if path.is_file() and path.suffix in (".yaml", ".json", ".jsonl"):
                shutil.copy(path, folder / path.name)
        self.folder = folder
        self.write_waiting()

    def write_waiting(self) -> None:
        """Write the rows that the disk refused before.

        Raises:
            DiskError: It refuses still.
        """
        for name in list(self._waiting):
            self._append(name, [], last=True)

    def _append(self, name: str, rows: list[dict[str, Any]], *, last: bool = False) -> None:
        """Append rows to a file; what the disk refuses waits in memory, and the run stops."""
        rows = [*self._waiting.pop(name, []), *rows]
        try:
            _append(self.folder / name, rows)
        except OSError as exc:
            self._waiting[name] = rows
            told = (
                f"{name} cannot be written ({exc.strerror or exc}): free some space on the disk of "
                f"{str(self.folder)!r}"
            )
            if last:
                raise DiskError(told) from exc
            self.stop(told)

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
        write_json(self.folder / "evaluation.json", redact_tree(self._evaluation))

    def write_end(
        self, how: str, reason: str, steps: int, seconds: float, watch: RunWatch | None = None
    ) -> None:
        """Write how the run ended to end.json.

        Args:
            how: finished, interrupted, stopped or failed.
            reason: In a sentence; "" where it finished.
            steps: Optimizer steps.
            seconds: Of the training, since it was last gone on with.
            watch: What may have ended it.
        """
        end = {"how": how, "reason": reason, "steps": steps}
        end["seconds"] = self._earlier + seconds
        if self.resumed_at:
            end["resumed_at"] = self.resumed_at
        if watch is not None and watch.stopped_on:
            end["finding"] = watch.stopped_on.as_dict()
            end["kept_step"] = watch.best.step if watch.best else None
        write_json(self.folder / "end.json", redact_tree({**end, "time": time.time()}))

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
        self._last: tuple[int, float | None] = (-1, None)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Score when it is time; the end of the training has a score of its own."""
        if state.global_step % self.every == 0 and state.global_step < state.max_steps:
            evaluation = self.score()
            self.tell(evaluation, state.global_step)
            first = next(iter(evaluation.rewards.values()), None)
            self._last = (state.global_step, first)
            self.rest()

    def on_state(self, args: Any, state: Any, control: Any, held: dict[str, Any], **_: Any) -> None:
        """Let the checkpoint of a step that was scored have that score, and others none."""
        step, score = self._last
        held["held_out"] = score if step == state.global_step else None


def _append(path: Path, rows: list[dict[str, Any]]) -> None:
    """Append whole lines, or nothing: half of a write is taken back."""
    size = path.stat().st_size if path.exists() else 0
    try:
        with path.open("ab") as lines:
            lines.write(_lines(rows))
    except OSError:
        if path.exists():
            os.truncate(path, size)
        raise


def _lines(rows: list[dict[str, Any]]) -> bytes:
    lines = (json.dumps(redact_tree(without_nan(row)), ensure_ascii=False) + "\n" for row in rows)
    return "".join(lines).encode("utf-8", "surrogatepass")
