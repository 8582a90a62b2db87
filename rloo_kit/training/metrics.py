"""What a training logs: TRL's metrics and tables, and a record of every completion."""

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rloo_kit.machine.hardware import GIB
from rloo_kit.machine.memory import take_peak
from rloo_kit.processes import Team
from rloo_kit.rloo.metrics import (
    Tally,
    completion_metrics,
    completion_records,
    legacy_rollout_metrics,
    rollout_metrics,
)
from rloo_kit.rloo.rollout import Rollout, ScoredBatch
from rloo_kit.text.redaction import redact, redact_tree


@dataclass(eq=False)
class StepLog:
    """Collects metrics and completions until TRL writes its next line."""

    metrics: dict[str, list[float]]
    """TRL's: values since its last line, which shows their means."""
    tables: dict[str, Any]
    """TRL's: columns of the completions that ``log_completions`` shows."""
    extra_columns: dict[str, list[Any]]
    """TRL's: what rewards gave to ``log_extra`` since the last rollout."""
    extra_metrics: dict[str, list[float]]
    """TRL's: what rewards gave to ``log_metric`` since the last rollout."""
    names: list[str]
    """Of the reward functions."""
    team: Team
    thoughts: Callable[[list[int], Any], dict[str, Any]]
    """What a record says of the thought in a completion."""
    legacy: bool
    """Add the older TRL's metrics."""
    episodes: int = 0
    """Completions that were trained on so far."""
    seconds: float = 0.0
    """That the optimizer step in progress took so far ..."""
    elsewhere: float = 0.0
    """... and those of them that were not learning."""
    groups_of_step: tuple[int, int] = (0, 0)
    """A step, and how many groups it has learned from so far."""
    first_started: float | None = None
    """When the first step began."""

    def note(self, name: str, value: float) -> None:
        """Add a value; the next line shows the mean of all."""
        self.metrics[name].append(value)

    def note_all(self, values: dict[str, float]) -> None:
        """Add several values."""
        for name, value in values.items():
            self.note(name, value)

    def note_drawn(self, batch: ScoredBatch, seconds: float, state: Any) -> None:
        """Count what was sampled, as TRL does."""
        lengths = [len(ids) for ids in batch.tokens.completion_ids]
        state.num_input_tokens_seen += sum(batch.tokens.lengths)
        self.metrics["num_tokens"] = [state.num_input_tokens_seen]
        self.note_all(completion_metrics(lengths, batch.ended))
        self.note("speed/generation_tokens_per_second", sum(lengths) / seconds)

    def note_rollout(self, rollout: Rollout, step: int) -> list[dict[str, Any]]:
        """Log a rollout whose advantages are final; return a record of every completion."""
        older = legacy_rollout_metrics(rollout) if self.legacy else {}
        self.note_all(rollout_metrics(rollout, self.names) | older)  # the older sign wins
        of_step, first = self.groups_of_step
        first = first if of_step == step else 0  # a step may learn from several rollouts
        self.groups_of_step = (step, first + len(rollout) // rollout.num_generations)
        sampled = rollout.sampled
        records = [
            {
                "step": step,
                **record,
                "group": first + record["group"],
                **self.thoughts(ids, record["completion"]),
            }
            for record, ids in zip(
                completion_records(rollout, self.names), sampled.tokens.completion_ids, strict=True
            )
        ]
        self.tables["prompt"].extend(redact_tree(sampled.prompts))
        self.tables["completion"].extend(redact_tree(sampled.completions))
        self.tables["advantages"].extend(record["advantage"] for record in records)
        for name in self.names:
            values = (record["rewards"][name] for record in records)
            self.tables["rewards"][name].extend(math.nan if v is None else v for v in values)
        self._flush_reward_logs(len(rollout))
        return records

    def _flush_reward_logs(self, num_rows: int) -> None:
        """Move what rewards logged (``log_extra``, ``log_metric``) to TRL's tables."""
        logged = dict(self.extra_columns), dict(self.extra_metrics)
        columns, metrics = map(_joined, zip(*self.team.gather(logged), strict=True))
        for column, values in columns.items():
            # Dynamic sampling scores more rows than it trains: which is whose is then unknown.
            of_rows = values if len(values) == num_rows else [None] * num_rows
            self.tables["extra"][redact(column)].extend(redact_tree(of_rows))
        for name, values in metrics.items():
            self.note(name, sum(values) / len(values))
        self.extra_columns.clear()
        self.extra_metrics.clear()

    def note_step(self, tally: Tally, learning_rate: float, skipped: int) -> None:
        """Log an optimizer step.

        Args:
            tally: Of all processes.
            learning_rate: Of the step.
            skipped: Steps that were skipped so far.
        """
        learning = max(1e-9, self.seconds - self.elsewhere)
        self.note("step_time", self.seconds)
        self.note("speed/learning_tokens_per_second", tally.step_tokens / learning)
        self.note("memory/peak_gib", max(self.team.gather(take_peak())) / GIB)
        self.note("lr", learning_rate)
        self.note_all(tally.metrics() | (tally.legacy_metrics() if self.legacy else {}))
        if self.legacy:  # over the optimizer steps since the last line
            ratios = self.metrics["val/ratio"]
            spread = statistics.variance(ratios) if len(ratios) > 1 else 0.0
            self.metrics["val/ratio_var"] = [spread]
        if skipped:
            self.note("loss", tally.loss)  # transformers would put 0 or a mean for NaN
            self.metrics["step/skipped"] = [skipped]
        elapsed = time.perf_counter() - (self.first_started or 0.0)
        for name, value in (("episode", self.episodes), ("eps", self.episodes / elapsed)):
            self.metrics[name] = [value]  # a count so far, not a mean of counts
        self.seconds = self.elsewhere = 0.0

    def state_dict(self) -> dict[str, Any]:
        """Return what is kept from step to step, in copies."""
        started = self.first_started
        return {
            "episodes": self.episodes,
            "seconds": 0.0 if started is None else time.perf_counter() - started,
            "groups_of_step": self.groups_of_step,
            "times": (self.seconds, self.elsewhere),
            "metrics": {name: list(values) for name, values in self.metrics.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what ``state_dict`` returned."""
        self.episodes = state["episodes"]
        self.first_started = time.perf_counter() - state["seconds"]
        self.groups_of_step = state["groups_of_step"]
        self.seconds, self.elsewhere = state["times"]
        self.metrics.clear()
        self.metrics.update(state["metrics"])


def _joined(parts: Sequence[dict[str, list[Any]]]) -> dict[str, list[Any]]:
    """Return dicts of lists as one, their lists joined."""
    names = dict.fromkeys(name for part in parts for name in part)
    return {name: [v for part in parts for v in part.get(name, ())] for name in names}
