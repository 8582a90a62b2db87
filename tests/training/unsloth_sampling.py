"""Sampling with the modules that Unsloth loads on a GPU; test_trainer.py starts it."""

import pytest
import torch

from rloo_kit.training.policy import enable_checkpointing


def test_the_model_samples_in_unsloths_scope_and_keeps_its_mode(policy, new_trainer, config):
    graphs = pytest.importorskip("unsloth.models._decode_graphs")
    sampler = new_trainer(config(generation="transformers")).sampler
    depths = []
    policy[0].get_base_model().register_forward_pre_hook(
        lambda *_: depths.append(getattr(graphs._TLS, "rl_depth", 0))
    )
    for training in (True, False):
        sampler.model.train(training)
        sampler.draw([[5, 6, 7]] * 2)
        assert {module.training for module in policy[0].modules()} == {training}
    assert depths
    assert all(depths)  # CUDA graphs, and the release of keys and values, begin there


def test_sampling_that_ran_out_of_memory_leaves_the_model_in_training(
    policy, new_trainer, config, monkeypatch
):
    llama = pytest.importorskip("unsloth.models.llama")
    base = policy[0].get_base_model()
    args = config(generation="transformers", gradient_checkpointing=True)
    sampler = new_trainer(args).sampler
    base._old_generate = base.generate  # as on a GPU, where Unsloth's takes its place
    monkeypatch.setattr(base, "generate", llama.unsloth_fast_generate.__get__(base), raising=False)

    def run_out(module, args, kwargs):
        if len(kwargs["input_ids"]) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    base.register_forward_pre_hook(run_out, with_kwargs=True)
    sampler.model.train()
    enable_checkpointing(sampler.model, sampler.args)
    with pytest.warns(RuntimeWarning, match="memory ran out"):
        assert len(sampler.draw([[5, 6, 7]] * 4)[0]) == 4
    assert {module.training for module in policy[0].modules()} == {True}
    assert not hasattr(base, "_flag_for_generation")
    assert all(layer.gradient_checkpointing for layer in base.model.layers)
