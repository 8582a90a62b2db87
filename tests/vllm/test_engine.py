"""vLLM in this process follows the adapter, and the canary notices when it does not."""

import copy
from pathlib import Path

import pytest
import torch

import rloo_kit as rk
from rloo_kit.machine.engines import _empty_engine
from rloo_kit.sampling import vllm_inprocess as vllm_engine
from rloo_kit.sampling.engine import Sampling
from rloo_kit.sampling.vllm_inprocess import VllmEngine, write_dequantised

pytestmark = pytest.mark.vllm
SMOLLM2 = Path(__file__).parents[2] / ".cache" / "smollm2" / "SmolLM2-135M-Instruct.Q4_1.gguf"
NEAR_TIE = 0.05
"""Nats below the likeliest token, where bf16 rounding may choose either."""


def agreement(engine, model, prompts, length=32):
    """Share of the engine's greedy tokens that are the likeliest of the model, or nearly."""
    ends = tuple(model.generation_config.eos_token_id)
    drawn = engine.generate(prompts, Sampling(length, ends, temperature=0), seed=0)
    same = []
    model.eval()
    with torch.inference_mode():
        for prompt, ids in zip(prompts, drawn.completion_ids, strict=True):
            logits = model(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
            log_probs = logits.float().log_softmax(-1)
            chosen = log_probs[range(len(ids)), ids]
            same.extend((log_probs.max(-1).values - chosen < NEAR_TIE).tolist())
    assert len(same) > 500
    return sum(same) / len(same)


def test_greedy_output_follows_the_adapter_after_every_sync(policy, engine):
    model, _, prompts = policy
    for step in range(3):
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.data += 0.02 * torch.randn(
                    parameter.shape, generator=torch.Generator().manual_seed(step)
                )
        engine.sync(model)
        assert agreement(engine, model, prompts) >= 0.99
        assert engine.sync_seconds < 0.5
    with model.disable_adapter():  # the check can fail: the base says something else
        assert agreement(engine, model, prompts) < 0.99


def test_the_adapter_is_added_as_by_vllms_own_code(policy, engine):
    engine.generate(policy[2][:1], Sampling(1, ()), seed=0)  # sets vLLM's indices of the adapter

    def compare(policy_of_vllm):
        layers = [one for one in policy_of_vllm.modules() if hasattr(one, "punica_wrapper")]
        layer = next(one for one in layers if len(one.output_slices) > 1)
        wrapper = layer.punica_wrapper
        assert wrapper.add_lora_linear.func is vllm_engine.add_one_adapter
        generator = torch.Generator().manual_seed(0)
        matrices = [
            tuple(torch.randn(one.shape, generator=generator) for one in stacked)
            for stacked in (layer.lora_a_stacked, layer.lora_b_stacked)
        ]
        x = torch.randn(6, matrices[0][0].shape[-1], generator=generator)
        y = torch.randn(6, sum(layer.output_slices), generator=generator)
        for index in (0, -1):  # the adapter, or none
            own = copy.copy(wrapper)
            del own.add_lora_linear
            own.is_prefill = True  # as in every pass on a CPU
            own.indices_len = [len(x), *wrapper.indices_len[1:]]
            own._update_prefill_metadata(torch.full([len(x)], index))
            expected, found = y.clone(), y.clone()
            own.add_lora_linear(expected, x, *matrices, 0.5, layer.output_slices)
            vllm_engine.add_one_adapter(own, found, x, *matrices, 0.5, layer.output_slices)
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
            assert torch.equal(found, y) == (index < 0)

    engine._llm.apply_model(compare)


def test_four_bit_weights_are_sampled_as_they_train(tmp_path):
    with rk.session():
        model, _ = rk.load_model("tiny-thinker", load_in_4bit=True, max_seq_length=128)
        model = rk.attach_lora(model, r=8)
        folder = write_dequantised(model, torch.bfloat16, tmp_path / "base")
        from transformers import AutoModelForCausalLM

        # in the type that this processor trains in, so that the weights alone could differ
        plain = AutoModelForCausalLM.from_pretrained(folder, dtype=model.dtype).eval()
        ids = torch.arange(5, 45).unsqueeze(0)
        model.eval()
        with torch.inference_mode(), model.disable_adapter():
            assert (model(ids).logits - plain(ids).logits).abs().max() < 0.2


def test_more_prompt_tokens_than_one_pass_takes(policy, ends):
    """vLLM's CPU worker fails on a prompt with a seed of its own that is cut between passes."""
    model, _, prompts = policy
    prompts = [first + second for first in prompts for second in prompts[:2]]
    assert sum(map(len, prompts)) > 4096
    engine = VllmEngine(model, max_length=128, num_sequences=len(prompts))
    engine.sync(model)
    drawn = engine.generate(prompts, Sampling(8, ends), seed=1)
    assert len(drawn.completion_ids) == len(prompts)
    assert all(0 < len(ids) <= 8 for ids in drawn.completion_ids)
    engine.close()


def test_seeds_decide_the_completions(policy, engine, ends):
    prompts = policy[2]
    sampling = Sampling(24, ends, temperature=1.5)
    first, again, other = (engine.generate(prompts[:8], sampling, seed) for seed in (1, 1, 2))
    assert first.completion_ids == again.completion_ids
    assert first.completion_ids != other.completion_ids
    same_prompt = engine.generate(prompts[:1] * 8, sampling, 1).completion_ids
    assert len({tuple(ids) for ids in same_prompt}) > 1
    assert [len(ids) for ids in first.completion_ids] == [len(p) for p in first.log_probs]


def test_it_trains_and_the_log_probs_agree(policy, make_trainer):
    model, tokenizer, _ = policy
    # completions continue in a second call after so many tokens, or end inside the thought
    budget = {"thinking_budget": 24, "rollout_correction": "token"}
    trainer = make_trainer(model, tokenizer, max_steps=4, **budget)
    closing = tokenizer.convert_tokens_to_ids("</think>")
    trainer.train()
    drawn = [ids for rollout in trainer.seen for ids in rollout.sampled.tokens.completion_ids]
    lengths = [(len(ids), closing in ids[:24]) for ids in drawn]
    assert all(closed or length <= 24 for length, closed in lengths)
    assert max(length for length, _ in lengths) > 24
    assert any(length == 24 and not closed for length, closed in lengths)
    logs = [log for log in trainer.state.log_history if "sampling/sync_seconds" in log]
    assert len(logs) == 4
    mean = sum(log["sampling/logp_difference_mean"] for log in logs) / len(logs)
    assert mean < 0.002
    assert all(0.5 < log["sampling/correction_mean"] < 1.5 for log in logs)
    assert all(log["sampling/adapter_reached"] > 0.9 for log in logs)
    rk.release(trainer)


def test_after_ctrl_c_the_next_call_has_its_own_completions(policy, engine, ends, monkeypatch):
    prompts = policy[2]
    sampling = Sampling(24, ends)
    wanted = engine.generate(prompts[:4], sampling, 3)
    inner = engine._llm.llm_engine
    step = inner.step
    steps = []

    def interrupted():
        steps.append(1)
        if len(steps) == 3:
            raise KeyboardInterrupt
        return step()

    monkeypatch.setattr(inner, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.generate(prompts, sampling, 1)
    monkeypatch.setattr(inner, "step", step)
    assert not inner.has_unfinished_requests()
    assert engine.generate(prompts[:4], sampling, 3).completion_ids == wanted.completion_ids


def test_the_canary_names_another_base_at_once(make_trainer, monkeypatch, policy, disturb_weights):
    def write_disturbed(model, dtype, folder):
        copy.deepcopy(model).unload().to(dtype).save_pretrained(folder)
        return disturb_weights(folder, 0.2)

    trainer = make_trainer(*policy[:2], per_device_train_batch_size=64)
    trainer.engine.close()
    monkeypatch.setattr(vllm_engine, "write_dequantised", write_disturbed)
    monkeypatch.setattr(vllm_engine, "is_4bit", lambda model: True)
    trainer.sampler.engine = VllmEngine(trainer.model, max_length=128, num_sequences=64)
    with pytest.raises(rk.StalePolicyError, match="other weights"):
        trainer.train()
    assert trainer.state.global_step == 0


def test_a_missing_adapter_is_found_before_the_first_step(make_trainer, policy, forget_adapter):
    forget_adapter("generate")
    trainer = make_trainer(policy[0], policy[1])
    with pytest.raises(rk.StalePolicyError, match="does not reach vLLM in this process"):
        trainer.train()
    assert trainer.state.global_step == 0


def test_a_failed_start_is_one_sentence(policy):
    with pytest.raises(rk.GenerationError, match=r"^vLLM cannot start [^\n]*: [^\n]+$"):
        VllmEngine(policy[0], max_length=10**7, num_sequences=4)
    VllmEngine(policy[0], max_length=64, num_sequences=2).close()  # and the next one starts


def test_a_failed_shutdown_is_one_sentence_and_the_next_engine_starts(policy):
    model, _, _ = policy
    engine = VllmEngine(model, max_length=64, num_sequences=2)

    def fails(*_):
        raise RuntimeError("the pool is not empty\nand more")

    engine._llm.llm_engine.engine_core.shutdown = fails
    with pytest.warns(UserWarning, match=r"vLLM did not shut down .*in_subprocess=True\)$"):
        engine.close()
    again = VllmEngine(model, max_length=64, num_sequences=2)
    again.sync(model)
    assert again.generate([[1, 2, 3]], Sampling(4, ()), seed=0).completion_ids
    again.close()


def test_an_emptied_engine_holds_no_weight_buffer_or_key(policy):
    """As on a GPU before the shutdown, with a real engine; its sleep allocator needs a card."""
    engine = VllmEngine(policy[0], max_length=64, num_sequences=2)
    engine.sync(policy[0])
    held = []

    def collect(served):
        for module in served.modules():
            held.extend(v for v in vars(module).values() if isinstance(v, torch.Tensor))
            own = *module._parameters.values(), *module._buffers.values()
            held.extend(tensor for tensor in own if tensor is not None)

    engine._llm.apply_model(collect)
    before = sum(tensor.nbytes for tensor in held)
    _empty_engine(engine._llm)
    assert before > 2**20
    assert sum(tensor.nbytes for tensor in held) == 0
    engine.close()
