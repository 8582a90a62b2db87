"""Loading of rewards from specs: built in, from a file, from a package.

A spec is one of

- a built-in name: ``thinking``
- a function of a file: ``my_rewards.py:polite`` (relative to the run file)
- a function of an installed package: ``package.module:function``
- the folder of a reward model: ``models/my-reward-model``, or its name on the hub: ``org/name``
- a callable
- a table, which also gives parameters: ``{name: thinking, weight: 0.5, long: 60}``

A text may end with a weight: ``thinking:0.5``, ``my_rewards.py:polite:0.5``. A table's ``weight``
may be a schedule over training, ``{0: 1.0, 0.5: 0.2}``, and a table composes with the keys

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
from rloo_kit.scoring.contract import checked, keywords_of, name_of
from rloo_kit.text.wording import did_you_mean, first_line, format_value, printable
from rloo_kit.types import Reward, Say, Tokenizer

RewardSpec: TypeAlias = "str | Mapping[str, Any] | Callable[..., Any] | LoadedReward"
Weight: TypeAlias = float | WeightSchedule

# Keys of a table that say how its reward counts; they are not parameters of the reward
COMPOSING = ("only_if", "only_for", "scaled_by", "clipped_to")
_TABLE_HINT = "write it as a table, {name: ..., weight: ..., parameter: ...}"
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_MODEL_FILES = ("config.json", "adapter_config.json")


@dataclass(frozen=True)
class LoadedReward:
    """A checked reward with the name of its metric and its weight in the score."""

    func: Any  # a ``CheckedReward``, or a sequence-classification model that TRL calls itself
    name: str
    weight: Weight = 1.0

    def weight_at(self, progress: float) -> float:
        """Return the weight at a share of the training, in [0, 1]."""
        return self.weight if isinstance(self.weight, int | float) else self.weight.at(progress)


def with_weights(
    rewards: list[LoadedReward], weights: Sequence[float] | None
) -> list[LoadedReward]:
    """Return the rewards with the weights of ``trainer.reward_weights``, if it is set."""
    if not weights:
        return rewards
    return [
        replace(reward, weight=float(weight))
        for reward, weight in zip(rewards, weights, strict=False)
    ]


def load_rewards(
    specs: Iterable[RewardSpec],
    tokenizer: Tokenizer | None = None,
    base_dir: str | Path | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    say: Say | None = None,
) -> list[LoadedReward]:
    """Return one loaded reward per spec, in order, with distinct names (``polite``, ``polite_2``).

    Args:
        specs: As the docstring of this module describes.
        tokenizer: The policy's; rewards with a ``bind`` method are bound to it.
        base_dir: Folder that relative paths start from; None: the working directory.
        chat_template_kwargs: Arguments of the policy's chat template, which may open the thought.
        say: Called with a line that names foreign code before it is imported.

    Raises:
        RewardLoadError: A reward cannot be found, imported or made.
    """
    if tokenizer is not None and chat_template_kwargs:
        with_settings: Any = copy.copy(tokenizer)
        with_settings.apply_chat_template = functools.partial(
            tokenizer.apply_chat_template, **chat_template_kwargs
        )
        tokenizer = with_settings
    loaded: list[LoadedReward] = []
    for spec in specs:
        reward = load_reward(spec, tokenizer, base_dir, say)
        used = {other.name for other in loaded}
        name = reward.name
        number = 1
        while name in used:
            number += 1
            name = f"{reward.name}_{number}"
        if name != reward.name:
            reward = replace(reward, func=replace(reward.func, name=name), name=name)
        loaded.append(reward)
    return loaded


def load_reward(
    spec: RewardSpec,
    tokenizer: Tokenizer | None = None,
    base_dir: str | Path | None = None,
    say: Say | None = None,
) -> LoadedReward:
    """Return the reward of one spec; its arguments and errors are those of ``load_rewards``."""
    if isinstance(spec, LoadedReward):
        return spec
    if hasattr(spec, "forward") and hasattr(spec, "state_dict"):
        # A torch module, which TRL calls itself
        name = getattr(getattr(spec, "config", None), "name_or_path", "") or "reward_model"
        return LoadedReward(spec, Path(name).name)
    func: Any = spec
    weight = 1.0
    if isinstance(spec, str | Mapping):
        table = {"name": spec} if isinstance(spec, str) else spec
        func, weight = _reward_and_weight(table, Path(base_dir or ""), say)
    elif hasattr(spec, "get_rewards"):
        # An object with get_rewards(prompts, completions), as older notebooks have it
        func = checked(func.get_rewards, type(spec).__name__)
    _refuse_non_reward(func, spec)
    reward = checked(func)
    if tokenizer is not None:
        reward = reward.bind(tokenizer)
    return LoadedReward(reward, reward.name, weight)


def with_tokenizers(rewards: list[LoadedReward], given: object) -> list[LoadedReward]:
    """Return the rewards after each reward model of the kit has got the tokenizer given for it.

    Args:
        rewards: The rewards.
        given: TRL's ``reward_processing_classes``: one tokenizer for each reward, or None.

    Raises:
        ConfigError: The number of tokenizers differs from that of the rewards, or one is given for
            a reward that is composed of others.
    """
    if given is None:
        return rewards
    listed = given if isinstance(given, list | tuple) else [given]
    if len(listed) != len(rewards):
        raise ConfigError(
            f"reward_processing_classes holds {len(listed)} and must match reward_funcs, which "
            f"holds {len(rewards)}: give a tokenizer or None for each reward"
        )
    return list(map(_with_tokenizer, rewards, listed))


def _with_tokenizer(reward: LoadedReward, tokenizer: object) -> LoadedReward:
    inner: Any = getattr(reward.func, "reward", None)
    if isinstance(inner, Composed) and tokenizer is not None:
        raise ConfigError(
            f"reward_processing_classes holds a tokenizer for {reward.name!r}, which is composed "
            "of other rewards: give None there, and give the tokenizer to the reward model in it"
        )
    if tokenizer is None or not isinstance(inner, RewardModel):
        return reward
    return replace(reward, func=replace(reward.func, reward=replace(inner, tokenizer=tokenizer)))


def reward_behind(name: str) -> Any:
    """Return the class or factory behind the short name of a built-in reward.

    Raises:
        RewardLoadError: There is no such name.
    """
    if name not in BUILTIN:
        raise RewardLoadError(_unknown(name))
    return BUILTIN[name]


# --- a spec in parts ---------------------------------------------------------------------------


def _reward_and_weight(table: Mapping[str, Any], base: Path, say: Say | None) -> tuple[Any, Weight]:
    """Return the reward of a table, and its weight."""
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
        model = parameters.get("model")
        if target_name == "reward_model" and isinstance(model, str):
            # A folder, unless it is a hub name
            path = _path(model, base)
            parameters["model"] = str(path) if path.is_dir() else model
        target = _target(target_name, base, say)
    reward = _with_parameters(target, parameters, target_name)
    reward = _composed(reward, composing, target_name, base, say)
    return reward, _checked_weight(weight if given is None else given, target_name)


def _composed(reward: Reward, keys: dict[str, Any], name: str, base: Path, say: Say | None) -> Any:
    """Return a reward with the composing keys of its table applied."""
    _refuse_non_reward(reward, name)
    try:
        if "scaled_by" in keys or "clipped_to" in keys:
            reward = rescaled(reward, scale=keys.get("scaled_by", 1.0), clip=keys.get("clipped_to"))
        if "only_if" in keys:
            gate = keys["only_if"]
            gate = dict(gate) if isinstance(gate, Mapping) else {"name": gate}
            limits = {key: gate.pop(key) for key in ("at_least", "otherwise") if key in gate}
            reward = gated(reward, load_reward(gate, base_dir=base, say=say).func, **limits)
        if "only_for" in keys:
            reward = routed(reward, **keys["only_for"])
    except (TypeError, ValueError, OverflowError) as exc:
        raise RewardLoadError(
            f"reward {format_value(name)} cannot be composed from {format_value(keys)} "
            f"({first_line(exc)}); write only_if: NAME, only_for: {{column: value}}, "
            "scaled_by: NUMBER, clipped_to: [low, high]"
        ) from exc
    return reward


def _target(name: str, base: Path, say: Say | None) -> Any:
    """Return the object that a text names; for a built-in, the class or function behind it."""
    if name in BUILTIN:
        return BUILTIN[name]
    path = _path(name, base)
    if name and any((path / file).is_file() for file in _MODEL_FILES):
        return RewardModel(str(path))
    if not name.endswith(".py") and _HUB_NAME.fullmatch(name) and not path.exists():
        return RewardModel(name)
    found = find_object(name, base, say, "reward")
    if found is None:
        raise RewardLoadError(_unknown(name))
    return found


def find_object(name: str, base: Path, say: Say | None, what: str) -> Any:
    """Return the object behind ``file.py:name`` or ``package.module:name``; None for other texts.

    Args:
        name: The text.
        base: Folder that a relative path starts from.
        say: Called with a line that names the code before it is imported.
        what: The kind of object, for messages.

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
                "to the run file, or an absolute one"
            )
        here = Path.cwd()
        shown = path.relative_to(here) if path.is_relative_to(here) else path
        _announce(str(shown), attribute, say)
        return _attribute(_load_file(path, what), attribute, name, what)
    if not colon:
        return None
    _announce(f"the installed module {home}", attribute, say)
    return _attribute(_import(home, name, what), attribute, name, what)


def _announce(place: str, attribute: str, say: Say | None) -> None:
    if say is not None:
        function = printable(attribute) or "no function named"
        say(f"running code of {printable(place)} ({function})")


def _path(text: str, base: Path) -> Path:
    try:
        path = (base / Path(text).expanduser()).resolve()
        path.exists()
    except (OSError, ValueError, RuntimeError):  # too long, or with bytes that no path has
        raise RewardLoadError(_unknown(text)) from None
    return path


def _split_weight(spec: str) -> tuple[str, str | float]:
    """Return (spec without its weight, weight); 1.0 if the last part is not a number."""
    head, _, tail = spec.rpartition(":")
    try:
        float(tail)
    except ValueError:
        return spec, 1.0
    if tail.isidentifier() and head not in BUILTIN and ":" not in Path(head).name:
        return spec, 1.0  # a function called nan or inf
    return (head, tail) if head else (spec, 1.0)


def _checked_weight(value: Any, name: str) -> Weight:
    """Return a weight as a finite float, or as a schedule."""
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
            f"give one such as 0.5 (for parameters, {_TABLE_HINT})"
        )
    return weight


# --- modules and what is in them ---------------------------------------------------------------


def _load_file(path: Path, what: str) -> ModuleType:
    """Return the module of a file, which runs once per process and content.

    Its name is unique, and ``sys.path`` does not change: a file that is named like a package must
    not replace it.
    """
    digest = hashlib.sha256(str(path).encode() + path.read_bytes()).hexdigest()[:12]
    name = f"_rloo_kit_reward_{path.stem}_{digest}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None  # noqa: PT018 - it ends with .py
    module = importlib.util.module_from_spec(spec)
    # Before it runs, since dataclasses and pickle look it up there
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
        f"{what} {format_value(spec)} cannot be found: there is no {format_value(attribute)} in "
        f"it{did_you_mean(attribute, names)}; add ':function' with one of: {', '.join(names)}"
    )


def _unknown(name: str) -> str:
    return (
        f"unknown reward {format_value(name)}{did_you_mean(name, BUILTIN)}; give a built-in one "
        f"({', '.join(sorted(BUILTIN))}), 'file.py:function', 'package.module:function', the "
        "folder of a reward model, or its hub name 'org/name'"
    )


# --- objects: parameters, refusals -------------------------------------------------------------


def _with_parameters(target: Any, parameters: dict[str, Any], name: str) -> Any:
    """Return a reward: call a class or built-in function; fill parameters into anything else."""
    is_instance = hasattr(target, "__dataclass_fields__") and not inspect.isclass(target)
    known, takes_any, _ = keywords_of(type(target) if is_instance else target)
    for parameter in parameters:
        if parameter not in known and not (takes_any and inspect.isclass(target)):
            raise RewardLoadError(
                f"reward {format_value(name)} has no parameter "
                f"{format_value(parameter)}{did_you_mean(parameter, known)}; "
                f"give one of: {', '.join(known) or '(none)'}"
            )
    try:
        if inspect.isclass(target) or name in BUILTIN:
            return target(**parameters)
        if is_instance and parameters:
            return replace(target, **parameters)
    except (TypeError, ValueError) as exc:
        raise RewardLoadError(
            f"reward {format_value(name)} cannot be made from {format_value(parameters)} "
            f"({first_line(exc)}); {_TABLE_HINT}"
        ) from exc
    return functools.partial(target, **parameters) if parameters else target


def _refuse_non_reward(func: object, spec: object) -> None:
    if inspect.isclass(func) or not callable(func):
        raise RewardLoadError(
            f"reward {format_value(spec)} is a {type(func).__name__}, which cannot be called as a "
            f"reward; give a function, an instance with __call__, or {_TABLE_HINT}"
        )
