"""Proof, on every batch, that the policy that sampled is the policy that trains.

The sampler reports the log-probability of each token it drew. The trainer computes the same for the
first tokens of a few completions, under its policy now, its policy one optimizer step ago, its base
without adapter, and its policy now with hidden states disturbed as much as rounding disturbs them.
So the sampler's numbers have a place between known policies, and a yardstick for what is only
noise: in 16 bit two right kernels are 0.0005 nats apart for a small model and 0.04 for another, and
no fixed threshold tells that from an adapter that never arrived.
"""

import contextlib
import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from rloo_kit.errors import GenerationError, StalePolicyError
from rloo_kit.rloo.batching import MicroBatch, TokenRows
from rloo_kit.sampling.engine import Engine, Sampling

PROBE_TOKENS = 512
"""Completion tokens that are compared on a batch ..."""
PROBE_TOKENS_PER_ROW = 64
"""... of each completion the first so many ..."""
PROBE_POSITIONS = 2048
"""... and no more positions than these, prompts included (but four completions at least)."""
SURE = 6.0
"""Standard errors beyond which a nearer other policy is no accident, if it also fits ..."""
FIT = 0.6
"""... so much better: its mean difference over that of the policy that trains."""
ALIKE, DOUBTFUL = 0.1, 3.0
"""A sampler that is ten times nearer to the other policy has its numbers, which rounding cannot
give; it does not take so many standard errors, whose size one undecided token can decide."""
MEMORY = 20
"""Batches whose evidence adds up, where one step moves the policy less than rounding does ..."""
SURE_TOGETHER = 8.0
"""... to so many standard errors."""
NOISE_FACTOR = 4.0
"""A mean difference of so many times the rounding noise has another cause ..."""
NOISE_FLOOR = 0.01
"""... if it is also larger than this, nats: where nearly every token is certain, rounding moves
nothing in most batches and one undecided token by a third of a nat in another."""
TEMPERATURE_TOLERANCE = 0.05
"""Relative; sampling that far off is reported, up to twice or half."""

Score = Callable[[MicroBatch], tuple[torch.Tensor, torch.Tensor]]
"""``(N, C)`` log-probabilities and entropies of the completion tokens, without gradient."""


@dataclass(frozen=True)
class Place:
    """Where the sampler stands between another policy (0) and the one that trains (1)."""

    evidence: float
    """``<sampler - middle, delta>``, delta from the other to the one that trains."""
    size: float
    """``<delta, delta>``."""
    variance: float
    """Of the evidence, from rounding alone."""
    fit: float = 1.0
    """Mean difference from the other policy over that from the one that trains."""

    @property
    def share(self) -> float:
        """1 where the sampler is the policy that trains, 0 where it is the other."""
        return 0.5 + self.evidence / self.size

    @property
    def errors(self) -> float:
        """Standard errors from the middle; negative: nearer to the other policy."""
        return self.evidence / math.sqrt(self.variance)

    @property
    def resolved(self) -> bool:
        """Whether the two policies are further apart than rounding."""
        return self.size > 2 * SURE * math.sqrt(self.variance)


def place_between(
    sampler: torch.Tensor, now: torch.Tensor, other: torch.Tensor, noise: torch.Tensor
) -> Place | None:
    """Return where the sampler stands on the line from ``other`` to ``now``; None if they are one.

    The share is the least squares estimate; its distance from 1/2, over its standard error under
    rounding, tells on which side it is. A few tokens can weigh much in both, so the mean absolute
    differences are given too.

    Args:
        sampler: ``(N,)`` log-probabilities as the engine reported them.
        now: ``(N,)`` of the policy that trains.
        other: ``(N,)`` of another policy.
        noise: ``(N,)`` standard deviation of a token's log-probability under rounding.
    """
    delta = now - other
    if len(delta) >= 100:  # a few tokens that flip in rounding must not decide
        kept = delta.abs().argsort()[: -max(3, len(delta) // 200)]
        sampler, now, other, noise = sampler[kept], now[kept], other[kept], noise[kept]
        delta = delta[kept]
    size = float(delta.square().sum())
    if size == 0:
        return None
    # A token that fits neither was moved by something else, and says nothing about the two.
    neither = torch.minimum((sampler - now).abs(), (sampler - other).abs())
    return Place(
        evidence=float(((sampler - (now + other) / 2) * delta).sum()),
        size=size,
        variance=float((delta.square() * (noise.square() + neither.square())).sum()),
        fit=_fit(sampler, now, other),
    )


def is_other(places: Sequence[Place]) -> bool:
    """Return whether another policy sampled, from the last batch alone or from all together."""
    last = places[-1]
    if last.errors < -SURE and last.fit < FIT:
        return True
    if last.errors < -DOUBTFUL and last.fit < ALIKE:
        return True
    if len(places) < 3:
        return False
    together = Place(
        sum(place.evidence for place in places),
        sum(place.size for place in places),
        sum(place.variance for place in places),
    )
    return together.errors < -SURE_TOGETHER and together.share < 0.25


def other_temperature(
    sampler: torch.Tensor, now: torch.Tensor, entropies: torch.Tensor, noise: torch.Tensor
) -> tuple[float, torch.Tensor] | None:
    """Return the sampler's inverse temperature over the trainer's, where another one explains it.

    At inverse temperature b the log-probability changes by ``d log p / d log b = log p + H``, H the
    entropy; one regression on that is a first-order estimate.

    Returns:
        The factor and the ``(N,)`` log-probabilities it predicts; None where the trainer's own
        temperature fits as well.
    """
    slope = now + entropies
    size = float(slope.square().sum())
    if size == 0:
        return None
    factor = 1 + float(((sampler - now) * slope).sum()) / size
    error = math.sqrt(float((slope * noise).square().sum())) / size
    tempered = now + (factor - 1) * slope
    off = abs(factor - 1) > max(TEMPERATURE_TOLERANCE, SURE * error)
    if off and 0.5 <= factor <= 2 and _fit(sampler, now, tempered) < FIT + 0.1:
        return factor, tempered
    return None


class Canary:
    """Compares sampler and trainer, and stops the run where they are two policies.

    Args:
        score: The trainer's pass, under whatever adapter the model has at the moment.
        model: A PEFT model.
        without_adapter: A context in which the model is its base.
        pad_token_id: Fills what holds no token.
        dtype: That the trainer computes in.
        sampling: How completions are drawn.
        adapter: The parameters that are sent; None: those that train.
    """

    def __init__(  # noqa: PLR0913
        self,
        *,
        score: Score,
        model: Any,
        without_adapter: Callable[[], AbstractContextManager[Any]],
        pad_token_id: int,
        dtype: torch.dtype,
        sampling: Sampling,
        adapter: dict[str, torch.Tensor] | None = None,
    ) -> None:
        self._score = score
        self._model = model
        self._without_adapter = without_adapter
        self._pad_token_id = pad_token_id
        self._dtype = dtype
        self._sampling = sampling
        self._adapter = adapter or {n: p for n, p in model.named_parameters() if p.requires_grad}
        self._now: dict[str, torch.Tensor] | None = None
        self._before: dict[str, torch.Tensor] | None = None
        self._past: dict[str, deque[Place]] = {
            name: deque(maxlen=MEMORY) for name in ("base", "before")
        }
        self._noises: deque[tuple[float, float]] = deque(maxlen=MEMORY)

    def sent(self, dtype: torch.dtype) -> None:
        """Remember the adapter as it was just sent; the one before is the policy a step back.

        Args:
            dtype: That it was rounded to on its way. A late step of a small learning rate can be
                lost in that, and the sampler is not stale for it.
        """
        self._before = self._now
        self._now = {
            name: parameter.detach().to("cpu", dtype, copy=True)
            for name, parameter in self._adapter.items()
        }

    def prove(
        self, engine: Engine, prompt_ids: list[list[int]], seed: int, *, off: bool = False
    ) -> None:
        """Send an adapter that is shifted on purpose, and see the sampler follow it and come back.

        Args:
            engine: It holds the right adapter before and after.
            prompt_ids: A few prompts.
            seed: Of the shift and of sampling.
            off: See too that the base samples while the shifted adapter is switched off.

        Raises:
            StalePolicyError: The sampler did not follow.
        """
        prompts = prompt_ids[:8]
        short = Sampling(
            min(16, self._sampling.max_tokens),
            self._sampling.stop_token_ids,
            self._sampling.temperature or 1.0,
        )
        drawn = engine.generate(prompts, short, seed)
        tokens = TokenRows(prompts, drawn.completion_ids)
        shifted = self._shift(tokens, seed)
        with self._adapter_set_to(shifted):
            tokens, sampler, there = self._sent_and_drawn(engine, prompts, short, seed)
            if off:
                self._prove_off(engine, prompts, short, seed)
        engine.sync(self._model)
        here, _ = self._pass(tokens)
        place = place_between(sampler, there, here, torch.ones_like(there))
        if place is not None and place.share < 0.5:
            raise StalePolicyError(
                f"the adapter does not reach {engine.name}, or its base weights are others: an "
                f"adapter that was shifted on purpose moved what it samples by {place.share:.0%} "
                f"of what it should; give both the same model folder and restart the engine, or "
                f"set trainer.generation: transformers"
            )

    def _prove_off(
        self, engine: Engine, prompts: list[list[int]], sampling: Sampling, seed: int
    ) -> None:
        with self._without_adapter():
            tokens, sampler, base = self._sent_and_drawn(engine, prompts, sampling, seed)
        adapted, _ = self._pass(tokens)
        place = place_between(sampler, base, adapted, torch.ones_like(base))
        if place is not None and place.share < 0.5:
            raise StalePolicyError(
                f"{engine.name} goes on with the adapter where it is switched off, so the base "
                f"cannot be sampled: restart the engine, or set trainer.generation: transformers"
            )

    def _sent_and_drawn(
        self, engine: Engine, prompts: list[list[int]], sampling: Sampling, seed: int
    ) -> tuple[TokenRows, torch.Tensor, torch.Tensor]:
        """Return what is sampled after a sync: its log-probabilities as told, and as they are."""
        engine.sync(self._model)
        drawn = engine.generate(prompts, sampling, seed)
        tokens = TokenRows(prompts, drawn.completion_ids)
        found, _ = self._pass(tokens)
        return tokens, _flat(drawn.log_probs, tokens, found.device), found

    def check(
        self, tokens: TokenRows, log_probs: list[list[float]], engine_name: str
    ) -> dict[str, float]:
        """Compare a batch with the policies it could have come from.

        Args:
            tokens: The batch.
            log_probs: Of its completion tokens, as the engine reported them.
            engine_name: For the message.

        Returns:
            Metrics: ``sampling/adapter_reached`` and ``sampling/step_reached`` (1: the policy that
            trains, 0: its base, or itself a step ago; absent where rounding hides which),
            ``sampling/probe_difference`` and ``sampling/rounding_noise`` (mean nats).

        Raises:
            StalePolicyError: Another policy sampled; the message says which, most likely.
            GenerationError: The engine reported no numbers.
        """
        probe, rows = _probe(tokens, log_probs)
        with self._adapter_set_to(self._now):
            now, entropies = self._pass(probe)
            noise = self._noise(now, self._pass(probe, disturbed=True)[0])
        sampler = _flat(rows, probe, now.device)
        if not bool(sampler.isfinite().all()):
            raise GenerationError(
                f"{engine_name} reports log-probabilities that are no numbers: its weights or the "
                f"adapter have run away; lower trainer.learning_rate, or restart the engine"
            )
        metrics = {
            "sampling/probe_difference": float((sampler - now).abs().mean()),
            "sampling/rounding_noise": self._mean_noise,
        }
        if not self._sampling.whole_distribution:
            # Truncation renormalises what is left, so the sampler's numbers are not the policy's.
            return metrics
        nearer: dict[str, float] = {}
        for cause, metric, other in (
            ("base", "adapter_reached", self._base_pass(probe)),
            ("before", "step_reached", self._pass_before(probe)),
        ):
            place = None if other is None else place_between(sampler, now, other, noise)
            if place is None:
                continue
            if place.resolved:
                metrics[f"sampling/{metric}"] = place.share
            self._past[cause].append(place)
            if is_other(self._past[cause]):
                nearer[cause] = place.fit
        tempered = other_temperature(sampler, now, entropies, noise)
        if tempered is not None:
            nearer["temperature"] = _fit(sampler, now, tempered[1])
        if not nearer and metrics["sampling/probe_difference"] > self._limit:
            nearer["unknown"] = 1.0
        if nearer:
            places = [torch.arange(len(ids)) for ids in probe.completion_ids]
            early = (torch.cat(places) < 2).to(now.device)
            raise StalePolicyError(
                self._explain(
                    min(nearer, key=nearer.get),
                    metrics,
                    tempered[0] if tempered else 1.0,
                    (sampler - now).abs(),
                    early,
                    engine_name,
                )
            )
        return metrics

    def _explain(
        self,
        cause: str,
        metrics: dict[str, float],
        factor: float,
        difference: torch.Tensor,
        early: torch.Tensor,
        engine_name: str,
    ) -> str:
        seen = (
            f"{engine_name} did not sample from the policy that trains (log-probabilities differ "
            f"by {metrics['sampling/probe_difference']:.4f} nats a token, rounding explains "
            f"{metrics['sampling/rounding_noise']:.4f})"
        )
        if cause == "base":
            return (
                f"{seen}: it is nearest to the base without adapter, so the adapter was not used; "
                f"restart the engine, or set trainer.generation: transformers"
            )
        if cause == "before":
            return (
                f"{seen}: it is nearest to the adapter of one optimizer step ago, so the last one "
                f"was not taken; restart the engine, or set trainer.generation: transformers"
            )
        if cause == "temperature":
            wanted = self._sampling.temperature
            return (
                f"{seen}: it fits a temperature of about {wanted / factor:.2f} and "
                f"trainer.temperature is {wanted:g}; give the engine the same, and a server "
                f"--logprobs-mode processed_logprobs"
            )
        if difference[early].mean() > 4 * difference[~early].mean():
            return (
                f"{seen}, nearly all of it in the first tokens: the prompt was changed on its way, "
                f"so look for a chat template or a BOS token added by the engine"
            )
        return (
            f"{seen}, and neither base, adapter nor temperature explain it: the engine has other "
            f"base weights, or other precision or quantisation; give both the same model folder "
            f"and load_in_4bit, or accept it with trainer.canary: false and rollout_correction"
        )

    # --- passes ----------------------------------------------------------------------------------

    def _pass(
        self, tokens: TokenRows, *, disturbed: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ``(N,)`` log-probabilities and entropies of all completion tokens, row by row."""
        batch = tokens.pad(range(len(tokens)), self._pad_token_id, self._model.device)
        place = self._rounding() if disturbed else contextlib.nullcontext()
        with torch.no_grad(), place:
            log_probs, entropies = self._score(batch)
        mask = batch.completion_mask
        return log_probs[mask].float(), entropies[mask].float()

    def _base_pass(self, tokens: TokenRows) -> torch.Tensor:
        with self._without_adapter():
            return self._pass(tokens)[0]

    def _pass_before(self, tokens: TokenRows) -> torch.Tensor | None:
        if self._before is None:
            return None
        with self._adapter_set_to(self._before):
            return self._pass(tokens)[0]

    def _noise(self, now: torch.Tensor, disturbed: torch.Tensor) -> torch.Tensor:
        """Return each token's standard deviation under rounding: its own draw, and the usual.

        Rounding is bursty: for many batches it moves nothing, then one undecided token by a tenth
        of a nat. So the mean square of the last batches is added.
        """
        moved = disturbed - now
        self._noises.append((float(moved.abs().mean()), float(moved.square().mean())))
        usual = sum(square for _, square in self._noises) / len(self._noises)
        return (moved.square() + usual).sqrt().clamp(min=1e-6)

    @property
    def _mean_noise(self) -> float:
        return sum(mean for mean, _ in self._noises) / len(self._noises)

    @property
    def _limit(self) -> float:
        return max(NOISE_FLOOR, NOISE_FACTOR * self._mean_noise)

    @contextlib.contextmanager
    def _rounding(self) -> Iterator[None]:
        """Disturb the output of every decoder layer as much as one more rounding would."""
        amplitude = torch.finfo(self._dtype).eps / 2
        generator = torch.Generator(self._model.device).manual_seed(0)

        def disturb(_module: Any, _inputs: Any, output: Any) -> Any:
            hidden = output[0] if isinstance(output, tuple) else output
            noise = torch.rand(hidden.shape, generator=generator, device=hidden.device) * 2 - 1
            hidden = (hidden.float() * (1 + amplitude * noise)).to(hidden.dtype)
            return (hidden, *output[1:]) if isinstance(output, tuple) else hidden

        layers = [m for m in self._model.modules() if type(m).__name__.endswith("DecoderLayer")]
        layers = layers or [self._model.get_input_embeddings()]
        hooks = [layer.register_forward_hook(disturb) for layer in layers]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    @contextlib.contextmanager
    def _adapter_set_to(self, values: dict[str, torch.Tensor]) -> Iterator[None]:
        """Lend the adapter other values; its own tensors stay as they are."""
        own = {name: parameter.data for name, parameter in self._adapter.items()}
        try:
            for name, parameter in self._adapter.items():
                parameter.data = values[name].to(own[name].device, own[name].dtype)
            yield
        finally:
            for name, parameter in self._adapter.items():
                parameter.data = own[name]

    def _shift(self, tokens: TokenRows, seed: int) -> dict[str, torch.Tensor]:
        """Return the adapter with noise that moves log-probabilities by 0.3 to 3 nats."""
        generator = torch.Generator().manual_seed(seed)
        noise = {
            name: torch.randn(parameter.shape, generator=generator)
            for name, parameter in self._adapter.items()
            if "lora_B" in name
        }
        here, _ = self._pass(tokens)
        size = 0.02
        for _ in range(12):
            shifted = {n: p.detach().to("cpu", copy=True) for n, p in self._adapter.items()}
            for name, values in noise.items():
                shifted[name] += (size * values).to(shifted[name].dtype)
            with self._adapter_set_to(shifted):
                there, _ = self._pass(tokens)
            moved = float((there - here).abs().mean())
            if 0.3 <= moved <= 3:
                break
            size *= 2 if moved < 0.3 else 0.6
        return shifted


def _probe(tokens: TokenRows, log_probs: list[list[float]]) -> tuple[TokenRows, list[list[float]]]:
    """Return the beginnings of some completions, spread over the batch."""
    order = sorted(range(len(tokens)), key=lambda row: (row * 0.6180339887) % 1)
    rows: list[int] = []
    completion_tokens = positions = 0
    for row in order:
        taken = min(len(tokens.completion_ids[row]), PROBE_TOKENS_PER_ROW)
        width = len(tokens.prompt_ids[row]) + taken
        if len(rows) >= 4 and positions + width > PROBE_POSITIONS:
            break
        rows.append(row)
        completion_tokens += taken
        positions += width
        if completion_tokens >= PROBE_TOKENS:
            break
    beginning = slice(0, PROBE_TOKENS_PER_ROW)
    probe = TokenRows(
        [tokens.prompt_ids[row] for row in rows],
        [tokens.completion_ids[row][beginning] for row in rows],
    )
    return probe, [log_probs[row][beginning] for row in rows]


def _flat(log_probs: list[list[float]], tokens: TokenRows, device: torch.device) -> torch.Tensor:
    rows = zip(log_probs, tokens.completion_ids, strict=True)
    return torch.tensor([p for row, ids in rows for p in row[: len(ids)]], device=device)


def _fit(sampler: torch.Tensor, now: torch.Tensor, other: torch.Tensor) -> float:
    """Return the mean difference from ``other`` over that from ``now``; below 1: other fits."""
    return float((sampler - other).abs().mean() / (sampler - now).abs().mean().clamp(min=1e-9))
