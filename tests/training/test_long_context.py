"""A learning step of the trainer costs memory and passes in proportion to its tokens, no more."""

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


class Given:
    """Samples what it was given."""

    name = "given completions"
    sync_seconds = 0.0
    adapter_dtype = torch.float32

    def __init__(self, length):
        self.length = length

    def sync(self, model):
        pass

    def generate(self, prompt_ids, sampling, seed):
        ids = [[5 + n % 200 for n in range(self.length)] for _ in prompt_ids]
        return Generations(ids, [[0.0] * self.length for _ in prompt_ids])

    def sleep(self):
        pass

    def close(self):
        pass


def peak_of(events):
    """Most bytes that torch held at one time, over what it held at the beginning."""
    held = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    return peak


def step(length, folder, attention="sdpa"):
    """Learn from two completions of that length; return the peak in bytes, positions and passes."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=HIDDEN, intermediate_size=INTERMEDIATE,
        num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, head_dim=16,
        attn_implementation=attention, tie_word_embeddings=True,
    )  # fmt: skip
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
        engine=Given(length),
    )  # fmt: skip
    passes = []
    learn = trainer.learner.learn
    forward = trainer.learner.forward

    def counted(batch):
        passes.append(batch.num_positions)
        return forward(batch)

    def learn_watched(rollout, weights):
        trainer.learner.forward = counted
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as watched:
            learned = learn(rollout, weights)
        peaks.append(peak_of(watched.profiler.kineto_results.events()))
        return learned

    peaks = []
    trainer.learner.learn = learn_watched
    trainer.train()
    rk.release(trainer)
    return peaks[0], sum(passes), len(passes)


def set_chunk(monkeypatch, tokens):
    """Set the kit's chunk, and the one of Unsloth where its kernel computes."""
    monkeypatch.setattr(logprobs, "CHUNK_TOKENS", tokens)
    monkeypatch.setattr(logprobs, "CHUNK_LOGITS", tokens * VOCABULARY)
    monkeypatch.setenv("UNSLOTH_CPU_CE_CHUNK_ELEMENTS", str(tokens * VOCABULARY))


@pytest.fixture(autouse=True)
def chunk(monkeypatch):
    set_chunk(monkeypatch, CHUNK)


@pytest.fixture(scope="module")
def short(tmp_path_factory):
    with pytest.MonkeyPatch.context() as monkeypatch:
        set_chunk(monkeypatch, CHUNK)
        return step(SHORT, tmp_path_factory.mktemp("short"))


def grown(short, long):
    """Bytes that the peak grew by with every token more of a completion."""
    return (long[0] - short[0]) / (LONG - SHORT)


def test_memory_and_passes_of_a_step_grow_no_faster_than_its_tokens(short, tmp_path):
    long = step(LONG, tmp_path)
    assert grown(short, long) < A_TOKEN
    assert long[2] == short[2]
    assert long[1] / short[1] == pytest.approx(LONG / SHORT, rel=0.02)


def test_attention_that_keeps_every_pair_of_tokens_would_be_seen(short, tmp_path):
    assert grown(short, step(LONG, tmp_path, "eager")) > 4 * A_TOKEN


def test_logits_of_all_tokens_at_once_would_be_seen(short, tmp_path, monkeypatch):
    set_chunk(monkeypatch, LONG)
    assert grown(short, step(LONG, tmp_path)) > 4 * A_TOKEN
