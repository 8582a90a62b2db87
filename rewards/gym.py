"""Reward that calls the verifier of a reasoning-gym task."""

import ast
import functools
import json
import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rloo_kit.errors import RewardContractError, RewardLoadError
from rloo_kit.types import Score

from ._text import parsed_expression, tagged_answer
from .countdown import evaluate_expression
from .thinking import AnswerReward, TextReward

# A longer answer is scored like an empty answer, since some verifiers are very slow
MAX_CHARACTERS = 20_000


@dataclass(frozen=True)
class ReasoningGym(AnswerReward, TextReward):
    """Reward an answer with the score of the task's own verifier.

    Range: [0, 1]; most verifiers give 1.0 for a right answer, and many give a small score for a
    wrong answer that is well formed. The answer is the text in the last ``<answer>`` after the
    thought, or else all text after the thought, without white space at its ends. The score is 0.0
    if the verifier raises. It is None if the row has no value in the column ``entry``, which
    ``load_prompts("reasoning_gym:TASK")`` makes. Source: ``score_answer`` of the tasks of
    reasoning-gym 0.1.25.

    Nine verifiers run the answer as Python code, so they get only harmless answers. For four of
    them, the answer must be a literal. For four others, it must be a formula. For puzzle24, it may
    have only whole numbers, ``+ - * /`` and brackets. Any other answer is scored like an empty
    answer. The setting ``trainer.reward_timeout_seconds`` limits the time for a formula. Do not
    train on game_of_life_halting, whose verifier accepts every text, or on coin_flip, whose
    verifier accepts "0" for nearly every probability.

    >>> from rloo_kit.rewards import ReasoningGym
    >>> ReasoningGym()(completions=["4"], entry=[None])
    [None]
    """

    __name__ = "reasoning_gym"
    _reads = ("entry",)

    def _score(self, text: str, opened: bool, entry: str | None) -> Score:
        if entry is None:
            return None
        answer = self.answer(text, opened)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # answers that are read as Python cause some
            task, settings, content = _read_entry(entry)
            _check_what_is_run(task, content)
            verify = _verifier(task, settings)
            if answer is None:
                return 0.0
            answer = tagged_answer(answer)
            # Some verifiers run an answer by eval.
            if len(answer) > MAX_CHARACTERS or (task in _GUARDS and not _GUARDS[task](answer)):
                answer = ""
            try:
                score = float(verify(answer, content))
            except Exception:  # each verifier reads answers in its own way
                return 0.0
        return min(max(score, 0.0), 1.0) if math.isfinite(score) else 0.0


# --- the entry and its verifier ------------------------------------------------------------------


def _read_entry(text: str) -> tuple[str, str, dict[str, Any]]:
    """Parse the column ``entry`` and return (task, settings as JSON, entry as the task made it).

    Raises:
        RewardContractError: The text is not an entry of reasoning-gym.
    """
    try:
        entry = json.loads(text, object_hook=_restored)
        settings = json.dumps(entry.pop("settings"), sort_keys=True)
        return entry["metadata"]["source_dataset"], settings, entry
    except (TypeError, ValueError, KeyError, AttributeError) as exc:
        raise RewardContractError(
            f"reward 'reasoning_gym' got {str(text)[:80]!r} in the column 'entry', which is not an "
            "entry of reasoning-gym; make the prompts with load_prompts('reasoning_gym:TASK')"
        ) from exc


def _restored(value: dict[str, Any]) -> Any:
    """Restore a tuple, or a dict with keys that are not text, from its form in JSON.

    Any other dict is returned unchanged.
    """
    if value.keys() == {"__tuple__"}:
        return tuple(value["__tuple__"])
    if value.keys() == {"__items__"}:
        return dict(value["__items__"])
    return value


# Task -> path of keys to a text in the entry, which the task's verifier runs as Python code
_RUN_BY_VERIFIER = {
    "bitwise_arithmetic": ("metadata", "problem"),
    "intermediate_integration": ("metadata", "integrand"),
    "number_sorting": ("answer",),
    "polynomial_multiplication": ("answer",),
    "simple_integration": ("metadata", "integrand"),
}


def _check_what_is_run(task: str, entry: dict[str, Any]) -> None:
    """Refuse an entry whose verifier would run text that is not arithmetic as Python code.

    Raises:
        RewardContractError: The verifier would run such text, or the task is ``composite``, which
            is never allowed.
    """
    text: Any = entry
    for key in _RUN_BY_VERIFIER.get(task, ()):
        text = text.get(key)
    tree = parsed_expression(text) if isinstance(text, str) else None
    is_safe = tree is not None and _consists_of(tree, _ARITHMETIC)
    if task == "composite" or (task in _RUN_BY_VERIFIER and not is_safe):
        raise RewardContractError(
            f"reward 'reasoning_gym' got an entry of {task!r} whose verifier would run "
            f"{str(text)[:80]!r} as Python; make the prompts with "
            "load_prompts('reasoning_gym:TASK'), and trust no other entries"
        )


@functools.lru_cache(maxsize=128)
def _verifier(task: str, settings: str) -> Callable[[str, dict[str, Any]], float]:
    try:
        import reasoning_gym as package
    except ImportError as exc:
        raise RewardLoadError(
            f"reward 'reasoning_gym' needs the package reasoning-gym ({exc}): "
            "pip install reasoning-gym"
        ) from exc
    try:
        return package.create_dataset(task, size=1, seed=0, **json.loads(settings)).score_answer
    except Exception as exc:  # each task checks in its own way, most by assert
        raise RewardContractError(
            f"reasoning-gym has no task {task!r} with the settings {settings} ({exc}); make the "
            "prompts again with the installed version: load_prompts('reasoning_gym:TASK')"
        ) from exc


# --- answers that a verifier must not get --------------------------------------------------------

_LITERAL = (ast.List, ast.Tuple, ast.Constant, ast.Name, ast.UnaryOp, ast.USub, ast.Load)
_FORMULA = (
    *(ast.BinOp, ast.UnaryOp, ast.Constant, ast.Name, ast.Call, ast.Load),
    *(ast.Add, ast.Sub, ast.Mult, ast.Div, ast.Pow, ast.USub, ast.UAdd),
)
_ARITHMETIC = (*_LITERAL, *_FORMULA, ast.LShift, ast.RShift)
_FUNCTIONS = """
sin cos tan sec csc cot asin acos atan sinh cosh tanh asinh acosh atanh exp log ln sqrt Abs
""".split()  # noqa: SIM905 - a table
MAX_FORMULA_CHARACTERS = 300
MAX_EXPONENT = 30


def _consists_of(tree: ast.AST, kinds: tuple[type, ...]) -> bool:
    """Return whether a syntax tree has only nodes of these types.

    Calls are allowed only for elementary functions such as ``sin``.
    """
    for node in ast.walk(tree):
        match node:
            case ast.Call(ast.Name(name), _, []) if name in _FUNCTIONS:
                pass
            case ast.Call():
                return False
        if not isinstance(node, kinds):
            return False
    return True


def _is_literal(text: str) -> bool:
    """Return whether ``eval`` of the text is harmless.

    It is harmless if it fails, or if the text has only constants, names, and lists or tuples of
    these.
    """
    try:
        tree = ast.parse(text.strip(), mode="eval")
    except (SyntaxError, ValueError):  # it fails in the verifier too
        return True
    except (RecursionError, MemoryError):
        return False
    return _consists_of(tree.body, _LITERAL)


def _is_formula(text: str) -> bool:
    """Return whether the text is a formula that can be computed in a short time.

    It may have arithmetic, small powers, variables and elementary functions.
    """
    tree = parsed_expression(text) if len(text) <= MAX_FORMULA_CHARACTERS else None
    if tree is None or not _consists_of(tree, _FORMULA) or _nesting(tree) > 2:
        return False
    return all(map(_is_bounded, ast.walk(tree)))


def _is_bounded(node: ast.AST) -> bool:
    """Return whether a node is allowed in a formula.

    Constants that are not finite real numbers, names that begin with ``_`` and large powers are
    not allowed.
    """
    match node:
        case ast.Constant(value):
            return isinstance(value, int | float) and value < math.inf
        case ast.Name(name):
            return not name.startswith("_")
        case ast.BinOp(_, ast.Pow(), exponent):
            return _is_small(exponent)
    return True


def _is_small(exponent: ast.AST) -> bool:
    """Return whether an exponent has no powers and at most two numbers, both small."""
    values = [node.value for node in ast.walk(exponent) if isinstance(node, ast.Constant)]
    return (
        not _nesting(exponent)
        and len(values) <= 2
        and all(isinstance(value, int | float) and value <= MAX_EXPONENT for value in values)
    )


def _nesting(node: ast.AST) -> int:
    """Return the depth to which powers are nested in a syntax tree."""
    inside = max(map(_nesting, ast.iter_child_nodes(node)), default=0)
    return inside + isinstance(getattr(node, "op", None), ast.Pow)


# Task whose verifier must not get every answer -> function that says whether it may get an answer
_GUARDS: dict[str, Callable[[str], bool]] = {
    "binary_matrix": _is_literal,
    "n_queens": _is_literal,
    "spiral_matrix": _is_literal,
    "string_insertion": _is_literal,
    "countdown": _is_formula,
    "intermediate_integration": _is_formula,
    "polynomial_multiplication": _is_formula,
    "puzzle24": lambda text: evaluate_expression(text) is not None,
    "simple_integration": _is_formula,
    "complex_arithmetic": lambda text: "nan" not in text.lower(),  # the verifier accepts it
}

# The reward with its defaults
reasoning_gym = ReasoningGym()
