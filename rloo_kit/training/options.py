"""The options of a step: which prompts are sampled, and which completions are learned from.

Each enters at one of the three places of ``rloo.step.Step``.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from rloo_kit.data.history import PromptHistory
from rloo_kit.rloo.rollout import Rollout, ScoredBatch
from rloo_kit.rloo.step import Row
from rloo_kit.training.config import LeaveOneOutConfig
from rloo_kit.training.metrics import StepLog

# Further rows that are looked at for one that the history does not skip; then the last is taken
MOST_TRIES = 100


@dataclass(kw_only=True, eq=False)
class Options:
    """``prompt_selection``, ``dynamic_sampling`` and ``learn_from``."""

    args: LeaveOneOutConfig
    dataset: Callable[[], Any]  # rows with `prompt`
    log: StepLog
    history: PromptHistory | None  # None: every prompt is sampled
    order: deque[int] = field(default_factory=deque)  # rows of the dataset that come next
    num_orders: int = 0  # that were begun

    def which_prompts(self, rows: list[Row]) -> list[Row]:
        """Replace prompts that the history skips by further prompts (``prompt_selection``)."""
        if self.history is None:
            return rows
        size, keeps = self.args.num_generations, self.history.keeps
        chosen = [row if keeps(row["prompt"]) else self._next_row() for row in rows[::size]]
        return [row for row in chosen for _ in range(size)]

    def after_scoring(
        self, batch: ScoredBatch, complete: Callable[[list[Row]], ScoredBatch]
    ) -> ScoredBatch:
        """Replace groups without signal by groups of further prompts (``dynamic_sampling``)."""
        shaping, size, drawn = self.args.shaping, self.args.num_generations, 0
        self._remember(batch)
        without = ~batch.has_signal(shaping, size)  # (P,)
        self.log.note("signal/groups_without", without.float().mean().item())
        if self.args.dynamic_sampling:
            for _ in range(self.args.dynamic_sampling_rounds):
                groups = (~batch.has_signal(shaping, size)).nonzero().flatten().tolist()
                if not groups:
                    break
                more = complete([row for _ in groups for row in [self._next_row()] * size])
                self._remember(more)
                batch = batch.replace_groups(groups, more, shaping, size)
                drawn += len(groups)
            self.log.note("signal/groups_drawn_again", drawn)
        if self.history is not None:
            self.log.note_all(self.history.metrics())
        return batch

    def rows_to_learn(self, rollout: Rollout) -> Rollout:
        """Draw the rows that get a training pass (``learn_from``)."""
        if self.args.learn_from is None:
            return rollout
        wanted = self.args.learn_from * len(rollout) // self.args.num_generations
        start = float(torch.rand(()))  # of the run's own random state
        drawn = rollout.with_drawn_rows(wanted, start)
        with_gradient = max(1, len(rollout.learnable_rows))
        self.log.note("signal/drawn", len(drawn.learnable_rows) / with_gradient)
        return drawn

    def _remember(self, batch: ScoredBatch) -> None:
        """Note in the history how the groups of a batch have scored."""
        if self.history is not None:
            size = self.args.num_generations
            means = batch.scores.view(-1, size).nanmean(dim=1).tolist()
            signal = batch.has_signal(self.args.shaping, size).tolist()
            self.history.note(batch.prompts[::size], means, signal)

    def _next_row(self) -> Row:
        """Return the next row that the history does not skip."""
        row = self._any_row()
        for _ in range(MOST_TRIES):
            if self.history is None or self.history.keeps(row["prompt"]):
                break
            row = self._any_row()
        return row

    def _any_row(self) -> Row:
        """Return the next row of a random order of the training set, apart from the run's own."""
        dataset = self.dataset()
        if not self.order:
            generator = torch.Generator().manual_seed(self.args.seed + self.num_orders)
            self.order.extend(torch.randperm(len(dataset), generator=generator).tolist())
            self.num_orders += 1
        return dataset[self.order.popleft()]

    def state_dict(self) -> dict[str, Any]:
        """Return what is kept from batch to batch, in copies."""
        return {
            "prompt_order": list(self.order),
            "prompt_orders": self.num_orders,
            "history": self.history and self.history.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what ``state_dict`` returned."""
        self.order = deque(state["prompt_order"])
        # an older checkpoint has no count, and began each order by the number of its slice
        self.num_orders = state.get("prompt_orders", state.get("micro_step", 0) + 1)
        if self.history is not None:
            self.history.load_state_dict(state["history"])
