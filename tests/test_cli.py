"""The command: version, wrong commands, doctor."""

import json
import os
import subprocess
import sys

import pytest

from rloo_kit import __version__
from rloo_kit.cli import main


def test_version(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out.strip() == f"rloo-kit {__version__}"


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["trian"], "invalid choice: 'trian' (choose from "),
        (["rewards", "lsit"], "; did you mean 'list'?\n"),
        (["xyz"], ")\n"),
    ],
)
def test_a_wrong_command_exits_with_2_and_names_the_nearest(words, hint, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(words)
    assert hint in capsys.readouterr().err


def test_a_secret_in_a_wrong_command_is_masked(capsys):
    secret = "hf_" + "a1" * 12
    with pytest.raises(SystemExit, match="2"):
        main(["train", "run.yaml", "--sett", f"trainer.hub_token={secret}"])
    error = capsys.readouterr().err
    assert "unrecognized arguments: --sett trainer.hub_token=[hidden" in error
    assert secret not in error


def test_no_command_shows_the_help_with_a_first_step(capsys):
    with pytest.raises(SystemExit, match="0"):
        main([])
    head, commands = capsys.readouterr().out.split("positional arguments")
    assert "First step: rloo-kit quickstart" in " ".join(head.split())
    assert "hand-over" in commands


def test_doctor_prints_what_it_found(capsys):
    assert main(["doctor"]) == 0
    printed = capsys.readouterr().out
    parts = ("device: ", "memory: ", "precision: ", "trl           1.15.0", "unsloth       starts")
    assert [part for part in parts if part not in printed] == []


def test_doctor_gives_the_command_that_installs_the_tested_version(tmp_path, monkeypatch, capsys):
    for name, version in {"peft": "0.18.0", "unsloth": "2026.10.7"}.items():
        info = tmp_path / f"{name}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    monkeypatch.syspath_prepend(tmp_path)  # in front of what is installed
    assert main(["doctor"]) == 0
    assert "0.18.0, tested with 0.21.2: pip install peft==0.21.2" in capsys.readouterr().out


@pytest.mark.long
def test_doctor_exits_with_1_when_training_cannot_start(tmp_path):
    broken = tmp_path / "bitsandbytes"
    broken.mkdir()
    (broken / "__init__.py").write_text("raise ImportError('libcudart is missing')\n")
    done = subprocess.run(
        [sys.executable, "-m", "rloo_kit", "doctor"],
        env={**os.environ, "PYTHONPATH": str(tmp_path)}, cwd=tmp_path,
        capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == 1, done.stdout
    assert "training cannot start" in done.stdout
    assert "libcudart is missing" in done.stdout
    assert "pip install torch==" in done.stdout


@pytest.mark.parametrize(
    ("rewards", "code", "line"),
    [
        ([0.1 * step for step in range(12)], 0, "It learned: the reward went from"),
        ([0.0] * 12, 1, "1. error: cold_start (accuracy)"),
    ],
)
def test_doctor_reports_whether_a_run_learned(tmp_path, capsys, rewards, code, line):
    rows = [
        {"step": n, "reward": reward, "reward_std": 0.2 * bool(reward),
         "rewards/accuracy/mean": reward, "signal/groups_without": float(not reward)}
        for n, reward in enumerate(rewards, 1)
    ]  # fmt: skip
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "metrics.jsonl").write_text(text + '{"step": 13, "rew')  # killed
    assert main(["doctor", str(tmp_path)]) == code
    assert line in capsys.readouterr().out


@pytest.mark.skipif(sys.platform == "win32", reason="a closed pipe is another error there")
def test_a_reader_that_stops_early_is_no_error():
    command = [sys.executable, "-m", "rloo_kit", "rewards", "show", "thinking"]
    read, write = os.pipe()
    os.close(read)
    ended = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, check=False)
    os.close(write)
    assert (ended.returncode, ended.stderr) == (0, b"")


def test_a_log_file_gets_each_line_at_once(tmp_path):
    """As under nohup, slurm and docker logs, where sampling may take minutes."""
    code = """
import os
import rloo_kit as rk
from rloo_kit.cli import main
rk.calibrate = lambda **_: (print("sampling"), os._exit(0))
main(["calibrate", "run.yaml"])
"""
    with (tmp_path / "log").open("wb") as log:
        subprocess.run([sys.executable, "-c", code], stdout=log, check=True)
    assert (tmp_path / "log").read_text() == "sampling\n"
