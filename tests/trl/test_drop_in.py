"""TRL's own tests of RLOOTrainer, and of GRPOTrainer's tools, pass with the kit's class.

    TRL_TEST_FILE=TRL/tests/test_rloo_trainer.py .venv/bin/python -m pytest -m slow tests/trl

The file of GRPOTrainer's tests lies beside it. Some ten minutes for each class.
``tests/scripts/trl_tests.py`` prints the table of both.
"""

import os
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parents[1] / "scripts"
DIFFERENT = {
    "test_train_with_generation_kwargs": "refused: beam search draws from another policy",
}
"""Tests that TRL's class passes and the kit's does not, and why."""
DIFFERENT_WITH_TOOLS = {
    "test_train_with_multiple_environments": "reads TRL's private `_env_tools`",
    "test_train_with_unknown_environment_raises": "refused before the training, not in its midst",
    "test_environment_owned_reward_mixed_environments": "calls a reward without completions",
}


@pytest.mark.slow
@pytest.mark.skipif("TRL_TEST_FILE" not in os.environ, reason="TRL_TEST_FILE names no file")
@pytest.mark.parametrize(
    ("name", "least", "different"),
    [
        ("test_rloo_trainer.py", 71, DIFFERENT),
        ("test_grpo_trainer.py", 13, DIFFERENT_WITH_TOOLS),
    ],
)
def test_trls_own_tests_pass_with_the_kits_class(name, least, different, monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))
    monkeypatch.setenv("PYTHONWARNINGS", "ignore")
    from trl_tests import run_all

    file = Path(os.environ["TRL_TEST_FILE"]).with_name(name)
    trl, kit = run_all(file, ["trl", "kit"]).values()
    passed = {name for name, outcome in trl.items() if outcome.kind == "passed"}
    assert len(passed) >= least
    lost = {name: kit[name].why for name in passed if kit[name].kind != "passed"}
    assert lost.keys() == different.keys(), lost
