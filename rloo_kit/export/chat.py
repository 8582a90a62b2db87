"""rloo-kit chat: talk to a trained model in the terminal, thought dimmed, its base beside it."""

import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, TextIO

from rloo_kit.checkpoints.stopping import Terminated
from rloo_kit.config.run_file import RunConfig
from rloo_kit.data.prompts import prompt_ids
from rloo_kit.errors import ConfigError
from rloo_kit.evaluation.models import LoadedBase, TrainedModel, find_trained, load_base
from rloo_kit.machine.hardware import why_not_vllm
from rloo_kit.machine.memory import add_to_session, session
from rloo_kit.sampling.engine import Engine, Sampling, why_no_hot_swap
from rloo_kit.text.thoughts import THOUGHT_ENDS, token_id
from rloo_kit.text.wording import printable
from rloo_kit.training.preparation import template_settings

HELP = "an empty line or Ctrl-D ends it, /new forgets what was said, Ctrl-C stops an answer"
MOST_TOKENS = 512
"""Of an answer, where no run says how long one may be."""


@dataclass(frozen=True)
class Manner:
    """How a model answers."""

    max_tokens: int
    temperature: float
    """0 is greedy."""
    template: dict[str, Any]
    """Settings of the chat template."""
    system: str | None
    chat: bool
    """Whether what is said are chat messages; else each line is a prompt of its own."""
    seed: int


@dataclass
class Voice:
    """One model in the conversation, and what was said to it and by it."""

    trained: TrainedModel
    said: list[dict[str, str]] = field(default_factory=list)


def chat(  # noqa: PLR0913
    model: str,
    *,
    base: bool = False,
    system: str | None = None,
    temperature: float | None = None,
    max_tokens: int | None = None,
    vllm: bool = False,
    seed: int = 42,
    source: TextIO | None = None,
    out: TextIO | None = None,
) -> None:
    """Answer line after line, until an empty one or the end of the input.

    Args:
        model: A run, a checkpoint, an adapter or a model.
        base: Let the base answer beside it.
        system: A system message; None: that of the run.
        temperature: None: that of the run, else 1; 0 is greedy.
        max_tokens: Of an answer; None: as in the run.
        vllm: Let vLLM answer in the place of transformers.
        seed: Of sampling; the same lines give the same answers.
        source: Lines are read here; None: the terminal.
        out: Written to; None: the terminal.

    Raises:
        KitError: With the remedy.
    """
    trained = find_trained(model)
    manner = replace(_manner(trained, system, temperature, max_tokens), seed=seed)
    if base and trained.adapter is None:
        raise ConfigError(f"{model} has no adapter, so it is its own base: leave --base out")
    voices = [Voice(trained), *([Voice(trained.without_adapter())] if base else [])]
    screen = Screen(source or sys.stdin, out or sys.stdout)
    with session():
        one = load_base(trained)
        if trained.config is None and not one.tokenizer.chat_template:
            manner = replace(manner, chat=False)
        engine = _engine(one, trained) if vllm else None
        screen.tell(f"{', '.join(voice.trained.name for voice in voices)}: {HELP}")
        for turn, line in enumerate(screen.lines()):
            if line.strip() == "/new":
                for voice in voices:
                    voice.said.clear()
                continue
            with _stopped(screen):
                manner = replace(manner, seed=seed + turn)
                answers = _answers(one, engine, voices, line, manner, screen)
                for voice, answer in zip(voices, answers, strict=True):
                    voice.said += [
                        {"role": "user", "content": line},
                        {
                            "role": "assistant",
                            "content": answer.rpartition(THOUGHT_ENDS)[2].strip(),
                        },
                    ]


def _manner(
    trained: TrainedModel, system: str | None, temperature: float | None, max_tokens: int | None
) -> Manner:
    config = trained.config or RunConfig()
    if temperature is not None and not 0 <= temperature <= 10:
        raise ConfigError(f"temperature is {temperature:g}, must be between 0 (greedy) and 10")
    if max_tokens is not None and max_tokens < 1:
        raise ConfigError(f"max-tokens is {max_tokens}, must be at least 1")
    if temperature is None:
        temperature = config.trainer.get("temperature", 1.0)
    return Manner(
        max_tokens or config.trainer.get("max_completion_length") or MOST_TOKENS,
        temperature,
        template_settings(config),
        system if system is not None else config.data.system,
        config.data.chat,
        seed=0,
    )


@contextlib.contextmanager
def _stopped(screen: "Screen") -> Iterator[None]:
    """Let Ctrl-C end an answer and not the conversation."""
    try:
        yield
    except Terminated:
        raise
    except KeyboardInterrupt:
        screen.tell("\n(stopped; what was said in this turn is forgotten)")


# --- answers -------------------------------------------------------------------------------------


def _answers(
    one: LoadedBase,
    engine: Engine | None,
    voices: list[Voice],
    line: str,
    manner: Manner,
    screen: "Screen",
) -> list[str]:
    """Return what each voice answers, thought included; alone, it is shown as it comes."""
    answers = []
    alone = len(voices) == 1
    for voice in voices:
        ids = prompt_ids(one.tokenizer, _prompt(voice, line, manner), manner.template)
        room = getattr(one.model.config, "max_position_embeddings", None)
        if engine is not None:
            room = min(room or sys.maxsize, voice.trained.model.max_seq_length)
        if room is not None and len(ids) + manner.max_tokens > room:
            raise ConfigError(
                f"what was said has {len(ids)} tokens, and the model has room for {room} with an "
                f"answer of {manner.max_tokens}: begin again, or lower --max-tokens"
            )
        show = screen.writer(_thinks_first(one.tokenizer, ids)) if alone else None
        if engine is not None:
            text = _by_vllm(one, engine, voice, ids, manner)
            if show is not None:
                show(text)
        else:
            text = _by_transformers(one, voice, ids, manner, show)
        answers.append(text)
    if alone:
        screen.end()
    else:
        screen.beside([voice.trained.short_name for voice in voices], answers)
    return answers


def _prompt(voice: Voice, line: str, manner: Manner) -> Any:
    if not manner.chat:
        return line
    system = [{"role": "system", "content": manner.system}] if manner.system else []
    return [*system, *voice.said, {"role": "user", "content": line}]


def _thinks_first(tokenizer: Any, ids: list[int]) -> bool:
    """Return whether the answer begins inside a thought that the template opened."""
    opening = token_id(tokenizer, "<think>")
    return opening is not None and opening in ids[-4:]


def _by_transformers(
    one: LoadedBase,
    voice: Voice,
    ids: list[int],
    manner: Manner,
    show: Callable[[str], None] | None,
) -> str:
    import torch
    from transformers import TextStreamer

    class Pieces(TextStreamer):
        """Hands on the text as it is decoded."""

        def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
            show(text)

    settings: dict[str, Any] = {"do_sample": manner.temperature > 0}
    if manner.temperature > 0:
        settings |= {"temperature": manner.temperature, "top_p": 1.0, "top_k": 0}
    if show is not None:
        settings["streamer"] = Pieces(one.tokenizer, skip_prompt=True, skip_special_tokens=True)
    with one.using(voice.trained) as model, torch.random.fork_rng():
        torch.manual_seed(manner.seed)
        switch = getattr(model, "for_inference", model.eval)
        switch()
        inputs = torch.tensor([ids], device=model.device)
        with torch.inference_mode():
            output = model.generate(
                inputs,
                attention_mask=torch.ones_like(inputs),
                max_new_tokens=manner.max_tokens,
                **settings,
            )
    return one.tokenizer.decode(output[0, len(ids) :], skip_special_tokens=True)


def _by_vllm(one: LoadedBase, engine: Any, voice: Voice, ids: list[int], manner: Manner) -> str:
    with one.using(voice.trained) as model:
        engine.sync(model)
    ends = tuple(one.model.generation_config.eos_token_id)
    sampling = Sampling(manner.max_tokens, ends, manner.temperature)
    (found,) = engine.generate([ids], sampling, manner.seed).completion_ids
    return one.tokenizer.decode(found, skip_special_tokens=True)


def _engine(one: LoadedBase, trained: TrainedModel) -> Any:
    """Start vLLM for the base and its adapter.

    Raises:
        ConfigError: It cannot be used, and why.
    """
    from rloo_kit.sampling.vllm_inprocess import VllmEngine

    if trained.adapter is None:
        raise ConfigError("vLLM is started for a base with an adapter: leave --vllm out")
    with one.using(trained) as model:
        why_not = why_not_vllm() or why_no_hot_swap(model)
        if why_not:
            raise ConfigError(f"vLLM cannot answer here ({why_not}): leave --vllm out")
        engine = VllmEngine(model, max_length=trained.model.max_seq_length, num_sequences=1)
    add_to_session(engine)
    return engine


# --- the terminal --------------------------------------------------------------------------------


class Screen:
    """Where lines come from and answers go.

    Args:
        source: Lines; a terminal is asked with a prompt.
        out: A terminal gets the thought dimmed; a file or a pipe gets plain text.
    """

    def __init__(self, source: TextIO, out: TextIO) -> None:
        from rich.console import Console

        self._source = source
        self._out = out
        self._asks = source.isatty()
        if hasattr(out, "reconfigure"):  # a terminal that is not UTF-8 shows a ? instead
            out.reconfigure(errors="replace")
        self._console = Console(file=out, highlight=False, markup=False, emoji=False)

    def tell(self, line: str) -> None:
        """Say something that is no answer, to a person alone."""
        if self._asks:
            self._console.print(line, style="dim")

    def lines(self) -> Iterator[str]:
        """Yield what is said until the end; a person's empty line ends it too."""
        while True:
            if self._asks:
                self._out.write("\n> ")
                self._out.flush()
            try:
                line = self._source.readline()
            except UnicodeDecodeError as exc:
                raise ConfigError(f"what was said is no UTF-8 text ({exc}): save it so") from exc
            if not line or (self._asks and not line.strip()):
                return
            if line.strip():
                yield line.rstrip("\n")

    def writer(self, thinks: bool) -> Callable[[str], None]:
        """Return what shows an answer piece by piece, its thought dimmed.

        Args:
            thinks: Whether it begins inside a thought.
        """
        shown = ""

        def show(piece: str) -> None:
            nonlocal shown
            before, shown = shown, shown + piece
            inside = thinks or shown.lstrip().startswith("<think>")
            ends = shown.find(THOUGHT_ENDS)
            border = 0 if not inside else len(shown) if ends < 0 else ends + len(THOUGHT_ENDS)
            border = max(0, border - len(before))
            self._write(piece[:border], dimmed=True)
            self._write(piece[border:], dimmed=False)

        return show

    def _write(self, text: str, *, dimmed: bool) -> None:
        if text:
            self._console.print(
                _plain(text), style="dim" if dimmed else None, end="", soft_wrap=True
            )
            self._out.flush()

    def end(self) -> None:
        """End an answer."""
        self._console.print()

    def beside(self, names: list[str], answers: list[str]) -> None:
        """Show answers side by side."""
        from rich.table import Table
        from rich.text import Text

        table = Table(*names, expand=self._console.is_terminal)
        cells = []
        for answer in answers:
            thought, closed, rest = answer.rpartition(THOUGHT_ENDS)
            cells.append(Text.assemble((_plain(thought + closed), "dim"), _plain(rest)))
        table.add_row(*cells)
        self._console.print(table)


def _plain(text: str) -> str:
    """Return text that cannot steer a terminal, its lines kept."""
    return "\n".join(printable(line) for line in text.split("\n"))
