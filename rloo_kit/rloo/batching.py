"""Micro-batches under a token budget: rows are sorted by length and cut so that padding is small.

The cost of a forward pass grows with the number of positions of its tensor, padding included: the
number of rows times the length of the longest row. Thinking models produce a few very long
completions among many short ones, so a single tensor of a whole generation batch would be mostly
padding. Each row has its prompt and then its completion, without a gap, and is padded on the right
only. Causal attention then never attends to padding, so no attention mask is needed.

If prompts are long, the rows of a group can share one pass over their prompt. The completions then
attend to the prompt's keys and values, and the gradient is the same.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, groupby
from operator import itemgetter

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from rloo_kit.types import TokenIds, Turns

# Label of a position whose log-probability is not computed
IGNORED = -100


@dataclass(frozen=True)
class SharedPrompts:
    """The U distinct prompts of a micro-batch, each without its last token.

    The model runs each of them once. The last token of a prompt stays in each row that continues
    the prompt, because its output predicts the first token of the row's completion.
    """

    input_ids: Tensor  # (U, S) int64, padded on the right
    lengths: Tensor  # (U,) int64, without padding
    of_row: Tensor  # (N,) int64: for each row, the index of its prompt


@dataclass(frozen=True)
class MicroBatch:
    """N rows of a generation batch as padded tensors.

    W is the length of the longest row, prompt and completion together. It is rounded up if
    ``TokenRows.pad`` was called with ``multiple_of``. C is the length of the longest completion. If
    prompts are shared, a row has only the last token of its prompt.
    """

    rows: Tensor  # (N,) int64: indices of the rows in the generation batch
    input_ids: Tensor  # (N, W) int64: prompt, completion, padding
    labels: Tensor  # (N, W) int64: ids of sampled tokens, `IGNORED` elsewhere
    # `(N, C)` int64: the column of each completion token in `input_ids`; arbitrary after the last
    # token of a row
    places: Tensor
    completion_mask: Tensor  # (N, C) bool, True on sampled completion tokens
    num_tokens: int  # number of tokens without padding, including shared prompts
    shared: SharedPrompts | None = None

    @property
    def num_positions(self) -> int:
        """Number of positions that the forward passes compute, including padding."""
        prompts = self.shared.input_ids.numel() if self.shared else 0
        return self.input_ids.numel() + prompts


@dataclass(frozen=True)
class TokenRows:
    """The token ids of B completions and their prompts, unpadded."""

    prompt_ids: TokenIds
    completion_ids: TokenIds
    # For each completion token, True if the policy sampled it and False if it came from a tool;
    # None if all tokens were sampled
    is_sampled: list[list[bool]] | None = None

    def __len__(self) -> int:
        return len(self.completion_ids)

    @cached_property
    def lengths(self) -> list[int]:
        """Number of tokens of each row, including its prompt."""
        pairs = zip(self.prompt_ids, self.completion_ids, strict=True)
        return [len(prompt) + len(completion) for prompt, completion in pairs]

    @cached_property
    def mask(self) -> list[list[bool]]:
        """``is_sampled``, or True for each completion token if all tokens were sampled."""
        return self.is_sampled or [[True] * len(ids) for ids in self.completion_ids]

    @property
    def sampled_ids(self) -> TokenIds:
        """Ids of the sampled tokens of each completion, without tokens that came from tools."""
        return [[*chain(*turns)] for turns in self.turns]

    @cached_property
    def turns(self) -> Turns:
        """Ids of the sampled tokens of each completion, as one list for each turn.

        A turn ends where tokens of a tool begin. Without tools each completion is one turn, even if
        the completion is empty.
        """
        if self.is_sampled is None:
            return [[ids] for ids in self.completion_ids]
        return [
            [
                [token for token, _ in run]
                for sampled, run in groupby(zip(ids, mask, strict=True), key=itemgetter(1))
                if sampled
            ]
            for ids, mask in zip(self.completion_ids, self.mask, strict=True)
        ]

    def num_tokens(self, rows: Sequence[int]) -> int:
        """Return the total number of tokens of some rows, including their prompts."""
        return sum(self.lengths[row] for row in rows)

    @cached_property
    def prompt_numbers(self) -> list[int]:
        """For each row, a number that identifies its prompt; equal prompts have the same number."""
        numbers = {}
        return [numbers.setdefault(tuple(ids), len(numbers)) for ids in self.prompt_ids]

    def is_cheaper_shared(self, rows: Sequence[int], overhead: int = 0) -> bool:
        """Return True if it is cheaper to run each distinct prompt once than once in each row.

        Args:
            rows: Numbers of the rows of the micro-batch.
            overhead: Cost of the separate pass over the prompts, in positions.
        """
        *_, shared = self._shared_positions(rows)
        apart = len(rows) * max(self.lengths[row] for row in rows)
        return shared + overhead < apart

    def _shared_positions(self, rows: Iterable[int]) -> Iterator[int]:
        """Yield, for n = 1, 2, ..., how many positions the first n rows have with shared prompts.

        Each distinct prompt of these rows runs once. The numbers include padding. The last token of
        a prompt is counted in each of its rows, not in the prompt.
        """
        longest_completion = longest_prompt = 0
        prompts = set()
        for num_rows, row in enumerate(rows, 1):
            longest_completion = max(longest_completion, len(self.completion_ids[row]))
            longest_prompt = max(longest_prompt, len(self.prompt_ids[row]))
            prompts.add(self.prompt_numbers[row])
            yield num_rows * (longest_completion + 1) + len(prompts) * (longest_prompt - 1)

    def cut(
        self, rows: Sequence[int], budget: int, overhead: int = 0, *, share: bool = False
    ) -> list[list[int]]:
        """Cut rows into micro-batches and return the row numbers of each.

        Every row is in exactly one micro-batch. The cost of a micro-batch is the number of its
        positions plus ``overhead``. The rows are sorted by length, and of all ways to cut the
        sorted list, this returns the one with the lowest total cost.

        Args:
            rows: Row numbers.
            budget: Maximum number of positions of a micro-batch. A single row may exceed it.
            overhead: Cost of one more pass, in positions.
            share: Allow a micro-batch to run each distinct prompt once if that is cheaper.
        """
        order = sorted(rows, key=lambda row: (self.lengths[row], row))
        # for the first n rows: the lowest cost, and the start of the last micro-batch
        cost, cut_before = [0], [0]
        for end in range(1, len(order) + 1):
            options = []
            longest = self.lengths[order[end - 1]]
            shared = self._shared_positions(reversed(order[:end]))
            for start in range(end - 1, -1, -1):
                positions = (end - start) * longest
                if share:
                    positions = min(positions, next(shared) + overhead)
                if positions > budget and options:
                    break
                options.append((cost[start] + positions + overhead, start))
            best, start = min(options)
            cost.append(best)
            cut_before.append(start)
        pieces = []
        end = len(order)
        while end:
            pieces.append(order[cut_before[end] : end])
            end = cut_before[end]
        return pieces

    def bundle(
        self, groups: Sequence[Sequence[int]], budget: int
    ) -> tuple[list[list[int]], list[list[int]]]:
        """Collect groups into bundles whose total number of tokens fits into the budget.

        Args:
            groups: The row numbers of each group.
            budget: Maximum number of tokens of a bundle.

        Returns:
            Two lists. The first has the row numbers of each bundle, which has one or several groups
            of similar length. The second has the row numbers of each group that exceeds the budget
            on its own.
        """
        bundles, too_long = [], []
        room = 0
        for tokens, rows in sorted((self.num_tokens(rows), list(rows)) for rows in groups):
            if tokens > budget:
                too_long.append(rows)
                continue
            if tokens > room:
                bundles.append([])
                room = budget
            bundles[-1] += rows
            room -= tokens
        return bundles, too_long

    def pad(
        self,
        rows: Sequence[int],
        pad_token_id: int,
        device: torch.device | str = "cpu",
        multiple_of: int | None = None,
        *,
        share: bool = False,
    ) -> MicroBatch:
        """Return some rows as a micro-batch, padded on the right to the longest of them.

        Args:
            rows: Row numbers.
            pad_token_id: The id of padding.
            device: The device of the returned tensors.
            multiple_of: Round the width up to a multiple of this number; None does not round.
            share: Put the distinct prompts into ``MicroBatch.shared``, each once, and leave only
                the last prompt token in the rows.
        """
        prompts = [self.prompt_ids[row] for row in rows]
        shared = None
        if share:
            heads = {self.prompt_numbers[row]: self.prompt_ids[row][:-1] for row in reversed(rows)}
            numbers = [*heads]
            of_row = [numbers.index(self.prompt_numbers[row]) for row in rows]
            shared = SharedPrompts(
                padded([*heads.values()], pad_token_id).to(device),
                torch.tensor([len(head) for head in heads.values()], device=device),
                torch.tensor(of_row, device=device),
            )
            prompts = [prompt[-1:] for prompt in prompts]
        pairs = zip(prompts, (self.completion_ids[row] for row in rows), strict=True)
        whole = [prompt + completion for prompt, completion in pairs]
        ids = padded(whole, pad_token_id, multiple_of)
        mask = padded([self.mask[row] for row in rows], dtype=torch.bool)
        begin = torch.tensor([len(prompt) for prompt in prompts]).unsqueeze(1)
        places = (begin + torch.arange(mask.size(1))).clamp(max=ids.size(1) - 1)
        # the maximum, because places after the end of a row may be the place of its last token
        is_sampled = torch.zeros_like(ids).scatter_reduce(1, places, mask.long(), "amax")
        return MicroBatch(
            rows=torch.tensor(rows, device=device),
            input_ids=ids.to(device),
            labels=ids.masked_fill(is_sampled == 0, IGNORED).to(device),
            places=places.to(device),
            completion_mask=mask.to(device),
            num_tokens=sum(map(len, whole)) + (int(shared.lengths.sum()) if shared else 0),
            shared=shared,
        )


def padded(
    rows: Sequence[Sequence[float]],
    value: int = 0,
    multiple_of: int | None = None,
    dtype: torch.dtype = torch.long,
    side: str = "right",
) -> Tensor:
    """Return N lists of numbers as a tensor ``(N, W)``, padded with ``value``.

    Args:
        rows: The lists. W is the length of the longest one.
        value: The number that pads the other lists.
        multiple_of: W is rounded up to a multiple of this number; None does not round.
        dtype: The dtype of the tensor.
        side: The side of padding, ``left`` or ``right``. Columns that rounding adds are always on
            the right.
    """
    tensors = [torch.tensor(row, dtype=dtype) for row in rows]
    found = pad_sequence(tensors, True, value, side)
    missing = -found.size(1) % (multiple_of or 1)
    return torch.nn.functional.pad(found, (0, missing), value=value)
