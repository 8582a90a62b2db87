"""What a training logs: TRL's metrics and tables, and a record of every completion."""

import math
import time
from typing import TYPE_CHECKING, Any

from rloo_kit.machine.hardware import GIB
from rloo_kit.machine.memory import take_peak, used_on_gpu
from rloo_kit.rloo.metrics import Tally, completion_metrics, completion_records, rollout_metrics
from rloo_kit.rloo.rollout import Rollout, ScoredBatch
from rloo_kit.text.redaction import redact, redact_tree
from rloo_kit.text.thoughts import ThoughtFinder

if TYPE_CHECKING:
    from rloo_kit.training.trainer import LeaveOneOutTrainer


class StepLog:
    """Collects metrics and completions until TRL writes its next line."""

    def __init__(self, trainer: "LeaveOneOutTrainer") -> None:
        self.trainer = trainer
        # TRL's: values since its last line, which shows their means
        self.metrics: dict[str, list[float]] = trainer._metrics["train"]
        self.names: list[str] = trainer.reward_func_names
        self.thoughts = ThoughtFinder(trainer._tokenizer)
        self.episodes = 0  # completions that were trained on so far
        self.seconds = 0.0  # that the optimizer step in progress took so far
        self.elsewhere = 0.0  # ... and those of them that were not learning
        self.groups_of_step = (0, 0)  # a step, and the groups it has learned from so far
        self.first_started: float | None = None
        self.used = 0  # bytes of the GPU at the end of the step's sampling; 0: no GPU

    def note(self, name: str, value: float) -> None:
        """Add a value; the next line shows the mean of all."""
        self.metrics[name].append(value)

    def note_used(self) -> None:
        """Look at the memory of the GPU, at the end of a phase and before an engine sleeps."""
        self.used = max(self.used, used_on_gpu())

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
        self.note_all(rollout_metrics(rollout, self.names))
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
        tables = self.trainer._logs  # TRL's columns, which `log_completions` shows
        tables["prompt"].extend(redact_tree(sampled.prompts))
        tables["completion"].extend(redact_tree(sampled.completions))
        tables["advantages"].extend(record["advantage"] for record in records)
        for name in self.names:
            values = (record["rewards"][name] for record in records)
            tables["rewards"][name].extend(math.nan if v is None else v for v in values)
        self._flush_reward_logs(len(rollout))
        return records

    def _flush_reward_logs(self, num_rows: int) -> None:
        """Move what rewards logged (``log_extra``, ``log_metric``) to TRL's tables."""
        trainer = self.trainer
        for column, values in trainer._pending_extra_logs.items():
            # Dynamic sampling scores more rows than it trains: which is whose is then unknown.
            of_rows = values if len(values) == num_rows else [None] * num_rows
            trainer._logs["extra"][redact(column)].extend(redact_tree(of_rows))
        for name, values in trainer._pending_metrics.items():
            self.note(name, sum(values) / len(values))
        trainer._pending_extra_logs.clear()
        trainer._pending_metrics.clear()

    def note_step(self, tally: Tally, learning_rate: float, skipped: int) -> None:
        """Log an optimizer step: its tally, and the steps skipped so far."""
        learning = max(1e-9, self.seconds - self.elsewhere)
        self.note("step_time", self.seconds)
        self.note("speed/learning_tokens_per_second", tally.step_tokens / learning)
        self.note_used()
        self.note("memory/peak_gib", (self.used or take_peak()) / GIB)
        self.used = 0
        self.note("lr", learning_rate)
        self.note_all(tally.metrics())
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
