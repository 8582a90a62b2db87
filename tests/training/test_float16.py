"""float16, for cards without bf16 (T4, RTX 20): the same code on a CPU."""

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest

import rloo_kit as rk
from rloo_kit.training import supervised

SCRIPT = Path(__file__).parents[1] / "scripts" / "float16.py"


@pytest.mark.long
def test_steps_in_float16(tmp_path):
    command = [sys.executable, SCRIPT, str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    plain, overflowing, nothing_to_learn = json.loads(done.stdout.splitlines()[-1])
    for one in (plain, overflowing, nothing_to_learn):
        assert (one["model"], one["pass"]) == ("torch.float16", "torch.float16")
        assert one["adapter"] == ["torch.float32"]
    assert (plain["skipped"], plain["moved"], plain["scale"]) == (0, True, 2.0**10)
    # scaled gradients would have norms of hundreds
    assert all(0 < norm < 20 for norm in plain["norms"])
    # a scale that overflows: no step, and half of the scale for the next one
    assert (overflowing["skipped"], overflowing["moved"]) == (2, False)
    assert overflowing["scale"] == 2.0**58
    assert overflowing["norms"] == [None, None]  # NaN in the log
    assert (nothing_to_learn["skipped"], nothing_to_learn["moved"]) == (0, False)


@dataclass(init=False)
class Given(SimpleNamespace):
    """Arguments of a trainer, as they were given."""


@pytest.mark.parametrize(("usual", "asked"), [("bf16", "fp16"), ("fp16", "bf16")])
def test_a_supervised_training_uses_the_precision_asked_for(monkeypatch, usual, asked):
    hardware = SimpleNamespace(device="cuda", mixed_precision=usual)
    monkeypatch.setattr(supervised, "setup", lambda: SimpleNamespace(hardware=hardware))
    made = supervised.make_arguments(Given, "a model", {}, {asked: True})
    assert {"bf16": made.bf16, "fp16": made.fp16} == {usual: False, asked: True}


def test_an_unknown_precision_is_named():
    with pytest.raises(rk.ConfigError, match="precision is 'half', must be one of bf16, fp16"):
        rk.load_model("tiny-thinker", precision="half")


@pytest.mark.slow
def test_the_embedded_model_learns_in_float16(tmp_path):
    """Five minutes: a CPU computes float16 slowly."""
    command = [
        sys.executable, "-m", "rloo_kit", "train", "quickstart", "--set", "trainer.fp16=true",
        "--set", "trainer.bf16=false", "--set", "model.backend=transformers",
        "--set", f"output_dir={tmp_path}/run",
    ]  # fmt: skip
    subprocess.run(command, check=True)
    scores = json.loads((tmp_path / "run" / "evaluation.json").read_text())
    assert scores["before"]["rewards"]["accuracy"] < 0.7
    assert scores["after"]["rewards"]["accuracy"] > 0.95
