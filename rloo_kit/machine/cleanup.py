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
    """What this process holds at one moment; memory in bytes."""

    resident: int
    gpu_allocated: int = 0  # by tensors
    gpu_reserved: int = 0  # by torch's allocator, tensors included
    gpu_other: int = 0  # of the device, outside of torch: CUDA contexts, graphs, other programs
    children: tuple[str, ...] = ()  # number and name of each child process


@dataclass(frozen=True)
class Released:
    """What ``release`` gave back and what is left, bytes."""

    before: MemoryUse
    after: MemoryUse

    @property
    def freed_resident(self) -> int:
        """Resident memory given back to the system."""
        return self.before.resident - self.after.resident

    @property
    def freed_gpu(self) -> int:
        """GPU memory given back to the driver, by torch's allocator and outside of it."""
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


# Lower-case parts of the messages of libraries that raise a plain RuntimeError for it
OUT_OF_MEMORY = (
    "out of memory",
    "can't allocate memory",
    "not enough memory: you tried to allocate",
    "cublas_status_alloc_failed",
    "cudnn_status_alloc_failed",
    "cudaerrormemoryallocation",
)


def is_out_of_memory(exc: BaseException) -> bool:
    """Return whether an error says that a device or the host has no memory left.

    PyTorch's allocator has a class of its own for that; the CUDA driver, cuBLAS, cuDNN,
    bitsandbytes and the allocator of the CPU say it in the text of another one.
    """
    import torch

    if isinstance(exc, KitError):
        return False
    if isinstance(exc, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(exc, RuntimeError) and any(one in str(exc).lower() for one in OUT_OF_MEMORY)


def measure() -> MemoryUse:
    """Return what this process holds now."""
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
    """Return the bytes of the GPU in use now, by the driver's count; 0 without one.

    What vLLM has unmapped while it sleeps is not in it, unlike in torch's own count. torch gives
    nothing back by itself, so at the end of a phase it holds what the phase took at most.
    """
    import torch

    if not torch.cuda.is_available():
        return 0
    free, total = torch.cuda.mem_get_info()
    return total - free


def take_peak() -> int:
    """Return the most bytes held since the last call, and reset it.

    On a GPU what torch allocated there; else the resident memory of this process, whose peak only
    Linux can reset (elsewhere it is the current value).
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
    """Give back the memory of trainers, models and engines, also while variables point at them.

    Weights, gradients, optimizer states and buffers are replaced by empty tensors: the objects stay
    valid Python and cannot be used any more. A vLLM engine is shut down with its process groups,
    caches and files. Safe to call twice.

    Args:
        *things: Trainers, models, engines, or anything with a ``release`` method (a reward model).
        clear_notebook: Also forget what a notebook keeps: ``Out``, ``_``, and the last error with
            the variables of its frames.

    Returns:
        What was given back, and what is left.
    """
    before = measure()
    with contextlib.ExitStack() as last_in_first_out:  # goes on after one that raises
        last_in_first_out.callback(return_to_system)
        last_in_first_out.callback(_release_host_buffers)
        if clear_notebook:
            last_in_first_out.callback(_clear_notebook)
        in_order = sorted(things, key=_is_engine)  # engines last: see VllmEngine.close
        for thing in reversed(in_order):
            last_in_first_out.callback(_release_one, thing)
    return Released(before, measure())


def _is_engine(thing: Any) -> bool:
    return hasattr(thing, "close")


def _release_one(thing: Any) -> None:
    if hasattr(thing, "release"):
        thing.release()
    elif hasattr(thing, "accelerator"):  # a trainer of TRL's or transformers' own
        release_model(thing.model)
        thing.accelerator.free_memory()
    elif hasattr(thing, "parameters"):
        release_model(thing)
    elif _is_engine(thing):
        thing.close()


def release_model(model: Any) -> None:
    """Empty a model, and end the engine that Unsloth loaded with it."""
    empty_model(model)
    llm = getattr(model, "vllm_engine", None)
    if llm is not None:
        shut_down_engine(llm, on_gpu=True)


def _release_host_buffers() -> None:
    """Free the pinned memory that Unsloth's offloading checkpoints grew; a training grows it again.

    Unsloth shrinks it after a training that ended well, which keeps the memory.
    """
    checkpointing: Any = sys.modules.get("unsloth_zoo.gradient_checkpointing")
    if getattr(checkpointing, "CPU_BUFFERS", None):  # there from the first checkpoint on
        dtype = checkpointing.GPU_BUFFER_DTYPE
        checkpointing.initialize_unsloth_gradient_checkpointing(dtype)


@dataclass
class Session:
    """What a ``session`` made, and what it gave back once it is over."""

    things: list[Any] = field(default_factory=list)
    released: Released | None = None


_sessions: list[Session] = []


@contextlib.contextmanager
def session(*, clear_notebook: bool = False) -> Iterator[Session]:
    """Release every model, trainer and engine that the body makes, also when it raises.

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
        errors = contextlib.suppress(Exception)  # the body's own says more
        raise
    finally:
        _sessions.remove(opened)
        things = opened.things[::-1]
        opened.things = []
        if things or "torch" in sys.modules:  # else there is no memory to give back
            with errors:
                opened.released = release(*things, clear_notebook=clear_notebook)


def add_to_session(thing: Any) -> None:
    """Let the innermost open session release ``thing`` at its end."""
    if _sessions:
        _sessions[-1].things.append(thing)


def shutdown_kernel() -> None:
    """End the Jupyter kernel, which gives back everything, the CUDA context included."""
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
    """Give back to the system, and to a GPU's driver, what nothing holds any more."""
    import torch

    for thread in threading.enumerate():
        if type(thread).__name__ == "TMonitor":  # watches tqdm's bars; the next bar starts another
            thread.exit()  # pyright: ignore[reportAttributeAccessIssue]  # tqdm's own method
    inductor = sys.modules.get("torch._inductor.async_compile")
    if inductor is not None:  # its processes wait for the next thing to compile
        inductor.shutdown_compile_workers()
    gc.collect()
    if torch.cuda.is_available():
        with contextlib.suppress(AttributeError, RuntimeError):
            torch._C._cuda_clearCublasWorkspaces()
            torch.accelerator.empty_host_cache()  # pinned memory that nothing holds
        torch.cuda.empty_cache()
        torch.cuda.ipc_collect()
    with contextlib.suppress(OSError, AttributeError):  # glibc only
        ctypes.CDLL("libc.so.6").malloc_trim(0)
