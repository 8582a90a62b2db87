"""Ways to train a run on several cards, on paper: DDP, FSDP2, a server, verl."""

from dataclasses import dataclass, replace

from rloo_kit.planning.memory import CONTEXT, LEARN, SAMPLE, SCORE, Job, plan_memory, planned_engine


@dataclass(frozen=True)
class Way:
    """A way to train on several cards."""

    name: str
    peak_bytes: int  # of the fullest card


def find_ways(job: Job, cards: int) -> list[Way]:
    """Return the ways to train a run on several equal cards, the simplest first.

    Each card that trains has the batch size, micro-batches and lengths of the run. FSDP2 or ZeRO-3
    divides the base among the cards, and vLLM divides its copy (tensor parallelism). Unsloth is
    used only if a single card trains.

    Args:
        job: Facts of the run on one card.
        cards: Number of cards, at least 2.
    """
    plain = "none" if job.checkpointing == "none" else "plain"
    several = replace(job, engine="transformers", checkpointing=plain)
    divided = replace(several, cards=cards)
    in_16bit = replace(divided, in_4bit=False)
    serving = cards // 2
    training = cards - cards // 2
    served = replace(several if training > 1 else job, engine="server", cards=training)
    widths = {"4-bit": divided, "16-bit": in_16bit} if job.in_4bit else {"16-bit": in_16bit}
    return [
        Way("a copy of the base on each card (DDP)", plan_memory(several).peak_bytes),
        Way(
            f"vLLM's server on {serving}, training on {training}",
            max(plan_memory(served).peak_bytes, _server_bytes(job, serving)),
        ),
        *(
            Way(f"{width} base divided (FSDP, ZeRO-3)", plan_memory(one).peak_bytes)
            for width, one in widths.items()
        ),
        Way("verl: 16-bit base divided, and vLLM", _verl_bytes(in_16bit)),
    ]


def _server_bytes(job: Job, cards: int) -> int:
    """Return the bytes of each card of a server: its part of the base and the smallest cache."""
    size = planned_engine(job).size
    return CONTEXT + (size.fixed + size.smallest_cache) // cards


def _verl_bytes(divided: Job) -> int:
    """Return the peak if vLLM's copy is on the cards only while it samples."""
    memory = plan_memory(replace(divided, engine="server"))
    held = sum(memory.parts[name].get(SAMPLE, 0) for name in ("weights", "LoRA adapter, float32"))
    held += _server_bytes(divided, divided.cards)
    return max(held, memory.phases[LEARN], memory.phases.get(SCORE, 0))
