"""Several processes train together: real ones, on this machine's CPU."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import yaml

CONFIGS = Path(__file__).parents[2] / "examples" / "accelerate"
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2")
RUN = {
    "model": {"name": "tiny-thinker", "max_seq_length": 256},
    "data": {"prompts": "arithmetic", "held_out": 16},
    "rewards": ["accuracy"],
    "trainer": {
        "max_steps": 4, "save_steps": 2, "per_device_train_batch_size": 16, "num_generations": 8,
        "max_completion_length": 48, "learning_rate": 1e-3, "beta": 0.02,
    },
    "output_dir": "run",
}  # fmt: skip

pytestmark = pytest.mark.long


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(RUN))
    return tmp_path


def start(folder, *more, launcher=TORCHRUN):
    """Start a training of two processes; what they print is in ``said.txt``."""
    with (folder / "said.txt").open("wb") as said:
        return subprocess.Popen(
            [*map(str, launcher), "-m", "rloo_kit", "train", "run.yaml", *more],
            cwd=folder, stdout=said, stderr=said, env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip


def finish(folder, process, seconds=300):
    try:
        return process.wait(seconds), (folder / "said.txt").read_text()
    finally:
        if process.poll() is None:
            for one in psutil.Process(process.pid).children(recursive=True):
                one.kill()
            process.kill()


def wait_for(folder, process, text):
    deadline = time.monotonic() + 240
    while text not in (folder / "said.txt").read_text():
        assert process.poll() is None, (folder / "said.txt").read_text()
        assert time.monotonic() < deadline
        time.sleep(0.05)


def steps(folder):
    rows = map(json.loads, (folder / "run" / "metrics.jsonl").read_text().splitlines())
    return [row["step"] for row in rows if "reward" in row]


def test_one_folder_and_one_report(folder):
    code, said = finish(folder, start(folder, "--set", "trainer.max_steps=2"))
    assert code == 0, said
    assert "TRL's own step trains: 2 processes train" in said
    assert said.count("before: accuracy") == 1
    assert said.count("step 2/2") == 1
    assert sorted(one.name for one in folder.iterdir()) == ["run", "run.yaml", "said.txt"]
    run = folder / "run"
    assert steps(folder) == [1, 2]
    assert len((run / "completions.jsonl").read_text().splitlines()) == 2 * 32  # of both
    assert "training step" in (run / "report.html").read_text()
    assert json.loads((run / "environment.json").read_text())["processes"] == 2
    found = json.loads((run / "evaluation.json").read_text())
    assert found["before"]["num_prompts"] == 16
    assert len(found["after"]["samples"]) == 16


def test_a_wrong_setting_is_said_once(folder):
    code, said = finish(folder, start(folder, "--set", "trainer.max_stepz=1"))
    assert code != 0
    assert len(re.findall("^rloo-kit: .*'max_stepz'", said, re.MULTILINE)) == 1


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_process_ends_all_with_one_sentence_and_the_run_resumes(folder, rank):
    process = start(folder)
    wait_for(folder, process, "step 3/4")
    ranks = psutil.Process(process.pid).children()
    victim = next(one for one in ranks if one.environ()["RANK"] == str(rank))
    victim.send_signal(signal.SIGKILL)
    code, said = finish(folder, process)
    assert code != 0
    ours = re.findall("^rloo-kit: .*", said, re.MULTILINE)
    assert len(ours) == 1
    assert "another process of this training has ended" in ours[0]
    code, said = finish(folder, start(folder, "--resume"))
    assert code == 0, said
    assert "resuming from step 2" in said
    assert steps(folder) == [1, 2, 3, 4]


@pytest.mark.slow
def test_ctrl_c_finishes_the_step_on_all(folder):
    process = start(folder)
    wait_for(folder, process, "step 1/4")
    ranks = psutil.Process(process.pid).children()
    ranks[1].send_signal(signal.SIGINT)  # of one alone
    code, said = finish(folder, process)
    assert code != 0  # as the launcher has it
    done = json.loads((folder / "run" / "end.json").read_text())
    assert (done["how"], done["steps"]) == ("interrupted", steps(folder)[-1])
    assert done["steps"] < 4
    assert "rloo_kit/runs" not in said  # no traceback of ours
    assert "stopping: " not in said  # only the first process prints, and it got no signal


@pytest.mark.slow
def test_accelerate_launch_takes_the_configuration(folder):
    text = (CONFIGS / "ddp.yaml").read_text()
    (folder / "ddp.yaml").write_text(text.replace("bf16", '"no"', 1))
    launcher = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", "ddp.yaml"]
    code, said = finish(folder, start(folder, launcher=launcher))
    assert code == 0, said
    assert "TRL's own step trains: 2 processes train" in said


@pytest.mark.slow
def test_fsdp2_and_deepspeed_train_as_ddp_does():
    script = Path(__file__).parents[1] / "scripts" / "divided_steps.py"
    done = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, timeout=1800, check=False
    )
    assert done.returncode == 0, done.stderr
    apart = re.findall("metrics ([0-9.e+-]+), adapter ([0-9.e+-]+)", done.stdout)
    assert len(apart) >= 2
    assert all(float(number) < 1e-2 for pair in apart for number in pair)
