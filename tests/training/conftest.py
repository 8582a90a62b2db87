"""The embedded model with an adapter, settings of a short training, and a trainer of both."""

import pytest

import rloo_kit as rk


@pytest.fixture
def policy():
    model, tokenizer = rk.load_model("tiny-thinker", max_seq_length=256)
    return rk.attach_lora(model, r=4), tokenizer


@pytest.fixture
def config(tmp_path):
    few = {
        "max_steps": 1, "max_completion_length": 24, "save_strategy": "no", "learning_rate": 1e-3,
    }  # fmt: skip
    return lambda **settings: rk.LeaveOneOutConfig(str(tmp_path / "out"), **few | settings)


@pytest.fixture
def new_trainer(policy, config):
    def make(args=None, kind=rk.LeaveOneOutTrainer, **parts):
        usual = {
            "model": policy[0],
            "reward_funcs": "length",
            "train_dataset": rk.load_prompts("arithmetic", num_prompts=16),
            "processing_class": policy[1],
        }
        return kind(args=args or config(), **usual | parts)

    return make
