"""What happens while an engine is awake, and what before it is shut down."""

import pytest
import torch

import rloo_kit as rk
from rloo_kit.sampling.engine import Generations
from rloo_kit.scoring.specs import load_rewards
from rloo_kit.training import step_trainer as trainer_module

COMPLETION = [5, 6, 7]


class Engine:
    """Samples the same tokens for every prompt, and notes when it is awake and what it saw."""

    name = "a recorder"
    sync_seconds = 0.0
    adapter_dtype = torch.float32

    def __init__(self, model):
        self.model = model
        self.awake = True
        self.calls = []

    def sync(self, model):
        self.awake = True
        self.calls.append("sync")

    def generate(self, prompt_ids, sampling, seed):
        self.awake = True
        self.calls.append("generate")
        ids = [COMPLETION[: 1 + row % 3] for row in range(len(prompt_ids))]
        return Generations(ids, [[-1.0] * len(row) for row in ids])

    def sleep(self):
        self.awake = False
        self.calls.append("sleep")

    def close(self):
        sizes = [parameter.numel() for parameter in self.model.parameters()]
        self.calls.append(f"close with {sum(sizes)} parameters")


@pytest.fixture
def trained(tmp_path, monkeypatch):
    """Return a function that gives (trainer, engine, when rewards and budgets were taken)."""

    def make(**settings):
        seen = []
        model, tokenizer = rk.load_model("tiny-thinker", load_in_4bit=False, max_seq_length=128)
        model = rk.attach_lora(model)
        engine = Engine(model)

        def reward(completions, **_):
            seen.append(("reward", engine.awake))
            return [float(len(completions) % (1 + i)) for i in range(len(completions))]

        quick = {
            "max_steps": 2,
            "per_device_train_batch_size": 8,
            "num_generations": 4,
            "max_completion_length": 8,
            "beta": 0.02,
            "canary": False,
            "save_strategy": "no",
        }
        trainer = rk.LeaveOneOutTrainer(
            model=model,
            processing_class=tokenizer,
            train_dataset=rk.load_prompts("arithmetic", num_prompts=16),
            reward_funcs=reward,
            args=rk.LeaveOneOutConfig(str(tmp_path), **{**quick, **settings}),
            engine=engine,
        )
        free = trainer_module.detect_hardware

        def noted():  # the budget of a pass is what is free now
            seen.append(("budget", engine.awake))
            return free()

        monkeypatch.setattr(trainer_module, "detect_hardware", noted)
        return trainer, engine, seen

    with rk.session():
        yield make


@pytest.mark.parametrize(
    "settings",
    [{}, pytest.param({"dynamic_sampling": True}, marks=pytest.mark.long)],
    ids=["plain", "dynamic sampling"],
)
def test_rewards_and_budgets_see_the_engine_asleep(trained, settings):
    trainer, engine, seen = trained(**settings)
    trainer.train()
    assert {what for what, _ in seen} == {"reward", "budget"}
    assert not any(awake for _, awake in seen)
    after = [engine.calls[i + 1] for i, call in enumerate(engine.calls[:-1]) if call == "generate"]
    assert set(after) == {"sleep"}


@pytest.mark.long
def test_the_dry_run_measures_with_the_engine_asleep(trained):
    trainer, engine, seen = trained()
    engine.awake = True  # as an evaluation before it left it
    trainer.dry_run()
    assert ("budget", False) in seen
    assert ("budget", True) not in seen


def test_an_evaluation_scores_with_the_engine_asleep(trained):
    trainer, engine, _ = trained()
    seen = []

    def reward(completions, **_):
        seen.append(engine.awake)
        return [0.0] * len(completions)

    rk.evaluate(
        trainer.model,
        trainer.processing_class,
        rk.load_prompts("arithmetic", num_prompts=4),
        load_rewards([reward]),
        max_completion_length=8,
        engine=engine,
    )
    assert seen == [False]


def test_weights_are_released_before_their_engine(trained):
    trainer, engine, _ = trained()
    rk.release(trainer)
    assert engine.calls[-1] == "close with 0 parameters"


def test_a_session_releases_models_before_engines(trained):
    model, _ = rk.load_model("tiny-thinker", load_in_4bit=False, max_seq_length=128)
    engine = Engine(model)
    rk.release(engine, model)
    assert engine.calls == ["close with 0 parameters"]
