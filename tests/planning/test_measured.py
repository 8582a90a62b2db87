"""The plan against what a driver measured: no measured peak is above the planned one."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from jobs import USUAL
from transformers import Qwen3Config

from rloo_kit.config.run_file import PROJECTIONS
from rloo_kit.machine.hardware import find_card
from rloo_kit.models.shape import read_shape, shape_of_config
from rloo_kit.planning.memory import Job, plan_memory, planned_engine

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
# Qwen3 of almost no size
TOY = {
    "vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64,
    "tie_word_embeddings": True, "max_position_embeddings": 40960,
}  # fmt: skip
H100 = json.loads((RESULTS / "gpu_acceptance_nvidia-h100-80gb-hbm3.json").read_text())
# Trainings with vLLM on an H100 that was limited to 8 and 12 GB
MEASURED = {
    part["name"]: part["data"] for part in H100["parts"] if part["family"] == "cards"
}  # fmt: skip


def job_of(name, data):
    """The job that was measured."""
    model = data["model"].removesuffix("-bnb-4bit").removesuffix("-bf16")
    shape = shape_of_config(Qwen3Config(**TOY), model) if model == "toy" else read_shape(model)
    in_4bit = "4bit" in data["model"]
    own = "own copy" in name
    rows, prompt, completion = (8, 64, 32) if model == "toy" else (16, 256, 512)
    room = find_card(f"{data['card']}GB").usable
    measured = {
        "in_4bit": in_4bit, "optimizer": "adamw_8bit" if in_4bit else "adamw_torch",
        "checkpointing": "plain" if own else "unsloth", "engine": "vllm" if own else "shared",
        "rows": rows, "at_once": rows, "step_rows": rows, "prompt": prompt,
        "completion": completion, "max_length": prompt + completion,
    }  # fmt: skip
    return Job(
        shape=replace(shape, packed=in_4bit),
        on_gpu=True,
        room=room,
        card=room,
        targets=PROJECTIONS,
        adapted_layers=shape.num_layers,
        **USUAL | measured,
    )


@pytest.mark.parametrize("name", MEASURED)
def test_no_measured_peak_is_above_the_plan(name):
    assert len(MEASURED) == 6
    data = MEASURED[name]
    job = job_of(name, data)
    measured = data["run_1"]["peak"]
    assert planned_engine(job).share(job.room) == pytest.approx(data["run_1"]["share"], abs=0.002)
    assert measured <= plan_memory(job).peak_bytes <= 1.3 * measured
