"""The loop of tools for the settings of a training."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from datasets import Dataset

from rloo_kit.errors import ConfigError
from rloo_kit.tools.loop import ToolLimits, ToolLoop
from rloo_kit.training.arguments import LeaveOneOutConfig
from rloo_kit.training.trl_step import run_tool_loop


def make_tool_loop(
    tools: Sequence[Callable[..., Any]] | None,
    environments: Mapping[str, Callable[[], Any]] | Callable[[], Any] | None,
    tokenizer: Any,
    args: LeaveOneOutConfig,
    max_length: int,
) -> ToolLoop | None:
    """Return the loop for tools and environments of a training; None if there are none.

    Args:
        tools: Functions.
        environments: A class, or a table of classes by name.
        tokenizer: The policy's.
        args: A ``LeaveOneOutConfig``; the schemas of the tools are added to its
            ``chat_template_kwargs``, so that prompts are counted with them.
        max_length: Most tokens of prompt and completion.

    Raises:
        ConfigError: A setting has no effect, or does not work with tools; or as ``ToolLoop``.
    """
    if not tools and environments is None:
        for name in ("max_tool_calling_iterations", "tool_timeout_seconds", "on_tool_error"):
            if getattr(args, name) != type(args).__dataclass_fields__[name].default:
                raise ConfigError(f"trainer.{name} has no effect without tools: leave it out")
        return None
    if args.partial_rollouts:
        raise ConfigError(
            "trainer.partial_rollouts does not carry over completions that call tools: leave it out"
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
    if shown not in (None, longest):  # those of an earlier loop for the same run are the same
        raise ConfigError(
            "trainer.chat_template_kwargs names tools, which the kit shows itself: leave them out"
        )
    args.chat_template_kwargs = settings | {"tools": longest}
    return loop


def with_prompts(
    dataset: Any,
    environments: Mapping[str, Callable[[], Any]] | Callable[[], Any] | None,
    args: LeaveOneOutConfig,
) -> Any:
    """Return the training set of environments whose ``reset`` returns the whole prompt.

    A set without prompts gets empty ones. Without a set each prompt of the training is a row with
    its own ``seed`` (0, 1, ...), by which ``reset`` can begin the same game for all completions of
    the prompt; in TRL's GRPO each completion begins its own.

    Args:
        dataset: A set, a stream or None. A stream needs prompts.
        environments: A class, or a table of classes by name, or None.
        args: Settings of the training.

    Raises:
        ConfigError: There is no set, and the environments are a table or ``max_steps`` is not set.
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
            "a table of environments requires a `train_dataset` whose column environment names "
            "the class of each row"
        )
    if args.max_steps < 1:
        raise ConfigError(
            "without a train_dataset max_steps gives the length of the training: set it"
        )
    per_step = math.ceil(args.gradient_accumulation_steps / args.steps_per_generation)
    count = args.max_steps * per_step * args.generation_batch_size // args.num_generations
    return Dataset.from_dict({"prompt": [empty] * count, "seed": range(count)})
