"""Tokens per second and hours from a card's data sheet: a range, and never a measurement.

Sampling reads all weights once for every token of a batch, so the card's bandwidth bounds it;
learning multiplies, so its arithmetic does (the roofline model: Williams, Waterman, Patterson
2009). What a real program reaches of either bound, and what each layer costs to start, is told as
a range, wide enough for what users of the same libraries report.
"""

from dataclasses import dataclass

from rloo_kit.machine.cards import Card
from rloo_kit.planning.memory import Job, weight_bytes

BANDWIDTH_REACHED = (0.3, 0.7)
"""Share of the bandwidth while completions are sampled."""
ARITHMETIC_REACHED = (0.12, 0.45)
"""Share of the arithmetic while it learns; packed weights are unpacked for every pass."""
LAYER_SECONDS = (1.5e-3, 4e-4)
"""That transformers takes to start one layer for one token, with an adapter."""
LENGTH_REACHED = (1.0, 0.4)
"""Share of the longest completion that the mean one has."""

Range = tuple[float, float]


@dataclass(frozen=True)
class Speed:
    """An estimate; every range is (low, high)."""

    generation: Range
    """Completion tokens per second while sampling."""
    learning: Range
    """Tokens of rows, prompts included, per second of all passes."""
    hours: Range | None
    """Of the whole run; None where its steps are not given."""


def estimate_speed(job: Job, card: Card, steps: int | None) -> Speed | None:
    """Return what the card may reach, or None where its data sheet is not known.

    Args:
        job: What is trained.
        card: On what.
        steps: Optimizer steps of the run; None: not known.
    """
    if not (job.on_gpu and card.bandwidth and card.operations) or job.engine == "server":
        return None
    generation = _generation(job, card.bandwidth)
    learning = _learning(job, card.operations)
    hours = None
    if steps:
        slow, fast = (
            steps
            * job.step_rows
            * (job.completion * length / sampled + (job.prompt + job.completion * length) / learnt)
            / 3600
            for length, sampled, learnt in zip(LENGTH_REACHED, generation, learning, strict=True)
        )
        hours = (fast, slow)
    return Speed(generation, learning, hours)


def _generation(job: Job, bandwidth: float) -> Range:
    shape = job.shape
    weights = weight_bytes(
        shape, in_4bit=job.in_4bit, value_bytes=job.value_bytes, in_fp8=job.in_fp8
    )
    of_a_row = 2 * shape.num_layers * shape.kv_size * job.value_bytes * job.width / 2
    found = []
    for share, start in zip(BANDWIDTH_REACHED, LAYER_SECONDS, strict=True):
        seconds = (weights + job.rows * of_a_row) / (share * bandwidth)
        if job.engine == "transformers":
            seconds += start * shape.num_layers
        found.append(job.rows / seconds)
    return found[0], found[1]


def _learning(job: Job, operations: float) -> Range:
    """Return tokens per second: two operations a weight forward, two backward, two again, two more.

    The frozen weights have no gradient of their own. Checkpointing runs every layer forward twice;
    a reference, or old log-probabilities, are one more pass.
    """
    shape = job.shape
    weights = shape.num_parameters + shape.vocab_size * shape.hidden_size
    weights -= shape.others
    attention = 2 * shape.num_layers * shape.query_size * job.width / 2
    passes = 2 + (job.checkpointing != "none") + job.scores
    of_a_token = 2 * passes * (weights + attention)
    low, high = (share * operations / of_a_token for share in ARITHMETIC_REACHED)
    return low, high
