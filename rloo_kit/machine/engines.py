"""Shut down a vLLM engine of this process, and measure the memory in vLLM's sleep allocator.

While an engine sleeps, the trainer can use the engine's GPU memory. An engine that can sleep
allocates this memory with vLLM's sleep allocator. A process has only one such allocator, and a new
engine can sleep only if the allocator is empty when the engine starts.
"""

import bisect
import contextlib
import gc
import logging
import os
import sys
import warnings
from collections.abc import Iterator
from importlib.util import module_from_spec
from typing import Any

from rloo_kit.machine.environment import quiet
from rloo_kit.machine.tensors import empty_model, empty_tensors, live_tensors
from rloo_kit.text.wording import first_line

MIB = 1024**2
WORTH_SAYING = 64 * MIB  # a smaller loss of GPU memory is not reported
RESTART = "restart the kernel, or train with rk.train(..., in_subprocess=True)"


def shut_down_engine(llm: Any, *, on_gpu: bool) -> None:
    """Shut down a ``vllm.LLM`` and free its memory; a second call does nothing.

    A model that shares its weights with the engine loses them too. An error that vLLM raises
    becomes a warning.

    Args:
        llm: A ``vllm.LLM``.
        on_gpu: True if the engine runs on a GPU; then its weights, KV cache and CUDA graphs are
            freed too.
    """
    if not vars(llm):
        return
    free = pool = 0
    try:
        gc.unfreeze()  # vLLM has called gc.freeze, and frozen objects are not collected
        with quiet():
            try:
                if on_gpu:
                    _empty_engine(llm)
                    free = _free_memory()
                    pool = sleep_pool_bytes()
                    if llm.llm_engine.vllm_config.model_config.enable_sleep_mode:
                        _unmap_pools()
            finally:
                llm.llm_engine.engine_core.shutdown()
    except Exception as exc:  # an error of any kind in vLLM
        warnings.warn(
            f"vLLM did not shut down ({type(exc).__name__}: {first_line(exc)}): its memory is "
            f"free again only when this process ends; to train again, {RESTART}",
            stacklevel=2,
        )
    _drop_caches(llm)
    leave_process_groups()
    if pool and (lost := pool - (_free_memory() - free)) > WORTH_SAYING:
        warnings.warn(
            f"vLLM has shut down, but still holds {lost / MIB:,.0f} MiB of the GPU, which are free "
            f"again only when this process ends; to train again, {RESTART}",
            stacklevel=2,
        )


@contextlib.contextmanager
def without_side_effects() -> Iterator[None]:
    """Undo the changes that starting vLLM in a ``with`` block makes to this process.

    vLLM's GPU worker reduces torch to one thread. Its CPU worker also replaces
    ``torch.set_num_threads``. Every start leaves environment variables of torch.distributed behind.
    """
    import torch

    set_num_threads = torch.set_num_threads
    num_threads = torch.get_num_threads()
    before = set(os.environ)
    level = logging.getLogger("vllm").level
    try:
        yield
    finally:
        torch.set_num_threads = set_num_threads
        torch.set_num_threads(num_threads)
        logging.getLogger("vllm").setLevel(level)
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            if name not in before:
                os.environ.pop(name, None)


def leave_process_groups() -> None:
    """End the process groups that a vLLM engine has joined, even if the engine failed to start."""
    if "vllm.distributed.parallel_state" in sys.modules:
        from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

        cleanup_dist_env_and_memory()
    gc.collect()


def _free_memory() -> int:
    """Free torch's unused GPU memory, and return how much GPU memory is free, in bytes."""
    import torch

    gc.collect()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]


def sleep_pool_bytes() -> int:
    """Return the GPU memory in vLLM's sleep allocator, in bytes; 0 if it was never used."""
    allocator = _sleep_allocator()
    return 0 if allocator is None else allocator.get_current_usage()


def may_sleep() -> bool:
    """Return True if the next vLLM engine of this process can sleep; warn if it cannot."""
    left = sleep_pool_bytes()
    if left:
        warnings.warn(
            f"an earlier vLLM engine of this process still holds {left / MIB:,.0f} MiB, so the new "
            f"engine cannot free its memory while the model learns: to avoid this, {RESTART}",
            stacklevel=2,
        )
    return not left


def restore_sleep_mode() -> None:
    """Restore the original methods of vLLM's sleep allocator, for an engine with its own weights.

    When Unsloth tries to share weights with an engine, it replaces these methods by methods that
    leave the weights on the GPU and refuse expandable segments (``patch_vllm_enable_sleep_mode``).
    Whenever Unsloth starts an engine, it replaces the methods again.
    """
    from vllm.device_allocator import cumem

    if cumem.CuMemAllocator.sleep.__module__ != cumem.__name__:
        spec: Any = cumem.__spec__
        own = module_from_spec(spec)
        spec.loader.exec_module(own)
        for name in ("__init__", "sleep", "wake_up"):
            setattr(cumem.CuMemAllocator, name, vars(own.CuMemAllocator)[name])


def _empty_engine(llm: Any) -> None:
    """Free an engine's weights, KV cache and CUDA graphs, even if objects still refer to them.

    Such references exist, because torch's compile caches keep an engine's modules after shutdown.
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
    """Return the vLLM sleep allocator of this process; None if there is none yet."""
    cumem = sys.modules.get("vllm.device_allocator.cumem")
    return None if cumem is None else cumem.CuMemAllocator.instance


def _pools_of(allocator: Any) -> list[Any]:
    """Return the ``torch.cuda.MemPool`` objects of vLLM's sleep allocator."""
    held = allocator.allocator_and_pools.values()
    # each value is a list of pairs since vLLM 0.32, and one pair in earlier versions
    pairs = [pair for one in held for pair in (one if isinstance(one, list) else [one])]
    return [pool for pool, *_ in pairs]


def _empty_pools(pools: list[Any]) -> None:
    """Free all tensors in ``torch.cuda.MemPool`` objects, such as buffers of the sampler.

    This must happen before vLLM drops its pools. A block that is freed after that can crash the
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


def _unmap_pools() -> None:
    """Return all GPU memory of vLLM's sleep allocator to the driver.

    Without this call, some of the memory would stay mapped when vLLM drops its pools. The reason is
    that vLLM has already freed the unused blocks of each pool (``CuMemAllocator._trim``), but torch
    does not know this. When torch frees such a block again, vLLM's callback raises a KeyError, and
    every later call of the callback fails. The memory of all later blocks then stays mapped.
    """
    allocator = _sleep_allocator()
    if allocator is not None:
        cumem = sys.modules["vllm.device_allocator.cumem"]
        for address in list(allocator.pointer_to_data):
            cumem.unmap_and_release(allocator.python_free_callback(address))


def _drop_caches(llm: Any) -> None:
    """Break the reference cycles that keep an engine's tensors alive after its shutdown."""
    import torch

    torch._dynamo.reset()
    engine = llm.llm_engine
    for owner in (engine, getattr(engine.engine_core, "engine_core", None), llm):
        if owner is not None:
            vars(owner).clear()
