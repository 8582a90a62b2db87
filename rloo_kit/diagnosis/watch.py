"""Diagnosis during training: reports findings, and can end the run and restore the best weights.

A finding is reported only after several checks in a row have found it, so that one odd batch is not
enough. A finding that only held-out prompts show needs two evaluations that agree.
"""

import math
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from statistics import fmean
from typing import Any

from transformers import TrainerCallback, TrainerState, TrainingArguments

from rloo_kit.config.run_file import RunConfig
from rloo_kit.diagnosis.record import KEPT_ROWS, RunRecord, read_rows
from rloo_kit.diagnosis.registry import Finding
from rloo_kit.diagnosis.run_rules import KINDS, find_in_run
from rloo_kit.rloo.rollout import Rollout
from rloo_kit.text.numbers import finite_numbers

# Number of checks in a row that must find a fault before it is reported
CHECKS_IN_A_ROW = 3
# First step at which a finding is reported; findings about equal scores need more steps
FIRST_STEPS = 5
FIRST_STEPS_OF_SIGNAL = 10
# Of n logs, one in every n // CHECKS is checked. A check takes 12 microseconds per log of the run,
# so the checks together take one or two milliseconds per log.
CHECKS = 100
# Number of batches over which the score of the weights is averaged
BEST_OVER = 4
# Two findings with equal values of these fields are the same finding, even if their numbers differ
_identity = attrgetter("kind", "reward", "level")


class BestWeights:
    """The weights with the highest score so far, copied to main memory.

    Args:
        parameters: The parameters that are trained.
    """

    def __init__(self, parameters: Sequence[Any]) -> None:
        self.step = 0  # optimizer step after which the weights were copied
        self.value = -math.inf
        self._parameters = list(parameters)
        self._batches: deque[float] = deque(maxlen=BEST_OVER)
        self._kept: list[Any] = []

    def see_batch(self, step: int, score: float) -> None:
        """Copy the current weights if the mean score of the last batches is the highest so far.

        The mean is over four batches (``BEST_OVER``), since one batch is noisy. The weights are not
        copied if the batch that they sampled scores below that mean.

        Args:
            step: Optimizer step after which the weights sampled the batch.
            score: Mean score of the batch.
        """
        self._batches.append(score)
        mean = fmean(self._batches)
        if score >= mean:
            # The mean of fewer batches is too noisy, so it counts as the lowest score
            self.see(step, mean if len(self._batches) == BEST_OVER else -math.inf)

    def see(self, step: int, score: float) -> None:
        """Copy the current weights if their score is at least the highest score so far."""
        if score >= self.value:
            self.step = step
            self.value = score
            self._kept = [values.detach().to("cpu", copy=True) for values in self._parameters]

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint. Later steps do not change the tensors in it."""
        return {
            "step": self.step,
            "value": self.value,
            "batches": list(self._batches),
            "weights": self._kept,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state that ``state_dict`` returned."""
        self.step, self.value, self._kept = state["step"], state["value"], state["weights"]
        self._batches.extend(state["batches"])

    def restore(self) -> None:
        """Copy the best weights back into the model."""
        for parameter, values in zip(self._parameters, self._kept, strict=False):
            parameter.data.copy_(values)

    def release(self) -> None:
        """Drop the references to the model's weights and to their copies, to free the memory."""
        self._parameters = self._kept = []


@dataclass(eq=False)
class RunWatch(TrainerCallback):
    """Trainer callback that diagnoses the run while it trains (see ``on_log``).

    If ``data.held_out_every`` is set and ``see_held_out`` was called for step 0, the scores of
    held-out prompts choose the best weights. Otherwise the scores of the training batches do.

    Args:
        config: Settings of the run, from which remedies are computed.
        tell: Function that is called with all current findings when they change.
        stop: Function that is called at most once, with the reason, when a finding must end the
            run.
        stop_on: Kinds of findings that end the run if their level is ``error``. The best weights
            are then restored.
        parameters: Function that returns the parameters that are trained.
    """

    config: RunConfig
    tell: Callable[[list[Finding]], None]
    stop: Callable[[str], None]
    stop_on: Sequence[str] = ()
    parameters: Callable[[], Sequence[Any]] = list

    def __post_init__(self) -> None:
        """Set the state that the watch has before training."""
        self._evaluation: dict[str, Any] = {}
        self._score_before: float | None = None
        self._begin()

    def _begin(self) -> None:
        self.findings: list[Finding] = []  # findings of the last check that were confirmed
        self.stopped_on: Finding | None = None
        self.best: BestWeights | None = None
        self._completions: list[dict[str, Any]] = []  # the first and the last ones
        self._num_checks = self._num_evaluations = 0
        self._since: dict[str, tuple[int, int]] = {}
        self._is_waiting = False  # a finding that can end the run waits to be confirmed
        self._failed = False

    @property
    def by_held_out(self) -> bool:
        """True if the scores of held-out prompts, not of batches, choose the best weights."""
        return bool(self.config.data.held_out_every) and "before" in self._evaluation

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """Reset the watch. The scores of held-out prompts from before training are kept."""
        self._begin()
        if self.stop_on:
            self.best = BestWeights(self.parameters())
            if self.by_held_out:
                self.see_held_out(0, self._evaluation["before"], self._score_before)

    def on_state(self, *_: Any, held: dict[str, Any]) -> None:
        """Add the best weights and the unconfirmed findings to ``held``, a checkpoint's state."""
        held["watch"] = {
            "after": self._evaluation.get("after"),
            "num_checks": self._num_checks,
            "num_evaluations": self._num_evaluations,
            "since": self._since,
            "is_waiting": self._is_waiting,
        }
        if self.best:
            held["best_weights"] = {"by_held_out": self.by_held_out, **self.best.state_dict()}

    def on_resume(
        self,
        args: TrainingArguments,
        state: TrainerState,
        *_: Any,
        held: dict[str, Any],
    ) -> None:
        """Restore the state of the watch, but not the weights of the model.

        The best weights and the unconfirmed findings come from ``held``, the state of a checkpoint.
        The first and the last completions of the finished steps come from ``completions.jsonl``.
        """
        rows = read_rows(Path(str(args.output_dir)) / "completions.jsonl", KEPT_ROWS)
        self._completions = [row for row in rows if (row.get("step") or 0) <= state.global_step]
        if watch := held.get("watch"):
            self._num_checks, self._num_evaluations = watch["num_checks"], watch["num_evaluations"]
            self._since, self._is_waiting = watch["since"], watch["is_waiting"]
            if watch["after"] and "before" in self._evaluation:
                self._evaluation["after"] = watch["after"]
        if self.best:
            kept = held.get("best_weights")
            if kept and kept.get("by_held_out", self.by_held_out) == self.by_held_out:
                self.best.load_state_dict(kept)
            else:  # no weights were kept, or another kind of score chose them
                self.best = BestWeights(self.parameters())
                self.best.see(state.global_step, -math.inf)  # until a score is known

    def on_completions(
        self,
        args: TrainingArguments,
        state: TrainerState,
        *_: Any,
        records: list[dict[str, Any]],
        rollout: Rollout,
    ) -> None:
        """Keep the records of a batch, and copy the weights that sampled it if they are the best.

        The weights are copied only if the scores of batches choose the best weights, and not while
        a finding that can end the run waits to be confirmed.
        """
        self._completions += records
        del self._completions[KEPT_ROWS:-KEPT_ROWS]
        if self.best and not self.by_held_out:
            scores = rollout.sampled.scores.view(-1, rollout.num_generations)  # (P, G)
            means = finite_numbers(scores.nanmean(dim=1).tolist())
            if means and not self._is_waiting:
                self.best.see_batch(state.global_step, fmean(means))

    def see_held_out(self, step: int, evaluation: dict[str, Any], score: float | None) -> None:
        """Store an evaluation on held-out prompts, and copy the current weights if they are best.

        Args:
            step: Number of optimizer steps so far; 0 before training.
            evaluation: Result of ``Evaluation.as_dict``.
            score: Mean of the reward that chooses the best weights; None if it gave no score.
        """
        if step:
            # Without texts, because checkpoints store it
            samples = [{"rewards": sample["rewards"]} for sample in evaluation["samples"]]
            self._evaluation["after"] = {"rewards": evaluation["rewards"], "samples": samples}
            self._num_evaluations += 1
        else:
            self._evaluation = {"before": evaluation}
            self._score_before = score
        if self.best and score is not None:
            self.best.see(step, score)

    def on_log(  # pyright: ignore[reportIncompatibleMethodOverride]  # transformers passes logs
        self,
        args: TrainingArguments,
        state: TrainerState,
        *_: Any,
        logs: dict[str, Any],
        **__: Any,
    ) -> None:
        """Check the run for findings.

        Only logs with a reward count. The first ``2 * CHECKS`` of them are all checked. Later, when
        there are n logs, only one in every ``n // CHECKS`` is checked. While a finding that can end
        the run waits to be confirmed, every log is checked. Time does not influence which logs are
        checked. Nothing is checked after a finding ended the run or a check failed.
        """
        if "reward" not in logs or self.stopped_on or self._failed:
            return
        num_logs = sum("reward" in row for row in state.log_history)
        if not self._is_waiting and num_logs % max(1, num_logs // CHECKS):
            return
        try:
            self._check(state)
        except Exception as exc:  # a faulty rule must not end a run
            self._failed = True
            warnings.warn(
                f"the doctor failed and makes no more checks, but the run continues "
                f"({type(exc).__name__}: {exc})",
                RuntimeWarning,
                stacklevel=1,  # the caller is transformers, whose warnings the command hides
            )

    def on_train_end(self, *_: Any, **__: Any) -> None:
        """Restore the best weights if a finding ended the run."""
        if self.stopped_on and self.best:
            self.best.restore()

    def close(self) -> None:
        """Release the model after the training."""
        if self.best:
            self.best.release()

    def _check(self, state: TrainerState) -> None:
        record = RunRecord(state.log_history, self._completions, self._evaluation, self.config)
        found = find_in_run(record)
        self._num_checks += 1
        now = (self._num_checks, self._num_evaluations)
        self._since = {f.kind: self._since.get(f.kind, now) for f in found}
        self._is_waiting = any(map(self._can_end, found))
        confirmed = [f for f in found if self._is_confirmed(f, state.global_step)]
        if list(map(_identity, confirmed)) != list(map(_identity, self.findings)):
            self.tell(confirmed)
        self.findings = confirmed
        if ending := next(filter(self._can_end, confirmed), None):
            self.stopped_on = ending
            self.stop(self._why(ending))

    def _can_end(self, finding: Finding) -> bool:
        return finding.kind in self.stop_on and finding.level == "error"

    def _is_confirmed(self, finding: Finding, step: int) -> bool:
        check, evaluation = self._since[finding.kind]
        # Only held-out prompts show this kind
        if finding.kind == "reward_hacking" and self._num_evaluations == evaluation:
            return False
        about_signal = KINDS[finding.kind].about_signal
        needed = FIRST_STEPS_OF_SIGNAL if about_signal else FIRST_STEPS
        return self._num_checks - check + 1 >= CHECKS_IN_A_ROW and step >= needed

    def _why(self, finding: Finding) -> str:
        kept = ""
        if self.best and math.isfinite(self.best.value):
            kept = (
                f"; the weights after step {self.best.step} are kept (mean score "
                f"{self.best.value:.3g})"
            )
        change = f"change {finding.setting}" if finding.setting else finding.remedy
        return f"{finding.kind}: {finding.evidence}{kept}; {change}"
