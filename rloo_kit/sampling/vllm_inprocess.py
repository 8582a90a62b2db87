"""vLLM in this process: the base loaded once, the adapter swapped while it runs.

Two ways to the same engine: Unsloth's, which shares the base weights with the trainer
(``load_model(..., fast_inference=True)`` on a GPU), and one of the kit's own.
"""

import bisect
import contextlib
import gc
import logging
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rloo_kit.errors import GenerationError
from rloo_kit.machine.environment import quiet, setup
from rloo_kit.machine.hardware import GIB, detect_hardware
from rloo_kit.machine.memory import empty_model, empty_tensors, live_tensors
from rloo_kit.models.engine_memory import (
    BATCHED_TOKENS,
    EngineSize,
    cpu_cache,
    engine_memory,
    engine_size,
)
from rloo_kit.models.shape import shape_of_config
from rloo_kit.sampling.engine import (
    SHARED_MEMORY,
    AdapterFolders,
    Generations,
    Sampling,
    active_adapter,
    adapter_tensors,
    reserved_rank_of,
)
from rloo_kit.text.wording import first_line

ADAPTER_NAME = "rloo-kit"
LIVE_IDS = 1_000_000
"""Added to the ids of the kit's own requests on a shared engine: Unsloth counts its own from 1."""


class VllmEngine:
    """An engine of the kit's own, or Unsloth's when the model carries one.

    Args:
        model: A PEFT model as ``attach_lora`` returned it.
        max_length: Longest prompt plus completion, tokens.
        num_sequences: Completions at one time.
        sleeps: Give memory back between ``sleep`` and the next ``generate`` (GPU).
        memory_share: Of the GPU's memory, for an engine with its own copy of the weights; None:
            computed (``engine_memory``).
        seed: Of the engine.
        extra: Further arguments of ``vllm.LLM``.

    Raises:
        GenerationError: vLLM cannot start, with its reason in one line.
    """

    def __init__(  # noqa: PLR0913
        self,
        model: Any,
        *,
        max_length: int,
        num_sequences: int,
        sleeps: bool = False,
        memory_share: float | None = None,
        seed: int = 0,
        extra: dict[str, Any] | None = None,
    ) -> None:
        shared = getattr(model, "vllm_engine", None)
        self.shared = shared is not None
        self.name = "vLLM, weights shared by Unsloth" if self.shared else "vLLM in this process"
        self.sync_seconds = 0.0
        """Of the last sync."""
        self.adapter_dtype = _compute_dtype(model)
        self._on_gpu = model.device.type != "cpu"
        self._sleeps = sleeps and self._on_gpu
        self._number = 0
        self._request: Any = None
        self._folder: Path | None = None
        self._folders = AdapterFolders()
        self._base: Path | None = None
        self._llm = shared
        if self.shared:
            self._sleeps &= shared.llm_engine.vllm_config.model_config.enable_sleep_mode
        else:
            _check_allocator(self._sleeps)
            try:
                self._llm = self._start(model, max_length, num_sequences, memory_share, seed, extra)
            except BaseException as exc:
                self.close()
                if isinstance(exc, GenerationError) or not isinstance(exc, Exception):
                    raise
                raise GenerationError(_why(exc)) from exc

    def _start(
        self,
        model: Any,
        max_length: int,
        num_sequences: int,
        memory_share: float | None,
        seed: int,
        extra: dict[str, Any] | None,
    ) -> Any:
        import torch

        extra = extra or {}
        on_cpu = model.device.type == "cpu"
        dtype = _compute_dtype(model)
        source = model.get_base_model().config._name_or_path
        arguments: dict[str, Any] = {}
        if not on_cpu:
            torch.cuda.empty_cache()
        if _is_4bit(model) and on_cpu:
            self._base = write_dequantised(model, dtype)
            source = str(self._base)
        elif _is_4bit(model):
            arguments["quantization"] = "bitsandbytes"
        arguments |= self._memory(model, num_sequences, max_length, memory_share, extra)
        arguments |= {
            "model": source,
            "skip_tokenizer_init": True,  # token ids in, token ids out
            "generation_config": "vllm",  # no sampling defaults but ours
            "dtype": str(dtype).removeprefix("torch."),
            "max_model_len": max_length,
            "max_num_seqs": num_sequences,
            "max_num_batched_tokens": max(BATCHED_TOKENS, max_length) if on_cpu else BATCHED_TOKENS,
            "enable_lora": True,
            "max_lora_rank": reserved_rank_of(model),
            "lora_target_modules": _vllm_modules(
                [config.target_modules for config in model.peft_config.values()]
            ),
            "max_loras": 1,
            "max_cpu_loras": 2,
            "enable_prefix_caching": True,
            "enable_sleep_mode": self._sleeps,
            "logprobs_mode": "processed_logprobs",  # after temperature and truncation
            "disable_log_stats": True,
            "seed": seed,
            **extra,
        }
        if on_cpu:  # its worker fails on a seeded prompt that is cut between two passes
            arguments.setdefault("enable_chunked_prefill", False)
        with self._as_it_was(), quiet():
            from vllm import LLM

            return LLM(**arguments)

    def _memory(
        self,
        model: Any,
        num_sequences: int,
        max_length: int,
        share: float | None,
        extra: dict[str, Any],
    ) -> dict[str, Any]:
        """Return vLLM's memory settings for an engine with its own copy of the weights."""
        hardware = detect_hardware()
        on_cpu = hardware.device == "cpu"
        in_4bit = _is_4bit(model) and not on_cpu
        size = self._size(model, num_sequences, max_length, extra, in_4bit=in_4bit)
        if on_cpu:
            return {"kv_cache_memory_bytes": cpu_cache(size, hardware.free_memory)}
        found = engine_memory(
            size,
            hardware.free_memory,
            sleeps=self._sleeps,
            card=hardware.total_memory,
            share=share,
        )
        if share is not None:
            return {"gpu_memory_utilization": share}
        # vLLM compares the share with what is free even where the cache has a size of its own.
        return {
            "kv_cache_memory_bytes": found.cache,
            "gpu_memory_utilization": found.share(hardware.total_memory),
        }

    @staticmethod
    def _size(
        model: Any, num_sequences: int, max_length: int, extra: dict[str, Any], *, in_4bit: bool
    ) -> EngineSize:
        config = model.get_base_model().config
        return engine_size(
            shape_of_config(config, str(config._name_or_path)),
            in_4bit=in_4bit,
            max_rank=reserved_rank_of(model),
            num_sequences=num_sequences,
            max_length=max_length,
            cache_bytes=1 if str(extra.get("kv_cache_dtype")).startswith("fp8") else 2,
            batched_tokens=extra.get("max_num_batched_tokens", BATCHED_TOKENS),
        )

    @contextlib.contextmanager
    def _as_it_was(self) -> Iterator[None]:
        """Let vLLM start without changing this process for everybody else.

        Its CPU worker replaces ``torch.set_num_threads`` and the number of threads, and every start
        leaves variables of torch.distributed behind.
        """
        import torch

        set_num_threads, num_threads = torch.set_num_threads, torch.get_num_threads()
        variables = dict(os.environ)
        level = logging.getLogger("vllm").level
        try:
            yield
        finally:
            torch.set_num_threads = set_num_threads
            torch.set_num_threads(num_threads)
            logging.getLogger("vllm").setLevel(level)
            for name in set(os.environ) - set(variables):
                if name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
                    del os.environ[name]

    def sync(self, model: Any) -> None:
        """Send the active adapter, if one is, and drop the one before."""
        started = time.perf_counter()
        self._wake()
        engine, before, folder_before = self._llm.llm_engine, self._request, self._folder
        self._request, self._folder = self._requested(model)
        if _is_lora_request(before):
            engine.remove_lora(before.lora_int_id)
        if _is_lora_request(self._request):
            try:
                engine.add_lora(self._request)
            except ValueError as exc:
                raise GenerationError(
                    f"vLLM does not take the adapter ({first_line(exc)}): set trainer.generation: "
                    f"transformers"
                ) from exc
        engine.reset_prefix_cache()
        AdapterFolders.drop(folder_before)
        self.sync_seconds = time.perf_counter() - started

    def _requested(self, model: Any) -> tuple[Any, Path | None]:
        """Return the request that samples with the active adapter, and the folder it lies in."""
        if active_adapter(model) is None:
            return None, None
        if self.shared and list(model.peft_config) == ["default"]:
            # Unsloth writes the adapter's config there once, and sends tensors.
            return model.load_lora(str(self._folders.root / "config"), load_tensors=True), None
        from vllm.lora.request import LoRARequest

        self._number += 1
        name, number = f"{ADAPTER_NAME}-{self._number}", self._number
        if self.shared:  # Unsloth would send every adapter, TRL's frozen reference copy too
            return self._live_request(model, f"{name}-live", number + LIVE_IDS), None
        folder = self._folders.write(model, self.adapter_dtype)
        return LoRARequest(name, number, str(folder)), folder

    def _live_request(self, model: Any, name: str, number: int) -> Any:
        """Return a request that carries the active adapter's tensors (Unsloth's LoRARequest)."""
        from vllm.lora.request import LoRARequest

        active = active_adapter(model)
        config = model.peft_config[active].to_dict()
        return LoRARequest(
            name,
            number,
            lora_tensors=adapter_tensors(model, active),
            lora_config={k: sorted(v) if isinstance(v, set) else v for k, v in config.items()},
        )

    def generate(self, prompt_ids: list[list[int]], sampling: Sampling, seed: int) -> Generations:
        """See ``Engine.generate``; every completion has a seed of its own."""
        from vllm import SamplingParams

        self._wake()
        parameters = [
            SamplingParams(**sampling.as_vllm(), seed=(seed + row) % 2**31, detokenize=False)
            for row in range(len(prompt_ids))
        ]
        try:
            outputs = self._llm.generate(
                [{"prompt_token_ids": ids} for ids in prompt_ids],
                parameters,
                lora_request=self._request,
                use_tqdm=False,
            )
        except BaseException:  # after Ctrl-C the next call must not meet this one's requests
            engine = self._llm.llm_engine
            engine.abort_request(list(engine.output_processor.request_states), internal=True)
            raise
        completions = [output.outputs[0] for output in outputs]
        ids = [list(completion.token_ids) for completion in completions]
        log_probs = [
            [place[token].logprob for token, place in zip(tokens, done.logprobs, strict=True)]
            for tokens, done in zip(ids, completions, strict=True)
        ]
        return Generations(ids, log_probs)

    def sleep(self) -> None:
        """Drop keys and values and move the weights to the host's memory (level 1), on a GPU.

        Weights that Unsloth shares stay where they are: the model learns with them.
        """
        if self._sleeps and self._llm is not None and not self._llm.llm_engine.is_sleeping():
            self._llm.sleep(level=1)

    def _wake(self) -> None:
        if self._sleeps and self._llm.llm_engine.is_sleeping():
            import torch

            torch.cuda.empty_cache()  # what the learning step let go of
            self._llm.wake_up()

    def close(self) -> None:
        """Shut the engine down, its process groups, threads, caches and files included.

        A model that shares its weights with the engine is released first (``release``): vLLM gives
        the pool that holds them back with the engine, and freeing a block of that pool afterwards
        can end the process (vllm/device_allocator/cumem.py).
        """
        if self._llm is not None and self._on_gpu:
            with contextlib.suppress(Exception):  # less is given back, and ``release`` says so
                self._wake()  # a block that is not mapped cannot be freed
                _empty_engine(self._llm)
        llm, self._llm = self._llm, None
        self._request = None
        if llm is not None:
            with contextlib.suppress(Exception), quiet():  # half-started, or already gone
                llm.llm_engine.engine_core.shutdown()
            _drop_caches(llm)
            del llm
        if "vllm.distributed.parallel_state" in sys.modules:  # also after a start that failed
            from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

            cleanup_dist_env_and_memory()
        self._folders.close()
        if self._base is not None:
            shutil.rmtree(self._base, ignore_errors=True)
        gc.collect()


def _is_lora_request(request: Any) -> bool:
    """Return whether vLLM holds the adapter under an id of its own.

    For an unquantised base Unsloth returns a request that is merged into the shared weights while
    the engine generates (``_MergedLoRARequest``); ``LLM.generate`` alone takes it.
    """
    return hasattr(request, "lora_int_id")


def write_dequantised(model: Any, dtype: Any) -> Path:
    """Write a 4-bit model's base weights, dequantised, to shared memory: the same policy exactly.

    vLLM has no 4-bit kernels on a CPU, and a checkpoint in 16 bit would be another policy than the
    4-bit one that trains.

    Args:
        model: A PEFT model over bitsandbytes' 4-bit layers.
        dtype: Of the weights.

    Returns:
        A folder with config and weights; the caller removes it.
    """
    from bitsandbytes.functional import dequantize_4bit
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    base = model.get_base_model()
    layers = {
        f"{name.replace('.base_layer', '')}.weight": module
        for name, module in base.named_modules()
        if getattr(getattr(module, "weight", None), "quant_state", None) is not None
        and not hasattr(module, "base_layer")
    }
    tensors = {}
    for name, tensor in base.state_dict().items():
        plain = name.replace(".base_layer", "")
        if "lora_" in plain or plain in layers or ".weight." in plain:
            continue
        tensors[plain] = tensor.detach().to("cpu", dtype).contiguous()
    for name, module in layers.items():
        values = dequantize_4bit(module.weight.data, module.weight.quant_state)
        tensors[name] = values.to("cpu", dtype).contiguous()
    if base.config.get_text_config().tie_word_embeddings:
        tensors.pop("lm_head.weight", None)
    config = base.config.to_dict()
    config.pop("quantization_config", None)
    parent = SHARED_MEMORY if SHARED_MEMORY.is_dir() else None
    folder = Path(tempfile.mkdtemp(prefix=f"rloo-kit-{os.getpid()}-base-", dir=parent))
    try:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        plain_config = type(base.config).from_dict(config)
        plain_config.dtype = dtype
        plain_config.save_pretrained(folder)
    except (OSError, SafetensorError) as exc:
        shutil.rmtree(folder, ignore_errors=True)
        raise GenerationError(
            f"vLLM's copy of the weights cannot be written to {str(folder.parent)!r} ({exc}): free "
            f"some space there, or set trainer.generation: transformers"
        ) from exc
    return folder


def _is_4bit(model: Any) -> bool:
    return any(type(module).__name__ == "Linear4bit" for module in model.modules())


def _vllm_modules(targets: list[Any]) -> list[str] | None:
    """Return the layers that need LoRA, also under the names vLLM gives to joined ones.

    Otherwise it computes an empty adapter for the LM head too, for every token.

    Args:
        targets: ``target_modules`` of each adapter.
    """
    if any(isinstance(names, str) for names in targets):  # a pattern
        return None
    names = set().union(*targets)
    joined = {"q_proj": "qkv_proj", "k_proj": "qkv_proj", "v_proj": "qkv_proj"}
    joined |= {"gate_proj": "gate_up_proj", "up_proj": "gate_up_proj"}
    return sorted({*names, *(joined[name] for name in names if name in joined)})


def _compute_dtype(model: Any) -> Any:
    """Return the type that the trainer computes the base in."""
    import torch

    config = model.get_base_model().config
    dtype = getattr(config, "dtype", None) or torch.bfloat16
    return dtype if dtype in (torch.bfloat16, torch.float16, torch.float32) else torch.bfloat16


def _check_allocator(sleeps: bool) -> None:
    """Refuse torch's expandable segments where this vLLM cannot sleep with them.

    Raises:
        GenerationError: They are on, and vLLM is older than the release that sets them aside.
    """
    settings = os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")
    if not sleeps or "expandable_segments:true" not in settings.lower():
        return
    from vllm.device_allocator import cumem

    if "expandable" not in Path(cumem.__file__).read_text().split("def use_memory_pool")[-1]:
        raise GenerationError(
            "vLLM cannot sleep while PYTORCH_CUDA_ALLOC_CONF holds expandable_segments:True: take "
            "it out and restart, or set trainer.vllm_enable_sleep_mode: false"
        )


def _why(exc: Exception) -> str:
    """Return one sentence for what vLLM raised while it started."""
    lines = [line.strip() for line in str(exc).splitlines() if line.strip()]
    told = next((line for line in lines if line.startswith("Value error, ")), "")
    text = (told.removeprefix("Value error, ") or (lines or [type(exc).__name__])[0])[:300]
    low = text.lower()
    if "one instance per process" in low:
        text = "an earlier engine of this process still holds memory"
        remedy = "restart the kernel, or train with in_subprocess=True"
    elif "expandable" in low:
        remedy = "take expandable_segments:True out of PYTORCH_CUDA_ALLOC_CONF and restart"
    elif "bitsandbytes" in low or "bnb" in low:
        remedy = "pip install vllm-bnb-plugin (vLLM 0.28 and later need it for 4-bit weights)"
    elif "failed to be inspected" in low and setup().hidden:
        remedy = (
            f"pip uninstall {' '.join(setup().hidden)} (they do not fit this torch, and vLLM's "
            f"inspection of the model fails on them)"
        )
    elif "memory" in low or type(exc).__name__ == "OutOfMemoryError":
        remedy = (
            f"lower model.max_seq_length or trainer.per_device_train_batch_size "
            f"({detect_hardware().free_memory / GIB:.1f} GiB are free), or set "
            f"trainer.generation: transformers"
        )
    else:
        remedy = "set trainer.generation: transformers to do without it"
    return f"vLLM cannot start ({type(exc).__name__}: {text}): {remedy}"


def _empty_engine(llm: Any) -> None:
    """Free an engine's weights, KV cache and CUDA graphs, whoever still refers to them.

    torch's compile caches keep the modules of an engine alive after its shutdown, and the next
    engine of this process asserts that the sleep allocator's pool is empty.
    """
    from vllm.compilation.cuda_graph import CUDAGraphWrapper

    CUDAGraphWrapper.clear_all_graphs()
    runner = llm.llm_engine.model_executor.driver_worker.worker.model_runner
    for module in runner.model.modules():
        empty_tensors(vars(module).values())
    empty_model(runner.model)
    empty_tensors([runner.kv_caches])
    cumem = sys.modules.get("vllm.device_allocator.cumem")
    if cumem is not None and cumem.CuMemAllocator.instance is not None:
        _empty_sleep_pools(cumem)


def _empty_sleep_pools(cumem: Any) -> None:
    """Prepare vLLM's sleep allocator, so that the shutdown frees all of its memory.

    This frees the tensors in its pools (sampler buffers, quantisation states), and maps again the
    blocks that vLLM unmapped during the load. torch frees those too, but the allocator no longer
    knows them: its C callback raises a KeyError, and the blocks after it stay mapped (2.6 GiB of a
    1.7B model, on an H100 with vLLM 0.26). The fix follows vLLM's csrc/cumem_allocator.cpp; it has
    not run on a card.

    Args:
        cumem: The module ``vllm.device_allocator.cumem``.
    """
    import ctypes

    allocator = cumem.CuMemAllocator.instance
    known = allocator.pointer_to_data
    blocks = sorted((address, address + data.handle[1]) for address, data in known.items())
    starts = [start for start, _ in blocks]
    for tensor in list(live_tensors()):
        address = tensor.untyped_storage().data_ptr()
        place = bisect.bisect_right(starts, address) - 1
        if tensor.is_cuda and place >= 0 and address < blocks[place][1]:
            empty_tensors([tensor])
    libc = ctypes.CDLL(None)
    libc.malloc.restype = ctypes.c_void_p
    for tag, (pool, *_) in allocator.allocator_and_pools.items():
        for segment in pool.snapshot():
            address = segment["address"]
            if address not in known:
                handle = (segment["device"], segment["total_size"], address, libc.malloc(8))
                cumem.create_and_map(handle)
                known[address] = cumem.AllocationData(handle, tag)


def _drop_caches(llm: Any) -> None:
    """Break the cycles that keep an engine's tensors alive after its shutdown."""
    import torch

    torch._dynamo.reset()
    engine = getattr(llm, "llm_engine", None)
    for owner in (engine, getattr(getattr(engine, "engine_core", None), "engine_core", None), llm):
        if owner is not None:
            vars(owner).clear()
