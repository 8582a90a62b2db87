"""A learning step of the trainer costs memory in proportion to its tokens, no more."""

from unittest.mock import Mock

import pytest
import torch
from datasets import Dataset
from torch.profiler import ProfilerActivity, profile
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

import rloo_kit as rk
from rloo_kit.machine import lm_head as logprobs
from rloo_kit.models.shape import TINY_THINKER
from rloo_kit.sampling.engine import Generations

pytestmark = pytest.mark.faults  # at the limit of memory; make test-faults

SHORT = 512
LONG = 2048
HIDDEN = 32
INTERMEDIATE = 64
VOCABULARY = 2048
# Bytes that a layer keeps of a token, and works with: about two thirds of it are used
A_TOKEN = 4 * (16 * HIDDEN + 8 * INTERMEDIATE)
# Tokens whose logits exist at one time, here
CHUNK = 128


def peak_of(events):
    """Most bytes that torch held at one time, over what it held at the beginning."""
    held = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    return peak


def step(length, folder):
    """Learn from two completions of that length; return the peak in bytes."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=HIDDEN, intermediate_size=INTERMEDIATE,
        num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, head_dim=16,
        tie_word_embeddings=True,
    )  # fmt: skip
    engine = Mock(adapter_dtype=torch.float32, sync_seconds=0.0)
    engine.name = "given completions"
    ids = [5 + n % 200 for n in range(length)]
    engine.generate.return_value = Generations([ids] * 2, [[0.0] * length] * 2)
    trainer = rk.LeaveOneOutTrainer(
        model=rk.attach_lora(Qwen3ForCausalLM(config), r=4),
        reward_funcs=lambda completions, **_: [0.0, 1.0],
        args=rk.LeaveOneOutConfig(
            str(folder), max_steps=1, per_device_train_batch_size=2, num_generations=2, beta=0.05,
            max_completion_length=length, tokens_per_micro_batch=1, canary=False, bf16=False,
            save_strategy="no", disable_tqdm=True,
        ),
        train_dataset=Dataset.from_dict({"prompt": ["12 + 34"]}),
        processing_class=AutoTokenizer.from_pretrained(TINY_THINKER),
        engine=engine,
    )  # fmt: skip
    learn = trainer.learner.learn

    def learn_watched(rollout, weights):
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as watched:
            learned = learn(rollout, weights)
        peaks.append(peak_of(watched.profiler.kineto_results.events()))
        return learned

    peaks = []
    trainer.learner.learn = learn_watched
    trainer.train()
    rk.release(trainer)
    return peaks[0]


def test_memory_of_a_step_grows_no_faster_than_its_tokens(tmp_path, monkeypatch):
    # the kit's chunk, and the one of Unsloth where its kernel computes
    monkeypatch.setattr(logprobs, "CHUNK_TOKENS", CHUNK)
    monkeypatch.setattr(logprobs, "CHUNK_LOGITS", CHUNK * VOCABULARY)
    monkeypatch.setenv("UNSLOTH_CPU_CE_CHUNK_ELEMENTS", str(CHUNK * VOCABULARY))
    grown = step(LONG, tmp_path / "long") - step(SHORT, tmp_path / "short")
    assert grown / (LONG - SHORT) < A_TOKEN
