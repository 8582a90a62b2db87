"""Read a run file, and make what it asks for: prompts, tokenizer, rewards, policy and engine."""

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from rloo_kit.config.engine_settings import requested_engine
from rloo_kit.config.lora import why_not_vllm_takes
from rloo_kit.config.run_file import (
    EXAMPLES,
    TASK_REWARDS,
    DataSection,
    LoraSection,
    RunConfig,
    find_run_file,
    make_run_config,
    read_run_file,
    without_hidden_settings,
)
from rloo_kit.config.trainer_settings import batch_plan
from rloo_kit.data.files import local_path, looks_local, missing_file
from rloo_kit.data.hub_tasks import SYSTEM, hub_task
from rloo_kit.data.images import has_images
from rloo_kit.data.lengths import check_lengths, drop_long_prompts, quantile_of_lengths
from rloo_kit.data.prompts import MAX_HELD_OUT, is_task, load_prompts, split_held_out
from rloo_kit.errors import ConfigError, DataError
from rloo_kit.machine.cleanup import add_to_session
from rloo_kit.machine.environment import Environment, load_env_file, set_variables, setup
from rloo_kit.machine.processes import check_launch
from rloo_kit.models.adapters import EMBEDDED, adapter_in, as_recorded, check_path, lora_settings
from rloo_kit.models.loading import attach_lora, check_lora_config, load_model, load_tokenizer
from rloo_kit.sampling.choice import check_engine, start_engine, thought_limit
from rloo_kit.sampling.engine import Choice, Engine
from rloo_kit.scoring.contract import guarded
from rloo_kit.scoring.specs import LoadedReward, RewardSpec, load_rewards
from rloo_kit.text.thoughts import give_marks
from rloo_kit.text.wording import first_line
from rloo_kit.tools.specs import load_environment, load_tools
from rloo_kit.types import Say

if TYPE_CHECKING:
    from rloo_kit.tools.loop import ToolLoop
    from rloo_kit.training.arguments import LeaveOneOutConfig
    from rloo_kit.training.step_choice import StepChoice


def read_config(
    source: str | Path | RunConfig, overrides: Sequence[str], *, recorded: bool = False
) -> tuple[RunConfig, Path]:
    """Return the settings of a run, and the folder that its relative paths start from.

    First the file ``.env`` is loaded into the environment. The run.yaml that a run writes has no
    secrets, so a resumed run reads its secrets from the environment.

    Args:
        source: A YAML file, the name of an example that comes with the kit, the folder of a run,
            or a ``RunConfig``.
        overrides: Settings in the form ``section.key=value``, as after ``--set``. Must be empty
            for a ``RunConfig``.
        recorded: As in ``make_run_config``.

    Raises:
        ConfigError: ``source`` is a folder without run.yaml, a setting is wrong, or there are
            ``overrides`` for a ``RunConfig``.
    """
    load_env_file()
    if isinstance(source, RunConfig):
        if overrides:
            raise ConfigError(
                f"{overrides!r} is not applied to a RunConfig: give a run file instead, or "
                "change the RunConfig"
            )
        _check_settings(source)
        config, base = source, Path()
    elif not isinstance(source, str | Path):
        raise ConfigError(
            f"a run cannot be read from a {type(source).__name__}: give the path of a run file, or "
            "a RunConfig"
        )
    else:
        file, base = source, find_run_file(source).parent
        if is_folder(source):
            file, base = run_file_in(source), Path()
        config = without_hidden_settings(read_run_file(file, overrides, recorded=recorded))
    adapter = adapter_in(beside(config.model.name, base))
    if adapter is not None:  # `lora:` gets the adapter's settings
        given = {name: getattr(config.lora, name) for name in config.lora.given}
        found = lora_settings(adapter, given | config.lora.others, "lora.")
        config = replace(config, lora=LoraSection(**found))
    return config, base


def is_folder(source: str | Path) -> bool:
    """Return True if ``source`` is the path of a folder and not the name of an example.

    If a folder has the name of an example, it is the source only if it has a run.yaml.
    """
    if not os.path.isdir(source):  # False, and not an error, for a text that cannot be a path
        return False
    return find_run_file(source) == Path(source) or os.path.isfile(Path(source, "run.yaml"))


def run_file_in(folder: str | Path) -> Path:
    """Return the path of the run file in the folder of a run.

    Raises:
        ConfigError: The folder has no such file.
    """
    file = Path(folder) / "run.yaml"
    if not os.path.isfile(file):  # False, and not an error, without permission
        raise ConfigError(
            f"{str(folder)!r} is not the folder of a run, because it has no run.yaml: give a "
            "run file, or a folder that `rloo-kit train` wrote"
        )
    return file


def _check_settings(config: RunConfig) -> None:
    """Check the settings of a ``RunConfig`` in the same way as those of a run file.

    Raises:
        ConfigError: A setting is wrong, or run.yaml cannot record it.
    """
    try:
        content = config.as_dict()
        yaml.safe_dump(content)
    except (AttributeError, yaml.YAMLError) as exc:
        raise ConfigError(
            f"run.yaml cannot record this RunConfig ({first_line(exc)}): give each section as its "
            "class (such as DataSection), a path as str, and a reward as 'file.py:function'"
        ) from exc
    make_run_config(content)


def beside(name: str, base: Path) -> str:
    """Return ``base / name`` if that path exists; otherwise return ``name`` unchanged.

    If ``base`` is the folder of the kit's examples, a file in the user's working folder takes
    precedence over a file of the kit.
    """
    candidate = base / name
    if base == EXAMPLES and os.path.exists(name):
        return name
    return str(candidate) if os.path.exists(candidate) else name


def _path_in(name: str) -> tuple[str, str]:
    """Split a value of ``data.prompts``, such as ``gsm8k:my/file.jsonl``.

    Returns:
        The task, or "" if there is none; and the path or hub name, or "" if there is none. If a
        colon follows the task, it is part of the first value (``gsm8k:``).
    """
    task, colon, path = name.partition(":")
    if hub_task(name):
        return task + colon, path
    return (name, "") if is_task(name) else ("", name)


def with_whole_paths(config: RunConfig, base: Path, rewards_base: Path) -> RunConfig:
    """Return the settings with absolute paths, so that they do not depend on the working folder.

    Args:
        config: The settings.
        base: Folder that relative paths of model and prompts start from.
        rewards_base: Folder that relative paths of rewards, tools and environments start from.
    """

    def whole(name: str | None) -> Any:
        found = name and beside(name, base)
        return _whole(Path(found)) if found and os.path.exists(found) else name

    code = partial(_with_whole_paths, base=rewards_base)
    model = config.model
    data = config.data
    name = model.name if beside(model.name, base) in EMBEDDED else whole(model.name)
    task, path = _path_in(data.prompts)
    judges = code(data.held_out_rewards)
    return replace(
        config,
        model=replace(model, name=name, chat_template=whole(model.chat_template)),
        data=replace(data, prompts=task + whole(path), held_out_rewards=judges),
        rewards=code(config.rewards),
        tools=code(config.tools),
        environment=code(config.environment),
    )


def _whole(path: Path) -> str:
    """Return the absolute path of a file or folder, with symbolic links resolved.

    If a file itself is a link, only the path of its folder is resolved. In the Hugging Face cache,
    files are such links, and the files that they point to have no suffix.
    """
    return str(path.parent.resolve() / path.name if path.is_file() else path.resolve())


def _with_whole_paths(reward: object, base: Path, *, is_path: bool = False) -> Any:
    """Return a reward, a tool, an environment, or a list of them, with absolute paths.

    Args:
        reward: The reward, tool, environment or list, as in a run file.
        base: Folder that relative paths start from.
        is_path: True if the value must be a path. If False, only text that looks like a path is
            changed. A path that does not exist is never changed.
    """
    if isinstance(reward, dict):
        paths = {"model", "file"}
        # the model of a judge is a name on its server
        fixed = {"model"} if str(reward.get("name")).partition(":")[0] == "judge" else set()
        return {
            key: value if key in fixed else _with_whole_paths(value, base, is_path=key in paths)
            for key, value in reward.items()
        }
    if isinstance(reward, list):
        return [_with_whole_paths(value, base) for value in reward]
    if not isinstance(reward, str):
        return reward
    path, colon, rest = reward.partition(":")
    if path and (is_path or "/" in path or path.endswith(".py")) and os.path.exists(base / path):
        return f"{_whole(base / path)}{colon}{rest}"
    return reward


def read_prompts(config: RunConfig, base: Path) -> tuple[Any, Any]:
    """Return the prompts to train on, in the order of the dataset, and the held-out prompts.

    The second value is None if no prompts are held out.

    Raises:
        DataError: The file is missing or has bad rows, or the task is for evaluation only.
    """
    data = config.data
    prefix, path = _path_in(data.prompts)
    path = path and beside(path, base)
    name = prefix + path
    task = hub_task(name)
    if looks_local(path) and not os.path.exists(local_path(path)):
        raise missing_file(path, base)
    if task is not None and task.train is None:
        raise DataError(
            f"{data.prompts} is for evaluation only: train on gsm8k or dapo-math, and then run "
            f"`rloo-kit eval RUN --prompts {data.prompts}`"
        )
    if is_task(name) and data.split == "held_out":
        raise ConfigError(
            "data.split: held_out would train on the held-out prompts: leave data.split out"
        )
    keys = ("system", "chat", "columns", "config", "level", "settings", "skip_empty")
    how = {key: getattr(data, key) for key in keys}
    load = partial(load_prompts, name, seed=config.seed, **how)
    train = load(split=data.split, num_prompts=data.num_prompts)
    if not is_task(name):
        return split_held_out(train, data.held_out)
    number = MAX_HELD_OUT if data.held_out is None else data.held_out
    return train, load(split="held_out", num_prompts=number) if number else None


def template_settings(config: RunConfig) -> dict[str, Any]:
    """Return the additional arguments for the chat template.

    They are ``trainer.chat_template_kwargs``. If ``data.enable_thinking`` is set, it replaces their
    value of ``enable_thinking``.
    """
    given = config.trainer.get("chat_template_kwargs") or {}
    given = json.loads(given) if isinstance(given, str) else given
    wanted = config.data.enable_thinking
    return given if wanted is None else {**given, "enable_thinking": wanted}


def system_message(data: DataSection) -> str | None:
    """Return the system message for the prompts of a run; None or "" means no system message.

    It is ``data.system`` if that is set. Otherwise, chat prompts of tasks from the hub (such as
    gsm8k) get the kit's system message, and other prompts get none.
    """
    of_task = data.system is None and data.chat and hub_task(data.prompts)
    return SYSTEM if of_task else data.system


def held_out_judges(
    rewards: list[LoadedReward],
    held_out: Any,
    load: Callable[[Sequence[Any]], list[LoadedReward]],
    data: DataSection,
) -> list[LoadedReward]:
    """Return the rewards that score held-out prompts: ``data.held_out_rewards`` and the run's own.

    If the held-out prompts have a column ``answer``, one reward must judge the answers. This is the
    default reward of the task, or ``accuracy`` if the task has none:

    - If the rewards include the default reward or ``math``, nothing is added. ``math`` is enough,
      because it recognises more correct answers. Otherwise the default reward is added.
    - The default reward comes first in the result, then ``math``.
    - If the default reward of the task is ``accuracy`` with arguments, and ``data.system`` is not
      set, it replaces an ``accuracy`` without arguments.

    Args:
        rewards: Rewards of the run.
        held_out: The held-out prompts, or None.
        load: Function that loads rewards from their values in a run file.
        data: The section ``data:`` of the run file.
    """
    paid = {reward.name: reward for reward in rewards}
    found = []
    for judge in load(data.held_out_rewards):
        if judge.name not in paid:
            found.append(judge)
        elif judge.func.reward != paid[judge.name].func.reward:
            other = f"{judge.name}_held_out"  # the same kind of reward with other arguments
            found.append(replace(judge, name=other, func=replace(judge.func, name=other)))
    found += rewards
    first = "accuracy"
    if held_out is not None and "answer" in held_out.column_names:
        judge, plain = load([TASK_REWARDS.get(data.prompts.partition(":")[0], first), first])
        if judge.name == first and judge.func.reward != plain.func.reward and data.system is None:
            # prompts of this task ask for a solution in steps, and the plain reward would compare
            # the whole solution with the answer
            found = [
                replace(one, func=judge.func) if one.func.reward == plain.func.reward else one
                for one in found
            ]
        first = judge.name
        if not any(one.name in (first, "math") for one in found):
            found.append(judge)
    return sorted(found, key=lambda judge: (judge.name != first, judge.name != "math"))


@dataclass(eq=False)
class PreparedJob:
    """The parts of a run. Each part is made and checked when it is first used."""

    config: RunConfig  # its paths are made absolute
    base: Path = Path()  # folder that relative paths of model and prompts start from
    say: Say = print  # called with each line for the user
    recorded: bool = False  # as in ``make_run_config``
    checkpoint: Path | None = None  # folder of the checkpoint that the run resumes from
    model_name: str = field(init=False)  # the name as the user wrote it

    def __post_init__(self) -> None:
        """Make the paths in the settings absolute."""
        self.model_name = self.config.model.name
        self.config = with_whole_paths(self.config, self.base, self.rewards_base)

    @cached_property
    def rewards_base(self) -> Path:
        """Folder that relative paths of rewards, tools and environments start from.

        It is ``base``. For an example that comes with the kit it is the working folder, so that the
        run finds the user's own rewards.
        """
        return Path() if self.base == EXAMPLES else self.base

    def prepare(self) -> None:
        """Make and check all parts that do not need the model's weights.

        The quickest checks come first. Files are checked before torch is imported, which takes
        seconds.

        Raises:
            KitError: A setting, a file or a reward is wrong, or this machine cannot do the run.
        """
        config = self.config
        if config.model.trust_remote_code:
            self.say(
                f"code that comes with {self.model_name} may run: model.trust_remote_code is true"
            )
        set_variables()
        check_launch(config.trainer)
        check_path(config.model.name, self.base)
        # first without a tokenizer, so that a wrong name is found within a second
        given = (config.rewards, config.data.held_out_rewards)
        loaded = [load_rewards(specs, base_dir=self.rewards_base, say=self.say) for specs in given]
        more = ["completion_turns"] if config.tools or config.environment else []
        more += ["environments"] if config.environment else []
        for rewards, dataset in zip(loaded, self.prompts, strict=True):
            if dataset is not None:  # else no prompts are held out
                for reward in rewards:
                    reward.func.check_columns([*dataset.column_names, *more])
        for part in ("tools", "environment", "splits", "judges"):  # these use the others
            getattr(self, part)

    @cached_property
    def environment(self) -> Environment:
        """The backend and the hardware of this process, as ``setup`` returns them."""
        return setup(self.config.model.backend)

    @cached_property
    def args(self) -> "LeaveOneOutConfig":
        """Settings of the trainer, made from the sections ``trainer:`` and ``data:``."""
        config = self.config
        _ = self.environment
        from rloo_kit.training.arguments import LeaveOneOutConfig  # TRL, after Unsloth

        settings = {**config.trainer, "output_dir": config.output_dir, "seed": config.seed}
        if config.data.enable_thinking is not None:
            settings["chat_template_kwargs"] = template_settings(config)
        return LeaveOneOutConfig(**settings, _recorded=self.recorded)

    @cached_property
    def tokenizer(self) -> Any:
        """Tokenizer of the model, which is loaded without reading the model's weights."""
        model = self.config.model
        found = load_tokenizer(
            model.name,
            trust_remote_code=model.trust_remote_code,
            revision=model.revision,
            chat_template=model.chat_template,
        )
        give_marks(found, **vars(self.config.thinking))
        return found

    @cached_property
    def prompts(self) -> tuple[Any, Any]:
        """All training prompts, and the held-out prompts or None; torch is not imported."""
        return read_prompts(self.config, self.base)

    @cached_property
    def prompt_limit(self) -> int | None:
        """Maximum number of tokens in a prompt, including the run's tools; None: no limit.

        If ``data.max_prompt_quantile`` is set, the limit is that quantile of the lengths of the
        training prompts, otherwise ``data.max_prompt_tokens``.
        """
        data = self.config.data
        if data.max_prompt_quantile is None:
            return data.max_prompt_tokens
        _ = self.tool_loop  # the length of a prompt includes its tools
        settings = self.args.chat_template_kwargs
        return quantile_of_lengths(
            self.prompts[0], self.tokenizer, data.max_prompt_quantile, settings
        )

    @cached_property
    def splits(self) -> tuple[Any, Any]:
        """Prompts to train on, and held-out prompts or None, after a check of their lengths.

        Both are a ``datasets.Dataset``. Prompts that are longer than ``data.max_prompt_tokens`` or
        ``data.max_prompt_quantile`` allow are left out.

        Raises:
            DataError: A split has no prompts left, or a prompt leaves no room for its completion.
            ConfigError: The sampling engine would ignore a setting, or ``trainer.thinking_budget``
                is set for a model whose thoughts cannot be recognised.
            GenerationError: The engine was requested by name, but is not installed.
        """
        args = self.args
        loop = self.tool_loop  # first, because the length of a prompt includes its tools
        from rloo_kit.training.step_choice import check_tools, choose_step

        check_lora_config(self.config.lora.as_dict(), "lora.")
        if not choose_step(args, router_loss=args.router_aux_loss_coef or 0.0).by_trl:
            check_engine(args, self.config)
        prompts, held_out = self.prompts
        tokenizer = self.tokenizer
        settings = args.chat_template_kwargs
        choice = choose_step(args, images=has_images(prompts))
        if loop is not None:
            check_tools(choice)
            for dataset in (prompts, held_out):
                if loop.environments is not None and dataset is not None:
                    loop.environments.check_names(dataset)
        thought_limit(tokenizer, args.thinking_budget)
        limit = self.prompt_limit
        if limit is not None:
            prompts, dropped = drop_long_prompts(prompts, tokenizer, limit, settings)
            if held_out is not None:
                held_out, more = drop_long_prompts(held_out, tokenizer, limit, settings)
                dropped += more
            if dropped:
                self.say(f"{dropped:,} prompts of more than {limit} tokens left out")
        longest = self.config.model.max_seq_length
        check_lengths(prompts, tokenizer, args, longest)
        if held_out is not None:
            check_lengths(held_out, tokenizer, args, longest, before=len(prompts))
        return prompts, held_out

    @cached_property
    def rewards(self) -> list[LoadedReward]:
        """Rewards of the run, including those that its environments define."""
        return self.load_rewards([*self.config.rewards, *self.of_environments])

    @property
    def of_environments(self) -> list[Any]:
        """Rewards of the environments that have a method ``get_reward``."""
        loop = self.tool_loop
        return loop.environments.rewards if loop and loop.environments else []

    def load_rewards(self, specs: Sequence[RewardSpec]) -> list[LoadedReward]:
        """Load rewards from their values in a run file, for the tokenizer of this run."""
        return load_rewards(
            specs, self.tokenizer, self.rewards_base, self.args.chat_template_kwargs
        )

    @cached_property
    def judges(self) -> list[LoadedReward]:
        """Rewards that score the held-out prompts, with the run's time limit."""
        found = held_out_judges(self.rewards, self.splits[1], self.load_rewards, self.config.data)
        return [self.guarded(judge, self.args.on_reward_error) for judge in found]

    def guarded(self, reward: LoadedReward, on_error: str) -> LoadedReward:
        """Return a reward with the run's time limit for each call, and a rule for failures.

        The reward is released at the end of the innermost open ``session``.

        Args:
            reward: A loaded reward.
            on_error: What to do if the reward fails: ``stop`` or ``skip``, as in
                ``trainer.on_reward_error``.
        """
        func = guarded(reward.func, self.args.reward_timeout_seconds, on_error)
        add_to_session(func)
        return replace(reward, func=func)

    @cached_property
    def tools(self) -> tuple[list[Any], Any]:
        """The tools, and the environment: a class, a dict of classes, or None.

        torch is not imported.
        """
        base = self.rewards_base
        tools = load_tools(self.config.tools, base, self.say)
        return tools, load_environment(self.config.environment, base, self.say)

    @cached_property
    def tool_loop(self) -> "ToolLoop | None":
        """The loop that calls the run's tools while sampling outside of training.

        It is None if the run has neither tools nor an environment.
        """
        from rloo_kit.training.tools import make_tool_loop  # TRL, after Unsloth

        tokenizer = self.tokenizer if any(self.tools) else None
        longest = self.config.model.max_seq_length
        longest = min(longest, self.args.vllm_max_model_length or longest)
        return make_tool_loop(*self.tools, tokenizer, self.args, longest)

    @cached_property
    def policy(self) -> tuple[Any, Any]:
        """The model with its adapter, and its tokenizer or processor.

        Raises:
            ConfigError: ``unsloth:`` has settings, but the backend is transformers.
        """
        config = self.config
        args = self.args
        if config.unsloth and self.environment.backend != "unsloth":
            raise ConfigError(
                f"unsloth.{next(iter(config.unsloth))} is for Unsloth, but transformers loads the "
                f"model ({self.environment.why_not_unsloth}): leave it out"
            )
        if self.checkpoint is not None:
            config = as_recorded(config, self.checkpoint)
        loaded, tokenizer = load_model(
            **vars(config.model),
            precision="fp16" if args.fp16 else "auto",
            max_lora_rank=config.lora.r,
            vllm=config.vllm,
            images=has_images(self.splits[0]),
            **({} if why_not_vllm_takes(config.lora.others) else _engine_arguments(args))
            | config.unsloth,
        )
        give_marks(getattr(tokenizer, "tokenizer", tokenizer), **vars(config.thinking))
        return attach_lora(loaded, **config.lora.as_dict(), seed=config.seed), tokenizer

    @cached_property
    def step(self) -> "StepChoice":
        """The training step that is used: the kit's or TRL's.

        Raises:
            ConfigError: ``trainer.step`` or another setting cannot be used for this run.
        """
        from rloo_kit.training.step_choice import choose_step, set_router_loss

        model = self.policy[0]
        router_loss = set_router_loss(self.args, model, model.config)
        return choose_step(self.args, images=has_images(self.splits[0]), router_loss=router_loss)

    @cached_property
    def engine(self) -> tuple[Engine | None, Choice]:
        """The sampling engine, and the ``Choice`` of ``start_engine``.

        The ``Choice`` has the engine's name, and the reason why no faster engine is used.
        The engine is None if the model itself samples with transformers, or if TRL samples.
        """
        if self.step.by_trl:
            return None, Choice("transformers")
        engine, choice = start_engine(self.policy[0], self.args)
        if engine is None:  # so that the trainer does not start one either
            self.args.generation = "transformers"
            self.args.use_vllm = False
        return engine, choice


def _engine_arguments(args: "LeaveOneOutConfig") -> dict[str, Any]:
    """Return arguments of ``load_model`` that let training and vLLM share the base weights.

    The result is empty if the settings request vLLM's server or transformers as the engine.
    """
    if requested_engine(args) in ("server", "transformers"):
        return {}
    share = args.vllm_gpu_memory_utilization if args.memory_share_given else None
    return {
        "fast_inference": "auto",
        "num_sequences": batch_plan(vars(args)).in_flight,
        "unsloth_vllm_standby": args.vllm_enable_sleep_mode,
        "gpu_memory_utilization": share,
    }
