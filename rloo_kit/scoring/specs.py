"""Functions that load rewards from specs (descriptions of a reward).

A spec is one of

- the name of a built-in reward: ``thinking``
- a function in a file: ``my_rewards.py:polite`` (the path is relative to the run file)
- a function in an installed package: ``package.module:function``
- a reward model, as a folder or a name on the hub: ``models/my-reward-model``, ``org/name``
- a callable
- a table, which can also set parameters of the reward: ``{name: thinking, weight: 0.5, long: 60}``

A spec that is text may end with a weight: ``thinking:0.5``, ``my_rewards.py:polite:0.5``. In a
table, ``weight`` may also be a schedule over training, such as ``{0: 1.0, 0.5: 0.2}``. These keys
of a table combine or change rewards (see ``composition``):

- ``only_if: thinking_format``, or ``{name: thinking_format, at_least: 0.5, otherwise: -1}``
- ``only_for: {task: [math, code]}``
- ``scaled_by: 0.1`` and ``clipped_to: [-1, 1]``
"""

import copy
import functools
import hashlib
import importlib
import importlib.util
import inspect
import math
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any, TypeAlias

from rloo_kit.errors import ConfigError, RewardLoadError
from rloo_kit.rewards import BUILTIN, RewardModel
from rloo_kit.scoring.composition import Composed, WeightSchedule, gated, rescaled, routed
from rloo_kit.scoring.contract import CheckedReward, checked, keywords_of, name_of
from rloo_kit.text.wording import did_you_mean, first_line, format_value, printable
from rloo_kit.types import Reward, Say, Tokenizer

RewardSpec: TypeAlias = "str | Mapping[str, Any] | Callable[..., Any] | LoadedReward"
Weight: TypeAlias = float | WeightSchedule

# Keys of a table that combine or change rewards; they are not parameters of the reward itself
COMPOSING = ("only_if", "only_for", "scaled_by", "clipped_to")
_TABLE_HINT = "write it as a table, {name: ..., weight: ..., parameter: ...}"
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_MODEL_FILES = ("config.json", "adapter_config.json")


@dataclass(frozen=True)
class LoadedReward:
    """Reward that is ready to be called, with the name of its metric and its weight in the sum."""

    func: Any  # a ``CheckedReward``, or a sequence-classification model that TRL calls itself
    name: str
    weight: Weight = 1.0
    is_bound: bool = False  # it is bound to a tokenizer, and must not be bound again

    def weight_at(self, progress: float) -> float:
        """Return the weight at ``progress``, the finished share of the training (0 to 1)."""
        weight = self.weight
        return weight.at(progress) if isinstance(weight, WeightSchedule) else weight


def with_weights(
    rewards: list[LoadedReward], weights: Sequence[float] | None
) -> list[LoadedReward]:
    """Return the rewards with their weights replaced by those of ``trainer.reward_weights``.

    If ``weights`` is None, every reward keeps its own weight. There may be fewer weights than
    rewards, because a run file does not list the rewards of environments. The rewards at the end,
    which get no new weight, then keep their own.
    """
    weights = weights or ()
    changed = [
        replace(reward, weight=float(weight))
        for reward, weight in zip(rewards, weights, strict=False)
    ]
    return changed + rewards[len(weights) :]


def load_rewards(
    specs: Iterable[RewardSpec] | str,
    tokenizer: Tokenizer | None = None,
    base_dir: str | Path | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    say: Say | None = None,
) -> list[LoadedReward]:
    """Return one loaded reward per spec, in the same order.

    Names are made distinct: two rewards called ``polite`` become ``polite`` and ``polite_2``.

    Args:
        specs: Specs of the rewards, or one spec as text. Each is the name of a built-in reward,
            ``file.py:function``, ``package.module:function``, a reward model (folder or hub name),
            a callable, or a table such as ``{name: thinking, weight: 0.5, long: 60}``.
        tokenizer: Tokenizer of the policy, for the rewards that have a ``bind`` method. None: the
            trainer or ``evaluate`` binds these rewards later, to the tokenizer that it uses.
        base_dir: Folder to which paths are relative; None: the working directory.
        chat_template_kwargs: Keyword arguments for the policy's chat template. They may determine
            whether the template opens a thought in the prompt.
        say: Function that prints a line before the code of a file or package is run.

    Raises:
        RewardLoadError: A reward cannot be found, imported, or created with its parameters.
    """
    if tokenizer is not None and chat_template_kwargs:
        with_settings: Any = copy.copy(tokenizer)
        with_settings.apply_chat_template = functools.partial(
            tokenizer.apply_chat_template, **chat_template_kwargs
        )
        tokenizer = with_settings
    loaded = []
    for spec in [specs] if isinstance(specs, str) else specs:
        reward = load_reward(spec, tokenizer, base_dir, say)
        used = {other.name for other in loaded}
        name = reward.name
        number = 1
        while name in used:
            number += 1
            name = f"{reward.name}_{number}"
        if name != reward.name:
            func = reward.func
            if isinstance(func, CheckedReward):
                func = replace(func, name=name)
            reward = replace(reward, func=func, name=name)
        loaded.append(reward)
    return loaded


def load_reward(
    spec: RewardSpec,
    tokenizer: Tokenizer | None = None,
    base_dir: str | Path | None = None,
    say: Say | None = None,
) -> LoadedReward:
    """Return the loaded reward of one spec; see ``load_rewards`` for arguments and errors."""
    loaded: Any = spec
    if isinstance(spec, str | Mapping):
        table = {"name": spec} if isinstance(spec, str) else spec
        loaded = _from_table(table, Path(base_dir or ""), say)
    elif hasattr(spec, "forward") and hasattr(spec, "state_dict"):
        # A torch module, which TRL calls itself
        name = getattr(getattr(spec, "config", None), "name_or_path", "") or "reward_model"
        loaded = LoadedReward(spec, Path(name).name)
    elif not isinstance(spec, LoadedReward):
        # An object with a method get_rewards(prompts, completions), as in older notebooks
        is_old = hasattr(spec, "get_rewards")
        func = checked(loaded.get_rewards, type(spec).__name__) if is_old else checked(spec)
        loaded = LoadedReward(func, func.name)
    if tokenizer is None or loaded.is_bound or not isinstance(loaded.func, CheckedReward):
        return loaded
    return replace(loaded, func=loaded.func.bind(tokenizer), is_bound=True)


def with_tokenizers(rewards: list[LoadedReward], given: object) -> list[LoadedReward]:
    """Return the rewards, with the given tokenizers set on the reward models among them.

    Args:
        rewards: The rewards.
        given: TRL's ``reward_processing_classes``: a list with a tokenizer or None for each reward,
            a single tokenizer, or None. A tokenizer for a reward without a model is ignored.

    Raises:
        ConfigError: The length of the list differs from that of ``rewards``, or the list has a
            tokenizer for a reward that is composed of other rewards.
    """
    if given is None:
        return rewards
    listed = given if isinstance(given, list | tuple) else [given]
    if len(listed) != len(rewards):
        raise ConfigError(
            f"reward_processing_classes has {len(listed)} entries, but reward_funcs has "
            f"{len(rewards)}: give a tokenizer or None for each reward"
        )
    found = []
    for reward, tokenizer in zip(rewards, listed, strict=True):
        inner: Any = getattr(reward.func, "reward", None)
        if tokenizer is not None and isinstance(inner, Composed):
            raise ConfigError(
                f"reward_processing_classes has a tokenizer for {reward.name!r}, which is composed "
                "of other rewards: give None there, and the tokenizer to the reward model in it"
            )
        if tokenizer is not None and isinstance(inner, RewardModel):
            inner = replace(inner, tokenizer=tokenizer)
            reward = replace(reward, func=replace(reward.func, reward=inner))
        found.append(reward)
    return found


# --- parts of a spec ---------------------------------------------------------------------------


def _from_table(table: Mapping[str, Any], base: Path, say: Say | None) -> LoadedReward:
    """Return the reward that a table describes, with its weight."""
    parameters = dict(table)
    name = parameters.pop("name", None)
    if name is None:
        raise RewardLoadError(
            f"the reward table {format_value(dict(table))} has no name; add 'name', such as "
            "name: thinking"
        )
    composing = {key: parameters.pop(key) for key in COMPOSING if key in parameters}
    given = parameters.pop("weight", None)
    weight = 1.0
    target = name
    target_name = name_of(name)
    if isinstance(name, str):
        target_name, weight = _split_weight(name)
        if target_name not in BUILTIN and _is_model(target_name, base):
            if "model" in parameters:
                raise RewardLoadError(
                    f"reward {format_value(target_name)} is the name of a model, but its table "
                    "names another model; remove 'model', or write name: reward_model"
                )
            parameters["model"] = target_name
            target = RewardModel
        else:
            target = BUILTIN.get(target_name) or find_object(target_name, base, say, "reward")
        if target is None:
            raise RewardLoadError(_unknown(target_name))
        for key in ("model", "base", "tokenizer") if target is RewardModel else ():
            if isinstance(value := parameters.get(key), str):
                path = _path(value, base)  # the value may also be a hub name
                parameters[key] = str(path) if path.is_dir() else value
    reward = _with_parameters(target, parameters, target_name)
    reward = checked(_composed(reward, composing, target_name, base, say))
    weight = _checked_weight(weight if given is None else given, target_name)
    return LoadedReward(reward, reward.name, weight)


def _composed(reward: Reward, keys: dict[str, Any], name: str, base: Path, say: Say | None) -> Any:
    """Return a reward after applying ``only_if``, ``only_for``, ``scaled_by`` and ``clipped_to``.

    Args:
        reward: The reward.
        keys: The keys among these four that the reward's table has, with their values.
        name: Name of the reward, for error messages.
        base: Folder to which paths are relative.
        say: See ``load_rewards``.
    """
    reward = checked(reward, given=name)
    try:
        if "scaled_by" in keys or "clipped_to" in keys:
            reward = rescaled(reward, scale=keys.get("scaled_by", 1.0), clip=keys.get("clipped_to"))
        if "only_if" in keys:
            gate = keys["only_if"]
            gate = dict(gate) if isinstance(gate, Mapping) else {"name": gate}
            limits = {key: gate.pop(key) for key in ("at_least", "otherwise") if key in gate}
            by = load_reward(gate, base_dir=base, say=say)
            if by.weight != 1.0:
                raise ValueError("a gate has no weight; give at_least")
            reward = gated(reward, by.func, **limits)
        if "only_for" in keys:
            reward = routed(reward, **keys["only_for"])
    except (TypeError, ValueError, OverflowError) as exc:
        raise RewardLoadError(
            f"reward {format_value(name)} cannot be composed from {format_value(keys)} "
            f"({first_line(exc)}); write only_if: NAME, only_for: {{column: value}}, "
            "scaled_by: NUMBER, clipped_to: [low, high]"
        ) from exc
    return reward


def _is_model(name: str, base: Path) -> bool:
    """Return whether a name is the folder of a reward model, or may be its name on the hub.

    Raises:
        RewardLoadError: No file or folder can have this name.
    """
    path = _path(name, base)
    if name and any((path / file).is_file() for file in _MODEL_FILES):
        return True
    return not name.endswith(".py") and bool(_HUB_NAME.fullmatch(name)) and not path.exists()


def find_object(name: str, base: Path, say: Say | None, what: str) -> Any:
    """Return the object that ``file.py:name`` or ``package.module:name`` refers to.

    Return None if the text has neither form. If the text is ``file.py`` without ``:name``, run the
    file, and raise an error that lists its functions and classes.

    Args:
        name: The text.
        base: Folder to which a path is relative.
        say: Function that prints a line with the name of the code before the code is run.
        what: Kind of the object, such as ``reward``, for error messages.

    Raises:
        RewardLoadError: The file or module is missing, raises, or does not have the object.
    """
    home, colon, attribute = name.rpartition(":")
    if name.endswith(".py"):
        home = name
        attribute = ""
    if home.endswith(".py"):
        path = _path(home, base)
        if not path.is_file():
            raise RewardLoadError(
                f"{what} file {format_value(str(path))} does not exist; give its path relative "
                "to the run file, or its absolute path"
            )
        here = Path.cwd()
        place = str(path.relative_to(here) if path.is_relative_to(here) else path)
        load = functools.partial(_load_file, path, what)
    elif colon:
        place = f"the installed module {home}"
        load = functools.partial(_import, home, name, what)
    else:
        return None
    if say is not None:
        function = printable(attribute) or "no function given"
        say(f"running code of {printable(place)} ({function})")
    return _attribute(load(), attribute, name, what)


def _path(text: str, base: Path) -> Path:
    try:
        path = base / Path(text).expanduser()
        path = path.parent.resolve() / path.name  # the target of a link may have no suffix .py
        path.exists()
    except (OSError, ValueError, RuntimeError):  # a name that no path can have
        raise RewardLoadError(_unknown(text)) from None
    return path


def _split_weight(spec: str) -> tuple[str, str | float]:
    """Split ``NAME:WEIGHT`` and return (NAME, WEIGHT); the weight is 1.0 if the text has none."""
    head, _, tail = spec.rpartition(":")
    try:
        float(tail)
    except ValueError:
        return spec, 1.0
    return (head, tail) if head else (spec, 1.0)


def _checked_weight(value: Any, name: str) -> Weight:
    """Return a weight as a float, or as a schedule if it is a mapping.

    Raises:
        RewardLoadError: The weight is not a finite number, or the mapping is not a schedule.
    """
    if isinstance(value, Mapping):
        try:
            return WeightSchedule.of(value)
        except ValueError as exc:
            raise RewardLoadError(f"reward {format_value(name)}: {exc}") from exc
    try:
        weight = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        weight = math.nan
    if not math.isfinite(weight):
        raise RewardLoadError(
            f"weight {format_value(value)} of reward {format_value(name)} is not a finite number; "
            f"give a number such as 0.5; to set parameters of the reward, {_TABLE_HINT}"
        )
    return weight


# --- modules and their contents ---------------------------------------------------------------


def _load_file(path: Path, what: str) -> ModuleType:
    """Run a Python file as a module and return the module.

    A file is run only once per process, unless its content changes. The module gets a unique name,
    and ``sys.path`` is not changed, so a file cannot replace a package of the same name.
    """
    digest = hashlib.sha256(str(path).encode() + path.read_bytes()).hexdigest()[:12]
    name = f"_rloo_kit_reward_{path.stem}_{digest}"
    if name in sys.modules:
        return sys.modules[name]
    spec: Any = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    # Register the module before it runs, since dataclasses and pickle look it up by name
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException as exc:
        del sys.modules[name]
        if not isinstance(exc, Exception | SystemExit):
            raise
        raise RewardLoadError(
            f"{what} file {format_value(str(path))} raised {type(exc).__name__} while it was "
            f"loaded ({first_line(exc)}); correct it or install what it imports (its folder is not "
            "on sys.path)"
        ) from exc
    return module


def _import(module: str, spec: str, what: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except Exception as exc:
        if module in BUILTIN:  # what follows the colon is a misspelt weight
            _checked_weight(spec.removeprefix(f"{module}:"), module)
        raise RewardLoadError(
            f"{what} {format_value(spec)}: importing {format_value(module)} raised "
            f"{type(exc).__name__} ({first_line(exc)}); install its package, or give a file as "
            "'path/to/file.py:function'"
        ) from exc


def _attribute(module: ModuleType, attribute: str, spec: str, what: str) -> Any:
    if attribute and hasattr(module, attribute):
        return getattr(module, attribute)
    names = [
        name
        for name, value in vars(module).items()
        if callable(value)
        and getattr(value, "__module__", "") == module.__name__
        and not name.startswith("_")
    ]
    raise RewardLoadError(
        f"{what} {format_value(spec)} cannot be found: its file or module has no object named "
        f"{format_value(attribute)}{did_you_mean(attribute, names)}; after a colon, as in "
        f"'file.py:function', give one of: {', '.join(names)}"
    )


def _unknown(name: str) -> str:
    return (
        f"unknown reward {format_value(name)}{did_you_mean(name, BUILTIN)}; give a built-in reward "
        f"({', '.join(sorted(BUILTIN))}), 'file.py:function', 'package.module:function', or a "
        "reward model (its folder, or its hub name 'org/name')"
    )


# --- objects and their parameters --------------------------------------------------------------


def _with_parameters(target: Any, parameters: dict[str, Any], name: str) -> Any:
    """Return a reward with its parameters set.

    A class, or the factory function of a built-in reward, is called with the parameters. For any
    other function, the parameters become keyword arguments of a ``functools.partial``.
    """
    known, takes_any, _ = keywords_of(target)
    for parameter in parameters:
        if parameter not in known and not (takes_any and inspect.isclass(target)):
            raise RewardLoadError(
                f"reward {format_value(name)} has no parameter "
                f"{format_value(parameter)}{did_you_mean(parameter, known)}; "
                f"give one of: {', '.join(known) or '(none)'}"
            )
    try:
        if inspect.isclass(target) or target is BUILTIN.get(name):
            return target(**parameters)
    except (TypeError, ValueError) as exc:
        raise RewardLoadError(
            f"reward {format_value(name)} cannot be made from {format_value(parameters)} "
            f"({first_line(exc)}); {_TABLE_HINT}"
        ) from exc
    return functools.partial(target, **parameters) if parameters else target
