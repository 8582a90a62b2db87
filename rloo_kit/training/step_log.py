"""The log of a training: metrics, TRL's table of completions, and a record of every completion."""

import math
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import TrainerState

from rloo_kit.machine.cleanup import take_peak, used_on_gpu
from rloo_kit.machine.hardware import GIB
from rloo_kit.rloo.metrics import Tally, completion_metrics, completion_records, rollout_metrics
from rloo_kit.rloo.rollout import Completions, Rollout
from rloo_kit.text.redaction import redact, redact_tree
from rloo_kit.text.thoughts import find_thoughts, thought_marks
from rloo_kit.tools.numbers import call_numbers
from rloo_kit.types import Tokenizer


@dataclass(eq=False)
class StepLog:
    """Collector of metrics and completions until TRL writes the next line of its log.

    Args:
        names: Names of the reward functions.
        tokenizer: The tokenizer; its special marks separate thoughts from answers.
        tables: Columns of TRL's table of completions (``log_completions``), to which rows are
            appended; empty if TRL's step trains, because TRL then fills its table itself.
        state: Returns transformers' ``TrainerState``, whose token count is updated.
        tell: Called for each rollout with two arguments: a list with one record per completion,
            and the rollout.
    """

    names: list[str]
    tokenizer: Tokenizer
    tables: dict[str, Any]
    state: Callable[[], TrainerState]
    tell: Callable[[list[dict[str, Any]], Rollout], None]

    def __post_init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Forget all values, at the beginning of a training."""
        self.metrics = defaultdict(list)  # values since the last line of the log
        # columns of the table that reward functions filled since the last rollout
        self.extra = defaultdict(list)
        self.extras: list[dict[str, list[Any]]] = []  # the same, for rollouts not logged yet
        self.loss_sum = 0.0  # over all optimizer steps with a finite loss
        self.episodes = 0  # completions so far
        self.elsewhere = 0.0  # seconds that the current optimizer step spent outside of learning
        self.groups_of_step = (0, 0)  # a step, and the number of its groups logged so far
        self.first_started: float | None = None  # when the first step started; None before it
        self.used = 0  # most bytes of GPU memory measured in the current step; 0 without a GPU

    def note(self, name: str, value: float) -> None:
        """Record a value of a metric; the next line of the log shows the mean of its values."""
        self.metrics[name].append(value)

    def note_all(self, values: dict[str, float]) -> None:
        """Record one value for each of several metrics, given by name."""
        for name, value in values.items():
            self.note(name, value)

    def note_used(self) -> None:
        """Measure the GPU memory in use, and keep the maximum of the current optimizer step.

        It must be called at the end of each phase of a step, and before an engine frees its memory.
        """
        self.used = max(self.used, used_on_gpu())

    def take_means(self) -> dict[str, float | None]:
        """Return the mean of each metric's recorded values, and discard these values.

        NaN values are left out; the mean is None if all values are NaN.
        """
        known = {n: [v for v in all if not math.isnan(v)] for n, all in self.metrics.items()}
        self.metrics.clear()
        return {name: sum(v) / len(v) if v else None for name, v in known.items()}

    # --- reports of a step -----------------------------------------------------------------------

    def note_extra(self, column: str, values: list[Any]) -> None:
        """Add values, one per completion, to a column of the table of completions.

        Reward functions call it as TRL's ``log_extra``.
        """
        self.extra[column].extend(values)

    def note_sampled(
        self, completions: Completions, seconds: float, num_sampled: int | None = None
    ) -> None:
        """Log the lengths of sampled completions, the token count and the sampling speed.

        Args:
            completions: The completions of a batch.
            seconds: How long sampling took.
            num_sampled: Number of tokens that were sampled in this time; None if these are all
                tokens of the completions.
        """
        lengths = [len(ids) for ids in completions.tokens.sampled_ids]
        state = self.state()
        state.num_input_tokens_seen += sum(completions.tokens.lengths)
        self.metrics["num_tokens"] = [state.num_input_tokens_seen]
        self.note_all(completion_metrics(lengths, completions.ended))
        num_sampled = sum(lengths) if num_sampled is None else num_sampled
        if num_sampled:
            self.note("speed/generation_tokens_per_second", num_sampled / seconds)
        self.elsewhere += seconds

    def note_scored(self, rows: int) -> None:
        """Keep the extra columns of a new rollout until ``note_rollout`` logs this rollout.

        Args:
            rows: Number of rows of the rollout. If a column has another number of values, some of
                them belong to rows that were replaced, so all values of the column become None.
        """
        self.extras.append(
            {
                column: values if len(values) == rows else [None] * rows
                for column, values in self.extra.items()
            }
        )
        self.extra.clear()

    def note_rollout(self, rollout: Rollout, number: int) -> None:
        """Log the metrics and completions of a rollout, and pass its records to ``tell``.

        Args:
            rollout: A rollout with final advantages.
            number: The number of the optimizer step that trains on it.
        """
        self.episodes += len(rollout)
        self.note_all(rollout_metrics(rollout, self.names))
        of_step, first = self.groups_of_step
        first = first if of_step == number else 0  # a step may learn from several rollouts
        self.groups_of_step = (number, first + len(rollout) // rollout.num_generations)
        sampled = rollout.sampled
        if sampled.tokens.is_sampled is not None:
            groups = torch.arange(len(rollout)).view(-1, rollout.num_generations).tolist()
            self.note_all(call_numbers(sampled.completions, sampled.scores.tolist(), groups))
        marks = thought_marks(self.tokenizer)
        records = [
            {
                "step": number,
                **record,
                "group": first + record["group"],
                **find_thoughts(marks, turns, record["completion"]),
            }
            for record, turns in zip(
                completion_records(rollout, self.names), sampled.tokens.turns, strict=True
            )
        ]
        if tables := self.tables:
            tables["prompt"].extend(redact_tree(sampled.prompts))
            tables["completion"].extend(redact_tree(sampled.completions))
            tables["advantages"].extend(rollout.row_advantages.tolist())
            for place, name in enumerate(self.names):
                tables["rewards"][name].extend(sampled.rewards[:, place].tolist())
            for column, values in self.extras.pop(0).items():
                tables["extra"][redact(column)].extend(redact_tree(values))
        self.tell(records, rollout)

    def note_step(self, tally: Tally, seconds: float, skipped: int) -> None:
        """Log the metrics of an optimizer step.

        Args:
            tally: The counts of the step.
            seconds: The duration of the step.
            skipped: The number of steps skipped so far in the whole training.
        """
        if self.first_started is None:
            self.first_started = time.perf_counter() - seconds
        learning = max(1e-9, seconds - self.elsewhere)
        self.note("step_time", seconds)
        self.note("speed/learning_tokens_per_second", tally.step_tokens / learning)
        self.note_used()
        self.note("memory/peak_gib", (self.used or take_peak()) / GIB)
        self.used = 0
        self.note_all(tally.metrics())
        self.note("loss", tally.loss)
        self.loss_sum += tally.loss if math.isfinite(tally.loss) else 0.0
        if skipped:
            self.metrics["step/skipped"] = [skipped]
        elapsed = time.perf_counter() - self.first_started
        # totals so far, which must not be averaged
        self.metrics |= {"episode": [self.episodes], "eps": [self.episodes / elapsed]}
        self.elsewhere = 0.0

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of the log's state, for a checkpoint."""
        started = self.first_started
        return {
            "episodes": self.episodes,
            "loss_sum": self.loss_sum,
            "seconds": 0.0 if started is None else time.perf_counter() - started,
            "groups_of_step": self.groups_of_step,
            "metrics": {name: list(values) for name, values in self.metrics.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state that ``state_dict`` returned."""
        self.episodes, self.loss_sum = state["episodes"], state["loss_sum"]
        self.first_started = time.perf_counter() - state["seconds"]
        self.groups_of_step = state["groups_of_step"]
        self.metrics = defaultdict(list, state["metrics"])
