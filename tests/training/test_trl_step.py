"""TRL's own step: when it trains, what it obeys, what it records, and how it resumes."""

import types
import warnings

import pytest
import torch
from datasets import Dataset
from transformers import AutoTokenizer, Qwen3MoeConfig, Qwen3MoeForCausalLM
from trl import RLOOTrainer

import rloo_kit as rk
from rloo_kit.checkpoints.store import read_checkpoint
from rloo_kit.models.shape import TINY_THINKER
from rloo_kit.training.step_choice import TRL_METHODS, choose_step

PROMPTS = Dataset.from_list(
    [{"prompt": f"What is {n} + 11?", "answer": str(n + 11)} for n in range(8)]
)


def short(completions, **_):
    """Score the completions of a group differently, by their texts."""
    return [float(sum(map(ord, text)) % 7) for text in completions]


def config(folder, **settings):
    given = {"max_steps": 1, "max_completion_length": 8, "per_device_train_batch_size": 8}
    return rk.LeaveOneOutConfig(str(folder), **{**given, **settings})


@pytest.fixture
def policy():
    model, tokenizer = rk.load_model("tiny-thinker", max_seq_length=128)
    return rk.attach_lora(model, r=2), tokenizer


def trainer_of(policy, args, rewards=short, kind=rk.LeaveOneOutTrainer, rows=PROMPTS):
    return kind(policy[0], rewards, args, rows, policy[1])


# --- the choice ----------------------------------------------------------------------------------


def settings(world_size=1, **given):
    """The settings of `choose_step`, as another number of processes has them."""
    args = config("unused", **given)
    values = {name: getattr(args, name) for name in (*vars(args), "distributed_state")}
    return types.SimpleNamespace(**values | {"world_size": world_size})


@pytest.mark.parametrize(
    ("given", "facts", "reason"),
    [
        ({"step": "trl"}, {}, "trainer.step is 'trl'"),
        ({"world_size": 2}, {}, "2 processes train"),
        ({}, {"images": True}, "the prompts have images"),
        ({}, {"router_loss": 0.001}, "trainer.router_aux_loss_coef is 0.001"),
        ({}, {"overridden": {"_compute_loss", "log"}}, "class overrides _compute_loss"),
    ],
)
def test_trls_step_is_chosen_for_a_reason(given, facts, reason):
    assert not choose_step(settings()).by_trl
    choice = choose_step(settings(**given), **facts)
    assert choice.by_trl
    assert choice.reason.endswith(reason)
    with pytest.raises(rk.ConfigError, match=f"^trainer.dynamic_sampling is True.*{reason}: leave"):
        choose_step(settings(**given, dynamic_sampling=True), **facts)
    if given.get("step") != "trl":
        with pytest.raises(rk.ConfigError, match=f"trainer.step is 'kit'.*{reason}: set"):
            choose_step(settings(**given | {"step": "kit"}), **facts)


def test_a_run_file_hears_of_it_before_the_model_is_loaded(tmp_path, monkeypatch, capsys):
    from rloo_kit.cli import main

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("rloo_kit.job.load_model", pytest.fail)  # the weights
    more = ["--set", "trainer.step=trl", "--set", "trainer.missing_eos_penalty=1"]
    assert main(["quickstart", *more]) == 2
    said = capsys.readouterr().err
    assert "trainer.missing_eos_penalty is 1, which only the kit's step obeys" in said
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("given", [{"generation": "vllm"}, {"use_vllm": True}])
def test_vllm_that_cannot_take_trls_weights_is_refused(given):
    with pytest.raises(rk.ConfigError, match="cannot load the weights that TRL's step sends"):
        choose_step(settings(step="trl", use_cpu=True, **given))


def test_fsdp_without_gpus_is_refused(monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(rk.ConfigError, match=r"^FSDP divides a model among the GPUs"):
        choose_step(settings())


# --- a trainer -----------------------------------------------------------------------------------


def test_methods_of_trl_that_a_subclass_overrides_are_called(policy, tmp_path):
    calls = set()

    def override(name):
        def method(self, *args, **keywords):
            calls.add(name)
            return getattr(RLOOTrainer, name)(self, *args, **keywords)

        return method

    mine = type("Mine", (rk.LeaveOneOutTrainer,), {name: override(name) for name in TRL_METHODS})
    trainer = trainer_of(policy, config(tmp_path), kind=mine)
    assert str(trainer.step_choice).endswith(f"class overrides {', '.join(sorted(TRL_METHODS))}")
    trainer.train()
    assert calls == TRL_METHODS


def test_records_hold_the_advantages_that_trl_trains_with(policy, tmp_path):
    seen = []

    class Mine(rk.LeaveOneOutTrainer):
        def _compute_loss(self, model, inputs):
            seen.extend(inputs["advantages"].tolist())
            return super()._compute_loss(model, inputs)

        def notify(self, event, **values):
            if event == "on_completions":
                records.extend(values["records"])

    records = []
    args = config(tmp_path, max_steps=2, beta=0.1, num_generations=4, learning_rate=1e-2)
    trainer_of(policy, args, kind=Mine).train()
    assert len(records) == 16
    assert sorted(seen) == pytest.approx(sorted(one["advantage"] for one in records), abs=1e-4)
    assert any(abs(one) > 0.1 for one in seen)
    assert {one["step"] for one in records} == {1, 2}
    assert all(one["rewards"]["short"] == one["score"] for one in records)


def test_a_training_resumes_from_a_checkpoint_of_transformers(tmp_path):
    def run(steps, resume=False, step="trl"):
        loaded, tokenizer = rk.load_model("tiny-thinker", max_seq_length=128)
        policy = rk.attach_lora(loaded, r=2), tokenizer
        args = config(tmp_path, max_steps=steps, save_steps=1, step=step, beta=0.1)
        trainer = trainer_of(policy, args)
        trainer.train(resume_from_checkpoint=resume)
        return trainer

    run(1)
    with pytest.warns(UserWarning, match="max_steps is 2 from here on"):
        second = run(2, resume=True)
    assert [row["step"] for row in second.state.log_history if "reward" in row] == [1, 2]
    assert read_checkpoint(tmp_path / "checkpoint-2").facts["step"] == "trl"
    assert (tmp_path / "checkpoint-2" / "optimizer.pt").exists()
    with pytest.raises(rk.CheckpointError, match=r"set trainer.step to trl"):
        run(3, resume=True, step="kit")


# --- rewards that return None, in both steps -----------------------------------------------------


def nothing(completions, **_):
    return [None] * len(completions)


def all_but_the_first(completions, **_):
    return [None, *short(completions[1:])]


def trained(policy, tmp_path, step, rewards):
    """Train two steps; return the trainer and its warnings of rewards that never score."""
    args = config(tmp_path, max_steps=2, step=step, save_strategy="no")
    trainer = trainer_of(policy, args, rewards)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        trainer.train()
    return trainer, [
        str(one.message) for one in seen if "returned None for every" in str(one.message)
    ]


@pytest.mark.parametrize("step", ["kit", "trl"])
def test_a_first_batch_without_any_score_stops_the_training(policy, tmp_path, step, caplog):
    trainer, _ = trained(policy, tmp_path, step, nothing)
    assert trainer.state.global_step == 1
    said = "reward nothing returned None for every completion of the first batch: let it return"
    assert trainer.stop_reason.startswith(said)
    assert caplog.text.count("All reward functions returned None for the following kwargs:") == 1


@pytest.mark.parametrize("step", ["kit", "trl"])
def test_a_reward_that_never_scores_is_named_once(policy, tmp_path, step, caplog):
    trainer, (said,) = trained(policy, tmp_path, step, [short, nothing])
    assert trainer.state.global_step == 2
    assert trainer.stop_reason is None
    assert said.startswith("reward nothing returned None for every completion of the first")
    assert "All reward functions" not in caplog.text


def test_a_row_without_a_score_is_warned_of_once(policy, tmp_path, caplog):
    trainer, _ = trained(policy, tmp_path, "kit", [all_but_the_first, nothing])
    assert trainer.state.global_step == 2
    (line,) = [one.getMessage() for one in caplog.records if one.name.startswith("rloo_kit")]
    assert line.startswith("All reward functions returned None for the following kwargs: prompt='")
    assert "1 of 8 rows of this batch are not trained: let a reward return a number" in line


# --- a mixture of experts ------------------------------------------------------------------------


@pytest.fixture
def experts():
    tokenizer = AutoTokenizer.from_pretrained(TINY_THINKER)
    torch.manual_seed(0)
    shape = Qwen3MoeConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, num_experts=4,
        num_experts_per_tok=2, moe_intermediate_size=32, max_position_embeddings=256,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
        output_router_logits=True,
    )  # fmt: skip
    return Qwen3MoeForCausalLM(shape), tokenizer


def test_a_frozen_router_has_no_loss_and_the_kits_step_unless_asked_for(experts, tmp_path):
    model = rk.attach_lora(experts[0], target_modules=["q_proj", "v_proj"])
    kit = trainer_of((model, experts[1]), config(tmp_path))
    kit.train()
    assert not kit.by_trl
    assert "aux_loss" not in kit.state.log_history[0]
    trl = trainer_of((model, experts[1]), config(tmp_path, router_aux_loss_coef=0.01))
    trl.train()
    assert str(trl.step_choice).endswith("trainer.router_aux_loss_coef is 0.01")
    assert trl.state.log_history[0]["aux_loss"] > 0
    assert trl.state.log_history[0]["step/by_trl"] == 1


def test_a_router_that_trains_has_the_models_own_coefficient(experts, tmp_path):
    trainer = trainer_of(experts, config(tmp_path, beta=0))
    assert trainer.router_aux_loss_coef == experts[0].config.router_aux_loss_coef > 0
    assert trainer.by_trl
