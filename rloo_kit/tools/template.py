"""The chat template of a model that calls tools: how it shows calls, and how they are read."""

import re
from collections.abc import Callable, Sequence
from functools import cached_property
from types import SimpleNamespace
from typing import Any

from rloo_kit.data.lengths import tokenize_prompts
from rloo_kit.errors import ConfigError
from rloo_kit.text.thoughts import THOUGHT_ENDS, completion_texts
from rloo_kit.text.wording import first_line

Message = dict[str, Any]


class CallTemplate:
    """A chat template that shows calls and results, checked by the functions of TRL.

    Args:
        tokenizer: The policy's. It gets TRL's ``response_template`` for its family if it has none.
        settings: Arguments of the chat template.

    Raises:
        ConfigError: The template shows no calls or changes earlier turns, or nobody knows how the
            model writes a call.
    """

    def __init__(self, tokenizer: Any, settings: dict[str, Any]) -> None:
        from transformers import ProcessorMixin
        from trl import chat_template_utils as templates

        self._tokenizer = tokenizer
        self._settings = settings
        if isinstance(tokenizer, ProcessorMixin):
            raise ConfigError("tools need a model without images: give its tokenizer")
        if not templates.supports_tool_calling(tokenizer):
            raise ConfigError(
                "the model's chat template shows no tool calls: take a model that was trained to "
                "call tools, or give model.chat_template"
            )
        if getattr(tokenizer, "response_template", None) is None:
            try:
                templates.add_response_schema(tokenizer)
            except ValueError as exc:
                if "<tool_call>\n{" not in re.sub(r"\\n", "\n", tokenizer.chat_template):
                    raise ConfigError(
                        "the kit does not know how this model writes a tool call: set "
                        "tokenizer.response_template (transformers, response parsing)"
                    ) from exc
                tokenizer.response_template = templates.qwen3_template
        self._of_training: str | None = None  # TRL's variant, which keeps earlier turns
        if not templates.is_chat_template_prefix_preserving(self._with_thoughts):
            try:
                self._of_training = templates.get_training_chat_template(tokenizer)
            except ValueError as exc:
                raise ConfigError(
                    "the model's chat template changes earlier turns when a tool's result follows, "
                    "so what is trained would not be what was sampled: give another "
                    "model.chat_template"
                ) from exc

    @cached_property
    def _with_thoughts(self) -> Any:
        """The tokenizer, with a thought in each turn of the model.

        Qwen3's template adds an empty thought to the last turn only, if the turn has none.
        """

        def render(messages: list[Message], **how: Any) -> Any:
            thought = {"reasoning_content": "dummy"}
            shown = [thought | one if one["role"] == "assistant" else one for one in messages]
            return self._tokenizer.apply_chat_template(shown, **how)

        return SimpleNamespace(apply_chat_template=render)

    @property
    def for_trl(self) -> dict[str, Any]:
        """The attributes of a trainer by which TRL's loop uses the template."""
        return {
            "processing_class": self._tokenizer if self._of_training else self._with_thoughts,
            "chat_template": self._of_training,
            "chat_template_kwargs": self._settings,
            "_tokenizer": self._tokenizer,
            "_is_vlm": False,
        }

    def prompt_ids(self, prompt: list[Message], schemas: list[dict[str, Any]]) -> list[int]:
        """Return the token ids of a prompt that shows tools.

        Raises:
            DataError: The chat template cannot render the prompt.
        """
        settings = {**self._settings, "tools": schemas or None}
        return tokenize_prompts(self._tokenizer, [prompt], settings)[0]

    def parse(self, ids: list[int], before: list[int]) -> Message:
        """Return a turn of the model as a message; ``before`` are the ids of all that it read."""
        from trl.chat_template_utils import parse_response

        return parse_response(self._tokenizer, ids, before)

    def with_texts(self, messages: list[Message], turns: list[list[int]]) -> list[Message]:
        """Return the messages of a trajectory with the texts that rewards read without tools too.

        A turn without calls has its whole text. A turn with calls has its thought and the text
        before the calls.

        Args:
            messages: Turns of the model and of tools, as TRL's loop returns them.
            turns: The ids of each turn of the model.
        """
        texts = iter(completion_texts(self._tokenizer, turns))
        shown = []
        for message in messages:
            one = {**message}
            if message["role"] == "assistant":
                text = next(texts)
                thought = one.pop("reasoning_content", None)
                if not message.get("tool_calls"):
                    one["content"] = text
                elif thought is not None:
                    one["content"] = f"{thought}{THOUGHT_ENDS}\n\n{message['content']}"
            shown.append(one)
        if shown[-1]["role"] == "tool":  # the result has filled the completion
            shown.append({"role": "assistant", "content": ""})
        return shown


def schemas_of(tools: Sequence[Callable[..., Any]]) -> list[dict[str, Any]]:
    """Return the JSON schemas by which a prompt shows functions.

    Raises:
        ConfigError: A function lacks a type or a description.
    """
    from transformers.utils.chat_template_utils import get_json_schema

    found = []
    for tool in tools:
        try:
            found.append(get_json_schema(tool))
        except Exception as exc:  # transformers has several
            raise ConfigError(
                f"tool {getattr(tool, '__name__', tool)} cannot be shown to the model "
                f"({first_line(exc)}): give each parameter a type, and a line under Args: in the "
                "docstring"
            ) from exc
    return found
