"""The whole step against Unsloth's GRPO in 4 bit, and against TRL's RLOO in 16 bit: A B A B.

On a large card both start at the same time, each in half of it, and then take their steps in turn.
On a smaller one each runs alone, twice.
"""

import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest
from runs_here import TOY

# isort: split

from gpu_peers import ARMS

pytestmark = pytest.mark.gpu
HERE = Path(__file__).parent
PROGRAM = HERE.parents[1] / "benchmarks" / "gpu_peers.py"
SMALL = ["--geometry", "toy", "--rows", "8", "--length", "8", "--steps", "3"]
# GiB of a card that holds both, each with an engine of its own
ROOM = 75


def start(arm, answer, log, options):
    models = os.environ.get("RLOO_KIT_GPU_MODELS", str(answer.parent))
    paths = [str(HERE), str(PROGRAM.parent), os.environ.get("PYTHONPATH", "")]
    command = [sys.executable, str(PROGRAM), arm, "--models", models, "--answer", str(answer)]
    return subprocess.Popen(
        command + (SMALL if TOY else []) + options, cwd=answer.parent, stdout=log, stderr=log,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
    )  # fmt: skip


def run(arms, folder, options):
    """Start arms, let them take their counted steps in turn; return the answers and the faults."""
    folder.mkdir()
    hold = folder / "hold"
    hold.touch()
    children = {}
    for arm in set(ARMS) - set(arms):
        (folder / f"{arm}.gone").touch()
    faults = []

    def look():
        time.sleep(0.1)
        for arm in [name for name, child in children.items() if child.poll() is not None]:
            (folder / f"{arm}.gone").touch()
            if children.pop(arm).returncode:
                text = (folder / f"{arm}.log").read_text()
                errors = [line for line in text.splitlines() if "Error" in line]
                faults.append(f"{arm}: {errors[-1] if errors else 'no answer'}")

    try:
        for arm in arms:
            with open(folder / f"{arm}.log", "w") as log:
                turns = [*options, "--turns", str(folder)]
                children[arm] = start(arm, folder / f"{arm}.json", log, turns)
        while any(not (folder / f"{arm}.ready").exists() for arm in children):
            look()
        hold.unlink()
        while children:
            look()
    finally:
        for child in children.values():
            child.kill()
    answers = [folder / f"{arm}.json" for arm in arms]
    return [json.loads(path.read_text()) for path in answers if path.exists()], faults


@pytest.mark.parametrize(
    ("kit", "peer"), [("kit", "unsloth-grpo"), ("kit-16bit", "trl-rloo")], ids=["4bit", "16bit"]
)
def test_whole_step(kit, peer, device, tmp_path, record_property):
    import torch

    memory = torch.cuda.get_device_properties(0).total_memory if device == "cuda" else 0
    if TOY or memory >= ROOM * 2**30:
        rounds = [(kit, peer)]
        options = ["--share", "0.3", "--card", str(memory // 2**31)]
    else:
        rounds, options = [(kit,), (peer,)] * 2, []
    steps = {kit: [], peer: []}
    faults = []
    peaks = {}
    for number, arms in enumerate(rounds):
        answers, said = run(arms, tmp_path / str(number), options)
        faults += said
        for answer in answers:
            steps[answer["arm"]] += answer["steps"][1:]  # the first one compiles
            peaks[answer["arm"]] = answer.get("peak_gib", 0)
    medians = {}
    for arm, rows in steps.items():
        if rows:
            medians[arm] = {key: statistics.median(row[key] for row in rows) for key in rows[0]}
            said = " ".join(f"{key} {value:.2f} s" for key, value in medians[arm].items())
            record_property(arm, f"{said}; {len(rows)} steps; peak {peaks[arm]:.1f} GiB")
    if len(medians) == 2:
        ratio = medians[peer]["step"] / medians[kit]["step"]
        record_property(f"{peer} over {kit}", f"{ratio:.2f}")
    assert not faults
