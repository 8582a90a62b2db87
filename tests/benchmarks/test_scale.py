"""The simulation of docs/explanation/scale.md against cases worked by hand; accelerate's files."""

import importlib.util
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "explanation" / "scale.md").read_text()
FILES = sorted((ROOT / "examples" / "accelerate").glob("*.yaml"))


def load_script():
    path = ROOT / "scripts" / "simulate_schedule.py"
    spec = importlib.util.spec_from_file_location("simulate_schedule", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


sim = load_script()
EVERY_ITERATION = (1.0, 0.0, 0.0)
NO_TAIL = sim.Lengths(median=1000, sigma=0.0)
NOTHING = sim.Wire("none", nominal=float("inf"), latency=0.0)


@pytest.mark.parametrize(
    ("lengths", "slots", "seconds"),
    [
        ([5, 5, 5], 3, 5),  # all at once
        ([5, 5, 5], 1, 15),  # one after the other
        ([2, 4, 2], 2, 4),  # the third begins when the first has ended
        ([1, 1, 9], 2, 10),  # the longest comes last
        ([], 2, 0),
    ],
)
def test_finished_rows_free_their_slot(lengths, slots, seconds):
    assert sim.sampling_seconds(lengths, slots, EVERY_ITERATION) == seconds


def test_iteration_cost_by_hand():
    # rows of 2 and 3 tokens: two iterations of 2 rows, one of 1 row; contexts 0+0, 1+1 and 2
    assert sim.sampling_seconds([2, 3], 2, (10.0, 1.0, 0.0)) == (10 + 2) * 2 + (10 + 1)
    assert sim.sampling_seconds([2, 3], 2, (0.0, 0.0, 1.0)) == 0 + 2 + 2
    # beside a row of 4, three of 1 after each other: contexts 0, 1, 2 and 3 of the long one alone
    assert sim.sampling_seconds([1, 4, 1, 1], 2, (0.0, 0.0, 1.0)) == 0 + 1 + 2 + 3
    # a row that begins late takes its own context with it: 0 + 0, 1 + 0, 2 + 1, then 3 and 4
    assert sim.sampling_seconds([1, 5, 2], 2, (0.0, 0.0, 1.0)) == 0 + 1 + 3 + 3 + 4
    # one slot: the second row begins with an empty context
    assert sim.sampling_seconds([2, 3], 1, (0.0, 0.0, 1.0)) == (0 + 1) + (0 + 1 + 2)


def test_rows_are_dealt_in_order_and_tokens_evenly():
    assert sim.by_rows([9, 1, 1, 1], 2) == [[9, 1], [1, 1]]
    assert [len(share) for share in sim.by_rows(list(range(10)), 3)] == [3, 3, 4]
    assert sim.by_tokens([9, 1, 1, 1], 2) == [[9], [1, 1, 1]]
    assert [sum(share) for share in sim.by_tokens([5, 4, 3, 3], 2)] == [8, 7]


def test_ring_all_reduce_sends_twice_the_others_share():
    assert sim.all_reduce_bytes(100, 1) == 0
    assert sim.all_reduce_bytes(100, 2) == 100
    assert sim.all_reduce_bytes(100, 4) == 150
    assert sim.all_gather_bytes(100, 4) == 75
    wire = sim.Wire("by hand", nominal=100.0, share=0.5, latency=1.0)
    assert sim.all_reduce_seconds(100, 4, wire) == 150 / 50 + 6
    assert sim.all_reduce_seconds(100, 1, wire) == 0


@pytest.mark.parametrize(
    ("sampling", "learning", "send", "between_steps"),
    [(3, 2, 0, 3), (2, 3, 0, 3), (3, 2, 1, 4), (2, 4, 1, 4)],
)
def test_one_step_off_takes_the_longer_of_both(sampling, learning, send, between_steps):
    assert sim.overlapped([sampling] * 9, [learning] * 9, send) == between_steps


def test_one_card_with_equal_lengths_and_no_network_is_arithmetic():
    card = sim.Card(bandwidth=1e12, compute=1e14, slots=8)
    found = sim.simulate(
        sim.Plan(1, 8), card=card, wires=(NOTHING, NOTHING), lengths=NO_TAIL, steps=3
    )
    model = sim.QWEN3_4B
    weights = model.bytes_in(4) / 1e12 + 8 * 2 * model.weights / 1e14
    cache = model.kv_bytes_of_token / 1e12 * 8 * sum(range(1000))
    learning = 8 * model.train_flops(1000) / 1e14
    assert found.sampling == pytest.approx(1000 * weights + cache)
    assert found.learning == pytest.approx(learning)
    assert found.wire == 0
    assert found.tokens == 8000
    assert found.step == pytest.approx(1000 * weights + cache + learning)


def test_one_step_off_overlaps_sampling_and_learning():
    together, apart = (
        sim.simulate(sim.Plan(4, 64, servers=2, overlap=off), lengths=NO_TAIL, steps=4)
        for off in (False, True)
    )
    assert together.step == pytest.approx(together.sampling + together.learning + together.wire)
    assert apart.step == pytest.approx(max(apart.sampling, apart.learning), rel=0.01)


@pytest.mark.long
def test_docs_hold_the_tables_of_the_script():
    tables, outcomes = sim.make_tables()
    for name, text in tables.items():
        assert f"{text}\n<!-- /{name} -->" in PAGE, f"run {sim.__doc__.splitlines()[3]}"
    assert len(outcomes) == len(sim.plans())


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_accelerate_knows_every_setting_of_its_files(file):
    from accelerate.commands.config.config_args import load_config_from_file

    load_config_from_file(str(file))  # refuses unknown names at the top
    written = yaml.safe_load(file.read_text())
    assert written["num_processes"] == 2
    assert f"accelerate/{file.name}" in PAGE
