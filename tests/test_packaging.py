"""The wheel and the sdist: what is packed, and what no file of the project may name."""

import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import rloo_kit
from rloo_kit.diagnosis.machine import install_command, set_for
from rloo_kit.machine.hardware import TESTED

ROOT = Path(__file__).resolve().parents[1]


# --- what is packed -------------------------------------------------------------------------------


def project_files():
    """Paths that git tracks or would add; the working tree without what is ignored."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    listing = subprocess.run(
        ["git", "ls-files", "-coz", "--exclude-standard"],
        cwd=ROOT, check=True, capture_output=True, text=True,
    )  # fmt: skip
    return [Path(name) for name in listing.stdout.split("\0") if name and (ROOT / name).is_file()]


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Names in the wheel, which is built from the sdist."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    for name in project_files():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, source / name)
    result = subprocess.run(
        [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(source)],
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    (wheel,) = out.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if not name.endswith("/")}


def test_the_wheel_holds_the_kit_its_rewards_examples_and_model(built):
    expected = {
        f"rloo_kit/{path}"
        for path in map(Path.as_posix, project_files())
        if path.startswith(("rewards/", "examples/", "requirements/constraints-"))
    } | {path for path in map(Path.as_posix, project_files()) if path.startswith("rloo_kit/")}
    assert {
        "rloo_kit/py.typed", "rloo_kit/rewards/accuracy.py", "rloo_kit/examples/quickstart.yaml",
        "rloo_kit/examples/posts.jsonl", "rloo_kit/assets/tiny-thinker/model.safetensors",
    } <= expected  # fmt: skip
    assert expected - built == set()


def test_the_wheel_holds_nothing_else(built):
    others = {name for name in built if not name.startswith("rloo_kit/")}
    assert {name.partition("/")[0] for name in others} == {
        f"rloo_kit-{rloo_kit.__version__}.dist-info"
    }
    assert not {name for name in built if re.search(r"(^|/)(tests?|conftest|scripts)[/_.]", name)}
    assert not {name for name in built if "__pycache__" in name}


def test_the_installed_version_is_the_one_in_the_project_file():
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert re.search(r'^version = "(.+)"$', text, re.M)[1] == rloo_kit.__version__


# --- what is written in the files -----------------------------------------------------------------

# In parts, so that this file does not name them either.
REGISTRIES = [
    ("pypi", "org"), ("files.python" + "hosted", "org"), ("pytorch", "org/whl"),
    ("anaconda", "org"),
    ("npmjs", "org"), ("crates", "io"), ("rubygems", "org"), ("golang", "org"),
]  # fmt: skip
NOT_TO_BE_NAMED = re.compile(
    "|".join(
        [r"\b" + re.escape(".".join(host)) + r"\b" for host in REGISTRIES]
        + [r"(?<![\w.~<>-])/(?:work|home|root|Users)/\w"]
    )
)


def test_no_file_names_a_registry_or_a_place_of_one_machine():
    found = []
    for name in project_files():
        try:
            text = (ROOT / name).read_text(encoding="utf-8")
        except UnicodeDecodeError:  # weights
            continue
        found += [f"{name}: {match[0]}" for match in NOT_TO_BE_NAMED.finditer(text)]
    assert found == []


# --- what the doctor says to install --------------------------------------------------------------


@pytest.mark.parametrize(
    ("torch", "card", "system", "command"),
    [
        ("2.13.0", False, "linux", "pip install rloo-kit"),
        ("2.13.0+cu130", True, "linux", 'pip install "rloo-kit[unsloth,vllm]" -c "{2.13}"'),
        ("2.11.0", True, "linux", 'pip install "rloo-kit[unsloth]" vllm -c "{2.11}"'),
        ("2.12.1", True, "linux", 'pip install "rloo-kit[unsloth,vllm]"'),
        (None, True, "linux", 'pip install "rloo-kit[unsloth,vllm]"'),
        ("2.13.0", True, "win32", 'pip install "rloo-kit[unsloth]"'),
    ],
)
def test_doctor_names_the_command_for_the_machine(torch, card, system, command, monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: card or None)
    monkeypatch.setattr(sys, "platform", system)
    for minor in ("2.11", "2.13"):
        path = ROOT / f"requirements/constraints-torch{minor}.txt"
        command = command.replace(f"{{{minor}}}", str(path))
    assert install_command(torch) == command


def test_constraints_are_the_set_for_but_for_torch_and_vllm():
    different = {name for name in TESTED if set_for("2.11.0")[1][name] != TESTED[name]}
    assert different == {"torch", "vllm"}
    assert all(set_for("2.13.0")[1][name] == TESTED[name] for name in TESTED)
