"""A fake card: the installed GPU packages see one of given memory, on a machine without a GPU.

``card(12, used_gib=3.6)`` gives vLLM a CUDA platform and replaces the few functions of torch that
say what a card is. vLLM then builds its real configuration, Unsloth its real engine arguments.
Nothing here runs a kernel.
"""

import atexit
import contextlib
import ctypes
import dataclasses
import functools
import inspect
import os
import shutil
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from fake_driver import build_driver

GIB = 2**30


def stub_driver():
    """Build a libcuda.so.1 without a device; load it, here and in child processes.

    vLLM inspects a model's class in a child process, which finds the library by LD_LIBRARY_PATH.
    """
    folder = Path(tempfile.mkdtemp(prefix="rloo-kit-stub-driver-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    ctypes.CDLL(str(build_driver(folder)), mode=ctypes.RTLD_GLOBAL)
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


@functools.cache
def start_libraries():
    """In the processes that run tests alone: pytest-xdist's own has no need of them."""
    from rloo_kit.machine.environment import setup

    setup()


def pytest_collectstart(collector):
    """Import Unsloth and TRL in order before a test module is imported."""
    start_libraries()


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
        import torch

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

    def request_memory(self, cache_config):
        """Ask vLLM for the memory of an engine as its GPU worker does when it starts.

        Raises:
            ValueError: vLLM's own: the card has not as much free memory as the engine asks for.
        """
        from vllm.utils.mem_utils import MemorySnapshot
        from vllm.v1.worker.utils import request_memory

        return request_memory(MemorySnapshot(device="cuda:0"), cache_config)


# The card that vLLM's platform answers for
shown = Card(24, 0, (8, 9), "NVIDIA GeForce RTX 4090")


def _put_platform():
    """Give vLLM its platform for CUDA, before more of vLLM is imported: modules ask it then."""
    import vllm.platforms
    from vllm.platforms.cuda import NonNvmlCudaPlatform
    from vllm.platforms.interface import DeviceCapability

    class Platform(NonNvmlCudaPlatform):
        @classmethod
        def get_device_capability(cls, device_id=0):
            return DeviceCapability(*shown.capability)

        @classmethod
        def get_device_name(cls, device_id=0):
            return shown.name

        @classmethod
        def get_device_total_memory(cls, device_id=0):
            return shown.total

    vllm.platforms._current_platform = Platform()
    for name, module in list(sys.modules.items()):
        if name.startswith("vllm.") and "current_platform" in getattr(module, "__dict__", {}):
            module.current_platform = vllm.platforms._current_platform


if COMPLETE:
    _put_platform()
    # as Unsloth's own import does on a GPU: it patches TRL's trainers, before the kit's is made
    import unsloth.models.loader  # noqa: F401


@pytest.fixture
def card(monkeypatch):
    """Return a function that puts a card into this machine: ``card(12, used_gib=3.6)``.

    ``patches``: a MonkeyPatch that takes it out again before the test ends.
    """

    if not COMPLETE:
        pytest.fail("the GPU's packages are missing or out of order: make test-gpu-contract")

    def put(
        total_gib,
        used_gib=0,
        capability=(8, 9),
        name="NVIDIA GeForce RTX 4070",
        patches=monkeypatch,
    ):
        made = Card(total_gib, used_gib, capability, name)
        _show_torch(patches, made)
        patches.setattr(sys.modules[__name__], "shown", made)
        _show_unsloth(patches)
        _show_the_kit(patches)
        return made

    return put


def _show_torch(monkeypatch, card):
    import torch

    answers = {
        "is_available": True,
        "device_count": 1,
        "current_device": 0,
        "get_device_capability": card.capability,
        "get_device_name": card.name,
        "is_bf16_supported": card.capability >= (8, 0),
        **dict.fromkeys(("synchronize", "empty_cache", "ipc_collect", "reset_peak_memory_stats")),
    }
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, said=answer, **__: said)
    for name in ("max_memory_allocated", "memory_allocated", "memory_reserved"):
        monkeypatch.setattr(torch.cuda, name, lambda device=None: card.used)
    monkeypatch.setattr(torch.cuda, "mem_get_info", card.memory)
    monkeypatch.setattr(torch.cuda, "get_device_properties", card.properties)
    monkeypatch.setattr(torch.accelerator, "get_memory_info", card.memory)
    monkeypatch.setattr(torch.accelerator, "memory_stats", lambda device=None: {})
    monkeypatch.setattr(torch.accelerator, "memory_reserved", lambda device=None: card.used)


def _show_unsloth(monkeypatch):
    """Turn Unsloth's branches to CUDA: it looked for a card when it was imported."""
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] in ("unsloth", "unsloth_zoo"):
            for variable in ("DEVICE_TYPE", "DEVICE_TYPE_TORCH"):
                if vars(module).get(variable) == "cpu":
                    monkeypatch.setattr(module, variable, "cuda")
    from unsloth_zoo import vllm_utils

    vllm_utils._merged_rollout_auto_platform.cache_clear()


def _show_the_kit(monkeypatch):
    from rloo_kit.machine import environment
    from rloo_kit.machine.hardware import detect_hardware

    found = dataclasses.replace(environment.setup(), hardware=detect_hardware())
    monkeypatch.setattr(environment, "_environment", found)


@pytest.fixture
def vllm_starts(card, monkeypatch):
    """Return a function like ``card``; ``vllm.LLM`` then starts its real engine, without kernels.

    ``llm.llm_engine.model_executor`` is a ``NoKernels``: its ``calls`` are what the GPU worker was
    asked, and its start is vLLM's own memory check on the card.
    """

    def put(*arguments, patches=monkeypatch, **settings):
        made = card(*arguments, patches=patches, **settings)
        import torch
        from no_kernels import NoKernels
        from transformers import PreTrainedModel
        from vllm.v1.executor.abstract import Executor

        on_the_card = property(lambda self: torch.device("cuda", 0))
        patches.setattr(PreTrainedModel, "device", on_the_card)
        patches.setattr(NoKernels, "card", made)
        patches.setattr(Executor, "get_class", staticmethod(lambda config: NoKernels))

    return put


@pytest.fixture
def policy():
    """Return a function that loads the embedded model with an adapter; call it before ``card``.

    Its weights are real, and in the host's memory.
    """
    import torch

    import rloo_kit as rk

    def make(*, four_bit=False):
        given = {"max_seq_length": 128, "dtype": torch.bfloat16}  # a CPU may train in float32
        model, tokenizer = rk.load_model("tiny-thinker", load_in_4bit=four_bit, **given)
        model = rk.attach_lora(model, r=16)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.2)
        return model, tokenizer

    with rk.session():
        yield make


@pytest.fixture
def large_policy(tmp_path):
    """Return a function that gives a 4-bit PEFT model of a size, without memory (device meta).

    ``model.config._name_or_path`` is a folder with its config, as vLLM reads one.
    """
    import torch
    from bitsandbytes.nn import Linear4bit
    from peft import LoraConfig, get_peft_model
    from published import published_config
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig
    from transformers.integrations.bitsandbytes import replace_with_bnb_linear

    from rloo_kit.config.run_file import PROJECTIONS

    def make(name):
        config = published_config(name)
        config.save_pretrained(tmp_path)
        settings = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
        lora = LoraConfig(task_type="CAUSAL_LM", r=16, target_modules=list(PROJECTIONS))
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
            model = replace_with_bnb_linear(
                model, modules_to_not_convert=["lm_head"], quantization_config=settings
            )
            for layer in (m for m in model.modules() if isinstance(m, Linear4bit)):
                packed = torch.empty(layer.weight.numel() // 2, 1, dtype=torch.uint8)
                layer.weight = torch.nn.Parameter(packed, requires_grad=False)
            model.config._name_or_path = str(tmp_path)
            return get_peft_model(model, lora)

    return make


@pytest.fixture
def share(policy, vllm_starts, tmp_path, monkeypatch):
    """Return a function that loads the embedded model with Unsloth's engine, as its loader does.

    ``model, tokenizer = share(four_bit=True)``. The model has what Unsloth gives it:
    ``vllm_engine``, ``load_lora``. Folding the adapter into the weights is a kernel: left out.
    """
    from unsloth.models._utils import patch_peft_fast_inference
    from unsloth_zoo import vllm_utils

    monkeypatch.chdir(tmp_path)

    def start(*, four_bit, patches=monkeypatch, **settings):
        model, tokenizer = policy(four_bit=four_bit)
        vllm_starts(12, patches=patches)
        patches.setenv("VLLM_LOGGING_LEVEL", "ERROR")
        vllm_utils.patch_vllm(debug=False)
        patches.setattr(vllm_utils, "_merged_rollout_use_exact", lambda targets: True)
        patches.setattr(vllm_utils, "merged_rollout", contextlib.nullcontext)
        base = model.get_base_model()
        if not four_bit:  # the model that vLLM has on a card, whose weights are the trainer's
            patches.setattr(vllm_utils, "_get_vllm_lora_model", lambda *_: base)
        asked = {"gpu_memory_utilization": 0.5, "max_seq_length": 128, "max_num_seqs": 16}
        asked |= {"max_lora_rank": 16, "use_bitsandbytes": four_bit, **settings}
        inspect.signature(vllm_utils.load_vllm).bind(**asked)
        llm = vllm_utils.load_vllm(base.config._name_or_path, base.config, **asked)
        base.vllm_engine = llm
        base.fast_generate = llm.generate
        base.fast_generate_batches = functools.partial(vllm_utils.generate_batches, llm)
        patch_peft_fast_inference(model)
        return model, tokenizer

    return start


@pytest.fixture
def engine_of():
    """Return a function that gives the kit's engine for a model; it ends with the test."""
    from rloo_kit.sampling.vllm_inprocess import VllmEngine

    started = []

    def start(model, **settings):
        settings = {"max_length": 128, "num_sequences": 16, "sleeps": True, **settings}
        started.append(VllmEngine(model, **settings))
        return started[-1]

    yield start
    for engine in started:
        engine.close()


@pytest.fixture
def model(policy):
    """The embedded model with an adapter, without an engine."""
    return policy()[0]


@pytest.fixture
def engine(model, vllm_starts, engine_of):
    """The kit's own engine beside ``model``."""
    vllm_starts(141)
    return engine_of(model)


@pytest.fixture
def suffix_decoding(tmp_path, monkeypatch):
    """Let vLLM find the package that guesses tokens by suffixes."""
    (tmp_path / "arctic_inference").mkdir()
    (tmp_path / "arctic_inference" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
