"""The canary: a check on every batch that the engine sampled from the current policy.

The engine ("sampler") reports the log-probability of each token that it sampled. For the first
tokens of a few completions, the trainer computes these log-probabilities in four ways: with its
current policy, with its policy of one optimizer step ago, with the base model without adapter, and
with its current policy after disturbing the hidden states as much as rounding does. The first three
results show which policy sampled the tokens. The last one shows how large a difference rounding can
explain.

A fixed threshold could not separate rounding from an adapter that never reached the engine, because
the effect of rounding depends on the model: in 16 bit the results of two correct kernels differ by
0.0005 nats for one model and by 0.04 nats for another.
"""

import contextlib
import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any, NamedTuple

import torch

from rloo_kit.errors import GenerationError, StalePolicyError
from rloo_kit.models.adapters import trained_parameters
from rloo_kit.rloo.batching import MicroBatch, TokenRows
from rloo_kit.sampling.engine import Engine, Sampling
from rloo_kit.types import Model

# A probe: the first PROBE_TOKENS_PER_ROW tokens of completions spread over the batch, until
# PROBE_TOKENS completion tokens or PROBE_POSITIONS positions (including prompts) are reached.
PROBE_TOKENS = 512
PROBE_TOKENS_PER_ROW = 64
PROBE_POSITIONS = 2048
PROBE_MIN_ROWS = 4

# One batch proves that another policy sampled if two conditions hold. The sampler is more than
# SURE_ERRORS standard errors from the midpoint of the two policies, on the side of the other
# policy. And its mean difference from the other policy is less than SURE_FIT times its mean
# difference from the current policy.
SURE_ERRORS = 6.0
SURE_FIT = 0.6
# An almost exact fit needs fewer standard errors: rounding cannot produce another policy's numbers,
# and a single undecided token can inflate the standard error.
EXACT_ERRORS = 3.0
EXACT_FIT = 0.1
# If one step changes the policy less than rounding does, the evidence of many batches is summed.
HISTORY = 20
HISTORY_ERRORS = 8.0
# A mean difference has another cause than rounding if it is more than NOISE_FACTOR times the noise
# and more than NOISE_FLOOR nats. The floor is needed if nearly every token is certain: rounding
# then changes nothing in most batches, but now and then it changes one uncertain token by a third
# of a nat.
NOISE_FACTOR = 4.0
NOISE_FLOOR = 0.01

# `(N, C)` log-probabilities of the completion tokens, without gradient
Pass = Callable[[MicroBatch], torch.Tensor]

BASE = "sampling/adapter_reached"
PREVIOUS_STEP = "sampling/step_reached"
MESSAGES = {
    BASE: (
        "the samples are nearest to the base without adapter, so the adapter was not used; restart "
        "the engine, or set trainer.generation: transformers"
    ),
    PREVIOUS_STEP: (
        "the samples are nearest to the adapter of one optimizer step ago, so the last update did "
        "not arrive; restart the engine, or set trainer.generation: transformers"
    ),
}
UNKNOWN = (
    "neither the base nor the adapter of the previous step explains this, so the engine uses other "
    "weights, precision, prompts or temperature than the trainer; set trainer.generation: "
    "transformers, or accept the difference with trainer.canary: false and rollout_correction"
)


class Position(NamedTuple):
    """Position of the sampler on the line from another policy to the current policy.

    The policies are vectors of log-probabilities. In the comments of the fields, ``delta`` is the
    current policy minus the other one, ``middle`` is their mean, and <a, b> is the scalar product.
    """

    evidence: float  # <sampler - middle, delta>
    size: float  # <delta, delta>
    # variance of `evidence`, due to rounding and to tokens that fit neither policy
    variance: float
    # mean of |sampler - other policy|, divided by the mean of |sampler - current policy|
    fit: float

    @property
    def share(self) -> float:
        """Position on the line: 1 at the current policy, 0 at the other policy."""
        return 0.5 + self.evidence / self.size

    @property
    def errors(self) -> float:
        """Distance of the sampler from the midpoint of the two policies, in standard errors.

        It is negative if the sampler is nearer to the other policy than to the current one.
        """
        return self.evidence / math.sqrt(self.variance)

    @property
    def resolved(self) -> bool:
        """True if the two policies differ by more than rounding can explain."""
        return self.size > 2 * SURE_ERRORS * math.sqrt(self.variance)


def position_between(
    sampler: torch.Tensor, now: torch.Tensor, other: torch.Tensor, noise: torch.Tensor
) -> Position | None:
    """Return where the sampler is on the line from ``other`` (0) to ``now`` (1).

    If there are at least 100 tokens, the tokens on which ``now`` and ``other`` differ most are left
    out: 0.5% of all tokens, but at least 3 tokens.

    In the result, ``share`` is the least-squares estimate of the sampler's place on the line.
    ``errors`` is the distance from the midpoint (1/2) in standard errors. It is negative if the
    sampler is nearer to ``other``. The result is None if ``other`` and ``now`` are equal on the
    remaining tokens, because there is then no line.

    Args:
        sampler: ``(N,)`` log-probabilities of N tokens, as the engine reported them.
        now: ``(N,)`` log-probabilities under the current policy.
        other: ``(N,)`` log-probabilities under the other policy.
        noise: ``(N,)`` standard deviations of the log-probabilities under rounding.
    """
    delta = now - other
    if len(delta) >= 100:  # drop the largest: a few tokens that rounding flips must not decide
        kept = delta.abs().argsort()[: -max(3, len(delta) // 200)]
        values = (sampler, now, other, noise, delta)
        sampler, now, other, noise, delta = (one[kept] for one in values)
    size = float(delta.square().sum())
    if size == 0:
        return None
    # A token that fits neither policy is not evidence for one of them, so it adds variance
    neither = torch.minimum((sampler - now).abs(), (sampler - other).abs())
    from_now, from_other = ((sampler - one).abs().mean() for one in (now, other))
    return Position(
        evidence=float(((sampler - (now + other) / 2) * delta).sum()),
        size=size,
        variance=float((delta.square() * (noise.square() + neither.square())).sum()),
        fit=float(from_other / from_now.clamp(min=1e-9)),
    )


def is_other(positions: Sequence[Position]) -> bool:
    """Return True if log-probabilities prove that the engine sampled from the other policy.

    The other policy is the base without adapter, or the policy of one step ago. The proof is that
    the engine's log-probabilities are much nearer to the other policy's than to the current
    policy's, either in the newest batch or, if there are at least 3 batches, in all of them
    together.

    Args:
        positions: For each of the last batches, the position of the engine on the line from the
            other policy to the current policy. The newest batch is the last.
    """
    last = positions[-1]
    sure = last.errors < -SURE_ERRORS and last.fit < SURE_FIT
    exact = last.errors < -EXACT_ERRORS and last.fit < EXACT_FIT
    if sure or exact or len(positions) < 3:
        return sure or exact
    # the sum of `fit` has no meaning and is not used
    together = Position(*map(sum, zip(*positions, strict=True)))
    return together.errors < -HISTORY_ERRORS and together.share < 0.25


@contextlib.contextmanager
def rounding(model: Model, dtype: torch.dtype) -> Iterator[None]:
    """Add noise to the output of every decoder layer during a ``with`` block.

    The noise is as large as a rounding error.

    Args:
        model: The model.
        dtype: The dtype whose rounding is imitated.
    """
    # half a unit in the last place: the largest error of one rounding
    amplitude = torch.finfo(dtype).eps / 2
    generator = torch.Generator(model.device).manual_seed(0)

    def disturb(_module: object, _inputs: object, output: Any) -> Any:
        hidden = output[0] if isinstance(output, tuple) else output  # (B, T, H)
        noise = torch.rand(hidden.shape, generator=generator, device=hidden.device) * 2 - 1
        hidden = (hidden.float() * (1 + amplitude * noise)).to(hidden.dtype)
        return (hidden, *output[1:]) if isinstance(output, tuple) else hidden

    layers = [m for m in model.modules() if type(m).__name__.endswith("DecoderLayer")]
    with contextlib.ExitStack() as hooks:
        for layer in layers or [model.get_input_embeddings()]:
            hooks.enter_context(layer.register_forward_hook(disturb))
        yield


@dataclass
class Policies:
    """Source of log-probabilities under the trainer's model, with current or other adapter values.

    ``adapter_set_to`` sets other values during a ``with`` block.
    """

    run: Pass  # the forward pass, with the current values of the adapter
    model: Model  # a model with a PEFT adapter
    pad_token_id: int
    dtype: torch.dtype  # dtype of the forward pass

    @cached_property
    def adapter(self) -> dict[str, torch.nn.Parameter]:
        """Trained parameters of the model, by name."""
        return trained_parameters(self.model)

    def log_probs(self, tokens: TokenRows) -> torch.Tensor:
        """Return the log-probabilities of all completion tokens in one vector, row after row."""
        batch = tokens.pad(range(len(tokens)), self.pad_token_id, self.model.device)
        with torch.no_grad():
            return self.run(batch)[batch.completion_mask].float()  # (B, C) -> (N,)

    @contextlib.contextmanager
    def adapter_set_to(self, values: dict[str, torch.Tensor]) -> Iterator[None]:
        """Replace the adapter's values during a ``with`` block, and restore them at the end.

        Args:
            values: The values of the trained parameters, by name.
        """
        own = [(parameter, parameter.data) for parameter in self.adapter.values()]
        try:
            for name, parameter in self.adapter.items():
                parameter.data = values[name].to(parameter.data)
            yield
        finally:
            for parameter, data in own:
                parameter.data = data

    def copy_adapter(self, dtype: torch.dtype | None = None) -> dict[str, torch.Tensor]:
        """Return copies of the adapter's values on the CPU, by name.

        Args:
            dtype: The dtype of the copies; None keeps the adapter's.
        """
        return {n: p.detach().to("cpu", dtype, copy=True) for n, p in self.adapter.items()}

    def shift(self, tokens: TokenRows, seed: int) -> dict[str, torch.Tensor]:
        """Return the adapter's values with added noise that clearly changes the model's output.

        Up to 12 noise scales are tried until the log-probabilities change by 0.3 to 3 nats on
        average. If none of the scales achieves this, the last one is used.

        Args:
            tokens: The completions on which the change is measured.
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
        own = shifted = self.copy_adapter()
        size = 0.02
        for _ in range(12):
            shifted = own | {n: own[n] + (size * v).to(own[n].dtype) for n, v in noise.items()}
            with self.adapter_set_to(shifted):
                there = self.log_probs(tokens)
            moved = float((there - here).abs().mean())
            if 0.3 <= moved <= 3:
                break
            size *= 2 if moved < 0.3 else 0.6
        return shifted


class Canary:
    """Check that an engine samples from the trainer's policy, by comparing log-probabilities."""

    def __init__(self, policies: Policies, sampling: Sampling) -> None:
        self._policies = policies
        self._sampling = sampling
        self._sent = deque[dict[str, torch.Tensor]](maxlen=2)  # sent adapters, the newest one last
        self._history = {name: deque[Position](maxlen=HISTORY) for name in MESSAGES}
        self._noises = deque[tuple[float, float]](maxlen=HISTORY)

    def sent(self, dtype: torch.dtype) -> None:
        """Keep a copy of the adapter that was just sent, rounded to ``dtype``."""
        # rounded, because an engine whose rounding hides a small step is not out of date
        self._sent.append(self._policies.copy_adapter(dtype))

    def prove(self, engine: Engine, prompt_ids: list[list[int]], seed: int) -> None:
        """Test that the engine uses the adapter that it is sent.

        The test adds large noise to the adapter, sends it, and checks that samples come from the
        changed adapter. Afterwards it sends the trained adapter.

        Args:
            engine: The engine that samples.
            prompt_ids: Prompts, of which the first 8 are used.
            seed: Seed of the noise and of the samples.

        Raises:
            StalePolicyError: The engine did not use the changed adapter.
        """
        prompts = prompt_ids[:8]
        short = Sampling(
            min(16, self._sampling.max_tokens),
            self._sampling.stop_token_ids,
            self._sampling.temperature,
        )
        # completions of the unchanged policy, to measure how much the noise changes it
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
        sampler = within.new_tensor([*chain(*drawn.log_probs)])
        position = position_between(sampler, within, outside, torch.ones_like(within))
        if position is not None and position.share < 0.5:
            raise StalePolicyError(
                f"the adapter does not reach {engine.name}, whose samples ignored a test change "
                f"of the adapter: restart the engine, or set trainer.generation: transformers"
            )

    def check(
        self, tokens: TokenRows, log_probs: list[list[float]], engine_name: str
    ) -> dict[str, float]:
        """Check which policy has sampled a batch.

        ``sent`` must be called after every sync of the engine.

        Args:
            tokens: The batch of B completions.
            log_probs: For each completion, the log-probabilities of its tokens, as the engine
                reported them.
            engine_name: Name of the engine, for messages.

        Returns:
            Metrics by name. ``sampling/adapter_reached`` is 1 if the engine used the current policy
            and 0 if it used the base model. ``sampling/step_reached`` is 1 for the current policy
            and 0 for the policy of one step ago. Each is left out if rounding hides the difference
            between its two policies. ``sampling/probe_difference`` is the mean difference between
            engine and trainer in nats; ``sampling/rounding_noise`` is the mean difference that
            rounding explains. If ``Sampling.whole_distribution`` is False, for example with
            ``top_k``, the policies cannot be compared, and only the last two metrics are returned.

        Raises:
            StalePolicyError: The log-probabilities fit another policy better, or differ by more
                than rounding explains; the message names the most likely cause. Never raised if
                ``Sampling.whole_distribution`` is False.
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
        sampler = now.new_tensor([*chain(*log_probs)])
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
            # Excluding tokens renormalises the others, so the engine's values are not the policy's
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
        for name, position in positions.items():
            self._history[name].append(position)
        found = [name for name in positions if is_other(self._history[name])]
        nearest = min(found, key=lambda name: positions[name].fit, default="")
        if not nearest and difference <= max(NOISE_FLOOR, NOISE_FACTOR * noise_mean):
            return metrics
        raise StalePolicyError(
            f"{engine_name} did not sample from the policy that trains (log-probabilities differ "
            f"by {difference:.4f} nats per token, of which rounding explains {noise_mean:.4f}): "
            f"{MESSAGES.get(nearest, UNKNOWN)}"
        )

    def _noise(self, moved: torch.Tensor) -> tuple[torch.Tensor, float]:
        """Estimate how much rounding changes log-probabilities.

        The effect of rounding is irregular: it changes nothing in many batches, and then one
        uncertain token by a tenth of a nat. So the variance of a token is the square of its change,
        plus the mean square over the last batches.

        Args:
            moved: ``(N,)`` changes of log-probabilities by the simulated rounding.

        Returns:
            The ``(N,)`` standard deviation of each token, and the mean absolute change over the
            last batches.
        """
        self._noises.append((float(moved.abs().mean()), float(moved.square().mean())))
        mean, square = (sum(values) / len(values) for values in zip(*self._noises, strict=True))
        return (moved.square() + square).sqrt().clamp(min=1e-6), mean


def _cut_probe(
    tokens: TokenRows, log_probs: list[list[float]]
) -> tuple[TokenRows, list[list[float]]]:
    """Return the first tokens and log-probabilities of some completions, spread over the batch."""
    rows = [*zip(tokens.prompt_ids, tokens.completion_ids, log_probs, strict=True)]
    chosen = []
    num_tokens = num_positions = 0
    # multiples of the golden ratio are spread evenly for any number of rows
    for place in sorted(range(len(rows)), key=lambda row: (row * 0.6180339887) % 1):
        prompt, ids, known = rows[place]
        ids = ids[:PROBE_TOKENS_PER_ROW]
        num_positions += len(prompt + ids)
        is_long = len(chosen) >= PROBE_MIN_ROWS and num_positions > PROBE_POSITIONS
        if is_long or num_tokens >= PROBE_TOKENS:
            break
        num_tokens += len(ids)
        chosen.append((prompt, ids, known[:PROBE_TOKENS_PER_ROW]))
    prompts, completions, known = map(list, zip(*chosen, strict=True))
    return TokenRows(prompts, completions), known
