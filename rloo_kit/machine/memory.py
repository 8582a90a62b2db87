"""Release of models, engines and trainers; sessions; what is measured and what is left, by name."""

import contextlib
import ctypes
import gc
import os
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from rloo_kit.errors import KitError
from rloo_kit.machine.hardware import SHARED_MEMORY

MIB = 1024**2
SMALLEST_HELD, SMALLEST_COUNTED = 4 * MIB, 64 * 1024
"""Bytes of a holder that is named, and of a tensor that is counted."""


@dataclass(frozen=True)
class MemoryUse:
    """What this process holds at one moment; memory in bytes."""

    resident: int
    gpu_allocated: int = 0  # by tensors
    gpu_reserved: int = 0  # by torch's allocator, tensors included
    gpu_other: int = 0  # of the device, outside of torch: CUDA contexts, graphs, other programs
    threads: tuple[str, ...] = ()  # names of live Python threads besides the main one
    children: tuple[str, ...] = ()  # number and name of each child process
    shared_files: tuple[str, ...] = ()  # files of this process in shared memory


@dataclass(frozen=True)
class Held:
    """Tensors that are still in memory, and what holds them."""

    bytes: int
    num_tensors: int
    holder: str

    def __str__(self) -> str:
        return f"{self.bytes / MIB:,.0f} MiB in {self.num_tensors} tensors held by {self.holder}"


@dataclass(frozen=True)
class Released:
    """What ``release`` gave back and what is left, bytes."""

    before: MemoryUse
    after: MemoryUse
    held: tuple[Held, ...] = ()  # by something else than what was released, largest first

    @property
    def freed_resident(self) -> int:
        """Resident memory given back to the system."""
        return self.before.resident - self.after.resident

    @property
    def freed_gpu(self) -> int:
        """GPU memory given back to the driver, by torch's allocator and outside of it."""
        before, after = self.before, self.after
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
                f"{self.after.gpu_allocated / MIB:,.0f} MiB"
            )
        new_threads = Counter(self.after.threads) - Counter(self.before.threads)
        for what, names in (
            ("child processes", self.after.children),
            ("shared-memory files", self.after.shared_files),
            ("new threads", tuple(new_threads)),
        ):
            if names:
                text += f"; {what} left: {', '.join(names)}"
        return "; ".join([text, *map(str, self.held)])


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
    if isinstance(exc, KitError):
        return False
    kinds = {kind.__name__ for kind in type(exc).__mro__}
    if isinstance(exc, MemoryError) or "OutOfMemoryError" in kinds:
        return True
    text = str(exc).lower() if isinstance(exc, RuntimeError) else ""
    return any(mark in text for mark in OUT_OF_MEMORY)


def measure() -> MemoryUse:
    """Return what this process holds now."""
    import psutil

    process = psutil.Process()
    main = threading.main_thread()
    torch = sys.modules.get("torch")
    gpu = {}
    if torch is not None and torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        reserved = torch.cuda.memory_reserved()
        gpu["gpu_allocated"] = torch.cuda.memory_allocated()
        gpu |= {"gpu_reserved": reserved, "gpu_other": total - free - reserved}
    return MemoryUse(
        resident=process.memory_info().rss,
        threads=tuple(sorted(t.name for t in threading.enumerate() if t is not main)),
        children=tuple(f"{child.pid} {_name(child)}" for child in process.children(True)),
        shared_files=_shared_files(process),
        **gpu,
    )


def take_peak() -> int:
    """Return the most bytes held since the last call, and reset it.

    On a GPU what torch allocated there; else the resident memory of this process, whose peak only
    Linux can reset (elsewhere it is the current value).
    """
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        peak = torch.cuda.max_memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        return peak
    try:
        status = Path("/proc/self/status").read_text()
        Path("/proc/self/clear_refs").write_text("5")
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
        What was given back, and what is left with its holder.
    """
    released, errors = _release_all(things, clear_notebook=clear_notebook)
    if errors:
        raise errors[0]
    return released


def _release_all(
    things: tuple[Any, ...], *, clear_notebook: bool
) -> tuple[Released, list[Exception]]:
    """Release every thing, also after one that raised."""
    before, errors = measure(), []
    for thing in sorted(things, key=_is_engine):  # engines last: see VllmEngine.close
        try:
            _release_one(thing)
        except Exception as exc:
            errors.append(exc)
    if clear_notebook:
        _clear_notebook()
    return_to_system()
    held: list[Held] = []
    with contextlib.suppress(MemoryError):  # to name them takes some, and none may be left
        held = held_tensors()
    return Released(before, measure(), tuple(held)), errors


def _is_engine(thing: Any) -> bool:
    return hasattr(thing, "sync") and hasattr(thing, "close")


def _release_one(thing: Any) -> None:
    if hasattr(thing, "release"):
        thing.release()
    elif hasattr(thing, "accelerator"):  # a trainer of TRL's or transformers' own
        empty_model(thing.model)
        thing.accelerator.free_memory()
    elif hasattr(thing, "parameters"):
        empty_model(thing)
    elif _is_engine(thing):
        thing.close()


@dataclass
class Session:
    """What a ``session`` made, and what it gave back once it is over."""

    things: list[Any] = field(default_factory=list)
    released: Released | None = None


_sessions: list[Session] = []


@contextlib.contextmanager
def session(*, clear_notebook: bool = False) -> Iterator[Session]:
    """Release every model, trainer and engine that the body makes, also when it raises.

    ``clear_notebook`` is that of ``release``. Example:
        with rk.session() as session:
            model, tokenizer = rk.load_model("tiny-thinker")
            ...
        print(session.released)
    """
    opened = Session()
    _sessions.append(opened)
    raised = True
    try:
        yield opened
        raised = False
    finally:
        _sessions.remove(opened)
        things, opened.things = opened.things[::-1], []
        opened.released, errors = _release_all(tuple(things), clear_notebook=clear_notebook)
        if errors and not raised:  # the body's own error says more
            raise errors[0]


def add_to_session(thing: Any) -> None:
    """Let the innermost open session release ``thing`` at its end; remember it by name."""
    if _sessions:
        _sessions[-1].things.append(thing)
    with contextlib.suppress(TypeError):  # what takes no weak reference is not named
        _made.append(weakref.ref(thing, _made.remove))


def remove_from_session(thing: Any) -> None:
    """Let no session release ``thing``."""
    for opened in _sessions:
        opened.things[:] = [one for one in opened.things if one is not thing]


# What the kit made in this process: models, trainers, engines, rewards
_made: list[weakref.ref[Any]] = []


def held_tensors(smallest: int = SMALLEST_HELD) -> list[Held]:
    """Return the live tensors by what holds them, largest first; holders of less are left out.

    A holder is something that the kit made, or a variable of the notebook or script.
    """
    if "torch" not in sys.modules:
        return []
    made = [(f"{type(thing).__name__}", thing) for ref in _made if (thing := ref()) is not None]
    variables = [
        (f"the variable {name}", value)
        for name, value in list(vars(sys.modules["__main__"]).items())
        if not name.startswith("__") and not isinstance(value, type | ModuleType)
    ]
    names: dict[int, str] = {}
    for name, thing in (*made, *variables):
        for tensor in _tensors_of(thing):
            with contextlib.suppress(RuntimeError):  # subclasses without a storage
                names.setdefault(tensor.untyped_storage().data_ptr(), name)
    sizes: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in live_tensors()}
    for place, storage in storages.items():
        if storage.nbytes() >= SMALLEST_COUNTED:
            holder = names.get(place, "other objects")
            sizes[holder] += storage.nbytes()
            counts[holder] += 1
    found = [Held(size, counts[holder], holder) for holder, size in sizes.most_common()]
    return [held for held in found if held.bytes >= smallest]


def _tensors_of(thing: Any, depth: int = 3) -> Iterator[Any]:
    """Yield the tensors of a model, a container or an object's attributes, a few levels deep."""
    torch = sys.modules["torch"]
    if isinstance(thing, torch.Tensor):
        if not thing.is_meta:
            yield thing
    elif isinstance(thing, torch.nn.Module):
        yield from (*thing.parameters(), *thing.buffers())
    elif depth:
        container = isinstance(thing, list | tuple | set | dict)
        inner = thing if container else getattr(thing, "__dict__", ())
        for value in list(inner.values() if isinstance(inner, dict) else inner):
            yield from _tensors_of(value, depth - 1)


def live_tensors() -> Iterator[Any]:
    """Yield every tensor of this process that has a storage of its own kind."""
    import torch

    for item in gc.get_objects():
        kind = type(item)
        if not issubclass(kind, torch.Tensor) or kind.__name__ == "FakeTensor" or item.is_meta:
            continue
        with contextlib.suppress(Exception):  # subclasses without a storage
            item.untyped_storage().data_ptr()
            yield item


def shutdown_kernel() -> None:
    """End the Jupyter kernel, which gives back everything, the CUDA context included."""
    application = None
    if "IPython" in sys.modules:
        from traitlets.config import Application

        application = Application.instance() if Application.initialized() else None
    kernel = getattr(application, "kernel", None)
    if kernel is None:
        print("no Jupyter kernel here: memory returns when the program ends")  # noqa: T201
        return
    print("shutting down the kernel: all memory returns to the system")  # noqa: T201
    kernel.do_shutdown(restart=False)


def _name(process: Any) -> str:
    import psutil

    try:
        return process.name()
    except psutil.Error:
        return "ended"


def _shared_files(process: Any) -> tuple[str, ...]:
    """Return files in shared memory that carry this process's number or are mapped into it."""
    if not SHARED_MEMORY.is_dir():
        return ()
    mine = f"-{os.getpid()}-"
    found = {file.name for file in SHARED_MEMORY.iterdir() if mine in file.name}
    with contextlib.suppress(Exception):  # not every system shows its maps
        prefix = f"{SHARED_MEMORY}/"
        found |= {
            part.path.removeprefix(prefix)
            for part in process.memory_maps()
            if part.path.startswith(prefix) and Path(part.path).exists()  # not a lock's, unnamed
        }
    return tuple(sorted(found))


def _clear_notebook() -> None:
    for name in ("last_exc", "last_value", "last_traceback", "last_type"):
        if hasattr(sys, name):
            delattr(sys, name)
    if "IPython" in sys.modules:
        from IPython import get_ipython

        shell = get_ipython()
        if shell is not None:
            shell.displayhook.flush()


def empty_model(model: Any) -> None:
    """Free a model's parameters, buffers, gradients and quantisation states; the modules stay."""
    for module in model.modules():
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            if tensor is None:
                continue
            tensor.grad = None
            if getattr(tensor, "quant_state", None) is not None:
                tensor.quant_state = None
            empty_tensors([tensor])
        if getattr(module, "quant_state", None) is not None:
            module.quant_state = None


def empty_tensors(values: Iterable[Any]) -> None:
    """Free the memory of tensors, also of those in lists and tuples; they stay, empty."""
    import torch

    for value in values:
        if isinstance(value, list | tuple):
            empty_tensors(value)
        elif isinstance(value, torch.Tensor):
            for tensor in (value, value._base):  # a view keeps its base
                if tensor is not None:
                    tensor.data = torch.empty(0, dtype=tensor.dtype)


def return_to_system() -> None:
    """Give back to the system, and to a GPU's driver, what nothing holds any more."""
    for thread in threading.enumerate():
        if type(thread).__name__ == "TMonitor":  # watches tqdm's bars; the next bar starts another
            thread.exit()  # pyright: ignore[reportAttributeAccessIssue]  # tqdm's own method
    inductor = sys.modules.get("torch._inductor.async_compile")
    if inductor is not None:  # its processes wait for the next thing to compile
        inductor.shutdown_compile_workers()
    gc.collect()
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        with contextlib.suppress(AttributeError, RuntimeError):
            torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
        torch.cuda.ipc_collect()
    with contextlib.suppress(OSError, AttributeError):  # glibc only
        ctypes.CDLL("libc.so.6").malloc_trim(0)
