"""Reward specs made into checked reward functions: built in, from a file, from a package.

A spec is one of

- a built-in name: ``thinking``
- a function of a file: ``my_rewards.py:polite`` (relative to the run file)
- a function of an installed package: ``package.module:function``
- the folder of a reward model: ``models/my-reward-model``, or its name on the hub: ``org/name``
- a callable
- a table, which also gives parameters: ``{name: thinking, weight: 0.5, long: 60}``
- the name of a plug-in: an entry point of the group ``rloo_kit.rewards`` in an installed package

A text may end with a weight: ``thinking:0.5``, ``my_rewards.py:polite:0.5``. A table's ``weight``
may be a schedule over training, ``{0: 1.0, 0.5: 0.2}``, and a table composes with the keys

- ``only_if: thinking_format``, or ``{name: thinking_format, at_least: 0.5, otherwise: -1}``
- ``only_for: {task: [math, code]}``
- ``scaled_by: 0.1`` and ``clipped_to: [-1, 1]``
"""

import difflib
import functools
import hashlib
import importlib
import importlib.metadata
import importlib.util
import inspect
import math
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any, TypeAlias

from rloo_kit.errors import ConfigError, RewardLoadError
from rloo_kit.scoring.composition import WeightSchedule, gated, rescaled, routed
from rloo_kit.scoring.contract import checked, keywords_of, name_of
from rloo_kit.text.chat_templates import WithSettings
from rloo_kit.text.wording import first_line, format_value, printable

Say: TypeAlias = Callable[[str], None]
RewardSpec: TypeAlias = "str | Mapping[str, Any] | Callable[..., Any] | LoadedReward"

_TABLE_HINT = "write it as a table, {name: ..., weight: ..., parameter: ...}"


@dataclass(frozen=True)
class LoadedReward:
    """A checked reward, the name of its metric, and its weight in the score."""

    func: Any
    """A ``CheckedReward``; a sequence-classification model is handed to TRL as it is."""
    name: str
    weight: float | WeightSchedule = 1.0

    def weight_at(self, progress: float) -> float:
        """Return the weight at a share of the training, in [0, 1]."""
        return self.weight if isinstance(self.weight, int | float) else self.weight.at(progress)


def load_rewards(
    specs: Iterable[RewardSpec],
    tokenizer: Any = None,
    base_dir: str | Path | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    say: Say | None = None,
) -> list[LoadedReward]:
    """Return one loaded reward per spec, in order, with distinct names (``polite``, ``polite_2``).

    Args:
        specs: See the module's text.
        tokenizer: The policy's; rewards with a ``bind`` method are bound to it.
        base_dir: Folder that relative paths start from; None: the working directory.
        chat_template_kwargs: What the policy's chat template is given, such as
            ``enable_thinking``; it may decide who opens the thought.
        say: Called with a line that names code which is not the kit's, before it is imported.

    Raises:
        RewardLoadError: A reward cannot be found, imported or made.
    """
    if tokenizer is not None and chat_template_kwargs:
        tokenizer = WithSettings(tokenizer, dict(chat_template_kwargs))
    loaded: list[LoadedReward] = []
    for spec in specs:
        reward = load_reward(spec, tokenizer, base_dir, say)
        name = _unused_name(reward.name, {other.name for other in loaded})
        if name != reward.name:
            reward = replace(reward, func=replace(reward.func, name=name), name=name)
        loaded.append(reward)
    return loaded


def load_reward(
    spec: RewardSpec,
    tokenizer: Any = None,
    base_dir: str | Path | None = None,
    say: Say | None = None,
) -> LoadedReward:
    """Return the reward of one spec; its arguments and errors are those of ``load_rewards``."""
    base = Path(base_dir) if base_dir is not None else Path.cwd()
    if isinstance(spec, LoadedReward):
        return spec
    if _is_model_object(spec):
        name = getattr(getattr(spec, "config", None), "name_or_path", "") or "reward_model"
        return LoadedReward(spec, Path(name).name)
    if isinstance(spec, Mapping):
        func, weight = _from_table(spec, base, say)
    elif isinstance(spec, str):
        name, weight = _split_weight(spec, base)
        func = _from_name(name, base, say)
    else:
        func, weight = _WithGetRewards(spec) if hasattr(spec, "get_rewards") else spec, 1.0
    _refuse_non_reward(func, spec)
    bind: Any = getattr(func, "bind", None)
    if tokenizer is not None and callable(bind):
        func = bind(tokenizer)
    name = name_of(func)
    return LoadedReward(checked(func, name), name, weight)


def with_tokenizers(rewards: list[LoadedReward], given: Any) -> list[LoadedReward]:
    """Return the rewards, TRL's ``reward_processing_classes`` given to folders and hub names.

    TRL gives them to models that are loaded; functions have no use for them.

    Raises:
        ConfigError: There are not as many of them as rewards.
    """
    if given is None:
        return rewards
    listed = given if isinstance(given, list | tuple) else [given]
    if len(listed) != len(rewards):
        raise ConfigError(
            f"reward_processing_classes holds {len(listed)} and reward_funcs {len(rewards)}: give "
            f"one for each reward, None for those without"
        )
    return [_with_tokenizer(*pair) for pair in zip(rewards, listed, strict=True)]


def _with_tokenizer(reward: LoadedReward, tokenizer: Any) -> LoadedReward:
    model = getattr(reward.func, "reward", None)
    if tokenizer is None or getattr(model, "__name__", None) != "reward_model":
        return reward
    return replace(reward, func=replace(reward.func, reward=replace(model, tokenizer=tokenizer)))


# --- a spec in parts ---------------------------------------------------------------------------


COMPOSING = ("only_if", "only_for", "scaled_by", "clipped_to")
"""Keys of a table that say how its reward counts; they are no parameters of the reward."""


def _from_table(
    table: Mapping[str, Any], base: Path, say: Say | None
) -> tuple[Callable[..., Any], float | WeightSchedule]:
    """Return the reward of a table, composed as its keys say, and its weight."""
    parameters = dict(table)
    name = parameters.pop("name", None)
    if name is None:
        raise RewardLoadError(
            f"the reward table {format_value(dict(table))} has no name; add 'name', such as name: "
            "thinking"
        )
    given = parameters.pop("weight", None)
    composing = {key: parameters.pop(key) for key in COMPOSING if key in parameters}
    weight = 1.0 if given is None else _checked_weight(given, name)
    if not isinstance(name, str):
        reward = _with_parameters(name, parameters, name_of(name))
        return _composed(reward, composing, name_of(name), base, say), weight
    target_name, weight_in_name = _split_weight(name, base)
    if given is not None and target_name != name:
        raise RewardLoadError(
            f"the reward table {format_value(dict(table))} gives two weights; remove "
            f"':{weight_in_name:g}' from its name"
        )
    if target_name == "reward_model":
        _resolve_model_folder(parameters, base)
    reward = _with_parameters(_target(target_name, base, say), parameters, target_name)
    reward = _composed(reward, composing, target_name, base, say)
    return reward, (weight_in_name if given is None else weight)


def _composed(
    reward: Callable[..., Any], keys: dict[str, Any], name: str, base: Path, say: Say | None
) -> Callable[..., Any]:
    """Return a reward as the composing keys of its table say."""
    if not keys:
        return reward
    _refuse_non_reward(reward, name)
    try:
        if "scaled_by" in keys or "clipped_to" in keys:
            clip = keys.get("clipped_to")
            reward = rescaled(
                reward, scale=keys.get("scaled_by", 1.0), clip=None if clip is None else tuple(clip)
            )
        if "only_if" in keys:
            reward = _gated(reward, keys["only_if"], base, say)
        if "only_for" in keys:
            reward = routed(reward, **keys["only_for"])
    except (TypeError, ValueError, OverflowError) as exc:
        raise RewardLoadError(
            f"reward {format_value(name)} cannot be composed from {format_value(keys)} "
            f"({first_line(exc)}); write only_if: NAME, only_for: {{column: value}}, scaled_by: "
            "NUMBER, clipped_to: [low, high]"
        ) from exc
    return reward


def _gated(
    reward: Callable[..., Any], gate: Any, base: Path, say: Say | None
) -> Callable[..., Any]:
    """Return a reward behind the gate that ``only_if`` describes."""
    limits = {}
    if isinstance(gate, Mapping):
        limits = {key: gate[key] for key in ("at_least", "otherwise") if key in gate}
        gate = {key: value for key, value in gate.items() if key not in limits}
    loaded = load_reward(gate, base_dir=base, say=say)
    if loaded.weight != 1.0:
        raise ValueError("a gate has no weight")
    return gated(reward, loaded.func, **{k: _finite(v, k) for k, v in limits.items()})


def _finite(value: Any, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{name} is {format_value(value)}, not a finite number")
    return float(value)


def _from_name(name: str, base: Path, say: Say | None) -> Callable[..., Any]:
    """Return the reward of a text without its weight."""
    target = _target(name, base, say)
    return _with_parameters(target, {}, name) if name in _builtin() else target


def _split_weight(spec: str, base: Path) -> tuple[str, float]:
    """Return (spec without its weight, weight); 1.0 where there is no weight.

    A last part that begins like a number is a weight. Any other one is a weight, and a bad one,
    only where the text before it names a reward in full.
    """
    head, colon, tail = spec.rpartition(":")
    if not colon:
        return spec, 1.0
    is_path_alone = head.endswith(".py") or len(head) == 1  # "my.py:polite", "C:\models\mine"
    is_complete = head in _builtin() or (":" in head and not is_path_alone) or _is_model(head, base)
    if is_complete or (tail[:1] in "+-.0123456789" and _is_number(tail)):
        return head, _checked_weight(tail, head)
    return spec, 1.0


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _checked_weight(value: Any, name: object) -> float | WeightSchedule:
    """Return a weight as a float, or as a schedule where it is a table.

    Raises:
        RewardLoadError: It is not a finite number, nor progress: weight pairs.
    """
    try:
        if isinstance(value, Mapping):
            return WeightSchedule.of(value)
        weight = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError) as exc:
        if isinstance(value, Mapping):
            raise RewardLoadError(f"reward {format_value(name)}: {exc}") from exc
        weight = math.nan
    if not math.isfinite(weight):
        raise RewardLoadError(
            f"weight {format_value(value)} of reward {format_value(name)} is not a finite number; "
            f"give one such as 0.5, or a schedule such as {{0: 1.0, 0.5: 0.2}} "
            f"(for parameters, {_TABLE_HINT})"
        )
    return weight


def _target(name: str, base: Path, say: Say | None = None) -> Any:
    """Return the object that a text names; of a built-in, the class or factory behind it.

    What is not the kit's own is named by ``say`` before it is imported.
    """
    tell = say if say is not None and name not in _own() else _nobody
    if name in _builtin():
        value = _builtin()[name].partition("[")[0].strip()  # "module:attribute [extra]"
        name = value if ":" in value else f"{value}:"
    elif _is_model(name, base):
        return _reward_model(str(_path(name, base)))
    elif _is_hub_name(name, base):
        _check_on_hub(name)
        return _reward_model(name)
    home, colon, attribute = name.rpartition(":")
    if home.endswith(".py") or name.endswith(".py"):
        path = _path(home if colon and home.endswith(".py") else name, base)
        attribute = attribute if home.endswith(".py") else ""
        if path.is_file():
            tell(_running(_as_seen_here(path), attribute))
        return _attribute(_load_file(path), attribute, name)
    if not colon:
        raise RewardLoadError(_unknown(name))
    tell(_running(f"the installed module {home}", attribute))
    return _attribute(_import(home, name), attribute, name)


def _reward_model(model: str) -> Any:
    return importlib.import_module("rloo_kit.rewards.reward_model").RewardModel(model)


def _nobody(_: str) -> None:
    """Hear a line where nobody asked for it."""


def _running(whose: str, attribute: str) -> str:
    return f"running code of {printable(whose)} ({printable(attribute) or 'no function named'})"


def _as_seen_here(path: Path) -> str:
    """Return a path from the working directory, whole where it lies outside."""
    here = Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)


def named_rewards() -> list[str]:
    """Return the name of every built-in reward and plug-in."""
    return sorted(_builtin())


def reward_behind(name: str) -> Any:
    """Return the class, factory, function or instance behind a short name.

    Raises:
        RewardLoadError: There is none, or it cannot be imported.
    """
    if name not in _builtin():
        raise RewardLoadError(_unknown(name))
    return _target(name, Path())


def _own() -> dict[str, str]:
    return importlib.import_module("rloo_kit.rewards").BUILTIN


def _builtin() -> dict[str, str]:
    """Return name -> "module:attribute" of the rewards that have a short name."""
    return {**{name: entry.value for name, entry in plug_ins().items()}, **_own()}


PLUG_IN_GROUP = "rloo_kit.rewards"
"""Entry-point group of packages that bring rewards."""


@functools.cache
def plug_ins() -> dict[str, importlib.metadata.EntryPoint]:
    """Return the entry points of installed packages, by name; a built-in reward keeps its name."""
    found = importlib.metadata.entry_points(group=PLUG_IN_GROUP)
    return {entry.name: entry for entry in found if entry.name not in _own()}


def _path(text: str, base: Path) -> Path:
    """Return an absolute path; a relative one starts from the folder of the run file.

    Raises:
        RewardLoadError: No file can be called so.
    """
    try:
        path = (base / Path(text).expanduser()).resolve()
        path.is_file()  # a name that is too long
    except (OSError, RuntimeError, ValueError) as exc:
        raise RewardLoadError(
            f"reward {format_value(text)} can be no path ({first_line(exc)}); give a built-in "
            "reward, or 'path/to/file.py:function'"
        ) from exc
    return path


def _is_model(text: str, base: Path) -> bool:
    files = ("config.json", "adapter_config.json")
    return bool(text) and any((_path(text, base) / file).is_file() for file in files)


def _is_hub_name(text: str, base: Path) -> bool:
    """Return whether a text is ``org/name``, and neither a file nor a folder."""
    is_name = re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", text)
    return bool(is_name) and not text.endswith(".py") and not _path(text, base).exists()


def _check_on_hub(name: str) -> None:
    """Ask the hub for a reward model's config, so that a wrong name costs no model load.

    Raises:
        RewardLoadError: It is neither there nor in the cache.
    """
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError

    reason = ""
    for file in ("config.json", "adapter_config.json"):
        try:
            hf_hub_download(name, file)
        except EntryNotFoundError as exc:
            reason = reason or first_line(exc)
        except Exception as exc:  # what is raised differs by the network
            reason = first_line(exc)
            break
        else:
            return
    raise RewardLoadError(
        f"reward {format_value(name)} is no file or folder here, and the hub gives no reward model "
        f"of that name ({reason}); correct it, go online, or give 'file.py:function' or a folder"
    )


def _resolve_model_folder(parameters: dict[str, Any], base: Path) -> None:
    """Make the parameter ``model`` absolute in place, where it is a folder and not a hub name."""
    model = parameters.get("model")
    if isinstance(model, str) and _path(model, base).is_dir():
        parameters["model"] = str(_path(model, base))


def _unused_name(name: str, used: set[str]) -> str:
    candidate, number = name, 1
    while candidate in used:
        number += 1
        candidate = f"{name}_{number}"
    return candidate


# --- modules and what is in them ---------------------------------------------------------------


def _load_file(path: Path) -> ModuleType:
    """Return the module of a file, run once per process and content under a name of its own.

    ``sys.path`` is left alone: a file called like a package must not take its place.
    """
    content = path.read_bytes() if path.is_file() else b""  # a file that was mended is run again
    digest = hashlib.sha256(str(path).encode() + content).hexdigest()[:12]
    name = f"_rloo_kit_reward_{path.stem}_{digest}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if not path.is_file() or spec is None or spec.loader is None:
        raise RewardLoadError(
            f"reward file {format_value(str(path))} does not exist; give its path relative to the "
            "run file, or an absolute one"
        )
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # before it runs, as dataclasses and pickle look it up there
    try:
        spec.loader.exec_module(module)
    except BaseException as exc:
        del sys.modules[name]
        if not isinstance(exc, Exception | SystemExit):
            raise
        raise RewardLoadError(_why_file_failed(path, exc)) from exc
    return module


def _why_file_failed(path: Path, exc: Exception | SystemExit) -> str:
    if isinstance(exc, SyntaxError):
        place = f"line {exc.lineno}" if exc.filename == str(path) else f"{exc.filename}"
        name = format_value(str(path))
        return f"reward file {name} has a syntax error ({place}: {exc.msg}); correct it"
    if isinstance(exc, ImportError):
        return (
            f"reward file {format_value(str(path))} cannot import what it asks for "
            f"({first_line(exc)}); install it, or keep helpers in the same file (its folder is not "
            "on sys.path)"
        )
    return (
        f"reward file {format_value(str(path))} raised {type(exc).__name__} while it was loaded "
        f"({first_line(exc)}); correct it, or move that work into the function"
    )


def _import(module: str, spec: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ImportError as exc:
        raise RewardLoadError(
            f"reward {format_value(spec)} cannot be imported ({first_line(exc)}); install its "
            "package, or give a file as 'path/to/file.py:function'"
        ) from exc
    except Exception as exc:
        raise RewardLoadError(
            f"reward {format_value(spec)}: importing {format_value(module)} raised "
            f"{type(exc).__name__} ({first_line(exc)}); correct that module"
        ) from exc


def _attribute(module: ModuleType, attribute: str, spec: str) -> Any:
    """Return a module's attribute, or say which ones it has."""
    if attribute and hasattr(module, attribute):
        return getattr(module, attribute)
    names = [
        name
        for name, value in vars(module).items()
        if callable(value) and not name.startswith("_") and _is_from(value, module)
    ]
    wrong = f"there is no {format_value(attribute)} in it" if attribute else "it names no function"
    raise RewardLoadError(
        f"reward {format_value(spec)} cannot be found: {wrong}{_nearest(attribute, names)}; "
        f"add ':function' with one of: {', '.join(names) or '(it has none)'}"
    )


def _is_from(value: object, module: ModuleType) -> bool:
    return getattr(value, "__module__", None) == module.__name__


def _nearest(wrong: object, names: Iterable[str]) -> str:
    near = difflib.get_close_matches(str(wrong), list(names), n=1)
    return f" (did you mean {near[0]!r}?)" if near else ""


def _unknown(name: str) -> str:
    return (
        f"unknown reward {format_value(name)}{_nearest(name, _builtin())}; give a built-in one "
        f"({', '.join(sorted(_builtin()))}), 'file.py:function', 'package.module:function', the "
        "folder of a reward model, or its hub name 'org/name'"
    )


# --- objects: parameters, names, refusals ------------------------------------------------------


def _with_parameters(target: Any, parameters: dict[str, Any], name: str) -> Any:
    """Return a reward: a class or built-in factory called, an instance or function filled in."""
    _refuse_unknown(target, parameters, name)
    try:
        if inspect.isclass(target) or name in _own():
            return target(**parameters)
        if not parameters:
            return target
        if is_dataclass(target) and not isinstance(target, type):
            return replace(target, **parameters)
    except (TypeError, ValueError) as exc:
        raise RewardLoadError(
            f"reward {format_value(name)} cannot be made from {format_value(parameters)} "
            f"({first_line(exc)}); {_TABLE_HINT}"
        ) from exc
    return functools.partial(target, **parameters)


def _refuse_unknown(target: Any, parameters: dict[str, Any], name: str) -> None:
    """Raise RewardLoadError where a parameter is not one of the target's."""
    if is_dataclass(target) and not inspect.isclass(target):
        known = [item.name for item in fields(target) if item.init]
    else:
        known, takes_any, _ = keywords_of(target)
        if takes_any and inspect.isclass(target):
            return
    for parameter in parameters:
        if parameter not in known:
            raise RewardLoadError(
                f"reward {format_value(name)} has no parameter "
                f"{format_value(parameter)}{_nearest(parameter, known)}; "
                f"give one of: {', '.join(known) or '(none)'}"
            )


def _refuse_non_reward(func: Any, spec: RewardSpec) -> None:
    """Raise RewardLoadError where an object cannot be called as a reward."""
    if inspect.isclass(func):
        raise RewardLoadError(
            f"reward {format_value(spec)} is a class; give an instance, {func.__name__}(), or "
            f"{_TABLE_HINT}"
        )
    if not callable(func):
        raise RewardLoadError(
            f"reward {format_value(spec)} is of type {type(func).__name__}, which cannot be "
            "called; give a function or an object with __call__"
        )


def _is_model_object(spec: Any) -> bool:
    """Return whether ``spec`` is a torch module, which TRL scores with itself."""
    return hasattr(spec, "forward") and hasattr(spec, "state_dict")


@dataclass(frozen=True)
class _WithGetRewards:
    """An object with ``get_rewards(prompts, completions)``, as older notebooks have it."""

    model: Any

    @property
    def __name__(self) -> str:
        return type(self.model).__name__

    def __call__(self, prompts: list[Any], completions: list[Any]) -> Any:
        return self.model.get_rewards(prompts, completions)
