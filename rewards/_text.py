"""The text of a completion, and its two parts: the thought and what follows it."""

from typing import TYPE_CHECKING, Any

from rloo_kit.text.thoughts import THOUGHT_ENDS
from rloo_kit.types import Completion

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

THINK_OPEN = "<think>"
THINK_CLOSE = THOUGHT_ENDS


def completion_text(completion: Completion) -> str:
    """Return the text of one completion, plain or conversational.

    Of chat messages it is the content of the last assistant message; "" where there is none.
    """
    if isinstance(completion, str):
        return completion
    for message in reversed(completion):
        if message.get("role", "assistant") == "assistant":
            return content_text(message.get("content"))
    return ""


def content_text(content: str | list[dict[str, Any]] | None) -> str:
    """Return a message's content as one string; of a list of parts, the text parts joined."""
    if isinstance(content, list):
        return "".join(part.get("text") or "" for part in content)
    return content or ""


def thought_text(text: str) -> str | None:
    """Return what stands before the first ``</think>``, without a leading ``<think>``.

    None means that the text holds no ``</think>``.
    """
    thought, close, _ = text.partition(THINK_CLOSE)
    return thought.lstrip().removeprefix(THINK_OPEN) if close else None


def text_after_thought(text: str) -> str:
    """Return what stands after the last ``</think>``.

    A text without ``</think>`` is returned whole, or as "" when it begins with ``<think>``: then
    all of it is an unfinished thought.
    """
    _, close, answer = text.rpartition(THINK_CLOSE)
    if not close and answer.lstrip().startswith(THINK_OPEN):
        return ""
    return answer


def template_opens_thought(tokenizer: "PreTrainedTokenizerBase") -> bool:
    """Return whether the tokenizer's chat template ends a prompt with an opened ``<think>``."""
    if not tokenizer.chat_template:
        return False
    try:
        rendered: Any = tokenizer.apply_chat_template(
            [{"role": "user", "content": "?"}], tokenize=False, add_generation_prompt=True
        )
    except Exception:  # a broken template is reported where the prompts are rendered
        return False
    return rendered.rstrip().endswith(THINK_OPEN)


def is_opened_in_prompt(prompt: Completion | None, by_template: bool | None) -> bool:
    """Return whether the thought was opened before the completion began.

    Args:
        prompt: A plain prompt is read itself; of chat messages the template decides.
        by_template: What ``template_opens_thought`` said; None counts as False.
    """
    if isinstance(prompt, str):
        return prompt.rstrip().endswith(THINK_OPEN)
    return bool(by_template)


def is_unclosed(text: str, *, opened: bool) -> bool:
    """Return whether a thought is open at the end of a completion.

    Args:
        text: The completion.
        opened: Whether the thought was opened before it.
    """
    _, close, tail = text.rpartition(THINK_CLOSE)
    return THINK_OPEN in tail or (opened and not close)
