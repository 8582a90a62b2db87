"""Everything here runs against the real engine: pytestmark in each file is ``vllm``."""

import pytest
import torch

import rloo_kit as rk
from rloo_kit.data.lengths import prompt_ids


@pytest.fixture(scope="session")
def adapted_model():
    """Return a loader of the embedded model in 16 bit with an adapter that does something."""

    def load():
        model, tokenizer = rk.load_model("tiny-thinker", load_in_4bit=False, max_seq_length=128)
        model = rk.attach_lora(model, r=16)
        torch.manual_seed(0)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.2)
        return model, tokenizer

    return load


@pytest.fixture
def policy(adapted_model):
    """That model, and 64 prompts."""
    with rk.session():
        model, tokenizer = adapted_model()
        rows = rk.load_prompts("arithmetic", num_prompts=64)
        yield model, tokenizer, [prompt_ids(tokenizer, row["prompt"]) for row in rows]


@pytest.fixture
def make_trainer(tmp_path):
    """Return a function that gives a trainer of the quickstart task with vLLM on."""

    def make(model, tokenizer, rewards=("accuracy",), **settings):
        quick = {
            "max_steps": 3,
            "per_device_train_batch_size": 32,
            "num_generations": 8,
            "max_completion_length": 48,
            "learning_rate": 1e-3,
            "beta": 0.02,
            "generation": "vllm",
            "save_strategy": "no",
        }
        return rk.LeaveOneOutTrainer(
            model=model,
            processing_class=tokenizer,
            train_dataset=rk.load_prompts("arithmetic"),
            reward_funcs=list(rewards),
            args=rk.LeaveOneOutConfig(str(tmp_path / "out"), **{**quick, **settings}),
        )

    return make
