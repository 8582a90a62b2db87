"""Trainers of the embedded model with tools."""

import pytest

import rloo_kit as rk
from rloo_kit.models.adapters import EMBEDDED

SETTINGS = {
    "per_device_train_batch_size": 16, "num_generations": 4, "max_completion_length": 192,
    "learning_rate": 1e-3, "beta": 0.05, "doctor": False, "seed": 7, "save_strategy": "no",
    "max_grad_norm": 0.0, "bf16": False,
}  # fmt: skip


@pytest.fixture
def trainer_of():
    """Return a trainer of the embedded model with tools."""
    return make_trainer


def make_trainer(folder, model="tiny-caller", prompts="sums", tools=(), callbacks=(), **settings):
    from transformers import AutoTokenizer  # after Unsloth

    loaded, _ = rk.load_model(model, max_seq_length=512, load_in_4bit=False, precision="fp32")
    reward = settings.pop("reward_funcs", ["accuracy", {"name": "tool_use", "cost": 0.1}])
    names = ("environment_factory", "eval_dataset")
    dataset = settings.pop("dataset", None)
    if dataset is None and prompts:
        dataset = rk.load_prompts(prompts, num_prompts=32)
    others = {name: settings.pop(name) for name in names if name in settings}
    return rk.LeaveOneOutTrainer(
        rk.attach_lora(loaded, r=4, seed=1),
        reward,
        rk.LeaveOneOutConfig(str(folder), **{"max_steps": 2, **SETTINGS, **settings}),
        dataset,
        AutoTokenizer.from_pretrained(EMBEDDED["tiny-caller"]),
        list(callbacks),
        tools=tools,
        **others,
    )
