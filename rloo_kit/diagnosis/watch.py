"""The doctor's rules while a run goes: what is found is told, and may stop it at its best weights.

A finding is told when several checks in a row made it, so that chance in one batch tells nothing;
what only held-out prompts show, when two looks at them agree.
"""

import math
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from statistics import fmean, variance
from typing import Any

from transformers import TrainerCallback

from rloo_kit.config.run_file import RunConfig
from rloo_kit.diagnosis.record import KEPT_SIZE, BothEnds, RunRecord, finite_numbers, text_of_row
from rloo_kit.diagnosis.rules import Finding
from rloo_kit.diagnosis.run_rules import find_in_run

IN_A_ROW = 3
"""Checks that must agree before a finding is told."""
FIRST_STEPS, FIRST_STEPS_OF_SIGNAL = 5, 10
"""Steps before the first finding is told; where it is about scores that do not differ."""
ABOUT_SIGNAL = frozenset(
    {
        "cold_start",
        "constant_reward",
        "learning_rate_too_low",
        "no_signal",
        "reward_collapse",
        "saturated_reward",
    }
)
BY_HELD_OUT = frozenset({"reward_hacking"})
TIME_SHARE = 0.005
"""Of the run's time, at most, that checks take."""
KEPT_ROWS = 1000
"""Completions of the beginning that the rules see, and as many of the end."""
BEST_OVER = 4
"""Batches whose mean reward says how good the weights are."""


class BestWeights:
    """The trained weights when they were at their best, in main memory.

    Best are the latest whose mean reward over ``BEST_OVER`` batches is below the highest by no more
    than chance (one standard error): a lucky batch at the beginning does not hold what is learnt
    later.

    Args:
        parameters: The trained ones.
    """

    def __init__(self, parameters: Sequence[Any]) -> None:
        self.step = 0
        """Optimizer steps these weights have behind them."""
        self.value = -math.inf
        """Mean reward, or score on held-out prompts."""
        self._parameters = list(parameters)
        self._batches: deque[list[float]] = deque(maxlen=BEST_OVER)
        self._top = (-math.inf, 0.0)
        self._kept: list[Any] = []

    def see_batch(self, step: int, group_means: list[float], *, healthy: bool) -> None:
        """Copy the weights if the batch that they just sampled puts them among the best.

        The batch alone must be as good as chance allows, too: else the mean of the batches before
        it would vouch for weights that have just been ruined.

        Args:
            step: Optimizer steps that the weights have behind them.
            group_means: Mean score of each group of the batch, as the rewards gave it.
            healthy: Whether nothing is found that ought to stop the run.
        """
        if not group_means:
            return
        self._batches.append(group_means)
        means = [mean for batch in self._batches for mean in batch]
        spread = variance(means) if len(means) > 1 else 0.0
        if self._kept and not healthy:
            return
        top, error_of_top = self._top
        alone = fmean(group_means) >= top - math.sqrt(spread / len(group_means) + error_of_top)
        if alone or not self._kept:
            self._see(step, fmean(means), spread / len(means))

    def see_held_out(self, step: int, scores: list[float]) -> None:
        """Copy the weights if held-out prompts put them among the best.

        Args:
            step: Optimizer steps that the weights have behind them.
            scores: Of the prompts.
        """
        if len(scores) > 1:
            self._see(step, fmean(scores), variance(scores) / len(scores))

    def _see(self, step: int, value: float, error: float) -> None:
        top, error_of_top = self._top
        if self._kept and value < top - math.sqrt(error + error_of_top):
            return
        if value > top:
            self._top = (value, error)
        self.step, self.value = step, value
        self._kept = [values.detach().to("cpu", copy=True) for values in self._parameters]

    def as_tree(self) -> dict[str, Any]:
        """Return what a checkpoint keeps; the weights are never changed in place."""
        return {
            "step": self.step,
            "value": self.value,
            "top": self._top,
            "batches": list(self._batches),
            "weights": list(self._kept),
        }

    def take_up(self, tree: dict[str, Any]) -> None:
        """Take up what ``as_tree`` returned."""
        self.step, self.value, self._top = tree["step"], tree["value"], tree["top"]
        self._batches.extend(tree["batches"])
        self._kept = tree["weights"]

    def restore(self) -> bool:
        """Put the best weights into the model; return whether there were any."""
        for parameter, values in zip(self._parameters, self._kept, strict=False):
            parameter.data.copy_(values)
        return bool(self._kept)

    def let_go(self) -> None:
        """Hold neither the model's weights nor their copies any more."""
        self._parameters, self._kept = [], []


class RunWatch(TrainerCallback):
    """Look for the doctor's findings after every step.

    Args:
        config: Of the run; its settings make the remedies.
        tell: Called with the findings whenever other ones are made than before.
        stop: Called with a sentence, at most once, when the run must end.
        stop_on: Kinds of findings that end it. The best weights are put back then.
        parameters: Gives the trained parameters.
    """

    def __init__(
        self,
        config: RunConfig | None = None,
        tell: Callable[[list[Finding]], None] = lambda findings: None,
        stop: Callable[[str], None] = lambda reason: None,
        stop_on: Sequence[str] = (),
        parameters: Callable[[], Sequence[Any]] = list,
    ) -> None:
        self.config, self.tell, self.stop = config, tell, stop
        self.stop_on = frozenset(stop_on)
        self.parameters = parameters
        self.by_held_out = False
        """Whether held-out prompts are scored on the way, and say which weights are best."""
        self.past: RunRecord | None = None
        """What a run that is gone on with has left."""
        self._begin()

    def _begin(self) -> None:
        self.findings: list[Finding] = []
        """Told last."""
        self.stopped_on: Finding | None = None
        self.best: BestWeights | None = None
        self._metrics: list[dict[str, Any]] = []
        self._completions = BothEnds(KEPT_ROWS, KEPT_SIZE)
        self._evaluation: dict[str, Any] = {}
        self._checks = self._looks = 0
        self._since: dict[str, tuple[int, int]] = {}
        self._suspected: set[str] = set()
        self._next_check = 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Begin a new record; scores on held-out prompts from before it are kept."""
        evaluation = self._evaluation
        self._begin()
        self._evaluation = evaluation
        if self.stop_on:
            self.best = BestWeights(self.parameters())
            if self.by_held_out and "before" in evaluation:
                self._see_scores(0, evaluation["before"])

    def on_state(self, args: Any, state: Any, control: Any, held: dict[str, Any], **_: Any) -> None:
        """Keep the best weights."""
        if self.best is not None:
            held["best_weights"] = self.best.as_tree()

    def on_resume(
        self, args: Any, state: Any, control: Any, held: dict[str, Any], **_: Any
    ) -> None:
        """Take up the record of the steps that are done, and the best weights."""
        done = state.global_step
        self._metrics = [row for row in state.log_history if row.get("step", 0) <= done]
        if self.past is not None:
            self._keep(row for row in self.past.completions if (row.get("step") or 0) <= done)
        if self.best is not None and "best_weights" in held:
            self.best.take_up(held["best_weights"])

    def on_completions(
        self,
        args: Any,
        state: Any,
        control: Any,
        records: list[dict[str, Any]],
        rollout: Any,
        **_: Any,
    ) -> None:
        """Keep a batch; remember the weights that sampled it when it is among the best."""
        self._keep(records)
        if self.best is None or self.by_held_out:
            return
        scores = rollout.sampled.scores.view(-1, rollout.num_generations)
        means = finite_numbers(scores.nanmean(dim=1).tolist())
        self.best.see_batch(state.global_step, means, healthy=self._is_healthy)

    def _keep(self, records: Iterable[dict[str, Any]]) -> None:
        for record in records:
            self._completions.add(record, len(text_of_row(record)))

    def see_held_out(self, step: int, evaluation: dict[str, Any]) -> None:
        """Take scores on held-out prompts into account.

        Args:
            step: Optimizer steps done; 0 before the first.
            evaluation: As ``Evaluation.as_dict`` returns it.
        """
        if not step:
            self._evaluation = {"before": evaluation}
            return
        self._evaluation["after"] = evaluation
        self._looks += 1
        if self.best is not None:
            self._see_scores(step, evaluation)

    def _see_scores(self, step: int, evaluation: dict[str, Any]) -> None:
        name = next(iter(evaluation["rewards"]), None)
        scores = finite_numbers(sample["rewards"].get(name) for sample in evaluation["samples"])
        if self.best is not None:
            self.best.see_held_out(step, scores)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **_: Any) -> None:
        """Check, unless checks have taken their share of the time."""
        self._metrics.append({"step": state.global_step, **logs})
        started = time.monotonic()
        if "reward" not in logs or self.stopped_on or started < self._next_check:
            return
        try:
            self._check(state.global_step)
        except Exception as exc:
            self._next_check = math.inf
            warnings.warn(
                f"the doctor looks no further and the run goes on: {type(exc).__name__}: {exc}",
                RuntimeWarning,
                stacklevel=2,
            )
            return
        taken = time.monotonic() - started
        self._next_check = started + taken / TIME_SHARE

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Put the best weights back if a finding ended the run."""
        if self.stopped_on and self.best:
            self.best.restore()

    def close(self) -> None:
        """Hold nothing of the model once the training is over, however it ended."""
        if self.best:
            self.best.let_go()

    @property
    def _is_healthy(self) -> bool:
        return not self.stop_on & self._suspected

    def _check(self, step: int) -> None:
        record = RunRecord(
            self._metrics, self._completions.rows, self._evaluation or None, self.config
        )
        found = find_in_run(record)
        self._checks += 1
        now = (self._checks, self._looks)
        self._since = {f.kind: self._since.get(f.kind, now) for f in found}
        self._suspected = {f.kind for f in found if f.level == "error"}
        sure = [f for f in found if self._is_sure(f, step)]
        if list(map(_name, sure)) != list(map(_name, self.findings)):
            self.tell(sure)
        self.findings = sure
        for finding in sure:
            if finding.kind in self.stop_on and finding.level == "error":
                self.stopped_on = finding
                self.stop(self._why(finding))
                return

    def _is_sure(self, finding: Finding, step: int) -> bool:
        check, look = self._since[finding.kind]
        if finding.kind in BY_HELD_OUT and self._looks == look:
            return False
        needed = FIRST_STEPS_OF_SIGNAL if finding.kind in ABOUT_SIGNAL else FIRST_STEPS
        return self._checks - check + 1 >= IN_A_ROW and step >= needed

    def _why(self, finding: Finding) -> str:
        change = f"; change {finding.setting}" if finding.setting else f"; {finding.remedy}"
        kept = ""
        if self.best and math.isfinite(self.best.value):
            kept = (
                f"; the weights after step {self.best.step} are kept, at a mean score of "
                f"{self.best.value:.3g}"
            )
        return f"{finding.kind}: {finding.evidence}{kept}{change}"


def _name(finding: Finding) -> tuple[str, str | None, str]:
    return finding.kind, finding.reward, finding.level
