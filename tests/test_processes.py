"""What several processes agree on before they exchange anything; tests/processes has the rest."""

import signal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rloo_kit.errors import ConfigError, ProcessLostError, RewardError
from rloo_kit.evaluation.evaluator import Evaluation
from rloo_kit.processes import (
    ALONE,
    join_team,
    launched_rank,
    launched_size,
    raise_if_peer_lost,
)
from rloo_kit.rloo.batching import TokenRows
from rloo_kit.runs.launch import outcome
from rloo_kit.training.preparation import divided_batch

# --- the batch -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rows", "slices", "processes", "expected"),
    [(8, 4, 2, (8, 2)), (8, 4, 4, (8, 1)), (8, 4, 8, (4, 1)), (8, 3, 2, (4, 3)), (6, 2, 4, (3, 1))],
)
def test_accumulation_is_divided_before_the_rows_of_a_pass(rows, slices, processes, expected):
    settings = {"per_device_train_batch_size": rows, "gradient_accumulation_steps": slices}
    divided = divided_batch(settings, processes)
    assert tuple(divided.values()) == expected
    assert rows * slices == processes * expected[0] * expected[1]


def test_an_indivisible_batch_names_possible_sizes():
    with pytest.raises(ConfigError, match="3 processes cannot divide a batch of 8 x 1 rows"):
        divided_batch({}, 3)


@given(st.lists(st.integers(1, 50), min_size=1, max_size=20), st.integers(1, 5))
def test_rows_are_dealt_once_and_evenly(lengths, shares):
    tokens = TokenRows([[0]] * len(lengths), [[1] * length for length in lengths])
    rows = list(range(len(lengths)))
    dealt = tokens.deal(rows, shares)
    assert sorted(row for share in dealt for row in share) == rows
    loads = [tokens.num_tokens(share) for share in dealt]
    assert max(loads) - min(loads) <= max(tokens.lengths)
    assert dealt == tokens.deal(rows[::-1], shares)  # whatever order a process has them in


def test_scores_of_shares_are_those_of_the_whole():
    def of(scores, length):
        samples = [{"rewards": {"accuracy": score}} for score in scores]
        return Evaluation({"accuracy": 0.0}, len(scores), length, 1.0, samples)

    whole = Evaluation.joined([of([1.0, 0.0, None], 10.0), of([1.0], 2.0)])
    assert whole.rewards == {"accuracy": pytest.approx(2 / 3)}
    assert (whole.num_prompts, whole.mean_length, len(whole.samples)) == (4, 8.0, 4)


# --- the launcher --------------------------------------------------------------------------------


def test_without_a_launcher_there_is_one_process(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv("WORLD_SIZE", "4")  # left over in a shell
    assert (launched_size(), launched_rank()) == (1, 0)
    assert ALONE.gather(3) == [3]
    assert ALONE.run_on_first(lambda: 5) == 5


def test_sharded_weights_are_refused(monkeypatch):
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "ACCELERATE_USE_FSDP": "true"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=r"FSDP shards the weights.*--processes"):
        join_team(on_cpu=True)


@pytest.mark.parametrize(
    ("error", "lost"),
    [
        (RuntimeError("[../third_party/gloo/gloo/transport/tcp/pair.cc:534] Broken pipe"), True),
        (RuntimeError("Connection closed by peer [127.0.0.1]:1234"), True),
        (RuntimeError("shape mismatch"), False),
        (OSError("connection reset by peer"), False),  # a judge's server
    ],
)
def test_a_dead_line_to_another_process_is_recognised(error, lost):
    with pytest.raises(ProcessLostError if lost else type(error)), raise_if_peer_lost():
        raise error


def test_an_error_of_the_kit_is_no_lost_process():
    with pytest.raises(RewardError), raise_if_peer_lost():
        raise RewardError("gloo")


@pytest.mark.parametrize(
    ("first", "codes", "text", "said", "code"),
    [
        (1, (3, -signal.SIGKILL), "", "process 1 of 2 was ended by SIGKILL: memory may", 2),
        (1, (3, 2), "rloo-kit: fix it", "process 1 of 2 ended with code 2:\nrloo-kit: fix it", 2),
        (1, (2, 2), "rloo-kit: same trouble", "", 2),  # the first has said it
        (0, (2, 3), "", "", 2),
        (1, (143, 143), "", "", 143),
    ],
)
def test_the_one_that_failed_first_is_named(first, codes, text, said, code):
    found, exit_code = outcome(first, codes, text)
    assert found.startswith(said) if said else found == ""
    assert exit_code == code
