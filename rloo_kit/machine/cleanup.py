"""Free the memory of models, engines and trainers, and measure the memory of this process."""

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
from rloo_kit.machine.engines import MIB, shut_down_engine
from rloo_kit.machine.tensors import empty_model


@dataclass(frozen=True)
class MemoryUse:
    """Memory in bytes that this process uses at one moment, and a list of its child processes."""

    resident: int  # main memory
    gpu_allocated: int = 0  # GPU memory of tensors
    gpu_reserved: int = 0  # GPU memory that torch's allocator has reserved, tensors included
    gpu_other: int = 0  # other used GPU memory: CUDA contexts, CUDA graphs, other programs
    children: tuple[str, ...] = ()  # process id and name of each child process


@dataclass(frozen=True)
class Released:
    """Memory of this process before and after a call of ``release``."""

    before: MemoryUse
    after: MemoryUse

    @property
    def freed_resident(self) -> int:
        """Main memory that was returned to the system, in bytes."""
        return self.before.resident - self.after.resident

    @property
    def freed_gpu(self) -> int:
        """GPU memory that was returned to the driver, by torch's allocator and others, in bytes."""
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
                f"; released {self.freed_gpu / MIB:,.0f} MiB of GPU memory; torch still holds "
                f"{self.after.gpu_reserved / MIB:,.0f} MiB (tensors: "
                f"{self.after.gpu_allocated / MIB:,.0f} MiB), and "
                f"{self.after.gpu_other / MIB:,.0f} MiB are in use outside of torch (CUDA context, "
                f"other programs)"
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
    """Return True if an error means that the GPU or the main memory is full.

    PyTorch's GPU allocator has an error class for this. The CUDA driver, cuBLAS, cuDNN,
    bitsandbytes and the CPU allocator raise a RuntimeError, and only its text tells the cause.
    """
    import torch

    if isinstance(exc, KitError):
        return False
    if isinstance(exc, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(exc, RuntimeError) and any(one in str(exc).lower() for one in OUT_OF_MEMORY)


def measure() -> MemoryUse:
    """Measure the memory that this process uses, and list its child processes."""
    import psutil
    import torch

    process = psutil.Process()
    reserved = torch.cuda.memory_reserved()  # without a GPU, torch's counters are 0
    children = []
    for child in process.children(recursive=True):
        with contextlib.suppress(psutil.Error):  # the child has just ended
            children.append(f"{child.pid} {child.name()}")
    resident = process.memory_info().rss
    other = used_on_gpu() - reserved
    return MemoryUse(resident, torch.cuda.memory_allocated(), reserved, other, tuple(children))


def used_on_gpu() -> int:
    """Return how many bytes of the GPU are in use, as the driver counts them; 0 without a GPU.

    The number does not include memory that a sleeping vLLM engine has unmapped, although torch's
    own counters include it. torch keeps freed memory reserved, so the number at the end of a phase
    shows the peak of that phase.
    """
    import torch

    if not torch.cuda.is_available():
        return 0
    free, total = torch.cuda.mem_get_info()
    return total - free


def take_peak() -> int:
    """Return the peak memory since the last call, in bytes, and reset the peak.

    With a GPU, this is the peak of the GPU memory that torch allocated. Without a GPU, it is the
    peak of the resident memory of this process. On systems other than Linux that peak cannot be
    reset, so the current resident memory is returned.
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
    """Free the memory of trainers, models and engines, even if variables still refer to them.

    Weights, gradients, optimizer states and buffers are replaced by empty tensors. The objects
    still exist, but cannot compute any more. A vLLM engine is shut down, and its process groups,
    caches and files are removed. A second call does nothing.

    Args:
        *things: Trainers, models, engines, and other objects with a method ``release``, such as a
            reward model.
        clear_notebook: Also drop what a notebook refers to: ``Out``, ``_``, and the last error
            with the variables of its frames.

    Returns:
        The memory before and after.
    """
    before = measure()
    with contextlib.ExitStack() as last_in_first_out:  # continues if one of the calls raises
        last_in_first_out.callback(return_to_system)
        last_in_first_out.callback(_release_host_buffers)
        if clear_notebook:
            last_in_first_out.callback(_clear_notebook)
        # engines, which have the method `close`, are released last: see VllmEngine.close
        for thing in sorted(things, key=lambda thing: hasattr(thing, "close"))[::-1]:
            last_in_first_out.callback(_release_one, thing)
    return Released(before, measure())


def _release_one(thing: Any) -> None:
    """Free the memory of one trainer, model, engine or object with a method ``release``."""
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
    """Free a model's memory, and shut down the vLLM engine that Unsloth loaded with it, if any."""
    empty_model(model)
    llm = getattr(model, "vllm_engine", None)
    if llm is not None:
        shut_down_engine(llm, on_gpu=True)


def _release_host_buffers() -> None:
    """Free the pinned memory in which Unsloth keeps activations for gradient checkpointing.

    The next training allocates it again. Unsloth itself only makes its buffers smaller after a
    training, which does not free their memory.
    """
    checkpointing: Any = sys.modules.get("unsloth_zoo.gradient_checkpointing")
    if getattr(checkpointing, "CPU_BUFFERS", None):  # exists once a forward pass has used it
        dtype = checkpointing.GPU_BUFFER_DTYPE
        checkpointing.initialize_unsloth_gradient_checkpointing(dtype)


@dataclass
class Session:
    """Models, trainers and engines that were made during a ``session``."""

    things: list[Any] = field(default_factory=list)
    released: Released | None = None  # the memory that was freed; None until the session ends


_sessions: list[Session] = []


@contextlib.contextmanager
def session(*, clear_notebook: bool = False) -> Iterator[Session]:
    """Free every model, trainer and engine that the body has made, even if the body raises.

    Args:
        clear_notebook: As in ``release``.

    Yields:
        The session. After its end, ``released`` says how much memory was freed.

    Raises:
        BaseException: Any error of the body, raised after the memory was freed.

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
        errors = contextlib.suppress(Exception)  # so that the body's error is raised
        raise
    finally:
        _sessions.remove(opened)
        things = opened.things[::-1]
        opened.things = []
        if things or "torch" in sys.modules:  # otherwise there is no memory to free
            with errors:
                opened.released = release(*things, clear_notebook=clear_notebook)


def add_to_session(thing: object) -> None:
    """Free ``thing`` at the end of the innermost open session; without a session do nothing."""
    if _sessions:
        _sessions[-1].things.append(thing)


def shutdown_kernel() -> None:
    """End the Jupyter kernel, which frees all of its memory, even its CUDA context."""
    kernel = getattr(_notebook(), "kernel", None)
    if kernel is None:
        print("no Jupyter kernel here: memory returns when the program ends")  # noqa: T201
        return
    print("shutting down the kernel: all memory returns to the system")  # noqa: T201
    kernel.do_shutdown(restart=False)


def _clear_notebook() -> None:
    """Drop the last error, and the outputs that the notebook keeps."""
    for name in ("last_exc", "last_value", "last_traceback", "last_type"):
        sys.__dict__.pop(name, None)
    if shell := _notebook():
        shell.displayhook.flush()


def _notebook() -> Any:
    """Return the IPython shell of this process; None outside of IPython."""
    ipython = sys.modules.get("IPython")
    return ipython and ipython.get_ipython()


def return_to_system() -> None:
    """Return unused memory to the system, and unused GPU memory to the driver.

    The workspaces of cuBLAS (8 to 32 MiB) are not freed, because CUDA graphs of an engine that is
    still alive use them by their address (pytorch issue 193402).
    """
    import torch

    for thread in threading.enumerate():
        if type(thread).__name__ == "TMonitor":  # tqdm's thread; the next progress bar restarts it
            thread.exit()  # pyright: ignore[reportAttributeAccessIssue]  # tqdm's own method
    inductor = sys.modules.get("torch._inductor.async_compile")
    if inductor is not None:  # its worker processes wait for something to compile
        inductor.shutdown_compile_workers()
    gc.collect()
    if torch.cuda.is_available():
        with contextlib.suppress(AttributeError, RuntimeError):
            torch.accelerator.empty_host_cache()  # unused pinned memory
        torch.cuda.empty_cache()
        torch.cuda.ipc_collect()
    with contextlib.suppress(OSError, AttributeError):  # glibc only
        ctypes.CDLL("libc.so.6").malloc_trim(0)
