"""Estimates of a run's memory on several GPUs with DDP, FSDP2, vLLM's server or verl."""

from dataclasses import replace

from rloo_kit.planning.memory import CONTEXT, LEARN, SAMPLE, SCORE, Job, plan_memory, planned_engine


def find_ways(job: Job, cards: int) -> dict[str, int]:
    """Return the ways to train a run on several equal GPUs, the simplest way first.

    The result maps the name of each way to the peak memory, in bytes, of the GPU that needs the
    most memory.

    Each GPU that trains has the batch size, micro-batches and lengths of the run. FSDP2 or ZeRO-3
    shards the base model across the GPUs, and vLLM shards its copy (tensor parallelism). Unsloth is
    used only if a single GPU trains.

    Args:
        job: Facts of the run on one GPU.
        cards: Number of GPUs, at least 2.
    """
    plain = "none" if job.checkpointing == "none" else "plain"
    several = replace(job, engine="transformers", checkpointing=plain)
    divided = replace(several, cards=cards)
    in_16bit = replace(divided, in_4bit=False)
    serving = cards // 2
    training = cards - serving
    served = replace(several if training > 1 else job, engine="server", cards=training)
    widths = {"4-bit": divided, "16-bit": in_16bit} if job.in_4bit else {"16-bit": in_16bit}
    return {
        "a copy of the base on each card (DDP)": plan_memory(several).peak_bytes,
        f"vLLM's server on {serving}, training on {training}": max(
            plan_memory(served).peak_bytes, _server_bytes(job, serving)
        ),
        **{
            f"{width} base divided (FSDP, ZeRO-3)": plan_memory(one).peak_bytes
            for width, one in widths.items()
        },
        "verl: 16-bit base divided, and vLLM": _verl_bytes(in_16bit),
    }


def _server_bytes(job: Job, cards: int) -> int:
    """Return the bytes that vLLM's server needs on each of ``cards`` GPUs.

    This is the CUDA context and the GPU's part of the base model, of vLLM's buffers and of the
    smallest possible KV cache.
    """
    size = planned_engine(job).size
    return CONTEXT + (size.fixed + size.smallest_cache) // cards


def _verl_bytes(divided: Job) -> int:
    """Return the peak memory of a GPU with verl, in bytes.

    With verl, vLLM's weights are on the GPU only during sampling.
    """
    memory = plan_memory(replace(divided, engine="server"))
    held = sum(memory.parts[name][SAMPLE] for name in ("weights", "LoRA adapter, float32"))
    held += _server_bytes(divided, divided.cards)
    return max(held, memory.phases[LEARN], memory.phases.get(SCORE, 0))
