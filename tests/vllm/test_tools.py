"""vLLM in this process samples trajectories: awake until the last turn, each turn checked."""

import pytest
import torch
from transformers import TrainerCallback

import rloo_kit as rk
from rloo_kit.errors import StalePolicyError
from rloo_kit.sampling.vllm_inprocess import VllmEngine
from rloo_kit.tools.calculator import calculator

pytestmark = pytest.mark.vllm


def trainer_of(folder, callbacks=(), vllm=None, **settings):
    model, tokenizer = rk.load_model(
        "tiny-caller", max_seq_length=512, load_in_4bit=False, precision="fp32", vllm=vllm
    )
    usual = {
        "per_device_train_batch_size": 32, "num_generations": 8, "max_completion_length": 192,
        "learning_rate": 1e-3, "beta": 0.02, "generation": "vllm", "doctor": False, "seed": 3,
        "save_strategy": "no", "max_steps": 4, "bf16": False, "vllm_max_model_length": 512,
    }  # fmt: skip
    return rk.LeaveOneOutTrainer(
        rk.attach_lora(model, r=16, seed=3),
        ["accuracy", {"name": "tool_use", "called": 0, "cost": 0.1}],
        rk.LeaveOneOutConfig(str(folder), **{**usual, **settings}),
        rk.load_prompts("sums", num_prompts=64),
        tokenizer,
        list(callbacks),
        tools=[calculator],
    )


class Seen(TrainerCallback):
    """Keeps the rollouts."""

    def __init__(self):
        self.rollouts = []

    def on_completions(self, args, state, control, rollout, **_):
        self.rollouts.append(rollout)


def test_it_trains_and_the_canary_is_quiet(tmp_path, monkeypatch):
    seen = Seen()
    trainer = trainer_of(tmp_path, [seen])
    sleep, draw = VllmEngine.sleep, VllmEngine.generate
    order = []
    monkeypatch.setattr(VllmEngine, "sleep", lambda self: (order.append("sleep"), sleep(self)))
    monkeypatch.setattr(
        VllmEngine, "generate", lambda self, *a: (order.append("turn"), draw(self, *a))[1]
    )
    trainer.train()
    logs = [log for log in trainer.state.log_history if "tools/call_frequency" in log]
    assert len(logs) == 4
    assert all(log["tools/call_frequency"] > 0 for log in logs)
    assert all(log["tools/failure_frequency"] == 0 for log in logs)
    reached = [log["sampling/adapter_reached"] for log in logs if "sampling/adapter_reached" in log]
    assert reached  # absent while the adapter is the base within rounding
    assert min(reached) > 0.5
    # log-probabilities of the sampled tokens are the learner's, turn by turn
    assert all(log["sampling/logp_difference_mean"] < 0.05 for log in logs)
    for rollout in seen.rollouts:
        masks = rollout.sampled.tokens.is_sampled
        assert any(not all(mask) for mask in masks)
        for mask, known in zip(masks, rollout.sampled.sampler_log_probs, strict=True):
            assert [value != 0 for value in known] == mask
    assert "turn,turn,sleep" in ",".join(order)  # no sleep between the turns of a batch
    rk.release(trainer)


def test_the_canary_catches_an_engine_that_forgets_the_adapter_in_the_second_turn(
    tmp_path, forget_adapter
):
    trainer = trainer_of(tmp_path, per_device_train_batch_size=64)
    forget_adapter("generate", lambda: trainer.sampler.unchecked)
    # the adapter starts as the base, so the first step cannot tell them apart
    with pytest.raises(StalePolicyError):
        trainer.train()
    rk.release(trainer)


@pytest.mark.slow
def test_two_hundred_steps_without_a_false_alarm(tmp_path):
    """Some ten minutes."""
    trainer = trainer_of(
        tmp_path, per_device_train_batch_size=64, num_generations=16, learning_rate=3e-3, beta=0.0,
        max_steps=200,
    )  # fmt: skip
    trainer.train()
    logs = [log for log in trainer.state.log_history if "tools/call_frequency" in log]
    assert len(logs) == 200
    assert sum("sampling/adapter_reached" in log for log in logs) > 150
    assert sum(log["rewards/accuracy/mean"] for log in logs[-20:]) / 20 > 0.9
    rk.release(trainer)


class ByHand(TrainerCallback):
    """The gradient in plain torch, one trajectory at a time, weighted by vLLM's log-probs."""

    def __init__(self):
        self.errors = []
        self.weights = []

    def on_pre_optimizer_step(self, args, state, control, model, **_):
        parameters = [p for p in model.parameters() if p.requires_grad]
        kit = torch.cat([p.grad.flatten() for p in parameters])
        sampled = self.trainer.rloo.rollout.sampled
        tokens = sampled.tokens
        scores = sampled.scores.view(-1, args.num_generations)
        others = (scores.sum(1, keepdim=True) - scores) / (args.num_generations - 1)
        columns = (tokens.prompt_ids, tokens.completion_ids, tokens.is_sampled)
        rows = zip((scores - others).flatten(), *columns, sampled.sampler_log_probs, strict=True)
        loss = 0
        for advantage, prompt, ids, mask, known in rows:
            logits = model(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1].float()
            own = logits.log_softmax(-1)[range(len(ids)), ids]
            weights = (own.detach() - torch.tensor(known)).exp().clamp(max=2.0)
            self.weights.extend(weights[mask].tolist())
            loss = loss - advantage * (weights * own)[mask].sum() / len(tokens)
        by_hand = torch.cat([g.flatten() for g in torch.autograd.grad(loss, parameters)])
        self.errors.append(float((kit - by_hand).norm() / by_hand.norm()))


def test_the_gradient_with_the_engines_log_probs_is_that_of_a_plain_loop(tmp_path):
    by_hand = ByHand()
    trainer = by_hand.trainer = trainer_of(
        tmp_path, [by_hand], vllm={"dtype": "bfloat16"}, max_steps=2, beta=0.0, max_grad_norm=0.0,
        rollout_correction="token", rollout_correction_cap=2.0,
    )  # fmt: skip
    trainer.train()
    assert trainer.state.log_history[0]["tools/call_frequency"] > 0
    assert len(by_hand.errors) == 2
    assert max(by_hand.errors) < 1e-5
    assert max(abs(weight - 1) for weight in by_hand.weights) > 1e-3  # the weights matter
    rk.release(trainer)
