"""Trajectories: completions in which the model calls tools, over several turns.

The loop is ``_tool_call_loop`` of TRL's ``GRPOTrainer``, so tools, environments and metrics have
the meaning and the names that they have there. Token ids are concatenated and never tokenized
again, so what is trained is what was sampled.

Shapes: B trajectories.
"""

import asyncio
import contextlib
import copy
import inspect
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property, wraps
from types import SimpleNamespace
from typing import Any

from rloo_kit.errors import ConfigError, DataError, KitError
from rloo_kit.rloo.batching import TokenRows
from rloo_kit.scoring.contract import OverdueError, within
from rloo_kit.text.wording import first_line
from rloo_kit.tools.environments import Environments, methods_of
from rloo_kit.tools.numbers import MAX_RESULT
from rloo_kit.tools.template import CallTemplate, Message, schemas_of

# Most characters of an error that the model reads
MAX_ERROR = 500

Drawn = tuple[list[list[int]], list[list[float]] | None]
# Function from prompt ids to completion ids, and their log-probabilities if an engine reports them
Draw = Callable[[list[list[int]]], Drawn]
Tool = Callable[..., Any]


@dataclass(frozen=True)
class Trajectories:
    """B completions of several turns, by the model and by tools."""

    prompts: list[Any]  # conversations as the model read them
    tokens: TokenRows
    messages: list[list[Message]]  # turns of the model (``assistant``) and of tools
    log_probs: list[list[float]] | None  # 0 for tokens of tools; None if the sampler has none
    open_calls: list[bool]  # whether it ends with a call whose result it does not have


@dataclass(frozen=True)
class ToolLimits:
    """Limits of trajectories and of calls."""

    max_tokens: int  # of a whole completion, the results of tools included
    max_length: int  # of prompt and completion
    max_rounds: int | None = None  # of calls in a completion
    timeout: float | None = None  # seconds of a call
    stop_on_error: bool = False  # False: the model reads the error


class ToolLoop:
    """Samples trajectories.

    Args:
        tools: Functions, plain or async.
        environments: A class, a table of classes by name, or None.
        tokenizer: The policy's; it may get a ``response_template``.
        settings: Arguments of the chat template.
        limits: Limits.
        run: TRL's loop (``training.trl_step.run_tool_loop``).

    Raises:
        ConfigError: A tool lacks a type or a description, an environment has no ``reset``, or the
            chat template does not fit.
    """

    def __init__(
        self,
        tools: Sequence[Tool],
        environments: Mapping[str, Callable[[], Any]] | Callable[[], Any] | None,
        tokenizer: Any,
        settings: dict[str, Any],
        limits: ToolLimits,
        run: Callable[..., Any],
    ) -> None:
        self.limits = limits
        self._run = run
        self.environments = None if environments is None else Environments(environments)
        self._tools = [*tools]
        samples = {None: None} if self.environments is None else self.environments.samples
        known_tools = {name: self._tools_with(one) for name, one in samples.items()}
        # Name of an environment -> what its prompts show
        self.schemas = {name: schemas_of(known) for name, known in known_tools.items()}
        self._has_async = any(
            inspect.iscoroutinefunction(tool) for known in known_tools.values() for tool in known
        )
        for known in known_tools.values():
            names = [one.__name__ for one in known]
            if len({*names}) < len(names):
                raise ConfigError(f"two of the tools {', '.join(names)} share a name: rename one")
        self._template = CallTemplate(tokenizer, settings)
        self.seconds = 0.0  # of all calls of the newest batch
        self._fault: KitError | None = None  # stops the run

    @property
    def tools(self) -> list[Tool]:
        """All tools, those of environments included."""
        own = [] if self.environments is None else self.environments.samples.values()
        return [*self._tools, *(tool for one in own for tool in methods_of(one))]

    def _tools_with(self, environment: Any) -> list[Tool]:
        return self._tools + ([] if environment is None else methods_of(environment))

    def sample(
        self,
        rows: Sequence[Mapping[str, Any]],
        draw: Draw,
        turns: Callable[[], AbstractContextManager[None]],
    ) -> Trajectories:
        """Sample one trajectory of each row.

        Args:
            rows: B rows of the dataset.
            draw: Samples one turn of some rows.
            turns: Context in which all turns of a batch are drawn.

        Raises:
            DataError: A prompt is not a conversation, a row names no known environment, or the
                ``reset`` of an environment raised.
            ConfigError: A tool failed and ``stop_on_error`` is set.
        """
        if isinstance(rows[0]["prompt"], str):
            raise DataError("tools need conversations as prompts: set data.chat: true")
        self.seconds = 0.0
        self._fault = None
        prompts = [row["prompt"] for row in rows]
        names: list[str | None] = [None] * len(rows)
        instances: list[Any] = [None] * len(rows)
        if self.environments is not None:
            names = [self.environments.name_of(row) for row in rows]
            prompts = self.environments.begin(rows)
            instances = self.environments.current
        prompt_ids = [
            self._template.prompt_ids(prompt, self.schemas[name])
            for prompt, name in zip(prompts, names, strict=True)
        ]
        longest = max(map(len, prompt_ids))
        if longest >= self.limits.max_length:
            raise DataError(
                f"a prompt has {longest} tokens with its tools and the text of its environment, "
                f"and the model takes {self.limits.max_length}: raise model.max_seq_length, or "
                "shorten them"
            )
        tables = [
            {one.__name__: self._guarded(one) for one in self._tools_with(instance)}
            for instance in instances
        ]
        with turns():
            ids, log_probs = _copied(draw(prompt_ids))
            messages = [[self._template.parse(*one)] for one in zip(ids, prompt_ids, strict=True)]
            mask, messages, ids, log_probs, *_ = self._run(
                self._for_trl(draw, tables), copy.deepcopy(prompts), prompt_ids, ids, messages,
                log_probs, None, {},
            )  # fmt: skip
            self._check_fault()
        tokens = TokenRows(prompt_ids, ids, [list(map(bool, row)) for row in mask])
        pairs = zip(messages, tokens.turns, strict=True)
        return Trajectories(
            prompts,
            tokens,
            [self._template.with_texts(*pair) for pair in pairs],
            log_probs,
            [bool(turns[-1].get("tool_calls")) for turns in messages],
        )

    def _for_trl(self, draw: Draw, tables: list[dict[str, Tool]]) -> dict[str, Any]:
        """Return the attributes of a trainer that TRL's loop reads.

        Args:
            draw: Samples one turn of some rows.
            tables: The tools of each row, by name.
        """

        def next_turn(prompt_ids: list[list[int]], *_: Any, **__: Any) -> Drawn:
            self._check_fault()
            return _copied(draw(prompt_ids))

        def those(is_async: bool) -> list[dict[str, Tool]]:
            return [
                {n: one for n, one in table.items() if inspect.iscoroutinefunction(one) == is_async}
                for table in tables
            ]

        limits = self.limits
        rounds = sys.maxsize if limits.max_rounds is None else limits.max_rounds
        config = SimpleNamespace(max_position_embeddings=limits.max_length)
        return {
            **self._template.for_trl,
            "async_loop": self._async_loop,
            "max_completion_length": limits.max_tokens,
            "max_tool_calling_iterations": rounds,
            "model": SimpleNamespace(config=config),
            "use_vllm": False,
            "_async_tool_dicts": those(True),
            "_generate_single_turn": next_turn,
            "_sync_tool_dicts": those(False),
        }

    @cached_property
    def _async_loop(self) -> asyncio.AbstractEventLoop | None:
        """A loop in a thread of its own, if a tool is async."""
        from trl.trainer.utils import start_event_loop_in_daemon

        if not self._has_async:
            return None
        _, loop, is_ready = start_event_loop_in_daemon("tools")
        is_ready.wait()
        return loop

    # --- calls -----------------------------------------------------------------------------------

    def _guarded(self, tool: Tool) -> Tool:
        """Return a tool with a time limit, and with a result that is a text of bounded length."""
        timeout = self.limits.timeout
        if inspect.iscoroutinefunction(tool):

            @wraps(tool)
            async def wait(**arguments: Any) -> str:
                with self._watched(tool):
                    try:
                        return _short(await asyncio.wait_for(tool(**arguments), timeout))
                    except TimeoutError as exc:
                        raise exc if timeout is None else OverdueError from exc

            return wait

        @wraps(tool)
        def call(**arguments: Any) -> str:
            with self._watched(tool):
                return _short(within(timeout, lambda: tool(**arguments)))

        return call

    @contextlib.contextmanager
    def _watched(self, tool: Tool) -> Iterator[None]:
        """Time a call, and translate its error into the text that the model reads."""
        started = time.perf_counter()
        try:
            yield
        except (KeyboardInterrupt, asyncio.CancelledError):
            raise
        except KitError as exc:  # a tool of the kit cannot work here, such as the sandbox
            self._fault = self._fault or exc
            raise RuntimeError(first_line(exc)) from exc
        except BaseException as exc:  # a sys.exit() in a tool must not end a run silently
            text = f"{type(exc).__name__}: {first_line(exc)}"[:MAX_ERROR]
            if isinstance(exc, OverdueError):
                text = f"it took more than {self.limits.timeout:g} s"
            if self.limits.stop_on_error:
                self._fault = self._fault or ConfigError(
                    f"tool {tool.__name__} failed ({text}): correct it, or set "
                    "trainer.on_tool_error: tell, so that the model reads the error"
                )
            raise RuntimeError(text) from exc
        finally:
            self.seconds += time.perf_counter() - started

    def _check_fault(self) -> None:
        """Raise the error of a tool that must stop the run."""
        if self._fault is not None:
            fault, self._fault = self._fault, None
            raise fault


def _copied(drawn: Drawn) -> Drawn:
    """Return copies, since TRL's loop changes its lists and the canary still reads the draws."""
    ids, log_probs = drawn
    return [*ids], log_probs and [[*one] for one in log_probs]


def _short(result: object) -> str:
    """Return a tool's result as a text of bounded length."""
    text = str(result)
    left = len(text) - MAX_RESULT
    return text if left <= 0 else f"{text[:MAX_RESULT]}... ({left} more characters)"
