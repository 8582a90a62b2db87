"""The launchers that docs/how-to/processes.md names start the command in two processes."""

import json
import os
import subprocess
import sys

import pytest
import torch
import yaml
from page_commands import FEW, ROOT, commands

from rloo_kit.config.run_file import read_run_file

LAUNCHERS = {
    "accelerate": ["accelerate.commands.launch", "--num_processes", "2"],
    "torchrun": ["torch.distributed.run", "--nproc_per_node", "2"],
}


@pytest.mark.parametrize(
    "launcher",
    ["accelerate", pytest.param("torchrun", marks=pytest.mark.slow)],  # accelerate starts the same
)
def test_a_launcher_trains(launcher, tmp_path):
    """As on the page; on a CPU accelerate's --multi_gpu is a file of settings."""
    (command,) = [c for c in commands(ROOT / "docs/how-to/processes.md") if c.startswith(launcher)]
    module, *options = LAUNCHERS[launcher]
    assert " ".join(options) in command
    if "--multi_gpu" in command and not torch.cuda.is_available():
        options = ["--config_file", f"{ROOT}/examples/accelerate/ddp_cpu_2.yaml", *options]
    settings = [*FEW[1::2], "output_dir=runs/mine", "model.backend=transformers"]
    (tmp_path / "mine.yaml").write_text(
        yaml.safe_dump(read_run_file("quickstart", settings).as_dict())
    )
    done = subprocess.run(
        [sys.executable, "-m", module, *options, "-m", "rloo_kit", "train", "mine.yaml"],
        cwd=tmp_path, env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.count("step 1/1") == 1  # the first process speaks
    facts = json.loads((tmp_path / "runs/mine/environment.json").read_text())
    assert facts["processes"] == 2
    assert (tmp_path / "runs/mine/adapter/adapter_model.safetensors").is_file()
