"""The canary keeps quiet under rounding, names what went wrong, and leaves the adapter alone."""

import copy
from types import SimpleNamespace
from unittest.mock import Mock, patch

import pytest
import torch

from rloo_kit.errors import GenerationError, StalePolicyError
from rloo_kit.rloo.batching import TokenRows
from rloo_kit.sampling.canary import (
    HISTORY,
    PROBE_POSITIONS,
    PROBE_TOKENS,
    PROBE_TOKENS_PER_ROW,
    Canary,
    Policies,
    is_other,
    position_between,
)
from rloo_kit.sampling.decoding import until_end
from rloo_kit.sampling.engine import Generations, Sampling
from rloo_kit.training.arguments import LeaveOneOutConfig
from rloo_kit.training.sampler import Sampler as SamplerOfTrainer

VOCABULARY = 24
HIDDEN = 16
PAD = 0
STOP = 1
BF16 = torch.bfloat16
NAMES = {
    "base": "base without adapter",
    "before": "one optimizer step ago",
    "unknown": "other weights, precision, prompts or temperature",
}


def seeded(seed):
    return torch.Generator().manual_seed(seed)


# --- one batch, as numbers -----------------------------------------------------------------------

SIZE = 512


def normal(generator):
    return 1e-3 * torch.randn(SIZE, generator=generator)


def heavy(generator):
    """Student's t with two degrees of freedom: no variance."""
    freedom = torch.randn(2, SIZE, generator=generator).square().sum(0) / 2
    return normal(generator) / freedom.sqrt()


def bursty(generator):
    """Next to nothing, but one token in a hundred by a tenth of a nat."""
    hit = torch.rand(SIZE, generator=generator) < 0.01
    return normal(generator) / 100 + 100 * hit * normal(generator)


NOISES = [normal, heavy, bursty]


def place_of(draw, generator, step, *, stale):
    """Where a sampler is between a policy and another one a step away, which it has if stale."""
    now = -torch.rand(SIZE, generator=generator).pow(-0.5).log() * 2
    sizes = 5 * torch.rand(SIZE, generator=generator).pow(4)
    other = now + step * sizes * torch.randn(SIZE, generator=generator)
    # each token's noise as a run knows it: its own draw, and the usual one
    usual = torch.stack([draw(generator) for _ in range(HISTORY)]).square().mean()
    noise = (draw(generator).square() + usual).sqrt().clamp(min=1e-6)
    sampler = (other if stale else now) + draw(generator)
    return position_between(sampler, now, other, noise)


@pytest.mark.parametrize("step", [1e-6, 1e-2], ids="step={}".format)
@pytest.mark.parametrize("draw", NOISES)
def test_a_healthy_sampler_raises_no_alarm(draw, step):
    generator = seeded(0)
    for _ in range(4):
        places = []
        for _ in range(HISTORY):
            places.append(place_of(draw, generator, step, stale=False))
            assert not is_other(places)


@pytest.mark.parametrize("draw", NOISES)
def test_another_policy_that_sampled_is_found_in_one_batch(draw):
    generator = seeded(1)
    for _ in range(20):
        place = place_of(draw, generator, 1.0, stale=True)
        assert place.resolved
        assert place.share < 0.2
        assert is_other([place])


@pytest.mark.parametrize("tokens", [120, 520])
def test_an_exact_fit_is_found_despite_large_errors(tokens):
    """One undecided token can make rounding look large; it gives no other policy's numbers."""
    generator = seeded(1)
    now = -torch.rand(tokens, generator=generator)
    other = now + 0.002 * torch.randn(tokens, generator=generator)
    noise = torch.full((tokens,), 0.002 * tokens**0.5 / 9)
    exact = position_between(other + 1e-6, now, other, noise)
    assert -6 < exact.errors < -3
    assert is_other([exact])
    rough = position_between(other + 0.3 * (now - other), now, other, noise)
    assert not is_other([rough])
    healthy = position_between(now + 1e-6, now, other, noise)
    assert not is_other([healthy])


def test_a_step_that_rounding_hides_is_found_in_many_batches():
    generator = seeded(2)
    for _ in range(8):
        places = [place_of(normal, generator, 3e-4, stale=True) for _ in range(HISTORY)]
        assert not places[-1].resolved
        assert [is_other(places[:n]) for n in (1, 2, HISTORY)] == [False, False, True]


# --- a policy that is small but real -------------------------------------------------------------


class TinyDecoderLayer(torch.nn.Module):
    """A mean over the tokens so far, one nonlinearity, and an adapter beside the linear layer."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(HIDDEN, HIDDEN).requires_grad_(False)
        self.lora_A = torch.nn.Parameter(torch.randn(2, HIDDEN) / HIDDEN**0.5)
        self.lora_B = torch.nn.Parameter(0.3 * torch.randn(HIDDEN, 2))
        self.adapter_on = True

    def forward(self, hidden):
        steps = torch.arange(1, hidden.shape[1] + 1).unsqueeze(-1)
        mixed = hidden + 2 * hidden.cumsum(1) / steps.sqrt()
        added = mixed @ self.lora_A.T @ self.lora_B.T if self.adapter_on else 0
        return torch.tanh(self.linear(mixed) + added)


class TinyPolicy(torch.nn.Module):
    device = torch.device("cpu")

    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = torch.nn.Embedding(VOCABULARY, HIDDEN).requires_grad_(False)
        self.layer = TinyDecoderLayer()
        self.head = torch.nn.Linear(HIDDEN, VOCABULARY).requires_grad_(False)

    def of_next(self, ids):
        return (2 * self.head(self.layer(self.embedding(ids)))).log_softmax(-1)

    def log_probs(self, batch):
        ids = batch.input_ids
        of_next = self.of_next(ids)[:, :-1].gather(2, ids[:, 1:, None]).squeeze(2)
        return of_next.gather(1, (batch.places - 1).clamp(min=0))

    def disable_adapter(self):
        return patch.object(self.layer, "adapter_on", False)

    def adapter(self):
        return {n: p.detach().clone() for n, p in self.named_parameters() if p.requires_grad}

    def step(self, size, seed):
        """An optimizer step in some direction."""
        generator = seeded(seed)
        with torch.no_grad():
            for parameter in (self.layer.lora_A, self.layer.lora_B):
                parameter += size * torch.randn(parameter.shape, generator=generator)


class Sampler:
    """An engine with a copy of the policy, whose kernels round in their own way.

    Args:
        policy: The policy to copy.
        fault: ``never takes`` or ``takes late`` an adapter, ``adds a token`` to prompts, has
            ``other weights``, or None.
        temperature: The temperature of its samples, whatever it is asked for.
    """

    name = "a sampler"
    adapter_dtype = BF16

    def __init__(self, policy, *, fault=None, temperature=1.0, rounding=2**-9):
        self.own = copy.deepcopy(policy)
        self.fault = fault
        self.temperature = temperature
        self.rounding = rounding
        self.generator = seeded(99)
        self.waiting = None
        if fault == "never takes":
            self.own.layer.adapter_on = False
        if fault == "other weights":
            weight = self.own.head.weight
            weight += 0.3 * torch.randn(weight.shape)

    def sync(self, model):
        arrived = {n: p.to(BF16).to(p.dtype) for n, p in model.adapter().items()}
        if self.fault == "takes late":
            self.waiting, arrived = arrived, self.waiting
        if arrived is not None:
            self.own.load_state_dict(arrived, strict=False)

    @torch.no_grad()
    def generate(self, prompt_ids, sampling, seed):
        generator = seeded(seed)
        extra = [STOP + 1, STOP + 2] if self.fault == "adds a token" else []
        ids = torch.tensor([[*extra, *prompt] for prompt in prompt_ids])  # of the same length
        numbers = []
        for _ in range(sampling.max_tokens):
            of_next = (self.of_last(ids) / self.temperature).log_softmax(-1)
            token = of_next.exp().multinomial(1, generator=generator)
            numbers.append(of_next.gather(1, token))
            ids = torch.cat([ids, token], 1)
        drawn = [until_end(row, [STOP]) for row in ids[:, -len(numbers) :].tolist()]
        rows = zip(drawn, torch.cat(numbers, 1).tolist(), strict=True)
        return Generations(drawn, [known[: len(row)] for row, known in rows])

    def of_last(self, ids):
        layer = self.own.layer(self.own.embedding(ids))[:, -1]
        noise = self.rounding * (2 * torch.rand(layer.shape, generator=self.generator) - 1)
        return 2 * self.own.head(layer * (1 + noise))


PROMPTS = [[2 + row % 7, 3 + row % 5, 4 + row % 3] for row in range(12)]
SAMPLING = Sampling(24, (STOP,))


def canary_of(policy, log_probs=None, sampling=SAMPLING):
    return Canary(Policies(log_probs or policy.log_probs, policy, PAD, BF16), sampling)


def train(policy, engine, canary, *, steps=5, size=0.02):
    """Sync, sample, check and step, as the trainer does; metrics of every batch."""
    found = []
    for step in range(steps):
        engine.sync(policy)
        canary.sent(engine.adapter_dtype)
        drawn = engine.generate(PROMPTS, SAMPLING, seed=step)
        tokens = TokenRows(PROMPTS, drawn.completion_ids)
        found.append(canary.check(tokens, drawn.log_probs, engine.name))
        policy.step(size, seed=step)
    return found


@pytest.mark.parametrize("size", [1e-5, 0.05])
@pytest.mark.parametrize("rounding", [0.0, 2**-8])
def test_a_healthy_run_is_quiet(rounding, size):
    for seed in range(2):
        policy = TinyPolicy(seed)
        engine = Sampler(policy, rounding=rounding)
        found = train(policy, engine, canary_of(policy), size=size, steps=6)
        for metrics in found:
            assert metrics["sampling/adapter_reached"] == pytest.approx(1, abs=0.2)
            assert metrics["sampling/probe_difference"] < 0.01
            assert metrics["sampling/rounding_noise"] < 0.01
        if size > 0.01:
            assert found[-1]["sampling/step_reached"] == pytest.approx(1, abs=0.2)


@pytest.mark.parametrize(
    ("given", "cause", "training"),
    [
        ({"fault": "never takes"}, "base", {}),
        ({"fault": "takes late"}, "before", {"size": 0.05}),
        ({"fault": "takes late"}, "before", {"size": 2e-3, "steps": 2 * HISTORY}),
        ({"fault": "other weights"}, "unknown", {}),
        ({"fault": "adds a token"}, "unknown", {}),
        ({"temperature": 0.7}, "unknown", {}),
        ({"temperature": 1.4}, "unknown", {}),
    ],
    ids=str,
)
def test_the_message_names_the_cause_and_no_other(given, cause, training):
    policy = TinyPolicy()
    engine = Sampler(policy, **given)
    engine.sync(policy)
    with pytest.raises(StalePolicyError) as caught:
        train(policy, engine, canary_of(policy), **training)
    text = str(caught.value)
    assert [name for name, words in NAMES.items() if words in text] == [cause], text


def test_nan_log_probs_are_refused():
    policy = TinyPolicy()
    drawn = Sampler(policy).generate(PROMPTS, SAMPLING, seed=0)
    nothing = [[float("nan")] * len(row) for row in drawn.log_probs]
    canary = canary_of(policy)
    canary.sent(BF16)
    with pytest.raises(GenerationError, match="NaN or Inf"):
        canary.check(TokenRows(PROMPTS, drawn.completion_ids), nothing, "a sampler")


@pytest.mark.parametrize("given", [{"top_k": 5}, {"min_p": 0.1}], ids=str)
def test_a_truncated_distribution_is_measured_and_not_judged(given):
    policy = TinyPolicy()
    engine = Sampler(policy, fault="never takes")
    canary = canary_of(policy, sampling=Sampling(24, (STOP,), **given))
    (metrics,) = train(policy, engine, canary, steps=1)
    assert metrics.keys() == {"sampling/probe_difference", "sampling/rounding_noise"}
    assert metrics["sampling/probe_difference"] > 0.1


# --- rare and large rounding ---------------------------------------------------------------------


class Rare:
    """A policy in numbers alone, whose rounding moves nothing but one token in 3,000 by far."""

    name = "a sampler"

    def __init__(self, seed):
        torch.manual_seed(0)
        self.policy = TinyPolicy()
        torch.nn.init.zeros_(self.policy.layer.lora_B)
        self.generator = seeded(seed)

    def moved(self, log_probs):
        hit = torch.rand(log_probs.shape, generator=self.generator) < 1 / 3000
        return log_probs + 0.1 * hit * torch.randn(log_probs.shape, generator=self.generator)

    def log_probs(self, batch):
        disturbed = bool(self.policy.layer._forward_hooks)
        with patch.object(self.policy.layer, "_forward_hooks", {}):
            log_probs = self.policy.log_probs(batch)
        return self.moved(log_probs) if disturbed else log_probs


def test_a_rare_burst_in_a_young_run_is_no_stale_policy():
    rows = [[2 + (7 * row + place) % 22 for place in range(64)] for row in range(8)]
    tokens = TokenRows([[2]] * 8, rows)
    for seed in range(6):
        rare = Rare(seed)
        canary = canary_of(rare.policy, log_probs=rare.log_probs)
        for step in range(8):
            rare.policy.step(1e-7, seed=step)
            canary.sent(torch.float32)
            with torch.no_grad():
                log_probs = rare.policy.log_probs(tokens.pad(range(8), PAD))
            canary.check(tokens, rare.moved(log_probs).tolist(), rare.name)


# --- the adapter ---------------------------------------------------------------------------------


def bits(policy):
    return {n: (p.data_ptr(), p.detach().numpy().tobytes()) for n, p in policy.named_parameters()}


def hooks(policy):
    return [hook for module in policy.modules() for hook in module._forward_hooks.values()]


def test_the_adapter_is_bit_for_bit_what_it_was():
    policy = TinyPolicy()
    engine = Sampler(policy)
    canary = canary_of(policy)
    before = bits(policy)
    canary.prove(engine, PROMPTS, seed=0)
    assert bits(policy) == before
    train(policy, engine, canary, steps=2, size=0.0)
    assert bits(policy) == before
    assert not hooks(policy)
    assert all(parameter.grad is None for parameter in policy.parameters())


@pytest.mark.parametrize("fails_at", [1, 2, 3, 4])
def test_the_adapter_is_unchanged_after_a_failed_pass(fails_at):
    policy = TinyPolicy()
    passes = []

    def log_probs_of(batch):
        passes.append(policy.layer.adapter_on)
        if len(passes) == fails_at:
            raise torch.OutOfMemoryError
        return policy.log_probs(batch)

    canary = canary_of(policy, log_probs=log_probs_of)
    canary.sent(BF16)
    policy.step(0.05, seed=0)
    canary.sent(BF16)
    drawn = Sampler(policy).generate(PROMPTS, SAMPLING, seed=0)
    before = bits(policy)
    with pytest.raises(torch.OutOfMemoryError):
        canary.check(TokenRows(PROMPTS, drawn.completion_ids), drawn.log_probs, "a sampler")
    assert bits(policy) == before
    assert policy.layer.adapter_on
    assert not hooks(policy)


@pytest.mark.parametrize("fails_at", [1, 2, 3])
def test_the_adapter_is_unchanged_after_an_engine_error(fails_at):
    policy = TinyPolicy()
    engine = Sampler(policy)
    calls = []

    def failing(own):
        def call(*args):
            calls.append(own)
            if len(calls) == fails_at:
                raise ConnectionError
            return own(*args)

        return call

    engine.sync = failing(engine.sync)
    engine.generate = failing(engine.generate)
    before = bits(policy)
    with pytest.raises(ConnectionError):
        canary_of(policy).prove(engine, PROMPTS, seed=0)
    assert bits(policy) == before


# --- the proof before the first step -------------------------------------------------------------


@pytest.mark.parametrize("new", [True, False], ids=["new adapter", "continued adapter"])
def test_a_sampler_that_follows_keeps_the_right_adapter(new):
    policy = TinyPolicy()
    if new:
        torch.nn.init.zeros_(policy.layer.lora_B)
    engine = Sampler(policy)
    engine.sync(policy)
    before = engine.own.adapter()
    canary_of(policy).prove(engine, PROMPTS, seed=0)
    assert all(engine.own.adapter()[name].equal(value) for name, value in before.items())


@pytest.mark.parametrize("fault", ["never takes", "takes late"])
def test_a_sampler_that_does_not_follow_is_found_first(fault):
    policy = TinyPolicy()
    torch.nn.init.zeros_(policy.layer.lora_B)
    engine = Sampler(policy, fault=fault)
    engine.sync(policy)
    with pytest.raises(StalePolicyError, match=r"does not reach a sampler.*restart the engine"):
        canary_of(policy).prove(engine, PROMPTS, seed=0)


# --- the probe -----------------------------------------------------------------------------------


def checked_shape(prompt_lengths, completion_lengths):
    """The rows and completion tokens of the largest pass of a check."""
    policy = TinyPolicy()
    passes = []

    def log_probs_of(batch):
        passes.append(batch)
        return policy.log_probs(batch)

    tokens = TokenRows([[2] * n for n in prompt_lengths], [[3] * n for n in completion_lengths])
    with torch.no_grad():
        whole = tokens.pad(range(len(tokens)), PAD)
        log_probs = policy.log_probs(whole)
    canary = canary_of(policy, log_probs=log_probs_of)
    canary.sent(torch.float32)
    rows = [row[:n].tolist() for row, n in zip(log_probs, completion_lengths, strict=True)]
    metrics = canary.check(tokens, rows, "a sampler")
    assert metrics["sampling/probe_difference"] < 1e-5
    return passes[0]


def test_only_the_beginnings_of_a_few_completions_are_compared():
    probe = checked_shape([5] * 64, [300] * 64)
    assert probe.completion_mask.size(1) == PROBE_TOKENS_PER_ROW
    assert PROBE_TOKENS <= probe.completion_mask.sum() < PROBE_TOKENS + PROBE_TOKENS_PER_ROW
    assert len(probe.rows) == PROBE_TOKENS // PROBE_TOKENS_PER_ROW


def test_long_prompts_are_few_but_four():
    assert len(checked_shape([400] * 64, [300] * 64).rows) == PROBE_POSITIONS // 464
    assert len(checked_shape([1000] * 8, [10] * 8).rows) == 4


class Linear4bit(torch.nn.Linear):
    """A layer that vLLM computes in bf16 on a GPU."""


@pytest.mark.parametrize(
    ("device", "layer", "dtype"),
    [
        ("cuda", Linear4bit, torch.bfloat16),
        ("cuda", torch.nn.Linear, torch.float16),
        ("cpu", Linear4bit, torch.float16),
    ],
)
def test_the_noise_is_that_of_the_coarser_dtype(device, layer, dtype, tmp_path):
    model = torch.nn.Sequential(layer(2, 2))
    model.dtype, model.device = torch.float16, torch.device(device)
    args = LeaveOneOutConfig(str(tmp_path), bf16=False)
    sampler = SimpleNamespace(
        accelerator=Mock(unwrap_model=lambda model: model),
        model=model, args=args, policy=None, pad_token_id=PAD, eos_token_ids=[STOP],
    )  # fmt: skip
    assert SamplerOfTrainer._make_canary(sampler)._policies.dtype == dtype
