"""The house: who may import whom, what an import loads, what is packed."""

import ast
import doctest
import importlib
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import rloo_kit

ROOT = Path(__file__).resolve().parents[1]
CORE = ROOT / "rloo_kit"
REWARDS = ROOT / "rewards"

RANKS = {
    "redaction": -1,
    "engine_tables": 0,
    "errors": 0,
    "pickles": 0,
    "surroundings": 0,
    "stopping": 0,
    "thoughts": 0,
    "types": 0,
    "wording": 0,
    "adapters": 0.5,
    "advantages": 1,
    "chat_templates": 1,
    "batching": 1,
    "config": 1,
    "cpu_lora": 1,
    "hardware": 1,
    "logprobs": 1,
    "nonfinite": 1,
    "objective": 1,
    "out_of_memory": 1,
    "output_folder": 1,
    "processes": 1,
    "launch": 2,
    "legacy": 2,
    "reward_contract": 1,
    "reward_statistics": 1,
    "checkpoints": 1,
    "state_files": 1,
    "data_files": 1,
    "findings": 1,
    "gym_tasks": 1,
    "tasks": 1,
    "page_json": 1,
    "composition": 2,
    "data": 2,
    "reward_findings": 2,
    "run_record": 2,
    "environment": 2,
    "gguf": 2,
    "child": 1,
    "cards": 2,
    "model_shape": 1,
    "engine_memory": 2,
    "shared_engine": 3,
    "rollout": 2,
    "generation": 2,
    "llama_cpp": 3,
    "memory": 2,
    "canary": 3,
    "learner": 3,
    "live_view": 3,
    "memory_plan": 3,
    "models": 4,
    "reward_check": 3,
    "reward_loading": 3,
    "run_curves": 3,
    "run_findings": 3,
    "run_groups": 3,
    "vllm_engine": 3,
    "vllm_server": 3,
    "engines": 4,
    "speed_estimate": 4,
    "reward_catalogue": 4,
    "reward_probes": 4,
    "reward_training": 5,
    "watch": 4,
    "notebook_figure": 4,
    "terminal_panel": 4,
    "report_content": 4,
    "diagnostics": 5,
    "report": 5,
    "live": 5,
    "eval_statistics": 1,
    "trained_models": 5,
    "evaluation": 5,
    "exact_resume": 5,
    "rehearsal": 5,
    "recording": 6,
    "model_card": 6,
    "same_answers": 6,
    "trainer": 6,
    "preparation": 7,
    "run_folder": 7,
    "__init__": 8,
    "result_files": 3,
    "chat": 8,
    "serve": 6,
    "examination": 8,
    "eval_table": 9,
    "win_rate": 9,
    "planning": 8,
    "reward_lab": 8,
    "export": 9,
    "run": 9,
    "cli": 10,
    "__main__": 11,
}
"""A room imports only rooms of a strictly lower rank; the folder of rewards has rank 1."""

HEAVY = {"torch", "unsloth", "trl", "transformers", "peft", "vllm", "datasets"}
MAY_IMPORT_HEAVY = {
    *(
        "advantages",
        "batching",
        "canary",
        "cpu_lora",
        "exact_resume",
        "learner",
        "logprobs",
        "objective",
        "recording",
    ),
    *("rehearsal", "rollout", "trainer", "watch"),
}


def rooms_imported(tree, package="rloo_kit"):
    """Rooms that a module of ``package`` imports anywhere, inside functions too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            parent = ".".join(package.split(".")[: package.count(".") + 2 - node.level])
            inside = [node.module] if node.module else [alias.name for alias in node.names]
            names = [f"{parent}.{name}" for name in inside]
        else:
            continue
        for name in names:
            top, _, rest = name.partition(".")
            if top == "rloo_kit":
                room = rest.partition(".")[0]
                yield room if room in {*RANKS, "rewards", "examples"} else "__init__"


def loaded_at_import(tree):
    """Packages that importing the module imports: nothing in functions or TYPE_CHECKING."""
    waiting = [*tree.body]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield node.module.partition(".")[0]
        elif isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            waiting += node.orelse
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            waiting += ast.iter_child_nodes(node)


def parse(path):
    return ast.parse(path.read_text(encoding="utf-8"))


def files(folder):
    return pytest.mark.parametrize("path", sorted(folder.glob("*.py")), ids=lambda path: path.stem)


def test_every_room_has_a_rank():
    assert {path.stem for path in CORE.glob("*.py")} == set(RANKS)


@files(CORE)
def test_a_room_imports_only_rooms_of_a_lower_rank(path):
    rank = RANKS[path.stem]
    imported = set(rooms_imported(parse(path)))
    assert "rewards" not in imported, "the core loads rewards by name alone"
    assert {room: RANKS[room] for room in imported if RANKS[room] >= rank} == {}


@files(REWARDS)
def test_a_reward_imports_only_the_lowest_rooms(path):
    imported = set(rooms_imported(parse(path), "rloo_kit.rewards")) - {"rewards"}
    assert {room: RANKS[room] for room in imported if RANKS[room] >= 1} == {}


@pytest.mark.parametrize(
    ("code", "rooms"),
    [
        ("from rloo_kit.run import train", {"run"}),
        ("import rloo_kit.run", {"run"}),
        ("from rloo_kit import run", {"run"}),
        ("from rloo_kit import __version__", {"__init__"}),
        ("import rloo_kit", {"__init__"}),
        ("from .run import train", {"run"}),
        ("from . import run", {"run"}),
        ("def f():\n    from rloo_kit.run import train", {"run"}),
        ("from rloo_kit.rewards import Length", {"rewards"}),
        ("import rloo_kitten.run, torch", set()),
    ],
)
def test_every_way_to_import_a_room_is_seen(code, rooms):
    assert set(rooms_imported(ast.parse(code))) == rooms


@pytest.mark.parametrize(
    ("code", "rooms"),
    [("from .length import x", {"rewards"}), ("from ..run import x", {"run"}),
     ("from .. import run", {"run"}), ("from . import length", {"rewards"})],
)  # fmt: skip
def test_relative_imports_of_a_reward_are_resolved(code, rooms):
    assert set(rooms_imported(ast.parse(code), "rloo_kit.rewards")) == rooms


@files(CORE)
def test_heavy_libraries_are_imported_inside_functions(path):
    heavy = HEAVY & set(loaded_at_import(parse(path)))
    assert not heavy or path.stem in MAY_IMPORT_HEAVY


@files(REWARDS)
def test_rewards_import_heavy_libraries_inside_functions(path):
    assert not HEAVY & set(loaded_at_import(parse(path)))


@pytest.mark.parametrize(
    ("code", "heavy"),
    [
        ("import torch.nn", {"torch"}),
        ("try:\n    from trl import X\nexcept ImportError: pass", {"trl"}),
        ("class A:\n    import peft", {"peft"}),
        ("def f():\n    import torch", set()),
        ("if TYPE_CHECKING:\n    import torch\nelse:\n    import trl", {"trl"}),
    ],
)
def test_every_way_to_import_a_heavy_library_is_seen(code, heavy):
    assert set(loaded_at_import(ast.parse(code))) == heavy


# --- what an import loads -------------------------------------------------------------------------


def run_python(code, **options):
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, **options
    )


def loaded_by(code, names):
    """The packages of ``names`` that are loaded in a fresh interpreter after ``code``."""
    code = f"{code}\nimport sys\nprint('loaded', *sorted({names!r} & set(sys.modules)))"
    result = run_python(code)
    assert result.returncode == 0, result.stderr
    return set(result.stdout.splitlines()[-1].split()[1:])


def test_importing_the_kit_loads_nothing_heavy():
    assert loaded_by("import rloo_kit", HEAVY | {"yaml"}) == set()
    assert loaded_by("import rloo_kit.rewards", HEAVY | {"yaml"}) == set()


def test_help_loads_nothing_heavy():
    code = """
from rloo_kit.cli import main
try:
    main(["--help"])
except SystemExit as end:
    assert end.code == 0
else:
    raise AssertionError("no exit")
"""
    assert loaded_by(code, HEAVY | {"yaml"}) == set()


def test_checking_a_run_file_loads_nothing_heavy():
    code = """
from rloo_kit import read_run_file
from rloo_kit.config import known_trainer_fields
read_run_file("quickstart", ["trainer.beta=0.1", "trainer.missing_eos_penalty=1"])
assert {"beta", "missing_eos_penalty", "reward_timeout_seconds"} <= known_trainer_fields()
"""
    assert loaded_by(code, HEAVY) == set()


def test_the_check_for_loaded_packages_sees_one():
    assert loaded_by("import yaml", {"yaml", "torch"}) == {"yaml"}


def test_the_folder_of_rewards_is_not_importable_by_its_bare_name():
    result = run_python("import rewards", cwd=ROOT)
    assert result.returncode != 0
    assert "ImportError: this folder was imported as 'rewards'" in result.stderr
    assert "write 'import rloo_kit.rewards' instead" in result.stderr


# --- public names ---------------------------------------------------------------------------------


def test_public_names_are_sorted_and_listed():
    assert rloo_kit.__all__ == sorted(set(rloo_kit.__all__))
    assert set(rloo_kit.__all__) <= set(dir(rloo_kit))


@pytest.mark.parametrize("name", rloo_kit.__all__)
def test_every_public_name_resolves(name):
    value = getattr(rloo_kit, name)
    assert value is not None
    assert getattr(value, "__name__", name) == name


def test_no_public_name_is_a_modules_name():
    modules = {path.stem for path in CORE.glob("*.py")} | {"rewards", "examples", "assets"}
    assert not modules & set(rloo_kit.__all__)


def test_another_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="has no attribute 'tarin'"):
        _ = rloo_kit.tarin


# --- doctests -------------------------------------------------------------------------------------


def with_examples():
    for folder, package in ((CORE, "rloo_kit"), (REWARDS, "rloo_kit.rewards")):
        for path in sorted(folder.glob("*.py")):
            if ">>>" in path.read_text(encoding="utf-8"):
                yield f"{package}.{path.stem}"


def test_the_maths_the_data_and_every_reward_family_show_examples():
    families = {path.stem for path in REWARDS.glob("*.py") if not path.stem.startswith("_")}
    shown = set(with_examples())
    assert {"rloo_kit.advantages", "rloo_kit.tasks"} <= shown
    # A reward model is loaded from disk: no example of it runs everywhere.
    assert {f"rloo_kit.rewards.{name}" for name in families - {"reward_model"}} <= shown


@pytest.mark.parametrize("name", list(with_examples()))
def test_examples_in_docstrings_are_true(name):
    result = doctest.testmod(importlib.import_module(name))
    assert result.attempted > 0
    assert result.failed == 0


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
    """Names in the sdist, and in the wheel that is built from it."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    for name in project_files():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, source / name)
    result = subprocess.run(
        [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(source)],
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    (sdist,), (wheel,) = out.glob("*.tar.gz"), out.glob("*.whl")
    with tarfile.open(sdist) as archive:
        in_sdist = {name.partition("/")[2] for name in archive.getnames()}
    with zipfile.ZipFile(wheel) as archive:
        in_wheel = {name for name in archive.namelist() if not name.endswith("/")}
    return in_sdist, in_wheel


def test_the_wheel_holds_the_kit_its_rewards_examples_and_model(built):
    _, wheel = built
    expected = {
        f"rloo_kit/{path}"
        for path in map(Path.as_posix, project_files())
        if path.startswith(("rewards/", "examples/"))
    } | {path for path in map(Path.as_posix, project_files()) if path.startswith("rloo_kit/")}
    assert {
        "rloo_kit/py.typed", "rloo_kit/rewards/accuracy.py", "rloo_kit/examples/quickstart.yaml",
        "rloo_kit/examples/posts.jsonl", "rloo_kit/assets/tiny-thinker/model.safetensors",
    } <= expected  # fmt: skip
    assert expected - wheel == set()


def test_the_wheel_holds_nothing_else(built):
    _, wheel = built
    others = {name for name in wheel if not name.startswith("rloo_kit/")}
    assert {name.partition("/")[0] for name in others} == {
        f"rloo_kit-{rloo_kit.__version__}.dist-info"
    }
    assert not {name for name in wheel if re.search(r"(^|/)(tests?|conftest|scripts)[/_.]", name)}
    assert not {name for name in wheel if "__pycache__" in name}


def test_the_sdist_builds_on_its_own(built):
    sdist, _ = built
    assert {"pyproject.toml", "README.md", "LICENSE", "rewards/accuracy.py"} <= sdist


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


@pytest.mark.parametrize(
    "text",
    [
        "https://" + ".".join(("pypi", "org")) + "/simple",
        ".".join(("files.python" + "hosted", "org")),
        "in /" + "work/main",
        "'/" + "home/me'",
    ],
)
def test_a_forbidden_place_is_seen(text):
    assert NOT_TO_BE_NAMED.search(text)


@pytest.mark.parametrize("text", ["https://example.org/home/x", "network/x", "a/home/b", "/tmp/x"])
def test_another_place_is_not(text):
    assert not NOT_TO_BE_NAMED.search(text)
