"""The wheel and the sdist: what is packed, and what no file of the project may name."""

import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml

import rloo_kit
from rloo_kit.diagnosis.installation import install_command, set_for
from rloo_kit.machine.hardware import TESTED

ROOT = Path(__file__).resolve().parents[1]


# --- what is packed -------------------------------------------------------------------------------


def project_files():
    """Return the paths of all files that git tracks or would add."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    listing = subprocess.run(
        ["git", "ls-files", "-coz", "--exclude-standard"],
        cwd=ROOT, check=True, capture_output=True, text=True,
    )  # fmt: skip
    return [Path(name) for name in listing.stdout.split("\0") if name and (ROOT / name).is_file()]


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Names of the files in the wheel, which is built from the sdist."""
    source = tmp_path_factory.mktemp("source")
    out = tmp_path_factory.mktemp("dist")
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
    packed = ("rloo_kit/", "rewards/", "examples/", "requirements/constraints-")
    expected = {
        f"rloo_kit/{path.removeprefix('rloo_kit/')}"
        for path in map(Path.as_posix, project_files())
        if path.startswith(packed)
    }
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


def test_the_changelog_has_a_dated_section_of_this_version():
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    dated = re.findall(r"^## \[(\d+\.\d+\.\d+)\] - \d{4}-\d\d-\d\d$", text, re.M)
    assert dated[0] == rloo_kit.__version__


# --- what a host runs -----------------------------------------------------------------------------


def read_yaml(path):
    return yaml.safe_load((ROOT / path).read_text(encoding="utf-8"))


def test_the_hosted_check_runs_ci_on_every_supported_python():
    job = read_yaml(".github/workflows/check.yml")["jobs"]["check"]
    assert [step["run"] for step in job["steps"] if "run" in step] == [".ci/run"]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    supported = [name.rpartition(" ")[2] for name in project["classifiers"] if "Python" in name]
    assert job["strategy"]["matrix"]["python"] == supported


def test_pre_commit_runs_what_make_lint_runs():
    hooks = read_yaml(".pre-commit-config.yaml")["repos"][0]["hooks"]
    recipe = subprocess.run(
        ["make", "-n", "lint"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    commands = [
        line for line in recipe.stdout.splitlines() if re.match(r"\S+/(ruff|pyright)", line)
    ]
    assert len(commands) == len(hooks) == 3
    assert all(command in hook["entry"] for command, hook in zip(commands, hooks, strict=True))


# --- what is written in the files -----------------------------------------------------------------

# In parts, so that this file does not name them itself
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


# --- what is installed ----------------------------------------------------------------------------

UNSLOTH = "pip install unsloth unsloth_zoo"
TEXT = (".py", ".md", ".ipynb", ".txt", ".yaml", ".sh", "")


def installs_of_the_kit(text):
    """Return the commands that ask an index for the kit; strings in several parts are joined."""
    joined = re.sub(r"[\"'] *\n *f?[\"']", "", text.replace('\\"', '"'))
    commands = re.findall(r"pip install ([^\n;`|]*)", joined)
    return [c for c in commands if re.search(r"(?:^|[\s\"'])rloo[-_.]kit(?:$|[^\w/.-])", c)]


def test_no_command_installs_the_unpublished_name():
    assert installs_of_the_kit('uv pip install --quiet "rloo-kit[unsloth]" vllm')
    found = []
    for name in project_files():
        kept = ("CHANGELOG.md", "benchmarks/results", "tests/test_packaging.py")  # quotations
        if name.as_posix().startswith(kept) or name.suffix not in TEXT:
            continue
        text = (ROOT / name).read_text(encoding="utf-8")
        found += [f"{name}: {command}" for command in installs_of_the_kit(text)]
    assert found == []


@pytest.mark.parametrize(
    ("torch", "card", "system", "command"),
    [
        ("2.13.0", False, "linux", None),
        ("2.13.0+cu130", True, "linux", f'{UNSLOTH} vllm vllm-bnb-plugin -c "{{2.13}}"'),
        ("2.11.0", True, "linux", f'{UNSLOTH} vllm -c "{{2.11}}"'),
        ("2.11.0+cu128", True, "linux", f'{UNSLOTH} -c "{{2.11}}"'),
        (None, True, "linux", f'{UNSLOTH} vllm vllm-bnb-plugin -c "{{2.13}}"'),
        ("2.13.0", True, "win32", f'{UNSLOTH} -c "{{2.13}}"'),
    ],
)
def test_doctor_names_the_command_for_the_machine(torch, card, system, command, monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: card or None)
    monkeypatch.setattr(sys, "platform", system)
    for minor in ("2.11", "2.13"):
        path = ROOT / f"requirements/constraints-torch{minor}.txt"
        command = command and command.replace(f"{{{minor}}}", str(path))
    assert install_command(torch) == command


def test_constraints_are_the_set_but_for_torch_and_vllm():
    different = {name for name in TESTED if set_for("2.11.0")[1][name] != TESTED[name]}
    assert different == {"torch", "vllm"}
    assert all(set_for("2.13.0")[1][name] == version for name, version in TESTED.items())
