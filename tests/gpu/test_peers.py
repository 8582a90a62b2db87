"""The whole step against TRL's RLOO with vLLM colocate and Unsloth's GRPO: A B C, and again."""

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
from runs_here import TOY

pytestmark = pytest.mark.gpu
HERE = Path(__file__).parent
PROGRAM = HERE.parents[1] / "benchmarks" / "gpu_peers.py"
SMALL = ["--geometry", "toy", "--rows", "8", "--length", "8", "--steps", "2"]


@pytest.mark.parametrize("turn", ["first", "second"])
def test_whole_step_of_three_trainers(turn, device, tmp_path, record_property):
    models = os.environ.get("RLOO_KIT_GPU_MODELS", str(tmp_path))
    paths = [str(HERE), str(PROGRAM.parent), os.environ.get("PYTHONPATH", "")]
    variables = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    medians = {}
    faults = []
    for arm in ("kit", "trl-rloo", "unsloth-grpo"):
        answer = tmp_path / f"{arm}.json"
        command = [sys.executable, str(PROGRAM), arm, "--models", models, "--answer", str(answer)]
        done = subprocess.run(
            command + (SMALL if TOY else []), env=variables, cwd=tmp_path,
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        if done.returncode:
            lines = [line for line in done.stderr.splitlines() if "Error" in line]
            faults.append(f"{arm}: {(lines or [done.returncode])[-1]}")
            continue
        found = json.loads(answer.read_text())
        counted = found["steps"][1:]  # the first one compiles
        medians[arm] = {key: statistics.median(row[key] for row in counted) for key in counted[0]}
        said = " ".join(f"{key} {value:.2f} s" for key, value in medians[arm].items())
        record_property(arm, f"{said}; peak {found.get('peak_gib', 0):.1f} GiB")
    for arm in medians.keys() - {"kit"}:
        ratio = medians[arm]["step"] / medians["kit"]["step"]
        record_property(f"{arm} over the kit", f"{ratio:.2f}")
    assert not faults
