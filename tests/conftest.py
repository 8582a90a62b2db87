"""Start the libraries in the kit's order before the first test module that needs one of them."""

import gc
import os
import signal
from collections import Counter
from functools import cache

import pytest

os.environ["HF_HUB_OFFLINE"] = "1"  # before anything reads it
if hasattr(signal, "SIGHUP"):  # programs that tests start would ignore it too, as after `nohup`
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

PURE = {
    "text",
    "report",
    "config",
    "scoring",
    "data",
    "rewards",
    "test_layers.py",
    "test_packaging.py",
    "test_other_systems.py",
    "test_output_folder.py",
}
"""Packages and files whose tests import none of the heavy libraries: they start in a second."""

SECONDS = {"notebook": 100, "faults": 4, "tracker": 4, "long": 2}
"""What a test of this marker takes, roughly."""


@cache
def start_libraries():
    from rloo_kit.machine.environment import setup

    setup()
    # Every training collects garbage several times: what the libraries made need not be walked.
    gc.collect()
    gc.freeze()


def pytest_collectstart(collector):
    """Import Unsloth and TRL in order before a test module is imported."""
    if isinstance(collector, pytest.Module):
        place = collector.path.relative_to(collector.config.rootpath / "tests").parts[0]
        if place not in PURE:
            start_libraries()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    """Long tests train, in pure packages too."""
    if item.get_closest_marker("long"):
        start_libraries()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    # Files that take long start first, so that no worker ends with one of them alone.
    seconds: Counter = Counter()
    for item in items:
        seconds[item.path] += max(
            (cost for name, cost in SECONDS.items() if item.get_closest_marker(name)), default=0
        )
    items.sort(key=lambda item: -seconds[item.path])
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if not on_gpu or os.environ.get("RLOO_KIT_GPU_TESTS_ON_CPU") == "1":
        return
    import torch

    if not torch.cuda.is_available():
        for item in on_gpu:
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))


@pytest.fixture(scope="session")
def packed_thinker(tmp_path_factory):
    """Folder of tiny-thinker in 4 bit on disk, as the base of every GPU run file is."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig

    from rloo_kit.models.shape import TINY_THINKER

    folder = tmp_path_factory.mktemp("packed") / "tiny-thinker-bnb-4bit"
    packing = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_compute_dtype=torch.bfloat16,
        llm_int8_skip_modules=["lm_head"],  # Unsloth's checkpoints name it too
    )
    model = AutoModelForCausalLM.from_pretrained(
        TINY_THINKER, quantization_config=packing, dtype=torch.bfloat16
    )
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(TINY_THINKER).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def save_adapter():
    """Return what saves an adapter of the embedded model that changes its answers."""
    import torch

    import rloo_kit as rk

    def save(folder, *, std, seed=0, r=8):
        with rk.session():
            model, tokenizer = rk.load_model("tiny-thinker", max_seq_length=128)
            model = rk.attach_lora(model, r=r)
            torch.manual_seed(seed)
            for name, values in model.named_parameters():
                if "lora_B" in name:
                    torch.nn.init.normal_(values, std=std)
            return rk.save_adapter(model, tokenizer, folder)

    return save
