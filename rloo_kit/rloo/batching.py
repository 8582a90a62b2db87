"""Token-budget micro-batches: rows sorted by length, cut, and padded no further than needed.

A forward pass pays for every position of its rectangle, ``rows * longest``. Thinking runs have a
few very long completions among many short ones, so a rectangle over a whole generation batch is
mostly padding. Rows begin at the left edge, prompt and completion without a gap, and are padded on
the right only: causal attention then never meets a pad, and no attention mask is needed.

If prompts are long, the rows of a group can share one pass over their prompt: completions then
attend to its keys and values, and the gradient is the same.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import compress, groupby
from operator import itemgetter

import torch
from torch.nn.utils.rnn import pad_sequence

# Label of a position whose token is not scored
IGNORED = -100


@dataclass(frozen=True)
class SharedPrompts:
    """The U different prompts of a micro-batch, without their last tokens: each runs once."""

    input_ids: torch.Tensor  # (U, S) int64, padded on the right
    lengths: torch.Tensor  # (U,) int64, without padding
    of_row: torch.Tensor  # (N,) int64: the prompt that a row continues


@dataclass(frozen=True)
class MicroBatch:
    """Some rows as tensors. W is the longest prompt with completion, C the longest completion.

    If prompts are shared, a row has only the last token of its prompt.
    """

    rows: torch.Tensor  # (N,) int64, their places in the generation batch
    input_ids: torch.Tensor  # (N, W) int64: prompt, completion, padding
    labels: torch.Tensor  # (N, W) int64: ids of completion tokens, else `IGNORED`
    # `(N, C)` int64: the column of each completion token; any column after the last token
    places: torch.Tensor
    completion_mask: torch.Tensor  # (N, C) bool, True on sampled completion tokens
    num_tokens: int  # positions that hold a token
    shared: SharedPrompts | None = None

    @property
    def num_positions(self) -> int:
        """Positions that the passes compute, padding included."""
        prompts = 0 if self.shared is None else self.shared.input_ids.numel()
        return self.input_ids.numel() + prompts


@dataclass
class SharedExtent:
    """The positions of some rows as one micro-batch whose prompts run once."""

    tokens: "TokenRows"
    num_rows: int = 0
    longest_completion: int = 0
    longest_prompt: int = 0
    prompts: set[int] = field(default_factory=set)

    def add(self, row: int) -> None:
        """Add a row, by its number."""
        tokens = self.tokens
        self.num_rows += 1
        self.longest_completion = max(self.longest_completion, len(tokens.completion_ids[row]))
        self.longest_prompt = max(self.longest_prompt, len(tokens.prompt_ids[row]))
        self.prompts.add(tokens.prompt_numbers[row])

    @property
    def positions(self) -> int:
        """Positions of rows and prompts; the last token of a prompt belongs to its rows."""
        rows = self.num_rows * (self.longest_completion + 1)
        return rows + len(self.prompts) * (self.longest_prompt - 1)


@dataclass(frozen=True)
class TokenRows:
    """The token ids of B completions and their prompts, unpadded."""

    prompt_ids: list[list[int]]
    completion_ids: list[list[int]]
    # Of each completion token: whether the policy sampled it, or it came from a tool; None: all
    # were sampled
    is_sampled: list[list[bool]] | None = None

    def __len__(self) -> int:
        return len(self.completion_ids)

    @cached_property
    def lengths(self) -> list[int]:
        """Tokens of each row, its prompt included."""
        pairs = zip(self.prompt_ids, self.completion_ids, strict=True)
        return [len(prompt) + len(completion) for prompt, completion in pairs]

    @property
    def sampled_ids(self) -> list[list[int]]:
        """The sampled tokens of each completion."""
        if self.is_sampled is None:
            return self.completion_ids
        pairs = zip(self.completion_ids, self.is_sampled, strict=True)
        return [list(compress(*pair)) for pair in pairs]

    @cached_property
    def turns(self) -> list[list[list[int]]]:
        """The sampled tokens of each completion, turn by turn."""
        if self.is_sampled is None:
            return [[ids] for ids in self.completion_ids]
        return [
            [
                [token for token, _ in run]
                for sampled, run in groupby(zip(ids, mask, strict=True), key=itemgetter(1))
                if sampled
            ]
            for ids, mask in zip(self.completion_ids, self.is_sampled, strict=True)
        ]

    def num_tokens(self, rows: Sequence[int]) -> int:
        """Return the tokens of some rows, prompts included."""
        return sum(self.lengths[row] for row in rows)

    @cached_property
    def prompt_numbers(self) -> list[int]:
        """Numbers of the rows' prompts; equal prompts have the same number."""
        numbers: dict[tuple[int, ...], int] = {}
        return [numbers.setdefault(tuple(ids), len(numbers)) for ids in self.prompt_ids]

    def is_cheaper_shared(self, rows: Sequence[int], overhead: int = 0) -> bool:
        """Return whether it costs less to run each prompt once, in a separate pass.

        Args:
            rows: Row numbers.
            overhead: Cost of the separate pass, in positions.
        """
        extent = SharedExtent(self)
        for row in rows:
            extent.add(row)
        apart = len(rows) * max(self.lengths[row] for row in rows)
        return extent.positions + overhead < apart

    def cut(
        self, rows: Sequence[int], budget: int, overhead: int = 0, *, share: bool = False
    ) -> list[list[int]]:
        """Cut rows into the micro-batches with the lowest total cost; every row comes once.

        Of all ways to cut the rows sorted by length, this returns the cheapest one.

        Args:
            rows: Row numbers.
            budget: Most positions of a micro-batch, unless it is a single longer row.
            overhead: Cost of one more pass, in positions.
            share: Let a micro-batch run its prompts once if that is cheaper.
        """
        order = sorted(rows, key=lambda row: (self.lengths[row], row))
        cost, cut_before = [0], [0]  # of the first n rows: the lowest cost, where the last cut is
        for end in range(1, len(order) + 1):
            options = []
            extent = SharedExtent(self)
            longest = self.lengths[order[end - 1]]
            for start in range(end - 1, -1, -1):
                positions = (end - start) * longest
                if share:
                    extent.add(order[start])
                    positions = min(positions, extent.positions + overhead)
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
        """Join whole groups while all their tokens fit into the budget together.

        Returns:
            The bundles, each the rows of one or several groups of similar length; and the groups
            that do not fit even alone.
        """
        sized = sorted((self.num_tokens(rows), list(rows)) for rows in groups)
        bundles: list[list[int]] = []
        room = 0
        for tokens, rows in sized:
            if tokens > budget:
                continue
            if tokens > room:
                bundles.append([])
                room = budget
            bundles[-1] += rows
            room -= tokens
        return bundles, [rows for tokens, rows in sized if tokens > budget]

    def pad(
        self,
        rows: Sequence[int],
        pad_token_id: int,
        device: torch.device | str = "cpu",
        multiple_of: int | None = None,
        *,
        share: bool = False,
    ) -> MicroBatch:
        """Return some rows as tensors as wide as the longest, rounded up to ``multiple_of``.

        With ``share`` the prompts are separate from the rows (``MicroBatch.shared``).
        """
        prompts = [self.prompt_ids[row] for row in rows]
        shared = self._shared_prompts(rows, pad_token_id, device) if share else None
        if share:
            prompts = [prompt[-1:] for prompt in prompts]
        completions = [self.completion_ids[row] for row in rows]
        pairs = list(zip(prompts, completions, strict=True))
        labels = [[IGNORED] * len(prompt) + completion for prompt, completion in pairs]
        ids = _padded([prompt + own for prompt, own in pairs], pad_token_id, multiple_of)
        begin = torch.tensor([len(prompt) for prompt in prompts]).unsqueeze(1)
        length = torch.tensor([len(completion) for completion in completions]).unsqueeze(1)
        columns = torch.arange(int(length.max()))
        mask = columns < length
        if self.is_sampled is not None:
            mask &= _padded([[*map(int, self.is_sampled[row])] for row in rows], 0).bool()
        return MicroBatch(
            rows=torch.tensor(list(rows), dtype=torch.long, device=device),
            input_ids=ids.to(device),
            labels=_padded(labels, IGNORED, multiple_of).to(device),
            places=(begin + columns).clamp(max=ids.size(1) - 1).to(device),
            completion_mask=mask.to(device),
            num_tokens=sum(map(len, labels)) + (0 if shared is None else int(shared.lengths.sum())),
            shared=shared,
        )

    def _shared_prompts(
        self, rows: Sequence[int], pad_token_id: int, device: torch.device | str
    ) -> SharedPrompts:
        heads = {self.prompt_numbers[row]: self.prompt_ids[row][:-1] for row in reversed(rows)}
        place = {number: place for place, number in enumerate(heads)}
        of_row = [place[self.prompt_numbers[row]] for row in rows]
        return SharedPrompts(
            _padded([*heads.values()], pad_token_id).to(device),
            torch.tensor([len(head) for head in heads.values()], device=device),
            torch.tensor(of_row, device=device),
        )


def _padded(rows: list[list[int]], value: int, multiple_of: int | None = None) -> torch.Tensor:
    """Return rows of ids as ``(N, W)`` int64, W the longest, rounded up to ``multiple_of``."""
    tensors = [torch.tensor(row, dtype=torch.long) for row in rows]
    padded = pad_sequence(tensors, batch_first=True, padding_value=value)
    missing = -padded.size(1) % (multiple_of or 1)
    return torch.nn.functional.pad(padded, (0, missing), value=value)
