"""Tool calling in a training: the tool loop, and prompts for environments."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from datasets import Dataset

from rloo_kit.errors import ConfigError
from rloo_kit.tools.loop import ToolLimits, ToolLoop
from rloo_kit.training.arguments import LeaveOneOutConfig
from rloo_kit.training.step_choice import check_defaults
from rloo_kit.training.trl_step import run_tool_loop

# A class whose public methods are tools, or a dict of such classes by name
EnvironmentFactory: TypeAlias = Mapping[str, Callable[[], Any]] | Callable[[], Any]


def make_tool_loop(
    tools: Sequence[Callable[..., Any]] | None,
    environments: EnvironmentFactory | None,
    tokenizer: Any,
    args: LeaveOneOutConfig,
    max_length: int,
) -> ToolLoop | None:
    """Return the loop that runs tools and environments; None if there are none.

    Args:
        tools: Functions that the model may call.
        environments: A class whose public methods are tools, or a dict of such classes by name.
        tokenizer: The policy's tokenizer.
        args: Settings of the training. The schemas of the tools are added to
            ``chat_template_kwargs``, so that the lengths of prompts include them.
        max_length: Maximum number of tokens of prompt and completion together.

    Raises:
        ConfigError: A setting has no effect without tools or does not work with them, or
            ``ToolLoop`` rejects the tools.
    """
    if not tools and environments is None:
        names = ("max_tool_calling_iterations", "tool_timeout_seconds", "on_tool_error")
        check_defaults(args, names, "has no effect without tools:", type(args))
        return None
    if args.partial_rollouts:
        raise ConfigError(
            "trainer.partial_rollouts does not work together with tools: leave one of the two out"
        )
    settings = {**(args.chat_template_kwargs or {})}
    shown = settings.pop("tools", None)
    limits = ToolLimits(
        max_tokens=args.max_completion_length,
        max_length=max_length,
        max_rounds=args.max_tool_calling_iterations,
        timeout=args.tool_timeout_seconds,
        stop_on_error=args.on_tool_error == "stop",
    )
    loop = ToolLoop(tools or (), environments, tokenizer, settings, limits, run_tool_loop)
    longest = max(loop.schemas.values(), key=lambda schemas: len(str(schemas)))
    if shown not in (None, longest):  # an earlier loop of the same run has added equal schemas
        raise ConfigError(
            "trainer.chat_template_kwargs contains tools, but the kit adds the tools to the prompt "
            "itself: remove them"
        )
    args.chat_template_kwargs = settings | {"tools": longest}
    return loop


def with_prompts(
    dataset: Any, environments: EnvironmentFactory | None, args: LeaveOneOutConfig
) -> Any:
    """Return the training set with a column ``prompt``; with environments, add it if it is missing.

    The added prompts are empty, because the method ``reset`` of an environment can return the whole
    prompt. If there is no dataset, a new one is made. It has an empty prompt for each group of the
    training, and a column ``seed`` (0, 1, ...). With this seed, ``reset`` can start the same game
    for all completions of a group. In TRL's GRPO trainer, each completion starts a different game.

    Args:
        dataset: A dataset, a stream or None. A stream must have prompts.
        environments: A class, a dict of classes by name, or None. If it is None, the dataset is
            returned unchanged.
        args: Settings of the training.

    Raises:
        ConfigError: There are environments but no dataset, and no dataset can be made, because
            ``environments`` is a dict or ``max_steps`` is not set.
    """
    empty = [{"role": "user", "content": ""}]
    if environments is None or not isinstance(dataset, Dataset | None):
        return dataset
    if dataset is not None:
        if "prompt" in dataset.column_names:
            return dataset
        return dataset.add_column("prompt", [empty] * len(dataset))
    if isinstance(environments, Mapping):
        raise ConfigError(
            "several environments require a `train_dataset` whose column `environment` names the "
            "environment of each row"
        )
    if args.max_steps < 1:
        raise ConfigError(
            "without a train_dataset only max_steps limits the length of the training: set "
            "max_steps"
        )
    per_step = math.ceil(args.gradient_accumulation_steps / args.steps_per_generation)
    count = args.max_steps * per_step * args.generation_batch_size // args.num_generations
    return Dataset.from_dict({"prompt": [empty] * count, "seed": range(count)})
