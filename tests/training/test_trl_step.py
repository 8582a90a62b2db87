"""TRL's own step: when it trains, what it obeys, what it records, and how it resumes."""

import types
import warnings

import pytest
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM, TrainerCallback
from trl import RLOOTrainer

import rloo_kit as rk
from rloo_kit.checkpoints.store import read_checkpoint
from rloo_kit.training.step_choice import TRL_METHODS, choose_step


def short(completions, **_):
    """Score the completions of a group differently, by their texts."""
    return [float(sum(map(ord, one[-1]["content"])) % 7) for one in completions]


# --- the choice ----------------------------------------------------------------------------------


def settings(world_size=1, **given):
    """The settings of `choose_step`, as another number of processes has them."""
    args = rk.LeaveOneOutConfig("unused", **given)
    values = {name: getattr(args, name) for name in (*vars(args), "distributed_state")}
    return types.SimpleNamespace(**values | {"world_size": world_size})


@pytest.mark.parametrize(
    ("given", "facts", "reason"),
    [
        ({"step": "trl"}, {}, "trainer.step is 'trl'"),
        ({"world_size": 2}, {}, "2 processes train"),
        ({}, {"images": True}, "the prompts have images"),
        ({}, {"router_loss": 0.001}, "trainer.router_aux_loss_coef is 0.001"),
        ({}, {"overridden": {"_compute_loss"}}, "class overrides _compute_loss"),
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


def test_methods_of_trl_that_a_subclass_overrides_are_called(new_trainer):
    calls = set()

    def override(name):
        def method(self, *args, **keywords):
            calls.add(name)
            return getattr(RLOOTrainer, name)(self, *args, **keywords)

        return method

    mine = type("Mine", (rk.LeaveOneOutTrainer,), {name: override(name) for name in TRL_METHODS})
    trainer = new_trainer(kind=mine)
    assert str(trainer.step_choice).endswith(f"class overrides {', '.join(sorted(TRL_METHODS))}")
    trainer.train()
    assert calls == TRL_METHODS


def test_records_hold_the_advantages_that_trl_trains_with(new_trainer, config):
    seen = []

    class Mine(rk.LeaveOneOutTrainer):
        def _compute_loss(self, model, inputs):
            seen.extend(inputs["advantages"].tolist())
            return super()._compute_loss(model, inputs)

    class Keep(TrainerCallback):
        def on_completions(self, *_, records, **__):
            kept.extend(records)

    kept = []
    args = config(max_steps=2, beta=0.1, num_generations=4, learning_rate=1e-2)
    new_trainer(args, Mine, reward_funcs=short, callbacks=[Keep()]).train()
    assert len(kept) == 16
    assert sorted(seen) == pytest.approx(sorted(one["advantage"] for one in kept), abs=1e-4)
    assert any(abs(one) > 0.1 for one in seen)
    assert {one["step"] for one in kept} == {1, 2}
    assert all(one["rewards"]["short"] == one["score"] for one in kept)


def test_an_engine_for_trls_step_is_refused(new_trainer, config):
    with pytest.raises(rk.ConfigError, match="TRL's step cannot use an engine: leave engine out"):
        new_trainer(config(step="trl"), engine=types.SimpleNamespace())


def test_release_frees_the_tables_and_the_engine_of_trl(new_trainer, config, monkeypatch):
    trainer = new_trainer(config(step="trl"))
    trainer.train()
    trainer.vllm_generation = types.SimpleNamespace(llm="engine")
    assert trainer.tables["prompt"]
    ended = []
    monkeypatch.setattr(
        "rloo_kit.training.trl_step.shut_down_engine", lambda llm, on_gpu: ended.append(llm)
    )
    rk.release(trainer)
    assert ended == ["engine"]
    assert trainer.tables == {}


def test_a_training_resumes_from_a_checkpoint_of_transformers(new_trainer, config, tmp_path):
    def run(steps, resume=False, step="trl"):
        args = config(max_steps=steps, save_strategy="steps", save_steps=1, step=step)
        trainer = new_trainer(args)
        trainer.train(resume_from_checkpoint=resume)
        return trainer

    run(1)
    with pytest.warns(UserWarning, match="max_steps is 2 from here on"):
        second = run(2, resume=True)
    assert [row["step"] for row in second.state.log_history if "reward" in row] == [1, 2]
    assert read_checkpoint(tmp_path / "out/checkpoint-2").facts["step"] == "trl"
    assert (tmp_path / "out/checkpoint-2/optimizer.pt").exists()
    with pytest.raises(rk.CheckpointError, match=r"set trainer.step=trl"):
        run(3, resume=True, step="kit")


def test_a_full_disk_is_named_where_transformers_writes(new_trainer, config, monkeypatch):
    def full(*_, **__):  # torch's own error
        raise RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 576 vs 534")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(rk.DiskError, match=r"checkpoint 1 could not be written.*free"):
        new_trainer(config(save_strategy="steps", save_steps=1, step="trl")).train()


def test_held_out_samples_keep_the_random_states(new_trainer, config):
    trainer = new_trainer(config(step="trl"))
    trainer.train()
    before = torch.get_rng_state()
    found = trainer.sample_rows([trainer.train_dataset[0]], seed=1)
    assert len(found.completions) == 1
    assert torch.equal(torch.get_rng_state(), before)


# --- rewards that return None, in both steps -----------------------------------------------------


def nothing(completions, **_):
    return [None] * len(completions)


def all_but_the_first(completions, **_):
    return [None, *short(completions[1:])]


@pytest.fixture
def trained(new_trainer, config):
    def train(step, *rewards):
        """Train two steps; return the trainer and its warnings of rewards that never score."""
        trainer = new_trainer(config(max_steps=2, step=step), reward_funcs=[*rewards])
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            trainer.train()
        said = [str(one.message) for one in seen]
        return trainer, [one for one in said if "returned None for every" in one]

    return train


@pytest.mark.parametrize("step", ["kit", "trl"])
def test_a_first_batch_without_any_score_stops_the_training(trained, step, caplog):
    trainer, _ = trained(step, nothing)
    assert trainer.state.global_step == 1
    said = "reward nothing returned None for every completion of the first batch: let it return"
    assert trainer.stop_reason.startswith(said)
    assert caplog.text.count("All reward functions returned None for the following kwargs:") == 1


@pytest.mark.parametrize("step", ["kit", "trl"])
def test_a_reward_that_never_scores_is_named_once(trained, step, caplog):
    trainer, (said,) = trained(step, short, nothing)
    assert trainer.state.global_step == 2
    assert trainer.stop_reason is None
    assert said.startswith("reward nothing returned None for every completion of the first")
    assert "All reward functions" not in caplog.text


def test_a_row_without_a_score_is_warned_of_once(trained, caplog):
    trained("kit", all_but_the_first, nothing)
    (line,) = [one.getMessage() for one in caplog.records if one.name.startswith("rloo_kit")]
    assert line.startswith("All reward functions returned None for the following kwargs: prompt='")
    assert "1 of 8 rows of this batch are not trained: let a reward return a number" in line


# --- a mixture of experts ------------------------------------------------------------------------


@pytest.fixture
def experts(policy):
    tokenizer = policy[1]
    torch.manual_seed(0)
    shape = Qwen3MoeConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, num_experts=4,
        num_experts_per_tok=2, moe_intermediate_size=32, max_position_embeddings=256,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
        output_router_logits=True,
    )  # fmt: skip
    return Qwen3MoeForCausalLM(shape)


def test_a_frozen_router_has_no_loss_and_the_kits_step_unless_asked_for(
    experts, new_trainer, config
):
    model = rk.attach_lora(experts, target_modules=["q_proj", "v_proj"])
    kit = new_trainer(model=model)
    kit.train()
    assert not kit.by_trl
    assert "aux_loss" not in kit.state.log_history[0]
    trl = new_trainer(config(router_aux_loss_coef=0.01), model=model)
    trl.train()
    assert str(trl.step_choice).endswith("trainer.router_aux_loss_coef is 0.01")
    assert trl.state.log_history[0]["aux_loss"] > 0
    assert trl.state.log_history[0]["step/by_trl"] == 1


def test_a_router_that_trains_has_the_models_own_coefficient(experts, new_trainer, config):
    trainer = new_trainer(config(beta=0), model=experts)
    assert trainer.router_aux_loss_coef == experts.config.router_aux_loss_coef > 0
    assert trainer.by_trl
