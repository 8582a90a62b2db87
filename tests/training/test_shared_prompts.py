"""Prompts that run once for their group: the same log-probabilities and gradient."""

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from transformers import AutoTokenizer

import rloo_kit as rk
from rloo_kit.models.shape import TINY_THINKER
from rloo_kit.rloo.batching import TokenRows
from rloo_kit.sampling.decoding import continues_prompts
from rloo_kit.training.policy import enable_checkpointing, without_checkpointing

SMALL = {
    "vocab_size": 261, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "initializer_range": 0.3,
    "max_position_embeddings": 256, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2,
}  # fmt: skip
FAMILIES = ["llama", "qwen3", "olmo2", "phi3"]
# Sliding windows see the padding of a shorter prompt, and state-space layers hold no keys
OTHERS = {
    "gemma3_text": {"sliding_window": 6},
    "mistral": {"sliding_window": 6},
    "mamba": {"state_size": 4},
    "falcon_h1": {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 4},
}
PROMPTS = [[50 + n for n in range(40)]] * 4 + [[90, 91, 92]] * 4 + [[95]] * 2
COMPLETIONS = [[(7 * row + n) % 200 for n in range(3 + 2 * row)] for row in range(10)]


def make(family, **more):
    torch.manual_seed(1)
    config = transformers.AutoConfig.for_model(family, **SMALL | more)
    return transformers.AutoModelForCausalLM.from_config(config)


def adapted(model):
    lora = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)  # not the base
    return get_peft_model(model, lora)


def trainer_of(model, folder, **settings):
    return rk.LeaveOneOutTrainer(
        model=model,
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=rk.LeaveOneOutConfig(
            output_dir=str(folder), bf16=False, use_cpu=True, doctor=False, **settings
        ),
        train_dataset=rk.load_prompts("arithmetic", num_prompts=4),
        processing_class=AutoTokenizer.from_pretrained(TINY_THINKER),
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_log_probs_and_gradient_are_the_same(family, tmp_path):
    trainer = trainer_of(adapted(make(family)), tmp_path, gradient_checkpointing=False)
    tokens = TokenRows(PROMPTS, COMPLETIONS)
    found = []
    for share in (False, True):
        trainer.model.zero_grad()
        batch = tokens.pad(range(10), 0, share=share)
        scored = trainer.policy.run(batch)
        weights = torch.randn(scored.log_probs.shape, generator=torch.Generator().manual_seed(2))
        (scored.log_probs * weights).sum().backward()
        gradient = torch.cat([p.grad.flatten() for p in trainer.trained_parameters().values()])
        found.append((scored.log_probs.detach(), scored.entropies, gradient))
    (log_probs, entropies, gradient), (shared, other_entropies, shared_gradient) = found
    assert continues_prompts(trainer.model)
    torch.testing.assert_close(shared, log_probs, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(other_entropies, entropies, atol=1e-4, rtol=1e-4)
    assert (shared_gradient - gradient).norm() < 1e-4 * gradient.norm()


@pytest.mark.parametrize("family", OTHERS)
def test_models_that_cannot_continue_a_prompt_are_known(family):
    assert not continues_prompts(make(family, **OTHERS[family]))


def test_checkpointing_runs_prompts_with_their_rows(tmp_path):
    model = make("llama")
    model.gradient_checkpointing_enable()
    trainer = trainer_of(adapted(model), tmp_path, gradient_checkpointing=False)
    assert not trainer.model.is_gradient_checkpointing
    assert trainer.policy.may_share()
    trainer.model.gradient_checkpointing_enable()  # its passes would lose a prompt's cache
    assert not trainer.policy.may_share()
    with trainer.policy.no_grad():
        assert trainer.policy.may_share()


def test_a_training_shares_its_prompts(tmp_path):
    trainer = trainer_of(
        adapted(make("llama")), tmp_path, gradient_checkpointing=False, max_steps=1,
        max_completion_length=4, beta=0.0, save_strategy="no",
    )  # fmt: skip
    widths = []
    run = trainer.policy.run
    trainer.policy.run = lambda batch, **k: (widths.append(batch.shared), run(batch, **k))[1]
    trainer.reward_funcs[:] = [lambda completions, **_: [float(n) for n in range(len(completions))]]
    trainer.learner.overhead = 0
    trainer.train()
    assert [len(shared.input_ids) for shared in widths] == [2]


def test_layers_that_are_not_checkpointed_stay_so_after_sampling(tmp_path):
    few = {"every_n_layers": 2, "use_reentrant": False}
    trainer = trainer_of(
        adapted(make("llama")), tmp_path, gradient_checkpointing=True,
        gradient_checkpointing_kwargs=few,
    )  # fmt: skip
    enable_checkpointing(trainer.model, trainer.args)

    def checkpointed():
        layers = trainer.model.get_base_model().model.layers
        return [layer.gradient_checkpointing for layer in layers]

    before = checkpointed()
    hooks = dict(trainer.model.get_input_embeddings()._forward_hooks)
    assert sorted(before) == [False, True]
    with without_checkpointing(trainer.model):
        assert not any(checkpointed())
    assert checkpointed() == before
    assert trainer.model.get_input_embeddings()._forward_hooks == hooks  # more would slow each pass


@pytest.mark.parametrize("iterations", [1, 2])
def test_a_dry_run_leaves_sharing_on_and_needs_no_adapter(tmp_path, iterations):
    trainer = trainer_of(
        make("llama"), tmp_path, beta=0.0, max_completion_length=4, num_iterations=iterations
    )
    trainer.dry_run()
    assert trainer.learner.may_share()


def test_checkpointing_is_turned_on_by_name_as_unsloth_takes_it_for_gemma(tmp_path):
    trainer = trainer_of(adapted(make("llama")), tmp_path, gradient_checkpointing=True)
    turn_on = trainer.model.gradient_checkpointing_enable
    seen = []

    def of_unsloth(**kwargs):  # `_gc_enable_reentrant` in unsloth/models/vision.py
        gc_kwargs = kwargs.get("gradient_checkpointing_kwargs", {}) or {}
        gc_kwargs["use_reentrant"] = True
        kwargs["gradient_checkpointing_kwargs"] = gc_kwargs
        seen.append(kwargs)
        return turn_on(**kwargs)

    trainer.model.gradient_checkpointing_enable = of_unsloth
    enable_checkpointing(trainer.model, trainer.args)
    assert trainer.model.is_gradient_checkpointing
    assert seen == [{"gradient_checkpointing_kwargs": {"use_reentrant": True}}]
