"""``rloo-kit chat``: talk to a trained model in the terminal, its thought dimmed."""

import io
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TextIO

from rloo_kit.checkpoints.stopping import Terminated
from rloo_kit.config.run_file import RunConfig
from rloo_kit.data.prompts import prompt_ids
from rloo_kit.errors import ConfigError
from rloo_kit.evaluation.models import TrainedModel, find_trained, load_base
from rloo_kit.machine.memory import session
from rloo_kit.text.thoughts import THOUGHT_ENDS, token_id
from rloo_kit.text.wording import printable
from rloo_kit.training.preparation import template_settings

HELP = "an empty line or Ctrl-D ends the conversation, Ctrl-C stops an answer"
# Of an answer, where no run sets it
DEFAULT_MAX_TOKENS = 512

Turns = list[dict[str, str]]


def chat(  # noqa: PLR0913
    model: str,
    *,
    base: bool = False,
    system: str | None = None,
    temperature: float | None = None,
    max_tokens: int | None = None,
    seed: int = 42,
    source: TextIO | None = None,
    out: TextIO | None = None,
) -> None:
    """Answer line after line, until an empty one or the end of the input.

    Args:
        model: A run, a checkpoint, an adapter or a model.
        base: Let the base answer too, after it.
        system: A system message; None: that of the run.
        temperature: None: that of the run, else 1; 0 is greedy.
        max_tokens: Of an answer; None: as in the run.
        seed: Of sampling; the same lines give the same answers.
        source: Lines are read here; None: the terminal.
        out: Written to; None: the terminal.

    Raises:
        KitError: With the remedy.
    """
    reader: TextIO = source or sys.stdin
    console = _console(out or sys.stdout)
    trained = find_trained(model)
    speaker = _Speaker.of(trained, system, temperature, max_tokens)
    if base and trained.adapter is None:
        raise ConfigError(f"{model} has no adapter, so it is its own base: leave --base out")
    models = [trained, *([trained.without_adapter()] if base else [])]
    histories: list[Turns] = [[] for _ in models]
    with session():
        speaker.load(trained)
        if reader.isatty():
            console.print(f"{', '.join(one.name for one in models)}: {HELP}", style="dim")
        for turn, line in enumerate(_lines(reader, console.file)):
            try:
                answers = []
                for one, history in zip(models, histories, strict=True):
                    if base:
                        console.print(f"{one.short_name}:", style="bold")
                    show = _Printer(console)
                    answers.append(speaker.answer(one, history, line, seed + turn, show))
                    console.print()
            except Terminated:
                raise
            except KeyboardInterrupt:
                console.print("\n(stopped: this turn is left out)", style="dim")
                continue
            for history, answer in zip(histories, answers, strict=True):
                final = answer.rpartition(THOUGHT_ENDS)[2].strip()  # the next turn needs no thought
                history += [_turn("user", line), _turn("assistant", final)]


def _turn(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def _lines(source: TextIO, out: TextIO) -> Iterator[str]:
    """Yield lines that are not empty; a person's empty line ends them."""
    while True:
        if source.isatty():
            out.write("\n> ")
            out.flush()
        try:
            line = source.readline()
        except UnicodeDecodeError as exc:
            raise ConfigError(f"the input is not UTF-8 text ({exc}): save it as UTF-8") from exc
        if not line or (source.isatty() and not line.strip()):
            return
        if line.strip():
            yield line.rstrip("\n")


# --- answers -------------------------------------------------------------------------------------


@dataclass
class _Speaker:
    """A loaded base and how it answers, with an adapter or without."""

    max_tokens: int
    temperature: float
    template: dict[str, Any]
    system: str | None
    is_chat: bool
    base: Any = None
    """LoadedBase, once loaded."""

    @classmethod
    def of(
        cls,
        trained: TrainedModel,
        system: str | None,
        temperature: float | None,
        max_tokens: int | None,
    ) -> "_Speaker":
        """Return one with the settings of a run, unless others are given."""
        config = trained.config or RunConfig()
        if temperature is not None and not 0 <= temperature <= 10:
            raise ConfigError(
                f"--temperature is {temperature:g}, must be between 0 (greedy) and 10"
            )
        if max_tokens is not None and max_tokens < 1:
            raise ConfigError(f"--max-tokens is {max_tokens}, must be at least 1")
        return cls(
            max_tokens or config.trainer.get("max_completion_length") or DEFAULT_MAX_TOKENS,
            config.trainer.get("temperature", 1.0) if temperature is None else temperature,
            template_settings(config),
            config.data.system if system is None else system,
            config.data.chat,
        )

    def load(self, trained: TrainedModel) -> None:
        """Load the base."""
        self.base = load_base(trained)
        if trained.config is None and not self.base.tokenizer.chat_template:
            self.is_chat = False

    def answer(
        self, trained: TrainedModel, history: Turns, line: str, seed: int, show: "_Printer"
    ) -> str:
        """Return the answer to a line, thought included; ``show`` gets it as it comes."""
        system = [_turn("system", self.system)] if self.system else []
        turns = [*system, *history, _turn("user", line)]
        tokenizer, config = self.base.tokenizer, self.base.model.config
        ids = prompt_ids(tokenizer, turns if self.is_chat else line, self.template)
        longest = getattr(config, "max_position_embeddings", None) or sys.maxsize
        if len(ids) + self.max_tokens > longest:
            raise ConfigError(
                f"the conversation has {len(ids)} tokens, and the model takes {longest} with an "
                f"answer of {self.max_tokens}: start again, or lower --max-tokens"
            )
        opening = token_id(tokenizer, "<think>")
        show.in_thought = opening is not None and opening in ids[-4:]  # by the template
        with self.base.using(trained) as model:
            found = self._generate(model, ids, seed, show)
        return tokenizer.decode(found, skip_special_tokens=True)

    def _generate(self, model: Any, ids: list[int], seed: int, show: "_Printer") -> Any:
        import torch
        from transformers import TextStreamer

        class Pieces(TextStreamer):
            """Pass on the text as it is decoded."""

            def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
                show(text)

        given: dict[str, Any] = {"do_sample": self.temperature > 0}
        if self.temperature > 0:
            given |= {"temperature": self.temperature, "top_p": 1.0, "top_k": 0}
        streamer: Any = Pieces(self.base.tokenizer, skip_prompt=True, skip_special_tokens=True)
        with torch.random.fork_rng(), torch.inference_mode():
            torch.manual_seed(seed)
            getattr(model, "for_inference", model.eval)()  # Unsloth's faster path, where it is
            inputs = torch.tensor([ids], device=model.device)  # (1, P)
            output = model.generate(
                inputs,
                attention_mask=torch.ones_like(inputs),
                max_new_tokens=self.max_tokens,
                streamer=streamer,
                **given,
            )
        return output[0, len(ids) :]


# --- the terminal --------------------------------------------------------------------------------


def _console(out: TextIO) -> Any:
    from rich.console import Console

    if isinstance(out, io.TextIOWrapper):  # a terminal that is not UTF-8 shows a ? instead
        out.reconfigure(errors="replace")
    return Console(file=out, highlight=False, markup=False, emoji=False)


class _Printer:
    """Print an answer piece by piece, its thought dimmed.

    Args:
        console: Of rich; a file or a pipe gets plain text.
    """

    def __init__(self, console: Any) -> None:
        self._console, self._printed = console, ""
        self.in_thought = False
        """Whether the prompt has opened the thought."""

    def __call__(self, piece: str) -> None:
        before, self._printed = self._printed, self._printed + piece
        inside = self.in_thought or self._printed.lstrip().startswith("<think>")
        end = self._printed.find(THOUGHT_ENDS)
        border = len(self._printed) if end < 0 else end + len(THOUGHT_ENDS)
        border = max(0, border - len(before)) if inside else 0
        for text, style in ((piece[:border], "dim"), (piece[border:], None)):
            if text:
                self._console.print(_plain(text), style=style, end="", soft_wrap=True)
        self._console.file.flush()


def _plain(text: str) -> str:
    """Return text that cannot steer a terminal, its lines kept."""
    return "\n".join(printable(line) for line in text.split("\n"))
