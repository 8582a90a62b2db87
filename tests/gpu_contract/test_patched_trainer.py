"""Under the class that Unsloth makes of TRL's trainer, with a model that carries an engine."""

import os

import pytest

import rloo_kit as rk

pytestmark = pytest.mark.gpu_contract


def test_the_kits_trainer_is_made_of_unsloths_class():
    from rloo_kit.training.trainer import LeaveOneOutTrainer

    assert "UnslothRLOOTrainer" in [base.__name__ for base in LeaveOneOutTrainer.__mro__]


def variables():
    """Return the environment without what torch's compiler keeps in it (_TORCHINDUCTOR_...)."""
    return {name: value for name, value in os.environ.items() if not name.startswith("_")}


def test_trls_own_vllm_layer_stays_off(share, tmp_path):
    with pytest.MonkeyPatch.context() as while_it_starts:  # training needs a real card
        model, tokenizer = share(four_bit=True, patches=while_it_starts)
    engine = model.vllm_engine
    before = variables()
    trainer = rk.LeaveOneOutTrainer(
        model=model,
        processing_class=tokenizer,
        train_dataset=rk.load_prompts("arithmetic"),
        reward_funcs=["accuracy"],
        args=rk.LeaveOneOutConfig(
            str(tmp_path / "run"),
            max_steps=1,
            per_device_train_batch_size=8,
            num_generations=4,
            max_completion_length=16,
            generation="transformers",
            save_strategy="no",
            use_cpu=True,
        ),
    )
    assert not trainer.use_vllm
    assert not hasattr(trainer, "vllm_generation")
    assert variables() == before
    trainer.train()
    assert engine.llm_engine.model_executor.requests == {}
    assert model.vllm_engine is engine
    assert variables() == before
    assert [path.name for path in tmp_path.iterdir() if path.name != "run"] == []


def test_unsloths_grpo_trainer_has_trls_tool_loop():
    from rloo_kit.training.trl_step import run_tool_loop

    said = [{"role": "assistant", "content": "no call"}]
    mask, messages, ids, log_probs, calls, failures, _ = run_tool_loop(
        {"max_tool_calling_iterations": 1},
        [[{"role": "user", "content": "?"}]], [[1]], [[2, 3]], [said], [[-1.0, -2.0]], None, {},
    )  # fmt: skip
    assert (mask, messages, ids, log_probs) == ([[1, 1]], [said], [[2, 3]], [[-1.0, -2.0]])
    assert (calls, failures) == (0, 0)
