"""DeepSpeed's ZeRO-3 in two processes: samples, trains, sends and saves a whole adapter."""

import importlib.util
import json
import os
import subprocess
import sys

import pytest
import torch
import yaml
from page_commands import FEW, ROOT
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from transformers.integrations import HfDeepSpeedConfig

from rloo_kit.config.run_file import read_run_file
from rloo_kit.errors import ConfigError
from rloo_kit.models.loading import TINY_THINKER, load_model

SPEC = importlib.util.spec_from_file_location(
    "servers_made_up", ROOT / "tests/sampling/test_vllm_server.py"
)
made_up = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(made_up)

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None,
    reason="DeepSpeed is not installed: uv pip install --no-build-isolation deepspeed",
)
SETTINGS = [
    *FEW[1::2],
    "output_dir=runs/mine",
    "model.backend=transformers",
    "model.load_in_4bit=false",
    "model.max_seq_length=64",
    "trainer.max_completion_length=24",
    "lora.r=4",
    "rewards=['mine.py:lottery']",
]
LOTTERY = """
import zlib

def lottery(completions, **_):
    return [zlib.crc32(c[-1]["content"].encode()) % 8 / 8 for c in completions]
"""


def run_file(*more):
    return yaml.safe_dump(read_run_file("quickstart", [*SETTINGS, *more]).as_dict())


def train(folder, *more, divide_all=False, arguments=("mine.yaml",)):
    """Start ``rloo-kit train`` with the shipped file, or one that leaves no parameter whole."""
    (folder / "mine.yaml").write_text(run_file(*more))
    (folder / "mine.py").write_text(LOTTERY)
    file = ROOT / "examples/accelerate/deepspeed_zero3.yaml"
    if divide_all:
        file = every_parameter_divided(folder, yaml.safe_load(file.read_text()))
    return subprocess.run(
        [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(file),
         "-m", "rloo_kit", "train", *arguments],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"},
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip


def every_parameter_divided(folder, settings):
    """Write accelerate's file again, with the limit below which DeepSpeed divides nothing at 0."""
    batch = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0}
    content = {**dict.fromkeys(batch, "auto"), "bf16": {"enabled": "auto"}}
    (folder / "zero3.json").write_text(json.dumps({**content, "zero_optimization": zero}))
    settings["deepspeed_config"] = {
        "deepspeed_config_file": str(folder / "zero3.json"),
        "zero3_init_flag": True,
    }
    (folder / "zero3.yaml").write_text(yaml.safe_dump(settings))
    return folder / "zero3.yaml"


def check_adapter(folder):
    """Return the adapter's tensors: whole, trained, and taken by plain PEFT."""
    tensors = load_file(folder / "runs/mine/adapter/adapter_model.safetensors")
    assert all(tensor.numel() for tensor in tensors.values())
    assert any(tensor.any() for name, tensor in tensors.items() if "lora_B" in name)
    base = AutoModelForCausalLM.from_pretrained(TINY_THINKER, dtype=torch.float32)
    plain = PeftModel.from_pretrained(base, folder / "runs/mine/adapter")
    own = {name for name, _ in plain.named_parameters() if "lora_" in name}
    assert {name.replace(".default", "") for name in own} == set(tensors)
    return tensors


@pytest.mark.parametrize("divide_all", [False, True], ids=["shipped_file", "every_matrix"])
def test_zero3_trains_and_saves_a_whole_adapter(tmp_path, divide_all):
    done = train(tmp_path, divide_all=divide_all)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("step 1/1") == 1
    assert "after:  accuracy" in done.stdout
    check_adapter(tmp_path)


def test_unsloth_is_refused_under_zero3():
    stage = HfDeepSpeedConfig({"zero_optimization": {"stage": 3}})  # on as long as it is held
    assert stage.is_zero3()
    with pytest.raises(ConfigError, match=r"Unsloth cannot load .* set model.backend to trans"):
        load_model("tiny-thinker", backend="unsloth")


def test_a_run_of_zero3_is_not_resumed(tmp_path):
    (tmp_path / "runs/mine").mkdir(parents=True)
    (tmp_path / "runs/mine/run.yaml").write_text(run_file())
    done = train(tmp_path, arguments=("runs/mine", "--resume"))
    assert done.returncode != 0
    assert "a run whose weights DeepSpeed shards cannot be resumed: begin a new" in done.stderr


def complete(content):
    """Answer as vLLM does, with tokens of the model's vocabulary."""
    choices = [
        {"index": n, "token_ids": [5 + n, 6], "logprobs": {"token_logprobs": [-0.5, -1.0]}}
        for n in range(content["n"])
    ]
    return 200, json.dumps({"choices": choices})


def test_zero3_sends_its_whole_adapter_to_a_server(tmp_path):
    arrived = []

    def load(content):
        vllm.adapters[content["lora_name"]] = None
        arrived.append(load_file(f"{content['lora_path']}/adapter_model.safetensors"))
        return 200, "Success"

    with made_up.serving(v1__completions=complete, v1__load_lora_adapter=load) as vllm:
        done = train(
            tmp_path,
            "trainer.generation=server",
            f"trainer.vllm_server_base_url={vllm.url}",
            divide_all=True,
        )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "canary is off: it needs whole weights, and DeepSpeed divides them" in done.stderr
    saved = check_adapter(tmp_path)
    assert len(arrived) == 3  # before, for the step, after
    assert {name: tuple(t.shape) for name, t in arrived[0].items()} == {
        name: tuple(t.shape) for name, t in saved.items()
    }
    for name, tensor in arrived[-1].items():
        torch.testing.assert_close(tensor, saved[name].to(tensor.dtype), rtol=0, atol=0)
