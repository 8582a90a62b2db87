"""Private names of TRL and transformers that the kit uses: each is listed, and exists."""

import ast
import inspect
from pathlib import Path

import transformers
import trl
from transformers import (
    GenerationMixin,
    PreTrainedConfig,
    PreTrainedModel,
    Trainer,
    TrainingArguments,
)
from trl.trainer import grpo_trainer, rloo_trainer, utils

import rloo_kit

KIT = Path(rloo_kit.__file__).parent
CLASSES = (
    trl.RLOOTrainer, trl.GRPOTrainer, Trainer, TrainingArguments, PreTrainedModel,
    GenerationMixin, PreTrainedConfig,
)  # fmt: skip
MODULES = (rloo_trainer, grpo_trainer, transformers.trainer, utils)
# What is used where, and why there is no public way
USED = {
    ("sampling/decoding.py", "_is_stateful"): "a state-space model has no cache to continue",
    ("sampling/decoding.py", "_prefill"): "generate's own first pass",
    ("sampling/decoding.py", "_sample"): "generate's own loop, where rows cannot leave the batch",
    ("sampling/decoding.py", "_update_model_kwargs_for_generation"): "generate's own next step",
    ("training/trl_step.py", "_ChunkedLogProbFunction"): "TRL's head has no other name",
    ("training/trl_step.py", "_tool_call_loop"): "TRL's RLOO has no tools",
    ("training/trl_step.py", "_logs"): "the table that log_completions shows",
    ("training/trl_step.py", "_metrics"): "scores of held-out prompts are not TRL's evaluation",
}


def is_private(name):
    return name.startswith("_") and not name.startswith("__")


def assigned_in(source):
    """Private names that a source defines: functions, classes, and attributes of self."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr


def known():
    names = {name for one in CLASSES for name in dir(one)}
    for module in MODULES:
        names |= {*vars(module), *assigned_in(inspect.getsource(module))}
    return {name for name in names if is_private(name)}


def used_in(tree, names):
    """Private names of ``names`` that a module reads or writes, and does not define itself."""
    nodes = [*ast.walk(tree)]
    own = {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    for node in (one for one in nodes if isinstance(one, ast.ClassDef)):
        if not any(ast.unparse(base).endswith("Trainer") for base in node.bases):
            own |= {*assigned_in(ast.unparse(node))}
    words = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    for node in nodes:
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr"):
            words |= {one.value for one in node.args if isinstance(one, ast.Constant)}
    return (words & names) - own


def test_the_private_names_are_these_few_and_exist_in_the_installed_version():
    names = known()
    found = {
        (str(path.relative_to(KIT)), name)
        for path in KIT.rglob("*.py")
        for name in used_in(ast.parse(path.read_text(encoding="utf-8")), names)
    }
    assert found == set(USED)


def test_a_use_is_found():
    tree = ast.parse(
        "class A(Trainer):\n    def _a(self):\n        self._b = getattr(self, '_c') + self._a"
    )
    assert used_in(tree, {"_a", "_b", "_c", "_d"}) == {"_b", "_c"}
