"""4-bit weights: loaded, sampled from, and trained on the gradients of the same weights exactly."""

import pytest
from policies import prompts_of, trained

pytestmark = pytest.mark.gpu


def rows_of(kit, tokenizer):
    """A few prompts with completions of unequal length."""
    prompts = prompts_of(kit, tokenizer, 4)
    texts = ["4+5=9 5+7=12 6+6+1=13 </think> 1329", "9", "</think> 12", "1+1=2 2+2=4"]
    return [
        (prompt, tokenizer(text)["input_ids"]) for prompt, text in zip(prompts, texts, strict=True)
    ]


def test_weights_are_four_bit_and_on_the_device(kit, four_bit, device, record_property):
    import bitsandbytes
    import torch

    with kit.session():
        model, _ = kit.load_model("tiny-thinker", load_in_4bit=True, max_seq_length=128)
        record_property("backend", model.rloo_kit_notes.backend)
        layers = [m for m in model.modules() if isinstance(m, bitsandbytes.nn.Linear4bit)]
        assert len(layers) == 4 * 7
        assert all(layer.weight.dtype == torch.uint8 for layer in layers)
        assert all(layer.weight.quant_state.nested for layer in layers)
        assert {p.device.type for p in model.parameters()} == {device}


def test_gradients_after_sampling_are_those_of_the_dequantised_weights(
    kit, four_bit, device, policy, make_trainer, plain_peft, tmp_path, record_property
):
    import torch

    from rloo_kit.rloo.batching import TokenRows
    from rloo_kit.sampling.vllm_inprocess import write_dequantised

    model, tokenizer = policy(load_in_4bit=True)
    trainer = make_trainer(model, tokenizer, max_steps=1, learning_rate=1e-12)
    trainer.train()  # samples, scores, learns, and moves no weight to speak of
    rows = rows_of(kit, tokenizer)
    batch = TokenRows(*map(list, zip(*rows, strict=True))).pad(
        range(len(rows)), tokenizer.pad_token_id, device
    )
    trainer.model.train()
    trainer.model.zero_grad()
    mask = batch.completion_mask
    scored = trainer.policy.run(batch)
    (-scored.log_probs[mask].mean()).backward()
    found = {n: p.grad.float().cpu() for n, p in model.named_parameters() if p.grad is not None}

    base = write_dequantised(model, torch.float32, tmp_path / "base")
    kit.save_adapter(model, tokenizer, tmp_path / "adapter")
    exact = plain_peft(
        base=base, adapters=[tmp_path / "adapter"], rows=rows, device="cpu", dtype="float32"
    )
    expected = exact.pop("log_probs")
    difference = (scored.log_probs[mask].detach().float().cpu() - expected).abs()
    assert set(found) == set(exact)
    cosine = torch.nn.functional.cosine_similarity(
        torch.cat([found[name].flatten() for name in sorted(exact)]),
        torch.cat([exact[name].flatten() for name in sorted(exact)]),
        dim=0,
    )
    record_property("cosine", round(cosine.item(), 5))
    record_property("log_prob_difference", round(difference.mean().item(), 5))
    assert cosine >= 0.99
    assert difference.mean() < 0.05


def test_four_bit_training_moves_the_adapter_and_nothing_else(
    four_bit, policy, make_trainer, record_property
):
    model, tokenizer = policy(load_in_4bit=True)
    frozen = {n: p.detach().clone() for n, p in model.named_parameters() if not p.requires_grad}
    before = trained(model)
    trainer = make_trainer(model, tokenizer, max_steps=2)
    trainer.train()
    after = trained(model)
    assert any(not after[name].equal(before[name]) for name in before)
    assert all(values.isfinite().all() for values in after.values())
    now = dict(model.named_parameters())
    assert all(now[name].equal(values) for name, values in frozen.items())
    record_property("tokens_per_second", round(speed(trainer)))


def speed(trainer):
    """Tokens learnt from per second in the last step."""
    return trainer.state.log_history[-2]["speed/learning_tokens_per_second"]
