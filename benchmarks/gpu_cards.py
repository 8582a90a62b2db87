"""A consumer card made of a large one: its size as every library sees it, and its true peak.

torch's allocator gets the smaller size as a limit. What this process takes in all, vLLM's own
allocations included, is read from the driver (NVML) all the time, so a peak over the card's size is
seen even where no limit is enforced.
"""

import contextlib
import json
import os
import threading
import time
from pathlib import Path

GIB = 2**30
# Share of a card's memory that torch reports (23.65 of 24 GiB).
REPORTED = 0.98
# Variables of torch.distributed that a training must leave as they were.
SETTLED = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}


class Usage:
    """Memory of the card that this process holds, by the driver's count; else the whole card's."""

    def __init__(self) -> None:
        import pynvml
        import torch

        torch.zeros(1, device="cuda")  # the context
        pynvml.nvmlInit()
        self._nvml, self._handle = pynvml, pynvml.nvmlDeviceGetHandleByIndex(0)
        self.by_process = self._mine() is not None
        self._others = 0 if self.by_process else self._device() - self._torch()

    def _mine(self) -> int | None:
        """Return this process's bytes, None where the driver does not tell them."""
        for process in self._nvml.nvmlDeviceGetComputeRunningProcesses(self._handle):
            if process.pid == os.getpid() and process.usedGpuMemory:
                return process.usedGpuMemory
        return None

    def _device(self) -> int:
        return self._nvml.nvmlDeviceGetMemoryInfo(self._handle).used

    @staticmethod
    def _torch() -> int:
        import torch

        return torch.cuda.memory_reserved()

    def read(self) -> int:
        """Return the bytes held now, the CUDA context included."""
        return (self._mine() or 0) if self.by_process else self._device()


class SmallCard:
    """Makes this process see and use a card of ``gb`` GB.

    Args:
        gb: On the box.
        limited: Whether torch's allocator is limited to it.
    """

    def __init__(self, gb: int, *, limited: bool = True) -> None:
        import torch

        self.usage = Usage()
        self.total = int(gb * GIB * REPORTED)
        self.context = self.usage.read() - torch.cuda.memory_reserved()
        self._real = torch.cuda.get_device_properties(0).total_memory
        self.peak, self._watching = self.usage.read(), True
        self.highest = 0
        self.calls: list[dict] = []
        """Every call that lets an engine sleep or wakes it, with the memory around it."""
        torch.cuda.mem_get_info = self._info
        torch.accelerator.get_memory_info = self._info
        properties = torch.cuda.get_device_properties

        class Properties:
            def __init__(self, real) -> None:
                self._of = real

            def __getattr__(self, name):
                return card_total if name == "total_memory" else getattr(self._of, name)

        card_total = self.total
        torch.cuda.get_device_properties = lambda *a, **k: Properties(properties(*a, **k))
        if limited:
            self.limit()
            torch.cuda.get_per_process_memory_fraction = lambda device=None: 1.0
        threading.Thread(target=self._watch, daemon=True).start()

    def _info(self, device=None) -> tuple[int, int]:
        return max(0, self.total - self.usage.read()), self.total

    def limit(self) -> None:
        """Limit torch's allocator.

        It also counts what vLLM has unmapped while it sleeps, so that much is added.
        """
        import torch

        hidden = max(0, torch.cuda.memory_reserved() + self.context - self.usage.read())
        share = (self.total - self.context + hidden) / self._real
        torch.cuda.set_per_process_memory_fraction(min(1.0, share))

    def follow(self) -> None:
        """Set the limit again whenever an engine falls asleep or wakes up."""
        from rloo_kit.sampling.vllm_inprocess import VllmEngine

        for name in ("sleep", "_wake", "close"):
            setattr(VllmEngine, name, self._then_limit(getattr(VllmEngine, name)))
        self._note_pool()

    def _note_pool(self) -> None:
        """Note what vLLM's sleep allocator holds before and after it is emptied at the end."""
        from vllm.v1.worker.gpu_worker import Worker

        from rloo_kit.sampling import vllm_inprocess as vllm_engine

        empty, shutdown = vllm_engine._empty_sleep_pools, Worker.shutdown

        def noted(cumem) -> None:
            self.calls.append({"call": "pool before", **_pool()})
            empty(cumem)

        def shut_down(worker) -> None:
            try:
                shutdown(worker)
            except Exception as exc:
                self.calls.append({"call": f"shutdown raised {exc!r}"})
                raise
            finally:
                self.calls.append({"call": "pool after", **_pool()})

        vllm_engine._empty_sleep_pools, Worker.shutdown = noted, shut_down

    def _then_limit(self, method):
        def limited(engine, *arguments):
            import torch

            row = {"call": method.__name__, "peak_before": self.take_peak()}
            row |= {"used_before": self.usage.read(), "reserved": torch.cuda.memory_reserved()}
            method(engine, *arguments)
            self.limit()
            row |= {"used": self.usage.read(), "reserved_after": torch.cuda.memory_reserved()}
            self.calls.append(row)

        return limited

    def _watch(self) -> None:
        while self._watching:
            self.peak = max(self.peak, self.usage.read())
            time.sleep(0.005)

    def take_peak(self) -> int:
        """Return the most bytes held since the last call."""
        peak, self.peak = self.peak, self.usage.read()
        self.highest = max(self.highest, peak)
        return peak


def _pool() -> dict[str, int]:
    """Return the blocks of vLLM's sleep allocator: how many, and bytes by tag."""
    from vllm.device_allocator.cumem import CuMemAllocator

    held = CuMemAllocator.instance.pointer_to_data if CuMemAllocator.instance else {}
    sizes = {"blocks": len(held)}
    for data in held.values():
        sizes[data.tag] = sizes.get(data.tag, 0) + data.handle[1]
    return sizes


def engine_facts(engine) -> dict[str, object]:
    """Return what vLLM made of its settings: read from its own configuration."""
    config = engine._llm.llm_engine.vllm_config
    worker = engine._llm.llm_engine.model_executor.driver_worker.worker
    measured = ("non_torch_memory", "peak_activation_memory", "cudagraph_memory_estimate",
                "available_kv_cache_memory_bytes", "requested_memory")  # fmt: skip
    cache, scheduler = config.cache_config, config.scheduler_config
    return {
        "engine": engine.name,
        "share": cache.gpu_memory_utilization,
        "cache_blocks": cache.num_gpu_blocks,
        "cache_tokens": (cache.num_gpu_blocks or 0) * cache.block_size,
        "cache_dtype": str(cache.cache_dtype),
        "max_num_seqs": scheduler.max_num_seqs,
        "max_num_batched_tokens": scheduler.max_num_batched_tokens,
        "sleep_mode": config.model_config.enable_sleep_mode,
        "quantization": config.model_config.quantization,
        "weights": int(worker.model_runner.model_memory_usage),
        **{name: int(getattr(worker, name, None) or 0) for name in measured},
    }


def card(options, answer) -> None:
    """Train with vLLM on a card made small, twice in one process: peaks, shares, what is left."""
    import gpu_models
    from gpu_parts import run_file

    import rloo_kit as rk

    rk.setup(options.backend)
    small = SmallCard(options.card)
    small.follow()
    in_4bit = options.bits == 4
    name = "toy" if options.toy else options.geometry
    options.toy = name == "toy"
    model = gpu_models.model_folder(options.scratch, name, load_in_4bit=in_4bit, device="cuda")
    path = run_file(options, options.answer.parent / "card", model)
    overrides = [
        f"model.load_in_4bit={str(in_4bit).lower()}",
        f"model.backend={options.backend}",
        "trainer.generation=vllm",
        "trainer.generation_kwargs={}",
        "trainer.num_iterations=1",
        "trainer.max_steps=3",
        *options.set,
    ]
    plan = rk.plan(path, gpu=f"{options.card}GB", overrides=overrides)
    answer.note(
        model=model.name,
        card=options.card,
        memory_by_process=small.usage.by_process,
        context=small.context,
        predicted=int(plan.peak_bytes),
        predicted_phases=plan.memory.phases,
        planned_share=plan.vllm_share,
        fits=bool(plan.fits),
    )
    os.chdir(options.answer.parent)
    for number in (1, 2):
        answer.note(**{f"run_{number}": _one(path, overrides, small, number)})
    _judge(answer, small)


def _one(path: Path, overrides: list[str], small: SmallCard, number: int) -> dict[str, object]:
    """Train once and release; return what was seen."""
    import torch

    import rloo_kit as rk
    from rloo_kit.sampling import choice as engines

    before, here = dict(os.environ), set(os.listdir())
    small.take_peak()
    small.highest, small.calls = 0, []
    lines, seen, start = [], {}, engines._in_process
    started = time.perf_counter()

    def noting(*arguments):
        engine = start(*arguments)
        seen.update(engine_facts(engine))
        seen["start_seconds"] = round(time.perf_counter() - started, 1)
        seen["start_peak"] = small.take_peak()
        return engine

    engines._in_process = noting
    try:
        folder = path.parent / f"run-{number}"
        result = rk.train(path, [*overrides, f"output_dir={folder}"], lines.append)
    finally:
        engines._in_process = start
    small.take_peak()
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    kept = ("sampling/", "speed/", "memory/", "step_time", "kl", "grad_norm")
    torch.cuda.empty_cache()
    return {
        **seen,
        "seconds": round(time.perf_counter() - started, 1),
        "peak": small.highest,
        "calls": [row for row in small.calls if row.get("used") != row.get("used_before", 0)][-24:],
        "left_after_release": small.usage.read() - small.context,
        "released": str(result.released),
        "steps": result.steps,
        "metrics": [
            {k: v for k, v in row.items() if k.startswith(kept)} for row in rows if "reward" in row
        ],
        "said": [line for line in lines if any(w in line for w in ("dry run", "vLLM", "memory"))],
        "variables_left": sorted(SETTLED & (set(os.environ) - set(before))),
        "new_files_in_working_folder": sorted(set(os.listdir()) - here),
    }


def _judge(answer, small: SmallCard) -> None:
    """Note what is wrong: over the card, another share than planned, something left."""
    wrong = []
    for number in (1, 2):
        run = answer.values[f"run_{number}"]
        if run["peak"] > small.total:
            wrong.append(f"run {number} peaks at {run['peak'] / GIB:.2f} GiB, over the card")
        if run["variables_left"] or run["new_files_in_working_folder"]:
            wrong.append(f"run {number} leaves variables or files")
    with contextlib.suppress(KeyError, ZeroDivisionError):
        answer.note(
            measured=answer.values["run_1"]["peak"],
            ratio=answer.values["predicted"] / answer.values["run_1"]["peak"],
        )
    if wrong:
        answer.note(failed="; ".join(wrong))
