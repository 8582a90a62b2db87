"""``rloo-kit chat``: a chat with a trained model in the terminal, with its thoughts dimmed."""

import contextlib
import functools
import io
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

from rich.console import Console

from rloo_kit.config.run_file import RunConfig
from rloo_kit.config.settings import DEFAULTS
from rloo_kit.data.lengths import prompt_ids
from rloo_kit.errors import ConfigError
from rloo_kit.evaluation.trained import find_trained, load_base
from rloo_kit.job import system_message, template_settings
from rloo_kit.machine.cleanup import session
from rloo_kit.text.thoughts import (
    THOUGHT_BEGINS,
    THOUGHT_ENDS,
    completion_texts,
    thought_marks,
)
from rloo_kit.text.wording import printable
from rloo_kit.tools.python import python
from rloo_kit.tools.specs import load_tools
from rloo_kit.types import Message, Model, Tokenizer

# Question to the user before the tool `python` runs a program
ASKED = "\nrun this program? [y/N] "


def chat(model: str, *, base: bool = False) -> None:
    """Chat with the user: read a line from the terminal, print the model's answer, and repeat.

    The system message, the temperature and the maximum completion length are those of the run. The
    model may call the run's tools, and the user must confirm each program that the tool ``python``
    is to run. Environments are not used.

    Args:
        model: Folder of a run, a checkpoint or an adapter, or name of a model.
        base: If True, the base model answers each line too, after the trained model.

    Raises:
        ConfigError: ``base`` is True but the model has no adapter, or the conversation exceeds the
            context length.
        ModelError: The model cannot be loaded.
    """
    trained = find_trained(model)
    config = trained.config
    if base and trained.adapter is None:
        raise ConfigError(f"{model} has no adapter, so it is its own base: leave --base out")
    models = [trained, trained.without_adapter()] if base else [trained]
    text = system_message(config.data)
    system = [{"role": "system", "content": text}] if text else []
    conversations = [(one, [*system]) for one in models]
    console = Console()
    with session():
        loaded = load_base(trained)
        tokenizer = loaded.tokenizer
        loop = _tool_loop(config, tokenizer, console)
        is_chat = config.data.chat and tokenizer.chat_template
        for line in _lines(console):
            for one, turns in conversations:
                if base:
                    console.out(f"{one.short_name}:", style="bold")
                turns.append({"role": "user", "content": line})
                with loaded.using(one) as policy:
                    draw = functools.partial(_say, policy, tokenizer, config, console)
                    prompt = turns if is_chat or loop else line
                    said = _answer(draw, tokenizer, loop, prompt, template_settings(config))
                turns += map(_without_thought, said)
                console.print()


def _answer(
    draw: Callable[..., Any],
    tokenizer: Tokenizer,
    loop: Any,
    prompt: Any,
    settings: dict[str, Any] | None,
) -> list[Message]:
    """Sample the answer to a prompt and return its turns.

    The last turn is empty if its thought was cut off.

    Args:
        draw: Function that samples a turn of the model; see ``_say``.
        tokenizer: Tokenizer of the model.
        loop: The tool loop, or None.
        prompt: The conversation, or the user's line.
        settings: Arguments for the chat template.
    """
    if loop is None:
        prompts = [prompt_ids(tokenizer, prompt, settings)]
        ids, _ = draw(prompts)
        said = [{"role": "assistant", "content": completion_texts(tokenizer, ids)[0]}]
    else:
        sampled = loop.sample([{"prompt": prompt}], draw, contextlib.nullcontext, ())
        prompts, ids = sampled.tokens.prompt_ids, sampled.tokens.completion_ids
        (said,) = sampled.completions
    marks = thought_marks(tokenizer)
    if marks is not None and marks.is_open(prompts[0] + ids[0]):
        said[-1]["content"] = ""
    return said


def _without_thought(turn: Message) -> Message:
    """Return a turn of the chat. A turn of the model is returned without its thought.

    Chat templates remove the thoughts of past turns in the same way.
    """
    if turn["role"] != "assistant":
        return turn
    return turn | {"content": turn["content"].rpartition(THOUGHT_ENDS)[2].strip()}


def _lines(console: Console) -> Iterator[str]:
    """Yield each non-empty line that the user types, until the input ends."""
    if isinstance(sys.stdin, io.TextIOWrapper):  # replace bytes that are not UTF-8
        sys.stdin.reconfigure(errors="replace")
    prompt = ""
    if sys.stdin.isatty():
        console.print("Ctrl-D ends the conversation", style="dim")
        prompt = "> "
    with contextlib.suppress(EOFError):
        while True:
            if line := console.input(prompt).strip():
                yield line


def _say(
    model: Model,
    tokenizer: Tokenizer,
    config: RunConfig,
    console: Console,
    prompts: list[list[int]],
) -> tuple[list[list[int]], None]:
    """Sample an answer to a prompt, and print it while it is sampled.

    Args:
        model: The model that answers.
        tokenizer: Tokenizer of the model.
        config: Settings of the run.
        console: Console to print to.
        prompts: A list with one element, the token ids of the prompt.

    Returns:
        A list with one element, the token ids of the answer; and None, in place of the
        log-probabilities that a tool loop accepts here.

    Raises:
        ConfigError: The prompt leaves no room for an answer in the model's context length.
    """
    import torch
    from transformers import TextStreamer

    (ids,) = prompts
    config_of_text = model.config.get_text_config()
    limit = getattr(config_of_text, "max_position_embeddings", None) or sys.maxsize
    room = limit - len(ids)
    if room < 1:
        raise ConfigError(
            "the conversation is longer than the model's context length: start a new conversation"
        )
    marks = thought_marks(tokenizer)

    decoder: Any = SimpleNamespace(
        decode=lambda sampled, **_: completion_texts(tokenizer, [sampled])[0]
    )
    streamer: Any = TextStreamer(decoder, skip_prompt=True)
    # A chat template may open the thought
    streamer.on_finalized_text = printer(console, marks is not None and marks.is_open(ids))
    settings = {**DEFAULTS, **config.trainer}
    inputs = torch.tensor(prompts, device=model.device)  # (1, P)
    with torch.inference_mode():
        getattr(model, "for_inference", model.eval)()  # Unsloth's faster path
        output = model.generate(
            inputs,
            attention_mask=torch.ones_like(inputs),
            max_new_tokens=min(settings["max_completion_length"], room),
            do_sample=True,
            temperature=settings["temperature"],
            # as in a run, the model's own generation_config does not apply
            top_p=1.0,
            top_k=0,
            min_p=0.0,
            repetition_penalty=1.0,
            streamer=streamer,
        )
    return output[:, len(ids) :].tolist(), None


# --- tools ---------------------------------------------------------------------------------------


def _tool_loop(config: RunConfig, tokenizer: Tokenizer, console: Console) -> Any:
    """Return the ``ToolLoop`` that runs the run's tools, or None if the run has no tools."""
    from rloo_kit.tools.loop import ToolLimits, ToolLoop
    from rloo_kit.training.trl_step import run_tool_loop

    if config.environment:
        console.print("environments are not used in a chat", style="dim")
    if not config.tools:
        return None
    settings = {**DEFAULTS, **config.trainer}
    tools = load_tools(config.tools, say=lambda line: console.out(line, style="dim"))
    limits = ToolLimits(
        max_tokens=settings["max_completion_length"],
        max_length=sys.maxsize,  # `_say` reports a conversation that is too long
        max_rounds=settings["max_tool_calling_iterations"],
        # The user may need time to confirm a program, and the sandbox has its own time limit
        timeout=None if python in tools else settings["tool_timeout_seconds"],
    )
    template = template_settings(config) or {}
    asking = [confirmed_python(console) if tool is python else tool for tool in tools]
    loop = ToolLoop(asking, None, tokenizer, template, limits, run_tool_loop)
    loop.show = lambda line: console.out(f"\n{printable(line)}", style="dim", highlight=False)
    return loop


def confirmed_python(console: Console) -> Callable[..., str]:
    """Return the tool ``python``, changed to ask the user before it runs a program.

    Raises:
        PermissionError: The returned tool is called, and the user does not answer ``y``.
    """

    @functools.wraps(python)
    def call(code: str) -> str:
        """Run a program if the user answers ``y``.

        Raises:
            PermissionError: The user did not answer ``y``.
        """
        if console.input(ASKED, markup=False).lower().strip() != "y":
            raise PermissionError("the user did not allow the program to run")
        return python(code)

    return call


def printer(console: Console, in_thought: bool) -> Callable[..., None]:
    """Return a function for a ``TextStreamer`` that prints each piece of an answer.

    The thought is dimmed. Output to a file or a pipe has no styles.

    Args:
        console: Console to print to.
        in_thought: True if the prompt opens the thought.
    """

    def show(piece: str, stream_end: bool = False) -> None:
        nonlocal in_thought
        thought = end = ""
        if in_thought or piece.lstrip().startswith(THOUGHT_BEGINS):
            thought, end, piece = piece.partition(THOUGHT_ENDS)
            in_thought = not end
        for text, style in ((thought + end, "dim"), (piece, None)):
            # Keep line breaks, and escape all other control characters
            plain = "\n".join(map(printable, text.split("\n")))
            console.out(plain, style=style, end="", highlight=False)
        console.file.flush()

    return show
