"""A fake card: the installed GPU packages see one of given memory, on a machine without a GPU.

``card(12, used_gib=3.6)`` gives vLLM a CUDA platform and replaces the few functions of torch that
say what a card is. vLLM then builds its real configuration, Unsloth its real engine arguments.
Nothing here runs a kernel.
"""

import atexit
import ctypes
import dataclasses
import os
import shutil
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest

GIB = 2**30
DRIVER = [
    "cuCtxGetCurrent",
    "cuCtxSetCurrent",
    "cuDeviceGetAttribute",
    "cuDevicePrimaryCtxRetain",
    "cuGetErrorString",
    "cuGetProcAddress_v2",
    "cuMemAddressFree",
    "cuMemAddressReserve",
    "cuMemCreate",
    "cuMemGetAllocationGranularity",
    "cuMemMap",
    "cuMemRelease",
    "cuMemSetAccess",
    "cuMemUnmap",
    "cuPointerGetAttribute",
    "cuTensorMapEncodeTiled",
]
"""What vLLM's libraries want of libcuda.so.1 (``nm -D --undefined-only``)."""
NO_DEVICE = 100
"""CUDA_ERROR_NO_DEVICE."""


def stub_driver():
    """Build a libcuda.so.1 whose functions find no device; load it, here and in child processes.

    vLLM inspects a model's class in a child process, which finds the library by LD_LIBRARY_PATH.
    """
    folder = Path(tempfile.mkdtemp(prefix="rloo-kit-stub-driver-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    library = folder / "libcuda.so.1"
    functions = "".join(f"int {name}(void) {{ return {NO_DEVICE}; }}\n" for name in DRIVER)
    subprocess.run(
        ["gcc", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-xc", "-", "-o", str(library)],
        input=functions,
        text=True,
        check=True,
    )
    ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    others = os.environ.get("LD_LIBRARY_PATH")
    os.environ["LD_LIBRARY_PATH"] = f"{folder}:{others}" if others else str(folder)


def has_driver():
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


# Unsloth hides a vLLM that cannot be imported: the driver comes before Unsloth. The folder's own
# conftest is the only one here (--confcutdir), as that of tests/ imports Unsloth.
COMPLETE = "unsloth" not in sys.modules and find_spec("vllm") is not None
if COMPLETE:
    os.environ["HF_HUB_OFFLINE"] = "1"
    if not has_driver():
        stub_driver()

from rloo_kit.environment import setup  # noqa: E402

setup()

import torch  # noqa: E402


class Card:
    """What the installed packages are answered about the card; ``used`` may change in a test.

    Args:
        total_gib: Its memory.
        used_gib: Taken now, by whatever runs on it.
        capability: Its compute capability.
        name: Its name.
    """

    def __init__(self, total_gib, used_gib, capability, name):
        self.total = int(total_gib * GIB)
        self.used = int(used_gib * GIB)
        self.capability = capability
        self.name = name

    @property
    def free(self):
        return self.total - self.used

    def memory(self, device=None):
        return self.free, self.total

    def properties(self, device=None):
        """Return what torch.cuda.get_device_properties does: fields of the installed class."""
        major, minor = self.capability
        fields = {
            "name": self.name,
            "total_memory": self.total,
            "major": major,
            "minor": minor,
            "multi_processor_count": 46,
            "warp_size": 32,
            "max_threads_per_multi_processor": 1536,
            "regs_per_multiprocessor": 65536,
            "shared_memory_per_block_optin": 101376,
            "shared_memory_per_multiprocessor": 102400,
            "is_integrated": 0,
            "gcnArchName": f"sm_{major}{minor}",
        }
        missing = [name for name in fields if not hasattr(torch._C._CudaDeviceProperties, name)]
        assert not missing, f"torch's class has no {missing}"
        return SimpleNamespace(**fields)

    def snapshot(self):
        """Return what vLLM's worker measures when it starts: a snapshot of the installed class."""
        from vllm.utils.mem_utils import MemorySnapshot

        return MemorySnapshot(device="cuda:0")

    def start(self, engine_config):
        """Ask vLLM for the memory of an engine as its GPU worker does.

        Args:
            engine_config: As ``create_engine_config`` returned it.

        Raises:
            ValueError: vLLM's own: the card has not as much free memory as the engine asks for.
        """
        from vllm.v1.worker.utils import request_memory

        return request_memory(self.snapshot(), engine_config.cache_config)


@pytest.fixture
def card(monkeypatch):
    """Return a function that puts a card into this machine: ``card(12, used_gib=3.6)``."""

    if not COMPLETE:
        pytest.fail("the GPU's packages are missing or out of order: make test-gpu-contract")

    def put(total_gib, used_gib=0, capability=(8, 9), name="NVIDIA GeForce RTX 4070"):
        made = Card(total_gib, used_gib, capability, name)
        _show_torch(monkeypatch, made)
        _show_vllm(monkeypatch, made)
        _show_unsloth(monkeypatch)
        _show_the_kit(monkeypatch)
        return made

    return put


def _show_torch(monkeypatch, card):
    answers = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "mem_get_info": card.memory,
        "get_device_capability": lambda device=None: card.capability,
        "get_device_properties": card.properties,
        "get_device_name": lambda device=None: card.name,
        "is_bf16_supported": lambda including_emulation=True: card.capability >= (8, 0),
        "synchronize": lambda device=None: None,
        "empty_cache": lambda: None,
    }
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, answer)
    monkeypatch.setattr(torch.accelerator, "get_memory_info", card.memory)
    monkeypatch.setattr(torch.accelerator, "memory_stats", lambda device=None: {})
    monkeypatch.setattr(torch.accelerator, "memory_reserved", lambda device=None: card.used)


def _show_vllm(monkeypatch, card):
    import vllm.platforms
    from vllm.platforms.cuda import NonNvmlCudaPlatform
    from vllm.platforms.interface import DeviceCapability

    class FakeCard(NonNvmlCudaPlatform):
        """vLLM's platform for CUDA; it asks torch, but for what it keeps from card to card."""

        @classmethod
        def get_device_capability(cls, device_id=0):
            return DeviceCapability(*card.capability)

    monkeypatch.setattr(vllm.platforms, "_current_platform", FakeCard())
    # modules of vLLM that were imported before keep the platform under a name of their own
    for name, module in list(sys.modules.items()):
        if name.startswith("vllm.") and "current_platform" in vars(module):
            monkeypatch.setattr(module, "current_platform", vllm.platforms._current_platform)


def _show_unsloth(monkeypatch):
    """Turn Unsloth's branches to CUDA: it looked for a card when it was imported."""
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] in ("unsloth", "unsloth_zoo"):
            for variable in ("DEVICE_TYPE", "DEVICE_TYPE_TORCH"):
                if vars(module).get(variable) == "cpu":
                    monkeypatch.setattr(module, variable, "cuda")


def _show_the_kit(monkeypatch):
    from rloo_kit import environment
    from rloo_kit.hardware import detect_hardware

    found = dataclasses.replace(setup(), hardware=detect_hardware())
    monkeypatch.setattr(environment, "_environment", found)


@pytest.fixture
def engine_config():
    """Return a function that builds vLLM's real engine configuration from arguments of ``LLM``.

    ``LLM`` hands them to ``EngineArgs`` in the same way; nothing starts.
    """

    def build(**arguments):
        from vllm import EngineArgs

        return EngineArgs(**arguments).create_engine_config()

    return build
