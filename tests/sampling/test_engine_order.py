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


def make_trainer(folder, reward, **settings):
    """Return a trainer of the embedded model whose engine is a recorder."""
    model, tokenizer = rk.load_model("tiny-thinker", load_in_4bit=False, max_seq_length=128)
    engine = Engine(rk.attach_lora(model))
    prompts = rk.load_prompts("arithmetic", num_prompts=16)
    return rk.LeaveOneOutTrainer(
        model=engine.model,
        processing_class=tokenizer,
        train_dataset=prompts,
        eval_dataset=prompts.select(range(2)),
        reward_funcs=reward,
        args=rk.LeaveOneOutConfig(
            str(folder), max_completion_length=8, canary=False, save_strategy="no", **settings
        ),
        engine=engine,
    )


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """What the engine was asked, and whether it was awake as rewards and budgets were taken."""
    seen = []
    phases = {}
    with rk.session(), pytest.MonkeyPatch.context() as patch:

        def reward(completions, **_):
            seen.append(("reward", engine.awake))
            return [float(len(completions) % (1 + i)) for i in range(len(completions))]

        trainer = make_trainer(
            tmp_path_factory.mktemp("out"), reward, max_steps=2, per_device_train_batch_size=8,
            num_generations=4, beta=0.02, dynamic_sampling=True,
        )  # fmt: skip
        engine = trainer.engine
        free = trainer_module.detect_hardware

        def noted():  # the budget of a pass is what is free now
            seen.append(("budget", engine.awake))
            return free()

        def evaluate():
            rk.evaluate(
                trainer.model, trainer.processing_class, trainer.eval_dataset,
                load_rewards([reward]), max_completion_length=8, engine=engine,
            )  # fmt: skip

        patch.setattr(trainer_module, "detect_hardware", noted)
        for name, act in (
            ("dry run", trainer.dry_run),
            ("training", trainer.train),
            ("evaluation", evaluate),
            ("release", lambda: rk.release(trainer)),
        ):
            engine.awake = True  # as an evaluation before it may leave it
            act()
            phases[name] = [*seen], [*engine.calls]
            seen.clear()
            engine.calls.clear()
    return phases


@pytest.mark.parametrize(
    ("phase", "taken"),
    [
        ("dry run", {"budget"}),
        ("training", {"reward"}),  # with the budget of the dry run
        ("evaluation", {"reward"}),
    ],
)
def test_rewards_and_budgets_see_the_engine_asleep(recorded, phase, taken):
    seen, calls = recorded[phase]
    assert {what for what, _ in seen} == taken
    assert not any(awake for _, awake in seen)
    after = [calls[i + 1] for i, call in enumerate(calls[:-1]) if call == "generate"]
    assert set(after) == ({"sleep"} if "reward" in taken else set())


def test_weights_are_released_before_their_engine(recorded):
    assert recorded["release"][1][-1] == "close with 0 parameters"


def test_an_evaluation_after_a_training_samples_from_its_last_weights(tmp_path):
    trainer = make_trainer(tmp_path, "length", max_steps=1, eval_strategy="steps", eval_steps=1)
    trainer.train()  # transformers may load the best weights at its end
    trainer.engine.calls.clear()
    trainer.evaluate()
    assert trainer.engine.calls[0] == "sync"


def test_a_session_releases_models_before_engines():
    with rk.session():
        model, _ = rk.load_model("tiny-thinker", load_in_4bit=False, max_seq_length=128)
        engine = Engine(model)
        rk.release(engine, model)
    assert engine.calls == ["close with 0 parameters"]
