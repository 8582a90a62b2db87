"""Layers: which package may import which, what an import loads, public names, doctests."""

import ast
import doctest
import importlib
from pathlib import Path

import pytest
from fresh_python import run_python

import rloo_kit

ROOT = Path(__file__).resolve().parents[1]
CORE = ROOT / "rloo_kit"
REWARDS = ROOT / "rewards"

# Packages and top-level modules, lowest layer first. Each may import only from lower layers
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

# Libraries that take seconds to load; they are imported inside functions
HEAVY = {"torch", "unsloth", "trl", "transformers", "peft", "vllm", "datasets"}

# Packages that may import them at the top, for tensors or TRL's classes (TID253 lists the files)
TENSOR_PACKAGES = {
    "rloo", "training", "checkpoints", "sampling", "diagnosis", "live", "runs", "machine"
}  # fmt: skip


def name_in_kit(path):
    """Return the package of a module, or the name of a module at the top level."""
    return path.relative_to(CORE).parts[0].removesuffix(".py")


def imported(tree):
    """Yield the kit's packages and top-level modules that a module imports, also in functions."""
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


def loaded_at_import(tree):
    """Yield the packages that are imported with a module: not in functions or TYPE_CHECKING."""
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


def files(folder, pattern):
    return pytest.mark.parametrize(
        "path", sorted(folder.glob(pattern)), ids=lambda path: str(path.relative_to(folder))
    )


def upward_imports():
    """Return (module, package) for each import from the same or a higher layer."""
    return [
        (str(path.relative_to(CORE)), name)
        for path in sorted(CORE.rglob("*.py"))
        for name in sorted(set(imported(parse(path))) - {name_in_kit(path)})
        if name != "__init__" and RANK[name] >= RANK[name_in_kit(path)]
    ]


def test_every_package_has_a_layer():
    packages = {path.parent.name for path in CORE.glob("*/__init__.py")}
    assert packages | {path.stem for path in CORE.glob("*.py")} | {"rewards"} == set(RANK)


def test_no_module_is_imported_from_a_higher_layer():
    inside_the_first = {"errors", "types", "text"}  # which the rest of that layer may import
    assert [(p, name) for p, name in upward_imports() if name not in inside_the_first] == []


def importers(core):
    """Return the modules that each module of a package imports, also for types and in functions."""
    package = ".".join(core.relative_to(ROOT).parts)
    modules = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in core.rglob("*.py")
    }
    found = {}
    for name, path in modules.items():
        found[name] = set()
        for node in ast.walk(parse(path)):
            if isinstance(node, ast.ImportFrom) and node.module:
                whole = f"{package}.{node.module}" if node.level else node.module
                inside = {f"{whole}.{alias.name}" for alias in node.names} & modules.keys()
                found[name] |= inside or {whole} & modules.keys()
    return found


def circles(edges):
    """Return the groups of modules that import each other in a circle."""

    def reached_from(name):
        seen = set()
        waiting = [name]
        while waiting:
            new = edges[waiting.pop()] - seen
            seen |= new
            waiting += new
        return seen

    reached = {name: reached_from(name) for name in edges}
    return {
        frozenset(other for other in reached[name] if name in reached[other])
        for name in edges
        if name in reached[name]
    }


def test_no_modules_import_each_other_in_a_circle():
    assert circles(importers(CORE)) | circles(importers(REWARDS)) == set()


def test_a_circle_is_found():
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == {frozenset("bc")}


def test_parts_of_a_step_take_what_they_use_and_not_the_trainer():
    parts = ("data", "scoring", "rloo", "sampling", "checkpoints", "training")
    assert [
        (str(path.relative_to(CORE)), node.name)
        for part in parts
        for path in sorted((CORE / part).glob("*.py"))
        for node in functions_outside_callbacks(parse(path))
        if "trainer" in {arg.arg for arg in (*node.args.args, *node.args.kwonlyargs)}
    ] == []


def functions_outside_callbacks(tree):
    """Return functions and methods, except those of callbacks, which transformers calls."""
    hooks = {
        id(inside)
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef) and "TrainerCallback" in map(ast.unparse, node.bases)
        for inside in ast.walk(node)
    }
    functions = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))
    return [node for node in functions if id(node) not in hooks]


@files(REWARDS, "*.py")
def test_a_reward_imports_only_lower_layers(path):
    above = {name for name in imported(parse(path)) if RANK[name] > RANK["rewards"]}
    assert above <= {"__init__"}


@files(CORE, "**/*.py")
def test_heavy_libraries_are_imported_inside_functions(path):
    heavy = HEAVY & set(loaded_at_import(parse(path)))
    assert not heavy or name_in_kit(path) in TENSOR_PACKAGES


@files(REWARDS, "*.py")
def test_rewards_import_heavy_libraries_inside_functions(path):
    assert not HEAVY & set(loaded_at_import(parse(path)))


def test_the_checks_see_imports():
    code = "import rloo_kit.runs.train\ndef f():\n    from rloo_kit import text\nimport torch.nn"
    assert set(imported(ast.parse(code))) == {"runs", "text"}
    assert set(loaded_at_import(ast.parse(code))) == {"rloo_kit", "torch"}


# --- what an import loads -------------------------------------------------------------------------


def loaded_by(code, names):
    """Return the packages of ``names`` that are loaded after ``code`` in a fresh interpreter."""
    code = f"{code}\nimport sys\nprint('loaded', *sorted({names!r} & set(sys.modules)))"
    return set(run_python(code).splitlines()[-1].split()[1:])


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
    """Most programs in these folders take too long to be run by a test."""
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
