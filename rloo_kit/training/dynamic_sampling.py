"""Dynamic sampling: replaces prompts whose completions all have equal scores by other prompts."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from rloo_kit.rloo.rollout import ScoredBatch
from rloo_kit.rloo.step import Row
from rloo_kit.training.arguments import LeaveOneOutConfig
from rloo_kit.training.step_log import StepLog


@dataclass(kw_only=True, eq=False)
class DynamicSampling:
    """Hook after scoring that counts groups without signal, and may replace them.

    A group has no signal if its scores are all equal. Such groups are replaced only if the setting
    ``dynamic_sampling`` is on.
    """

    args: LeaveOneOutConfig
    dataset: Callable[[], Any]  # returns the training set, whose rows have `prompt`
    log: StepLog
    order: deque[int] = field(default_factory=deque)  # row numbers of the next prompts to draw
    num_orders: int = 0  # number of random orders begun so far

    def restart(self) -> None:
        """Forget the order of prompts, at the beginning of a training."""
        self.order.clear()
        self.num_orders = 0

    def after_scoring(
        self, batch: ScoredBatch, complete: Callable[[list[Row]], ScoredBatch]
    ) -> ScoredBatch:
        """Log the share of groups without signal and, if the settings ask for it, replace them.

        In each of at most ``dynamic_sampling_rounds`` rounds, groups of newly drawn prompts are
        sampled in place of the groups that are still without signal.

        Args:
            batch: A scored generation batch.
            complete: Samples and scores one completion of each row in a list. For a new group the
                list has the same row ``num_generations`` times.

        Returns:
            The batch with replaced groups, or ``batch`` itself if ``dynamic_sampling`` is off.
        """
        shaping = self.args.shaping
        size = self.args.num_generations
        drawn = 0
        without = ~batch.has_signal(shaping, size)  # (P,)
        self.log.note("signal/groups_without", without.float().mean().item())
        if not self.args.dynamic_sampling:
            return batch
        for _ in range(self.args.dynamic_sampling_rounds):
            if not without.any():
                break
            rows = [self._next_row() for _ in range(int(without.sum()))]
            more = complete([row for row in rows for _ in range(size)])
            batch = batch.with_signal_of(more, shaping, size)
            without = ~batch.has_signal(shaping, size)
            drawn += len(rows)
        self.log.note("signal/groups_drawn_again", drawn)
        self.log.note("signal/trained_groups_without", without.float().mean().item())
        return batch

    def _next_row(self) -> Row:
        """Return the next row of a random order that differs from the order of the training."""
        dataset = self.dataset()
        if not self.order:
            # the seed itself would give the order of the training (TRL's RepeatSampler)
            generator = torch.Generator().manual_seed(self.args.seed + 1 + self.num_orders)
            self.order.extend(torch.randperm(len(dataset), generator=generator).tolist())
            self.num_orders += 1
        return dataset[self.order.popleft()]

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of the order of prompts, for a checkpoint."""
        return {"prompt_order": list(self.order), "prompt_orders": self.num_orders}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state that ``state_dict`` returned."""
        self.order = deque(state["prompt_order"])
        self.num_orders = state["prompt_orders"]
