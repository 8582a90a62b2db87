"""Layers: which package may import which, what an import loads, public names, doctests."""

import ast
import doctest
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import rloo_kit

ROOT = Path(__file__).resolve().parents[1]
CORE = ROOT / "rloo_kit"
REWARDS = ROOT / "rewards"

# Packages and top-level modules, lowest first: each imports only what is above it in this list.
LAYERS = [
    {"errors", "types", "text", "output_folder"},
    {"config"},
    {"machine"},
    {"rewards"},
    {"scoring"},
    {"models"},
    {"data"},
    {"rloo"},
    {"tools"},
    {"sampling"},
    {"diagnosis"},
    {"checkpoints"},
    {"live"},
    {"training"},
    {"job"},
    {"planning", "report"},
    {"evaluation"},
    {"runs"},
    {"reward_lab"},
    {"export"},
    {"cli", "notebook_form"},
    {"__main__", "__init__"},
]

RANK = {name: rank for rank, layer in enumerate(LAYERS) for name in layer}

# Libraries that take seconds to load; ruff's TID253 bans them at the top of other modules.
HEAVY = {"torch", "unsloth", "trl", "transformers", "peft", "vllm", "datasets"}


def name_in_kit(path):
    """The package of a module, or its own name at the top level."""
    return path.relative_to(CORE if CORE in path.parents else ROOT).parts[0].removesuffix(".py")


def imported(tree):
    """Packages and top-level modules of the kit that a module imports, inside functions too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for top, _, rest in (name.partition(".") for name in names):
            if top == "rloo_kit":
                name = rest.partition(".")[0]
                yield name if name in RANK else "__init__"


def parse(path):
    return ast.parse(path.read_text(encoding="utf-8"))


def test_every_package_has_a_layer():
    packages = {path.parent.name for path in CORE.glob("*/__init__.py")}
    assert packages | {path.stem for path in CORE.glob("*.py")} | {"rewards"} == set(RANK)


def test_no_module_is_imported_from_a_higher_layer():
    inside_the_first = {"errors", "types", "text"}  # of which the others of that layer know
    assert [
        (str(path), name)
        for path in [*CORE.rglob("*.py"), *REWARDS.glob("*.py")]
        for name in {*imported(parse(path))} - {name_in_kit(path), "__init__"} - inside_the_first
        if RANK[name] >= RANK[name_in_kit(path)]
    ] == []


def test_the_checks_see_imports():
    code = "import rloo_kit.runs.train\ndef f():\n    from rloo_kit import text\nimport torch.nn"
    assert set(imported(ast.parse(code))) == {"runs", "text"}


# --- what an import loads -------------------------------------------------------------------------


def loaded_by(code, names):
    """The packages of ``names`` that are loaded in a fresh interpreter after ``code``."""
    code = f"{code}\nimport sys\nprint('loaded', *sorted({names!r} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return set(result.stdout.splitlines()[-1].split()[1:])


def test_importing_the_kit_loads_nothing_heavy():
    assert loaded_by("import rloo_kit", HEAVY | {"yaml"}) == set()
    assert loaded_by("import rloo_kit.rewards", HEAVY | {"yaml"}) == set()


def test_checking_a_run_file_loads_nothing_heavy():
    code = """
from rloo_kit import read_run_file
from rloo_kit.config.trainer_settings import known_trainer_fields
read_run_file("quickstart", ["trainer.beta=0.1", "trainer.missing_eos_penalty=1"])
assert {"beta", "missing_eos_penalty", "reward_timeout_seconds"} <= known_trainer_fields()
"""
    assert loaded_by(code, HEAVY) == set()


# --- public names ---------------------------------------------------------------------------------


def test_public_names_are_sorted_and_listed():
    assert rloo_kit.__all__ == sorted(set(rloo_kit.__all__))
    assert set(rloo_kit.__all__) <= set(dir(rloo_kit))


@pytest.mark.parametrize("name", rloo_kit.__all__)
def test_every_public_name_resolves(name):
    assert getattr(getattr(rloo_kit, name), "__name__", name) == name


# --- doctests -------------------------------------------------------------------------------------


def with_examples():
    for folder, package in ((CORE, "rloo_kit"), (REWARDS, "rloo_kit.rewards")):
        for path in sorted(folder.rglob("*.py")):
            if ">>>" in path.read_text(encoding="utf-8"):
                inside = path.relative_to(folder).with_suffix("")
                yield ".".join((package, *inside.parts))


@pytest.mark.parametrize("name", list(with_examples()))
def test_examples_in_docstrings_are_true(name):
    result = doctest.testmod(importlib.import_module(name))
    assert result.attempted > 0
    assert result.failed == 0


@pytest.mark.parametrize("folder", ["benchmarks", "scripts"])
def test_programs_import_names_that_exist(folder):
    """Most programs of these folders take too long for a test to run."""
    wanted = {
        (node.module, alias.name)
        for path in (ROOT / folder).glob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("rloo_kit")
        for alias in node.names
    }
    assert wanted
    for module, name in sorted(wanted):
        whole = importlib.import_module(module)
        assert hasattr(whole, name) or importlib.import_module(f"{module}.{name}")
