"""Completer, which samples completions of rows and calls the rewards, in all commands.

Shapes: B completions, F reward functions.
"""

import asyncio
import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from rloo_kit.data.images import has_images
from rloo_kit.data.lengths import tokenize_prompts
from rloo_kit.errors import DataError
from rloo_kit.rloo.batching import TokenRows
from rloo_kit.rloo.rollout import Completions
from rloo_kit.rloo.step import Pending
from rloo_kit.scoring.contract import AsyncCheckedReward, call_reward, reward_columns
from rloo_kit.text.thoughts import completion_texts
from rloo_kit.tools.loop import Draw, ToolLoop
from rloo_kit.types import Score, Tokenizer


@dataclass(kw_only=True, eq=False)
class Completer:
    """Samples a completion of each row and calls the rewards."""

    draw: Draw
    processing_class: Tokenizer  # the tokenizer, or a processor that has one
    template_settings: dict[str, Any] | None  # of the chat template
    ends: frozenset[int]  # tokens that end a completion
    # F rewards: functions, async functions, or models
    functions: Callable[[], Sequence[Any]] = list
    tokenizers: Sequence[Any] = ()  # F, used if the reward is a model
    # `trainer_state`, `log_extra` and `log_metric` for the rewards
    for_rewards: Callable[[], dict[str, Any]] = dict
    tool_loop: ToolLoop | None = None  # runs the tools that completions call
    # around the draws of a batch, of which there are several with tools
    turns: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext
    # runs async rewards, in a thread of its own; None runs them one after another
    loop: asyncio.AbstractEventLoop | None = None

    def sample(self, rows: Sequence[Mapping[str, Any]]) -> Completions:
        """Sample one completion of each row.

        Raises:
            DataError: The chat template cannot render a prompt, or the rows have images.
            StalePolicyError: The engine sampled from another policy.
            MemoryRanOutError: Not even a single completion fits into memory.
        """
        if self.tool_loop is not None:
            return self._with_tools(rows, self.tool_loop)
        prompt_ids = self.tokenize(rows)
        ids, log_probs = self.draw(prompt_ids)
        return self.completions(rows, TokenRows(prompt_ids, ids), log_probs)

    def _with_tools(self, rows: Sequence[Mapping[str, Any]], tool_loop: ToolLoop) -> Completions:
        """Sample one trajectory of each row."""
        found = tool_loop.sample(rows, self.draw, self.turns)
        pairs = zip(found.tokens.completion_ids, found.open_calls, strict=True)
        return Completions(
            prompts=found.prompts,
            completions=found.messages,
            tokens=found.tokens,
            ended=[ids[-1] in self.ends and not is_open for ids, is_open in pairs],
            sampler_log_probs=found.log_probs,
        )

    def tokenize(self, rows: Sequence[Mapping[str, Any]]) -> list[list[int]]:
        """Return the token ids of the rows' prompts.

        Raises:
            DataError: The chat template cannot render a prompt, or the rows have images.
        """
        if has_images(rows):
            raise DataError(
                "the prompts have images, and only a training can sample from images: leave them "
                "out, or train on these prompts (a training also scores its held-out prompts)"
            )
        prompts = [row["prompt"] for row in rows]
        return tokenize_prompts(self.processing_class, prompts, self.template_settings)

    def completions(
        self,
        rows: Sequence[Mapping[str, Any]],
        tokens: TokenRows,
        log_probs: list[list[float]] | None,
    ) -> Completions:
        """Return B sampled completions with their texts."""
        prompts = [row["prompt"] for row in rows]
        texts = completion_texts(self.processing_class, tokens.completion_ids)
        return Completions(
            prompts=prompts,
            completions=as_completions(prompts, texts),
            tokens=tokens,
            ended=[ids[-1] in self.ends for ids in tokens.completion_ids],
            sampler_log_probs=log_probs,
        )

    def score(self, rows: Sequence[Mapping[str, Any]], completions: Completions) -> Pending[Any]:
        """Start the reward functions; the result is F lists of B scores.

        Async rewards begin now, others when the result is read.

        Raises:
            RewardContractError: A reward broke the contract, now or when the result is read.
        """
        with_tools = {}
        if self.tool_loop is not None:
            with_tools["prompts"] = completions.prompts  # with the observations of environments
            with_tools["completion_turns"] = completions.tokens.turns
            if self.tool_loop.environments is not None:
                with_tools["environments"] = self.tool_loop.environments.current
        columns = reward_columns(
            rows,
            completions.completions,
            completions.tokens.sampled_ids,
            **self.for_rewards(),
            **with_tools,
        )
        started = {
            place: asyncio.run_coroutine_threadsafe(function(**columns), self.loop)
            for place, function in enumerate(self.functions())
            if self.loop is not None and isinstance(function, AsyncCheckedReward)
        }
        return Pending(bool(started), functools.partial(self._finish, columns, started))

    def _finish(
        self, columns: dict[str, Any], started: dict[int, Future[Any]]
    ) -> list[list[Score]]:
        """Call the other rewards, and wait for the started ones."""
        return [
            started[place].result()
            if place in started
            else self._logits(function, self.tokenizers[place], columns)
            if isinstance(function, torch.nn.Module)
            else call_reward(function, columns)
            for place, function in enumerate(self.functions())
        ]

    def _logits(
        self, model: torch.nn.Module, tokenizer: Any, columns: dict[str, Any]
    ) -> list[Score]:
        """Return B logits of a sequence-classification model, with texts formatted as in TRL."""
        from trl.data_utils import apply_chat_template

        pairs = zip(columns["prompts"], columns["completions"], strict=True)
        texts = [prompt + completion for prompt, completion in pairs]
        if not isinstance(texts[0], str):
            texts = [
                apply_chat_template(
                    {"messages": messages}, tokenizer, **(self.template_settings or {})
                )["text"]
                for messages in texts
            ]
        inputs = tokenizer(
            text=texts, return_tensors="pt", padding=True, padding_side="right",
            add_special_tokens=False,
        )  # fmt: skip
        with torch.inference_mode():
            return model(**inputs.to(next(model.parameters()).device)).logits[:, 0].tolist()


def as_completions(prompts: Sequence[Any], texts: Sequence[str]) -> list[Any]:
    """Return texts in the form for rewards: a list of one message if the prompt is a chat."""
    return [
        text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]
        for prompt, text in zip(prompts, texts, strict=True)
    ]
