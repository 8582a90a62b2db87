"""After release a process holds what one holds that never trained; a child gives back everything.

Seen from outside, by the card's free memory (a CPU's: the process's resident memory), so that
nothing that the process itself cannot see is missed. Other programs that use the card meanwhile
disturb it.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu
SCRIPT = Path(__file__).resolve().parents[1] / "scripts" / "held_memory.py"
MIB = 2**20
# Kernels that were loaded into the context stay there until the process ends
LEFT = 512 * MIB


def free_of(device, process=None):
    """Bytes that a process takes from the device; without one, those already taken."""
    if device == "cuda":
        import torch

        free, total = torch.cuda.mem_get_info()
        return total - free
    import psutil

    return psutil.Process(process.pid).memory_info().rss if process else 0


def held_by(device, *arguments):
    """Run the script; return (bytes it holds when it is done, what it says)."""
    before = free_of(device)
    process = subprocess.Popen(
        [sys.executable, str(SCRIPT), *arguments],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        said = ""
        while not said.startswith("{"):
            said = process.stdout.readline()
            assert said, f"{arguments} ended without a line"
        return free_of(device, process) - before, json.loads(said)
    finally:
        process.stdin.close()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@pytest.fixture(scope="module")
def bare(kit, device):
    """Bytes of a process that has imported the same and computed nothing to speak of."""
    from rloo_kit.machine.hardware import why_not_vllm

    return held_by(device, "bare", *([] if why_not_vllm() else ["vllm"]))[0]


@pytest.mark.parametrize("generation", ["transformers", "vllm"])
def test_after_release_the_bare_context_is_left(
    generation, kit, device, bare, request, record_property
):
    if generation == "vllm":
        request.getfixturevalue("vllm")
    held, said = held_by(device, generation)
    record_property("bare_mib", round(bare / MIB))
    record_property("left_mib", round((held - bare) / MIB))
    record_property("released", said["released"])
    assert said["steps"] == 2
    assert "child processes left" not in said["released"]
    assert held - bare < LEFT


def test_a_child_process_gives_everything_back(
    kit, four_bit, vllm, device, tmp_path, record_property
):
    before = free_of(device)
    lines = []
    result = kit.train(
        "quickstart",
        [
            f"output_dir={tmp_path / 'run'}",
            "trainer.max_steps=2",
            "trainer.generation=vllm",
            "data.held_out=8",
        ],
        lines.append,
        in_subprocess=True,
    )
    left = free_of(device) - before
    record_property("left_mib", round(left / MIB))
    assert result.steps == 2
    assert any("completions from vLLM" in line for line in lines)
    assert kit.release().after.children == ()
    assert left < 64 * MIB
