"""Chunked log-probabilities against full logits, and what of TRL they stand in for."""

import ast
import inspect
import textwrap

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Qwen3Config, Qwen3ForCausalLM
from trl.trainer import utils as trl_utils

from rloo_kit.machine.lm_head import CHUNK_TOKENS, PlainTorchLogProb, token_log_probs
from rloo_kit.training.trl_step import route_trl_lm_head

HIDDEN = 12
VOCABULARY = 97
TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}


def make_case(num_tokens, *, bias=False, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def random(*shape):
        # Small enough that float32 itself is not the larger error.
        return (0.6 * torch.randn(*shape, generator=generator)).to(dtype).requires_grad_()

    targets = torch.randint(0, VOCABULARY, (num_tokens,), generator=generator)
    head_bias = random(VOCABULARY) if bias else None
    return random(num_tokens, HIDDEN), random(VOCABULARY, HIDDEN), head_bias, targets


def full_logits(hidden, weight, bias, *, logit_scale=1.0, softcap=None, temperature=1.0):
    """Logits of every token at once, in the order of TRL's kernel: scale, cap, temperature."""
    logits = hidden @ weight.T
    if bias is not None:
        logits = logits + bias
    logits = logits * logit_scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    return logits / temperature


def from_logits(logits, targets):
    log_probs = logits.log_softmax(-1)
    entropy = -(log_probs.exp() * log_probs).sum(-1).detach()
    return log_probs.gather(-1, targets.unsqueeze(-1)).squeeze(-1), entropy


def gradients(log_probs, inputs):
    """Gradients of a sum in which every token has another weight."""
    weights = torch.linspace(-1, 2, len(log_probs))
    return torch.autograd.grad((log_probs * weights).sum(), [x for x in inputs if x is not None])


@pytest.mark.parametrize(
    ("bias", "scale", "softcap"), [(False, 1.0, None), (True, 1 / 0.7, None), (True, 1 / 0.7, 3.0)]
)
@pytest.mark.parametrize("num_tokens", [1, CHUNK_TOKENS, 2 * CHUNK_TOKENS + 37])
def test_values_and_gradients_are_those_of_full_logits(num_tokens, bias, scale, softcap):
    *inputs, targets = make_case(num_tokens, bias=bias)
    log_probs, entropy = token_log_probs(*inputs, targets, scale, softcap)
    logits = full_logits(*inputs, softcap=softcap, temperature=1 / scale)
    expected, expected_entropy = from_logits(logits, targets)
    torch.testing.assert_close(log_probs, expected, **TOLERANCE)
    torch.testing.assert_close(entropy, expected_entropy, **TOLERANCE)
    for ours, theirs in zip(gradients(log_probs, inputs), gradients(expected, inputs), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5 * theirs.abs().max().item())


@pytest.mark.parametrize("grad", [True, False])
def test_no_tokens_give_empty_float32_results(grad):
    *inputs, targets = make_case(0, dtype=torch.bfloat16)
    with torch.set_grad_enabled(grad):
        results = token_log_probs(*inputs, targets)
    assert [(x.shape, x.dtype) for x in results] == [((0,), torch.float32)] * 2


def test_half_precision_gives_float32_near_the_exact_result():
    hidden, weight, _, targets = make_case(50, dtype=torch.bfloat16)
    log_probs, entropy = token_log_probs(hidden, weight.float(), None, targets)
    assert log_probs.dtype == entropy.dtype == torch.float32
    expected, _ = from_logits(full_logits(hidden.float(), weight.float(), None), targets)
    torch.testing.assert_close(log_probs, expected, rtol=0.02, atol=0.05)


class PeakBytes(TorchDispatchMode):
    """The most bytes that were alive at once in the results of operations."""

    def __init__(self):
        super().__init__()
        self.alive = {}
        self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for item in result if isinstance(result, list | tuple) else [result]:
            if isinstance(item, torch.Tensor):
                storage = item.untyped_storage()
                self.alive[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self.alive = {key: kept for key, kept in self.alive.items() if not kept[0].expired()}
        self.peak = max(self.peak, sum(size for _, size in self.alive.values()))
        return result


def peak_of_forward_and_backward(score, num_tokens, vocabulary):
    hidden = torch.randn(num_tokens, 8, requires_grad=True)
    weight = torch.randn(vocabulary, 8, requires_grad=True)
    targets = torch.randint(0, vocabulary, (num_tokens,))
    with PeakBytes() as peak:
        score(hidden, weight, targets).sum().backward()
    assert hidden.grad is not None
    return peak.peak


def test_peak_memory_is_bounded_by_one_chunk():
    vocabulary = 4096
    one_chunk = CHUNK_TOKENS * vocabulary * 4

    def chunked(hidden, weight, targets):
        return token_log_probs(hidden, weight, None, targets)[0]

    def full(hidden, weight, targets):
        return from_logits(full_logits(hidden, weight, None), targets)[0]

    small, large = (
        peak_of_forward_and_backward(chunked, n * CHUNK_TOKENS, vocabulary) for n in (1, 8)
    )
    assert small > one_chunk, "the measurement must see the logits"
    assert large - small < one_chunk / 2
    # The same measurement does see the growth where there is one.
    assert peak_of_forward_and_backward(full, 8 * CHUNK_TOKENS, vocabulary) - large > 4 * one_chunk


# --- what TRL calls -------------------------------------------------------------------------------


def apply(inputs, targets, *, softcap=None, logit_scale=1.0, temperature=1.0, outputs=("entropy",)):
    return PlainTorchLogProb.apply(*inputs, targets, temperature, 64, softcap, logit_scale, outputs)


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("logit_scale", [1.0, 0.25])
def test_apply_scales_caps_and_divides_by_the_temperature(logit_scale, softcap):
    *inputs, targets = make_case(40)
    options = {"softcap": softcap, "logit_scale": logit_scale, "temperature": 0.7}
    log_probs, entropy, *rest = apply(inputs, targets, **options)
    expected, expected_entropy = from_logits(full_logits(*inputs, **options), targets)
    torch.testing.assert_close(log_probs, expected, **TOLERANCE)
    torch.testing.assert_close(entropy, expected_entropy, **TOLERANCE)
    assert rest == [None, None, None]


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
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, VOCABULARY, (4, 90), generator=generator)
    labels = ids.clone()
    labels[:, :5] = -100  # the prompt
    labels[1, 60:] = -100  # padding
    mask = labels[:, 1:] != -100
    assert mask.sum() > CHUNK_TOKENS
    assert mask.sum() % CHUNK_TOKENS

    plain = make_model()
    logits = plain(input_ids=ids).logits[:, :-1] / 0.7
    expected, expected_entropy = from_logits(logits, ids[:, 1:])
    output = fused_model(input_ids=ids, labels=labels, fused_lm_head=True)

    torch.testing.assert_close(output.log_probs, expected * mask, **TOLERANCE)
    torch.testing.assert_close(output.entropy, expected_entropy * mask, **TOLERANCE)
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


def call_of_the_kernel():
    tree = ast.parse(textwrap.dedent(inspect.getsource(trl_utils.add_fused_lm_head)))
    return next(
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "_ChunkedLogProbFunction.apply"
    )


def test_trl_calls_the_kernel_with_our_arguments_in_order():
    call = call_of_the_kernel()
    assert [ast.unparse(argument) for argument in call.args] == [
        "hidden_states[mask]", "weight", "bias", "labels[mask]", "temperature",
        "_CHUNKED_LOGPROB_CHUNK_SIZE", "final_logit_softcapping", "logit_scale", "outputs",
    ]  # fmt: skip
    assert call.keywords == []
    assert list(inspect.signature(PlainTorchLogProb.apply).parameters) == [
        "hidden", "weight", "bias", "targets", "temperature",
        "chunk_size", "softcap", "logit_scale", "outputs",
    ]  # fmt: skip


# --- the route ------------------------------------------------------------------------------------


@pytest.fixture
def without_cuda(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.mark.usefixtures("without_cuda")
@pytest.mark.parametrize("kernel", [None, type("ChunkedLogProbFunction", (), {})])
def test_without_a_gpu_the_kernel_is_replaced_once(monkeypatch, kernel):
    monkeypatch.setattr(trl_utils, "_ChunkedLogProbFunction", kernel)
    assert route_trl_lm_head() is True
    assert trl_utils._ChunkedLogProbFunction is PlainTorchLogProb
    assert route_trl_lm_head() is False


def test_with_a_gpu_the_kernel_is_left_alone(monkeypatch):
    kernel = type("ChunkedLogProbFunction", (), {})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(trl_utils, "_ChunkedLogProbFunction", kernel)
    assert route_trl_lm_head() is False
    assert trl_utils._ChunkedLogProbFunction is kernel
