"""Give memory back: drop model, optimizer and caches, measure, and end a notebook's kernel."""

import contextlib
import ctypes
import gc
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MIB = 1024**2


@dataclass(frozen=True)
class MemoryUse:
    """Memory of this process at one moment, bytes."""

    resident: int
    gpu_allocated: int = 0
    gpu_reserved: int = 0


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
        """GPU memory given back to the driver."""
        return self.before.gpu_reserved - self.after.gpu_reserved

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
        return text


def measure() -> MemoryUse:
    """Return what this process holds now."""
    import psutil

    resident = psutil.Process().memory_info().rss
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return MemoryUse(resident)
    return MemoryUse(resident, torch.cuda.memory_allocated(), torch.cuda.memory_reserved())


def take_peak() -> int:
    """Return the most bytes held since the last call, and begin anew.

    On a GPU what torch allocated there; else the resident memory of this process, whose peak only
    Linux can begin anew (elsewhere it is the peak since the process began).
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


def release(*things: Any) -> Released:
    """Give back the memory of trainers and models, also while variables still point at them.

    Weights, gradients, optimizer states and buffers are replaced by empty tensors, so the objects
    stay valid Python and can do nothing any more. Safe to call twice. Rewards with a ``release``
    method (a reward model) are released too.

    Args:
        *things: Trainers, models, or anything with a ``release`` method.
    """
    before = measure()
    for thing in things:
        if hasattr(thing, "reward_funcs"):
            _release_trainer(thing)
        elif hasattr(thing, "parameters"):
            _empty_model(thing)
        elif hasattr(thing, "release"):
            thing.release()
    _return_to_system()
    return Released(before, measure())


def shutdown_kernel() -> None:
    """End the Jupyter kernel, which gives back everything, the CUDA context included.

    Outside of a notebook it says so and does nothing.
    """
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


def _release_trainer(trainer: Any) -> None:
    for model in (trainer.model, getattr(trainer, "ref_model", None)):
        if model is not None:
            _empty_model(model)
    for reward in trainer.reward_funcs:
        if hasattr(reward, "release"):
            reward.release()
        elif hasattr(reward, "parameters"):
            _empty_model(reward)
    if trainer.optimizer is not None:
        inner = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
        inner.state.clear()
        inner.param_groups.clear()
    handler = trainer.callback_handler
    for owner, names in (
        (
            trainer,
            (
                "model",
                "model_wrapped",
                "ref_model",
                "optimizer",
                "lr_scheduler",
                "_buffered_inputs",
                "_learner",
                "_window",
            ),
        ),
        (handler, ("model", "optimizer", "lr_scheduler", "train_dataloader", "eval_dataloader")),
    ):
        for name in names:
            if hasattr(owner, name):
                setattr(owner, name, None)
    trainer.accelerator.free_memory()


def _empty_model(model: Any) -> None:
    import torch

    for module in model.modules():
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            if tensor is None:
                continue
            tensor.grad = None
            if getattr(tensor, "quant_state", None) is not None:
                tensor.quant_state = None
            tensor.data = torch.empty(0, dtype=tensor.dtype)
        if getattr(module, "quant_state", None) is not None:
            module.quant_state = None


def _return_to_system() -> None:
    gc.collect()
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.ipc_collect()
    with contextlib.suppress(OSError, AttributeError):  # glibc only
        ctypes.CDLL("libc.so.6").malloc_trim(0)
