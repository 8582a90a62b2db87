"""N processes make the steps that one makes: same advantages, losses and adapter."""

import functools

import pytest
from teams import in_team, train

CASES = {
    "no-kl": {"beta": 0.0},
    "kl": {"beta": 0.05},
    "one-group": {"beta": 0.05, "num_generations": 16},
    "kl-by-token": {"beta": 0.05, "token_level_kl": True},
    "normalised": {"beta": 0.05, "normalize_advantages": True},
    "two-iterations": {"beta": 0.05, "num_iterations": 2, "epsilon": 0.002},
    "accumulated": {"beta": 0.05, "gradient_accumulation_steps": 2},
    "drawn-again": {"beta": 0.05, "dynamic_sampling": True, "missing_eos_penalty": 0.2},
}
SAME = (
    "loss",
    "reward",
    "kl",
    "grad_norm",
    "entropy",
    "completions/mean_length",
    "longest",
    "episode",
)
"""Metrics that may not depend on the number of processes."""


def all_cases(folder, team):
    return {name: train(team, folder / name, **case) for name, case in CASES.items()}


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    """What each case came to in 1, 2 and 4 processes, as the first process saw it."""
    folder = tmp_path_factory.mktemp("teams")
    return {
        size: in_team(functools.partial(all_cases, folder / f"{size}"), size, folder / f"of-{size}")
        for size in (1, 2, 4)
    }


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("case", list(CASES))
def test_n_processes_make_the_steps_of_one(seen, case, size):
    alone, first = seen[1][0][case], seen[size][0][case]
    assert len(alone["records"]) == len(first["records"]) > 0
    for one, other in zip(alone["records"], first["records"], strict=True):
        assert (one["step"], one["group"], one["completion"], one["rewards"]) == (
            other["step"],
            other["group"],
            other["completion"],
            other["rewards"],
        )
        # divided by their spread, which rounding in the KL goes through
        close = 3e-5 if case == "normalised" else 1e-5
        for name in ("score", "advantage", "baseline"):
            assert other[name] == pytest.approx(one[name], abs=close), name
        # the difference of two float32 sums of some 60 nats, from passes of other widths
        assert other["kl"] == pytest.approx(one["kl"], abs=1e-4)
    for one, other in zip(alone["rows"], first["rows"], strict=True):
        for name in SAME:
            scored_more = name == "longest" and case == "drawn-again"  # rows that fill up a draw
            if name in one and not scored_more:
                assert other[name] == pytest.approx(one[name], rel=1e-4, abs=1e-5), name
    assert (first["extra"], first["texts"]) == (alone["extra"], alone["texts"])
    assert distance(alone, first) < 1e-3


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("case", list(CASES))
def test_all_processes_hold_the_same_adapter(seen, case, size):
    first, *others = (result[case]["adapter"] for result in seen[size])
    for other in others:
        assert all((other[name] == values).all() for name, values in first.items())


def distance(one, other):
    """Return the distance of two adapters over the way that the first one moved."""
    apart = sum(((one["adapter"][n] - v) ** 2).sum() for n, v in other["adapter"].items()) ** 0.5
    way = sum((v**2).sum() for v in one["moved"].values()) ** 0.5
    return float(apart / way)
