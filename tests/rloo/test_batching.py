"""Micro-batches: cut at the lowest cost, groups kept whole, within the memory that is free."""

import random
from itertools import chain

import pytest

from rloo_kit.rloo.batching import TokenRows
from rloo_kit.rloo.token_budget import default_token_budget, pass_overhead

OVERHEAD = 32

PAD = 999


def every_cut(order):
    for bits in range(2 ** (len(order) - 1)):
        pieces = [[order[0]]]
        for place, row in enumerate(order[1:]):
            if bits >> place & 1:
                pieces.append([])
            pieces[-1].append(row)
        yield pieces


# --- cut ---------------------------------------------------------------------------------------


def shared_positions(tokens, rows):
    width = 1 + max(len(tokens.completion_ids[row]) for row in rows)
    prompts = {tuple(tokens.prompt_ids[row]) for row in rows}
    return len(rows) * width + len(prompts) * (max(map(len, prompts)) - 1)


@pytest.mark.parametrize("share", [False, True])
@pytest.mark.parametrize("budget", [1, 60, 400, 10**9])
@pytest.mark.parametrize("seed", range(8))
def test_a_cut_is_the_cheapest_of_all(seed, budget, share):
    draw = random.Random(seed)
    prompts = [[n] * draw.randint(1, 60) for n in range(3)]
    tokens = TokenRows(
        [prompts[n % 3] for n in range(9)], [[7] * draw.randint(0, 30) for _ in range(9)]
    )
    lengths = tokens.lengths

    def size(rows):
        apart = len(rows) * max(lengths[row] for row in rows)
        return min(apart, shared_positions(tokens, rows) + OVERHEAD) if share else apart

    pieces = tokens.cut(draw.sample(range(9), 9), budget, OVERHEAD, share=share)
    order = sorted(range(9), key=lambda row: (lengths[row], row))
    allowed = [
        sum(size(piece) + OVERHEAD for piece in cut)
        for cut in every_cut(order)
        if all(len(piece) == 1 or size(piece) <= budget for piece in cut)
    ]
    assert sum(size(piece) + OVERHEAD for piece in pieces) == min(allowed)
    assert sorted(chain(*pieces)) == [*range(9)]
    for piece in pieces:
        is_cheaper = tokens.is_cheaper_shared(piece, OVERHEAD)
        batch = tokens.pad(piece, PAD, share=share and is_cheaper)
        assert batch.num_positions == size(piece) - OVERHEAD * (share and is_cheaper)


# --- bundle ------------------------------------------------------------------------------------


@pytest.mark.parametrize("budget", [20, 60, 150, 10**9])
@pytest.mark.parametrize("seed", range(5))
def test_bundles_hold_whole_groups_within_the_budget_and_lose_nothing(seed, budget):
    draw = random.Random(seed)
    lengths = [draw.choice([draw.randint(2, 9), draw.randint(2, 40)]) for _ in range(40)]
    tokens = TokenRows([[1]] * 40, [[7] * (length - 1) for length in lengths])
    places = draw.sample(range(40), 40)
    groups = [places[first : first + 4] for first in range(0, 40, 4)]
    groups[3] = groups[3][:2]
    wanted = sorted(chain(*groups))
    bundles, too_long = tokens.bundle(groups, budget)

    def size(rows):
        return sum(lengths[row] for row in rows)

    assert sorted(chain(*bundles, *too_long)) == wanted
    assert sorted(too_long) == sorted(group for group in groups if size(group) > budget)
    for bundle in bundles:
        assert size(bundle) <= budget
        for group in groups:
            assert set(group) <= set(bundle) or not set(group) & set(bundle)


# --- default budget ------------------------------------------------------------------------------

GIB = 2**30


KEPT = 2 * 28 * (12 * 1024 + 5 * 3072)
"""Bytes of a position that the backward pass needs."""


@pytest.mark.parametrize(
    ("gib", "how", "expected"),
    [
        (8, {}, 4 * GIB // KEPT),
        (0.5, {"checkpointing": True}, GIB // 4 // (2 * (12 * 1024 + 5 * 3072 + 28 * 1024))),
        (0, {}, 512),
        (1000, {}, 16_384),
        (1000, {"on_cpu": True}, 4 * GIB // KEPT),
        (2, {"on_cpu": True}, GIB // KEPT),
    ],
)
def test_the_budget_is_half_the_memory_within_bounds(gib, how, expected):
    found = default_token_budget(
        int(gib * GIB),
        hidden_size=1024,
        num_layers=28,
        intermediate_size=3072,
        bytes_per_value=2,
        **{"checkpointing": False, "on_cpu": False, **how},
    )
    assert found == expected


def test_a_pass_costs_more_positions_where_a_position_costs_little():
    assert pass_overhead(6, 10_000_000, on_cpu=True) > pass_overhead(6, 20_000_000, on_cpu=True)
    assert pass_overhead(36, 4 * 10**9, on_cpu=False) > pass_overhead(36, 4 * 10**9, on_cpu=True)
    rows = TokenRows([[1]] * 4, [[7] * 10, [7] * 10, [7] * 100, [7] * 100])
    assert len(rows.cut(range(4), 1000, overhead=0)) == 2
    assert len(rows.cut(range(4), 1000, overhead=1000)) == 1
