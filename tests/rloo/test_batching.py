"""Micro-batches: cut at the lowest cost, groups kept whole, padding on the right alone."""

import math
import random
from itertools import chain

import pytest

from rloo_kit.rloo.batching import IGNORED, TokenRows
from rloo_kit.rloo.token_budget import default_token_budget, pass_overhead

OVERHEAD = 32

PAD = 999


def positions(tokens, rows):
    """Positions of a micro-batch in which each row has its own prompt."""
    return len(rows) * max(tokens.lengths[row] for row in rows)


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
    completions = [[7] * draw.choice([draw.randint(0, 9), draw.randint(0, 99)]) for _ in range(9)]
    tokens = TokenRows([prompts[n % 3] for n in range(9)], completions)

    def size(rows):
        shared = shared_positions(tokens, rows) + OVERHEAD
        return min(positions(tokens, rows), shared if share else math.inf)

    pieces = tokens.cut(draw.sample(range(9), 9), budget, OVERHEAD, share=share)
    order = sorted(range(9), key=lambda row: (tokens.lengths[row], row))
    allowed = [
        sum(size(piece) + OVERHEAD for piece in cut)
        for cut in every_cut(order)
        if all(len(piece) == 1 or size(piece) <= budget for piece in cut)
    ]
    assert sum(size(piece) + OVERHEAD for piece in pieces) == min(allowed)
    assert sorted(chain(*pieces)) == [*range(9)]
    for piece in pieces:
        shared, apart = shared_positions(tokens, piece), positions(tokens, piece)
        is_cheaper = shared + OVERHEAD < apart
        assert tokens.is_cheaper_shared(piece, OVERHEAD) == is_cheaper
        batch = tokens.pad(piece, PAD, share=is_cheaper)
        assert batch.num_positions == (shared if is_cheaper else apart)


# --- bundle ------------------------------------------------------------------------------------


@pytest.mark.parametrize("budget", [20, 60, 150, 10**9])
@pytest.mark.parametrize("seed", range(5))
def test_bundles_hold_whole_groups_within_the_budget_and_lose_nothing(seed, budget):
    draw = random.Random(seed)
    lengths = [draw.choice([draw.randint(2, 9), draw.randint(2, 40)]) for _ in range(40)]
    tokens = TokenRows([[0]] * 40, [[0] * (length - 1) for length in lengths])
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


# --- pad ---------------------------------------------------------------------------------------

PROMPTS = [[11, 12, 13], [21], [31, 32, 33, 34, 35], [41, 42]]
COMPLETIONS = [[111, 112], [121, 122, 123, 124], [131], []]
ROWS = TokenRows(PROMPTS, COMPLETIONS)


@pytest.mark.parametrize("multiple_of", [None, 4, 7, 64])
@pytest.mark.parametrize("rows", [[0, 1, 2, 3], [2, 0], [1], [1, 3]])
def test_padded_rows_give_their_token_ids_back(rows, multiple_of):
    batch = ROWS.pad(rows, PAD, multiple_of=multiple_of)
    assert batch.rows.tolist() == rows
    gathered = batch.input_ids.gather(1, batch.places)
    assert batch.completion_mask.shape == (len(rows), max(len(COMPLETIONS[row]) for row in rows))
    for place, row in enumerate(rows):
        ids = PROMPTS[row] + COMPLETIONS[row]
        assert batch.input_ids[place, : len(ids)].tolist() == ids
        assert (batch.input_ids[place, len(ids) :] == PAD).all(), "padding is on the right"
        assert gathered[place][batch.completion_mask[place]].tolist() == COMPLETIONS[row]
        scored = batch.labels[place] != IGNORED
        assert batch.labels[place][scored].tolist() == COMPLETIONS[row]
        assert scored.nonzero().flatten().tolist() == list(range(len(PROMPTS[row]), len(ids)))
    assert batch.num_tokens == ROWS.num_tokens(rows)
    assert batch.num_positions == batch.input_ids.numel()


@pytest.mark.parametrize("share", [False, True])
def test_tokens_of_tools_have_no_label(share):
    tokens = TokenRows([[9, 1], [9, 2]], [[3, 4, 5], [6]], [[True, False, True], [True]])
    batch = tokens.pad([0, 1], PAD, share=share)
    labels = [[IGNORED, 3, IGNORED, 5], [IGNORED, 6, IGNORED, IGNORED]]
    assert batch.labels[:, 1 - share :].tolist() == labels
    assert batch.num_tokens == tokens.num_tokens([0, 1])


def test_a_completion_without_tokens_is_one_turn():
    assert ROWS.turns == [[ids] for ids in COMPLETIONS]


# --- default budget ------------------------------------------------------------------------------

GIB = 2**30


LAYER = 12 * 1024 + 5 * 3072


def budget(gib, *, checkpointing=False, on_cpu=False):
    return default_token_budget(
        int(gib * GIB), 1024, 28, intermediate_size=3072, bytes_per_value=2,
        checkpointing=checkpointing, on_cpu=on_cpu,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("gib", "how", "room", "values"),
    [
        (8, {}, 4, 28 * LAYER),
        (0.5, {"checkpointing": True}, 1 / 4, LAYER + 28 * 1024),
        (2, {"on_cpu": True}, 1, 28 * LAYER),
        (1000, {"on_cpu": True}, 4, 28 * LAYER),  # the most on a CPU
    ],
)
def test_the_budget_is_half_the_memory_per_position(gib, how, room, values):
    assert budget(gib, **how) == room * GIB // (2 * values)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_budget_grows_with_memory_between_its_bounds(checkpointing):
    found = [budget(gib, checkpointing=checkpointing) for gib in (0, 0.1, 1, 2, 4, 8, 80, 1000)]
    assert found == sorted(found)
    assert (found[0], found[-1]) == (512, 16_384)
    assert len(set(found)) > 3


def test_a_pass_costs_more_positions_where_a_position_costs_little():
    assert pass_overhead(6, 10_000_000, on_cpu=True) > pass_overhead(6, 20_000_000, on_cpu=True)
    assert pass_overhead(36, 4 * 10**9, on_cpu=False) > pass_overhead(36, 4 * 10**9, on_cpu=True)


def test_shared_prompts_are_apart_from_their_rows():
    tokens = TokenRows([[1, 2, 3], [4, 5], [1, 2, 3]], [[11], [12, 13], []])
    batch = tokens.pad([2, 1, 0], PAD, share=True)
    shared = batch.shared
    prompts = [
        ids[:length].tolist() for ids, length in zip(shared.input_ids, shared.lengths, strict=True)
    ]
    assert sorted(prompts) == [[1, 2], [4]]
    assert [prompts[n] for n in shared.of_row.tolist()] == [[1, 2], [4], [1, 2]]
    assert batch.input_ids.tolist() == [[3, PAD, PAD], [5, 12, 13], [3, 11, PAD]]
    assert batch.input_ids.gather(1, batch.places)[batch.completion_mask].tolist() == [12, 13, 11]
    assert batch.num_tokens == 3 + 6
