"""``rloo-kit chat``: a chat with a trained model in the terminal, which shows thoughts dimmed."""

import contextlib
import functools
import inspect
import io
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

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
from rloo_kit.types import Model, Tokenizer

# Question to the user before the tool `python` runs a program
ASKED = "\nrun this program? [y/N] "

if TYPE_CHECKING:
    from rich.console import Console

    from rloo_kit.tools.loop import ToolLoop


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
    from rich.console import Console

    trained = find_trained(model)
    config = trained.config or RunConfig()
    if base and trained.adapter is None:
        raise ConfigError(f"{model} has no adapter, so it is its own base: leave --base out")
    models = [trained, trained.without_adapter()] if base else [trained]
    text = system_message(config.data)
    system = [_turn("system", text)] if text else []
    conversations: list[list[dict[str, Any]]] = [[*system] for _ in models]
    if isinstance(sys.stdin, io.TextIOWrapper):  # show a ? for what is not UTF-8
        sys.stdin.reconfigure(errors="replace")
    console = Console()
    with session():
        loaded = load_base(trained)
        loop = _tool_loop(config, loaded.tokenizer, console)
        for line in _lines(console):
            for one, turns in zip(models, conversations, strict=True):
                if base:
                    console.out(f"{one.short_name}:", style="bold")
                turns.append(_turn("user", line))
                is_chat = config.data.chat and loaded.tokenizer.chat_template
                with loaded.using(one) as policy:
                    say = functools.partial(_say, policy, loaded.tokenizer, config, console)
                    if loop is not None:
                        turns += _with_calls(loop, turns, say)
                    else:
                        prompt = turns if is_chat else line
                        ids = prompt_ids(loaded.tokenizer, prompt, template_settings(config))
                        (answer,) = completion_texts(loaded.tokenizer, [say(ids)])
                        turns.append(_turn("assistant", _without_thought(answer)))
                console.print()


def _turn(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}


def _without_thought(text: str) -> str:
    """Return the text after the thought, which is all that a chat template keeps of past turns."""
    return text.rpartition(THOUGHT_ENDS)[2].strip()


def _lines(console: "Console") -> Iterator[str]:
    """Yield each line that the user types, without the empty ones, until the input ends."""
    prompt = ""
    if sys.stdin.isatty():
        console.print("Ctrl-D ends the conversation", style="dim")
        prompt = "> "
    with contextlib.suppress(EOFError):
        while True:
            if line := console.input(prompt).strip():
                yield line


def _say(
    model: Model, tokenizer: Tokenizer, config: RunConfig, console: "Console", ids: list[int]
) -> list[int]:
    """Sample an answer to a prompt, print it while it is sampled, and return its token ids.

    ``ids`` are the token ids of the prompt.

    Raises:
        ConfigError: The prompt leaves no room for an answer in the model's context length.
    """
    import torch
    from transformers import TextStreamer

    longest = getattr(model.config, "max_position_embeddings", None) or sys.maxsize
    room = longest - len(ids)
    if room < 1:
        raise ConfigError(
            "the conversation is longer than the model's context length: start a new conversation"
        )
    marks = thought_marks(tokenizer)

    def decode(sampled: list[int], **_: Any) -> str:
        return completion_texts(tokenizer, [sampled])[0]

    streamer: Any = TextStreamer(SimpleNamespace(decode=decode), skip_prompt=True)  # pyright: ignore[reportArgumentType]
    # A chat template may open the thought
    streamer.on_finalized_text = Printer(console, marks is not None and marks.is_open(ids))
    settings = {**DEFAULTS, **config.trainer}
    inputs = torch.tensor([ids], device=model.device)  # (1, P)
    with torch.inference_mode():
        getattr(model, "for_inference", model.eval)()  # Unsloth's faster path
        output = model.generate(
            inputs,
            attention_mask=torch.ones_like(inputs),
            max_new_tokens=min(settings["max_completion_length"], room),
            do_sample=True,
            temperature=settings["temperature"],
            top_p=1.0,
            top_k=0,
            streamer=streamer,
        )
    return output[0, len(ids) :].tolist()


# --- tools ---------------------------------------------------------------------------------------


def _tool_loop(config: RunConfig, tokenizer: Tokenizer, console: "Console") -> "ToolLoop | None":
    """Return the loop that runs the run's tools, or None if the run has no tools."""
    from rloo_kit.tools.loop import ToolLimits, ToolLoop
    from rloo_kit.training.trl_step import run_tool_loop

    if config.environment:
        console.print("environments are not played in a chat", style="dim")
    if not config.tools:
        return None
    settings = {**DEFAULTS, **config.trainer}
    tools = load_tools(config.tools, say=lambda line: console.out(line, style="dim"))
    limits = ToolLimits(
        max_tokens=settings["max_completion_length"],
        max_length=sys.maxsize,  # `_say` reports a conversation that is too long
        max_rounds=settings.get("max_tool_calling_iterations"),
        # The user may need time to confirm a program, and the sandbox has its own time limit
        timeout=None if python in tools else settings.get("tool_timeout_seconds"),
    )
    template = template_settings(config) or {}
    shown = [seen(tool, console) for tool in tools]
    return ToolLoop(shown, None, tokenizer, template, limits, run_tool_loop)


def _with_calls(
    loop: "ToolLoop", turns: list[dict[str, Any]], say: Callable[[list[int]], list[int]]
) -> list[dict[str, Any]]:
    """Let the model answer and call tools; return its messages and those of the tools, in order.

    Args:
        loop: Loop that runs the tools.
        turns: The conversation so far, as chat messages.
        say: Function that samples and prints, from the token ids of a prompt to those sampled.
    """
    found = loop.sample(
        [{"prompt": turns}], lambda ids: ([say(ids[0])], None), contextlib.nullcontext
    )
    return [
        one | {"content": _without_thought(one["content"])} if one["role"] == "assistant" else one
        for one in found.messages[0]
    ]


def seen(tool: Callable[..., Any], console: "Console") -> Callable[..., Any]:
    """Wrap a tool so that each call prints its result or error, and return the wrapped tool.

    The tool ``python`` also asks the user before it runs a program.

    Raises:
        PermissionError: Raised by a call of ``python`` if the user did not answer ``y``.
    """

    @contextlib.contextmanager
    def shown() -> Iterator[list[Any]]:
        """Print the result that the body appends to the yielded list, or the error of the body.

        Raises:
            Exception: The error of the body.
        """
        results: list[Any] = []
        try:
            yield results
        except Exception as exc:
            results.append(f"{type(exc).__name__}: {exc}")
            raise
        finally:
            text = printable(str(*results))
            console.out(f"\n{tool.__name__}: {text}", style="dim", highlight=False)

    if inspect.iscoroutinefunction(tool):

        @functools.wraps(tool)
        async def wait(**arguments: Any) -> Any:
            with shown() as results:
                results.append(await tool(**arguments))
            return results[0]

        return wait

    @functools.wraps(tool)
    def call(**arguments: Any) -> Any:
        """Call the tool.

        Raises:
            PermissionError: The user did not let the program run.
        """
        with shown() as results:
            if tool is python and console.input(ASKED, markup=False).lower().strip() != "y":
                raise PermissionError("the user did not run the program")
            results.append(tool(**arguments))
        return results[0]

    return call


class Printer:
    """Printer of an answer that arrives in pieces; it dims the thought.

    The text is plain if the output goes to a file or a pipe.
    """

    def __init__(self, console: "Console", in_thought: bool) -> None:
        self._console = console
        self._in_thought = in_thought

    def __call__(self, piece: str, stream_end: bool = False) -> None:
        """Print one piece of the answer, as a ``TextStreamer`` passes it."""
        thought = ""
        end = ""
        answer = piece
        if self._in_thought or piece.lstrip().startswith(THOUGHT_BEGINS):
            thought, end, answer = piece.partition(THOUGHT_ENDS)
            self._in_thought = not end
        for text, style in ((thought + end, "dim"), (answer, None)):
            # Keep line breaks, and escape all other control characters
            plain = "\n".join(map(printable, text.split("\n")))
            self._console.out(plain, style=style, end="", highlight=False)
        self._console.file.flush()
