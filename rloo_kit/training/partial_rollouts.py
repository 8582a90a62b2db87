"""Partial rollouts: sampling stops when enough groups are complete; later steps continue the rest.

Without partial rollouts a step waits for its longest completion although most of its completions
have ended. With them, more groups are sampled at once than a step trains. Unfinished groups keep
their tokens, and the policy continues them after the optimizer step. Each token keeps its
log-probability under the policy that sampled it. Each prompt that was begun is trained exactly
once.

Sources: Kimi k1.5 (arXiv 2501.12599, section 2.6.2, partial rollouts); APRIL (arXiv 2509.18521).

Shapes: G generations per prompt, B completions of a batch.
"""

import itertools
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from rloo_kit.rloo.batching import TokenRows
from rloo_kit.rloo.guards import retry_smaller
from rloo_kit.rloo.rollout import Completions
from rloo_kit.rloo.step import Row
from rloo_kit.sampling.engine import Begun
from rloo_kit.training.sampler import Sampler, TrainingCompleter


@dataclass(eq=False)
class PartialCompletion:
    """The tokens sampled so far of a completion that may still be unfinished."""

    ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)  # one for each token
    batches: list[int] = field(default_factory=list)  # number of the batch that sampled each token
    has_ended: bool = False


@dataclass(eq=False)
class Group:
    """A prompt whose sampling has begun, with all its completions."""

    number: int  # position of the prompt in the order of the whole training
    begun: int  # number of the batch in which its sampling began
    row: Row  # its row in the training set
    prompt_ids: list[int]
    completions: list[PartialCompletion]


@dataclass(kw_only=True, eq=False)
class InFlight:
    """The groups whose sampling has begun but that have not been trained.

    ``rloo.step.Step`` calls an object of this class as its hook ``in_flight``.
    """

    completer: TrainingCompleter
    sampler: Sampler  # continues completions
    order: Callable[[], Iterator[int]]  # returns row numbers of the dataset, epoch after epoch
    dataset: Callable[[], Any]  # returns the training set, whose rows have `prompt`
    num_generations: int  # G
    num_groups: int  # maximum number of groups in flight
    max_age: int  # maximum number of batches that a group waits
    num_wanted: Callable[[], int]  # returns the number of groups that the whole training needs

    def __post_init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Forget all groups, at the beginning of a training."""
        self.groups: list[Group] = []  # oldest first
        self.num_begun = 0  # number of groups begun so far
        self.batch = 0  # number of batches so far
        self.num_sampled = 0  # number of tokens sampled for the current batch
        self.coming = self.order()  # row numbers of the next prompts to begin

    def __call__(self, num_rows: int) -> tuple[list[Row], Completions]:
        """Sample until ``num_rows / G`` groups are complete, and return their completions.

        Returns:
            The training-set row of each completion, and the completions.

        Raises:
            StalePolicyError: The engine did not sample from the current policy.
            MemoryRanOutError: Not even a single completion fits into memory.
        """
        started = time.perf_counter()
        self.num_sampled = 0
        taken = self._sample(num_rows // self.num_generations)
        self.groups = [group for group in self.groups if group not in taken]
        parts = [(group, one) for group in taken for one in group.completions]
        rows = [group.row for group, _ in parts]
        tokens = TokenRows([group.prompt_ids for group, _ in parts], [one.ids for _, one in parts])
        completions = self.completer.completions(rows, tokens, [one.log_probs for _, one in parts])
        ages = [[self.batch - batch for batch in one.batches] for _, one in parts]
        completions = replace(completions, token_ages=ages)
        self.batch += 1
        seconds = time.perf_counter() - started
        self.completer.log.note_sampled(completions, seconds, self.num_sampled)
        return rows, completions

    def _sample(self, num: int) -> list[Group]:
        """Sample until ``num`` groups can be taken as the next batch; return these groups."""
        self._begin(num)
        pieces = self.sampler.pieces

        def next_rows() -> list[tuple[Group, PartialCompletion]]:
            return self._growing()[: pieces.size]

        def attempt() -> None:
            while not self._choose(num):
                self._grow(next_rows(), num)

        retry_smaller(attempt, lambda exc: pieces.halve(exc, len(next_rows())))
        return self._choose(num)

    def _begin(self, num: int) -> None:
        """Begin new groups until ``num_groups`` are in flight, or the training needs no more.

        In any case at least ``num`` groups are in flight afterwards.
        """
        room = min(self.num_groups - len(self.groups), self.num_wanted() - self.num_begun)
        for place in itertools.islice(self.coming, max(0, room, num - len(self.groups))):
            parts = [PartialCompletion() for _ in range(self.num_generations)]
            self._add(self.num_begun, self.batch, place, parts)
            self.num_begun += 1

    def _add(self, number: int, begun: int, place: int, parts: list[PartialCompletion]) -> None:
        """Add a group; ``place`` is the number of its row in the dataset."""
        row = self.dataset()[place]
        (prompt_ids,) = self.completer.tokenize([row])
        self.groups.append(Group(number, begun, row, prompt_ids, parts))

    def _growing(self) -> list[tuple[Group, PartialCompletion]]:
        """Return the unfinished completions, each with its group."""
        return [
            (group, one) for group in self.groups for one in group.completions if not one.has_ended
        ]

    def _choose(self, num: int, ended: Collection[PartialCompletion] = ()) -> list[Group]:
        """Return the ``num`` oldest complete groups, or an empty list if sampling must continue.

        Sampling must continue if fewer than ``num`` groups are complete. It must also continue if
        some group is not complete and one of the groups left over would become older than
        ``max_age`` before it is trained.

        Args:
            num: The number of groups of a batch.
            ended: Completions that have just ended; their ``has_ended`` is not set yet.
        """
        open_groups = {group for group, one in self._growing() if one not in ended}
        taken = [group for group in self.groups if group not in open_groups][:num]
        left = [group for group in self.groups if group not in taken]
        # the group at index `place` of the queue waits for at least place // num more batches
        is_late = any(
            self.batch + 1 + place // num - group.begun > self.max_age
            for place, group in enumerate(left)
        )
        return [] if len(taken) < num or (is_late and open_groups) else taken

    def _grow(self, rows: list[tuple[Group, PartialCompletion]], num: int) -> None:
        """Continue the given completions until ``num`` groups can be taken as a batch.

        Args:
            rows: The completions, each with its group.
            num: The number of groups of a batch.
        """
        begun = Begun(
            [group.prompt_ids for group, _ in rows],
            [one.ids for _, one in rows],
            lambda ended: bool(self._choose(num, {rows[row][1] for row in ended})),
        )
        drawn = self.sampler.grow(begun)
        for (group, one), ids, log_probs in zip(
            rows, drawn.completion_ids, drawn.log_probs, strict=True
        ):
            self.num_sampled += len(ids)
            # new lists, because the result of `state_dict` has the old ones
            one.ids = one.ids + ids
            one.log_probs = one.log_probs + log_probs
            one.batches = one.batches + [self.batch] * len(ids)
            one.has_ended = self.sampler.has_ended(group.prompt_ids, one.ids)

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of the groups in flight, for a checkpoint."""
        groups = [
            {
                "number": group.number,
                "begun": group.begun,
                "completions": [{**vars(one)} for one in group.completions],
            }
            for group in self.groups
        ]
        return {"groups": groups, "num_begun": self.num_begun, "batch": self.batch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state that ``state_dict`` returned."""
        self.restart()
        self.num_begun = state["num_begun"]
        self.batch = state["batch"]
        places = list(itertools.islice(self.coming, self.num_begun))
        for held in state["groups"]:
            parts = [PartialCompletion(**one) for one in held["completions"]]
            self._add(held["number"], held["begun"], places[held["number"]], parts)
