"""Run files of Qwen3's shapes with random weights, whose completions have full length."""

import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
TOY = os.environ.get("RLOO_KIT_GPU_TOY") == "1"
REWARD = '''"""Scores that differ in every group, of whatever text."""

import zlib


def lottery(completions, **_):
    return [zlib.crc32(str(c).encode()) % 100 / 100 for c in completions]
'''


def model_folder(name, *, load_in_4bit, fallback):
    """Folder of a model: the toy in a rehearsal. Kept from call to call."""
    import gpu_models
    import torch

    root = Path(os.environ.get("RLOO_KIT_GPU_MODELS", fallback))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return gpu_models.model_folder(
        root, "toy" if TOY else name, load_in_4bit=load_in_4bit, device=device
    )


def run_file(folder, model, *, load_in_4bit, **trainer):
    """Write a run and its prompts; return its path."""
    import yaml

    rows, prompt, length = (8, 64, 32) if TOY else (16, 256, 512)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "rewards_here.py").write_text(REWARD)
    texts = [f"{number} " + "why " * (prompt // 4) for number in range(64)]
    lines = [json.dumps({"prompt": text[: prompt - 32]}) for text in texts]
    (folder / "prompts.jsonl").write_text("\n".join(lines) + "\n")
    settings = {
        "max_steps": 3,
        "per_device_train_batch_size": rows,
        "num_generations": 4,
        "max_completion_length": length,
        "beta": 0.02,
        "learning_rate": 1e-5,
        "optim": "adamw_8bit" if load_in_4bit and not TOY else "adamw_torch",
        "doctor": False,
    }
    content = {
        "model": {
            "name": str(model), "max_seq_length": prompt + length, "load_in_4bit": load_in_4bit
        },
        "lora": {"r": 16, "lora_alpha": 16},
        "data": {"prompts": "prompts.jsonl", "held_out": 0},
        "rewards": ["rewards_here.py:lottery"],
        "trainer": settings | trainer,
        "output_dir": str(folder / "run"),
    }  # fmt: skip
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(content, sort_keys=False))
    return path


def metrics_of(folder):
    """The rows of a run's metrics that have a reward."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if "reward" in row]
