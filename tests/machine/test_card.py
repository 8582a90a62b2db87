"""A machine whose card cannot train says why, before anything is loaded."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from rloo_kit.cli import main
from rloo_kit.errors import BackendError
from rloo_kit.machine.hardware import (
    check_card,
    detect_hardware,
    why_not_together,
    why_not_unsloth,
)

ROOT = Path(__file__).resolve().parents[2]
INSTALL = " ".join((ROOT / "docs/how-to/install.md").read_text(encoding="utf-8").split())
KERNELS = ["sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120"]  # of torch 2.13
WORKS = {
    "card": "NVIDIA GeForce RTX 3060",
    "capability": (8, 6),
    "driver": "580.65",
    "cuda": "13.0",
    "kernels": KERNELS,
    "installed": ["gcc", "Python.h"],
}
BROKEN = "Failed to initialize NVML: Driver/library version mismatch\nNVML library version: 550.144"
HIDDEN = {"card": None, "driver": "550.54.14"}


@pytest.fixture
def why_not(monkeypatch, tmp_path):
    """Return a function that checks the card of a machine on which some of ``WORKS`` differs."""

    def check(**changes):
        facts = WORKS | changes
        monkeypatch.setattr(torch.cuda, "is_available", lambda: facts["card"] is not None)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda: facts["card"])
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: facts["capability"])
        monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: facts["kernels"])
        monkeypatch.setattr(torch.version, "cuda", facts["cuda"])
        for name in ("CC", "CUDA_VISIBLE_DEVICES"):
            monkeypatch.delenv(name, raising=False)
        programs = [*facts["installed"], *(["nvidia-smi"] if facts["driver"] else [])]
        monkeypatch.setattr(shutil, "which", lambda name: name if name in programs else None)
        said = f"{facts['driver']}\n"
        answer = subprocess.CompletedProcess([], 18 * (BROKEN in said), stdout=said)
        monkeypatch.setattr(subprocess, "run", lambda *_, **__: answer)
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        folder.mkdir()
        if "Python.h" in facts["installed"]:
            (folder / "Python.h").touch()
        monkeypatch.setattr(sysconfig, "get_path", lambda *_: folder)
        monkeypatch.setattr(sys, "platform", "linux")
        return check_card()

    return check


CPU = {"card": None, "driver": None, "installed": []}


@pytest.mark.parametrize("facts", [CPU, *({"capability": c} for c in [(7, 5), (8, 9), (12, 1)])])
def test_a_cpu_and_a_card_with_kernels_are_taken(facts, why_not):
    assert why_not(**facts) is None


REFUSED = [
    (HIDDEN, "torch's CUDA 13.0 needs a newer driver: update it to 580 or later"),
    (HIDDEN | {"driver": "515.1", "cuda": "12.8"}, "update it to 525 or later"),
    (HIDDEN | {"cuda": None}, "torch is built without CUDA: install its CUDA build"),
    (HIDDEN | {"driver": "580.65"}, "look at CUDA_VISIBLE_DEVICES"),
    (HIDDEN | {"driver": BROKEN}, "(Failed to initialize NVML: Driver/library version mismatch)"),
    ({"capability": (6, 1)}, "has compute capability 6.1; torch, vLLM and bitsandbytes have"),
    (
        {"capability": (7, 0), "kernels": ["sm_70", *KERNELS]},
        "kernels for 7.5 (T4, RTX 20) to 12.x",
    ),
    ({"capability": (13, 0)}, "has compute capability 13.0"),
    ({"installed": ["Python.h"]}, "finds no C compiler: install gcc"),
    ({"installed": ["clang"]}, "finds no Python.h: install python3-dev"),
]


def test_a_home_folder_that_cannot_be_written_is_named(why_not, monkeypatch, tmp_path):
    """As in a container whose user has no home folder: Triton stores compiled kernels there."""
    monkeypatch.setattr(os, "access", lambda path, _: path == tmp_path)
    monkeypatch.setenv("HOME", "/nowhere")
    assert why_not() == (
        "Triton compiles for the card and finds no folder for its cache "
        "(/nowhere/.triton/cache cannot be written): set TRITON_CACHE_DIR to another folder"
    )
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "kernels"))
    assert why_not() is None


@pytest.mark.parametrize(("facts", "says"), REFUSED)
def test_what_to_change_is_said(facts, says, why_not):
    assert says in why_not(**facts)


def test_the_install_page_says_the_same(why_not):
    for facts, _ in (REFUSED[0], REFUSED[2], *REFUSED[-2:]):
        assert why_not(**facts) in INSTALL
    assert "torch, vLLM and bitsandbytes have kernels for 7.5 (T4, RTX 20) to 12.x" in INSTALL
    assert why_not_together("0.26.0", "2.11.0+cu128") in INSTALL


def test_a_mac_trains_without_unsloth(monkeypatch):
    """Where mlx is installed, unsloth/__init__.py replaces the trainers of TRL by stubs."""
    monkeypatch.setattr("rloo_kit.machine.hardware.installed_version", lambda _: "2026.10.9")
    assert why_not_unsloth("cpu") is None
    monkeypatch.setattr(sys, "platform", "darwin")
    assert "MLX" in why_not_unsloth("cpu")
    assert why_not_unsloth("cuda") is None  # a plan for another machine


@pytest.mark.parametrize(
    ("vllm", "torch", "together"),
    [
        ("0.31.0", "2.13.0+cu130", True),
        ("0.31.0", "2.13.0+cpu", True),
        ("0.26.0+cu129", "2.11.0+cu128", True),
        ("0.26.0+cu129", "2.11.0+cu130", False),
        ("0.26.0", "2.11.0+cu128", False),
    ],
)
def test_vllm_and_torch_are_of_one_cuda(vllm, torch, together):
    assert (why_not_together(vllm, torch) is None) == together


@pytest.mark.long
@pytest.mark.skipif(os.name == "nt", reason="its nvidia-smi is a shell script")
def test_an_old_driver_stops_a_run_before_it_trains_on_the_cpu(tmp_path):
    """Where nvidia-smi lists a card with an old driver, and torch sees none."""
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 550.54.14\n")
    program.chmod(0o755)
    code = """
from rloo_kit.cli import main
print(main(["train", "qwen3-4b-thinking-12gb"]), main(["doctor"]))
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}, cwd=tmp_path,
        capture_output=True, text=True, timeout=200, check=True,
    )  # fmt: skip
    says = "torch does not see the card that nvidia-smi lists (driver 550.54.14)"
    assert says in done.stderr
    assert not (tmp_path / "runs").exists()
    assert f"training cannot start: {says}" in done.stdout
    assert done.stdout.endswith("\n2 1\n")


@pytest.mark.long
def test_the_doctor_imports_vllm_before_it_says_that_it_starts(tmp_path, monkeypatch, capsys):
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm/__init__.py").write_text("raise ImportError('libcudart.so.13: not here')\n")
    info = tmp_path / "vllm-0.31.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.31.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))  # vLLM is imported in a process of its own
    main(["doctor"])
    (line,) = re.findall(r"^  vllm +(vLLM.*|starts)$", capsys.readouterr().out, re.M)
    assert line == "vLLM cannot be imported: ImportError: libcudart.so.13: not here"


@pytest.mark.parametrize(
    ("limit", "total", "free"), [("max", 64, 32), ("8", 8, 5), ("50", 50, 32), ("2", 2, 0)]
)
def test_memory_of_a_cpu_is_that_of_its_container(monkeypatch, tmp_path, limit, total, free):
    memory = SimpleNamespace(total=64, available=32)  # of the host
    monkeypatch.setattr("psutil.virtual_memory", lambda: memory)
    monkeypatch.setattr("rloo_kit.machine.hardware.CGROUP", tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    (tmp_path / "memory.max").write_text(f"{limit}\n")
    (tmp_path / "memory.current").write_text("4\n")
    (tmp_path / "memory.stat").write_text("anon 2\ninactive_file 1\n")
    found = detect_hardware()
    assert (found.total_memory, found.free_memory) == (total, free)


def see_cards(monkeypatch, mem_get_info):
    """Let torch see two cards, of which the second is the current one."""
    monkeypatch.setattr(
        "torch.cuda",
        SimpleNamespace(
            is_available=lambda: True,
            mem_get_info=mem_get_info,
            is_bf16_supported=lambda including_emulation: True,
            device_count=lambda: 2,
            current_device=lambda: 1,
            get_device_properties=lambda index: SimpleNamespace(name=f"card {index}"),
        ),
    )


def test_name_and_memory_are_of_the_same_card(monkeypatch):
    see_cards(monkeypatch, lambda: (1, 2))
    assert detect_hardware().name == "card 1"


@pytest.mark.parametrize(
    ("error", "remedy"),
    [("out of memory", "end the other"), ("uncorrectable ECC error", "restart")],
)
def test_a_card_that_cannot_be_used_is_one_sentence(monkeypatch, error, remedy):
    def fails():
        raise torch.AcceleratorError(f"CUDA error: {error}\nCUDA kernel errors might be")

    see_cards(monkeypatch, fails)
    says = rf"^card 1 cannot be used now \(CUDA error: {error}\): {remedy}"
    with pytest.raises(BackendError, match=says):
        detect_hardware()
