"""Functions that show tools and calls to a model in its chat template, and read its calls."""

import inspect
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from rloo_kit.errors import ConfigError
from rloo_kit.text.thoughts import THOUGHT_ENDS, completion_texts
from rloo_kit.text.wording import first_line
from rloo_kit.tools.environments import Tool
from rloo_kit.types import Message


def checked_template(tokenizer: Any, settings: dict[str, Any]) -> dict[str, Any]:
    """Check with TRL's functions that a chat template can show tool calls and results.

    Args:
        tokenizer: Tokenizer of the policy. If it has no ``response_template``, TRL's template for
            the model family is set on it.
        settings: Keyword arguments for the chat template.

    Returns:
        The trainer attributes from which TRL's loop reads the template, as name -> value.

    Raises:
        ConfigError: The tokenizer is a processor for images, it has no default chat template, the
            template cannot show tool calls, or the format in which the model writes a call is
            unknown. Also raised if the chat template changes earlier turns when a turn is added,
            and TRL has no variant of the template that leaves them unchanged.
    """
    from transformers import ProcessorMixin
    from trl import chat_template_utils as templates

    if isinstance(tokenizer, ProcessorMixin):
        raise ConfigError(
            "tools need a model without images: pass its tokenizer instead of a processor"
        )
    named = tokenizer.chat_template
    named = named if isinstance(named, dict) else {"default": named}
    if "default" not in named or not templates.supports_tool_calling(tokenizer):
        raise ConfigError(
            "the model has no default chat template, or its template shows no tool calls: use a "
            "model that was trained to call tools, or set model.chat_template"
        )
    if getattr(tokenizer, "response_template", None) is None:
        try:
            templates.add_response_schema(tokenizer)
        except ValueError as exc:
            if not any("<tool_call>\n{" in one.replace(r"\n", "\n") for one in named.values()):
                raise ConfigError(
                    "the kit does not know how this model writes a tool call: set "
                    "tokenizer.response_template, as the page on response parsing in "
                    "transformers' documentation describes"
                ) from exc
            tokenizer.response_template = templates.qwen3_template

    def render(messages: list[Message], **how: Any) -> Any:
        """Apply the chat template to messages with a dummy thought in each turn of the model.

        Qwen3's template adds an empty thought to a turn without one, but only to the last turn.
        Without the dummy it would therefore seem to change earlier turns.
        """
        thought = {"reasoning_content": "dummy"}
        shown = [thought | one if one["role"] == "assistant" else one for one in messages]
        return tokenizer.apply_chat_template(shown, **how)

    with_thoughts: Any = SimpleNamespace(apply_chat_template=render)
    variant = None  # TRL's variant of the template, which leaves earlier turns unchanged
    if not templates.is_chat_template_prefix_preserving(with_thoughts):
        try:
            variant = templates.get_training_chat_template(tokenizer)
        except ValueError as exc:
            raise ConfigError(
                "the model's chat template changes earlier turns when a tool's result follows, "
                "so the training would not use the sampled tokens: set another "
                "model.chat_template"
            ) from exc
    return {
        "processing_class": tokenizer if variant else with_thoughts,
        "chat_template": variant,
        "chat_template_kwargs": settings,
        "_tokenizer": tokenizer,
        "_is_vlm": False,
    }


def with_texts(tokenizer: Any, messages: list[Message], turns: list[list[int]]) -> list[Message]:
    """Put the thoughts of a trajectory back into its messages, and return the messages.

    A turn without calls gets its whole text as content, as in a run without tools. A turn with
    calls gets its thought and the text before the calls. If the last message is the result of a
    tool, an empty turn of the model is added.

    Args:
        tokenizer: Tokenizer of the policy.
        messages: Turns of the model and of tools, as TRL's loop returns them. They are changed.
        turns: Token ids of each turn of the model.
    """
    texts = iter(completion_texts(tokenizer, turns))
    for message in messages:
        if message["role"] == "assistant":
            text = next(texts)
            thought = message.pop("reasoning_content", None)
            if not message.get("tool_calls"):
                message["content"] = text
            elif thought is not None:
                message["content"] = f"{thought}{THOUGHT_ENDS}\n\n{message['content']}"
    if messages[-1]["role"] == "tool":  # no tokens were left for another turn of the model
        messages.append({"role": "assistant", "content": ""})
    return messages


def schemas_of(tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """Return the JSON schema of each tool, which the prompt shows to the model.

    Raises:
        ConfigError: A tool has no description; a parameter has no type, has no description or
            cannot be passed by its name; or two tools have the same name.
    """
    from transformers.utils.chat_template_utils import get_json_schema

    found = []
    for tool in tools:
        try:
            found.append(get_json_schema(tool))
        except Exception as exc:  # transformers raises errors of several types
            raise ConfigError(
                f"tool {getattr(tool, '__name__', tool)} cannot be shown to the model "
                f"({first_line(exc)}): give each parameter a type, and a line under Args: in the "
                "docstring"
            ) from exc
        for parameter in inspect.signature(tool).parameters.values():
            if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
                raise ConfigError(
                    f"tool {tool.__name__} has the parameter {parameter}, but the model passes "
                    "each value by its name: use only parameters that can be passed by name"
                )
    names = [one["function"]["name"] for one in found]
    if len({*names}) < len(names):
        raise ConfigError(f"two of the tools {', '.join(names)} share a name: rename one")
    return found
