"""Chunked log-probabilities against full logits, and what of TRL they stand in for."""

from itertools import accumulate

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from transformers import Qwen3Config, Qwen3ForCausalLM
from trl.trainer import utils as trl_utils

from rloo_kit.machine.lm_head import CHUNK_TOKENS, PlainTorchLogProb
from rloo_kit.training.trl_step import route_trl_lm_head

HIDDEN = 12
VOCABULARY = 97


def make_case(num_tokens, *, bias=False):
    generator = torch.Generator().manual_seed(0)

    def random(*shape):
        # Small enough that float32 itself is not the larger error.
        return (0.6 * torch.randn(shape, generator=generator)).requires_grad_()

    targets = torch.randint(VOCABULARY, (num_tokens,), generator=generator)
    head_bias = random(VOCABULARY) if bias else None
    return random(num_tokens, HIDDEN), random(VOCABULARY, HIDDEN), head_bias, targets


def full_logits(hidden, weight, bias, *, logit_scale=1.0, softcap=None, temperature=1.0):
    """Logits of every token at once, in the order of TRL's kernel: scale, cap, temperature."""
    logits = torch.nn.functional.linear(hidden, weight, bias) * logit_scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    return logits / temperature


def from_logits(logits, targets):
    spread = torch.distributions.Categorical(logits=logits)
    return spread.log_prob(targets), spread.entropy().detach()


def apply(inputs, targets, *, softcap=None, logit_scale=1.0, temperature=1.0, outputs=("entropy",)):
    return PlainTorchLogProb.apply(*inputs, targets, temperature, 64, softcap, logit_scale, outputs)


def assert_close(ours, theirs):
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def gradients(log_probs, inputs):
    """Gradients of a sum in which every token has another weight."""
    weights = torch.linspace(-1, 2, len(log_probs))
    return torch.autograd.grad(log_probs @ weights, [x for x in inputs if x is not None])


@pytest.mark.parametrize(
    ("num_tokens", "bias", "options"),
    [
        (1, False, {}),
        (CHUNK_TOKENS, True, {"temperature": 0.7}),
        (2 * CHUNK_TOKENS + 37, True, {"temperature": 0.7, "softcap": 3.0, "logit_scale": 0.25}),
    ],
)
def test_values_and_gradients_are_those_of_full_logits(num_tokens, bias, options):
    *inputs, targets = make_case(num_tokens, bias=bias)
    log_probs, entropy, *rest = apply(inputs, targets, **options)
    assert rest == [None, None, None]
    logits = full_logits(*inputs, **options)
    expected, expected_entropy = from_logits(logits, targets)
    assert_close(log_probs, expected)
    assert_close(entropy, expected_entropy)
    for ours, theirs in zip(gradients(log_probs, inputs), gradients(expected, inputs), strict=True):
        largest = theirs.abs().max()
        assert_close(ours / largest, theirs / largest)


@pytest.mark.parametrize("num_tokens", [0, 50])
def test_half_precision_gives_float32_near_the_exact_result(num_tokens):
    hidden, weight, _, targets = make_case(num_tokens)
    expected, _ = from_logits(full_logits(hidden, weight, None), targets)
    for may_learn in (True, False):
        with torch.set_grad_enabled(may_learn):
            log_probs, entropy, *_ = apply((hidden.bfloat16(), weight, None), targets)
        assert log_probs.dtype == entropy.dtype == torch.float32
        torch.testing.assert_close(log_probs, expected, rtol=0.02, atol=0.05)


def peak_bytes(num_tokens, vocabulary):
    """Most bytes that torch held at one time while that many tokens were scored and learned."""
    hidden = torch.randn(num_tokens, 8, requires_grad=True)
    weight = torch.randn(vocabulary, 8, requires_grad=True)
    targets = torch.randint(vocabulary, (num_tokens,))
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as watched:
        apply((hidden, weight, None), targets)[0].sum().backward()
    events = watched.profiler.kineto_results.events()
    events = [event for event in events if event.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())
    return max(accumulate(event.nbytes() for event in events))


def test_peak_memory_is_bounded_by_one_chunk():
    vocabulary = 4096
    one_chunk = CHUNK_TOKENS * vocabulary * 4
    small = peak_bytes(CHUNK_TOKENS, vocabulary)
    assert small > one_chunk, "the measurement must see the logits"
    assert peak_bytes(8 * CHUNK_TOKENS, vocabulary) - small < one_chunk / 2


# --- what TRL calls -------------------------------------------------------------------------------


def test_apply_says_which_targets_are_likeliest():
    *inputs, targets = make_case(2 * CHUNK_TOKENS + 5)
    targets[::2] = full_logits(*inputs).argmax(-1)[::2]
    *rest, is_top = apply(inputs, targets, outputs=("log_probs", "entropy", "is_top1"))
    assert is_top.tolist() == (full_logits(*inputs).argmax(-1) == targets).tolist()
    assert [one is None for one in rest] == [False, False, True, True]


def test_apply_refuses_what_it_does_not_compute():
    *inputs, targets = make_case(4)
    with pytest.raises(NotImplementedError, match=r"mean_logits.*only by TRL's Triton kernel"):
        apply(inputs, targets, outputs=("log_probs", "mean_logits"))


def make_model():
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, head_dim=8, max_position_embeddings=64,
        tie_word_embeddings=False,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config).train()
    torch.nn.init.normal_(model.lm_head.weight, std=0.3)  # far enough from uniform to tell
    return model


@pytest.fixture
def fused_model(monkeypatch):
    """A tiny model whose fused LM head runs in plain torch, at temperature 0.7."""
    monkeypatch.setattr(trl_utils, "_ChunkedLogProbFunction", PlainTorchLogProb)
    model = make_model()
    trl_utils.add_fused_lm_head(model, temperature=0.7, outputs=("log_probs", "entropy"))
    return model


def test_trls_fused_head_gives_full_log_probs_and_gradients(fused_model):
    ids = torch.randint(VOCABULARY, (4, 90), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    labels[:, :5] = -100  # the prompt
    labels[1, 60:] = -100  # padding
    mask = labels[:, 1:] != -100
    plain = make_model()
    logits = plain(input_ids=ids).logits[:, :-1] / 0.7
    expected, expected_entropy = from_logits(logits, ids[:, 1:])
    output = fused_model(input_ids=ids, labels=labels, fused_lm_head=True)

    assert_close(output.log_probs, expected * mask)
    assert_close(output.entropy, expected_entropy * mask)
    advantages = torch.tensor([[1.0], [-0.5], [0.25], [-0.75]])
    (output.log_probs * advantages).sum().backward()
    (expected * mask * advantages).sum().backward()
    for (name, ours), theirs in zip(
        fused_model.named_parameters(), plain.parameters(), strict=True
    ):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-5, msg=name)


def test_a_batch_without_any_completion_token_can_go_backward(fused_model):
    # mask_truncated_completions leaves such a batch when every completion was cut off.
    ids = torch.randint(0, VOCABULARY, (2, 6))
    output = fused_model(input_ids=ids, labels=ids.new_full(ids.shape, -100), fused_lm_head=True)
    output.log_probs.sum().backward()


# --- the route ------------------------------------------------------------------------------------


KERNEL = type("ChunkedLogProbFunction", (), {})


@pytest.mark.parametrize(
    ("kernel", "on_gpu", "is_replaced"),
    [(None, False, True), (KERNEL, False, True), (KERNEL, True, False)],
)
def test_only_without_a_gpu_the_kernel_is_replaced_once(monkeypatch, kernel, on_gpu, is_replaced):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: on_gpu)
    monkeypatch.setattr(trl_utils, "_ChunkedLogProbFunction", kernel)
    assert route_trl_lm_head() == is_replaced
    assert trl_utils._ChunkedLogProbFunction is (PlainTorchLogProb if is_replaced else kernel)
    assert not route_trl_lm_head()
