"""The order things start in, each case in a process of its own."""

import json
import os
import subprocess
import sys
import textwrap

import pytest
import torch

from rloo_kit.errors import ConfigError
from rloo_kit.machine import environment


def python(source, cwd, **variables):
    env = {k: v for k, v in os.environ.items() if k not in VARIABLES}
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(source)],
        cwd=cwd, env={**env, **variables},
        capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip


VARIABLES = (
    "GOMP_SPINCOUNT",
    "OMP_WAIT_POLICY",
    "TQDM_NOTEBOOK",
    "ACCELERATE_MIXED_PRECISION",
    "UNSLOTH_COMPILE_LOCATION",
)


@pytest.mark.long
def test_setup_fills_in_variables_and_imports_unsloth_before_what_it_patches(tmp_path):
    lines = "FROM_FILE=file", "FROM_SHELL=file", "TQDM_NOTEBOOK=from-file"
    (tmp_path / ".env").write_text("\n".join(lines))
    done = python(
        f"""
        import json, os, sys
        import trl  # alone it loads nothing that Unsloth patches
        import rloo_kit as rk
        first = rk.setup()
        from trl.trainer import utils  # Unsloth patches it where it came first
        names = ["FROM_FILE", "FROM_SHELL", *{VARIABLES!r}]
        print(json.dumps({{
            "variables": {{name: os.environ.get(name) for name in names}},
            "same": rk.setup() is first,
            "patched": hasattr(utils._ChunkedLogProbFunction, "_unsloth_cpu_dispatch"),
            "subclass": issubclass(rk.LeaveOneOutTrainer, trl.RLOOTrainer),
            "backend": first.backend,
            "dotenv": first.dotenv,
        }}))
        """,
        tmp_path,
        FROM_SHELL="shell",
        XDG_CACHE_HOME=str(tmp_path / "cache"),
    )
    assert done.stdout.count("\n") == 1, (done.stdout, done.stderr)  # no banner
    found = json.loads(done.stdout)
    assert found["variables"].pop("ACCELERATE_MIXED_PRECISION") in ("bf16", "no")
    assert found == {
        "variables": {
            "GOMP_SPINCOUNT": "1000",
            "OMP_WAIT_POLICY": None,
            "FROM_FILE": "file",
            "FROM_SHELL": "shell",  # what is already set wins
            "TQDM_NOTEBOOK": "from-file",
            "UNSLOTH_COMPILE_LOCATION": str(tmp_path / "cache/rloo-kit/unsloth_compiled_cache"),
        },
        "same": True,
        "patched": True,
        "subclass": True,
        "backend": "unsloth",
        "dotenv": str(tmp_path / ".env"),
    }


@pytest.mark.parametrize(
    ("given", "count"),
    [({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "ACTIVE"}, None)],
)
def test_waiting_threads_spin_little_unless_the_user_says_how(monkeypatch, given, count):
    monkeypatch.setattr(environment.os, "environ", dict(given))
    environment.set_variables()
    assert environment.os.environ.get("GOMP_SPINCOUNT") == count


@pytest.mark.parametrize(
    ("limit", "given", "threads"),
    [
        ("150000 100000", {}, "2"),
        ("50000 100000", {}, "1"),
        ("50000 100000", {"OMP_NUM_THREADS": "3"}, "3"),  # what is already set wins
        ("800000 100000", {}, None),  # no fewer than the machine has
        ("max 100000", {}, None),
        (None, {}, None),
    ],
)
def test_torch_starts_no_more_threads_than_a_container_may_use(
    monkeypatch, tmp_path, limit, given, threads
):
    monkeypatch.setattr(environment, "CPU_LIMIT", tmp_path / "cpu.max")
    monkeypatch.setattr(environment.os, "environ", dict(given))
    monkeypatch.setattr(environment.os, "cpu_count", lambda: 8)
    if limit is not None:
        environment.CPU_LIMIT.write_text(limit + "\n")
    environment.set_variables()
    assert environment.os.environ.get("OMP_NUM_THREADS") == threads


def test_an_env_file_of_powershell_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".env").write_text("HF_TOKEN=hf_abc", encoding="utf-16")
    with pytest.raises(ConfigError, match=r"\.env' cannot be read .*: make it readable UTF-8"):
        environment.load_env_file()


@pytest.mark.skipif(sys.platform == "win32", reason="the home folder is a variable there")
def test_a_user_without_a_home_folder_can_start(monkeypatch):
    """A container's user that has a number and no name."""
    monkeypatch.setattr(environment.os, "environ", {})
    monkeypatch.setattr("os.getuid", lambda: 4_000_000_000)
    environment.set_variables()
    assert environment.cache_folder().name == "rloo-kit"


@pytest.mark.long
def test_an_early_import_is_refused_for_unsloth_and_a_process_keeps_its_backend(tmp_path):
    done = python(
        """
        import trl.trainer.utils
        import rloo_kit as rk
        try:
            rk.LeaveOneOutTrainer
        except rk.KitError as exc:
            print(type(exc).__name__, exc)
        print(rk.setup(backend="transformers").backend)
        try:
            rk.load_model("tiny-thinker", backend="unsloth")
        except rk.KitError as exc:
            print(exc)
        """,
        tmp_path,
    )
    assert done.stdout.startswith("ImportOrderError "), done.stderr[-2000:]
    early, backend, kept = done.stdout.splitlines()
    assert "was imported before unsloth" in early
    assert backend == "transformers"
    assert "already uses 'transformers'" in kept
    assert "restart the kernel" in early
    assert "restart the kernel" in kept


@pytest.mark.long
def test_broken_packages_are_hidden(tmp_path):
    """torchvision as it is beside a CPU build of torch, and an Unsloth that fails at import."""
    path = tmp_path / "path"
    for name in ("torchvision", "unsloth"):
        (path / name).mkdir(parents=True)
    (path / "torchvision" / "__init__.py").write_text("import torchvision.ops\n")
    (path / "torchvision" / "ops.py").write_text(
        "raise RuntimeError('operator torchvision::nms does not exist')\n"
    )
    (path / "unsloth" / "__init__.py").write_text("raise RuntimeError('needs a newer driver')\n")
    done = python(
        """
        import sys
        import rloo_kit as rk
        found = rk.setup()
        from trl import RLOOTrainer
        print(found.backend, "|", found.why_not_unsloth)
        print([name for name in sys.modules if name.startswith("torchvision.")])
        """,
        tmp_path,
        PYTHONPATH=str(path),
    )
    assert done.stdout.startswith("transformers | Unsloth"), done.stderr[-2000:]
    assert "needs a newer driver" in done.stdout
    assert done.stdout.endswith("[]\n")


@pytest.mark.parametrize(("avx512_bf16", "hidden"), [(False, True), (True, False)])
def test_kernels_for_another_processor_are_hidden_from_unsloth(avx512_bf16, hidden, monkeypatch):
    has = {"architecture": "x86_64", "avx512_bf16": avx512_bf16}
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: has)
    monkeypatch.delitem(sys.modules, "vllm._C", raising=False)
    environment._hide_foreign_kernels()
    assert (sys.modules.get("vllm._C", "not hidden") is None) == hidden
    monkeypatch.delitem(sys.modules, "vllm._C", raising=False)
