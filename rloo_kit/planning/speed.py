"""Tokens per second and hours from a card's data sheet: a range, never a measurement.

Sampling reads all weights once for every token of a batch, so the card's bandwidth bounds it;
learning multiplies, so its arithmetic does (the roofline model: Williams et al. 2009). Each
constant is (low, high): the share of its bound that a program reaches.
"""

from dataclasses import dataclass

from rloo_kit.machine.cards import Card
from rloo_kit.models.shape import weight_bytes
from rloo_kit.planning.memory import Job

BANDWIDTH_REACHED = (0.3, 0.7)
ARITHMETIC_REACHED = (0.12, 0.45)
# That transformers takes to start one layer for one token, with an adapter
LAYER_SECONDS = (1.5e-3, 4e-4)
# Mean completion over the longest one
LENGTH_REACHED = (1.0, 0.4)


@dataclass(frozen=True)
class Speed:
    """An estimate; every range is (low, high)."""

    generation: tuple[float, ...]
    """Completion tokens per second while sampling."""
    learning: tuple[float, ...]
    """Tokens of rows, prompts included, per second of all passes."""
    hours: tuple[float, ...] | None
    """Of the whole run; None where its steps are not given."""

    def __str__(self) -> str:
        low, high = (f"{value:,.0f}" for value in self.generation)
        slow, fast = (f"{value:,.0f}" for value in self.learning)
        text = f"{low} to {high} tokens/s sampled, {slow} to {fast} learned"
        if self.hours:
            text += "; {:,.1f} to {:,.1f} hours".format(*self.hours)
        return f"an estimate from the data sheet: {text}"


def estimate_speed(job: Job, card: Card, steps: int) -> Speed | None:
    """Return what the card may reach, or None where its data sheet is not known.

    Args:
        job: What is trained.
        card: On what.
        steps: Optimizer steps of the run; 0: not known.
    """
    if not (job.on_gpu and card.bandwidth and card.operations) or job.engine == "server":
        return None
    shape = job.shape
    size = weight_bytes(shape, in_4bit=job.in_4bit, value_bytes=job.value_bytes, in_fp8=job.in_fp8)
    cache = job.rows * shape.num_layers * shape.kv_size * job.value_bytes * job.width
    start = shape.num_layers if job.engine == "transformers" else 0
    generation = tuple(
        job.rows / ((size + cache) / (share * card.bandwidth) + start * seconds)
        for share, seconds in zip(BANDWIDTH_REACHED, LAYER_SECONDS, strict=True)
    )
    # two operations a weight: forward, backward (frozen weights get no gradient), each further pass
    passes = 2 + (job.checkpointing != "none") + job.scores
    weights = shape.num_parameters + shape.vocab_size * shape.hidden_size - shape.others
    attention = shape.num_layers * shape.query_size * job.width
    each = 2 * passes * (weights + attention)
    learning = tuple(share * card.operations / each for share in ARITHMETIC_REACHED)
    rows = steps * job.step_rows / 3600
    hours = [
        rows * (job.completion * length / sampled + (job.prompt + job.completion * length) / learnt)
        for length, sampled, learnt in zip(LENGTH_REACHED, generation, learning, strict=True)
    ]
    return Speed(generation, learning, tuple(hours[::-1]) if steps else None)
