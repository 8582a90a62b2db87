"""What a card must have done right once. Every test skips, by name, what is missing here.

``RLOO_KIT_GPU_TESTS_ON_CPU=1`` runs the same tests on a CPU, with what has no meaning there left
out: so that no slip of the pen waits for a card.
"""

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

os.environ["HF_HUB_OFFLINE"] = "1"  # nothing is downloaded

HERE = Path(__file__).resolve().parent
SCRIPTS = HERE.parent / "scripts"
ON_CPU = os.environ.get("RLOO_KIT_GPU_TESTS_ON_CPU") == "1"
sys.path.insert(0, str(HERE))
KIT = ("transformers", "trl", "peft", "accelerate", "datasets", "dotenv", "yaml", "rich")


@functools.cache
def why_no_device():
    """Return why nothing here can run, or None."""
    try:
        import torch
    except ImportError:
        return "torch is not installed"
    if not torch.cuda.is_available() and not ON_CPU:
        return "no GPU here (torch.cuda.is_available() is false)"
    return None


@pytest.fixture(scope="session")
def device():
    """``cuda``, or ``cpu`` where that was asked for."""
    reason = why_no_device()
    if reason:
        pytest.skip(reason)
    import torch

    small = os.environ.get("RLOO_KIT_GPU_CARD")
    if small and torch.cuda.is_available():  # other processes on the card do not disturb then
        from small_card import SmallCard

        SmallCard(int(small), limited=False)
    return "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(scope="session")
def kit(device):
    """rloo_kit, set up."""
    from policies import need

    need(*KIT)
    import rloo_kit as rk

    rk.setup()
    return rk


@pytest.fixture(scope="session")
def four_bit(kit):
    """Skip without bitsandbytes."""
    from policies import need

    need("bitsandbytes")


@pytest.fixture(scope="session")
def vllm(kit):
    """Skip without vLLM."""
    from rloo_kit.machine.hardware import why_not_vllm

    reason = why_not_vllm()
    if reason:
        pytest.skip(reason)


@pytest.fixture
def policy(kit):
    """Return a function that gives the embedded model with an adapter that does something."""
    from policies import make_policy

    with kit.session():
        yield functools.partial(make_policy, kit)


@pytest.fixture
def make_trainer(kit, tmp_path):
    """Return a function that gives a trainer of the quickstart task."""

    def make(model, tokenizer, *, reward="accuracy", engine=None, folder="out", **settings):
        quick = {
            "max_steps": 3,
            "per_device_train_batch_size": 64,
            "num_generations": 8,
            "max_completion_length": 48,
            "learning_rate": 1e-3,
            "beta": 0.02,
            "generation": "transformers" if engine is None else "auto",
            "save_strategy": "no",
            "dry_run": False,
        }
        return kit.LeaveOneOutTrainer(
            model=model,
            processing_class=tokenizer,
            train_dataset=kit.load_prompts("arithmetic", num_prompts=64),
            reward_funcs=reward,
            args=kit.LeaveOneOutConfig(str(tmp_path / folder), **{**quick, **settings}),
            engine=engine,
        )

    return make


@pytest.fixture
def plain_peft(tmp_path):
    """Return a function that runs ``plain_peft.py``, in a process that Unsloth has not patched."""

    def run(**order):
        order_file = tmp_path / "order.json"
        answer = tmp_path / "answer.safetensors"
        order_file.write_text(json.dumps(order, default=str))
        done = subprocess.run(
            [sys.executable, str(SCRIPTS / "plain_peft.py"), str(order_file), str(answer)],
            capture_output=True, text=True, timeout=300, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-3000:]
        from safetensors.torch import load_file

        return load_file(answer)

    return run
