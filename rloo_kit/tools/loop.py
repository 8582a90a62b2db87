"""Sampling of trajectories: completions of several turns in which the model calls tools.

The loop is ``_tool_call_loop`` of TRL's ``GRPOTrainer``, so tools, environments and metrics have
the same meaning as in TRL. The token ids of all turns are concatenated and never tokenized again,
so that the training uses exactly the tokens that were sampled.

In shapes, B is the number of trajectories in a batch.
"""

import asyncio
import contextlib
import copy
import inspect
import sys
import time
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, wraps
from types import SimpleNamespace
from typing import Any

from rloo_kit.data.lengths import prompt_ids as prompt_ids_of
from rloo_kit.errors import ConfigError, DataError, KitError
from rloo_kit.rloo.batching import TokenRows
from rloo_kit.rloo.rollout import Completions
from rloo_kit.scoring.contract import OverdueError, within
from rloo_kit.text.wording import encodable, first_line
from rloo_kit.tools.environments import Environments, Factories, Tool, methods_of
from rloo_kit.tools.numbers import MAX_RESULT
from rloo_kit.tools.template import checked_template, schemas_of, with_texts
from rloo_kit.types import Say

Drawn = tuple[list[list[int]], list[list[float]] | None]
# Function that samples completions: it gets the token ids of prompts, and returns the token ids of
# completions and, if the engine reports them, their log-probabilities
Draw = Callable[[list[list[int]]], Drawn]


@dataclass(frozen=True)
class ToolLimits:
    """Limits of a trajectory and of a tool call."""

    max_tokens: int  # maximum tokens in a completion, including the results of tools
    max_length: int  # maximum tokens in a prompt and its completion together
    max_rounds: int | None = None  # maximum rounds of calls in a completion; None: no limit
    timeout: float | None = None  # maximum seconds for a call; None: no limit
    stop_on_error: bool = False  # True: an error in a tool stops the run; False: the model reads it


class ToolLoop:
    """Sampler of trajectories, which lets the model call tools and read the results.

    Args:
        tools: Plain or async functions that the model can call in every row.
        environments: Environment class, dict of classes by name, or None.
        tokenizer: Tokenizer of the policy. Its ``response_template`` is needed to read the model's
            calls, and is set on the tokenizer if it is missing.
        settings: Keyword arguments for the chat template.
        limits: Limits of a trajectory and of a call.
        run: Function that runs TRL's loop (``training.trl_step.run_tool_loop``).

    Raises:
        ConfigError: A parameter of a tool has no type or no description, two tools have the same
            name, an environment has no ``reset``, or the chat template cannot show tool calls.
    """

    def __init__(
        self,
        tools: Sequence[Tool],
        environments: Factories | None,
        tokenizer: Any,
        settings: dict[str, Any],
        limits: ToolLimits,
        run: Callable[..., Any],
    ) -> None:
        self.limits = limits
        self._run = run
        self.environments = None if environments is None else Environments(environments)
        self._tools = [*tools]
        samples = self.environments.samples if self.environments else {None: None}
        # Name of an environment -> JSON schemas of its tools, which the prompt shows
        self.schemas = {
            name: schemas_of(self._tools + methods_of(one)) for name, one in samples.items()
        }
        self._tokenizer = tokenizer
        self._settings = settings
        self._for_trl = checked_template(tokenizer, settings)
        self.seconds = 0.0  # time spent in all calls of the newest batch
        self.show: Say = lambda line: None  # gets a line about each call: name and result, or error
        self._fault: KitError | None = None  # error of a tool that must stop the run

    @property
    def tools(self) -> list[Tool]:
        """All tools, including the tools of environments."""
        own = self.environments.samples.values() if self.environments else []
        return [*self._tools, *(tool for one in own for tool in methods_of(one))]

    def sample(
        self,
        rows: Sequence[Mapping[str, Any]],
        draw: Draw,
        turns: Callable[[], contextlib.AbstractContextManager[None]],
        ends: Container[int],
    ) -> Completions:
        """Sample one trajectory for each row.

        Args:
            rows: B rows of the dataset.
            draw: Function that samples the next turn of some rows.
            turns: Function that returns a context manager. All turns are sampled inside it.
            ends: Ids of tokens that end a turn.

        Returns:
            B completions, each a list of turns of the model and results of tools. The prompts
            contain the observations of environments. Tokens of results have the log-probability 0.
            ``ended`` is False for a trajectory whose last call has no result.

        Raises:
            DataError: A prompt is not a conversation or is too long, a row names an unknown
                environment, or the ``reset`` of an environment raised.
            ConfigError: A tool failed and ``stop_on_error`` is set.
        """
        from trl.chat_template_utils import parse_response

        if isinstance(rows[0]["prompt"], str):
            raise DataError("tools need conversations as prompts: set data.chat: true")
        self.seconds = 0.0
        self._fault = None
        prompts = [row["prompt"] for row in rows]
        names = instances = [None] * len(rows)
        if self.environments is not None:
            names = list(map(self.environments.name_of, rows))
            prompts = self.environments.begin(rows)
            instances = self.environments.current
        tokenizer = self._tokenizer
        prompt_ids = [
            prompt_ids_of(
                tokenizer, prompt, {**self._settings, "tools": self.schemas[name] or None}
            )
            for prompt, name in zip(prompts, names, strict=True)
        ]
        longest = max(map(len, prompt_ids))
        if longest >= self.limits.max_length:
            raise DataError(
                f"a prompt has {longest} tokens with its tools and the text of its environment, "
                f"but the model's context length is {self.limits.max_length}: raise "
                "model.max_seq_length, or shorten the prompts or the docstrings of the tools"
            )
        trainer = self._trainer(draw, instances)
        with turns():
            ids, log_probs = trainer["_generate_single_turn"](prompt_ids)
            pairs = zip(ids, prompt_ids, strict=True)
            first = [[parse_response(tokenizer, *pair)] for pair in pairs]
            mask, messages, ids, log_probs, *_ = self._run(
                trainer, copy.deepcopy(prompts), prompt_ids, ids, first, log_probs, None, {}
            )
            self._check_fault()
        tokens = TokenRows(prompt_ids, ids, [list(map(bool, row)) for row in mask])
        return Completions(
            prompts=prompts,
            completions=[
                with_texts(tokenizer, *one) for one in zip(messages, tokens.turns, strict=True)
            ],
            tokens=tokens,
            ended=[
                one[-1] in ends and not turns[-1].get("tool_calls")
                for one, turns in zip(ids, messages, strict=True)
            ],
            sampler_log_probs=log_probs,
        )

    def _trainer(self, draw: Draw, environments: Sequence[Any]) -> dict[str, Any]:
        """Return the trainer attributes that TRL's loop reads, as a dict of name -> value.

        Args:
            draw: Function that samples the next turn of some rows.
            environments: The environment of each row, or None.
        """

        def next_turn(prompt_ids: list[list[int]], *_: Any, **__: Any) -> Drawn:
            self._check_fault()
            ids, log_probs = draw(prompt_ids)
            # copies, because TRL's loop changes its lists in place, and the canary (the check that
            # the engine samples from the current policy) still reads the originals
            return [*ids], log_probs and [[*one] for one in log_probs]

        def those(is_async: bool) -> list[dict[str, Tool]]:
            return [
                {
                    tool.__name__: self._guarded(tool)
                    for tool in self._tools + methods_of(environment)
                    if inspect.iscoroutinefunction(tool) == is_async
                }
                for environment in environments
            ]

        limits = self.limits
        rounds = sys.maxsize if limits.max_rounds is None else limits.max_rounds
        config = SimpleNamespace(max_position_embeddings=limits.max_length)
        async_tools = those(True)
        return {
            **self._for_trl,
            "async_loop": self._async_loop if any(async_tools) else None,
            "max_completion_length": limits.max_tokens,
            "max_tool_calling_iterations": rounds,
            "model": SimpleNamespace(config=config),
            "use_vllm": False,
            "_async_tool_dicts": async_tools,
            "_generate_single_turn": next_turn,
            "_sync_tool_dicts": those(False),
        }

    @cached_property
    def _async_loop(self) -> asyncio.AbstractEventLoop:
        """Event loop in a separate thread, in which async tools run."""
        from trl.trainer.utils import start_event_loop_in_daemon

        _, loop, _ = start_event_loop_in_daemon("tools")
        return loop

    # --- calls -----------------------------------------------------------------------------------

    def _guarded(self, tool: Tool) -> Tool:
        """Return the tool with a time limit, and with a limit of 10,000 characters for its result.

        A longer result is truncated, and the number of missing characters is added at its end.
        """
        timeout = self.limits.timeout
        if inspect.iscoroutinefunction(tool):

            @wraps(tool)
            async def wait(**arguments: Any) -> str:
                """Call the tool.

                Raises:
                    RuntimeError: The tool raised an error, or ran longer than its time limit.
                """
                with self._watched(tool):
                    limit = asyncio.timeout(timeout)
                    try:
                        async with limit:
                            result = await tool(**arguments)
                    except TimeoutError as exc:
                        if limit.expired():
                            raise OverdueError from exc
                        raise
                    return self._read(tool, result)

            return wait

        @wraps(tool)
        def call(**arguments: Any) -> str:
            with self._watched(tool):
                return self._read(tool, within(timeout, lambda: tool(**arguments)))

        return call

    def _read(self, tool: Tool, result: object) -> str:
        """Return a result or an error as the model reads it, and pass it to ``self.show``."""
        text = encodable(str(result))
        left = len(text) - MAX_RESULT
        text = text if left <= 0 else f"{text[:MAX_RESULT]}... ({left} more characters)"
        self.show(f"{tool.__name__}: {text}")
        return text

    @contextlib.contextmanager
    def _watched(self, tool: Tool) -> Iterator[None]:
        """Measure the time of a call, and turn its error into a RuntimeError.

        The model reads the text of the RuntimeError. If the error must stop the run, it is also
        remembered for ``_check_fault``.
        """
        started = time.perf_counter()
        try:
            yield
        except (KeyboardInterrupt, asyncio.CancelledError):
            raise
        except BaseException as exc:  # a sys.exit() in a tool must not end a run silently
            text = f"{type(exc).__name__}: {first_line(exc)}"
            if isinstance(exc, OverdueError):
                text = f"it took more than {self.limits.timeout:g} s"
            if isinstance(exc, KitError):  # the tool cannot work here, such as the sandbox
                self._fault = self._fault or exc
            elif self.limits.stop_on_error:
                self._fault = self._fault or ConfigError(
                    f"tool {tool.__name__} failed ({text}): correct it, or set "
                    "trainer.on_tool_error: tell, so that the model reads the error"
                )
            # not `from exc`: if exc is a StopIteration, contextlib would raise exc instead
            raise RuntimeError(self._read(tool, text)) from None
        finally:
            self.seconds += time.perf_counter() - started

    def _check_fault(self) -> None:
        """Raise the remembered error of a tool that must stop the run, if there is one."""
        if self._fault:
            raise self._fault
