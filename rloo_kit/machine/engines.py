"""Shutdown of a vLLM engine in this process, and the memory left in vLLM's sleep allocator.

A GPU process has one such allocator. An engine can sleep only if it finds the allocator empty.
"""

import bisect
import gc
import sys
import warnings
from typing import Any

from rloo_kit.machine.environment import quiet
from rloo_kit.machine.tensors import empty_model, empty_tensors, live_tensors
from rloo_kit.text.wording import first_line

MIB = 1024**2
WORTH_SAYING = 64 * MIB
RESTART = "restart the kernel, or train with rk.train(..., in_subprocess=True)"


def shut_down_engine(llm: Any, *, on_gpu: bool) -> None:
    """Shut a ``vllm.LLM`` down and free its memory; a second call does nothing.

    A model that shares its weights with the engine is emptied too. An error becomes a warning.

    Args:
        llm: A ``vllm.LLM``.
        on_gpu: The engine runs on a GPU, so its weights, KV cache and CUDA graphs are freed there.
    """
    if not vars(llm):
        return
    free = pool = 0
    try:
        gc.unfreeze()  # vLLM froze the heap at its start, and frozen objects are not collected
        with quiet():
            try:
                if on_gpu:
                    _empty_engine(llm)
                    free = _free_memory()
                    pool = sleep_pool_bytes()
            finally:
                llm.llm_engine.engine_core.shutdown()
    except Exception as exc:  # vLLM's own, of any kind
        warnings.warn(
            f"vLLM did not shut down ({type(exc).__name__}: {first_line(exc)}): the memory that it "
            f"holds returns when this process ends; to train again, {RESTART}",
            stacklevel=2,
        )
    _drop_caches(llm)
    leave_process_groups()
    if pool and (lost := pool - (_free_memory() - free)) > WORTH_SAYING:
        warnings.warn(
            f"vLLM has shut down and still holds {lost / MIB:,.0f} MiB of the GPU, which return "
            f"when this process ends; to train again, {RESTART}",
            stacklevel=2,
        )


def leave_process_groups() -> None:
    """End the process groups of a vLLM engine, also of one that failed to start."""
    if "vllm.distributed.parallel_state" in sys.modules:
        from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

        cleanup_dist_env_and_memory()
    gc.collect()


def _free_memory() -> int:
    """Free torch's unused memory, and return the free bytes of the GPU."""
    import torch

    gc.collect()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]


def sleep_pool_bytes() -> int:
    """Return the GPU memory in vLLM's sleep allocator, in bytes; 0 if vLLM has none yet."""
    allocator = _sleep_allocator()
    return 0 if allocator is None else allocator.get_current_usage()


def may_sleep() -> bool:
    """Return whether the next engine of this process can sleep; warn if it cannot."""
    left = sleep_pool_bytes()
    if left:
        warnings.warn(
            f"an earlier vLLM engine of this process holds {left / MIB:,.0f} MiB, so this one "
            f"keeps its memory while the model learns: {RESTART}, and it gives that memory back",
            stacklevel=2,
        )
    return not left


def _empty_engine(llm: Any) -> None:
    """Free an engine's weights, KV cache and CUDA graphs, even if objects still refer to them.

    torch's compile caches keep the modules of an engine alive after its shutdown.
    """
    from vllm.compilation.cuda_graph import CUDAGraphWrapper

    if llm.llm_engine.is_sleeping():
        llm.wake_up()  # an unmapped block cannot be freed
    CUDAGraphWrapper.clear_all_graphs()
    llm.apply_model(empty_model)
    allocator = _sleep_allocator()
    if allocator is not None:
        _empty_pools(_pools_of(allocator))


def _sleep_allocator() -> Any:
    """Return vLLM's sleep allocator of this process, or None."""
    cumem = sys.modules.get("vllm.device_allocator.cumem")
    return None if cumem is None else cumem.CuMemAllocator.instance


def _pools_of(allocator: Any) -> list[Any]:
    """Return the ``torch.cuda.MemPool`` objects of vLLM's sleep allocator."""
    held = allocator.allocator_and_pools.values()
    # from vLLM 0.32 on a tag has a list of pairs, earlier one pair
    pairs = [pair for one in held for pair in (one if isinstance(one, list) else [one])]
    return [pool for pool, *_ in pairs]


def _empty_pools(pools: list[Any]) -> None:
    """Free the tensors in ``torch.cuda.MemPool`` objects: sampler buffers, quantisation states.

    This must happen before vLLM drops its pools, because a block that is freed later can end the
    process (``release_pools`` in vllm/device_allocator/cumem.py).
    """
    segments = [segment for pool in pools for segment in pool.snapshot(include_traces=False)]
    blocks = sorted((one["address"], one["address"] + one["total_size"]) for one in segments)
    starts = [start for start, _ in blocks]
    for tensor in list(live_tensors()):
        address = tensor.untyped_storage().data_ptr()
        place = bisect.bisect_right(starts, address) - 1
        if tensor.is_cuda and place >= 0 and address < blocks[place][1]:
            empty_tensors([tensor])


def _drop_caches(llm: Any) -> None:
    """Break the reference cycles that keep an engine's tensors alive after its shutdown."""
    import torch

    torch._dynamo.reset()
    engine = getattr(llm, "llm_engine", None)
    for owner in (engine, getattr(getattr(engine, "engine_core", None), "engine_core", None), llm):
        if owner is not None:
            vars(owner).clear()
