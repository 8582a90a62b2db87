"""Check, on every batch, that the policy that sampled is the policy that trains.

The sampler reports the log-probability of each token it drew. The trainer computes the same for the
first tokens of a few completions, under its policy now, its policy one optimizer step ago, its base
without adapter, and its policy now with hidden states disturbed as much as rounding disturbs them.
No fixed threshold separates rounding from an adapter that never arrived: in 16 bit two correct
kernels are 0.0005 nats apart for one model and 0.04 for another.
"""

import contextlib
import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from rloo_kit.errors import GenerationError, StalePolicyError
from rloo_kit.models.adapters import trained_parameters
from rloo_kit.rloo.batching import MicroBatch, TokenRows
from rloo_kit.sampling.engine import Engine, Sampling
from rloo_kit.types import Model

# A probe: the first PROBE_TOKENS_PER_ROW tokens of completions spread over the batch, until
# PROBE_TOKENS completion tokens or PROBE_POSITIONS positions (prompts included) are reached.
PROBE_TOKENS = 512
PROBE_TOKENS_PER_ROW = 64
PROBE_POSITIONS = 2048
PROBE_MIN_ROWS = 4

# One batch proves that another policy sampled: this many standard errors nearer to it, and a mean
# difference from it of at most this share of the difference from the policy that trains.
SURE_ERRORS = 6.0
SURE_FIT = 0.6
# An almost exact fit needs fewer standard errors: rounding cannot produce another policy's numbers,
# and a single undecided token can inflate the standard error.
EXACT_ERRORS = 3.0
EXACT_FIT = 0.1
# Where one step moves the policy less than rounding does, the evidence of many batches adds up.
HISTORY = 20
HISTORY_ERRORS = 8.0
# A mean difference has another cause than rounding if it is this many times the noise, and larger
# than the floor (nats). If nearly every token is certain, rounding changes nothing in most batches,
# and one undecided token by a third of a nat in another.
NOISE_FACTOR = 4.0
NOISE_FLOOR = 0.01

# `(N, C)` log-probabilities of the completion tokens, without gradient
Pass = Callable[[MicroBatch], torch.Tensor]

BASE = "sampling/adapter_reached"
PREVIOUS_STEP = "sampling/step_reached"
MESSAGES = {
    BASE: (
        "it is nearest to the base without adapter, so the adapter was not used; restart the "
        "engine, or set trainer.generation: transformers"
    ),
    PREVIOUS_STEP: (
        "it is nearest to the adapter of one optimizer step ago, so the last update did not "
        "arrive; restart the engine, or set trainer.generation: transformers"
    ),
}
UNKNOWN = (
    "neither base nor adapter explain it, so the engine computes with other weights, precision, "
    "prompts or temperature; set trainer.generation: transformers, or accept it with "
    "trainer.canary: false and rollout_correction"
)


@dataclass(frozen=True)
class Position:
    """Position of the sampler between another policy (0) and the one that trains (1)."""

    evidence: float  # <sampler - middle, delta>, delta from the other to the one that trains
    size: float  # <delta, delta>
    variance: float  # of the evidence, from rounding alone
    fit: float = 1.0  # mean difference from the other over that from the one that trains

    @property
    def share(self) -> float:
        """1 if the sampler is the policy that trains, 0 if it is the other."""
        return 0.5 + self.evidence / self.size

    @property
    def errors(self) -> float:
        """Distance of the sampler from the midpoint of the two policies, in standard errors.

        Negative if the sampler is nearer to the other policy than to the one that trains.
        """
        return self.evidence / math.sqrt(self.variance)

    @property
    def resolved(self) -> bool:
        """True if the two policies are further apart than rounding."""
        return self.size > 2 * SURE_ERRORS * math.sqrt(self.variance)


def position_between(
    sampler: torch.Tensor, now: torch.Tensor, other: torch.Tensor, noise: torch.Tensor
) -> Position | None:
    """Return the sampler's position on the line from ``other`` to ``now``; None if they are equal.

    The share is the least squares estimate. Its distance from 1/2, divided by its standard error
    under rounding, tells which of the two is nearer.

    Args:
        sampler: ``(N,)`` log-probabilities as the engine reported them.
        now: ``(N,)`` of the policy that trains.
        other: ``(N,)`` of the other policy.
        noise: ``(N,)`` standard deviations under rounding.
    """
    delta = now - other
    if len(delta) >= 100:  # a few tokens that flip in rounding must not decide
        kept = delta.abs().argsort()[: -max(3, len(delta) // 200)]
        sampler = sampler[kept]
        now = now[kept]
        other = other[kept]
        noise = noise[kept]
        delta = delta[kept]
    size = float(delta.square().sum())
    if size == 0:
        return None
    # A token that fits neither policy has another cause, and is not evidence for either
    neither = torch.minimum((sampler - now).abs(), (sampler - other).abs())
    from_now, from_other = ((sampler - one).abs().mean() for one in (now, other))
    return Position(
        evidence=float(((sampler - (now + other) / 2) * delta).sum()),
        size=size,
        variance=float((delta.square() * (noise.square() + neither.square())).sum()),
        fit=float(from_other / from_now.clamp(min=1e-9)),
    )


def is_other(positions: Sequence[Position]) -> bool:
    """Return whether another policy sampled, by the last batch alone or by all batches together."""
    last = positions[-1]
    sure = last.errors < -SURE_ERRORS and last.fit < SURE_FIT
    exact = last.errors < -EXACT_ERRORS and last.fit < EXACT_FIT
    if sure or exact or len(positions) < 3:
        return sure or exact
    sums = zip(*((p.evidence, p.size, p.variance) for p in positions), strict=True)
    together = Position(*map(sum, sums))
    return together.errors < -HISTORY_ERRORS and together.share < 0.25


@contextlib.contextmanager
def rounding(model: Model, dtype: torch.dtype) -> Iterator[None]:
    """Disturb the output of every decoder layer as much as one more rounding would."""
    # half a unit in the last place: the largest error of one rounding
    amplitude = torch.finfo(dtype).eps / 2
    generator = torch.Generator(model.device).manual_seed(0)

    def disturb(_module: object, _inputs: object, output: Any) -> Any:
        hidden = output[0] if isinstance(output, tuple) else output  # (B, T, H)
        noise = torch.rand(hidden.shape, generator=generator, device=hidden.device) * 2 - 1
        hidden = (hidden.float() * (1 + amplitude * noise)).to(hidden.dtype)
        return (hidden, *output[1:]) if isinstance(output, tuple) else hidden

    layers = [m for m in model.modules() if type(m).__name__.endswith("DecoderLayer")]
    layers = layers or [model.get_input_embeddings()]
    hooks = [layer.register_forward_hook(disturb) for layer in layers]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@dataclass
class Policies:
    """The trainer's forward pass with other values in the adapter; the trained ones stay as is."""

    run: Pass  # with the adapter that the model has at the moment
    model: Model  # with an adapter of PEFT
    pad_token_id: int
    dtype: torch.dtype  # of the pass

    @cached_property
    def adapter(self) -> dict[str, torch.nn.Parameter]:
        """Trained parameters, by name."""
        return trained_parameters(self.model)

    def log_probs(self, tokens: TokenRows) -> torch.Tensor:
        """Return one log-probability per completion token, ``(N,)``, the rows one after another."""
        batch = tokens.pad(range(len(tokens)), self.pad_token_id, self.model.device)
        with torch.no_grad():
            return self.run(batch)[batch.completion_mask].float()  # (B, C) -> (N,)

    @contextlib.contextmanager
    def adapter_set_to(self, values: dict[str, torch.Tensor]) -> Iterator[None]:
        """Give the adapter other values during the body; its own tensors do not change."""
        own = {name: parameter.data for name, parameter in self.adapter.items()}
        try:
            for name, parameter in self.adapter.items():
                parameter.data = values[name].to(own[name].device, own[name].dtype)
            yield
        finally:
            for name, parameter in self.adapter.items():
                parameter.data = own[name]

    def copy_adapter(self, dtype: torch.dtype | None = None) -> dict[str, torch.Tensor]:
        """Return copies of the adapter's values on the CPU; None for ``dtype`` keeps theirs."""
        return {n: p.detach().to("cpu", dtype, copy=True) for n, p in self.adapter.items()}

    def shift(self, tokens: TokenRows, seed: int) -> dict[str, torch.Tensor]:
        """Return values of the adapter with noise that moves log-probabilities by 0.3 to 3 nats.

        Args:
            tokens: Completions whose log-probabilities are compared; the mean difference counts.
            seed: Seed of the noise.
        """
        generator = torch.Generator().manual_seed(seed)
        # only B, because it is zero in a new adapter, so that noise in A would change nothing
        noise = {
            name: torch.randn(parameter.shape, generator=generator)
            for name, parameter in self.adapter.items()
            if "lora_B" in name
        }
        here = self.log_probs(tokens)
        shifted = self.copy_adapter()
        size = 0.02
        for _ in range(12):
            shifted = self.copy_adapter()
            for name, values in noise.items():
                shifted[name] += (size * values).to(shifted[name].dtype)
            with self.adapter_set_to(shifted):
                there = self.log_probs(tokens)
            moved = float((there - here).abs().mean())
            if 0.3 <= moved <= 3:
                break
            size *= 2 if moved < 0.3 else 0.6
        return shifted


class Canary:
    """Comparison of sampler and trainer, which stops the run if their policies differ."""

    def __init__(self, policies: Policies, sampling: Sampling) -> None:
        self._policies = policies
        self._sampling = sampling
        self._sent = deque[dict[str, torch.Tensor]](maxlen=2)  # adapters, the last one last
        self._history = {name: deque[Position](maxlen=HISTORY) for name in MESSAGES}
        self._noises = deque[tuple[float, float]](maxlen=HISTORY)

    def sent(self, dtype: torch.dtype) -> None:
        """Keep a copy of the adapter that was just sent, rounded to ``dtype``."""
        # that rounding can hide a small step, which does not make the sampler stale
        self._sent.append(self._policies.copy_adapter(dtype))

    def prove(self, engine: Engine, prompt_ids: list[list[int]], seed: int) -> None:
        """Send an adapter that is shifted on purpose, and check that the sampler uses it.

        Args:
            engine: The engine that samples.
            prompt_ids: Prompts, of which the first 8 are used.
            seed: Seed of the shift and of the samples.

        Raises:
            StalePolicyError: The sampler did not use the shifted adapter.
        """
        prompts = prompt_ids[:8]
        short = Sampling(
            min(16, self._sampling.max_tokens),
            self._sampling.stop_token_ids,
            self._sampling.temperature or 1.0,
        )
        # completions of the policy as it is, to measure how far a shift moves it
        drawn = engine.generate(prompts, short, seed)
        shifted = self._policies.shift(TokenRows(prompts, drawn.completion_ids), seed)
        with self._policies.adapter_set_to(shifted):
            engine.sync(self._policies.model)
            drawn = engine.generate(prompts, short, seed)
            tokens = TokenRows(prompts, drawn.completion_ids)
            within = self._policies.log_probs(tokens)  # (N,)
        outside = self._policies.log_probs(tokens)
        # from here on the engine samples from the policy that trains
        engine.sync(self._policies.model)
        sampler = _flat(drawn.log_probs, tokens, within.device)
        position = position_between(sampler, within, outside, torch.ones_like(within))
        if position is not None and position.share < 0.5:
            raise StalePolicyError(
                f"the adapter does not reach {engine.name} (it was shifted on purpose): restart "
                f"the engine, or set trainer.generation: transformers"
            )

    def check(
        self, tokens: TokenRows, log_probs: list[list[float]], engine_name: str
    ) -> dict[str, float]:
        """Compare a batch with the policies that may have sampled it; return metrics.

        ``sent`` must be called after every sync.

        ``sampling/adapter_reached`` and ``sampling/step_reached`` are 1 for the policy that trains,
        0 for its base or for itself a step ago, and absent if rounding hides the difference.
        ``sampling/probe_difference`` and ``sampling/rounding_noise`` are means in nats.

        Args:
            tokens: The batch of B completions.
            log_probs: Log-probabilities of their tokens, as the engine reported them.
            engine_name: Name of the engine, for messages.

        Raises:
            StalePolicyError: Another policy sampled; the message names the most likely one.
            GenerationError: The engine reported NaN or Inf.
        """
        tokens, log_probs = _cut_probe(tokens, log_probs)
        policies = self._policies
        *before, sent = self._sent
        with policies.adapter_set_to(sent):
            now = policies.log_probs(tokens)  # (N,)
            with rounding(policies.model, policies.dtype):
                disturbed = policies.log_probs(tokens)
        noise, noise_mean = self._noise(disturbed - now)
        sampler = _flat(log_probs, tokens, now.device)
        if not bool(sampler.isfinite().all()):
            raise GenerationError(
                f"{engine_name} reports log-probabilities that are NaN or Inf: its weights or the "
                f"adapter have diverged; lower trainer.learning_rate, or restart the engine"
            )
        difference = float((sampler - now).abs().mean())
        metrics = {
            "sampling/probe_difference": difference, "sampling/rounding_noise": noise_mean
        }  # fmt: skip
        if not self._sampling.whole_distribution:
            # Truncation renormalises the rest, so the sampler's numbers are not the policy's
            return metrics
        with policies.model.disable_adapter():
            others = {BASE: policies.log_probs(tokens)}
        for values in before:
            with policies.adapter_set_to(values):
                others[PREVIOUS_STEP] = policies.log_probs(tokens)
        positions = {
            name: position
            for name, other in others.items()
            if (position := position_between(sampler, now, other, noise)) is not None
        }
        metrics |= {name: one.share for name, one in positions.items() if one.resolved}
        nearest = self._nearest(positions)
        if not nearest and difference <= max(NOISE_FLOOR, NOISE_FACTOR * noise_mean):
            return metrics
        raise StalePolicyError(
            f"{engine_name} did not sample from the policy that trains (log-probabilities differ "
            f"by {difference:.4f} nats a token, rounding explains {noise_mean:.4f}): "
            f"{MESSAGES.get(nearest, UNKNOWN)}"
        )

    def _nearest(self, positions: dict[str, Position]) -> str:
        """Return the name of the other policy that sampled, or ""."""
        for name, position in positions.items():
            self._history[name].append(position)
        found = [name for name in positions if is_other(self._history[name])]
        return min(found, key=lambda name: positions[name].fit, default="")

    def _noise(self, moved: torch.Tensor) -> tuple[torch.Tensor, float]:
        """Return each token's standard deviation under rounding, and the mean of the last batches.

        Rounding is bursty: it changes nothing in many batches, and then one undecided token by a
        tenth of a nat. So the mean square of the last batches is added to the token's own.
        """
        self._noises.append((float(moved.abs().mean()), float(moved.square().mean())))
        mean, square = (sum(values) / len(values) for values in zip(*self._noises, strict=True))
        return (moved.square() + square).sqrt().clamp(min=1e-6), mean


def _cut_probe(
    tokens: TokenRows, log_probs: list[list[float]]
) -> tuple[TokenRows, list[list[float]]]:
    """Return the first tokens of some completions, spread over the batch."""
    # multiples of the golden ratio are spread evenly for any number of rows
    order = sorted(range(len(tokens)), key=lambda row: (row * 0.6180339887) % 1)
    rows: list[int] = []
    completion_tokens = positions = 0
    for row in order:
        taken = min(len(tokens.completion_ids[row]), PROBE_TOKENS_PER_ROW)
        width = len(tokens.prompt_ids[row]) + taken
        if len(rows) >= PROBE_MIN_ROWS and positions + width > PROBE_POSITIONS:
            break
        rows.append(row)
        completion_tokens += taken
        positions += width
        if completion_tokens >= PROBE_TOKENS:
            break
    prompts = [tokens.prompt_ids[row] for row in rows]
    completions = [tokens.completion_ids[row][:PROBE_TOKENS_PER_ROW] for row in rows]
    return TokenRows(prompts, completions), [log_probs[row] for row in rows]


def _flat(log_probs: list[list[float]], tokens: TokenRows, device: torch.device) -> torch.Tensor:
    rows = zip(log_probs, tokens.completion_ids, strict=True)
    return torch.tensor([p for row, ids in rows for p in row[: len(ids)]], device=device)
