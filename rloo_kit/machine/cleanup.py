"""Release of models, engines and trainers; sessions; the memory that a process holds."""

import contextlib
import ctypes
import gc
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rloo_kit.errors import KitError
from rloo_kit.machine.engines import shut_down_engine
from rloo_kit.machine.tensors import empty_model

MIB = 1024**2


@dataclass(frozen=True)
class MemoryUse:
    """Memory of this process at one moment, in bytes, and its child processes."""

    resident: int
    gpu_allocated: int = 0  # by tensors
    gpu_reserved: int = 0  # by torch's allocator, tensors included
    gpu_other: int = 0  # of the device, outside of torch: CUDA contexts, graphs, other programs
    children: tuple[str, ...] = ()  # number and name of each child process


@dataclass(frozen=True)
class Released:
    """Memory before and after ``release``."""

    before: MemoryUse
    after: MemoryUse

    @property
    def freed_resident(self) -> int:
        """Resident memory given back to the system, in bytes."""
        return self.before.resident - self.after.resident

    @property
    def freed_gpu(self) -> int:
        """GPU memory given back to the driver, by torch's allocator and outside of it, in bytes."""
        before = self.before
        after = self.after
        return before.gpu_reserved + before.gpu_other - after.gpu_reserved - after.gpu_other

    def __str__(self) -> str:
        text = (
            f"released {max(0, self.freed_resident) / MIB:,.0f} MiB of memory, "
            f"{self.after.resident / MIB:,.0f} MiB left in the process (its libraries)"
        )
        if self.before.gpu_reserved or self.after.gpu_reserved:
            text += (
                f"; released {self.freed_gpu / MIB:,.0f} MiB of GPU memory, "
                f"{self.after.gpu_reserved / MIB:,.0f} MiB left, of which tensors hold "
                f"{self.after.gpu_allocated / MIB:,.0f} MiB, and "
                f"{self.after.gpu_other / MIB:,.0f} MiB outside of torch (CUDA context, other "
                f"programs)"
            )
        if self.after.children:
            text += f"; child processes left: {', '.join(self.after.children)}"
        return text


# Lower-case parts of the messages of libraries that raise a plain RuntimeError for out of memory
OUT_OF_MEMORY = (
    "out of memory",
    "can't allocate memory",
    "not enough memory: you tried to allocate",
    "cublas_status_alloc_failed",
    "cudnn_status_alloc_failed",
    "cudaerrormemoryallocation",
)


def is_out_of_memory(exc: BaseException) -> bool:
    """Return whether an error means that a device or the host has no memory left.

    PyTorch's allocator has an error class for that. The CUDA driver, cuBLAS, cuDNN, bitsandbytes
    and the allocator of the CPU only mention it in the text of another error.
    """
    import torch

    if isinstance(exc, KitError):
        return False
    if isinstance(exc, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(exc, RuntimeError) and any(one in str(exc).lower() for one in OUT_OF_MEMORY)


def measure() -> MemoryUse:
    """Return the memory and the child processes of this process."""
    import psutil
    import torch

    process = psutil.Process()
    # torch counts 0 without a GPU
    allocated = torch.cuda.memory_allocated()
    reserved = torch.cuda.memory_reserved()
    children = []
    for child in process.children(recursive=True):
        with contextlib.suppress(psutil.Error):  # it has just ended
            children.append(f"{child.pid} {child.name()}")
    resident = process.memory_info().rss
    other = used_on_gpu() - reserved
    return MemoryUse(resident, allocated, reserved, other, tuple(children))


def used_on_gpu() -> int:
    """Return the bytes of the GPU in use now, by the driver's count; 0 without a GPU.

    Memory that vLLM has unmapped while it sleeps does not count, unlike in torch's own count. torch
    does not free memory by itself, so at the end of a phase it still holds the peak of the phase.
    """
    import torch

    if not torch.cuda.is_available():
        return 0
    free, total = torch.cuda.mem_get_info()
    return total - free


def take_peak() -> int:
    """Return the peak memory in bytes since the last call, and reset it.

    With a GPU it is the GPU memory that torch allocated. Without one it is the resident memory of
    this process, and on systems other than Linux, where that peak cannot be reset, its current
    value.
    """
    import torch

    if torch.cuda.is_available():
        peak = torch.cuda.max_memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        return peak
    try:
        status = Path("/proc/self/status").read_text("utf-8")
        Path("/proc/self/clear_refs").write_text("5", "utf-8")
    except OSError:
        import psutil

        return psutil.Process().memory_info().rss
    return int(status.split("VmHWM:")[1].split()[0]) * 1024


def release(*things: Any, clear_notebook: bool = False) -> Released:
    """Free the memory of trainers, models and engines, even while variables refer to them.

    Weights, gradients, optimizer states and buffers are replaced by empty tensors. The objects stay
    valid Python objects, but cannot compute any more. A vLLM engine is shut down with its process
    groups, caches and files. A second call does nothing.

    Args:
        *things: Trainers, models, engines, or anything with a ``release`` method (a reward model).
        clear_notebook: Also drop the references of a notebook: ``Out``, ``_``, and the last error
            with the variables of its frames.

    Returns:
        The memory before and after.
    """
    before = measure()
    with contextlib.ExitStack() as last_in_first_out:  # continues after one that raises
        last_in_first_out.callback(return_to_system)
        last_in_first_out.callback(_release_host_buffers)
        if clear_notebook:
            last_in_first_out.callback(_clear_notebook)
        # engines, which have `close`, come last: see VllmEngine.close
        for thing in sorted(things, key=lambda thing: hasattr(thing, "close"))[::-1]:
            last_in_first_out.callback(_release_one, thing)
    return Released(before, measure())


def _release_one(thing: Any) -> None:
    if hasattr(thing, "release"):
        thing.release()
    elif hasattr(thing, "accelerator"):  # a trainer of TRL or transformers
        release_model(thing.model)
        thing.accelerator.free_memory()
    elif hasattr(thing, "parameters"):
        release_model(thing)
    elif hasattr(thing, "close"):
        thing.close()


def release_model(model: Any) -> None:
    """Empty a model, and end the engine that Unsloth loaded with it."""
    empty_model(model)
    llm = getattr(model, "vllm_engine", None)
    if llm is not None:
        shut_down_engine(llm, on_gpu=True)


def _release_host_buffers() -> None:
    """Free the pinned memory of Unsloth's offloading checkpoints; the next training allocates it.

    Unsloth itself only shrinks its buffers after a training, which keeps the memory.
    """
    checkpointing: Any = sys.modules.get("unsloth_zoo.gradient_checkpointing")
    if getattr(checkpointing, "CPU_BUFFERS", None):  # exists from the first checkpoint on
        dtype = checkpointing.GPU_BUFFER_DTYPE
        checkpointing.initialize_unsloth_gradient_checkpointing(dtype)


@dataclass
class Session:
    """Models, trainers and engines of a ``session``, and its released memory after its end."""

    things: list[Any] = field(default_factory=list)
    released: Released | None = None


_sessions: list[Session] = []


@contextlib.contextmanager
def session(*, clear_notebook: bool = False) -> Iterator[Session]:
    """Release every model, trainer and engine that the body makes, also if it raises.

    Args:
        clear_notebook: As in ``release``.

    Raises:
        BaseException: Any error of the body, after the release.

    Example:
        with rk.session() as session:
            model, tokenizer = rk.load_model("tiny-thinker")
            ...
        print(session.released)
    """
    opened = Session()
    _sessions.append(opened)
    errors: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
    try:
        yield opened
    except BaseException:
        errors = contextlib.suppress(Exception)  # the body's error is the one to raise
        raise
    finally:
        _sessions.remove(opened)
        things = opened.things[::-1]
        opened.things = []
        if things or "torch" in sys.modules:  # else there is no memory to free
            with errors:
                opened.released = release(*things, clear_notebook=clear_notebook)


def add_to_session(thing: object) -> None:
    """Make the innermost open session release ``thing`` at its end."""
    if _sessions:
        _sessions[-1].things.append(thing)


def shutdown_kernel() -> None:
    """End the Jupyter kernel, which frees all memory, the CUDA context included."""
    kernel = getattr(_notebook(), "kernel", None)
    if kernel is None:
        print("no Jupyter kernel here: memory returns when the program ends")  # noqa: T201
        return
    print("shutting down the kernel: all memory returns to the system")  # noqa: T201
    kernel.do_shutdown(restart=False)


def _clear_notebook() -> None:
    for name in ("last_exc", "last_value", "last_traceback", "last_type"):
        sys.__dict__.pop(name, None)
    if shell := _notebook():
        shell.displayhook.flush()


def _notebook() -> Any:
    """Return IPython's shell of this process, or None."""
    ipython = sys.modules.get("IPython")
    return ipython and ipython.get_ipython()


def return_to_system() -> None:
    """Return unused memory to the system, and to a GPU's driver.

    cuBLAS keeps its workspaces of 8 to 32 MiB: CUDA graphs of an engine that is still alive read
    them by their address (pytorch issue 193402).
    """
    import torch

    for thread in threading.enumerate():
        if type(thread).__name__ == "TMonitor":  # tqdm's thread, which the next bar starts again
            thread.exit()  # pyright: ignore[reportAttributeAccessIssue]  # tqdm's own method
    inductor = sys.modules.get("torch._inductor.async_compile")
    if inductor is not None:  # its processes wait for more to compile
        inductor.shutdown_compile_workers()
    gc.collect()
    if torch.cuda.is_available():
        with contextlib.suppress(AttributeError, RuntimeError):
            torch.accelerator.empty_host_cache()  # unused pinned memory
        torch.cuda.empty_cache()
        torch.cuda.ipc_collect()
    with contextlib.suppress(OSError, AttributeError):  # glibc only
        ctypes.CDLL("libc.so.6").malloc_trim(0)
